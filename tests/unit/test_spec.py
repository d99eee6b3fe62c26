"""A spec is strict: a mistake is one line with the file, the line, the key and the nearest spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests import plans

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.image import dockerfile, facts, recipes
from trainyard.spec import architectures, catalog, model, naming, pylock
from trainyard.spec.lock import DEFAULT, Lock, Locked

WriteSpec = Callable[..., str]


def refusal(write_spec: WriteSpec, text: str) -> str:
    with pytest.raises(UserError) as refused:
        model.load(write_spec(text))
    message = str(refused.value)
    assert "\n" not in message
    assert "mine/image.yaml" in message
    return message


@pytest.mark.parametrize("target", model.targets())
def test_the_catalogue_is_valid(target: str) -> None:
    loaded = model.load(target)
    assert loaded.version
    assert loaded.trainers.default in loaded.trainer_commands()


def test_an_unknown_target_lists_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown target 'tf-cup' \(did you mean 'tf-cpu'\?\); valid targets: .*xla"):
        model.load("tf-cup")


@pytest.mark.parametrize("target", [None, "", "../..", "$(touch /tmp/x)", "a b", "..", "/etc"])
def test_an_invalid_target_is_refused_in_one_line(target: str | None) -> None:
    with pytest.raises(UserError, match="valid targets:") as refused:
        model.load(target)
    assert "\n" not in str(refused.value)


def test_a_path_is_looked_up_from_the_current_folder(
    write_spec: WriteSpec, spec_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user of the installed package types it, outside the checkout."""
    folder = Path(write_spec(spec_text))
    monkeypatch.chdir(folder.parent)
    assert model.load("./mine").folder == folder.resolve()
    assert model.load("examples/patches").folder == settings.ROOT / "examples" / "patches"
    with pytest.raises(UserError, match=r"unknown target 'mine': write '\./mine' for the folder; valid targets:"):
        model.load("mine")
    with pytest.raises(UserError, match=r"no image\.yaml or trainyard\.yaml in the folder '\./other'; valid targets:"):
        model.load("./other")


def test_an_unknown_key_names_line_and_nearest_spelling(write_spec: WriteSpec, spec_text: str) -> None:
    message = refusal(write_spec, spec_text.replace("  packages:", "  pakages:"))
    assert "mine/image.yaml:5: unknown key 'framework.pakages' (did you mean 'packages'?)" in message


def test_an_unknown_key_at_the_top(write_spec: WriteSpec, spec_text: str) -> None:
    message = refusal(write_spec, spec_text + "sumary: x\n")
    assert ":10: unknown key 'sumary' (did you mean 'summary'?); valid here: summary, base," in message


def test_a_missing_field_is_named(write_spec: WriteSpec, spec_text: str) -> None:
    assert "'budget' is missing" in refusal(write_spec, spec_text.replace("budget: {size: 1.9 GB}\n", ""))


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("tensorflow-cpu", "is not pinned: write 'tensorflow-cpu==<version>'"),
        ("tensorflow-cpu>=2", "is not pinned"),
        ("tensorflow-cpu==2.*", "is not pinned"),
        ("tensorflow-cpu==two", "is not a requirement"),
        ("torch==2.9.1", "none of the packages is tensorflow"),
    ],
)
def test_a_bad_version_is_refused(write_spec: WriteSpec, spec_text: str, pin: str, words: str) -> None:
    message = refusal(write_spec, spec_text.replace("tensorflow-cpu==2.21.0", pin))
    assert words in message
    assert "framework" in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("debian-12", "debain-12", "unknown base 'debain-12' (did you mean 'debian-12'?)"),
        ("1.9 GB", "huge", "'huge' is not a size"),
        ("0.97", "97", "smoke.accuracy"),
        ("default: mnist", "default: minst", "no trainer 'minst' (did you mean 'mnist'?)"),
        ("requirements: [tf]", "requirements: [tg]", "neither a set (jax, tf, torch) nor pinned"),
        ("name: tensorflow", "name: tensorflo", "framework.name"),
        ("package: tf,", "package: tf2,", "trainers.package"),
        ("package: tf,", "package: tf, folder: nowhere,", "no folder"),
        ("requirements: [tf]", "system: ['a b; reboot']", "system.0"),
        ("  packages:", "  index: pytorch-cup\n  packages:", "unknown index 'pytorch-cup'"),
    ],
)
def test_values_that_name_nothing_are_refused(
    write_spec: WriteSpec, spec_text: str, old: str, new: str, words: str
) -> None:
    assert old in spec_text
    assert words in refusal(write_spec, spec_text.replace(old, new, 1))


