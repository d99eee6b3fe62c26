"""TrainJobs of Kubeflow Trainer: their runtimes, and the JobSet that its controller makes of them.

A TrainJob names a runtime, a template that its cluster has. What Kubeflow Trainer itself installs is here as facts,
from manifests/base/runtimes of https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3
(2026-08-21); other runtimes are known if they are in the same file. The JobSet is built as pkg/runtime/core and
pkg/runtime/framework/plugins/{jobset,torch,jax,plainml} of that commit do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard_jobs.kubernetes.gke_objects import JOBSET_VERSION, quantity
from trainyard_jobs.schema.kubernetes import TRAIN_JOB_VERSION
from trainyard_jobs.schema.kubernetes_defaults import mapping, sequence

GROUP = TRAIN_JOB_VERSION.partition("/")[0]
#: The kinds of runtimes; the first is the default.
RUNTIME_KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")

#: The label of a replicated job that says which part of a TrainJob applies to it (pkg/constants/constants.go).
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
TRAINER = "trainer"
#: Names of containers and replicated jobs.
NODE, LAUNCHER = "node", "launcher"
INITIALIZERS = {"dataset": "dataset-initializer", "model": "model-initializer"}
INITIALIZER_VOLUME = "initializer"

#: The command by which the Torch plugin recognizes torchtune.
TORCHTUNE = ["tune", "run"]
#: The port of the first node, for torch and JAX.
PORT = 29500

POLICIES = ("torch", "mpi", "jax", "xgboost", "flux")
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

#: The key by which a strategic merge patch finds the entries of a list of a pod's; other lists are replaced.
#: https://github.com/kubernetes/api/blob/master/core/v1/types.go (patchMergeKey), jobset_types.go for replicatedJobs.
_MERGE_KEYS = {
    "replicatedJobs": "name",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "claims": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}

Document = dict[str, Any]


@dataclass(frozen=True)
class Runtime:
    """The runtime of a TrainJob.

    Attributes:
        spec: of the ClusterTrainingRuntime or TrainingRuntime.
        in_file: whether it is in the file of the job; if not, it is what Kubeflow Trainer installs under its name.
    """

    name: str
    spec: Document
    in_file: bool

    @property
    def policy(self) -> str:
        """The kind of its mlPolicy, such as "torch"; empty for a plain one."""
        given = mapping(self.spec, "mlPolicy")
        return next((one for one in POLICIES if given.get(one) is not None), "")

    @property
    def replicated_jobs(self) -> list[Document]:
        return [one for one in sequence(self.spec, "template", "spec", "replicatedJobs") if isinstance(one, dict)]

    @property
    def trainer_container(self) -> Document:
        """The container that trains; empty without one."""
        for one in self.replicated_jobs:
            for container in map(mapping, sequence(pod_of(one), "containers")):
                if step_of(one) == TRAINER and container.get("name") == NODE:
                    return container
        return {}

    def containers(self, job: str) -> list[Document] | None:
        """The containers of a replicated job, init containers included; None without such a job."""
        for one in self.replicated_jobs:
            if one.get("name") == job:
                pod = pod_of(one)
                every = (*sequence(pod, "initContainers"), *sequence(pod, "containers"))
                return [found for found in every if isinstance(found, dict)]
        return None


def _shipped_job(name: str, step: str, container: Document, **more: Any) -> Document:
    metadata = {"metadata": {"labels": {STEP: step}}} if step else {}
    pod = {"template": {"spec": {"containers": [container]}}}
    return {"name": name, **more, "template": {**metadata, "spec": pod}}


def _shipped_spec(policy: str, *jobs: Document) -> Document:
    return {"mlPolicy": {"numNodes": 1, policy: {}}, "template": {"spec": {"replicatedJobs": list(jobs)}}}


def _initializer(name: str) -> Document:
    mount = {"name": INITIALIZER_VOLUME, "mountPath": "/workspace"}
    return _shipped_job(name, name, {"name": name, "volumeMounts": [mount]})


_TORCHTUNE = _shipped_spec(
    "torch",
    *map(_initializer, INITIALIZERS.values()),
    _shipped_job(NODE, TRAINER, {"name": NODE, "command": TORCHTUNE}),
)
_MPI = _shipped_spec("mpi", _shipped_job(NODE, "", {"name": NODE}), _shipped_job(LAUNCHER, TRAINER, {"name": NODE}))

#: The runtimes that Kubeflow Trainer installs, without what is of no consequence here.
_SHIPPED: dict[str, Document] = {
    "torch-distributed": _shipped_spec(
        "torch",
        _shipped_job(NODE, TRAINER, {"name": NODE, "image": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"}),
    ),
    "jax-distributed": _shipped_spec(
        "jax", _shipped_job(NODE, TRAINER, {"name": NODE, "image": "nvcr.io/nvidia/jax:25.10-py3"})
    ),
    "xgboost-distributed": _shipped_spec("xgboost", _shipped_job(NODE, TRAINER, {"name": NODE})),
    "deepspeed-distributed": _MPI,
    "mlx-distributed": _MPI,
    "torchtune-llama3.2-1b": _TORCHTUNE,
    "torchtune-llama3.2-3b": _TORCHTUNE,
    "torchtune-qwen2.5-1.5b": _TORCHTUNE,
}


def is_train_job(document: Document) -> bool:
    """Whether an object is a TrainJob of the version that is known here."""
    return (document.get("kind"), document.get("apiVersion")) == ("TrainJob", TRAIN_JOB_VERSION)


def reference(train_job: Document) -> tuple[str, str, str]:
    """API group, kind and name of its runtime, with the defaults of the custom resource definition."""
    given = mapping(train_job, "spec", "runtimeRef")
    defaults = {"apiGroup": GROUP, "kind": RUNTIME_KINDS[0], "name": ""}
    group, kind, name = (str(given.get(key, default)) for key, default in defaults.items())
    return group, kind, name


def runtime_of(train_job: Document, documents: Sequence[Document]) -> Runtime | None:
    """The runtime of a TrainJob, from the documents of its file or Kubeflow Trainer's own; None if it is neither."""
    _, kind, name = reference(train_job)
    for one in documents:
        if one.get("kind") == kind and mapping(one, "metadata").get("name") == name:
            return Runtime(name, mapping(one, "spec"), True)
    shipped = _SHIPPED.get(name) if kind == RUNTIME_KINDS[0] else None
    return Runtime(name, shipped, False) if shipped else None


