"""The processes of a run, as far as the data needs them: sharing the work of an index, and comparing data."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from trainers.common.exits import UserError


@runtime_checkable
class Peers(Protocol):
    """The processes of a run; every process must make the same calls.

    Implemented by ``trainers.torch._device`` and ``trainers.tf._strategy``.
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
