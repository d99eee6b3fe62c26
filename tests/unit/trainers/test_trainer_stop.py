"""Test how a run ends: signals that all processes agree on, a log that nobody takes, errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from trainers.common.job import Stop

ROOT = Path(__file__).resolve().parents[3]


class World:
    """Run processes in lockstep: each is a thread, and time is the number that the slowest has counted."""

    def __init__(self, count: int) -> None:
        self.now = [0.0] * count
        self.barrier = threading.Barrier(count)
        self.values: list[list[float]] = [[] for _ in range(count)]
        self.result: list[float] = []
        self.agreements = 0

    def maximum(self, rank: int) -> Callable[[list[float]], list[float]]:
        def call(values: list[float]) -> list[float]:
            self.values[rank] = values
            if self.barrier.wait(timeout=20) == 0:
                self.agreements += 1
                self.now[:] = [max(self.now)] * len(self.now)
                self.result = [max(column) for column in zip(*self.values, strict=True)]
            self.barrier.wait(timeout=20)
            return self.result

        return call


def run_world(
    seconds: list[float], steps: int, at: Callable[[int, int, Stop], None], minutes: float = 0.0
) -> tuple[World, list[tuple[int, int]], list[list[int]]]:
    """Train up to ``steps`` steps of ``seconds[rank]``; ``at(rank, step, stop)`` is called in each. Returns the world,
    and by rank the code and step with which each ended, and the steps at which it had to save."""
    world = World(len(seconds))
    ended, saves = [(0, steps)] * len(seconds), [[] for _ in seconds]  # type: ignore[var-annotated]

    def process(rank: int) -> None:
        stop = Stop(world.maximum(rank), minutes, clock=lambda: world.now[rank])
        for step in range(steps):
            at(rank, step, stop)
            world.now[rank] += seconds[rank]
            if code := stop.poll():
                ended[rank] = (code, step)
                return
            if stop.save_due:
                saves[rank].append(step)
                stop.saved()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(seconds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return world, ended, saves


@pytest.mark.parametrize("slow", [2.0, 0.4])
def test_processes_with_slow_steps_stop_within_two_steps_of_the_signal(slow: float) -> None:
    def at(rank: int, step: int, stop: Stop) -> None:
        if rank == 1 and step == 30:
            stop.received = 143

    _, ended, _ = run_world([slow, slow / 2], 100, at)
    assert ended[0] == ended[1] and ended[0][0] == 143, "both end after the same step"
    assert (ended[0][1] - 30) * slow <= Stop.EVERY


def test_processes_with_fast_steps_agree_about_once_a_second() -> None:
    world, ended, _ = run_world([0.001, 0.0005], 20_000, lambda rank, step, stop: None)
    assert ended == [(0, 20_000)] * 2
    # 20 seconds; the first ten agreements are after 1, 2, 4... steps.
    assert 20 <= world.agreements <= 20 + 12


def test_a_signal_after_fast_steps_is_agreed_on_within_a_second() -> None:
    def at(rank: int, step: int, stop: Stop) -> None:
        if rank == 0 and step == 5000:
            stop.received = 143

    _, ended, _ = run_world([0.001, 0.001], 20_000, at)
    assert ended[0] == ended[1] and ended[0][1] - 5000 <= 1000 * Stop.EVERY + 1


def test_processes_save_by_the_clock_at_the_same_steps() -> None:
    _, _, saves = run_world([2.0, 1.0], 200, lambda rank, step, stop: None, minutes=1.0)
    assert saves[0] == saves[1] and len(saves[0]) == 200 * 2 // 62, "every minute, and at most a step later"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_asks_to_end_stops_a_run_after_its_step(name: str, tmp_path: Path) -> None:
    """Take SIGUSR1 as Slurm sends it with --signal=USR1@60, and SIGHUP as from a terminal that is closed."""
    code = (
        "import os, signal, sys; from trainers.common import job; stop = job.Stop(); stop.install();"
        f"os.kill(os.getpid(), signal.{name}); sys.exit(stop.poll())"
    )
    # These tests may themselves run under nohup, whose children inherit that SIGHUP is ignored.
    heard = ["env", "--default-signal=HUP", sys.executable, "-c", code]
    done = subprocess.run(heard, cwd=ROOT, check=False)
    assert done.returncode == 128 + signal.Signals[name]
    ignored = subprocess.run(["nohup", sys.executable, "-c", code], cwd=ROOT, check=False,
                             capture_output=True)  # fmt: skip
    assert ignored.returncode == (0 if name == "SIGHUP" else done.returncode)


def test_one_process_stops_after_the_step_and_saves_by_the_clock() -> None:
    now = [0.0]
    stop = Stop(minutes=0.5, clock=lambda: now[0])
    stop.install()
    assert stop.poll() == 0 and not stop.save_due
    now[0] = 31.0
    assert stop.poll() == 0 and stop.save_due
    stop.saved()
    assert stop.poll() == 0 and not stop.save_due
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.poll() == 143


MANY_LINES = """
import sys
from trainers.common import job
def main(_):
    for number in range(9):
        print("line", number, flush=True)
        print("note", number, file=sys.stderr)
    open(sys.argv[1], "w").close()  # saved
    return 0
job.run(main, None, "toy")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("kind", ["full", "pipe", "closed"])
@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_a_log_that_nobody_takes_does_not_end_a_run(kind: str, streams: str, unbuffered: str, tmp_path: Path) -> None:
    """Take none, as with `trainer | head`, a full disk, and a stream that was closed before the start."""
    target = {"full": "/dev/full", "pipe": "/dev/fd/9", "closed": "&-"}[kind]
    to = f">{target}" + (f" 2>{target}" if streams == "both" else "")
    read, write = os.pipe()
    os.close(read)
    script = f"exec 9>&{write}; exec {sys.executable} -c '{MANY_LINES}' {tmp_path}/saved {to}"
    done = subprocess.run(["bash", "-c", script.replace("/dev/fd/9", "&9")], cwd=ROOT, pass_fds=(write,),
                          stderr=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "PYTHONUNBUFFERED": unbuffered})  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "saved").exists(), done.stderr
    if streams == "stdout" and kind != "closed":
        reason = {"full": "No space left on device", "pipe": "Broken pipe"}[kind]
        assert done.stderr.splitlines()[-1] == f"toy: 9 lines of the log were not written ({reason})"


def test_a_user_error_is_one_line_and_a_bug_keeps_its_traceback() -> None:
    def ended(error: str) -> subprocess.CompletedProcess[str]:
        script = f"from trainers.common import files, job\ndef run(args): raise {error}\njob.run(run, None, 'toy')"
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    mistaken = ended("files.UserError('no such thing', 2)")
    assert (mistaken.returncode, mistaken.stderr) == (2, "toy: no such thing\n")
    full = ended("OSError(28, 'No space left on device', '/out/report.json')")
    assert (full.returncode, full.stderr) == (1, "toy: /out/report.json: No space left on device\n")
    broken = ended("ValueError('bug')")
    assert broken.returncode == 1 and broken.stderr.startswith("Traceback") and "ValueError: bug" in broken.stderr
