"""``trainyard dev plan``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Print the recipe of an image: all that its files decide.",
    "trainyard dev plan tf-cpu",
    "trainyard dev plan --json >recipes.json     # of the repository in the current folder",
    hidden=True,
)
@options.target
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, as_json: bool) -> None:
    """Print the recipe of TARGET's image, for each platform and package index that it is locked for.

    Nothing is built: the recipe of each platform is written to build/TARGET/recipe/ in the state folder, where a
    'docker build' by hand takes it from. A repository that was never locked is locked first, as by 'trainyard image'.
    """
    from trainyard.common import console
    from trainyard.image import recipes
    from trainyard.workspace.loading import load

    made = recipes.every(load(target, context=context))
    for recipe in made:
        pins = sum(len(layer.pins) for layer in recipe.layers)
        console.say(
            f"{recipe.name} {recipe.framework.version}, {recipe.platform}, index {recipe.index}: {pins} packages in "
            f"{len(recipe.layers)} layers"
        )
    console.result({"recipes": [recipe.model_dump(mode="json", by_alias=True) for recipe in made]}, as_json=as_json)
