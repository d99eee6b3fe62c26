"""What a training run reports: pytorch/xla's log lines, JSON lines, TensorBoard events, a summary and a report.

:class:`Log` records what the loop of a trainer passes to it and decides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Protocol, Self, cast

from trainers.common import paths
from trainers.common.exits import Diverged, Lines, UserError, again, dropping
from trainers.common.files import Lease

_CURVE_POINTS = 2000  # of the loss curve, thinned by half when reached, so that reports and checkpoints stay small


class Devices(Protocol):
    """The devices and processes of a run. Implemented by ``trainers.torch._device``."""

    label: str  # for Device= in the log
    replicas: int  # devices over which a global batch is split
    processes: int
    chief: bool  # whether this is the process that logs and saves

    def maximum(self, values: list[float]) -> list[float]:
        """The element-wise maximum of ``values`` over all processes."""

    def compilations(self) -> tuple[int, float]:
        """The number of graphs compiled or traced so far, and the seconds it took."""

    def versions(self) -> dict[str, str]:
        """Versions of the framework's packages."""


def clock() -> str:
    """The time of day in the format of pytorch/xla's log."""
    return time.strftime("%H:%M:%S")


def train_line(device: str, epoch: int, step: int, loss: float, rate: float, global_rate: float, now: str) -> str:
    """The line that pytorch/xla's log analyzer parses; ``rate`` and ``global_rate`` in images per second.

    https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py
    """
    return (
        f"| Training Device={device} Epoch={epoch} Step={step} Loss={loss:.5f} "
        f"Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now}"
    )


def test_line(device: str, step: int, epoch: int, accuracy: float, now: str) -> str:
    """pytorch/xla's log line for a test; ``accuracy`` in percent."""
    return f"| Test Device={device} Step={step} Epoch={epoch} Accuracy={accuracy:.2f} Time={now}"


class Meter:
    """Rate and GlobalRate of one device, in images per second, and the time spent training and waiting for data.

    Both rates follow pytorch/xla's ``RateTracker``: Rate is 0.6 times the rate since the last reading plus 0.4 times
    the previous Rate (``RATE_TRACKER_SMOOTHING`` replaces the 0.4); GlobalRate is all images divided by the total time,
    including compilation and evaluation.
    https://github.com/pytorch/xla/blob/master/torch_xla/core/xla_model.py
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.smoothing = float(os.environ.get("RATE_TRACKER_SMOOTHING") or 0.4)
        self.begun = self.read_at = clock()
        self.images = self.unread = 0
        self.rate: float | None = None
        self.training_seconds = self.waited = 0.0
        self._in_training = False

    def add(self, images: int) -> None:
        """Count ``images`` that this device trained on."""
        self.images += images
        self.unread += images

    def read(self) -> tuple[float, float]:
        """The current Rate and GlobalRate."""
        now = self.clock()
        current = self.unread / max(now - self.read_at, 1e-9)
        self.rate = current if self.rate is None else (1 - self.smoothing) * current + self.smoothing * self.rate
        self.read_at, self.unread = now, 0
        return self.rate, self.images / max(now - self.begun, 1e-9)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the time spent in this context as training; evaluation, saving and set-up are not."""
        start, self._in_training = self.clock(), True
        try:
            yield
        finally:
            self._in_training = False
            self.training_seconds += self.clock() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within :meth:`training`, do not count the time spent in this context; elsewhere, no effect."""
        start = self.clock()
        try:
            yield
        finally:
            if self._in_training:
                self.training_seconds -= self.clock() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent in this context as waiting for data."""
        start = self.clock()
        try:
            yield
        finally:
            self.waited += self.clock() - start


