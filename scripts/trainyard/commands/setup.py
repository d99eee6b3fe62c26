"""``trainyard setup``."""

from __future__ import annotations

from trainyard.common import options

GROUP = "shell"


@options.command(
    "Start or install a Docker engine.",
    "trainyard setup",
    "trainyard setup --emulation",
)
@options.flag("--emulation", help="Also let this host run programs for arm64, under QEMU.")
def command(emulation: bool) -> None:
    """Start the Docker engine that is installed, or install one on Debian or Ubuntu, as root.

    Nothing is done if an engine answers. Elsewhere, one line says what to install.
    """
    from trainyard.common import docker_engine

    docker_engine.set_up(emulation=emulation)
