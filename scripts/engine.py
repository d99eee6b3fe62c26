"""The Docker engine: one client, and what a host without one is told."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import docker
import docker.errors
from docker.models.images import Image

from scripts.cli import ROOT, StepFailed, UserError
from scripts.units import in_bytes

#: Label on every container, volume and network that a verb or a test makes, so that clean-up finds what is ours only.
OWNED = "io.trainyard.owned"

#: Label with the process that made it: what a living process still uses is no leftover.
OWNER = f"{OWNED}.by"


def owned(purpose: str) -> dict[str, str]:
    """The labels of a container, volume or network that this process makes for ``purpose``."""
    return {OWNED: purpose, OWNER: str(os.getpid())}


def in_use(labels: dict[str, str] | None) -> bool:
    """Whether the process that made a thing with these labels is still alive, and is not this one."""
    owner = (labels or {}).get(OWNER, "")
    return owner.isdigit() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists()


def existing_client() -> docker.DockerClient:
    """A client of an engine that already answers.

    Raises:
        docker.errors.DockerException, OSError: none does.
    """
    found = docker.from_env(timeout=600)
    found.ping()
    return found


@cache
def client() -> docker.DockerClient:
    """A client of a running engine. On a Debian or Ubuntu host without one, as root, an engine is installed first.

    Raises:
        UserError: there is none and none can be had; the line says what to do.
    """
    with contextlib.suppress(docker.errors.DockerException, OSError):
        return existing_client()
    installed = subprocess.run([ROOT / "scripts" / "install-engine.sh"], check=False)
    if installed.returncode:
        raise UserError("no Docker engine to work with; the line above says what to do")
    return docker.from_env(timeout=600)


@cache
def stores_in_containerd() -> bool:
    """Whether the engine keeps images in containerd, which zstd layers and stable digests need."""
    return any(
        "containerd.snapshotter" in str(value) for pair in client().info().get("DriverStatus") or [] for value in pair
    )


def image(reference: str, *, made_by: str) -> Image:
    """A local image.

    Raises:
        UserError: it is not here; ``made_by`` is the command that makes it.
    """
    try:
        return client().images.get(reference)
    except docker.errors.ImageNotFound:
        raise UserError(f"no local image {reference}: run '{made_by}' first") from None


def pull(reference: str) -> Image:
    """A local image, pulled from its registry if it is not here.

    Raises:
        UserError: it is not here and cannot be pulled; the line ends with the engine's words.
    """
    with contextlib.suppress(docker.errors.ImageNotFound):
        return client().images.get(reference)
    try:
        return client().images.pull(reference)
    except docker.errors.APIError as error:
        raise UserError(f"no local image {reference}, and it cannot be pulled: {error.explanation}") from None


def digest(reference: str, *, made_by: str = "make image") -> str:
    """``sha256:...`` of a local image: with the containerd store, the digest a registry will know it by."""
    return str(image(reference, made_by=made_by).id)


def forget(reference: str) -> None:
    """Take a name off a local image, and the image with it if it has no other; no matter if there is none."""
    with contextlib.suppress(docker.errors.ImageNotFound):
        client().images.remove(reference, force=True)


def cached(*, least: float = 0) -> set[str]:
    """Ids of the records of the engine's build cache that hold at least ``least`` bytes."""
    # Not the engine's own account of its disk, which fails while images come and go (404, 500; Docker 26).
    records = re.findall(r"(?m)^([0-9a-z]{25})\*?\s+\w+\s+([\d.]+[kMGT]?B)", buildx("du", quiet=True))
    return {identity for identity, size in records if in_bytes(size) >= least}


def drop_cached(records: set[str]) -> None:
    """Remove records of the build cache, as far as nothing uses them: a build that runs, an image, another record."""
    left = records & cached()
    while left:
        for identity in left:
            client().api.prune_builds(filters={"id": identity}, all=True)  # type: ignore[arg-type]  # ids are no labels
        before, left = left, left & cached()
        if left == before:
            return


def buildx(*arguments: str, quiet: bool = False, environment: dict[str, str] | None = None) -> str:
    """Run ``docker buildx``; its standard output.

    Progress goes to the terminal unless ``quiet``.

    Raises:
        StepFailed: it failed; its output stands above, or in the message if ``quiet``.
    """
    client()
    command = ["docker", "buildx", *arguments]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if found.returncode:
        words = f": {found.stderr.strip().splitlines()[-1]}" if quiet and found.stderr.strip() else "; see above"
        raise StepFailed(f"'docker buildx {arguments[0]}' failed{words}")
    return found.stdout


def ca_bundle() -> Path | None:
    """The host's CA bundle, which builds get as a secret: TLS-inspecting networks need it, others do not mind."""
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        path = Path(os.environ.get(variable) or "/nonexistent")
        if path.is_file():
            return path
    for known in (
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    ):
        if Path(known).is_file():
            return Path(known)
    return None
