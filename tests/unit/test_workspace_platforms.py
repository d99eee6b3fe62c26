"""A user's repository for several platforms: what each is locked with, built from and called."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import plans, workspaces
from tests.fakes.engine import FakeEngine
from tests.fakes.package_index import PackageIndex, source_distribution, wheel
from tests.workspaces import is_current, relock, repository
from tests.workspaces import versions as pinned

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_image, build_backends, dockerfile, lock_origin, planning
from trainyard.spec import architectures, model, pylock, workspace
from trainyard.spec.architectures import AMD64, ARM64, Architecture
from trainyard.spec.lock import DEFAULT, Lock, Locked, Unreadable
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import requirements

BOTH = "platforms: [linux/amd64, linux/arm64]\n"

Write = Callable[..., RepositorySpec]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host for amd64."""
    monkeypatch.setattr(architectures.platform, "machine", lambda: "x86_64")


def binary(name: str, version: str, *platforms: Architecture) -> list[tuple[str, bytes]]:
    """The wheels of a package with compiled code for some platforms."""
    return [wheel(name, version, tag=f"cp313-cp313-manylinux_2_17_{one.machine}") for one in platforms]


@pytest.fixture
def index(resolves: None) -> Iterator[PackageIndex]:
    """The packages of tf-cpu for both platforms, and some that users ask for."""
    with PackageIndex() as found:
        for spec in model.each_platform(model.load("tf-cpu")):
            found.add(*(wheel(name, version) for name, version in spec.locked().versions.items()))
        found.add(wheel("einops", "0.8.0"), wheel("tqdm", "4.0"), *binary("fast", "1.0", AMD64, ARM64))
        yield found


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex) -> Write:
    """Write the files of a repository that uses ``index`` alone; its spec."""
    root = tmp_path / "mine"
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    monkeypatch.setattr(base_image, "lockable_reference", lambda name, _context: model.bases()[name].image)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (root / "uv.toml").write_text(f'[[index]]\nname = "fake"\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")
    (root / "train.py").touch()

    def run(lines: str = "fast\n", more: str = BOTH, extends: str = "tf-cpu") -> RepositorySpec:
        text = f"extends: {extends}\nrun: python train.py\ncode: [train.py]\nrequirements: requirements.txt\n{more}"
        (root / "trainyard.yaml").write_text(text, encoding="utf-8")
        (root / "requirements.txt").write_text(lines, encoding="utf-8")
        return repository()

    return run


def on(architecture: Architecture) -> RepositorySpec:
    """The repository of the current folder on a platform."""
    return repository().on(architecture.name)


def locked(architecture: Architecture = AMD64) -> Locked:
    """What the lock has for a platform."""
    return on(architecture).locked()


def content() -> Lock:
    """The lock of the current folder."""
    found = repository().lock
    assert isinstance(found, Lock)
    return found


def versions(name: str) -> list[str | None]:
    """The version of a package on each platform; None where it is not locked."""
    return [one.locked().versions.get(name) for one in model.each_platform(model.load(None))]


def hashes(name: str, architecture: Architecture) -> list[str]:
    return [digest for pin in locked(architecture).requirements if pin.name == name for digest in pin.hashes]


# --- trainyard.yaml --------------------------------------------------------------------------------------------------


def test_a_repository_is_for_amd64_alone_unless_it_lists_platforms(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(more="").platforms == ["linux/amd64"]
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    with pytest.raises(UserError, match=r"'TRAINYARD_ARCH=arm64': this image is made for linux/amd64 alone"):
        model.load(None)


@pytest.mark.parametrize(
    ("extends", "platforms", "words"),
    [
        ("xla", "[linux/amd64, linux/arm64]", "5: platforms: 'xla' is not made for linux/arm64: it is for linux/amd64"),
        ("tf-cpu", "[linux/arm]", "5: platforms.0: 'linux/arm' is not a platform of images (did you mean 'linux/arm64"),
        ("tf-cpu", "[linux/arm64, linux/arm64]", "5: platforms: linux/arm64 is listed twice"),
        ("tf-cpu", "[]", "5: platforms: "),
    ],
)
def test_platforms_that_an_image_cannot_have_are_one_line(
    write: Write, extends: str, platforms: str, words: str
) -> None:
    with pytest.raises(UserError) as error:
        write(more=f"platforms: {platforms}\n", extends=extends)
    assert str(error.value).startswith(f"trainyard.yaml:{words}") and "\n" not in str(error.value)


def test_a_platform_has_the_framework_of_the_target_for_it_and_another_name_on_this_host(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd64 = write()
    monkeypatch.setenv("TRAINYARD_ARCH", "arm64")
    arm64 = model.load(None)
    assert [amd64.packages, arm64.packages] == [["tensorflow-cpu==2.21.0"], ["tensorflow==2.21.0"]]
    assert [amd64.local_name, arm64.local_name] == ["mine", "mine-arm64"]
    assert arm64.build_folder == amd64.build_folder.parents[1] / "mine-arm64" / "build"
    assert [amd64.command("image"), arm64.command("image")] == [
        "trainyard image",
        "TRAINYARD_ARCH=arm64 trainyard image",
    ]


def test_a_repository_for_arm64_alone_is_for_that_on_every_host(write: Write) -> None:
    spec = write(more="platforms: [linux/arm64]\n")
    assert spec.arch == "arm64"
    relock(spec)
    assert set(content().indexes[DEFAULT]) == {"arm64"}
    assert is_current(spec)


def test_the_schema_has_the_platforms_as_choices() -> None:
    found: dict[str, Any] = workspace.schema()["properties"]["platforms"]
    assert found["items"]["enum"] == ["linux/amd64", "linux/arm64"] and found["uniqueItems"]


# --- pylock.trainyard.toml -------------------------------------------------------------------------------------------


def test_a_lock_has_the_files_of_each_platform(write: Write, index: PackageIndex) -> None:
    relock(write("fast\neinops\n"))
    digest = {name: hashlib.sha256(body).hexdigest() for name, body in index.files.items()}
    for one in (AMD64, ARM64):
        assert hashes("fast", one) == [digest[f"fast-1.0-cp313-cp313-manylinux_2_17_{one.machine}.whl"]]
        assert hashes("einops", one) == [digest["einops-0.8.0-py3-none-any.whl"]]
    for one in (AMD64, ARM64):
        assert locked(one).framework == model.load("tf-cpu", one.name).locked().framework


def test_what_amd64_has_is_the_same_with_another_platform(write: Write) -> None:
    spec = write("fast\neinops\n", "")
    relock(spec)
    alone = spec.lock_file.read_bytes()
    assert set(content().indexes[DEFAULT]) == {"amd64"} and b"marker" not in alone and b"aarch64" not in alone
    before = locked()
    relock(write("fast\neinops\n"))
    assert locked() == before and locked(ARM64).pins
    relock(write("fast\neinops\n", "platforms: [linux/amd64]\n"))
    assert spec.lock_file.read_bytes() == alone


def test_a_lock_for_other_platforms_is_out_of_date(
    write: Write, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    relock(write(more=""))
    spec = write()
    assert not is_current(spec)
    status, _, err = trainyard("lock", "--check")
    assert status == 1 and err.count("\n") == 1 and "pylock.trainyard.toml needs to be updated" in err
    status, _, err = trainyard("lock")
    assert status == 0 and "packages for linux/amd64, " in err and "packages for linux/arm64" in err
    assert is_current(spec) and not relock(spec, check=True)
    assert not is_current(write(more=""))


def test_a_lock_without_a_platform_says_what_to_run(write: Write) -> None:
    relock(write(more=""))
    write()
    with pytest.raises(UserError, match=r"^pylock\.trainyard\.toml: nothing for linux/arm64: run '.*trainyard lock'"):
        on(ARM64).locked()


def test_a_lock_of_which_a_part_of_a_platform_is_missing_is_refused(write: Write) -> None:
    spec = write()
    relock(spec)
    indexes = {DEFAULT: {**content().indexes[DEFAULT], "arm64": Locked()}}
    pylock.write(spec.lock_file, replace(content(), indexes=indexes))
    with pytest.raises(UserError, match=r"^pylock\.trainyard\.toml: written by another version of Trainyard"):
        on(AMD64).locked()


def test_versions_are_those_that_all_platforms_have(write: Write, index: PackageIndex) -> None:
    """Also where each platform has a newer one than the other."""
    index.add(*binary("fast", "2.0", AMD64), *binary("other", "1.0", AMD64, ARM64), *binary("other", "2.0", ARM64))
    spec = write("fast\nother\n")
    relock(spec)
    assert versions("fast") == ["1.0", "1.0"], "there is no 2.0 for arm64"
    assert versions("other") == ["1.0", "1.0"], "there is no 2.0 for amd64"
    assert not relock(spec)


def test_versions_differ_where_no_version_has_a_file_for_all_platforms(write: Write, index: PackageIndex) -> None:
    index.add(*binary("only", "1.0", AMD64), *binary("only", "2.0", ARM64))
    spec = write("only\n")
    relock(spec)
    assert versions("only") == ["1.0", "2.0"] and not relock(spec)


def test_two_wheels_of_one_name_are_each_for_their_platform(write: Write, index: PackageIndex) -> None:
    for folder, version in (("a", "1.0"), ("b", "2.0")):
        Path(folder).mkdir()
        name, data = wheel("foo", version)
        Path(folder, name).write_bytes(data)
    one, other = (f"./{name}-py3-none-any.whl" for name in ("a/foo-1.0", "b/foo-2.0"))
    relock(write(f"{one} ; platform_machine == 'x86_64'\n{other} ; platform_machine == 'aarch64'\n"))
    assert versions("foo") == ["1.0", "2.0"]


def test_a_lock_of_another_index_that_is_of_another_time_cannot_be_used(write: Write, index: PackageIndex) -> None:
    """As after a commit of one of two files."""
    spec = write("tqdm\n")
    relock(spec)
    known = repository().usable_lock
    assert known
    both = replace(known, indexes={**known.indexes, "pytorch-cpu": known.indexes["default"]})
    pylock.write(spec.lock_file, both)
    other = pylock.file_of(spec.lock_file, "pytorch-cpu")
    text = other.read_text(encoding="utf-8")
    relock(write("tqdm\neinops\n"))
    other.write_text(text, encoding="utf-8")
    found = repository().lock
    reason = "not of the same 'trainyard lock' as pylock.trainyard.toml: run 'trainyard lock'"
    assert isinstance(found, Unreadable) and found.reason == f"{other.name}: {reason}"
    index.add(wheel("tqdm", "9.0"))
    assert relock(spec) and isinstance(repository().lock, Lock)
    assert versions("tqdm") == ["4.0", "4.0"], "its versions are kept"


@pytest.mark.parametrize(
    ("required", "subject"), [("only", "requirements.txt:2: only"), ("uses", "trainyard.yaml: the requirements")]
)
def test_a_package_without_a_file_for_a_platform_is_named_with_the_line_and_the_platform(
    write: Write, index: PackageIndex, required: str, subject: str
) -> None:
    index.add(*binary("only", "1.0", AMD64), wheel("uses", "1", ("only",)))
    with pytest.raises(UserError) as error:
        relock(write(f"tqdm\n{required}\n"))
    reason = "only 1.0 has no wheel for linux/arm64 and Python 3.13 of debian-13"
    assert str(error.value) == f"{subject} cannot be installed: {reason}"


def test_versions_differ_where_the_requirements_say_so(write: Write, index: PackageIndex) -> None:
    index.add(wheel("tqdm", "5.0"))
    spec = write("tqdm>=5 ; platform_machine == 'aarch64'\ntqdm<5 ; platform_machine == 'x86_64'\n")
    relock(spec)
    assert versions("tqdm") == ["4.0", "5.0"]
    assert is_current(spec) and not relock(spec)
    relock(write("tqdm>=5 ; platform_machine == 'aarch64'\ntqdm<5 ; platform_machine == 'x86_64'\neinops\n"))
    assert versions("tqdm") == ["4.0", "5.0"]


def test_an_upgrade_is_the_same_version_on_all_platforms(write: Write, index: PackageIndex) -> None:
    spec = write("fast\ntqdm\n")
    relock(spec)
    index.add(*binary("fast", "1.1", AMD64, ARM64), *binary("fast", "1.2", ARM64), wheel("tqdm", "5.0"))
    assert not relock(spec)
    relock(spec, upgrade_packages=["fast"])
    assert versions("fast") == ["1.1", "1.1"] and versions("tqdm") == ["4.0", "4.0"]
    relock(spec, upgrade=True)
    assert versions("fast") == ["1.1", "1.1"] and versions("tqdm") == ["5.0", "5.0"]
    assert hashes("fast", AMD64) != hashes("fast", ARM64)


def test_a_package_of_one_platform_is_upgraded_there(write: Write, index: PackageIndex) -> None:
    spec = write("tqdm ; platform_machine == 'aarch64'\n")
    relock(spec)
    index.add(wheel("tqdm", "5.0"))
    relock(spec, upgrade_packages=["tqdm"])
    assert versions("tqdm") == [None, "5.0"]
    with pytest.raises(UserError, match=r"^'tensorflow' is part of the framework of tf-cpu"):
        relock(spec, upgrade_packages=["tensorflow"])


def test_markers_are_those_of_the_platform(write: Write) -> None:
    spec = write("tqdm ; platform_machine == 'x86_64'\neinops ; platform_machine == 'aarch64'\n")
    relock(spec)
    assert versions("tqdm") == ["4.0", None] and versions("einops") == [None, "0.8.0"]


def test_a_contradiction_on_one_platform_is_refused_where_that_is_listed(write: Write) -> None:
    line = "numpy<2 ; platform_machine == 'aarch64'\n"
    relock(write(line, ""))
    with pytest.raises(UserError, match=r"^requirements\.txt:1: numpy<2 .*contradicts numpy .*\(tensorflow 2\.21\.0\)"):
        relock(write(line))


def test_sources_of_uv_are_those_of_the_platform(write: Write) -> None:
    spec = write()
    Path("pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["a"]\n'
        '[[tool.uv.sources.a]]\npath = "one"\nmarker = "platform_machine == \'aarch64\'"\n'
    )
    document = spec.workspace.document.model_copy(
        update={"requirements": workspace.Requirements(file="pyproject.toml")}
    )
    found = workspace.Workspace(spec.workspace.file, document)
    assert [one.text for one in requirements.read(found, "3.13").lines] == ["a"]
    (source,) = requirements.read(found, "3.13", ARM64.machine).sources
    assert source.location == str(Path("one").resolve())


def test_a_platform_is_not_added_to_a_lock_of_another_trainyard(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its framework would be that of another version than those that the lock keeps."""
    relock(write(more=""))
    spec = write()
    monkeypatch.setattr(lock_origin, "contents", lambda _: "5e6f7a8b")
    with pytest.raises(UserError, match=r"would make another image: run 'trainyard lock --upgrade'"):
        relock(spec)
    relock(spec, upgrade=True)
    assert locked(ARM64).pins


def test_the_hash_of_contents_is_the_same_for_all_platforms(write: Write) -> None:
    write()
    assert lock_origin.contents(on(AMD64)) == lock_origin.contents(on(ARM64))


def test_platforms_are_compared_by_the_lock_and_not_by_the_configuration(write: Write) -> None:
    """An image of amd64 that was built before another platform was listed differs in its lock alone."""
    one, both = write(more="").workspace, write().workspace
    assert one.config_hash == both.config_hash


def test_a_folder_is_built_to_one_wheel_for_all_platforms(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(_: object, where: str, *arguments: Any) -> Path:
        made.append(where)
        return workspaces.make(where, *arguments)

    monkeypatch.setattr(build_backends.Backends, "wheel", counted)
    backend = (
        "import os, zipfile\n"
        "def build_wheel(folder, *_):\n"
        "    with zipfile.ZipFile(os.path.join(folder, 'tool-1-py3-none-any.whl'), 'w') as archive:\n"
        "        archive.writestr('tool-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tool\\nVersion: 1\\n')\n"
        "        archive.writestr('tool-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nTag: py3-none-any\\n')\n"
        "        archive.writestr('tool-1.dist-info/RECORD', '')\n"
        "    return 'tool-1-py3-none-any.whl'\n"
    )
    Path("tool").mkdir()
    Path("tool/backend.py").write_text(backend)
    Path("tool/pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tool"\nversion = "1"\n'
    )
    relock(write("./tool\n"))
    assert len(made) == 1
    assert hashes("tool", AMD64) == hashes("tool", ARM64)
    folder = on(ARM64).build_folder / "wheels"
    folder.mkdir(parents=True)
    workspaces.ensure_wheels(on(ARM64), folder)
    (wheel_,) = folder.glob("*.whl")
    assert [hashlib.sha256(wheel_.read_bytes()).hexdigest()] == hashes("tool", ARM64)


# --- What is compiled ------------------------------------------------------------------------------------------------

COMPILE = 'build: {packages: [g++], sources: ["slow%s"], requires: [ninja]}\n'


@pytest.fixture
def slow(index: PackageIndex) -> PackageIndex:
    """The index with a source distribution, and what it is built with."""
    about = "Metadata-Version: 2.2\nName: slow\nVersion: 1.0\n"
    files = {"PKG-INFO": about, "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'x'\n"}
    index.add(source_distribution("slow", "1.0", files), *binary("ninja", "1.0", AMD64, ARM64))
    index.add(*binary("ninja", "2.0", ARM64))
    return index


def test_what_is_compiled_is_locked_and_built_with_the_same_versions_on_all_platforms(
    write: Write, slow: PackageIndex
) -> None:
    relock(write(more=BOTH + COMPILE % ""))
    assert locked().compiled == locked(ARM64).compiled != []
    tools = [pinned(on(one), "build") for one in (AMD64, ARM64)]
    assert tools == [{"ninja": "1.0"}] * 2, "there is no 2.0 for amd64"
    text = dockerfile.dockerfile(on(ARM64))
    for name, pins in (("compiled", locked(ARM64).compiled), ("build-requires", locked(ARM64).build_requires)):
        lines = "".join(f"{pin.requirement()}\n" for pin in pins)
        assert f"\n[{name}]\n{lines}" in text


def test_it_is_compiled_on_the_platform_of_the_image(write: Write, slow: PackageIndex) -> None:
    """Wheels are installed on that of the machine that builds."""
    relock(write(more=BOTH + COMPILE % ""))
    for one in (AMD64, ARM64):
        text = dockerfile.dockerfile(on(one))
        starts = {line.split()[-1]: line for line in text.splitlines() if line.startswith("FROM ") and " AS " in line}
        assert starts["tools"] == "FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS tools"
        assert starts["compile-tools"] == "FROM ${COMPILE_BASE} AS compile-tools"
        assert starts["compiled"] == "FROM environment AS compiled"
        assert starts["environment"] == "FROM compile-tools AS environment"
        tools, compiling = (text.split(f" AS {name}\n")[1].split("\nFROM ")[0] for name in ("tools", "compile-tools"))
        assert tools.startswith(compiling.rstrip("\n")), "BuildKit runs them once where the platform is the same"


@pytest.mark.parametrize(
    ("engine", "wanted", "expected"), [(AMD64, AMD64, "old"), (AMD64, ARM64, "base"), (ARM64, ARM64, "old")]
)
def test_it_is_compiled_in_the_build_base_only_if_that_is_of_the_platform(
    write: Write,
    slow: PackageIndex,
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    engine: Architecture,
    wanted: Architecture,
    expected: str,
) -> None:
    """A base that was bootstrapped is for one platform; an offline build has the build base for the engine's."""
    relock(write(more=BOTH + COMPILE % ""))
    fake_engine.architecture = engine.name
    monkeypatch.setattr(planning, "_reachable", lambda spec: (spec, plans.sources(build_base="old")))
    made = planning.plan_for(on(wanted)).arguments
    assert (made["BUILD_BASE"], made["COMPILE_BASE"]) == ("old", expected)


def test_what_no_platform_compiles_is_in_no_stage(write: Write, slow: PackageIndex) -> None:
    relock(write(more=BOTH + COMPILE % "; platform_machine == 'x86_64'"))
    assert locked(AMD64).compiled and not locked(ARM64).compiled
    assert " AS compiled\n" in dockerfile.dockerfile(on(AMD64))
    assert "compile" not in dockerfile.dockerfile(on(ARM64)).replace("compileall", "").split("AS about")[1]
    assert versions("slow") == ["1.0", None]


def test_a_platform_that_compiles_nothing_needs_no_build_tools(write: Write, slow: PackageIndex) -> None:
    """Of which there may be none for it."""
    slow.files = {name: body for name, body in slow.files.items() if not name.startswith("ninja") or "x86_64" in name}
    relock(write(more=BOTH + COMPILE % "; platform_machine == 'x86_64'"))
    assert pinned(on(AMD64), "build") == {"ninja": "1.0"}
    assert not locked(ARM64).build_requires


# --- The image -------------------------------------------------------------------------------------------------------


def test_the_tags_of_images_end_with_their_architecture_and_have_other_hashes(write: Write) -> None:
    relock(write())
    tags = []
    for one in model.each_platform(model.load(None)):
        dockerfile.write(dockerfile.rendered(one))
        (one.build_folder / "code.tar").touch()
        made = plans.plan(one)
        tags.append(made.built.tag)
        assert (made.recipe.local, made.recipe.tags) == (f"trainyard:{one.local_name}", ("mine", "mine-2.21.0"))
        assert f"\nENV WHEEL_PLATFORM={one.architecture.machine}-manylinux_2_40\n" in dockerfile.dockerfile(one)
    assert [tag.rpartition("-")[2] for tag in tags] == ["amd64", "arm64"]
    assert len({tag.split("-")[3] for tag in tags}) == 2


def test_a_check_of_the_lock_fails_where_one_platform_differs(write: Write, index: PackageIndex) -> None:
    spec = write()
    relock(spec)
    write("fast\ntqdm ; platform_machine == 'aarch64'\n")
    with pytest.raises(StepFailed, match=r"pylock\.trainyard\.toml needs to be updated"):
        relock(repository(), check=True)
