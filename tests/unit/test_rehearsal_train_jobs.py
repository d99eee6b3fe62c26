"""A TrainJob is rehearsed as the JobSet that Kubeflow Trainer makes of it, with the variables of its runtime.

Expected values are those of pkg/runtime/framework/plugins of
https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3, mostly of torch/torch_test.go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rehearsing import rehearsal_of, resolved

from trainyard.common.errors import UserError
from trainyard_jobs.model import yaml_writer
from trainyard_jobs.rehearsal.model import End, Rehearsal

Document = dict[str, Any]
API = "trainer.kubeflow.org/v1alpha1"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def train_job(name: str = "train", /, **spec: Any) -> Document:
    spec = {"runtimeRef": {"name": "torch-distributed"}} | spec
    return {"apiVersion": API, "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def runtime(*jobs: Document, policy: Document | None = None, **spec: Any) -> Document:
    found = {
        "mlPolicy": policy or {"numNodes": 1, "torch": {}},
        "template": {"spec": {"replicatedJobs": list(jobs), **spec}},
    }
    return {"apiVersion": API, "kind": "TrainingRuntime", "metadata": {"name": "own"}, "spec": found}


def replicated(name: str, step: str, *containers: Document, **pod: Any) -> Document:
    job = {"template": {"spec": {"containers": list(containers), **pod}}}
    return {"name": name, "template": {"metadata": {"labels": {STEP: step}}, "spec": job}}


OWN = {"kind": "TrainingRuntime", "name": "own"}


def patch(**pod: Any) -> Document:
    one = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": "a.io/b", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [one]}}}}


def rehearsed(folder: Path, *documents: Document) -> Rehearsal:
    return rehearsal_of(folder, "---\n".join(yaml_writer.dump(one) for one in documents))


def pet(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PET_")}


def test_every_node_gets_the_variables_of_torchrun(tmp_path: Path) -> None:
    job = train_job(trainer={"image": "i", "numNodes": 2, "args": ["--x"], "env": [{"name": "A", "value": "1"}]})
    found = rehearsed(tmp_path, job)
    assert (found.platform, found.name) == ("Kubeflow TrainJob", "train")
    assert [(one.name, one.hostname, one.image, one.command, one.arguments) for one in found.replicas] == [
        (f"node-0-{rank}", f"train-node-0-{rank}", "i", None, ("--x",)) for rank in range(2)
    ]
    assert [dict(one.environment) for one in found.replicas] == [
        {
            "A": "1",
            "JOB_COMPLETION_INDEX": str(rank),
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "train-node-0-0.train",
            "PET_MASTER_PORT": "29500",
        }
        for rank in range(2)
    ]
    assert "train-node-0-0.train" in found.replicas[0].aliases


def test_the_launcher_forms_the_group(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, train_job(trainer={"image": "i", "numNodes": 3}))
    groups = [resolved(one, tmp_path)["cluster"] for one in found.replicas]
    assert [(one["node_rank"], one["nnodes"]) for one in groups] == [(0, 3), (1, 3), (2, 3)]
    assert {(one["master_addr"], one["master_port"]) for one in groups} == {("train-node-0-0.train", 29500)}


@pytest.mark.parametrize(
    ("trainer", "processes"),
    [
        ({}, "1"),
        ({"resourcesPerNode": {"limits": {"cpu": "4"}}}, "4"),
        ({"resourcesPerNode": {"requests": {"cpu": "3"}}}, "3"),
        ({"resourcesPerNode": {"limits": {"cpu": "2500m"}}}, "3"),
        ({"resourcesPerNode": {"limits": {"cpu": "0.7"}}}, "1"),
        ({"resourcesPerNode": {"limits": {"example.com/gpu": "2"}}}, "auto"),
        ({"resourcesPerNode": {"limits": {"cpu": "6", "example.com/gpu": "2"}}}, "auto"),
        ({"numProcPerNode": 3, "resourcesPerNode": {"limits": {"cpu": "8"}}}, "3"),
    ],
)
def test_processes_per_node_are_those_of_the_torch_plugin(tmp_path: Path, trainer: Document, processes: str) -> None:
    """torch_test.go, "nproc_per_node=..."."""
    (one,) = rehearsed(tmp_path, train_job(trainer={"image": "i", **trainer})).replicas
    assert one.environment["PET_NPROC_PER_NODE"] == processes


def test_without_a_trainer_there_are_no_variables_of_torchrun(tmp_path: Path) -> None:
    """EnforceMLPolicy of torch.go looks for the container only if spec.trainer is there."""
    found = rehearsed(
        tmp_path, runtime(replicated("node", "trainer", {"name": "node", "image": "i"})), train_job(runtimeRef=OWN)
    )
    assert [(one.image, pet(one.environment)) for one in found.replicas] == [("i", {})]


def test_the_runtime_of_the_file_is_the_template(tmp_path: Path) -> None:
    container = {
        "name": "node",
        "image": "theirs",
        "command": ["sh"],
        "env": [{"name": "A", "value": "runtime"}, {"name": "B", "value": "runtime"}],
        "resources": {"limits": {"cpu": "5"}},
    }
    own = runtime(
        replicated("dataset-initializer", "dataset-initializer", {"name": "dataset-initializer", "image": "d"}),
        replicated("node", "trainer", container, {"name": "sidecar", "image": "s"}),
        policy={"numNodes": 2, "torch": {}},
        failurePolicy={"maxRestarts": 1},
    )
    found = rehearsed(tmp_path, own, train_job(runtimeRef=OWN, trainer={"env": [{"name": "A", "value": "job"}]}))
    assert [(one.image, one.command) for one in found.replicas] == [("theirs", ("sh",))] * 2
    first = found.replicas[0].environment
    assert (first["A"], first["B"], first["PET_NPROC_PER_NODE"], first["PET_NNODES"]) == ("job", "runtime", "5", "2")
    assert "dataset-initializer is not started" in found.notes


def test_patches_are_merged_into_the_pods(tmp_path: Path) -> None:
    own = runtime(
        replicated(
            "node",
            "trainer",
            {"name": "node", "image": "i", "volumeMounts": [{"name": "old", "mountPath": "/old"}]},
            volumes=[{"name": "old", "emptyDir": {}}],
        )
    )
    bucket = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "data"}}
    patches = [
        patch(
            volumes=[{"name": "new", "csi": bucket}],
            containers=[{"name": "node", "volumeMounts": [{"name": "new", "mountPath": "/new"}]}],
            terminationGracePeriodSeconds=40,
        )
    ]
    found = rehearsed(tmp_path, own, train_job(runtimeRef=OWN, trainer={}, runtimePatches=patches))
    assert [(one.path, one.bucket) for one in found.replicas[0].mounts] == [("/old", ""), ("/new", "data")]
    assert found.grace == 40


def test_nodes_of_jax_get_its_variables(tmp_path: Path) -> None:
    """EnforceMLPolicy of plugins/jax/jax.go."""
    job = train_job(runtimeRef={"name": "jax-distributed"}, trainer={"image": "i", "numNodes": 2})
    second = rehearsed(tmp_path, job).replicas[1].environment
    assert {name: value for name, value in second.items() if name.startswith("JAX_")} == {
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:29500",
    }


def test_a_failed_pod_is_replaced_up_to_the_default_of_a_job_and_then_the_job_fails(tmp_path: Path) -> None:
    """backoffLimit is 6 where the runtime sets none, and the JobSet has no failurePolicy."""
    found = rehearsed(tmp_path, train_job(trainer={"image": "i"}))
    end = End(found.replicas[0], 1, "exit", 0, 0, {})
    actions = [found.policy.after(end).action for _ in range(7)]
    assert actions == ["restart"] * 6 + ["failed"]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([train_job(runtimeRef={"name": "ours"})], "job.yaml:6: the ClusterTrainingRuntime 'ours' is unknown: add it"),
        ([train_job(runtimeRef={"name": "deepspeed-distributed"})], "starts mpi, which a rehearsal does not support"),
        (
            [train_job(runtimeRef={"name": "torchtune-llama3.2-1b"}, trainer={"command": ["tune", "run"]})],
            "starts torchtune, which a rehearsal does not support",
        ),
        ([runtime({"template": {}}), train_job(runtimeRef=OWN)], "the runtime own makes an invalid JobSet"),
        ([train_job(), train_job("second")], "only one Job, JobSet or TrainJob can be rehearsed"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_one_line(tmp_path: Path, documents: list[Document], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        rehearsed(tmp_path, *documents)


def test_jobs_are_rehearsed_with_the_defaults_of_the_cluster(tmp_path: Path) -> None:
    """A Job is not Indexed, a JobSet's Job is; with backoffLimitPerIndex, backoffLimit is the largest number."""
    pod = {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": pod}
    part = {"name": "a", "template": {"spec": pod}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "train"},
        "spec": {"replicatedJobs": [part]},
    }
    indexes = [rehearsed(tmp_path, one).replicas[0].environment.get("JOB_COMPLETION_INDEX") for one in (job, jobset)]
    assert indexes == [None, "0"]
    per_index = job | {"spec": {**pod, "completions": 1, "completionMode": "Indexed", "backoffLimitPerIndex": 1}}
    found = rehearsed(tmp_path, per_index)
    end = End(found.replicas[0], 1, "exit", 0, 0, {})
    assert {found.policy.after(end).action for _ in range(9)} == {"restart"}
