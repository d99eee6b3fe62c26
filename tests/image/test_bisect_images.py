"""``trainyard bisect`` names the package that broke a repository, by images with some packages of each side."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workspaces import command_in

pytestmark = pytest.mark.slow("tests/unit/test_bisect.py, with the same search over locks and without images")

SPEC = """\
extends: tf-cpu
name: bisected
requirements: [{}]
code: [train.py]
run: python train.py
"""
GOOD = ("einops==0.7.0", "tabulate==0.9.0", "wcwidth==0.2.12", "shellingham==1.5.0")
BAD = ("einops==0.8.0", "tabulate==0.8.10", "wcwidth==0.2.13", "shellingham==1.5.4")
TRAIN = 'from importlib.metadata import version\n\nassert version("tabulate") == "0.9.0", "tables look otherwise"\n'


def test_the_package_that_broke_a_repository_is_named_and_verdicts_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    trainyard = partial(command_in, folder)

    def locked(requirements: tuple[str, ...]) -> None:
        (folder / "trainyard.yaml").write_text(SPEC.format(", ".join(requirements)))
        trainyard("lock")

    locked(GOOD)
    (folder / "pylock.trainyard.toml").rename(folder / "good.lock")
    locked(BAD)
    found: dict[str, Any] = json.loads(trainyard("bisect", "good.lock", "--json").stdout)
    assert (found["culprits"], found["changes"]) == ([["tabulate 0.9.0 -> 0.8.10"]], 4)
    assert "tables look otherwise" in found["reason"] and found["tries"] <= 4, "log2 of 4, and 2"
    again = trainyard("bisect", "good.lock", "--json")
    assert "build" not in again.stderr, "what was tried is not tried again"
    recalled = json.loads(again.stdout)
    assert (recalled["culprits"], recalled["before"]) == (found["culprits"], found["tries"])
