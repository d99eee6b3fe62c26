"""Images per second as pytorch/xla counts them, and the time spent training and waiting for data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator


class Meter:
    """Rate and GlobalRate of one device, in images per second.

    Both follow pytorch/xla's ``RateTracker``: Rate is 0.6 times the rate since the last reading plus 0.4 times the
    previous Rate (``RATE_TRACKER_SMOOTHING`` replaces the 0.4); GlobalRate is all images divided by the total time,
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
        start = self.clock()
        try:
            yield
        finally:
            self.training_seconds += self.clock() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent in this context as waiting for data."""
        start = self.clock()
        try:
            yield
        finally:
            self.waited += self.clock() - start
