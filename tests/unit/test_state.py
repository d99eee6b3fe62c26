"""What only one process of a host may do at a time, others wait for."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from scripts import state


def test_a_second_process_says_that_it_waits_and_gets_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    made = tmp_path / "made"

    def second() -> None:
        state._turns.clear()  # forked from a process that has the turn
        with state.candidate_of("xla"):
            made.touch()

    process = multiprocessing.get_context("fork").Process(target=second)
    with state.candidate_of("xla"), state.candidate_of("xla"):  # within a turn it is had already
        process.start()
        process.join(0.3)
        assert process.is_alive() and not made.exists()
    process.join(10)
    assert made.exists() and process.exitcode == 0
    assert "another process makes xla: waiting for it" in capfd.readouterr().err


def test_different_targets_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    with state.candidate_of("xla"), state.candidate_of("tf-cpu"):
        assert sorted(path.name for path in (tmp_path / "turns").iterdir()) == ["candidate-tf-cpu", "candidate-xla"]
