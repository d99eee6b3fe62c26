"""Talk to the Docker engine: its client, local images and the build cache."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.models.images import Image
from docker.types import LogConfig
from docker.utils import parse_repository_tag
from docker.utils.config import find_config_file

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.spec.architectures import AMD64, ARCHITECTURES, ARM64, Architecture
from trainyard.spec.naming import NAME, TAG, candidate_tag
from trainyard.spec.units import in_bytes

#: Label on every container, volume and network that a command or a test creates: clean-up removes nothing else.
OWNED = "io.trainyard.owned"

#: Label with the id of the process that created it: what a running process uses is not cleaned up.
OWNER = f"{OWNED}.by"

#: Errors of BuildKit in Docker 26.1 that do not recur when the build is retried. The first: two builds share a step,
#: and the one that requested it has ended, so that its session, with secrets and contexts, is gone. The second: the
#: engine garbage-collected a snapshot that the build had just found, after other images were removed. The third:
#: it garbage-collected a blob. The fourth: equal steps of two builds were merged, and the build that had them first has
#: ended: https://github.com/moby/buildkit/issues/2303
_TRANSIENT_ERRORS = re.compile(
    r"no active sessions|failed to prepare extraction snapshot .*: not found|failed to solve: not found$"
    r"|inconsistent graph state",
    re.MULTILINE,
)

#: Seconds before a build that failed with a transient error is started again, so that the other build gets further.
_PAUSES = (1, 5)

#: Limits of every container: processes and threads, of which a training on many cores has thousands, and its log on the
#: engine's disk, of which the end is kept.
LIMITS = {"pids_limit": 16_384, "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "64m"})}

#: Options of a container that looks into an image, whatever the programs of the image do.
LOOKING: dict[str, Any] = {"network_mode": "none", "read_only": True, "mem_limit": 4 << 30, **LIMITS}

#: Seconds until a program that looks into an image is given up: 5 for 2 GB of packages on 2 cores (2026-11).
_SECONDS = 300

#: The line in which scripts/install-engine.sh or scripts/setup-emulation.sh says why it ends.
_SCRIPT_ERROR = re.compile(r"(?:engine|emulation): error: (.*)")


def resource_labels(purpose: str) -> dict[str, str]:
    """Return the labels of a container, volume or network that this process creates for ``purpose``."""
    return {OWNED: purpose, OWNER: str(os.getpid())}


def in_use(labels: dict[str, str] | None) -> bool:
    """Return whether the process that created the resource with these labels is running, and is not this one."""
    owner = (labels or {}).get(OWNER, "")
    return owner.isdigit() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists()


def context() -> str:
    """Return the name of the Docker context of the engine, in which buildx's builder of that name builds.

    https://docs.docker.com/engine/manage-resources/contexts/
    """
    given = "default" if settings.standard_variable("DOCKER_HOST") else settings.standard_variable("DOCKER_CONTEXT")
    return given or get_current_context_name() or "default"


def existing_client() -> docker.DockerClient:
    """Return a client of the running engine of the Docker context, or raise DockerException or OSError."""
    # The client itself would take another engine; without a file, it looks for contexts in the current folder.
    if (name := context()) != "default" and not (find_config_file() and ContextAPI.get_context(name)):
        raise docker.errors.ContextNotFound(name)
    running = docker.from_env(timeout=600)
    running.ping()
    return running


@cache
def client() -> docker.DockerClient:
    """Return a client of a running engine.

    Raises:
        UserError: none answers; the line names the command that starts or installs one.
    """
    with contextlib.suppress(docker.errors.DockerException, OSError):
        return existing_client()
    _run_script("install-engine.sh", "trainyard setup", "--check")
    raise UserError("'docker' reaches an engine that is not at DOCKER_HOST: set it as 'docker context ls' prints it")


def set_up(*, emulation: bool = False) -> None:
    """Start the engine that is installed, or install one on a Debian or Ubuntu host, as root; nothing if one answers.

    Args:
        emulation: also let this host's kernel run programs for arm64.
    Raises:
        UserError: that failed; the script's last line says why.
    """
    _run_script("install-engine.sh", "trainyard setup")
    if emulation:
        _run_script("setup-emulation.sh", "trainyard setup --emulation")


def set_up_in_checkout() -> None:
    """Call :func:`set_up` where no engine answers, if this runs from a checkout."""
    try:
        existing_client()
    except (docker.errors.DockerException, OSError):
        if settings.CHECKOUT:
            set_up()


def _run_script(name: str, setup: str, *arguments: str) -> None:
    """Run a script of scripts/, which names the command ``setup`` in what it prints, or raise :class:`UserError`."""
    command = [str(ROOT / "scripts" / name), *arguments]
    environment = settings.environment(TRAINYARD_SETUP=setup)
    script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace")
    reason = f"{name} failed"
    for line in script.stderr or ():
        if error := _SCRIPT_ERROR.match(line):
            reason = error[1]
        else:
            sys.stderr.write(line)
    if script.wait():
        raise UserError(reason)


@cache
def stores_in_containerd() -> bool:
    """Return whether the engine keeps images in containerd, which zstd layers and stable digests need."""
    return "containerd.snapshotter" in str(client().info().get("DriverStatus"))


@cache
def architecture() -> Architecture:
    """Return the architecture of the engine's machine, maybe another one than this host's; AMD64 if it is unknown."""
    return ARCHITECTURES.get(str(client().version().get("Arch")), AMD64)


def architecture_of(reference: str) -> Architecture:
    """Return the architecture of a local image; the engine's if it is unknown."""
    name = client().images.get(reference).attrs.get("Architecture")
    return ARCHITECTURES.get(str(name), architecture())


