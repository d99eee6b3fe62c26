"""``trainyard dev shell``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command("Open a shell in an image.", "trainyard dev shell xla")
@options.target
@click.pass_obj
def command(context: Context, target: str | None) -> None:
    """Open a shell in a new container of TARGET's image. Needs a terminal; the container is removed at the end."""
    import os
    import sys

    from trainyard.common import errors
    from trainyard.spec.naming import NAME
    from trainyard.workspace.loading import load

    spec = load(target, context=context)
    reference = f"{NAME}:{spec.local_name}"
    context.engine.image(reference, made_by=spec.command("image"))
    if not sys.stdin.isatty():
        raise errors.UserError(f"no terminal: run a command with 'docker run --rm {reference} -- COMMAND'")
    arguments = ["docker", "run", "--rm", "--interactive", "--tty", reference, "--", "bash"]
    os.execvp(arguments[0], arguments)
