"""A run of a trainer: its checkpoints, signals, log, and when it saves and tests. The trainer's file has the rest."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import IO, Any

from trainers.common import exits, flags, order, paths
from trainers.common.exits import USAGE, UserError, again
from trainers.common.log import Log

State = dict[str, Any]
Test = Callable[[Callable[[], None]], tuple[float, ...]]  # what Run.epochs() takes
BEST = "best.ckpt"


class Checkpoints:
    """Checkpoints ``step-<global step>.ckpt`` in ``folder``.

    ``write(state, file)`` and ``read(file)`` are the framework's. States consist of tensors and primitives only, so
    that loading a checkpoint cannot execute code. ``not_finite(state)`` returns the name of a weight with NaN or
    infinity, "" if there is none: every run that resumed from such a checkpoint would fail.
    """

    def __init__(
        self, folder: str, keep: int, write: Callable[[State, IO[bytes]], None], read: Callable[[IO[bytes]], State],
        not_finite: Callable[[State], str],
    ) -> None:  # fmt: skip
        self.folder, self.keep, self.write, self.read, self.not_finite = folder, keep, write, read, not_finite
        self._again = again(True)

    def steps(self) -> list[int]:
        """The global steps of the existing checkpoints, ascending."""
        found = (re.fullmatch(r"step-(\d+)\.ckpt", name) for name in paths.names(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> str:
        """The path of the checkpoint of global step ``step``."""
        return paths.join(self.folder, f"step-{step:09d}.ckpt")

    def prepare(self, resume: bool) -> None:
        """Create the folder and remove partial files of processes that were killed.

        Unless this run can ``resume``, move the checkpoints there to a new folder ``old-<UTC>`` in it: among them those
        of this run would be the oldest, and later runs would resume the earlier one. Raises :class:`UserError`.
        """
        self._again = again(resume)
        paths.make_folder(self.folder)
        names = paths.names(self.folder)
        for name in names:
            if re.fullmatch(r"\.(step-\d+|best)\.ckpt\.[0-9a-f]+\.tmp", name):
                paths.remove(paths.join(self.folder, name))
        others = [name for name in names if re.fullmatch(r"(step-\d+|best)\.ckpt", name)]
        if others and not (resume and self.steps()):
            set_aside(self.folder, others, paths.move)

    def save(self, state: State, step: int) -> str:
        """Write ``state``; raises :class:`UserError` if that fails, with all earlier checkpoints unchanged."""
        path = self._write(state, self.path(step))
        # Later ones cannot be used, or this run would have resumed from them: the newest are those up to this step.
        for old in [kept for kept in self.steps() if kept <= step][: -self.keep]:
            paths.remove(self.path(old))
        return path

    def save_best(self, state: State) -> str:
        """Write ``state`` as ``best.ckpt``, which no later :meth:`save` removes; raises like it."""
        return self._write(state, paths.join(self.folder, BEST))

    def _write(self, state: State, path: str) -> str:
        try:
            with paths.atomic_file(path) as file:
                self.write(state, file)
            return path
        # A full disk is a RuntimeError from torch's writer, an OSError from the file system.
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise cannot_save(path, reason, self.steps(), self._again) from None

    def newest(self) -> State | None:
        """Return the newest checkpoint that is readable and whose weights are finite, or None if the folder has none.

        Raises :class:`UserError` if there are checkpoints but none can be used: a run that started over would
        eventually replace them.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._load(self.path(step))
            except UserError as error:
                print(f"note: {error}; trying the one before", file=sys.stderr)
        check_usable(self.folder, steps)
        return None

    def best(self) -> State | None:
        """Return the checkpoint of :meth:`save_best`, or None; raise :class:`UserError` if it cannot be used."""
        if BEST not in paths.names(self.folder):
            return None
        try:
            return self._load(paths.join(self.folder, BEST))
        except UserError as error:
            raise UserError(f"{error}; move it away to keep the best of the following epochs") from None

    def _load(self, path: str) -> State:
        try:
            with paths.open_file(path) as file:
                state = self.read(file)
            if lacking := {"run", "log", "step"} - state.keys():
                raise ValueError(f"it has no {min(lacking)}")
            if name := self.not_finite(state):
                raise ValueError(f"its weight {name} is not finite")
            return state
        except Exception as error:  # damaged archives raise zlib.error, RuntimeError, KeyError and more
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path} cannot be used ({reason})") from None


def check_usable(folder: str, steps: list[int]) -> None:
    """Raise :class:`UserError` if there are checkpoints of ``steps``, none of which was usable."""
    if steps:
        raise UserError(f"{folder}: none of its {len(steps)} checkpoints can be used; use another --checkpoint-dir")


