"""``trainyard update`` on a repository with a lock of a year ago, one of whose newer packages breaks it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import workspaces
from tests.workspaces import command_in

pytestmark = pytest.mark.slow("tests/unit/test_update.py, with the same groups over locks and without images")

SPEC = """\
extends: tf-cpu
name: updated
requirements: [{}]
code: [train.py]
run: python train.py
smoke: {{args: [], expect: 'accuracy ([0-9.]+)'}}
"""
TRAIN = """\
from importlib.metadata import version

assert version("tabulate") == "0.9.0", "tables look otherwise"
print("accuracy 98.5")
"""


def test_a_year_old_lock_ends_with_a_report_and_without_the_culprit(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    trainyard = partial(command_in, folder)

    for requirements in ("einops==0.8.0, pluggy==1.5.0, tabulate==0.9.0", "einops, pluggy, tabulate"):
        (folder / "trainyard.yaml").write_text(SPEC.format(requirements))
        trainyard("lock")
    words = ("update", "--only=minor", "--as-of=2026-11-20", "--runs=1", "--slower=3", "--larger=2")
    report = trainyard(*words, "--report=body.md").stdout
    assert (folder / "body.md").read_text("utf-8") == report
    for line in (
        "| smoke test | passed | passed | passes |  |",
        "| accuracy or value | 98.5 | 98.5 | the smoke test's |  |",
        "- pluggy 1.5.0 -> 1.7.0",
        "- left out: tabulate 0.9.0 -> 0.10.0 (train.py:3: AssertionError: tables look otherwise)",
    ):
        assert line in report.splitlines(), report
    for name in ("run, s", "start, s", "memory", "size", "bytes to pull", "of them new", "advisories"):
        assert f"| {name} | " in report, report
    lock = (folder / "pylock.trainyard.toml").read_text()
    assert (
        workspaces.repository(str(folder)).locked().versions.items() >= {"pluggy": "1.7.0", "tabulate": "0.9.0"}.items()
    )
    again = trainyard(*words, "--json")
    found: dict[str, Any] = json.loads(again.stdout)
    assert (found["taken"], "build" in again.stderr) == ([], False), "nothing is built where nothing is new"
    assert (folder / "pylock.trainyard.toml").read_text() == lock
