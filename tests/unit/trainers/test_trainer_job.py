"""Test what a job saves, where it resumes, how it ends, and what it says, with a model that is a number."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from far_storage import FarStorage
from trainers.common import files
from trainers.common.arguments import Parser, classification
from trainers.common.files import UserError
from trainers.common.job import Diverged, Job


class Toy:
    """Be the one process of a run, with its model."""

    rank, size, label = 0, 1, "cpu/0"
    value, others = 0.0, 0.0

    def maximum(self, values: list[float]) -> list[float]:
        return [max(value, self.others) for value in values]

    def gather(self, content: Any) -> list[Any]:
        return [content]

    def broadcast(self, content: Any) -> Any:
        return content

    def wait(self) -> None: ...

    def not_finite(self, model: Any) -> str:
        return "" if math.isfinite(self.value) else "w"

    def digest(self, model: Any) -> str:
        return str(self.value)

    def profile(self, folder: str) -> Callable[[], None]:
        return lambda: None

    def versions(self) -> dict[str, str]:
        return {}

    def save(self, folder: str) -> Any:
        with files.open_file(files.join(folder, "value"), "wb") as file:
            file.write(str(self.value).encode())

    def load(self, folder: str) -> None:
        with files.open_file(files.join(folder, "value")) as file:
            self.value = float(file.read())


def train(
    *words: str, loss: float = 1.0, about: dict[str, Any] | None = None, at: Callable[[int, Job], object] | None = None,
    accuracy: Callable[[int], float] = lambda step: 50.0 + step, save: Callable[[Toy, str], Any] = Toy.save,
    test_loss: Callable[[int], float] = lambda step: 0.5, toy: Toy | None = None,
) -> tuple[int, list[int], list[float]]:  # fmt: skip
    """Train 21 steps, each of which adds its number to the model, and test after each seventh; returns the exit status,
    the steps that were trained, and the values of exported models. ``at`` is called in each step."""
    args = classification(Parser("toy", ""), words, sgd=0.03, adamw=0.003)
    toy, trained, exported = toy or Toy(), [], []

    def export(folder: str) -> list[str]:
        exported.append(toy.value)
        return ["model"]

    def write(folder: str) -> Any:
        return save(toy, folder)

    about = about or {"global_batch": 10}
    with Job("toy", args, toy, about, total=21, every=7, count=10) as job:
        step = job.resume(toy.load)
        if job.due("test", step):
            job.log(step, accuracy=accuracy(step), test_loss=test_loss(step))
        while not job.stop(step):
            if at:
                at(step, job)
            toy.value += step
            trained.append(step)
            step += 1
            if job.due("log", step):
                job.log(step, loss=loss, lr=0.1)
            if job.due("test", step):
                job.log(step, **({} if job.stop() else {"accuracy": accuracy(step), "test_loss": test_loss(step)}))
            if job.due("save", step):
                job.save(step, write)
        return job.finish(step, write, export), trained, exported


def summary_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def kept(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/run.json"))


@pytest.fixture(params=["local", "far"])
def place(request: pytest.FixtureRequest, tmp_path: Path, mount: Callable[[Path], FarStorage]) -> str:
    """Give a checkpoint folder at ``tmp_path / "run"``, local or on remote storage."""
    if request.param == "local":
        return str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    mount(tmp_path)
    return "far://run"


@pytest.mark.parametrize("stop", [1, 7, 10, 14])
def test_a_run_that_was_stopped_is_resumed(stop: int, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    train()
    whole = summary_of(capsys)
    assert (whole["status"], whole["weights_sha256"]) == ("completed", "210.0")
    words = (f"--checkpoint-dir={place}", "--export-dir=/tmp")
    assert train(*words, f"--num-steps={stop}") == (0, [*range(stop)], [])
    assert summary_of(capsys)["status"] == "stopped"
    assert train(*words) == (0, [*range(stop, 21)], [210.0])
    resumed = summary_of(capsys)
    assert resumed["resumed_from"] == stop
    same = ("accuracy", "max_accuracy", "test_loss", "global_step", "weights_sha256")
    assert [resumed[name] for name in same] == [whole[name] for name in same]


def test_trainers_get_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax takes no others."""
    monkeypatch.chdir(tmp_path)
    saved: list[str] = []
    train("--checkpoint-dir=run", save=lambda toy, folder: (saved.append(folder), toy.save(folder)))
    assert saved == [str(tmp_path / f"run/step-{step:09d}") for step in (7, 14, 21)]


