"""Vertex AI: CustomJobs and hyperparameter tuning jobs, in the form that gcloud's ``--config`` takes."""

from __future__ import annotations

from typing import Any

from scripts.cli import UserError
from scripts.jobs import machines, tuning
from scripts.jobs.request import Request

#: What a CPU job runs on if nothing is said: the smallest that all our trainers were run on comfortably.
DEFAULT_MACHINE = "n1-standard-8"


def machine_spec(request: Request) -> dict[str, Any]:
    """The MachineSpec: a TPU by count (v2, v3) or by topology (v5e, v6e), GPUs, or a machine alone.

    Raises:
        UserError: Vertex AI does not offer that TPU to jobs.
    """
    if request.tpu:
        return _tpu(request)
    if request.gpus:
        machine = request.machine or machines.machine_for(request.gpus.type, request.gpus.count)
        return {
            "machineType": machine,
            "acceleratorType": request.gpus.type,
            "acceleratorCount": request.gpus.count,
        }
    machine = request.machine or DEFAULT_MACHINE
    own = machines.gpu_of_machine(machine)
    # Machines that come with GPUs must still be asked for them (configure-compute#gpus).
    return {"machineType": machine} | ({"acceleratorType": own[0], "acceleratorCount": own[1]} if own else {})


def _tpu(request: Request) -> dict[str, Any]:
    tpu = request.tpu
    assert tpu is not None
    if tpu.vertex is None:
        offered = [one.accelerator_type for one in machines.slices().values() if one.vertex]
        raise UserError(
            f"Vertex AI has no {tpu.accelerator_type} for jobs; it has {', '.join(offered)}; or PLATFORM=gke"
        )
    if tpu.vertex.count:
        return {
            "machineType": tpu.machine_type,
            "acceleratorType": tpu.vertex.count,
            "acceleratorCount": tpu.cores,
        }
    return {"machineType": tpu.machine_type, "tpuTopology": tpu.topology}


def pools(request: Request) -> list[dict[str, Any]]:
    """The worker pools: one replica in the first, which is the chief, and the others in the second.

    Raises:
        UserError: several machines were asked for beside a TPU slice, which is one pool of one replica.
    """
    if request.tpu and (request.workers > 1 or request.slices > 1):
        raise UserError(
            "a TPU job on Vertex AI is one pool with one replica, whatever the slice: leave out WORKERS and SLICES, "
            "or take a bigger slice"
        )
    container: dict[str, Any] = {"imageUri": request.image}
    if request.args:
        container["args"] = list(request.args)
    pool = {"machineSpec": machine_spec(request), "replicaCount": 1, "containerSpec": container}
    if request.workers == 1:
        return [pool]
    return [pool, pool | {"replicaCount": request.workers - 1}]


def job_spec(request: Request) -> dict[str, Any]:
    """The CustomJobSpec."""
    found: dict[str, Any] = {"workerPoolSpecs": pools(request)}
    scheduling: dict[str, Any] = {}
    if request.timeout:
        scheduling["timeout"] = f"{request.timeout}s"
    if request.spot:
        scheduling["strategy"] = "SPOT"
    if request.spot and request.workers > 1:
        # Without it the replicas that stay wait for ever for one that comes back with a new rendezvous.
        scheduling["restartJobOnWorkerRestart"] = True
    if scheduling:
        found["scheduling"] = scheduling
    if request.service_account:
        found["serviceAccount"] = request.service_account
    if request.output:
        found["baseOutputDirectory"] = {"outputUriPrefix": request.output}
    if request.tensorboard:
        found["tensorboard"] = request.tensorboard
    return found


def tuning_job(request: Request) -> dict[str, Any]:
    """The HyperparameterTuningJob, with the metric that our trainers report."""
    assert request.tuning is not None
    return {
        "displayName": request.name,
        "studySpec": tuning.study_spec(request.tuning),
        "maxTrialCount": request.tuning.trials,
        "parallelTrialCount": request.tuning.parallel,
        "trialJobSpec": job_spec(request),
    }


def config(request: Request) -> dict[str, Any]:
    """What ``--config`` takes."""
    return tuning_job(request) if request.tuning else job_spec(request)


def group(tuned: bool) -> str:
    """gcloud's command group."""
    return "hp-tuning-jobs" if tuned else "custom-jobs"


def submit_command(request: Request, file: str) -> list[str]:
    """The command that submits ``file``."""
    found = ["gcloud", "ai", group(request.tuning is not None), "create", f"--region={request.place}",
             f"--display-name={request.name}", f"--config={file}"]  # fmt: skip
    if request.tuning:
        # gcloud's own defaults for these (1 and 1) win over the file.
        found += [f"--max-trial-count={request.tuning.trials}", f"--parallel-trial-count={request.tuning.parallel}"]
    return found + ([f"--project={request.project}"] if request.project else [])
