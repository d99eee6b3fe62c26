"""The lifecycle of a TPU VM that trains: create, check, train, restart after an interruption, delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainyard.common.errors import StepFailed
from trainyard_jobs.pods import provisioning, ssh
from trainyard_jobs.pods import run as training
from trainyard_jobs.pods.api import Node, TpuApi
from trainyard_jobs.pods.gcloud_args import Pod
from trainyard_jobs.pods.provisioning import Limits, ignore_signals
from trainyard_jobs.pods.run import Interruption, Run, Show
from trainyard_jobs.pods.ssh import Workers, plural

logger = logging.getLogger(__name__)


class Operations:
    """Act on a TPU VM and its workers through gcloud and ssh. All methods raise StepFailed if they fail."""

    def __init__(self, pod: Pod, limits: Limits, tpu: TpuApi) -> None:
        self._pod, self._limits, self._tpu = pod, limits, tpu

    def node(self) -> Node | None:
        """Return the TPU VM; None if it does not exist."""
        return self._tpu.node(self._pod)

    def require_ready(self) -> Node:
        """Return the TPU VM, which must exist and be READY."""
        return provisioning.require_ready(self._pod, self._tpu)

    def await_ready(self) -> Node:
        """Wait until the TPU VM is READY."""
        return provisioning.await_ready(self._pod, self._limits, self._tpu)

    def create(self) -> Node:
        """Create the TPU VM and wait until it is READY."""
        return provisioning.create(self._pod, self._limits, self._tpu)

    def create_queued(self, valid_until: str | None) -> Node:
        """Create it through a queued resource."""
        return provisioning.create_queued(self._pod, self._limits, self._tpu, valid_until=valid_until)

    def delete(self, *, queued: bool) -> None:
        """Delete the TPU VM, or the queued resource and its TPU VM."""
        provisioning.delete(self._pod, self._limits, self._tpu, queued=queued)

    def connect(self, node: Node) -> Workers:
        """Connect to every worker by ssh."""
        return ssh.connect(self._pod, node, self._tpu)

    def check_network(self, workers: Workers) -> None:
        """Check that every worker reaches every other one."""
        ssh.check_network(workers, seconds=self._limits.check)

    def remove_previous(self, workers: Workers, container: str) -> None:
        """Remove the container of an earlier run."""
        training.remove_previous(workers, container)

    def start(self, workers: Workers, run: Run) -> None:
        """Pull the image and start the containers."""
        training.start(workers, run)

    def watch(self, workers: Workers, show: Show, container: str) -> int | Interruption:
        """Show the logs until the containers have ended or the run is interrupted."""
        return training.watch(workers, self._limits, show, self._tpu, container)

    def stop(self, workers: Workers, container: str) -> None:
        """Stop the containers."""
        training.stop(workers, self._limits, container)

    def interruption(self) -> Interruption | None:
        """Return why the TPU VM cannot go on with a run; None if it can."""
        return training.interruption(self._pod, self._tpu)


@dataclass
class PodController:
    """Trains on a TPU VM from its creation to its deletion.

    Attributes:
        show: given the workers' addresses, returns what prints their log lines.
        queue: create the TPU VM through a queued resource, which is valid for ``valid_until``.
        keep: do not delete it at the end.
        may_create: create the TPU VM if it does not exist.
        others: the same TPU VM in other zones, to create it there if a zone has no capacity.
        restarts: how often the run was restarted so far.
    """

    pod: Pod
    run: Run
    limits: Limits
    operations: Operations
    show: Callable[[tuple[str, ...]], Show]
    queue: bool = False
    valid_until: str | None = None
    keep: bool = False
    may_create: bool = True
    others: Sequence[tuple[Pod, Operations]] = ()
    restarts: int = field(default=0, init=False)
    #: Whether this controller created the TPU VM, and so has to delete it.
    _created: bool = field(default=False, init=False)
    #: Workers on which this controller may have started containers.
    _workers: Workers | None = field(default=None, init=False)

    def execute(self) -> int:
        """Create the TPU VM unless it exists, train until the run ends, and delete the TPU VM if it was created here.

        Returns:
            The exit status of the first worker that failed, or 0.
        Raises:
            UserError, StepFailed: one line.
        """
        try:
            while True:
                outcome = self._run_once()
                if not isinstance(outcome, Interruption):
                    break
                self._prepare_restart(outcome)
        except BaseException:
            self._clean_up(failed=True)
            raise
        self._clean_up(failed=False)
        return outcome

    def _clean_up(self, *, failed: bool) -> None:
        """Delete the TPU VM if it was created here and is not kept; stop the containers of one that stays.

        Args:
            failed: an exception is being raised: another one, of the deletion, becomes a warning.
        """
        with ignore_signals():
            if failed and self._workers and (self.keep or not self._created):
                logger.info(f"{self.pod.name}: stopping the containers")
                self.operations.stop(self._workers, self.run.container)
            if self._created and self.keep:
                delete = f"trainyard pod --action delete --name {self.pod.name}"
                logger.info(f"{self.pod.name} is kept and billed until '{delete}'")
            elif self._created:
                logger.info(f"{self.pod.name}: deleting it; Ctrl-C is ignored until it is deleted")
                try:
                    self.operations.delete(queued=self.queue)
                except StepFailed as error:
                    if not failed:
                        raise
                    logger.warning(str(error))

    def _run_once(self) -> int | Interruption:
        """Run until the containers end or the run is interrupted, whatever state the TPU VM is in."""
        try:
            node = self._ready_node()
            workers = self.operations.connect(node)
            self.operations.check_network(workers)
            self.operations.remove_previous(workers, self.run.container)
            self._workers = workers  # from here on, containers on the workers were started by this controller
            self.operations.start(workers, self.run)
        except StepFailed:
            # A preemption can happen during any of these steps, and then is what made the step fail.
            found = self.operations.interruption() if self._created and self.operations.node() else None
            if not found:
                raise
            return found
        logger.info(f"{self.pod.name}: training on {plural(len(workers), 'worker')}")
        outcome = self.operations.watch(workers, self.show(workers.addresses), self.run.container)
        if isinstance(outcome, int):
            self._workers = None
        return outcome

    def _use_zone_of_existing(self) -> None:
        """Before anything is created: use the zone that has a TPU VM of this name."""
        zones = self._zones()
        for number, (pod, operations) in enumerate(zones):
            if operations.node():
                self.pod, self.operations = pod, operations
                self.others = [*zones[number + 1 :], *zones[:number]]
                return

    def _zones(self) -> list[tuple[Pod, Operations]]:
        return [(self.pod, self.operations), *self.others]

    def _use_next_zone(self) -> None:
        """Delete what is left in this zone, and use the next one."""
        self.operations.delete(queued=self.queue)
        current, (self.pod, self.operations), *rest = self._zones()
        self.others = [*rest, current]

    def _ready_node(self) -> Node:
        if self.others and not self._created:
            self._use_zone_of_existing()
        if self.operations.node():
            if not self._created and not self.restarts:
                logger.info(f"{self.pod.name} exists: it is used as it is and not deleted at the end")
            return self.operations.await_ready()
        if not self.may_create:
            return self.operations.require_ready()
        self._created = True
        try:
            return self._create_with_capacity()
        except StepFailed as error:
            if "already exists" in str(error):  # created by another process since node() was called
                self._created = False
            raise

    def _create_with_capacity(self) -> Node:
        """Create the TPU VM in the first zone that has capacity.

        After a preemption there often is no capacity at first, so that all zones are tried again then.
        """
        begin = time.monotonic()
        untried = len(self.others)
        while True:
            try:
                if self.queue:
                    return self.operations.create_queued(self.valid_until)
                return self.operations.create()
            except StepFailed as error:
                if not provisioning.is_no_capacity(error):
                    raise
                if untried:
                    untried -= 1
                    logger.warning(f"{error}; trying the next zone")
                    self._use_next_zone()
                    continue
                if self.queue:
                    raise
                if not self.restarts:
                    raise StepFailed(f"{error} ('--queued' waits for capacity)") from None
                if self.limits.queue is not None and time.monotonic() - begin > self.limits.queue:
                    raise
                logger.warning(f"{error}; retrying")
            time.sleep(6 * self.limits.poll)
            if self.others:
                untried = len(self.others)
                self._use_next_zone()

    def _prepare_restart(self, why: Interruption) -> None:
        """Delete a preempted TPU VM, or stop the containers of one that stays.

        Raises:
            StepFailed: the limit of restarts is reached, or the TPU VM was not created here.
        """
        self.restarts += 1
        event = f"{self.pod.name} {why.value}"
        if self.restarts > self.limits.restarts:
            option = "'--restarts'"
            raise StepFailed(f"{event} again, after {self.limits.restarts} restarts ({option} sets the limit)")
        count = f"({self.restarts} of {self.limits.restarts})"
        if why is not Interruption.PREEMPTED:
            logger.warning(f"{event}: restarting when it is healthy {count}")
            if self._workers:
                self.operations.stop(self._workers, self.run.container)
            return
        self._workers = None
        if not self._created:
            raise StepFailed(
                f"{event} and was not created by this command: delete it and create it again, or let "
                f"'trainyard pod' do both"
            )
        logger.warning(f"{event}: creating it again {count}")
        self.operations.delete(queued=self.queue)
