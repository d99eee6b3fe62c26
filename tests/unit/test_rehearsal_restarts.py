"""Restart policies follow the platforms' documentation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rehearsing import rehearsal_of

from trainyard.common.errors import UserError
from trainyard_jobs.rehearsal import faults
from trainyard_jobs.rehearsal.model import End, Policy, Replica
from trainyard_jobs.rehearsal.progress import Progress
from trainyard_jobs.rehearsal.restart_policy import Kubernetes, PodFailurePolicy, TrainingService

CHIEF = Replica("chief", "h0", "chief", 0, "i", group="j-0")
WORKER = Replica("worker-0", "h1", "worker", 1, "i", group="j-0")


def after(
    policy: Policy,
    replica: Replica,
    status: int,
    cause: str = "exit",
    restarts: int = 0,
    job_restarts: int = 0,
    others: Mapping[str, int | None] | None = None,
) -> str:
    given = {"chief": None, "worker-0": None} if others is None else dict(others)
    given.pop(replica.name, None)
    return policy.after(End(replica, status, cause, restarts, job_restarts, given)).action


# --- Vertex AI ------------------------------------------------------------------------------------

VERTEX = TrainingService(primary=("chief",))


@pytest.mark.parametrize(
    ("replica", "status", "cause", "restarts", "job_restarts", "action"),
    [
        (CHIEF, 0, "exit", 0, 0, "succeeded"),
        (WORKER, 0, "exit", 0, 0, "wait"),
        (WORKER, 1, "exit", 0, 0, "failed"),
        (CHIEF, 127, "exit", 0, 0, "failed"),
        (WORKER, 134, "exit", 0, 0, "restart"),
        (WORKER, 143, "preempted", 0, 0, "restart"),
        (WORKER, 1, "preempted", 0, 0, "restart"),  # a preempted machine is not an error of the program
        (CHIEF, 137, "killed", 4, 0, "restart"),
        (WORKER, 143, "exit", 5, 0, "restart-job"),
        (WORKER, 143, "exit", 5, 2, "restart-job"),
        (WORKER, 143, "exit", 5, 3, "failed"),
    ],
)
def test_vertex_restarts_a_worker_5_times_and_then_the_job_3_times(
    replica: Replica, status: int, cause: str, restarts: int, job_restarts: int, action: str
) -> None:
    assert after(VERTEX, replica, status, cause, restarts, job_restarts) == action


def test_restart_job_on_worker_restart_restarts_all_replicas() -> None:
    policy = TrainingService(primary=("chief",), restart_job=True)
    assert after(policy, WORKER, 137, "killed") == "restart-job"
    assert after(policy, WORKER, 1, "exit") == "failed"


def test_a_failure_without_restart_job_on_worker_restart_comes_with_advice() -> None:
    verdict = VERTEX.after(End(CHIEF, 1, "exit", 0, 0, {"worker-0": None}))
    assert "restartJobOnWorkerRestart" in verdict.advice


def test_the_hosts_of_a_slice_restart_together_and_must_all_succeed() -> None:
    policy = TrainingService(primary=("chief", "worker-0"), restart_together=True)
    assert after(policy, WORKER, 143, "preempted") == "restart-job"
    assert after(policy, CHIEF, 0, others={"worker-0": None}) == "wait"
    assert after(policy, CHIEF, 0, others={"worker-0": 0}) == "succeeded"


@pytest.mark.parametrize(
    ("scheduling", "restarts", "action"),
    [
        ("{}", 0, "restart"),
        ("{restartJobOnWorkerRestart: true}", 0, "restart-job"),
        ("{restartJobOnWorkerRestart: true, disableRetries: true}", 0, "restart"),
        ("{disableRetries: true}", 5, "failed"),
        ("{}", 5, "restart-job"),
    ],
)
def test_scheduling_decides_whether_a_job_is_retried_or_restarted(
    tmp_path: Path, scheduling: str, restarts: int, action: str
) -> None:
    pool = "{replicaCount: 1, machineSpec: {machineType: n1-standard-4}, containerSpec: {imageUri: i}}"
    found = rehearsal_of(tmp_path, f"workerPoolSpecs: [{pool}, {pool}]\nscheduling: {scheduling}")
    assert after(found.policy, WORKER, 143, "preempted", restarts) == action


# --- Kubernetes ------------------------------------------------------------------------------------------------


def job(limit: int, rules: list[dict[str, Any]] | None = None, jobset: dict[str, Any] | None = None) -> Kubernetes:
    return Kubernetes({"j-0": PodFailurePolicy(limit, tuple(rules or ()))}, jobset, {"j-0": "j"})


def test_a_job_replaces_pods_up_to_its_backoff_limit() -> None:
    policy = job(2)
    assert [after(policy, WORKER, 1) for _ in range(3)] == ["restart", "restart", "failed"]


def test_all_pods_must_complete() -> None:
    policy = job(0)
    assert after(policy, CHIEF, 0) == "wait"
    assert after(policy, WORKER, 0, others={"chief": 0}) == "succeeded"


@pytest.mark.parametrize(
    ("rule", "status", "cause", "action"),
    [
        ({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}, 143, "preempted", "restart"),
        ({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}, 137, "killed", "failed"),
        ({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}, 42, "exit", "failed"),
        ({"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [42]}}, 1, "exit", "restart"),
        ({"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [42]}}, 42, "exit", "failed"),
    ],
)
def test_the_pod_failure_policy_decides_first(rule: dict[str, Any], status: int, cause: str, action: str) -> None:
    assert after(job(0, [rule]), WORKER, status, cause) == action


@pytest.mark.parametrize(
    ("failure_policy", "actions"),
    [
        ({}, ["failed"]),
        ({"maxRestarts": 2}, ["restart-job", "restart-job", "failed"]),
        ({"maxRestarts": 2, "rules": [{"action": "FailJobSet"}]}, ["failed"]),
        (
            {
                "maxRestarts": 0,
                "rules": [{"action": "RestartJobSetAndIgnoreMaxRestarts", "targetReplicatedJobs": ["j"]}],
            },
            ["restart-job"] * 3,
        ),
        ({"maxRestarts": 1, "rules": [{"action": "FailJobSet", "targetReplicatedJobs": ["other"]}]}, ["restart-job"]),
        (
            {"maxRestarts": 1, "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}]},
            ["failed"],
        ),
    ],
)
def test_the_failure_policy_of_a_jobset(failure_policy: dict[str, Any], actions: list[str]) -> None:
    policy = job(0, jobset=failure_policy)
    assert [after(policy, WORKER, 1, job_restarts=number) for number in range(len(actions))] == actions


def test_success_policy_any_ends_the_jobset_with_its_first_job() -> None:
    policy = Kubernetes(
        {"a-0": PodFailurePolicy(), "b-0": PodFailurePolicy()},
        {},
        {"a-0": "a", "b-0": "b"},
        {"operator": "Any", "targetReplicatedJobs": ["a"]},
    )
    leader, other = Replica("a", "h", "chief", 0, "i", group="a-0"), Replica("b", "h", "worker", 1, "i", group="b-0")
    assert after(policy, other, 0, others={"a": None}) == "wait"
    assert after(policy, leader, 0, others={"b": None}) == "succeeded"


# --- what the user lets go wrong -------------------------------------------------------------------------------

LINE = "| Training Device=cpu/0 Epoch={epoch} Step={step} Loss=2.1 Rate=9.5 GlobalRate=9.5 Time=00:00:00"


def progress(*points: tuple[int, int]) -> Progress:
    found = Progress()
    for epoch, step in points:
        found.add(LINE.format(epoch=epoch, step=step), 0.0)
    return found


@pytest.mark.parametrize(
    ("when", "points", "due"),
    [
        ("", [], False),
        ("", [(1, 0)], True),
        ("@step20", [(1, 19)], False),
        ("@step20", [(1, 20)], True),
        ("@step20", [(1, 15), (2, 0)], False),
        ("@step20", [(1, 15), (2, 5)], True),  # 16 steps of the first epoch, and 5
        ("@epoch2", [(1, 99)], False),
        ("@epoch2", [(1, 99), (2, 0)], True),
        ("@epoch2:step5", [(2, 4)], False),
        ("@epoch2:step5", [(3, 0)], True),
    ],
)
def test_moments_are_those_of_the_log(when: str, points: list[tuple[int, int]], due: bool) -> None:
    (fault,) = faults.parse("preempt", f"worker-0{when}", [CHIEF, WORKER])
    assert fault.due(progress(*points), 5.0) is due


def test_moments_may_be_seconds_or_a_text_in_the_log() -> None:
    seconds, text = faults.parse("kill", "worker-0@30s,chief@/saved, at last/", [CHIEF, WORKER])
    assert (seconds.due(progress(), 29.0), seconds.due(progress(), 30.0)) == (False, True)
    found = Progress([text.text])
    assert not text.due(found, 99.0)
    found.add("step 5 is saved, at last", 1.0)
    assert text.due(found, 1.0)


def test_the_losses_of_any_code_are_read() -> None:
    found = Progress()
    for seconds, line in enumerate(("iter 0: loss 4.5, time 3 ms", '{"loss": 2.5, "step": 20}', "launch: loss 9")):
        found.add(line, seconds)
    assert found.losses == [(0, 4.5), (1, 2.5)]
    assert [step for _, step, _ in found.curves.points["loss"]][:2] == [0, 20]
    assert found.reached(0, 20)


@pytest.mark.parametrize("line", ["step 20 of 90", "{'global_step': 20}", "Step: 20 loss: 1.5", "iteration Step=20,"])
def test_steps_of_other_trainers_are_understood(line: str) -> None:
    found = Progress()
    found.add(line.replace("'", '"'), 0.0)
    assert found.reached(0, 20) or line.startswith("{")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-9", "no replica 'worker-9' .did you mean 'worker-0'.*chief, worker-0"),
        ("worker-0@step", "'step' is not a moment"),
        ("worker-0@tomorrow", "'tomorrow' is not a moment: write step20"),
    ],
)
def test_invalid_faults_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        faults.parse("preempt", text, [CHIEF, WORKER])


def test_master_is_the_first_replica_everywhere() -> None:
    (fault,) = faults.parse("kill", "master", [CHIEF, WORKER])
    assert fault.targets == ("chief",)


def test_a_slice_is_preempted_as_a_whole_but_a_single_host_can_be_killed() -> None:
    hosts = [Replica(f"host-{index}", f"h{index}", "host", index, "i", slice="s") for index in range(3)]
    assert faults.parse("preempt", "host-1", hosts)[0].targets == ("host-0", "host-1", "host-2")
    assert faults.parse("kill", "host-1", hosts)[0].targets == ("host-1",)


def test_progress_reads_rates_accuracies_resumptions_and_the_summary() -> None:
    found = progress((1, 0))
    found.add("Epoch 1 test end 00:00:01, Accuracy=53.33", 2.0)
    found.add("Resumed from step 58 in gs://b", 3.0)
    assert (found.accuracy, found.rate, found.resumed_from) == (53.33, 9.5, [58])
    found.add('{"event": "summary", "accuracy": 93.9, "images_per_second": 812.5}', 4.0)
    assert (found.accuracy, found.rate) == (93.9, 812.5)
