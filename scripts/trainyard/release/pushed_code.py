"""The image, or the image index of several platforms, whose code is replaced: from a record or from its registry."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainyard.common.errors import UserError
from trainyard.oci import image_index
from trainyard.oci.documents import CONFIGURATION, InvalidAnswer, check_manifest, hashed, parse
from trainyard.oci.registry import Manifest, Repository
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS, TAG
from trainyard.workspace.pushes import Push

#: The annotation with the manifest of the image, and the index that it is in, if any, as they were before the manifest
#: was stored :func:`with_configuration`: pairs of media type and Base64 in JSON, whose digests are compared.
_ORIGINAL = f"{LABELS}.original"


@dataclass(frozen=True)
class Image:
    """An image for one platform.

    Attributes:
        digest: what ``docker pull`` gets it by.
        manifest, configuration: as they are stored.
        index: with its provenance, if it was read from the registry; ``digest`` is that of the index then.
    """

    digest: str
    manifest: Manifest
    configuration: bytes
    index: Manifest | None = None

    @property
    def media_type(self) -> str:
        """Return the media type of its manifest."""
        return self.manifest.media_type

    @cached_property
    def document(self) -> dict[str, Any]:
        """Return the document of its manifest."""
        return self.manifest.document

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        return parse(self.configuration, CONFIGURATION, f"the configuration of {self.digest[:19]}")

    @property
    def labels(self) -> dict[str, str]:
        """Name -> value of the labels."""
        return dict((self.config.get("config") or {}).get("Labels") or {})

    @property
    def diff_ids(self) -> list[str]:
        """Digests of the uncompressed layers, bottom first."""
        return list((self.config.get("rootfs") or {}).get("diff_ids") or [])

    @property
    def architecture(self) -> Architecture:
        """The architecture that it is for."""
        name = str(self.config.get("architecture"))
        if name not in ARCHITECTURES:
            raise UserError(f"{self.digest[:19]} is for the architecture {name!r}, not for {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[name]

    @property
    def code_type(self) -> str:
        """The media type of the topmost layer."""
        return str(self.document["layers"][-1]["mediaType"])


@dataclass(frozen=True)
class Pushed:
    """An image, or an image index.

    Attributes:
        name: its tag or digest, for messages.
        digest: what ``docker pull`` gets it by.
        images: those of the index; the image alone.
        index: the document of the index; None for an image alone.
    """

    name: str
    digest: str
    images: tuple[Image, ...]
    index: dict[str, Any] | None = None

    @property
    def tag(self) -> str:
        """Its immutable tag."""
        about = self.images[0].labels if self.index is None else self.index.get("annotations") or {}
        return str(about.get(TAG, self.name))

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its first image."""
        return self.images[0].labels

    def as_push(self, repository: Repository, tag: str = "") -> Push:
        """The record of it.

        Args:
            tag: its immutable tag; :attr:`tag` if empty.
        """
        tag = tag or self.tag
        images = tuple(_as_push(one, repository, tag) for one in self.images)
        if self.index is None:
            return images[0]
        return Push(repository.name, tag, self.digest, image_index.INDEX, json.dumps(self.index), "", images)


def _as_push(image: Image, repository: Repository, tag: str) -> Push:
    documents = image.manifest.body.decode(), image.configuration.decode()
    return Push(repository.name, tag, image.digest, image.media_type, *documents)


def recorded(push: Push) -> Pushed:
    """What a record is about."""
    images = tuple(
        Image(one.digest, Manifest.stored(one.manifest.encode(), one.media_type), one.config.encode())
        for one in push.images or (push,)
    )
    return Pushed(push.tag, push.digest, images, json.loads(push.manifest) if push.images else None)


def at_registry(spec: Spec, repository: Repository, version: str) -> Pushed | None:
    """An image or an index by its tag or digest; None if there is none.

    An index is taken as a whole if the workspace has several platforms, else its image for the platform of ``spec``.

    Raises:
        UserError: it is an index without an image for a platform of the workspace.
    """
    stored = repository.manifest(version)
    if stored is None:
        return None
    document = stored.document
    if not image_index.is_index(document):
        image = _image(repository, stored)
        return Pushed(version, image.digest, (image,))
    if len(spec.platforms) == 1:
        found = image_index.digest_for(document, spec.architecture)
        digests = [found] if found else []
    else:
        members = image_index.images(document)
        digests = [members[one] for one in spec.platforms if one in members]
    if not digests:
        raise UserError(
            f"{repository.name}@{stored.digest[:19]} is an index without an image for {', '.join(spec.platforms)}"
        )
    images = tuple(_image(repository, repository.existing(digest)) for digest in digests)
    if len(spec.platforms) == 1:  # an image with its provenance, which is pulled by the digest of the index
        image = replace(images[0], digest=stored.digest, index=stored)
        return Pushed(version, image.digest, (image,))
    return Pushed(version, stored.digest, images, document)


def _image(repository: Repository, stored: Manifest) -> Image:
    """Return the image of a manifest, which may have been stored :func:`with_configuration`.

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
    return Image((index or manifest).digest, manifest, configuration, index)


def with_configuration(image: Image) -> Manifest:
    """Return the manifest of an image with its configuration in itself, ``data`` of the descriptor.

    Reading it takes one request instead of two or three.
    https://github.com/opencontainers/image-spec/blob/main/descriptor.md
    """
    if "oci" not in image.media_type:  # Docker's schema has no 'data'
        return image.manifest
    document = image.manifest.document
    document["config"]["data"] = base64.b64encode(image.configuration).decode()
    original = [image.manifest, *([image.index] if image.index else [])]
    text = json.dumps([(one.media_type, base64.b64encode(one.body).decode()) for one in original])
    document["annotations"] = {**(document.get("annotations") or {}), _ORIGINAL: text}
    return Manifest.of(document, image.media_type)
