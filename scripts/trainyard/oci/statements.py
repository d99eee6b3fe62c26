"""Make and read statements about an image at a registry, in the form of in-toto: in a Sigstore bundle, or plain.

Each is an artifact that refers to the image (:mod:`trainyard.oci.referrers`). cosign stores and finds signed ones in
the same way (https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md). Nothing is verified here:
:mod:`trainyard.release.claims` does so.
"""

from __future__ import annotations

import abc
import base64
import datetime
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Protocol, cast

from pydantic import Field

# pydantic reads the types of a TypedDict on Python 3.11 only if it is this one.
from typing_extensions import TypedDict

from trainyard.oci import referrers
from trainyard.oci.documents import InvalidAnswer, many, model, parse
from trainyard.oci.referrers import Artifact
from trainyard.oci.registry import Manifest, Repository

#: Type of a statement, of the payload of an envelope with it, and of the artifact with one that is not signed
#: (https://github.com/in-toto/attestation/blob/main/spec/v1/envelope.md).
PLAIN = "application/vnd.in-toto+json"

#: Type of a bundle, and of the artifact with a signed statement
#: (https://github.com/sigstore/protobuf-specs/blob/main/protos/sigstore_bundle.proto).
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"

#: Type of an artifact -> the annotation with the predicate type: BuildKit's, and cosign's.
_PREDICATE_TYPE = {PLAIN: "in-toto.io/predicate-type", BUNDLE: "dev.sigstore.bundle.predicateType"}

_STATEMENT = "https://in-toto.io/Statement/v1"


class Subject(TypedDict):
    """Name an artifact that a statement is about; ``digest``: algorithm -> hexadecimal digits."""

    name: NotRequired[str]
    digest: dict[str, str]


class Statement(TypedDict):
    """See https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md."""

    _type: str
    subject: list[Subject]
    predicateType: str
    predicate: NotRequired[dict[str, Any] | None]


#: The members of a bundle that are read. Its envelope: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md
_SIGNATURES: Any = Annotated[many(model({"sig": str}, {})), Field(min_length=1, max_length=1)]
_BUNDLE = model(
    {
        "mediaType": str,
        "verificationMaterial": model(
            {}, {"publicKey": model({}, {"hint": str}), "certificate": model({"rawBytes": str}, {})}
        ),
        "dsseEnvelope": model({"payload": str, "payloadType": str, "signatures": _SIGNATURES}, {}),
    },
    {},
)


@dataclass(frozen=True)
class Bundle:
    """A signed statement.

    Attributes:
        payload: the statement.
        envelope: around the statement, as the bundle has it.
        key_hint: the name of the public key that verifies it; None if there is a certificate.
        certificate: of the identity that signed, in DER form; None if there is a public key.
    """

    payload: bytes
    envelope: dict[str, Any]
    key_hint: str | None
    certificate: bytes | None


@dataclass(frozen=True)
class Opened:
    """The statement of a bundle, and what is wrong with it, in words; empty if it is signed as trusted.

    Attributes:
        foreign: whether it names another signer, so that nothing can be said about its signature.
    """

    payload: bytes
    problem: str = ""
    foreign: bool = False


def read_bundle(data: bytes) -> Bundle:
    """Return the parts of a Sigstore bundle with an in-toto statement, or raise :class:`InvalidAnswer`."""
    document = parse(data, _BUNDLE, "the bundle")
    envelope, material = document["dsseEnvelope"], document["verificationMaterial"]
    if (document["mediaType"], envelope["payloadType"]) != (BUNDLE, PLAIN):
        raise InvalidAnswer(
            f"the bundle is malformed: its types are {document['mediaType']} and {envelope['payloadType']}"
        )
    key, certificate = material.get("publicKey"), material.get("certificate")
    if (key is None) == (certificate is None):
        raise InvalidAnswer("the bundle is malformed: it must have a public key or a certificate")
    try:
        return Bundle(
            base64.b64decode(envelope["payload"], validate=True),
            envelope,
            None if key is None else key.get("hint") or "",
            None if certificate is None else base64.b64decode(certificate["rawBytes"], validate=True),
        )
    except ValueError as error:
        raise InvalidAnswer(f"the bundle is malformed: {error}") from None