def _plain(value: Any) -> Any:
    """``value`` for JSON: floats rounded to six decimals; NaN and infinity, which JSON lacks, as strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


class Output:
    """Writes events to stdout, ``metrics_file`` (JSON lines) and ``tensorboard_dir``; silent unless ``chief``."""

    def __init__(self, chief: bool, metrics_file: str = "", tensorboard_dir: str = "") -> None:
        self.chief = chief
        self._bar_shown = False
        self._file: IO[str] | None = None
        self._board: Any = None
        self._mirrors: list[paths.Mirror] = []
        if not chief:
            return
        if metrics_file:
            self._file = self._open(metrics_file)
        if tensorboard_dir:
            self._board = _tensorboard(self._mirror(tensorboard_dir).local)

    def _mirror(self, folder: str) -> paths.Mirror:
        self._mirrors.append(paths.Mirror(folder))
        return self._mirrors[-1]

    def _open(self, path: str) -> IO[str]:
        folder, _, name = path.rpartition("/")
        try:
            mirror = self._mirror(folder or ("/" if path.startswith("/") else "."))
            mirror.fetch(name)  # a resumed run appends to the file
            return cast(IO[str], Lines(open(paths.join(mirror.local, name), "a", encoding="utf-8")))
        except OSError as error:
            raise UserError(f"--metrics-file {path}: {error.strerror}") from None

    def say(self, line: str) -> None:
        """Print ``line``."""
        if self.chief:
            self._clear_bar()
            print(line, flush=True)

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append ``{"event": kind, "time": seconds since the epoch, ...}`` to the metrics file; returns the object."""
        content: dict[str, Any] = _plain({"event": kind, "time": round(time.time(), 3), **fields})
        if self._file:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()
        for mirror in self._mirrors:
            with dropping():
                mirror.keep_up()
        return content

    def scalars(self, step: int, **values: float) -> None:
        """Write ``values`` at ``step`` to TensorBoard: ``train_loss`` under the tag ``train/loss``."""
        if not self._board:
            return
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-not-found, unused-ignore]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found, unused-ignore]

        points = [Summary.Value(tag=name.replace("_", "/", 1), simple_value=value) for name, value in values.items()]
        with dropping():
            self._board.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=points)))

    def progress(self, epoch: int, done: int, total: int) -> None:
        """Redraw the progress bar of this epoch if stderr is a terminal."""
        if self.chief and sys.stderr.isatty():
            filled = 30 * done // total
            print(f"\repoch {epoch} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end="", file=sys.stderr)
            self._bar_shown = True

    def _clear_bar(self) -> None:
        if self._bar_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._bar_shown = False

    def close(self) -> None:
        """Flush and close the files."""
        self._clear_bar()
        for file in (self._file, self._board):
            with dropping():
                if file:
                    file.close()
        while self._mirrors:
            self._mirrors.pop().close()


def _tensorboard(folder: str) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-not-found, unused-ignore]
            EventFileWriter,
        )
    except ImportError:
        raise UserError("--logdir needs the tensorboard package: pip install tensorboard") from None
    try:
        return EventFileWriter(folder)
    except OSError as error:
        raise UserError(f"--logdir {folder}: {error.strerror}") from None


