"""What AI Platform Training refused, by its API's own words (ml v1) and its documentation. It is shut down.

Old files are still about, and are converted: what was wrong with them is wrong with what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scripts.jobs import ai_platform, machines
from scripts.jobs.pools import whole
from scripts.jobs.rules import Evidence, Flaw, rule, unknown
from scripts.jobs.rules_accelerators import gpu_findings

_ROLES = ("master", "worker", "parameterServer", "evaluator")
_REFUSED = "the service refused such jobs"


def _config(job: Evidence, role: str) -> dict[str, Any]:
    found = job.spec.get(f"{role}Config")
    return found if isinstance(found, dict) else {}


def _legacy(name: object) -> bool:
    return name in machines.table().ai_platform_machines


@rule("ai-platform")
def the_service_is_there(job: Evidence) -> Iterator[Flaw]:
    """The service that takes the job exists.

    ai-platform/training/docs/deprecations: shut down on 31 January 2025.
    """
    yield Flaw(
        job.at(),
        f"an AI Platform job; the service was shut down on {ai_platform.SHUT_DOWN}",
        "the API answers 400: Cloud AI Platform has been deprecated",
        f"make job FROM={job.job.path.name} PLATFORM=vertex writes the job that replaces it",
        note=True,
    )


@rule("ai-platform")
def training_input_is_below_its_key(job: Evidence) -> Iterator[Flaw]:
    """The input is below `trainingInput:`, where gcloud looks for it.

    gcloud 528, api_lib/ml_engine/jobs.py (BuildTrainingJob): a flat file gives "Non-custom jobs must have packages."
    """
    if not job.job.root:
        yield Flaw(
            job.at(),
            "the fields are not below trainingInput:",
            "gcloud does not see them",
            "indent all of it below trainingInput:",
        )


@rule("ai-platform")
def machines_go_with_the_tier(job: Evidence) -> Iterator[Flaw]:
    """Machine types and counts are given for CUSTOM, together, and for no other tier.

    ml v1: TrainingInput.scaleTier, masterType, workerType, workerCount, parameterServerCount, evaluatorCount.
    """
    spec = job.spec
    custom = spec.get("scaleTier") == "CUSTOM"
    if custom and not spec.get("masterType"):
        yield Flaw(job.at("scaleTier"), "CUSTOM without masterType", _REFUSED, "name the master's machine type")
    for role in _ROLES:
        count, kind = spec.get(f"{role}Count"), spec.get(f"{role}Type")
        if not custom:
            given = next((key for key in (f"{role}Type", f"{role}Count") if spec.get(key)), None)
            if given:
                yield Flaw(
                    job.at(given),
                    f"{given} with scaleTier {spec.get('scaleTier', 'BASIC')}",
                    _REFUSED,
                    "write scaleTier: CUSTOM, or leave it out",
                )
        elif count and whole(count) > 0 and not kind:
            yield Flaw(job.at(f"{role}Count"), f"{role}Count without {role}Type", _REFUSED, f"add {role}Type")
        elif kind and role != "master" and not count:
            yield Flaw(job.at(f"{role}Type"), f"{role}Type without {role}Count", _REFUSED, f"add {role}Count")


@rule("ai-platform")
def machine_types_do_not_mix(job: Evidence) -> Iterator[Flaw]:
    """Machine types exist, and are all Compute Engine's or all AI Platform's own; accelerators go with the former.

    ml v1: TrainingInput.masterType ("you must use either all"), ReplicaConfig.acceleratorConfig.
    """
    kinds = {role: job.spec[f"{role}Type"] for role in _ROLES if job.spec.get(f"{role}Type")}
    own = [*machines.table().ai_platform_machines, "cloud_tpu"]
    for role, kind in kinds.items():
        if kind not in own and kind not in machines.machine_types():
            near = unknown(str(kind), own)
            yield Flaw(
                job.at(f"{role}Type"),
                f"machine type '{kind}'{near}",
                _REFUSED,
                "correct it",
                note=bool(re.fullmatch(r"[a-z]\d\w*-\w+-\d+", str(kind))),
            )
    plain = {role: kind for role, kind in kinds.items() if kind != "cloud_tpu"}
    if len({_legacy(kind) for kind in plain.values()}) > 1:
        words = ", ".join(f"{role} {kind}" for role, kind in plain.items())
        yield Flaw(
            job.at(f"{list(plain)[-1]}Type"),
            f"both families of machine types: {words}",
            _REFUSED,
            "take Compute Engine's for all",
        )
    for role in _ROLES:
        accelerator = _config(job, role).get("acceleratorConfig")
        base = job.spec.get("masterType") if kinds.get(role) == "cloud_tpu" else kinds.get(role)
        if accelerator and (_legacy(base) or not base):
            yield Flaw(
                job.at(f"{role}Config", "acceleratorConfig"),
                f"acceleratorConfig with {base or 'no machine type'}",
                _REFUSED,
                "acceleratorConfig goes with Compute Engine machine types: take n1-standard-8",
            )


@rule("ai-platform")
def there_is_something_to_run(job: Evidence) -> Iterator[Flaw]:
    """There is a container, or a package with a runtime version, and not both.

    ml v1: ReplicaConfig.imageUri ("only one of TrainingInput.runtimeVersion or imageUri"), packageUris (at most 100).
    """
    image = _config(job, "master").get("imageUri")
    runtime, packages = job.spec.get("runtimeVersion"), job.spec.get("packageUris") or []
    if image and runtime:
        yield Flaw(
            job.at("runtimeVersion"),
            "both masterConfig.imageUri and runtimeVersion",
            _REFUSED,
            "leave runtimeVersion out: what runs is what is in the image",
        )
    elif not image and not (packages and job.spec.get("pythonModule")):
        yield Flaw(
            job.at(),
            "neither masterConfig.imageUri nor packageUris with pythonModule",
            _REFUSED,
            "add masterConfig.imageUri",
        )
    elif not image and not runtime:
        yield Flaw(job.at("packageUris"), "a package without runtimeVersion", _REFUSED, "add runtimeVersion")
    if len(packages) > 100:
        yield Flaw(job.at("packageUris"), f"{len(packages)} packages; at most 100", _REFUSED, "leave some out")


@rule("ai-platform")
def commands_go_with_containers(job: Evidence) -> Iterator[Flaw]:
    """A container's command and arguments go with an image, and not with the job's own arguments.

    ml v1: ReplicaConfig.containerCommand, containerArgs; an image of a worker or server defaults to the master's.
    """
    master = _config(job, "master").get("imageUri")
    for role in _ROLES:
        config = _config(job, role)
        for key in ("containerCommand", "containerArgs"):
            at = job.at(f"{role}Config", key)
            if config.get(key) and not (config.get("imageUri") or master):
                yield Flaw(at, f"{role}Config.{key} without an image", _REFUSED, "add imageUri")
            elif config.get(key) and job.spec.get("args"):
                yield Flaw(at, f"both {role}Config.{key} and args", _REFUSED, "keep one of the two")


@rule("ai-platform")
def gpus_fit_ai_platforms_machines(job: Evidence) -> Iterator[Flaw]:
    """The number and type of GPUs are ones that the machine type can have.

    ai-platform/training/docs/using-gpus, as google/caliban (COMPATIBILITY_TABLE) and tensorflow/cloud have it.
    """
    for role in _ROLES:
        accelerator = _config(job, role).get("acceleratorConfig") or {}
        kind, machine = str(accelerator.get("type") or ""), str(job.spec.get(f"{role}Type") or "")
        if kind.startswith("NVIDIA") and not _legacy(machine) and machine:
            yield from gpu_findings(
                job.at(f"{role}Config", "acceleratorConfig"),
                machine,
                kind,
                whole(accelerator.get("count") or 0),
                own_gpus_are_said=False,
            )


@rule("ai-platform")
def tpu_workers_are_alone(job: Evidence) -> Iterator[Flaw]:
    """A TPU is one worker of type cloud_tpu, with cores that exist, no parameter server, and a chief without a TPU.

    ai-platform/training/docs/using-tpus; tensorflow/cloud, core/validate.py; google/caliban, platform/cloud/types.py.
    """
    spec = job.spec
    known = machines.table().ai_platform_tpus
    for role in ("master", "parameterServer", "evaluator"):
        kind = str((_config(job, role).get("acceleratorConfig") or {}).get("type") or "")
        if spec.get(f"{role}Type") == "cloud_tpu" or kind.startswith("TPU"):
            yield Flaw(job.at(f"{role}Type"), f"a TPU as {role}", _REFUSED, "the TPU is the worker")
    accelerator = _config(job, "worker").get("acceleratorConfig") or {}
    kind, count = str(accelerator.get("type") or ""), whole(accelerator.get("count") or 0)
    is_tpu = spec.get("workerType") == "cloud_tpu"
    if kind.startswith("TPU") != is_tpu and accelerator:
        yield Flaw(
            job.at("workerConfig", "acceleratorConfig"),
            f"{kind} on {spec.get('workerType')}",
            _REFUSED,
            "a TPU goes with workerType: cloud_tpu, and that with a TPU",
        )
    if not is_tpu and spec.get("scaleTier") != "BASIC_TPU":
        return
    if is_tpu and whole(spec.get("workerCount") or 0) != 1:
        yield Flaw(
            job.at("workerCount"),
            f"{spec.get('workerCount')} TPU workers",
            _REFUSED,
            "write workerCount: 1; a pod is one worker with more cores",
        )
    if whole(spec.get("parameterServerCount") or 0) > 0:
        yield Flaw(job.at("parameterServerCount"), "parameter servers beside a TPU", _REFUSED, "leave them out")
    if kind in known and count not in known[kind]:
        yield Flaw(
            job.at("workerConfig", "acceleratorConfig", "count"),
            f"{count} cores of {kind}",
            _REFUSED,
            f"there are {', '.join(map(str, known[kind]))}",
        )
    elif kind and kind not in known:
        yield Flaw(
            job.at("workerConfig", "acceleratorConfig", "type"),
            f"a TPU {kind}",
            _REFUSED,
            f"there were {', '.join(known)}",
        )


@rule("ai-platform")
def tpu_runtimes_are_said_where_needed(job: Evidence) -> Iterator[Flaw]:
    """tpuTfVersion is there for a TPU worker with a container, is a version that TPUs had, and nowhere else.

    ml v1: ReplicaConfig.tpuTfVersion; ai-platform/training/docs/using-tpus for the versions.
    """
    known = machines.table().ai_platform_tpu_runtimes
    on_tpu = job.spec.get("workerType") == "cloud_tpu" or job.spec.get("scaleTier") == "BASIC_TPU"
    contained = bool(_config(job, "master").get("imageUri") or _config(job, "worker").get("imageUri"))
    for role in _ROLES:
        version = _config(job, role).get("tpuTfVersion")
        at = job.at(f"{role}Config", "tpuTfVersion")
        if version and not (role == "worker" and on_tpu and contained):
            yield Flaw(at, f"{role}Config.tpuTfVersion without a TPU worker in a container", _REFUSED, "leave it out")
        elif version and str(version) not in known and not str(version).startswith("pytorch-"):
            yield Flaw(
                at,
                f"tpuTfVersion {version}{unknown(str(version), known)}",
                _REFUSED,
                "write a minor version that TPUs had",
            )
    if on_tpu and contained and not _config(job, "worker").get("tpuTfVersion"):
        yield Flaw(
            job.at("workerConfig"),
            "a TPU worker in a container without tpuTfVersion",
            _REFUSED,
            "add workerConfig.tpuTfVersion, the version of TensorFlow in the image",
        )
    runtime = job.spec.get("runtimeVersion")
    if on_tpu and runtime and str(runtime) not in known:
        yield Flaw(
            job.at("runtimeVersion"),
            f"runtimeVersion {runtime} had no TPU support",
            _REFUSED,
            f"one of {', '.join(known)}",
        )


@rule("ai-platform")
def region_had_it(job: Evidence) -> Iterator[Flaw]:
    """The region is one of AI Platform's, and one with TPUs for a TPU job.

    gcloud 528, command_lib/ml_engine/constants.py; google/caliban, ACCELERATOR_REGION_SUPPORT.
    """
    region = job.spec.get("region") or job.region
    if not region:
        yield Flaw(job.at(), "no region", "gcloud asks for one", "add region: us-central1", note=True)
        return
    known = machines.table()
    on_tpu = job.spec.get("workerType") == "cloud_tpu" or job.spec.get("scaleTier") == "BASIC_TPU"
    valid = known.ai_platform_tpu_regions if on_tpu else known.ai_platform_regions
    if region not in valid:
        what = f"no {'TPUs' if on_tpu else 'training'} in '{region}'{unknown(str(region), valid)}"
        yield Flaw(job.at("region"), what, _REFUSED, "take one of them")


@rule("ai-platform")
def names_had_their_form(job: Evidence) -> Iterator[Flaw]:
    """Job ids, networks and durations are written as the API wanted them.

    ml v1: Job.jobId, TrainingInput.network, Scheduling.maxWaitTime, Scheduling.priority.
    """
    job_id = job.job.documents[0].get("jobId")
    if job_id and not re.fullmatch(r"[A-Za-z]\w{0,127}", str(job_id)):
        yield Flaw(job.job.where(("jobId",)), f"jobId '{job_id}'", _REFUSED, "letters, digits, underscores")
    network = job.spec.get("network")
    if network and not re.fullmatch(r"projects/\d+/global/networks/[\w-]+", str(network)):
        yield Flaw(
            job.at("network"),
            f"network '{network}'",
            _REFUSED,
            "write projects/<number, not name>/global/networks/<name>",
        )
    scheduling = job.spec.get("scheduling") or {}
    wait = str(scheduling.get("maxWaitTime", "1800s"))
    if re.fullmatch(r"\d+s", wait) and int(wait[:-1]) < 1800:
        yield Flaw(job.at("scheduling", "maxWaitTime"), f"maxWaitTime {wait}", _REFUSED, "at least 1800s")
    if scheduling.get("priority") is not None and not 0 <= whole(scheduling["priority"]) <= 1000:
        yield Flaw(job.at("scheduling", "priority"), f"priority {scheduling['priority']}", _REFUSED, "0 to 1000")


@rule("ai-platform")
def search_could_be_run(job: Evidence) -> Iterator[Flaw]:
    """Hyperparameters make a search.

    ml v1: HyperparameterSpec, ParameterSpec (discreteValues increasing, at most 1000; GRID_SEARCH without DOUBLE).
    """
    spec = job.spec.get("hyperparameters")
    if not isinstance(spec, dict):
        return

    def wrong(number: int, what: str, fix: str) -> Flaw:
        return Flaw(job.at("hyperparameters", "params", number), what, _REFUSED, fix)

    if whole(spec.get("maxParallelTrials") or 1) > whole(spec.get("maxTrials") or 1):
        yield Flaw(
            job.at("hyperparameters", "maxParallelTrials"),
            "more trials at a time than in all",
            _REFUSED,
            "take fewer at a time",
        )
    for number, one in enumerate(spec.get("params") or []):
        if not isinstance(one, dict):
            continue
        kind, values = one.get("type"), one.get("discreteValues") or []
        if kind in ("DOUBLE", "INTEGER") and not {"minValue", "maxValue"} <= set(one):
            yield wrong(number, f"{one.get('parameterName')}: {kind} without minValue and maxValue", "give both")
        if kind == "DISCRETE" and (not values or list(values) != sorted(values) or len(values) > 1000):
            yield wrong(number, f"{one.get('parameterName')}: discreteValues", "list at most 1000 from small to big")
        if kind == "CATEGORICAL" and not one.get("categoricalValues"):
            yield wrong(number, f"{one.get('parameterName')}: no categoricalValues", "list them")
        if kind == "DOUBLE" and spec.get("algorithm") == "GRID_SEARCH":
            yield wrong(number, f"{one.get('parameterName')}: GRID_SEARCH over DOUBLE", "use DISCRETE")
