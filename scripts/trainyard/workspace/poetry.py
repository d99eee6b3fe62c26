"""The tables of Poetry in a pyproject.toml, as PEP 508 requirements.

Poetry's own library converts them: https://python-poetry.org/docs/dependency-specification/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from trainyard.workspace import dependency_tables
from trainyard.workspace.dependency_tables import Toml, table

_TABLE = "[tool.poetry.dependencies]"


@dataclass
class Dependencies:
    """What ``[tool.poetry.dependencies]`` lists.

    Attributes:
        requirements: PEP 508 requirements, without those that are left out.
        python: the versions of Python, as a PEP 440 specifier; empty if it gives none.
        notes: what is left out, and what the user has to write instead.
    """

    requirements: list[str] = field(default_factory=list)
    python: str = ""
    notes: list[str] = field(default_factory=list)


def dependencies(path: Path) -> Dependencies | None:
    """The packages that a project of Poetry always needs; None if its pyproject.toml does not list them in that format.

    Optional packages and groups are left out, with a note.

    Raises:
        UserError: the file cannot be read, or is not TOML.
    """
    source = dependency_tables.toml(path)
    listed = table(source.data, "tool", "poetry", "dependencies")
    if not listed:
        return None
    found = Dependencies()
    optional = []
    for name, value in listed.items():
        if name.lower() == "python":
            found.python = _python(value)
            continue
        entries = value if isinstance(value, list) else [value]
        if any(isinstance(entry, dict) and entry.get("optional") for entry in entries):
            optional.append(name)
            continue
        for entry in entries:
            _add(source, name, entry, found)
    if optional:
        found.notes.append(f"{path.name}: optional packages are left out: {', '.join(optional)}")
    poetry = table(source.data, "tool", "poetry")
    groups = [*(["dev"] if poetry.get("dev-dependencies") else []), *table(poetry, "group")]
    if groups:
        found.notes.append(f"{path.name}: groups are left out: {', '.join(groups)}")
    return found


def _add(source: Toml, name: str, entry: object, found: Dependencies) -> None:
    """Add the requirement of one entry, and what it does not say."""
    where = f"{source.path.name}:{_line(source, name)}"
    details: Mapping[str, Any] = entry if isinstance(entry, dict) else {"version": entry}
    if local := details.get("path") or details.get("file"):
        found.notes.append(
            f"{where}: {name} is left out: it is the folder or file '{local}': list '{_dotted(str(local))}' in a "
            "requirements.txt, and write its name under 'requirements'"
        )
        return
    try:
        text = _requirement(name, entry)
    except ValueError as error:
        found.notes.append(f"{where}: {name} is left out: {error}: write it under 'requirements' as PEP 508 has it")
        return
    found.requirements.append(text)
    if details.get("source"):
        found.notes.append(
            f"{where}: {name} comes from the source '{details['source']}': give its address to uv, as in "
            "[[tool.uv.index]], or remove it"
        )
    if details.get("allow-prereleases"):
        found.notes.append(f"{where}: {name} allows pre-releases: name one in its range under 'requirements'")


def _requirement(name: str, entry: object) -> str:
    """An entry as a PEP 508 requirement.

    Raises:
        ValueError: it is none; the message says why.
    """
    from poetry.core.factory import Factory

    if not isinstance(entry, str | dict):
        raise ValueError(f"{entry!r} is neither a version nor a table")
    try:
        text = Factory.create_dependency(name, entry).to_pep_508()
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(str(error).splitlines()[0] if str(error) else f"{entry!r} is no version") from None
    if "||" in text:
        version = entry if isinstance(entry, str) else entry.get("version")
        raise ValueError(f"{version!r} has alternatives, which a requirement has not")
    text = re.sub(r" \(([^)]*)\)", r"\1", text, count=1)
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return text


def _python(value: object) -> str:
    from poetry.core.constraints.version import parse_constraint

    try:
        text = str(parse_constraint(str(value)))
    except ValueError:
        return ""
    return "" if "||" in text or text == "*" else text


def _line(source: Toml, name: str) -> int:
    """Number of the line that an entry begins in."""
    start = source.line_of(_TABLE)
    entry = re.compile(rf"\s*(tool\.poetry\.dependencies\.)?[\"']?{re.escape(name)}[\"']?\s*[=.]")
    header = re.compile(rf"\s*\[tool\.poetry\.dependencies\.[\"']?{re.escape(name)}[\"']?\]")
    lines = source.text.splitlines()
    inside = (number for number in range(start, len(lines)) if entry.match(lines[number]))
    outside = (number for number, line in enumerate(lines) if header.match(line))
    return next(inside, next(outside, start - 1)) + 1


def _dotted(path: str) -> str:
    """A path as requirements files have it: relative ones begin with ``./``."""
    return path if path.startswith(("/", "./")) else f"./{path}"
