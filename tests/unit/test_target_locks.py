"""Targets are locked for all platforms at once, and stock uv and pip install what a lock has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.pylock import Pylock
from tests.fakes.package_index import PackageIndex, source_distribution, wheel
from tests.unit.conftest import BASE_CONTENTS

from trainyard.common import settings
from trainyard.image import base_contents, package_index, target_lock
from trainyard.spec import model, pylock
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import versions
from trainyard.spec.model import Spec

SPEC = """\
summary: An image for two platforms
base: debian-12
platforms: [linux/amd64, linux/arm64]
framework:
  name: tensorflow
  packages: [tensorflow-cpu==2.21.0]
requirements: [einops==0.8.0]
trainers: {package: tf, default: mnist}
budget: {size: 1.9 GB}
smoke: {trainer: mnist, accuracy: 0.97}
"""

Result = tuple[int, str, str]
Run = Callable[..., Result]


def built(name: str, version: str, requires: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield the wheels of a package that has one for each platform."""
    for machine in ("x86_64", "aarch64"):
        yield wheel(name, version, requires, f"cp311-cp311-manylinux2014_{machine}", {f"{name}.py": machine})


@pytest.fixture
def index(resolves: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """A package index, the only one that uv has; mkl is needed on x86_64 alone."""
    with PackageIndex() as found:
        file = tmp_path / "uv.toml"
        file.write_text(f'[[index]]\nname = "fake"\nurl = "{found.url}"\ndefault = true\n', encoding="utf-8")
        monkeypatch.setenv("UV_CONFIG_FILE", str(file))
        needs = ("numpy>=1", "mkl; platform_machine == 'x86_64'", "pywin32; sys_platform == 'win32'")
        found.add(
            *built("tensorflow-cpu", "2.21.0", needs), *built("numpy", "2.0"), *built("einops", "0.8.0", ("numpy",))
        )
        found.add(wheel("mkl", "1.0", (), "py3-none-manylinux_2_28_x86_64"))
        yield found


@pytest.fixture
def folder(write_spec: Callable[[str], str], index: PackageIndex) -> Path:
    return Path(write_spec(SPEC))


def packages(folder: Path, arch: str) -> dict[str, str]:
    """Return name -> version of what an image has."""
    return model.load(str(folder), arch).locked().versions


def test_one_file_has_what_each_platform_installs(folder: Path, index: PackageIndex, trainyard: Run) -> None:
    assert trainyard("lock", str(folder))[0] == 0
    both = {"tensorflow-cpu": "2.21.0", "numpy": "2.0", "einops": "0.8.0"}
    assert packages(folder, "amd64") == both | {"mkl": "1.0"}
    assert packages(folder, "arm64") == both
    for arch in ("amd64", "arm64"):
        locked = model.load(str(folder), arch).locked()
        assert {pin.name for pin in locked.requirements} == {"einops"}
        assert all(len(pin.hashes) == 1 for pin in [*locked.framework, *locked.requirements])
    lock = tomllib.loads((folder / pylock.FILE).read_text(encoding="utf-8"))
    assert [one["name"] for one in lock["packages"] if "marker" in one] == ["mkl"]
    assert index.host not in (folder / pylock.FILE).read_text(encoding="utf-8")


def test_what_is_locked_stays_until_something_needs_another_version(
    folder: Path, index: PackageIndex, trainyard: Run
) -> None:
    trainyard("lock", str(folder))
    before = (folder / pylock.FILE).read_bytes()
    index.add(*built("numpy", "2.1"), wheel("mkl", "2.0", (), "py3-none-manylinux_2_28_x86_64"))
    status, out, err = trainyard("lock", str(folder), "--json")
    assert (status, json.loads(out)) == (0, {"written": []}) and "up to date" in err
    assert (folder / pylock.FILE).read_bytes() == before
    (folder / "image.yaml").write_text(SPEC.replace("einops==0.8.0", "einops==0.8.1"), encoding="utf-8")
    index.add(*built("einops", "0.8.1", ("numpy>=2.1",)))
    trainyard("lock", str(folder))
    assert packages(folder, "amd64") | {} == packages(folder, "arm64") | {"mkl": "1.0"}
    assert packages(folder, "arm64")["numpy"] == "2.1"


def test_newer_versions_are_taken_if_that_is_asked_for(folder: Path, index: PackageIndex, trainyard: Run) -> None:
    trainyard("lock", str(folder))
    index.add(*built("numpy", "2.1"), wheel("mkl", "2.0", (), "py3-none-manylinux_2_28_x86_64"))
    assert trainyard("lock", str(folder), "--check")[0] == 0
    assert trainyard("lock", str(folder), "--upgrade-package", "mkl")[0] == 0
    assert (packages(folder, "amd64")["mkl"], packages(folder, "amd64")["numpy"]) == ("2.0", "2.0")
    status, _, err = trainyard("lock", str(folder), "--upgrade-package", "numpi")
    assert status == 2 and "no package 'numpi' (did you mean 'numpy'" in err
    status, _, err = trainyard("lock", str(folder), "--upgrade", "--check")
    assert status == 1 and err.strip().endswith("mine/pylock.toml is out of date: run 'trainyard lock mine'")
    assert trainyard("lock", str(folder), "--upgrade")[0] == 0
    assert {packages(folder, arch)["numpy"] for arch in ("amd64", "arm64")} == {"2.1"}


def test_a_version_that_one_platform_lacks_is_taken_on_none(folder: Path, index: PackageIndex, trainyard: Run) -> None:
    index.add(next(built("numpy", "3.0")), wheel("numpy", "2.5", (), "cp311-cp311-manylinux_2_39_x86_64"))
    assert trainyard("lock", str(folder))[0] == 0
    assert {packages(folder, arch)["numpy"] for arch in ("amd64", "arm64")} == {"2.0"}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python 3.11 of an environment without packages."""
    venv.create(tmp_path / "env", symlinks=True)
    return tmp_path / "env" / "bin" / "python"


def install(python: Path, tool: str, file: Path, *options: str) -> dict[str, str]:
    """Install a lock as its users do; return name -> version of what the environment has then."""
    words = {
        "uv": [*settings.UV, "pip", "sync", "--python", str(python), "--no-cache", *options, str(file)],
        "pip": [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-cache-dir",
            *options,
            "-r",
            str(file),
        ],
    }[tool]
    done = subprocess.run(words, env={"PATH": os.defpath}, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    about = (path.name.removesuffix(".dist-info").rpartition("-") for path in site.glob("*.dist-info"))
    return {name.replace("_", "-"): version for name, _, version in about}


WITH_TOOLS = pytest.mark.parametrize("tool", ["uv", "pip"])
HOST = model.architectures.of_host().name


@WITH_TOOLS
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11")
def test_uv_and_pip_install_a_lock_that_is_exported(
    folder: Path, trainyard: Run, python: Path, tmp_path: Path, tool: str
) -> None:
    trainyard("lock", str(folder))
    file = tmp_path / "pylock.laptop.toml"
    status, _, err = trainyard("lock", str(folder), "--export", str(file))
    assert status == 0 and "pylock.laptop.toml" in err
    assert install(python, tool, file) == packages(folder, HOST)


@WITH_TOOLS
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11")
def test_uv_and_pip_install_a_lock_from_a_folder_with_its_files(
    folder: Path, index: PackageIndex, trainyard: Run, python: Path, tool: str
) -> None:
    trainyard("lock", str(folder))
    for name, data in index.files.items():
        (folder / name).write_bytes(data)
    assert install(python, tool, folder / pylock.FILE, "--no-index") == packages(folder, HOST)


def test_an_exported_lock_has_the_addresses_of_the_index_without_credentials(
    folder: Path, index: PackageIndex, trainyard: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainyard("lock", str(folder))
    with PackageIndex(("me", "hunter2")) as private:
        private.files |= index.files
        file = tmp_path / "private.toml"
        file.write_text(f'[[index]]\nname = "p"\nurl = "{private.url_with_credentials}"\ndefault = true\n')
        monkeypatch.setenv("UV_CONFIG_FILE", str(file))
        assert trainyard("lock", str(folder), "--export", str(tmp_path / "pylock.toml"))[0] == 0
        text = (tmp_path / "pylock.toml").read_text(encoding="utf-8")
        assert "hunter2" not in text and text.count(f'url = "http://{private.host}/files/') == 7 and "path" not in text
        exported = Pylock.from_dict(tomllib.loads(text))
        committed = Pylock.from_dict(tomllib.loads((folder / pylock.FILE).read_text(encoding="utf-8")))
        assert [(one.name, one.version, one.marker) for one in exported.packages] == [
            (one.name, one.version, one.marker) for one in committed.packages
        ]
        private.files |= dict(built("numpy", "2.0", ("einops",)))
        status, _, err = trainyard("lock", str(folder), "--export", str(tmp_path / "pylock.toml"))
        assert status == 2 and "no package index has numpy-2.0-cp311-cp311-manylinux2014_" in err


def test_a_lock_is_exported_to_a_name_that_uv_and_pip_read(folder: Path, trainyard: Run, tmp_path: Path) -> None:
    status, _, err = trainyard("lock", str(folder), "--export", str(tmp_path / "lock.toml"))
    assert status == 2 and "uv and pip read files that are named pylock.NAME.toml" in err


def test_a_source_distribution_is_in_the_lock_and_never_built(
    folder: Path, index: PackageIndex, trainyard: Run, tmp_path: Path
) -> None:
    (folder / "image.yaml").write_text(SPEC.replace("[einops==0.8.0]", "[slow==1.0]"), encoding="utf-8")
    run_by_build = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    about = "Metadata-Version: 2.1\nName: slow\nVersion: 1.0\nRequires-Dist: einops\n"
    index.add(source_distribution("slow", "1.0", {"PKG-INFO": about, "setup.py": run_by_build}))
    assert trainyard("lock", str(folder))[0] == 0
    assert packages(folder, "arm64")["slow"] == "1.0" and packages(folder, "arm64")["einops"] == "0.8.0"
    lock = Pylock.from_dict(tomllib.loads((folder / pylock.FILE).read_text(encoding="utf-8")))
    (slow,) = (one for one in lock.packages if one.name == "slow")
    assert slow.sdist and slow.sdist.path == "slow-1.0.tar.gz" and not slow.wheels
    assert not (tmp_path / "ran").exists()


def test_the_framework_of_another_index_is_locked_in_a_file_of_its_own(
    folder: Path, index: PackageIndex, trainyard: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = SPEC.replace("tensorflow-cpu==2.21.0]", "torch==2.15.0]\n  index: pytorch-cpu").replace(
        "tensorflow", "torch"
    )
    (folder / "image.yaml").write_text(text.replace("package: tf", "package: torch"), encoding="utf-8")
    index.add(*built("torch", "2.15.0", ("mkl; platform_machine == 'x86_64'",)))
    with PackageIndex(("me", "hunter2")) as cpu:
        cpu.add(*built("torch", "2.15.0+cpu"), *built("einops", "0.8.0"))
        monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", cpu.url_with_credentials)
        monkeypatch.setattr(package_index, "reachable", lambda _: None)
        status, out, err = trainyard("lock", str(folder), "--json")
        assert status == 0, err
        spec = model.load(str(folder), "amd64")
        assert spec.locked().versions == {"torch": "2.15.0", "mkl": "1.0", "einops": "0.8.0", "numpy": "2.0"}
        assert spec.locked("pytorch-cpu").versions == {"torch": "2.15.0+cpu", "einops": "0.8.0", "numpy": "2.0"}
        assert any(name.endswith("mine/pylock.pytorch-cpu.toml") for name in json.loads(out)["written"])
        text = (folder / "pylock.pytorch-cpu.toml").read_text(encoding="utf-8")
        assert "hunter2" not in text and "://" not in text
        assert trainyard("lock", str(folder), "--export", str(tmp_path / "pylock.toml"))[0] == 0
        exported = (tmp_path / "pylock.toml").read_text(encoding="utf-8")
        assert "hunter2" not in exported and exported.count(f"http://{cpu.host}/") == 2


def test_the_lock_of_an_index_that_is_not_locked_any_more_is_removed(
    folder: Path, index: PackageIndex, trainyard: Run
) -> None:
    trainyard("lock", str(folder))
    spec = model.load(str(folder), "arm64")
    lock = spec.usable_lock
    assert lock
    both = replace(lock, indexes={**lock.indexes, "pytorch-cpu": lock.indexes["default"]})
    spec, written = target_lock.write(spec, both)
    assert folder / "pylock.pytorch-cpu.toml" in written and isinstance(spec, Spec)
    assert model.load(str(folder), "arm64").locked("pytorch-cpu").versions == packages(folder, "arm64")
    target_lock.write(spec, lock)
    assert not (folder / "pylock.pytorch-cpu.toml").exists()


def test_what_a_base_with_the_framework_satisfies_is_recorded_and_not_locked(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Run
) -> None:
    target = model.load("xla-nightly")
    folder = tmp_path / "mine"
    shutil.copytree(target.folder, folder)
    pins = {name: version for name, _, version in (text.partition("==") for text in model.requirements_of(target))}
    index.add(*(wheel(name, version) for name, version in pins.items() if name != "onnx"))
    index.add(wheel("onnx", pins["onnx"], ("protobuf",)), wheel("protobuf", "7.0"), wheel("protobuf", "6.0"))
    has = {**BASE_CONTENTS["packages"], "numpy": pins["numpy"], "protobuf": "6.0", "odd": "2004d"}
    contents = BaseContents.model_validate({**BASE_CONTENTS, "packages": has})
    monkeypatch.setattr(base_contents, "inspect", lambda _: contents)
    status, _, err = trainyard("lock", str(folder))
    assert status == 0, err
    spec = model.load(str(folder))
    assert spec.base_contents == contents and spec.day == contents.day and spec.locked().framework == []
    assert versions(spec.locked().requirements) == {name: version for name, version in pins.items() if name != "numpy"}
    lock = Pylock.from_dict(tomllib.loads((folder / pylock.FILE).read_text(encoding="utf-8")))
    assert str(lock.requires_python) == "==3.12.*" and "numpy" not in {one.name for one in lock.packages}
