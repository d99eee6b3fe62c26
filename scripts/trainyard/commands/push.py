"""``trainyard push``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard import options, settings

GROUP = "publish"


@click.command(
    short_help="Push an image that passed to a registry, with its SBOM and provenance.",
    epilog="""\b
    Examples:
      trainyard push tf-cpu --registry localhost:5000/team
      trainyard push tf-cpu --registry localhost:5000/team --key signing.pem
    """,
)
@options.target
@options.registry
@options.signing_key
@options.json_output
def command(target: str | None, registry: str | None, key: Path | None, as_json: bool) -> None:
    """Push TARGET's image under its immutable tag, trainyard:<target>-<version>-<date>-<content hash>.

    The image must have passed verify and smoke, and its locked packages must have no known vulnerability without a
    waiver. If the registry has the tag with another digest, the push is refused; 'trainyard promote' moves the floating
    tags. Provenance, SBOM and, with a key, a signature are attached (docs/supply-chain.md).

    Layers are compressed with zstd; for registries and engines without zstd, build with COMPRESSION=gzip.
    """
    from trainyard import console
    from trainyard.installation import require_extra
    from trainyard.oci import referrers
    from trainyard.oci.registry import check_address
    from trainyard.release import publish
    from trainyard.spec.model import load
    from trainyard.spec.naming import NAME
    from trainyard.spec.units import in_units

    spec = load(target)
    address = check_address(registry)
    private = None
    if key:  # a key that cannot be read fails before anything is uploaded
        require_extra("cryptography", "sign", "push")
        from trainyard.release import signature

        private = signature.private_key(key, settings.standard_variable("COSIGN_PASSWORD"))
    pushed = publish.push(spec, address)
    # `trainyard promote` on another host reads this.
    referrers.record_verification(f"{address}/{NAME}", pushed["digest"])
    attached = publish.attach_referrers(spec, address, pushed["digest"], private)
    if pushed["already_there"]:
        console.say(f"{pushed['tag']} already exists with this digest: nothing to push")
    else:
        console.log.print(publish.table(pushed))
        console.say(f"{in_units(pushed['bytes_uploaded'])} uploaded in {pushed['seconds']} s")
    console.say(f"attached: {', '.join(attached)}")
    console.say(pushed["reference"])
    console.result(pushed | {"attached": attached}, as_json=as_json)
