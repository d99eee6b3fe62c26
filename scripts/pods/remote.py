"""What the shell of a TPU VM is told to do: plain text for ssh, every word of the user's quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Name of our container on every worker: one run at a time, as the TPU itself allows no more.
CONTAINER = "trainyard"

#: As the guide runs a container on a TPU VM (cloud.google.com/tpu/docs/run-in-container); the memory is what PyTorch's
#: data loaders share (pytorch/xla's README).
RUN_FLAGS = ("--privileged", "--net=host", "--shm-size=16g")

#: Where a VM asks for the token of its service account (cloud.google.com/compute/docs/access/authenticate-workloads).
TOKEN_URL = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"

#: Hosts that take that token: Artifact Registry, and Container Registry's names, which it serves now.
GOOGLE_REGISTRY = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io")

#: Where PJRT's processes meet: the port a firewall between workers must leave open (launcher contract a.3).
MESH_PORT = 8476

MEET = Path(__file__).with_name("meet.py")

#: Exit status of :func:`clear` where a container runs (sysexits.h: EX_TEMPFAIL).
OCCUPIED = 75


def login(image: str) -> str:
    """Let the worker's Docker pull from Artifact Registry with the VM's own service account; empty for other hosts.

    The token lasts an hour and the pull follows at once, so nothing has to renew it.
    """
    host = image.partition("/")[0]
    if not GOOGLE_REGISTRY.fullmatch(host):
        return ""
    token = f'curl -fsS -H Metadata-Flavor:Google {TOKEN_URL} | sed -E \'s/.*"access_token" *: *"([^"]*)".*/\\1/\''
    return f"{token} | sudo docker login --username oauth2accesstoken --password-stdin https://{host} >/dev/null"


def pull(image: str) -> str:
    """Have the image on the worker: the registry's present one, or one that was loaded there by hand."""
    name = shlex.quote(image)
    have = f"sudo docker pull --quiet {name} >/dev/null || sudo docker image inspect {name} >/dev/null 2>&1"
    return " && ".join(step for step in (login(image), f"{{ {have}; }}") if step)


def label(image: str, name: str) -> str:
    """Print a label of an image that is on the worker; an empty line if it has none."""
    template = f'{{{{index .Config.Labels "{name}"}}}}'
    return f"sudo docker image inspect --format {shlex.quote(template)} {shlex.quote(image)}"


def clear(container: str = CONTAINER) -> str:
    """Remove what a run before left; exit status OCCUPIED if that still runs."""
    running = f"sudo docker inspect --format '{{{{.State.Running}}}}' {container} 2>/dev/null"
    return f'[ "$({running})" != true ] || exit {OCCUPIED}; sudo docker rm -f {container} >/dev/null 2>&1; true'


def start(
    image: str,
    command: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    container: str = CONTAINER,
) -> str:
    """Start the container in the background, so that a lost ssh connection does not end the training.

    Args:
        command: what the image's entrypoint gets; nothing starts its default trainer.
        env: variables of the container.
        flags: further flags of ``docker run``.
    """
    variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
    words = ["sudo", "docker", "run", "--detach", f"--name={container}", *RUN_FLAGS, *flags, *variables, image]
    return shlex.join([*words, *command])


def follow(container: str = CONTAINER, *, skip: int = 0) -> str:
    """The container's log but for its first ``skip`` lines, until it ends; then its exit status, 255 if it is gone.

    Both of its streams are one here, in the engine's order, so that a count of lines says where to go on.
    """
    log = f"sudo docker logs --follow {container} 2>&1" + (f" | sed -u 1,{skip}d" if skip else "")
    return f"{log}; code=$(sudo docker wait {container}) || exit 255; exit $code"


def follow_marked(container: str = CONTAINER) -> str:
    """The same with ``[i]`` before each line, i being the number at the end of a worker's host name."""
    log = f'sudo docker logs --follow {container} 2>&1 | sed -u "s/^/[${{HOSTNAME##*-}}] /"'
    return f"{log}; exit $(sudo docker wait {container})"


def ended(container: str = CONTAINER) -> str:
    """Print ``true CODE`` or ``false CODE``: whether the container runs, and its exit status if it does not."""
    return f"sudo docker inspect --format '{{{{.State.Running}}}} {{{{.State.ExitCode}}}}' {container}"


def stop(container: str = CONTAINER, *, seconds: int = 15) -> str:
    """End the container: SIGTERM, and ``seconds`` for a last checkpoint. Its log stays."""
    return f"sudo docker stop --time={seconds} {container} >/dev/null 2>&1; true"


def meet(index: int, addresses: Sequence[str], *, seconds: float) -> str:
    """Find out which other workers this one reaches; see meet.py for what it prints."""
    words = [str(MESH_PORT), str(seconds), str(index), *addresses]
    return shlex.join(["python3", "-c", MEET.read_text(encoding="utf-8"), *words])
