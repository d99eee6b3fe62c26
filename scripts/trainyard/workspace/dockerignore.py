"""Which paths a ``.dockerignore`` leaves out, as Docker's builders decide it.

The Docker SDK for Python has a matcher too, after an implementation that its authors call buggy because it looks at one
parent folder only: https://github.com/moby/patternmatcher/blob/v0.6.0/patternmatcher.go (``Matches``). This one is
``MatchesOrParentMatches`` of the same file; https://docs.docker.com/build/concepts/context/#dockerignore-files.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainyard.common.errors import UserError
from trainyard.spec import yaml_source
from trainyard.spec.model import relative

#: Name of the file.
FILE = ".dockerignore"


@dataclass(frozen=True)
class _Pattern:
    matches: re.Pattern[str]
    exception: bool


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
        parts = path.split("/")
        paths = [path, *("/".join(parts[:count]) for count in range(1, len(parts)))]
        left_out = False
        for pattern in self._patterns:
            if pattern.exception == left_out and any(pattern.matches.fullmatch(one) for one in paths):
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
            yield _Pattern(re.compile(_expression(cleaned)), exception)
        except re.error:
            raise UserError(f"{where}:{number}: '{text}' is not a pattern") from None


#: What Docker's patterns are made of -> the regular expression of each: ``**`` also matches slashes.
_PARTS = re.compile(
    r"(?P<any>\*\*/?)|(?P<star>\*)|(?P<one>\?)|(?P<set>\[\^?[^\]]*\])|\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL
)


def _expression(pattern: str) -> str:
    found = ""
    for part in _PARTS.finditer(pattern):
        rest = pattern[part.end() :]
        if part["any"]:
            # At the start, before plain text, it also matches within names: "**.pyc" is every file with that ending.
            within = not (part.start() or part["any"].endswith("/") or re.search(r"[*?\[\]\\]", rest))
            found += ".*" if within or not rest else "(?:.*/)?"
        elif part["star"]:
            found += "[^/]*"
        elif part["one"]:
            found += "[^/]"
        elif part["set"]:
            found += part["set"]
        elif part["plain"] == "[":
            raise re.error("a set without its end")
        else:
            found += re.escape(part["escaped"] or part["plain"])
    return found
