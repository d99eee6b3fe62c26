"""``trainyard verify``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainyard.common import options
from trainyard.common.context import Context

if TYPE_CHECKING:
    from trainyard.recipe import Recipe

logger = logging.getLogger(__name__)

GROUP = "build"


@options.command(
    "Check that an image is what its spec, locks, labels and tags say.",
    "trainyard verify tf-cpu",
    "trainyard verify --image registry.example/team/image:tag",
    "trainyard verify --recipe recipe.json registry.example/team/image:tag",
)
@options.target
@options.option("--image", metavar="REFERENCE", help="The image; pulled if it is not on this host.")
@options.recipe
@options.verbose
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, image: str | None, recipe: Path | None, as_json: bool) -> None:
    """Check that TARGET's image is its recipe, which follows from its spec and its locks, and breaks no rule.

    The image is the target's candidate, or trainyard:TARGET if there is no candidate. With --image, it is any other
    image; without TARGET, that is checked against the rules that need no recipe. With --recipe, the image TARGET is
    compared with a recipe that another host has written. 'trainyard dev rules image target' lists the rules. The check
    takes seconds and needs no accelerator.
    """
    from trainyard import recipe as recipes
    from trainyard.common import console
    from trainyard.lint.image import verify

    if recipe:
        wanted: recipes.Recipe | None = (given := recipes.read(recipe))
        reference = image or target or given.local
        context.engine.pull(reference)
    else:
        wanted, reference = _wanted(context, target, image)
    try:
        facts = verify.verify(wanted, reference, context, show=console.show)
    except verify.VerifyFailed as error:
        console.result(error.facts, as_json=as_json)
        raise
    console.say(f"{facts['digest']} {'matches its recipe' if wanted else 'breaks no rule'}")
    console.result(facts, as_json=as_json)


def _wanted(context: Context, target: str | None, image: str | None) -> tuple[Recipe | None, str]:
    """Return the recipe, if any, and the reference of the image to verify, pulled if it is not on this host.

    Raises:
        UserError: neither a target nor an image is given, or there is no such target or image.
    """
    from trainyard.image import recipes
    from trainyard.spec.model import targets
    from trainyard.spec.naming import LABELS, default_reference
    from trainyard.workspace.loading import load

    if not image:
        spec = load(target, context=context)
        reference = default_reference(context.engine, spec.local_name)
        local = context.engine.image(reference, made_by=spec.command("dev build"))
        return recipes.for_image(spec, local.labels), reference
    given = load(target, context=context) if target else None
    local = context.engine.pull(image)
    named = str(local.labels.get(f"{LABELS}.target") or "")
    if given is None and named in targets():
        command = f"trainyard verify {named} --image {image}"
        logger.info(f"{image} is labelled as {named}: '{command}' compares it with that recipe, too")
    arch = str(local.attrs.get("Architecture"))
    if given and arch != given.arch and f"linux/{arch}" in given.platforms:
        given = load(target, arch, context=context)
    return (recipes.for_image(given, local.labels) if given else None), image
