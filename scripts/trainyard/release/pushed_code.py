"""The image, or the image index of several platforms, whose code is replaced: from a record or from its registry."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainyard.console import StepFailed, UserError
from trainyard.oci import image_index
from trainyard.oci.registry import Manifest, Repository, sha256
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.model import Spec
from trainyard.spec.naming import LABELS, TAG
from trainyard.workspace.pushes import Push

#: The annotation with the digest of the image whose manifest was stored :func:`with_configuration`.
_DIGEST = f"{LABELS}.digest"


@dataclass(frozen=True)
class Image:
    """An image for one platform.

    Attributes:
        digest: what ``docker pull`` gets it by.
        document: its manifest, ``media_type``: that of the manifest.
        configuration: as it is stored.
    """

    digest: str
    media_type: str
    document: dict[str, Any]
    configuration: bytes

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        return dict(json.loads(self.configuration))

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
        return ARCHITECTURES[self.config["architecture"]]

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
    documents = json.dumps(image.document), image.configuration.decode()
    return Push(repository.name, tag, image.digest, image.media_type, *documents)


def recorded(push: Push) -> Pushed:
    """What a record is about."""
    images = tuple(
        Image(one.digest, one.media_type, json.loads(one.manifest), one.config.encode())
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
    document = json.loads(stored.body)
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
        image = replace(images[0], digest=stored.digest)
        return Pushed(version, image.digest, (image,))
    return Pushed(version, stored.digest, images, document)


def _image(repository: Repository, stored: Manifest) -> Image:
    """The image of a manifest, which may have been stored :func:`with_configuration`."""
    document = json.loads(stored.body)
    annotations = document.get("annotations") or {}
    digest = str(annotations.pop(_DIGEST, stored.digest))
    if not annotations:
        document.pop("annotations", None)
    try:
        configuration = base64.b64decode(document["config"].pop("data", ""), validate=True)
    except binascii.Error:
        configuration = b""
    if sha256(configuration) != document["config"]["digest"]:
        configuration = _blob(repository, document["config"]["digest"])
    return Image(digest, stored.media_type, document, configuration)


def with_configuration(image: Image) -> Manifest:
    """The manifest of an image with its configuration in itself, ``data`` of the descriptor, which saves a request.

    https://github.com/opencontainers/image-spec/blob/main/descriptor.md
    """
    document = dict(image.document)
    if "oci" in image.media_type:  # Docker's schema has no 'data'
        document["config"] = {**document["config"], "data": base64.b64encode(image.configuration).decode()}
        document["annotations"] = {**document.get("annotations", {}), _DIGEST: image.digest}
    return Manifest.of(document, image.media_type)


def _blob(repository: Repository, digest: str) -> bytes:
    """A small blob, checked against its digest."""
    data = repository.request("GET", f"blobs/{digest}").content
    if sha256(data) != digest:
        raise StepFailed(f"{repository.name}: the blob {digest[:19]} is damaged there")
    return data
