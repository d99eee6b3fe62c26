"""A user's repository is a target: trainyard.yaml is found, read as strictly as image.yaml, and gives a Dockerfile."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import locks, plans
from tests.fakes.engine import FakeEngine
from tests.workspaces import added, lock, repository

from trainyard.common import console
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import build, dockerfile, facts, offline, planning
from trainyard.image.plan import Plan
from trainyard.release import candidate
from trainyard.spec import model, state, workspace
from trainyard.spec.lock import Pin

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a trainyard.yaml into a repository called ``My_Model``, and go there; its path."""
    root = tmp_path / "My_Model"
    (root / ".git").mkdir(parents=True)
    (root / "src").mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))

    def run(text: str) -> Path:
        path = root / "trainyard.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return run


def final_stage(text: str) -> list[str]:
    return text.rpartition("\nFROM ")[2].splitlines()


def stages(text: str) -> dict[str, str]:
    """Name -> text of the stages of a Dockerfile that have a name."""
    found = [one.rstrip() for one in text.split("\nFROM ")[1:] if " AS " in one.splitlines()[0]]
    return {one.splitlines()[0].split()[-1]: one for one in found}


def layers(text: str) -> list[str]:
    """The instructions of a Dockerfile's final stage that make layers."""
    return [line for line in final_stage(text) if line.startswith(("COPY", "RUN", "ADD", "WORKDIR"))]


def locked(*more: Pin) -> str:
    """The Dockerfile of the repository when its lock has ``more`` besides the target's packages."""
    lock(model.load(None), *more)
    return dockerfile.dockerfile(model.load(None))


