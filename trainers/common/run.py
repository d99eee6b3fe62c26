"""The bookkeeping of a training run: epochs and steps, logs, checkpoints, and how the run ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from trainers.common import exits, hypertune, order, paths, report
from trainers.common.checkpoints import Checkpoints, State
from trainers.common.events import Log, clock, test_line, train_line
from trainers.common.meter import Meter
from trainers.common.signals import StopRequest

_AGREE_EVERY = 10  # steps between checks whether any process must stop: an all-reduce per step would be too slow
_CURVE_POINTS = 2000  # of the loss curve, thinned by half when reached, so that reports and checkpoints stay small
Batch = TypeVar("Batch")


class DistributedContext(Protocol):
    """The devices and processes of a run. Implemented by ``trainers.torch._device`` and ``trainers.tf._strategy``."""

    label: str  # for Device= in the log
    replicas: int  # devices over which a global batch is split
    processes: int
    chief: bool  # whether this is the process that logs and saves

    def agree(self, code: int) -> int:
        """The largest ``code`` passed by any process."""

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of the chief's ``read()``, on every process."""

    def compilations(self) -> tuple[int, float]:
        """The number of graphs compiled or traced so far, and the seconds it took."""

    def versions(self) -> dict[str, str]:
        """Versions of the framework's packages."""

    def profile(self, folder: str) -> Callable[[], None]:
        """Start a trace; the returned function stops it and writes it into ``folder``."""


