"""Convert an AI Platform job to the equivalent Vertex AI job.

The mapping of fields is derived from both APIs' schemas (ml v1, aiplatform v1). Notes list what has no counterpart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainyard.common.errors import UserError, nearest
from trainyard_jobs.model import machines
from trainyard_jobs.platforms.writing import without_empty

#: Replacement for K80s, which Google Cloud no longer has: the smallest GPU that n1 machines accept.
SUCCESSOR_OF_K80 = "NVIDIA_TESLA_T4"

#: Placeholders for what a file leaves to gcloud's flags.
PACKAGE, MODULE = "gs://BUCKET/PACKAGE.tar.gz", "PACKAGE.MODULE"

_ROLES = ("master", "worker", "parameterServer", "evaluator")


@dataclass
class Migrated:
    """A converted job.

    Attributes:
        config: a CustomJobSpec, or a HyperparameterTuningJob.
        region: region of the original job.
        flags: of the submit command, for fields that are not part of the configuration.
        notes: changes other than names, for the user.
    """

    config: dict[str, Any]
    region: str
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def migrate(job: dict[str, Any], *, image: str | None = None) -> Migrated:
    """Convert a job or a TrainingInput.

    Args:
        image: image to use instead of the job's.
    Raises:
        UserError: it is not a training job, or names a machine type that did not exist.
    """
    if "predictionInput" in job:
        raise UserError("a prediction job, which is not supported: Vertex AI has BatchPredictionJobs for that")
    source = job.get("trainingInput", job)
    done = Migrated({}, str(source.get("region") or "us-central1"))
    # Without a scale tier, machine types come from a file that is submitted with --scale-tier=custom.
    tier = str(source.get("scaleTier") or ("CUSTOM" if source.get("masterType") else "BASIC"))
    known = machines.table().ai_platform_tiers
    if tier != "CUSTOM" and tier not in known:
        raise UserError(f"scaleTier '{tier}' did not exist{nearest(tier, [*known, 'CUSTOM'])}")
    spec: dict[str, Any] = {"workerPoolSpecs": _pools(_with_tier(source, tier), done, image)}
    spec |= _scheduling(source, done)
    for key in ("serviceAccount", "network", "enableWebAccess"):
        if source.get(key):
            spec[key] = source[key]
    if source.get("jobDir"):
        spec["baseOutputDirectory"] = {"outputUriPrefix": source["jobDir"]}
        done.notes.append(
            "jobDir is now baseOutputDirectory: trainers find it in AIP_MODEL_DIR, AIP_CHECKPOINT_DIR and "
            "AIP_TENSORBOARD_LOG_DIR; Vertex AI adds no --job-dir"
        )
    if source.get("encryptionConfig"):
        done.flags.append(f"--kms-key={source['encryptionConfig'].get('kmsKeyName', '')}")
    if job.get("labels"):
        done.flags.append("--labels=" + ",".join(f"{key}={value}" for key, value in job["labels"].items()))
    if source.get("useChiefInTfConfig") is False:
        done.notes.append("useChiefInTfConfig no longer exists: TF_CONFIG names the first task 'chief', never 'master'")
    done.config = spec
    if source.get("hyperparameters"):
        done.config = tuning_job(source["hyperparameters"], spec, str(job.get("jobId") or "migrated"))
    return done


def _with_tier(source: dict[str, Any], tier: str) -> dict[str, Any]:
    """The job with its scale tier replaced by machine types."""
    if tier == "CUSTOM":
        return source
    about = machines.table().ai_platform_tiers[tier]
    found = source | {"masterType": about.master}
    if about.workers:
        found |= {"workerType": about.worker, "workerCount": about.workers}
    if about.servers:
        found |= {"parameterServerType": about.server, "parameterServerCount": about.servers}
    return found


def _pools(source: dict[str, Any], done: Migrated, image: str | None) -> list[dict[str, Any]]:
    """Master, workers, parameter servers, evaluators; empty pools keep positions, but none ends the list."""
    if source.get("workerType") == "cloud_tpu":
        return [_tpu_pool(source, done, image)]
    pools = []
    for role in _ROLES:
        count = 1 if role == "master" else int(source.get(f"{role}Count") or 0)
        pools.append(_pool(source, role, count, done, image) if count else {})
    while not pools[-1]:
        pools.pop()
    if {} in pools:
        done.notes.append(
            "an empty pool {} keeps the position of the pools after it: the API takes it, 'gcloud --config' does not; "
            "submit the job with the SDK or the REST API"
        )
    return pools


def _tpu_pool(source: dict[str, Any], done: Migrated, image: str | None) -> dict[str, Any]:
    """Chief and TPU worker as one machine, to which the TPU is attached."""
    wanted = (source.get("workerConfig") or {}).get("acceleratorConfig") or {"type": "TPU_V2", "count": 8}
    kind = str(wanted.get("type", "")).removesuffix("_POD")
    if kind not in ("TPU_V2", "TPU_V3"):
        raise UserError(f"Vertex AI has no {wanted.get('type')} for jobs: use '--platform gke', or another TPU")
    done.notes.append(
        "chief and TPU were two machines and are one now (a TPU VM): the image must use a TPU that is attached to "
        "its host, as TensorFlow's TPU build with libtpu and torch_xla 2 do; tpuTfVersion has no counterpart"
    )
    count = int(wanted.get("count") or 8)
    tpu = machines.slice_of(f"{kind.removeprefix('TPU_').lower()}-{count}")
    if done.region not in tpu.regions:
        done.notes.append(f"{done.region} no longer has {tpu.accelerator_type}: the job moves to {tpu.regions[0]}")
        done.region = tpu.regions[0]
    machine = {"machineType": tpu.machine_type, "acceleratorType": kind, "acceleratorCount": count}
    return _finished({"machineSpec": machine, "replicaCount": 1}, source, "master", done, image)


def _pool(source: dict[str, Any], role: str, count: int, done: Migrated, image: str | None) -> dict[str, Any]:
    name = str(source.get(f"{role}Type") or source.get("masterType") or "standard")
    legacy = machines.table().ai_platform_machines.get(name)
    if legacy is None and name not in machines.machine_types():
        raise UserError(f"{role}Type '{name}' did not exist{nearest(name, machines.table().ai_platform_machines)}")
    machine, _, gpus = (legacy or name).partition("+")
    number, _, kind = gpus.partition("x")
    own = (source.get(f"{role}Config") or {}).get("acceleratorConfig") or {}
    if own:
        number, kind = str(own.get("count") or 1), str(own.get("type"))
    spec: dict[str, Any] = {"machineType": machine}
    if kind in machines.table().gpus_gone:
        done.notes.append(f"{role}: Google Cloud no longer has {kind}: replaced by {SUCCESSOR_OF_K80}")
        kind, number = SUCCESSOR_OF_K80, str(min(int(number), 4))
    if kind:
        spec |= {"acceleratorType": kind, "acceleratorCount": int(number)}
    return _finished({"machineSpec": spec, "replicaCount": count}, source, role, done, image)


def _finished(
    pool: dict[str, Any], source: dict[str, Any], role: str, done: Migrated, image: str | None
) -> dict[str, Any]:
    """``pool`` with its container and disk."""
    master = source.get("masterConfig") or {}
    own = source.get(f"{role}Config") or {}
    if disk := own.get("diskConfig"):
        pool["diskSpec"] = dict(disk)
    args = [*(source.get("args") or own.get("containerArgs") or [])]
    if (
        source.get("jobDir")
        and not source.get("hyperparameters")
        and not any(str(a).startswith("--job-dir") for a in args)
    ):
        args.append(f"--job-dir={source['jobDir']}")  # AI Platform appended it to the arguments
    container = image or own.get("imageUri") or master.get("imageUri")
    if container:
        command = list(own.get("containerCommand") or [])
        pool["containerSpec"] = without_empty({"imageUri": container, "command": command, "args": args})
        return pool
    pool["pythonPackageSpec"] = _package(source, args, pool["machineSpec"], done)
    return pool


def _package(source: dict[str, Any], args: list[str], machine: dict[str, Any], done: Migrated) -> dict[str, Any]:
    """A Python package on one of Google's prebuilt images, with placeholders for what flags of gcloud gave.

    Raises:
        UserError: the runtime version is none.
    """
    module, uris = source.get("pythonModule"), source.get("packageUris")
    if not module or not uris:
        done.notes.append(
            "the file leaves its package to --package-path or --packages, and to --module-name: replace "
            f"{' and '.join([PACKAGE] * (not uris) + [MODULE] * (not module))}, or give '--image'"
        )
    version = str(source.get("runtimeVersion") or "1.15")
    if not re.fullmatch(r"\d+\.\d+", version):
        raise UserError(f"runtimeVersion '{version}' is not a version such as 2.11: correct it, or give '--image'")
    device = "gpu" if machine.get("acceleratorType", "").startswith("NVIDIA") else "cpu"
    suffix = ".py310" if tuple(int(part) for part in version.split(".")) >= (2, 11) else ""
    executor = f"us-docker.pkg.dev/vertex-ai/training/tf-{device}.{version.replace('.', '-')}{suffix}:latest"
    done.notes.append(
        f"runtimeVersion {version} is now the prebuilt image {executor}; most of these are no longer supported: see "
        f"https://cloud.google.com/vertex-ai/docs/training/pre-built-containers, or give '--image'"
    )
    return without_empty(
        {
            "executorImageUri": executor,
            "packageUris": list(uris or [PACKAGE]),
            "pythonModule": module or MODULE,
            "args": args,
        }
    )


def _scheduling(source: dict[str, Any], done: Migrated) -> dict[str, Any]:
    old = source.get("scheduling") or {}
    dropped = [key for key in old if key != "maxRunningTime"]
    if dropped:
        done.notes.append(f"scheduling.{', '.join(dropped)}: no counterpart on Vertex AI, omitted")
    return {"scheduling": {"timeout": old["maxRunningTime"]}} if old.get("maxRunningTime") else {}


def tuning_job(old: dict[str, Any], spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the tuning job of a HyperparameterSpec, with a display name."""
    metric = old.get("hyperparameterMetricTag") or "training/hptuning/metric"
    study: dict[str, Any] = {
        "metrics": [{"metricId": metric, "goal": old.get("goal") or "MAXIMIZE"}],
        "parameters": [_parameter(one) for one in old.get("params") or []],
    }
    if old.get("algorithm") not in (None, "ALGORITHM_UNSPECIFIED"):
        study["algorithm"] = old["algorithm"]
    if old.get("enableTrialEarlyStopping"):
        study["medianAutomatedStoppingSpec"] = {}
    failed = {"maxFailedTrialCount": int(old["maxFailedTrials"])} if old.get("maxFailedTrials") else {}
    return {
        "displayName": name,
        "studySpec": study,
        "maxTrialCount": int(old.get("maxTrials") or 1),
        "parallelTrialCount": int(old.get("maxParallelTrials") or 1),
        **failed,
        "trialJobSpec": spec,
    }


def _parameter(old: dict[str, Any]) -> dict[str, Any]:
    kind = old.get("type")
    found: dict[str, Any] = {"parameterId": old.get("parameterName")}
    if kind == "CATEGORICAL":
        return found | {"categoricalValueSpec": {"values": list(old.get("categoricalValues") or [])}}
    if kind == "DISCRETE":
        return found | {"discreteValueSpec": {"values": list(old.get("discreteValues") or [])}}
    sides = {side: old.get(side) for side in ("minValue", "maxValue")}
    if kind == "INTEGER":
        found["integerValueSpec"] = {side: str(int(value or 0)) for side, value in sides.items()}
    else:
        found["doubleValueSpec"] = sides
    if old.get("scaleType") not in (None, "NONE"):
        found["scaleType"] = old["scaleType"]
    return found
