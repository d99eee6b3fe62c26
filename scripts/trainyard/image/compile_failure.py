"""Why a source distribution could not be compiled, from what uv, its build backend and the compiler printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PACKAGES = "to 'packages' under 'build:'"

#: What a line says, and what to do about it; the first that matches a line is the reason. The words are those of
#: setuptools, of GCC, of Python and of the shell.
_KNOWN = (
    (r"command '(?:[^']*/)?([^'/]+)' failed: No such file", "there is no compiler '{}': add g++ {packages}"),
    (r"fatal error: (\S+): No such file", "there is no header '{}': add the Debian package that has it {packages}"),
    (r"^ModuleNotFoundError: No module named '([\w.]+)'",
     "its build imports '{}' and does not declare it: add the package that has it to 'requires' under 'build:'"),
    (r"FileNotFoundError: \[Errno 2\] No such file or directory: '([\w.+-]+)'",
     "there is no program '{}': add the Debian package that has it {packages}"),
    (r"([\w.+-]+): (?:command )?not found$", "there is no program '{}': add the Debian package that has it {packages}"),
)  # fmt: skip

#: Lines with the cause if none of those is there: an error of a compiler with its place, then an exception.
_CAUSES = (r"^\S+:\d+(?::\d+)?: error: .+", r"^\w+(?:Error|Exception): .+")


def reason(said: Sequence[str]) -> str:
    """What failed, in one line, from the output of the step that compiles; empty if it is none of what is known."""
    lines = [line.strip() for line in said]
    text = "\n".join(lines)
    found = re.search(r"Failed to (?:build|download and build) `([^`]+)`", text)
    package = f"{found[1]}: " if found else ""
    for pattern, words in _KNOWN:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + words.format(match[1], packages=_PACKAGES)
    for pattern in _CAUSES:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + match[0]
    return ""
