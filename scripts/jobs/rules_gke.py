"""What GKE takes and never runs, or runs wrongly, in Jobs and JobSets.

Topologies and machine types: kubernetes-engine/docs/concepts/plan-tpus; how slices are run:
kubernetes-engine/docs/how-to/tpus and tpu-multislice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.documents import Location
from scripts.jobs import gke, kubernetes, machines
from scripts.jobs.rules import Evidence, Flaw, complaints, rule, unknown


@dataclass(frozen=True)
class Work:
    """A Job's spec, wherever it is: at the top of a Job, or in a JobSet.

    Attributes:
        at: location of the spec in its document.
        host: name of its pods' hosts without the index at the end.
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


def works(job: Evidence) -> Iterator[Work]:
    """Every Job of the file, also those within JobSets."""
    for number, document in enumerate(job.job.documents):
        name = str((document.get("metadata") or {}).get("name", ""))
        spec = document.get("spec")
        if document.get("kind") == "Job" and isinstance(spec, dict):
            yield Work(number, ("spec",), spec, name, 1, False)
        if document.get("kind") == "JobSet":
            for index, one in enumerate(kubernetes.replicated_jobs(document)):
                inner = (one.get("template") or {}).get("spec")
                replicas = one.get("replicas", 1) if isinstance(one.get("replicas", 1), int) else 1
                if isinstance(inner, dict):
                    at: Location = ("spec", "replicatedJobs", index, "template", "spec")
                    host = f"{name}-{one.get('name', '')}-{max(0, replicas - 1)}"
                    yield Work(number, at, inner, host, replicas, True)


@rule("gke", of_shape=True)
def manifests_have_the_schema(job: Evidence) -> Iterator[Flaw]:
    """Every object is as its kind's schema says, with no unknown field.

    kubernetes-validate's schemas of the newest Kubernetes; JobSet: kubernetes-sigs/jobset, jobset_types.go.
    """
    for number, document in enumerate(job.job.documents):
        for one in complaints("gke", document):
            yield Flaw(
                job.job.where(one.location, number),
                f"{'.'.join(map(str, one.location)) or 'the object'}: {one.what}",
                "kubectl refuses the object, or the server drops the field with a warning",
                "correct it, or leave it out",
            )


@rule("gke")
def tpu_nodes_exist(job: Evidence) -> Iterator[Flaw]:
    """The node selector names a TPU and a topology that go together.

    plan-tpus; xpk 1.16.0, system_characteristics.py.
    """
    known = {tpu.gke_accelerator: tpu for tpu in machines.table().tpus.values() if tpu.gke_accelerator}
    why = "no node ever fits, and the pods stay Pending"
    for work in works(job):
        accelerator, topology = work.selector.get(gke.ACCELERATOR), work.selector.get(gke.TOPOLOGY)
        at = (*work.pod_at, "nodeSelector")
        if bool(accelerator) != bool(topology):
            have, lack = (gke.ACCELERATOR, gke.TOPOLOGY) if accelerator else (gke.TOPOLOGY, gke.ACCELERATOR)
            yield Flaw(job.at(*at, document=work.document), f"{have} without {lack}", why, f"add {lack}")
        elif accelerator and str(accelerator).startswith("tpu-v3"):
            continue
        elif accelerator and accelerator not in known:
            yield Flaw(
                job.at(*at, gke.ACCELERATOR, document=work.document),
                f"no TPU '{accelerator}'{unknown(str(accelerator), [str(one) for one in known])}",
                why,
                "take one of them",
            )
        elif accelerator and topology not in known[accelerator].slices:
            fitting = list(known[accelerator].slices)
            yield Flaw(
                job.at(*at, gke.TOPOLOGY, document=work.document),
                f"{accelerator} has no topology '{topology}'{unknown(str(topology), fitting)}",
                why,
                "take one of them",
                note=str(accelerator) in ("tpu-v4-podslice", "tpu-v5p-slice", "tpu7x"),
            )


