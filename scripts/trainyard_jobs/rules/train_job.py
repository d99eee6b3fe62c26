"""Rules that the webhook and the custom resource definition of Kubeflow Trainer apply to a TrainJob.

https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3 (2026-08-21). Its webhook judges a
TrainJob with the runtime that it names. A runtime in the same file is what it is; of one that the cluster has, Kubeflow
Trainer's own manifest is known, which the cluster's administrator can have changed: what depends on that is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import nearest
from trainyard.common.rule_engine import Severity
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.kubernetes import train_jobs
from trainyard_jobs.kubernetes.train_jobs import INITIALIZER_VOLUME, INITIALIZERS, NODE, Runtime
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import object_name
from trainyard_jobs.rules.kubernetes_pod import resource_problems
from trainyard_jobs.rules.problems import Problem, repeated, rule_for_each
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping, sequence

_REPOSITORY = "https://github.com/kubeflow/trainer/blob/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3"
_CRD = f"{_REPOSITORY}/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
_PLUGINS = f"{_REPOSITORY}/pkg/runtime/framework/plugins"
_CORE = "https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/core/validation/validation.go"
_JOBSET = "https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go"

_WEBHOOK = "Kubeflow Trainer's webhook refuses it"
_NO_IMAGE = "the patch adds a container without an image"

#: mlPolicy -> variables that its plugin sets, and refuses in a TrainJob (pkg/constants/constants.go).
_RESERVED = {
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"),
    "mpi": (
        "OMPI_MCA_orte_default_hostfile",
        "OMPI_MCA_plm_rsh_args",
        "OMPI_MCA_orte_keep_fqdn_hostnames",
        "OMPI_MCA_orte_set_default_slots",
    ),
}

#: torchtune: the models; the only one for several nodes; the one without QLoRA; those with QLoRA on a single device;
#: and settings that the runtime makes.
_TORCHTUNE_MODELS = ("llama3_2/1B", "llama3_2/3B", "qwen2_5/1.5B", "llama3_3/70B")
_ON_NODES, _NO_QLORA, _QLORA_ON_ONE_DEVICE = "llama3_3/70B", "qwen2_5/1.5B", ("llama3_2/1B", "llama3_2/3B")
_TORCHTUNE_OWN = ("output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file")

#: Fields of spec that older versions have -> the last of them, and what newer ones have instead.
_OLD_FIELDS = {
    "podSpecOverrides": ("2.0", "runtimePatches"),
    "podTemplateOverrides": ("2.1", "runtimePatches"),
    "labels": ("2.1", "runtimePatches, with metadata"),
    "annotations": ("2.1", "runtimePatches, with metadata"),
}

#: Lists of a patched pod whose entries have a unique name in the definition.
_NAMED = ("containers", "initContainers", "volumes", "imagePullSecrets", "schedulingGates")


@dataclass(frozen=True)
class _TrainJob:
    """Join a TrainJob of the file to its runtime, if that is known."""

    document: dict[str, Any]
    runtime: Runtime | None

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.document, "spec")

    @property
    def trainer(self) -> dict[str, Any]:
        return mapping(self.spec, "trainer")

    def patches(self) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Every replicated job of every runtime patch, with its location."""
        for at, patch in entries(self.spec, ("spec",), "runtimePatches"):
            yield from entries(patch, at, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")

    def patched_containers(self) -> Iterator[tuple[Location, str, dict[str, Any]]]:
        """Every container of every patch: its location, the name of its replicated job, itself."""
        for at, replicated in self.patches():
            for key in ("initContainers", "containers"):
                for here, container in entries(replicated, at, "template", "spec", "template", "spec", key):
                    yield here, str(replicated.get("name")), container

    def of_runtime(self, problem: tuple[Location, str, str], why: str) -> Problem:
        """Return a problem that depends on the template of the runtime; ``why`` is what goes wrong because of it."""
        if self.runtime and self.runtime.in_file:
            return problem
        why = f"{why}, unless the cluster's runtime is another one than Kubeflow Trainer installs"
        return (*problem, Severity.NOTE, why)


def _train_jobs(job: Evidence) -> Iterator[tuple[int, _TrainJob]]:
    for number, document in enumerate(job.job.documents):
        if train_jobs.is_train_job(document):
            yield number, _TrainJob(document, train_jobs.runtime_of(document, job.job.documents))


@rule_for_each(
    _train_jobs,
    f"{_JOBSET} (ValidateCreate: names of Jobs and pods)",
    "the TrainJob is created, but JobSet's webhook refuses its JobSet",
    Severity.CANNOT_START,
)
def train_job_pods_have_names(job: _TrainJob) -> Iterator[Problem]:
    """The names that the pods of a TrainJob get are DNS labels."""
    name = object_name(job.document)
    if not name or job.runtime is None or names.dns_1035_label(name):
        return
    jobset = train_jobs.jobset(job.document, job.runtime, name)
    for replicated in map(mapping, sequence(jobset, "spec", "replicatedJobs")):
        pods = mapping(replicated, "template", "spec").get("completions")
        last = max(0, pods - 1) if isinstance(pods, int) else 0
        longest = f"{name}-{replicated.get('name')}-0-{last}-abcde"
        if wrong := names.dns_1035_label(longest):
            yield ("metadata", "name"), f"its pods are named {longest}, with a random ending: {wrong}", "shorten it"
            break


@rule_for_each(_train_jobs, f"{_CRD} (x-kubernetes-list-map-keys)", "the API server refuses the TrainJob")
def train_job_lists_have_unique_keys(job: _TrainJob) -> Iterator[Problem]:
    """Variables, patches, containers, volumes and mounts of a TrainJob are not given twice."""
    name: dict[str, object] = {"name": ""}
    yield from repeated(job.trainer.get("env"), ("spec", "trainer", "env"), name)
    claims = mapping(job.trainer, "resourcesPerNode").get("claims")
    yield from repeated(claims, ("spec", "trainer", "resourcesPerNode", "claims"), name)
    for key in INITIALIZERS:
        variables = mapping(job.spec, "initializer", key).get("env")
        yield from repeated(variables, ("spec", "initializer", key, "env"), name)
    yield from repeated(job.spec.get("runtimePatches"), ("spec", "runtimePatches"), {"manager": ""})
    lists: dict[Location, list[Any]] = {}
    for at, replicated in job.patches():
        lists.setdefault(at[:-1], []).append(replicated)
        for key in _NAMED:
            here = (*at, "template", "spec", "template", "spec", key)
            yield from repeated(train_jobs.pod_of(replicated).get(key), here, name)
    for at, replicated_jobs in lists.items():
        yield from repeated(replicated_jobs, at, name)
    for at, _, container in job.patched_containers():
        # By its definition, a patch can mount a volume once only.
        for key in ("env", "volumeMounts"):
            yield from repeated(container.get(key), (*at, key), name)


@rule_for_each(_train_jobs, f"{_PLUGINS}/jobset/jobset.go (Validate: runtimePatches)", _WEBHOOK)
def train_job_patches_have_managers(job: _TrainJob) -> Iterator[Problem]:
    """The manager of a runtime patch is a path with a domain, and sets no variables of the trainer or initializers."""
    for at, patch in entries(job.spec, ("spec",), "runtimePatches"):
        manager = str(patch.get("manager", ""))
        if manager and (wrong := names.domain_prefixed_path(manager)):
            yield (*at, "manager"), f"manager is '{manager}'", wrong
    for at, _, container in job.patched_containers():
        name = container.get("name")
        if name in (NODE, *INITIALIZERS.values()) and "initContainers" not in at and container.get("env"):
            field = "spec.trainer.env" if name == NODE else "spec.initializer"
            yield (*at, "env"), f"a patch sets variables of the container {name}", f"write them in {field}"


@rule_for_each(_train_jobs, f"{_REPOSITORY}/pkg/webhooks/trainjob_webhook.go (ValidateCreate)", _WEBHOOK)
def train_job_runtimes_exist(job: _TrainJob) -> Iterator[Problem]:
    """A TrainJob names a runtime of a kind that exists; the runtime is created before the job."""
    group, kind, name = train_jobs.reference(job.document)
    at: Location = ("spec", "runtimeRef")
    if group != train_jobs.GROUP or kind not in train_jobs.RUNTIME_KINDS:
        kinds = " or ".join(train_jobs.RUNTIME_KINDS)
        yield at, f"no kind of runtime {kind}.{group}", f"use {kinds} of {train_jobs.GROUP}"
    elif job.runtime is None and name:
        fix = "nothing, if the cluster has it: 'kubectl get' shows it"
        yield at, f"{kind} {name} is not in this file", fix, Severity.NOTE, "what it decides is not checked"


@rule_for_each(_train_jobs, f"{_PLUGINS} (Validate of torch/torch.go, mpi/mpi.go, xgboost/xgboost.go)", _WEBHOOK)
def train_job_variables_are_free(job: _TrainJob) -> Iterator[Problem]:
    """A TrainJob sets no variable that its runtime sets."""
    reserved = _RESERVED.get(job.runtime.policy, ()) if job.runtime else ()
    for at, variable in entries(job.spec, ("spec",), "trainer", "env"):
        if variable.get("name") in reserved:
            yield at, f"{variable['name']} is set by the runtime", "remove it"


@rule_for_each(
    _train_jobs,
    f"{_CORE} (ValidateContainerResourceRequirements)",
    "the TrainJob is created, but the API server refuses its Jobs",
    Severity.CANNOT_START,
)
def train_job_resources_are_valid(job: _TrainJob) -> Iterator[Problem]:
    """Requests of a node are at most its limits; GPUs are requested and limited equally."""
    own = mapping(job.trainer, "resourcesPerNode")
    given = {kind: mapping(own, kind) for kind in ("requests", "limits")}
    if any(names.quantity(value) is None for values in given.values() for value in values.values()):
        return  # the definition refuses it
    # A runtime of the cluster may limit what is only requested here; those of Kubeflow Trainer do not.
    certain = job.runtime is not None or given["requests"].keys() <= given["limits"].keys()
    base = job.runtime.trainer_container.get("resources") if job.runtime else None
    merged = mapping(train_jobs.merged(base, own)) if own else {}
    for problem in resource_problems(merged, ("spec", "trainer", "resourcesPerNode")):
        yield problem if certain else (*problem[:3], Severity.NOTE)


@rule_for_each(_train_jobs, f"{_PLUGINS}/torch/torchtune.go (validateTorchTune)", _WEBHOOK)
def torchtune_supports_model(job: _TrainJob) -> Iterator[Problem]:
    """torchtune supports the model, the number of nodes and the kind of fine-tuning of a TrainJob."""
    runtime = job.runtime
    if runtime and runtime.policy == "torch" and job.trainer.get("command") == train_jobs.TORCHTUNE:
        yield from _torchtune(job, runtime)


def _torchtune(job: _TrainJob, runtime: Runtime) -> Iterator[Problem]:
    parts, nodes = runtime.name.split("-"), job.trainer.get("numNodes", 1)
    model = f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""
    at: Location = ("spec", "trainer")
    if model not in _TORCHTUNE_MODELS:
        what = f"'tune run' on the runtime {runtime.name}, which names no model"
        yield ("spec", "runtimeRef", "name"), what, "use torchtune-llama3.2-1b or another one of torchtune"
    given = [str(word).partition("=") for word in sequence(job.trainer, "args")]
    enabled = [name for name, _, value in given if value.strip().lower() == "true"]
    quantized = any("model.quantize_base" in name for name in enabled) and not any(
        "model.use_dora" in name for name in enabled
    )
    if nodes > 1 and (model != _ON_NODES or quantized or any("model.lora_attn_modules" in name for name, *_ in given)):
        what = f"{model or 'it'} on {nodes} nodes"
        yield (*at, "numNodes"), what, f"write numNodes: 1; {_ON_NODES} runs on several, without LoRA"
    gpus = train_jobs.gpus(mapping(job.trainer, "resourcesPerNode"))
    single = job.trainer.get("numProcPerNode") == 1 or gpus == 1
    if quantized and nodes == 1 and (model == _NO_QLORA or (model in _QLORA_ON_ONE_DEVICE and not single)):
        fix = "use another model" if model == _NO_QLORA else "request one GPU"
        yield (*at, "args"), f"QLoRA of {model}" + ("" if model == _NO_QLORA else " on several devices"), fix
    for number, (name, *_) in enumerate(given):
        if name in _TORCHTUNE_OWN:
            yield (*at, "args", number), f"{name} is set by the runtime", "remove it"


@rule_for_each(_train_jobs, f"{_PLUGINS}/jobset/jobset.go (Validate: initializers)", _WEBHOOK)
def train_job_initializers_exist(job: _TrainJob) -> Iterator[Problem]:
    """The runtime has the initializers that a TrainJob configures."""
    for key, name in INITIALIZERS.items():
        if job.runtime is None or key not in mapping(job.spec, "initializer"):
            continue
        at: Location = ("spec", "initializer", key)
        found = job.runtime.containers(name)
        container = next((each for each in found or [] if each.get("name") == name), None)
        mounts = [mapping(mount).get("name") for mount in sequence(container, "volumeMounts")]
        runtime = f"the runtime {job.runtime.name}"
        if container is None:
            what = f"{runtime} has no replicated job {name}" + (f" with a container {name}" if found else "")
            yield job.of_runtime((at, what, "remove it, or use another runtime"), _WEBHOOK)
        elif INITIALIZER_VOLUME not in mounts:
            what = f"the container {name} of {runtime} does not mount the volume {INITIALIZER_VOLUME}"
            why = "the webhook of Kubeflow Trainer 2.3 and newer refuses it"
            yield at, what, "add a volumeMount of that name to the runtime", Severity.NOTE, why


@rule_for_each(_train_jobs, f"{_PLUGINS}/jobset/jobset.go (Validate: runtimePatches)", _NO_IMAGE, Severity.CANNOT_START)
def train_job_patches_match_runtime(job: _TrainJob) -> Iterator[Problem]:
    """Runtime patches are for replicated jobs and containers that the runtime has.

    The webhook means to refuse others, but looks for them in the template that it has merged the patches into
    (newRuntimeInfo in pkg/runtime/core/trainingruntime.go).
    """
    if job.runtime is None:
        return
    known = [str(each.get("name")) for each in job.runtime.replicated_jobs]
    for at, replicated in job.patches():
        name = str(replicated.get("name", ""))
        if name and name not in known:
            what = f"the runtime {job.runtime.name} has no replicated job '{name}'{nearest(name, known)}"
            yield job.of_runtime(((*at, "name"), what, f"use one of {', '.join(known)}"), _NO_IMAGE)
    for at, owner, container in job.patched_containers():
        containers = [str(each.get("name")) for each in job.runtime.containers(owner) or []]
        name = str(container.get("name", ""))
        if owner in known and name and name not in containers:
            what = f"the job {owner} of the runtime {job.runtime.name} has no container '{name}'"
            yield job.of_runtime(((*at, "name"), what, f"use one of {', '.join(containers)}"), _NO_IMAGE)


@rule_for_each(
    _train_jobs,
    f"{_REPOSITORY}/pkg/apis/trainer/v1alpha1/trainjob_types.go; 2.0 and 2.1 of it",
    "newer versions refuse it, or drop it with a warning",
    Severity.NOTE,
)
def train_job_fields_are_current(job: _TrainJob) -> Iterator[Problem]:
    """A TrainJob has no fields and values that Kubeflow Trainer 2.2 and newer refuse."""
    for key, (last, instead) in _OLD_FIELDS.items():
        if key in job.spec:
            yield ("spec", key), f"{key} is a field of Kubeflow Trainer {last}", f"write {instead}"
    processes = job.trainer.get("numProcPerNode")
    if isinstance(processes, str):
        at, what = ("spec", "trainer", "numProcPerNode"), f"numProcPerNode: {processes} is for Kubeflow Trainer 2.1"
        yield at, what, "remove it, or write a number", Severity.NOTE, "newer versions accept numbers only"