def can_run(wanted: Architecture) -> bool:
    """Return whether the engine runs programs for an architecture, natively or emulated; True if it does not say."""
    if wanted == architecture():
        return True
    # `inspect` asks the engine, which tries a program of each architecture:
    # https://github.com/moby/buildkit/blob/v0.13.2/util/archutil/detect.go
    inspected = buildx("inspect", "--bootstrap", f"--builder={context()}")
    platforms = re.search(r"(?m)^Platforms:\s+(.*)$", inspected)
    return platforms is None or wanted.platform in re.split(r",\s*", platforms[1].replace("*", ""))


def emulated_environment(wanted: Architecture) -> dict[str, str]:
    """Return variables of a container whose programs the engine's machine emulates; none for its own architecture.

    QEMU's default processor has pointer authentication and SVE, which are slow to emulate: `import tensorflow` takes
    12 s with this one, and 50 s with the default (2026-11). https://www.qemu.org/docs/master/system/arm/cpu-features.html
    """
    return {"QEMU_CPU": "neoverse-n1"} if wanted == ARM64 and architecture() != ARM64 else {}


def require_emulation(wanted: Architecture) -> None:
    """Raise a :class:`UserError` if the engine does not run programs for an architecture."""
    if not can_run(wanted):
        raise UserError(cannot_run(f"programs for {wanted.platform}"))


def cannot_run(what: str) -> str:
    """Return what to do about an engine that cannot run ``what``, for messages."""
    return (
        f"the engine runs no {what}: run 'trainyard setup --emulation' to emulate them, or use an engine on such a "
        "machine"
    )


def image(reference: str, *, made_by: str) -> Image:
    """Return a local image, or raise a :class:`UserError` that names the command that makes it, ``made_by``."""
    try:
        return client().images.get(reference)
    except docker.errors.ImageNotFound:
        raise UserError(f"no local image {reference}: run '{made_by}' first") from None


def existing_image(reference: str) -> Image | None:
    """Return a local image; None if there is no such image, or no engine is running."""
    try:
        return existing_client().images.get(reference)
    except (docker.errors.DockerException, OSError):
        return None


def images(name: str | None = None, *, label: str | None = None) -> list[Image]:
    """Return the engine's images, without those that another process removes meanwhile.

    Args:
        name: of a repository, or with a tag; None for all.
        label: that they have, as in ``io.trainyard.target=xla``.
    """
    found = []
    for listed in client().api.images(name, filters={"label": [label]} if label else None):
        with contextlib.suppress(docker.errors.ImageNotFound):
            found.append(client().images.get(listed["Id"]))
    return found


def digest_of(reference: str) -> str | None:
    """Return the digest of a local image; None if there is no such image."""
    try:
        return str(client().images.get(reference).id)
    except docker.errors.ImageNotFound:
        return None