class Trust(abc.ABC):
    """Open the bundles of those whose signatures count.

    Attributes:
        how: completes "signed" in messages: ``with this key``.
    """

    how: str

    def open(self, data: bytes) -> Opened:
        """Return the statement of a bundle, and whether it is signed as trusted."""
        try:
            bundle = read_bundle(data)
        except InvalidAnswer as error:
            return Opened(b"", str(error))
        return self._opened(bundle, data)

    @abc.abstractmethod
    def _opened(self, bundle: Bundle, data: bytes) -> Opened:
        """Return the statement of a bundle, of which ``data`` is the text."""


class Signer(Protocol):
    """Sign statements; ``trust`` is what accepts these signatures."""

    @property
    def trust(self) -> Trust: ...

    def seal(self, payload: bytes) -> bytes:
        """Return the bundle of a statement.

        Raises:
            StepFailed: a service that signing needs cannot be reached or refuses.
        """


def make(repository: Repository, digest: str, predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """Return the text of a statement about the image ``digest``, which is signed or attached."""
    algorithm, _, value = digest.partition(":")
    statement: Statement = {
        "_type": _STATEMENT,
        "subject": [{"name": repository.name, "digest": {algorithm: value}}],
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }
    return json.dumps(statement, separators=(",", ":")).encode()


def decode(data: bytes) -> Statement:
    """Return the statement that a text is, or raise :class:`InvalidAnswer` if it is none."""
    statement = cast(Statement, parse(data, Statement, "the statement"))
    if statement["_type"] != _STATEMENT:
        raise InvalidAnswer(f"a statement of type {statement['_type']}, not {_STATEMENT}")
    return statement


def problem(statement: Statement, digest: str) -> str:
    """Return why a statement is not about the image ``digest``, in words; empty if it is."""
    algorithm, _, value = digest.partition(":")
    digests = [subject["digest"] for subject in statement["subject"]]
    if value in [known.get(algorithm) for known in digests]:
        return ""
    about = next((f"{name}:{text[:12]}" for known in digests for name, text in known.items()), "nothing")
    return f"about {about}, not about this image"


def rfc_3339(time: datetime.datetime) -> str:
    """Return a time in UTC, as ``2026-11-23T16:00:00Z``."""
    return time.astimezone(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def artifact(data: bytes, media_type: str, predicate_type: str) -> Artifact:
    """Return the artifact with a statement: the text of one, or a bundle with it, by ``media_type``."""
    annotations = {_PREDICATE_TYPE[media_type]: predicate_type}
    if media_type == BUNDLE:  # as cosign writes it
        now = rfc_3339(datetime.datetime.now(datetime.UTC))
        annotations |= {"dev.sigstore.bundle.content": "dsse-envelope", "org.opencontainers.image.created": now}
    return Artifact(data, media_type, annotations)


def attached(
    repository: Repository, digest: str, predicate_types: Collection[str] = ()
) -> Iterator[tuple[str, Artifact]]:
    """Yield the artifacts with statements about the image ``digest``, after their digests.

    Args:
        predicate_types: of the statements; those of artifacts without an annotation are not known. All if empty.
    """
    for entry in referrers.listed(repository, digest, _PREDICATE_TYPE):
        kind = (entry.get("annotations") or {}).get(_PREDICATE_TYPE[entry["artifactType"]])
        if predicate_types and kind and kind not in predicate_types:
            continue
        if artifact := referrers.fetch(repository, entry):
            yield str(entry["digest"]), artifact


def predicate(repository: Repository, digest: str, predicate_type: str) -> dict[str, Any] | None:
    """Return the predicate of the first statement of a type about the image ``digest``; None if there is none.

    Raises:
        InvalidAnswer: there is none, and an artifact that should hold one does not.
    """
    wrong = None
    for _, artifact in attached(repository, digest, [predicate_type]):
        try:
            data = artifact.data if artifact.media_type == PLAIN else read_bundle(artifact.data).payload
            statement = decode(data)
        except InvalidAnswer as error:
            wrong = error
            continue
        if statement["predicateType"] == predicate_type and not problem(statement, digest):
            return statement.get("predicate") or {}
    if wrong:
        raise wrong
    return None


def copy(subject: Manifest, source: Repository, destination: Repository) -> None:
    """Attach the statements about an image to the same image in another repository."""
    referrers.attach(destination, subject, [artifact for _, artifact in attached(source, subject.digest)])
