"""Signed claims about an image at a registry: in-toto statements in Sigstore bundles, as referrers of OCI 1.1.

cosign stores and finds its attestations in the same way (https://github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from trainyard.console import StepFailed, UserError
from trainyard.oci import image_index, referrers_api
from trainyard.oci.reference import Reference
from trainyard.oci.referrers_api import Artifact
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import bundle, predicates, signature
from trainyard.release.predicates import Claim
from trainyard.release.signature import PrivateKey, PublicKey

_STATEMENT = "https://in-toto.io/Statement/v1"


class _Subject(BaseModel):
    digest: dict[str, str]


class _Statement(BaseModel):
    """See https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md."""

    kind: str = Field(alias="_type")
    subject: list[_Subject]
    predicate_type: str = Field(alias="predicateType")
    predicate: dict[str, Any] = {}


@dataclass(frozen=True)
class Found:
    """A claim that a registry has.

    Attributes:
        digest: of the artifact.
        kind: see :func:`trainyard.release.predicates.kind_of`; empty if there is no statement.
        predicate: what it says.
        problem: why it is not valid, in words; empty if it is.
        foreign: whether it names another key than the one it was checked with.
    """

    digest: str
    kind: str = ""
    predicate: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    foreign: bool = False

    @property
    def valid(self) -> bool:
        """Whether the key signed it, about the image that it is attached to."""
        return not self.problem

    def __str__(self) -> str:
        return f"{self.kind or self.digest[:19]}: {self.problem or 'signed with this key'}"


def statement(repository: Repository, digest: str, claim: Claim) -> bytes:
    """The in-toto statement of a claim about the image ``digest``."""
    algorithm, _, value = digest.partition(":")
    document = {
        "_type": _STATEMENT,
        "subject": [{"name": repository.name, "digest": {algorithm: value}}],
        "predicateType": predicates.TYPES[claim.kind],
        "predicate": claim.predicate,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def attach(
    repository: Repository,
    subject: Manifest,
    key: PrivateKey,
    claims: Iterable[Claim],
    *,
    known: Sequence[Found] | None = None,
) -> list[str]:
    """Sign claims about an image and attach those that it does not have yet; their kinds.

    Args:
        known: what :func:`check` found, if it was called before.
    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    if known is None:
        known = check(repository, subject.digest, key.public_key())
    signed = [(one.kind, one.predicate) for one in known if one.valid]
    new = [one for one in claims if (one.kind, dict(one.predicate)) not in signed]
    artifacts = [_artifact(key, one, statement(repository, subject.digest, one)) for one in new]
    referrers_api.attach(repository, subject, artifacts)
    return [one.kind for one in new]


def _artifact(key: PrivateKey, claim: Claim, payload: bytes) -> Artifact:
    """The artifact with a signed statement; its annotations are those of cosign."""
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": predicates.TYPES[claim.kind],
        "org.opencontainers.image.created": predicates.rfc_3339(datetime.datetime.now(datetime.UTC)),
    }
    return Artifact(bundle.seal(key, payload), referrers_api.BUNDLE, annotations)


def check(repository: Repository, digest: str, key: PublicKey) -> list[Found]:
    """Every claim that is attached to the image ``digest``, and whether it is valid.

    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    attached = referrers_api.get(repository, digest, referrers_api.BUNDLE)
    return [_checked(name, bundle.open_with(key, one.data), digest) for name, one in attached.items()]


def _checked(name: str, opened: bundle.Opened, digest: str) -> Found:
    try:
        found = _Statement.model_validate_json(opened.payload)
    except ValidationError:
        return Found(name, problem=opened.problem or "its content is no in-toto statement", foreign=opened.foreign)
    kind = predicates.kind_of(found.predicate_type, found.predicate)
    algorithm, _, value = digest.partition(":")
    problem = opened.problem
    if not problem and found.kind != _STATEMENT:
        problem = f"a statement of type {found.kind}, not {_STATEMENT}"
    if not problem and value not in [one.digest.get(algorithm) for one in found.subject]:
        about = next((f"{name}:{value[:12]}" for one in found.subject for name, value in one.digest.items()), "nothing")
        problem = f"about {about}, not about this image"
    return Found(name, kind, found.predicate, problem, opened.foreign)


def check_all(repository: Repository, image: Manifest, key: PublicKey) -> dict[str, list[Found]]:
    """Every claim about an image, and about each image of an image index: platform -> claims.

    The platform is empty for the claims about ``image`` itself.

    Raises:
        StepFailed: see :func:`check`.
    """
    index = image_index.images(json.loads(image.body))
    return {name: check(repository, digest, key) for name, digest in {"": image.digest, **index}.items()}


def signatures(repository: Repository, digest: str, key: PublicKey, known: Sequence[Found] | None = None) -> int:
    """How many signatures by ``key`` an image has, in cosign's classic form and as claims.

    Args:
        known: what :func:`check` found, if it was called before.
    Raises:
        StepFailed: it has none.
    """
    if known is None:
        known = check(repository, digest, key)
    as_claims = sum(one.kind == "signature" and one.valid for one in known)
    try:
        return signature.verified(repository, digest, key) + as_claims
    except StepFailed:
        if not as_claims:
            raise
        return as_claims


def unsigned(reference: str, key: PublicKey) -> str:
    """Why an image at a registry has no valid signature by ``key``, in words; empty if it has one."""
    try:
        named = Reference.parse(reference)
        if named.names_docker_hub:
            return "it names no registry"
        repository = Repository(named.name)
        image = repository.manifest(named.version)
        if image is None:
            return "there is no such image"
        signatures(repository, image.digest, key)
    except (StepFailed, UserError) as error:
        return str(error)
    return ""


def require(repository: Repository, digest: str, key: PublicKey, kinds: Sequence[str]) -> list[Found]:
    """The valid claims of some kinds about an image.

    Raises:
        StepFailed: one of the kinds has no valid claim, or one that says that a test failed; or the registry refuses.
    """
    found = check(repository, digest, key)
    image = f"{repository.name}@{digest}"
    for kind in kinds:
        of_kind = [one for one in found if one.kind == kind]
        valid = [one for one in of_kind if one.valid]
        if not valid:
            why = f": {of_kind[0].problem}" if of_kind else ""
            raise StepFailed(f"{image} has no claim '{kind}' that is signed with this key{why}")
        if any(predicates.says_failed(kind, one.predicate) for one in valid):
            raise StepFailed(f"{image}: the claim '{kind}' says that the test failed")
    return [one for one in found if one.valid and one.kind in kinds]


def require_all(repository: Repository, image: Manifest, key: PublicKey, kinds: Sequence[str]) -> list[Found]:
    """The valid claims of some kinds about an image; of an image index, about each of its images.

    Raises:
        StepFailed: see :func:`require`; or an image index has no signature, or the registry refuses.
    """
    document = json.loads(image.body)
    if not image_index.is_index(document):
        return require(repository, image.digest, key, kinds)
    signatures(repository, image.digest, key)
    digests = image_index.images(document).values()
    return [one for digest in digests for one in require(repository, digest, key, kinds)]