def test_it_is_found_from_every_folder_of_the_repository(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("extends: cpu\nrun: python train.py\n")
    monkeypatch.chdir(path.parent / "src")
    assert workspace.find() == path
    assert model.load(None).folder == path.parent


def test_it_is_not_looked_for_above_the_git_repository(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("extends: cpu\n")
    inner = path.parent / "vendor" / "other"
    (inner / ".git").mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert workspace.find() is None
    with pytest.raises(UserError, match="no target given"):
        model.load(None)


def test_a_target_that_is_named_wins(write: Write) -> None:
    write("extends: cpu\n")
    assert not isinstance(model.load("tf-cpu"), model.RepositorySpec)


def test_the_image_is_named_after_the_folder_unless_it_has_a_name(write: Write) -> None:
    assert write("extends: cpu\n") and model.load(".").target == "my-model"
    assert write("extends: cpu\nname: digits\n") and model.load(".").target == "digits"


def test_the_image_is_its_parent_with_additions(write: Write) -> None:
    write("extends: xla\nsystem: [ffmpeg]\nenvironment: {A: b}\nrun: python -m my.train --lr 0.1\n")
    found, parent = model.load(None), model.load("xla")
    assert found.framework == parent.framework
    assert found.system == [*parent.system, "ffmpeg"]
    assert found.environment == {"A": "b"}
    assert found.trainers.default == "run"
    assert found.trainer_commands()["run"] == ["python", "-m", "my.train", "--lr", "0.1"]
    assert "mnist" in found.trainer_commands()


@pytest.mark.parametrize(
    ("pyproject", "licence"),
    [
        ('[project]\nname = "x"\nlicense = "mit OR AGPL-3.0-only"\n', "MIT OR AGPL-3.0-only"),
        ('[project]\nname = "x"\nlicense = "LicenseRef-Own"\n', "LicenseRef-Own"),
        ('[project]\nname = "x"\nlicense = "BSD"\n', None),
        ('[project]\nname = "x"\nlicense = {file = "LICENSE"}\n', None),
        ('[project]\nname = "x"\nlicense = {text = "MIT"}\n', None),
        ('[project]\nname = "x"\n', None),
        ("[tool.x]\n", None),
        ("license\n", None),
        (None, None),
    ],
)
def test_the_licence_is_that_of_the_repository_or_none(
    write: Write, pyproject: str | None, licence: str | None
) -> None:
    folder = write("extends: cpu\nrequirements: [einops]\n").parent
    (folder / "LICENSE").write_text("MIT License\n", encoding="utf-8")
    (folder / "pyproject.toml").unlink(missing_ok=True)
    if pyproject is not None:
        (folder / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    assert facts.labels(model.load(None)).get("org.opencontainers.image.licenses") == licence
    assert facts.labels(model.load("cpu"))["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("args", ["[--epochs, 1, --lr, 0.1]", "--epochs 1 --lr 0.1", "['--epochs', '1', --lr, '0.1']"])
def test_arguments_may_be_numbers_or_one_text(write: Write, args: str) -> None:
    write(f"extends: cpu\nrun: python train.py\nsmoke:\n  args: {args}\n")
    found = repository().workspace
    assert found and found.document.smoke and found.document.smoke.args == ["--epochs", "1", "--lr", "0.1"]


@pytest.mark.parametrize(
    ("smoke", "level"),
    [
        ("", "started"),
        ("smoke: {}\n", "ran"),
        ("smoke: {args: [--epochs=1]}\n", "ran"),
        ("smoke: {expect: loss}\n", "trained"),
        ("smoke: {resume: true}\n", "trained"),
    ],
)
def test_the_label_says_how_far_the_code_is_tested(write: Write, smoke: str, level: str) -> None:
    write(f"extends: cpu\nrun: python train.py\n{smoke}")
    assert facts.labels(model.load(None))["io.trainyard.tested"] == level


def test_without_a_command_the_trainers_of_the_parent_count(write: Write) -> None:
    """It is not the code that they show to train: that would be a level which nothing of the repository has reached."""
    write("extends: cpu\nrequirements: [einops]\n")
    found = model.load(None)
    assert facts.labels(found)["io.trainyard.tested"] == "environment"
    assert facts.labels(model.load("cpu"))["io.trainyard.tested"] == "trained"
    assert found.trainers.default == "mnist"
    assert found.workspace.document.code == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extend: cpu\n", "trainyard.yaml:1: unknown key 'extend' (did you mean 'extends'?); valid here: extends,"),
        ("extends: gpuu\n", "trainyard.yaml:1: extends: unknown target 'gpuu' (did you mean 'gpu'?)"),
        ("extends: images/cpu\n", "trainyard.yaml:1: extends: unknown target 'images/cpu'"),
        ("extends: xla-nightly\nbuild: {sources: [a==1]}\n", "trainyard.yaml:2: build: nothing can be compiled for"),
        ("extends: cpu\nname: gpu\n", "trainyard.yaml:2: name: 'gpu' is a target of the catalogue"),
        ("extends: cpu\nname: My Model\n", "trainyard.yaml:2: name: "),
        ("extends: cpu\nrequirements: ['a b']\n", "trainyard.yaml:2: requirements.packages.0: 'a b' is not"),
        ("extends: cpu\nrequirements: {fil: x}\n", "unknown key 'requirements.fil' (did you mean 'file'?)"),
        ("extends: cpu\nrun: python 'train.py\n", "trainyard.yaml:2: run: "),
        ("extends: cpu\nrun: ''\n", "trainyard.yaml:2: run: the command is empty"),
        ("extends: cpu\ncode: [src]\n", "trainyard.yaml:2: code: there is no 'run'"),
        ("extends: cpu\nsmoke: {args: [-x]}\n", "trainyard.yaml:2: smoke: there is no 'run'"),
        ("extends: cpu\nrun: x\nsmoke: {arg: 1}\n", "unknown key 'smoke.arg' (did you mean 'args'?)"),
        ("extends: cpu\nrun: x\nsmoke: {expect: '('}\n", "smoke.expect: '(' is not a regular expression"),
        ("extends: cpu\nrun: x\nsmoke: {for: 0}\n", "trainyard.yaml:3: smoke.for: Input should be greater than 0"),
        ("extends: cpu\nrun: x\nsmoke: {data: dat}\n", "trainyard.yaml:3: smoke.data: no folder 'dat'"),
        ("extends: cpu\nbuild: {packages: [g++]}\n", "'build.sources' is missing"),
        ("extends: cpu\n\trun: x\n", "trainyard.yaml:2: not valid YAML"),
        ("# nothing yet\n", "trainyard.yaml: the file is empty"),
        ("- extends\n", "trainyard.yaml: expected 'key: value' pairs at the top"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_and_line(write: Write, text: str, words: str) -> None:
    write(text)
    with pytest.raises(UserError) as refused:
        model.load(None)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_image_has_the_layers_of_its_target_and_its_code_on_top(write: Write) -> None:
    """A node with both images unpacks them once; the working directory, which makes no layer, is in the base."""
    write("extends: xla\nrun: python train.py\n")
    text = locked()
    parent = dockerfile.dockerfile(model.load("xla"))
    assert layers(text) == [*layers(parent), "COPY --link --from=code /code/../out /"]
    assert final_stage(text)[0] == final_stage(parent)[0] == "libraries AS image"


def test_everything_below_the_code_is_built_as_for_the_parent(write: Write) -> None:
    """Stages with equal text and equal files share their layers."""
    write("extends: xla\nrun: python train.py\n")
    own, parent = stages(locked()), stages(dockerfile.dockerfile(model.load("xla")))
    assert {"system", "libraries", "tools", "wheel-torch", "wheels-1", "wheels-4", "site"} <= parent.keys()
    assert own.keys() - parent.keys() == {"code"}
    assert {name for name in parent if own[name] != parent[name]} == {"image"}


@pytest.mark.parametrize(
    ("sizes", "new"),
    [
        ([100], ["wheel-a0"]),
        ([100, 9_000_000, 50, 70], ["wheel-a1", "wheel-a0", "wheel-a3", "wheel-a2"]),
        ([100, 9_000_000, 50, 70, 60], ["wheel-a1", "wheel-a0", "wheel-a3", "wheels-added"]),
    ],
)
def test_what_a_repository_adds_has_layers_of_its_own_above_those_of_the_target(
    write: Write, sizes: list[int], new: list[str]
) -> None:
    write("extends: tf-cpu\nrun: python train.py\n")
    text = locked(*(added(f"a{number}", size=size) for number, size in enumerate(sizes)))
    own, parent = stages(text), stages(dockerfile.dockerfile(model.load("tf-cpu")))
    wheels = [name for name in own if name.startswith("wheel")]
    of_parent = [name for name in parent if name.startswith("wheel")]
    assert wheels == [*of_parent, *new]
    assert all(own[name] == parent[name] for name in (*of_parent, "sources", "built"))
    copied = [line.split()[2].removeprefix("--from=") for line in layers(text)]
    assert copied[: len(wheels) + 1] == [*wheels, "site"]
    _, *parts = re.split(r"(?m)^\[(\S+)\]\n", own["sources-added"])
    locks = dict(zip(parts[::2], parts[1::2], strict=True))
    in_locks = [name for name in new for number in range(len(sizes)) if f"a{number}==1.0 \\\n" in locks[name]]
    assert len(in_locks) == len(sizes), "each is in one lock"


def test_the_dockerfile_is_the_same_whatever_the_state_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is part of the content hash in the tag."""
    write("extends: xla\nrun: python train.py\n")
    text = locked(added("einops"))
    assert str(tmp_path) not in text
    assert "build/my-model" not in text
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "another" / "state"))
    assert dockerfile.dockerfile(model.load(None)) == text


def test_only_the_stages_of_added_packages_have_addresses_and_credentials_of_indexes(write: Write) -> None:
    """They are secrets, with which the stages of the target's packages would be others than the target's."""
    write("extends: cpu\nrun: python train.py\n")
    own = stages(locked(*(added(name) for name in ("a", "b", "c", "d", "e"))))
    private = {"sources-added", "wheel-a", "wheel-b", "wheel-c", "wheels-added"}
    assert private <= own.keys()
    for name, step in own.items():
        assert ("--mount=type=secret,id=uv,target=/run/secrets/uv.toml" in step) is (name in private), name
        assert ("--mount=type=secret,id=netrc,target=/run/secrets/netrc" in step) is (name in private), name
        assert (" wheels /wheels\n" in step or "target=/wheels " in step) is (name in private), name
    assert "id=netrc" not in dockerfile.dockerfile(model.load("cpu"))


def test_sources_are_compiled_in_a_stage_with_its_packages_and_variables(write: Write) -> None:
    write(
        "extends: gpu\nrun: python train.py\n"
        "build: {packages: [g++], sources: [flash-attn==2.8.3], environment: {TORCH_CUDA_ARCH_LIST: '8.0 $9.0'}}\n"
    )
    text = locked(locks.pin("flash-attn==2.8.3", "compiled"))
    compiled = text.split(" AS compiled\n")[1].split("\nFROM ")[0]
    assert " /tmp/apt.sh libpython3-dev g++\n" in compiled
    assert r'ENV TORCH_CUDA_ARCH_LIST="8.0 \$9.0"' in compiled
    assert " /steps/compiled.sh && /steps/seal.sh\n" in compiled
    assert "COPY --link --from=compiled /compiled/../out /" in final_stage(text)
    assert "g++" not in "".join(final_stage(text))


def test_a_budget_counts_only_where_trainyard_yaml_has_one(write: Write) -> None:
    write("extends: cpu\n")
    assert not model.load(None).limited
    write("extends: cpu\nbudget: {size: 3 GB}\n")
    assert model.load(None).limited
    assert model.load(None).budget.size == 3_000_000_000


def test_the_revision_is_the_commit_of_the_users_repository(write: Write) -> None:
    import subprocess

    path = write("extends: cpu\n")
    (path.parent / ".git").rmdir()

    def git(*words: str) -> str:
        command = ["git", "-C", str(path.parent), "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", "trainyard.yaml")
    git("commit", "-q", "-m", "Add the image")
    found = repository().root
    facts._git.cache_clear()
    assert facts.revision(found) == git("rev-parse", "HEAD")
    path.write_text("extends: xla\n", encoding="utf-8")
    facts._git.cache_clear()
    assert facts.revision(found) == git("rev-parse", "HEAD") + "-dirty"


def test_a_build_without_a_network_needs_what_fetch_has_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    monkeypatch.setenv("TRAINYARD_OFFLINE", "1")
    with pytest.raises(UserError, match="nothing was downloaded for tf-cpu: run 'trainyard dev fetch tf-cpu'"):
        planning.plan_for(model.load("tf-cpu"))


def test_a_build_without_a_network_asks_neither_index_nor_registry(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("an offline build asked a server")

    state_folder = tmp_path / "state"
    monkeypatch.setenv("TRAINYARD_BUILD", str(state_folder))
    copy = plans.with_index("cpu", "pytorch-cpu", tmp_path)
    monkeypatch.setattr(planning.package_index, "choose", unexpected)
    monkeypatch.setattr(planning.base_image, "resolve", unexpected)
    sources = plans.sources(
        index="pytorch-cpu", index_url="https://index.example", base="registry.example/debian@sha256:1",
        base_digest="sha256:1", notes=["a note"],
    )  # fmt: skip
    (state_folder / "cpu").mkdir(parents=True)
    (state_folder / "cpu" / "fetched.json").write_text(sources.model_dump_json(), encoding="utf-8")
    monkeypatch.setenv("TRAINYARD_OFFLINE", "1")
    found = planning.plan_for(model.load(str(copy)))
    assert (found.recipe.index, found.built.base) == ("pytorch-cpu", "registry.example/debian@sha256:1")
    assert (found.sources, found.built.notes) == (sources, ("a note",))
    with pytest.raises(UserError, match="nothing was downloaded for cpu: run 'trainyard dev fetch cpu'"):
        offline.contexts(found)  # its bases were removed
    arguments = build.bake_arguments(found, compression="zstd")
    assert "cpu.args.HTTPS_PROXY=http://127.0.0.1:9" in arguments
    monkeypatch.delenv("TRAINYARD_OFFLINE")
    found = dataclasses.replace(found, context=Context())
    assert not any("PROXY" in word for word in build.bake_arguments(found, compression="zstd"))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_fallback_of_the_build_is_one_warning(
    quiet: bool,
    trainyard: Callable[..., tuple[int, str, str]],
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The build warns when it takes it; --quiet leaves out the lines at the end, and not the warning."""
    note = "base debian:12 is unreachable: built on trainyard-base:debian-12"

    def make(planned: Plan, *_: object, **_how: object) -> dict[str, object]:
        for one in planned.built.notes:
            console.warn(one)
        verified = {"packages": 1, "size": 1, "layers": [], "seconds": 1.0}
        facts = {"digest": "sha256:1", "seconds": 1.0}
        built = facts | {"recipe": planned.recipe.text()}
        return {"image": "trainyard:cpu", "tag": "cpu-1", "build": built, "verify": verified, "smoke": facts}

    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    monkeypatch.setattr(planning, "plan_for", lambda spec: plans.plan(spec, notes=[note]))
    monkeypatch.setattr(candidate, "make", make)
    status, _, err = trainyard("image", "cpu", *(["--quiet"] if quiet else []))
    assert status == 0
    assert err.count(f"WARNING: {note}") == 1
    assert len(err.splitlines()) == (1 if quiet else 5)


def test_a_candidate_that_was_removed_before_it_got_its_name_is_one_line(
    trainyard: Callable[..., tuple[int, str, str]],
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As by 'docker rmi' while it is tested."""
    made = contextlib.nullcontext({"digest": "sha256:1"})
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    monkeypatch.setattr(planning, "plan_for", plans.plan)
    monkeypatch.setattr(build, "building", lambda *_, **__: made)
    monkeypatch.setattr(state, "recall", lambda *_: {"passed": True})
    status, _, err = trainyard("image", "cpu")
    assert status == 2
    assert err.splitlines()[-1] == "image: no local image trainyard:cpu-candidate: run 'trainyard image cpu' first"


def test_an_image_whose_provenance_could_not_be_made_gets_no_name(
    trainyard: Callable[..., tuple[int, str, str]],
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It is made while the image is verified and tested, and what goes wrong is said when that has ended."""
    tested: list[str] = []
    ended = threading.Event()

    def keep(*_: object) -> None:
        assert ended.wait(60), "the image was not tested meanwhile"
        raise StepFailed("cpu: building sha256:1 again for its provenance gave another digest")

    def passed(*given: object, **_how: object) -> dict[str, object]:
        tested.append(str(given[1]))
        if len(tested) == 2:
            ended.set()
        return {"passed": True}

    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    monkeypatch.setattr(planning, "plan_for", plans.plan)
    monkeypatch.setattr(build, "_build", lambda *_, **__: ({"digest": "sha256:1"}, []))
    monkeypatch.setattr(build.layer_contents, "take", lambda *_: ["sha256:2"])
    monkeypatch.setattr(build.state, "record", lambda *_: None)
    monkeypatch.setattr(build.provenance, "keep", keep)
    monkeypatch.setattr(candidate.verify, "verify", passed)
    monkeypatch.setattr(candidate.smoke_test, "smoke", passed)
    fake_engine.add("trainyard:cpu-candidate")
    status, _, err = trainyard("image", "cpu")
    assert status == 1
    assert tested == ["trainyard:cpu-candidate"] * 2
    assert list(fake_engine.tags) == ["trainyard:cpu-candidate"], "it got a name"
    assert err.splitlines()[-1] == "image: cpu: building sha256:1 again for its provenance gave another digest"


def test_quiet_leaves_warnings_and_errors(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    import subprocess
    import sys

    script = (
        "import logging; from trainyard.common import console; library = logging.getLogger('trainyard.image.build');"
        "shown = console.Messages(); shown.__enter__(); console.be_quiet(); console.say('a'); console.show('b');"
        "library.info('e'); library.warning('c'); console.fail('d')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["WARNING:", "c", "d"]


def test_a_repository_is_for_amd64_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock has one platform; asking for another one does not make the image of the first."""
    (tmp_path / "trainyard.yaml").write_text("extends: tf-cpu\n", encoding="utf-8")
    assert model.load(str(tmp_path)).platforms == ["linux/amd64"]
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    with pytest.raises(UserError, match=r"^'TRAINYARD_ARCH=arm64': this image is made for linux/amd64 alone"):
        model.load(str(tmp_path))