@pytest.mark.parametrize("text", ["a: [", "just words", "", "- a\n- b\n", "\ta: b", "a: 1\na: 2\n"])
def test_broken_yaml_is_one_line(write_spec: WriteSpec, text: str) -> None:
    refusal(write_spec, text)


def test_a_file_that_is_not_text(write_spec: WriteSpec, spec_text: str) -> None:
    target = write_spec(spec_text)
    (Path(target) / "image.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8 text"):
        model.load(target)


def test_extends_inherits_everything_else_from_the_parent(write_spec: WriteSpec) -> None:
    mine = model.load(write_spec("extends: xla\nrequirements: [einops==0.8.2]\nsmoke: {accuracy: 0.9}\n"))
    xla = model.load("xla")
    assert mine.framework == xla.framework
    assert mine.framework_of == xla.folder, "the parent's framework and its layers are shared"
    assert mine.requirements == [*xla.requirements, "einops==0.8.2"]
    assert mine.smoke.accuracy == 0.9
    assert mine.smoke.trainer == xla.smoke.trainer
    assert mine.budget == xla.budget


def test_extends_with_a_framework_of_its_own_has_its_own_lock(write_spec: WriteSpec) -> None:
    text = "extends: tf-cpu\nframework: {packages: [tensorflow-cpu==2.20.0]}\n"
    mine = model.load(write_spec(text))
    assert mine.framework_of is None


def test_a_target_is_loaded_for_the_platform_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, packages in (("amd64", ["tensorflow-cpu==2.21.0"]), ("arm64", ["tensorflow==2.21.0"])):
        assert model.load("tf-cpu", arch).packages == packages
        monkeypatch.setenv("TRAINYARD_ARCH", arch)
        assert model.load("tf-cpu") == model.load("tf-cpu", arch)
    monkeypatch.setenv("TRAINYARD_ARCH", "aarch64")
    assert model.load("tf-cpu").platform == "linux/arm64"


@pytest.mark.parametrize(
    ("machine", "platforms", "arch"),
    [
        ("x86_64", ["linux/amd64", "linux/arm64"], "amd64"),
        ("aarch64", ["linux/amd64", "linux/arm64"], "arm64"),
        ("arm64", ["linux/amd64", "linux/arm64"], "arm64"),
        ("aarch64", ["linux/amd64"], "amd64"),
        ("riscv64", ["linux/arm64"], "arm64"),
    ],
)
def test_the_platform_is_the_hosts_or_the_first(
    monkeypatch: pytest.MonkeyPatch, machine: str, platforms: list[str], arch: str
) -> None:
    monkeypatch.setattr(architectures.platform, "machine", lambda: machine)
    assert architectures.choose(platforms).name == arch


def test_a_platform_that_an_image_is_not_made_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    with pytest.raises(UserError) as refused:
        model.load("xla")
    assert (
        str(refused.value)
        == "'TRAINYARD_ARCH=arm64': this image is made for linux/amd64 alone ('platforms' of its spec)"
    )
    monkeypatch.setenv("TRAINYARD_ARCH", "amr64")
    with pytest.raises(
        UserError, match=r"^'TRAINYARD_ARCH=amr64': use one of amd64, arm64 \(did you mean 'arm64'\?\)$"
    ):
        model.load("tf-cpu")


def test_messages_name_the_architecture_where_it_is_not_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures.platform, "machine", lambda: "x86_64")
    assert model.load("tf-cpu", "arm64").command("image") == "TRAINYARD_ARCH=arm64 trainyard image tf-cpu"
    assert model.load("tf-cpu", "amd64").command("image") == "trainyard image tf-cpu"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "platforms: [linux/arm]",
            "platforms.0: 'linux/arm' is not a platform of images (did you mean 'linux/arm64'?)",
        ),
        ("platforms: []", "platforms: List should have at least 1 item"),
        ("platforms: linux/arm64", "platforms: Input should be a valid list"),
        ("platforms: [linux/amd64, linux/amd64]", "platforms: linux/amd64 is listed twice"),
    ],
)
def test_platforms_are_those_that_there_are(write_spec: WriteSpec, spec_text: str, line: str, words: str) -> None:
    assert words in refusal(write_spec, f"{spec_text}{line}\n")


