"""Read Poetry's own table of a pyproject.toml with Poetry's library, which runs nothing of the project.

https://python-poetry.org/docs/pyproject/. Projects with ``package-mode = false`` have no build backend to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.workspace.project import Project

if TYPE_CHECKING:
    from poetry.core.packages.dependency import Dependency
    from poetry.core.poetry import Poetry

#: Poetry's name of the group that is the project's dependencies.
_MAIN = "main"


def project(file: Path) -> Project | None:
    """Return what the table says; scripts and modules are left to the build backend. None if it has a mistake."""
    from poetry.core.version.helpers import format_python_constraint

    read = _read(file)
    if read is None:
        return None
    package = read.package
    return Project(
        file,
        package.name if read.is_package_mode else "",
        str(package.version),
        "" if package.python_constraint.is_any() else format_python_constraint(package.python_constraint),
        _lines(one for one in package.requires if not one.is_optional()),
        {str(extra): _lines(every) for extra, every in package.extras.items()},
        installed=read.is_package_mode,
    )


def groups(file: Path) -> dict[str, list[str]]:
    """Return the requirements of each group but the project's own; none if the table has a mistake."""
    if (read := _read(file)) is None:
        return {}
    package = read.package
    names = sorted(package.dependency_group_names(include_optional=True) - {_MAIN})
    return {str(name): list(_lines(package.dependency_group(name).dependencies)) for name in names}


def _read(file: Path) -> Poetry | None:
    """Return what Poetry reads; None if it has a mistake, which the build backend explains better."""
    from poetry.core.factory import Factory

    logging.getLogger("poetry").addHandler(logging.NullHandler())  # it says of each path that there is nothing
    try:
        return Factory().create_poetry(file.parent)
    except Exception:  # of many kinds, as those of versions
        return None


def _lines(dependencies: Iterable[Dependency]) -> tuple[str, ...]:
    return tuple(one.to_pep_508(with_extras=False) for one in dependencies)
