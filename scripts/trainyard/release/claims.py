"""Attach and check claims about an image at a registry: in-toto statements, signed in Sigstore bundles, or plain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import image_index, referrers, statements
from trainyard.oci.documents import InvalidAnswer
from trainyard.oci.reference import Reference
from trainyard.oci.referrers import Artifact
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.statements import Opened, Signer, Trust
from trainyard.release import predicates
from trainyard.release.predicates import Claim

#: The kinds of claims that an image has which passed.
_TESTS = ("verify", "smoke")


@dataclass(frozen=True)
class Found:
    """Describe a claim that a registry has.

    Attributes:
        digest: of the artifact.
        kind: see :func:`trainyard.release.predicates.kind_of`; empty if there is no statement.
        predicate: what it says.
        signer: who signed it, in words that complete "signed": ``with this key``.
        problem: why it is not valid, in words; empty if it is.
        foreign: whether it is not signed, or names another signer than the one that was trusted.
    """

    digest: str
    kind: str = ""
    predicate: dict[str, Any] = field(default_factory=dict)
    signer: str = ""
    problem: str = ""
    foreign: bool = False

    @property
    def valid(self) -> bool:
        """Return whether it is about the image that it is attached to, and signed as trusted if that was asked."""
        return not self.problem

    def __str__(self) -> str:
        return f"{self.kind or self.digest[:19]}: {self.problem or f'signed {self.signer}'}"


def statement(repository: Repository, digest: str, claim: Claim) -> bytes:
    """Return the text of the in-toto statement of a claim about the image ``digest``."""
    return statements.make(repository, digest, predicates.TYPES[claim.kind], claim.predicate)


def attach(
    repository: Repository,
    subject: Manifest,
    signer: Signer | None,
    claims: Iterable[Claim],
    *,
    known: Sequence[Found] | None = None,
) -> list[str]:
    """Attach the claims about an image that it does not have yet, and return their kinds.

    Args:
        signer: who signs them; they are plain statements if None.
        known: what :func:`check` found, if it was called before.
    """
    if known is None:
        known = check(repository, subject.digest, signer.trust if signer else None)
    existing = [(claim.kind, claim.predicate) for claim in known if claim.valid]
    new = [claim for claim in claims if (claim.kind, dict(claim.predicate)) not in existing]
    referrers.attach(repository, subject, [_artifact(repository, subject, signer, claim) for claim in new])
    return [claim.kind for claim in new]


def _artifact(repository: Repository, subject: Manifest, signer: Signer | None, claim: Claim) -> Artifact:
    text, kind = statement(repository, subject.digest, claim), predicates.TYPES[claim.kind]
    if signer is None:
        return statements.artifact(text, statements.PLAIN, kind)
    return statements.artifact(signer.seal(text), statements.BUNDLE, kind)


def check(repository: Repository, digest: str, trust: Trust | None, kinds: Collection[str] = ()) -> list[Found]:
    """Return the claims that are attached to the image ``digest``, and whether they are valid.

    Args:
        trust: whose signatures count; if None, all claims do, signed by anyone or not.
        kinds: of the claims that are read, and others of the same predicate types; all if empty.
    """
    attached = statements.attached(repository, digest, {predicates.TYPES[kind] for kind in kinds})
    how = trust.how if trust else ""
    return [_checked(name, _opened(artifact, trust), digest, how) for name, artifact in attached]


def _opened(artifact: Artifact, trust: Trust | None) -> Opened:
    if artifact.media_type == statements.PLAIN:
        return Opened(artifact.data, "not signed" if trust else "", foreign=True)
    if trust:
        return trust.open(artifact.data)
    try:
        return Opened(statements.read_bundle(artifact.data).payload)
    except InvalidAnswer as error:
        return Opened(b"", str(error))


def _checked(name: str, opened: Opened, digest: str, signer: str) -> Found:
    try:
        decoded = statements.decode(opened.payload)
    except InvalidAnswer as error:
        return Found(name, problem=opened.problem or str(error), foreign=opened.foreign)
    predicate = decoded.get("predicate") or {}
    kind = predicates.kind_of(decoded["predicateType"], predicate)
    problem = opened.problem or statements.problem(decoded, digest)
    return Found(name, kind, predicate, signer, problem, opened.foreign)


def check_all(repository: Repository, image: Manifest, trust: Trust) -> dict[str, list[Found]]:
    """Return platform -> claims about each image of an index; the platform of ``image`` itself is empty."""
    index = image_index.images(image.document)
    return {name: check(repository, digest, trust) for name, digest in {"": image.digest, **index}.items()}


def signatures(repository: Repository, digest: str, trust: Trust, known: Sequence[Found] | None = None) -> int:
    """Return how many valid signatures an image has, by ``known`` or all claims, or raise StepFailed for none."""
    if known is None:
        known = check(repository, digest, trust, ["signature"])
    count = sum(one.kind == "signature" and one.valid for one in known)
    if not count:
        raise StepFailed(f"{repository.name}@{digest} has no signature {trust.how}")
    return count


def unsigned(reference: str, trust: Trust) -> str:
    """Return why an image at a registry has no valid signature, in words; empty if it has one."""
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


def passed(repository: Repository, digest: str) -> bool:
    """Return whether an image has claims that it passed verify and smoke, and none that it failed, signed or not.

    Everyone with write access to the repository can attach them: they prevent mistakes, they do not protect against the
    repository's owners.
    """
    valid = [claim for claim in check(repository, digest, None, _TESTS) if claim.valid]
    failed = any(predicates.says_failed(claim.kind, claim.predicate) for claim in valid)
    return not failed and {claim.kind for claim in valid} >= set(_TESTS)


def require(repository: Repository, digest: str, trust: Trust, kinds: Sequence[str]) -> list[Found]:
    """Return the valid claims of some kinds, or raise StepFailed if a kind has none or a failed test."""
    found = check(repository, digest, trust, kinds)
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
    """Return the valid claims of some kinds about an image; of an image index, which is signed, about its images.

    Raises:
        StepFailed: see :func:`require`; or an image index has no valid signature.
    """
    document = image.document
    if not image_index.is_index(document):
        return require(repository, image.digest, trust, kinds)
    signatures(repository, image.digest, trust)
    digests = image_index.images(document).values()
    return [one for digest in digests for one in require(repository, digest, trust, kinds)]
