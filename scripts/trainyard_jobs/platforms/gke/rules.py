"""Rules about the nodes of Jobs and JobSets: TPU slices, GPUs, ports of the host, Spot VMs.

Topologies and machine types: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. How slices are run:
https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../how-to/tpu-multislice. The API server takes all of
this: what no node can run is found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from trainyard.common.rule_engine import Severity
from trainyard.spec.gpus import respelled
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.kubernetes.gke_objects import (
    ACCELERATOR,
    GPU,
    GPU_RESOURCE,
    INSTANCE_TYPE,
    TOPOLOGY,
    TPU_RESOURCE,
    quantity,
)
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.job_templates import JobTemplate, job_templates, pod_templates
from trainyard_jobs.rules.problems import Problem, rule_for_each
from trainyard_jobs.schema.kubernetes_defaults import MAX_INT32, entries, mapping, sequence

_DOCUMENTATION = "https://cloud.google.com/kubernetes-engine/docs"

#: Annotation of pods that run on part of a slice, or on several as one: that topology, and not the nodes', is theirs
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/use-gke-dynamic-slicing).
_SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"

#: Node labels of nodes that offer more GPUs than they have (https://cloud.google.com/kubernetes-engine/docs/concepts/gpus).
_SHARED_GPUS = (
    "cloud.google.com/gke-gpu-partition-size",
    "cloud.google.com/gke-gpu-sharing-strategy",
    "cloud.google.com/gke-max-shared-clients-per-gpu",
)

_PENDING = "no node matches, and the pods stay Pending"
_IF_NEW = "use one of them; if it is new, add it to scripts/trainyard_jobs/model/machines.yaml"


def _templates(job: Evidence) -> Iterator[tuple[int, JobTemplate]]:
    return ((template.document, template) for template in pod_templates(job))


def _sliced(template: JobTemplate) -> str:
    """The topology of the part of a slice, or of the slices, that the pods run on; empty without one."""
    annotations = mapping(template.template, "metadata", "annotations")
    return str(annotations.get(_SLICE_TOPOLOGY) or template.selector.get(_SLICE_TOPOLOGY) or "")


@rule_for_each(
    _templates,
    f"{_DOCUMENTATION}/concepts/plan-tpus (topologies); "
    "system_characteristics.py of https://github.com/AI-Hypercomputer/xpk 1.16.0",
    _PENDING,
    Severity.CANNOT_START,
)
def tpu_nodes_exist(template: JobTemplate) -> Iterator[Problem]:
    """The node selector names a TPU and a topology that exist together."""
    accelerator, topology = template.selector.get(ACCELERATOR), template.selector.get(TOPOLOGY)
    at, generation = (*template.pod_at, "nodeSelector"), gke_objects.generation_of(template.selector)
    if accelerator and generation is None and not str(accelerator).startswith("tpu-v3"):
        labels = {name: tpu.gke_accelerator for name, tpu in machines.table().tpus.items() if tpu.gke_accelerator}
        known = {label: label for label in labels.values()} | labels
        yield _unlisted("TPU", str(accelerator), known, "tpus", (*at, ACCELERATOR))
    elif bool(accelerator) != bool(topology) and not _sliced(template) and not template.queue:
        have, lack = (ACCELERATOR, TOPOLOGY) if accelerator else (TOPOLOGY, ACCELERATOR)
        why = "GKE cannot provide nodes for it; only existing nodes may match"
        yield at, f"{have} without {lack}", f"add {lack}", Severity.NOTE, why
    elif generation and topology and not machines.machine_of_topology(generation, str(topology)):
        fitting = list(machines.table().tpus[generation].slices)
        what = f"{accelerator} has no topology '{topology}'{unknown(str(topology), fitting)}"
        yield (*at, TOPOLOGY), what, "use one of them"


def _unlisted(kind: str, name: str, known: Mapping[str, str], table: str, at: Location) -> Problem:
    """Return the problem of a value that a table lacks: one of ``known``, name -> value, misspelt, or a note."""
    if right := respelled(name, known):
        return at, f"no {kind} '{name}'", f"write {known[right]}"
    others = unknown(name, list(dict.fromkeys(known.values())))
    what = f"{kind} '{name}' is not in the table of {machines.table().sources[table].checked}{others}"
    return at, what, _IF_NEW, Severity.NOTE, "whether GKE has such nodes is not checked"


@rule_for_each(
    _templates,
    f"{_DOCUMENTATION}/concepts/plan-tpus and "
    "https://cloud.google.com/compute/docs/gpus (the accelerators of each machine type)",
    _PENDING,
    Severity.CANNOT_START,
)
def node_labels_agree(template: JobTemplate) -> Iterator[Problem]:
    """A node can have all labels that are selected: machine type, GPU or TPU, and topology."""
    machine, gpu, accelerator = (str(template.selector.get(label) or "") for label in (INSTANCE_TYPE, GPU, ACCELERATOR))
    problem = ""
    if gpu and accelerator:
        problem = f"a GPU ({gpu}) and a TPU ({accelerator}) are selected: no machine has both"
    elif machine in machines.machine_types():
        problem = _contradiction(template, machine, gpu)
    elif right := respelled(machine, machines.machine_types()):
        problem = f"no machine type '{machine}' (did you mean '{right}'?)"
    if problem:
        yield (*template.pod_at, "nodeSelector"), problem, "correct or remove one of the labels"


def _contradiction(template: JobTemplate, machine: str, gpu: str) -> str:
    """Why no node of a known machine type has the other labels; empty if one can."""
    own = machines.gpu_of_machine(machine)
    label = machines.table().gpus[own[0]].gke_accelerator if own else ""
    generation = gke_objects.generation_of(template.selector)
    if gpu and (own or not machine.startswith("n1-")) and gpu != label and gpu in _gpu_labels():
        return f"{machine} has {f'{own[1]} {label}' if own else 'no GPU'}, and {gpu} is selected"
    if generation and machines.generation_of_machine(machine) != generation:
        return f"{machine} has no {machines.table().tpus[generation].gke_accelerator}"
    topology = str(template.selector.get(TOPOLOGY) or "")
    if generation and machines.machine_of_topology(generation, topology) and not machines.slice_on(machine, topology):
        return f"{machine} is not a machine of the topology {topology}"
    return ""


def _gpu_labels() -> dict[str, int]:
    """Node label of every known GPU -> the most that a machine has."""
    return {gpu.gke_accelerator: max(gpu.counts) for gpu in machines.table().gpus.values()}


@rule_for_each(
    _templates,
    "https://cloud.google.com/compute/docs/gpus (GPUs of each machine type)",
    _PENDING,
    Severity.CANNOT_START,
)
def gpus_fit_node(template: JobTemplate) -> Iterator[Problem]:
    """The selected GPU exists, and a node has as many as a pod requests."""
    known, at = _gpu_labels(), (*template.pod_at, "nodeSelector")
    label, count = str(template.selector.get(GPU) or ""), _devices(template, GPU_RESOURCE)
    own = machines.gpu_of_machine(str(template.selector.get(INSTANCE_TYPE)))
    if label and label not in known:
        yield _unlisted("GPU", label, {one: one for one in known}, "gpus", at)
    most = own[1] if own else known.get(label)
    if most and count > most and not any(key in template.selector for key in _SHARED_GPUS):
        what = f"a pod requests {count} GPUs; a node has at most {most}"
        yield at, what, "request fewer in each pod, in more pods"


def _devices(template: JobTemplate, resource: str) -> int:
    """How many devices a pod requests: those of its containers, and of its init containers that keep running."""
    total = 0
    for at, container in template.all_containers():
        if "containers" in at or container.get("restartPolicy") == "Always":
            amount = quantity(mapping(container, "resources", "limits").get(resource))
            total += int(amount) if amount is not None else 0
    return total


#: What the API server demands of devices, as a source of rules.
DEVICES = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers#extended-resources"


def unlimited(resources: Mapping[str, object], at: Location) -> Iterator[Problem]:
    """Yield the GPUs and chips among the resources of a container whose limit is not what is requested."""
    requests, limits = mapping(resources, "requests"), mapping(resources, "limits")
    for name in (GPU_RESOURCE, TPU_RESOURCE):
        if name in requests and quantity(requests[name]) != quantity(limits.get(name)):
            what = f"{name}: {requests[name]} requested, limit {limits.get(name, 'none')}"
            yield at, what, "give both the same number"


@rule_for_each(_templates, DEVICES, "no pod with it is created", Severity.CANNOT_START)
def accelerators_are_limited(template: JobTemplate) -> Iterator[Problem]:
    """A container has a limit for the GPUs and chips that it requests, of the same number."""
    for at, container in template.all_containers():
        yield from unlimited(mapping(container, "resources"), (*at, "resources"))


@rule_for_each(
    _templates,
    "https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/core/validation/validation.go "
    "(checkHostPortConflicts, of pods alone: templates have no defaults)",
    "the job is created, but the API server refuses its pods",
    Severity.CANNOT_START,
)
def host_ports_are_free(template: JobTemplate) -> Iterator[Problem]:
    """On the host's network, whose ports a pod's are, containers share none."""
    seen: set[tuple[object, ...]] = set()
    for at, container in template.all_containers() if template.pod.get("hostNetwork") else ():
        for here, port in entries(container, at, "ports") if "containers" in at else ():
            host = port.get("hostPort") or port.get("containerPort")
            if host != port.get("containerPort"):
                what = f"hostPort is {host} on the host's network"
                yield (*here, "hostPort"), what, "make it the same as containerPort"
            key = (host, port.get("protocol", "TCP"), port.get("hostIP", ""))
            if key in seen:
                yield here, f"port {host} of the host's network is used twice", "remove one, or use another port"
            seen.add(key)


def _slices(template: JobTemplate) -> list[machines.TpuSlice]:
    """The slices that a selector matches: one for each machine type that has the topology."""
    generation, topology = gke_objects.generation_of(template.selector), str(template.selector.get(TOPOLOGY) or "")
    if generation is None:
        return []
    found = [machines.slice_on(machine, topology) for machine in machines.table().tpus[generation].chips]
    return [fit for fit in found if fit]


def _at_once(template: JobTemplate) -> int:
    """How many pods of one Job run at the same time."""
    return min(template.count("parallelism"), template.pods)


def _with_others(job: Evidence) -> Iterator[tuple[int, tuple[JobTemplate, list[JobTemplate]]]]:
    """Yield every Job, and template of pods of no Job, with all of its document."""
    templates = list(pod_templates(job))
    for template in templates:
        yield template.document, (template, [each for each in templates if each.document == template.document])


@rule_for_each(
    _with_others,
    f"{_DOCUMENTATION}/how-to/tpus "
    "(parallelism and completions equal the number of VMs, google.com/tpu the chips of a VM)",
    "libtpu waits for the missing machines, or the pods are never scheduled",
    Severity.CANNOT_START,
)
def pods_match_slice(jobs: tuple[JobTemplate, list[JobTemplate]]) -> Iterator[Problem]:
    """There is one pod per machine of the slice, and it requests all chips of the machine."""
    template, templates = jobs
    chips = _devices(template, TPU_RESOURCE)
    if chips:
        yield from _slice_problems(template, chips, templates)
    elif fitting := _slices(template):
        tolerated = any(
            toleration.get("operator") == "Exists" or toleration.get("key") == TPU_RESOURCE
            for toleration in map(mapping, sequence(template.pod, "tolerations"))
        )
        what = "TPU nodes are selected, but no container asks for google.com/tpu"
        why = "the pod gets no TPU" if tolerated else "the pod does not tolerate the taint of TPU nodes"
        fix = f"add resources.limits google.com/tpu: {fitting[0].chips_per_host}"
        severity = Severity.NOTE if tolerated else Severity.CANNOT_START
        yield (*template.pod_at, "containers"), what, fix, severity, why


def _slice_problems(template: JobTemplate, chips: int, templates: list[JobTemplate]) -> Iterator[Problem]:
    """Yield problems of a pod that requests ``chips``; ``templates`` are all Jobs of its document."""
    selector, sides = template.selector, machines.sides(_sliced(template))
    pods = _at_once(template)
    if not selector.get(ACCELERATOR):
        if not template.queue:
            why = "GKE does not know which TPU to provide; only existing nodes may match"
            what = "google.com/tpu without a nodeSelector for the TPU"
            yield template.pod_at, what, f"select {ACCELERATOR} and {TOPOLOGY}", Severity.NOTE, why
        return
    if _sliced(template):
        if sides and pods * chips % prod(sides):
            what = f"{pods} pods of {chips} chips for a slice of {_sliced(template)}"
            fix, why = f"make the product {prod(sides)}", "the pods may wait for chips of another slice"
            yield (*template.at, "parallelism"), what, fix, Severity.NOTE, why
        return
    fitting = _slices(template)
    # Of pods of no Job, it is not known how many there are.
    if not fitting or any(
        fit.chips_per_host == chips and (fit.hosts in (1, pods) or not template.is_job) for fit in fitting
    ):
        return  # unknown; reported by tpu_nodes_exist; or as it should be, a slice of one machine for each pod included
    together = sum(other.replicas * _at_once(other) for other in templates if other.selector == selector)
    shared = any(fit.chips_per_host == chips and together % fit.hosts == 0 for fit in fitting)
    partly = any(fit.hosts == 1 and chips < fit.chips_per_host for fit in fitting)
    ways = " or ".join(f"{fit.hosts} pods of {fit.chips_per_host} chips ({fit.machine_type})" for fit in fitting)
    at = (*template.pod_at, "containers", 0, "resources", "limits", TPU_RESOURCE)
    if any(fit.chips_per_host == chips for fit in fitting):
        at = (*template.at, "completions" if "completions" in template.spec else "parallelism")
    pods_of = f"{template.pods} completions, {template.count('parallelism')} at a time," if template.is_job else "a pod"
    what = f"{pods_of} of {chips} chips for a topology of {selector[TOPOLOGY]}"
    yield at, what, f"make it {ways}", Severity.NOTE if shared or partly else Severity.CANNOT_START


def _with_services(job: Evidence) -> Iterator[tuple[int, tuple[JobTemplate, dict[str, object]]]]:
    """Yield every Job with the name of every Service of the file -> its clusterIP."""
    services = {
        str(mapping(document, "metadata").get("name")): mapping(document, "spec").get("clusterIP")
        for document in job.job.documents
        if document.get("kind") == "Service"
    }
    for template in job_templates(job):
        yield template.document, (template, services)


@rule_for_each(
    _with_services,
    f"{_DOCUMENTATION}/how-to/tpus (completionMode Indexed, backoffLimit 0, a headless Service as subdomain)",
    "the pods' host names do not resolve, so that they cannot connect",
    Severity.CANNOT_START,
)
def pod_groups_can_connect(job: tuple[JobTemplate, dict[str, object]]) -> Iterator[Problem]:
    """Jobs of several pods are Indexed, do not retry single pods, and have resolvable host names."""
    template, services = job
    completions, parallelism, note = template.count("completions"), template.count("parallelism"), Severity.NOTE
    if completions < 2:
        return
    variables = {str(mapping(variable).get("name")) for container in template.containers
                 for variable in sequence(container, "env")}  # fmt: skip
    if template.spec.get("completionMode") != "Indexed":
        # GKE gives libtpu the index of a pod as TPU_WORKER_ID.
        of_slice = template.selector.get(ACCELERATOR) and "TPU_WORKER_ID" not in variables and not _sliced(template)
        hosts = [fit.hosts for fit in _slices(template)] if of_slice and _devices(template, TPU_RESOURCE) else []
        lost = bool(hosts) and min(hosts) > 1
        what = f"{template.spec['completions']} pods without completionMode: Indexed"
        why = "no pod knows its index, which a group of pods needs that trains together"
        severity = Severity.CANNOT_START if lost else note
        yield template.at, what, "add completionMode: Indexed", severity, why
    if parallelism < completions:
        what = f"{parallelism} of {completions} pods at a time"
        why = "pods that train together wait without end for those that are not started"
        yield (*template.at, "parallelism"), what, "make both the same", note, why
    if template.spec.get("backoffLimit") not in (0, MAX_INT32) and "backoffLimitPerIndex" not in template.spec:
        why = "a failed pod restarts alone, in a group that waits for the old one"
        fix = "write backoffLimit: 0; a JobSet's failurePolicy.maxRestarts restarts the group"
        yield (*template.at, "backoffLimit"), "backoffLimit is not 0", fix, note, why
    subdomain = template.pod.get("subdomain")
    if not template.in_jobset and not (subdomain and services.get(str(subdomain)) == "None"):
        # GKE gives libtpu the host names of the pods where no variable does.
        lost = bool(template.selector.get(ACCELERATOR)) and "TPU_WORKER_HOSTNAMES" not in variables
        what = f"subdomain '{subdomain}' has no headless Service here" if subdomain else "no subdomain"
        fix = "add a Service with clusterIP: None, and set subdomain to its name"
        severity = Severity.CANNOT_START if lost and not subdomain else note
        yield (*template.pod_at, "subdomain"), what, fix, severity


@rule_for_each(
    _templates,
    f"{_DOCUMENTATION}/concepts/spot-vms (15 seconds for user pods)",
    "the trainer is killed before it has saved",
    Severity.NOTE,
)
def spot_grace_period_fits(template: JobTemplate) -> Iterator[Problem]:
    """Pods on Spot VMs end within the time that GKE leaves them."""
    grace, most = template.pod.get("terminationGracePeriodSeconds", 30), gke_objects.SPOT_GRACE
    if template.selector.get(gke_objects.SPOT) and isinstance(grace, int) and grace > most:
        what = f"a grace period of {grace} s on a Spot VM, which has {most} s"
        yield (*template.pod_at, "terminationGracePeriodSeconds"), what, f"write {most}"
