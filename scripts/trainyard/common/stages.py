"""Report the stages of a command, such as build, verify and smoke, to the logger.

:class:`trainyard.common.console.Messages` draws a moving line for a stage on a terminal, which one line replaces when
it has ended. Elsewhere a stage is a line at its beginning and one at its end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

logger = logging.getLogger(__name__)

#: Level of what a stage does now: the moving line shows it, a log only with ``--verbose``.
NOW = logging.INFO - 5


@dataclass
class Stage:
    """Hold what the last line of a stage says about it in ``done``."""

    done: str = ""


def row(name: str, text: str) -> str:
    """Return a line of a command's answer: a name, and what it says."""
    return f"{name:<8} {text}".rstrip()


@contextlib.contextmanager
def stage(name: str, last: float | None = None) -> Iterator[Stage]:
    """Report that a stage begins, and how long it took when it has ended without an exception.

    Args:
        last: seconds that it took last time, if that is known.
    """
    running, started = Stage(), time.monotonic()
    before = f", {last:.0f} s last time" if last else ""
    logger.info(f"{name}{before}", extra={"moving": name, "before": before})
    try:
        yield running
    except BaseException:
        logger.info("", extra={"moving": ""})
        raise
    seconds = f"{time.monotonic() - started:.1f} s"
    logger.info(row(name, f"{seconds:>7}  {running.done}"), extra={"moving": ""})


def now(what: str) -> None:
    """Report what the stage that runs does now."""
    logger.log(NOW, what)
