"""The console: lines, tables and results that the command line prints.

People read stderr: messages, progress, tables. Programs read stdout, which holds the result alone. Libraries do not
print: they report to their logger what they do (info) and what the user should know (warning), and :class:`Messages`
shows it while a command runs.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from trainyard.common import settings
from trainyard.common.errors import visible
from trainyard.common.stages import NOW

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: The loggers of all packages outside the images.
_LOGGERS = [logging.getLogger(name) for name in ("trainyard", "trainyard_jobs")]

#: A command in quotes, after sudo or variables for it.
_COMMAND = re.compile(rf"(?<!\w)(['`](?:sudo |{settings.PREFIX}[A-Z_]+=\S* )*)trainyard (?=[a-z-])")

#: Styles of rich for the lines of a level.
_STYLES = {logging.WARNING: "bold yellow", logging.ERROR: "bold red"}


@cache
def terminal() -> Console:
    """Return rich's console on stderr. Importing rich takes longer than ``--help`` may."""
    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for part in super().render(*args, **kwargs):
                yield part if part.control else part._replace(text=visible(part.text))

    # Text of users' files is printed as it is: neither [x] nor :cat: has a meaning.
    return Terminal(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty(), markup=False, emoji=False)


def _moves() -> bool:
    """Return whether stderr is a terminal that lines can move on."""
    return sys.stderr.isatty() and not terminal().is_dumb_terminal


def _line(name: str, before: str) -> Progress:
    """Return a line that moves while a stage runs: its name, for how long it has run, and what it does now.

    Args:
        before: follows the seconds.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    fixed, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    line = Progress(
        SpinnerColumn(table_column=fixed),
        TextColumn("{task.description} {task.elapsed:.0f} s{task.fields[before]} ", markup=False, table_column=fixed),
        TextColumn("{task.fields[now]}", markup=False, table_column=rest),
        console=terminal(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
    )
    line.add_task(name, total=None, before=before, now="")
    return line


class Messages(logging.Handler):
    """Show what is reported while a command runs, a line each on stderr: ``with Messages(): ...``.

    The records of :mod:`trainyard.common.stages` begin and end a line that moves, on a terminal.

    Commands that a message names in quotes are those that the user can type. A warning is shown once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()
        self._moving: Progress | None = None

    def __enter__(self) -> Messages:
        self._before = [(logger.handlers, logger.level) for logger in _LOGGERS]
        for logger in _LOGGERS:
            logger.handlers = [self]
            logger.setLevel(NOW)
        return self

    def __exit__(self, *_error: object) -> None:
        for logger, (handlers, level) in zip(_LOGGERS, self._before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, a warning or an error in one line, or begin, change or end the moving line."""
        text = visible(record.getMessage()).replace("\n", "\\n" if record.levelno >= logging.WARNING else "\n")
        if record.levelno == logging.WARNING:
            if text in self._warned:
                return
            self._warned.add(text)
        if record.levelno > NOW:
            text = f"WARNING: {text}" if record.levelno == logging.WARNING else text
            text = _COMMAND.sub(rf"\1{settings.program()} ", text)
        moving = getattr(record, "moving", None)
        if moving is not None and _moves():
            if self._moving:
                self._moving.stop()
            self._moving = _line(moving, record.__dict__["before"]) if moving else None
            if self._moving:
                self._moving.start()
                return
        if moving is not None and is_verbose() and settings.standard_variable("GITHUB_ACTIONS"):
            text = f"::group::{text}" if moving else f"::endgroup::\n{text}".rstrip()
        if record.levelno == NOW and self._moving:
            self._moving.update(self._moving.task_ids[0], now=text)
        if not text or (record.levelno == NOW and not is_verbose()):
            return
        if sys.stderr.isatty():
            style = getattr(record, "style", "") or _STYLES.get(record.levelno, "")
            terminal().print(text, markup=False, style=style)
        else:  # without rich, whose import takes longer than pushing code
            print(text, file=sys.stderr, flush=True)


def be_quiet() -> None:
    """Show warnings and errors only, until the command ends."""
    for logger in _LOGGERS:
        logger.setLevel(logging.WARNING)


def be_verbose() -> None:
    """Show details, too, until the command ends."""
    for logger in _LOGGERS:
        logger.setLevel(logging.DEBUG)


def is_verbose() -> bool:
    """Return whether details are shown."""
    return _LOGGERS[0].isEnabledFor(logging.DEBUG)


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
