"""Kubernetes Jobs, JobSets and TrainJobs as containers: CPU and GPU pods, TPU slices, multislice.

They are read with the defaults that the cluster fills in. A TrainJob is run as the JobSet that its controller makes.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job/ and https://jobset.sigs.k8s.io (names, labels,
annotations, JOB_COMPLETION_INDEX); GKE's TPU device plugin and webhook (:mod:`trainyard_jobs.rehearsal.tpu`);
https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice (MEGASCALE_*).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainyard_jobs.kubernetes import gke_objects, train_jobs
from trainyard_jobs.kubernetes.gke_objects import ACCELERATOR, GPU_RESOURCE, SPOT_GRACE, TOPOLOGY, TPU_RESOURCE
from trainyard_jobs.model import machines
from trainyard_jobs.model.options import Mount
from trainyard_jobs.rehearsal import tpu
from trainyard_jobs.rehearsal.model import Rehearsal, Replica, count, words
from trainyard_jobs.rehearsal.restart_policy import Kubernetes, PodFailurePolicy
from trainyard_jobs.schema import job_file, kinds, kubernetes, kubernetes_defaults
from trainyard_jobs.schema.job_file import JobFile
from trainyard_jobs.schema.kubernetes import without_null

_JOBSET = "jobset.sigs.k8s.io"
_INDEX = "batch.kubernetes.io/job-completion-index"
#: The port of a multislice job's coordinator:
#: https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice
_MEGASCALE_PORT = "8080"
_RESTART_ATTEMPT = f"{_JOBSET}/restart-attempt"


@dataclass(frozen=True)
class _Job:
    """A plain Job, or one that a JobSet creates."""

    document: int
    name: str
    spec: Mapping[str, Any]
    where: tuple[int | str, ...]
    jobset: str = ""
    replicated: str = ""
    index: int = 0
    of: int = 1
    global_index: int = 0
    coordinator: str = ""
    subdomain: str = ""

    @property
    def pod(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.spec.get("template", {}).get("spec", {})
        return found

    @property
    def pods(self) -> int:
        return max(1, count(self.spec.get("completions"), count(self.spec.get("parallelism"), 1)))

    @property
    def indexed(self) -> bool:
        return bool(self.spec.get("completionMode") == "Indexed")

    def hostname(self, index: int) -> str:
        return f"{self.name}-{index}"

    def address(self, index: int) -> str:
        """The name by which other pods reach a pod: below that of its headless Service, if it has one."""
        return f"{self.hostname(index)}.{self.subdomain}" if self.subdomain else self.hostname(index)


def rehearsal(job: JobFile) -> Rehearsal:
    """Return the pods of the file's Job or JobSet; a UserError gives the line of what cannot be rehearsed."""
    numbers = [
        number for number, one in enumerate(job.documents) if kinds.kind_of(one) and one["kind"] in kinds.REHEARSED
    ]
    if not numbers:
        what = f"{job_file.described(job.spec)} cannot be rehearsed, only a {', '.join(kinds.REHEARSED)}"
        raise job.error((), what, job.documents.index(job.spec))
    if len(numbers) > 1:
        raise job.error((), "a second job: only one Job, JobSet or TrainJob can be rehearsed", numbers[1])
    given: dict[str, Any] = without_null(job.documents[numbers[0]])
    name = str((given.get("metadata") or {}).get("name") or job.path.stem)
    notes: list[str] = []
    document = _jobset_of(job, given, numbers[0], name, notes) if given["kind"] == "TrainJob" else given
    document = kubernetes_defaults.jobs(document)
    is_set = document["kind"] == "JobSet"
    jobs = _jobs_of_set(document, numbers[0], name) if is_set else [_single(document, numbers[0], name)]
    if not jobs:
        raise job.error(("spec", "replicatedJobs"), "the JobSet has no replicatedJobs", numbers[0])
    replicas: list[Replica] = []
    for one in jobs:
        found = _slice(job, one)
        for index in range(one.pods):
            replicas.append(_replica(job, one, found, index, len(replicas), notes))
        notes += _job_notes(one, found)
    spec = document.get("spec", {})
    ordered = bool(spec.get("startupPolicy")) or any(one.get("dependsOn") for one in spec.get("replicatedJobs") or [])
    if ordered or any(count(one.spec.get("parallelism"), one.pods) < one.pods for one in jobs):
        notes.append("all pods start at once: startupPolicy, dependsOn and a parallelism below completions are ignored")
    policy = Kubernetes(
        groups={one.name: _failure_policy(one) for one in jobs},
        jobset=(spec.get("failurePolicy") or {"maxRestarts": 0}) if is_set else None,
        replicated={one.name: one.replicated for one in jobs},
        success=spec.get("successPolicy") or {},
    )
    return Rehearsal(
        platform=f"{'Kubeflow' if given['kind'] == 'TrainJob' else 'GKE'} {given['kind']}",
        name=name,
        replicas=tuple(replicas),
        policy=policy,
        grace=float(count(jobs[0].pod.get("terminationGracePeriodSeconds"), SPOT_GRACE)),
        notes=tuple(dict.fromkeys(notes)),
        deadline=count(jobs[0].spec.get("activeDeadlineSeconds")),
    )


