"""Who signs images, and whose signatures count: a key, or an identity that a Sigstore instance has a certificate for.

:mod:`trainyard.release.keys` has the first, :mod:`trainyard.release.identities` the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainyard.oci.registry import Manifest, Repository


@dataclass(frozen=True)
class Opened:
    """What a bundle holds: the statement, and what is wrong with it, in words; empty if it is signed as trusted.

    Attributes:
        foreign: whether it names another signer, so that nothing can be said about its signature.
    """

    payload: bytes
    problem: str = ""
    foreign: bool = False


@dataclass(frozen=True)
class Signed:
    """A signature in cosign's classic form: its tag, None if the signer makes none; and whether it is new."""

    tag: str | None
    new: bool


class Trust(Protocol):
    """Whose signatures of images count.

    Attributes:
        how: completes "signed" in messages: ``with this key``.
    """

    @property
    def how(self) -> str: ...

    def open(self, data: bytes) -> Opened:
        """The statement of a bundle, and whether it is signed as trusted."""

    def verified(self, repository: Repository, digest: str) -> int:
        """How many valid signatures in cosign's classic form an image has.

        Raises:
            StepFailed: it has none, or the registry cannot be reached or refuses.
        """


class Signer(Protocol):
    """Who signs images; ``trust`` is what accepts these signatures."""

    @property
    def trust(self) -> Trust: ...

    def seal(self, payload: bytes) -> bytes:
        """The bundle of a statement.

        Raises:
            StepFailed: a service that signing needs cannot be reached or refuses.
        """

    def sign(self, repository: Repository, subject: Manifest) -> Signed:
        """Add a signature in cosign's classic form to an image, unless the signer makes none.

        Raises:
            StepFailed: the registry cannot be reached or refuses.
        """
