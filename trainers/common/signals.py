"""SIGTERM and SIGINT as a request to stop after the current step."""

from __future__ import annotations

import signal
from types import FrameType

from trainers.common import exits


class StopRequest:
    """Becomes true when the process is told to end; the handlers only take a note, so no step is cut short."""

    def __init__(self) -> None:
        self.code = 0  # the exit code owed to the signal, 0 as long as there was none

    def install(self) -> None:
        """Catch SIGTERM (preemption, ``docker stop``) and the first SIGINT (Ctrl-C; a second one interrupts)."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.code = self.code or (exits.PREEMPTED if number == signal.SIGTERM else exits.INTERRUPTED)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self) -> bool:
        return self.code != 0
