"""Shell commands for the workers of a TPU VM, as text for ssh. Every argument that comes from the user is quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Name of the container on every worker. One name for all runs: only one process can use the TPU at a time.
CONTAINER = "trainyard"

#: Flags of https://cloud.google.com/tpu/docs/run-in-container. Shared memory is for PyTorch's data loaders;
#: its size is that of https://github.com/pytorch/xla#docker.
RUN_FLAGS = ("--privileged", "--net=host", "--shm-size=16g")

#: Access token of the VM's service account (https://cloud.google.com/compute/docs/access/authenticate-workloads).
TOKEN_URL = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"

#: Hosts that accept this token: Artifact Registry, and the host names of Container Registry, which it serves.
GOOGLE_REGISTRY = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io")

#: Port of PJRT's mesh controller, which a firewall between workers must not block (R4.4 in
#: docs/launcher-contract-tpu-nodes.md).
MESH_PORT = 8476

CONNECTIVITY_PROBE = Path(__file__).with_name("connectivity_probe.py")

#: Exit status of :func:`remove_previous` if a container is running (EX_TEMPFAIL of sysexits.h).
RUNNING = 75


def login(image: str) -> str:
    """Log Docker in to Artifact Registry with the VM's service account; empty for other registries.

    The token is valid for an hour and the pull follows immediately, so it is not refreshed.
    """
    host = image.partition("/")[0]
    if not GOOGLE_REGISTRY.fullmatch(host):
        return ""
    token = f'curl -fsS -H Metadata-Flavor:Google {TOKEN_URL} | sed -E \'s/.*"access_token" *: *"([^"]*)".*/\\1/\''
    return f"{token} | sudo docker login --username oauth2accesstoken --password-stdin https://{host} >/dev/null"


def pull(image: str) -> str:
    """Pull the image; if the pull fails, use the image of that name that was loaded on the worker by hand."""
    name = shlex.quote(image)
    have = f"sudo docker pull --quiet {name} >/dev/null || sudo docker image inspect {name} >/dev/null 2>&1"
    return " && ".join(step for step in (login(image), f"{{ {have}; }}") if step)


def label(image: str, name: str) -> str:
    """Print a label of an image on the worker; an empty line if it has no such label."""
    template = f'{{{{index .Config.Labels "{name}"}}}}'
    return f"sudo docker image inspect --format {shlex.quote(template)} {shlex.quote(image)}"


def remove_previous(container: str = CONTAINER) -> str:
    """Remove the container of an earlier run; exit status RUNNING if it is running."""
    running = f"sudo docker inspect --format '{{{{.State.Running}}}}' {container} 2>/dev/null"
    return f'[ "$({running})" != true ] || exit {RUNNING}; sudo docker rm -f {container} >/dev/null 2>&1; true'


def start(
    image: str,
    command: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    container: str = CONTAINER,
    *,
    entrypoint: Sequence[str] = (),
    secrets: Mapping[str, str] | None = None,
) -> str:
    """Start the container detached, so that a lost ssh connection does not end the run.

    Args:
        entrypoint: what replaces the image's; empty keeps it.
        secrets: variable -> secret of Secret Manager that the VM's service account reads: ``SECRET``,
            ``SECRET:VERSION`` or ``projects/PROJECT/secrets/SECRET[/versions/VERSION]``.
        command: arguments for the image's entrypoint; without any, it starts its default trainer.
        env: variables of the container.
        flags: further flags of ``docker run``.
    """
    variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
    docker, more, arguments = docker_words(entrypoint, list(secrets or {}))
    words = [*docker, "run", "--detach", f"--name={container}", *RUN_FLAGS, *flags, *variables, *more, image]
    steps = []
    for name, source in (secrets or {}).items():
        secret, _, version = source.partition("/versions/") if "/" in source else source.partition(":")
        access = ["gcloud", "secrets", "versions", "access", version or "latest", f"--secret={secret}"]
        steps.append(f'{name}="$({shlex.join(access)})" && export {name}')
    return " && ".join([*steps, shlex.join([*words, *arguments, *command])])


def docker_words(entrypoint: Sequence[str], secrets: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return Docker's command, flags of ``run``, and the first arguments of the container.

    Args:
        entrypoint: what replaces the image's; empty keeps it.
        secrets: names of variables of this shell, whose values are not words of a command, which others could see.
    """
    sudo = ["sudo", *([f"--preserve-env={','.join(secrets)}"] if secrets else [])]
    replaced = [f"--entrypoint={entrypoint[0]}"] if entrypoint else []
    return [*sudo, "docker"], [*replaced, *(f"--env={name}" for name in secrets)], list(entrypoint[1:])


def follow(container: str = CONTAINER, *, skip: int = 0) -> str:
    """Print the container's log after its first ``skip`` lines until it ends; exit with its status, 255 if it is gone.

    stdout and stderr are merged in the order in which Docker logged them: a count of lines is a position in the log.
    """
    log = f"sudo docker logs --follow {container} 2>&1" + (f" | sed -u 1,{skip}d" if skip else "")
    return f"{log}; code=$(sudo docker wait {container}) || exit 255; exit $code"


def follow_marked() -> str:
    """The same with ``[i]`` before each line, where i is the number at the end of the worker's host name."""
    log = f'sudo docker logs --follow {CONTAINER} 2>&1 | sed -u "s/^/[${{HOSTNAME##*-}}] /"'
    return f"{log}; exit $(sudo docker wait {CONTAINER})"


def container_state(container: str = CONTAINER) -> str:
    """Print ``true CODE`` or ``false CODE``: whether the container is running, and its exit status if it is not."""
    return f"sudo docker inspect --format '{{{{.State.Running}}}} {{{{.State.ExitCode}}}}' {container}"


def stop(container: str = CONTAINER, *, seconds: int) -> str:
    """Stop the container: SIGTERM, then SIGKILL after ``seconds``. Its log remains."""
    return f"sudo docker stop --time={seconds} {container} >/dev/null 2>&1; true"


def probe_connectivity(index: int, addresses: Sequence[str], *, seconds: float) -> str:
    """Find out which other workers the worker ``index`` reaches; connectivity_probe.py describes the output."""
    words = [str(MESH_PORT), str(seconds), str(index), *addresses]
    return shlex.join(["python3", "-c", CONNECTIVITY_PROBE.read_text(encoding="utf-8"), *words])
