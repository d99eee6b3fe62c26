"""TensorFlow's side of the checkpoints: numpy arrays in an .npz archive, read without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from trainers.common.checkpoints import Checkpoints, State


def _write(state: State, file: IO[bytes]) -> None:
    np.savez(file, **{name: np.asarray(value) for name, value in state.items()})


def _read(file: IO[bytes]) -> State:
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def folder(path: str, keep: int) -> Checkpoints:
    """The checkpoint folder ``path``, keeping the newest ``keep``."""
    return Checkpoints(path, keep, _write, _read)


def values(variables: Sequence[Any]) -> State:
    """``variables`` by number and name, as arrays."""
    return {f"{number:04d} {variable.path}": np.asarray(variable) for number, variable in enumerate(variables)}


def assign(variables: Sequence[Any], state: State) -> None:
    """Give ``variables`` the values that :func:`values` took of them."""
    for variable, name in zip(variables, values(variables), strict=True):
        variable.assign(state[name])
