"""What ``benchmarks.trainers`` can measure: one module a section, found by its name.

A section module has::

    TARGET = "xla"                                    # the image it is measured in; empty: --inside alone
    DEVICES = ("cpu", "cuda")                         # what it can be measured on

    def prepare(folder: Path) -> None                 # outside the image: writes the data
    def measure(data: Path, device: str, rounds: int) -> Result   # inside: ours and the peer, alternating

A section imports its framework, the trainers and its peer within :func:`measure`: the list of sections is made
where none of them is.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Row:
    """One comparison: ``ours`` against ``peer``, both in ``unit``; ``ratio`` is how much better ours is."""

    what: str
    ours: float
    peer: float
    unit: str
    ratio: float
    target: float = 0.0  # what the ratio must reach; 0: none
    against: str = "peer"  # what the peer is

    @property
    def verdict(self) -> str:
        """``met`` or ``MISSED``, empty without a target."""
        return "" if not self.target else "met" if self.ratio >= self.target else "MISSED"


@dataclass(frozen=True)
class Result:
    """What a section found: the comparisons, and everything measured on the way."""

    rows: list[Row]
    detail: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """The sections there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of section ``name``."""
    return importlib.import_module(f"{__name__}.{name}")
