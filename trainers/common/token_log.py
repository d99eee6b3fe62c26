"""Report the losses of a trainer of language models, its tokens per second, and the part of the peak that it uses."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainers.common import exits
from trainers.common.log import Devices, Journal


class TokenLog(Journal):
    """Log a run that trains on tokens."""

    def __init__(self, trainer: str, args: argparse.Namespace, devices: Devices) -> None:
        super().__init__(trainer, args, devices)
        self.tokens_per_step, self.flops_per_token = 0, 0.0  # set once they are known
        self.peak: float | None = None  # operations per second of all devices
        self.mark = time.perf_counter()
        self.seconds, self.trained = 0.0, 0  # of training, and the steps in it
        self._logged = (0.0, 0)  # both, when the last line was logged

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Return the model FLOPs utilization in percent, nothing if the devices' peak is not known."""
        if not self.peak:
            return {}
        return {"mfu": 100 * tokens_per_second * self.flops_per_token / self.peak}

    # --- in the order in which a loop calls them --------------------------------------------------------

    def start(self, **what: Any) -> None:
        """Log the beginning of the run, which ``what`` describes; from now on, time counts as training."""
        self.begin(**what)
        self.mark = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count as training: compilation, validation, saving."""
        self.pause()
        try:
            yield
        finally:
            self.mark = time.perf_counter()

    def pause(self) -> None:
        """Count no more time as training."""
        self.seconds += time.perf_counter() - self.mark
        self.mark = time.perf_counter()

    def count(self, step: int) -> None:
        """Count a step, after which ``step`` steps are done."""
        self._step, self.trained = step, self.trained + 1

    def train(self, loss: float, rate: float, norm: float) -> None:
        """Log the ``loss`` of the last step, the same in all processes, its learning rate and norm of gradients."""
        with self.paused():
            seconds, trained = self.seconds - self._logged[0], self.trained - self._logged[1]
            self._logged = (self.seconds, self.trained)
            speed = trained * self.tokens_per_step / max(seconds, 1e-9)
            self.add_loss(loss)
            mfu = self._mfu(speed)
            self.say(f"step {self._step}/{self.args.max_steps}: loss {loss:.4f}, lr {rate:.3g}, norm {norm:.3f},"
                     f" {speed:,.0f} tokens/s" + (f", MFU {mfu['mfu']:.1f} %" if mfu else ""))  # fmt: skip
            self._output.event("train", global_step=self._step, loss=loss, learning_rate=rate, norm=norm,
                               tokens_per_second=speed, **mfu)  # fmt: skip
            self._output.scalars(self._step, train_loss=loss, train_tokens_per_second=speed)

    def validation(self, loss: float, count: int) -> None:
        """Log the validation ``loss`` of ``count`` tokens; raises :class:`Diverged` if it is not finite."""
        self.check_finite(loss)
        self.say(f"step {self._step}: val loss {loss:.4f}, {self.seconds:.1f} s of training")
        self._output.event("test", global_step=self._step, loss=loss, count=count, train_seconds=self.seconds)
        self._output.scalars(self._step, val_loss=loss)
        self.add_test(loss=loss)

    def results(self) -> dict[str, Any]:
        """Return losses and speed."""
        speed = self.trained * self.tokens_per_step / max(self.seconds, 1e-9)
        losses = [test["loss"] for test in self.tests]
        return {
            "val_loss": losses[-1] if losses else None, "min_val_loss": min(losses, default=None),
            "loss_first": self.curve[0][1] if self.curve else None,
            "loss_last": self.curve[-1][1] if self.curve else None,
            "tokens_per_second": speed, **self._mfu(speed), "train_seconds": self.seconds,
        }  # fmt: skip


class TokenRun:
    """Decide when a run that trains on tokens validates and saves, and how it ends.

    ::

        run = TokenRun(log, args, device, resumed, about)
        for step in run.steps(validate, tokens, save):
            loss, norm = train_step(step)
            run.end_step(loss, rate, lambda: float(norm))

    Steps count from 0. ``resumed`` is what a checkpoint says about its run, with ``step`` and ``log``, or None.
    """

    def __init__(
        self, log: TokenLog, args: argparse.Namespace, device: Any, resumed: dict[str, Any] | None,
        about: dict[str, Any],
    ) -> None:  # fmt: skip
        """Log the beginning of the run, which ``about`` describes; from now on, time counts as training."""
        self.log, self.args, self.device = log, args, device
        self.step, self._saved = 0, -1  # steps done, and those in the newest checkpoint
        if resumed:
            self.step = self._saved = resumed["step"]
            log.load(resumed["log"], self.step)
        elif args.eval_only:
            raise exits.UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", exits.USAGE)
        log.start(**about)
        self.stop = exits.Stop(device.maximum if device.processes > 1 else None, args.checkpoint_minutes)
        self.stop.install()
        self.status, self.code = "completed", 0
        self._last = min(args.num_steps or args.max_steps, args.max_steps)  # the number of steps to train
        self._losses: Any = 0.0  # their sum since they were read last shows any that is not finite

    @property
    def complete(self) -> bool:
        """Return whether the run has come to its end, so that its model is exported."""
        return self.status not in ("stopped", "preempted")

    def steps(
        self, validate: Callable[[], float | None], tokens: int, save: Callable[[int, str], str]
    ) -> Iterator[int]:
        """Yield each step; call :meth:`end_step` after it.

        Args:
            validate: returns the loss of the ``tokens`` of the validation set; None if ``self.stop`` asks to stop.
            save: writes a checkpoint of a step with a state of the log; returns its path.
        """
        args, log = self.args, self.log
        self._save_to = save
        while True:
            done = self.step >= self._last or args.eval_only
            if self.step % args.eval_steps == 0 < self.step or self.step == args.max_steps or args.eval_only:
                with log.paused():
                    self.stop.restart()
                    loss = validate()
                if loss is None:
                    self.code = self.stop.code
                    self._save()
                else:
                    log.validation(loss, tokens)
                    if loss <= args.target_loss:
                        self.status, done = "reached", True
            if self.code or done:
                break
            yield self.step
        log.pause()
        if self.code:
            self.status = "preempted"
        elif self.status == "completed" and not args.eval_only:
            if self.step < args.max_steps:
                self.status = "stopped"
            elif args.target_loss:
                self.status, self.code = "missed", exits.TARGET_MISSED

    def end_step(self, loss: Any, learning_rate: float, norm: Callable[[], float]) -> None:
        """End a step with a ``loss`` on the device and a ``norm`` of its gradients, read only if they are logged."""
        args, log = self.args, self.log
        self._losses = self._losses + loss
        self.step += 1
        log.count(self.step)
        if self.step % args.log_steps == 0 or log.trained == 1:
            log.check_finite(self.device.mean(self._losses))
            self._losses = 0.0 * loss
            log.train(self.device.mean(loss), learning_rate, norm())
        self.code = self.stop.poll()  # of SIGTERM, agreed by all processes
        due = self.stop.save_due or self.step == self._last
        if self.code or due or self.step % (args.checkpoint_steps or args.eval_steps) == 0:
            self._save()

    def _save(self) -> None:
        if self.args.checkpoint_dir and self._saved != self.step:
            with self.log.paused():
                self.log.check_held()
                self.log.check_finite(self.device.mean(self._losses))
                self.log.saved(self.step, self._save_to(self.step, self.log.state()))
                self.stop.saved()
            self._saved = self.step
