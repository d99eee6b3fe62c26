"""``trainyard dev build``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Build an image from its locks, as a candidate.",
    "trainyard dev build xla",
    "trainyard dev build examples/patches --no-cache",
    "trainyard dev build tf-cpu --compression gzip",
)
@options.target
@options.builder
@options.compression
@options.flag("--no-cache", help="Build every stage again.")
@options.offline
@options.quiet
@options.verbose
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, compression: str, no_cache: bool, quiet: bool, as_json: bool) -> None:
    """Build TARGET's image as the candidate trainyard:<target>-candidate.

    'trainyard image' also verifies it, runs the smoke test in it and tags it. docs/anatomy.md lists the variables of a
    build, such as BASE and DEBIAN_MIRROR.
    """
    from trainyard.common import console
    from trainyard.image import build, planning
    from trainyard.workspace.loading import load

    with planning.planned(load(target, context=context)) as plan:
        facts = build.build(plan, compression=compression, no_cache=no_cache)
    console.say(f"built {plan.recipe.candidate} {facts['digest']}")
    if quiet and not as_json:
        print(facts["digest"])
    console.result({"image": plan.recipe.candidate} | build.as_json(facts), as_json=as_json)
