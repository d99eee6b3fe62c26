"""Rules about Jobs and JobSets on GKE.

Topologies and machine types: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. How slices are run:
https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../how-to/tpu-multislice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.jobs import gke_objects, machines
from trainyard.jobs.schema import kubernetes
from trainyard.lint.engine import Finding, Severity, rule
from trainyard.lint.jobs.evidence import Evidence, unknown
from trainyard.spec.yaml_source import Location

#: TPUs whose list of topologies in machines.yaml is not complete: custom topologies exist.
_MORE_TOPOLOGIES = ("tpu-v4-podslice", "tpu-v5p-slice", "tpu7x")


@dataclass(frozen=True)
class JobTemplate:
    """The spec of a Job, or of a replicated job of a JobSet.

    Attributes:
        document: its number, ``at``: location of the spec in it.
        host: host name of its pods without the index at the end.
        replicas: how many such Jobs there are.
    """

    document: int
    at: Location
    spec: dict[str, Any]
    host: str
    replicas: int
    in_jobset: bool

    @property
    def pod(self) -> dict[str, Any]:
        template = self.spec.get("template")
        pod = template.get("spec") if isinstance(template, dict) else None
        return pod if isinstance(pod, dict) else {}

    @property
    def pod_at(self) -> Location:
        return (*self.at, "template", "spec")

    @property
    def containers(self) -> list[dict[str, Any]]:
        found = self.pod.get("containers")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def selector(self) -> dict[str, Any]:
        found = self.pod.get("nodeSelector")
        return found if isinstance(found, dict) else {}

    def count(self, key: str) -> int:
        value = self.spec.get(key)
        return value if isinstance(value, int) else 1


def job_templates(job: Evidence) -> Iterator[JobTemplate]:
    """Every Job of the file, also those within JobSets."""
    for number, document in enumerate(job.job.documents):
        name = str((document.get("metadata") or {}).get("name", ""))
        spec = document.get("spec")
        if document.get("kind") == "Job" and isinstance(spec, dict):
            yield JobTemplate(number, ("spec",), spec, name, 1, False)
        if document.get("kind") == "JobSet":
            for index, one in enumerate(kubernetes.replicated_jobs(document)):
                inner = (one.get("template") or {}).get("spec")
                replicas = one.get("replicas", 1) if isinstance(one.get("replicas", 1), int) else 1
                if isinstance(inner, dict):
                    at: Location = ("spec", "replicatedJobs", index, "template", "spec")
                    host = f"{name}-{one.get('name', '')}-{max(0, replicas - 1)}"
                    yield JobTemplate(number, at, inner, host, replicas, True)


@rule(
    "gke",
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus; "
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
        if bool(accelerator) != bool(topology):
            have, lack = (
                (gke_objects.ACCELERATOR, gke_objects.TOPOLOGY)
                if accelerator
                else (gke_objects.TOPOLOGY, gke_objects.ACCELERATOR)
            )
            yield Finding(job.at(*at, document=template.document), f"{have} without {lack}", why, f"add {lack}")
        elif accelerator and str(accelerator).startswith("tpu-v3"):
            continue
        elif accelerator and accelerator not in known:
            yield Finding(
                job.at(*at, gke_objects.ACCELERATOR, document=template.document),
                f"no TPU '{accelerator}'{unknown(str(accelerator), [str(one) for one in known])}",
                why,
                "use one of them",
            )
        elif accelerator and topology not in known[accelerator].slices:
            fitting = list(known[accelerator].slices)
            yield Finding(
                job.at(*at, gke_objects.TOPOLOGY, document=template.document),
                f"{accelerator} has no topology '{topology}'{unknown(str(topology), fitting)}",
                why,
                "use one of them",
                severity=Severity.NOTE if str(accelerator) in _MORE_TOPOLOGIES else Severity.CANNOT_START,
            )


def _slices(template: JobTemplate) -> list[machines.TpuSlice]:
    """The slices that a selector matches: one per machine type that has the topology."""
    for tpu in machines.table().tpus.values():
        if tpu.gke_accelerator and tpu.gke_accelerator == template.selector.get(gke_objects.ACCELERATOR):
            found = [
                machines.slice_on(machine, str(template.selector.get(gke_objects.TOPOLOGY))) for machine in tpu.chips
            ]
            return [one for one in found if one]
    return []


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
    for template in job_templates(job):
        chips = [(index, _limit(container, "google.com/tpu")) for index, container in enumerate(template.containers)]
        asked = next(((index, count) for index, count in chips if count), None)
        fitting = _slices(template)
        if asked is None:
            if fitting:
                yield Finding(
                    job.at(*template.pod_at, "containers", document=template.document),
                    "TPU nodes are selected, but no container asks for google.com/tpu",
                    "the pod gets no TPU",
                    f"add resources.limits google.com/tpu: {fitting[0].chips_per_host}",
                )
            continue
        if not template.selector.get(gke_objects.ACCELERATOR):
            yield Finding(
                job.at(*template.pod_at, document=template.document),
                "google.com/tpu without a nodeSelector for the TPU",
                "GKE does not know which TPU to provide",
                f"select {gke_objects.ACCELERATOR} and {gke_objects.TOPOLOGY}",
            )
            continue
        if not fitting:
            continue  # reported by tpu_nodes_exist
        index, count = asked
        pods = template.count("completions"), template.count("parallelism")
        if any(one.chips_per_host == count and pods == (one.hosts, one.hosts) for one in fitting):
            continue
        ways = " or ".join(f"{one.hosts} pods of {one.chips_per_host} chips ({one.machine_type})" for one in fitting)
        at = (*template.pod_at, "containers", index, "resources", "limits", "google.com/tpu")
        if any(one.chips_per_host == count for one in fitting):
            at = (*template.at, "completions" if "completions" in template.spec else "parallelism")
        yield Finding(
            job.at(*at, document=template.document),
            f"{pods[0]} completions, {pods[1]} at a time, of {count} chips for a topology of "
            f"{template.selector[gke_objects.TOPOLOGY]}",
            "libtpu waits for the missing machines, or the pods are never scheduled",
            f"make it {ways}",
        )


def _limit(container: dict[str, Any], name: str) -> int:
    resources = container.get("resources")
    limits = (resources.get("limits") if isinstance(resources, dict) else None) or {}
    value = str(limits.get(name, "")) if isinstance(limits, dict) else ""
    return int(value) if value.isdigit() else 0


@rule(
    "gke",
    severity=Severity.REFUSE,
    source="https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus (extended resources cannot be overcommitted)",
)
def requests_equal_limits(job: Evidence) -> Iterator[Finding]:
    """Requests and limits of accelerators are equal."""
    for template in job_templates(job):
        for index, container in enumerate(template.containers):
            resources = container.get("resources")
            if not isinstance(resources, dict):
                continue
            for name in ("google.com/tpu", "nvidia.com/gpu"):
                given = [str((resources.get(kind) or {}).get(name, "")) for kind in ("requests", "limits")]
                if given[0] and given[0] != given[1]:
                    yield Finding(
                        job.at(*template.pod_at, "containers", index, "resources", document=template.document),
                        f"{name}: {given[0]} requested, limit {given[1] or 'none'}",
                        "the API server refuses the pod",
                        "give both the same number",
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
        str((document.get("metadata") or {}).get("name")): document.get("spec") or {}
        for document in job.job.documents
        if document.get("kind") == "Service"
    }
    for template in job_templates(job):
        if template.count("completions") < 2:
            continue
        if template.spec.get("completionMode") != "Indexed":
            yield Finding(
                job.at(*template.at, document=template.document),
                f"{template.spec['completions']} pods without completionMode: Indexed",
                "no pod knows its index",
                "add completionMode: Indexed",
            )
        if template.count("parallelism") < template.count("completions"):
            yield Finding(
                job.at(*template.at, "parallelism", document=template.document),
                f"{template.count('parallelism')} of {template.count('completions')} pods at a time",
                "the first pods wait without end for those that are not started",
                "make both the same",
            )
        if template.spec.get("backoffLimit", 6) != 0:
            yield Finding(
                job.at(*template.at, "backoffLimit", document=template.document),
                "backoffLimit is not 0",
                "a failed pod restarts alone, in a group that waits for the old one",
                "write backoffLimit: 0; a JobSet's failurePolicy.maxRestarts restarts the group",
            )
        subdomain = template.pod.get("subdomain")
        headless = services.get(str(subdomain), {}).get("clusterIP") == "None"
        if not template.in_jobset and not (subdomain and headless):
            yield Finding(
                job.at(*template.pod_at, "subdomain", document=template.document),
                f"subdomain '{subdomain}' has no headless Service here" if subdomain else "no subdomain",
                "the pods' host names do not resolve, so that they cannot connect",
                "add a Service with clusterIP: None, and set subdomain to its name",
                severity=Severity.NOTE if subdomain else Severity.CANNOT_START,
            )


@rule(
    "gke",
    severity=Severity.REFUSE,
    source=(
        "https://kubernetes.io/docs/concepts/workloads/controllers/job (Never or OnFailure; "
        "a podFailurePolicy needs Never)"
    ),
)
def restart_policy_is_allowed(job: Evidence) -> Iterator[Finding]:
    """The restart policy is one that Jobs and their pod failure policy allow."""
    for template in job_templates(job):
        policy = template.pod.get("restartPolicy", "Always")
        allowed = ["Never"] if template.spec.get("podFailurePolicy") else ["Never", "OnFailure"]
        if template.pod and policy not in allowed:
            yield Finding(
                job.at(*template.pod_at, "restartPolicy", document=template.document),
                f"restartPolicy is {policy}",
                "the API server refuses the Job",
                f"write {' or '.join(allowed)}",
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


@rule(
    "gke",
    severity=Severity.REFUSE,
    source=(
        "https://www.rfc-editor.org/rfc/rfc1123; jobset_types.go "
        "(a host name is <jobset>-<job>-<job index>-<pod index>)"
    ),
)
def names_are_short_enough(job: Evidence) -> Iterator[Finding]:
    """Names are valid labels, as are the pod names that Kubernetes derives from them."""
    for number, document in enumerate(job.job.documents):
        name = str((document.get("metadata") or {}).get("name", ""))
        if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            yield Finding(
                job.at("metadata", "name", document=number),
                f"name '{name}'",
                "the API server refuses it",
                "use a-z, 0-9 and dashes, at most 63",
            )
    for template in job_templates(job):
        longest = f"{template.host}-{max(0, template.count('completions') - 1)}"
        if len(longest) > 63:
            yield Finding(
                job.at("metadata", "name", document=template.document),
                f"the host names of its pods have {len(longest)} characters; at most 63 ({longest})",
                "the pods cannot be created",
                "use a shorter name",
            )
