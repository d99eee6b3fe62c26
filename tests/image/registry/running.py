"""A real registry in a container, for tests and benchmarks: Debian's `docker-registry` on the project's own base."""

from __future__ import annotations

import os
from pathlib import Path

# Ryuk, testcontainers' clean-up container, cannot be pulled on networks without Docker Hub.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

from testcontainers.community.registry import DockerRegistryContainer
from tests.engine import CONTEXT, ENGINE

from trainyard.common.docker_engine import resource_labels
from trainyard.image import base_image

IMAGE = "trainyard-registry:2.8"


def image() -> str:
    """Build the registry's image (14 s without cache, 1 s with it); its reference."""
    ENGINE.buildx(
        "build",
        "--quiet",
        "--load",
        "--provenance=false",
        f"--build-arg=BASE={base_image.resolve(CONTEXT, 'debian-12').reference}",
        f"--tag={IMAGE}",
        str(Path(__file__).parent),
    )
    return IMAGE


def container(*, username: str | None = None, password: str | None = None, disk: str = "") -> DockerRegistryContainer:
    """A registry to be started with ``with``.

    Args:
        username, password: credentials that it requires; none if None.
        disk: how much it can store, such as ``1m``; unlimited if empty.
    """
    found = DockerRegistryContainer(image=image(), username=username, password=password)
    found = found.with_kwargs(labels=resource_labels("registry"))
    return found.with_tmpfs_mount("/var/lib/registry", f"size={disk}") if disk else found


def address(started: DockerRegistryContainer) -> str:
    """The address for the engine: localhost, the only host with which it uses plain HTTP."""
    return f"localhost:{started.get_exposed_port(started.port)}"
