"""The lifecycle of a TPU VM that trains: create, check, train, restart after an interruption, delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainyard.common.errors import StepFailed
from trainyard_jobs.pods import provisioning
from trainyard_jobs.pods.api import Node
from trainyard_jobs.pods.provisioning import ignore_signals
from trainyard_jobs.pods.run import Interruption, Run, Show, TrainingVm
from trainyard_jobs.pods.ssh import Workers, plural

logger = logging.getLogger(__name__)


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

    vm: TrainingVm
    run: Run
    show: Callable[[tuple[str, ...]], Show]
    queue: bool = False
    valid_until: str | None = None
    keep: bool = False
    may_create: bool = True
    others: Sequence[TrainingVm] = ()
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
                logger.info(f"{self.vm.pod.name}: stopping the containers")
                self.vm.stop(self._workers, self.run.container)
            if self._created and self.keep:
                name = self.vm.pod.name
                logger.info(f"{name} is kept and billed until 'trainyard pod --action delete --name {name}'")
            elif self._created:
                logger.info(f"{self.vm.pod.name}: deleting it; Ctrl-C is ignored until it is deleted")
                try:
                    self.vm.delete(queued=self.queue)
                except StepFailed as error:
                    if not failed:
                        raise
                    logger.warning(str(error))

    def _run_once(self) -> int | Interruption:
        """Run until the containers end or the run is interrupted, whatever state the TPU VM is in."""
        try:
            node = self._ready_node()
            workers = self.vm.connect(node)
            self.vm.check_network(workers)
            self.vm.remove_previous(workers, self.run.container)
            self._workers = workers  # from here on, containers on the workers were started by this controller
            self.vm.start(workers, self.run)
        except StepFailed:
            # A preemption can happen during any of these steps, and then is what made the step fail.
            found = self.vm.interruption() if self._created and self.vm.node() else None
            if not found:
                raise
            return found
        logger.info(f"{self.vm.pod.name}: training on {plural(len(workers), 'worker')}")
        outcome = self.vm.watch(workers, self.show(workers.addresses), self.run.container)
        if isinstance(outcome, int):
            self._workers = None
        return outcome

    def _use_zone_of_existing(self) -> None:
        """Before anything is created: use the zone that has a TPU VM of this name."""
        zones = [self.vm, *self.others]
        for number, vm in enumerate(zones):
            if vm.node():
                self.vm, self.others = vm, [*zones[number + 1 :], *zones[:number]]
                return

    def _use_next_zone(self) -> None:
        """Delete what is left in this zone, and use the next one."""
        self.vm.delete(queued=self.queue)
        following, *rest = self.others
        self.vm, self.others = following, [*rest, self.vm]

    def _ready_node(self) -> Node:
        if self.others and not self._created:
            self._use_zone_of_existing()
        if self.vm.node():
            if not self._created and not self.restarts:
                logger.info(f"{self.vm.pod.name} exists: it is used as it is and not deleted at the end")
            return self.vm.await_ready()
        if not self.may_create:
            return self.vm.require_ready()
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
                    return self.vm.create_queued(self.valid_until)
                return self.vm.create()
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
                if self.vm.limits.queue is not None and time.monotonic() - begin > self.vm.limits.queue:
                    raise
                logger.warning(f"{error}; retrying")
            time.sleep(6 * self.vm.limits.poll)
            if self.others:
                untried = len(self.others)
                self._use_next_zone()

    def _prepare_restart(self, why: Interruption) -> None:
        """Delete a preempted TPU VM, or stop the containers of one that stays.

        Raises:
            StepFailed: the limit of restarts is reached, or the TPU VM was not created here.
        """
        self.restarts += 1
        event = f"{self.vm.pod.name} {why.value}"
        if self.restarts > self.vm.limits.restarts:
            raise StepFailed(f"{event} again, after {self.vm.limits.restarts} restarts ('--restarts' sets the limit)")
        count = f"({self.restarts} of {self.vm.limits.restarts})"
        if why is not Interruption.PREEMPTED:
            logger.warning(f"{event}: restarting when it is healthy {count}")
            if self._workers:
                self.vm.stop(self._workers, self.run.container)
            return
        self._workers = None
        if not self._created:
            fix = "delete it and create it again, or let 'trainyard pod' do both"
            raise StepFailed(f"{event} and was not created by this command: {fix}")
        logger.warning(f"{event}: creating it again {count}")
        self.vm.delete(queued=self.queue)
