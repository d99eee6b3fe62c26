"""Vertex AI: CustomJobs and hyperparameter tuning jobs, in the form that gcloud's ``--config`` takes."""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
from typing import Any

from trainyard.common.errors import UserError
from trainyard_jobs.model import machines, tuning, yaml_writer
from trainyard_jobs.model.options import POOL, POOLS, Mount
from trainyard_jobs.model.request import Request, accelerator
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.ai_platform import migration as ai_platform_migration
from trainyard_jobs.platforms.base import Conversion, Platform, RenderedJob, Submission
from trainyard_jobs.platforms.vertex import rehearse as rehearsed_vertex
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.rules.evidence import validate
from trainyard_jobs.schema.job_file import JobFile

logger = logging.getLogger(__name__)

#: Machine type of CPU jobs: the smallest on which every trainer of Trainyard has memory to spare.
DEFAULT_MACHINE = "n1-standard-8"

#: Where the service mounts NFS.
NFS = "/mnt/nfs/"


def machine_spec(request: Request) -> dict[str, Any]:
    """The MachineSpec, with the reservation that it uses.

    Raises:
        UserError: Vertex AI does not offer that TPU, or the reservation has no full name.
    """
    found = _machine(request)
    if request.reservation == "any":
        found["reservationAffinity"] = {"reservationAffinityType": "ANY_RESERVATION"}
    elif request.reservation:
        # https://docs.cloud.google.com/vertex-ai/docs/training/use-reservations
        if not re.fullmatch(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+", request.reservation):
            form = "projects/PROJECT/zones/ZONE/reservations/NAME"
            raise UserError(f"'--reservation {request.reservation}': Vertex AI takes {form}, or 'any'")
        found["reservationAffinity"] = {
            "reservationAffinityType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [request.reservation],
        }
    return found


def _machine(request: Request) -> dict[str, Any]:
    """Return the machine: a TPU by count (v2, v3) or topology (v5e, v6e), GPUs, or one without accelerators.

    Raises:
        UserError: Vertex AI does not offer that TPU.
    """
    if request.tpu:
        return _tpu(request, request.tpu)
    if request.gpus:
        machine = request.machine or machines.machine_for(request.gpus.type, request.gpus.count)
        return {
            "machineType": machine,
            "acceleratorType": request.gpus.type,
            "acceleratorCount": request.gpus.count,
        }
    machine = request.machine or DEFAULT_MACHINE
    own = machines.gpu_of_machine(machine)
    # Machine types that include GPUs still require an accelerator type and count:
    # https://cloud.google.com/vertex-ai/docs/training/configure-compute#gpus
    return {"machineType": machine} | ({"acceleratorType": own[0], "acceleratorCount": own[1]} if own else {})


def _tpu(request: Request, tpu: machines.TpuSlice) -> dict[str, Any]:
    if tpu.vertex is None:
        offered = [one.accelerator_type for one in machines.slices().values() if one.vertex]
        raise UserError(
            f"Vertex AI has no {tpu.accelerator_type} for jobs; it has {', '.join(offered)}; or '--platform gke'"
        )
    if tpu.vertex.count:
        return {
            "machineType": tpu.machine_type,
            "acceleratorType": tpu.vertex.count,
            "acceleratorCount": tpu.cores,
        }
    return {"machineType": tpu.machine_type, "tpuTopology": tpu.topology}


def pools(request: Request) -> list[dict[str, Any]]:
    """The worker pools: the first has one replica, the chief; the second has the other workers.

    Raises:
        UserError: several machines were requested with a TPU slice, which is one pool of one replica; or a pool would
            be empty.
    """
    if request.tpu and (request.workers > 1 or request.slices > 1 or request.pool):
        raise UserError(
            "a TPU job on Vertex AI is one pool with one replica for any slice: leave out WORKERS, SLICES and POOL, "
            "or request a larger slice"
        )
    own = {role: match for role, text in request.pool if (match := re.fullmatch(POOL, text))}
    counts = {role: int(match[1] or 1) for role, match in own.items()}
    if any(counts.get(role, 1) > 1 for role in POOLS[:2]):
        raise UserError("'--pool': '--workers' gives the number of machines of chief and workers together")
    counts |= {"chief": 1, "workers": request.workers - 1}
    used = POOLS[: 1 + max(POOLS.index(role) for role in counts if role in own or counts[role])]
    if empty := next((role for role in used if not counts.get(role)), None):
        fix = "give '--workers 2' or more" if empty == "workers" else f"give '--pool {empty}=MACHINE', too"
        raise UserError(f"the pool of {empty} is empty, which gcloud refuses: {fix}")
    return [_pool(request, counts[role], own.get(role)) for role in used]


def _pool(request: Request, count: int, own: re.Match[str] | None) -> dict[str, Any]:
    if own:
        gpus, tpu = accelerator(own[3]) if own[3] else (None, None)
        if tpu:
            raise UserError(f"'--pool': {tpu} on {own[2]}: a TPU job has one pool, without '--pool'")
        request = dataclasses.replace(request, machine=own[2], gpus=gpus)
    container = {
        "imageUri": request.image,
        "command": list(request.command),
        "args": list(request.args),
        "env": [{"name": name, "value": value} for name, value in request.env],
    }
    disk = {"bootDiskType": request.disk.type, "bootDiskSizeGb": request.disk.size} if request.disk else {}
    pool = {
        "machineSpec": machine_spec(request),
        "replicaCount": count,
        "diskSpec": writing.without_empty(disk),
        "nfsMounts": [_nfs(request, mount) for mount in request.mounts],
        "containerSpec": writing.without_empty(container),
    }
    return writing.without_empty(pool)


def _nfs(request: Request, mount: Mount) -> dict[str, str]:
    """An NfsMount (https://docs.cloud.google.com/vertex-ai/docs/training/train-nfs-share).

    Raises:
        UserError: it is a bucket, or Vertex AI cannot mount it there.
    """
    if mount.bucket:
        raise UserError(f"'--mount gs://{mount.bucket}': Vertex AI has every bucket below /gcs: leave it out")
    if not mount.path.startswith(NFS) or mount.read_only:
        raise UserError(f"'--mount': Vertex AI mounts NFS below {NFS}, and not read-only: write {NFS}NAME, without :ro")
    if not request.network and not request.network_attachment:
        raise UserError(f"'--mount nfs://{mount.server}' requires '--network' or '--network-attachment'")
    return {"server": mount.server, "path": f"/{mount.folder}", "mountPoint": mount.path.removeprefix(NFS)}


def job_spec(request: Request) -> dict[str, Any]:
    """The CustomJobSpec."""
    scheduling: dict[str, Any] = {}
    if request.timeout:
        scheduling["timeout"] = f"{request.timeout}s"
    if request.spot:
        scheduling["strategy"] = "SPOT"
    if request.flex_start:
        scheduling["strategy"] = "FLEX_START"
    if request.max_wait:
        scheduling["maxWaitDuration"] = f"{request.max_wait}s"
    if request.spot and request.workers > 1:
        # Without it, the remaining replicas never finish waiting for the restarted one, which starts a new rendezvous.
        scheduling["restartJobOnWorkerRestart"] = True
    attachment, output = request.network_attachment, request.output
    optional = {
        "scheduling": scheduling,
        "serviceAccount": request.service_account,
        "baseOutputDirectory": {"outputUriPrefix": output} if output else None,
        "tensorboard": request.tensorboard,
        "network": request.network,
        "pscInterfaceConfig": {"networkAttachment": attachment} if attachment else None,
        "persistentResourceId": request.persistent_resource,
        "enableWebAccess": request.web_access,
    }
    return {"workerPoolSpecs": pools(request)} | writing.without_empty(optional)


def config(request: Request) -> dict[str, Any]:
    """Return the file for ``--config``: the CustomJobSpec, or the HyperparameterTuningJob of a search."""
    search = request.tune
    if search is None:
        return job_spec(request)
    return {
        "displayName": request.name,
        "studySpec": tuning.study_spec(search),
        "maxTrialCount": search.trials,
        "parallelTrialCount": search.parallel,
        "trialJobSpec": job_spec(request),
    }


def group(tuned: bool) -> str:
    """gcloud's command group for jobs, or for tuning jobs."""
    return "hp-tuning-jobs" if tuned else "custom-jobs"


def submit_command(request: Request, file: str) -> list[str]:
    """The command that submits ``file``."""
    found = ["gcloud", "ai", group(request.tune is not None), "create", f"--region={request.place}",
             f"--display-name={request.name}", f"--config={file}"]  # fmt: skip
    if request.tune:
        # gcloud's defaults for these flags (1 and 1) override the file.
        found += [f"--max-trial-count={request.tune.trials}", f"--parallel-trial-count={request.tune.parallel}"]
    if request.labels:
        found.append("--labels=" + ",".join(f"{key}={value}" for key, value in request.labels))
    if request.kms_key:
        found.append(f"--kms-key={request.kms_key}")
    return found + ([f"--project={request.project}"] if request.project else [])


class Vertex(Platform):
    """Vertex AI."""

    name = "vertex"
    kinds = ("custom-job", "hyperparameter-tuning-job")
    tpu_machine = True
    options = frozenset({"flex-start", "max-wait", "reservation", "disk", "labels", "kms-key", "network", "mount",
                         "env", "network-attachment", "persistent-resource", "pool", "web-access"})  # fmt: skip

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        # https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.customJobs#CustomJob
        if len(request.name) > 128:
            raise UserError("'--name': a display name has at most 128 characters")
        writing.check_machine(request)
        file = file or self.file_name
        body = yaml_writer.dump(config(request))
        return writing.rendered(request, submit_command(request, file), file, body, writing.machine_notes(request))

    def convert(self, job: JobFile, conversion: Conversion, file: str | None = None) -> RenderedJob:
        """An AI Platform job as a Vertex AI job."""
        if job.kind != "ai-platform":
            raise UserError(f"{job.path}: a {job.kind}: '--from' converts AI Platform jobs only")
        document = job.documents[0]
        for error in (one for one in validate(job.kind, document) if not one.ignored):
            raise job.error(error.location, f"{error.what}; 'trainyard job check {job.path!s}' lists every mistake")
        done = ai_platform_migration.migrate(document, image=conversion.image)
        name = conversion.name or str(document.get("jobId") or job.path.stem)
        request = Request(name, "", region=conversion.region or done.region, project=conversion.project)
        if "studySpec" in done.config:
            trials = {"trials": done.config["maxTrialCount"], "parallel": done.config["parallelTrialCount"]}
            request = dataclasses.replace(request, tune=tuning.Tuning((), **trials))
            done.config["displayName"] = name
        command = [*submit_command(request, file or self.file_name), *done.flags]
        header = yaml_writer.comment(
            [
                f"{name}: converted from {job.path.name} by `trainyard job`. Submit it with:",
                shlex.join(command),
                "",
                *done.notes,
            ]
        )
        text = writing.checked(header + yaml_writer.dump(done.config), request)
        notes = tuple(f"changed: {note}" for note in done.notes)
        return RenderedJob(text, command, request, notes=notes, flags=tuple(done.flags))

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        request = job.request
        with submission.temporary_file(job.text, self.file_name) as path:
            created = submission.run_json([*submit_command(request, str(path)), *job.flags, "--format=json"])
        name = str(created["name"])
        logger.info(f"submitted as {name}")
        where = [f"--region={request.place}", *([f"--project={request.project}"] if request.project else [])]
        jobs = ["ai", group(request.tune is not None)]
        return submission.follow_google_job(name, jobs, where, succeeded="JOB_STATE_SUCCEEDED", interval=interval)

    def rehearse(self, job: JobFile, trial: Trial | None = None) -> Rehearsal:
        return rehearsed_vertex.rehearsal(job, trial)
