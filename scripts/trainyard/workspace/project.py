"""Hold a Python project of a user's code, and check what its files say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from trainyard.common.errors import UserError
from trainyard.spec import markers
from trainyard.workspace.lines import where, without_credentials

#: ``package.module:object.attribute [extra]`` (https://packaging.python.org/en/latest/specifications/entry-points/).
_OBJECT = re.compile(r"([\w.]+)\s*(:\s*[\w.]+)?\s*(\[.*\])?")

#: The beginning of a folder's address in what a build backend tells: that of the project's own is in it.
IN_CONTAINER = "file:///trainyard/project/"

_COMMANDS = ("gui_scripts", "console_scripts")


@dataclass(frozen=True)
class Project:
    """Describe a folder with a pyproject.toml or setup.py of a project.

    Attributes:
        file: what makes it one; ``name``: as it writes it, empty if only its build backend tells it.
        version: PEP 440, or None if it is dynamic and was not told.
        requires_python: versions of Python; empty if it says nothing.
        dependencies: PEP 508 requirements, ``optional_dependencies``: those of each extra.
        entry_points: group -> name -> object; the groups ``console_scripts`` and ``gui_scripts`` are commands.
        import_roots: folders that its modules are imported from.
        installed: False with ``[tool.uv] package = false``: only its dependencies count.
        pending: what its build backend was not asked yet, in words; empty if nothing.
        unknown: field that the build backend did not tell -> the line that says so and what to do.
    """

    file: Path
    name: str = ""
    version: str | None = None
    requires_python: str = ""
    dependencies: tuple[str, ...] = ()
    optional_dependencies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    import_roots: tuple[Path, ...] = ()
    installed: bool = True
    pending: str = ""
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the project's folder."""
        return self.file.parent

    @property
    def scripts(self) -> dict[str, str]:
        """Return the object of each command, as ``package.module:function``."""
        return {name: value for group in _COMMANDS for name, value in self.entry_points.get(group, {}).items()}


def checked(project: Project) -> Project:
    """Return a project with its version and entry points in their normal form.

    Raises:
        UserError: a value is not what the specifications of packaging demand; the message names the line.
    """
    file = project.file
    version, python = project.version, str(project.requires_python).strip()
    try:
        version = None if version is None else str(Version(str(version)))
    except ValueError:  # InvalidVersion is one, and a number of thousands of digits
        raise UserError(f"{where(file, str(version))}: '{str(version)[:50]}' is not a version (PEP 440)") from None
    try:
        SpecifierSet(python)
    except InvalidSpecifier:
        raise UserError(f"{where(file, python)}: '{python}' is not a range of versions (PEP 440)") from None
    for key, lines in {"dependencies": project.dependencies, **project.optional_dependencies}.items():
        if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
            raise UserError(f"{where(file, key)}: {key}: expected a list of requirements")
        for line in lines:
            try:
                markers.requirement(line)
            except InvalidRequirement as error:
                shown, words = without_credentials(line)[:200], str(error).splitlines()[0]
                raise UserError(f"{where(file, line)}: {shown!r} is not a requirement ({words})") from None
    return dataclasses.replace(
        project,
        version=version,
        requires_python=python,
        dependencies=tuple(project.dependencies),
        optional_dependencies={extra: tuple(lines) for extra, lines in project.optional_dependencies.items()},
        entry_points=_entry_points(project.entry_points, file),
    )


def _entry_points(groups: Mapping[str, Any], file: Path) -> dict[str, dict[str, str]]:
    found = {}
    for group, names in groups.items():
        if not isinstance(names, dict):
            raise UserError(f"{where(file, group)}: {group}: expected names and objects, as in train = 'package:main'")
        for name, value in names.items():
            match = _OBJECT.fullmatch(value) if isinstance(value, str) else None
            if not match or (group in _COMMANDS and not match[2]):
                place = where(file, str(value))
                raise UserError(f"{place}: {name} = {value!r}: not an object, as in 'package.module:main'")
            if group in _COMMANDS and not re.fullmatch(r"[\w.-]+", name):
                raise UserError(
                    f"{where(file, name)}: {name!r} is not a name of a command: use letters, digits, . _ and -"
                )
        if names:
            found[group] = {str(name): re.sub(r"\s*\[.*\]$", "", value) for name, value in names.items()}
    return found
