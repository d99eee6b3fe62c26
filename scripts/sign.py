"""Sign an image at a registry, or check its signatures, in the form that `cosign verify --key` reads.

    make sign TARGET=tf-cpu REGISTRY=localhost:5000/ml COSIGN_KEY=signing.pem
    make sign IMAGE=localhost:5000/ml/trainyard:tf-cpu COSIGN_KEY=signing.pem
    make sign IMAGE=... COSIGN_PUB=signing.pub          checks; fails if none is valid

The key is a private key in PEM form (PKCS 8 or SEC 1; EC, RSA or Ed25519), as `openssl genpkey -algorithm EC -pkeyopt
ec_paramgen_curve:P-256` makes one; COSIGN_PASSWORD opens one that is encrypted. `make push` signs by itself where
COSIGN_KEY is set. Nothing is sent to a transparency log: cosign verifies with --insecure-ignore-tlog.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from scripts import cli, engine
from scripts.cli import StepFailed, UserError, say
from scripts.plan import NAME
from scripts.published import artifacts, registry
from scripts.published.artifacts import Artifact
from scripts.published.tags import Manifest, Repository
from scripts.spec import load
from scripts.stored import contents

#: Media type and annotation of a signature (sigstore/cosign, specs/SIGNATURE_SPEC.md).
MEDIA_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"

#: What cosign writes into the payload's ``type``.
_TYPE = "cosign container image signature"

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


def private_key(path: Path, password: str | None) -> PrivateKey:
    """The private key of a PEM file.

    Raises:
        UserError: there is none, it is of another kind, or the password does not open it.
    """
    data = _pem(path, "COSIGN_KEY")
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in data or b"ENCRYPTED COSIGN PRIVATE KEY" in data:
        raise UserError(
            f"COSIGN_KEY={path}: encrypted in cosign's own format, which only cosign opens: sign with "
            f"'cosign sign --key {path} <image by digest>', or give a PKCS 8 key"
        )
    try:
        key = serialization.load_pem_private_key(data, password.encode() if password else None)
    except TypeError:
        raise UserError(
            f"COSIGN_KEY={path}: COSIGN_PASSWORD must be given if and only if the key is encrypted"
        ) from None
    except ValueError:
        raise UserError(f"COSIGN_KEY={path}: no private key in PEM form, or not opened by COSIGN_PASSWORD") from None
    if not isinstance(key, PrivateKey):
        raise UserError(f"COSIGN_KEY={path}: cosign takes EC, RSA and Ed25519 keys")
    return key


def public_key(path: Path) -> PublicKey:
    """The public key of a PEM file.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    try:
        key = serialization.load_pem_public_key(_pem(path, "COSIGN_PUB"))
    except ValueError:
        raise UserError(f"COSIGN_PUB={path}: no public key in PEM form: 'openssl pkey -in <key> -pubout'") from None
    if not isinstance(key, PublicKey):
        raise UserError(f"COSIGN_PUB={path}: cosign takes EC, RSA and Ed25519 keys")
    return key


def _pem(path: Path, variable: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{variable}={path}: {error.strerror}") from None


def payload(repository: str, digest: str) -> bytes:
    """What is signed: that ``digest`` is an image of ``repository`` (containers/image, "simple signing")."""
    document = {
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": digest},
            "type": _TYPE,
        },
        "optional": None,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def signature(key: PrivateKey, data: bytes) -> bytes:
    """A signature as cosign makes it: over SHA-256 (Ed25519 over the data itself), RSA with PKCS #1 v1.5."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, padding.PKCS1v15(), hashes.SHA256())
    return key.sign(data)


def valid(key: PublicKey, artifact: Artifact, digest: str) -> bool:
    """Whether an artifact is a signature by ``key`` about the image ``digest``."""
    try:
        told = base64.b64decode(artifact.annotations.get(SIGNATURE, ""), validate=True)
        critical = json.loads(artifact.data)["critical"]
        about = critical["type"] == _TYPE and critical["image"]["docker-manifest-digest"] == digest
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(told, artifact.data, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(told, artifact.data, padding.PKCS1v15(), hashes.SHA256())
        else:
            key.verify(told, artifact.data)
    except (InvalidSignature, binascii.Error, ValueError, KeyError, TypeError):
        return False
    return artifact.media_type == MEDIA_TYPE and bool(about)


def sign(repository: Repository, subject: Manifest, key: PrivateKey) -> str | None:
    """Sign an image at a registry, beside the signatures that it has; its signatures' tag, None if it has this one."""
    there = artifacts.get(repository, subject.digest, "sig")
    if any(valid(key.public_key(), artifact, subject.digest) for artifact in there):
        return None
    data = payload(repository.name, subject.digest)
    told = base64.b64encode(signature(key, data)).decode()
    return artifacts.put(repository, subject, "sig", [*there, Artifact(data, MEDIA_TYPE, {SIGNATURE: told})])


def verified(repository: Repository, digest: str, key: PublicKey) -> int:
    """How many signatures by ``key`` an image has.

    Raises:
        StepFailed: none.
    """
    found = artifacts.get(repository, digest, "sig")
    count = sum(valid(key, artifact, digest) for artifact in found)
    if not count:
        what = f"{len(found)} signatures, none by this key" if found else "no signature"
        raise StepFailed(f"{repository.name}@{digest} has {what}")
    return count


def key_given() -> PrivateKey | None:
    """The key that COSIGN_KEY names, None without it.

    Raises:
        UserError: it is none.
    """
    path = os.environ.get("COSIGN_KEY")
    return private_key(Path(path), os.environ.get("COSIGN_PASSWORD")) if path else None


def _subject(options: Any) -> tuple[Repository, Manifest]:
    if options.image:
        name, tag = contents.split(options.image)
    else:
        spec = load(options.target)
        name = f"{registry.check_address(options.registry)}/{NAME}"
        tag = engine.digest(f"{NAME}:{spec.target}", made_by=f"make image TARGET={spec.target}")
    repository = Repository(name)
    found = repository.manifest(tag)
    if found is None:
        raise UserError(f"{name} has no {tag}: push it first")
    return repository, found


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--image", default=os.environ.get("IMAGE") or None, help="a reference; or IMAGE")
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="host[:port]/path; or REGISTRY")
    parser.add_argument("--public-key", default=os.environ.get("COSIGN_PUB") or None, help="or COSIGN_PUB")
    options = parser.parse_args(arguments)
    key = key_given()
    if key is None and not options.public_key:
        raise UserError("COSIGN_KEY=<private key> signs, COSIGN_PUB=<public key> checks: give one")
    repository, subject = _subject(options)
    found: dict[str, Any] = {"image": f"{repository.name}@{subject.digest}"}
    if key is not None:
        found["tag"] = sign(repository, subject, key)
        say(f"{found['image']} {'is signed' if found['tag'] else 'was signed with this key already'}")
    if options.public_key:
        found["valid"] = verified(repository, subject.digest, public_key(Path(options.public_key)))
        say(f"{found['image']}: {found['valid']} valid signature{'s' if found['valid'] != 1 else ''}")
    cli.result(found, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
