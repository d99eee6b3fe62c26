"""SIGTERM and SIGINT as a request to stop after the current step."""

from __future__ import annotations

import signal
from types import FrameType

from trainers.common import exits


class StopRequest:
    """True once the process has received SIGTERM or SIGINT. The handlers only record it, so that steps complete."""

    def __init__(self) -> None:
        self.code = 0  # the exit code for the signal, 0 until one is received

    def install(self) -> None:
        """Catch SIGTERM (preemption, ``docker stop``) and the first SIGINT (Ctrl-C); a second SIGINT interrupts."""
        signal.signal(signal.SIGTERM, self._record)
        signal.signal(signal.SIGINT, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.code = self.code or (exits.PREEMPTED if number == signal.SIGTERM else exits.INTERRUPTED)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self) -> bool:
        return self.code != 0
