"""The framework of a repository in the versions that it asks for, and the base that has a Python for them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.fakes.package_index import PackageIndex, wheel
from tests.workspaces import empty, fresh, is_current, relock, repository, versions

from trainyard.common.errors import UserError
from trainyard.image import dockerfile, lock_origin, package_index, repository_lock
from trainyard.spec import catalog, gpus, model
from trainyard.spec.lock import Lock
from trainyard.spec.model import RepositorySpec

Write = Callable[..., RepositorySpec]

#: Version of a release -> tags of its wheels.
TENSORFLOW = {
    "2.17.1": ("cp311-cp311-manylinux_2_17_x86_64",),
    "2.18.0": ("cp311-cp311-manylinux_2_17_x86_64",),
    "2.20.0": (
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp313-cp313-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_17_aarch64",
    ),
    "2.21.0": ("cp313-cp313-manylinux_2_17_x86_64", "cp313-cp313-manylinux_2_17_aarch64"),
}


def fill(index: PackageIndex) -> None:
    """Add the packages of tf-cpu and cpu, whose frameworks have several versions, and need a numpy."""
    for target, framework in (("tf-cpu", "tensorflow-cpu"), ("cpu", "torch")):
        locked = model.load(target, "amd64").locked().versions
        index.add(*(wheel(name, version) for name, version in locked.items() if name not in (framework, "torchvision")))
    for version, tags in TENSORFLOW.items():
        needs = ("numpy>=1.26,<2.1",) if version < "2.20" else ("numpy>=1.26",)
        index.add(*(wheel("tensorflow" if "aarch64" in tag else "tensorflow-cpu", version, needs, tag) for tag in tags))
    index.add(wheel("numpy", "1.26.4"), wheel("numpy", "2.0.2"), wheel("einops", "0.8.0"))
    for version, vision in (("2.9.0", "0.24.0"), ("2.9.1", "0.24.1"), ("2.15.0", "0.29.2")):
        index.add(wheel("torch", version), wheel("torchvision", vision, (f"torch=={version}", "numpy")))


@pytest.fixture
def index(resolves: None) -> Iterator[PackageIndex]:
    with PackageIndex() as served:
        fill(served)
        yield served


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex) -> Write:
    """Write the files of a repository that uses ``index`` alone; its spec."""
    root = tmp_path / "repository"
    settings = empty(root, monkeypatch)
    settings.write_text(f'[[index]]\nname = "fake"\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")

    def run(requirements: str, more: str = "", extends: str = "tf-cpu", python: str = "") -> RepositorySpec:
        listed = "" if "requirements:" in more else "requirements: requirements.txt\n"
        text = f"extends: {extends}\nrun: python train.py\n{listed}{more}"
        (root / "trainyard.yaml").write_text(text, encoding="utf-8")
        (root / "requirements.txt").write_text(requirements, encoding="utf-8")
        if python:
            project = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = "{python}"\n'
            (root / "pyproject.toml").write_text(project, encoding="utf-8")
        return repository()

    return run


def origin(spec: RepositorySpec) -> str:
    """Return what a lock says that its framework was resolved for."""
    lock = fresh(spec).lock
    assert isinstance(lock, Lock) and lock.origin
    return lock.origin.framework


@pytest.mark.parametrize(
    ("requirements", "more", "version", "base"),
    [
        ("tensorflow==2.20.0\n", "", "2.20.0", "debian-13"),
        ("tensorflow>=2.17,<2.19\n", "", "2.18.0", "debian-12"),
        ("tensorflow-cpu<2.18\n", "", "2.17.1", "debian-12"),
        ("", "framework: tensorflow==2.18.0\n", "2.18.0", "debian-12"),
        ("", "framework: [tensorflow-cpu>=2.18]\n", "2.21.0", "debian-13"),
        ("tensorflow==2.20.0\n", "base: debian-12\n", "2.20.0", "debian-12"),
        ("tensorflow==2.20.0+local\n", "", "2.20.0", "debian-13"),
    ],
)
def test_the_framework_has_the_version_that_is_asked_for_on_a_base_that_has_wheels(
    write: Write, requirements: str, more: str, version: str, base: str
) -> None:
    spec = write(requirements, more)
    relock(spec)
    spec = fresh(spec)
    assert (spec.version, spec.base) == (version, base)
    assert spec.packages == [f"tensorflow-cpu=={version}"]
    assert versions(spec, "framework")["tensorflow-cpu"] == version
    assert ("numpy" in versions(fresh(spec), "framework")) and "tensorflow" not in versions(spec)
    assert is_current(spec) and not relock(spec)
    text = dockerfile.dockerfile(spec)
    assert f"tensorflow-cpu=={version}" in text and f"debian:{base.removeprefix('debian-')}-slim" in text


def test_what_the_wheels_of_a_release_require_is_what_the_catalogue_says_where_they_differ(
    write: Write, index: PackageIndex
) -> None:
    """Take torch 2.0.0, whose wheels for macOS require no packages of NVIDIA: uv reads one wheel for all platforms."""
    tags = ("cp310-none-macosx_11_0_arm64", "cp311-cp311-manylinux1_x86_64", "cp311-cp311-manylinux2014_aarch64")
    index.add(*(wheel("torch", "2.0.0", tag=tag) for tag in tags), wheel("torchvision", "0.15.1", ("torch==2.0.0",)))
    required = [Requirement(text) for text in catalog.metadata()[0]["requires-dist"]]
    index.add(*(wheel(one.name, next(iter(one.specifier)).version if one.specifier else "4") for one in required))
    spec = write("torch==2.0.0\n", extends="cpu")
    relock(spec)
    assert versions(fresh(spec), "framework")["nvidia-cudnn-cu11"] == "8.5.0.96"


def test_it_says_what_it_chose_and_why_in_one_line_each(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    relock(write("tensorflow==2.18.0\n"))
    lines = capsys.readouterr().err.splitlines()
    assert "repository: tensorflow-cpu 2.18.0: requirements.txt:1 asks for tensorflow==2.18.0" in lines
    assert "repository: base debian-12 with Python 3.11: tensorflow-cpu==2.18.0 has no wheel for Python 3.13" in lines


def test_what_goes_with_the_framework_has_a_version_that_goes_with_it(write: Write) -> None:
    spec = write("torch==2.9.0\n", extends="cpu")
    relock(spec)
    assert fresh(spec).packages == ["torch==2.9.0", "torchvision==0.24.0"]


def test_an_index_that_uvs_sources_name_does_not_decide_which_torch_there_is(write: Write) -> None:
    write("", extends="cpu")
    (Path.cwd() / "trainyard.yaml").write_text("extends: cpu\nrun: python train.py\nrequirements: pyproject.toml\n")
    (Path.cwd() / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["torch==2.9.0"]\n'
        '[[tool.uv.index]]\nname = "other"\nurl = "http://127.0.0.1:9/whl/cu134"\nexplicit = true\n'
        '[tool.uv.sources]\ntorch = {index = "other"}\n'
    )
    relock(repository())
    assert fresh(repository()).packages == ["torch==2.9.0", "torchvision==0.24.0"]


def test_the_packages_of_a_framework_must_go_together_on_a_base(
    write: Write, index: PackageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.8.0 has wheels for both Pythons, and the torchvision that goes with it for one."""
    index.add(
        wheel("torch", "2.8.0"), wheel("torchvision", "0.23.0", ("torch==2.8.0",), "cp311-cp311-manylinux_2_28_x86_64")
    )
    spec = write("torch==2.8.0\n", extends="cpu")
    relock(spec)
    assert fresh(spec).packages == ["torch==2.8.0", "torchvision==0.23.0"]
    said = "repository: base debian-12 with Python 3.11: torch==2.8.0 with torchvision has no wheels for Python 3.13"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("requirements", ["old==1.0\n", "needs-old\n", "einops\nold>=1\n", "torch==2.9.0\nold\n"])
