"""The packages beside the builder: they bring commands, rules, generated pages and checks.

A neighbour has a folder ``commands``, a module per command, and may have a module ``registration`` with a
:class:`Neighbour` called ``NEIGHBOUR``. That module is imported when a command asks for what neighbours bring. No other
module of this package names them, and without them it has its own commands and rules.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.common import settings

if TYPE_CHECKING:
    from trainyard.common.rule_engine import Rule

#: Import names of the neighbours, in the order in which their rules are listed.
NEIGHBOURS = ("trainyard_jobs",)

#: Path of a generated page -> name and variables of its template.
Pages = dict[Path, tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Neighbour:
    """Describe a package beside the builder: all that it brings besides its commands.

    Attributes:
        rules: returns its rules, for ``trainyard dev rules``.
        pages: returns its generated pages, for ``trainyard dev render``.
        outdated: takes a day; returns a line for each table that was last compared with its source too long before.
        values: name of an option or argument -> returns the values that the shell completes. Within 200 ms: without
            libraries that take longer to import.
    """

    rules: Callable[[], Sequence[Rule[Any]]] = tuple
    pages: Callable[[], Pages] = dict
    outdated: Callable[[datetime.date], list[str]] = lambda _day: []
    values: Mapping[str, Callable[[], Sequence[str]]] = field(default_factory=dict)


def command_folders() -> dict[str, Path]:
    """Return the import name of each package of commands, the builder's first, and its folder."""
    folders = {"trainyard.commands": settings.PACKAGE / "commands"}
    for name in NEIGHBOURS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[f"{name}.commands"] = Path(spec.submodule_search_locations[0]) / "commands"
    return folders


def neighbours() -> Iterator[Neighbour]:
    """Yield the neighbours that are installed and have a module ``registration``."""
    for name in NEIGHBOURS:
        if importlib.util.find_spec(name) and importlib.util.find_spec(f"{name}.registration"):
            neighbour: Neighbour = importlib.import_module(f"{name}.registration").NEIGHBOUR
            yield neighbour


def values(name: str) -> Sequence[str]:
    """Return the values that neighbours complete for an option or argument; none for one that they do not know."""
    return [value for neighbour in neighbours() if name in neighbour.values for value in neighbour.values[name]()]
