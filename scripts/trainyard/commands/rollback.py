"""``trainyard rollback``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "publish"


@options.command(
    "Move a target's floating tags back to the previous image.",
    "trainyard rollback tf-cpu --registry localhost:5000/team",
)
@options.target
@options.registry
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, registry: str | None, as_json: bool) -> None:
    """Move the tags of TARGET at a registry back to what they pointed to before the last promote.

    The current image becomes <tag>.previous, so that a second rollback undoes the first. To go back further, promote
    an older image by its immutable tag: 'trainyard promote --image'.
    """
    from trainyard.common import console
    from trainyard.oci.registry import Repository, check_address
    from trainyard.release import promotion
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    name = load(target, context=context).target
    made = promotion.rollback(name, Repository(f"{check_address(registry)}/{NAME}", context.state))
    for tag, (digest, before) in made["tags"].items():
        console.say(f"{made['repository']}:{tag} is {digest[:19]} again, was {before[:19]}")
    console.result(made, as_json=as_json)