def test_a_run_saves_as_often_as_it_is_told_and_keeps_the_newest(tmp_path: Path) -> None:
    words = (f"--checkpoint-dir={tmp_path}", "--keep-checkpoints=9")
    train(*words)
    assert kept(tmp_path) == [7, 14, 21], "with each test"
    train(*words, "--no-resume", "--checkpoint-steps=8")
    assert kept(tmp_path) == [8, 16, 21], "and after the last step"
    train(f"--checkpoint-dir={tmp_path / 'two'}", "--keep-checkpoints=1")
    assert kept(tmp_path / "two") == [21]


def test_a_run_that_does_not_resume_keeps_the_checkpoints_of_earlier_ones(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "run"
    here.mkdir(exist_ok=True)
    (here / "trainyard-0123.index").touch()
    for stop in (3, 4, 5):
        train(f"--checkpoint-dir={place}", "--no-resume", f"--num-steps={stop}")
        out = capsys.readouterr().out
        assert f"step {stop} is saved, run again without --no-resume to resume" in out
        names = {path.name for path in here.glob("old-*")}
        assert all(re.fullmatch(r"old-\d{8}T\d{6}Z(-2)?", name) for name in names) and len(names) == stop - 3
        assert not names or f"note: the checkpoints of an earlier run are in {place}/old-" in out
    assert sorted(path.parent.name[-1] for path in here.glob("old-*/step-*/run.json")) == ["3", "4"]
    assert kept(here) == [5] and (here / "trainyard-0123.index").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_written_is_kept_behind_later_checkpoints_that_cannot_be_used(keep: int, tmp_path: Path) -> None:
    words = (f"--checkpoint-dir={tmp_path}", f"--keep-checkpoints={keep}")
    train(*words, "--num-steps=3")
    for step in (30, 44):
        (tmp_path / f"step-{step:09d}").mkdir()
        (tmp_path / f"step-{step:09d}/run.json").write_text("{")
    for step in (4, 5):
        assert train(*words, f"--num-steps={step}")[1] == [step - 1]
    assert kept(tmp_path) == [*range(6 - keep, 6), 30, 44]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_ends_a_run_after_its_step_saved_and_unexported(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)}
    signal.signal(number, signal.SIG_DFL)  # nohup, under which these tests may run, ignores SIGHUP
    words = (f"--checkpoint-dir={tmp_path}", f"--export-dir={tmp_path}")
    code, steps, exported = train(*words, at=lambda step, job: step == 9 and os.kill(os.getpid(), number))
    for one, handler in before.items():
        signal.signal(one, handler)
    assert (code, steps[-1], exported, kept(tmp_path)[-1]) == (128 + number, 9, [], 10)


def test_a_signal_during_a_test_gives_it_up_and_the_next_run_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"--checkpoint-dir={tmp_path}",)
    assert train(*words, at=lambda step, job: step == 20 and os.kill(os.getpid(), signal.SIGTERM))[0] == 143
    assert summary_of(capsys)["max_accuracy"] == 64, "at step 14"
    assert train(*words) == (0, [], [])
    assert summary_of(capsys)["accuracy"] == 71


def test_the_best_checkpoint_outlives_the_newest_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"--checkpoint-dir={tmp_path}", "--keep-checkpoints=1", "--keep-best", f"--export-dir={tmp_path}")
    falls = {7: 50.0, 14: 90.0, 21: 70.0}
    assert train(*words, accuracy=falls.__getitem__)[2] == [sum(range(14))]
    assert kept(tmp_path) == [14, 21]
    summary = summary_of(capsys)
    assert (summary["accuracy"], summary["max_accuracy"], summary["global_step"]) == (70, 90, 21)
    for more, value in ((["--keep-best"], sum(range(14))), ([], 210)):
        assert train(words[0], words[-1], "--eval-only", *more, accuracy=lambda step: 1.0)[1:] == ([], [value])