def run(reference: str, program: str, words: Sequence[str], purpose: str, **options: Any) -> tuple[int, bytes, bytes]:
    """Return the exit status, stdout and stderr (64 MB at most) of a program in a local image, whatever it does.

    Args:
        purpose: see :func:`resource_labels`; ``options``: of ``docker.containers.create``, besides :data:`LOOKING`.
    Raises:
        docker.errors.APIError: the image has no such program.
        StepFailed: it does not end.
    """
    container = client().containers.create(
        reference, list(words), entrypoint=[program], labels=resource_labels(purpose), **LOOKING, **options
    )
    try:
        container.start()
        try:
            status = int(container.wait(timeout=_SECONDS)["StatusCode"])
            return status, container.logs(stderr=False), container.logs(stdout=False)
        except (requests.exceptions.RequestException, docker.errors.NotFound):  # or it was removed
            raise StepFailed(f"{reference}: its {program} does not end: given up after {_SECONDS} s") from None
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)


def default_reference(target: str) -> str:
    """Return the candidate of a target or, if it has none, the reference of the last image that passed everything."""
    candidate = candidate_tag(target)
    return candidate if digest_of(candidate) else f"{NAME}:{target}"


def version(target: str) -> dict[str, str]:
    """Return ``digest`` and ``version`` of a target's image; empty if there is none, or no engine is running."""
    local = existing_image(f"{NAME}:{target}")
    return {"digest": str(local.id), "version": local.labels.get(TAG, "")} if local else {}


def pull(reference: str, wanted: Architecture | None = None) -> Image:
    """Return a local image, pulled from its registry if it does not exist.

    Args:
        wanted: its architecture; None: the engine's, if the image has it.
    Raises:
        UserError: it cannot be pulled; the line ends with the engine's error.
    """
    with contextlib.suppress(docker.errors.ImageNotFound):
        local = client().images.get(reference)
        if wanted is None or local.attrs.get("Architecture") == wanted.name:
            return local
    repository, tag = parse_repository_tag(reference)
    platform = wanted.platform if wanted else None
    reason = ""
    try:
        # ImageCollection.pull() ignores errors that the engine reports after it has begun to answer.
        for line in client().api.pull(repository, tag=tag or "latest", platform=platform, stream=True, decode=True):
            reason = line.get("error") or reason
        if not reason:
            return client().images.get(reference)
    except docker.errors.APIError as error:
        reason = str(error.explanation)
    raise UserError(f"no local image {reference}, and it cannot be pulled: {reason}")


def digest(reference: str, *, made_by: str = "trainyard image") -> str:
    """Return ``sha256:...`` of a local image: with the containerd store, the digest that it has at registries."""
    return str(image(reference, made_by=made_by).id)


def untag(reference: str) -> None:
    """Remove a tag of a local image, and the image if that was its last tag; do nothing if there is no such tag."""
    with contextlib.suppress(docker.errors.ImageNotFound):
        client().images.remove(reference, force=True)


def cached(*, least: float = 0, builder: str = "") -> set[str]:
    """Return ids of the records of a builder's cache, the engine's by default, that hold at least ``least`` bytes."""
    # Not the API's disk usage, which fails while images are created and removed (404, 500; Docker 26).
    used = buildx("du", f"--builder={builder or context()}")
    records = re.findall(r"(?m)^([0-9a-z]{25})\*?\s+\w+\s+([\d.]+[kMGT]?B)", used)
    return {identity for identity, size in records if in_bytes(size) >= least}


def drop_cached(records: set[str], *, builder: str = "") -> None:
    """Remove those records of a builder's cache that no running build, image or other record uses."""
    left = records & cached(builder=builder)
    while left:
        for identity in left:
            buildx("prune", f"--builder={builder or context()}", "--force", "--all", f"--filter=id={identity}")
        before, left = left, left & cached(builder=builder)
        if left == before:
            return


def retry_transient(run: Callable[[], subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """Return the result of ``run``, which runs a build; after a transient error, wait and call it again."""
    ended = run()
    for pause in _PAUSES:
        if not ended.returncode or not _TRANSIENT_ERRORS.search(ended.stderr or ""):
            break
        time.sleep(pause)
        ended = run()
    return ended


def buildx(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run ``docker buildx``, again after a transient error, and return its standard output.

    Raises:
        StepFailed: it failed; the message ends with the last line of its output.
    """
    client()
    command, variables = ["docker", "buildx", *arguments], settings.environment(**(environment or {}))
    ended = retry_transient(
        lambda: subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    )
    if ended.returncode:
        words = (ended.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise StepFailed(f"'docker buildx {arguments[0]}' failed: {words}")
    return ended.stdout
