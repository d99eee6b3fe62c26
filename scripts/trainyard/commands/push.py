"""``trainyard push``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainyard.common import options, settings

if TYPE_CHECKING:
    from trainyard.common.context import Context
    from trainyard.oci.statements import Signer

GROUP = "publish"


@options.command(
    "Push an image that passed to a registry, with its SBOM and provenance.",
    "trainyard push tf-cpu --registry localhost:5000/team",
    "trainyard push tf-cpu --registry localhost:5000/team --key signing.pem",
    "trainyard push tf-cpu --registry localhost:5000/team --keyless",
    "trainyard push --registry localhost:5000/team",
    "trainyard push --code-only",
)
@options.target
@options.registry
@options.signing
@options.flag(
    "--code-only",
    help="Replace the code in the image that was pushed last, without an engine; nothing tests it.",
)
@options.option("--image", metavar="TAG|DIGEST", help="Image at the registry whose code --code-only replaces.")
@options.flag("--allow-untested", help="Push an image whose code was started and did not run.")
@options.quiet
@options.verbose
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    registry: str | None,
    key: Path | None,
    keyless: bool,
    code_only: bool,
    image: str | None,
    allow_untested: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Push TARGET's image under its immutable tag, trainyard:<target>-<version>-<date>-<content hash>.

    Without TARGET it is the image of the repository whose trainyard.yaml is in the current folder or above it.

    The image must have passed verify and smoke, and its locked packages must have no known vulnerability without a
    waiver. If the registry has the tag with another digest, the push is refused; 'trainyard promote' moves the floating
    tags. SBOM, provenance and the results of verify and smoke are attached, and signed with a key or --keyless
    (docs/supply-chain.md).

    With --code-only the code of the repository replaces that of the image at the registry, or of all images of an image
    index: one layer, in less than a second, on any machine. The result is tagged dev-<hash>, and is neither signed nor
    promoted.

    Layers are compressed with zstd; for registries and engines without zstd, build with '--compression gzip'.
    """
    from trainyard.common import console, errors
    from trainyard.oci.registry import check_address
    from trainyard.workspace.loading import load

    if image and not code_only:
        raise errors.UserError("--image requires --code-only: what is pushed otherwise is the local image")
    if keyless and code_only:
        raise errors.UserError("--keyless and --code-only exclude each other: replaced code is not signed")
    spec = load(target, context=context)
    if code_only:
        made = _push_code(spec, registry, image)
    else:
        from trainyard.release import signers

        address = check_address(registry)
        # What cannot be read fails before anyone is asked for a certificate, and before anything is uploaded.
        signer = signers.signer(key, "push", keyless=keyless, context=context)
        made = _push(spec, address, signer, allow_untested)
    if quiet and not as_json:
        click.echo(made["reference"])
    console.result(made, as_json=as_json)


def _push_code(spec: Any, registry: str | None, image: str | None) -> dict[str, Any]:
    from trainyard.common import console
    from trainyard.release import code_push, repository_code
    from trainyard.spec.units import in_units

    code = repository_code.of(spec)
    made = code_push.push(code, code_push.address(code, registry), spec.context.state, image=image)
    if made["changed"]:
        console.say(f"{made['tag']}: {in_units(made['bytes_uploaded'])} uploaded in {made['seconds']} s; not tested")
    else:
        console.say(f"the code has not changed: it is that of {made['tag']}")
    console.say(made["reference"])
    return made


def _push(spec: Any, address: str, signer: Signer | None, allow_untested: bool) -> dict[str, Any]:
    from trainyard.common import console
    from trainyard.release import audit, publish, sources

    source = sources.of(spec)
    alone = len(spec.platforms) == 1 or bool(settings.variable("ARCH"))
    sources.check_own(spec, all_platforms=not alone)
    if alone:
        pushed = publish.push_attached(source, address, signer, allow_untested=allow_untested)
        images = {spec.platform: pushed}
    else:
        pushed = publish.push_all(source, address, signer, allow_untested=allow_untested)
        images = pushed["images"]
    for image in images.values():
        if image["already_there"]:
            console.say(f"{image['tag']} already exists with this digest: nothing to push")
        console.say(f"attached: {', '.join(image['attached']) or 'nothing that was not there'}")
    for caution in dict.fromkeys(audit.Coverage(**image["advisories"]).caution() for image in images.values()):
        if caution:
            console.warn(caution)
    if len(spec.platforms) > 1 and pushed not in images.values():
        console.say(f"{pushed['tag']} is the image index of {', '.join(images)}")
    if pushed["tested"]:
        console.say(f"tested: {pushed['tested']}")
    console.say(pushed["reference"])
    return pushed
