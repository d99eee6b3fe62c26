"""Checkpoints in PyTorch's format: written with ``torch.save``, read with ``weights_only=True``."""

from __future__ import annotations

from typing import IO

import torch

from trainers.common.checkpoints import Checkpoints, State


def _write(state: State, file: IO[bytes]) -> None:
    torch.save(state, file)


def _read(file: IO[bytes]) -> State:
    return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


def folder(path: str, keep: int) -> Checkpoints:
    """The checkpoint folder ``path``, of which the newest ``keep`` checkpoints are kept."""
    return Checkpoints(path, keep, _write, _read)
