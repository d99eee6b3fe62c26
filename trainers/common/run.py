"""A training run but for the training: where it stands, what it logs, when it saves, when and how it ends."""

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

_AGREE_EVERY = 10  # steps between the processes' agreements on stopping: an all-reduce a step costs more than it saves
_CURVE_POINTS = 2000  # of the loss curve, halved when reached, so that reports and checkpoints stay small
Batch = TypeVar("Batch")


class World(Protocol):
    """What a run must know of the devices it runs on; the frameworks' seams implement it."""

    label: str  # as in the log's Device=
    replicas: int  # devices that share a global batch
    processes: int
    chief: bool  # the one process that logs and saves

    def agree(self, code: int) -> int:
        """The largest ``code`` of any process."""

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """What the chief gets from ``read()``, on every process."""

    def compilations(self) -> tuple[int, float]:
        """How many graphs were compiled or traced so far, and the seconds that took."""

    def versions(self) -> dict[str, str]:
        """Releases of the framework's packages."""

    def profile(self, folder: str) -> Callable[[], None]:
        """Start tracing; the function returned stops it and writes the trace into ``folder``."""


class Run:
    """Bookkeeping of one training run; use as a context manager around the training loop::

    with Run("torch.mnist", args, world, images) as run:
        state = run.restore(checkpoints)
        for epoch in run.epochs():
            for step in run.steps():
                loss = train_one(step)
                run.log(step, loss.item, rate)
            if not run.ended:
                run.tested(*evaluate())
        return run.finish()
    """

    def __init__(self, trainer: str, args: argparse.Namespace, world: World, train_images: int) -> None:
        self.trainer, self.args, self.world = trainer, args, world
        self.global_batch = args.batch_size * world.replicas * getattr(args, "accumulate", 1)
        self.steps_per_epoch = order.steps_per_epoch(train_images, self.global_batch)
        self.total_steps = self.steps_per_epoch * args.epochs
        self.global_step = 0  # steps done since the very first start
        self.resumed_from: int | None = None
        self.ended = ""  # why the run is over: stopped, preempted, reached; "" as long as it goes on
        self.tests: list[dict[str, float]] = []
        self.curve: list[tuple[int, float]] = []
        self.stop = StopRequest()
        self.meter = Meter()
        metrics_folder = args.output_dir or args.logdir
        metrics_file = args.metrics_file or (metrics_folder and paths.join(metrics_folder, "metrics.jsonl"))
        self.log_to = Log(world.chief, metrics_file, args.logdir)
        self._hypertune = hypertune.reporter(args.hypertune_tag) if world.chief else None
        self._checkpoints: Checkpoints | None = None
        self._snapshot: Callable[[], State] | None = None
        self._read_loss: Callable[[], float] | None = None
        self._started = time.monotonic()
        self._first_loss: float | None = None
        self._code = 0
        self._saved_step = -1
        self._profile: contextlib.ExitStack | None = None
        self._profile_end = 0
        self._same = {  # what must not change between a run and its resumption
            "trainer": trainer, "seed": args.seed, "global_batch": self.global_batch, "train_images": train_images,
        }  # fmt: skip

    # --- where the run stands ---------------------------------------------------------------------------

    def restore(self, checkpoints: Checkpoints, snapshot: Callable[[], State]) -> State | None:
        """Save with ``snapshot()`` into ``checkpoints`` from now on; returns the state to go on from, if any.

        Raises :class:`UserError` if that state belongs to a run with other data, seed or batch size.
        """
        self.stop.install()
        state = None
        if self.args.checkpoint_dir:
            self._checkpoints, self._snapshot = checkpoints, snapshot
            if self.world.chief:
                checkpoints.prepare()
            if self.args.resume:
                state = self.world.agreed_state(checkpoints.newest)
        if state:
            meta = json.loads(str(state.pop("run")))
            for name, now in self._same.items():
                if meta["same"][name] != now:
                    raise exits.UserError(
                        f"{self.args.checkpoint_dir}: its checkpoints have {name} {meta['same'][name]}, this run has"
                        f" {now}: run with the same, use another --checkpoint-dir, or --no-resume",
                        exits.USAGE,
                    )
            self.global_step = self.resumed_from = self._saved_step = meta["global_step"]
            self.tests, self.curve = meta["tests"], [tuple(point) for point in meta["curve"]]
        self.log_to.event(
            "start", **self._same, trainer_flags=vars(self.args), device=self.world.label,
            replicas=self.world.replicas, processes=self.world.processes, steps_per_epoch=self.steps_per_epoch,
            resumed_from=self.resumed_from, versions=self._versions(),
        )  # fmt: skip
        if state:
            self.log_to.say(f"Resumed from step {self.global_step} in {self.args.checkpoint_dir}")
        return state

    @property
    def epoch(self) -> int:
        """The epoch at hand, from 1."""
        return len(self.tests) + 1

    @property
    def position(self) -> int:
        """The step of this epoch that comes next, from 0."""
        return self.global_step - (self.epoch - 1) * self.steps_per_epoch

    def epochs(self) -> Iterator[int]:
        """The epochs still to do, from the one the checkpoint stopped in."""
        while not self.ended and self.epoch <= self.args.epochs:
            yield self.epoch

    def steps(self) -> Iterator[int]:
        """The steps (from 0) still to do in this epoch; ends early when the run has to."""
        for first, _ in self.chunks(1):
            yield first

    def chunks(self, most: int) -> Iterator[tuple[int, int]]:
        """This epoch's remaining steps as (first step, how many), at most ``most`` together.

        A chunk ends where something may happen: after a step that logs, at a save, and at the run's end.
        """
        position = self.position
        self._say_epoch("train begin")
        while position < self.steps_per_epoch and not self._must_end():
            count = min(most, self._steps_to_boundary(position))
            self._profile_if_asked()
            self.meter.add(count * self.global_batch // self.world.replicas)
            with self.meter.training():
                yield position, count
            self.global_step += count
            position += count
            self.log_to.progress(self.epoch, position, self.steps_per_epoch)
            if self.args.checkpoint_steps and self.global_step % self.args.checkpoint_steps == 0:
                self.save()
        if self._read_loss:
            with self.meter.training():  # reading waits until the device has done all steps, so that times are true
                self._check_finite(self._read_loss())
        self._end_profile()
        if self.ended or not self.args.checkpoint_steps or self.global_step == self.total_steps:
            self.save()
        if not self.ended:
            self._say_epoch("train end")

    def _steps_to_boundary(self, position: int) -> int:
        log_steps, save_steps = self.args.log_steps, self.args.checkpoint_steps
        distances = [self.steps_per_epoch - position, log_steps - (position - 1) % log_steps]
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
        if self.world.processes == 1:
            return self.stop.code
        return self.world.agree(self.stop.code) if count % _AGREE_EVERY == 0 else 0

    def _say_epoch(self, what: str) -> None:
        self.log_to.say(f"Epoch {self.epoch} {what} {clock()}")

    def _profile_if_asked(self) -> None:
        done = self.global_step - (self.resumed_from or 0)
        if self._profile and done >= self._profile_end:
            self._end_profile()
        elif self.args.profile and not self._profile_end and done >= 2:  # the first steps compile and allocate
            self._profile_end = done + self.args.profile
            self._profile = contextlib.ExitStack()
            folder = self._profile.enter_context(paths.local_folder(self.args.output_dir or self.args.logdir or "."))
            self._profile.callback(self.world.profile(folder))

    def _end_profile(self) -> None:
        if self._profile:
            self._profile.close()
            self._profile = None
            self.log_to.say(f"Trace written to {self.args.output_dir or self.args.logdir or '.'}")

    # --- what happens on the way ------------------------------------------------------------------------

    def log(self, step: int, read_loss: Callable[[], float], learning_rate: float) -> None:
        """Log ``step`` of this epoch if it is due; only then is the loss read from the device.

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
        count, seconds = self.world.compilations()
        self.log_to.say(train_line(self.world.label, self.epoch, step, loss, rate, global_rate, clock()))
        self.log_to.event(
            "train", epoch=self.epoch, step=step, global_step=done, loss=loss, learning_rate=learning_rate,
            rate=rate, global_rate=global_rate, rate_total=rate * self.world.replicas,
            global_rate_total=global_rate * self.world.replicas, data_wait=self._data_wait(),
            compile_count=count, compile_seconds=seconds,
        )  # fmt: skip
        self.log_to.scalars(done, train_loss=loss, train_rate=rate, train_learning_rate=learning_rate)

    def _check_finite(self, loss: float) -> None:
        """Raise :class:`Diverged`, on all processes alike, if any process's ``loss`` is not finite."""
        if self.world.agree(0 if math.isfinite(loss) else exits.DIVERGED):
            raise exits.Diverged(
                f"the loss is not finite by step {self.global_step}: lower --lr, or try --precision fp32"
                + ("; earlier checkpoints are kept" if self.args.checkpoint_dir else "")
            )

    def testing(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """``batches``, until the process is told to stop: the epoch is already saved, so the test can be redone."""
        for number, batch in enumerate(batches):
            if code := self._agreed_stop(number):
                self.ended = "preempted"
                raise exits.UserError(f"stopped while testing epoch {self.epoch}; {self._where_saved()}", code)
            yield batch

    def tested(self, correct: float, count: int, loss_sum: float, **more: float) -> None:
        """Note the test after this epoch: ``correct`` of ``count`` images, and the sum of their losses."""
        accuracy, loss = 100.0 * correct / count, loss_sum / count
        epoch = self.epoch
        self.log_to.say(test_line(self.world.label, 0, epoch, accuracy, clock()))
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
        """Write a checkpoint of this step, if there is a folder for it and it isn't there yet."""
        if not self._checkpoints or not self._snapshot or self._saved_step == self.global_step:
            return
        if self._read_loss:
            self._check_finite(self._read_loss())  # a checkpoint with NaN in it would be resumed for ever
        state = self._snapshot()
        meta = {"same": self._same, "global_step": self.global_step, "tests": self.tests, "curve": self.curve}
        if self.world.chief:
            path = self._checkpoints.save({**state, "run": json.dumps(meta)}, self.global_step)
            self.log_to.event("checkpoint", global_step=self.global_step, path=path)
        self._saved_step = self.global_step

    def exported(self, folder: str, names: list[str]) -> None:
        """Note what was exported into ``folder``."""
        self.log_to.say(f"Exported {', '.join(names)} to {folder}")
        self.log_to.event("export", folder=folder, names=names)

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self, weights_sha256: str = "", **more: Any) -> int:
        """Write the summary and the report; returns the exit code.

        ``weights_sha256`` tells two runs with the same result from two that differ in a single bit.
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
        if self.world.chief and self.args.output_dir:
            accuracies = [(test["step"], test["accuracy"]) for test in self.tests]
            report.write(self.args.output_dir, summary, self.curve, accuracies)
        self.log_to.say(json.dumps(summary))
        self.log_to.close()
        return self._code

    def _where_saved(self) -> str:
        if self._saved_step < 0:
            return "nothing is saved, there is no --checkpoint-dir"
        return f"step {self._saved_step} is saved, run again to go on"

    def _summary(self, best: float | None, weights_sha256: str, more: dict[str, Any]) -> dict[str, Any]:
        last = self.tests[-1] if self.tests else {"accuracy": None, "loss": None}
        images = self.meter.images * self.world.replicas
        count, seconds = self.world.compilations()
        return self.log_to.event(
            "summary", trainer=self.trainer, status=self.ended, exit_code=self._code, accuracy=last["accuracy"],
            max_accuracy=best, test_loss=last["loss"], loss_first=self._first_loss,
            loss_last=self.curve[-1][1] if self.curve else None, images_per_second=images
            / max(self.meter.training_seconds, 1e-9), train_seconds=self.meter.training_seconds,
            wall_seconds=time.monotonic() - self._started, data_wait=self._data_wait(), compile_count=count,
            compile_seconds=seconds, epochs=len(self.tests), global_step=self.global_step,
            resumed_from=self.resumed_from, device=self.world.label, replicas=self.world.replicas,
            processes=self.world.processes, global_batch=self.global_batch, seed=self.args.seed,
            weights_sha256=weights_sha256, versions=self._versions(), **more,
        )  # fmt: skip

    def _data_wait(self) -> float:
        return self.meter.waited / max(self.meter.training_seconds, self.meter.waited, 1e-9)

    def _versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), **self.world.versions()}

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
