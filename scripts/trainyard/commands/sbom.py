"""``trainyard sbom``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "publish"


@options.command(
    "Write an image's software bill of materials (CycloneDX 1.6).",
    "trainyard sbom tf-cpu",
    "trainyard sbom tf-cpu --json > sbom.cdx.json",
    "trainyard sbom --image localhost:5000/ml/trainyard:tf-cpu --output sbom.cdx.json",
)
@options.target
@options.option("--image", metavar="REFERENCE", help="Any image, local or at a registry, instead of TARGET's.")
@options.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; <state folder>/TARGET/sbom.cdx.json by default.",
)
@options.flag("--json", "as_json", help="Print the SBOM on stdout instead of writing a file.")
@click.pass_obj
def command(context: Context, target: str | None, image: str | None, output: Path | None, as_json: bool) -> None:
    """Write the SBOM of TARGET's image: every package that pip and dpkg installed, read from the image itself.

    Packages have their purl and license, and Python packages the SHA-256 of every file that the lock accepts for them,
    and the libraries inside their wheels, such as OpenSSL. The same image gives the same bytes. 'trainyard push'
    attaches the SBOM to the image.
    """
    from trainyard.common import console, errors
    from trainyard.oci import inventory
    from trainyard.release import sbom
    from trainyard.spec import state
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    spec = None if image else load(target, context=context)
    if spec is None and not output and not as_json:
        output_option, json_option = "'--output'", "'--json'"
        raise errors.UserError(f"{output_option} gives the file for the SBOM of an image, or {json_option} prints it")
    reference = image or f"{NAME}:{spec.local_name if spec else ''}"
    if spec is not None:
        context.engine.image(reference, made_by=spec.command("image"))
    found = inventory.find(context.engine, reference, libraries=True)
    if found.repository is not None:
        inventory.fetch(found, found.repository, found.layers, libraries=True)
    text = sbom.make(found)
    if as_json:
        print(text, end="")
        return
    path = output or (state.own(spec.kept) if spec else context.state) / "sbom.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    console.say(f"{path}: {len(found.python())} Python packages, {len(found.debian())} Debian packages")
