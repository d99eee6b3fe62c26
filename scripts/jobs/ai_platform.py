"""AI Platform Training, for reading and converting: the service was shut down on 31 January 2025.

cloud.google.com/ai-platform/training/docs/deprecations.
"""

from __future__ import annotations

import re
from typing import Any

from scripts.cli import UserError
from scripts.jobs import machines, tuning
from scripts.jobs.request import Request

SHUT_DOWN = "31 January 2025"

#: MACHINE= that stands for a scale tier of its own: one chief and one TPU v2-8.
BASIC_TPU = "BASIC_TPU"

DEFAULT_MACHINE = "n1-standard-8"


def job_id(name: str) -> str:
    """A name as the API takes it: letters, digits and underscores, a letter first (ml.v1: Job.jobId)."""
    found = re.sub(r"\W", "_", name)
    return found if found[:1].isalpha() else f"job_{found}"


def tpu_version(request: Request) -> str:
    """The tpuTfVersion: the one given, or that of the image's framework.

    Raises:
        UserError: the image's framework is of no version that AI Platform's TPUs had.
    """
    if request.tpu_version:
        return request.tpu_version
    known = machines.table().ai_platform_tpu_runtimes
    if request.spec is None:
        raise UserError(f"no TPU_VERSION: the runtime version of the TPU, one of {', '.join(known)}")
    framework = request.spec.framework
    minor = ".".join(framework.version.split(".")[:2])
    if framework.name == "tensorflow" and minor in known:
        return minor
    raise UserError(
        f"AI Platform's TPUs had runtimes {known[0]} to {known[-1]}; {request.spec.target} holds {framework.name} "
        f"{framework.version}: use PLATFORM=vertex, or give TPU_VERSION= to write the old form anyway"
    )


def _gpus(request: Request) -> dict[str, Any]:
    if not request.gpus:
        return {}
    return {"acceleratorConfig": {"type": request.gpus.type, "count": request.gpus.count}}


def _tpu(request: Request) -> dict[str, Any]:
    """Chief and TPU: two machines, since the TPU was one of its own.

    Raises:
        UserError: AI Platform never had that slice.
    """
    tpu = request.tpu
    assert tpu is not None
    kind = f"TPU_{tpu.generation.upper()}{'_POD' if tpu.pod else ''}"
    if tpu.cores not in machines.table().ai_platform_tpus.get(kind, []):
        raise UserError(f"AI Platform had no {tpu.accelerator_type}: v2-8 and v3-8, pods of up to v2-512 and v3-256")
    worker: dict[str, Any] = {"imageUri": request.image, "tpuTfVersion": tpu_version(request)}
    if request.machine == BASIC_TPU:
        if tpu.accelerator_type != "v2-8":
            raise UserError(f"BASIC_TPU is a v2-8, not a {tpu.accelerator_type}")
        return {"scaleTier": BASIC_TPU, "masterConfig": {"imageUri": request.image}, "workerConfig": worker}
    machine = request.machine or DEFAULT_MACHINE
    if machine in machines.table().ai_platform_machines:
        # acceleratorConfig goes with Compute Engine machines only; cloud_tpu alone is a v2-8.
        if tpu.accelerator_type != "v2-8":
            raise UserError(f"with the machine type {machine} the TPU is a v2-8: give a Compute Engine machine type")
    else:
        worker["acceleratorConfig"] = {"type": kind, "count": tpu.cores}
    return {
        "scaleTier": "CUSTOM",
        "masterType": machine,
        "masterConfig": {"imageUri": request.image},
        "workerType": "cloud_tpu",
        "workerCount": 1,
        "workerConfig": worker,
    }


def _machines(request: Request) -> dict[str, Any]:
    machine = request.machine
    if machine is None:
        machine = machines.machine_for(request.gpus.type, request.gpus.count) if request.gpus else DEFAULT_MACHINE
    config = {"imageUri": request.image} | _gpus(request)
    found: dict[str, Any] = {"scaleTier": "CUSTOM", "masterType": machine, "masterConfig": config}
    if request.workers > 1:
        found |= {"workerType": machine, "workerCount": request.workers - 1, "workerConfig": config}
    return found


def config(request: Request) -> dict[str, Any]:
    """The job as ``gcloud ai-platform jobs submit training --config`` takes it.

    Raises:
        UserError: something was asked for that AI Platform never had.
    """
    for name, value in (("SPOT", request.spot), ("TENSORBOARD", request.tensorboard), ("SLICES", request.slices > 1)):
        if value:
            raise UserError(f"AI Platform has no {name}: use PLATFORM=vertex")
    if request.tpu and request.workers > 1:
        raise UserError("a TPU job has one TPU worker: leave out WORKERS, or take a pod such as ACCELERATOR=v2-32")
    found = _tpu(request) if request.tpu else _machines(request)
    if request.args:
        found["args"] = list(request.args)
    found["region"] = request.place
    if request.output:
        found["jobDir"] = request.output
    if request.service_account:
        found["serviceAccount"] = request.service_account
    if request.timeout:
        found["scheduling"] = {"maxRunningTime": f"{request.timeout}s"}
    if request.tuning:
        found["hyperparameters"] = tuning.hyperparameters(request.tuning)
    return {"trainingInput": found}


def submit_command(request: Request, file: str) -> list[str]:
    """The command that submitted ``file``."""
    found = ["gcloud", "ai-platform", "jobs", "submit", "training", job_id(request.name), f"--region={request.place}",
             f"--config={file}"]  # fmt: skip
    return found + ([f"--project={request.project}"] if request.project else [])
