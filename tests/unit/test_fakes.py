"""The fakes of job services are independent of Trainyard's rules, and refuse what the services refuse."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes import kubernetes, vertex
from tests.fakes.server import ApiError

from trainyard.common.settings import ROOT

#: What judges jobs and builds, or writes them: a fake that uses it would accept its mistakes.
TESTED = (
    "trainyard.lint", "trainyard.common.rule_engine", "trainyard_jobs.check", "trainyard_jobs.kubernetes",
    "trainyard_jobs.model", "trainyard_jobs.platforms", "trainyard_jobs.pods", "trainyard_jobs.rules",
    "trainyard_jobs.schema",
)  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def test_the_check_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def f():\n    from trainyard import lint\n    import a.b\nfrom trainyard_jobs import schema as s\n"
    )
    assert {"trainyard.lint", "a.b", "trainyard_jobs.schema"} <= set(imported(path))


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "fakes").glob("*.py")), ids=lambda path: path.name)
def test_fakes_do_not_import_what_they_test(path: Path) -> None:
    assert [name for name in imported(path) if name.startswith(TESTED)] == []


# --- Vertex AI and AI Platform ---------------------------------------------------------------------------------------

POOL = {"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": "1", "containerSpec": {"imageUri": "i"}}
CUSTOM_JOB: dict[str, Any] = {"displayName": "x", "jobSpec": {"workerPoolSpecs": [POOL]}}
LR = {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.1, "maxValue": 1}}
TUNING_JOB: dict[str, Any] = {
    "displayName": "x",
    "maxTrialCount": 4,
    "parallelTrialCount": 2,
    "studySpec": {"metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}], "parameters": [LR]},
    "trialJobSpec": {"workerPoolSpecs": [POOL]},
}
TRAINING_JOB: dict[str, Any] = {
    "jobId": "x",
    "trainingInput": {"scaleTier": "CUSTOM", "region": "r", "masterType": "m", "masterConfig": {"imageUri": "i"}},
}


def change(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of a document with another value at ``a.0.b``; None removes it."""
    found = node = copy.deepcopy(document)
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        node = node[step]  # type: ignore[index]
    if value is None:
        del node[last]  # type: ignore[arg-type]
    else:
        node[last] = value  # type: ignore[index]
    return found


