"""GKE: Jobs for one machine or a group of GPU machines, JobSets for TPU slices of several machines and multislice.

https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../tpu-multislice; the JobSet API is
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.model import machines, yaml_writer
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.platforms.gke import rehearse as rehearsed_gke
from trainyard_jobs.platforms.writing import without_empty
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.schema.job_file import JobFile

logger = logging.getLogger(__name__)

#: The options that every platform with Kubernetes objects on GKE has, and how the API server checks objects.
OPTIONS = frozenset({"flex-start", "reservation", "queue", "placement", "disk", "mount", "labels", "env", "secret",
                     "cpu", "memory", "namespace", "node-selector", "toleration", "image-pull-secret"})  # fmt: skip
MOUNTS = ("gs", "nfs", "pvc")
DRY_RUN = ("kubectl", "create", "--dry-run=server", "--filename")

#: The port of torchrun's rendezvous, which is also the launcher's default.
PORT = 29500

#: Value of RESERVATION= for any reservation that fits.
ANY_RESERVATION = "any"

#: Where the disk that DISK= requests is mounted.
DISK_PATH = "/mnt/disk"

#: How often a JobSet is restarted after a failure: the trainers resume from their last checkpoint.
RESTARTS = 3

#: Path in the container, volume, and whether it is read-only.
Mounted = tuple[str, dict[str, Any], bool]


def hosts(request: Request) -> int:
    """The number of machines in total."""
    return request.tpu.hosts * request.slices if request.tpu else request.workers


def _in_jobset(request: Request) -> bool:
    """Whether the job is a JobSet: TPU slices of several machines, and groups that must be restarted as a whole."""
    return hosts(request) > 1 and (request.tpu is not None or request.spot)


def _part(request: Request) -> str:
    """Name of the JobSet's replicated job: its replicas are the slices, or the group of machines."""
    return "slice" if request.tpu else "group"


def selector(request: Request) -> dict[str, str]:
    """Labels of the nodes that its pods are scheduled on.

    Raises:
        UserError: GKE does not offer that TPU.
    """
    found: dict[str, str] = {}
    if request.tpu:
        if request.tpu.gke_accelerator is None:
            offered = [one.accelerator_type for one in machines.slices().values() if one.gke_accelerator]
            raise UserError(f"GKE has no {request.tpu.accelerator_type}; it has {', '.join(offered)}")
        found |= {gke_objects.ACCELERATOR: request.tpu.gke_accelerator, gke_objects.TOPOLOGY: request.tpu.topology}
    elif request.gpus:
        found[gke_objects.GPU] = machines.table().gpus[request.gpus.type].gke_accelerator
    if request.machine and not request.tpu:
        found[gke_objects.INSTANCE_TYPE] = request.machine
    if request.spot:
        found[gke_objects.SPOT] = "true"
    if request.flex_start:
        found[gke_objects.FLEX_START] = "true"
    if request.reservation == ANY_RESERVATION:
        found[gke_objects.RESERVATION_AFFINITY] = "any"
    elif request.reservation:
        found |= {gke_objects.RESERVATION_AFFINITY: "specific", gke_objects.RESERVATION_NAME: request.reservation}
    for key, value in request.node_selector:
        if found.setdefault(key, value) != value:
            raise UserError(f"'--node-selector {key}={value}': another option selects {found[key]}")
    return found


def devices(request: Request) -> dict[str, str]:
    """Accelerators that a pod requests."""
    if request.tpu:
        return {gke_objects.TPU_RESOURCE: str(request.tpu.chips_per_host)}
    return {gke_objects.GPU_RESOURCE: str(request.gpus.count)} if request.gpus else {}


def resources(request: Request) -> dict[str, Any]:
    """Return the requests and limits of a container. CPU has no limit, which would throttle it."""
    requests = without_empty({"cpu": request.cpu, "memory": request.memory}) | devices(request)
    return without_empty({"requests": requests, "limits": {key: requests[key] for key in requests if key != "cpu"}})


