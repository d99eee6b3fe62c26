"""Nightlies: their packages have no version in the spec, the newest is locked, and fallbacks have another name."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import plans
from tests.fakes.engine import FakeEngine
from tests.fakes.package_index import PackageIndex, wheel

from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image, dockerfile, facts, fallback, target_lock
from trainyard.release import batch, publish, sources
from trainyard.spec import framework, model, pylock
from trainyard.spec.model import Spec

SPEC = """\
summary: A nightly
base: debian-13
nightly: true
framework:
  name: tensorflow
  packages: [tf-nightly]
requirements: [einops==0.8.0]
trainers: {package: tf, default: mnist}
budget: {size: 1.9 GB}
smoke: {trainer: mnist, accuracy: 0.97}
"""

Write = Callable[..., str]
Result = tuple[int, str, str]


@pytest.fixture
def index(resolves: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """A package index, the only one that uv has."""
    with PackageIndex() as found:
        settings = tmp_path / "config" / "uv" / "uv.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text(f'[[index]]\nname = "fake"\nurl = "{found.url}"\ndefault = true\n', encoding="utf-8")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        found.add(
            wheel("einops", "0.8.0"), wheel("keras-nightly", "3.16.0.dev1"), wheel("keras-nightly", "3.16.0.dev2")
        )
        found.add(*(wheel("tf-nightly", f"2.23.0.dev2026102{day}", ("keras-nightly>=3.12.0.dev",)) for day in range(7)))
        yield found


def locked(folder: str) -> Spec:
    target_lock.lock(model.load(folder))
    return model.load(folder)


def test_a_package_without_a_version_is_locked_in_its_newest_pre_release(
    index: PackageIndex, write_spec: Write
) -> None:
    spec = locked(write_spec(SPEC))
    assert spec.packages == ["tf-nightly==2.23.0.dev20261026"]
    assert spec.version == "2.23.0.dev20261026"
    assert spec.locked().versions == {
        "tf-nightly": "2.23.0.dev20261026",
        "keras-nightly": "3.16.0.dev2",
        "einops": "0.8.0",
    }


def test_a_pre_release_is_newer_than_the_last_release(index: PackageIndex, write_spec: Write) -> None:
    index.add(wheel("tf-nightly", "2.22.0"))
    assert locked(write_spec(SPEC)).version == "2.23.0.dev20261026"
    index.add(wheel("tf-nightly", "2.23.0"))
    assert locked(write_spec(SPEC)).version == "2.23.0"


def test_a_specifier_bounds_what_is_newest(index: PackageIndex, write_spec: Write) -> None:
    spec = locked(write_spec(SPEC.replace("[tf-nightly]", '["tf-nightly<2.23.0.dev20261023"]')))
    assert spec.version == "2.23.0.dev20261022"


def test_what_has_a_version_keeps_it(index: PackageIndex, write_spec: Write) -> None:
    pins = "[tf-nightly, keras-nightly==3.16.0.dev1]"
    spec = locked(write_spec(SPEC.replace("[tf-nightly]", pins)))
    assert spec.packages == ["tf-nightly==2.23.0.dev20261026", "keras-nightly==3.16.0.dev1"]


def test_the_day_is_recorded_and_part_of_the_tag(index: PackageIndex, write_spec: Write, tmp_path: Path) -> None:
    spec = locked(write_spec(SPEC))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    assert abs(datetime.datetime.strptime(spec.day, "%Y%m%d").date() - today) <= datetime.timedelta(days=1)
    assert spec.usable_lock
    target_lock.write(spec, dataclasses.replace(spec.usable_lock, day="20261026"))
    spec = model.load(str(spec.folder), context=Context(state=tmp_path))
    dockerfile.write(dockerfile.rendered(spec))
    made = plans.plan(spec)
    assert re.fullmatch(r"mine-2\.23\.0\.dev20261026-20261026-[0-9a-f]{8}", made.built.tag)


def test_the_next_lock_takes_what_has_been_released_since(index: PackageIndex, write_spec: Write) -> None:
    folder = write_spec(SPEC)
    locked(folder)
    index.add(wheel("tf-nightly", "2.23.0.dev20261027"))
    assert locked(folder).version == "2.23.0.dev20261027"


def test_a_lock_that_fails_changes_nothing(
    index: PackageIndex, write_spec: Write, trainyard: Callable[..., Result]
) -> None:
    folder = Path(write_spec(SPEC))
    locked(str(folder))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    index.add(wheel("tf-nightly", "2.23.0.dev20261027", ("einops<0.8",)))
    (folder / "image.yaml").write_text(SPEC.replace("[tf-nightly]", "['tf-nightly>=2.23.0.dev20261027']"))
    status, _, err = trainyard("lock", str(folder))
    assert status == 1 and err.count("\n") == 1
    assert "cannot lock mine: " in err and "einops" in err
    del before[folder / "image.yaml"]
    assert {path: path.read_bytes() for path in before} == before


def test_the_packages_of_all_platforms_have_the_versions_of_the_first(index: PackageIndex, write_spec: Write) -> None:
    text = SPEC.replace("nightly: true", "nightly: true\nplatforms: [linux/amd64, linux/arm64]")
    # The newest is not built for arm64 yet.
    for tag in ("manylinux_2_27_x86_64", "manylinux_2_27_aarch64"):
        index.add(wheel("tf-nightly", "2.23.0.dev20261028", tag=f"cp313-cp313-{tag}"))
    folder = write_spec(text)
    spec = locked(folder)
    versions = [one.locked().versions["tf-nightly"] for one in model.each_platform(spec)]
    assert versions == ["2.23.0.dev20261028"] * 2


TWO = SPEC.replace("nightly: true", "nightly: true\nplatforms: [linux/amd64, linux/arm64]")


def test_a_nightly_that_one_platform_does_not_have_is_not_taken(index: PackageIndex, write_spec: Write) -> None:
    index.add(wheel("tf-nightly", "2.23.0.dev20261028", tag="cp313-cp313-manylinux_2_27_x86_64"))
    assert locked(write_spec(TWO)).version == "2.23.0.dev20261026"


def test_a_version_that_one_platform_does_not_have_is_one_line(
    index: PackageIndex, write_spec: Write, trainyard: Callable[..., Result]
) -> None:
    index.add(wheel("tf-nightly", "2.23.0.dev20261028", tag="cp313-cp313-manylinux_2_27_x86_64"))
    status, _, err = trainyard("lock", write_spec(TWO.replace("[tf-nightly]", '["tf-nightly>=2.23.0.dev20261028"]')))
    assert status == 1 and err.strip().endswith(
        "cannot lock mine: tf-nightly 2.23.0.dev20261028 has no wheel for linux/arm64 and Python 3.13 of debian-13"
    )


def test_a_package_without_a_version_is_refused_in_a_spec_that_is_no_nightly(write_spec: Write) -> None:
    with pytest.raises(UserError) as error:
        model.load(write_spec(SPEC.replace("nightly: true\n", "")))
    assert str(error.value).endswith(
        "mine/image.yaml:5: framework.packages.0: 'tf-nightly' is not pinned: write 'tf-nightly==<version>', or give "
        "'nightly: true' for the newest of every night"
    )


@pytest.mark.parametrize("command", ["render", "build"])
def test_a_nightly_that_was_never_locked_says_so(
    fake_engine: FakeEngine, write_spec: Write, trainyard: Callable[..., Result], command: str
) -> None:
    folder = write_spec(SPEC)
    status, _, err = trainyard(command, folder)
    assert status == 2 and err.count("\n") == 1
    assert "mine/pylock.toml is missing: run 'trainyard lock " in err.replace("make lock TARGET=", "trainyard lock ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('day = "', 'day = "today '),
        ('lock-version = "1.0"', 'lock-version = "2.0"'),
        ("sha256 =", "md5 ="),
        ("[[packages]]", "[[package]]"),
        ("name = ", "named = "),
        ('requires-python = "==3.13.*"', 'requires-python = ">=3.13"'),
        ("[[packages]]", "[[packages"),
        ("# checksum: ", "# sum: "),
    ],
)
def test_a_damaged_lock_is_one_line(index: PackageIndex, write_spec: Write, old: str, new: str) -> None:
    spec = locked(write_spec(SPEC))
    text = spec.lock_file.read_text(encoding="utf-8").replace(old, new)
    again = pylock.with_checksum(text.partition("\n\n")[2])
    spec.lock_file.write_text(text if old.startswith("#") else again, encoding="utf-8")
    damaged = model.load(str(spec.folder))
    assert not damaged.version_known
    with pytest.raises(UserError, match=r"mine/pylock\.toml: .*run 'trainyard lock mine'") as error:
        damaged.locked()
    assert "\n" not in str(error.value)


def test_an_image_that_extends_a_nightly_has_its_versions(index: PackageIndex, write_spec: Write) -> None:
    parent = write_spec(SPEC)
    locked(parent)
    index.add(wheel("tf-nightly", "2.23.0.dev20261027"))
    child = locked(write_spec(f"extends: {parent}\nsummary: More\n", "child"))
    assert child.version == "2.23.0.dev20261026"
    assert child.day == model.load(parent).day
    assert child.locked().framework == model.load(parent).locked().framework


@pytest.mark.parametrize("target", ["tf-nightly", "xla-nightly-fallback"])
def test_the_nightlies_of_the_catalogue_are_locked(target: str) -> None:
    spec = model.load(target)
    assert spec.nightly and spec.version_known and spec.day
    assert framework.unpinned(spec.declared_packages) and not framework.unpinned(spec.packages)


class TestFallback:
    """xla-nightly, whose base may be out of reach."""

    @pytest.fixture
    def unreachable(self, fake_engine: FakeEngine) -> None:
        """The engine that runs has no image, and knows no registry."""

    @pytest.mark.usefixtures("unreachable")
    def test_it_is_built_where_the_base_is_out_of_reach(self) -> None:
        found, reason = fallback.choose(model.load("xla-nightly"))
        assert found.target == "xla-nightly-fallback"
        assert reason == (
            "base us-central1-docker.pkg.dev/tpu-pytorch-releases/docker/xla:nightly_3.12_tpuvm of xla-nightly is "
            "unreachable (no such host): building xla-nightly-fallback in its place"
        )

    @pytest.mark.parametrize(("local", "remote"), [("sha256:1", None), (None, "sha256:1")])
    def test_it_is_not_built_where_the_engine_or_a_registry_has_the_base(
        self, fake_engine: FakeEngine, local: str | None, remote: str | None
    ) -> None:
        if local:
            fake_engine.add(base_image.configured_reference("xla-nightly"))
        fake_engine.digest_at_registry = lambda _: remote
        spec = model.load("xla-nightly")
        assert fallback.choose(spec) == (spec, "")

    @pytest.mark.usefixtures("unreachable")
    def test_it_does_not_replace_a_base_that_the_user_gave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRAINYARD_BASE", "registry.example/xla:nightly")
        spec = model.load("xla-nightly")
        assert fallback.choose(spec) == (spec, "")

    @pytest.mark.usefixtures("unreachable")
    def test_other_targets_have_none(self) -> None:
        for target in ("tf-cpu", "xla", "tf-nightly", "xla-nightly-fallback"):
            spec = model.load(target)
            assert fallback.choose(spec) == (spec, "")

    def test_its_label_and_its_summary_say_what_it_is(self) -> None:
        spec = model.load("xla-nightly-fallback")
        assert facts.labels(spec)["io.trainyard.fallback-for"] == "xla-nightly"
        assert facts.labels(spec)["io.trainyard.target"] == "xla-nightly-fallback"
        assert fallback.note(spec).startswith(f"this is not xla-nightly: it has torch_xla {spec.version}, the ")
        assert not fallback.note(model.load("xla-nightly"))

    def test_its_promotion_is_refused_whatever_is_on_this_host(self, trainyard: Callable[..., Result]) -> None:
        status, _, err = trainyard("promote", "xla-nightly-fallback", "--registry", "localhost:1/ml")
        assert status == 2 and err.count("\n") == 1
        assert (
            "xla-nightly-fallback is a fallback, built where the base of xla-nightly was out of reach, and never" in err
        )

    def test_a_push_of_the_nightly_names_what_was_built_in_its_place(self, fake_engine: FakeEngine) -> None:
        fake_engine.add("trainyard:xla-nightly-fallback")
        with pytest.raises(UserError) as error:
            publish.image_to_push(sources.of(model.load("xla-nightly")))
        assert str(error.value) == (
            "no local image trainyard:xla-nightly: xla-nightly-fallback was built in its place; 'trainyard push "
            "xla-nightly-fallback' pushes that under its name"
        )
        fake_engine.images.clear()
        with pytest.raises(UserError, match="run 'trainyard image xla-nightly' first"):
            publish.image_to_push(sources.of(model.load("xla-nightly")))

    def test_nothing_else_has_the_label(self) -> None:
        others = [target for target in model.targets() if target != "xla-nightly-fallback"]
        assert not any("io.trainyard.fallback-for" in facts.labels(model.load(target)) for target in others)

    def test_an_image_that_extends_it_is_none(self, write_spec: Write) -> None:
        assert model.load(write_spec("extends: xla-nightly-fallback\nsummary: Mine\n")).fallback_for is None

    def test_all_images_are_built_without_it(self) -> None:
        names = [job.name for job in batch.wanted([], Context())]
        assert "xla-nightly" in names and "xla-nightly-fallback" not in names
        assert [job.name for job in batch.wanted(["xla-nightly-fallback"], Context())] == ["xla-nightly-fallback"]

    def test_no_pipeline_builds_it(self) -> None:
        files = [*ROOT.glob("cloudbuild*.yaml"), *ROOT.glob(".github/workflows/*.yml")]
        assert files
        assert not [path for path in files if "xla-nightly-fallback" in path.read_text(encoding="utf-8")]

    def test_a_target_that_does_not_exist_has_none(self, write_spec: Write) -> None:
        with pytest.raises(UserError, match=r"fallback_for: unknown target 'xla-nigthly' \(did you mean 'xla-nightly'"):
            model.load(write_spec(SPEC + "fallback_for: xla-nigthly\n"))
