"""Find the image, or the image index of several platforms, whose code is replaced: in a record or at its registry."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import image_index
from trainyard.oci.documents import CONFIGURATION, Configured, InvalidAnswer, check_manifest, hashed, parse
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import Named
from trainyard.release import pushes
from trainyard.release.pushes import Push
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.naming import LABELS, TAG

#: The annotation with the manifest of the image, and the index that it is in, if any, as they were before the manifest
#: was stored :func:`with_configuration`: pairs of media type and Base64 in JSON, whose digests are compared.
_ORIGINAL = f"{LABELS}.original"


@dataclass(frozen=True)
class Image(Configured):
    """Read the documents in the record of an image for one platform."""

    push: Push

    @cached_property
    def manifest(self) -> Manifest:
        """Return its manifest."""
        return Manifest.stored(self.push.manifest.encode(), self.push.media_type)

    @cached_property
    def document(self) -> dict[str, Any]:
        """Return the document of its manifest."""
        return self.manifest.document

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return its configuration."""
        return parse(self.push.config.encode(), CONFIGURATION, f"the configuration of {self.push.digest[:19]}")

    def _configuration(self) -> dict[str, Any]:
        return self.config

    @property
    def diff_ids(self) -> list[str]:
        """Return digests of the uncompressed layers, bottom first."""
        return list((self.config.get("rootfs") or {}).get("diff_ids") or [])

    @property
    def architecture(self) -> Architecture:
        """Return the architecture that it is for."""
        name = str(self.config.get("architecture"))
        if name not in ARCHITECTURES:
            valid = ", ".join(ARCHITECTURES)
            raise UserError(f"{self.push.digest[:19]} is for the architecture {name!r}, not for {valid}")
        return ARCHITECTURES[name]

    @property
    def code_type(self) -> str:
        """Return the media type of the topmost layer."""
        return str(self.document["layers"][-1]["mediaType"])


def pushed_tag(target: str) -> str:
    """Return the tag of the image or image index that was pushed last, from any host: ``<target>.pushed``."""
    return f"{target}.pushed"


def remember(
    named: Named, architecture: Architecture, folder: Path, repository: Repository, tag: str, digest: str
) -> None:
    """Record an image or an image index that was pushed, here and at the registry, for code-only pushes on any host.

    Args:
        architecture: of the image that is taken of an index, where the repository has one platform.
        folder: of the repository.
        tag: its immutable tag.
        digest: its digest there; the registry has it.
    Raises:
        StepFailed: the registry refuses.
    """
    pushed = at_registry(named, architecture, repository, digest)
    if pushed is None:
        raise StepFailed(f"{repository.name} no longer has {digest}, which was just pushed: run 'trainyard push' again")
    pushes.record(repository.state / named.name, replace(pushed, tag=tag, folder=str(folder)))
    stored = repository.existing(digest)
    if not pushed.images:
        stored = with_configuration(Image(pushed), stored)
    # Where tags are immutable, other hosts find the image by its floating tag, or by --image.
    with suppress(UserError):
        repository.tag(stored, pushed_tag(named.name))


def images_of(push: Push) -> list[Image]:
    """Return the images of an index, or the image alone, that a record is about."""
    return [Image(member) for member in push.images or (push,)]


def at_registry(named: Named, architecture: Architecture, repository: Repository, version: str) -> Push | None:
    """Return the record of an image or an index by its tag or digest; None if there is none.

    An index is taken as a whole if the workspace has several platforms, else its image for ``architecture``.

    Raises:
        UserError: it is an index without an image for a platform of the workspace.
    """
    stored = repository.manifest(version)
    if stored is None:
        return None
    document = stored.document
    if not image_index.is_index(document):
        return _image(repository, stored, version)
    members, alone = image_index.images(document), len(named.platforms) == 1
    digests = [image_index.digest_for(document, architecture)] if alone else map(members.get, named.platforms)
    images = tuple(_image(repository, repository.existing(digest), version) for digest in digests if digest)
    if not images:
        raise UserError(
            f"{repository.name}@{stored.digest[:19]} is an index without an image for {', '.join(named.platforms)}"
        )
    if alone:  # an image with its provenance, which is pulled by the digest of the index
        return replace(images[0], digest=stored.digest)
    tag = str((document.get("annotations") or {}).get(TAG, version))
    return Push(repository.name, tag, stored.digest, image_index.INDEX, json.dumps(document), "", images)


def _image(repository: Repository, stored: Manifest, version: str) -> Push:
    """Return the record of an image by its manifest, which may have been stored :func:`with_configuration`.

    Args:
        version: its tag if it has no label with its immutable tag.
    Raises:
        InvalidAnswer: a document is not the one that another names by its digest.
    """
    what = f"{repository.name}@{stored.digest}"
    document = stored.document
    if "config" not in document:
        raise InvalidAnswer(f"{what} is an index in an index, where one image is expected")
    original = (document.get("annotations") or {}).get(_ORIGINAL)
    try:
        bodies = {kind: base64.b64decode(body, validate=True) for kind, body in json.loads(original or "[]")}
        configuration = base64.b64decode(document["config"].get("data") or "", validate=True)
    except (ValueError, TypeError):
        raise InvalidAnswer(f"{what}: its annotation {_ORIGINAL} is malformed: run 'trainyard push' again") from None
    for kind, body in bodies.items():
        check_manifest(body, kind, what)
    originals = [Manifest.stored(body, kind) for kind, body in bodies.items()]
    manifest, index = (*originals, None, None)[:2]
    manifest = manifest or stored
    if index and manifest.digest not in image_index.images(index.document).values():
        raise InvalidAnswer(f"{what}: {manifest.digest} is not in {index.digest}: run 'trainyard push' again")
    digest = manifest.document["config"]["digest"]
    if hashed(configuration) != digest:
        configuration = repository.blob(digest)
    texts = manifest.body.decode(), configuration.decode("utf-8", "replace")
    push = Push(repository.name, version, (index or manifest).digest, manifest.media_type, *texts)
    return replace(push, tag=Image(push).labels.get(TAG, version))


def with_configuration(image: Image, stored: Manifest) -> Manifest:
    """Return the manifest of an image with its configuration in itself, ``data`` of the descriptor.

    Reading it takes one request instead of two or three.
    https://github.com/opencontainers/image-spec/blob/main/descriptor.md

    Args:
        stored: what the registry has: the manifest, or its index.
    """
    if "oci" not in image.push.media_type:  # Docker's schema has no 'data'
        return image.manifest
    document = image.manifest.document
    document["config"]["data"] = base64.b64encode(image.push.config.encode()).decode()
    original = {manifest.digest: manifest for manifest in (image.manifest, stored)}.values()
    text = json.dumps([(manifest.media_type, base64.b64encode(manifest.body).decode()) for manifest in original])
    document["annotations"] = {**(document.get("annotations") or {}), _ORIGINAL: text}
    return Manifest.of(document, image.push.media_type)