def test_requirements_that_go_together_on_another_base_have_that(
    write: Write, index: PackageIndex, capsys: pytest.CaptureFixture[str], requirements: str
) -> None:
    index.add(wheel("old", "1.0", (), "cp311-cp311-manylinux_2_17_x86_64"), wheel("needs-old", "1.0", ("old",)))
    spec = write(requirements, extends="cpu")
    relock(spec)
    lines = requirements.splitlines()
    said = (
        "repository: base debian-12 with Python 3.11: with Python 3.13, "
        f"requirements.txt:{len(lines)}: {lines[-1]} cannot be installed: because "
    )
    assert said in capsys.readouterr().err
    assert fresh(spec).base == "debian-12" and versions(fresh(spec))["old"] == "1.0"
    assert is_current(spec) and not relock(spec)


def test_the_framework_on_another_base_is_one_that_has_wheels_for_it(write: Write, index: PackageIndex) -> None:
    """tensorflow-cpu 2.21.0 of tf-cpu has no wheel for Python 3.11 here."""
    index.add(wheel("old", "1.0", (), "cp311-cp311-manylinux_2_17_x86_64"))
    spec = write("old\n")
    relock(spec)
    assert (fresh(spec).version, fresh(spec).base) == ("2.20.0", "debian-12")


@pytest.mark.parametrize(
    ("requirements", "text", "python"),
    [
        ("oldest\n", "", ""),
        ("old\nnew\n", "", ""),
        ("old\n", "", ">=3.12"),
        ("old\n", "base: debian-13\n", ""),
    ],
)
def test_requirements_that_go_together_on_no_base_say_why_not_on_the_target_s(
    write: Write, index: PackageIndex, requirements: str, text: str, python: str
) -> None:
    for name, tag in (("oldest", "cp39-cp39"), ("old", "cp311-cp311"), ("new", "cp313-cp313")):
        index.add(wheel(name, "1.0", (), f"{tag}-manylinux_2_17_x86_64"))
    words = r"^requirements\.txt:1: .* because .* has no wheels with a matching Python \w+ tag \(e\.g\., `cp313`\)"
    with pytest.raises(UserError, match=words):
        relock(write(requirements, text, extends="cpu", python=python))


