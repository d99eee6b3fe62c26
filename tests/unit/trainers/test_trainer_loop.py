"""What the loops of the trainers are made of: few modules, signals, checkpoints, the log."""

from __future__ import annotations

import ast
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_checkpoints import checkpoints, read, state, write
from trainers.common import exits, files, flags
from trainers.common.log import Log
from trainers.common.run import Run, Test, Tracer

TRAINERS = Path(flags.__file__).parents[1]
MAINS = [str(path.relative_to(TRAINERS)) for path in TRAINERS.glob("*/[a-z]*.py")
         if path.parent.name != "common" and "Job(" not in path.read_text()]  # fmt: skip


@pytest.mark.parametrize("trainer", MAINS)
def test_the_main_of_a_trainer_is_short(trainer: str) -> None:
    body = ast.parse((TRAINERS / trainer).read_text()).body
    (main,) = [part for part in body if isinstance(part, ast.FunctionDef) and part.name == "main"]
    assert (main.end_lineno or 0) - main.lineno < 80


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_asks_to_end_stops_a_run_after_its_step(name: str, tmp_path: Path) -> None:
    """SIGUSR1 is what Slurm sends with --signal=USR1@60; SIGHUP is that of a terminal which is closed."""
    code = (
        "import os, signal, sys; from trainers.common import exits; stop = exits.Stop(); stop.install();"
        f"os.kill(os.getpid(), signal.{name}); sys.exit(stop.poll())"
    )
    # These tests may themselves run under nohup, whose children inherit that SIGHUP is ignored.
    heard = ["env", "--default-signal=HUP", sys.executable, "-c", code]
    done = subprocess.run(heard, cwd=TRAINERS.parent, check=False)
    assert done.returncode == 128 + signal.Signals[name]
    ignored = subprocess.run(["nohup", sys.executable, "-c", code], cwd=TRAINERS.parent, check=False,
                             capture_output=True)  # fmt: skip
    assert ignored.returncode == (0 if name == "SIGHUP" else done.returncode)


