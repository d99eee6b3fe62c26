"""Find the image, or the image index of several platforms, whose code is replaced: in a record or at its registry."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainyard.common.errors import UserError
from trainyard.oci import image_index
from trainyard.oci.documents import CONFIGURATION, Configured, InvalidAnswer, check_manifest, hashed, parse
from trainyard.oci.registry import Manifest, Repository
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS, TAG
from trainyard.workspace.pushes import Push

#: The annotation with the manifest of the image, and the index that it is in, if any, as they were before the manifest
#: was stored :func:`with_configuration`: pairs of media type and Base64 in JSON, whose digests are compared.
_ORIGINAL = f"{LABELS}.original"


@dataclass(frozen=True)
class Image(Configured):
    """Describe an image for one platform.

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
        """Return its configuration."""
        return parse(self.configuration, CONFIGURATION, f"the configuration of {self.digest[:19]}")

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
            raise UserError(f"{self.digest[:19]} is for the architecture {name!r}, not for {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[name]

    @property
    def code_type(self) -> str:
        """Return the media type of the topmost layer."""
        return str(self.document["layers"][-1]["mediaType"])


@dataclass(frozen=True)
class Pushed:
    """Describe an image, or an image index.

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
        """Return its immutable tag."""
        about = self.images[0].labels if self.index is None else self.index.get("annotations") or {}
        return str(about.get(TAG, self.name))

    def as_push(self, repository: Repository, tag: str = "") -> Push:
        """Return the record of it, with its immutable tag, :attr:`tag` if that is empty."""
        named = repository.name, tag or self.tag
        images = tuple(
            Push(*named, one.digest, one.media_type, one.manifest.body.decode(), one.configuration.decode())
            for one in self.images
        )
        if self.index is None:
            return images[0]
        return Push(*named, self.digest, image_index.INDEX, json.dumps(self.index), "", images)


def recorded(push: Push) -> Pushed:
    """Return what a record is about."""
    images = tuple(
        Image(one.digest, Manifest.stored(one.manifest.encode(), one.media_type), one.config.encode())
        for one in push.images or (push,)
    )
    return Pushed(push.tag, push.digest, images, json.loads(push.manifest) if push.images else None)


def at_registry(spec: Spec, repository: Repository, version: str) -> Pushed | None:
    """Return an image or an index by its tag or digest; None if there is none.

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
    members, alone = image_index.images(document), len(spec.platforms) == 1
    digests = [image_index.digest_for(document, spec.architecture)] if alone else map(members.get, spec.platforms)
    images = tuple(_image(repository, repository.existing(digest)) for digest in digests if digest)
    if not images:
        raise UserError(
            f"{repository.name}@{stored.digest[:19]} is an index without an image for {', '.join(spec.platforms)}"
        )
    if alone:  # an image with its provenance, which is pulled by the digest of the index
        return Pushed(version, stored.digest, (replace(images[0], digest=stored.digest, index=stored),))
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
