"""What the controller of a pod decides: gcloud, ssh and the workers are fakes here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from trainyard.common.errors import StepFailed
from trainyard.common.gcloud import Finished
from trainyard_jobs.pods.api import Node, TpuApi
from trainyard_jobs.pods.controller import PodController
from trainyard_jobs.pods.gcloud_args import Pod
from trainyard_jobs.pods.logs import Follower
from trainyard_jobs.pods.provisioning import Limits
from trainyard_jobs.pods.run import Interruption, Run, Show, TrainingVm
from trainyard_jobs.pods.ssh import Workers

POD = Pod("run1", "z", "v4-16", "v")
READY = Node("READY", "HEALTHY", ("10.0.0.1", "10.0.0.2"), "v4-16")
LIMITS = Limits(poll=0, grace=0, restarts=2)
Outcome = int | Interruption | BaseException


class FakeVm(TrainingVm):
    """A TPU VM that is a variable.

    Attributes:
        existing: the TPU VM.
        done: names of the operations in their order, but for those that only read.
        errors: name of an operation -> errors of its next calls; None lets a call succeed.
        outcomes: of the next runs.
    """

    def __init__(self, zone: str = POD.zone) -> None:
        super().__init__(replace(POD, zone=zone), LIMITS, TpuApi())
        self.existing: Node | None = None
        self.done: list[str] = []
        self.errors: dict[str, list[str | None]] = {}
        self.outcomes: Iterator[Outcome] = iter([0])

    def _do(self, name: str) -> None:
        self.done.append(name)
        errors = self.errors.get(name)
        error = errors.pop(0) if errors else None
        if error:
            raise StepFailed(error)

    def node(self) -> Node | None:
        return self.existing

    def require_ready(self) -> Node:
        assert self.existing
        return self.existing

    def await_ready(self) -> Node:
        return self.require_ready()

    def create(self) -> Node:
        self._do("create")
        self.existing = READY
        return READY

    def create_queued(self, valid_until: str | None) -> Node:
        return self.create()

    def delete(self, *, queued: bool) -> None:
        self._do("delete")
        self.existing = None

    def connect(self, node: Node) -> Workers:
        return Workers(POD, [["ssh"]] * 2, node.addresses)

    def check_network(self, workers: Workers) -> None:
        self._do("check")

    def remove_previous(self, workers: Workers, container: str) -> None:
        self._do("clear")

    def start(self, workers: Workers, run: Run) -> None:
        self._do("start")

    def watch(self, workers: Workers, show: Show, container: str) -> int | Interruption:
        self._do("watch")
        outcome = next(self.outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def stop(self, workers: Workers, container: str) -> None:
        self._do("stop")

    def interruption(self) -> Interruption | None:
        return None


@pytest.fixture
def cloud() -> FakeVm:
    return FakeVm()


def execute(cloud: FakeVm, *outcomes: Outcome, **options: bool) -> int:
    """The exit status of a controller whose runs have these outcomes."""
    cloud.outcomes = iter(outcomes)
    return PodController(cloud, Run("image"), lambda addresses: lambda worker, line: None, **options).execute()


ONCE = ["create", "check", "clear", "start", "watch"]


def test_a_run_returns_its_status_and_deletes_the_pod(cloud: FakeVm) -> None:
    assert execute(cloud, 7) == 7
    assert cloud.done == [*ONCE, "delete"]


def test_a_preempted_pod_is_created_again_up_to_the_limit_of_restarts(cloud: FakeVm) -> None:
    assert execute(cloud, Interruption.PREEMPTED, 0) == 0
    assert cloud.done == [*ONCE, "delete", *ONCE, "delete"]
    with pytest.raises(StepFailed, match=r"was preempted again, after 2 restarts"):
        execute(cloud, *[Interruption.PREEMPTED] * 3)
    assert cloud.existing is None


@pytest.mark.parametrize("why", [Interruption.MAINTENANCE, Interruption.RETRY])
def test_a_pod_that_was_not_preempted_restarts_its_containers(cloud: FakeVm, why: Interruption) -> None:
    assert execute(cloud, why, 0) == 0
    assert cloud.done == [*ONCE, "stop", *ONCE[1:], "delete"]


def test_a_pod_that_exists_is_neither_created_nor_deleted(cloud: FakeVm) -> None:
    cloud.existing = READY
    assert execute(cloud, 0) == 0
    assert cloud.done == ONCE[1:]
    with pytest.raises(StepFailed, match="was preempted and was not created by this command"):
        execute(cloud, Interruption.PREEMPTED)
    assert "delete" not in cloud.done


def test_a_pod_that_another_process_created_meanwhile_is_not_deleted(cloud: FakeVm) -> None:
    cloud.errors["create"] = ["run1: ALREADY_EXISTS: Resource 'run1' already exists."]
    with pytest.raises(StepFailed, match="already exists"):
        execute(cloud, 0)
    assert cloud.done == ["create"]


def test_creation_waits_for_capacity_only_after_a_preemption(cloud: FakeVm) -> None:
    no_capacity = "run1: There is no more capacity in the zone"
    cloud.errors["create"] = [no_capacity]
    with pytest.raises(StepFailed, match="'--queued' waits for capacity"):
        execute(cloud, 0)
    assert cloud.done == ["create", "delete"]
    cloud.done, cloud.errors["create"] = [], [None, no_capacity, no_capacity]
    assert execute(cloud, Interruption.PREEMPTED, 0) == 0
    assert cloud.done.count("create") == 4


def test_ctrl_c_deletes_a_created_pod_and_stops_the_containers_of_a_kept_one(cloud: FakeVm) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(cloud, KeyboardInterrupt())
    assert cloud.done == [*ONCE, "delete"]
    cloud.done = []
    with pytest.raises(KeyboardInterrupt):
        execute(cloud, KeyboardInterrupt(), keep=True)
    assert cloud.done == [*ONCE, "stop"]


def test_containers_of_another_run_are_not_stopped(cloud: FakeVm) -> None:
    cloud.existing = READY
    cloud.errors["clear"] = ["run1: a container 'trainyard' is already running"]
    with pytest.raises(StepFailed, match="is already running"):
        execute(cloud, 0)
    assert cloud.done == ["check", "clear"]


def test_a_failed_deletion_is_a_warning_after_another_failure_and_an_error_after_none(
    cloud: FakeVm, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.errors = {"create": ["run1: PERMISSION_DENIED: create"], "delete": ["run1 could not be deleted"] * 2}
    with pytest.raises(StepFailed, match="run1: PERMISSION_DENIED: create"):
        execute(cloud, 0)
    assert "run1 could not be deleted" in capsys.readouterr().err
    with pytest.raises(StepFailed, match="run1 could not be deleted"):
        execute(cloud, 0)


# --- states of the Cloud TPU API -------------------------------------------------------------------------------------


class FakeGcloud(TpuApi):
    """gcloud that describes these TPU VMs and queued resources, one after the other; the last one repeats."""

    def __init__(self, *nodes: Node | None, queued: Sequence[tuple[str, str] | str] = ()) -> None:
        self._nodes, self._queued = list(nodes), list(queued)
        self.polls = 0

    def call(self, command: Sequence[str], *, timeout: float | None = None) -> Finished:
        if "describe" not in command:
            return Finished([], 1, "", "ERROR: (gcloud.x) PERMISSION_DENIED: no")
        self.polls += 1
        found: dict[str, object]
        if "queued-resources" in command:
            answer = (self._queued.pop(0) if len(self._queued) > 1 else self._queued[0]) if self._queued else None
            if isinstance(answer, str):
                return Finished([], 1, "", f"ERROR: (gcloud.x) {answer}")
            if answer is None:
                return Finished([], 1, "", "ERROR: (gcloud.x) NOT_FOUND")
            found = {"state": {"state": answer[0], "failedData": {"error": {"message": answer[1]}}}}
        else:
            node = self._nodes.pop(0) if len(self._nodes) > 1 else self._nodes[0]
            if node is None:
                return Finished([], 1, "", "ERROR: (gcloud.x) NOT_FOUND")
            endpoints = [{"ipAddress": address} for address in node.addresses]
            found = {"state": node.state, "health": node.health, "networkEndpoints": endpoints}
        return Finished([], 0, json.dumps(found), "")


def vm(*nodes: Node | None, queued: Sequence[tuple[str, str] | str] = ()) -> TrainingVm:
    return TrainingVm(POD, LIMITS, FakeGcloud(*nodes, queued=queued))


def test_stopped_containers_mean_a_preemption_if_the_api_reports_it_soon_after() -> None:
    preempted = replace(READY, state="PREEMPTED")
    assert vm(READY, READY, preempted).outcome_of(143) is Interruption.PREEMPTED
    assert vm(READY).outcome_of(143) == 143
    assert vm(preempted).outcome_of(1) == 1, "a failure of the trainer itself"


def test_a_retryable_exit_status_of_the_launcher_restarts_the_run() -> None:
    assert vm(READY).outcome_of(138) is Interruption.RETRY


@pytest.mark.parametrize("node", [None, replace(READY, state="STOPPED")])
def test_a_pod_that_was_stopped_or_deleted_by_hand_is_not_a_preemption(node: Node | None) -> None:
    with pytest.raises(StepFailed, match="deleted during the run"):
        vm(node).outcome_of(143)


def test_a_suspended_queued_resource_is_a_preemption() -> None:
    assert vm(None, queued=[("SUSPENDED", "")]).interruption() is Interruption.PREEMPTED


def test_a_pod_that_is_not_ready_in_time_fails_with_the_name_of_the_limit() -> None:
    with pytest.raises(StepFailed, match=r"run1 is CREATING after 0 s \('--wait' sets the limit\)"):
        TrainingVm(POD, replace(LIMITS, ready=-1), FakeGcloud(replace(READY, state="CREATING"))).await_ready()
    with pytest.raises(StepFailed, match="run1 is STOPPED and will not become READY by itself"):
        vm(replace(READY, state="STOPPED")).await_ready()


def test_a_queued_resource_that_failed_is_reported_with_its_error() -> None:
    with pytest.raises(StepFailed, match="run1: the queued resource is FAILED: the interval expired"):
        vm(queued=[("FAILED", "the interval expired")]).await_active()


def test_polling_a_queued_resource_survives_ten_failures_in_a_row_but_no_permanent_error() -> None:
    vm(queued=["UNAVAILABLE"] * 10 + [("ACTIVE", "")]).await_active()
    for error, polls in (("UNAVAILABLE", 11), ("PERMISSION_DENIED", 1)):
        gcloud = FakeGcloud(queued=[error])
        with pytest.raises(StepFailed, match=error):
            TrainingVm(POD, LIMITS, gcloud).await_active()
        assert gcloud.polls == polls


def test_a_pod_that_cannot_be_deleted_is_reported_with_the_command_to_run() -> None:
    line = "is billed if it exists: PERMISSION_DENIED: no; run: gcloud compute tpus tpu-vm delete run1"
    with pytest.raises(StepFailed, match=line):
        vm(READY).delete(queued=False)


# --- following a log over lost connections -------------------------------------------------------------------------


class Shells(Workers):
    """Workers whose ssh commands run these shell scripts here, one after the other.

    Attributes:
        requested: the scripts that they should have run.
    """

    requested: list[str]

    def __init__(self, *scripts: str) -> None:
        super().__init__(POD, [["ssh"]], ("10.0.0.1",))
        object.__setattr__(self, "requested", [])
        object.__setattr__(self, "_scripts", iter(scripts))

    def command(self, worker: int, script: str) -> list[str]:
        self.requested.append(script)
        return ["sh", "-c", next(self._scripts)]  # type: ignore[attr-defined]


def followed(*scripts: str) -> tuple[int | None, list[str], list[str]]:
    """The container's exit status, the lines shown, and the scripts that the worker should have run."""
    workers = Shells(*scripts)
    lines: list[str] = []
    changed = threading.Event()
    follower = Follower(workers, 0, "c", lambda worker, line: lines.append(line), changed, reconnect_interval=0)
    follower.join(20)
    assert changed.is_set()
    return follower.code, lines, workers.requested


