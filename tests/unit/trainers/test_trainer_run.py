"""Logs, checkpoints and exit codes of a run, with a replacement for a framework whose model is a single number."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image
from trainers.common import events, exits, flags, hypertune, paths
from trainers.common.checkpoints import Checkpoints, State
from trainers.common.meter import Meter
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine

# The expression of https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py
ANALYZER = r"^\| Training (Device=.+) (Epoch=.+) (Step=.+) (Loss=.+) (Rate=.+) (GlobalRate=.+) (Time=.+)"


class OneDevice:
    label, replicas, processes, chief = "cpu/0", 1, 1, True

    def agree(self, code: int) -> int:
        return code

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        return read()

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        return {"framework": "1"}

    def profile(self, folder: str) -> Callable[[], None]:
        return lambda: Path(folder, "trace.json").touch() or None


def write(state: State, file: IO[bytes]) -> None:
    file.write(json.dumps(state).encode())


def read(file: IO[bytes]) -> State:
    state: State = json.load(file)
    return state


def arguments(*words: str) -> argparse.Namespace:
    return flags.parse("toy", "", (), ["--epochs=3", "--batch-size=10", "--log-steps=3", *words])


def train(
    *words: str, images: int = 70, at: Callable[[Run], None] = lambda run: None, loss: Callable[[int], float] = float
) -> tuple[int, Run, list[tuple[int, int]]]:
    """Run the toy: its weight becomes ``weight * 31 + epoch * step`` in each of 7 steps an epoch."""
    args = arguments(*words)
    weight, done = 1, []
    with Run("toy", args, OneDevice(), images) as run:
        if state := run.restore(Checkpoints(args.checkpoint_dir, args.keep_checkpoints, write, read),
                                lambda: {"weight": weight}):  # fmt: skip
            weight = state["weight"]
        for epoch in run.epochs():
            for step in run.steps():
                weight = (weight * 31 + epoch * step) % 1_000_003
                done.append((epoch, step))
                value = loss(run.global_step + 1)
                run.log(step, lambda value=value: value, 0.1)  # type: ignore[misc]
                at(run)
            if not run.ended:
                run.tested(weight % 100, 100, 1.0)
        return run.finish(str(weight)), run, done


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["event"] == "summary"
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_lines_are_those_of_pytorch_xla() -> None:
    line = events.train_line("xla:0/14", 1, 0, 6.875, 258.4712, 258.4712, "02:38:57")
    assert line == "| Training Device=xla:0/14 Epoch=1 Step=0 Loss=6.87500 Rate=258.47 GlobalRate=258.47 Time=02:38:57"
    assert re.match(ANALYZER, line)
    assert events.test_line("xla:0/14", 0, 1, 98.53, "02:40:11") == (
        "| Test Device=xla:0/14 Step=0 Epoch=1 Accuracy=98.53 Time=02:40:11"
    )


def test_a_run_writes_log_lines_metrics_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, done = train(f"--output-dir={tmp_path}")
    out = capsys.readouterr().out.splitlines()
    assert code == 0 and len(done) == 21
    assert len([line for line in out if re.match(ANALYZER, line)]) == 9, "steps 0, 3 and 6 of each epoch"
    assert out[0].startswith("Epoch 1 train begin ") and "Max Accuracy: " in out[-2]
    kinds = [event["event"] for event in lines_of(tmp_path / "metrics.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("train"), kinds.count("test")) == ("start", "summary", 9, 3)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] == json.loads(out[-1])
    assert len(report["loss"]) == 9 and len(report["accuracy"]) == 3
    picture = Image.open(tmp_path / "report.png")
    assert picture.size == (960, 300) and len(picture.getcolors() or ()) > 4, "axes and two coloured curves"


def test_rate_is_smoothed_as_in_pytorch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    meter = Meter(clock=lambda: now[0])
    meter.add(100)
    now[0] += 1
    assert meter.read() == (100.0, 100.0)
    meter.add(300)
    now[0] += 1
    rate, global_rate = meter.read()
    assert rate == (1 - 0.4) * 300 + 0.4 * 100 and global_rate == 200, "the same float64 operations: the same bits"
    monkeypatch.setenv("RATE_TRACKER_SMOOTHING", "0.9")
    assert Meter().smoothing == 0.9


@pytest.mark.parametrize("stop", range(1, 21))
def test_a_run_stopped_at_any_step_and_resumed_has_the_same_result(
    stop: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    whole = summary(capsys)
    folder = f"--checkpoint-dir={tmp_path}"
    code, run, first = train(folder, f"--num-steps={stop}")
    assert (code, run.ended) == (0, "stopped")
    assert summary(capsys)["global_step"] == stop
    _, run, rest = train(folder)
    resumed = summary(capsys)
    assert resumed["resumed_from"] == stop
    assert first + rest == [(epoch, step) for epoch in (1, 2, 3) for step in range(7)]
    for name in ("weights_sha256", "accuracy", "max_accuracy", "epochs", "global_step", "loss_last"):
        assert resumed[name] == whole[name], name
    assert [point[0] for point in run.curve] == [1, 4, 7, 8, 11, 14, 15, 18, 21]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    number: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(run: Run) -> None:
        if run.global_step == 9:
            os.kill(os.getpid(), number)

    assert train(f"--checkpoint-dir={tmp_path}", at=at)[0] == code
    out = capsys.readouterr().out.splitlines()
    assert "Ended after step 10 (preempted); step 10 is saved, run again to resume" in out
    assert (tmp_path / "step-000000010.ckpt").exists()
    assert json.loads(out[-1])["exit_code"] == code
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_after_a_signal_during_the_test_the_test_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(f"--checkpoint-dir={tmp_path}")
    stopped = pytest.raises(exits.UserError, match="stopped while testing epoch 1; step 7 is saved")
    with stopped as raised, Run("toy", args, OneDevice(), 70) as run:
        run.restore(Checkpoints(str(tmp_path), 3, write, read), lambda: {"weight": 5})
        for _ in run.epochs():
            assert len(list(run.steps())) == 7
            for batch in run.testing(range(10)):
                if batch == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.code == 143
    assert summary(capsys)["status"] == "preempted"
    _, run, done = train(f"--checkpoint-dir={tmp_path}")
    assert done[0] == (2, 0) and len(run.tests) == 3, "the interrupted test is repeated"


def test_nan_ends_the_run_and_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(exits.Diverged, match="not finite by step 10") as raised:
        train(f"--checkpoint-dir={tmp_path}", "--checkpoint-steps=2", "--log-steps=100",
              loss=lambda step: math.nan if step > 8 else 1.0)  # fmt: skip
    assert raised.value.code == 22
    assert summary(capsys)["status"] == "diverged"
    assert max(Checkpoints(str(tmp_path), 3, write, read).steps()) == 8


def test_the_target_accuracy_ends_the_run_early_and_missing_it_has_an_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accuracies = [test["accuracy"] for test in train()[1].tests]
    code, run, _ = train(f"--target-accuracy={accuracies[0]}")
    assert (code, run.ended, len(run.tests)) == (0, "reached", 1)
    code, run, _ = train("--target-accuracy=99.9")
    assert (code, run.ended, len(run.tests)) == (21, "missed", 3)


def test_resuming_with_another_batch_size_or_seed_is_an_error(tmp_path: Path) -> None:
    train(f"--checkpoint-dir={tmp_path}", "--num-steps=3")
    for change in ("--batch-size=5", "--seed=1"):
        with pytest.raises(exits.UserError, match="another --checkpoint-dir, or --no-resume") as raised:
            train(f"--checkpoint-dir={tmp_path}", change)
        assert raised.value.code == 2
    assert train(f"--checkpoint-dir={tmp_path}", "--seed=1", "--no-resume")[0] == 0


def test_chunks_end_at_logged_steps_and_at_the_end() -> None:
    args = arguments("--log-steps=4", "--num-steps=9")
    with Run("toy", args, OneDevice(), 200) as run:
        run.restore(Checkpoints("", 1, write, read), dict)
        assert list(run.chunks(32)) == [(0, 1), (1, 4), (5, 4)]


def test_the_newest_checkpoints_are_kept_and_a_damaged_one_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Checkpoints(str(tmp_path), 2, write, read)
    for step in (1, 2, 30):
        folder.save({"n": step}, step)
    assert folder.steps() == [2, 30]
    Path(folder.path(30)).write_bytes(b'{"n":')
    (tmp_path / ".step-000000031.ckpt.1.tmp").touch()
    folder.prepare()
    assert folder.newest() == {"n": 2}
    assert "step-000000030.ckpt is damaged" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["step-000000002.ckpt", "step-000000030.ckpt"]
    Path(folder.path(2)).write_bytes(b"")
    with pytest.raises(exits.UserError, match="none of its 2 checkpoints can be read"):
        folder.newest()


def test_a_full_disk_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    folder = Checkpoints(str(tmp_path), 2, write, read)
    folder.save({"n": 1}, 1)

    def full(state: State, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    folder.write = full
    with pytest.raises(exits.UserError, match=r"No space left on device.*the checkpoint of step 1 is intact"):
        folder.save({"n": 2}, 2)
    assert os.listdir(tmp_path) == ["step-000000001.ckpt"] and folder.newest() == {"n": 1}


def test_an_atomic_file_does_not_appear_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), paths.atomic_file(str(tmp_path / "x")) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_hypertune_writes_the_format_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "7")
    monkeypatch.setattr(hypertune.time, "time", lambda: 1795203834.35)
    tuner = hypertune.HyperTune()
    for step in range(1, 103):
        tuner.report_hyperparameter_tuning_metric("", 0.9, step)
    lines = path.read_text().splitlines()
    assert len(lines) == 100, "the last 100 reports"
    assert lines[0] == (
        '{"checkpoint_path": "", "global_step": "3", "timestamp": 1795203834.35,'
        ' "training/hptuning/metric": "0.9", "trial": "7"}'
    )


def test_hypertune_reports_only_in_a_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLOUD_ML_TRIAL_ID", "CLOUD_ML_HP_METRIC_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert hypertune.reporter("") is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", "bare-name")
    tuner = hypertune.reporter("")
    assert tuner
    tuner.report_hyperparameter_tuning_metric("accuracy", float("nan"), 1)
    assert json.loads((tmp_path / "bare-name").read_text())["accuracy"] == "nan"


def test_profile_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--profile=2", f"--output-dir={tmp_path}")
    assert (tmp_path / "trace.json").exists()
    assert f"Trace written to {tmp_path}" in capsys.readouterr().out


def test_only_the_chief_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = events.Log(False, str(tmp_path / "m"), str(tmp_path))
    log.say("x")
    log.event("x")
    log.close()
    assert capsys.readouterr().out == "" and not os.listdir(tmp_path)


def test_the_learning_rate_rises_then_falls_and_is_never_zero() -> None:
    rates = [warmup_cosine(step, 100, 0.5) for step in range(100)]
    # The highest rate is half of one of 80 steps after the peak of the cosine, and 1 - cos(x) < x**2 / 2.
    assert min(rates) > 0 and 0.5 * (1 - (math.pi / 160) ** 2 / 4) < max(rates) < 0.5
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert warmup_cosine(100, 100, 0.5) == rates[-1], "a run continued past its end keeps the last rate"


def test_a_user_error_is_one_line_and_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(exits, "leave", ended.append)

    def mistaken(args: object) -> int:
        raise exits.UserError("no such thing", 2)

    def full(args: object) -> int:
        raise OSError(28, "No space left on device", "/out/report.json")

    def broken(args: object) -> int:
        raise ValueError("bug")

    exits.guard(mistaken, None, "toy")
    exits.guard(full, None, "toy")
    assert ended == [2, 1]
    assert capsys.readouterr().err == "toy: no such thing\ntoy: /out/report.json: No space left on device\n"
    with pytest.raises(ValueError, match="bug"):
        exits.guard(broken, None, "toy")


def test_growing_files_are_copied_to_a_bucket_every_minute_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects cannot be appended to. The bucket is a folder here, accessed through the same functions."""
    far, now, broken = tmp_path / "far", [100.0], [False]
    far.mkdir()
    (far / "m").write_text("first\n")

    def place(path: str) -> str:
        if broken[0]:
            raise exits.UserError(f"{path}: cannot be reached")
        return path.replace("gs://far", str(far))

    written = paths.atomic_file
    monkeypatch.setattr(paths, "names", lambda path: sorted(os.listdir(place(path))))
    monkeypatch.setattr(paths, "open_file", lambda path: io.BytesIO(Path(place(path)).read_bytes()))
    monkeypatch.setattr(paths, "atomic_file", lambda path: written(place(path)))
    monkeypatch.setattr(paths.time, "monotonic", lambda: now[0])
    mirror = paths.Mirror("gs://far")
    mirror.fetch("m")
    with open(Path(mirror.local, "m"), "a") as file:
        file.write("second\n")
    mirror.keep_up()
    assert (far / "m").read_text() == "first\n", "not every time"
    now[0], broken[0] = 161.0, True
    mirror.keep_up()
    assert "cannot be reached; trying again in a minute" in capsys.readouterr().err
    now[0], broken[0] = 222.0, False
    mirror.keep_up()
    assert (far / "m").read_text() == "first\nsecond\n"
    Path(mirror.local, "late").write_text("x")
    mirror.close()
    assert (far / "late").exists() and not Path(mirror.local).exists()
