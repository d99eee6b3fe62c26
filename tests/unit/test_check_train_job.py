"""What Kubeflow Trainer takes and refuses by its definition: its own tests and examples, written anew.

The expected results are those of upstream at https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3:

- webhook and definition: test/integration/webhooks/trainjob_test.go
- plugins: pkg/runtime/framework/plugins/{jobset/jobset,torch/torch,mpi/mpi,xgboost/xgboost}_test.go
- documents that are valid: its examples (YAML)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from trainyard.common.rule_engine import Finding, Severity
from trainyard_jobs import platforms
from trainyard_jobs.model import yaml_writer
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

Document = dict[str, Any]
API = "trainer.kubeflow.org/v1alpha1"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def train_job(name: str = "train", /, **spec: Any) -> Document:
    spec = {"runtimeRef": {"kind": "TrainingRuntime", "name": "testing"}} | spec
    return {"apiVersion": API, "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def replicated(name: str, step: str, container: Document | None, **more: Any) -> Document:
    containers = [container] if container else []
    job = {"template": {"spec": {"containers": containers}}}
    return {"name": name, "template": {"metadata": {"labels": {STEP: step}}, "spec": job}, **more}


def initializer(name: str, *, mount: str = "initializer", container: str = "") -> Document:
    mounts = [{"name": mount, "mountPath": "/workspace"}] if mount else []
    return replicated(name, name, {"name": container or name, "image": "i", "volumeMounts": mounts})


NODE = replicated("node", "trainer", {"name": "node", "image": "i"})


def runtime(*jobs: Document, policy: str = "torch", name: str = "testing") -> Document:
    """A TrainingRuntime in the file of the job."""
    spec = {"mlPolicy": {"numNodes": 1, policy: {}}, "template": {"spec": {"replicatedJobs": list(jobs or (NODE,))}}}
    return {"apiVersion": API, "kind": "TrainingRuntime", "metadata": {"name": name}, "spec": spec}


BOTH = runtime(initializer("dataset-initializer"), initializer("model-initializer"), NODE)


def patch(manager: str = "acme.io/manager", /, job: str = "node", **pod: Any) -> Document:
    one = {"name": job, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [one]}}}}


def findings(*documents: Document) -> list[Finding]:
    text = "---\n".join(yaml_writer.dump(one) for one in copy.deepcopy(documents))
    return all_rules.check(Evidence(job_file.parse(text, Path("job.yaml"))))


def severities(*documents: Document) -> list[Severity]:
    """The severities of what is found, without what is said of the runtime's own schema."""
    return [one.severity for one in findings(*documents) if one.rule != "manifests_match_schema" or one.fails]


CLUSTER = {"name": "torch-distributed"}
TUNE = {"kind": "TrainingRuntime", "name": "torchtune-llama3.2-1b"}
TUNED = runtime(name="torchtune-llama3.2-1b")

