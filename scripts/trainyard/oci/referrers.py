"""Attach artifacts to an image at a registry, and read them: the referrers of OCI 1.1.

An artifact is a manifest with one document, whose ``subject`` is the image. A registry that has the referrers API lists
it by the image's digest. For one that has not, such as docker-registry 2.8, clients keep the list as an image index
under a tag that is named after the digest
(https://github.com/opencontainers/distribution-spec/blob/main/spec.md#referrers-tag-schema).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard.common.errors import StepFailed
from trainyard.oci.documents import INDEX as LIST
from trainyard.oci.documents import InvalidAnswer, descriptor, hashed
from trainyard.oci.image_index import INDEX, is_index
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.transport import MAX_ATTEMPTS
from trainyard.spec import state

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"

#: The configuration of a manifest that needs none
#: (https://github.com/opencontainers/image-spec/blob/main/manifest.md#guidance-for-an-empty-descriptor).
_EMPTY, _EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"


@dataclass(frozen=True)
class Artifact:
    """A document that refers to an image; ``media_type`` is the type of the document and of the artifact."""

    data: bytes
    media_type: str
    annotations: dict[str, str] = field(default_factory=dict)


def list_tag(digest: str) -> str:
    """Return the tag of the list that clients keep for a registry without the referrers API."""
    algorithm, _, encoded = digest.partition(":")
    return f"{algorithm[:32]}-{encoded[:64]}"


def subject_of(tag: str) -> str | None:
    """Return the digest of the image whose referrers a tag is named after; None for the tag of an image.

    cosign names tags such as ``sha256-….sig`` after digests, too.
    """
    digest = re.match(r"(sha256|sha512)-([0-9a-f]{64,128})(?![0-9a-z])", tag)
    return f"{digest[1]}:{digest[2]}" if digest else None


def put_blob(repository: Repository, data: bytes) -> None:
    """Upload a blob, unless the repository has it."""
    digest = hashed(data)
    if not repository.has_blob(digest):
        repository.upload(data, digest)


def attach(repository: Repository, subject: Manifest, artifacts: Sequence[Artifact]) -> list[str]:
    """Attach artifacts to the image ``subject``, in addition to those that it has, and return their digests."""
    manifests = [_manifest(artifact, subject) for artifact in artifacts]
    for data in [_EMPTY, *(artifact.data for artifact in artifacts)] if artifacts else []:
        put_blob(repository, data)
    unlisted = [manifest for manifest in manifests if repository.put(manifest, manifest.digest) != subject.digest]
    if unlisted:
        _add_to_list(repository, subject.digest, unlisted)
    return [manifest.digest for manifest in manifests]


def _manifest(artifact: Artifact, subject: Manifest) -> Manifest:
    document = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "artifactType": artifact.media_type,
        "config": descriptor(_EMPTY_TYPE, _EMPTY),
        "layers": [descriptor(artifact.media_type, artifact.data)],
        "subject": subject.descriptor,
        "annotations": artifact.annotations,
    }
    return Manifest.of(document, _MANIFEST)


def _add_to_list(repository: Repository, digest: str, manifests: Sequence[Manifest]) -> None:
    """Add the manifests of artifacts to the list of an image's referrers.

    Registries have no transactions. A lock excludes other processes of this host. If a process of another host writes
    the list at the same time, the next reading shows that the entries are missing, and they are added again. What is
    lost is at most the other process's addition, if it does not read the list again.

    Raises:
        StepFailed: the tag is that of something else, or other processes write the list all the time.
    """
    tag = list_tag(digest)
    entries = [
        manifest.descriptor | {key: manifest.document[key] for key in ("artifactType", "annotations")}
        for manifest in manifests
    ]
    with state.file_lock(repository.state, f"referrers-{tag}"):
        for _ in range(MAX_ATTEMPTS):
            known = _by_tag(repository, digest)
            if known is None:
                raise StepFailed(f"{repository.name}:{tag} is not a list of referrers: delete that tag")
            missing = [entry for entry in entries if entry["digest"] not in {other.get("digest") for other in known}]
            if not missing:
                return
            index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*known, *missing]}
            repository.put(Manifest.of(index, INDEX), tag)
    raise StepFailed(f"{repository.name}:{tag}, the list of referrers, is overwritten by other processes: try again")


def _by_tag(repository: Repository, digest: str) -> list[dict[str, Any]] | None:
    """Return the list of referrers that clients keep, empty if there is none; None if the tag is another's."""
    manifest = repository.manifest(list_tag(digest))
    document = manifest.document if manifest else {"manifests": []}
    return list(document["manifests"]) if is_index(document) else None


def listed(repository: Repository, digest: str, media_types: Collection[str]) -> list[dict[str, Any]]:
    """Return the descriptors of the artifacts of some types that refer to the image ``digest``."""
    pages = list(repository.pages(f"referrers/{digest}", LIST)) if repository.lists_referrers else []
    if pages:
        entries = [entry for page in pages for entry in page.get("manifests") or []]
    else:
        repository.lists_referrers = False
        entries = _by_tag(repository, digest) or []
    found = [entry for entry in entries if entry.get("artifactType") in media_types]
    if len(found) > 500:  # a push attaches up to five
        raise InvalidAnswer(
            f"{repository.name}@{digest} has {len(found):,} referrers: delete those that are not needed"
        )
    return found


def fetch(repository: Repository, descriptor: dict[str, Any]) -> Artifact | None:
    """Return the artifact of a descriptor; None if it was deleted since it was listed, or has not one document."""
    manifest = repository.manifest(str(descriptor["digest"]))
    document = manifest.document if manifest else {}
    match document.get("layers"):
        case [{"mediaType": str(kind), "digest": str(blob)}]:
            return Artifact(repository.blob(blob), kind, dict(document.get("annotations") or {}))
    return None
