"""Checkpoints of the TensorFlow trainers: NumPy arrays in an .npz archive, read without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from trainers.common.checkpoints import Checkpoints, State
from trainers.common.exits import USAGE, UserError


def _write(state: State, file: IO[bytes]) -> None:
    np.savez(file, **{name: np.asarray(value) for name, value in state.items()})


def _read(file: IO[bytes]) -> State:
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def folder(path: str, keep: int) -> Checkpoints:
    """The checkpoint folder ``path``, of which the newest ``keep`` checkpoints are kept."""
    return Checkpoints(path, keep, _write, _read)


def values(variables: Sequence[Any]) -> State:
    """``variables`` as arrays, by number and name."""
    return dict(zip(_names(variables), map(np.asarray, variables), strict=True))


def _names(variables: Sequence[Any]) -> list[str]:
    return [f"{number:04d} {variable.path}" for number, variable in enumerate(variables)]


def assign(variables: Sequence[Any], state: State) -> None:
    """Assign to ``variables`` the ``state`` that :func:`values` returned.

    Raises :class:`UserError` if ``state`` belongs to another network.
    """
    named = _names(variables)
    shapes = {name: value.shape for name, value in state.items()}
    if shapes != dict(zip(named, (tuple(variable.shape) for variable in variables), strict=True)):
        raise UserError("the checkpoint is of another network: run with the --model and options it was made with, use"
                        " another --checkpoint-dir, or --no-resume", USAGE)  # fmt: skip
    for variable, name in zip(variables, named, strict=True):
        variable.assign(state[name])
