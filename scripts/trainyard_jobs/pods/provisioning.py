"""Create a TPU VM, directly or through a queued resource, wait until it is READY, and delete it."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.pods import api, gcloud_args
from trainyard_jobs.pods.api import PREEMPTED_STATES, STOPPED_STATES, Node, TpuApi
from trainyard_jobs.pods.gcloud_args import Pod

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, and the number of restarts.

    Attributes:
        ready: until a TPU VM that is being created is READY.
        queue: until a queued resource is provisioned; None waits without limit.
        poll: interval between two polls of a state.
        check: until every worker has connected to every other worker.
        grace: for the other workers to end after one has failed, and between SIGTERM and SIGKILL.
        restarts: after how many preemptions or failures that ask for a retry the run fails (xla_dist had
            MAX_TPU_RETRY = 50: https://github.com/pytorch/xla/blob/v1.13.0/torch_xla/distributed/xla_dist.py).
    """

    ready: float = 1800
    queue: float | None = None
    poll: float = 10
    check: float = 30
    grace: float = 15
    restarts: int = 50


Answer = TypeVar("Answer")

#: The error of a zone without capacity (https://docs.cloud.google.com/tpu/docs/troubleshooting/trouble-tpu), and ours
#: of a queued resource that is not provisioned in time.
_NO_CAPACITY = re.compile(r"no more capacity|s in the queue \(")


def is_no_capacity(error: StepFailed) -> bool:
    """Whether creating a TPU VM failed because its zone has no capacity now: another zone may have."""
    return bool(_NO_CAPACITY.search(str(error)))


class _Polling:
    """Polls a state, which is printed when it changes, with the seconds since the start.

    A poll that fails is tried again, so that one lost request does not give up a place in the queue.
    """

    #: Consecutive failures after which polling fails: 100 s at the default interval.
    MAX_FAILURES = 10

    def __init__(self, name: str) -> None:
        self._name, self._last, self._begin, self._failures = name, "", time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def update(self, state: str) -> None:
        if state != self._last:
            logger.info(f"{self._name}: {state}" + (f" ({self.seconds:.0f} s)" if self._last else ""))
            self._last = state

    def poll(self, request: Callable[[], Answer]) -> Answer | None:
        """The answer, or None if the request failed and will be retried.

        Raises:
            StepFailed: the error is permanent, or was the last of too many.
        """
        try:
            answer = request()
        except StepFailed as error:
            self._failures += 1
            if self._failures > self.MAX_FAILURES or api.PERMANENT_ERRORS.search(str(error)):
                raise
            logger.warning(f"{error}; retrying")
            return None
        self._failures = 0
        return answer


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP (a closed terminal) while resources that are billed are deleted."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


