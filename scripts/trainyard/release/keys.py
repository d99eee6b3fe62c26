"""Images that are signed with a key, and whose signatures are checked with it."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.oci import referrers
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import bundle, signature
from trainyard.release.signature import PrivateKey, PublicKey
from trainyard.release.signers import Opened, Signed


@dataclass(frozen=True)
class TrustedKey:
    """A public key whose signatures count (:class:`trainyard.release.signers.Trust`)."""

    key: PublicKey
    how: str = "with this key"

    def open(self, data: bytes) -> Opened:
        """The statement of a bundle, and whether it is signed with the key."""
        return bundle.open_with(self.key, data)

    def verified(self, repository: Repository, digest: str) -> int:
        """How many valid signatures in cosign's classic form an image has."""
        return signature.verified(repository, digest, self.key)


@dataclass(frozen=True)
class KeySigner:
    """A private key (:class:`trainyard.release.signers.Signer`)."""

    key: PrivateKey

    @property
    def trust(self) -> TrustedKey:
        """The key's public key."""
        return TrustedKey(self.key.public_key())

    def seal(self, payload: bytes) -> bytes:
        """The bundle of a statement."""
        return bundle.seal(self.key, payload)

    def sign(self, repository: Repository, subject: Manifest) -> Signed:
        """Add a signature in cosign's classic form to an image, unless it has one with this key."""
        new = signature.sign(repository, subject, self.key) is not None
        return Signed(referrers.tag(subject.digest, "sig"), new)
