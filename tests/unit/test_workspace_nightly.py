"""A user's repository that extends a target whose base image holds the framework, in versions that no index has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngine, Image
from tests.fakes.package_index import PackageIndex, wheel
from tests.workspaces import fresh, is_current, relock, repository
from tests.workspaces import versions as pinned

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_contents, dockerfile, lock_origin, planning
from trainyard.image.plan import Plan
from trainyard.oci import probe_runner
from trainyard.oci.probe_runner import Distribution, ProbeResult
from trainyard.spec import model, pylock
from trainyard.spec.lock import DEFAULT, Lock
from trainyard.spec.model import RepositorySpec, Spec

DIGEST, NEWER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"

#: Name -> version and requirements of what the base has installed.
INSTALLED = {
    "torch": ("2.10.0.dev20261121+cpu", ["sympy>=1.13", "fsspec", "not a requirement", "pefile; os_name == 'nt'"]),
    "torchvision": ("0.25.0.dev20261121+cpu", ["numpy", "torch==2.10.0.dev20261121"]),
    "torch-xla": (
        "2.10.0+git0123abc",
        ["absl_py", "numpy", 'libtpu==0.0.30.dev20261120; extra == "tpu"', 'jax>=0.9; extra == "pallas"'],
    ),
    "libtpu": ("0.0.30.dev20261120", []),
    "numpy": ("2.4.0", []),
    "absl-py": ("2.1.0", []),
    "fsspec": ("2026.9.0", ["tqdm; extra == 'progress'"]),
    "sympy": ("1.13.3", ["mpmath"]),
    "mpmath": ("1.3.0", []),
    "tqdm": ("4.0", []),
    "pip": ("25.0", []),
}

Write = Callable[..., RepositorySpec]


@pytest.fixture
def index(resolves: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """What the trainers need, later releases of what the base has, and what users ask for."""
    with PackageIndex() as found:
        pins = [text.split("==") for text in model.requirements_of(model.load("xla-nightly"))]
        found.add(*(wheel(name, version) for name, version in pins))
        found.add(
            wheel("numpy", "2.9"), wheel("sympy", "1.14"), wheel("tqdm", "4.0"), wheel("tqdm", "5.0"),
            wheel("torch", "2.9.1"), wheel("einops", "0.8.0"), wheel("jax", "0.9.0"),
            wheel("lightning", "1", ("torch>=2.5", "numpy>=2", "tqdm")), wheel("old", "1", ("torch<2.9",)),
        )  # fmt: skip
        yield found


class Registry:
    """The registry and the engine, with the base.

    Attributes:
        digest: of the base's tag; empty if its registry does not answer.
        python: of the base.
        installed: what it has installed.
        inspected: references that were inspected.
    """

    def __init__(self) -> None:
        self.digest = DIGEST
        self.python = "3.12.9"
        self.installed: dict[str, tuple[str, list[str]]] = dict(INSTALLED)
        self.inspected: list[str] = []

    def digest_of(self, reference: str) -> str | None:
        return DIGEST if "library/debian:" in reference else self.digest or None  # of another registry, which answers

    def inspect(self, _engine: Engine, reference: str) -> ProbeResult:
        self.inspected.append(reference)
        packages = [
            Distribution(name, version, "", tuple(requires), 0) for name, (version, requires) in self.installed.items()
        ]
        site = "/usr/local/lib/python3.12/site-packages"
        return ProbeResult(self.python, tuple(packages), executable="/usr/local/bin/python3", site=site)


@pytest.fixture
def registry(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    fake_engine.digest_at_registry = found.digest_of
    fake_engine.instead("GET /images/.+/json", lambda: Image("sha256:0").document)  # whatever is pulled
    monkeypatch.setattr(probe_runner, "probe", found.inspect)
    return found


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex, registry: Registry) -> Write:
    """Write the files of a repository that uses ``index`` alone; its spec."""
    root = tmp_path / "repository"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    for name, file in (("UV_CONFIG_FILE", "user.toml"), ("NETRC", "none")):
        monkeypatch.setenv(name, str(tmp_path / file))
    # uv looks for a Python of the base's version, and would download one.
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    (tmp_path / "user.toml").touch()
    (root / "uv.toml").write_text(f'[[index]]\nname = "fake"\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")
    (root / "train.py").write_text("print('loss')\n", encoding="utf-8")

    def run(requirements: str = "einops\n", more: str = "", extends: str = "xla-nightly") -> RepositorySpec:
        text = f"extends: {extends}\ncode: [train.py]\nrun: python train.py\nrequirements: requirements.txt\n{more}"
        (root / "trainyard.yaml").write_text(text, encoding="utf-8")
        (root / "requirements.txt").write_text(requirements, encoding="utf-8")
        return repository()

    return run


def locked(spec: Spec) -> dict[str, str]:
    """Return what the lock adds to the base."""
    return pinned(fresh(spec))


def content(spec: Spec) -> Lock:
    """The lock that is there now."""
    found = fresh(spec).lock
    assert isinstance(found, Lock)
    return found


def planned(spec: Spec) -> Plan:
    """The plan of a build, which locks first."""
    return planning.plan_for(spec)


def test_the_lock_records_the_base_and_what_the_base_lacks(write: Write, registry: Registry) -> None:
    spec = write("einops\ntorch>=2.5\nlightning\n")
    assert not spec.version_known
    assert relock(spec)
    lock = content(spec)
    assert list(lock.indexes) == [DEFAULT] and lock.python == "3.12"
    own = lock.indexes[DEFAULT]["amd64"]
    assert own.base and not own.framework and not own.compiled
    assert lock.origin and lock.origin.base == f"{model.bases()['xla-nightly'].image}@{DIGEST}" == registry.inspected[0]

    spec = repository()
    assert spec.version_known and spec.version == "2.10.0+git0123abc"
    assert spec.base_contents is not None and spec.base_contents.digest == DIGEST
    added = locked(spec)
    assert {"einops", "lightning", "tensorboard"} <= added.keys()
    assert not added.keys() & INSTALLED.keys(), "what the base has is used as it is"
    assert spec.locked().versions == {name: one[0] for name, one in INSTALLED.items()} | added
    assert "not a requirement" not in spec.base_contents.requires["torch"]
    assert is_current(spec)
    assert not relock(spec)


def test_the_image_is_built_on_the_locked_digest(write: Write) -> None:
    plan = planned(write())
    assert plan.sources.base == plan.recipe.base.reference == f"{model.bases()['xla-nightly'].image}@{DIGEST}"
    assert plan.recipe.version == "2.10.0+git0123abc"
    assert plan.built.tag.startswith("repository-2.10.0_git0123abc-")
    arguments = plan.arguments
    assert (arguments["BASE_DIGEST"], arguments["PYTHON"]) == (DIGEST, "/usr/local/bin/python3")
    assert arguments["CODE"] == plan.recipe.labels["io.trainyard.code"] != ""
    text = plan.dockerfile.read_text(encoding="utf-8")
    assert text == dockerfile.dockerfile(repository())
    assert "COPY --link --from=site " in text and "COPY --link --from=code " in text and "2.10.0" not in text


def test_a_newer_nightly_changes_nothing_until_it_is_upgraded(write: Write, registry: Registry) -> None:
    before = planned(write())
    registry.digest = NEWER
    registry.installed["torch-xla"] = ("2.11.0+git4567def", ["numpy"])
    assert planned(write()) == before
    relock(write("einops\ntqdm\n"))
    assert planned(repository()).sources.base == before.sources.base
    relock(repository(), upgrade_packages=["einops"])
    assert len(registry.inspected) == 1
    relock(repository(), upgrade=True)
    assert planned(repository()).sources.base_digest == NEWER
    assert repository().version == "2.11.0+git4567def"


def test_an_upgrade_to_the_same_nightly_inspects_and_changes_nothing(
    write: Write, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    relock(write())
    assert not relock(repository(), upgrade=True)
    assert len(registry.inspected) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "numpy<2",
            "requirements.txt:2: numpy<2 contradicts numpy 2.4.0, which the base image of xla-nightly (torch-xla "
            "2.10.0+git0123abc) has: relax it, no other target has it",
        ),
        (
            "torch==2.15.0",
            "requirements.txt:2: torch==2.15.0 contradicts torch 2.10.0.dev20261121+cpu, which the base image of "
            "xla-nightly (torch-xla 2.10.0+git0123abc) has: relax it, or extend cpu or gpu or torch-tpu",
        ),
    ],
)
def test_a_requirement_that_contradicts_the_base_is_one_line_with_both_sides(
    write: Write, line: str, message: str
) -> None:
    spec = write(f"einops\n{line}\n")
    with pytest.raises(UserError) as error:
        relock(spec)
    assert str(error.value) == message
    assert not spec.lock_file.exists()


def test_a_contradiction_through_another_package_has_uvs_reason(write: Write) -> None:
    with pytest.raises(UserError) as error:
        relock(write("einops\nold\n"))
    text = str(error.value)
    assert text.startswith("requirements.txt:2: old cannot be installed: because ")
    assert "torch<2.9" in text and "torch==2.10.0.dev20261121+cpu" in text and "\n" not in text


def test_what_the_framework_does_not_need_may_be_replaced(write: Write) -> None:
    """Packages that are locked precede those of the base on the module path."""
    relock(write("tqdm\n"))
    assert "tqdm" not in locked(repository())
    relock(write("tqdm>=4.5\n"))
    assert locked(repository())["tqdm"] == "5.0"
    relock(write("tqdm\n"))
    assert locked(repository())["tqdm"] == "5.0", "versions of an existing lock are kept"


def test_a_package_of_the_base_is_upgraded_by_name_unless_the_framework_needs_it(write: Write) -> None:
    relock(write("tqdm\n"))
    relock(repository(), upgrade_packages=["tqdm"])
    assert locked(repository())["tqdm"] == "5.0"
    with pytest.raises(UserError, match=r"'mpmath' is part of the framework of xla-nightly"):
        relock(repository(), upgrade_packages=["mpmath"])


def test_an_extra_of_the_framework_adds_what_the_base_lacks(write: Write) -> None:
    relock(write("torch-xla[tpu,pallas]\n"))
    assert locked(repository())["jax"] == "0.9.0"


def test_the_requirements_are_resolved_for_the_python_in_the_base(
    write: Write, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BASE", "registry.example/xla:own")
    registry.python = "3.11.2"
    spec = write("einops; python_version == '3.11'\n")
    Path("pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\nrequires-python = "<3.12"\n')
    relock(spec)
    assert locked(repository())["einops"] == "0.8.0"


def test_another_base_is_locked_and_a_mirror_of_the_same_is_built_on(
    write: Write, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write()
    relock(spec)
    before = spec.lock_file.read_bytes()
    monkeypatch.setenv("TRAINYARD_BASE", f"mirror.example/xla@{DIGEST}")
    plan = planned(repository())
    assert (plan.sources.base, plan.sources.base_digest) == (f"mirror.example/xla@{DIGEST}", DIGEST)
    assert spec.lock_file.read_bytes() == before

    monkeypatch.setenv("TRAINYARD_BASE", model.bases()["xla-nightly"].image)
    assert planned(repository()).sources.base == f"{model.bases()['xla-nightly'].image}@{DIGEST}", (
        "not what the tag is now"
    )

    monkeypatch.setenv("TRAINYARD_BASE", "registry.example/xla:own")
    with pytest.raises(StepFailed, match="needs to be updated"):
        relock(repository(), check=True)
    assert planned(repository()).sources.base == registry.inspected[-1] == "registry.example/xla:own"
    monkeypatch.delenv("TRAINYARD_BASE")
    plan = planned(repository())
    assert plan.sources.base == "registry.example/xla:own", "a lock has one base, on every machine"
    assert plan.built.notes == ("base registry.example/xla:own has no digest, as it comes from no registry",)


def test_a_base_with_a_digest_is_recorded_with_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BASE", f"mirror.example/xla@{NEWER}")
    plan = planned(write())
    assert (plan.built.base_digest, plan.built.notes) == (NEWER, ())


def test_a_base_that_cannot_be_reached_is_one_line_and_no_lock(write: Write, registry: Registry) -> None:
    registry.digest = ""
    spec = write()
    with pytest.raises(UserError, match=r"^base \S+ is unreachable \(no such host\) and cannot be bootstrapped"):
        relock(spec)
    assert not spec.lock_file.exists()


def test_a_locked_base_needs_no_registry(write: Write, registry: Registry) -> None:
    before = planned(write())
    registry.digest = ""
    assert planned(repository()) == before


def test_a_record_of_the_catalogues_base_is_not_that_of_the_workspace(
    write: Write, inspect_base: Callable[[Spec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue may be locked with another day's base."""
    spec = write()
    relock(spec)
    spec = repository()
    before = lock_origin.contents(spec)
    copy = inspect_base(model.load("xla-nightly"))
    load = model._load
    monkeypatch.setattr(model, "_load", lambda folder, *more: load(copy if folder.name == copy.name else folder, *more))
    assert model.load("xla-nightly").version == "2.10.0+git0123abc"
    assert lock_origin.contents(spec) == before, "it is the same Trainyard"
    assert repository().base_contents == spec.base_contents
    spec.lock_file.unlink()
    assert not repository().version_known


