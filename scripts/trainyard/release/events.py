"""Pass on the progress of a target: JSON lines, which `trainyard image --events` writes and `dev images` reads.

=========  =============================================================================
event      fields
=========  =============================================================================
stage      ``stage``: build, verify or smoke
step       ``stage`` of the Dockerfile and ``step`` within it, as in framework and 2/3
failed     ``reason``: the line that the command ends with
ready      ``result``: what `trainyard image --json` prints
=========  =============================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: Called with the name of an event and its fields.
Emit = Callable[..., None]


def ignore(event: str, **fields: Any) -> None:
    """Emit nothing: the :data:`Emit` of a command whose events no other process reads."""


def writer(descriptor: int) -> Emit:
    """Return an :data:`Emit` that writes to an open file descriptor."""

    def emit(event: str, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader was killed; the build does not depend on it
            os.write(descriptor, json.dumps({"event": event, **fields}).encode() + b"\n")

    return emit


def read(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events in the output of :func:`writer`, without an incomplete one that a killed process left."""
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict) and "event" in found:
                yield found
