"""``trainyard sign``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainyard.common import options

if TYPE_CHECKING:
    from trainyard.common.context import Context
    from trainyard.oci.registry import Manifest, Repository
    from trainyard.release.claims import Found

GROUP = "publish"


@options.command(
    "Sign an image at a registry, or check its signatures and claims.",
    "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out signing.pem",
    "trainyard sign tf-cpu --registry localhost:5000/ml --key signing.pem",
    "trainyard sign --image localhost:5000/ml/trainyard:tf-cpu --key signing.pem",
    "trainyard sign --image localhost:5000/ml/trainyard:tf-cpu --public-key signing.pub",
    "trainyard sign tf-cpu --registry localhost:5000/ml --keyless",
)
@options.target
@options.registry
@options.option("--image", metavar="REFERENCE", help="Any image at a registry instead of TARGET's at --registry.")
@options.signing
@options.checking
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    registry: str | None,
    image: str | None,
    key: Path | None,
    keyless: bool,
    public_key: Path | None,
    certificate_identity: str | None,
    certificate_oidc_issuer: str | None,
    as_json: bool,
) -> None:
    """Sign an image, or check its signatures and signed claims, in the form that 'cosign verify --key' reads.

    With a public key, or an identity and its issuer, every claim about the image is listed, and of an image index those
    about its images, too. The command fails if there is no valid signature, or if a claim was changed or is about
    another image; a claim of another signer does not count.

    Keys are PEM files (PKCS 8 or SEC 1; EC, RSA or Ed25519). 'trainyard push' signs by itself if it has a key. Nothing
    is sent to a transparency log: cosign verifies with --insecure-ignore-tlog.

    With --keyless, the identity of a job of GitHub Actions, of a machine of Google Cloud, or the OIDC token in
    SIGSTORE_ID_TOKEN signs. It gets a certificate for some minutes from Sigstore, and the signature is entered into
    Sigstore's transparency log: both are public.
    """
    from trainyard.common import console, errors
    from trainyard.release import claims, predicates, signers

    signer = signers.signer(key, "sign", keyless=keyless, context=context)
    trust = signers.trust(public_key, certificate_identity, certificate_oidc_issuer, "sign", context=context)
    if signer is None and trust is None:
        raise errors.UserError(f"{signers.ways_to_sign()} signs, {signers.ways_to_check()} checks: give one")
    repository, subject = _subject(context, target, registry, image)
    found: dict[str, Any] = {"image": f"{repository.name}@{subject.digest}"}
    if signer is not None:
        found["attached"] = claims.attach(repository, subject, signer, [predicates.signature()])
        already = "" if found["attached"] else "already "
        console.say(f"{found['image']} is {already}signed {signer.trust.how}")
    if trust is not None:
        of_platform = claims.check_all(repository, subject, trust)
        found["claims"] = _show(of_platform)
        found["valid"] = claims.signatures(repository, subject.digest, trust, of_platform[""])
        console.say(f"{found['image']}: {found['valid']} valid signature{'s' if found['valid'] != 1 else ''}")
    console.result(found, as_json=as_json)


def _subject(
    context: Context, target: str | None, address: str | None, image: str | None
) -> tuple[Repository, Manifest]:
    """Return the repository and the manifest of an image at a registry.

    Args:
        target: whose local image was pushed to ``address``, ``host[:port]/path``.
        image: reference of an image at a registry, instead of the two.
    Raises:
        UserError: there is no such image, here or at the registry.
    """
    from trainyard.common import errors
    from trainyard.image import recipes
    from trainyard.oci import inventory
    from trainyard.oci.registry import Repository, check_address
    from trainyard.release import platform_index
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    if image:
        repository, version = inventory.at_registry(image)
    else:
        spec = load(target, context=context)
        repository = Repository(f"{check_address(address)}/{NAME}", context.state)
        version = platform_index.version_of_host(recipes.named(spec), repository, spec.architecture, context)
    subject = repository.manifest(version)
    if subject is None:
        raise errors.UserError(f"{repository.name} has no {version}: push it first")
    return repository, subject


def _show(of_platform: Mapping[str, Sequence[Found]]) -> list[dict[str, Any]]:
    """Print every claim, and return them for JSON.

    Raises:
        StepFailed: one that names the signer is not valid.
    """
    from trainyard.common import console, errors

    all_claims = [(platform, one) for platform, some in of_platform.items() for one in some]
    lines = [f"{platform} {one}".strip() for platform, one in all_claims]
    for line in lines:
        console.say(f"  {line}")
    wrong = [line for line, (_, one) in zip(lines, all_claims, strict=True) if not one.valid and not one.foreign]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise errors.StepFailed(f"not a valid claim: {wrong[0]}{more}")
    return [
        {
            "platform": platform or None,
            "kind": one.kind,
            "digest": one.digest,
            "valid": one.valid,
            "problem": one.problem or None,
        }
        for platform, one in all_claims
    ]
