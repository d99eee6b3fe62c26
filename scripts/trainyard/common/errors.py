"""The errors that end a command with one line, and the words of that line."""

from __future__ import annotations

import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can correct: one line that says what is wrong, where, and what to do. Exit status 2."""


class StepFailed(Exception):
    """A step ran and failed; the message gives the reason in one line. Exit status 1."""


class EngineFailed(StepFailed):
    """Report that the Docker engine failed, or is none: whatever was to be done with it was neither good nor bad."""


def one_line(text: str) -> str:
    """Return a text that is not ours with line breaks and other control characters escaped."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def visible(text: str) -> str:
    """Return a text that is not ours as the terminal may have it: with control characters escaped, in its own lines."""
    return re.sub(r"[^\n\t]+", lambda match: one_line(match[0]), text)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the valid spelling nearest to ``word``; empty if none is near."""
    import difflib

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.65)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
