"""``trainyard promote``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainyard.common import options

if TYPE_CHECKING:
    from trainyard.common.context import Context
    from trainyard.oci.registry import Repository
    from trainyard.oci.statements import Signer, Trust
    from trainyard.recipe import Named
    from trainyard.release.promotion import Demanded

GROUP = "publish"


@options.command(
    "Move a target's floating tags to an image that passed.",
    "trainyard promote tf-cpu --registry localhost:5000/team",
    "trainyard promote tf-cpu --registry localhost:5000/team --image tf-cpu-2.21.0-20261120-0123abcd",
    "trainyard promote tf-cpu --registry localhost:5000/team --to localhost:5000/team-floating",
    "trainyard promote tf-cpu --registry localhost:5000/team --require-signed --public-key signing.pub",
)
@options.target
@options.registry
@options.option("--image", metavar="TAG|DIGEST", help="Image at the registry; TARGET's local image by default.")
@options.option(
    "--to",
    metavar="HOST[:PORT]/PATH",
    help="Where the tags are moved, if not at --registry: needed where its tags are immutable.",
)
@options.flag("--require-signed", help="Promote only an image whose signed claims are valid.")
@options.option("--claims", metavar="KIND,...", help="Kinds of claims that --require-signed demands; all by default.")
@options.checking
@options.key(
    "--key", "COSIGN_KEY", "Private key (PEM) to sign a verification summary with. COSIGN_PASSWORD decrypts it."
)
@options.keyless
@options.trust_config
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    registry: str | None,
    image: str | None,
    to: str | None,
    require_signed: bool,
    claims: str | None,
    public_key: Path | None,
    certificate_identity: str | None,
    certificate_oidc_issuer: str | None,
    key: Path | None,
    keyless: bool,
    as_json: bool,
) -> None:
    """Move the tags <target> and <target>-<version> at a registry to an image that is there.

    The image must have passed verify and smoke, on this host or where it was pushed from. Nothing is pulled or pushed.
    What the tags pointed to before is kept as <tag>.previous, which 'trainyard rollback' returns to.

    With --require-signed, the image, or each image of an image index, must have valid claims of the kinds sbom,
    provenance, verify and smoke, or of those in --claims, and an image index must be signed. They are checked with
    --public-key, or with --certificate-identity and --certificate-oidc-issuer. With --key or --keyless, a verification
    summary (SLSA) is attached, too.
    """
    from trainyard.common import console, errors
    from trainyard.oci.registry import check_address
    from trainyard.release import predicates, promotion, signers

    destination = check_address(to, "--to") if to else None
    if claims and not require_signed:
        raise errors.UserError("--claims requires --require-signed: it names the claims that are demanded")
    if keyless and not require_signed:
        raise errors.UserError("--keyless requires --require-signed: it signs the summary of what is demanded")
    demanded = None
    if require_signed:
        kinds = predicates.kinds_in(claims) if claims is not None else predicates.ABOUT_IMAGES
        signer = signers.signer(key, "promote", keyless=keyless, context=context)
        trust = signers.trust(public_key, certificate_identity, certificate_oidc_issuer, "promote", context=context)
        demanded = _demanded(kinds, signer, trust)
    named, source, version = _image(context, target, registry, image)
    made = promotion.promote(named, source, version, to=destination, demanded=demanded)
    if made["claims"]:
        console.say(f"claims that were checked: {', '.join(made['claims'])}")
    for tag, before in made["tags"].items():
        console.say(f"{made['repository']}:{tag} is {made['digest'][:19]}, was {before[:19] if before else 'missing'}")
    if made["tested"]:
        console.say(f"tested: {made['tested']}")
    if not made["tags"]:
        console.say(f"the tags already point to {made['digest'][:19]}")
    console.result(made, as_json=as_json)


def _image(
    context: Context, target: str | None, registry: str | None, image: str | None
) -> tuple[Named, Repository, str]:
    """Return whose tags are moved, the repository, and the tag or digest of the image there."""
    from trainyard.image import recipes
    from trainyard.oci.registry import Repository, check_address
    from trainyard.release import platform_index, promotion
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    spec = load(target, context=context)
    named, repository = recipes.named(spec), Repository(f"{check_address(registry)}/{NAME}", context.state)
    promotion.check_promoted(named)  # before this host is asked for an image
    return named, repository, image or platform_index.version_of_host(named, repository, spec.architecture, context)


def _demanded(kinds: Sequence[str], signer: Signer | None, trust: Trust | None) -> Demanded:
    """The claims that --require-signed demands; whose claims count follows from who signs."""
    from trainyard.common import errors
    from trainyard.release import promotion, signers

    if trust is None and signer:
        trust = signer.trust
    if trust is None:
        raise errors.UserError(f"--require-signed needs {signers.ways_to_check()} to check the claims with")
    return promotion.Demanded(trust, kinds, signer)
