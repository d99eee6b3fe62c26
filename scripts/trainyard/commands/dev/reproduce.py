"""``trainyard dev reproduce``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "publish"


@options.command("Build an image twice without cache and compare the builds.", "trainyard dev reproduce tf-cpu")
@options.target
@options.builder
@options.compression
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, compression: str, as_json: bool) -> None:
    """Build TARGET twice without cache: both builds have the same digest, or every file that differs is listed.

    The target's own image is not touched, and the two builds are removed with the cache that they added.
    """
    from trainyard.common import console, errors
    from trainyard.image import planning
    from trainyard.release import reproduce
    from trainyard.workspace.loading import load

    with planning.planned(load(target, context=context)) as plan:
        builds, found = reproduce.reproduce(plan, compression=compression)
    name = plan.recipe.local_name
    console.result(reproduce.result(plan, builds, found), as_json=as_json)
    if found:
        console.show(reproduce.table(found))
        names = ", ".join(dict.fromkeys(one.layer for one in found if one.layer))
        raise errors.StepFailed(f"{name} is not reproducible: {len(found)} differences in {names or 'its compression'}")
    seconds = " and ".join(f"{one.seconds:.0f} s" for one in builds)
    console.say(f"{name} is reproducible: {builds[0].digest} twice, {seconds}")
