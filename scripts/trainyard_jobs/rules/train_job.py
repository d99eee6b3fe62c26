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
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.kubernetes import train_jobs
from trainyard_jobs.kubernetes.train_jobs import INITIALIZER_VOLUME, INITIALIZERS, NODE, Runtime
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import Problem, object_name, repeated
from trainyard_jobs.rules.kubernetes_pod import resource_problems
from trainyard_jobs.schema.kubernetes_defaults import mapping, sequence

_REPOSITORY = "https://github.com/kubeflow/trainer/blob/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3"
_CRD = f"{_REPOSITORY}/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
_PLUGINS = f"{_REPOSITORY}/pkg/runtime/framework/plugins"
_CORE = "https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/core/validation/validation.go"
_JOBSET = "https://github.com/kubernetes-sigs/jobset/blob/08dfbdf/pkg/webhooks/jobset_webhook.go"

_WEBHOOK = "Kubeflow Trainer's webhook refuses it"
_DEFINITION = "the API server refuses the TrainJob"

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
    """A TrainJob of the file: the number of its document, and its runtime if that is known."""

    number: int
    document: dict[str, Any]
    runtime: Runtime | None

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.document.get("spec"))

    @property
    def trainer(self) -> dict[str, Any]:
        return mapping(self.spec.get("trainer"))

    def patches(self) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Every replicated job of every runtime patch, with its location."""
        for number, patch in enumerate(map(mapping, sequence(self.spec.get("runtimePatches")))):
            template = mapping(mapping(patch.get("trainingRuntimeSpec")).get("template"))
            for index, one in enumerate(map(mapping, sequence(mapping(template.get("spec")).get("replicatedJobs")))):
                at: Location = ("spec", "runtimePatches", number, "trainingRuntimeSpec", "template", "spec")
                yield (*at, "replicatedJobs", index), one

    def patched_containers(self) -> Iterator[tuple[Location, str, dict[str, Any]]]:
        """Every container of every patch: its location, the name of its replicated job, itself."""
        for at, one in self.patches():
            pod = train_jobs.pod_of(one)
            for key in ("initContainers", "containers"):
                for index, container in enumerate(map(mapping, sequence(pod.get(key)))):
                    yield (*at, "template", "spec", "template", "spec", key, index), str(one.get("name")), container


def _train_jobs(job: Evidence) -> Iterator[_TrainJob]:
    for number, document in enumerate(job.job.documents):
        if train_jobs.is_train_job(document):
            yield _TrainJob(number, document, train_jobs.runtime_of(document, job.job.documents))


def _finding(
    job: Evidence, one: _TrainJob, problem: Problem, why: str, severity: Severity = Severity.REFUSE
) -> Finding:
    location, what, remediation = problem
    return Finding(job.at(*location, document=one.number), what, why, remediation, severity=severity)


def _of_runtime(job: Evidence, one: _TrainJob, problem: Problem, why: str, severity: Severity) -> Finding:
    """A finding that depends on the template of the runtime."""
    if one.runtime and one.runtime.in_file:
        return _finding(job, one, problem, why, severity)
    why = f"{why}, unless the cluster's runtime is another one than Kubeflow Trainer installs"
    return _finding(job, one, problem, why, Severity.NOTE)


@rule("gke", severity=Severity.CANNOT_START, source=f"{_JOBSET} (ValidateCreate: names of Jobs and pods)")
def train_job_pods_have_names(job: Evidence) -> Iterator[Finding]:
    """The names that the pods of a TrainJob get are DNS labels."""
    for one in _train_jobs(job):
        name = object_name(one.document)
        if not name or one.runtime is None or names.dns_1035_label(name):
            continue
        jobset = train_jobs.jobset(one.document, one.runtime, name)
        for replicated in map(mapping, sequence(jobset["spec"].get("replicatedJobs"))):
            pods = mapping(mapping(replicated.get("template")).get("spec")).get("completions")
            last = max(0, pods - 1) if isinstance(pods, int) else 0
            longest = f"{name}-{replicated.get('name')}-0-{last}-abcde"
            if wrong := names.dns_1035_label(longest):
                problem = (
                    ("metadata", "name"),
                    f"its pods are named {longest}, with a random ending: {wrong}",
                    "shorten it",
                )
                why = "the TrainJob is created, but JobSet's webhook refuses its JobSet"
                yield _finding(job, one, problem, why, Severity.CANNOT_START)
                break


@rule("gke", severity=Severity.REFUSE, source=f"{_CRD} (x-kubernetes-list-map-keys)")
def train_job_lists_have_unique_keys(job: Evidence) -> Iterator[Finding]:
    """Variables, patches, containers, volumes and mounts of a TrainJob are not given twice."""
    for one in _train_jobs(job):
        for problem in _duplicates(one):
            yield _finding(job, one, problem, _DEFINITION)


def _duplicates(one: _TrainJob) -> Iterator[Problem]:
    name: dict[str, object] = {"name": ""}
    yield from repeated(one.trainer.get("env"), ("spec", "trainer", "env"), name)
    claims = mapping(one.trainer.get("resourcesPerNode")).get("claims")
    yield from repeated(claims, ("spec", "trainer", "resourcesPerNode", "claims"), name)
    for key in INITIALIZERS:
        variables = mapping(mapping(one.spec.get("initializer")).get(key)).get("env")
        yield from repeated(variables, ("spec", "initializer", key, "env"), name)
    yield from repeated(one.spec.get("runtimePatches"), ("spec", "runtimePatches"), {"manager": ""})
    lists: dict[Location, list[Any]] = {}
    for at, replicated in one.patches():
        lists.setdefault(at[:-1], []).append(replicated)
        for key in _NAMED:
            here = (*at, "template", "spec", "template", "spec", key)
            yield from repeated(train_jobs.pod_of(replicated).get(key), here, name)
    for at, replicated_jobs in lists.items():
        yield from repeated(replicated_jobs, at, name)
    for at, _, container in one.patched_containers():
        # By its definition, a patch can mount a volume once only.
        for key in ("env", "volumeMounts"):
            yield from repeated(container.get(key), (*at, key), name)


@rule("gke", severity=Severity.REFUSE, source=f"{_PLUGINS}/jobset/jobset.go (Validate: runtimePatches)")
def train_job_patches_have_managers(job: Evidence) -> Iterator[Finding]:
    """The manager of a runtime patch is a path with a domain, and sets no variables of the trainer or initializers."""
    reserved = (NODE, *INITIALIZERS.values())
    for one in _train_jobs(job):
        for number, patch in enumerate(map(mapping, sequence(one.spec.get("runtimePatches")))):
            manager = str(patch.get("manager", ""))
            if manager and (wrong := names.domain_prefixed_path(manager)):
                at: Location = ("spec", "runtimePatches", number, "manager")
                yield _finding(job, one, (at, f"manager is '{manager}'", wrong), _WEBHOOK)
        for at, _, container in one.patched_containers():
            if container.get("name") in reserved and "initContainers" not in at and container.get("env"):
                what = f"a patch sets variables of the container {container['name']}"
                field = "spec.trainer.env" if container["name"] == NODE else "spec.initializer"
                yield _finding(job, one, ((*at, "env"), what, f"write them in {field}"), _WEBHOOK)


@rule("gke", severity=Severity.REFUSE, source=f"{_REPOSITORY}/pkg/webhooks/trainjob_webhook.go (ValidateCreate)")
def train_job_runtimes_exist(job: Evidence) -> Iterator[Finding]:
    """A TrainJob names a runtime of a kind that exists; the runtime is created before the job."""
    for one in _train_jobs(job):
        group, kind, name = train_jobs.reference(one.document)
        at: Location = ("spec", "runtimeRef")
        if group != train_jobs.GROUP or kind not in train_jobs.RUNTIME_KINDS:
            kinds = " or ".join(train_jobs.RUNTIME_KINDS)
            problem = at, f"no kind of runtime {kind}.{group}", f"use {kinds} of {train_jobs.GROUP}"
            yield _finding(job, one, problem, _WEBHOOK)
        elif one.runtime is None and name:
            problem = at, f"{kind} {name} is not in this file", "nothing, if the cluster has it: 'kubectl get' shows it"
            yield _finding(job, one, problem, "what it decides is not checked", Severity.NOTE)


@rule(
    "gke", severity=Severity.REFUSE, source=f"{_PLUGINS} (Validate of torch/torch.go, mpi/mpi.go, xgboost/xgboost.go)"
)
def train_job_variables_are_free(job: Evidence) -> Iterator[Finding]:
    """A TrainJob sets no variable that its runtime sets."""
    for one in _train_jobs(job):
        reserved = _RESERVED.get(one.runtime.policy, ()) if one.runtime else ()
        for number, variable in enumerate(map(mapping, sequence(one.trainer.get("env")))):
            if variable.get("name") in reserved:
                at: Location = ("spec", "trainer", "env", number)
                problem = at, f"{variable['name']} is set by the runtime", "remove it"
                yield _finding(job, one, problem, _WEBHOOK)


@rule("gke", severity=Severity.CANNOT_START, source=f"{_CORE} (ValidateContainerResourceRequirements)")
def train_job_resources_are_valid(job: Evidence) -> Iterator[Finding]:
    """Requests of a node are at most its limits; GPUs are requested and limited equally."""
    why = "the TrainJob is created, but the API server refuses its Jobs"
    for one in _train_jobs(job):
        own = mapping(one.trainer.get("resourcesPerNode"))
        given = {kind: mapping(own.get(kind)) for kind in ("requests", "limits")}
        if any(names.quantity(value) is None for values in given.values() for value in values.values()):
            continue  # the definition refuses it
        in_file = one.runtime is not None and one.runtime.in_file
        # A runtime of the cluster may limit what is only requested here.
        certain = in_file or given["requests"].keys() <= given["limits"].keys()
        severity = Severity.CANNOT_START if certain else Severity.NOTE
        base = one.runtime.trainer_container.get("resources") if one.runtime else None
        merged = mapping(train_jobs.merged(base, own)) if own else {}
        for problem in resource_problems(merged, ("spec", "trainer", "resourcesPerNode")):
            yield _finding(job, one, problem, why, severity)


@rule("gke", severity=Severity.REFUSE, source=f"{_PLUGINS}/torch/torchtune.go (validateTorchTune)")
def torchtune_supports_model(job: Evidence) -> Iterator[Finding]:
    """torchtune supports the model, the number of nodes and the kind of fine-tuning of a TrainJob."""
    for one in _train_jobs(job):
        runtime = one.runtime
        if runtime and runtime.policy == "torch" and one.trainer.get("command") == train_jobs.TORCHTUNE:
            for problem in _torchtune(one, runtime):
                yield _finding(job, one, problem, _WEBHOOK)


def _torchtune(one: _TrainJob, runtime: Runtime) -> Iterator[Problem]:
    parts, nodes = runtime.name.split("-"), one.trainer.get("numNodes", 1)
    model = f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""
    at: Location = ("spec", "trainer")
    if model not in _TORCHTUNE_MODELS:
        what = f"'tune run' on the runtime {runtime.name}, which names no model"
        yield ("spec", "runtimeRef", "name"), what, "use torchtune-llama3.2-1b or another one of torchtune"
    given = [str(word).partition("=") for word in sequence(one.trainer.get("args"))]
    enabled = [name for name, _, value in given if value.strip().lower() == "true"]
    quantized = any("model.quantize_base" in name for name in enabled) and not any(
        "model.use_dora" in name for name in enabled
    )
    if nodes > 1 and (model != _ON_NODES or quantized or any("model.lora_attn_modules" in name for name, *_ in given)):
        what = f"{model or 'it'} on {nodes} nodes"
        yield (*at, "numNodes"), what, f"write numNodes: 1; {_ON_NODES} runs on several, without LoRA"
    single = (
        one.trainer.get("numProcPerNode") == 1 or train_jobs.gpus(mapping(one.trainer.get("resourcesPerNode"))) == 1
    )
    if quantized and nodes == 1 and (model == _NO_QLORA or (model in _QLORA_ON_ONE_DEVICE and not single)):
        fix = "use another model" if model == _NO_QLORA else "request one GPU"
        yield (*at, "args"), f"QLoRA of {model}" + ("" if model == _NO_QLORA else " on several devices"), fix
    for number, (name, *_) in enumerate(given):
        if name in _TORCHTUNE_OWN:
            yield (*at, "args", number), f"{name} is set by the runtime", "remove it"


@rule("gke", severity=Severity.REFUSE, source=f"{_PLUGINS}/jobset/jobset.go (Validate: initializers)")
def train_job_initializers_exist(job: Evidence) -> Iterator[Finding]:
    """The runtime has the initializers that a TrainJob configures."""
    for one in _train_jobs(job):
        for key, name in INITIALIZERS.items():
            if one.runtime is None or key not in mapping(one.spec.get("initializer")):
                continue
            at: Location = ("spec", "initializer", key)
            found = one.runtime.containers(name)
            container = next((each for each in found or [] if each.get("name") == name), None)
            mounts = [mapping(mount).get("name") for mount in sequence(mapping(container).get("volumeMounts"))]
            runtime = f"the runtime {one.runtime.name}"
            if container is None:
                what = f"{runtime} has no replicated job {name}" + (f" with a container {name}" if found else "")
                problem = at, what, "remove it, or use another runtime"
                yield _of_runtime(job, one, problem, _WEBHOOK, Severity.REFUSE)
            elif INITIALIZER_VOLUME not in mounts:
                what = f"the container {name} of {runtime} does not mount the volume {INITIALIZER_VOLUME}"
                why = "the webhook of Kubeflow Trainer 2.3 and newer refuses it"
                yield _finding(
                    job, one, (at, what, "add a volumeMount of that name to the runtime"), why, Severity.NOTE
                )


@rule("gke", severity=Severity.CANNOT_START, source=f"{_PLUGINS}/jobset/jobset.go (Validate: runtimePatches)")
def train_job_patches_match_runtime(job: Evidence) -> Iterator[Finding]:
    """Runtime patches are for replicated jobs and containers that the runtime has.

    The webhook means to refuse others, but looks for them in the template that it has merged the patches into
    (newRuntimeInfo in pkg/runtime/core/trainingruntime.go).
    """
    why = "the patch adds a container without an image"
    for one in _train_jobs(job):
        if one.runtime is None:
            continue
        known = [str(each.get("name")) for each in one.runtime.replicated_jobs]
        for at, replicated in one.patches():
            name = str(replicated.get("name", ""))
            if name and name not in known:
                what = f"the runtime {one.runtime.name} has no replicated job '{name}'{nearest(name, known)}"
                problem = (*at, "name"), what, f"use one of {', '.join(known)}"
                yield _of_runtime(job, one, problem, why, Severity.CANNOT_START)
        for at, owner, container in one.patched_containers():
            containers = [str(each.get("name")) for each in one.runtime.containers(owner) or []]
            name = str(container.get("name", ""))
            if owner in known and name and name not in containers:
                what = f"the job {owner} of the runtime {one.runtime.name} has no container '{name}'"
                problem = (*at, "name"), what, f"use one of {', '.join(containers)}"
                yield _of_runtime(job, one, problem, why, Severity.CANNOT_START)


@rule(
    "gke",
    severity=Severity.NOTE,
    source=f"{_REPOSITORY}/pkg/apis/trainer/v1alpha1/trainjob_types.go; 2.0 and 2.1 of it",
)
def train_job_fields_are_current(job: Evidence) -> Iterator[Finding]:
    """A TrainJob has no fields and values that Kubeflow Trainer 2.2 and newer refuse."""
    for one in _train_jobs(job):
        for key, (last, instead) in _OLD_FIELDS.items():
            if key in one.spec:
                what = f"{key} is a field of Kubeflow Trainer {last}"
                why = "newer versions refuse it, or drop it with a warning"
                yield _finding(job, one, (("spec", key), what, f"write {instead}"), why, Severity.NOTE)
        processes = one.trainer.get("numProcPerNode")
        if isinstance(processes, str):
            at: Location = ("spec", "trainer", "numProcPerNode")
            problem = at, f"numProcPerNode: {processes} is for Kubeflow Trainer 2.1", "remove it, or write a number"
            yield _finding(job, one, problem, "newer versions accept numbers only", Severity.NOTE)
