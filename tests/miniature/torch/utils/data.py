"""A data loader with worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor


class DataLoader:
    """Batches of a data set, in order, read by worker processes."""

    def __init__(self, data: Sequence[np.ndarray], batch_size: int, num_workers: int) -> None:
        self._data, self._size, self._workers = data, batch_size, num_workers

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each batch as one array."""
        with multiprocessing.get_context("fork").Pool(self._workers) as workers:
            yield from workers.imap(self._read, range(0, len(self._data), self._size))

    def _read(self, first: int) -> Tensor:
        last = min(first + self._size, len(self._data))
        return np.stack([self._data[number] for number in range(first, last)]).view(Tensor)
