"""``trainyard sign``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainyard import options, settings

if TYPE_CHECKING:
    from trainyard.release.claims import Found

GROUP = "publish"


@click.command(
    short_help="Sign an image at a registry, or check its signatures and claims.",
    epilog="""\b
    Examples:
      openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out signing.pem
      trainyard sign tf-cpu --registry localhost:5000/ml --key signing.pem
      trainyard sign --image localhost:5000/ml/trainyard:tf-cpu --key signing.pem
      trainyard sign --image localhost:5000/ml/trainyard:tf-cpu --public-key signing.pub
    """,
)
@options.target
@options.registry
@options.option("--image", metavar="REFERENCE", help="Any image at a registry instead of TARGET's at --registry.")
@options.signing_key
@options.checking_key
@options.json_output
def command(
    target: str | None,
    registry: str | None,
    image: str | None,
    key: Path | None,
    public_key: Path | None,
    as_json: bool,
) -> None:
    """Sign an image, or check its signatures and signed claims, in the forms that 'cosign verify --key' reads.

    With a public key, every claim about the image is listed, and of an image index those about its images, too. The
    command fails if there is no valid signature, or if a claim was changed or is about another image; a claim of
    another key does not count.

    Keys are PEM files (PKCS 8 or SEC 1; EC, RSA or Ed25519). 'trainyard push' signs by itself if it has a key. Nothing
    is sent to a transparency log: cosign verifies with --insecure-ignore-tlog.
    """
    from trainyard import console
    from trainyard.installation import require_extra

    require_extra("cryptography", "sign")
    from trainyard.release import claims, predicates, signature

    if key is None and public_key is None:
        raise console.UserError("COSIGN_KEY=<private key> signs, COSIGN_PUB=<public key> checks: give one")
    private = signature.private_key(key, settings.standard_variable("COSIGN_PASSWORD")) if key else None
    repository, subject = signature.image_to_sign(target, registry, image)
    found: dict[str, Any] = {"image": f"{repository.name}@{subject.digest}"}
    if private is not None:
        found["tag"] = signature.sign(repository, subject, private)
        attached = claims.attach(repository, subject, private, [predicates.signature()])
        console.say(
            f"{found['image']} {'is signed' if found['tag'] or attached else 'is already signed with this key'}"
        )
    if public_key:
        public = signature.public_key(public_key)
        of_platform = claims.check_all(repository, subject, public)
        found["claims"] = _show(of_platform)
        found["valid"] = claims.signatures(repository, subject.digest, public, of_platform[""])
        console.say(f"{found['image']}: {found['valid']} valid signature{'s' if found['valid'] != 1 else ''}")
    console.result(found, as_json=as_json)


def _show(of_platform: Mapping[str, Sequence[Found]]) -> list[dict[str, Any]]:
    """Print every claim, and return them for JSON.

    Raises:
        StepFailed: one that names the key is not valid.
    """
    from trainyard import console

    all_claims = [(platform, one) for platform, some in of_platform.items() for one in some]
    lines = [f"{platform} {one}".strip() for platform, one in all_claims]
    for line in lines:
        console.say(f"  {line}")
    wrong = [line for line, (_, one) in zip(lines, all_claims, strict=True) if not one.valid and not one.foreign]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise console.StepFailed(f"not a valid claim: {wrong[0]}{more}")
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
