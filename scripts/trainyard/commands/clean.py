"""``trainyard clean``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "shell"


@options.command(
    "Remove what Trainyard left on this host, and only that.",
    "trainyard clean",
    "trainyard clean xla",
    "trainyard clean --all --cache",
)
@options.target
@options.flag("--all", "everything", help="Also remove every image, base image and record of Trainyard.")
@options.flag("--cache", help="Also remove the engine's build cache, of all projects on this host.")
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, everything: bool, cache: bool, as_json: bool) -> None:
    """Remove containers, networks and volumes that interrupted runs left, and images that passed no test.

    With TARGET, also that target's images and records. What a running process uses is kept, as are images that a
    command with the same state folder makes, and files in that folder that Trainyard did not make.
    """
    from trainyard.common import console
    from trainyard.project import clean

    removed = clean.clean(context, target, everything=everything, cache=cache)
    for name in removed:
        console.say(f"removed {name}")
    console.result({"removed": removed}, as_json=as_json)