class StepFolders:
    """Checkpoints that all processes write: folders ``step-<step>`` with ``run.json``, which describes the run.

    One is complete once it has the file ``marker``, which is written last, and first removed.
    """

    marker = "run.json"

    def __init__(self, args: argparse.Namespace, run: dict[str, Any]) -> None:
        self.folder, self.keep, self.args, self.run = args.checkpoint_dir, args.keep_checkpoints, args, run

    def path(self, step: int) -> str:
        """Return the folder of the checkpoint after ``step`` steps."""
        return paths.join(self.folder, f"step-{step:09d}")

    def steps(self, complete: bool = True) -> list[int]:
        """Return the steps of the checkpoints in the folder, ascending; or of those that are not ``complete``."""
        steps = [int(name[5:]) for name in paths.names(self.folder) if name.startswith("step-") and name[5:].isdigit()]
        return sorted(step for step in steps if (self.marker in paths.names(self.path(step))) == complete)

    def prepare(self) -> None:
        """Remove incomplete checkpoints; with --no-resume, move the others to a folder old-<UTC>."""
        paths.make_folder(self.folder)
        for step in self.steps(complete=False):
            paths.remove(self.path(step))
        if steps := [] if self.args.resume else self.steps():
            set_aside(self.folder, [f"step-{step:09d}" for step in steps], paths.move)

    def about(self, step: int) -> tuple[dict[str, Any], str]:
        """Return what run.json of a checkpoint says, and what is wrong with it."""
        try:
            return json.loads(paths.read_file(paths.join(self.path(step), "run.json"))), ""
        except (UserError, OSError, ValueError) as error:
            return {}, f"run.json: {error}"


def set_aside(folder: str, names: list[str], move: Callable[[str, str], None]) -> None:
    """Move the checkpoints ``names`` of ``folder`` to a new folder ``old-<UTC>`` in it with ``move(path, target)``."""
    taken, began = paths.names(folder), time.strftime("old-%Y%m%dT%H%M%SZ", time.gmtime())
    unused = (began, *(f"{began}-{number}" for number in range(2, len(taken) + 3)))
    place = paths.join(folder, next(name for name in unused if name not in taken))
    for name in names:
        move(paths.join(folder, name), paths.join(place, name))
    print(f"note: the checkpoints of an earlier run are in {place} now", file=sys.stderr)


def cannot_save(path: str, reason: str, kept: list[int], again: str) -> UserError:
    """Return the error that the checkpoint ``path`` cannot be written, where those of the steps ``kept`` are."""
    rest = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no earlier checkpoint"
    return UserError(f"{path}: cannot be saved ({reason}); {rest}; free disk space and run the same command {again}"
                     " to resume")  # fmt: skip


def check_same_run(
    saved: dict[str, Any], now: dict[str, Any], args: argparse.Namespace, say: Callable[[str], None]
) -> None:
    """Raise :class:`UserError` unless the run ``now`` can continue from a checkpoint of the run ``saved``.

    Both describe a run by what decides its result, such as seed and batch size, the fingerprints of its ``data``, and
    other ``flags``. ``say`` is called with those flags that have changed, and with data that is accepted.
    """
    for name, value in now.items():
        if name not in ("data", "flags") and saved.get(name, value) != value:
            raise UserError(
                f"{args.checkpoint_dir}: its checkpoints have {name} {saved[name]}, this run has {value}: use the same"
                " value, or another --checkpoint-dir", USAGE)  # fmt: skip
    before, had = saved.get("data", {}), saved.get("flags", {})
    differing = ", ".join(what for what, fingerprint in now["data"].items() if before.get(what) != fingerprint)
    other = f"other data (other {differing})" if before else "data that they do not name"
    if differing and not args.accept_other_data:
        raise UserError(
            f"{args.checkpoint_dir}: its checkpoints are of {other}: use the same data, another --checkpoint-dir, or"
            " --accept-other-data to train them further on this data", USAGE)  # fmt: skip
    if had.get("ema") and not now["flags"].get("ema"):
        raise UserError(
            f"{args.checkpoint_dir}: its checkpoints have averaged weights, which are tested and exported: give --ema"
            f" {had['ema']}, too, or another --checkpoint-dir", USAGE)  # fmt: skip
    changed = [f"{flags.words(name, value)}, was {flags.words(name, had[name]).removeprefix(f'--{name} ')}"
               for name, value in now["flags"].items() if had.get(name, value) != value]  # fmt: skip
    if differing or changed:
        say(f"Resuming with {'; '.join([other] * bool(differing) + changed)}")


