"""Check documents of registries where they arrive: manifests, image indexes, configurations, lists.

What a registry or a proxy before it answers may be anything. :func:`parse` returns a document whose members have the
types that the OCI specifications give them, so that the rest of the code may read them without looking.

https://github.com/opencontainers/image-spec, https://github.com/opencontainers/distribution-spec
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

# pydantic reads the types of a TypedDict on Python 3.11 only if it is this one.
from typing_extensions import TypedDict

from trainyard.common.errors import StepFailed, one_line

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
    """Report a response that is not what was requested; nothing of it is used."""


def model(required: dict[str, Any], optional: dict[str, Any]) -> Any:
    """Return the type of an object in JSON: name -> type of its members.

    An optional member may be null, as Go's programs write it. Members that no code reads may be anything, but none of
    these in another case, which Go's programs take for it (https://pkg.go.dev/encoding/json#Unmarshal).
    """
    members = required | {name: NotRequired[kind | None] for name, kind in optional.items()}
    made: Any = TypedDict("made", members)  # type: ignore[misc]
    spelled = {name.lower(): name for name in members}

    def check_case(value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if spelled.get(name.lower(), name) != name:
                raise ValueError(f"the member {name!r} is spelled {spelled[name.lower()]!r}")
        return value

    return Annotated[with_config(ConfigDict(extra="allow", strict=True))(made), BeforeValidator(check_case)]


def many(kind: Any) -> Any:
    """Return the type of a list in JSON."""
    return list[kind]


#: https://github.com/opencontainers/image-spec/blob/main/descriptor.md
_DIGEST = Annotated[str, Field(pattern=r"^[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[a-zA-Z0-9=_-]+$")]
_PLATFORM = model({}, {"os": str, "architecture": str, "variant": str})
_TEXTS = dict[str, str]
_DESCRIPTOR = model(
    {"mediaType": str, "digest": _DIGEST, "size": Annotated[int, Field(ge=0)]},
    {"data": str, "artifactType": str, "platform": _PLATFORM, "annotations": _TEXTS},
)

#: The manifest of an image or another artifact.
IMAGE = model(
    {"config": _DESCRIPTOR},
    {
        "mediaType": str,
        "layers": many(_DESCRIPTOR),
        "subject": _DESCRIPTOR,
        "artifactType": str,
        "annotations": _TEXTS,
        "manifests": type(None),
    },
)

#: An image index, or a list of referrers.
INDEX = model(
    {"manifests": many(_DESCRIPTOR) | None},
    {"mediaType": str, "annotations": _TEXTS, "config": type(None), "layers": type(None)},
)

#: The configuration of an image; one of another artifact may lack them all.
CONFIGURATION = model(
    {},
    {
        "os": str,
        "architecture": str,
        "config": model({}, dict.fromkeys(("Env", "Entrypoint", "Cmd"), list[str]) | {"User": str, "Labels": _TEXTS}),
        "rootfs": model({}, {"diff_ids": many(_DIGEST)}),
        "history": many(model({}, {"created_by": str, "empty_layer": bool})),
    },
)

#: A page of the tags of a repository: no paths, which would be those of other documents.
TAGS = model({}, {"tags": list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]]})

#: The members of a CycloneDX document that are read (https://cyclonedx.org/docs/1.6/json/).
_PROPERTIES = many(model({}, {"name": str, "value": str}))
SBOM = model(
    {},
    {
        "metadata": model({}, {"component": model({}, {"properties": _PROPERTIES})}),
        "components": many(model({"name": str}, {"version": str, "purl": str, "properties": _PROPERTIES})),
    },
)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse(data: bytes, kind: Any, what: str) -> dict[str, Any]:
    """Return a JSON document as it is written, after a check of its members.

    Args:
        kind: what :func:`model` returned.
        what: the document, for the message.
    Raises:
        InvalidAnswer: it is not JSON, a number in it is not finite, or a member is missing or has another type.
    """
    try:
        document: dict[str, Any] = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        page = data.lstrip()[:15].lower().startswith((b"<!doctype", b"<html"))
        why = "a page in HTML, as proxies and login pages answer" if page else error
        raise InvalidAnswer(f"{what} is not a JSON document ({why})") from None
    check(document, kind, what)
    return document


def check(document: Any, kind: Any, what: str) -> None:
    """Raise :class:`InvalidAnswer` if a member of a document is missing or has another type."""
    try:
        _adapter(kind).validate_python(document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        member = ".".join(str(part) for part in problem["loc"][:6]) or "the document"
        raise InvalidAnswer(f"{what} is malformed: {one_line(member)}: {problem['msg']}") from None


def check_manifest(data: bytes, media_type: str, what: str) -> str:
    """Check a manifest or index, and return its media type.

    Args:
        media_type: as the registry gives it.
        what: the document, for the message.
    Raises:
        InvalidAnswer: see :func:`parse`; or it is neither a manifest nor an index, or is both: a reader could take an
            index for an image (https://github.com/opencontainers/image-spec/security/advisories/GHSA-77vh-xpmg-72qh).
    """
    given = media_type.partition(";")[0].strip()
    document = parse(data, dict[str, Any], what)
    own, types = str(document.get("mediaType") or given), IMAGE_TYPES + INDEX_TYPES
    known = given if given in types else own
    if known not in types:
        raise InvalidAnswer(f"{what} is neither an image manifest nor an index, by its type {known[:80]!r}")
    if own != known:
        raise InvalidAnswer(f"{what} is sent as {known} and says that it is {own[:80]!r}")
    check(document, INDEX if known in INDEX_TYPES else IMAGE, what)
    return known


def hashed(data: bytes, like: str = "sha256:") -> str:
    """Return the digest of ``data``, by the algorithm of the digest ``like``; empty for an unknown algorithm."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}" if algorithm in ALGORITHMS else ""


def descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    """Return what manifests and indexes name a document by."""
    return {"mediaType": media_type, "digest": hashed(data), "size": len(data)}


def labels_in(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> value of the labels in the configuration of an image."""
    return dict((configuration.get("config") or {}).get("Labels") or {})


class Configured:
    """Read the configuration of an image, with which its containers start."""

    def _configuration(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """Return the ``config`` part of the configuration."""
        return dict(self._configuration().get("config") or {})

    @property
    def labels(self) -> dict[str, str]:
        """Return name -> value of the labels."""
        return labels_in(self._configuration())

    @property
    def environment(self) -> dict[str, str]:
        """Return name -> value of the environment variables."""
        return dict(entry.partition("=")[::2] for entry in self.settings.get("Env") or [])
