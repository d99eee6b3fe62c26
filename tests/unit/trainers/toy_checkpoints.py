"""Checkpoints of a model that is a single number, in JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO

from trainers.common.run import Checkpoints, State


def state(step: int, weight: float = 0.5) -> State:
    """A checkpoint after ``step`` steps."""
    return {"weight": weight, "run": "{}", "log": "{}", "step": step}


def write(content: State, file: IO[bytes]) -> None:
    """Write a checkpoint."""
    file.write(json.dumps(content).encode())


def read(file: IO[bytes]) -> State:
    """Read a checkpoint."""
    content: State = json.load(file)
    return content


def _not_finite(content: State) -> str:
    return "" if math.isfinite(content["weight"]) else "weight"


def checkpoints(folder: Path | str, keep: int) -> Checkpoints:
    """The checkpoints in ``folder``."""
    return Checkpoints(str(folder), keep, write, read, _not_finite)