class Tracer:
    """Traces ``--profile`` steps after the first two, which compile and allocate, into ``--output-dir``."""

    def __init__(
        self, args: argparse.Namespace, profile: Callable[[str], Callable[[], None]], say: Callable[[str], None]
    ) -> None:
        """``profile(folder)`` starts to trace into ``folder``, and returns what ends it."""
        self._steps, self._profile, self._say = args.profile, profile, say
        self._folder = args.output_dir or args.logdir or "."
        self._next: int | None = None  # the step before which the trace begins, then that before which it ends
        self._open = contextlib.ExitStack()

    def step(self, step: int) -> None:
        """Call before each ``step``, or before the first of several that the device takes as one."""
        self._next = step + 2 if self._next is None else self._next
        if step >= self._next:
            self.close()
            if self._steps:
                self._next, self._steps = step + self._steps, 0
                folder = self._open.enter_context(paths.local_folder(self._folder))
                self._open.callback(self._say, f"Trace written to {self._folder}")
                self._open.callback(self._profile(folder))

    def close(self) -> None:
        """Write the trace, if it is not written yet."""
        self._open.close()


class Run:
    """A run, which continues the one in ``--checkpoint-dir``, if any.

    A context manager around its loop::

        with Run("torch.mnist", args, device, ..., model=model, optimizer=optimizer) as run:
            for epoch in run.epochs(test):
                for step, batch in run.steps(batches(epoch, run.step_in_epoch)):
                    run.end_step(train_step(batch), rate)
            run.finish(export)

    Steps are global and count from 0. After each step it logs, saves where that is due, and stops on SIGTERM; after
    each epoch it saves and tests. A device may take up to :attr:`due` steps as one.
    """

    def __init__(
        self, name: str, args: argparse.Namespace, device: Any, *, global_batch: int, train_count: int, test_count: int,
        data: dict[str, str], **parts: Any,
    ) -> None:  # fmt: skip
        """``data`` are fingerprints of the data set; ``parts`` is what a checkpoint holds: ``model``, ``optimizer``,
        ``average`` (the averaged model, which is tested instead) and others that are not None."""
        self.args, self.device, self.test_count = args, device, test_count
        self.parts = {part: value for part, value in parts.items() if value is not None}
        self.tested = self.parts.get("average", self.parts["model"])
        self.steps_per_epoch = order.steps_per_epoch(train_count, global_batch)
        self.total_steps = args.epochs * self.steps_per_epoch
        self.peak = args.lr * (device.replicas if args.scale_lr else 1)  # of the learning rate
        self.step = self._saved = 0  # steps done, and of those the steps in the newest checkpoint
        self.epoch, self._end = 1, 0  # the epoch, and the step at which its training ends
        self.code = 0  # the exit code
        self._status = "completed"
        self._resumed: State | None = None
        self._loss: Any = None  # of the last step
        self._about = {"trainer": name, "model": getattr(args, "model", ""), "optimizer": args.optimizer,
                       "seed": args.seed, "global_batch": global_batch, "train_images": train_count, "data": data,
                       "flags": flags.deciding(args, device.precision)}  # fmt: skip
        self._checkpoints = Checkpoints(args.checkpoint_dir, args.keep_checkpoints, device.write, device.read,
                                        device.not_finite)  # fmt: skip
        self._stop = exits.Stop(device.maximum if device.processes > 1 else None, args.checkpoint_minutes)
        self.log = Log(name, args, device, global_batch, self.steps_per_epoch)
        self._tracer = Tracer(args, device.profile, self.log.say)

    @property
    def step_in_epoch(self) -> int:
        """Return the number of steps of this epoch that are done."""
        return self.step - (self.epoch - 1) * self.steps_per_epoch

    @property
    def due(self) -> int:
        """Return the number of steps up to the next one that is logged, or behind which it saves or ends the epoch."""
        counts: list[int] = [self._end - self.step, -self.step_in_epoch % self.args.log_steps + 1]
        if every := self.args.checkpoint_steps:
            counts.append(every - self.step % every)
        return min(counts)

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self.log)
            self._resume()
            self.log.start(self.peak, **self._about)
            self._stop.install()
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def _resume(self) -> None:
        args, checkpoints = self.args, self._checkpoints
        if args.checkpoint_dir and self.device.chief and not args.eval_only:
            checkpoints.prepare(args.resume)
        if args.checkpoint_dir and args.resume:
            read = checkpoints.best if args.eval_only and args.keep_best else checkpoints.newest
            self._resumed = self.device.agreed_state(read)
        if self._resumed:
            check_same_run(json.loads(self._resumed["run"]), self._about, args, self.log.say)
            self.device.load(self.parts, self._resumed)
            self.step = self._saved = self._resumed["step"]
            self.log.load(self._resumed["log"], self.step)

    def epochs(self, test: Test) -> Iterator[int]:
        """Yield each epoch, from 1, for its :meth:`steps`, and test after it; with ``--eval-only``, only test.

        ``test(poll)`` calls ``poll()`` before each batch, and returns the number of correct answers, the sum of losses,
        and, if it has it, the number of correct answers among the best five.
        """
        if self.args.eval_only:
            if not self._resumed:
                raise UserError(f"--eval-only: {self.args.checkpoint_dir} has no checkpoint", USAGE)
            self.epoch = self.step // self.steps_per_epoch
            self._test(test)
            return
        for epoch in range(len(self.log.tests) + 1, self.args.epochs + 1):
            self.epoch = epoch
            yield epoch
            if self.step < epoch * self.steps_per_epoch:
                self._status = "preempted" if self.code else "stopped"
                return
            best, accuracy = self.log.best, self._test(test)
            if self.args.keep_best and (best is None or accuracy > best):
                state = self._state()
                if self.device.chief:
                    self._checkpoints.save_best(state)
            if self.args.target_accuracy and accuracy >= self.args.target_accuracy:
                self._status = "reached"
                return

    def steps(self, batches: Generator[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the next step and its batch, up to the end of the epoch; call :meth:`end_step` after each.

        ``batches`` start with the first step that is not done. Random numbers are seeded with the step.
        """
        end = self.epoch * self.steps_per_epoch
        self._end = min(end, self.args.num_steps or end)
        self.log.begin_epoch(self.epoch)
        self._stop.restart()
        with contextlib.closing(batches):
            while self.step < self._end and not self.code:
                self._tracer.step(self.step)
                with self.log.waiting():
                    batch = next(batches)
                self.device.seed_step(self.step)
                yield self.step, batch
        self._check_loss()  # waits until the device has done all steps, so that the time is right
        self.log.end_epoch(self.epoch, complete=self.step == end)
        if self.code or self.step < end or not self.args.checkpoint_steps or self.step == self.total_steps:
            self._save()

    def end_step(self, loss: Any, learning_rate: float, count: int = 1) -> None:
        """End ``count`` steps, the last with ``loss``, which is on the device, and read only if it is logged."""
        self._loss = loss
        self.device.end_step()
        self.step += count - 1
        self.log.step(self.epoch, self.step, count)
        if self.step_in_epoch % self.args.log_steps == 0:
            self.log.train(self.epoch, self.step, self.device.mean(loss), learning_rate)
        self.step += 1
        self.code = self._stop.poll()  # of SIGTERM, agreed by all processes
        if self._stop.save_due or (self.args.checkpoint_steps and self.step % self.args.checkpoint_steps == 0):
            self._save()

    def finish(self, export: Callable[[str], list[str]], test_of_export: Test | None = None, **more: Any) -> None:
        """Export and write the summary. ``export(folder)`` writes the tested model and returns the names of its files;
        ``test_of_export`` tests it in fp32, if it was tested in another precision; ``more`` is for the summary."""
        args, log, device = self.args, self.log, self.device
        self._tracer.close()
        if self._status == "completed" and log.tests[-1]["accuracy"] < args.target_accuracy:
            self._status, self.code = "missed", exits.TARGET_MISSED
        if args.keep_best and (state := device.agreed_state(self._checkpoints.best)):
            log.say(f"Best checkpoint: step {state['step']}")
            device.load(self.parts, state)
        digest = device.digest(self.tested)
        exports = bool(args.export_dir) and device.chief and self._status not in ("stopped", "preempted")
        if test_of_export and device.maximum([exports])[0]:
            self._stop.restart()
            more["exported_accuracy"] = 100 * test_of_export(self._poll)[0] / self.test_count
            log.say(f"Exported model: test accuracy {more['exported_accuracy']:.2f} % in fp32")
        if exports:
            log.exported(args.export_dir, export(args.export_dir))
        log.finish(self._status, self.code, digest, **more)

    def _check_loss(self) -> None:
        if self._loss is not None:
            self.log.check_finite(self.device.mean(self._loss))

    def _state(self) -> State:
        self._check_loss()  # every resumed run would fail on a checkpoint with NaN
        state = self.device.state(self.parts)
        self.log.check_weights(self.device.not_finite(state))
        return {**state, "run": json.dumps(self._about), "log": self.log.state(), "step": self.step}

    def _save(self) -> None:
        if self.args.checkpoint_dir and self._saved < self.step:
            with self.log.paused():
                self.log.check_held()
                state = self._state()
                path = self._checkpoints.save(state, self.step) if self.device.chief else ""
                self.log.saved(self.step, path)
            self._saved = self.step
            self._stop.saved()

    def _poll(self) -> None:
        if code := self._stop.poll():
            raise UserError(f"stopped while testing epoch {self.epoch}; {self.log.where_saved()}", code)

    def _test(self, test: Test) -> float:
        self._stop.restart()
        correct, loss_sum, *top5 = test(self._poll)
        self.log.check_weights(self.device.not_finite(self.device.state({"model": self.tested})))
        more = {"top5": 100 * top5[0] / self.test_count} if top5 else {}
        return self.log.test(self.epoch, self.test_count, correct, loss_sum, **more)