class Run:
    """Bookkeeping of one training run; use as a context manager around the training loop.

    For example::

        with Run("torch.mnist", args, context, images) as run:
            state = run.restore(checkpoints)
            for epoch in run.epochs():
                for step in run.steps():
                    loss = train_one(step)
                    run.log(step, loss.item, rate)
                if not run.ended:
                    run.tested(*evaluate())
            return run.finish()
    """

    def __init__(self, trainer: str, args: argparse.Namespace, context: DistributedContext, train_images: int) -> None:
        self.trainer, self.args, self.context = trainer, args, context
        self.global_batch = args.batch_size * context.replicas * getattr(args, "accumulate", 1)
        self.steps_per_epoch = order.steps_per_epoch(train_images, self.global_batch)
        self.total_steps = self.steps_per_epoch * args.epochs
        self.global_step = 0  # steps done, including those before the run was resumed
        self.resumed_from: int | None = None
        self.ended = ""  # why the run ended: stopped, preempted, reached; "" while it continues
        self.tests: list[dict[str, float]] = []
        self.curve: list[tuple[int, float]] = []
        self.stop = StopRequest()
        self.meter = Meter()
        metrics_folder = args.output_dir or args.logdir
        metrics_file = args.metrics_file or (metrics_folder and paths.join(metrics_folder, "metrics.jsonl"))
        self.log_to = Log(context.chief, metrics_file, args.logdir)
        self._hypertune = hypertune.reporter(args.hypertune_tag) if context.chief else None
        self._checkpoints: Checkpoints | None = None
        self._snapshot: Callable[[], State] | None = None
        self._read_loss: Callable[[], float] | None = None
        self._started = time.monotonic()
        self._first_loss: float | None = None
        self._code = 0
        self._saved_step = -1
        self._profile: contextlib.ExitStack | None = None
        self._profile_end = 0
        self._same = {  # must be the same when a run is resumed
            "trainer": trainer, "seed": args.seed, "global_batch": self.global_batch, "train_images": train_images,
        }  # fmt: skip

    # --- progress ---------------------------------------------------------------------------------------

    def restore(self, checkpoints: Checkpoints, snapshot: Callable[[], State]) -> State | None:
        """Save ``snapshot()`` into ``checkpoints`` from now on; returns the state to resume from, or None.

        Raises :class:`UserError` if that state is from a run with other data, seed or batch size.
        """
        self.stop.install()
        state = None
        if self.args.checkpoint_dir:
            self._checkpoints, self._snapshot = checkpoints, snapshot
            if self.context.chief:
                checkpoints.prepare()
            if self.args.resume:
                state = self.context.agreed_state(checkpoints.newest)
        if state:
            meta = json.loads(str(state.pop("run")))
            for name, now in self._same.items():
                if meta["same"][name] != now:
                    raise exits.UserError(
                        f"{self.args.checkpoint_dir}: its checkpoints have {name} {meta['same'][name]}, this run has"
                        f" {now}: use the same value, another --checkpoint-dir, or --no-resume",
                        exits.USAGE,
                    )
            self.global_step = self.resumed_from = self._saved_step = meta["global_step"]
            self.tests, self.curve = meta["tests"], [tuple(point) for point in meta["curve"]]
        self.log_to.event(
            "start", **self._same, trainer_flags=vars(self.args), device=self.context.label,
            replicas=self.context.replicas, processes=self.context.processes, steps_per_epoch=self.steps_per_epoch,
            resumed_from=self.resumed_from, versions=self._versions(),
        )  # fmt: skip
        if state:
            self.log_to.say(f"Resumed from step {self.global_step} in {self.args.checkpoint_dir}")
        return state

    @property
    def epoch(self) -> int:
        """The current epoch, from 1."""
        return len(self.tests) + 1

    @property
    def position(self) -> int:
        """The next step of this epoch, from 0."""
        return self.global_step - (self.epoch - 1) * self.steps_per_epoch

    def epochs(self) -> Iterator[int]:
        """The remaining epochs, starting with the one in which the checkpoint was saved."""
        while not self.ended and self.epoch <= self.args.epochs:
            yield self.epoch

    def steps(self) -> Iterator[int]:
        """The remaining steps of this epoch, from 0; ends early if the run must stop."""
        for first, _ in self.chunks(1):
            yield first

    def chunks(self, most: int) -> Iterator[tuple[int, int]]:
        """This epoch's remaining steps as (first step, count), with a count of at most ``most``.

        A chunk ends after a step that is logged, at a checkpoint, and at the end of the run.
        """
        position = self.position
        self._log_epoch("train begin")
        while position < self.steps_per_epoch and not self._must_end():
            count = min(most, self._steps_to_boundary(position))
            self._start_profile()
            self.meter.add(count * self.global_batch // self.context.replicas)
            with self.meter.training():
                yield position, count
            self.global_step += count
            position += count
            self.log_to.progress(self.epoch, position, self.steps_per_epoch)
            if self.args.checkpoint_steps and self.global_step % self.args.checkpoint_steps == 0:
                self.save()
        if self._read_loss:
            with self.meter.training():  # waits until the device has done all steps, so that the measured time is right
                self._check_finite(self._read_loss())
        self._end_profile()
        if self.ended or not self.args.checkpoint_steps or self.global_step == self.total_steps:
            self.save()
        if not self.ended:
            self._log_epoch("train end")

    def _steps_to_boundary(self, position: int) -> int:
        log_steps, save_steps = self.args.log_steps, self.args.checkpoint_steps
        distances: list[int] = [self.steps_per_epoch - position, log_steps - (position - 1) % log_steps]
        if save_steps:
            distances.append(save_steps - self.global_step % save_steps)
        if self.args.num_steps:
            distances.append(self.args.num_steps - self.global_step)
        return min(distances)

    def _must_end(self) -> bool:
        if self.args.num_steps and self.global_step >= self.args.num_steps:
            self.ended = "stopped"
        elif code := self._agreed_stop(self.global_step):
            self.ended, self._code = "preempted", code
        return bool(self.ended)

    def _agreed_stop(self, count: int) -> int:
        if self.context.processes == 1:
            return self.stop.code
        return self.context.agree(self.stop.code) if count % _AGREE_EVERY == 0 else 0

    def _log_epoch(self, what: str) -> None:
        self.log_to.say(f"Epoch {self.epoch} {what} {clock()}")

    def _start_profile(self) -> None:
        done = self.global_step - (self.resumed_from or 0)
        if self._profile and done >= self._profile_end:
            self._end_profile()
        elif self.args.profile and not self._profile_end and done >= 2:  # the first steps compile and allocate
            self._profile_end = done + self.args.profile
            self._profile = contextlib.ExitStack()
            folder = self._profile.enter_context(paths.local_folder(self.args.output_dir or self.args.logdir or "."))
            self._profile.callback(self.context.profile(folder))

    def _end_profile(self) -> None:
        if self._profile:
            self._profile.close()
            self._profile = None
            self.log_to.say(f"Trace written to {self.args.output_dir or self.args.logdir or '.'}")

    # --- what happens on the way ------------------------------------------------------------------------

    def log(self, step: int, read_loss: Callable[[], float], learning_rate: float) -> None:
        """Log ``step`` of this epoch every ``--log-steps`` steps; only then is the loss read from the device.

        Raises :class:`Diverged` if it is not finite: ``read_loss`` must return NaN if any loss since the last
        call was not finite.
        """
        self._read_loss = read_loss
        if step % self.args.log_steps:
            return
        loss = float(read_loss())
        self._check_finite(loss)
        if self._first_loss is None:
            self._first_loss = loss
        done = (self.epoch - 1) * self.steps_per_epoch + step + 1
        self.curve.append((done, loss))
        if len(self.curve) > _CURVE_POINTS:
            self.curve = self.curve[::2]
        rate, global_rate = self.meter.read()
        count, seconds = self.context.compilations()
        self.log_to.say(train_line(self.context.label, self.epoch, step, loss, rate, global_rate, clock()))
        self.log_to.event(
            "train", epoch=self.epoch, step=step, global_step=done, loss=loss, learning_rate=learning_rate,
            rate=rate, global_rate=global_rate, rate_total=rate * self.context.replicas,
            global_rate_total=global_rate * self.context.replicas, data_wait=self._data_wait(),
            compile_count=count, compile_seconds=seconds,
        )  # fmt: skip
        self.log_to.scalars(done, train_loss=loss, train_rate=rate, train_learning_rate=learning_rate)

    def _check_finite(self, loss: float) -> None:
        """Raise :class:`Diverged`, on all processes alike, if any process's ``loss`` is not finite."""
        if self.context.agree(0 if math.isfinite(loss) else exits.DIVERGED):
            raise exits.Diverged(
                f"the loss is not finite by step {self.global_step}: lower --lr, or try --precision fp32"
                + ("; earlier checkpoints are kept" if self.args.checkpoint_dir else "")
            )

    def testing(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over ``batches`` of the test. Raises :class:`UserError` if the run must stop: the epoch is already
        saved, and a resumed run repeats the test."""
        for number, batch in enumerate(batches):
            if code := self._agreed_stop(number):
                self.ended = "preempted"
                raise exits.UserError(f"stopped while testing epoch {self.epoch}; {self._where_saved()}", code)
            yield batch

    def tested(self, correct: float, count: int, loss_sum: float, **more: float) -> None:
        """Record the test after this epoch: ``correct`` of ``count`` images, and the sum of their losses."""
        accuracy, loss = 100.0 * correct / count, loss_sum / count
        epoch = self.epoch
        self.log_to.say(test_line(self.context.label, 0, epoch, accuracy, clock()))
        self.log_to.say(f"Epoch {epoch} test end {clock()}, Accuracy={accuracy:.2f}")
        self.log_to.event("test", epoch=epoch, global_step=self.global_step, accuracy=accuracy, loss=loss, count=count,
                          correct=correct, **more)  # fmt: skip
        self.log_to.scalars(self.global_step, test_accuracy=accuracy, test_loss=loss)
        if self._hypertune:
            self._hypertune.report_hyperparameter_tuning_metric(
                self.args.hypertune_tag, accuracy / 100, self.global_step
            )
        self.tests.append({"epoch": epoch, "step": self.global_step, "accuracy": accuracy, "loss": loss, **more})
        if self.args.target_accuracy and accuracy >= self.args.target_accuracy:
            self.ended = "reached"

    def save(self) -> None:
        """Write a checkpoint of this step if there is a folder for it and it is not written yet."""
        if not self._checkpoints or not self._snapshot or self._saved_step == self.global_step:
            return
        if self._read_loss:
            self._check_finite(self._read_loss())  # every resumed run would fail on a checkpoint with NaN
        state = self._snapshot()
        meta = {"same": self._same, "global_step": self.global_step, "tests": self.tests, "curve": self.curve}
        if self.context.chief:
            path = self._checkpoints.save({**state, "run": json.dumps(meta)}, self.global_step)
            self.log_to.event("checkpoint", global_step=self.global_step, path=path)
        self._saved_step = self.global_step

    def exported(self, folder: str, names: list[str]) -> None:
        """Record that the files ``names`` were exported into ``folder``."""
        self.log_to.say(f"Exported {', '.join(names)} to {folder}")
        self.log_to.event("export", folder=folder, names=names)

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self, weights_sha256: str = "", **more: Any) -> int:
        """Write the summary and the report; returns the exit code.

        ``weights_sha256`` shows whether the results of two runs are identical to the bit.
        """
        best = max((test["accuracy"] for test in self.tests), default=None)
        if not self.ended:
            self.ended = "completed"
        if self.args.target_accuracy and self.ended == "completed" and (best or 0) < self.args.target_accuracy:
            self.ended, self._code = "missed", exits.TARGET_MISSED
        if best is not None:
            self.log_to.say(f"Max Accuracy: {best:.2f}%")
        if self.ended in ("stopped", "preempted"):
            self.log_to.say(f"Ended after step {self.global_step} ({self.ended}); {self._where_saved()}")
        summary = self._summary(best, weights_sha256, more)
        if self.context.chief and self.args.output_dir:
            accuracies = [(test["step"], test["accuracy"]) for test in self.tests]
            report.write(self.args.output_dir, summary, self.curve, accuracies)
        self.log_to.say(json.dumps(summary))
        self.log_to.close()
        return self._code

    def _where_saved(self) -> str:
        if self._saved_step < 0:
            return "nothing is saved without --checkpoint-dir"
        return f"step {self._saved_step} is saved, run again to resume"

    def _summary(self, best: float | None, weights_sha256: str, more: dict[str, Any]) -> dict[str, Any]:
        last = self.tests[-1] if self.tests else {"accuracy": None, "loss": None}
        images = self.meter.images * self.context.replicas
        count, seconds = self.context.compilations()
        return self.log_to.event(
            "summary", trainer=self.trainer, status=self.ended, exit_code=self._code, accuracy=last["accuracy"],
            max_accuracy=best, test_loss=last["loss"], loss_first=self._first_loss,
            loss_last=self.curve[-1][1] if self.curve else None, images_per_second=images
            / max(self.meter.training_seconds, 1e-9), train_seconds=self.meter.training_seconds,
            wall_seconds=time.monotonic() - self._started, data_wait=self._data_wait(), compile_count=count,
            compile_seconds=seconds, epochs=len(self.tests), global_step=self.global_step,
            resumed_from=self.resumed_from, device=self.context.label, replicas=self.context.replicas,
            processes=self.context.processes, global_batch=self.global_batch, seed=self.args.seed,
            weights_sha256=weights_sha256, versions=self._versions(), **more,
        )  # fmt: skip

    def _data_wait(self) -> float:
        return self.meter.waited / max(self.meter.training_seconds, self.meter.waited, 1e-9)

    def _versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), **self.context.versions()}

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, exits.UserError):
            self.ended = "diverged" if isinstance(error, exits.Diverged) else self.ended or "failed"
            self._code = error.code
            best = max((test["accuracy"] for test in self.tests), default=None)
            self.log_to.say(json.dumps(self._summary(best, "", {"error": str(error)})))
        self.log_to.close()