def test_a_line_that_was_cut_off_is_shown_once_and_completely() -> None:
    code, lines, requested = followed(
        "printf 'a\\nb\\npart'; exit 255", "echo true 0", "printf 'partial\\nlast'; exit 3"
    )
    assert (code, lines) == (3, ["a", "b", "partial", "last"])
    assert "sed -u 1,2d" in requested[2]


def test_lines_of_a_container_that_ended_meanwhile_are_shown() -> None:
    code, lines, _ = followed("exit 255", "echo false 0", "echo late; exit 0")
    assert (code, lines) == (0, ["late"])


def test_exit_status_255_of_a_container_is_not_a_lost_connection() -> None:
    code, lines, _ = followed("echo a; exit 255", "echo false 255", "exit 255")
    assert (code, lines) == (255, ["a"])


def test_a_worker_that_does_not_answer_is_retried() -> None:
    code, lines, _ = followed("exit 255", "exit 255", "echo a; exit 0")
    assert (code, lines) == (0, ["a"])


def test_a_closed_stdout_ends_the_watch() -> None:
    def broken(worker: int, line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        vm(READY).watch(Shells("echo a; exec sleep 30"), broken)


# --- several zones ---------------------------------------------------------------------------------------------------


class FakeZones:
    """The same TPU VM in three zones, and the order in which they were used."""

    def __init__(self) -> None:
        self.zones = {name: FakeVm(name) for name in ("a", "b", "c")}

    def execute(self, *outcomes: Outcome, queue: bool = False) -> tuple[int, str]:
        """The exit status, and the zone of the last run."""
        iterator = iter(outcomes)
        for one in self.zones.values():
            one.outcomes = iterator
        first, *others = self.zones.values()
        show = lambda addresses: lambda worker, line: None  # noqa: E731
        controller = PodController(first, Run("image"), show, queue=queue, others=others)
        return controller.execute(), controller.vm.pod.zone


STOCK_OUT = "run1: There is no more capacity in the zone"


@pytest.mark.parametrize(
    "error", [STOCK_OUT, "run1: still WAITING after 60 s in the queue ('--queue-wait' sets the limit)"]
)
def test_the_first_zone_with_capacity_trains_and_nothing_is_left_in_the_others(error: str) -> None:
    cloud = FakeZones()
    cloud.zones["a"].errors = {"create": [error]}
    assert cloud.execute(0, queue="queue" in error) == (0, "b")
    assert cloud.zones["a"].done == ["create", "delete"]
    assert cloud.zones["b"].done == ["create", "check", "clear", "start", "watch", "delete"]
    assert cloud.zones["c"].done == []


def test_other_errors_do_not_move_to_the_next_zone() -> None:
    cloud = FakeZones()
    cloud.zones["a"].errors = {"create": ["run1: PERMISSION_DENIED"]}
    with pytest.raises(StepFailed, match="PERMISSION_DENIED"):
        cloud.execute(0)
    assert (cloud.zones["b"].done, cloud.zones["c"].done) == ([], [])


def test_without_capacity_in_any_zone_nothing_is_left() -> None:
    cloud = FakeZones()
    for zone in cloud.zones.values():
        zone.errors = {"create": [STOCK_OUT]}
    with pytest.raises(StepFailed, match="'--queued' waits for capacity"):
        cloud.execute(0)
    assert [zone.done for zone in cloud.zones.values()] == [["create", "delete"]] * 3


def test_an_existing_tpu_vm_is_used_in_whichever_zone_it_is() -> None:
    cloud = FakeZones()
    cloud.zones["c"].existing = READY
    assert cloud.execute(0) == (0, "c")
    assert "create" not in [word for zone in cloud.zones.values() for word in zone.done]


def test_after_a_preemption_every_zone_is_tried_until_one_has_capacity() -> None:
    cloud = FakeZones()
    cloud.zones["a"].errors = {"create": [None, STOCK_OUT, STOCK_OUT]}
    cloud.zones["b"].errors = {"create": [STOCK_OUT, STOCK_OUT]}
    cloud.zones["c"].errors = {"create": [STOCK_OUT]}
    assert cloud.execute(Interruption.PREEMPTED, 0) == (0, "c")
    assert all(zone.done[-1] == "delete" for zone in cloud.zones.values()), "nothing is left anywhere"
