"""Logs, checkpoints and exit codes of a run, with a replacement for a framework whose model is a single number."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from far_storage import FarStorage
from PIL import Image
from toy_checkpoints import checkpoints, state
from trainers.common import exits, flags, paths
from trainers.common import log as log_module
from trainers.common.log import Log, Meter, Output, train_line
from trainers.common.log import test_line as line_of_test
from trainers.common.run import State

# The expression of https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py
ANALYZER = r"^\| Training (Device=.+) (Epoch=.+) (Step=.+) (Loss=.+) (Rate=.+) (GlobalRate=.+) (Time=.+)"


class OneDevice:
    label, replicas, processes, chief = "cpu/0", 1, 1, True

    def maximum(self, values: list[float]) -> list[float]:
        return values

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        return {"framework": "1"}


def arguments(*words: str) -> argparse.Namespace:
    return flags.parse("toy", "", (), ["--epochs=3", "--batch-size=10", "--log-steps=3", *words])


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["event"] == "summary"
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_lines_are_those_of_pytorch_xla() -> None:
    line = train_line("xla:0/14", 1, 0, 6.875, 258.4712, 258.4712, "02:38:57")
    assert line == "| Training Device=xla:0/14 Epoch=1 Step=0 Loss=6.87500 Rate=258.47 GlobalRate=258.47 Time=02:38:57"
    assert re.match(ANALYZER, line)
    assert line_of_test("xla:0/14", 0, 1, 98.53, "02:40:11") == (
        "| Test Device=xla:0/14 Step=0 Epoch=1 Accuracy=98.53 Time=02:40:11"
    )


def run_log(args: argparse.Namespace, steps: int = 21, state: str = "") -> Log:
    """A log of ``steps`` steps in epochs of 7, whose loss in step n is n; finished after the last one."""
    with Log("toy", args, OneDevice(), 10, 7) as log:
        first = 0
        if state:
            first = json.loads(state)["step"]
            log.load(state, first)
        log.start(0.1, trainer="toy")
        for step in range(first, steps):
            epoch, position = step // 7 + 1, step % 7
            if position == 0 or step == first:
                log.begin_epoch(epoch)
            log.step(epoch, step)
            if position % args.log_steps == 0:
                log.train(epoch, step, float(step), 0.1)
            if position == 6:
                log.end_epoch(epoch)
                assert log.test(epoch, 200, 100 + epoch, 50.0) == 50 + epoch / 2
        log.finish("completed", 0, "sha")
    return log


def test_a_run_writes_log_lines_metrics_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log(arguments(f"--output-dir={tmp_path}"))
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if re.match(ANALYZER, line)]) == 9, "steps 0, 3 and 6 of each epoch"
    assert out[0].startswith("Epoch 1 train begin ") and out[-2] == "Max Accuracy: 51.50%"
    kinds = [event["event"] for event in lines_of(tmp_path / "metrics.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("train"), kinds.count("test")) == ("start", "summary", 9, 3)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] == json.loads(out[-1])
    assert [point[0] for point in report["loss"]] == [1, 4, 7, 8, 11, 14, 15, 18, 21]
    assert report["accuracy"] == [[7, 50.5], [14, 51.0], [21, 51.5]]
    picture = Image.open(tmp_path / "report.png")
    assert picture.size == (960, 300) and len(picture.getcolors() or ()) > 4, "axes and two coloured curves"


@pytest.mark.parametrize("stop", [3, 7, 10, 20])
def test_the_log_of_a_resumed_run_continues_that_of_the_first(
    stop: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_log(arguments())
    first = run_log(arguments(), stop)
    capsys.readouterr()
    resumed = run_log(arguments(), state=json.dumps({**json.loads(first.state()), "step": stop}))
    assert (resumed.tests, resumed.curve) == (whole.tests, whole.curve)
    assert summary(capsys)["resumed_from"] == stop


def test_a_user_error_ends_the_log_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    for error, status, code in (
        (exits.UserError("stopped", exits.PREEMPTED), "preempted", 143),
        (exits.UserError("no data", exits.USAGE), "failed", 2),
    ):
        with pytest.raises(exits.UserError), Log("toy", arguments(), OneDevice(), 10, 7):
            raise error
        found = summary(capsys)
        assert (found["status"], found["exit_code"], found["error"]) == (status, code, str(error))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(exits.Diverged, match="not finite by step 10: lower --lr") as raised,
        Log("toy", arguments(), OneDevice(), 10, 7) as log,
    ):
        log.step(2, 9)
        log.train(2, 9, loss, 0.1)
    assert raised.value.code == 22
    assert summary(capsys)["status"] == "diverged"


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


def test_the_newest_checkpoints_are_kept_and_a_damaged_one_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints(tmp_path, 2)
    for step in (1, 2, 30):
        folder.save(state(step), step)
    assert folder.steps() == [2, 30]
    Path(folder.path(30)).write_bytes(b'{"n":')
    (tmp_path / ".step-000000031.ckpt.1.tmp").touch()
    folder.prepare(resume=True)
    assert folder.newest() == state(2)
    assert "step-000000030.ckpt cannot be used (" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["step-000000002.ckpt", "step-000000030.ckpt"]
    Path(folder.path(2)).write_bytes(b"")
    with pytest.raises(exits.UserError, match=r"none of its 2 checkpoints can be used; use another --checkpoint-dir$"):
        folder.newest()


def test_a_full_disk_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path, 2)
    folder.save(state(1), 1)

    def full(content: State, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    folder.write = full
    with pytest.raises(exits.UserError, match=r"No space left on device.*the checkpoint of step 1 is intact"):
        folder.save(state(2), 2)
    assert os.listdir(tmp_path) == ["step-000000001.ckpt"] and folder.newest() == state(1)


def test_an_atomic_file_does_not_appear_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), paths.atomic_file(str(tmp_path / "x")) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_hypertune_writes_the_format_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "7")
    tuner = log_module.HyperTune()
    for step in range(1, 103):
        tuner.report_hyperparameter_tuning_metric("", 0.9, step)
    lines = path.read_text().splitlines()
    assert len(lines) == 100, "the last 100 reports"
    report = (
        r'\{"checkpoint_path": "", "global_step": "3", "timestamp": (\d+\.\d+),'
        r' "training/hptuning/metric": "0\.9", "trial": "7"\}'
    )
    found = re.fullmatch(report, lines[0])
    assert found and abs(float(found[1]) - time.time()) < 600


def test_a_resumed_trial_reports_the_tests_before_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tuning service reads a file that is new in each container."""

    def values(name: str) -> list[tuple[str, str]]:
        reports = lines_of(tmp_path / name)
        return [(report["global_step"], report["training/hptuning/metric"]) for report in reports]

    saved = ""
    for name, steps in (("whole", 21), ("first", 16), ("resumed", 21)):
        monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(tmp_path / name))
        log = run_log(arguments(), steps, saved if name == "resumed" else "")
        saved = json.dumps({**json.loads(log.state()), "step": 16})
    assert values("first") == values("whole")[:2]
    assert values("resumed") == values("whole") and len(values("whole")) == 3


