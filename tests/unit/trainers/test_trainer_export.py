"""Test that exported files appear when they are complete, and say which version wrote them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trainers
from trainers.common import files

import trainyard


def test_files_appear_when_all_are_complete_and_replace_the_old_ones(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    (tmp_path / "weights").write_text("old")
    (tmp_path / "other").write_text("kept")
    with files.complete_files(str(tmp_path)) as fresh:
        Path(fresh, "weights").write_text("new")
        Path(fresh, "model").mkdir()
        Path(fresh, "model", "graph").write_text("new")
        assert (tmp_path / "weights").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["model", "other", "weights"]
    assert (os.listdir(tmp_path / "model"), (tmp_path / "weights").read_text()) == (["graph"], "new")


def test_after_an_error_the_old_files_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("old")
    with pytest.raises(OSError, match="full"), files.complete_files(str(tmp_path)) as fresh:
        Path(fresh, "weights").write_text("new")
        raise OSError("full")
    assert os.listdir(tmp_path) == ["weights"] and (tmp_path / "weights").read_text() == "old"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with files.complete_files(str(tmp_path)) as fresh:
            Path(fresh, "weights").write_text("half")
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(os.listdir(tmp_path)) == 1 and "weights" not in os.listdir(tmp_path)
    with files.complete_files(str(tmp_path)) as fresh:
        Path(fresh, "weights").write_text("whole")
    assert os.listdir(tmp_path) == ["weights"]


def test_an_export_that_is_killed_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what had its name in the next export: a folder cannot be replaced by one operation."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "graph").write_text("earlier")
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "replace", lambda *_: os._exit(9))
        with files.complete_files(str(tmp_path)) as fresh:
            Path(fresh, "model").mkdir()
            Path(fresh, "model", "graph").write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.read_text() for path in tmp_path.glob(".earlier-*/graph")] == ["earlier"]
    with pytest.raises(OSError, match="full"), files.complete_files(str(tmp_path)):
        raise OSError("full")
    assert os.listdir(tmp_path) == ["model"] and (tmp_path / "model" / "graph").read_text() == "earlier"


def test_the_version_in_exported_models_is_that_of_trainyard() -> None:
    assert trainers.__version__ == trainyard.__version__
