"""How an image was built, in BuildKit's own words (SLSA provenance), kept beside the image and never in its digest.

An attestation holds times, so an image built with one is another digest every time, and nothing that passed could be
compared, promoted or reproduced by digest. So the image is built without, and the same build runs once more with
``--provenance=mode=max``: every step comes from the cache, the image inside is the same to the byte, and the documents
that BuildKit lays around it are kept, some 50 KB. ``make push`` sends them under a tag named after the image's digest,
where ``docker buildx imagetools inspect --format '{{json .Provenance}}'`` finds them.
"""

from __future__ import annotations

import json
import os
from typing import Any

from scripts import engine, state
from scripts.bake import bake
from scripts.cli import StepFailed
from scripts.plan import NAME
from scripts.published import artifacts
from scripts.published.tags import Manifest, Repository
from scripts.stored import blobs

#: Annotation of an attestation's descriptor, with its value (moby/buildkit, docs/attestations/attestation-storage.md).
_KIND = ("vnd.docker.reference.type", "attestation-manifest")
#: The other one: the digest of the image that it is about.
_ABOUT = "vnd.docker.reference.digest"

#: Records of a target that are kept, of 50 KB each.
KEPT = 20


def local(target: str) -> str:
    """What the second build is called, as long as it is looked at: it would keep the whole image on the disk."""
    return f"{NAME}:{target}-provenance"


def tag(digest: str) -> str:
    """The tag of an image's provenance at a registry."""
    return artifacts.tag(digest, "provenance")


def _step(digest: str) -> str:
    """What the record is called: one an image, since what is pushed may be an older one than was built last."""
    return f"provenance-{digest.removeprefix('sha256:')[:12]}"


def recall(target: str, digest: str) -> dict[str, bytes] | None:
    """Digest -> text of the documents of an image's provenance, the index first; None if none is kept."""
    facts = state.recall(target, _step(digest), digest)
    return {name: text.encode() for name, text in facts["documents"].items()} if facts else None


def keep(target: str, digest: str, arguments: list[str]) -> None:
    """Keep the provenance of the build that has just ended, unless it is known or ``PROVENANCE=0``.

    Args:
        digest: of the image that it made.
        arguments: of :func:`scripts.bake.bake`, which make it again, as :func:`local` and with provenance.
    Raises:
        StepFailed: the second build gave another image.
    """
    if state.recall(target, _step(digest), digest) or not engine.stores_in_containerd():
        return
    if os.environ.get("PROVENANCE") == "0":
        return
    try:
        bake(target, arguments, quiet=True)
        found = blobs.documents(local(target))
    finally:
        engine.forget(local(target))
    index = next(name for name, text in found.items() if b'"manifests"' in text)
    if digest not in subjects(found[index]):
        raise StepFailed(f"{target}: building {digest[:19]} again for its provenance gave another image")
    wanted = [index, *(name for entry in _attestations(found[index]) for name in _named(found, entry["digest"]))]
    texts = {name: found[name].decode() for name in wanted}
    state.record(target, _step(digest), digest, {"passed": True, "documents": texts})
    state.forget_old(target, "provenance-*", KEPT)


def _named(found: dict[str, bytes], manifest: str) -> list[str]:
    """A manifest and what it names."""
    data = json.loads(found[manifest])
    return [manifest, str(data["config"]["digest"]), *(str(layer["digest"]) for layer in data["layers"])]


def _attestations(index: bytes) -> list[dict[str, Any]]:
    """The descriptors of the attestations in an index."""
    entries = json.loads(index).get("manifests", [])
    return [entry for entry in entries if entry.get("annotations", {}).get(_KIND[0]) == _KIND[1]]


def subjects(index: bytes) -> list[str]:
    """The digests of the images in an index that have an attestation beside them."""
    return [str(entry["annotations"][_ABOUT]) for entry in _attestations(index)]


def attach(target: str, repository: Repository, digest: str) -> str | None:
    """Lay the provenance of an image beside it at a registry; the tag it has there, None if there is none.

    Raises:
        StepFailed: the registry does not take it.
    """
    documents = recall(target, digest)
    if documents is None:
        return None
    index, *rest = documents
    for entry in _attestations(documents[index]):
        manifest = str(entry["digest"])
        for name in rest:
            if name in _named(documents, manifest)[1:]:
                artifacts.put_blob(repository, documents[name])
        repository.put(Manifest(manifest, str(entry["mediaType"]), documents[manifest]), manifest)
    media_type = str(json.loads(documents[index])["mediaType"])
    repository.put(Manifest(index, media_type, documents[index]), tag(digest))
    return tag(digest)