@pytest.mark.parametrize(("step", "epochs"), [(7, 1), (10, 1), (14, 2)])
def test_testing_a_checkpoint_counts_its_complete_epochs(
    step: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the best epoch contains its test, one within an epoch does not."""
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(tmp_path / "metrics"))
    before = run_log(arguments(), step)
    with Log("toy", arguments("--eval-only", f"--checkpoint-dir={tmp_path}"), OneDevice(), 10, 7) as log:
        log.load(before.state(), step)
        log.start(0.1, trainer="toy")
        log.test(step // 7, 200, 150, 50.0)
        log.finish("completed", 0, "sha")
    assert summary(capsys)["epochs"] == epochs
    assert [test["step"] for test in log.tests] == sorted({7, step} | set(range(7, step, 7)))
    assert len(lines_of(tmp_path / "metrics")) == len(log.tests)


def test_hypertune_reports_only_in_a_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLOUD_ML_TRIAL_ID", "CLOUD_ML_HP_METRIC_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert log_module.reporter("") is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", "bare-name")
    tuner = log_module.reporter("")
    assert tuner
    tuner.report_hyperparameter_tuning_metric("accuracy", float("nan"), 1)
    assert json.loads((tmp_path / "bare-name").read_text())["accuracy"] == "nan"


def test_only_the_chief_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Output(False, str(tmp_path / "m"), str(tmp_path))
    log.say("x")
    log.event("x")
    log.close()
    assert capsys.readouterr().out == "" and not os.listdir(tmp_path)


def test_a_user_error_is_one_line_and_a_bug_keeps_its_traceback() -> None:
    def ended(error: str) -> subprocess.CompletedProcess[str]:
        script = f"from trainers.common import exits\ndef run(args): raise {error}\nexits.guard(run, None, 'toy')"
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=Path(exits.__file__).parents[2], capture_output=True, text=True, check=False)

    mistaken = ended("exits.UserError('no such thing', 2)")
    assert (mistaken.returncode, mistaken.stderr) == (2, "toy: no such thing\n")
    full = ended("OSError(28, 'No space left on device', '/out/report.json')")
    assert (full.returncode, full.stderr) == (1, "toy: /out/report.json: No space left on device\n")
    broken = ended("ValueError('bug')")
    assert broken.returncode == 1 and broken.stderr.startswith("Traceback") and "ValueError: bug" in broken.stderr


def test_growing_files_are_copied_to_a_bucket_every_minute_and_at_the_end(
    tmp_path: Path, mount: Callable[[Path], FarStorage], capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects cannot be appended to."""
    far = tmp_path / "far"
    far.mkdir()
    (far / "m").write_text("first\n")
    mount(tmp_path)
    mirror = paths.Mirror("gs://far")
    mirror.fetch("m")
    with open(Path(mirror.local, "m"), "a") as file:
        file.write("second\n")
    mirror.keep_up()
    assert (far / "m").read_text() == "first\n", "not every time"
    mirror.every = 0.0
    far.rename(tmp_path / "gone")
    far.touch()
    mirror.keep_up()
    said = capsys.readouterr().err
    assert "gs://far/m: cannot be reached" in said and "trying again in a minute" in said
    far.unlink()
    (tmp_path / "gone").rename(far)
    mirror.keep_up()
    assert (far / "m").read_text() == "first\nsecond\n"
    Path(mirror.local, "late").write_text("x")
    mirror.close()
    assert (far / "late").exists() and not Path(mirror.local).exists()
