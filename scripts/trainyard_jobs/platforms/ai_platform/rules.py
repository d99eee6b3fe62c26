"""Rules about jobs of AI Platform Training, by its API (ml v1) and its documentation.

The service is shut down. Old files are still converted to Vertex AI, and a mistake in one would be converted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard_jobs.model import machines
from trainyard_jobs.platforms.vertex.accelerators import gpu_findings
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.worker_pools import parse_count

_ROLES = ("master", "worker", "parameterServer", "evaluator")
_REFUSED = "the service refused such jobs"

#: Why a field that is missing in the file is a note: gcloud's BuildTrainingJob merges its flags over the file.
_FROM_FLAG = "the service refused such jobs; 'gcloud ai-platform jobs submit training' can add it to the file"

#: The flags of gcloud 528 that add to a file (AddCustomContainerFlags in command_lib/ml_engine/flags.py); none is
#: for evaluators.
_MACHINE_FLAGS = {
    "masterType": "--master-machine-type",
    "workerType": "--worker-machine-type",
    "workerCount": "--worker-count",
    "parameterServerType": "--parameter-server-machine-type",
    "parameterServerCount": "--parameter-server-count",
}


def _config(job: Evidence, role: str) -> dict[str, Any]:
    found = job.spec.get(f"{role}Config")
    return found if isinstance(found, dict) else {}


def _missing(job: Evidence, at: str, what: str, field: str) -> Finding:
    """A finding about a field of the TrainingInput that is missing: a note if a flag of gcloud can give it."""
    flag = _MACHINE_FLAGS.get(field)
    if flag is None:
        return Finding(at, what, _REFUSED, f"add {field}")
    return Finding(at, what, _FROM_FLAG, f"add {field}, or submit with {flag}", severity=Severity.NOTE)


def _legacy(name: object) -> bool:
    return name in machines.table().ai_platform_machines


@rule("ai-platform", severity=Severity.NOTE, source="https://cloud.google.com/ai-platform/training/docs/deprecations")
def service_exists(job: Evidence) -> Iterator[Finding]:
    """The service that takes the job exists."""
    yield Finding(
        job.at(),
        f"an AI Platform job; the service was shut down on {machines.AI_PLATFORM_SHUT_DOWN}",
        "the API answers 400: Cloud AI Platform has been deprecated",
        f"convert it: 'trainyard job --from {job.job.path.name} --platform vertex'",
    )


@rule(
    "ai-platform",
    severity=Severity.NOTE,
    source='gcloud 528, BuildTrainingJob in api_lib/ml_engine/jobs.py ("Non-custom jobs must have packages.")',
)
def training_input_has_its_key(job: Evidence) -> Iterator[Finding]:
    """The fields are below trainingInput, where gcloud looks for them."""
    if not job.job.root:
        yield Finding(
            job.at(),
            "the fields are not below trainingInput:",
            "programs that call the API can send it as the trainingInput of a job; gcloud's --config takes whole jobs",
            "for gcloud, indent all of it below trainingInput:",
        )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "discovery document ml v1, TrainingInput "
        "(scaleTier, masterType, workerType, workerCount, parameterServerCount, evaluatorCount)"
    ),
)
def machines_match_tier(job: Evidence) -> Iterator[Finding]:
    """Machine types and counts are given together, and for scaleTier CUSTOM only."""
    spec = job.spec
    tier = spec.get("scaleTier")
    given = [f"{role}{end}" for role in _ROLES for end in ("Type", "Count") if spec.get(f"{role}{end}")]
    if tier != "CUSTOM":
        for field in given:
            what = f"{field} with scaleTier {tier}" if tier else f"{field} without scaleTier, which is BASIC then"
            why, fix = (_REFUSED, "") if tier else (_FROM_FLAG, ", or submit with --scale-tier=custom")
            severity = Severity.REFUSE if tier else Severity.NOTE
            yield Finding(job.at(field), what, why, f"write scaleTier: CUSTOM, or remove it{fix}", severity=severity)
        return
    if not spec.get("masterType"):
        yield _missing(job, job.at("scaleTier"), "CUSTOM without masterType", "masterType")
    for role in _ROLES[1:]:
        count, kind = f"{role}Count", f"{role}Type"
        if parse_count(spec.get(count) or 0) > 0 and not spec.get(kind):
            yield _missing(job, job.at(count), f"{count} without {kind}", kind)
        elif spec.get(kind) and count not in spec:
            # The count's default is 0, which the API allows.
            yield Finding(
                job.at(kind),
                f"{kind} without {count}",
                "the job has no machine of that type",
                f"add {count}",
                severity=Severity.NOTE,
            )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "discovery document ml v1, TrainingInput.masterType "
        '("you must use either all"), ReplicaConfig.acceleratorConfig'
    ),
)
def machine_types_do_not_mix(job: Evidence) -> Iterator[Finding]:
    """Machine types are all Compute Engine's or all AI Platform's; accelerators need Compute Engine's."""
    kinds = {role: job.spec[f"{role}Type"] for role in _ROLES if job.spec.get(f"{role}Type")}
    own = [*machines.table().ai_platform_machines, "cloud_tpu"]
    for role, kind in kinds.items():
        if kind not in own and kind not in machines.machine_types():
            near = unknown(str(kind), own)
            looks_valid = re.fullmatch(r"[a-z]\d\w*-\w+-\d+", str(kind))
            yield Finding(
                job.at(f"{role}Type"),
                f"machine type '{kind}'{near}",
                _REFUSED,
                "correct it",
                severity=Severity.NOTE if looks_valid else Severity.REFUSE,
            )
    plain = {role: kind for role, kind in kinds.items() if kind != "cloud_tpu"}
    if len({_legacy(kind) for kind in plain.values()}) > 1:
        words = ", ".join(f"{role} {kind}" for role, kind in plain.items())
        yield Finding(
            job.at(f"{list(plain)[-1]}Type"),
            f"both families of machine types: {words}",
            _REFUSED,
            "use Compute Engine's for all",
        )
    for role in _ROLES:
        accelerator = _config(job, role).get("acceleratorConfig")
        base = job.spec.get("masterType") if kinds.get(role) == "cloud_tpu" else kinds.get(role)
        if accelerator and not base and role != "evaluator":
            kind = "masterType" if role == "worker" and kinds.get(role) == "cloud_tpu" else f"{role}Type"
            yield _missing(job, job.at(f"{role}Config", "acceleratorConfig"), f"acceleratorConfig without {kind}", kind)
        elif accelerator and (_legacy(base) or not base):
            yield Finding(
                job.at(f"{role}Config", "acceleratorConfig"),
                f"acceleratorConfig with {base or 'no machine type'}",
                _REFUSED,
                "use a Compute Engine machine type, such as n1-standard-8",
            )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "discovery document ml v1, ReplicaConfig.imageUri "
        '("only one of TrainingInput.runtimeVersion or imageUri"), TrainingInput.packageUris'
    ),
)
def job_has_container_or_package(job: Evidence) -> Iterator[Finding]:
    """The job has a container, or a package with a runtime version, and not both."""
    image = _config(job, "master").get("imageUri")
    runtime, packages = job.spec.get("runtimeVersion"), job.spec.get("packageUris") or []
    if image and runtime:
        yield Finding(
            job.at("runtimeVersion"),
            "both masterConfig.imageUri and runtimeVersion",
            _REFUSED,
            "remove runtimeVersion: the image has the runtime",
        )
    elif not image and not (packages and job.spec.get("pythonModule")):
        yield Finding(
            job.at(),
            "neither masterConfig.imageUri nor packageUris with pythonModule",
            _FROM_FLAG,
            "add masterConfig.imageUri, or submit with --master-image-uri, or with --packages or --package-path and "
            "--module-name",
            severity=Severity.NOTE,
        )
    elif not image and not runtime:
        yield Finding(
            job.at("packageUris"),
            "a package without runtimeVersion",
            _FROM_FLAG,
            "add runtimeVersion, or submit with --runtime-version",
            severity=Severity.NOTE,
        )
    if len(packages) > 100:
        yield Finding(job.at("packageUris"), f"{len(packages)} packages; at most 100", _REFUSED, "remove some")


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source="discovery document ml v1, ReplicaConfig.containerCommand, ReplicaConfig.containerArgs",
)
def commands_need_containers(job: Evidence) -> Iterator[Finding]:
    """A container's command and arguments need an image, and exclude the job's own arguments."""
    master = _config(job, "master").get("imageUri")
    for role in _ROLES:
        config = _config(job, role)
        for key in ("containerCommand", "containerArgs"):
            at = job.at(f"{role}Config", key)
            if config.get(key) and not (config.get("imageUri") or master):
                yield Finding(
                    at,
                    f"{role}Config.{key} without an image",
                    _FROM_FLAG,
                    "add imageUri, or submit with --master-image-uri",
                    severity=Severity.NOTE,
                )
            elif config.get(key) and job.spec.get("args"):
                yield Finding(at, f"both {role}Config.{key} and args", _REFUSED, "keep one of the two")


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/ai-platform/training/docs/using-gpus; "
        "COMPATIBILITY_TABLE in https://github.com/google/caliban"
    ),
)
def ai_platform_gpus_match_machines(job: Evidence) -> Iterator[Finding]:
    """The machine type supports the type and number of GPUs."""
    for role in _ROLES:
        accelerator = _config(job, role).get("acceleratorConfig") or {}
        kind, machine = str(accelerator.get("type") or ""), str(job.spec.get(f"{role}Type") or "")
        if kind.startswith("NVIDIA") and not _legacy(machine) and machine:
            yield from gpu_findings(
                job.at(f"{role}Config", "acceleratorConfig"),
                machine,
                kind,
                parse_count(accelerator.get("count") or 0),
                must_name_own_gpus=False,
            )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/ai-platform/training/docs/using-tpus; "
        "core/validate.py in https://github.com/tensorflow/cloud"
    ),
)
def ai_platform_tpu_is_one_worker(job: Evidence) -> Iterator[Finding]:
    """A TPU is one worker of type cloud_tpu, with a number of cores that exists, without parameter servers."""
    spec = job.spec
    known = machines.table().ai_platform_tpus
    for role in ("master", "parameterServer", "evaluator"):
        kind = str((_config(job, role).get("acceleratorConfig") or {}).get("type") or "")
        if spec.get(f"{role}Type") == "cloud_tpu" or kind.startswith("TPU"):
            # The API's description of masterType allows cloud_tpu; using-tpus has no such job.
            severity = Severity.CANNOT_START if role == "master" else Severity.REFUSE
            yield Finding(
                job.at(f"{role}Type"), f"a TPU as {role}", _REFUSED, "the TPU is the worker", severity=severity
            )
    accelerator = _config(job, "worker").get("acceleratorConfig") or {}
    kind, count = str(accelerator.get("type") or ""), parse_count(accelerator.get("count") or 0)
    is_tpu = spec.get("workerType") == "cloud_tpu"
    if kind.startswith("TPU") != is_tpu and accelerator:
        yield Finding(
            job.at("workerConfig", "acceleratorConfig"),
            f"{kind} on {spec.get('workerType')}",
            _REFUSED,
            "use workerType: cloud_tpu with a TPU, and only with one",
        )
    if not is_tpu and spec.get("scaleTier") != "BASIC_TPU":
        return
    if is_tpu and "workerCount" not in spec:
        yield _missing(job, job.at("workerType"), "a TPU worker without workerCount", "workerCount")
    elif is_tpu and parse_count(spec["workerCount"]) != 1:
        yield Finding(
            job.at("workerCount"),
            f"{spec.get('workerCount')} TPU workers",
            _REFUSED,
            "write workerCount: 1; a TPU pod is one worker with more cores",
        )
    if parse_count(spec.get("parameterServerCount") or 0) > 0:
        yield Finding(job.at("parameterServerCount"), "parameter servers with a TPU", _REFUSED, "remove them")
    if kind in known and "count" not in accelerator:
        yield Finding(
            job.at("workerConfig", "acceleratorConfig"),
            f"{kind} without a count",
            _FROM_FLAG,
            "add the count, or submit with --worker-accelerator",
            severity=Severity.NOTE,
        )
    elif kind in known and count not in known[kind]:
        yield Finding(
            job.at("workerConfig", "acceleratorConfig", "count"),
            f"{count} cores of {kind}",
            _REFUSED,
            f"there are {', '.join(map(str, known[kind]))}",
        )
    elif kind and kind not in known:
        yield Finding(
            job.at("workerConfig", "acceleratorConfig", "type"),
            f"a TPU {kind}",
            _REFUSED,
            f"there were {', '.join(known)}",
        )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "discovery document ml v1, ReplicaConfig.tpuTfVersion; "
        "https://cloud.google.com/ai-platform/training/docs/using-tpus"
    ),
)
def tpu_runtime_version_is_valid(job: Evidence) -> Iterator[Finding]:
    """tpuTfVersion is set for a TPU worker with a container, to a version that TPUs had."""
    known = machines.table().ai_platform_tpu_runtimes
    on_tpu = job.spec.get("workerType") == "cloud_tpu" or job.spec.get("scaleTier") == "BASIC_TPU"
    contained = bool(_config(job, "master").get("imageUri") or _config(job, "worker").get("imageUri"))
    for role in _ROLES:
        version = _config(job, role).get("tpuTfVersion")
        at = job.at(f"{role}Config", "tpuTfVersion")
        if version and not (role == "worker" and on_tpu and contained):
            yield Finding(at, f"{role}Config.tpuTfVersion without a TPU worker in a container", _REFUSED, "remove it")
        elif version and str(version) not in known and not str(version).startswith("pytorch-"):
            yield Finding(
                at,
                f"tpuTfVersion {version}{unknown(str(version), known)}",
                _REFUSED,
                "use a version that TPUs supported",
            )
    if on_tpu and contained and not _config(job, "worker").get("tpuTfVersion"):
        yield Finding(
            job.at("workerConfig"),
            "a TPU worker in a container without tpuTfVersion",
            _FROM_FLAG,
            "add workerConfig.tpuTfVersion, the version of TensorFlow in the image, or submit with --tpu-tf-version "
            "of 'gcloud beta'",
            severity=Severity.NOTE,
        )
    runtime = job.spec.get("runtimeVersion")
    if on_tpu and runtime and str(runtime) not in known:
        yield Finding(
            job.at("runtimeVersion"),
            f"runtimeVersion {runtime} had no TPU support",
            _REFUSED,
            f"one of {', '.join(known)}",
        )


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source=(
        "gcloud 528, command_lib/ml_engine/constants.py; "
        "ACCELERATOR_REGION_SUPPORT in https://github.com/google/caliban"
    ),
)
def ai_platform_region_existed(job: Evidence) -> Iterator[Finding]:
    """AI Platform had the region, with TPUs for a TPU job."""
    region = job.spec.get("region") or job.region
    if not region:
        yield Finding(job.at(), "no region", "gcloud asks for one", "add region: us-central1", severity=Severity.NOTE)
        return
    known = machines.table()
    on_tpu = job.spec.get("workerType") == "cloud_tpu" or job.spec.get("scaleTier") == "BASIC_TPU"
    valid = known.ai_platform_tpu_regions if on_tpu else known.ai_platform_regions
    if region not in valid:
        what = f"no {'TPUs' if on_tpu else 'training'} in '{region}'{unknown(str(region), valid)}"
        yield Finding(job.at("region"), what, _REFUSED, "use one of them")


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source="discovery document ml v1, Job.jobId, TrainingInput.network, Scheduling.maxWaitTime, Scheduling.priority",
)
def ai_platform_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """Job ids, networks and durations are written as the API requires."""
    job_id = job.job.documents[0].get("jobId")
    if job_id and not re.fullmatch(r"[A-Za-z]\w{0,127}", str(job_id)):
        yield Finding(job.job.where(("jobId",)), f"jobId '{job_id}'", _REFUSED, "letters, digits, underscores")
    network = job.spec.get("network")
    if network and not re.fullmatch(r"projects/\d+/global/networks/[\w-]+", str(network)):
        yield Finding(
            job.at("network"),
            f"network '{network}'",
            _REFUSED,
            "write projects/<number, not name>/global/networks/<name>",
        )
    scheduling = job.spec.get("scheduling") or {}
    wait = str(scheduling.get("maxWaitTime", "1800s"))
    if re.fullmatch(r"\d+s", wait) and int(wait[:-1]) < 1800:
        yield Finding(job.at("scheduling", "maxWaitTime"), f"maxWaitTime {wait}", _REFUSED, "at least 1800s")
    if scheduling.get("priority") is not None and not 0 <= parse_count(scheduling["priority"]) <= 1000:
        yield Finding(job.at("scheduling", "priority"), f"priority {scheduling['priority']}", _REFUSED, "0 to 1000")