class TpuVm:
    """Create, await, describe and delete a TPU VM, which may not exist yet. What fails raises StepFailed."""

    def __init__(self, pod: Pod, limits: Limits, tpu: TpuApi) -> None:
        self.pod, self.limits, self.tpu = pod, limits, tpu

    def node(self) -> Node | None:
        """Return how the API describes it; None if it does not exist."""
        return self.tpu.node(self.pod)

    @property
    def _kind(self) -> str:
        return f"{self.pod.accelerator_type}{' (Spot)' if self.pod.spot else ''} in {self.pod.zone}"

    def create(self) -> Node:
        """Create the TPU VM and wait until it is READY and HEALTHY, printing its states as they change.

        Raises:
            StepFailed: it could not be created, or not in time. The line holds gcloud's error.
        """
        logger.info(f"{self.pod.name}: creating {self._kind}")
        with (
            tempfile.TemporaryFile("w+", errors="replace") as output,
            subprocess.Popen(
                gcloud_args.create(self.pod),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):

            def error() -> str | None:
                if not process.poll():  # still running, or succeeded
                    return None
                output.seek(0)
                return api.error_message(subprocess.CompletedProcess([], process.returncode, "", output.read()))

            try:
                return self.await_ready(error)
            finally:
                process.kill()

    def create_queued(self, valid_until: str | None) -> Node:
        """Create a queued resource and wait until its TPU VM is provisioned and READY; see :meth:`create`."""
        logger.info(f"{self.pod.name}: queueing for {self._kind}")
        requested = self.tpu.call(gcloud_args.create_queued(self.pod, valid_until=valid_until))
        if requested.returncode:
            raise StepFailed(f"{self.pod.name}: {api.error_message(requested)}")
        self.await_active()
        return self.await_ready()

    def await_active(self) -> None:
        """Wait until the queued resource is ACTIVE.

        Raises:
            StepFailed: it failed or was deleted, or is not ACTIVE in time.
        """
        polling = _Polling(f"{self.pod.name} (queue)")
        while True:
            found = polling.poll(lambda: self.tpu.queued_resource(self.pod) or ("deleted", ""))
            state, error = found or ("unknown", "")
            polling.update(state)
            if state == "ACTIVE":
                return
            if state in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING", "deleted"):
                raise StepFailed(f"{self.pod.name}: the queued resource is {state}{f': {error}' if error else ''}")
            if self.limits.queue is not None and polling.seconds > self.limits.queue:
                waited = f"still {state} after {polling.seconds:.0f} s in the queue"
                raise StepFailed(f"{self.pod.name}: {waited} ('--queue-wait' sets the limit)")
            time.sleep(self.limits.poll)

    def await_ready(self, creation_error: Callable[[], str | None] = lambda: None) -> Node:
        """Wait until the TPU VM is READY and HEALTHY.

        Args:
            creation_error: returns the error of the command that creates the TPU VM once it has failed, else None.
        Raises:
            StepFailed: it cannot become READY, or is not READY in time.
        """
        polling = _Polling(self.pod.name)
        while True:
            error = creation_error()
            if error:
                raise StepFailed(f"{self.pod.name}: {error}")
            found = polling.poll(self.node)
            if found:
                polling.update(str(found))
                if found.ready:
                    return found
                if found.state in PREEMPTED_STATES + STOPPED_STATES:
                    raise StepFailed(f"{self.pod.name} is {found} and will not become READY by itself")
            if polling.seconds > self.limits.ready:
                state = f"is {found}" if found else "does not exist"
                raise StepFailed(f"{self.pod.name} {state} after {polling.seconds:.0f} s ('--wait' sets the limit)")
            time.sleep(self.limits.poll)

    def require_ready(self) -> Node:
        """Return the TPU VM, which must exist and be READY.

        Raises:
            UserError: it does not exist.
            StepFailed: it is not READY.
        """
        found = self.node()
        if found is None:
            where = f"no TPU VM {self.pod.name} in {self.pod.zone}"
            raise UserError(f"{where}: create it with 'trainyard pod --action create'")
        if not found.ready:
            raise StepFailed(f"{self.pod.name} is {found}, not READY")
        return found

    def delete(self, *, queued: bool | None = None) -> bool:
        """Delete the TPU VM and the queued resource that created it; False if neither exists.

        A TPU VM that is being created cannot be deleted yet: the deletion is retried for ``limits.ready`` seconds.

        Args:
            queued: whether a queued resource has to be deleted; None looks for one.
        Raises:
            StepFailed: it was not deleted and is billed if it exists; the line holds the command that deletes it.
        """
        deadline = time.monotonic() + self.limits.ready
        warned = False
        while True:
            with_queue = bool(self.tpu.queued_resource(self.pod)) if queued is None else queued
            command = gcloud_args.delete(self.pod, queued=with_queue)
            finished = self.tpu.call(command)
            if finished.returncode == 0:
                logger.info(f"{self.pod.name}: deleted")
                return True
            if api.is_not_found(finished):
                logger.info(f"{self.pod.name}: does not exist")
                return False
            error = api.error_message(finished)
            if time.monotonic() > deadline or api.PERMANENT_ERRORS.search(error):
                failed = f"{self.pod.name} could not be deleted and is billed if it exists: {error}"
                raise StepFailed(f"{failed}; run: {' '.join(command)}")
            if not warned:
                logger.warning(f"{self.pod.name} cannot be deleted yet ({error}); retrying")
                warned = True
            time.sleep(self.limits.poll)
