"""``trainyard verify``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Check that an image is what its spec, locks, labels and tags say.",
    "trainyard verify tf-cpu",
    "trainyard verify --image registry.example/team/image:tag",
)
@options.target
@options.option("--image", metavar="REFERENCE", help="The image; pulled if it is not on this host.")
@options.verbose
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, image: str | None, as_json: bool) -> None:
    """Check that TARGET's image is what its spec, its locks, its labels and its tags say.

    The image is the target's candidate, or trainyard:TARGET if there is no candidate. With --image, it is any other
    image; without TARGET, that is checked against the rules that need no spec. 'trainyard dev rules image target' lists
    the rules. The check takes seconds and needs no accelerator.
    """
    from trainyard.common import console
    from trainyard.lint.image import verify

    spec, reference = verify.image_to_verify(context, target, image)
    try:
        facts = verify.verify(context.engine, spec, reference, show=console.show)
    except verify.VerifyFailed as error:
        console.result(error.facts, as_json=as_json)
        raise
    console.say(f"{facts['digest']} {'matches its spec' if spec else 'breaks no rule'}")
    console.result(facts, as_json=as_json)
