"""A training on the workers of a pod: started, watched until it ends or something interrupts it, stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scripts.cli import StepFailed, say, warn
from scripts.pods import calls, remote
from scripts.pods.calls import HALTED, SUSPENDED, TAKEN
from scripts.pods.follow import Follower
from scripts.pods.gcloud import Pod
from scripts.pods.life import Limits
from scripts.pods.workers import Workers

#: The launcher's exit status for "worth a retry" (launcher contract, Interface).
WORTH_A_RETRY = 138
#: How a container ends that was told to, or was killed: by the VM's own end, perhaps.
KILLED = (129, 137, 143, WORTH_A_RETRY)


@dataclass(frozen=True)
class Run:
    """What to start on every worker: what ``docker run`` gets.

    Attributes:
        command: for the image's entrypoint.
        program: the command is a program of its own: an image of ours, whose entrypoint is the launcher, gets ``--``
            in front of it.
    """

    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()
    container: str = remote.CONTAINER
    program: bool = False


class Interruption(Enum):
    """Why a training ended that could go on."""

    TAKEN = "was preempted"
    MAINTENANCE = "is under maintenance"
    RETRY = "has a trainer that asks to be started again"


Show = Callable[[int, str], None]


def clear(workers: Workers, container: str) -> None:
    """Remove what a run before left on the workers.

    Raises:
        StepFailed: it still runs there, and may be somebody's.
    """
    found = workers.on_all(remote.clear(container), timeout=120)
    if any(done.returncode == remote.OCCUPIED for done in found):
        raise StepFailed(
            f"{workers.pod.name}: a container '{container}' runs there already: 'make pod ACTION=logs' follows it, "
            "'make pod ACTION=stop' ends it"
        )


def start(workers: Workers, run: Run) -> None:
    """Have the image on every worker and its container running there.

    Raises:
        StepFailed: the image cannot be pulled, or the container does not start.
    """
    say(f"{workers.pod.name}: pulling {run.image} on {len(workers)} worker{'s' if len(workers) > 1 else ''}")
    workers.all_do(f"the pull of {run.image}", remote.pull(run.image))
    command = list(run.command)
    if run.program and workers.on(0, remote.label(run.image, "io.trainyard.target")).stdout.strip():
        command.insert(0, "--")
    script = remote.start(run.image, command, run.env, run.flags, run.container)
    workers.all_do("the start of the container", script, timeout=600)


def stop(workers: Workers, limits: Limits, container: str = remote.CONTAINER) -> None:
    """End the containers on every worker; each has the time of ``grace`` for a last checkpoint."""
    seconds = int(limits.grace)
    workers.on_all(remote.stop(container, seconds=seconds), timeout=seconds + 60)


def watch(
    workers: Workers, limits: Limits, show: Show, container: str = remote.CONTAINER, *, stops: bool = True
) -> int | Interruption:
    """Show what the containers say until they have ended; the exit status of the first that failed, or 0.

    Args:
        stops: when one fails, the others wait for it in vain: stop them after the time of grace.
    """
    changed = threading.Event()
    followers = [Follower(workers, index, container, show, changed) for index in range(len(workers))]
    first: int | None = None
    failed_at = looked_at = time.monotonic()
    try:
        while any(follower.code is None for follower in followers):
            changed.wait(min(limits.poll, 1))
            changed.clear()
            bad = next((follower for follower in followers if follower.code), None)
            if bad and first is None:
                first, failed_at = bad.code, time.monotonic()
                warn(f"worker {bad.worker} ended with exit status {bad.code}")
            _still_followed(followers, workers.pod, limits)
            if time.monotonic() - looked_at > limits.poll:
                looked_at = time.monotonic()
                found = interruption(workers.pod)
                if found:
                    return found
            if stops and first is not None and time.monotonic() - failed_at > limits.grace:
                failed_at = time.monotonic()
                stop(workers, limits, container)
        first = next((follower.code for follower in followers if follower.code), 0) if first is None else first
        return _settled(workers.pod, limits, first or 0) if stops else first or 0
    finally:
        for follower in followers:
            follower.leave()


def _still_followed(followers: Sequence[Follower], pod: Pod, limits: Limits) -> None:
    """
    Raises:
        StepFailed: a worker of a pod that is READY has not answered for as long as a new one may take to be READY.
        OSError: nobody reads the lines any more.
    """
    for follower in followers:
        if follower.error:
            raise follower.error
        if follower.lost_for > limits.ready:
            raise StepFailed(f"{pod.name}: worker {follower.worker} has not answered for {follower.lost_for:.0f} s")


def _settled(pod: Pod, limits: Limits, code: int) -> int | Interruption:
    """How a training ended whose containers ended with ``code``.

    A VM that is taken back ends its containers a little before the API says so.
    """
    for _ in range(3 if code in KILLED else 0):
        found = interruption(pod)
        if found:
            return found
        time.sleep(limits.poll)
    return Interruption.RETRY if code == WORTH_A_RETRY else code


def interruption(pod: Pod) -> Interruption | None:
    """What keeps the pod from going on, if anything does.

    Raises:
        StepFailed: somebody stopped or deleted it.
    """
    try:
        found = calls.node(pod)
    except StepFailed as error:
        warn(f"{error}; the training goes on")
        return None
    if found is None and (calls.queued(pod) or ("", ""))[0] in SUSPENDED:
        return Interruption.TAKEN
    if found is None or found.state in HALTED:
        raise StepFailed(f"{pod.name} is {found or 'gone'}: somebody deleted or stopped it")
    if found.state in TAKEN:
        return Interruption.TAKEN
    return Interruption.MAINTENANCE if found.health == "UNHEALTHY_MAINTENANCE" else None