def _jobset_of(job: JobFile, train_job: Mapping[str, Any], number: int, name: str, notes: list[str]) -> dict[str, Any]:
    """The JobSet of a TrainJob, without the jobs that only prepare its data.

    Raises:
        UserError: its runtime is unknown, or cannot be rehearsed.
    """
    at = ("spec", "runtimeRef")
    runtime = train_jobs.runtime_of(dict(train_job), [without_null(one) for one in job.documents])
    if runtime is None:
        _, kind, wanted = train_jobs.reference(dict(train_job))
        raise job.error(at, f"the {kind} {wanted!r} is unknown: add it to the file, as another document", number)
    command = (train_job["spec"].get("trainer") or {}).get("command")
    if runtime.policy not in ("", "torch", "jax") or command == train_jobs.TORCHTUNE:
        what = runtime.policy if runtime.policy not in ("", "torch", "jax") else "torchtune"
        raise job.error(at, f"the runtime {runtime.name} starts {what}, which a rehearsal does not support", number)
    found = train_jobs.jobset(dict(train_job), runtime, name)
    # The file's own runtime is of a custom resource definition, which is not checked: what it makes is.
    for error in kubernetes.validate(found) if runtime.in_file else ():
        if error.empty is not None or "required" in error.what:
            what = f"{'.'.join(map(str, error.location))}: {error.what}"
            raise job.error(at, f"the runtime {runtime.name} makes an invalid JobSet: {what}", number)
    initializers = train_jobs.INITIALIZERS.values()
    parts: list[dict[str, Any]] = found["spec"].get("replicatedJobs") or []
    found["spec"]["replicatedJobs"] = [one for one in parts if train_jobs.step_of(one) not in initializers]
    notes += [f"{one['name']} is not started" for one in parts if train_jobs.step_of(one) in initializers]
    if not runtime.in_file:
        notes.append(f"the runtime {runtime.name} is the one that Kubeflow Trainer installs; the cluster's can differ")
    return found


def _single(document: Mapping[str, Any], number: int, name: str) -> _Job:
    spec = document.get("spec", {})
    subdomain = str(spec.get("template", {}).get("spec", {}).get("subdomain") or "")
    return _Job(number, name, spec, ("spec",), subdomain=subdomain)


def _jobs_of_set(document: Mapping[str, Any], number: int, name: str) -> list[_Job]:
    spec = document.get("spec", {})
    network = spec.get("network") or {}
    subdomain = "" if network.get("enableDNSHostnames") is False else str(network.get("subdomain") or name)
    jobs: list[_Job] = []
    for position, replicated in enumerate(spec.get("replicatedJobs") or []):
        copies = max(1, count(replicated.get("replicas"), 1))
        for index in range(copies):
            jobs.append(
                _Job(
                    document=number,
                    name=f"{name}-{replicated['name']}-{index}",
                    spec=replicated.get("template", {}).get("spec", {}),
                    where=("spec", "replicatedJobs", position, "template", "spec"),
                    jobset=name,
                    replicated=str(replicated["name"]),
                    index=index,
                    of=copies,
                    global_index=len(jobs),
                    coordinator=_coordinator(spec, name, subdomain),
                    subdomain=subdomain,
                )
            )
    return jobs


def _coordinator(spec: Mapping[str, Any], name: str, subdomain: str) -> str:
    """Address of the JobSet's first pod, or of the one that its `coordinator` names."""
    chosen = spec.get("coordinator") or {}
    replicated = chosen.get("replicatedJob") or (spec.get("replicatedJobs") or [{}])[0].get("name")
    host = f"{name}-{replicated}-{chosen.get('jobIndex', 0)}-{chosen.get('podIndex', 0)}"
    return f"{host}.{subdomain}" if subdomain else host


def _container(job: JobFile, one: _Job) -> Mapping[str, Any]:
    """The container that trains: the one that requests an accelerator, else the first."""
    containers = one.pod.get("containers") or []
    if not containers:
        raise job.error((*one.where, "template", "spec"), "the pod has no containers", one.document)
    requesting = [found for found in containers if _requested(found, TPU_RESOURCE) or _requested(found, GPU_RESOURCE)]
    chosen: Mapping[str, Any] = (requesting or containers)[0]
    if not chosen.get("image"):
        raise job.error((*one.where, "template", "spec", "containers", 0), "no image", one.document)
    return chosen


