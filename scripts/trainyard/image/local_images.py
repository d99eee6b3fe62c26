"""Which images of a target are on this host."""

from __future__ import annotations

import docker.errors

from trainyard.oci import docker_engine
from trainyard.spec.naming import NAME, candidate_tag


def digest_of(reference: str) -> str | None:
    """Digest of a local image; None if there is no such image."""
    try:
        return str(docker_engine.client().images.get(reference).id)
    except docker.errors.ImageNotFound:
        return None


def default_reference(target: str) -> str:
    """The candidate of a target or, if it has none, the reference of the last image that passed everything."""
    candidate = candidate_tag(target)
    return candidate if digest_of(candidate) else f"{NAME}:{target}"


def version(target: str) -> dict[str, str]:
    """``digest`` and ``version`` of the image of a target; empty if there is none, or no engine is running."""
    try:
        image = docker_engine.existing_client().images.get(f"{NAME}:{target}")
    except (docker.errors.DockerException, OSError):
        return {}
    return {"digest": str(image.id), "version": image.labels.get("org.opencontainers.image.version", "")}