def test_the_reason_is_that_which_holds_for_every_version_of_the_framework(write: Write, index: PackageIndex) -> None:
    """The line that uv names begins as trainyard.yaml:1 does, where the reason for another framework is noted."""
    index.add(wheel("needs-two", "1.0", ("torch==2.9.0", "einops>=9")))
    padding = "\n" * 9
    with pytest.raises(UserError) as error:
        relock(write("", f"{padding}requirements:\n  - needs-two\n", extends="cpu"))
    assert str(error.value).startswith("trainyard.yaml:13: needs-two cannot be installed: because ")
    assert "einops" in str(error.value)


@pytest.mark.parametrize(
    ("python", "base"),
    [("==3.12.*", "python-3.12"), ("<3.11", "python-3.10"), (">=3.14", "python-3.14"), ("~=3.12.4", "python-3.12")],
)
def test_each_python_that_a_project_asks_for_has_a_base(write: Write, python: str, base: str) -> None:
    spec = write("einops\n", extends="cpu", python=python)
    relock(spec)
    assert fresh(spec).base == base and is_current(spec)
    text = dockerfile.dockerfile(fresh(spec))
    assert "PYTHON=/usr/local/bin/python3" in text and "libpython3-dev" not in text, "it was compiled, with its headers"
    assert "/pythons/" not in text, "its layers are not shared"
    assert " tini ca-certificates" in text and " python3 " not in text


def test_another_base_makes_another_image_without_an_upgrade(write: Write) -> None:
    relock(write("einops\n", extends="cpu"))
    spec = write("einops\n", "base: debian-12\n", extends="cpu")
    lock_origin.check_tool(spec)
    assert not is_current(spec) and relock(spec)


def test_a_framework_without_a_wheel_for_the_base_that_is_given_names_the_pythons_that_have_one(
    write: Write, index: PackageIndex
) -> None:
    with pytest.raises(UserError) as error:
        relock(write("", "framework: tensorflow==2.20.0\nbase: python-3.14\n"))
    assert str(error.value) == (
        "trainyard.yaml:4: tensorflow-cpu==2.20.0 has no wheel for linux/amd64 and Python 3.14 of python-3.14, but for "
        "3.11 and 3.13"
    )
    index.add(wheel("tensorflow-cpu", "2.21.0", (), "cp312-cp312-manylinux_2_17_x86_64"))
    with pytest.raises(UserError) as error:
        relock(write("", "base: python-3.14\n"))
    assert str(error.value) == (
        "trainyard.yaml:4: tensorflow-cpu==2.21.0 has no wheel for linux/amd64 and Python 3.14 of python-3.14, but for "
        "3.12 and 3.13"
    )