def test_a_target_that_extends_another_has_its_platforms_or_other_ones(write_spec: WriteSpec) -> None:
    both = ["linux/amd64", "linux/arm64"]
    assert model.load(write_spec("summary: x\nextends: tf-cpu\n")).platforms == both
    one = model.load(write_spec("summary: x\nextends: tf-cpu\nplatforms: [linux/arm64]\n"))
    assert (one.platforms, one.packages) == (["linux/arm64"], ["tensorflow==2.21.0"])


def test_every_platform_has_other_pins_and_another_dockerfile() -> None:
    amd64, arm64 = model.each_platform(model.load("cpu", "amd64"))
    assert (amd64.dockerfile().name, arm64.dockerfile().name) == ("Dockerfile", "Dockerfile.arm64")
    assert [] != amd64.locked().framework != arm64.locked().framework != []
    assert model.load("cpu", "arm64").dockerfile("pytorch-cpu").name == "Dockerfile.pytorch-cpu.arm64"


def test_an_image_is_built_for_a_platform_whose_lock_it_has(write_spec: WriteSpec) -> None:
    """A spec that extends a target that got another platform since."""
    spec = model.load(write_spec("summary: x\nextends: tf-cpu\n"), "amd64")
    for archs, names in ((["amd64"], ["Dockerfile"]), (["amd64", "arm64"], ["Dockerfile", "Dockerfile.arm64"])):
        lock = Lock(spec.python_version, {DEFAULT: dict.fromkeys(archs, Locked())})
        assert [path.name for path in dockerfile.rendered(spec.with_lock(lock))] == names


def test_extends_in_a_circle_is_refused(write_spec: WriteSpec, tmp_path: Path) -> None:
    target = write_spec(f"extends: {tmp_path}/mine\n")
    with pytest.raises(UserError, match="'extends' refers back to itself"):
        model.load(target)


def test_extends_something_unknown_names_the_line(write_spec: WriteSpec) -> None:
    assert "mine/image.yaml:1: extends: unknown target 'xlaa'" in refusal(write_spec, "extends: xlaa\n")


# --- conflicts, and bases that hold the framework ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parent", "pin", "words"),
    [
        ("xla", "torch-tpu==0.2.0", "torch-xla 2.9.0 and torch-tpu 0.2.0 cannot share an image: torch_xla 2.9.0 pins"),
        ("xla", "libtpu==0.0.50", "torch-xla 2.9.0 and libtpu 0.0.50 cannot share an image"),
        ("torch-tpu", "libtpu==0.0.21", "torch_tpu needs libtpu 0.0.50 or later"),
        ("torch-tpu", "tensorflow-tpu==2.20.0", "aborts with one later than 0.0.21"),
        ("cpu", "libtpu==0.0.21", "libtpu 0.0.21 and Python 3.13 cannot share an image: libtpu 0.0.21 has wheels for"),
    ],
)
def test_packages_that_cannot_share_an_image_are_refused_with_the_reason(
    write_spec: WriteSpec, parent: str, pin: str, words: str
) -> None:
    assert words in refusal(write_spec, f"extends: {parent}\nrequirements: [{pin}]\n")


def test_a_pinned_libtpu_that_tensorflow_aborts_with_is_refused(write_spec: WriteSpec, spec_text: str) -> None:
    text = spec_text.replace("tensorflow-cpu==2.21.0", "tensorflow-tpu==2.20.0, libtpu==0.0.50")
    assert "'import tensorflow' aborts" in refusal(write_spec, text)


def test_every_conflict_has_a_source_and_says_when_it_can_be_removed() -> None:
    for name, entry in catalog.conflicts().items():
        assert entry.source and entry.until and entry.reason, name


