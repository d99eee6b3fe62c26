"""Choose the samples of each step, as a function of seed, epoch and step, so that resuming needs no loader state.

The processes of a run are here as far as data need them: they share the work of an index, and compare data.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from trainers.common.files import UserError
from trainers.common.mnist import random_bits


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order ``int64[count]`` of the samples in ``epoch``."""
    return np.argsort(random_bits(count, seed, epoch), kind="stable")


def block_permutation(count: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Return the same with runs of ``block`` consecutive samples, which one request can read; ``block`` 1: no runs.

    Each epoch cuts the samples into other runs, the first of which can be shorter, so that neighbours vary.
    """
    if block == 1:
        return permutation(count, seed, epoch)
    first = int(random_bits(1, seed, epoch, 3)[0]) % block
    edges = np.unique(np.concatenate([[0], np.arange(first, count, block), [count]]))
    runs = permutation(len(edges) - 1, seed, epoch)
    lengths = np.diff(edges)[runs]
    # Within a run, places count up from the start of the run.
    starts: np.ndarray = np.repeat(edges[:-1][runs] - (np.cumsum(lengths) - lengths), lengths)
    return starts + np.arange(count)


def share(batch: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Return the rows of a global ``batch`` that belong to process ``rank`` of ``ranks``."""
    size = len(batch) // ranks
    return batch[rank * size : (rank + 1) * size]


def padded_batches(count: int, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every one of ``count`` samples once, in full batches.

    As indices ``int64[batches, global_batch]`` and a mask ``bool`` of the same shape, which is false for padding
    (index 0). So shapes are static, and every test sample counts exactly once.
    """
    batches = -(-count // global_batch)
    indices = np.zeros(batches * global_batch, np.int64)
    indices[:count] = np.arange(count)
    mask = np.arange(batches * global_batch) < count
    return indices.reshape(batches, global_batch), mask.reshape(batches, global_batch)


@runtime_checkable
class Peers(Protocol):
    """Describe the processes of a run; every process must make the same calls."""

    rank: int
    processes: int

    def broadcast(self, content: bytes) -> bytes:
        """Return the ``content`` that the process of rank 0 passes."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return the ``content`` that each process passes, by rank."""


class Alone:
    """Stand for a single process, or one of several that do not share work."""

    rank, processes = 0, 1

    def broadcast(self, content: bytes) -> bytes:
        """Return ``content``."""
        return content

    def gather(self, content: bytes) -> list[bytes]:
        """Return ``content`` as the only element."""
        return [content]


ALONE = Alone()


def check_alike(peers: Peers, what: str, mine: str) -> None:
    """Raise :class:`UserError` on every process unless all pass the same string ``mine``, which describes ``what``.

    Processes with different data would take different numbers of steps and wait for each other forever, or train on
    the wrong images unnoticed.
    """
    found = [content.decode() for content in peers.gather(mine.encode())]
    if len(set(found)) > 1:
        first = next(rank for rank, other in enumerate(found) if other != found[0])
        raise UserError(
            f"the processes see different data: rank 0 has {found[0]}, rank {first} {found[first]} ({what}); --datadir"
            " must hold the same for all"
        )
