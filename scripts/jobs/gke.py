"""GKE: Jobs for one machine or a group of GPU machines, JobSets for TPU slices of several machines and multislice.

cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../tpu-multislice; the JobSet API is jobset.sigs.k8s.io.
"""

from __future__ import annotations

import re
from typing import Any

from scripts.cli import UserError
from scripts.jobs import machines
from scripts.jobs.request import Request

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GPU = "cloud.google.com/gke-accelerator"
SPOT = "cloud.google.com/gke-spot"

#: Label of a JobSet's pods, and the annotation that gives each of its Jobs a node pool of its own.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

#: torchrun's port, which the launcher uses too.
PORT = 29500

#: How often a JobSet starts again after a slice failed: the trainers go on from their last checkpoint.
RESTARTS = 3

#: Seconds GKE leaves a pod on a Spot machine that is taken away (kubernetes-engine/docs/concepts/spot-vms).
SPOT_GRACE = 15


def object_name(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1123 label).

    Raises:
        UserError: nothing of it is left.
    """
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
    if not found:
        raise UserError(f"NAME={name!r} has no letter or digit")
    return found


def hosts(request: Request) -> int:
    """Machines in all."""
    return request.tpu.hosts * request.slices if request.tpu else request.workers


def _in_jobset(request: Request) -> bool:
    """Whether it is a JobSet: TPU slices of several machines, and groups that must start again as a group."""
    return hosts(request) > 1 and (request.tpu is not None or request.spot)


def _part(request: Request) -> str:
    """Name of the JobSet's replicated job: its replicas are the slices, or the one group of machines."""
    return "slice" if request.tpu else "group"


def selector(request: Request) -> dict[str, str]:
    """Labels of the nodes it must run on.

    Raises:
        UserError: GKE does not have that TPU.
    """
    found: dict[str, str] = {}
    if request.tpu:
        if request.tpu.gke_accelerator is None:
            offered = [one.accelerator_type for one in machines.slices().values() if one.gke_accelerator]
            raise UserError(f"GKE has no {request.tpu.accelerator_type}; it has {', '.join(offered)}")
        found |= {ACCELERATOR: request.tpu.gke_accelerator, TOPOLOGY: request.tpu.topology}
    elif request.gpus:
        found[GPU] = machines.table().gpus[request.gpus.type].gke_accelerator
    if request.machine and not request.tpu:
        found["node.kubernetes.io/instance-type"] = request.machine
    if request.spot:
        found[SPOT] = "true"
    return found


def _devices(request: Request) -> dict[str, str]:
    if request.tpu:
        return {"google.com/tpu": str(request.tpu.chips_per_host)}
    return {"nvidia.com/gpu": str(request.gpus.count)} if request.gpus else {}


def _environment(request: Request, name: str) -> dict[str, str]:
    """What the launcher needs to know of the group; a TPU slice is told by GKE itself."""
    if _in_jobset(request):
        return {"NNODES": str(hosts(request)), "JOBSET_NAME": name, "REPLICATED_JOB_NAME": _part(request)}
    if request.workers > 1:
        return {"NNODES": str(request.workers), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(PORT)}
    return {}


def _pod(request: Request, name: str) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "trainer", "image": request.image}
    args = request.with_output_flag()
    if args:
        container["args"] = list(args)
    if environment := _environment(request, name):
        container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
    if request.tpu and hosts(request) > 1:
        # libtpu's processes, and the coordinator of a multislice job.
        container["ports"] = [{"containerPort": 8471}, {"containerPort": 8080}]
    if devices := _devices(request):
        container["resources"] = {"requests": devices, "limits": devices}
    # Data loaders hand batches over in shared memory; Kubernetes gives 64 MiB unless told otherwise.
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SPOT_GRACE if request.spot else 30,
    }
    if request.service_account:
        pod["serviceAccountName"] = request.service_account
    if labels := selector(request):
        pod["nodeSelector"] = labels
    if tolerations := _tolerations(request):
        pod["tolerations"] = tolerations
    pod["containers"] = [container]
    pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    return pod


def _tolerations(request: Request) -> list[dict[str, str]]:
    found = []
    for key, needed in (("google.com/tpu", request.tpu), ("nvidia.com/gpu", request.gpus)):
        if needed:
            found.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    if request.spot:
        found.append({"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return found


def _job_spec(request: Request, name: str) -> dict[str, Any]:
    """The spec of a Job: of the whole job, or of one slice."""
    pods = request.tpu.hosts if request.tpu else request.workers
    spec: dict[str, Any] = {"backoffLimit": 0}
    if request.spot:
        # A machine that was taken away is no failure of the trainer's: one pod comes back, a group starts again.
        action = "FailJob" if _in_jobset(request) else "Ignore"
        spec["podFailurePolicy"] = {"rules": [{"action": action, "onPodConditions": [{"type": "DisruptionTarget"}]}]}
    if request.timeout:
        spec["activeDeadlineSeconds"] = request.timeout
    pod = _pod(request, name)
    if pods > 1:
        spec |= {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
        if not _in_jobset(request):
            pod["subdomain"] = name
    return spec | {"template": {"metadata": {"labels": {"app": name}}, "spec": pod}}


def _failure_policy(request: Request) -> dict[str, Any]:
    """The trainers go on from their last checkpoint; machines that were taken away do not count as failures."""
    found: dict[str, Any] = {"maxRestarts": RESTARTS}
    if request.spot:
        found["rules"] = [
            {
                "name": "taken_away",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    return found


def _service(name: str) -> dict[str, Any]:
    """Gives the pods of a group names that resolve, before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }


def manifests(request: Request) -> list[dict[str, Any]]:
    """The objects to create: a JobSet; a Job; a Job and the headless Service of its group.

    Raises:
        UserError: GKE cannot have it so.
    """
    name = object_name(request.name)
    if request.tuning or request.tensorboard:
        raise UserError("GKE has neither tuning jobs nor a managed TensorBoard: use PLATFORM=vertex")
    if request.tpu and request.workers > 1:
        raise UserError("a TPU slice counts its own machines: leave out WORKERS; SLICES= are several of them")
    if request.slices > 1 and not request.tpu:
        raise UserError("SLICES= is about TPUs: WORKERS= are several machines")
    if _in_jobset(request):
        part = {"name": _part(request), "replicas": request.slices, "template": {"spec": _job_spec(request, name)}}
        about: dict[str, Any] = {"name": name} | ({"annotations": EXCLUSIVE} if request.tpu else {})
        spec = {"failurePolicy": _failure_policy(request), "replicatedJobs": [part]}
        return [{"apiVersion": JOBSET_VERSION, "kind": "JobSet", "metadata": about, "spec": spec}]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": _job_spec(request, name)}
    return [_service(name), job] if request.workers > 1 else [job]


def pods(request: Request) -> tuple[str, int]:
    """The label selector of its pods, and how many there are."""
    label = JOBSET_NAME if _in_jobset(request) else "job-name"
    return f"{label}={object_name(request.name)}", hosts(request)


def kind(request: Request) -> str:
    """What to ask kubectl about: ``job/NAME`` or ``jobset/NAME``."""
    return f"{'jobset' if _in_jobset(request) else 'job'}/{object_name(request.name)}"


def submit_command(request: Request, file: str) -> list[str]:
    """The command that creates the objects of ``file``."""
    return ["kubectl", "create", f"--filename={file}"]
