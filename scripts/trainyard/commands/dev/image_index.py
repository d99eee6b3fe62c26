"""``trainyard dev image-index``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "publish"


@options.command(
    "Push an image index of images that several hosts pushed.",
    'trainyard dev image-index tf-cpu --images "TAG TAG" --registry localhost:5000/team',
)
@options.target
@options.option(
    "--images",
    metavar="TAG|DIGEST...",
    callback=options.words,
    help="Images at the registry, separated by spaces: one for each platform.",
)
@options.registry
@options.signing
@options.quiet
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    images: tuple[str, ...],
    registry: str | None,
    key: Path | None,
    keyless: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Push one reference for TARGET's images of several platforms, which are at the registry already.

    'trainyard push' makes the index of the images that passed on its host. Where each platform is built on its own
    machine, each pushes its own image, and one of them makes the index when all have done so. The images must have
    passed verify and smoke where they were pushed from.

    Nothing is built or pulled. A platform without an image is not in the index, and a warning names it.
    """
    from trainyard.common import console
    from trainyard.oci.registry import Repository, check_address
    from trainyard.release import platform_index, publish, signers, sources
    from trainyard.spec.model import load
    from trainyard.spec.naming import NAME

    repository = Repository(f"{check_address(registry)}/{NAME}", context.state)
    signer = signers.signer(key, "image-index", keyless=keyless, context=context)
    source = sources.of(load(target, context=context))
    made = publish.push_index(source, repository, platform_index.images_at(source.named, repository, images), signer)
    console.say(f"{made['tag']} is the image index of {', '.join(made['platforms'])}")
    console.say(made["reference"])
    if quiet and not as_json:
        click.echo(made["reference"])
    console.result(made, as_json=as_json)