def pod_of(replicated: Document) -> Document:
    """The spec of the pods of a replicated job."""
    return mapping(replicated, "template", "spec", "template", "spec")


def step_of(replicated: Document) -> str:
    """Which part of a TrainJob applies to a replicated job; empty if none does."""
    return str(mapping(replicated, "template", "metadata", "labels").get(STEP) or "")


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """``base`` after a strategic merge patch: mappings field by field, lists of named entries entry by entry.

    Args:
        key: the field that both are values of.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {name: merged(base.get(name), value, name) for name, value in patch.items()}
    by = _MERGE_KEYS.get(key)
    if not by or not isinstance(base, list) or not isinstance(patch, list):
        return copy.deepcopy(patch)
    found = list(base)
    for one in patch:
        where = next((at for at, old in enumerate(found) if mapping(old).get(by) == mapping(one).get(by)), None)
        if where is None:
            found.append(copy.deepcopy(one))
        else:
            found[where] = merged(found[where], one)
    return found


def node_selector(train_job: Document, documents: Sequence[Document]) -> Document:
    """Return the labels that the nodes of its trainer must have, by its runtime and its patches of that."""
    runtime = runtime_of(train_job, documents) or Runtime("", {}, False)
    jobs = sequence(jobset(train_job, runtime, ""), "spec", "replicatedJobs")
    trainers = (entry for entry in map(mapping, jobs) if step_of(entry) == TRAINER or entry.get("name") == NODE)
    return next((mapping(pod_of(entry), "nodeSelector") for entry in trainers), {})


def gpus(resources: Document) -> int:
    """The number of GPUs: of any resource with "gpu" in its name, of the requests first."""
    for kind in ("requests", "limits"):
        for name, value in mapping(resources, kind).items():
            if "gpu" in str(name).lower() and (amount := quantity(value)):
                return math.ceil(amount)
    return 0


def processes_per_node(trainer: Document, container: Document) -> str:
    """The value of PET_NPROC_PER_NODE: numProcPerNode, "auto" with GPUs, else the number of CPUs, rounded up.

    Args:
        container: of the runtime, whose resources count if the trainer has none.
    """
    given = trainer.get("numProcPerNode")
    if given is not None:
        return str(given)
    resources = mapping(trainer.get("resourcesPerNode", container.get("resources")))
    if gpus(resources):
        return "auto"
    requested = quantity(mapping(resources, "requests").get("cpu"))
    limit = quantity(mapping(resources, "limits").get("cpu"))
    return str(max(1, math.ceil(requested or limit or 0)))


def group_variables(policy: str, name: str, nodes: int, processes: str) -> list[Document]:
    """The variables by which the nodes form a group, as the plugin of an mlPolicy sets them.

    https://github.com/kubeflow/trainer/blob/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3/pkg/runtime/framework/plugins/torch/torch.go
    (EnforceMLPolicy), and plugins/jax/jax.go.

    Args:
        name: of the TrainJob.
    """
    head = f"{name}-{NODE}-0-0.{name}"
    index = {"fieldRef": {"fieldPath": _COMPLETION_INDEX}}
    if policy == "torch":
        return [
            {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": processes},
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": head},
            {"name": "PET_MASTER_PORT", "value": str(PORT)},
        ]
    if policy == "jax":
        return [
            {"name": "JAX_NUM_PROCESSES", "value": str(nodes)},
            {"name": "JAX_PROCESS_ID", "valueFrom": index},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{head}:{PORT}"},
        ]
    return []


def jobset(train_job: Document, runtime: Runtime, name: str) -> Document:
    """The JobSet that the controller makes of a TrainJob; ports, which are of no consequence here, are left out.

    Args:
        name: of the TrainJob, and so of the JobSet.
    """
    spec = mapping(train_job, "spec")
    template = copy.deepcopy(mapping(runtime.spec, "template"))
    found = mapping(template, "spec")
    labels: Document = dict(mapping(template, "metadata", "labels"))
    for patch in sequence(spec, "runtimePatches"):
        given = mapping(patch, "trainingRuntimeSpec", "template")
        labels |= mapping(given, "metadata", "labels")
        found = merged(found, mapping(given, "spec"))
    for replicated in map(mapping, sequence(found, "replicatedJobs")):
        if step_of(replicated) == TRAINER:
            _apply_trainer(replicated, spec, runtime, name)
    return {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "metadata": {"name": name} | ({"labels": labels} if labels else {}),
        "spec": found,
    }


def _apply_trainer(replicated: Document, spec: Document, runtime: Runtime, name: str) -> None:
    """Write what ``spec.trainer`` says into the replicated job that trains.

    The variables of the group are set only if the TrainJob has a trainer, and last: its own variables cannot refer to
    them.
    """
    trainer = mapping(spec, "trainer")
    nodes = trainer.get("numNodes", mapping(runtime.spec, "mlPolicy").get("numNodes", 1))
    replicated["replicas"] = 1
    job = mapping(replicated, "template", "spec")
    job |= {"parallelism": nodes, "completions": nodes}
    for container in map(mapping, sequence(pod_of(replicated), "containers")):
        if container.get("name") != NODE:
            continue
        processes = processes_per_node(trainer, container)
        container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
        if "resourcesPerNode" in trainer:
            container["resources"] = merged(container.get("resources"), trainer["resourcesPerNode"])
        variables = [*sequence(trainer, "env")]
        if "trainer" in spec:
            variables += group_variables(runtime.policy, name, nodes, processes)
        container["env"] = _upserted(sequence(container, "env"), variables)


def _upserted(variables: list[Any], more: list[Any]) -> list[Any]:
    """Variables with ``more``: one of the same name is replaced where it is, another is added at the end."""
    found = {str(mapping(one).get("name")): one for one in variables}
    return list((found | {str(mapping(one).get("name")): one for one in more}).values())