#: What is accepted: a line, the documents.
VALID: list[tuple[str, tuple[Document, ...]]] = [
    ("a TrainingRuntime of the namespace", (runtime(), train_job())),
    ("a ClusterTrainingRuntime, by default", (train_job(runtimeRef=CLUSTER),)),
    ("no nodes", (runtime(), train_job(trainer={"numNodes": 0}))),
    ("one node, one process", (runtime(), train_job(trainer={"numNodes": 1, "numProcPerNode": 1}))),
    ("a dataset", (BOTH, train_job(initializer={"dataset": {"storageUri": "hf://trainjob-model"}}))),
    ("a dataset without a place", (BOTH, train_job(initializer={"dataset": {"storageUri": ""}}))),
    ("a dataset in a bucket", (BOTH, train_job(initializer={"dataset": {"storageUri": "s3://bucket/path"}}))),
    ("a model in a bucket", (BOTH, train_job(initializer={"model": {"storageUri": "gs://bucket/model"}}))),
    ("a long command", (runtime(), train_job(trainer={"command": ["a" * 1048576]}))),
    ("long arguments", (runtime(), train_job(trainer={"args": ["a" * 1048576]}))),
    ("a variable", (runtime(), train_job(trainer={"env": [{"name": "test", "value": "value"}]}))),
    ("managed by its controller", (runtime(), train_job(managedBy="trainer.kubeflow.org/trainjob-controller"))),
    ("managed by MultiKueue", (runtime(), train_job(managedBy="kueue.x-k8s.io/multikueue"))),
    (
        "patches of two managers",
        (
            runtime(),
            train_job(
                runtimePatches=[
                    patch("acme.io/manager-one", serviceAccountName="custom-sa"),
                    patch("acme.io/manager-two", serviceAccountName="custom-sa-two"),
                ]
            ),
        ),
    ),
    ("a patch without content", (runtime(), train_job(runtimePatches=[{"manager": "kueue.k8s.io/manager"}]))),
    ("a grace period", (runtime(), train_job(runtimePatches=[patch(terminationGracePeriodSeconds=300)]))),
    ("no grace period", (runtime(), train_job(runtimePatches=[patch(terminationGracePeriodSeconds=0)]))),
    ("GPUs whose limit is the runtime's", (
        runtime(replicated("node", "trainer", {
            "name": "node", "image": "i", "resources": {"limits": {"nvidia.com/gpu": 4}}})),
        train_job(trainer={"resourcesPerNode": {"requests": {"nvidia.com/gpu": 4}}}))),
    ("a suspended job", (runtime(), train_job(suspend=True))),
    ("LoRA on a node", (TUNED, train_job(runtimeRef=TUNE, trainer={
        "numNodes": 1, "command": ["tune", "run"], "args": ["model.lora_attn_modules=[q_proj, v_proj]"]}))),
    ("torch's variables in a runtime of JAX", (
        runtime(policy="jax"), train_job(trainer={"env": [{"name": "PET_NODE_RANK", "value": "1"}]}))),
    # the examples, by their content
    ("01-multi-node", (train_job(runtimeRef=CLUSTER, trainer={"numNodes": 3, "command": ["torchrun", "train.py"]}),)),
    (
        "02-runtime-patches",
        (
            train_job(
                runtimeRef=CLUSTER | {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"},
                trainer={
                    "numNodes": 2,
                    "env": [{"name": "CUSTOM_VAR", "value": "v"}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
                    "resourcesPerNode": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": 4}},
                },
                runtimePatches=[
                    patch(
                        "example.io/platform-team",
                        serviceAccountName="training-sa",
                        nodeSelector={"node-type": "training"},
                        tolerations=[{"key": "k", "operator": "Equal", "value": "true", "effect": "NoSchedule"}],
                    )
                ],
            ),
        ),
    ),
    ("04-volcano", (
        runtime() | {"kind": "ClusterTrainingRuntime"},
        train_job(runtimeRef={"name": "testing"}, trainer={"numNodes": 4}))),
]  # fmt: skip


@pytest.mark.parametrize(("what", "documents"), VALID, ids=[what for what, _ in VALID])
def test_what_kubeflow_trainer_accepts_has_no_findings(what: str, documents: tuple[Document, ...]) -> None:
    assert severities(*documents) == [], findings(*documents)


def variables(*names: str) -> list[Document]:
    return [{"name": name, "value": "1"} for name in names]


#: What is refused: the rule that finds it, a part of what is said, the documents.
REFUSED: list[tuple[str, str, tuple[Document, ...]]] = [
    ("manifests_match_schema", "numNodes: -1", (runtime(), train_job(trainer={"numNodes": -1}))),
    ("manifests_match_schema", "numProcPerNode: -5", (runtime(), train_job(trainer={"numProcPerNode": -5}))),
    ("manifests_match_schema", "numProcPerNode: 0", (runtime(), train_job(trainer={"numProcPerNode": 0}))),
    ("manifests_match_schema", "storageUri", (BOTH, train_job(initializer={"dataset": {"storageUri": "invalid-uri"}}))),
    ("manifests_match_schema", "storageUri", (BOTH, train_job(initializer={"dataset": {"storageUri": "s3://"}}))),
    ("manifests_match_schema", "storageUri", (BOTH, train_job(initializer={"model": {"storageUri": "invalid-uri"}}))),
    ("manifests_match_schema", "command", (runtime(), train_job(trainer={"command": ["a" * 1048577]}))),
    ("manifests_match_schema", "args", (runtime(), train_job(trainer={"args": ["a" * 1048577]}))),
    ("manifests_match_schema", "managedBy", (runtime(), train_job(managedBy="invalid"))),
    ("manifests_match_schema", "terminationGracePeriodSeconds", (
        runtime(), train_job(runtimePatches=[patch(terminationGracePeriodSeconds=-1)]))),
    ("manifests_match_schema", "unknown field 'numnodes'", (runtime(), train_job(trainer={"numnodes": 1}))),
    ("manifests_match_schema", "activeDeadlineSeconds", (runtime(), train_job(activeDeadlineSeconds=0))),
    ("manifests_match_schema", "runtimeRef", ({**train_job(), "spec": {}},)),
    ("manifests_match_schema", "requests.cpu", (
        runtime(), train_job(trainer={"resourcesPerNode": {"requests": {"cpu": "two"}}}))),
    ("manifests_match_schema", "requests.cpu", (
        runtime(), train_job(trainer={"resourcesPerNode": {"requests": {"cpu": 0.5}}}))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "said", "documents"), REFUSED, ids=[f"{rule}-{said}" for rule, said, _ in REFUSED])
def test_what_kubeflow_trainer_refuses_is_refused(rule: str, said: str, documents: tuple[Document, ...]) -> None:
    refused = [one for one in findings(*documents) if one.severity == Severity.REFUSE]
    assert {one.rule for one in refused} == {rule}, refused
    assert any(said in one.what for one in refused), refused


#: What is admitted, and not refused by every version or in every cluster.
OTHERS: list[tuple[str, Severity, str, tuple[Document, ...]]] = [
    ("train_job_patches_match_runtime", Severity.CANNOT_START, "no replicated job 'nod' (did you mean", (
        runtime(), train_job(runtimePatches=[patch(job="nod", serviceAccountName="a")]))),
    ("train_job_patches_match_runtime", Severity.CANNOT_START, "no container 'other'", (
        runtime(), train_job(runtimePatches=[patch(containers=[{"name": "other"}])]))),
    ("train_job_patches_match_runtime", Severity.NOTE, "no replicated job 'worker'", (
        train_job(runtimeRef=CLUSTER, runtimePatches=[patch(job="worker", serviceAccountName="a")]),)),
    ("train_job_runtimes_are_known", Severity.NOTE, "is not in this file", (
        train_job(runtimeRef={"name": "our-own"}),)),
    ("train_job_accelerators_are_limited", Severity.CANNOT_START, "nvidia.com/gpu: 4 requested, limit none", (
        runtime(), train_job(trainer={"resourcesPerNode": {"requests": {"nvidia.com/gpu": 4}}}))),
    ("train_job_accelerators_are_limited", Severity.CANNOT_START, "nvidia.com/gpu: 4 requested, limit none", (
        train_job(runtimeRef=CLUSTER, trainer={"resourcesPerNode": {"requests": {"nvidia.com/gpu": 4}}}),)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "severity", "said", "documents"), OTHERS, ids=[f"{rule}-{said}" for rule, _, said, _ in OTHERS]
)
def test_what_depends_on_the_cluster_is_not_refused(
    rule: str, severity: Severity, said: str, documents: tuple[Document, ...]
) -> None:
    (found,) = [one for one in findings(*documents) if one.rule != "manifests_match_schema"]
    assert (found.rule, found.severity) == (rule, severity)
    assert said in found.what


def test_a_runtime_that_is_not_known_may_limit_what_is_requested() -> None:
    job = train_job(runtimeRef={"name": "ours"}, trainer={"resourcesPerNode": {"requests": {"nvidia.com/gpu": 4}}})
    assert [one.rule for one in findings(job)] == ["train_job_runtimes_are_known"]


def test_every_rule_about_train_jobs_has_a_fault_here() -> None:
    rules = {one.id for one in platforms.RULES if one.id.startswith("train_job_")}
    assert rules <= {rule for rule, *_ in (*REFUSED, *OTHERS)}


def test_a_train_job_of_another_version_is_not_judged() -> None:
    (found,) = findings(train_job("1x") | {"apiVersion": "trainer.kubeflow.org/v1beta1"})
    assert (found.severity, "is not checked" in found.what) == (Severity.NOTE, True)


def test_the_image_of_a_train_job_is_looked_up() -> None:
    job = job_file.parse(
        yaml_writer.dump(train_job(runtimeRef=CLUSTER, trainer={"image": "r/none:1"})), Path("job.yaml")
    )
    found = all_rules.check(Evidence(job, missing={"r/none:1": "not found"}))
    assert [(one.rule, one.where) for one in found] == [("images_exist", "job.yaml:9")]


def test_a_finding_names_the_line_of_a_job_after_its_runtime() -> None:
    found = findings(runtime(), train_job(trainer={"numNodes": -1}))
    documents = yaml_writer.dump(runtime()).count("\n") + 1
    line = yaml_writer.dump(train_job(trainer={"numNodes": -1})).splitlines().index("    numNodes: -1") + 1
    assert f"job.yaml:{documents + line}" in {one.where for one in found}