def _slices(work: Work) -> list[machines.TpuSlice]:
    """The slices a selector may mean: one for each machine type that has the topology."""
    for tpu in machines.table().tpus.values():
        if tpu.gke_accelerator and tpu.gke_accelerator == work.selector.get(gke.ACCELERATOR):
            found = [machines.slice_on(machine, str(work.selector.get(gke.TOPOLOGY))) for machine in tpu.chips]
            return [one for one in found if one]
    return []


@rule("gke")
def pods_fill_their_slice(job: Evidence) -> Iterator[Flaw]:
    """There is one pod for each machine of the slice, and it asks for all of the machine's chips.

    how-to/tpus: parallelism and completions equal the number of VMs, google.com/tpu the chips of a VM.
    """
    for work in works(job):
        chips = [(index, _limit(container, "google.com/tpu")) for index, container in enumerate(work.containers)]
        asked = next(((index, count) for index, count in chips if count), None)
        fitting = _slices(work)
        if asked is None:
            if fitting:
                yield Flaw(
                    job.at(*work.pod_at, "containers", document=work.document),
                    "TPU nodes are selected, but no container asks for google.com/tpu",
                    "the pod runs beside the TPU, without it",
                    f"add resources.limits google.com/tpu: {fitting[0].chips_per_host}",
                )
            continue
        if not work.selector.get(gke.ACCELERATOR):
            yield Flaw(
                job.at(*work.pod_at, document=work.document),
                "google.com/tpu without a nodeSelector for the TPU",
                "GKE cannot tell which TPU is meant",
                f"select {gke.ACCELERATOR} and {gke.TOPOLOGY}",
            )
            continue
        if not fitting:
            continue  # told by tpu_nodes_exist
        index, count = asked
        pods = work.count("completions"), work.count("parallelism")
        if any(one.chips_per_host == count and pods == (one.hosts, one.hosts) for one in fitting):
            continue
        ways = " or ".join(f"{one.hosts} pods of {one.chips_per_host} chips ({one.machine_type})" for one in fitting)
        at = (*work.pod_at, "containers", index, "resources", "limits", "google.com/tpu")
        if any(one.chips_per_host == count for one in fitting):
            at = (*work.at, "completions" if "completions" in work.spec else "parallelism")
        yield Flaw(
            job.at(*at, document=work.document),
            f"{pods[0]} completions, {pods[1]} at a time, of {count} chips for a topology of "
            f"{work.selector[gke.TOPOLOGY]}",
            "libtpu waits for the missing machines, or the pods are never scheduled",
            f"make it {ways}",
        )


def _limit(container: dict[str, Any], name: str) -> int:
    resources = container.get("resources")
    limits = (resources.get("limits") if isinstance(resources, dict) else None) or {}
    value = str(limits.get(name, "")) if isinstance(limits, dict) else ""
    return int(value) if value.isdigit() else 0


@rule("gke")
def requests_are_the_limits(job: Evidence) -> Iterator[Flaw]:
    """Devices are limited to what is requested.

    kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus: extended resources cannot be overcommitted.
    """
    for work in works(job):
        for index, container in enumerate(work.containers):
            resources = container.get("resources")
            if not isinstance(resources, dict):
                continue
            for name in ("google.com/tpu", "nvidia.com/gpu"):
                given = [str((resources.get(kind) or {}).get(name, "")) for kind in ("requests", "limits")]
                if given[0] and given[0] != given[1]:
                    yield Flaw(
                        job.at(*work.pod_at, "containers", index, "resources", document=work.document),
                        f"{name}: {given[0]} requested, limit {given[1] or 'none'}",
                        "the API server refuses the pod",
                        "give both the same number",
                    )