def _requested(container: Mapping[str, Any], resource: str) -> int:
    resources = container.get("resources") or {}
    return max(count((resources.get(kind) or {}).get(resource)) for kind in ("limits", "requests"))


def _limit(container: Mapping[str, Any], resource: str) -> Fraction:
    """Return a limit of a container; 0 without one."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return gke_objects.quantity(limits.get(resource)) or Fraction(0)


def _slice(job: JobFile, one: _Job) -> machines.TpuSlice | None:
    """The TPU slice that the pods of a Job form; None for a Job without TPUs."""
    chips = _requested(_container(job, one), TPU_RESOURCE)
    if not chips:
        return None
    selector = one.pod.get("nodeSelector") or {}
    accelerator, topology = str(selector.get(ACCELERATOR) or ""), str(selector.get(TOPOLOGY) or "")
    known = machines.slices().values()
    found = next((each for each in known if (each.gke_accelerator, each.topology) == (accelerator, topology)), None)
    if found is None:
        what = f"{ACCELERATOR} {accelerator!r} with {TOPOLOGY} {topology!r} is not a TPU slice"
        raise job.error((*one.where, "template", "spec", "nodeSelector"), what, one.document)
    if found.chips_per_host != chips:
        generation = machines.table().tpus[found.generation]
        machine = next((name for name, own in generation.chips.items() if own == chips), None)
        found = machines.slice_of(found.accelerator_type, machine)
    if found.hosts != one.pods:
        what = f"a {topology} slice of {chips} chips a pod has {found.hosts} hosts, but the Job has {one.pods} pods"
        fix = f"set parallelism and completions to {found.hosts}"
        raise job.error((*one.where, "completions"), f"{what}: {fix}", one.document)
    return found


def _replica(
    job: JobFile, one: _Job, found: machines.TpuSlice | None, index: int, ordinal: int, notes: list[str]
) -> Replica:
    container = _container(job, one)
    environment: dict[str, str] = {}
    if one.indexed:
        environment["JOB_COMPLETION_INDEX"] = str(index)
    if found:
        addresses = [one.address(host) for host in range(found.hosts)]
        environment |= tpu.gke_variables(found, index, addresses)
        if one.of > 1:
            environment |= {
                "MEGASCALE_NUM_SLICES": str(one.of),
                "MEGASCALE_SLICE_ID": str(one.index),
                "MEGASCALE_COORDINATOR_ADDRESS": f"{one.name.rpartition('-')[0]}-0-0.{one.subdomain}:{_MEGASCALE_PORT}",
            }
    own, attempts = _own_variables(job, one, container, index, notes)
    environment |= own
    kind = "host" if found and found.hosts > 1 else "worker"
    return Replica(
        name=f"{one.replicated}-{one.index}-{index}" if one.jobset else f"{kind}-{index}",
        hostname=one.hostname(index),
        role="chief" if ordinal == 0 else kind,
        ordinal=ordinal,
        image=str(container["image"]),
        command=_expanded(container.get("command"), environment),
        arguments=_expanded(container.get("args"), environment),
        environment=environment,
        aliases=tuple(dict.fromkeys(name for name in (one.address(index),) if name != one.hostname(index))),
        devices=tpu.devices(found) if found else (),
        slice=one.name if found and found.hosts > 1 else "",
        group=one.name,
        mounts=_mounts(one, container, environment, notes),
        attempt_variables=attempts,
        hosts=gke_objects.hosts_of(one.pod.get("nodeSelector") or {}),
        cpus=float(_limit(container, "cpu")),
        memory=int(_limit(container, "memory")),
    )


def _fields(one: _Job, index: int) -> dict[str, str]:
    """The fields of a pod that the downward API provides."""
    pod = one.hostname(index)
    found = {
        "metadata.name": f"{pod}-r3hrs",
        "metadata.namespace": "default",
        "metadata.uid": "00000000-0000-4000-8000-000000000000",
        "spec.nodeName": f"node-{pod}",
        "spec.serviceAccountName": str(one.pod.get("serviceAccountName") or "default"),
        "status.hostIP": "10.128.0.2",
    }
    metadata_of_pod = {"batch.kubernetes.io/job-name": one.name, "job-name": one.name}
    if one.indexed:
        metadata_of_pod[_INDEX] = str(index)
    if one.jobset:
        metadata_of_pod |= {
            f"{_JOBSET}/jobset-name": one.jobset,
            f"{_JOBSET}/replicatedjob-name": one.replicated,
            f"{_JOBSET}/replicatedjob-replicas": str(one.of),
            f"{_JOBSET}/job-index": str(one.index),
            f"{_JOBSET}/job-global-index": str(one.global_index),
            f"{_JOBSET}/coordinator": one.coordinator,
            _RESTART_ATTEMPT: "0",
        }
    metadata = one.spec.get("template", {}).get("metadata") or {}
    for kind in ("labels", "annotations"):
        for key, value in (metadata_of_pod | (metadata.get(kind) or {})).items():
            found[f"metadata.{kind}['{key}']"] = str(value)
    return found


def _own_variables(
    job: JobFile, one: _Job, container: Mapping[str, Any], index: int, notes: list[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The container's `env`, and the names of variables that count the JobSet's restarts."""
    fields = _fields(one, index)
    found: dict[str, str] = {}
    attempts = []
    for entry in container.get("env") or []:
        name, source = str(entry.get("name")), entry.get("valueFrom") or {}
        variable = f"'--env '{name}=...''"
        path = str((source.get("fieldRef") or {}).get("fieldPath") or "")
        if not source:
            found[name] = _reference(str(entry.get("value") or ""), found)
        elif path in fields:
            found[name] = fields[path]
            if _RESTART_ATTEMPT in path:
                attempts.append(name)
        elif path == "status.podIP":
            found[name] = one.address(index)  # Docker assigns the address at start; the name resolves to it
        elif path:
            what = f"env {name}: a rehearsal does not support fieldPath {path}; set the variable with {variable}"
            raise job.error((*one.where, "template", "spec", "containers"), what, one.document)
        else:
            notes.append(f"env {name}: {next(iter(source))} is not available in a rehearsal; set it with {variable}")
    if container.get("envFrom"):
        notes.append("envFrom (config maps, secrets) is ignored; set variables with '--env 'NAME=value ...''")
    return found, tuple(attempts)


