"""A TPU VM comes to be, becomes READY, and goes: directly, or through the queue."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from scripts.cli import StepFailed, UserError, say, warn
from scripts.pods import calls, gcloud
from scripts.pods.calls import HALTED, TAKEN, Node
from scripts.pods.gcloud import Pod


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds.

    Attributes:
        ready: for a TPU VM to be READY once it is being created.
        queue: for a queued resource to get its turn; None for ever.
        poll: between two looks at a state.
        check: for every worker to reach every other one.
        grace: for the others to end by themselves when one worker has failed, and for a last checkpoint.
        restarts: how often to start again after the pod was taken (xla_dist: MAX_TPU_RETRY).
    """

    ready: float = 1800
    queue: float | None = None
    poll: float = 10
    check: float = 30
    grace: float = 15
    restarts: int = 50


class _Changes:
    """Says a state when it is another one than before, with the time since the first."""

    def __init__(self, name: str) -> None:
        self._name, self._last, self._begin = name, "", time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def say(self, state: str) -> None:
        if state != self._last:
            say(f"{self._name}: {state}" + (f" ({self.seconds:.0f} s)" if self._last else ""))
            self._last = state


Answer = TypeVar("Answer")


class _Patience:
    """Asks again where the answer failed to come: a place in the queue is not given up for one lost request."""

    #: Failures in a row that are borne.
    MOST = 10

    def __init__(self) -> None:
        self._failures = 0

    def ask(self, question: Callable[[], Answer]) -> Answer | None:
        """The answer, or None if it did not come.

        Raises:
            StepFailed: it will not come by asking again, or has not come for too long.
        """
        try:
            answer = question()
        except StepFailed as error:
            self._failures += 1
            if self._failures > self.MOST or calls.HOPELESS.search(str(error)):
                raise
            warn(f"{error}; asking again")
            return None
        self._failures = 0
        return answer


def create(pod: Pod, limits: Limits) -> Node:
    """Create the TPU VM and wait until it is READY and HEALTHY, saying its states as they change.

    Raises:
        StepFailed: it could not be had, or not in time; one line, gcloud's own words in it.
    """
    say(f"{pod.name}: creating {pod.accelerator_type}{' (Spot)' if pod.spot else ''} in {pod.zone}")
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            gcloud.create(pod),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        ) as making,
    ):

        def failed() -> str | None:
            if not making.poll():  # it still runs, or did what it should
                return None
            output.seek(0)
            return calls.words(subprocess.CompletedProcess([], making.returncode, "", output.read()))

        try:
            return await_ready(pod, limits, failed)
        finally:
            making.kill()


def create_queued(pod: Pod, limits: Limits, *, valid_until: str | None) -> Node:
    """Ask for the TPU VM in the queue, wait for its turn, and until it is READY.

    Raises:
        StepFailed: as for :func:`create`.
    """
    say(f"{pod.name}: queueing for {pod.accelerator_type}{' (Spot)' if pod.spot else ''} in {pod.zone}")
    asked = calls.call(gcloud.create_queued(pod, valid_until=valid_until))
    if asked.returncode:
        raise StepFailed(f"{pod.name}: {calls.words(asked)}")
    await_turn(pod, limits)
    return await_ready(pod, limits)


def await_turn(pod: Pod, limits: Limits) -> None:
    """Wait until the queued resource is ACTIVE.

    Raises:
        StepFailed: it never will be, or was not in time.
    """
    changes, patience = _Changes(f"{pod.name} (queue)"), _Patience()
    while True:
        state, why = patience.ask(lambda: calls.queued(pod) or ("gone", "")) or ("unknown", "")
        changes.say(state)
        if state == "ACTIVE":
            return
        if state in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING", "gone"):
            raise StepFailed(f"{pod.name}: the queued resource is {state}{f': {why}' if why else ''}")
        if limits.queue is not None and changes.seconds > limits.queue:
            raise StepFailed(f"{pod.name}: still {state} after {changes.seconds:.0f} s in the queue (QUEUE_WAIT=)")
        time.sleep(limits.poll)


def await_ready(pod: Pod, limits: Limits, failed: Callable[[], str | None] = lambda: None) -> Node:
    """Wait until the TPU VM is READY and HEALTHY.

    Args:
        failed: why it never will be, as soon as that is known.
    Raises:
        StepFailed: it never will be, or was not in time.
    """
    changes, patience = _Changes(pod.name), _Patience()
    while True:
        why = failed()
        if why:
            raise StepFailed(f"{pod.name}: {why}")
        found = patience.ask(lambda: calls.node(pod))
        if found:
            changes.say(str(found))
            if found.ready:
                return found
            if found.state in TAKEN + HALTED:
                raise StepFailed(f"{pod.name} is {found} and will not be READY by itself")
        if changes.seconds > limits.ready:
            raise StepFailed(f"{pod.name} is {found or 'not there'} after {changes.seconds:.0f} s (WAIT= waits longer)")
        time.sleep(limits.poll)


def existing(pod: Pod) -> Node:
    """The TPU VM, READY.

    Raises:
        UserError: there is none. StepFailed: it is not READY.
    """
    found = calls.node(pod)
    if found is None:
        raise UserError(f"no TPU VM {pod.name} in {pod.zone}: 'make pod ACTION=create' makes one")
    if not found.ready:
        raise StepFailed(f"{pod.name} is {found}, not READY")
    return found


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal are not heard inside: what costs money must go first."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def delete(pod: Pod, limits: Limits, *, queued: bool | None = None) -> bool:
    """Delete the TPU VM, and the queued resource that made it; whether there was anything to delete.

    What is still being created cannot be deleted at once: it is tried until the time for READY is over.

    Args:
        queued: whether a queued resource of this name is to go too; None looks whether there is one.
    Raises:
        StepFailed: it is still there, and costs money; the line has the command to type.
    """
    deadline = time.monotonic() + limits.ready
    said = False
    while True:
        through_queue = bool(calls.queued(pod)) if queued is None else queued
        command = gcloud.delete_queued(pod) if through_queue else gcloud.delete(pod)
        done = calls.call(command)
        if done.returncode == 0:
            say(f"{pod.name}: deleted")
            return True
        if calls.not_there(done):
            say(f"{pod.name}: there is none (left)")
            return False
        why = calls.words(done)
        if time.monotonic() > deadline or calls.HOPELESS.search(why):
            hand = " ".join(command)
            raise StepFailed(f"{pod.name} could not be deleted, and costs money if it is there: {why}; run: {hand}")
        if not said:
            warn(f"{pod.name} cannot be deleted yet ({why}); trying again")
            said = True
        time.sleep(limits.poll)
