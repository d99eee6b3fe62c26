"""``trainyard setup``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "shell"


@options.command(
    "Start or install a Docker engine, or check what this machine has.",
    "trainyard setup",
    "trainyard setup --check",
    "trainyard setup --emulation",
)
@options.flag("--emulation", help="Also let this host run programs for arm64, under QEMU.")
@options.flag("--check", help="Start and install nothing: say in ten lines what there is, and what to do.")
@click.pass_obj
def command(context: Context, emulation: bool, check: bool) -> None:
    """Start the Docker engine that is installed, or install one on Debian or Ubuntu, as root.

    Nothing is done if an engine answers. Elsewhere, one line says what to install. With --check, the exit status is 2
    if no engine or builder answers.
    """
    from trainyard.common import console, docker_engine
    from trainyard.common.errors import UserError

    if check:
        from trainyard.project import machine

        found = machine.lines(context)
        for name, (words, remedy) in found.items():
            console.say(f"{name:9}  {': '.join(filter(None, (words, remedy)))}", "yellow" if remedy else "")
        if not found["engine"][0] or not found["buildx"][0]:
            raise UserError("no image can be built: see 'engine' and 'buildx' above")
        return
    docker_engine.set_up(emulation=emulation)