def variables(request: Request, own: dict[str, str]) -> list[dict[str, Any]]:
    """The variables of a container: ``own`` and the secrets.

    Raises:
        UserError: a secret is not given as a key of a Kubernetes Secret.
    """
    found: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in own.items()]
    for name, source in request.secret:
        secret, _, key = source.partition(":")
        if not key:
            raise UserError(f"'--secret {name}={source}': Kubernetes takes SECRET:KEY, a Secret and a key in it")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def _environment(request: Request, name: str) -> dict[str, str]:
    """The variables that the launcher needs to form the group; GKE itself sets those of a TPU slice."""
    if _in_jobset(request):
        return {"NNODES": str(hosts(request)), "JOBSET_NAME": name, "REPLICATED_JOB_NAME": _part(request)}
    if request.workers > 1:
        return {"NNODES": str(request.workers), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(PORT)}
    return {}


def _pod(request: Request, name: str) -> dict[str, Any]:
    args, output = request.with_output()
    environment = _environment(request, name) | output
    mounted = volumes(request)
    # The ports of libtpu's processes, and of the coordinator of a multislice job:
    # https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice
    ports = [{"containerPort": 8471}, {"containerPort": 8080}] if request.tpu and hosts(request) > 1 else []
    container = {
        "name": "trainer",
        "image": request.image,
        "command": list(request.command),
        "args": list(args),
        "env": variables(request, environment),
        "ports": ports,
        "resources": resources(request),
        "volumeMounts": volume_mounts(mounted),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": gke_objects.SPOT_GRACE if request.spot else 30,
        "serviceAccountName": request.service_account,
        "nodeSelector": selector(request),
        "tolerations": tolerations(request),
        "imagePullSecrets": [{"name": one} for one in request.image_pull_secret],
        "priorityClassName": request.priority,
        "containers": [without_empty(container)],
        "volumes": [volume for _, volume, _ in mounted],
    }
    return without_empty(pod)


