"""An AI Platform Training job (shut down on 31 January 2025) as containers.

Sources: `TrainingInput` in the ml v1 discovery document, and below https://cloud.google.com/ai-platform/training/docs/:
distributed-training-details (TF_CONFIG), training-jobs (--job-dir), using-tpus (TPU_CONFIG).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainyard.common.errors import UserError
from trainyard_jobs.model import machines
from trainyard_jobs.platforms.vertex.rehearse import METRIC_FILE, OPEN_PORTS, PORT, RUN, of_trial, trial_variables
from trainyard_jobs.rehearsal.model import PROJECT_NUMBER, Rehearsal, Replica, TpuNode, Trial, count, words
from trainyard_jobs.rehearsal.restart_policy import TrainingService
from trainyard_jobs.schema.job_file import JobFile

#: Task in TF_CONFIG -> prefix of its fields in TrainingInput; task -> role of the replica.
_TASKS = {"master": "master", "worker": "worker", "ps": "parameterServer", "evaluator": "evaluator"}
_ROLES = {"master": "chief", "worker": "worker", "ps": "server", "evaluator": "evaluator"}
_CLOUD_TPU = "cloud_tpu"
#: Addresses of the TPU node's workers, from a range that is reserved for documentation (RFC 5737).
_TPU_ADDRESS = "192.0.2.{}:8470"
_MAX_ADDRESSES = 254
NODE = "cmle-tpu-rehearsal"


def rehearsal(job: JobFile, trial: Trial | None = None) -> Rehearsal:
    """Return the replicas and the TPU node of a job; a UserError gives the line of what cannot be rehearsed."""
    spec = job.spec
    master = spec.get("masterConfig") or {}
    if not master.get("imageUri"):
        what = "no masterConfig.imageUri: only containers can be rehearsed, not runtime versions and Python packages"
        raise job.error((*job.root, "masterConfig"), what)
    node = _tpu_node(job, spec)
    counts = _counts(spec)
    cluster = {
        task: [f"cmle-training-{task}-{RUN}-{index}" for index in range(number)] for task, number in counts.items()
    }
    chief = "chief" if spec.get("useChiefInTfConfig") else "master"
    replicas: list[Replica] = []
    for task, hosts in cluster.items():
        config = spec.get(f"{_TASKS[task]}Config") or {}
        for index, host in enumerate(hosts):
            environment = {
                "CLOUD_ML_JOB_ID": str(job.documents[0].get("jobId") or job.path.stem),
                "CLOUD_ML_PROJECT_ID": PROJECT_NUMBER,
                "TF_CONFIG": tf_config(cluster, chief, task, index, spec, trial),
            }
            if trial:
                environment |= trial_variables(trial)
            if node and task == "master":
                config_of_tpu = {"project": node.project, "zone": node.zone, "tpu_node_name": node.name}
                environment["TPU_CONFIG"] = json.dumps(config_of_tpu)
            replicas.append(
                Replica(
                    name=task if task == "master" else f"{task}-{index}",
                    hostname=host,
                    role=_ROLES[task],
                    ordinal=len(replicas),
                    image=str(config.get("imageUri") or master["imageUri"]),
                    command=words(config.get("containerCommand")),
                    arguments=_arguments(spec, config, trial),
                    environment=environment,
                )
            )
    return Rehearsal(
        platform="AI Platform tuning trial" if trial else "AI Platform Training job",
        name=str(job.documents[0].get("jobId") or job.path.stem),
        replicas=tuple(replicas),
        policy=TrainingService(primary=("master",), job_retries=0),
        node=node,
        notes=tuple(_notes(spec)),
        metric_file=METRIC_FILE if trial else "",
    )


def _counts(spec: Mapping[str, Any]) -> dict[str, int]:
    counts = {"master": 1}
    for task in ("worker", "ps", "evaluator"):
        number = count(spec.get(f"{_TASKS[task]}Count"))
        if task == "worker" and spec.get("workerType") == _CLOUD_TPU:
            number = 0  # the TPU node, which runs no container of the job
        if number:
            counts[task] = number
    return counts


def _tpu_node(job: JobFile, spec: Mapping[str, Any]) -> TpuNode | None:
    """The TPU of a job with a `cloud_tpu` worker, or of scale tier BASIC_TPU, which is a v2-8."""
    if spec.get("scaleTier") == "BASIC_TPU":
        return TpuNode(NODE, "v2-8", (_TPU_ADDRESS.format(1),))
    if spec.get("workerType") != _CLOUD_TPU:
        return None
    accelerator = (spec.get("workerConfig") or {}).get("acceleratorConfig") or {}
    kind, number = str(accelerator.get("type") or "TPU_V2"), count(accelerator.get("count"), 8)
    where = (*job.root, "workerConfig", "acceleratorConfig")
    if not kind.startswith("TPU_V") or not kind[5:6].isdigit():
        raise job.error(where, f"{kind} is not a TPU; {_CLOUD_TPU} requires TPU_V2, TPU_V3 or one of their pods")
    name = f"v{kind[5]}-{number}"
    try:
        # A TPU node of v2 or v3 has 8 cores for each address; its TPU VM has 4 chips, so 8 cores, for each host.
        hosts = machines.slice_of(name).hosts
    except UserError as error:
        raise job.error(where, str(error)) from None
    return TpuNode(NODE, name, tuple(_TPU_ADDRESS.format(index) for index in range(1, min(hosts, _MAX_ADDRESSES) + 1)))


def _arguments(spec: Mapping[str, Any], config: Mapping[str, Any], trial: Trial | None) -> tuple[str, ...] | None:
    """args or containerArgs, then the parameters of the trial, then --job-dir, which is below the trial's number."""
    given = words(config.get("containerArgs")) or words(spec.get("args"))
    more = trial.arguments() if trial else []
    if spec.get("jobDir"):
        folder = str(spec["jobDir"]).rstrip("/")
        more.append(f"--job-dir={folder}/{trial.number}" if trial else f"--job-dir={folder}")
    return (*(given or ()), *more) if given or more else None


def tf_config(
    cluster: Mapping[str, list[str]], chief: str, task: str, index: int, spec: Mapping[str, Any], trial: Trial | None
) -> str:
    """TF_CONFIG of one machine. Jobs with a single machine have it too, without a cluster."""
    names = {name: chief if name == "master" else name for name in cluster}
    config: dict[str, object] = {
        "environment": "cloud",
        "job": {key: spec[key] for key in ("scaleTier", "masterType", "workerType", "region", "jobDir") if key in spec},
        "open_ports": OPEN_PORTS,
        "task": {"type": names[task], "index": index, "cloud": RUN} | of_trial(trial),
    }
    if sum(map(len, cluster.values())) > 1:
        config["cluster"] = {names[name]: [f"{host}:{PORT}" for host in hosts] for name, hosts in cluster.items()}
    return json.dumps(config)


def _notes(spec: Mapping[str, Any]) -> list[str]:
    notes = [
        f"AI Platform Training was shut down on {machines.AI_PLATFORM_SHUT_DOWN}: convert the job with "
        f"'trainyard job --from <file> --platform vertex'"
    ]
    for prefix in _TASKS.values():
        accelerator = (spec.get(f"{prefix}Config") or {}).get("acceleratorConfig") or {}
        if str(accelerator.get("type") or "").startswith("NVIDIA"):
            notes.append(
                f"{prefix}: {accelerator.get('count', 1)} {accelerator['type']}: replaced by one process on the CPU"
            )
    return notes
