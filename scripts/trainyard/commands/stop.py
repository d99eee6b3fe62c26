"""``trainyard stop``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "workspace"


@options.command(
    "End a container that 'trainyard run --detach' started.",
    "trainyard stop",
    "trainyard stop tf-cpu",
)
@options.target
@click.pass_obj
def command(context: Context, target: str | None) -> None:
    """End the container of your repository, or of TARGET, that was started last, report, and remove it.

    It gets SIGTERM, and 30 seconds to save what it has.
    """
    from trainyard.image import running
    from trainyard.sandbox import containers
    from trainyard.workspace.loading import load

    container = running.newest(context.engine, load(target, context=context).local_name)
    containers.stop(container, running.GRACE)
    running.report(container)
    containers.remove(container)
