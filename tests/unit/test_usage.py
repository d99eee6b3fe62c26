"""`make test ARGS=--usage`: minutes and disk of each file of tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests import usage


class Report:
    """What pytest reports of one phase of a test."""

    def __init__(self, nodeid: str, duration: float) -> None:
        self.nodeid, self.duration = nodeid, duration


def test_long_files_have_a_line_each_and_the_others_share_one(tmp_path: Path) -> None:
    counted = usage.Usage(tmp_path)
    for nodeid, seconds in (("a.py::first", 50), ("a.py::second", 40), ("b.py::first", 600), ("c.py::x", 12)):
        counted.pytest_runtest_logreport(Report(nodeid, seconds))  # type: ignore[arg-type]
    counted.highest.update({"b.py": 12 * 10**9, "c.py": 3 * 10**9})
    assert counted.lines() == [
        "  10.0 min   12.0 GB  b.py",
        "   1.5 min    0.0 GB  a.py",
        "   0.2 min    3.0 GB  all others",
    ]


def test_the_disk_is_sampled_while_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.01)
    counted = usage.Usage(tmp_path)
    counted.before -= 10**9
    counted.pytest_runtest_logstart("a.py::first")
    until = time.monotonic() + 30
    while "a.py" not in counted.highest and time.monotonic() < until:
        time.sleep(0.01)
    assert counted.highest["a.py"] > 0
