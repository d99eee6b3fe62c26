"""``trainyard promote``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "publish"


@click.command(
    short_help="Move a target's floating tags to an image that passed.",
    epilog="""\b
    Examples:
      trainyard promote tf-cpu --registry localhost:5000/team
      trainyard promote tf-cpu --registry localhost:5000/team --image tf-cpu-2.21.0-20261120-0123abcd
      trainyard promote tf-cpu --registry localhost:5000/team --to localhost:5000/team-floating
    """,
)
@options.target
@options.registry
@options.option("--image", metavar="TAG|DIGEST", help="Image at the registry; TARGET's local image by default.")
@options.option(
    "--to",
    metavar="HOST[:PORT]/PATH",
    help="Where the tags are moved, if not at --registry: needed where its tags are immutable.",
)
@options.json_output
def command(target: str | None, registry: str | None, image: str | None, to: str | None, as_json: bool) -> None:
    """Move the tags <target> and <target>-<version> at a registry to an image that is there.

    The image must have passed verify and smoke, on this host or where it was pushed from. Nothing is pulled or pushed.
    What the tags pointed to before is kept as <tag>.previous, which 'trainyard rollback' returns to.
    """
    from trainyard import console
    from trainyard.oci.registry import check_address
    from trainyard.release import promotion
    from trainyard.spec.model import load

    destination = check_address(to, "TO") if to else None
    made = promotion.promote(load(target), check_address(registry), image=image, to=destination)
    for tag, before in made["tags"].items():
        console.say(f"{made['repository']}:{tag} is {made['digest'][:19]}, was {before[:19] if before else 'missing'}")
    if made["tested"]:
        console.say(f"tested: {made['tested']}")
    if not made["tags"]:
        console.say(f"the tags already point to {made['digest'][:19]}")
    console.result(made, as_json=as_json)
