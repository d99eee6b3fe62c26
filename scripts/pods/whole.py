"""The whole life of a pod: created, checked, training, taken away, created again, deleted at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from scripts.cli import StepFailed, say, warn
from scripts.pods import calls
from scripts.pods.calls import Node
from scripts.pods.gcloud import Pod
from scripts.pods.life import Limits, await_ready, create, create_queued, delete, existing, undisturbed
from scripts.pods.training import Interruption, Run, Show, clear, interruption, start, stop, watch
from scripts.pods.workers import Workers, check, connect


@dataclass
class Whole:
    """The whole life of a pod, from create to delete.

    Attributes:
        queue: ask for it in the queue.
        keep: do not delete it at the end.
        may_create: False: it must be there.
        restarts: how often it started again so far.
    """

    pod: Pod
    run: Run
    limits: Limits
    show: Callable[[tuple[str, ...]], Show]
    queue: bool = False
    valid_until: str | None = None
    keep: bool = False
    may_create: bool = True
    restarts: int = 0
    mine: bool = False
    workers: Workers | None = None

    def live(self) -> int:
        """Create the pod unless it is there, train on it until that is done, and delete it if it was created here.

        Returns:
            the exit status of the first worker that failed, or 0.
        Raises:
            UserError, StepFailed: one line.
        """
        try:
            while True:
                outcome = self._once()
                if not isinstance(outcome, Interruption):
                    break
                self._recover(outcome)
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)
        return outcome

    def _end(self, *, failed: bool) -> None:
        """Leave behind what should be: nothing, or a kept pod without a container that runs.

        Raises:
            StepFailed: the pod could not be deleted; said in a warning instead if something else had ``failed``.
        """
        with undisturbed():
            if failed and self.workers and (self.keep or not self.mine):
                say(f"{self.pod.name}: stopping the containers")
                stop(self.workers, self.limits, self.run.container)
            if self.mine and self.keep:
                say(f"{self.pod.name} is kept, and costs money until 'make pod ACTION=delete NAME={self.pod.name}'")
            elif self.mine:
                say(f"{self.pod.name}: deleting it; Ctrl-C is not heard until that is done")
                try:
                    delete(self.pod, self.limits, queued=self.queue)
                except StepFailed as error:
                    if not failed:
                        raise
                    warn(str(error))

    def _once(self) -> int | Interruption:
        """From a pod in whatever state to the end of the training, or to what interrupts it."""
        try:
            node = self._ready()
            workers = connect(self.pod, node)
            check(workers, seconds=self.limits.check)
            clear(workers, self.run.container)
            self.workers = workers  # from here on, the containers are ours to stop
            start(workers, self.run)
        except StepFailed:
            # A pod can be taken at any moment; then it is not the step that failed.
            found = interruption(self.pod) if self.mine and calls.node(self.pod) else None
            if not found:
                raise
            return found
        say(f"{self.pod.name}: training on {len(workers)} worker{'s' if len(workers) > 1 else ''}")
        outcome = watch(workers, self.limits, self.show(workers.addresses), self.run.container)
        if isinstance(outcome, int):
            self.workers = None
        return outcome

    def _ready(self) -> Node:
        found = calls.node(self.pod)
        if found:
            if not self.mine and not self.restarts:
                say(f"{self.pod.name} is there already: it is used as it is, and not deleted at the end")
            return await_ready(self.pod, self.limits)
        if not self.may_create:
            return existing(self.pod)
        self.mine = True
        try:
            if self.queue:
                return create_queued(self.pod, self.limits, valid_until=self.valid_until)
            return self._created()
        except StepFailed as error:
            if "already exists" in str(error):  # somebody else's, made in between: not ours to delete
                self.mine = False
            raise

    def _created(self) -> Node:
        """A new TPU VM. Whoever was preempted finds no capacity at first, and waits for it as a queue would."""
        begin = time.monotonic()
        while True:
            try:
                return create(self.pod, self.limits)
            except StepFailed as error:
                if "no more capacity" not in str(error):
                    raise
                if not self.restarts:
                    raise StepFailed(f"{error} (QUEUED=1 waits for capacity)") from None
                if self.limits.queue is not None and time.monotonic() - begin > self.limits.queue:
                    raise
                warn(f"{error}; trying again")
            time.sleep(6 * self.limits.poll)

    def _recover(self, why: Interruption) -> None:
        """Make ready for another start.

        Raises:
            StepFailed: there were enough of them, or the pod is not ours to create again.
        """
        self.restarts += 1
        words = f"{self.pod.name} {why.value}"
        if self.restarts > self.limits.restarts:
            raise StepFailed(f"{words} again, after {self.limits.restarts} restarts (RESTARTS= allows more)")
        again = f"({self.restarts} of {self.limits.restarts})"
        if why is not Interruption.TAKEN:
            warn(f"{words}: starting again as soon as it is healthy {again}")
            if self.workers:
                stop(self.workers, self.limits, self.run.container)
            return
        self.workers = None
        if not self.mine:
            raise StepFailed(
                f"{words}, and was not created here: delete it and create it again ('make pod' does all of it)"
            )
        warn(f"{words}: creating it again {again}")
        delete(self.pod, self.limits, queued=self.queue)
