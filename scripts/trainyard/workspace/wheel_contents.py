"""Tell what wheels contain, from wheel_contents.json, which ``trainyard dev wheels`` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("wheel_contents.json")


@dataclass(frozen=True)
class Contents:
    """Hold what a wheel contains.

    Attributes:
        version: of the wheel that was read; empty if none was, and its modules were written by hand.
        modules: that it has at the top, or in a namespace package, as google.protobuf.
        libraries: of Debian packages, which no wheel brings and every use of it loads.
    """

    version: str = ""
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


@cache
def known() -> dict[str, Contents]:
    """Return canonical name -> contents, of all distributions of the table."""
    wheels: dict[str, list[str]] = json.loads(FILE.read_text(encoding="utf-8"))["wheels"]
    return {name: Contents(version, *(tuple(one.split()) for one in rest)) for name, (version, *rest) in wheels.items()}


def is_open(name: str) -> bool:
    """Return whether a distribution may have any module: it is not in the table, or all that it has is dependencies."""
    return not known().get(name, Contents()).modules


@cache
def providers() -> dict[str, list[str]]:
    """Return module -> the distributions of the table that have it."""
    found: dict[str, list[str]] = {}
    for name, contents in known().items():
        for module in contents.modules:
            found.setdefault(module, []).append(name)
    return found


@cache
def parts() -> dict[str, list[str]]:
    """Return package without a distribution, such as google -> the distributions that have a part of it."""
    found: dict[str, set[str]] = {}
    for module, names in providers().items():
        while module := module.rpartition(".")[0]:
            found.setdefault(module, set()).update(names)
    return {module: sorted(names) for module, names in found.items()}
