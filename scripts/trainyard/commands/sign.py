"""``trainyard sign``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainyard import options, settings

GROUP = "publish"


@click.command(
    short_help="Sign an image at a registry, or check its signatures.",
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
@options.key(
    "--public-key", "COSIGN_PUB", "Public key (PEM) to check signatures with. The command fails if none is valid."
)
@options.json_output
def command(
    target: str | None,
    registry: str | None,
    image: str | None,
    key: Path | None,
    public_key: Path | None,
    as_json: bool,
) -> None:
    """Sign an image, or check its signatures, in the form that 'cosign verify --key' reads.

    Keys are PEM files (PKCS 8 or SEC 1; EC, RSA or Ed25519). 'trainyard push' signs by itself if it has a key. Nothing
    is sent to a transparency log: cosign verifies with --insecure-ignore-tlog.
    """
    from trainyard import console
    from trainyard.installation import require_extra

    require_extra("cryptography", "sign")
    from trainyard.release import signature

    if key is None and public_key is None:
        raise console.UserError("COSIGN_KEY=<private key> signs, COSIGN_PUB=<public key> checks: give one")
    private = signature.private_key(key, settings.standard_variable("COSIGN_PASSWORD")) if key else None
    repository, subject = signature.image_to_sign(target, registry, image)
    found: dict[str, Any] = {"image": f"{repository.name}@{subject.digest}"}
    if private is not None:
        found["tag"] = signature.sign(repository, subject, private)
        console.say(f"{found['image']} {'is signed' if found['tag'] else 'is already signed with this key'}")
    if public_key:
        found["valid"] = signature.verified(repository, subject.digest, signature.public_key(public_key))
        console.say(f"{found['image']}: {found['valid']} valid signature{'s' if found['valid'] != 1 else ''}")
    console.result(found, as_json=as_json)
