"""AI Platform Training, to read and convert its jobs: the service was shut down on 31 January 2025.

https://cloud.google.com/ai-platform/training/docs/deprecations
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from trainyard.common.errors import UserError
from trainyard_jobs.model import machines, tuning, yaml_writer
from trainyard_jobs.model.machines import AI_PLATFORM_SHUT_DOWN
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.ai_platform import migration as ai_platform_migration
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.schema.job_file import JobFile

#: Value of MACHINE= for the scale tier of one chief and one TPU v2-8.
BASIC_TPU = "BASIC_TPU"

DEFAULT_MACHINE = "n1-standard-8"


def job_id(name: str) -> str:
    """A name as the API accepts it: letters, digits and underscores, a letter first (ml v1, Job.jobId)."""
    found = re.sub(r"\W", "_", name)
    return found if found[:1].isalpha() else f"job_{found}"


def tpu_version(request: Request) -> str:
    """The tpuTfVersion: the given one, or that of the image's framework.

    Raises:
        UserError: AI Platform's TPUs had no runtime of the framework's version.
    """
    if request.tpu_version:
        return request.tpu_version
    known = machines.table().ai_platform_tpu_runtimes
    if request.recipe is None:
        raise UserError(f"no '--tpu-version': the runtime version of the TPU, one of {', '.join(known)}")
    framework, version = request.recipe.framework, request.recipe.version
    minor = ".".join(version.split(".")[:2])
    if framework.name == "tensorflow" and minor in known:
        return minor
    raise UserError(
        f"AI Platform's TPUs had runtimes {known[0]} to {known[-1]}; {request.recipe.name} contains {framework.name} "
        f"{version}: use '--platform vertex', or give '--tpu-version' to write the job anyway"
    )


def _container(request: Request) -> dict[str, Any]:
    """The image and its command, which excludes ``args``."""
    command = [*request.command, *request.args] if request.command else []
    return writing.without_empty({"imageUri": request.image, "containerCommand": command})


def _tpu(request: Request, tpu: machines.TpuSlice) -> dict[str, Any]:
    """Chief and TPU, which was a machine separate from the chief.

    Raises:
        UserError: AI Platform did not offer that slice.
    """
    kind = f"TPU_{tpu.generation.upper()}{'_POD' if tpu.pod else ''}"
    if tpu.cores not in machines.table().ai_platform_tpus.get(kind, []):
        raise UserError(f"AI Platform had no {tpu.accelerator_type}: v2-8 and v3-8, pods of up to v2-512 and v3-256")
    worker = _container(request) | {"tpuTfVersion": tpu_version(request)}
    if request.machine == BASIC_TPU:
        if tpu.accelerator_type != "v2-8":
            raise UserError(f"BASIC_TPU is a v2-8, not a {tpu.accelerator_type}")
        return {"scaleTier": BASIC_TPU, "masterConfig": _container(request), "workerConfig": worker}
    machine = request.machine or DEFAULT_MACHINE
    if machine in machines.table().ai_platform_machines:
        # Only Compute Engine machine types accept an acceleratorConfig; cloud_tpu without one is a v2-8.
        if tpu.accelerator_type != "v2-8":
            raise UserError(f"with the machine type {machine} the TPU is a v2-8: give a Compute Engine machine type")
    else:
        worker["acceleratorConfig"] = {"type": kind, "count": tpu.cores}
    return {
        "scaleTier": "CUSTOM",
        "masterType": machine,
        "masterConfig": _container(request),
        "workerType": "cloud_tpu",
        "workerCount": 1,
        "workerConfig": worker,
    }


def _machines(request: Request) -> dict[str, Any]:
    machine = request.machine
    if machine is None:
        machine = machines.machine_for(request.gpus.type, request.gpus.count) if request.gpus else DEFAULT_MACHINE
    config = _container(request)
    if request.gpus:
        config["acceleratorConfig"] = {"type": request.gpus.type, "count": request.gpus.count}
    found: dict[str, Any] = {"scaleTier": "CUSTOM", "masterType": machine, "masterConfig": config}
    if request.workers > 1:
        found |= {"workerType": machine, "workerCount": request.workers - 1, "workerConfig": config}
    return found


def config(request: Request) -> dict[str, Any]:
    """The job as ``gcloud ai-platform jobs submit training --config`` takes it.

    Raises:
        UserError: AI Platform did not support what is requested.
    """
    for name, value in (("spot", request.spot), ("tensorboard", request.tensorboard), ("slices", request.slices > 1)):
        if value:
            raise UserError(f"AI Platform has no '--{name}': use '--platform vertex'")
    if request.tpu and request.workers > 1:
        raise UserError(
            "a TPU job has one TPU worker: leave out '--workers', or request a pod such as '--accelerator v2-32'"
        )
    found = _tpu(request, request.tpu) if request.tpu else _machines(request)
    optional = {
        "args": [] if request.command else list(request.args),
        "region": request.place,
        "jobDir": request.output,
        "serviceAccount": request.service_account,
        "scheduling": {"maxRunningTime": f"{request.timeout}s"} if request.timeout else None,
        "hyperparameters": tuning.hyperparameters(request.tune) if request.tune else None,
    }
    return {"trainingInput": found | writing.without_empty(optional)}


def submit_command(request: Request, file: str) -> list[str]:
    """The command that submits ``file``."""
    found = ["gcloud", "ai-platform", "jobs", "submit", "training", job_id(request.name), f"--region={request.place}",
             f"--config={file}"]  # fmt: skip
    return found + ([f"--project={request.project}"] if request.project else [])


class AiPlatform(Platform):
    """AI Platform Training."""

    name = "ai-platform"
    kinds = ("ai-platform",)

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        """The job, and below it the Vertex AI job that replaces it, as a comment: the file stays one document."""
        old = config(request)
        successor = ai_platform_migration.migrate(old)
        file = file or self.file_name
        command = submit_command(request, file)
        convert = f"trainyard job --from {shlex.quote(file)} --platform vertex"
        head = yaml_writer.comment(
            [
                f"NOT FOR USE: AI Platform Training was shut down on {AI_PLATFORM_SHUT_DOWN}. This is its format, for",
                f"comparison, and for conversion with `{convert}`.",
            ]
        ) + writing.header(request, command, file)
        below = yaml_writer.comment(
            ["", "The same job on Vertex AI:", "", *yaml_writer.dump(successor.config).splitlines()]
        )
        return RenderedJob(
            # Without the image's contents: the service was shut down before current frameworks were released.
            writing.checked(head + yaml_writer.dump(old) + below, request),
            command,
            request,
            warnings=(f"AI Platform Training was shut down on {AI_PLATFORM_SHUT_DOWN} and accepts no jobs",),
            notes=tuple(f"on Vertex AI: {note}" for note in successor.notes),
        )

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        """Submit the job to a private or fake endpoint: Google's refuses it."""
        request, name = job.request, job_id(job.request.name)
        with submission.temporary_file(job.text, self.file_name) as path:
            submission.run_json([*submit_command(request, str(path)), "--format=json"])
        where = [f"--project={request.project}"] if request.project else []
        jobs = ["ai-platform", "jobs"]
        return submission.follow_google_job(name, jobs, where, succeeded="SUCCEEDED", interval=interval)

    def rehearse(self, job: JobFile, trial: Trial | None = None) -> Rehearsal:
        convert = f"trainyard job --from {shlex.quote(str(job.path))} --platform vertex >vertex.yaml"
        raise UserError(
            f"{job.path}: AI Platform Training was shut down on {AI_PLATFORM_SHUT_DOWN}: convert the job with "
            f"'{convert}', and rehearse that"
        )
