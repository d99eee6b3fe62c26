"""A Vertex AI CustomJob, and a trial of a HyperparameterTuningJob, as containers.

Sources, below https://cloud.google.com/vertex-ai/docs/training/:
distributed-training (CLUSTER_SPEC, TF_CONFIG), code-requirements (AIP_*, CLOUD_ML_*), training-with-tpu-vm
(TPU_CONFIG), understanding-training-service (restarts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import UserError
from trainyard_jobs.model import machines
from trainyard_jobs.model.request import output_variables
from trainyard_jobs.rehearsal import tpu
from trainyard_jobs.rehearsal.model import PROJECT_NUMBER, ZONE, Rehearsal, Replica, Trial, count, variables, words
from trainyard_jobs.rehearsal.restart_policy import JOB_RETRIES, TrainingService
from trainyard_jobs.schema.job_file import JobFile

#: Position in workerPoolSpecs -> task of its replicas in TF_CONFIG (distributed-training).
TASKS = ("chief", "worker", "ps", "evaluator")
ROLES = {"chief": "chief", "worker": "worker", "ps": "server", "evaluator": "evaluator"}
#: The port in CLUSTER_SPEC (distributed-training), and its `open_ports`, for other traffic between replicas.
PORT = 2222
OPEN_PORTS = [3333]
#: The project in TPU_CONFIG: Google's tenant project, not the user's (training-with-tpu-vm).
TENANT_PROJECT = "tenant-project-rehearsal"
#: The file that cloudml-hypertune writes and the service reads:
#: https://github.com/GoogleCloudPlatform/cloudml-hypertune/blob/master/hypertune/hypertune.py
METRIC_FILE = "/tmp/hypertune/output.metrics"
JOB_ID = "1234567890123456789"
#: Part of the host names, such as cmle-training-workerpool0-1d969d3ba6-0 on the platform.
RUN = "f00d5eed00"


@dataclass(frozen=True)
class _Pool:
    """A worker pool: its position, its spec, and its number of containers (a TPU slice has one for each host)."""

    number: int
    spec: Mapping[str, Any]
    replicas: int
    slice: machines.TpuSlice | None

    @property
    def task(self) -> str:
        return TASKS[self.number]

    @property
    def name(self) -> str:
        return f"workerpool{self.number}"

    def hosts(self) -> list[str]:
        return [f"cmle-training-{self.name}-{RUN}-{index}" for index in range(self.replicas)]

    def addresses(self) -> list[str]:
        return [f"{host}:{PORT}" for host in self.hosts()]


def rehearsal(job: JobFile, trial: Trial | None = None) -> Rehearsal:
    """Return the replicas of a CustomJob or ``trial``; a UserError gives the line of what cannot be rehearsed."""
    spec = job.spec
    pools = _pools(job, spec)
    if not pools or pools[0].number:
        raise job.error((*job.root, "workerPoolSpecs"), "worker pool 0, the primary replica, is missing")
    found = pools[0].slice
    base = str(spec.get("baseOutputDirectory", {}).get("outputUriPrefix") or "").rstrip("/")
    # A trial has the folder of its number, below that of the job.
    folders = output_variables(f"{base}/{trial.number}" if trial else base) if base else {}
    common = folders | _identity(spec, trial)
    replicas: list[Replica] = []
    for pool in pools:
        for index in range(pool.replicas):
            replicas.append(_replica(job, pool, index, len(replicas), pools, common, trial))
    scheduling = spec.get("scheduling") or {}
    hosts = tuple(one.name for one in replicas if one.role == "host")
    retries = not scheduling.get("disableRetries")
    policy = TrainingService(
        primary=hosts or (replicas[0].name,),
        restart_together=found is not None and found.hosts > 1,
        restart_job=bool(scheduling.get("restartJobOnWorkerRestart")) and retries,
        job_retries=JOB_RETRIES if retries else 0,
    )
    names = pools[0].hosts()
    attributes = {
        name: tpu.attributes(found, index, names, ZONE) for index, name in enumerate(names) if found is not None
    }
    return Rehearsal(
        platform="Vertex AI tuning trial" if trial else "Vertex AI CustomJob",
        name=str(job.documents[0].get("displayName") or job.path.stem),
        replicas=tuple(replicas),
        policy=policy,
        attributes=attributes,
        notes=tuple(_notes(pools, spec)),
        metric_file=METRIC_FILE if trial else "",
    )


def _pools(job: JobFile, spec: Mapping[str, Any]) -> list[_Pool]:
    listed = spec.get("workerPoolSpecs") or []
    if len(listed) > len(TASKS):
        where = (*job.root, "workerPoolSpecs", len(TASKS))
        raise job.error(where, f"a job has at most {len(TASKS)} worker pools")
    pools = []
    for number, one in enumerate(listed):
        if not one:
            continue  # an empty pool keeps the positions of the following ones
        where = (*job.root, "workerPoolSpecs", number)
        if "containerSpec" not in one:
            what = (
                "only containers can be rehearsed, not Python packages in Google's executor images (pythonPackageSpec)"
            )
            raise job.error(where, f"workerPoolSpecs[{number}] has no containerSpec: {what}")
        replicas = count(one.get("replicaCount"), 1)
        if number == 0 and replicas != 1:
            what = f"worker pool 0 has one replica, the primary, not {replicas}"
            raise job.error((*where, "replicaCount"), what)
        found = slice_of_machine(job, (*where, "machineSpec"), one.get("machineSpec") or {})
        pools.append(_Pool(number, one, found.hosts if found else replicas, found))
    return pools


def slice_of_machine(
    job: JobFile, where: tuple[int | str, ...], machine: Mapping[str, Any]
) -> machines.TpuSlice | None:
    """The TPU slice that a machineSpec requests; None for machines without TPUs.

    Raises:
        UserError: there is no such slice; the message gives the line.
    """
    accelerator, topology = str(machine.get("acceleratorType") or ""), machine.get("tpuTopology")
    machine_type = str(machine.get("machineType") or "")
    if accelerator in ("TPU_V2", "TPU_V3"):
        name = f"v{accelerator[-1]}-{count(machine.get('acceleratorCount'), 8)}"
        try:
            return machines.slice_of(name)
        except UserError as error:
            raise job.error((*where, "acceleratorCount"), str(error)) from None
    if machines.generation_of_machine(machine_type) is None:
        return None
    found = machines.slice_on(machine_type, str(topology)) if topology else None
    if found is None:
        what = f"{machine_type} with tpuTopology {topology} is not a TPU slice (docs/jobs.md lists them)"
        raise job.error((*where, "tpuTopology"), what)
    return found


def _replica(
    job: JobFile,
    pool: _Pool,
    index: int,
    ordinal: int,
    pools: Sequence[_Pool],
    common: Mapping[str, str],
    trial: Trial | None,
) -> Replica:
    container = pool.spec["containerSpec"]
    if not container.get("imageUri"):
        raise job.error((*job.root, "workerPoolSpecs", pool.number, "containerSpec"), "no imageUri")
    arguments = words(container.get("args"))
    if trial:
        arguments = (*(arguments or ()), *trial.arguments())
    environment = dict(common) | {"CLUSTER_SPEC": cluster_spec(pools, pool, index, trial)}
    if sum(one.replicas for one in pools) > 1 and pool.slice is None:
        environment["TF_CONFIG"] = tf_config(pools, pool, index, trial)
    if pool.slice:
        environment |= _tpu_variables()
    host = pool.slice is not None and pool.slice.hosts > 1
    role = "host" if host else ROLES[pool.task]
    name = pool.task if pool.task == "chief" and not host else f"{role if host else pool.task}-{index}"
    return Replica(
        name=name,
        hostname=pool.hosts()[index],
        role=role,
        ordinal=ordinal,
        image=str(container["imageUri"]),
        command=words(container.get("command")),
        arguments=arguments,
        environment=environment | variables(container.get("env")),
        aliases=(f"{pool.name}-{index}",),
        devices=tpu.devices(pool.slice) if pool.slice else (),
        slice=pool.name if host else "",
        hosts=machines.hosts_of(str((pool.spec.get("machineSpec") or {}).get("machineType") or "")),
    )


def of_trial(trial: Trial | None) -> dict[str, object]:
    """Return what the task in CLUSTER_SPEC and in TF_CONFIG has in a trial."""
    return {"trial": str(trial.number)} if trial else {}


def cluster_spec(pools: Sequence[_Pool], pool: _Pool, index: int, trial: Trial | None) -> str:
    """CLUSTER_SPEC of one replica. The value of its `job` is a string of JSON, as in jobs on the platform."""
    task = {"type": pool.name, "index": index} | of_trial(trial)
    arguments = [str(word) for word in pool.spec["containerSpec"].get("args") or []]
    return json.dumps(
        {
            "cluster": {one.name: one.addresses() for one in pools},
            "environment": "cloud",
            "task": task,
            "job": json.dumps({"python_module": "", "package_uris": [], "job_args": arguments}),
            "open_ports": OPEN_PORTS,
        }
    )


def tf_config(pools: Sequence[_Pool], pool: _Pool, index: int, trial: Trial | None) -> str:
    """TF_CONFIG of one replica; jobs with a single replica have none."""
    task = {"type": pool.task, "index": index, "cloud": RUN} | of_trial(trial)
    cluster = {one.task: one.addresses() for one in pools}
    return json.dumps({"cluster": cluster, "environment": "cloud", "job": {}, "task": task})


def _identity(spec: Mapping[str, Any], trial: Trial | None) -> dict[str, str]:
    found = {"CLOUD_ML_JOB_ID": JOB_ID, "CLOUD_ML_PROJECT_ID": PROJECT_NUMBER}
    if spec.get("tensorboard"):
        found["AIP_TENSORBOARD_RESOURCE_NAME"] = str(spec["tensorboard"])
    if trial:
        found |= trial_variables(trial)
    return found


def trial_variables(trial: Trial) -> dict[str, str]:
    """Return the variables of a trial."""
    return {
        "CLOUD_ML_TRIAL_ID": str(trial.number),
        "CLOUD_ML_HP_METRIC_FILE": METRIC_FILE,
        "CLOUD_ML_HP_METRIC_TAG": trial.metric,
    }


def _tpu_variables() -> dict[str, str]:
    """Variables for TPU nodes, which the service also sets on TPU VMs, whose TPU is attached and needs no address."""
    config = {"project": TENANT_PROJECT, "zone": ZONE, "tpu_node_name": f"cmle-tpu-{RUN}"}
    return {"TPU_CONFIG": json.dumps(config), "TPU_NODE_NAME": config["tpu_node_name"]}


def _notes(pools: Sequence[_Pool], spec: Mapping[str, Any]) -> list[str]:
    notes = []
    for pool in pools:
        machine = pool.spec.get("machineSpec") or {}
        accelerator = str(machine.get("acceleratorType") or "")
        if accelerator.startswith("NVIDIA"):
            number = count(machine.get("acceleratorCount"), 1)
            notes.append(f"{pool.name}: {number} {accelerator} a replica: replaced by one process on the CPU")
        if pool.slice and pool.slice.hosts > 1:
            notes.append(
                f"{pool.name}: the {pool.slice.hosts} hosts of a {pool.slice.accelerator_type} train independently: "
                "XLA's CPU backend has no collectives between hosts"
            )
        notes += [f"{pool.name}: {key} is not mounted" for key in ("nfsMounts", "lustreMounts") if pool.spec.get(key)]
    notes += [f"{key} is not simulated" for key in ("network", "pscInterfaceConfig", "tensorboard") if spec.get(key)]
    return notes
