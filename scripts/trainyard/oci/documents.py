"""Documents of registries, checked where they arrive: manifests, image indexes, configurations, lists.

What a registry or a proxy before it answers may be anything. :func:`parse` returns a document whose members have the
types that the OCI specifications give them, so that the rest of the code may read them without looking.

https://github.com/opencontainers/image-spec, https://github.com/opencontainers/distribution-spec
"""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

# pydantic reads the types of a TypedDict on Python 3.11 only if it is this one.
from typing_extensions import TypedDict

from trainyard.console import StepFailed

#: Most bytes of a manifest or index, which registries must accept
#: (https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-manifests).
MANIFEST_LIMIT = 4 << 20

#: Most bytes of any other document: SBOMs of the images have up to 1 MB, lists of 1,000 tags 0.1 MB.
DOCUMENT_LIMIT = 32 << 20

#: Algorithms of digests that can be compared: those that references may have (:mod:`trainyard.oci.reference`).
ALGORITHMS = ("sha256", "sha384", "sha512")

IMAGE_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class InvalidAnswer(StepFailed):
    """What a registry answered is not what was asked for, and nothing of it is used."""


#: https://github.com/opencontainers/image-spec/blob/main/descriptor.md#digests
Digest = Annotated[str, Field(pattern=r"^[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[a-zA-Z0-9=_-]+$")]

# Members that no code reads may be anything, and null stands for a missing member, as Go's programs write it.
_open = with_config(ConfigDict(extra="allow", strict=True))


@_open
class Platform(TypedDict, total=False):
    """The platform of an image in an index."""

    os: str
    architecture: str
    variant: str | None


@_open
class Descriptor(TypedDict):
    """What a manifest or an index says of a blob or a manifest; ``size`` in bytes."""

    mediaType: str
    digest: Digest
    size: Annotated[int, Field(ge=0)]
    data: NotRequired[str | None]
    artifactType: NotRequired[str | None]
    platform: NotRequired[Platform | None]
    annotations: NotRequired[dict[str, str] | None]


@_open
class ImageManifest(TypedDict):
    """The manifest of an image or another artifact."""

    config: Descriptor
    layers: NotRequired[list[Descriptor] | None]
    subject: NotRequired[Descriptor | None]
    artifactType: NotRequired[str | None]
    annotations: NotRequired[dict[str, str] | None]
    manifests: NotRequired[None]


@_open
class Index(TypedDict):
    """An image index, or a list of referrers."""

    manifests: list[Descriptor] | None
    annotations: NotRequired[dict[str, str] | None]
    config: NotRequired[None]
    layers: NotRequired[None]


@_open
class Settings(TypedDict, total=False):
    """What containers of an image start with."""

    User: str | None
    WorkingDir: str | None
    Env: list[str] | None
    Entrypoint: list[str] | None
    Cmd: list[str] | None
    Labels: dict[str, str] | None


@_open
class RootFilesystem(TypedDict, total=False):
    """The layers of an image."""

    diff_ids: list[Digest] | None


@_open
class Step(TypedDict, total=False):
    """How a layer was created."""

    created_by: str | None
    empty_layer: bool | None


@_open
class Configuration(TypedDict, total=False):
    """The configuration of an image; of another artifact, members of these names may be missing."""

    os: str
    architecture: str
    variant: str | None
    config: Settings | None
    rootfs: RootFilesystem | None
    history: list[Step] | None


@_open
class Tags(TypedDict, total=False):
    """A page of the tags of a repository."""

    tags: list[str] | None


@functools.cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def parse(data: bytes, model: Any, what: str) -> dict[str, Any]:
    """Return a JSON document as it is written, after a check of its members.

    Args:
        model: one of this module's.
        what: the document, for the message.
    Raises:
        InvalidAnswer: it is not JSON, a number in it is not finite, or a member is missing or has another type.
    """
    try:
        document: dict[str, Any] = from_json(data, allow_inf_nan=False)
        _adapter(model).validate_python(document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        member = ".".join(str(part) for part in problem["loc"][:6]) or "the document"
        raise InvalidAnswer(f"{what} is malformed: {member}: {problem['msg']}") from None
    except ValueError as error:
        start = data.lstrip()[:15].lower()
        why = (
            "a page in HTML, as proxies and login pages answer" if start.startswith((b"<!doctype", b"<html")) else error
        )
        raise InvalidAnswer(f"{what} is not a JSON document ({why})") from None
    return document


def parse_manifest(data: bytes, media_type: str, what: str) -> tuple[dict[str, Any], str]:
    """Return the document of a manifest or index, and its media type.

    Args:
        media_type: as the registry gives it.
        what: the document, for the message.
    Raises:
        InvalidAnswer: see :func:`parse`; or it is neither a manifest nor an index, or is both: a reader could take an
            index for an image (https://github.com/opencontainers/image-spec/security/advisories/GHSA-77vh-xpmg-72qh).
    """
    given = media_type.partition(";")[0].strip()
    own = str(parse(data, dict[str, Any], what).get("mediaType") or given)
    known = given if given in IMAGE_TYPES + INDEX_TYPES else own
    if known not in IMAGE_TYPES + INDEX_TYPES:
        raise InvalidAnswer(f"{what} is neither an image manifest nor an index, by its type {known[:80]!r}")
    if own != known:
        raise InvalidAnswer(f"{what} is sent as {known} and says that it is {own[:80]!r}")
    if known in INDEX_TYPES:
        document = parse(data, Index, what)
        document["manifests"] = document.get("manifests") or []
    else:
        document = parse(data, ImageManifest, what)
        document["layers"] = document.get("layers") or []
    return document, known


def hashed(data: bytes, like: str = "sha256:") -> str:
    """Return the digest of ``data``, by the algorithm of the digest ``like``; empty for an unknown algorithm."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}" if algorithm in ALGORITHMS else ""