@rule("gke")
def groups_know_one_another(job: Evidence) -> Iterator[Flaw]:
    """Jobs of several pods that work together are Indexed, do not retry pods one by one, and have names that resolve.

    how-to/tpus: completionMode Indexed, backoffLimit 0, a headless Service as subdomain (a JobSet makes its own).
    """
    services = {
        str((document.get("metadata") or {}).get("name")): document.get("spec") or {}
        for document in job.job.documents
        if document.get("kind") == "Service"
    }
    for work in works(job):
        if work.count("completions") < 2:
            continue
        if work.spec.get("completionMode") != "Indexed":
            yield Flaw(
                job.at(*work.at, document=work.document),
                f"{work.spec['completions']} pods without completionMode: Indexed",
                "no pod knows which of them it is",
                "add completionMode: Indexed",
            )
        if work.count("parallelism") < work.count("completions"):
            yield Flaw(
                job.at(*work.at, "parallelism", document=work.document),
                f"{work.count('parallelism')} of {work.count('completions')} pods at a time",
                "the first ones wait for ever for those that are not started",
                "make both the same",
            )
        if work.spec.get("backoffLimit", 6) != 0:
            yield Flaw(
                job.at(*work.at, "backoffLimit", document=work.document),
                "backoffLimit is not 0",
                "a pod that failed comes back alone, to a group that waits for the old one",
                "write backoffLimit: 0; a JobSet's failurePolicy.maxRestarts starts the group again",
            )
        subdomain = work.pod.get("subdomain")
        headless = services.get(str(subdomain), {}).get("clusterIP") == "None"
        if not work.in_jobset and not (subdomain and headless):
            yield Flaw(
                job.at(*work.pod_at, "subdomain", document=work.document),
                f"subdomain '{subdomain}' has no headless Service here" if subdomain else "no subdomain",
                "the pods' names do not resolve, and they never find one another",
                "add a Service with clusterIP: None, and its name as subdomain",
                note=bool(subdomain),
            )


@rule("gke")
def retries_are_possible(job: Evidence) -> Iterator[Flaw]:
    """The restart policy is one that Jobs may have, and that their failure policy needs.

    kubernetes.io/docs/concepts/workloads/controllers/job: Never or OnFailure; a podFailurePolicy needs Never.
    """
    for work in works(job):
        policy = work.pod.get("restartPolicy", "Always")
        allowed = ["Never"] if work.spec.get("podFailurePolicy") else ["Never", "OnFailure"]
        if work.pod and policy not in allowed:
            yield Flaw(
                job.at(*work.pod_at, "restartPolicy", document=work.document),
                f"restartPolicy is {policy}",
                "the API server refuses the Job",
                f"write {' or '.join(allowed)}",
            )


@rule("gke")
def spot_pods_are_let_in(job: Evidence) -> Iterator[Flaw]:
    """Pods that select Spot machines end in the time these leave them.

    kubernetes-engine/docs/concepts/spot-vms: user pods have 15 seconds, more from 1.35 on where the pool says so.
    """
    for work in works(job):
        grace = work.pod.get("terminationGracePeriodSeconds", 30)
        if work.selector.get(gke.SPOT) and isinstance(grace, int) and grace > gke.SPOT_GRACE:
            yield Flaw(
                job.at(*work.pod_at, "terminationGracePeriodSeconds", document=work.document),
                f"{grace} s to end on a Spot machine that leaves {gke.SPOT_GRACE}",
                "the trainer is killed before it has saved",
                f"write {gke.SPOT_GRACE}",
                note=True,
            )


@rule("gke")
def names_are_short_enough(job: Evidence) -> Iterator[Flaw]:
    """Names are labels, also those that Kubernetes makes of them for pods.

    RFC 1123; jobset_types.go: a pod's host name is <jobset>-<job>-<job index>-<pod index>.
    """
    for number, document in enumerate(job.job.documents):
        name = str((document.get("metadata") or {}).get("name", ""))
        if name and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            yield Flaw(
                job.at("metadata", "name", document=number),
                f"name '{name}'",
                "the API server refuses it",
                "use a-z, 0-9 and dashes, at most 63",
            )
    for work in works(job):
        longest = f"{work.host}-{max(0, work.count('completions') - 1)}"
        if len(longest) > 63:
            yield Flaw(
                job.at("metadata", "name", document=work.document),
                f"its pods' host names get {len(longest)} characters; at most 63 ({longest})",
                "the pods cannot be created",
                "take a shorter name",
            )
