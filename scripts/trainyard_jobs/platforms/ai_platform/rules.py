"""Rules about jobs of AI Platform Training, by its API (ml v1) and its documentation.

The service is shut down. Old files are still converted to Vertex AI, and a mistake in one would be converted too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard_jobs.model import machines
from trainyard_jobs.platforms.vertex.accelerators import gpu_findings
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.worker_pools import parse_count
from trainyard_jobs.schema.kubernetes_defaults import mapping

_ROLES = ("master", "worker", "parameterServer", "evaluator")

#: The flags of gcloud 528 that add to a file (AddCustomContainerFlags in command_lib/ml_engine/flags.py); none is
#: for evaluators.
_MACHINE_FLAGS = {
    "masterType": "--master-machine-type",
    "workerType": "--worker-machine-type",
    "workerCount": "--worker-count",
    "parameterServerType": "--parameter-server-machine-type",
    "parameterServerCount": "--parameter-server-count",
}

_DISCOVERY = "discovery document ml v1"
_DOCUMENTATION = "https://cloud.google.com/ai-platform/training/docs"


def _rule(
    source: str, severity: Severity = Severity.REFUSE
) -> Callable[[Callable[[Evidence], Iterator[Finding]]], Rule[Evidence]]:
    return rule("ai-platform", severity=severity, source=source)


def _refused(at: str, what: str, remediation: str, severity: Severity = Severity.REFUSE) -> Finding:
    return Finding(at, what, "the service refused such jobs", remediation, severity)


def _from_flag(at: str, what: str, remediation: str) -> Finding:
    """Return a note about what is missing in the file: gcloud's BuildTrainingJob merges its flags over the file."""
    why = "the service refused such jobs; 'gcloud ai-platform jobs submit training' can add it to the file"
    return Finding(at, what, why, remediation, Severity.NOTE)


def _missing(at: str, what: str, field: str) -> Finding:
    """A finding about a field of the TrainingInput that is missing: a note if a flag of gcloud can give it."""
    flag = _MACHINE_FLAGS.get(field)
    return _from_flag(at, what, f"add {field}, or submit with {flag}") if flag else _refused(at, what, f"add {field}")


def _config(job: Evidence, role: str) -> dict[str, Any]:
    return mapping(job.spec, f"{role}Config")


def _accelerator(job: Evidence, role: str) -> tuple[str, int]:
    """Return the type and number of a role's accelerators; an empty type without any."""
    given = mapping(job.spec, f"{role}Config", "acceleratorConfig")
    return str(given.get("type") or ""), parse_count(given.get("count") or 0)


def _on_tpu(job: Evidence) -> bool:
    return job.spec.get("workerType") == "cloud_tpu" or job.spec.get("scaleTier") == "BASIC_TPU"


def _legacy(name: object) -> bool:
    return name in machines.table().ai_platform_machines


@_rule(f"{_DOCUMENTATION}/deprecations", Severity.NOTE)
def service_exists(job: Evidence) -> Iterator[Finding]:
    """The service that takes the job exists."""
    yield Finding(
        job.at(),
        f"an AI Platform job; the service was shut down on {machines.AI_PLATFORM_SHUT_DOWN}",
        "the API answers 400: Cloud AI Platform has been deprecated",
        f"convert it: 'trainyard job --from {job.job.path.name} --platform vertex'",
    )


