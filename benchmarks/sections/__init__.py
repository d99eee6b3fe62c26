"""What ``benchmarks.trainers`` can measure: one module a section, found by its name.

A section module has::

    TARGET = "xla"                                    # the image it is measured in
    DEVICES = ("cpu", "cuda")                         # what it can be measured on
    DATA = ("digits",)                                # words of `trainyard dev dataset`; () for none

    def measure(data: Path, device: str, rounds: int) -> Result   # inside: ours and the peer, by turns

Trainers and peers are started as programs, so that a section imports no framework.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    spread: float = 0.0  # of the peer's rounds, as relative_range() has it

    @property
    def verdict(self) -> str:
        """``met`` or ``MISSED``, empty without a target; none if the peer's rounds differ by more than the margin."""
        if not self.target or abs(self.ratio - self.target) < self.spread:
            return "no verdict" if self.target else ""
        return "met" if self.ratio >= self.target else "MISSED"


@dataclass(frozen=True)
class Result:
    """The comparisons of a section, and everything measured on the way."""

    rows: list[Row]
    detail: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """Return the names of the sections."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """Return the module of section ``name``."""
    return importlib.import_module(f"{__name__}.{name}")


def has_bf16(device: str) -> bool:
    """Return whether ``device`` computes in bfloat16; a CPU that does not takes minutes for each step."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return device != "cpu" or "avx512_bf16" in flags or "amx_bf16" in flags


def relative_range(rounds: Sequence[float]) -> float:
    """Return the difference of the highest and the lowest of some rounds, divided by their median."""
    return (max(rounds) - min(rounds)) / statistics.median(rounds)


def run(module: str, *words: str, **variables: str) -> str:
    """Run a Python module as a program; returns what it prints.

    Raises:
        RuntimeError: it failed; the message ends with its last words.
    """
    command = [sys.executable, "-m", module, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if ended.returncode:
        raise RuntimeError(f"{module} {' '.join(words)}: {ended.stderr.strip().rpartition(chr(10))[2]}")
    return ended.stdout


def training(module: str, folder: Path, *words: str, kind: str = "train", **variables: str) -> list[dict[str, Any]]:
    """Run a trainer; returns the events ``kind`` of its metrics, which are kept in ``folder`` while it runs."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run(module, f"--metrics-file={metrics}", *words, **variables)
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == kind]


def tried(
    grid: Sequence[dict[str, Any]], side: Callable[[dict[str, Any]], dict[str, Any]], key: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what a side says with each point of a grid, and the point with the highest value of ``key``."""
    found = []
    for settings in grid:
        try:
            found.append({**settings, **side(settings)})
        except RuntimeError as error:  # torch.compile where there is no C++ compiler
            found.append({**settings, key: 0.0, "error": str(error)[:200]})
    return found, grid[max(range(len(grid)), key=lambda number: float(found[number][key]))]
