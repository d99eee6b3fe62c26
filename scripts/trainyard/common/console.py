"""The console: lines, tables and results that the command line prints.

People read stderr: messages, progress, tables. Programs read stdout, which holds the result alone. Libraries do not
print: they report to their logger what they do (info) and what the user should know (warning), and :class:`Messages`
shows it while a command runs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from trainyard.common import registration

if TYPE_CHECKING:
    from rich.console import Console

#: The loggers of all packages outside the images.
_LOGGERS = [logging.getLogger(name) for name in ("trainyard", *registration.NEIGHBOURS)]

#: Styles of rich for the lines of a level.
_STYLES = {logging.WARNING: "bold yellow", logging.ERROR: "bold red"}


@cache
def terminal() -> Console:
    """Return rich's console on stderr. Importing rich takes longer than ``--help`` may."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


class Messages(logging.Handler):
    """Show what is reported while a command runs, a line each on stderr: ``with Messages(): ...``.

    Args:
        translate: returns a message in the words that the user knows commands by.
    """

    def __init__(self, translate: Callable[[str], str] = str) -> None:
        super().__init__()
        self.translate = translate

    def __enter__(self) -> Messages:
        self._before = [(logger.handlers, logger.level) for logger in _LOGGERS]
        for logger in _LOGGERS:
            logger.handlers = [self]
            logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_error: object) -> None:
        for logger, (handlers, level) in zip(_LOGGERS, self._before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        text = record.getMessage()
        text = self.translate(f"WARNING: {text}" if record.levelno == logging.WARNING else text)
        if sys.stderr.isatty():
            style = getattr(record, "style", "") or _STYLES.get(record.levelno, "")
            terminal().print(text, markup=False, style=style)
        else:  # without rich, whose import takes longer than pushing code
            print(text, file=sys.stderr, flush=True)


def be_quiet() -> None:
    """Show warnings and errors only, until the command ends."""
    for logger in _LOGGERS:
        logger.setLevel(logging.WARNING)


def say(message: str, style: str = "") -> None:
    """Print a line, on a terminal in a style of rich."""
    _LOGGERS[0].info(message, extra={"style": style})


def warn(message: str) -> None:
    """Print a warning."""
    _LOGGERS[0].warning(message)


def fail(message: str) -> None:
    """Print the line that a command ends with when it failed."""
    _LOGGERS[0].error(message)


def show(part: object) -> None:
    """Print what a library made for people: a finding, a line, or a table or text of rich."""
    from trainyard.common.rule_engine import Finding

    if isinstance(part, Finding):
        say(f"{part.severity.upper()} {part}", _STYLES[logging.ERROR if part.fails else logging.WARNING])
        say(f"  why: {part.why}\n  fix: {part.remediation}")
    elif isinstance(part, str):
        say(part)
    elif _LOGGERS[0].isEnabledFor(logging.INFO):
        terminal().print(part)


def result(data: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the machine-readable result on stdout, if it was asked for."""
    if as_json:
        import json

        print(json.dumps(data, indent=2, sort_keys=True))
