"""BuildKit's SLSA provenance of an image, stored separately so that the image's digest does not depend on it.

An attestation contains times: an image that is built with one gets a different digest in every build and could not be
compared, promoted or reproduced by digest. The image is therefore built without attestations. The same build then runs
again with ``--provenance=mode=max``: every step comes from the cache, the image is identical, and the attestation's
documents (about 50 KB) are kept. ``make push`` uploads them under a tag that is named after the image's digest, where
``docker buildx imagetools inspect --format '{{json .Provenance}}'`` finds them.
"""

from __future__ import annotations

import json
from typing import Any

from trainyard.common import settings
from trainyard.common.console import StepFailed
from trainyard.image.buildx import bake
from trainyard.oci import docker_engine, image_store, referrers
from trainyard.oci.registry import Manifest, Repository
from trainyard.spec import state
from trainyard.spec.naming import NAME

#: Annotation of an attestation's descriptor, with its value (https://github.com/moby/buildkit/blob/master/docs/attestations/attestation-storage.md).
_KIND = ("vnd.docker.reference.type", "attestation-manifest")
#: Start of the predicate types of provenance; the version follows (https://slsa.dev/spec/v1.0/provenance).
SLSA = "https://slsa.dev/provenance/"
#: Annotation with the digest of the image that the attestation is about.
_ABOUT = "vnd.docker.reference.digest"


def local(target: str) -> str:
    """Temporary name of the second build's image. It is removed again: a name keeps the whole image on the disk."""
    return f"{NAME}:{target}-provenance"


def tag(digest: str) -> str:
    """The tag of an image's provenance at a registry."""
    return referrers.tag(digest, "provenance")


def recall(target: str, digest: str) -> dict[str, bytes] | None:
    """Digest -> text of the documents of an image's provenance, the index first; None if there is none."""
    facts = state.recall(target, "provenance", digest)
    return {name: text.encode() for name, text in facts["documents"].items()} if facts else None


def keep(target: str, digest: str, arguments: list[str]) -> None:
    """Store the provenance of the build that has just ended, unless it is known or ``PROVENANCE=0``.

    Args:
        target: the image's target.
        digest: of the image that was built.
        arguments: of :func:`trainyard.image.buildx.bake`, to build it again as :func:`local` and with provenance.
    Raises:
        StepFailed: the second build gave an image with another digest.
    """
    if state.recall(target, "provenance", digest) or not docker_engine.stores_in_containerd():
        return
    if settings.variable("PROVENANCE") == "0":
        return
    try:
        bake(target, arguments, quiet=True)
        found = image_store.documents(local(target))
    finally:
        docker_engine.untag(local(target))
    index = next(name for name, text in found.items() if b'"manifests"' in text)
    if digest not in subjects(found[index]):
        raise StepFailed(f"{target}: building {digest[:19]} again for its provenance gave another digest")
    wanted = [index, *(name for entry in _attestations(found[index]) for name in _named(found, entry["digest"]))]
    texts = {name: found[name].decode() for name in wanted}
    state.record(target, "provenance", digest, {"passed": True, "documents": texts})


def _named(found: dict[str, bytes], manifest: str) -> list[str]:
    """The digests of a manifest, of its configuration and of its layers."""
    data = json.loads(found[manifest])
    return [manifest, str(data["config"]["digest"]), *(str(layer["digest"]) for layer in data["layers"])]


def _attestations(index: bytes) -> list[dict[str, Any]]:
    """The descriptors of the attestations in an index."""
    entries = json.loads(index).get("manifests", [])
    return [entry for entry in entries if entry.get("annotations", {}).get(_KIND[0]) == _KIND[1]]


def subjects(index: bytes) -> list[str]:
    """The digests of the images in an index that have an attestation."""
    return [str(entry["annotations"][_ABOUT]) for entry in _attestations(index)]


def statement(target: str, digest: str) -> dict[str, Any] | None:
    """The in-toto statement of an image's provenance, as BuildKit wrote it; None if there is none."""
    documents = recall(target, digest)
    if documents is None:
        return None
    for entry in _attestations(next(iter(documents.values()))):
        _, _, *layers = _named(documents, str(entry["digest"]))
        for layer in layers:
            found: dict[str, Any] = json.loads(documents[layer])
            if str(found.get("predicateType")).startswith(SLSA):
                return found
    return None


def attach(target: str, repository: Repository, digest: str) -> str | None:
    """Attach the provenance of an image to it at a registry; its tag there, None if there is no provenance.

    Raises:
        StepFailed: the registry refuses it.
    """
    documents = recall(target, digest)
    if documents is None:
        return None
    index, *rest = documents
    for entry in _attestations(documents[index]):
        manifest = str(entry["digest"])
        for name in rest:
            if name in _named(documents, manifest)[1:]:
                referrers.put_blob(repository, documents[name])
        repository.put(Manifest(manifest, str(entry["mediaType"]), documents[manifest]), manifest)
    media_type = str(json.loads(documents[index])["mediaType"])
    repository.put(Manifest(index, media_type, documents[index]), tag(digest))
    return tag(digest)