@rule(
    "ai-platform",
    severity=Severity.REFUSE,
    source="discovery document ml v1, HyperparameterSpec, ParameterSpec (discreteValues increasing, at most 1000)",
)
def ai_platform_search_is_valid(job: Evidence) -> Iterator[Finding]:
    """Hyperparameters make a valid search."""
    spec = job.spec.get("hyperparameters")
    if not isinstance(spec, dict):
        return

    def wrong(number: int, what: str, fix: str) -> Finding:
        return Finding(job.at("hyperparameters", "params", number), what, _REFUSED, fix)

    if parse_count(spec.get("maxParallelTrials") or 1) > parse_count(spec.get("maxTrials") or 1):
        yield Finding(
            job.at("hyperparameters", "maxParallelTrials"),
            "more trials at a time than in all",
            _REFUSED,
            "run fewer at a time",
        )
    for number, one in enumerate(spec.get("params") or []):
        if not isinstance(one, dict):
            continue
        kind, values = one.get("type"), one.get("discreteValues") or []
        if kind in ("DOUBLE", "INTEGER") and not {"minValue", "maxValue"} <= set(one):
            yield wrong(number, f"{one.get('parameterName')}: {kind} without minValue and maxValue", "give both")
        if kind == "DISCRETE" and (not values or list(values) != sorted(values) or len(values) > 1000):
            yield wrong(number, f"{one.get('parameterName')}: discreteValues", "list at most 1000 in increasing order")
        if kind == "CATEGORICAL" and not one.get("categoricalValues"):
            yield wrong(number, f"{one.get('parameterName')}: no categoricalValues", "list them")
        if kind == "DOUBLE" and spec.get("algorithm") == "GRID_SEARCH":
            yield wrong(number, f"{one.get('parameterName')}: GRID_SEARCH over DOUBLE", "use DISCRETE")
