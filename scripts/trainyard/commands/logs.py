"""``trainyard logs``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "workspace"


@options.command(
    "Show the log of a container that 'trainyard run --detach' started.",
    "trainyard logs",
    "trainyard logs --follow",
)
@options.target
@options.flag("--follow", help="Go on until the container ends.")
@click.pass_obj
def command(context: Context, target: str | None, follow: bool) -> None:
    """Show the log of the container of your repository, or of TARGET, that was started last.

    If it has ended, its report follows, as that of 'trainyard run'. Ctrl-C ends this command alone.
    """
    from trainyard.image import running
    from trainyard.workspace.loading import load

    running.show(running.newest(context.engine, load(target, context=context).local_name), follow=follow)
