"""Signatures of images at a registry, in the form that ``cosign verify --key`` reads.

A key is a PEM file (PKCS 8 or SEC 1; EC, RSA or Ed25519). Nothing is sent to a transparency log.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from trainyard.common.console import StepFailed, UserError
from trainyard.oci import documents, inventory, referrers
from trainyard.oci.referrers import Referrer
from trainyard.oci.registry import Manifest, Repository, check_address
from trainyard.release import platform_index
from trainyard.spec.model import load
from trainyard.spec.naming import NAME

#: Media type and annotation of a signature (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).
MEDIA_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"

#: The payload's ``type``, as cosign writes it.
_TYPE = "cosign container image signature"

#: Curves of EC keys that cosign takes -> the digest that keys on them sign in Sigstore bundles
#: (https://github.com/sigstore/architecture-docs/blob/main/algorithm-registry.md).
CURVES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}

#: Least bits of RSA keys, to sign and to trust: table 2 of
#: https://nvlpubs.nist.gov/nistpubs/SpecialPublications/NIST.SP.800-131Ar2.pdf
RSA_BITS = 2048

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


def private_key(path: Path, password: str | None) -> PrivateKey:
    """The private key of a PEM file; ``password`` (COSIGN_PASSWORD) decrypts it.

    Raises:
        UserError: there is none, it is of another kind, or the password does not decrypt it.
    """
    data = _pem(path, "COSIGN_KEY")
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in data or b"ENCRYPTED COSIGN PRIVATE KEY" in data:
        raise UserError(
            f"COSIGN_KEY={path}: encrypted in cosign's format, which only cosign can decrypt: sign with "
            f"'cosign sign --key {path} <image by digest>', or give a PKCS 8 key"
        )
    try:
        key = serialization.load_pem_private_key(data, password.encode() if password else None)
    except TypeError:
        raise UserError(
            f"COSIGN_KEY={path}: COSIGN_PASSWORD must be given if and only if the key is encrypted"
        ) from None
    except ValueError:
        raise UserError(
            f"COSIGN_KEY={path}: not a private key in PEM form, or not decrypted by COSIGN_PASSWORD"
        ) from None
    if not isinstance(key, PrivateKey):
        raise UserError(f"COSIGN_KEY={path}: cosign takes EC, RSA and Ed25519 keys")
    _check_strength(key, f"COSIGN_KEY={path}")
    return key


def public_key(path: Path) -> PublicKey:
    """The public key of a PEM file.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    try:
        key = serialization.load_pem_public_key(_pem(path, "COSIGN_PUB"))
    except ValueError:
        raise UserError(f"COSIGN_PUB={path}: not a public key in PEM form: 'openssl pkey -in <key> -pubout'") from None
    if not isinstance(key, PublicKey):
        raise UserError(f"COSIGN_PUB={path}: cosign takes EC, RSA and Ed25519 keys")
    _check_strength(key, f"COSIGN_PUB={path}")
    return key


def _check_strength(key: PrivateKey | PublicKey, given: str) -> None:
    """Raise a :class:`UserError` for an EC key on a curve cosign does not take, or a short RSA key."""
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and key.curve.name not in CURVES:
        raise UserError(f"{given}: cosign takes EC keys on {', '.join(CURVES)}, not on {key.curve.name}")
    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey) and key.key_size < RSA_BITS:
        raise UserError(f"{given}: an RSA key of {key.key_size} bits can be broken: make one of {RSA_BITS} or more")


def _pem(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{variable}={path}: {error.strerror}") from None


def payload(repository: str, digest: str) -> bytes:
    """The signed document: that ``digest`` is an image of ``repository``.

    Its format is "simple signing" (https://github.com/containers/image/blob/main/docs/containers-signature.5.md).
    """
    document = {
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": digest},
            "type": _TYPE,
        },
        "optional": None,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def signature(key: PrivateKey, data: bytes, digest: hashes.HashAlgorithm | None = None) -> bytes:
    """A signature as cosign writes it: of the SHA-256 digest (Ed25519: of the data), RSA with PKCS #1 v1.5.

    Args:
        digest: another digest, for EC keys.
    """
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(digest or hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, padding.PKCS1v15(), hashes.SHA256())
    return key.sign(data)


def signed(key: PublicKey, found: bytes, data: bytes, digest: hashes.HashAlgorithm | None = None) -> bool:
    """Whether ``found`` is a signature of ``data`` that :func:`signature` makes with the private key of ``key``."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(found, data, ec.ECDSA(digest or hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(found, data, padding.PKCS1v15(), hashes.SHA256())
        else:
            key.verify(found, data)
    except InvalidSignature:
        return False
    return True


def valid(key: PublicKey, referrer: Referrer, digest: str) -> bool:
    """Whether a referrer is a signature by ``key`` of the image ``digest``."""
    try:
        found = base64.b64decode(referrer.annotations.get(SIGNATURE, ""), validate=True)
        critical = documents.parse(referrer.data, dict[str, Any], "the signature")["critical"]
        about = critical["type"] == _TYPE and critical["image"]["docker-manifest-digest"] == digest
    except (binascii.Error, ValueError, KeyError, TypeError, documents.InvalidAnswer):
        return False
    return referrer.media_type == MEDIA_TYPE and bool(about) and signed(key, found, referrer.data)


def sign(repository: Repository, subject: Manifest, key: PrivateKey) -> str | None:
    """Add a signature to an image at a registry; the signatures' tag, None if it is already signed with this key."""
    existing = referrers.get(repository, subject.digest, "sig")
    if any(valid(key.public_key(), referrer, subject.digest) for referrer in existing):
        return None
    data = payload(repository.name, subject.digest)
    text = base64.b64encode(signature(key, data)).decode()
    return referrers.put(repository, subject, "sig", [*existing, Referrer(data, MEDIA_TYPE, {SIGNATURE: text})])


def verified(repository: Repository, digest: str, key: PublicKey) -> int:
    """How many valid signatures by ``key`` an image has.

    Raises:
        StepFailed: it has none.
    """
    found = referrers.get(repository, digest, "sig")
    count = sum(valid(key, referrer, digest) for referrer in found)
    if not count:
        what = f"{len(found)} signatures, none by this key" if found else "no signature"
        raise StepFailed(f"{repository.name}@{digest} has {what}")
    return count


def image_to_sign(target: str | None, address: str | None, image: str | None) -> tuple[Repository, Manifest]:
    """The repository and the manifest of an image at a registry.

    Args:
        target: whose local image was pushed to ``address``.
        address: ``host[:port]/path`` of the registry.
        image: reference of an image at a registry, instead of the two.
    Raises:
        UserError: there is no such image, here or at the registry.
        StepFailed: the registry cannot be reached or refuses.
    """
    if image:
        repository, version = inventory.at_registry(image)
    else:
        spec = load(target)
        repository = Repository(f"{check_address(address)}/{NAME}")
        version = platform_index.version_of_host(spec, repository)
    subject = repository.manifest(version)
    if subject is None:
        raise UserError(f"{repository.name} has no {version}: push it first")
    return repository, subject
