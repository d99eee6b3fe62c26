"""``trainyard dev``: the group of commands for single steps, checks and tools."""

from __future__ import annotations

import click

from trainyard.common import options

GROUP = "project"


@options.command(
    "Single steps, checks and tools, and work on this project.",
    "trainyard dev",
    "trainyard dev build cpu",
    "trainyard dev audit --help",
    cls=options.Group,
)
@click.pass_context
def command(context: click.Context) -> None:
    """List the commands for single steps of an image, for looking into it, for machines, and for this project."""
    click.echo(context.get_help())
