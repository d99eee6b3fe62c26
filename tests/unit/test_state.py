"""What only one process of a host may do at a time, others wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import state


def test_a_second_process_says_that_it_waits_and_gets_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    script = "from scripts import state\nwith state.candidate_of('xla'): print('has it', flush=True)"
    with state.candidate_of("xla"), state.candidate_of("xla"):  # within a turn it is had already
        second = subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"TRAINYARD_BUILD": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert second.stderr.readline().strip().endswith("another process makes xla: waiting for it")
        assert second.poll() is None
    out, _ = second.communicate(timeout=10)
    assert out == "has it\n" and second.returncode == 0


def test_different_targets_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    with state.candidate_of("xla"), state.candidate_of("tf-cpu"):
        assert sorted(path.name for path in (tmp_path / "turns").iterdir()) == ["candidate-tf-cpu", "candidate-xla"]
