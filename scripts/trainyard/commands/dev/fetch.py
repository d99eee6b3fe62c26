"""``trainyard dev fetch``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Download what building an image needs, for --offline.",
    "trainyard dev fetch              # in your own repository",
    "trainyard dev fetch xla",
    "trainyard image xla --offline",
)
@options.target
@options.builder
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, as_json: bool) -> None:
    """Download the base image and the packages of TARGET, so that 'trainyard image --offline' needs no network.

    The packages are kept in the engine's build cache: 'docker buildx prune' and 'trainyard clean --cache' remove them.
    """
    from trainyard.common import console
    from trainyard.image import build, planning
    from trainyard.spec.model import load

    spec = load(target, context=context)
    with planning.planned(spec) as plan:
        facts = build.fetch(plan)
    offline = "'--offline'"
    console.say(f"{spec.target} can be built without a network: {spec.command('image')} with {offline}")
    console.result(build.as_json(facts), as_json=as_json)
