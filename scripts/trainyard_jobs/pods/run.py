"""A training run on the workers of a TPU VM: start it, watch it until it ends or is interrupted, stop it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainyard.common.errors import StepFailed
from trainyard_jobs.pods import shell_commands, ssh
from trainyard_jobs.pods.api import PREEMPTED_STATES, STOPPED_STATES, SUSPENDED_STATES, Node
from trainyard_jobs.pods.gcloud_args import Pod
from trainyard_jobs.pods.logs import Follower
from trainyard_jobs.pods.provisioning import Limits, TpuVm
from trainyard_jobs.pods.ssh import Workers, plural

logger = logging.getLogger(__name__)

#: The launcher's exit status for a failure that a restart may fix (docs/launcher-contract.md, R15.4).
RETRYABLE_EXIT_CODE = 138
#: Exit statuses of a container that was stopped: by SIGHUP, SIGKILL or SIGTERM, perhaps because its VM is preempted.
STOPPED_EXIT_CODES = (129, 137, 143, RETRYABLE_EXIT_CODE)


@dataclass(frozen=True)
class Run:
    """What to start on every worker: the arguments of ``docker run``.

    Attributes:
        command: arguments for the image's entrypoint.
        program: the command starts with a program instead of a trainer. In Trainyard's images, whose entrypoint is the
            launcher, ``--`` is put before it.
    """

    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()
    container: str = shell_commands.CONTAINER
    program: bool = False


class Interruption(Enum):
    """Why a training run ended that can be restarted."""

    PREEMPTED = "was preempted"
    MAINTENANCE = "is under maintenance"
    RETRY = "runs a trainer that exited with a retryable failure"


#: Prints a line of a worker's log: called with the worker's index and the line.
Show = Callable[[int, str], None]


class TrainingVm(TpuVm):
    """Run a training in containers on the workers of a TPU VM. All methods raise StepFailed if they fail."""

    def connect(self, node: Node) -> Workers:
        """Connect to every worker by ssh."""
        return ssh.connect(self.pod, node, self.tpu)

    def check_network(self, workers: Workers) -> None:
        """Check that every worker reaches every other one."""
        ssh.check_network(workers, seconds=self.limits.check)

    def remove_previous(self, workers: Workers, container: str) -> None:
        """Remove the container of an earlier run from the workers.

        Raises:
            StepFailed: it is still running.
        """
        found = workers.on_all(shell_commands.remove_previous(container), timeout=120)
        if any(finished.returncode == shell_commands.RUNNING for finished in found):
            ways = "'trainyard pod --action logs' follows it, 'trainyard pod --action stop' stops it"
            raise StepFailed(f"{self.pod.name}: a container '{container}' is already running: {ways}")

    def start(self, workers: Workers, run: Run) -> None:
        """Pull the image on every worker and start its container.

        Raises:
            StepFailed: the image cannot be pulled, or the container does not start.
        """
        logger.info(f"{self.pod.name}: pulling {run.image} on {plural(len(workers), 'worker')}")
        workers.require_all(f"the pull of {run.image}", shell_commands.pull(run.image))
        command = list(run.command)
        if run.program and workers.on(0, shell_commands.label(run.image, "io.trainyard.target")).stdout.strip():
            command.insert(0, "--")
        script = shell_commands.start(run.image, command, run.env, run.flags, run.container)
        workers.require_all("the start of the container", script, timeout=600)

    def stop(self, workers: Workers, container: str = shell_commands.CONTAINER) -> None:
        """Stop the containers on every worker, with ``limits.grace`` seconds for a last checkpoint."""
        seconds = int(self.limits.grace)
        workers.on_all(shell_commands.stop(container, seconds=seconds), timeout=seconds + 60)

    def watch(
        self, workers: Workers, show: Show, container: str = shell_commands.CONTAINER, *, stop_on_failure: bool = True
    ) -> int | Interruption:
        """Show the containers' logs until all have ended; the exit status of the first that failed, or 0.

        Args:
            stop_on_failure: stop the other containers ``limits.grace`` seconds after one has failed: they wait for it.
        Raises:
            StepFailed: the TPU VM was stopped or deleted, or a worker no longer answers.
        """
        changed = threading.Event()
        followers = [Follower(workers, index, container, show, changed) for index in range(len(workers))]
        first: int | None = None
        failed_at = polled_at = time.monotonic()
        try:
            while any(follower.code is None for follower in followers):
                changed.wait(min(self.limits.poll, 1))
                changed.clear()
                failed = next((follower for follower in followers if follower.code), None)
                if failed and first is None:
                    first, failed_at = failed.code, time.monotonic()
                    logger.warning(f"worker {failed.worker} exited with status {failed.code}")
                _check_connections(followers, self.pod, self.limits)
                if time.monotonic() - polled_at > self.limits.poll:
                    polled_at = time.monotonic()
                    found = self.interruption()
                    if found:
                        return found
                if stop_on_failure and first is not None and time.monotonic() - failed_at > self.limits.grace:
                    failed_at = time.monotonic()
                    self.stop(workers, container)
            first = next((follower.code for follower in followers if follower.code), 0) if first is None else first
            return self.outcome_of(first or 0) if stop_on_failure else first or 0
        finally:
            for follower in followers:
                follower.close()

    def outcome_of(self, code: int) -> int | Interruption:
        """Return the outcome of a run whose containers ended with ``code``.

        The containers of a VM that is preempted are stopped shortly before the API reports the preemption, so the state
        is polled three times if the containers were stopped.
        """
        for _ in range(3 if code in STOPPED_EXIT_CODES else 0):
            found = self.interruption()
            if found:
                return found
            time.sleep(self.limits.poll)
        return Interruption.RETRY if code == RETRYABLE_EXIT_CODE else code

    def interruption(self) -> Interruption | None:
        """Return why the TPU VM cannot go on with the run; None if it can, or if the API does not answer.

        Raises:
            StepFailed: it was stopped or deleted by hand.
        """
        try:
            found = self.node()
        except StepFailed as error:
            logger.warning(f"{error}; the run continues")
            return None
        if found is None and (self.tpu.queued_resource(self.pod) or ("", ""))[0] in SUSPENDED_STATES:
            return Interruption.PREEMPTED
        if found is None:
            raise StepFailed(f"{self.pod.name} was deleted during the run")
        if found.state in STOPPED_STATES:
            raise StepFailed(f"{self.pod.name} is {found}: it was stopped or deleted during the run")
        if found.state in PREEMPTED_STATES:
            return Interruption.PREEMPTED
        return Interruption.MAINTENANCE if found.health == "UNHEALTHY_MAINTENANCE" else None


def _check_connections(followers: Sequence[Follower], pod: Pod, limits: Limits) -> None:
    """
    Raises:
        StepFailed: a worker of a READY TPU VM has not answered for ``limits.ready`` seconds.
        OSError: the reader of the log ended.
    """
    for follower in followers:
        if follower.error:
            raise follower.error
        if follower.disconnected_for > limits.ready:
            seconds = f"{follower.disconnected_for:.0f} s"
            raise StepFailed(f"{pod.name}: worker {follower.worker} has not answered for {seconds}")
