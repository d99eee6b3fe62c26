"""A real registry in a container, for tests and benchmarks: Debian's `docker-registry` on the project's own base."""

from __future__ import annotations

import os
from pathlib import Path

# Ryuk, testcontainers' reaper, is an image of a registry that closed networks do not reach.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

from testcontainers.community.registry import DockerRegistryContainer

from scripts import base, engine

IMAGE = "trainyard-registry:2.8"


def image() -> str:
    """The reference of the registry's image, built if need be (14 s cold, 1 s from the builder's cache)."""
    engine.buildx(
        "build",
        "--quiet",
        "--load",
        "--provenance=false",
        f"--build-arg=BASE={base.resolve('debian-12').reference}",
        f"--tag={IMAGE}",
        str(Path(__file__).parent),
        quiet=True,
    )
    return IMAGE


def container(*, username: str | None = None, password: str | None = None, disk: str = "") -> DockerRegistryContainer:
    """A registry to be started with ``with``.

    Args:
        username, password: what it asks for; nothing if None.
        disk: how much it can store, such as ``1m``; unlimited if empty.
    """
    found = DockerRegistryContainer(image=image(), username=username, password=password)
    found = found.with_kwargs(labels=engine.owned("registry"))
    return found.with_tmpfs_mount("/var/lib/registry", f"size={disk}") if disk else found


def address(started: DockerRegistryContainer) -> str:
    """Where the engine finds it: on its own localhost, the one place from which it takes plain HTTP."""
    return f"localhost:{started.get_exposed_port(started.port)}"
