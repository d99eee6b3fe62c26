"""Images per second as pytorch/xla counts them, and what the time went on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator


class Meter:
    """Rate and GlobalRate of one device, in images per second.

    Both follow pytorch/xla's log analyzer: Rate mixes 0.6 of the images since the last reading with 0.4 of the
    previous Rate (``RATE_TRACKER_SMOOTHING`` replaces the 0.4); GlobalRate is all images over all time,
    compilation and evaluation included.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.smoothing = float(os.environ.get("RATE_TRACKER_SMOOTHING") or 0.4)
        self.begun = self.read_at = clock()
        self.images = self.unread = 0
        self.rate: float | None = None
        self.training_seconds = self.waited = 0.0

    def add(self, images: int) -> None:
        """Count ``images`` trained on by this device."""
        self.images += images
        self.unread += images

    def read(self) -> tuple[float, float]:
        """Rate and GlobalRate now."""
        now = self.clock()
        current = self.unread / max(now - self.read_at, 1e-9)
        self.rate = current if self.rate is None else (1 - self.smoothing) * current + self.smoothing * self.rate
        self.read_at, self.unread = now, 0
        return self.rate, self.images / max(now - self.begun, 1e-9)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Time spent here counts as training (evaluation, saving and set-up do not)."""
        start = self.clock()
        try:
            yield
        finally:
            self.training_seconds += self.clock() - start

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent here is the trainer waiting for data."""
        start = self.clock()
        try:
            yield
        finally:
            self.waited += self.clock() - start
