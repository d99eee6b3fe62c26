"""Rules about the nodes of Jobs and JobSets on GKE: TPU slices, GPUs, Spot VMs.

Topologies and machine types: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. How slices are run:
https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../how-to/tpu-multislice. Nothing of this is refused by
the API server: what no node can run is found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects, kubernetes_names
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.job_templates import JobTemplate, job_templates
from trainyard_jobs.schema.kubernetes_defaults import MAX_INT32, mapping, sequence

_INSTANCE_TYPE = "node.kubernetes.io/instance-type"

#: Annotation of pods that run on part of a slice, or on several as one: that topology, and not the nodes', is theirs
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/use-gke-dynamic-slicing).
_SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"

#: Node labels of nodes that offer more GPUs than they have (https://cloud.google.com/kubernetes-engine/docs/concepts/gpus).
_SHARED_GPUS = (
    "cloud.google.com/gke-gpu-partition-size",
    "cloud.google.com/gke-gpu-sharing-strategy",
    "cloud.google.com/gke-max-shared-clients-per-gpu",
)


def _generation(template: JobTemplate) -> str | None:
    """The TPU generation of the nodes; None without a TPU, and for one that machines.yaml does not have."""
    label = template.selector.get(gke_objects.ACCELERATOR)
    known = machines.table().tpus.items()
    return next((name for name, tpu in known if label and tpu.gke_accelerator == label), None)


def _sides(topology: object) -> list[int]:
    """``4x4x8`` as numbers; empty if it is no topology."""
    return (
        [int(side) for side in str(topology).split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", str(topology)) else []
    )


def _sliced(template: JobTemplate) -> str:
    """The topology of the part of a slice, or of the slices, that the pods run on; empty without one."""
    metadata = mapping(template.template.get("metadata"))
    return str(
        mapping(metadata.get("annotations")).get(_SLICE_TOPOLOGY) or template.selector.get(_SLICE_TOPOLOGY) or ""
    )


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (topologies); "
        "system_characteristics.py of https://github.com/AI-Hypercomputer/xpk 1.16.0"
    ),
)
def tpu_nodes_exist(job: Evidence) -> Iterator[Finding]:
    """The node selector names a TPU and a topology that exist together."""
    known = {tpu.gke_accelerator: tpu for tpu in machines.table().tpus.values() if tpu.gke_accelerator}
    why = "no node matches, and the pods stay Pending"
    for template in job_templates(job):
        accelerator, topology = (
            template.selector.get(gke_objects.ACCELERATOR),
            template.selector.get(gke_objects.TOPOLOGY),
        )
        at = (*template.pod_at, "nodeSelector")
        generation = _generation(template)
        if accelerator and generation is None and not str(accelerator).startswith("tpu-v3"):
            yield Finding(
                job.at(*at, gke_objects.ACCELERATOR, document=template.document),
                f"no TPU '{accelerator}'{unknown(str(accelerator), [str(one) for one in known])}",
                why,
                "use one of them; if it is new, add it to scripts/trainyard_jobs/model/machines.yaml",
                severity=Severity.NOTE,
            )
        elif bool(accelerator) != bool(topology) and not _sliced(template) and not template.queue:
            labels = [gke_objects.ACCELERATOR, gke_objects.TOPOLOGY]
            have, lack = labels if accelerator else reversed(labels)
            yield Finding(
                job.at(*at, document=template.document),
                f"{have} without {lack}",
                "GKE cannot provide nodes for it; only existing nodes may match",
                f"add {lack}",
                severity=Severity.NOTE,
            )
        elif generation and topology and not machines.machine_of_topology(generation, str(topology)):
            fitting = list(machines.table().tpus[generation].slices)
            yield Finding(
                job.at(*at, gke_objects.TOPOLOGY, document=template.document),
                f"{accelerator} has no topology '{topology}'{unknown(str(topology), fitting)}",
                why,
                "use one of them",
            )


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and "
        "https://cloud.google.com/compute/docs/gpus (the accelerators of each machine type)"
    ),
)
def node_labels_agree(job: Evidence) -> Iterator[Finding]:
    """A node can have all labels that are selected: machine type, GPU or TPU, and topology."""
    for template in job_templates(job):
        selector = template.selector
        machine, gpu = str(selector.get(_INSTANCE_TYPE) or ""), str(selector.get(gke_objects.GPU) or "")
        accelerator = str(selector.get(gke_objects.ACCELERATOR) or "")
        problem = ""
        if gpu and accelerator:
            problem = f"a GPU ({gpu}) and a TPU ({accelerator}) are selected: no machine has both"
        elif machine in machines.machine_types():
            problem = _contradiction(template, machine, gpu)
        if problem:
            yield Finding(
                job.at(*template.pod_at, "nodeSelector", document=template.document),
                problem,
                "no node matches, and the pods stay Pending",
                "correct or remove one of the labels",
            )


def _contradiction(template: JobTemplate, machine: str, gpu: str) -> str:
    """Why no node of a known machine type has the other labels; empty if one can."""
    own = machines.gpu_of_machine(machine)
    label = machines.table().gpus[own[0]].gke_accelerator if own else ""
    generation = _generation(template)
    if gpu and (own or not machine.startswith("n1-")) and gpu != label and gpu in _gpu_labels():
        return f"{machine} has {f'{own[1]} {label}' if own else 'no GPU'}, and {gpu} is selected"
    if generation and machines.generation_of_machine(machine) != generation:
        return f"{machine} has no {machines.table().tpus[generation].gke_accelerator}"
    topology = str(template.selector.get(gke_objects.TOPOLOGY) or "")
    if generation and machines.machine_of_topology(generation, topology) and not machines.slice_on(machine, topology):
        return f"{machine} is not a machine of the topology {topology}"
    return ""


def _gpu_labels() -> dict[str, int]:
    """Node label of every known GPU -> the most that a machine has."""
    return {gpu.gke_accelerator: max(gpu.counts) for gpu in machines.table().gpus.values()}


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source="https://cloud.google.com/compute/docs/gpus (GPUs of each machine type)",
)
def gpus_fit_node(job: Evidence) -> Iterator[Finding]:
    """The selected GPU exists, and a node has as many as a pod requests."""
    known = _gpu_labels()
    for template in job_templates(job):
        label = str(template.selector.get(gke_objects.GPU) or "")
        count = _devices(template, gke_objects.GPU_RESOURCE)
        own = machines.gpu_of_machine(str(template.selector.get(_INSTANCE_TYPE)))
        at = job.at(*template.pod_at, "nodeSelector", document=template.document)
        if label and label not in known:
            yield Finding(
                at,
                f"no GPU '{label}'{unknown(label, list(known))}",
                "no node matches, and the pods stay Pending",
                "use one of them; if it is new, add it to scripts/trainyard_jobs/model/machines.yaml",
                severity=Severity.NOTE,
            )
        most = own[1] if own else known.get(label)
        if most and count > most and not any(one in template.selector for one in _SHARED_GPUS):
            yield Finding(
                at,
                f"a pod requests {count} GPUs; a node has at most {most}",
                "the pods stay Pending",
                "request fewer in each pod, in more pods",
            )


def _devices(template: JobTemplate, resource: str) -> int:
    """How many devices a pod requests: those of its containers, and of its init containers that keep running."""
    total = 0
    for at, container in template.all_containers():
        if "containers" in at or container.get("restartPolicy") == "Always":
            amount = kubernetes_names.quantity(mapping(mapping(container.get("resources")).get("limits")).get(resource))
            total += int(amount) if amount is not None else 0
    return total


def _slices(template: JobTemplate) -> list[machines.TpuSlice]:
    """The slices that a selector matches: one for each machine type that has the topology."""
    generation, topology = _generation(template), str(template.selector.get(gke_objects.TOPOLOGY) or "")
    if generation is None:
        return []
    found = [machines.slice_on(machine, topology) for machine in machines.table().tpus[generation].chips]
    return [one for one in found if one]


def _at_once(template: JobTemplate) -> int:
    """How many pods of one Job run at the same time."""
    return min(template.count("parallelism"), template.pods)


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/kubernetes-engine/docs/how-to/tpus "
        "(parallelism and completions equal the number of VMs, google.com/tpu the chips of a VM)"
    ),
)
def pods_match_slice(job: Evidence) -> Iterator[Finding]:
    """There is one pod per machine of the slice, and it requests all chips of the machine."""
    templates = list(job_templates(job))
    for template in templates:
        chips = _devices(template, gke_objects.TPU_RESOURCE)
        if chips:
            yield from _slice_findings(job, template, chips, templates)
        elif fitting := _slices(template):
            tolerated = any(
                mapping(one).get("operator") == "Exists" or mapping(one).get("key") == gke_objects.TPU_RESOURCE
                for one in sequence(template.pod.get("tolerations"))
            )
            yield Finding(
                job.at(*template.pod_at, "containers", document=template.document),
                "TPU nodes are selected, but no container asks for google.com/tpu",
                "the pod gets no TPU" if tolerated else "the pod does not tolerate the taint of TPU nodes",
                f"add resources.limits google.com/tpu: {fitting[0].chips_per_host}",
                severity=Severity.NOTE if tolerated else Severity.CANNOT_START,
            )


def _slice_findings(
    job: Evidence, template: JobTemplate, chips: int, templates: list[JobTemplate]
) -> Iterator[Finding]:
    """Findings about a pod that requests ``chips``; ``templates`` are all of the file."""
    selector, sliced = template.selector, _sliced(template)
    pods = _at_once(template)
    if not selector.get(gke_objects.ACCELERATOR):
        if not template.queue:
            yield Finding(
                job.at(*template.pod_at, document=template.document),
                "google.com/tpu without a nodeSelector for the TPU",
                "GKE does not know which TPU to provide; only existing nodes may match",
                f"select {gke_objects.ACCELERATOR} and {gke_objects.TOPOLOGY}",
                severity=Severity.NOTE,
            )
        return
    if sliced:
        if _sides(sliced) and pods * chips % prod(_sides(sliced)):
            yield Finding(
                job.at(*template.at, "parallelism", document=template.document),
                f"{pods} pods of {chips} chips for a slice of {sliced}",
                "the pods may wait for chips of another slice",
                f"make the product {prod(_sides(sliced))}",
                severity=Severity.NOTE,
            )
        return
    fitting = _slices(template)
    if not fitting or any(one.chips_per_host == chips and one.hosts in (1, pods) for one in fitting):
        return  # unknown; reported by tpu_nodes_exist; or as it should be, a slice of one machine for each pod included
    same = [one for one in templates if one.document == template.document and one.selector == selector]
    together = sum(one.replicas * _at_once(one) for one in same)
    shared = any(one.chips_per_host == chips and together % one.hosts == 0 for one in fitting)
    partly = any(one.hosts == 1 and chips < one.chips_per_host for one in fitting)
    ways = " or ".join(f"{one.hosts} pods of {one.chips_per_host} chips ({one.machine_type})" for one in fitting)
    at = (*template.pod_at, "containers", 0, "resources", "limits", gke_objects.TPU_RESOURCE)
    if any(one.chips_per_host == chips for one in fitting):
        at = (*template.at, "completions" if "completions" in template.spec else "parallelism")
    yield Finding(
        job.at(*at, document=template.document),
        f"{template.pods} completions, {template.count('parallelism')} at a time, of {chips} chips for a topology of "
        f"{selector[gke_objects.TOPOLOGY]}",
        "libtpu waits for the missing machines, or the pods are never scheduled",
        f"make it {ways}",
        severity=Severity.NOTE if shared or partly else Severity.CANNOT_START,
    )


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/kubernetes-engine/docs/how-to/tpus "
        "(completionMode Indexed, backoffLimit 0, a headless Service as subdomain)"
    ),
)
def pod_groups_can_connect(job: Evidence) -> Iterator[Finding]:
    """Jobs of several pods are Indexed, do not retry single pods, and have resolvable host names."""
    services = {
        str(mapping(document.get("metadata")).get("name")): mapping(document.get("spec"))
        for document in job.job.documents
        if document.get("kind") == "Service"
    }
    for template in job_templates(job):
        if template.count("completions") < 2:
            continue

        def note(at: Location, what: str, why: str, remediation: str, *, document: int = template.document) -> Finding:
            return Finding(job.at(*at, document=document), what, why, remediation, severity=Severity.NOTE)

        if template.spec.get("completionMode") != "Indexed":
            yield note(
                template.at,
                f"{template.spec['completions']} pods without completionMode: Indexed",
                "no pod knows its index, which a group of pods needs that trains together",
                "add completionMode: Indexed",
            )
        if template.count("parallelism") < template.count("completions"):
            yield note(
                (*template.at, "parallelism"),
                f"{template.count('parallelism')} of {template.count('completions')} pods at a time",
                "pods that train together wait without end for those that are not started",
                "make both the same",
            )
        if template.spec.get("backoffLimit") not in (0, MAX_INT32) and "backoffLimitPerIndex" not in template.spec:
            yield note(
                (*template.at, "backoffLimit"),
                "backoffLimit is not 0",
                "a failed pod restarts alone, in a group that waits for the old one",
                "write backoffLimit: 0; a JobSet's failurePolicy.maxRestarts restarts the group",
            )
        if not template.in_jobset:
            yield from _host_names(job, template, services)


def _host_names(job: Evidence, template: JobTemplate, services: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Findings about the host names of a Job's pods, which GKE gives to libtpu where no variable does."""
    subdomain = template.pod.get("subdomain")
    if subdomain and services.get(str(subdomain), {}).get("clusterIP") == "None":
        return
    variables = {str(mapping(one).get("name")) for container in template.containers
                 for one in sequence(container.get("env"))}  # fmt: skip
    lost = bool(template.selector.get(gke_objects.ACCELERATOR)) and "TPU_WORKER_HOSTNAMES" not in variables
    yield Finding(
        job.at(*template.pod_at, "subdomain", document=template.document),
        f"subdomain '{subdomain}' has no headless Service here" if subdomain else "no subdomain",
        "the pods' host names do not resolve, so that they cannot connect",
        "add a Service with clusterIP: None, and set subdomain to its name",
        severity=Severity.CANNOT_START if lost and not subdomain else Severity.NOTE,
    )


@rule(
    "gke",
    severity=Severity.NOTE,
    source="https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms (15 seconds for user pods)",
)
def spot_grace_period_fits(job: Evidence) -> Iterator[Finding]:
    """Pods on Spot VMs end within the time that GKE leaves them."""
    for template in job_templates(job):
        grace = template.pod.get("terminationGracePeriodSeconds", 30)
        if template.selector.get(gke_objects.SPOT) and isinstance(grace, int) and grace > gke_objects.SPOT_GRACE:
            yield Finding(
                job.at(*template.pod_at, "terminationGracePeriodSeconds", document=template.document),
                f"a grace period of {grace} s on a Spot VM, which has {gke_objects.SPOT_GRACE} s",
                "the trainer is killed before it has saved",
                f"write {gke_objects.SPOT_GRACE}",
            )
