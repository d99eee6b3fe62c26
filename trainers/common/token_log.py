"""Report the losses of a trainer of language models, its tokens per second, and the part of the peak that it uses."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

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
