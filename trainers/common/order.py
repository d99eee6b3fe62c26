"""The samples of each step, as a function of seed, epoch and step, so that resuming needs no loader state.

And the processes of a run, as far as the data needs them: sharing the work of an index, and comparing data.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, runtime_checkable

import numpy as np

from trainers.common.exits import UserError


def random_bits(count: int, *key: int) -> np.ndarray:
    """``count`` random uint64 that depend on the integers ``key`` only.

    NumPy guarantees the stream of its bit generators across versions, but not its distributions:
    https://numpy.org/neps/nep-0019-rng-policy.html
    """
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def fingerprints(**arrays: np.ndarray) -> dict[str, str]:
    """Return a fingerprint of the contents of each of the ``arrays``, by its name with spaces."""
    digests = {name: hashlib.sha256(array.tobytes()) for name, array in arrays.items()}
    return {name.replace("_", " "): digest.hexdigest()[:16] for name, digest in digests.items()}


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order ``int64[count]`` of the samples in ``epoch``."""
    return np.argsort(random_bits(count, seed, epoch), kind="stable")


def block_permutation(count: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """The same with runs of ``block`` consecutive samples, which one request can read; ``block`` 1: no runs.

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


def steps_per_epoch(count: int, global_batch: int) -> int:
    """The number of full batches in ``count`` samples; the rest is dropped for this epoch.

    Raises :class:`UserError` if there is none.
    """
    if count < global_batch:
        raise UserError(
            f"the {count} training images do not fill one step of {global_batch}: lower --batch-size"
            " or use fewer devices"
        )
    return count // global_batch


def share(batch: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The rows of a global ``batch`` that belong to process ``rank`` of ``ranks``."""
    size = len(batch) // ranks
    return batch[rank * size : (rank + 1) * size]


def shifts(count: int, most: int, *key: int) -> np.ndarray:
    """Uniform row and column offsets ``int64[count, 2]`` from 0 to ``2*most`` that depend on ``key`` only."""
    return (random_bits(2 * count, *key) % np.uint64(2 * most + 1)).astype(np.int64).reshape(count, 2)


def padded_batches(count: int, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Every one of ``count`` samples once, in full batches.

    Returns indices ``int64[batches, global_batch]`` and a mask ``bool`` of the same shape, which is false for padding
    (index 0). So shapes are static, and every test sample counts exactly once.
    """
    batches = -(-count // global_batch)
    indices = np.zeros(batches * global_batch, np.int64)
    indices[:count] = np.arange(count)
    mask = np.arange(batches * global_batch) < count
    return indices.reshape(batches, global_batch), mask.reshape(batches, global_batch)


@runtime_checkable
class Peers(Protocol):
    """The processes of a run; every process must make the same calls.

    Implemented by ``trainers.torch._device`` and ``trainers.tf._peers``.
    """

    rank: int
    processes: int

    def broadcast(self, content: bytes) -> bytes:
        """The ``content`` passed by the process of rank 0."""

    def gather(self, content: bytes) -> list[bytes]:
        """The ``content`` passed by each process, by rank."""


class Alone:
    """A single process, or one of several that do not share work."""

    rank, processes = 0, 1

    def broadcast(self, content: bytes) -> bytes:
        """``content``."""
        return content

    def gather(self, content: bytes) -> list[bytes]:
        """``content`` as the only element."""
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