@pytest.mark.parametrize(
    ("name", "conflicting", "fitting"),
    [
        ("tensorboard-setuptools", {"tensorboard": "2.20.0", "setuptools": "82.0.0"}, {"setuptools": "81.0.0"}),
        ("jax-cuda12-plugin", {"jaxlib": "0.8.0", "jax-cuda12-plugin": "0.7.2"}, {"jax-cuda12-plugin": "0.8.0"}),
        ("jax-cuda13-plugin", {"jaxlib": "0.8.0", "jax-cuda13-plugin": "0.7.2"}, {"jax-cuda13-plugin": "0.8.0"}),
        ("jaxlib-of-jax", {"jax": "0.4.28", "jaxlib": "0.12.0"}, {"jaxlib": "0.4.28"}),
        ("torchaudio-2.11", {"torch": "2.8.0", "torchaudio": "2.11.0"}, {"torchaudio": "2.8.0"}),
    ],
)
def test_a_lock_is_resolved_with_the_constraint_of_a_conflict(
    name: str, conflicting: dict[str, str], fitting: dict[str, str]
) -> None:
    conflict = catalog.conflicts()[name]
    assert conflict.holds(conflicting, "3.13")
    assert not conflict.holds(conflicting | fitting, "3.13")
    constraint = Requirement(conflict.constraint.format_map(conflicting))
    assert constraint.specifier.contains(fitting[constraint.name])
    assert not constraint.specifier.contains(conflicting[constraint.name])


def test_tensorflow_and_torch_xla_share_a_libtpu_and_are_not_refused(write_spec: WriteSpec) -> None:
    model.load(write_spec("extends: tf-tpu\nrequirements: [torch-xla==2.9.0]\n"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tools: [gsutils]", "tools.0"),
        ("profile: 'yes'", "profile"),
        ("accelerator: gpu", "accelerator"),
        ("environment: {'A B': x}", "environment"),
        ("environment: {A: 1}", "environment.A"),
    ],
)
def test_optional_blocks_are_strict_too(write_spec: WriteSpec, spec_text: str, line: str, words: str) -> None:
    assert words in refusal(write_spec, spec_text + line + "\n")


def test_a_framework_in_the_base_has_no_pins_of_its_own(write_spec: WriteSpec, spec_text: str) -> None:
    words = "base xla-nightly holds the framework: remove the packages"
    assert words in refusal(write_spec, spec_text.replace("base: debian-12", "base: xla-nightly"))


def test_a_framework_must_come_from_somewhere(write_spec: WriteSpec, spec_text: str) -> None:
    assert "none given" in refusal(write_spec, spec_text.replace("  packages: [tensorflow-cpu==2.21.0]\n", ""))


def test_a_nightly_has_the_versions_in_its_base(inspect_base: Callable[[model.Spec], Path], tmp_path: Path) -> None:
    unlocked = model.load("xla-nightly")
    found = model.load(str(inspect_base(unlocked)), context=Context(state=tmp_path))
    assert found.version_known
    assert found.version == "2.10.0+git0123abc"
    assert "libtpu==0.0.30.dev20260101" in found.packages
    assert found.version_tag() == "xla-nightly-2.10.0_git0123abc", "tags have no +"
    made = plans.plan(found)
    assert made.built.tag.startswith("xla-nightly-2.10.0_git0123abc-20261120-"), (
        "the day on which its base was inspected"
    )
    assert found.locked().versions["torch"] == "2.10.0"
    assert found.locked().versions["fsspec"] != "2025.1.0", "locked packages precede those of the base"


def test_the_dockerfile_of_a_nightly_does_not_depend_on_the_versions_in_the_base(
    inspect_base: Callable[[model.Spec], Path],
) -> None:
    unlocked = model.load("xla-nightly")
    found = model.load(str(inspect_base(unlocked)))
    assert "2.10.0" not in dockerfile.dockerfile(found)
    assert recipes.make(found).framework.packages["torch-xla"] == "2.10.0+git0123abc"


def test_a_damaged_record_of_a_base_is_one_line(inspect_base: Callable[[model.Spec], Path]) -> None:
    folder = inspect_base(model.load("xla-nightly"))
    path = folder / pylock.FILE
    body = path.read_text(encoding="utf-8").partition("\n\n")[2].replace('site = "', 'sites = "')
    path.write_text(pylock.with_checksum(body), encoding="utf-8")
    damaged = model.load(str(folder))
    assert not damaged.version_known
    with pytest.raises(
        UserError, match=r"pylock\.toml: written by another version .* run 'trainyard lock xla-nightly' again"
    ):
        damaged.locked()


