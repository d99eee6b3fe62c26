"""Sign images with a key, and check signatures with it.

A key is a PEM file (PKCS 8 or SEC 1; EC, RSA or Ed25519). Statements are signed in Sigstore bundles, which ``cosign
verify --key`` reads. Nothing is sent to a transparency log.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]  # no __all__

from trainyard.common.errors import UserError
from trainyard.oci.statements import BUNDLE, PLAIN, Bundle, Opened, Trust

#: Curves of EC keys that cosign takes. Each has its digest in Sigstore bundles, SHA-256, SHA-384 and SHA-512
#: (https://github.com/sigstore/architecture-docs/blob/main/algorithm-registry.md).
CURVES = ("secp256r1", "secp384r1", "secp521r1")

#: Least bits of RSA keys, to sign and to trust: table 2 of
#: https://nvlpubs.nist.gov/nistpubs/SpecialPublications/NIST.SP.800-131Ar2.pdf
RSA_BITS = 2048

#: What a message about a key of another kind says.
_KINDS = "cosign takes EC, RSA and Ed25519 keys"

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


def private_key(path: Path, password: str | None) -> PrivateKey:
    """Return the private key of a PEM file; ``password`` (COSIGN_PASSWORD) decrypts it.

    Raises:
        UserError: there is none, it is of another kind, or the password does not decrypt it.
    """
    given = f"COSIGN_KEY={path}"
    data = _pem(path, given)
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in data or b"ENCRYPTED COSIGN PRIVATE KEY" in data:
        raise UserError(
            f"{given}: encrypted in cosign's format, which only cosign can decrypt: sign with "
            f"'cosign sign --key {path} <image by digest>', or give a PKCS 8 key"
        )
    try:
        key = serialization.load_pem_private_key(data, password.encode() if password else None)
    except TypeError:
        raise UserError(f"{given}: COSIGN_PASSWORD must be given if and only if the key is encrypted") from None
    except ValueError:
        raise UserError(f"{given}: not a private key in PEM form, or not decrypted by COSIGN_PASSWORD") from None
    if not isinstance(key, PrivateKey):
        raise UserError(f"{given}: {_KINDS}")
    _check_strength(key, given)
    return key


def public_key(path: Path) -> PublicKey:
    """Return the public key of a PEM file.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    given = f"COSIGN_PUB={path}"
    try:
        key = serialization.load_pem_public_key(_pem(path, given))
    except ValueError:
        raise UserError(f"{given}: not a public key in PEM form: 'openssl pkey -in <key> -pubout'") from None
    if not isinstance(key, PublicKey):
        raise UserError(f"{given}: {_KINDS}")
    _check_strength(key, given)
    return key


def _check_strength(key: PrivateKey | PublicKey, given: str) -> None:
    """Raise a :class:`UserError` for an EC key on a curve cosign does not take, or a short RSA key."""
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and key.curve.name not in CURVES:
        raise UserError(f"{given}: cosign takes EC keys on {', '.join(CURVES)}, not on {key.curve.name}")
    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey) and key.key_size < RSA_BITS:
        raise UserError(f"{given}: an RSA key of {key.key_size} bits can be broken: make one of {RSA_BITS} or more")


def _pem(path: Path, given: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{given}: {error.strerror}") from None


@dataclass(frozen=True)
class TrustedKey(Trust):
    """Accept the signatures of a key, by its public key."""

    key: PublicKey
    how: str = "with this key"

    @property
    def hint(self) -> str:
        """Return the name of the key in bundles, as cosign writes it: the SHA-256 of its DER form, in Base64."""
        der = self.key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(hashlib.sha256(der).digest()).decode()

    def named(self) -> SSlibKey:
        """Return the key of the library, with its name; RSA signatures have the padding of cosign's."""
        scheme = "rsa-pkcs1v15-sha256" if isinstance(self.key, rsa.RSAPublicKey) else None
        return SSlibKey.from_crypto(self.key, self.hint, scheme)

    def _opened(self, bundle: Bundle, data: bytes) -> Opened:
        if bundle.key_hint is None:
            return Opened(bundle.payload, "signed by an identity, not with a key", foreign=True)
        if bundle.key_hint != self.hint:
            return Opened(bundle.payload, "signed with another key", foreign=True)
        # The bundle names the key; cosign does not repeat the name in the envelope.
        (signature,) = bundle.envelope["signatures"]
        try:
            envelope = Envelope.from_dict(bundle.envelope | {"signatures": [signature | {"keyid": self.hint}]})
            envelope.verify([self.named()], threshold=1)
        except (VerificationError, ValueError):
            return Opened(bundle.payload, "its signature does not match its content: one of them was changed")
        return Opened(envelope.payload)


@dataclass(frozen=True)
class KeySigner:
    """Sign with a private key."""

    key: PrivateKey

    @property
    def trust(self) -> TrustedKey:
        """Return the key's public key."""
        return TrustedKey(self.key.public_key())

    def seal(self, payload: bytes) -> bytes:
        """Return the bundle of a statement."""
        envelope = Envelope(payload, PLAIN, {})
        envelope.sign(CryptoSigner(self.key, self.trust.named()))
        material = {"publicKey": {"hint": self.trust.hint}, "tlogEntries": []}
        document = {"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope.to_dict()}
        return json.dumps(document, separators=(",", ":")).encode()