def test_nothing_is_compiled_for_it(write: Write) -> None:
    with pytest.raises(UserError, match=r"^trainyard\.yaml:\d+: build: nothing can be compiled for 'xla-nightly'"):
        write("einops\n", "build: {sources: [old==1]}\n")


def test_a_repository_that_changes_its_target_changes_the_record_of_its_base(write: Write) -> None:
    spec = write()
    relock(spec)
    moved = write(extends="tf-cpu")
    assert moved.base_contents is None and "tensorflow-cpu==2.21.0" in moved.packages
    assert not is_current(moved)
    other = write(extends="xla-nightly")
    assert other.version_known, "the lock is still there"


def test_a_record_that_is_damaged_is_one_line(write: Write) -> None:
    spec = write()
    relock(spec)
    written = spec.lock_file.read_text(encoding="utf-8")
    damaged = re.sub(r'(?m)^(torch|site) = ".*\n', "", written)
    assert damaged.count("\n") == written.count("\n") - 2
    spec.lock_file.write_text(pylock.with_checksum(damaged.partition("\n\n")[2]), encoding="utf-8")
    with pytest.raises(UserError, match=r"^pylock\.trainyard\.toml: written by another version of Trainyard"):
        repository().locked()
    spec.lock_file.write_text(written.replace('"2.4.0"', '"2.3.0"'), encoding="utf-8")
    unlocked = repository()
    assert not unlocked.version_known, "reported by what reads the lock"
    with pytest.raises(UserError, match=r"^pylock\.trainyard\.toml: changed since 'trainyard lock' wrote it"):
        unlocked.locked()


def test_the_framework_is_what_its_packages_need() -> None:
    requires = {"torch": ["sympy", "jax; extra == 'x'"], "sympy": ["mpmath<1.4"], "mpmath": [], "pip": []}
    assert base_contents._required(["torch"], requires, "3.12.1").keys() == {"torch", "sympy", "mpmath"}
