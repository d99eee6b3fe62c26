"""Messages, results, the errors that end a command, and checks of what is installed.

People read stderr: messages, progress, tables. Programs read stdout, which holds the result alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    log: Console


class UserError(Exception):
    """A mistake that the user can correct: one line that says what is wrong, where, and what to do. Exit status 2."""


class StepFailed(Exception):
    """A step ran and failed; the message gives the reason in one line. Exit status 1."""


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


@cache
def _stderr() -> Console:
    return _console()


@cache
def _errors() -> Console:
    """The console for warnings and errors, which ``--quiet`` leaves."""
    return _console()


def be_quiet() -> None:
    """Print warnings and errors only."""
    _stderr().quiet = True


def is_quiet() -> bool:
    """Whether :func:`be_quiet` was called."""
    return _stderr().quiet


def __getattr__(name: str) -> Any:
    """``log``, the console on stderr, is made on first use: importing rich takes longer than ``--help`` may."""
    if name == "log":
        return _stderr()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def say(message: str) -> None:
    """Print a line."""
    _stderr().print(message, markup=False)


def warn(message: str) -> None:
    """Print a warning."""
    _errors().print(f"WARNING: {message}", style="bold yellow", markup=False)


def fail(message: str) -> None:
    """Print the line that a command ends with when it failed."""
    _errors().print(message, style="bold red", markup=False)


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the valid spelling nearest to ``word``; empty if none is near."""
    import difflib

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def result(data: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the machine-readable result on stdout, if it was asked for."""
    if as_json:
        import json

        print(json.dumps(data, indent=2, sort_keys=True))