def volumes(request: Request) -> list[Mounted]:
    """Shared memory, the disk, and each bucket."""
    # Data loaders pass batches through shared memory, which is 64 MiB by default.
    return [("/dev/shm", {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, False), *_storage(request)]


def volume_mounts(mounted: list[Mounted]) -> list[dict[str, Any]]:
    """The volumes as a container mounts them."""
    return [
        {"name": volume["name"], "mountPath": path} | ({"readOnly": True} if read_only else {})
        for path, volume, read_only in mounted
    ]


def _storage(request: Request) -> Iterator[Mounted]:
    if request.disk:
        claim: dict[str, Any] = {"accessModes": ["ReadWriteOnce"]}
        if request.disk.type:
            claim["storageClassName"] = request.disk.type
        claim["resources"] = {"requests": {"storage": f"{request.disk.size}Gi"}}
        volume = {"name": "disk", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
        yield DISK_PATH, volume, False
    for number, mount in enumerate(request.mounts):
        if mount.claim:
            claim_of = {"claimName": mount.claim} | ({"readOnly": True} if mount.read_only else {})
            yield mount.path, {"name": f"claim-{number}", "persistentVolumeClaim": claim_of}, mount.read_only
            continue
        if mount.server:
            nfs = {"server": mount.server, "path": f"/{mount.folder}"} | ({"readOnly": True} if mount.read_only else {})
            yield mount.path, {"name": f"nfs-{number}", "nfs": nfs}, mount.read_only
            continue
        options = ["implicit-dirs", *([f"only-dir={mount.folder}"] if mount.folder else [])]
        attributes = {"bucketName": mount.bucket, "mountOptions": ",".join(options)}
        driver: dict[str, Any] = {"driver": gke_objects.BUCKET_DRIVER} | ({"readOnly": True} if mount.read_only else {})
        volume = {"name": f"bucket-{number}", "csi": driver | {"volumeAttributes": attributes}}
        yield mount.path, volume, mount.read_only


def pod_metadata(request: Request, name: str) -> dict[str, Any]:
    """Labels and annotations of the pods."""
    annotations = {gke_objects.BUCKET_VOLUMES: "true"} if any(one.bucket for one in request.mounts) else {}
    if request.placement:
        key = gke_objects.REQUIRED_TOPOLOGY if request.placement.required else gke_objects.PREFERRED_TOPOLOGY
        annotations[key] = request.placement.label
    return without_empty({"labels": {"app": name} | dict(request.labels), "annotations": annotations})


def object_labels(request: Request) -> dict[str, str]:
    """Labels of the object that Kueue admits: the Job, the JobSet or the TrainJob."""
    return dict(request.labels) | ({gke_objects.QUEUE: request.queue} if request.queue else {})


def exclusive_pools(request: Request) -> dict[str, str]:
    """The annotation of a JobSet of TPU slices, each of which gets a node pool."""
    # Kueue's placement and one node pool for each Job exclude each other.
    return gke_objects.EXCLUSIVE if _in_jobset(request) and request.tpu and not request.placement else {}


def metadata(request: Request, **more: Any) -> dict[str, Any]:
    """Name and namespace of an object, and ``more``."""
    names = {"name": gke_objects.object_name(request.name), "namespace": request.namespace}
    return without_empty(names | more)


def tolerations(request: Request) -> list[dict[str, str]]:
    """Return the taints of GKE's nodes with accelerators, of Spot VMs, and those that are given."""
    found = []
    for text in request.toleration:
        key, equals, value = text.partition(":")[0].partition("=")
        how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        found.append(without_empty({"key": key, "effect": text.partition(":")[2]}) | how)
    for key, needed in ((gke_objects.TPU_RESOURCE, request.tpu), (gke_objects.GPU_RESOURCE, request.gpus)):
        if needed:
            found.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    if request.spot:
        found.append({"key": gke_objects.SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return found


def _job_spec(request: Request, name: str) -> dict[str, Any]:
    """The spec of a Job, which is the whole job or one slice of a JobSet."""
    pods = request.tpu.hosts if request.tpu else request.workers
    spec: dict[str, Any] = {"backoffLimit": 0}
    if request.spot:
        # A preempted machine is not a failure of the trainer: a single pod is replaced, a group is restarted.
        action = "FailJob" if _in_jobset(request) else "Ignore"
        spec["podFailurePolicy"] = {"rules": [{"action": action, "onPodConditions": [{"type": "DisruptionTarget"}]}]}
    if request.timeout:
        spec["activeDeadlineSeconds"] = request.timeout
    pod = _pod(request, name)
    if pods > 1:
        spec |= {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
        if not _in_jobset(request):
            pod["subdomain"] = name
    return spec | {"template": {"metadata": pod_metadata(request, name), "spec": pod}}


def _failure_policy(request: Request) -> dict[str, Any]:
    """Restart the JobSet, whose trainers resume from their last checkpoint; preemptions do not count as restarts."""
    found: dict[str, Any] = {"maxRestarts": RESTARTS}
    if request.spot:
        action = "RestartJobSetAndIgnoreMaxRestarts"
        found["rules"] = [{"name": "preempted", "action": action, "onJobFailureReasons": ["PodFailurePolicy"]}]
    return found


def _service(request: Request, name: str) -> dict[str, Any]:
    """A headless Service: the host names of a group's pods resolve, also before the pods are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(request),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }


def manifests(request: Request) -> list[dict[str, Any]]:
    """The objects to create: a JobSet; a Job; a Job and the headless Service of its group.

    Raises:
        UserError: GKE does not support what is requested.
    """
    name = gke_objects.object_name(request.name)
    if request.tune or request.tensorboard:
        raise UserError("GKE has neither tuning jobs nor a managed TensorBoard: use '--platform vertex'")
    if request.tpu and request.workers > 1:
        raise UserError(
            "the TPU slice determines the number of machines: leave out '--workers'; '--slices' requests several slices"
        )
    if request.slices > 1 and not request.tpu:
        raise UserError("'--slices' requires a TPU: '--workers' requests several machines")
    about = metadata(request, labels=object_labels(request), annotations=exclusive_pools(request))
    if _in_jobset(request):
        part = {"name": _part(request), "replicas": request.slices, "template": {"spec": _job_spec(request, name)}}
        spec = {"failurePolicy": _failure_policy(request), "replicatedJobs": [part]}
        return [{"apiVersion": gke_objects.JOBSET_VERSION, "kind": "JobSet", "metadata": about, "spec": spec}]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": _job_spec(request, name)}
    return [_service(request, name), job] if request.workers > 1 else [job]


def submit_command(file: str) -> list[str]:
    """The command that creates the objects of ``file``."""
    return ["kubectl", "create", f"--filename={file}"]


def waiting_reasons(pods: list[dict[str, Any]]) -> str:
    """Why pods have not started, in Kubernetes' words: `` (ImagePullBackOff)``; empty if there is no reason to show."""
    reasons: list[str] = []
    for pod in pods:
        status = pod.get("status", {})
        reasons += [one["reason"] for one in status.get("conditions") or [] if one.get("reason") == "Unschedulable"]
        states = [one.get("state", {}).get("waiting", {}) for one in status.get("containerStatuses") or []]
        reasons += [one["reason"] for one in states if one.get("reason") not in (None, "ContainerCreating")]
    return f" ({', '.join(dict.fromkeys(reasons))})" if reasons else ""


def follow_pods(resource: str, labels: str, count: int, interval: int, where: Sequence[str] = ()) -> str:
    """Show the logs of all pods, including pods that replace others, until the job has ended.

    Logs are followed once all pods have started. A job may end between two queries, or before all of its pods have
    started: the logs of pods that were not followed are shown at its end.

    Args:
        resource: for kubectl, such as ``job/NAME``.
        labels: label selector of its pods; ``count``: their number.
        interval: seconds between two queries.
        where: kubectl's option for the namespace; empty for that of its configuration.
    Returns:
        the condition that ended it: Complete or Failed of a Job or TrainJob, Completed or Failed of a JobSet.
    """
    followed: set[str] = set()
    shown = ""
    while True:
        status = submission.run_json(["kubectl", "get", resource, "--output=json", *where]).get("status", {})
        conditions = [str(one["type"]) for one in status.get("conditions") or [] if one["status"] == "True"]
        ended = next((one for one in conditions if one in ("Complete", "Completed", "Failed")), None)
        query = ["kubectl", "get", "pods", f"--selector={labels}", "--output=json", *where]
        found = submission.run_json(query)["items"]
        started = {_uid(pod) for pod in found if pod.get("status", {}).get("phase", "Pending") != "Pending"}
        if ended:
            for pod in found:
                if _uid(pod) in started - followed:
                    submission.run_visibly(["kubectl", "logs", f"pod/{pod['metadata']['name']}", "--prefix", *where])
            return ended
        if len(started) >= count and started - followed:
            followed |= started
            submission.run_visibly(["kubectl", "logs", "--follow", f"--selector={labels}", "--prefix", "--tail=-1",
                                    f"--max-log-requests={len(found)}", *where])  # fmt: skip
            continue
        message = f"{len(started)} of {count} pods have started{waiting_reasons(found)}"
        if message != shown and not started & followed:
            logger.info(message)
            shown = message
        time.sleep(interval)


def submit_objects(job: RenderedJob, resource: str, labels: str, count: int, interval: int) -> Submission:
    """Create the objects of a job, and follow its pods until the job has ended.

    Args:
        resource, labels, count, interval: see :func:`follow_pods`.
    Raises:
        UserError: kubectl is not installed.
        StepFailed: the job could not be created, or it failed.
    """
    submission.require_program("kubectl")
    with submission.temporary_file(job.text, Platform.file_name) as path:
        if submission.run_visibly(submit_command(str(path))):
            raise StepFailed("kubectl could not create the job; see above ('--name' gives it another name)")
    where = [f"--namespace={job.request.namespace}"] if job.request.namespace else []
    try:
        state = follow_pods(resource, labels, count, interval, where)
    except KeyboardInterrupt:
        submission.say_still_running(["kubectl", "delete", resource, *where])
        raise
    return submission.submission(resource, state, succeeded=("Complete", "Completed"))


def _uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("uid") or pod["metadata"]["name"])


class Gke(Platform):
    """Google Kubernetes Engine."""

    name = "gke"
    in_kubernetes = True
    kinds = ("gke",)
    tpu_machine = True
    mounts = MOUNTS
    options = OPTIONS | {"priority"}
    dry_run = DRY_RUN

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        writing.check_machine(request)
        objects = "---\n".join(yaml_writer.dump(one) for one in manifests(request))
        file = file or self.file_name
        notes = (*writing.machine_notes(request), *writing.network_notes(request))
        return writing.rendered(request, submit_command(file), file, objects, notes)

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        name = gke_objects.object_name(job.request.name)
        kind, label = ("jobset", gke_objects.JOBSET_NAME) if _in_jobset(job.request) else ("job", "job-name")
        return submit_objects(job, f"{kind}/{name}", f"{label}={name}", hosts(job.request), interval)

    def rehearse(self, job: JobFile, trial: Trial | None = None) -> Rehearsal:
        return rehearsed_gke.rehearsal(job)