def fields(judge: Callable[..., None], *arguments: Any) -> list[str]:
    """The fields that a fake refuses; empty if it accepts the job."""
    try:
        judge(*arguments)
    except ApiError as error:
        assert error.status == 400
        return [field for field, _ in error.violations]
    return []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("displayName", None, "displayName"),
        ("displayName", "x" * 129, "displayName"),
        ("jobSpec.workerPoolSpecs.0.machinSpec", {}, "jobSpec.workerPoolSpecs[0].machinSpec"),
        ("jobSpec.workerPoolSpecs.0.replicaCount", "many", "jobSpec.workerPoolSpecs[0].replicaCount"),
        ("jobSpec.workerPoolSpecs.0.replicaCount", "2", "jobSpec.workerPoolSpecs[0].replicaCount"),
        ("jobSpec.workerPoolSpecs.0.containerSpec.imageUri", None, "jobSpec.workerPoolSpecs[0].containerSpec.imageUri"),
        ("jobSpec.workerPoolSpecs.0.containerSpec", None, "jobSpec.workerPoolSpecs[0]"),
        ("jobSpec.workerPoolSpecs.0.machineSpec.acceleratorType", "NVIDIA_T4",
         "jobSpec.workerPoolSpecs[0].machineSpec.acceleratorType"),
        ("jobSpec.workerPoolSpecs.0.machineSpec.acceleratorCount", 1, "jobSpec.workerPoolSpecs[0].machineSpec"),
        ("jobSpec.workerPoolSpecs", [POOL] * 5, "jobSpec.workerPoolSpecs"),
        ("jobSpec.workerPoolSpecs.0", {}, "jobSpec.workerPoolSpecs"),
        ("jobSpec.scheduling", {"timeout": "1h"}, "jobSpec.scheduling.timeout"),
        ("jobSpec.scheduling", {"strategy": "CHEAP"}, "jobSpec.scheduling.strategy"),
        ("jobSpec.baseOutputDirectory", {"outputUriPrefix": "/tmp"}, "jobSpec.baseOutputDirectory.outputUriPrefix"),
        ("jobSpec.tensorboard", "t", "jobSpec.serviceAccount"),
    ],
)  # fmt: skip
def test_the_fake_of_vertex_ai_refuses_custom_jobs(path: str, value: object, field: str) -> None:
    assert fields(vertex.refuse_custom_job, CUSTOM_JOB) == []
    assert field in fields(vertex.refuse_custom_job, change(CUSTOM_JOB, path, value))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("maxTrialCount", 0, "maxTrialCount"),
        ("studySpec.metrics.0.goal", "BEST", "studySpec.metrics[0].goal"),
        ("studySpec.parameters", [LR, LR], "studySpec.parameters[1].parameterId"),
        ("studySpec.parameters.0.discreteValueSpec", {"values": [2, 1]},
         "studySpec.parameters[0].discreteValueSpec.values"),
        ("trialJobSpec.workerPoolSpecs.0.replicaCount", "2", "trialJobSpec.workerPoolSpecs[0].replicaCount"),
    ],
)  # fmt: skip
def test_the_fake_of_vertex_ai_refuses_tuning_jobs(path: str, value: object, field: str) -> None:
    kind = "hyperparameterTuningJobs"
    assert fields(vertex.refuse_custom_job, TUNING_JOB, kind) == []
    assert field in fields(vertex.refuse_custom_job, change(TUNING_JOB, path, value), kind)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("jobId", "1-x", "jobId"),
        ("trainingInput.region", None, "trainingInput.region"),
        ("trainingInput.masterType", None, "trainingInput.masterType"),
        ("trainingInput.workerCount", "2", "trainingInput.workerType"),
        ("trainingInput.scaleTier", "HUGE", "trainingInput.scaleTier"),
        ("trainingInput.gpus", 2, "trainingInput.gpus"),
        ("trainingInput.workerConfig", {"tpuTfVersion": "2.11"}, "trainingInput.workerConfig.tpuTfVersion"),
    ],
)
def test_the_fake_of_ai_platform_refuses_jobs(path: str, value: object, field: str) -> None:
    assert fields(vertex.refuse_training_job, TRAINING_JOB) == []
    assert field in fields(vertex.refuse_training_job, change(TRAINING_JOB, path, value))


# --- Kubernetes ------------------------------------------------------------------------------------------------------

JOB: dict[str, Any] = yaml.safe_load("""
apiVersion: batch/v1
kind: Job
metadata: {name: x}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}
""")
JOBSET: dict[str, Any] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "x"},
    "spec": {"replicatedJobs": [{"name": "slice", "replicas": 2, "template": {"spec": JOB["spec"]}}]},
}


@pytest.mark.parametrize(
    ("document", "path", "value", "status", "words"),
    [
        (JOB, "spec.paralelism", 2, 400, 'unknown field "spec.paralelism"'),
        (JOB, "spec.parallelism", "two", 422, "spec.parallelism: Invalid value"),
        (JOB, "spec.template.spec.containers.0.name", None, 422, "containers[0].name: Required value"),
        (JOB, "spec.template.spec.restartPolicy", "Always", 422, "spec.template.spec.restartPolicy: Required value"),
        (JOB, "spec.completions", None, 422, "spec.completions: Required value"),
        (JOB, "apiVersion", "batch/v2", 400, 'no matches for kind "Job" in version "batch/v2"'),
        (JOBSET, "spec.replicatedJob", [], 400, 'unknown field "spec.replicatedJob"'),
        (JOBSET, "spec.replicatedJobs.0.name", None, 422, "spec.replicatedJobs[0].name: Required value"),
        (JOBSET, "spec.replicatedJobs.0.template.spec.complete", 1, 400, 'template.spec.complete"'),
        (JOBSET, "spec.failurePolicy", {"rules": [{"name": "x", "action": "Restart"}]}, 422, "action: Invalid value"),
    ],
)  # fmt: skip
def test_the_fake_of_kubernetes_refuses_objects(
    document: dict[str, Any], path: str, value: object, status: int, words: str
) -> None:
    kubernetes.refuse_invalid(document)
    with pytest.raises(ApiError) as refused:
        kubernetes.refuse_invalid(change(document, path, value))
    assert refused.value.status == status
    assert words in str(refused.value)
