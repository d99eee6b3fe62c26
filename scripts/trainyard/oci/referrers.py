"""Documents attached to an image at a registry: SBOMs, signatures, and records that the image was verified.

SBOMs and signatures are OCI manifests with the document as their layer, which every registry stores, under tags that
are named after the image's digest, in the form that cosign reads and writes
(https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md). ``subject`` makes them referrers where the
registry supports those (OCI distribution specification 1.1).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from dataclasses import dataclass, field

from trainyard.oci import docker_engine, registry
from trainyard.oci.registry import Manifest, Repository

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"

#: Media type of CycloneDX documents (ECMA-424; cosign uses it too).
SBOM = "application/vnd.cyclonedx+json"

#: Label of a verification record's configuration: the digest that passed verify and smoke.
VERIFIED = "io.trainyard.passed"


@dataclass(frozen=True)
class Referrer:
    """A document that is attached to an image, and its annotations."""

    data: bytes
    media_type: str
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """``sha256:...`` of the document."""
        return _sha256(self.data)


def tag(digest: str, kind: str) -> str:
    """``sha256-….<kind>``: cosign's kinds are ``sig`` and ``sbom``."""
    return f"{digest.replace(':', '-')}.{kind}"


def subject(tag: str) -> str | None:
    """The digest of the image that a referrer's tag is named after; None for the tag of an image."""
    found = re.match(r"(sha256|sha512)-([0-9a-f]{64,128})(?![0-9a-z])", tag)
    return f"{found[1]}:{found[2]}" if found else None


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def put_blob(repository: Repository, data: bytes) -> None:
    """Upload a blob, unless the repository has it."""
    digest = _sha256(data)
    if not repository.has_blob(digest):
        repository.upload(data, digest)


def put(repository: Repository, subject: Manifest, kind: str, referrers: list[Referrer]) -> str:
    """Attach ``referrers`` to the image ``subject``, replacing those of that kind; their tag.

    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    config = json.dumps(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [referrer.digest for referrer in referrers]},
        }
    ).encode()
    for data in (config, *(referrer.data for referrer in referrers)):
        put_blob(repository, data)
    document = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {"mediaType": _CONFIG, "digest": _sha256(config), "size": len(config)},
        "layers": [
            {
                "mediaType": referrer.media_type,
                "digest": referrer.digest,
                "size": len(referrer.data),
                "annotations": referrer.annotations,
            }
            for referrer in referrers
        ],
        "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": len(subject.body)},
    }
    body = json.dumps(document).encode()
    name = tag(subject.digest, kind)
    repository.tag(Manifest(_sha256(body), _MANIFEST, body), name)
    return name


def get(repository: Repository, digest: str, kind: str) -> list[Referrer]:
    """The documents of that kind that are attached to the image ``digest``.

    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    found = repository.manifest(tag(digest, kind))
    if found is None:
        return []
    referrers = []
    for layer in found.document.get("layers", []):
        data = repository.blob(layer["digest"])
        referrers.append(Referrer(data, str(layer["mediaType"]), dict(layer.get("annotations") or {})))
    return referrers


def verification_tag(digest: str) -> str:
    """The tag of the record that a digest passed verify and smoke."""
    return tag(digest, "passed")


def record_verification(repository: str, digest: str) -> None:
    """Record at the registry that an image's digest passed verify and smoke.

    The record is an image of a few bytes with a label. The engine pushes it, because the engine can reach whatever it
    pushes images to. Everyone with write access to the repository can write such records: they prevent mistakes, they
    do not protect against the repository's owners.

    Raises:
        StepFailed: the registry refuses it.
    """
    record = f"{repository}:{verification_tag(digest)}"
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    api = docker_engine.client().api
    api.import_image_from_data(empty.getvalue(), repository, verification_tag(digest), [f"LABEL {VERIFIED}={digest}"])
    try:
        for _ in registry.push(record):
            pass
    finally:
        api.remove_image(record, noprune=True)


def is_verified(repository: Repository, digest: str) -> bool:
    """Whether the registry has a record that this digest passed verify and smoke."""
    found = repository.manifest(verification_tag(digest))
    if found is None:
        return False
    labels = (repository.config(found).get("config") or {}).get("Labels") or {}
    return bool(labels.get(VERIFIED) == digest)