def _reference(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with ``$(NAME)`` replaced for known variables and ``$$`` by a dollar sign, as Kubernetes does."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_][\w.-]*)\)",
        lambda match: "$" if match[1] is None else environment.get(match[1], match[0]),
        text,
    )


def _expanded(value: object, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    found = words(value)
    return None if found is None else tuple(_reference(word, environment) for word in found)


def _mounts(
    one: _Job, container: Mapping[str, Any], environment: Mapping[str, str], notes: list[str]
) -> tuple[Mount, ...]:
    """Volumes: Cloud Storage FUSE as the bucket's folder, emptyDir as memory; others are not mounted."""
    volumes = {str(volume.get("name")): volume for volume in one.pod.get("volumes") or []}
    mounts = []
    for mount in container.get("volumeMounts") or []:
        volume, path = volumes.get(str(mount.get("name")), {}), str(mount.get("mountPath"))
        csi, read_only = volume.get("csi") or {}, bool(mount.get("readOnly"))
        if csi.get("driver") == gke_objects.BUCKET_DRIVER:
            attributes = csi.get("volumeAttributes") or {}
            options = re.split(r"\s*,\s*", str(attributes.get("mountOptions") or ""))
            folders = [option[len("only-dir=") :] for option in options if re.match("only-dir[=:]", option)]
            below = mount.get("subPath") or _reference(str(mount.get("subPathExpr") or ""), environment)
            folder = "/".join(word for part in (*folders[-1:], below) if (word := str(part).strip(" /")))
            read_only |= bool(csi.get("readOnly")) or not {"ro", "o=ro"}.isdisjoint(options)
            mounts.append(Mount(path, str(attributes.get("bucketName")), folder, read_only))
        elif "emptyDir" in volume:
            mounts.append(Mount(path, read_only=read_only))
        else:
            notes.append(f"volume {mount.get('name')} at {path} is not mounted")
    return tuple(mounts)


def _failure_policy(one: _Job) -> PodFailurePolicy:
    rules: Sequence[Mapping[str, Any]] = (one.spec.get("podFailurePolicy") or {}).get("rules") or []
    return PodFailurePolicy(count(one.spec.get("backoffLimit")), tuple(rules))


def _job_notes(one: _Job, found: machines.TpuSlice | None) -> list[str]:
    notes = []
    if found and found.hosts * one.of > 1:
        slices = f"{one.of} slices of " if one.of > 1 else ""
        notes.append(
            f"{slices}{found.accelerator_type}: the {found.hosts * one.of} hosts train independently: XLA's "
            "CPU backend has no collectives between hosts"
        )
    gpus = max(_requested(container, GPU_RESOURCE) for container in one.pod.get("containers") or [{}])
    if gpus:
        notes.append(f"{gpus} GPU(s) a pod: replaced by one process on the CPU")
    if one.pod.get("initContainers"):
        notes.append("initContainers are not started")
    if len(one.pod.get("containers") or []) > 1:
        notes.append("only the container of a pod that trains is started")
    return notes
