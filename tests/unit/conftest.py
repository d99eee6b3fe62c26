"""Unit tests run without Docker and without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from scripts import cli, spec

SPEC = """\
summary: A test image
base: debian-12
framework:
  name: tensorflow
  packages: [tensorflow-cpu==2.21.0]
requirements: [tf]
trainers: {package: tf, default: mnist}
budget: {size: 1.9 GB}
smoke: {trainer: mnist, accuracy: 0.97}
"""


@pytest.fixture
def spec_text() -> str:
    """A complete image.yaml."""
    return SPEC


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[[str], str]:
    """Write an image.yaml into a folder of its own; the folder's path, as TARGET would give it."""

    def write(text: str, name: str = "mine") -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "image.yaml").write_text(text, encoding="utf-8")
        return str(folder)

    return write


#: What `make lock` records of a base that holds the framework.
HELD = {
    "image": "registry.example/xla:nightly",
    "reference": "registry.example/xla:nightly@sha256:" + "1" * 64,
    "digest": "sha256:" + "1" * 64,
    "day": "20261120",
    "python": "3.12.9",
    "interpreter": "/usr/local/bin/python3",
    "site": "/usr/local/lib/python3.12/site-packages",
    "packages": {
        "fsspec": "2025.1.0",
        "libtpu": "0.0.30.dev20260101",
        "torch": "2.10.0",
        "torch-xla": "2.10.0+git0123abc",
        "torchvision": "0.25.0",
    },
    "requires": {"torch-xla": ["numpy", 'libtpu==0.0.30.dev20260101; extra == "tpu"']},
}


@pytest.fixture
def look_into_base(tmp_path: Path) -> Callable[[spec.Spec], Path]:
    """A copy of a target whose base holds the framework, as it is once it is locked (HELD); its folder."""

    def look(found: spec.Spec) -> Path:
        folder = tmp_path / found.target
        shutil.copytree(found.folder, folder)
        (folder / "base.json").write_text(json.dumps(HELD), encoding="utf-8")
        pins = [f"{text} --hash=sha256:{'0' * 64}\n" for text in spec.requirements_of(found)]
        (folder / "requirements.lock").write_text("".join(pins), encoding="utf-8")
        return folder

    return look


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a verb as its command line does: exit status, stdout, stderr."""

    def run(module: ModuleType, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [f"{module.__name__.rpartition('.')[2]}.py", *arguments])
        monkeypatch.setattr(cli.log, "_file", None)
        with pytest.raises(SystemExit) as ended:
            cli.run(module.main)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(autouse=True)
def no_target_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "JSON", "FORCE", "BASE", "WORKSHOP"):
        monkeypatch.delenv(name, raising=False)
