"""Which paths a ``.dockerignore`` leaves out, as Docker's builders decide it.

The Docker SDK for Python has a matcher too, after an implementation that its authors call buggy because it looks at one
parent folder only: https://github.com/moby/patternmatcher/blob/v0.6.0/patternmatcher.go (``Matches``). This one is
``MatchesOrParentMatches`` of the same file; https://docs.docker.com/build/concepts/context/#dockerignore-files.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from trainyard.common.errors import UserError
from trainyard.spec import yaml_source
from trainyard.spec.model import relative

#: Name of the file.
FILE = ".dockerignore"


class _Pattern:
    """Compare paths with :func:`_parts` in linear time, as Go does: all positions at once, as bits of an integer."""

    def __init__(self, parts: list[tuple[str, int]], exception: bool) -> None:
        self._parts, self.exception = [(re.compile(text, re.DOTALL), step) for text, step in parts], exception
        self._after = cache(self._read)

    def _read(self, positions: int, character: str) -> int:
        """Return the positions after a character; at the start, before any, if it is empty."""
        reached = 0 if character else 1
        for at, (part, step) in enumerate(self._parts):
            if positions >> at & 1 and step < 2 and part.fullmatch(character):
                reached |= 1 << at + step
            if reached >> at & 1 and step != 1:  # without a character
                reached |= 2 << at | (step > 1) << at + step
        return reached

    def matches(self, path: str) -> bool:
        """Return whether it matches a path or a folder above it."""
        positions = self._after(0, "")
        for character in f"{path}/":
            if character == "/" and positions >> len(self._parts):
                return True
            if not (positions := self._after(positions, character)):
                return False
        return False


class Matcher:
    """The patterns of a ``.dockerignore``.

    Args:
        lines: of the file.
        where: its name in messages.
    Raises:
        UserError: a line is not a pattern.
    """

    def __init__(self, lines: Iterable[str], where: str = FILE) -> None:
        self._patterns = list(_patterns(lines, where))

    def __call__(self, path: str) -> bool:
        """Whether ``path``, relative to the file's folder and with slashes, is left out."""
        left_out = False
        for pattern in self._patterns:
            if pattern.exception == left_out and pattern.matches(path):
                left_out = not left_out
        return left_out


def read(folder: Path) -> Matcher:
    """The matcher of ``folder``; it leaves nothing out if there is no such file.

    Raises:
        UserError: the file cannot be read, or a line is not a pattern.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return Matcher([])
    return Matcher(yaml_source.text(path).split("\n"), relative(path))


def _patterns(lines: Iterable[str], where: str) -> Iterable[_Pattern]:
    """https://github.com/moby/patternmatcher/blob/v0.6.0/ignorefile/ignorefile.go (``ReadAll``)."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or line.startswith("#"):
            continue
        exception = text.startswith("!")
        text = text[1:].strip() if exception else text
        if exception and not text:
            raise UserError(f"{where}:{number}: '!' has no pattern after it")
        cleaned = re.sub("^/+", "/", posixpath.normpath(text))
        cleaned = cleaned[1:] if len(cleaned) > 1 and cleaned.startswith("/") else cleaned
        try:
            yield _Pattern(list(_parts(cleaned)), exception)
        except re.error:
            raise UserError(f"{where}:{number}: '{text}' is not a pattern") from None


#: What Docker's patterns are made of: ``**`` also matches slashes.
_PARTS = re.compile(
    r"(?P<any>\*\*/?)|(?P<star>\*)|(?P<one>\?)|(?P<set>\[\^?[^\]]*\])|\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL
)


def _parts(pattern: str) -> Iterator[tuple[str, int]]:
    """Yield expression and step: 1, 0 for what is repeated or absent, or how many parts may be left out from here."""
    for part in _PARTS.finditer(pattern):
        rest = pattern[part.end() :]
        if part["any"]:
            # At the start, before plain text, it also matches within names: "**.pyc" is every file with that ending.
            within = not (part.start() or part["any"].endswith("/") or re.search(r"[*?\[\]\\]", rest))
            yield from [(".", 0)] if within or not rest else [("", 3), (".", 0), ("/", 1)]
        elif part["star"]:
            yield "[^/]", 0
        elif part["one"]:
            yield "[^/]", 1
        elif part["set"]:
            yield part["set"], 1
        elif part["plain"] == "[":
            raise re.error("a set without its end")
        else:
            yield re.escape(part["escaped"] or part["plain"]), 1