def test_a_home_directory_that_cannot_be_written_names_the_folder_that_uv_needs(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    for name in ("UV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    kept = "/dev/null/.cache/uv, where uv keeps what it downloads, cannot be written"
    with pytest.raises(UserError, match=f"^{kept}: set 'UV_CACHE_DIR=<folder>'$"):
        relock(write("torch==2.9.0\n", extends="cpu"))


def test_packages_that_never_go_together_have_uvs_reason(write: Write) -> None:
    with pytest.raises(UserError, match=r"requirements\.txt:\d: torch.* cannot be installed: because "):
        relock(write("torch==2.9.0\ntorchvision==0.24.1\n", extends="cpu"))


def test_what_else_the_repository_requires_decides_within_a_range(write: Write, index: PackageIndex) -> None:
    index.add(wheel("needs-old", "1", ("torch<2.9.1",)))
    spec = write("torch<2.10\nneeds-old\n", extends="cpu")
    relock(spec)
    assert fresh(spec).version == "2.9.0"


def test_a_package_that_the_framework_needs_may_have_another_version(write: Write) -> None:
    """The packages that the target names keep theirs."""
    spec = write("numpy<2\n")
    relock(spec)
    assert fresh(spec).version == "2.21.0"
    assert versions(fresh(spec), "framework")["numpy"] == "1.26.4"


def test_a_requirement_may_need_another_version_of_what_the_framework_needs(
    write: Write, index: PackageIndex, caplog: pytest.LogCaptureFixture
) -> None:
    """The packages that the target names keep theirs, and the lock is kept until the requirement goes."""
    index.add(wheel("old", "1.0", ("numpy<2",)))
    repository_lock.answered(write("old\n"))  # of check --online
    relock(write("old\n"))
    assert "what the framework needs is numpy 1.26.4, as the requirements ask for" in caplog.text
    spec = fresh(write("old\n"))
    assert (spec.version, versions(spec, "framework")["numpy"], origin(spec)) == ("2.21.0", "1.26.4", "dependencies")
    before = spec.lock_file.read_bytes()
    relock(spec)
    assert spec.lock_file.read_bytes() == before
    relock(write("einops\n"))
    assert (origin(spec), versions(fresh(spec), "framework")["numpy"]) == ("", "2.4.6")


def test_a_project_for_an_older_python_gets_a_base_that_has_it(
    write: Write, index: PackageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    index.add(wheel("tensorflow-cpu", "2.21.0", ("numpy>=1.26",), "cp311-cp311-manylinux_2_17_x86_64"))
    spec = write("einops\n", python=">=3.9,<3.13")
    relock(spec)
    assert (fresh(spec).version, fresh(spec).base) == ("2.21.0", "debian-12")
    assert is_current(spec) and not relock(spec)
    said = capsys.readouterr().err
    assert "repository: base debian-12 with Python 3.11: pyproject.toml:4 excludes Python 3.13 of debian-13" in said


def test_it_is_kept_as_long_as_it_is_asked_for(write: Write, index: PackageIndex) -> None:
    relock(write("tensorflow<2.18\n"))
    index.add(wheel("tensorflow-cpu", "2.17.2", (), "cp311-cp311-manylinux_2_17_x86_64"))
    spec = write("tensorflow<2.18\neinops\n")
    relock(spec)
    assert fresh(spec).version == "2.17.1"
    relock(spec, upgrade=True)
    assert fresh(spec).version == "2.17.2"
    spec = write("tensorflow==2.20.0\n")
    assert not is_current(spec)
    relock(spec)
    assert (fresh(spec).version, fresh(spec).base) == ("2.20.0", "debian-13")
    spec = write("einops\n")
    relock(spec)
    assert (fresh(spec).version, origin(spec)) == ("2.21.0", "")
    assert fresh(spec).locked().framework == model.load("tf-cpu", "amd64").locked().framework


def test_platforms_have_the_same_version(write: Write) -> None:
    spec = write("tensorflow<2.21\n", "platforms: [linux/amd64, linux/arm64]\nbase: debian-12\n")
    relock(spec)
    assert [platform.version for platform in model.each_platform(fresh(spec))] == ["2.20.0", "2.20.0"]


@pytest.mark.parametrize(
    ("requirements", "more", "python", "message"),
    [
        (
            "tensorflow==2.19.0\n", "", "",
            "requirements.txt:1: tensorflow-cpu==2.19.0 has no wheel for linux/amd64 and Python 3.10, 3.11, 3.12, "
            "3.13 or 3.14: the nearest that has one is 2.20.0 (Python 3.13)",
        ),
        (
            "tensorflow==2.18.0\n", "", ">=3.12",
            "requirements.txt:1: tensorflow-cpu==2.18.0 has no wheel for linux/amd64 and Python 3.12, 3.13 or "
            "3.14 (pyproject.toml:4 excludes Python 3.10 and 3.11): the nearest that has one is 2.20.0 (Python 3.13)",
        ),
        (
            "tensorflow>=3\n", "", "",
            "requirements.txt:1: tensorflow-cpu>=3 has no wheel for linux/amd64 and Python 3.10, 3.11, 3.12, 3.13 "
            "or 3.14: the nearest that has one is 2.21.0 (Python 3.13)",
        ),
        (
            "", "framework: tensorflow==2.18.0\nbase: debian-13\n", "",
            "trainyard.yaml:4: tensorflow-cpu==2.18.0 has no wheel for linux/amd64 and Python 3.13 of debian-13, but "
            "for 3.11: the nearest that has one is 2.20.0 (Python 3.13)",
        ),
        (
            "tensorflow==2.20.0\n", "", "<3.11",
            "requirements.txt:1: tensorflow-cpu==2.20.0 has no wheel for linux/amd64 and Python 3.10 (pyproject.toml:4 "
            "excludes Python 3.11, 3.12, 3.13 and 3.14)",
        ),
        (
            "tensorflow==2.20.0\n", "", "<3.10",
            "pyproject.toml:4: requires-python '<3.10' excludes Python 3.13 of tf-cpu: relax it, or allow the Python "
            "of a base: debian-12 (Python 3.11), debian-13 (Python 3.13), python-3.12 (Python 3.12), python-3.10 "
            "(Python 3.10), python-3.14 (Python 3.14), debian-14 (Python 3.14)",
        ),
        ("", "framework: torch==2.9.1\n", "",
         "trainyard.yaml:4: framework: 'torch==2.9.1' is not in the framework of 'tf-cpu': tensorflow-cpu, tensorflow"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_line_with_the_nearest_that_can(
    write: Write, requirements: str, more: str, python: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        relock(write(requirements, more, python=python))
    assert str(error.value) == message


def test_a_requirement_that_no_version_suits_has_uvs_reason(write: Write, index: PackageIndex) -> None:
    index.add(wheel("picky", "1", ("tensorflow-cpu==2.21.0",)))
    with pytest.raises(UserError, match=r"requirements\.txt:\d: .* cannot be installed: ") as error:
        relock(write("tensorflow==2.20.0\npicky\n"))
    assert "picky" in str(error.value) and "\n" not in str(error.value)


def test_torch_xla_and_its_torch_have_one_version(write: Write, index: PackageIndex) -> None:
    """torch_xla's metadata does not name the torch that it is built for."""
    locked = model.load("xla", "amd64").locked().versions
    tag = "cp311-cp311-manylinux_2_28_x86_64"
    index.add(*(wheel(name, version) for name, version in locked.items() if not re.match("torch", name)))
    for version, vision in (("2.8.0", "0.23.0"), ("2.9.0", "0.24.0")):
        index.add(wheel("torch", version, (), tag), wheel("torchvision", vision, (f"torch=={version}",), tag))
        index.add(wheel("torch_xla", version, ('libtpu==0.0.21; extra == "tpu"',), tag))
    spec = write("torch==2.8.0\n", extends="xla")
    relock(spec)
    pins = versions(fresh(spec), "framework")
    assert (pins["torch"], pins["torch-xla"]) == ("2.8.0", "2.8.0")


def test_a_uv_lock_with_another_framework_is_followed(write: Write) -> None:
    write("", extends="cpu")
    Path("trainyard.yaml").write_text("extends: cpu\nrun: python train.py\nrequirements: uv.lock\n", encoding="utf-8")
    Path("pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\ndependencies = ["torch>=2"]\n')
    pin = '[[package]]\nname = "torch"\nversion = "2.9.0+cpu"\nsource = { registry = "https://host/cpu" }\n'
    Path("uv.lock").write_text(f"version = 1\n\n{pin}", encoding="utf-8")
    spec = repository()
    relock(spec)
    assert fresh(spec).packages == ["torch==2.9.0", "torchvision==0.24.0"]


def test_an_image_without_a_command_needs_a_version_that_the_trainers_support(
    write: Write, index: PackageIndex
) -> None:
    index.add(wheel("torch", "2.5.1"), wheel("torchvision", "0.20.1", ("torch==2.5.1",)))
    write("", extends="cpu")
    Path("trainyard.yaml").write_text("extends: cpu\nframework: torch==2.5.1\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        relock(repository())
    assert str(error.value) == (
        "trainyard.yaml: the trainers of 'cpu' need torch 2.6 or later, not 2.5.1: give the command of your own, as in "
        "'run: python train.py', or ask for another version"
    )
    assert not Path("pylock.trainyard.toml").exists()


def test_an_index_of_the_framework_that_lacks_the_version_is_left_out_with_a_warning(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's CPU index has the CPU builds of a target; the default index has the version that is asked for."""
    with PackageIndex() as other:
        other.add(wheel("torch", "2.15.0"), wheel("torchvision", "0.29.2", ("torch==2.15.0", "numpy")))
        monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", other.url)
        package_index.reachable.cache_clear()
        spec = write("torch==2.9.1\n", extends="cpu")
        relock(spec)
        locked = fresh(spec)
        assert locked.usable_lock and locked.usable_lock.names("amd64") == ["default"]
        assert locked.packages == ["torch==2.9.1", "torchvision==0.24.1"]
        assert "no packages of index 'pytorch-cpu' in pylock.trainyard.toml: " in capsys.readouterr().err


def test_wheels_without_code_for_gpus_on_a_platform_are_refused_before_anything_is_built(
    write: Write, index: PackageIndex
) -> None:
    """torch's wheels for arm64 are CPU builds before 2.11."""
    gpu = [name for arch in ("amd64", "arm64") for name in model.load("gpu", arch).locked().versions.items()]
    index.add(*(wheel(name, version) for name, version in dict(gpu).items() if not name.startswith("torch")))
    index.add(wheel("torch", "2.9.1"), wheel("torchvision", "0.24.1", ("torch==2.9.1",)))
    spec = write("torch==2.9.1\n", "platforms: [linux/amd64, linux/arm64]\n", extends="gpu")
    with pytest.raises(UserError) as error:
        relock(spec)
    assert str(error.value) == (
        "trainyard.yaml: torch 2.9.1 has no wheels with code for GPUs on linux/arm64: ask for a later version, or "
        "remove the platform from 'platforms'"
    )
    assert not Path("pylock.trainyard.toml").exists()
    spec = write("torch==2.9.1\n", extends="gpu")
    relock(spec)
    assert fresh(spec).device_code == gpus.device_code("torch", "2.9.1", "amd64")


def test_an_image_of_an_older_version_has_the_command_alone(write: Write, index: PackageIndex) -> None:
    index.add(wheel("torch", "2.5.1"), wheel("torchvision", "0.20.1", ("torch==2.5.1",)))
    spec = write("torch==2.5.1\n", extends="cpu")
    relock(spec)
    assert list(fresh(spec).trainer_commands()) == ["run"]
    assert "trainers" not in dockerfile.dockerfile(fresh(spec)).replace('"trainers": {', "")
    required = {canonicalize_name(Requirement(text).name) for text in model.requirements_of(spec.extends)}
    assert not required & versions(fresh(spec)).keys()


def test_a_target_with_the_framework_in_its_base_has_no_other_version(write: Write) -> None:
    with pytest.raises(UserError) as error:
        write("", "framework: torch==2.9.1\n", extends="xla-nightly")
    assert str(error.value) == (
        "trainyard.yaml:4: framework: base xla-nightly of 'xla-nightly' has torch, torchvision, torch-xla, libtpu: "
        "remove 'framework'"
    )


def test_on_another_base_the_hashes_are_those_of_files_for_its_python(write: Write, index: PackageIndex) -> None:
    """The target's lock has those of files for another Python."""
    required = Requirement(model.requirements_of(model.load("tf-cpu", "amd64"))[-1])
    version = next(iter(required.specifier)).version
    served = wheel(required.name, version, (), "cp311-cp311-manylinux_2_17_x86_64")
    index.add(served)
    spec = write("tensorflow==2.18.0\n")
    relock(spec)
    pins = {pin.name: pin for pin in fresh(spec).locked().requirements}
    pin = pins[canonicalize_name(required.name)]
    assert pin.version == version and hashlib.sha256(served[1]).hexdigest() in pin.hashes