MANY_LINES = """
import sys
from trainers.common import exits
def main(_):
    for number in range(9):
        print("line", number, flush=True)
        print("note", number, file=sys.stderr)
    open(sys.argv[1], "w").close()  # saved
    return 0
exits.guard(main, None, "toy")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("kind", ["full", "pipe", "closed"])
@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_a_log_that_nobody_takes_does_not_end_a_run(kind: str, streams: str, unbuffered: str, tmp_path: Path) -> None:
    """As `trainer | head`, a full disk, and a stream that was closed before the start."""
    target = {"full": "/dev/full", "pipe": "/dev/fd/9", "closed": "&-"}[kind]
    to = f">{target}" + (f" 2>{target}" if streams == "both" else "")
    read, write = os.pipe()
    os.close(read)
    script = f"exec 9>&{write}; exec {sys.executable} -c '{MANY_LINES}' {tmp_path}/saved {to}"
    done = subprocess.run(["bash", "-c", script.replace("/dev/fd/9", "&9")], cwd=TRAINERS.parent, pass_fds=(write,),
                          stderr=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "PYTHONUNBUFFERED": unbuffered})  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "saved").exists(), done.stderr
    if streams == "stdout" and kind != "closed":
        reason = {"full": "No space left on device", "pipe": "Broken pipe"}[kind]
        assert done.stderr.splitlines()[-1] == f"toy: 9 lines of the log were not written ({reason})"


def test_metrics_that_cannot_be_written_do_not_end_a_run(tmp_path: Path) -> None:
    run, _, _ = train(f"--checkpoint-dir={tmp_path}", "--metrics-file=/dev/full")
    assert run.code == 0 and checkpoints(tmp_path, 9).steps() == [7, 14, 21]


def test_a_run_holds_the_folders_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT", 0.1)
    c, out = tmp_path / "c", tmp_path / "out"
    train(f"--checkpoint-dir={c}", "--num-steps=7")
    before = sorted(os.listdir(c))
    for held, words in ((c, (f"--checkpoint-dir={c}/../c", "--no-resume")), (out, (f"--output-dir={out}",))):
        other = files.Lease(str(held))
        with pytest.raises(exits.UserError, match="another run has it"):
            train(*words)
        if held == c:
            train(f"--checkpoint-dir={c}", "--eval-only")  # which only reads them
        other.release()
    assert sorted(os.listdir(c)) == before and not list(out.iterdir())
    train(f"--checkpoint-dir={c}", f"--output-dir={c}")  # one folder for both
    assert ".lease" not in os.listdir(c)


def test_one_process_stops_after_the_step_and_saves_by_the_clock() -> None:
    now = [0.0]
    stop = exits.Stop(minutes=0.5, clock=lambda: now[0])
    stop.install()
    assert stop.poll() == 0 and not stop.save_due
    now[0] = 31.0
    assert stop.poll() == 0 and stop.save_due
    stop.saved()
    assert stop.poll() == 0 and not stop.save_due
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.poll() == 143


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


# --- Run ------------------------------------------------------------------------------------------------------


class Four:
    label, replicas, processes, chief = "cpu/0", 4, 4, True

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        return {}


class Number:
    """A model that is a number."""

    value = 0.0


class Toy(Four):
    """The device of a run whose model is a :class:`Number`; its processes are this one."""

    replicas, processes, precision = 1, 1, "fp32"
    write, read = staticmethod(write), staticmethod(read)

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def end_step(self) -> None: ...
    def profile(self, folder: str) -> Callable[[], None]:
        return lambda: None

    def maximum(self, values: list[float]) -> list[float]:
        return values

    def seed_step(self, step: int) -> None:
        self.seeds.append(step)

    def mean(self, loss: float) -> float:
        return loss

    def agreed_state(self, read: Callable[[], Any]) -> Any:
        return read()

    def state(self, parts: dict[str, Number]) -> dict[str, Any]:
        return {name: part.value for name, part in parts.items()}

    def load(self, parts: dict[str, Number], state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.value = state[name]

    def not_finite(self, state: dict[str, Any]) -> str:
        return "" if math.isfinite(state["model"]) else "model"

    def digest(self, model: Number) -> str:
        return str(model.value)


def train(
    *words: str, loss: float = 1.0, most: int = 1, test_of_export: Test | None = None
) -> tuple[Run, list[tuple[int, int]], list[str]]:
    """Three epochs of seven steps, each of which adds its number to the model, ``most`` at a time. Returns the run, the
    steps that it trained (epoch, step) and the digests of exported models; 50 + epoch % of the test are right."""
    args = parse("--epochs=3", "--batch-size=10", *words)
    device, model, trained, exported = Toy(), Number(), [], []

    def export(folder: str) -> list[str]:
        exported.append(device.digest(run.tested))
        return ["model"]

    def test(poll: Callable[[], None]) -> tuple[float, float]:
        poll()
        return 50.0 + run.epoch, 1.0

    with Run("toy", args, device, global_batch=10, train_count=75, test_count=100, data={}, model=model) as run:
        for epoch in run.epochs(test):
            batches = (step for step in range(run.step_in_epoch, 7))
            for step, batch in run.steps(batches):
                assert most > 1 or batch == step - 7 * (epoch - 1), "a resumed run goes on with the next batch"
                count = min(most, run.due)
                trained += [(epoch, number) for number in range(step, step + count)]
                model.value += sum(range(step, step + count))
                run.end_step(loss, 0.1, count)
        run.finish(export, test_of_export)
    assert most > 1 or device.seeds == [step for _, step in trained]
    return run, trained, exported


def summary_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


@pytest.mark.parametrize("stop", [1, 7, 10, 14])
def test_a_run_that_was_stopped_is_resumed(stop: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole, _ = train()
    expected = summary_of(capsys)
    assert whole == [(step // 7 + 1, step) for step in range(21)] and expected["status"] == "completed"
    kept = (f"--checkpoint-dir={tmp_path / 'c'}", f"--export-dir={tmp_path / 'e'}")
    _, first, exported = train(*kept, f"--num-steps={stop}")
    assert (summary_of(capsys)["status"], exported, len(first)) == ("stopped", [], stop)
    _, second, exported = train(*kept)
    resumed = summary_of(capsys)
    assert first + second == whole and exported == [resumed["weights_sha256"]] == ["210.0"]
    assert {name: resumed[name] for name in ("accuracy", "test_loss", "epochs", "global_step", "weights_sha256")} == {
        name: expected[name] for name in ("accuracy", "test_loss", "epochs", "global_step", "weights_sha256")
    }


def test_a_run_saves_as_often_as_it_is_told(tmp_path: Path) -> None:
    kept = (f"--checkpoint-dir={tmp_path}", "--keep-checkpoints=9")
    train(*kept)
    assert checkpoints(tmp_path, 9).steps() == [7, 14, 21], "after each epoch"
    train(*kept, "--no-resume", "--checkpoint-steps=8")
    assert checkpoints(tmp_path, 9).steps() == [8, 16, 21], "and after the last step"


def test_steps_that_are_taken_as_one_are_logged_saved_and_stopped_like_single_steps(tmp_path: Path) -> None:
    found = []
    for most in (1, 2, 9):
        folder = tmp_path / str(most)
        words = (f"--checkpoint-dir={folder}", "--keep-checkpoints=99", "--log-steps=3", "--checkpoint-steps=4",
                 f"--metrics-file={folder}.jsonl")  # fmt: skip
        _, first, _ = train(*words, "--num-steps=10", most=most)
        _, second, _ = train(*words, most=most)
        events = [json.loads(line) for line in Path(f"{folder}.jsonl").read_text().splitlines()]
        logged = [(event["event"], event["global_step"]) for event in events if "global_step" in event]
        saved = checkpoints(folder, 99).steps()
        found.append((len(first), first + second, saved, logged, events[-1]["weights_sha256"]))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == 10 and found[0][2] == [4, 8, 10, 12, 16, 20, 21]
    assert [step for kind, step in found[0][3] if kind == "train"] == [1, 4, 7, 8, 11, 14, 15, 18, 21]


@pytest.mark.parametrize(("counts", "traced"), [([1] * 9, [2, 5]), ([1, 2, 4, 1], [3, 7]), ([4, 1, 1, 1], [4, 7])])
def test_steps_are_traced_after_the_first_two(counts: list[int], traced: list[int], tmp_path: Path) -> None:
    """Also of a resumed run, and at least as many as ``--profile`` says."""
    done, steps, said = 0, [], []

    def profile(folder: str) -> Callable[[], None]:
        steps.append(done)
        return lambda: steps.append(done)

    tracer = Tracer(parse("--profile=3", f"--output-dir={tmp_path}"), profile, said.append)
    for count in counts:
        tracer.step(100 + done)
        done += count
    tracer.close()
    assert steps == traced and said == [f"Trace written to {tmp_path}"]


def test_a_model_that_is_exported_in_another_precision_is_tested_in_that_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = []

    def test_of_export(poll: Callable[[], None]) -> tuple[float, float]:
        poll()
        tested.append("fp32")
        return 47.218, 1.0

    kept, exports = f"--checkpoint-dir={tmp_path / 'c'}", f"--export-dir={tmp_path / 'e'}"
    train(kept, exports, "--num-steps=17", test_of_export=test_of_export)
    train(kept, test_of_export=test_of_export)
    assert not tested and "exported_accuracy" not in capsys.readouterr().out, "nothing is exported"
    train(kept, exports, "--eval-only", test_of_export=test_of_export)
    *lines, summary = capsys.readouterr().out.splitlines()
    assert "Exported model: test accuracy 47.22 % in fp32" in lines and tested == ["fp32"]
    assert (json.loads(summary)["accuracy"], json.loads(summary)["exported_accuracy"]) == (53, 47.218)


def test_only_testing_takes_the_newest_or_the_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (f"--checkpoint-dir={tmp_path}", "--keep-best")
    train(*kept, "--num-steps=17")
    capsys.readouterr()
    for words, step, epochs in ((kept, 14, 2), (kept[:1], 17, 2)):
        _, trained, _ = train(*words, "--eval-only")
        summary = summary_of(capsys)
        assert (trained, summary["global_step"], summary["epochs"]) == ([], step, epochs)
    with pytest.raises(exits.UserError, match="has no checkpoint"):
        train(f"--checkpoint-dir={tmp_path / 'none'}", "--eval-only")


@pytest.mark.parametrize(("target", "status", "code", "steps"), [(52, "reached", 0, 14), (90, "missed", 21, 21)])
def test_a_run_ends_when_its_accuracy_is_reached(
    target: int, status: str, code: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trained, _ = train(f"--target-accuracy={target}")
    assert (run.code, len(trained), summary_of(capsys)["status"]) == (code, steps, status)


def test_a_run_that_diverges_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(exits.Diverged, match="the loss is not finite by step"):
        train(f"--checkpoint-dir={tmp_path}", loss=math.nan)
    assert os.listdir(tmp_path) == []


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
    ("given", "faults"), [({}, False), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, True)], ids=["default", "user's"]
)
def test_memory_of_a_step_is_kept_for_the_next_unless_the_user_says_otherwise(
    given: dict[str, str], faults: bool
) -> None:
    """100 MB in blocks of 1 MB, allocated and freed by turns, as activations are; a page has 4 KB."""
    code = """
import ctypes, resource
import trainers.torch
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(1 << 20) for _ in range(100)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(TRAINERS.parent), **given},
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert (int(ended.stdout) > 10_000) == faults, ended.stdout


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
