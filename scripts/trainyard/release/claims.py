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

from trainyard.common.console import StepFailed, UserError
from trainyard.oci import image_index, referrers_api
from trainyard.oci.documents import InvalidAnswer
from trainyard.oci.reference import Reference
from trainyard.oci.referrers_api import Artifact
from trainyard.oci.registry import Manifest, Repository
from trainyard.release import predicates
from trainyard.release.predicates import Claim
from trainyard.release.signers import Opened, Signer, Trust

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
        signer: who signed it, in words that complete "signed": ``with this key``.
        foreign: whether it names another signer than the one that was trusted.
    """

    digest: str
    kind: str = ""
    predicate: dict[str, Any] = field(default_factory=dict)
    signer: str = ""
    problem: str = ""
    foreign: bool = False

    @property
    def valid(self) -> bool:
        """Whether it is signed as trusted, about the image that it is attached to."""
        return not self.problem

    def __str__(self) -> str:
        return f"{self.kind or self.digest[:19]}: {self.problem or f'signed {self.signer}'}"


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
    signer: Signer,
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
        known = check(repository, subject.digest, signer.trust)
    signed = [(one.kind, one.predicate) for one in known if one.valid]
    new = [one for one in claims if (one.kind, dict(one.predicate)) not in signed]
    artifacts = [_artifact(signer, one, statement(repository, subject.digest, one)) for one in new]
    referrers_api.attach(repository, subject, artifacts)
    return [one.kind for one in new]


def _artifact(signer: Signer, claim: Claim, payload: bytes) -> Artifact:
    """The artifact with a signed statement; its annotations are those of cosign."""
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": predicates.TYPES[claim.kind],
        "org.opencontainers.image.created": predicates.rfc_3339(datetime.datetime.now(datetime.UTC)),
    }
    return Artifact(signer.seal(payload), referrers_api.BUNDLE, annotations)


def check(repository: Repository, digest: str, trust: Trust) -> list[Found]:
    """Every claim that is attached to the image ``digest``, and whether it is valid.

    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    attached = referrers_api.get(repository, digest, referrers_api.BUNDLE)
    return [_checked(name, trust.open(one.data), digest, trust.how) for name, one in attached.items()]


def _checked(name: str, opened: Opened, digest: str, signer: str) -> Found:
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
    return Found(name, kind, found.predicate, signer, problem, opened.foreign)


def check_all(repository: Repository, image: Manifest, trust: Trust) -> dict[str, list[Found]]:
    """Every claim about an image, and about each image of an image index: platform -> claims.

    The platform is empty for the claims about ``image`` itself.

    Raises:
        StepFailed: see :func:`check`.
    """
    index = image_index.images(image.document)
    return {name: check(repository, digest, trust) for name, digest in {"": image.digest, **index}.items()}


def signatures(repository: Repository, digest: str, trust: Trust, known: Sequence[Found] | None = None) -> int:
    """How many valid signatures an image has, in cosign's classic form and as claims.

    Args:
        known: what :func:`check` found, if it was called before.
    Raises:
        StepFailed: it has none.
    """
    if known is None:
        known = check(repository, digest, trust)
    as_claims = sum(one.kind == "signature" and one.valid for one in known)
    try:
        return trust.verified(repository, digest) + as_claims
    except StepFailed as error:
        if not as_claims or isinstance(error, InvalidAnswer):
            raise
        return as_claims


def unsigned(reference: str, trust: Trust) -> str:
    """Why an image at a registry has no valid signature, in words; empty if it has one."""
    try:
        named = Reference.parse(reference)
        if named.names_docker_hub:
            return "it names no registry"
        repository = Repository(named.name)
        image = repository.manifest(named.version)
        if image is None:
            return "there is no such image"
        signatures(repository, image.digest, trust)
    except (StepFailed, UserError) as error:
        return str(error)
    return ""


def require(repository: Repository, digest: str, trust: Trust, kinds: Sequence[str]) -> list[Found]:
    """The valid claims of some kinds about an image.

    Raises:
        StepFailed: one of the kinds has no valid claim, or one that says that a test failed; or the registry refuses.
    """
    found = check(repository, digest, trust)
    image = f"{repository.name}@{digest}"
    for kind in kinds:
        of_kind = [one for one in found if one.kind == kind]
        valid = [one for one in of_kind if one.valid]
        if not valid:
            why = f": {of_kind[0].problem}" if of_kind else ""
            raise StepFailed(f"{image} has no claim '{kind}' that is signed {trust.how}{why}")
        if any(predicates.says_failed(kind, one.predicate) for one in valid):
            raise StepFailed(f"{image}: the claim '{kind}' says that the test failed")
    return [one for one in found if one.valid and one.kind in kinds]


def require_all(repository: Repository, image: Manifest, trust: Trust, kinds: Sequence[str]) -> list[Found]:
    """The valid claims of some kinds about an image; of an image index, about each of its images.

    Raises:
        StepFailed: see :func:`require`; or an image index has no signature, or the registry refuses.
    """
    document = image.document
    if not image_index.is_index(document):
        return require(repository, image.digest, trust, kinds)
    signatures(repository, image.digest, trust)
    digests = image_index.images(document).values()
    return [one for digest in digests for one in require(repository, digest, trust, kinds)]
