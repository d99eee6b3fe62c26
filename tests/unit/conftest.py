"""Unit tests run without Docker and without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from scripts import cli

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


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a verb as its command line does: exit status, stdout, stderr."""

    def run(module: ModuleType, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [f"{module.__name__.rpartition('.')[2]}.py", *arguments])
        monkeypatch.setattr(cli.log, "file", None)
        with pytest.raises(SystemExit) as ended:
            cli.run(module.main)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(autouse=True)
def no_target_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "JSON", "FORCE", "BASE"):
        monkeypatch.delenv(name, raising=False)
