"""Messages and results.

People read stderr: messages, progress, tables. Programs read stdout, which holds the result alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    log: Console


#: Whether only warnings and errors are printed.
_quiet = False


def be_quiet(quiet: bool = True) -> None:
    """Print warnings and errors only, or everything again."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Whether only warnings and errors are printed."""
    return _quiet


#: What a message is translated by, before it is printed.
_translate: Callable[[str], str] = str


def translate_messages(translate: Callable[[str], str] = str) -> None:
    """Print messages as ``translate`` returns them; without an argument, as they are."""
    global _translate
    _translate = translate


@cache
def _console(quiet: bool) -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty(), quiet=quiet)


def __getattr__(name: str) -> Any:
    """``log``, the console on stderr, is made on first use: importing rich takes longer than ``--help`` may."""
    if name == "log":
        return _console(_quiet)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _print(message: str, style: str = "") -> None:
    message = _translate(message)
    if sys.stderr.isatty():
        _console(False).print(message, markup=False, style=style)
    else:  # without rich, whose import takes longer than pushing code
        print(message, file=sys.stderr, flush=True)


def say(message: str, style: str = "") -> None:
    """Print a line, on a terminal in a style of rich."""
    if not _quiet:
        _print(message, style)


def warn(message: str) -> None:
    """Print a warning."""
    _print(f"WARNING: {message}", "bold yellow")


def fail(message: str) -> None:
    """Print the line that a command ends with when it failed."""
    _print(message, "bold red")


def result(data: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the machine-readable result on stdout, if it was asked for."""
    if as_json:
        import json

        print(json.dumps(data, indent=2, sort_keys=True))