# --- commit and time of an image ------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package that was installed from a wheel."""
    monkeypatch.setattr(settings, "CHECKOUT", None)
    monkeypatch.setattr(settings, "PACKAGE", tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    facts._build_facts.cache_clear()
    yield tmp_path
    facts._build_facts.cache_clear()


def test_an_installed_package_has_the_commit_that_it_was_built_from(installed: Path) -> None:
    (installed / "_build.json").write_text('{"revision": "0123abc", "time": 1700000000}', encoding="utf-8")
    assert (facts.revision(), facts.source_date_epoch()) == ("0123abc", 1700000000)


def test_a_package_of_an_unknown_commit_has_a_fixed_time(installed: Path) -> None:
    assert (facts.revision(), facts.source_date_epoch()) == ("unknown", naming.FILE_EPOCH)


def test_the_commit_and_its_time_can_be_set(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_REVISION", "mine")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    assert (facts.revision(), facts.source_date_epoch()) == ("mine", 7)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UserError, match="not a number of seconds"):
        facts.source_date_epoch()


@pytest.fixture
def with_trainers(write_locked_spec: WriteSpec, spec_text: str) -> Path:
    """Write the spec of an image with one more trainer, ``training/words.py``; return the spec's folder."""
    text = spec_text.replace("default: mnist", "default: words, folder: training").replace(
        "trainer: mnist", "trainer: words"
    )
    folder = Path(write_locked_spec(spec_text))
    (folder / "training").mkdir()
    (folder / "training" / "words.py").touch()
    (folder / "image.yaml").write_text(text, encoding="utf-8")
    return folder


def extending(folder: Path) -> model.Spec:
    child = folder.parent / "child"
    child.mkdir()
    (child / "image.yaml").write_text(f"extends: {folder}/\nsummary: With one more variable\nenvironment: {{A: b}}\n")
    (child / pylock.FILE).write_bytes((folder / pylock.FILE).read_bytes())
    return model.load(str(child))


def version(folder: Path) -> model.Spec:
    (folder / "2.20").mkdir()
    (folder / "2.20" / "version.yaml").write_text("packages: [tensorflow-cpu==2.20.0]\n", encoding="utf-8")
    (folder / "2.20" / pylock.FILE).write_bytes((folder / pylock.FILE).read_bytes())
    return model.load(str(folder / "2.20"))


def repository(folder: Path) -> model.Spec:
    own = folder.parent / "repository"
    own.mkdir()
    (own / "trainyard.yaml").write_text("extends: mine\nrun: python train.py\n", encoding="utf-8")
    return model.load(str(own))


@pytest.mark.parametrize("made_of", [lambda folder: model.load(str(folder)), extending, version, repository],
                         ids=["image", "extending", "version", "repository"])  # fmt: skip
def test_the_trainers_of_a_folder_are_inherited(
    made_of: Callable[[Path], model.Spec], with_trainers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_folders", lambda: {"mine": with_trainers})
    spec = made_of(with_trainers)
    assert spec.trainer_commands()["words"][-1] == "/opt/trainyard/own/words.py"
    assert dockerfile.contexts(spec)["own-trainers"] == str(with_trainers / "training")
    if not isinstance(spec, model.RepositorySpec):  # which is not locked
        text = dockerfile.rendered(spec)[spec.dockerfile("default")]
        assert "COPY --from=own-trainers . /out/opt/trainyard/own\n" in text


def test_trainers_of_a_folder_of_the_catalogue_are_in_the_main_build_context(
    with_trainers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerfile, "IMAGES", with_trainers.parent)
    spec = model.load(str(with_trainers))
    assert dockerfile.contexts(spec) == {}
    found = dockerfile.own_trainers(spec)
    assert found and (found.inside, found.copy) == (True, f"{with_trainers}/training/")


def test_a_change_of_a_trainer_of_a_folder_is_a_change_of_the_image(with_trainers: Path) -> None:
    for folder in ("a", "b"):
        (with_trainers / "training" / folder).mkdir()
        (with_trainers / "training" / folder / "data.txt").write_text(folder, encoding="utf-8")
    spec = extending(with_trainers)
    dockerfile.write(dockerfile.rendered(spec))
    before = facts.inputs(spec, "default")
    (with_trainers / "training" / "b" / "data.txt").write_text("other", encoding="utf-8")
    after = facts.inputs(spec, "default")
    assert {name for name in before if before[name] != after[name]} == {"training/b/data.txt"}
