"""Rules about CustomJobs and tuning jobs of Vertex AI; for machines see accelerators.py, for searches tuning.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard_jobs.rules.evidence import VERTEX, Evidence, unknown
from trainyard_jobs.rules.worker_pools import machine_of, parse_count, pools

#: Pools in their order (https://cloud.google.com/vertex-ai/docs/training/distributed-training).
ROLES = ("chief", "workers", "parameter or reduction servers", "evaluators")

#: Variables that the service sets
#: (https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables).
_RESERVED_VARIABLES = re.compile(
    r"AIP_\w+|CLOUD_ML_\w+|CLUSTER_SPEC|TF_CONFIG|TPU_CONFIG|TPU_NODE_NAME|MASTER_(ADDR|PORT)"
)


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/vertex-ai/docs/training/distributed-training; "
        "https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/utils/worker_spec_utils.py "
        '("Chief spec replica count cannot be greater than 1."); '
        "gcloud 528, _ValidateWorkerPoolSpecsFromConfig in command_lib/ai/custom_jobs/validation.py"
    ),
)
def pools_are_in_order(job: Evidence) -> Iterator[Finding]:
    """The first pool is the chief with one replica; workers, servers and evaluators follow."""
    found = job.spec.get("workerPoolSpecs")
    why = "the service refuses the job"
    if not isinstance(found, list) or not found:
        yield Finding(job.at("workerPoolSpecs"), "there is no worker pool", why, "add workerPoolSpecs with one pool")
        return
    if len(found) > len(ROLES):
        yield Finding(
            job.at("workerPoolSpecs", 4),
            f"{len(found)} pools; at most 4",
            why,
            f"keep, in this order: {', '.join(ROLES)}",
        )
    if not found[0]:
        yield Finding(job.at("workerPoolSpecs", 0), "the first pool is empty", why, "the chief is the first pool")
    for number, empty in enumerate(found[1:], 1):
        if not empty:
            last = number == len(found) - 1
            yield Finding(
                job.at("workerPoolSpecs", number),
                f"{'the last pool' if last else f'pool {number}'} is empty",
                "the API skips it; 'gcloud ai custom-jobs create --config' refuses empty pools",
                "remove it: an empty pool {} only keeps the position of the pools after it"
                if last
                else "submit it with the SDK or curl, or with an empty --worker-pool-spec of gcloud",
                severity=Severity.NOTE,
            )
    for number, pool in pools(job):
        count = parse_count(pool.get("replicaCount", 0))
        at = job.at("workerPoolSpecs", number, "replicaCount")
        if number == 0 and count > 1:
            yield Finding(
                at,
                f"{count} replicas in the first pool; it has exactly 1",
                why,
                f"keep 1 here, and add a second pool with {count - 1}",
            )
        elif count == 0:
            yield Finding(
                at,
                f"pool {number} ({ROLES[min(number, 3)]}) has no replica",
                "the API accepts it, since replicaCount is optional; the pool has no machine",
                "give replicaCount: 1 or more",
                severity=Severity.CANNOT_START if "replicaCount" in pool else Severity.NOTE,
            )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        'https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec#WorkerPoolSpec ("task" is a union); '
        "gcloud 528, _ValidateWorkerPoolSpecsFromConfig in command_lib/ai/custom_jobs/validation.py"
    ),
)
def pools_are_complete(job: Evidence) -> Iterator[Finding]:
    """Every pool has a machine type, and either a container or a Python package."""
    why = "the service refuses the job"
    for number, pool in pools(job):
        at = job.at("workerPoolSpecs", number)
        tasks = [key for key in ("containerSpec", "pythonPackageSpec") if pool.get(key)]
        if len(tasks) != 1:
            what = (
                "neither containerSpec nor pythonPackageSpec"
                if not tasks
                else "both containerSpec and pythonPackageSpec"
            )
            yield Finding(at, f"pool {number} has {what}", why, "give exactly one of the two")
        if pool.get("containerSpec") and not (pool["containerSpec"] or {}).get("imageUri"):
            yield Finding(at, f"pool {number}: containerSpec has no imageUri", why, "name the image")
        package = pool.get("pythonPackageSpec") or {}
        if package and not (package.get("executorImageUri") or package.get("pythonModule")):
            yield Finding(
                at,
                f"pool {number}: pythonPackageSpec has neither executorImageUri nor pythonModule",
                why,
                "name the image, the module, and packageUris",
            )
        if not machine_of(pool).get("machineType") and not job.spec.get("persistentResourceId"):
            yield Finding(
                at,
                f"pool {number} has no machineSpec.machineType",
                "the API accepts it, but only the machines of a persistent resource need none",
                "name a machine type, such as n1-standard-8",
                severity=Severity.CANNOT_START,
            )


@rule(
    *VERTEX,
    severity=Severity.NOTE,
    source="https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec#Scheduling",
)
def scheduling_is_current(job: Evidence) -> Iterator[Finding]:
    """The scheduling strategy is not deprecated, and FLEX_START sets how long to wait."""
    scheduling = job.spec.get("scheduling") or {}
    replacement = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}.get(str(scheduling.get("strategy")))
    if replacement:
        yield Finding(
            job.at("scheduling", "strategy"),
            f"{scheduling['strategy']} is deprecated",
            "the service may stop accepting it",
            f"write {replacement}",
        )
    if scheduling.get("strategy") == "FLEX_START" and not scheduling.get("maxWaitDuration"):
        yield Finding(
            job.at("scheduling", "strategy"),
            "FLEX_START without maxWaitDuration",
            "the job ends after 24 hours without machines",
            "add maxWaitDuration; 0s waits without a limit",
        )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/DiskSpec; "
        "https://cloud.google.com/vertex-ai/docs/training/configure-compute#boot_disk_options; "
        "https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/utils/worker_spec_utils.py "
        '("[100, 64000]")'
    ),
)
def boot_disks_are_valid(job: Evidence) -> Iterator[Finding]:
    """Boot disks have a type and size that exist."""
    types = ["pd-ssd", "pd-standard", "hyperdisk-balanced"]
    for number, pool in pools(job):
        disk = pool.get("diskSpec") or {}
        kind, size = disk.get("bootDiskType"), disk.get("bootDiskSizeGb")
        why = "the service refuses the job"
        if kind and kind not in types:
            yield Finding(
                job.at("workerPoolSpecs", number, "diskSpec", "bootDiskType"),
                f"bootDiskType '{kind}'{unknown(str(kind), types)}",
                why,
                "use one of them",
            )
        if size is not None and not 100 <= parse_count(size) <= 64000:
            yield Finding(
                job.at("workerPoolSpecs", number, "diskSpec", "bootDiskSizeGb"),
                f"{size} GB; valid are 100 to 64000",
                why,
                "use 100 or more",
            )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec#ContainerSpec; "
        "https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables"
    ),
)
def environment_variables_are_valid(job: Evidence) -> Iterator[Finding]:
    """A container has at most 100 environment variables, with valid names, each once; none is set by the service."""
    for number, pool in pools(job):
        for task in ("containerSpec", "pythonPackageSpec"):
            entries = [one for one in (pool.get(task) or {}).get("env") or [] if isinstance(one, dict)]
            names = [str(one.get("name") or "") for one in entries]
            if len(names) > 100:
                yield Finding(
                    job.at("workerPoolSpecs", number, task, "env"),
                    f"{len(names)} variables; at most 100",
                    "the service refuses the job",
                    "remove some",
                )
            for index, name in enumerate(names):
                at = job.at("workerPoolSpecs", number, task, "env", index)
                if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                    yield Finding(
                        at,
                        f"'{name}' is no name of a variable",
                        "the service refuses the job: it must be a valid C identifier",
                        "use letters, digits and underscores, and no digit first",
                    )
                if name in names[:index]:
                    yield Finding(
                        at,
                        f"{name} is there twice",
                        "one of the two values is lost",
                        "keep one",
                        severity=Severity.NOTE,
                    )
                if _RESERVED_VARIABLES.fullmatch(name):
                    yield Finding(
                        at,
                        f"{name} is set by the service",
                        "the trainer may get either value",
                        "remove it",
                        severity=Severity.NOTE,
                    )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec "
        "(network, serviceAccount, tensorboard, baseOutputDirectory)"
    ),
)
def resource_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """Buckets, networks, service accounts and TensorBoards are named as the API requires."""
    directory = job.spec.get("baseOutputDirectory")
    output = (directory or {}).get("outputUriPrefix")
    if directory is not None and not output:
        yield Finding(
            job.at("baseOutputDirectory"),
            "baseOutputDirectory without outputUriPrefix",
            "the service refuses the job",
            "add outputUriPrefix: gs://bucket/folder, or remove baseOutputDirectory",
        )
    forms = [
        (("baseOutputDirectory", "outputUriPrefix"), output, r"gs://[a-z0-9][\w.-]+(/.*)?", "gs://bucket/folder"),
        (
            ("network",),
            job.spec.get("network"),
            r"projects/\d+/global/networks/[\w-]+",
            "projects/<number, not name>/global/networks/<name>",
        ),
        (
            ("serviceAccount",),
            job.spec.get("serviceAccount"),
            r"[^@\s]+@[^@\s]+\.[^@\s]+",
            "name@project.iam.gserviceaccount.com",
        ),
        (
            ("tensorboard",),
            job.spec.get("tensorboard"),
            r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+",
            "projects/<project>/locations/<region>/tensorboards/<id>",
        ),
    ]
    for location, value, form, words in forms:
        if value is not None and not re.fullmatch(form, str(value)):
            yield Finding(
                job.at(*location), f"{'.'.join(location)}: '{value}'", "the service refuses the job", f"write {words}"
            )


@rule(
    *VERTEX, severity=Severity.REFUSE, source="https://cloud.google.com/vertex-ai/docs/experiments/tensorboard-training"
)
def tensorboard_can_be_written(job: Evidence) -> Iterator[Finding]:
    """A job with a TensorBoard has a service account and an output folder, in the same region."""
    board = job.spec.get("tensorboard")
    if not board:
        return
    at = job.at("tensorboard")
    for key, why, severity in (
        ("serviceAccount", "the service refuses the job", Severity.REFUSE),
        ("baseOutputDirectory", "AIP_TENSORBOARD_LOG_DIR is not set, and the trainer writes no logs", Severity.NOTE),
    ):
        if not job.spec.get(key):
            yield Finding(at, f"a tensorboard without {key}", why, f"add {key}", severity=severity)
    place = re.search(r"/locations/([^/]+)/", str(board))
    if job.region and place and place[1] != job.region:
        yield Finding(
            at,
            f"the TensorBoard is in {place[1]}, the job in {job.region}",
            "the service refuses the job",
            "use a TensorBoard in the job's region",
        )


@rule(
    "custom-job",
    severity=Severity.NOTE,
    source="gcloud 528: sends a jobSpec at the top level inside the job's own jobSpec",
)
def file_is_a_custom_job_spec(job: Evidence) -> Iterator[Finding]:
    """The file is a CustomJobSpec, which is what 'gcloud --config' takes."""
    if job.job.root:
        yield Finding(
            job.job.where(("jobSpec",)),
            "a whole CustomJob, with its spec below jobSpec:",
            "the REST API and the SDK accept it; 'gcloud --config' accepts only the content of jobSpec:",
            "for gcloud, keep only the content of jobSpec:",
        )
