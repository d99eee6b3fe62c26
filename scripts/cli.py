"""What every verb's command line has in common.

A verb is a module with a ``main`` that :func:`run` runs; ``make VERB TARGET=x`` runs ``python -m scripts.VERB x``.
People read stderr (log, progress, tables); machines read stdout, which holds the result alone, with ``--json``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

#: The project's top folder.
ROOT = Path(__file__).resolve().parent.parent

#: Where verbs keep what they learn about images (never committed).
STATE = Path(os.environ.get("TRAINYARD_BUILD", ROOT / "build"))

log = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


class UserError(Exception):
    """Something the user can mend: one line that says what is wrong, where, and what to do. Exit status 2."""


class StepFailed(Exception):
    """A step ran and failed for a reason its message gives in a line. Exit status 1."""


def say(message: str) -> None:
    """A line for people."""
    log.print(message, markup=False)


def warn(message: str) -> None:
    """A line people must not miss."""
    log.print(f"WARNING: {message}", style="bold yellow", markup=False)


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the valid spelling nearest to ``word``; empty if none is near."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def result(data: dict[str, Any], *, as_json: bool) -> None:
    """The machine-readable result, on stdout."""
    if as_json:
        print(json.dumps(data, indent=2, sort_keys=True))


def parser(module_doc: str | None, *, target: bool = True) -> argparse.ArgumentParser:
    """An argument parser with what all verbs take: ``--json``, and a target unless ``target`` is False.

    Both may come from make's variables instead, ``TARGET=`` and ``JSON=1``, which reach us through the environment.
    """
    found = argparse.ArgumentParser(
        description=(module_doc or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if target:
        found.add_argument(
            "target",
            nargs="?",
            default=os.environ.get("TARGET"),
            help="a folder under images/ by its name, or the path of any folder with an image.yaml",
        )
    found.add_argument(
        "--json", action="store_true", default=bool(os.environ.get("JSON")), help="print the result as JSON on stdout"
    )
    return found


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a verb: turn what went wrong into one line and an exit status.

    0 done · 1 a step failed · 2 the user's mistake · 130 interrupted.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    verb = Path(sys.argv[0]).stem.replace("_", "-")
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except UserError as error:
        log.print(f"{verb}: {error}", style="bold red", markup=False)
        sys.exit(2)
    except StepFailed as error:
        log.print(f"{verb}: {error}", style="bold red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        log.print(f"{verb}: interrupted; nothing was tagged or published", style="bold red", markup=False)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout went away, as `make list | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        log.print(f"{verb}: {error.strerror or error}{where}", style="bold red", markup=False)
        sys.exit(1)