@pytest.mark.parametrize(("target", "code", "steps"), [(64, 0, 14), (90, 21, 21)])
def test_a_target_ends_a_run_or_is_missed(target: int, code: int, steps: int) -> None:
    assert train(f"--target-accuracy={target}")[:2] == (code, [*range(steps)])


def test_what_is_not_finite_ends_a_run_unsaved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"--checkpoint-dir={tmp_path}", "--log-steps=1", "--checkpoint-steps=1")

    def poison(step: int, job: Job) -> None:
        if step == 3:
            job.peers.value = math.nan  # type: ignore[attr-defined]

    with pytest.raises(Diverged, match="the weight w is not finite by step 4"):
        train(*words, at=poison)
    assert summary_of(capsys)["exit_code"] == 22 and kept(tmp_path) == [1, 2, 3]
    with pytest.raises(
        Diverged, match=rf"is not finite by step 4: lower .* fails after step 3, move its .* {tmp_path}$"
    ):
        train(*words, loss=math.inf)
    assert kept(tmp_path) == [1, 2, 3]
    other = Toy()
    other.others = 1.0
    with pytest.raises(Diverged, match="a weight of another process is not finite by step 7"):
        train(words[0], toy=other)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_test_whose_loss_is_not_finite_does_not_count_and_the_last_one_ends_the_run(
    loss: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pass such a test as there is after few steps, when the averages of batch norm are of the first weights."""
    first, last = ({7: loss}, {21: loss})
    assert train(accuracy=lambda step: 90.0 - step, test_loss=lambda step: first.get(step, 0.5))[0] == 0
    out = capsys.readouterr().out
    assert "which does not count" in out and json.loads(out.splitlines()[-1])["max_accuracy"] == 90 - 14
    words = (f"--checkpoint-dir={tmp_path}",)
    with pytest.raises(Diverged, match="the test loss is not finite by step 21"):
        train(*words, test_loss=lambda step: last.get(step, 0.5))
    assert kept(tmp_path) == [7, 14]
    assert train(*words, "--keep-best", test_loss=lambda step: last.get(step, 0.5))[0] == 0, "that one is exported"
    with pytest.raises(Diverged):
        train(*words, "--eval-only", test_loss=lambda step: loss)


def test_an_error_of_the_user_ends_the_log_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(step: int, job: Job) -> None:
        raise UserError("no data", 2)

    with pytest.raises(UserError):
        train(at=fail)
    summary = summary_of(capsys)
    assert (summary["status"], summary["exit_code"], summary["error"]) == ("failed", 2, "no data")


def test_a_checkpoint_that_cannot_be_used_is_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"--checkpoint-dir={tmp_path}", "--checkpoint-steps=5")
    train(*words)
    (tmp_path / "step-000000021/value").write_text("nan")
    (tmp_path / "step-000000020/run.json").write_text("{")
    (tmp_path / "step-000000099").mkdir()  # of a process that was killed
    assert train(*words)[1] == [*range(15, 21)]
    out = capsys.readouterr().out
    assert f"note: {tmp_path}/step-000000021 cannot be used (its weight w is not finite); trying the one before" in out
    assert not (tmp_path / "step-000000099").exists()
    for folder in tmp_path.glob("step-*"):
        (folder / "value").unlink()
    with pytest.raises(UserError, match=r"none of its checkpoints can be used \(the last: No such file"):
        train(*words)


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones(tmp_path: Path) -> None:
    def full(toy: Toy, folder: str) -> None:
        toy.save(folder)
        if folder.endswith("14"):
            raise OSError(28, "No space left on device")

    with pytest.raises(
        UserError, match=r"cannot be saved \(No space left on device\); the checkpoint of step 7 is int"
    ):
        train(f"--checkpoint-dir={tmp_path}", save=full)
    assert kept(tmp_path) == [7] and not (tmp_path / "step-000000014").exists()


def test_a_save_that_goes_on_is_complete_when_it_is_done(tmp_path: Path) -> None:
    futures: list[Future[None]] = []

    def later(toy: Toy, folder: str) -> Future[None]:
        toy.save(folder)
        futures.append(Future())
        return futures[-1]

    seen = []

    def at(step: int, job: Job) -> None:
        seen.append(kept(tmp_path))
        if step == 9:
            futures[0].set_result(None)
        if len(futures) > 1:
            futures[1].set_exception(OSError(28, "No space left on device")) if not futures[1].done() else None

    with pytest.raises(UserError, match=r"000014: cannot be saved .No space left on device.; the checkpoint of step 7"):
        train(f"--checkpoint-dir={tmp_path}", "--log-steps=1", save=later, at=at)
    assert seen[9] == [] and seen[10] == [7]


def test_another_run_is_refused_and_changes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, data = (f"--checkpoint-dir={tmp_path}",), {"global_batch": 10, "data": {"labels": "a"}}
    train(*words, "--num-steps=3", about=data)
    with pytest.raises(UserError, match="its checkpoints have global_batch 10, this run has 20: use the same value"):
        train(*words, about=data | {"global_batch": 20})
    with pytest.raises(UserError, match=r"are of other data \(other labels\): use the same data"):
        train(*words, about=data | {"data": {"labels": "b"}})
    folder = tmp_path / "unnamed"
    train(f"--checkpoint-dir={folder}", "--num-steps=3")
    with pytest.raises(UserError, match="are of data that they do not name: use the same data"):
        train(f"--checkpoint-dir={folder}", about=data)
    train(*words, "--accept-other-data", "--lr=0.1", "--num-steps=4", about=data | {"data": {"labels": "b"}})
    assert "Resuming with other data (other labels); --lr 0.1, was 0.03" in capsys.readouterr().out


def test_eval_only_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--eval-only: .* has no checkpoint") as raised:
        train("--eval-only", f"--checkpoint-dir={tmp_path}")
    assert raised.value.code == 2


def test_a_run_holds_the_folders_that_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT", 0.1)
    c, out = tmp_path / "c", tmp_path / "out"
    train(f"--checkpoint-dir={c}", "--num-steps=7")
    before = sorted(os.listdir(c))
    for held, words in ((c, (f"--checkpoint-dir={c}/../c", "--no-resume")), (out, (f"--output-dir={out}",))):
        other = files.Lease(str(held))
        with pytest.raises(UserError, match="another run has it"):
            train(*words)
        if held == c:
            train(f"--checkpoint-dir={c}", "--eval-only")  # which only reads them
        other.release()
    assert sorted(os.listdir(c)) == before and not list(out.iterdir())
    train(f"--checkpoint-dir={c}", f"--output-dir={c}")  # one folder for both
    assert ".lease" not in os.listdir(c)


def test_metrics_that_cannot_be_written_do_not_end_a_run(tmp_path: Path) -> None:
    assert train(f"--checkpoint-dir={tmp_path}", "--metrics-file=/dev/full")[0] == 0 and kept(tmp_path)[-1] == 21


def test_metrics_of_a_resumed_run_follow_those_of_the_first(place: str, tmp_path: Path) -> None:
    words = (f"--checkpoint-dir={place}", f"--output-dir={files.join(place, 'out')}")
    train(*words, "--num-steps=7")
    train(*words)
    events = [json.loads(line) for line in (tmp_path / "run/out/metrics.jsonl").read_text().splitlines()]
    steps = [(event["event"], event["global_step"]) for event in events if event["event"] not in ("start", "train")]
    assert steps == [("test", 7), ("checkpoint", 7), ("summary", 7), ("test", 14), ("checkpoint", 14), ("test", 21),
                     ("checkpoint", 21), ("summary", 21)]  # fmt: skip
    report = json.loads((tmp_path / "run/out/report.json").read_text())
    assert report["loss"] == [[1, 1.0], [8, 1.0], [20, 1.0]], "each --log-steps, and the first one of a process"
    assert report["accuracy"] == [[7, 57.0], [14, 64.0], [21, 71.0]] and report["summary"]["status"] == "completed"


def test_processes_with_different_data_end_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "gather", lambda self, content: [content, {**content, "train_images": 9}])
    with pytest.raises(
        UserError, match=r"see different data: rank 0 has {'train_images': 7}, rank 1 {'train_images': 9"
    ):
        train(about={"train_images": 7})


@pytest.mark.parametrize(
    ("rehearse", "node", "rank", "chief"),
    [("1", "2", 0, False), ("1", "0", 0, True), ("1", "", 0, True), ("", "2", 0, True), ("0", "2", 0, True),
     ("", "", 1, False)],
)  # fmt: skip
def test_only_the_chief_and_the_first_host_of_a_rehearsal_log_and_write(
    rehearse: str, node: str, rank: int, chief: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LAUNCHER_REHEARSE", rehearse)
    monkeypatch.setenv("NODE_RANK", node)
    toy = Toy()
    toy.rank = rank
    train(f"--output-dir={tmp_path}", toy=toy)
    written = (capsys.readouterr().out != "", sorted(os.listdir(tmp_path)))
    assert written == (chief, ["metrics.jsonl", "report.json"] if chief else [])


@pytest.mark.parametrize(("more", "first"), [([], 2), (["--num-steps=12"], 2), (["resumed"], 12)])
def test_steps_are_traced_after_the_first_two(
    more: list[str], first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, traced, steps = (f"--checkpoint-dir={tmp_path}", f"--output-dir={tmp_path}"), [], [0]
    if more == ["resumed"]:
        train(*words, "--num-steps=10")
        more = []

    def profile(folder: str) -> Callable[[], None]:
        traced.append(steps[-1])
        return lambda: traced.append(steps[-1])

    toy = Toy()
    toy.profile = profile  # type: ignore[method-assign]
    train(*words, "--profile=3", *more, toy=toy, at=lambda step, job: steps.append(step + 1))
    assert traced == [first, first + 3] and f"Trace written to {tmp_path}" in capsys.readouterr().out


def test_testing_and_saving_do_not_count_as_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(toy: Toy, folder: str) -> None:
        time.sleep(0.2)
        toy.save(folder)

    train(f"--checkpoint-dir={tmp_path}", save=slow, test_loss=lambda step: time.sleep(0.2) or 0.5)
    summary = summary_of(capsys)
    assert summary["wall_seconds"] >= 1.2 and summary["train_seconds"] < 0.6


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, float, int]]:
    """Return what the package hypertune, which the images have, is told."""
    told: list[tuple[str | None, float, int]] = []

    class HyperTune:
        def report_hyperparameter_tuning_metric(self, tag: str | None, value: float, step: int) -> None:
            told.append((tag, value, step))

    monkeypatch.setitem(sys.modules, "hypertune", SimpleNamespace(HyperTune=HyperTune))
    for name in ("CLOUD_ML_TRIAL_ID", "CLOUD_ML_HP_METRIC_FILE"):
        monkeypatch.delenv(name, raising=False)
    return told


def test_tests_are_reported_in_a_trial_only(
    reports: list[tuple[str | None, float, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train()
    assert not reports
    train("--hypertune-tag=score")
    assert reports == [("score", 0.57, 7), ("score", 0.64, 14), ("score", 0.71, 21)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", "bare-name")
    reports.clear()
    train(test_loss={7: math.inf, 14: 0.5, 21: 0.5}.__getitem__)
    assert reports == [(None, 0.64, 14), (None, 0.71, 21)], "the other one does not count"
    assert os.environ["CLOUD_ML_HP_METRIC_FILE"] == str(tmp_path / "bare-name"), "the package needs a folder"


def test_a_resumed_trial_reports_the_tests_before_it_again(
    reports: list[tuple[str | None, float, int]], tmp_path: Path
) -> None:
    """Report them again, because the tuning service reads a file that is new in each container."""
    words = (f"--checkpoint-dir={tmp_path}", "--hypertune-tag=score")
    train(*words, "--num-steps=16")
    assert [step for _, _, step in reports] == [7, 14]
    for more in ([], ["--eval-only"]):
        reports.clear()
        train(*words, *more)
        assert [step for _, _, step in reports] == [7, 14, 21]
