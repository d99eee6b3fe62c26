"""Users' repositories with other versions of a framework than the catalogue's: built, and trained in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import versions

CASES = [(target, requirement) for target, requirements in versions.VERSIONS.items() for requirement in requirements]


@pytest.mark.big("cpu", "tf-cpu")
@pytest.mark.parametrize(("target", "requirement"), CASES, ids=[requirement for _, requirement in CASES])
def test_a_repository_trains_with_the_version_that_it_pins(target: str, requirement: str, tmp_path: Path) -> None:
    versions.build_and_train(target, requirement, tmp_path)


@pytest.mark.big("cpu", "tf-cpu")
@pytest.mark.parametrize(("target", "framework"), [("cpu", "torch==2.6.0"), ("tf-cpu", "tensorflow==2.16.2")])
def test_the_trainers_of_the_catalogue_train_with_the_oldest_version_that_they_support(
    target: str, framework: str, tmp_path: Path
) -> None:
    """Without a command, the image is the target with that framework, and its trainer has to learn."""
    (tmp_path / "trainyard.yaml").write_text(
        f"extends: {target}\nname: versions-oldest-{target}\nframework: {framework}\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", "image"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stderr