class Journal:
    """Log a run: what all trainers have in common; a context manager around its loop.

    On a :class:`UserError` it writes the summary before the error is passed on. Steps are global and count from 0.
    """

    tested, tested_as = "loss", "val_loss"  # what tuning and a report have of the tests, and its name in the report
    unit = 1  # of that, in what tuning gets

    def __init__(self, trainer: str, args: argparse.Namespace, devices: Devices) -> None:
        self.trainer, self.args, self.devices = trainer, args, devices
        self.tests: list[dict[str, float]] = []
        self.curve: list[tuple[int, float]] = []
        if devices.chief and args.export_dir:
            paths.check_writable(args.export_dir)  # rather than after hours of training
        written = [args.output_dir, "" if args.eval_only else args.checkpoint_dir] if devices.chief else []
        real = {path.rstrip("/") if paths.is_remote(path) else os.path.realpath(path) for path in written if path}
        self._leases = [Lease(path) for path in sorted(real)]
        folder = args.output_dir or args.logdir
        metrics_file = args.metrics_file or (folder and paths.join(folder, "metrics.jsonl"))
        self._output = Output(devices.chief, metrics_file, args.logdir)
        self._hypertune = reporter(args.hypertune_tag) if devices.chief else None
        self._started = time.monotonic()
        self._step = 0  # steps done, including those before the run was resumed
        self._resumed_from: int | None = None
        self._saved: int | None = None  # the step of the newest checkpoint
        self._training = contextlib.ExitStack()  # what ends when training does
        self._finished = False

    def say(self, line: str) -> None:
        """Print ``line``, on the chief only."""
        self._output.say(line)

    def load(self, text: str, step: int) -> None:
        """Continue the log of the run that saved ``text``, the result of :meth:`state`, at ``step``."""
        content = json.loads(text)
        self.tests, self.curve = content["tests"], [tuple(point) for point in content["curve"]]
        self._step = self._resumed_from = self._saved = step

    def state(self) -> str:
        """Return the tests and the loss curve so far, for a checkpoint."""
        return json.dumps({"tests": self.tests, "curve": self.curve})

    def begin(self, **what: Any) -> None:
        """Log the beginning of the run, which ``what`` describes."""
        self._output.event("start", **what, trainer_flags=vars(self.args), device=self.devices.label,
                           processes=self.devices.processes, resumed_from=self._resumed_from,
                           versions=self._versions())  # fmt: skip
        if self._resumed_from is not None:
            self.say(f"Resumed from step {self._resumed_from} in {self.args.checkpoint_dir}")
        for test in self.tests:  # the tuning service reads a new file in each container
            if not (self.args.eval_only and test["step"] == self._step):
                self._tune(test)

    def _tune(self, test: dict[str, float]) -> None:
        if self._hypertune and math.isfinite(test["loss"]):
            value, step = test[self.tested] / self.unit, int(test["step"])
            with dropping():
                self._hypertune.report_hyperparameter_tuning_metric(self.args.hypertune_tag, value, step)

    def add_loss(self, loss: float) -> None:
        """Add the ``loss`` of the last step to the curve."""
        self.curve.append((self._step, loss))
        if len(self.curve) > _CURVE_POINTS:
            self.curve = self.curve[::2]

    def add_test(self, **test: float) -> None:
        """Add a ``test`` after the last step, and report it to hyperparameter tuning."""
        # A checkpoint can contain the test of its step, which --eval-only repeats.
        self.tests = [other for other in self.tests if other["step"] != self._step]
        self.tests.append({"step": self._step, **test})
        self._tune(self.tests[-1])

    def check_finite(self, loss: float, what: str = "the loss") -> None:
        """Raise :class:`Diverged` if ``loss``, the same in all processes, is not finite."""
        if not math.isfinite(loss):
            more = f"; if that fails after step {self._saved}, move its checkpoint out of {self.args.checkpoint_dir}"
            raise Diverged(
                f"{what} is not finite by step {self._step}: lower --lr, or try --precision fp32"
                + (more if self._saved else "")
            )

    def check_held(self) -> None:
        """Raise :class:`UserError` in every process if another run has taken a folder of this one."""
        lost: UserError | None = None
        try:
            for lease in self._leases:
                lease.check()
        except UserError as error:
            lost = error
        if self.devices.maximum([bool(lost)])[0]:
            raise lost or UserError("another run has a folder of this one, as the log of rank 0 says")

    def saved(self, step: int, path: str) -> None:
        """Log that the checkpoint ``path`` of ``step`` steps was written."""
        self._saved = step
        if path:
            self._output.event("checkpoint", global_step=step, path=path)

    def where_saved(self) -> str:
        """Return what a run that stops now has saved, for messages."""
        if self._saved is None:
            return "nothing is saved without --checkpoint-dir"
        return f"step {self._saved} is saved, run {again(self.args.resume)} to resume"

    def exported(self, folder: str, names: list[str]) -> None:
        """Log that the files ``names`` were exported into ``folder``."""
        self.say(f"Exported {', '.join(names)} to {folder}")
        self._output.event("export", folder=folder, names=names)

    def finish(self, status: str, code: int, weights_sha256: str = "", **more: Any) -> int:
        """Write the summary, with ``more`` in it, and the report; returns ``code``, with which the process exits.

        ``status`` says how the run ended: completed, stopped (by ``--num-steps``), preempted, reached or missed (the
        target). ``weights_sha256`` shows whether two runs have the same result to the bit.
        """
        if status in ("stopped", "preempted"):
            self.say(f"Ended after step {self._step} ({status}); {self.where_saved()}")
        summary = self._summary(status, code, weights_sha256, more)
        if self.devices.chief and self.args.output_dir:
            tests = [(int(test["step"]), test[self.tested]) for test in self.tests]
            write_report(self.args.output_dir, summary, self.curve, tests, self.tested_as)
        self.say(json.dumps(summary))
        self._output.close()
        self._finished = True
        return code

    def results(self) -> dict[str, Any]:
        """Return what the summary says about this kind of run."""
        raise NotImplementedError

    def _summary(self, status: str, code: int, weights_sha256: str, more: dict[str, Any]) -> dict[str, Any]:
        return self._output.event(
            "summary", trainer=self.trainer, status=status, exit_code=code, **self.results(),
            wall_seconds=time.monotonic() - self._started, global_step=self._step, resumed_from=self._resumed_from,
            repeated_reads=paths.retries.count, device=self.devices.label, processes=self.devices.processes,
            seed=self.args.seed, weights_sha256=weights_sha256, versions=self._versions(), **more,
        )  # fmt: skip

    def _versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), **self.devices.versions()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training.close()
        if isinstance(error, UserError) and not self._finished:
            stopped = error.code > 128  # by a signal, as shells count: SIGTERM is 128 + 15
            status = "diverged" if isinstance(error, Diverged) else "preempted" if stopped else "failed"
            self.say(json.dumps(self._summary(status, error.code, "", {"error": str(error)})))
        self._output.close()
        for lease in self._leases:
            lease.release()