@_rule(
    'gcloud 528, BuildTrainingJob in api_lib/ml_engine/jobs.py ("Non-custom jobs must have packages.")', Severity.NOTE
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


@_rule(
    f"{_DISCOVERY}, TrainingInput "
    "(scaleTier, masterType, workerType, workerCount, parameterServerCount, evaluatorCount)"
)
def machines_match_tier(job: Evidence) -> Iterator[Finding]:
    """Machine types and counts are given together, and for scaleTier CUSTOM only."""
    spec = job.spec
    tier = spec.get("scaleTier")
    given = [f"{role}{end}" for role in _ROLES for end in ("Type", "Count") if spec.get(f"{role}{end}")]
    if tier != "CUSTOM":
        for field in given:
            at, fix = job.at(field), "write scaleTier: CUSTOM, or remove it"
            if tier:
                yield _refused(at, f"{field} with scaleTier {tier}", fix)
            else:
                what = f"{field} without scaleTier, which is BASIC then"
                yield _from_flag(at, what, f"{fix}, or submit with --scale-tier=custom")
        return
    if not spec.get("masterType"):
        yield _missing(job.at("scaleTier"), "CUSTOM without masterType", "masterType")
    for role in _ROLES[1:]:
        count, kind = f"{role}Count", f"{role}Type"
        if parse_count(spec.get(count) or 0) > 0 and not spec.get(kind):
            yield _missing(job.at(count), f"{count} without {kind}", kind)
        elif spec.get(kind) and count not in spec:
            # The count's default is 0, which the API allows.
            what, why = f"{kind} without {count}", "the job has no machine of that type"
            yield Finding(job.at(kind), what, why, f"add {count}", Severity.NOTE)


@_rule(f'{_DISCOVERY}, TrainingInput.masterType ("you must use either all"), ReplicaConfig.acceleratorConfig')
def machine_types_do_not_mix(job: Evidence) -> Iterator[Finding]:
    """Machine types are all Compute Engine's or all AI Platform's; accelerators need Compute Engine's."""
    kinds = {role: job.spec[f"{role}Type"] for role in _ROLES if job.spec.get(f"{role}Type")}
    own = [*machines.table().ai_platform_machines, "cloud_tpu"]
    for role, kind in kinds.items():
        if kind not in own and kind not in machines.machine_types():
            looks_valid = re.fullmatch(r"[a-z]\d\w*-\w+-\d+", str(kind))
            severity = Severity.NOTE if looks_valid else Severity.REFUSE
            what = f"machine type '{kind}'{unknown(str(kind), own)}"
            yield _refused(job.at(f"{role}Type"), what, "correct it", severity)
    plain = {role: kind for role, kind in kinds.items() if kind != "cloud_tpu"}
    if len({_legacy(kind) for kind in plain.values()}) > 1:
        what = f"both families of machine types: {', '.join(f'{role} {kind}' for role, kind in plain.items())}"
        yield _refused(job.at(f"{list(plain)[-1]}Type"), what, "use Compute Engine's for all")
    for role in _ROLES:
        if not _config(job, role).get("acceleratorConfig"):
            continue
        at, on_tpu = job.at(f"{role}Config", "acceleratorConfig"), kinds.get(role) == "cloud_tpu"
        base = job.spec.get("masterType") if on_tpu else kinds.get(role)
        if not base and role != "evaluator":
            kind = "masterType" if role == "worker" and on_tpu else f"{role}Type"
            yield _missing(at, f"acceleratorConfig without {kind}", kind)
        elif _legacy(base) or not base:
            what = f"acceleratorConfig with {base or 'no machine type'}"
            yield _refused(at, what, "use a Compute Engine machine type, such as n1-standard-8")


@_rule(
    f'{_DISCOVERY}, ReplicaConfig.imageUri ("only one of TrainingInput.runtimeVersion or imageUri"), '
    "TrainingInput.packageUris"
)
def job_has_container_or_package(job: Evidence) -> Iterator[Finding]:
    """The job has a container, or a package with a runtime version, and not both."""
    image = _config(job, "master").get("imageUri")
    runtime, packages = job.spec.get("runtimeVersion"), job.spec.get("packageUris") or []
    if image and runtime:
        what = "both masterConfig.imageUri and runtimeVersion"
        yield _refused(job.at("runtimeVersion"), what, "remove runtimeVersion: the image has the runtime")
    elif not image and not (packages and job.spec.get("pythonModule")):
        yield _from_flag(
            job.at(),
            "neither masterConfig.imageUri nor packageUris with pythonModule",
            "add masterConfig.imageUri, or submit with --master-image-uri, or with --packages or --package-path and "
            "--module-name",
        )
    elif not image and not runtime:
        fix = "add runtimeVersion, or submit with --runtime-version"
        yield _from_flag(job.at("packageUris"), "a package without runtimeVersion", fix)
    if len(packages) > 100:
        yield _refused(job.at("packageUris"), f"{len(packages)} packages; at most 100", "remove some")


@_rule(f"{_DISCOVERY}, ReplicaConfig.containerCommand, ReplicaConfig.containerArgs")
def commands_need_containers(job: Evidence) -> Iterator[Finding]:
    """A container's command and arguments need an image, and exclude the job's own arguments."""
    master = _config(job, "master").get("imageUri")
    for role in _ROLES:
        config = _config(job, role)
        for key in ("containerCommand", "containerArgs"):
            at = job.at(f"{role}Config", key)
            if config.get(key) and not (config.get("imageUri") or master):
                fix = "add imageUri, or submit with --master-image-uri"
                yield _from_flag(at, f"{role}Config.{key} without an image", fix)
            elif config.get(key) and job.spec.get("args"):
                yield _refused(at, f"both {role}Config.{key} and args", "keep one of the two")


@_rule(f"{_DOCUMENTATION}/using-gpus; COMPATIBILITY_TABLE in https://github.com/google/caliban")
def ai_platform_gpus_match_machines(job: Evidence) -> Iterator[Finding]:
    """The machine type supports the type and number of GPUs."""
    for role in _ROLES:
        (kind, count), machine = _accelerator(job, role), str(job.spec.get(f"{role}Type") or "")
        if kind.startswith("NVIDIA") and not _legacy(machine) and machine:
            at = job.at(f"{role}Config", "acceleratorConfig")
            yield from gpu_findings(at, machine, kind, count, must_name_own_gpus=False)


@_rule(f"{_DOCUMENTATION}/using-tpus; core/validate.py in https://github.com/tensorflow/cloud")
def ai_platform_tpu_is_one_worker(job: Evidence) -> Iterator[Finding]:
    """A TPU is one worker of type cloud_tpu, with a number of cores that exists, without parameter servers."""
    spec = job.spec
    for role in ("master", "parameterServer", "evaluator"):
        if spec.get(f"{role}Type") == "cloud_tpu" or _accelerator(job, role)[0].startswith("TPU"):
            # The API's description of masterType allows cloud_tpu; using-tpus has no such job.
            severity = Severity.CANNOT_START if role == "master" else Severity.REFUSE
            yield _refused(job.at(f"{role}Type"), f"a TPU as {role}", "the TPU is the worker", severity)
    kind, _ = _accelerator(job, "worker")
    is_tpu = spec.get("workerType") == "cloud_tpu"
    if kind.startswith("TPU") != is_tpu and _config(job, "worker").get("acceleratorConfig"):
        what = f"{kind} on {spec.get('workerType')}"
        fix = "use workerType: cloud_tpu with a TPU, and only with one"
        yield _refused(job.at("workerConfig", "acceleratorConfig"), what, fix)
    if not _on_tpu(job):
        return
    if is_tpu and "workerCount" not in spec:
        yield _missing(job.at("workerType"), "a TPU worker without workerCount", "workerCount")
    elif is_tpu and parse_count(spec["workerCount"]) != 1:
        what = f"{spec.get('workerCount')} TPU workers"
        yield _refused(job.at("workerCount"), what, "write workerCount: 1; a TPU pod is one worker with more cores")
    if parse_count(spec.get("parameterServerCount") or 0) > 0:
        yield _refused(job.at("parameterServerCount"), "parameter servers with a TPU", "remove them")
    yield from _tpu_count(job)


def _tpu_count(job: Evidence) -> Iterator[Finding]:
    """Yield what is wrong with the type and the number of cores of a job's TPU."""
    known, at = machines.table().ai_platform_tpus, ("workerConfig", "acceleratorConfig")
    kind, count = _accelerator(job, "worker")
    if kind in known and "count" not in mapping(job.spec, *at):
        fix = "add the count, or submit with --worker-accelerator"
        yield _from_flag(job.at(*at), f"{kind} without a count", fix)
    elif kind in known and count not in known[kind]:
        fix = f"there are {', '.join(map(str, known[kind]))}"
        yield _refused(job.at(*at, "count"), f"{count} cores of {kind}", fix)
    elif kind and kind not in known:
        yield _refused(job.at(*at, "type"), f"a TPU {kind}", f"there were {', '.join(known)}")


@_rule(f"{_DISCOVERY}, ReplicaConfig.tpuTfVersion; {_DOCUMENTATION}/using-tpus")
def tpu_runtime_version_is_valid(job: Evidence) -> Iterator[Finding]:
    """tpuTfVersion is set for a TPU worker with a container, to a version that TPUs had."""
    known, on_tpu = machines.table().ai_platform_tpu_runtimes, _on_tpu(job)
    contained = bool(_config(job, "master").get("imageUri") or _config(job, "worker").get("imageUri"))
    for role in _ROLES:
        version = _config(job, role).get("tpuTfVersion")
        at = job.at(f"{role}Config", "tpuTfVersion")
        if version and not (role == "worker" and on_tpu and contained):
            yield _refused(at, f"{role}Config.tpuTfVersion without a TPU worker in a container", "remove it")
        elif version and str(version) not in known and not str(version).startswith("pytorch-"):
            what = f"tpuTfVersion {version}{unknown(str(version), known)}"
            yield _refused(at, what, "use a version that TPUs supported")
    if on_tpu and contained and not _config(job, "worker").get("tpuTfVersion"):
        yield _from_flag(
            job.at("workerConfig"),
            "a TPU worker in a container without tpuTfVersion",
            "add workerConfig.tpuTfVersion, the version of TensorFlow in the image, or submit with --tpu-tf-version "
            "of 'gcloud beta'",
        )
    runtime = job.spec.get("runtimeVersion")
    if on_tpu and runtime and str(runtime) not in known:
        what = f"runtimeVersion {runtime} had no TPU support"
        yield _refused(job.at("runtimeVersion"), what, f"one of {', '.join(known)}")


@_rule(
    "gcloud 528, command_lib/ml_engine/constants.py; ACCELERATOR_REGION_SUPPORT in https://github.com/google/caliban"
)
def ai_platform_region_existed(job: Evidence) -> Iterator[Finding]:
    """AI Platform had the region, with TPUs for a TPU job."""
    region = job.spec.get("region") or job.region
    if not region:
        yield Finding(job.at(), "no region", "gcloud asks for one", "add region: us-central1", severity=Severity.NOTE)
        return
    known, on_tpu = machines.table(), _on_tpu(job)
    valid = known.ai_platform_tpu_regions if on_tpu else known.ai_platform_regions
    if region not in valid:
        what = f"no {'TPUs' if on_tpu else 'training'} in '{region}'{unknown(str(region), valid)}"
        yield _refused(job.at("region"), what, "use one of them")


@_rule(f"{_DISCOVERY}, Job.jobId, TrainingInput.network, Scheduling.maxWaitTime, Scheduling.priority")
def ai_platform_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """Job ids, networks and durations are written as the API requires."""
    job_id = job.job.documents[0].get("jobId")
    if job_id and not re.fullmatch(r"[A-Za-z]\w{0,127}", str(job_id)):
        yield _refused(job.job.where(("jobId",)), f"jobId '{job_id}'", "letters, digits, underscores")
    network = job.spec.get("network")
    if network and not re.fullmatch(r"projects/\d+/global/networks/[\w-]+", str(network)):
        fix = "write projects/<number, not name>/global/networks/<name>"
        yield _refused(job.at("network"), f"network '{network}'", fix)
    scheduling = job.spec.get("scheduling") or {}
    wait = str(scheduling.get("maxWaitTime", "1800s"))
    if re.fullmatch(r"\d+s", wait) and int(wait[:-1]) < 1800:
        yield _refused(job.at("scheduling", "maxWaitTime"), f"maxWaitTime {wait}", "at least 1800s")
    if scheduling.get("priority") is not None and not 0 <= parse_count(scheduling["priority"]) <= 1000:
        yield _refused(job.at("scheduling", "priority"), f"priority {scheduling['priority']}", "0 to 1000")


@_rule(f"{_DISCOVERY}, HyperparameterSpec, ParameterSpec (discreteValues increasing, at most 1000)")
def ai_platform_search_is_valid(job: Evidence) -> Iterator[Finding]:
    """Hyperparameters make a valid search."""
    spec = mapping(job.spec, "hyperparameters")
    if parse_count(spec.get("maxParallelTrials") or 1) > parse_count(spec.get("maxTrials") or 1):
        at = job.at("hyperparameters", "maxParallelTrials")
        yield _refused(at, "more trials at a time than in all", "run fewer at a time")
    for number, parameter in enumerate(spec.get("params") or []):
        if not isinstance(parameter, dict):
            continue
        at, name = job.at("hyperparameters", "params", number), parameter.get("parameterName")
        kind, values = parameter.get("type"), parameter.get("discreteValues") or []
        if kind in ("DOUBLE", "INTEGER") and not {"minValue", "maxValue"} <= set(parameter):
            yield _refused(at, f"{name}: {kind} without minValue and maxValue", "give both")
        if kind == "DISCRETE" and (not values or list(values) != sorted(values) or len(values) > 1000):
            yield _refused(at, f"{name}: discreteValues", "list at most 1000 in increasing order")
        if kind == "CATEGORICAL" and not parameter.get("categoricalValues"):
            yield _refused(at, f"{name}: no categoricalValues", "list them")
        if kind == "DOUBLE" and spec.get("algorithm") == "GRID_SEARCH":
            yield _refused(at, f"{name}: GRID_SEARCH over DOUBLE", "use DISCRETE")
