"""What the loops of the trainers are made of: few modules, signals, checkpoints, the log."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_checkpoints import checkpoints, state
from trainers.common import exits, flags
from trainers.common.log import Log

TRAINERS = Path(flags.__file__).parents[1]
#: Modules of the project that a reader of a trainer has to know, itself included.
MOST_MODULES = {"torch.mnist": 10, "torch.flowers": 16, "torch.imagenet": 18, "torch.gpt": 13}


def module_file(name: str) -> Path | None:
    """The file of module ``name`` of this project, None for packages and names in modules."""
    path = TRAINERS.parent.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def imported(name: str, found: set[str]) -> set[str]:
    """``name`` and the modules of this project that importing it imports."""
    path = module_file(f"trainers.{name}")
    if name not in found and path:
        found.add(name)
        body = ast.parse(path.read_text()).body
        for statement in body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("trainers"):
                package = (statement.module or "").removeprefix("trainers").removeprefix(".")
                for one in (package, *(f"{package}.{alias.name}" for alias in statement.names)):
                    imported(one, found)
    return found


@pytest.mark.parametrize("trainer", MOST_MODULES)
def test_a_trainer_imports_few_modules(trainer: str) -> None:
    found = imported(trainer, set())
    assert len(found) <= MOST_MODULES[trainer], sorted(found)


# --- exits.Stop -----------------------------------------------------------------------------------------------


class World:
    """Processes in lockstep: each is a thread, and time is the number that the slowest has counted."""

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
    seconds: list[float], steps: int, at: Callable[[int, int, exits.Stop], None], minutes: float = 0.0
) -> tuple[World, list[tuple[int, int]], list[list[int]]]:
    """Train up to ``steps`` steps of ``seconds[rank]``; ``at(rank, step, stop)`` is called in each. Returns the world,
    and by rank the code and step with which each ended, and the steps at which it had to save."""
    world = World(len(seconds))
    ended, saves = [(0, steps)] * len(seconds), [[] for _ in seconds]  # type: ignore[var-annotated]

    def process(rank: int) -> None:
        stop = exits.Stop(world.maximum(rank), minutes, clock=lambda: world.now[rank])
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
    def at(rank: int, step: int, stop: exits.Stop) -> None:
        if rank == 1 and step == 30:
            stop.received = exits.PREEMPTED

    _, ended, _ = run_world([slow, slow / 2], 100, at)
    assert ended[0] == ended[1] and ended[0][0] == 143, "both end after the same step"
    assert (ended[0][1] - 30) * slow <= exits.Stop.EVERY


def test_processes_with_fast_steps_agree_about_once_a_second() -> None:
    world, ended, _ = run_world([0.001, 0.0005], 20_000, lambda rank, step, stop: None)
    assert ended == [(0, 20_000)] * 2
    # 20 seconds; the first ten agreements are after 1, 2, 4... steps.
    assert 20 <= world.agreements <= 20 + 12


def test_a_signal_after_fast_steps_is_agreed_on_within_a_second() -> None:
    def at(rank: int, step: int, stop: exits.Stop) -> None:
        if rank == 0 and step == 5000:
            stop.received = exits.PREEMPTED

    _, ended, _ = run_world([0.001, 0.001], 20_000, at)
    assert ended[0] == ended[1] and ended[0][1] - 5000 <= 1000 * exits.Stop.EVERY + 1


def test_processes_save_by_the_clock_at_the_same_steps() -> None:
    _, _, saves = run_world([2.0, 1.0], 200, lambda rank, step, stop: None, minutes=1.0)
    assert saves[0] == saves[1] and len(saves[0]) == 200 * 2 // 62, "every minute, and at most a step later"


def test_one_process_stops_after_the_step_and_saves_by_the_clock() -> None:
    now = [0.0]
    stop = exits.Stop(minutes=0.5, clock=lambda: now[0])
    stop.install()
    try:
        assert stop.poll() == 0 and not stop.save_due
        now[0] = 31.0
        assert stop.poll() == 0 and stop.save_due
        stop.saved()
        assert stop.poll() == 0 and not stop.save_due
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll() == 143
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- checkpoints ----------------------------------------------------------------------------------------------


def test_the_best_checkpoint_outlives_the_newest(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path, 1)
    assert folder.best() is None
    folder.save_best(state(1))
    for step in (1, 2, 3):
        folder.save(state(step), step)
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "step-000000003.ckpt"]
    assert folder.best() == state(1) and folder.newest() == state(3)
    (tmp_path / ".best.ckpt.1.tmp").touch()
    folder.prepare(resume=True)
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "step-000000003.ckpt"]
    (tmp_path / "best.ckpt").write_bytes(b"{")
    with pytest.raises(exits.UserError, match=r"best.ckpt cannot be used .*; move it away to keep"):
        folder.best()


# --- flags ----------------------------------------------------------------------------------------------------


def parse(*words: str, **defaults: Any) -> Any:
    return flags.parse("toy", "", (), list(words), **defaults)


def test_the_default_learning_rate_depends_on_the_optimizer() -> None:
    assert (parse().lr, parse(lr=0.5).lr, parse("--lr=2", lr=0.5).lr) == (0.03, 0.5, 2.0)
    assert parse("--optimizer=adamw", lr=0.5).lr == flags.ADAMW_LR
    assert parse("--optimizer=adamw", lr=0.5, adamw_lr=0.003).lr == 0.003
    assert parse("--optimizer=adamw", "--lr=2").lr == 2.0


@pytest.mark.parametrize("flag", ["--eval-only", "--keep-best"])
def test_flags_about_checkpoints_need_their_folder(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flag)
    assert ended.value.code == 2
    assert f"{flag}: needs --checkpoint-dir" in capsys.readouterr().err


# --- the log --------------------------------------------------------------------------------------------------


class Four:
    label, replicas, processes, chief = "cpu/0", 4, 4, True

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "Learning rate 0.03: --lr is not scaled (see --scale-lr) for 4 devices, 256 images a step"),
        (["--scale-lr"], "Learning rate 0.12: --lr 0.03 times 4 devices, 256 images a step"),
    ],
)
def test_the_log_says_whether_the_learning_rate_is_scaled(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(*words)
    Log("toy", args, Four(), 256, 10).start(args.lr * (4 if args.scale_lr else 1))
    assert capsys.readouterr().out == line + "\n"


def test_saving_does_not_count_as_training(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    log = Log("toy", parse(), Four(), 256, 10)
    log.meter.clock = lambda: now[0]
    log.begin_epoch(1)
    now[0] = 5.0
    with log.paused():
        now[0] = 105.0
    now[0] = 106.0
    log.end_epoch(1)
    with log.paused():
        now[0] = 200.0
    assert log.meter.training_seconds == 6.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, "3000 None", id="neither idle nor shared cores are much slower"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7 None", id="given"),
        pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, "None PASSIVE", id="another policy is given"),
    ],
)
def test_threads_of_openmp_spin_briefly_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    code = "import os, trainers.torch; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(TRAINERS.parent), **given},
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert ended.stdout == f"{expected}\n"