class Log(Journal):
    """Log a run that classifies images."""

    tested = tested_as = "accuracy"
    unit = 100  # percent

    def __init__(
        self, trainer: str, args: argparse.Namespace, devices: Devices, global_batch: int, steps_per_epoch: int
    ) -> None:
        super().__init__(trainer, args, devices)
        self.global_batch, self.steps_per_epoch = global_batch, steps_per_epoch
        self.meter = Meter()
        self.waiting, self.paused = self.meter.waiting, self.meter.paused
        self._first_loss: float | None = None

    # --- in the order in which a loop calls them --------------------------------------------------------

    def start(self, learning_rate: float, **what: Any) -> None:
        """Log the beginning of the run. ``what`` describes the run, as in its checkpoints."""
        replicas = self.devices.replicas
        self.begin(**what, replicas=replicas, steps_per_epoch=self.steps_per_epoch, learning_rate=learning_rate)
        if replicas > 1:
            scaled = f"--lr {self.args.lr:g} times" if self.args.scale_lr else "--lr is not scaled (see --scale-lr) for"
            self.say(f"Learning rate {learning_rate:g}: {scaled} {replicas} devices, {self.global_batch} images a step")

    def begin_epoch(self, epoch: int) -> None:
        """Log the beginning of the training of ``epoch``, from 1; the time until :meth:`end_epoch` counts as such."""
        self.say(f"Epoch {epoch} train begin {clock()}")
        self._training.enter_context(self.meter.training())

    def step(self, epoch: int, step: int, count: int = 1) -> None:
        """Count ``count`` steps of ``epoch``, of which ``step`` is the last."""
        self._step = step + 1
        self.meter.add(count * self.global_batch // self.devices.replicas)
        self._output.progress(epoch, self._step - (epoch - 1) * self.steps_per_epoch, self.steps_per_epoch)

    def train(self, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        """Log the ``loss`` of ``step``; raises :class:`Diverged` if it is not finite.

        All processes must pass the same loss, so that all of them stop: the mean over all processes.
        """
        self.check_finite(loss)
        if self._first_loss is None:
            self._first_loss = loss
        self.add_loss(loss)
        rate, global_rate = self.meter.read()
        count, seconds = self.devices.compilations()
        position, replicas = step - (epoch - 1) * self.steps_per_epoch, self.devices.replicas
        self.say(train_line(self.devices.label, epoch, position, loss, rate, global_rate, clock()))
        self._output.event(
            "train", epoch=epoch, step=position, global_step=step + 1, loss=loss, learning_rate=learning_rate,
            rate=rate, global_rate=global_rate, rate_total=rate * replicas, global_rate_total=global_rate * replicas,
            data_wait=self._data_wait(), compile_count=count, compile_seconds=seconds,
        )  # fmt: skip
        self._output.scalars(step + 1, train_loss=loss, train_rate=rate, train_learning_rate=learning_rate)

    def check_weights(self, name: str) -> None:
        """Raise :class:`Diverged` in all processes if any passes the ``name`` of a weight that is not finite."""
        if self.devices.maximum([bool(name)])[0]:
            self.check_finite(math.nan, f"the weight {name}" if name else "a weight of another process")

    def end_epoch(self, epoch: int, complete: bool = True) -> None:
        """Log the end of the training of ``epoch``, if it is ``complete``."""
        self._training.close()
        if complete:
            self.say(f"Epoch {epoch} train end {clock()}")

    def test(self, epoch: int, count: int, correct: float, loss_sum: float, **more: float) -> float:
        """Log the test after ``epoch``: ``correct`` of ``count`` images, and the sum of their losses; returns the
        accuracy in percent, -1 if the loss is not finite. Raises :class:`Diverged` if it is the final model's: after
        few steps, the averages of batch norm do not yet fit the weights, and the loss can become finite later."""
        accuracy, loss = 100.0 * correct / count, loss_sum / count
        other = self.args.keep_best and self.best is not None  # which is the final model if this one is worse
        if self.args.eval_only or (self._step >= self.args.epochs * self.steps_per_epoch and not other):
            self.check_finite(loss, "the test loss")
        self.say(test_line(self.devices.label, 0, epoch, accuracy, clock()))
        self.say(f"Epoch {epoch} test end {clock()}, Accuracy={accuracy:.2f}")
        self._output.event("test", epoch=epoch, global_step=self._step, accuracy=accuracy, loss=loss, count=count,
                           correct=correct, **more)  # fmt: skip
        self._output.scalars(self._step, test_accuracy=accuracy, test_loss=loss)
        self.add_test(epoch=epoch, accuracy=accuracy, loss=loss, **more)
        if not math.isfinite(loss):
            self.say(f"The test loss is not finite by step {self._step}: this accuracy does not count")
            return -1.0
        return accuracy

    @property
    def best(self) -> float | None:
        """Return the best accuracy of the tests whose loss was finite, in percent; None before the first."""
        return max((test["accuracy"] for test in self.tests if math.isfinite(test["loss"])), default=None)

    def finish(self, status: str, code: int, weights_sha256: str = "", **more: Any) -> int:
        """Print the best accuracy, and go on as :meth:`Journal.finish`."""
        if self.best is not None:
            self.say(f"Max Accuracy: {self.best:.2f}%")
        return super().finish(status, code, weights_sha256, **more)

    def results(self) -> dict[str, Any]:
        """Return accuracies, losses, and the speed of the training."""
        last = self.tests[-1] if self.tests else {"accuracy": None, "loss": None}
        count, seconds = self.devices.compilations()
        return {
            "accuracy": last["accuracy"], "max_accuracy": self.best, "test_loss": last["loss"],
            "loss_first": self._first_loss, "loss_last": self.curve[-1][1] if self.curve else None,
            "images_per_second": self.meter.images * self.devices.replicas / max(self.meter.training_seconds, 1e-9),
            "train_seconds": self.meter.training_seconds, "data_wait": self._data_wait(), "compile_count": count,
            "compile_seconds": seconds, "epochs": self._step // self.steps_per_epoch,
            "replicas": self.devices.replicas, "global_batch": self.global_batch,
        }  # fmt: skip

    def _data_wait(self) -> float:
        return self.meter.waited / max(self.meter.training_seconds, self.meter.waited, 1e-9)


# --- hyperparameter tuning --------------------------------------------------------------------------------------------

# The file format of cloudml-hypertune: https://github.com/GoogleCloudPlatform/cloudml-hypertune
DEFAULT_TAG = "training/hptuning/metric"  # cloudml-hypertune's default


class HyperTune:
    """A replacement for ``hypertune.HyperTune`` if that package is not installed, with the same output.

    The file (``CLOUD_ML_HP_METRIC_FILE``, else ``/tmp/hypertune/output.metrics``) contains the last 100 reports, one
    JSON object per line with sorted keys; value, step and trial are strings.
    """

    def __init__(self) -> None:
        self.path = os.environ.get("CLOUD_ML_HP_METRIC_FILE") or "/tmp/hypertune/output.metrics"
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self.trial = os.environ.get("CLOUD_ML_TRIAL_ID") or "0"
        self.reports: deque[dict[str, object]] = deque(maxlen=100)

    def report_hyperparameter_tuning_metric(
        self, hyperparameter_metric_tag: str, metric_value: float, global_step: int = 0, checkpoint_path: str = ""
    ) -> None:
        """Append one report and rewrite the file."""
        self.reports.append(
            {
                "timestamp": time.time(),
                "trial": self.trial,
                hyperparameter_metric_tag or DEFAULT_TAG: str(float(metric_value)),
                "global_step": str(global_step),
                "checkpoint_path": checkpoint_path,
            }
        )
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(report, sort_keys=True) + "\n" for report in self.reports)


def reporter(tag: str) -> HyperTune | None:
    """A reporter of cloudml-hypertune, or its replacement; None outside of a tuning trial and without a ``tag``.

    The tuning services set ``CLOUD_ML_TRIAL_ID`` in a trial. Raises :class:`UserError` if the file cannot be created.
    """
    if not (tag or os.environ.get("CLOUD_ML_TRIAL_ID") or os.environ.get("CLOUD_ML_HP_METRIC_FILE")):
        return None
    try:
        # cloudml-hypertune 0.1.0.dev6 fails if the variable is empty or a file name without a folder.
        if not os.path.dirname(os.environ.get("CLOUD_ML_HP_METRIC_FILE", "/tmp/hypertune/")):
            return HyperTune()
        import hypertune  # type: ignore[import-not-found, unused-ignore]

        return hypertune.HyperTune()  # type: ignore[no-any-return]
    except ImportError:
        return HyperTune()
    except OSError as error:
        raise UserError(f"hypertune: {error.filename}: {error.strerror}; set CLOUD_ML_HP_METRIC_FILE") from None


# --- report.json and report.png: training loss and tests of a run ----------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN, _TOP = 480, 300, 56, 40
_AXIS, _GRID = (110, 110, 110), (225, 225, 225)
Points = Sequence[tuple[float, float]]


def write_report(folder: str, summary: dict[str, Any], losses: Points, tests: Points, name: str) -> None:
    """Write report.json (``summary`` and both curves) and report.png (the curves side by side) into ``folder``.

    ``losses`` are (step, training loss), ``tests`` (step, ``name``): "accuracy" in percent, or "val_loss".
    """
    paths.make_folder(folder)
    content = {"summary": summary, "loss": list(losses), name: list(tests)}
    with paths.atomic_file(paths.join(folder, "report.json")) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
    with paths.atomic_file(paths.join(folder, "report.png")) as file:
        file.write(_picture(str(summary.get("trainer", "")), losses, tests, name))


def _picture(title: str, losses: Points, tests: Points, name: str) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (2 * _WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    _plot(draw, 0, f"{title}: training loss", losses, (31, 119, 180))
    titles = {"accuracy": "test accuracy, %", "val_loss": "validation loss"}
    _plot(draw, _WIDTH, titles[name], tests, (214, 39, 40))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _plot(draw: Any, left: int, title: str, points: Points, colour: tuple[int, int, int]) -> None:
    x0, x1, y0, y1 = left + _MARGIN, left + _WIDTH - 16, _HEIGHT - 36, _TOP
    draw.text((x0, 14), title, fill="black")
    if points:
        least_x, most_x = min(x for x, _ in points), max(x for x, _ in points)
        least_y, most_y = min(y for _, y in points), max(y for _, y in points)
        wide, high = (most_x - least_x) or 1, (most_y - least_y) or 1

        def place(x: float, y: float) -> tuple[float, float]:
            return x0 + (x1 - x0) * (x - least_x) / wide, y0 - (y0 - y1) * (y - least_y) / high

        for part in range(5):
            value = least_y + high * part / 4
            y = place(least_x, value)[1]
            draw.line([(x0, y), (x1, y)], fill=_GRID)
            draw.text((left + 4, y - 6), f"{value:.4g}", fill=_AXIS)
        draw.text((x0, y0 + 8), f"step {least_x:g}", fill=_AXIS)
        draw.text((x1 - 60, y0 + 8), f"{most_x:g}".rjust(9), fill=_AXIS)
        line = [place(x, y) for x, y in points]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2)
        for x, y in line if len(line) < 60 else ():
            draw.ellipse([x - 2, y - 2, x + 2, y + 2], fill=colour)
    draw.line([(x0, y1), (x0, y0), (x1, y0)], fill=_AXIS)
