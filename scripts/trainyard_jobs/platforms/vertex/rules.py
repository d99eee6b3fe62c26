"""Rules about CustomJobs and tuning jobs of Vertex AI; for machines see accelerators.py, for searches tuning.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.worker_pools import WORKER_SPECS, parse_count, pools, refused, vertex_rule
from trainyard_jobs.schema.kubernetes_defaults import mapping

#: Pools in their order (https://cloud.google.com/vertex-ai/docs/training/distributed-training).
ROLES = ("chief", "workers", "parameter or reduction servers", "evaluators")

#: Variables that the service sets
#: (https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables).
_RESERVED_VARIABLES = re.compile(
    r"AIP_\w+|CLOUD_ML_\w+|CLUSTER_SPEC|TF_CONFIG|TPU_CONFIG|TPU_NODE_NAME|MASTER_(ADDR|PORT)"
)

_DOCUMENTATION = "https://cloud.google.com/vertex-ai/docs"
_API = f"{_DOCUMENTATION}/reference/rest/v1"
_GCLOUD = "gcloud 528, _ValidateWorkerPoolSpecsFromConfig in command_lib/ai/custom_jobs/validation.py"


@vertex_rule(
    f"{_DOCUMENTATION}/training/distributed-training; "
    f'{WORKER_SPECS} ("Chief spec replica count cannot be greater than 1."); {_GCLOUD}'
)
def pools_are_in_order(job: Evidence) -> Iterator[Finding]:
    """The first pool is the chief with one replica; workers, servers and evaluators follow."""
    found = job.spec.get("workerPoolSpecs")
    if not isinstance(found, list) or not found:
        yield refused(job.at("workerPoolSpecs"), "there is no worker pool", "add workerPoolSpecs with one pool")
        return
    if len(found) > len(ROLES):
        fix = f"keep, in this order: {', '.join(ROLES)}"
        yield refused(job.at("workerPoolSpecs", 4), f"{len(found)} pools; at most 4", fix)
    if not found[0]:
        yield refused(job.at("workerPoolSpecs", 0), "the first pool is empty", "the chief is the first pool")
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
    for pool in pools(job):
        count, at = parse_count(pool.spec.get("replicaCount", 0)), pool.at("replicaCount")
        if pool.number == 0 and count > 1:
            what = f"{count} replicas in the first pool; it has exactly 1"
            # One replica is a TPU slice of any number of machines.
            tpu = machines.generation_of_machine(pool.machine_type)
            yield refused(at, what, "keep 1 here" if tpu else f"keep 1 here, and add a second pool with {count - 1}")
        elif count == 0:
            yield Finding(
                at,
                f"pool {pool.number} ({ROLES[min(pool.number, 3)]}) has no replica",
                "the API accepts it, since replicaCount is optional; the pool has no machine",
                "give replicaCount: 1 or more",
                severity=Severity.CANNOT_START if "replicaCount" in pool.spec else Severity.NOTE,
            )


@vertex_rule(f'{_API}/CustomJobSpec#WorkerPoolSpec ("task" is a union); {_GCLOUD}')
def pools_are_complete(job: Evidence) -> Iterator[Finding]:
    """Every pool has a machine type, and either a container or a Python package."""
    for pool in pools(job):
        at, name = pool.at(), f"pool {pool.number}"
        container, package = pool.spec.get("containerSpec") or {}, pool.spec.get("pythonPackageSpec") or {}
        if bool(container) == bool(package):
            what = (
                "both containerSpec and pythonPackageSpec" if package else "neither containerSpec nor pythonPackageSpec"
            )
            yield refused(at, f"{name} has {what}", "give exactly one of the two")
        if container and not container.get("imageUri"):
            yield refused(at, f"{name}: containerSpec has no imageUri", "name the image")
        if package and not (package.get("executorImageUri") or package.get("pythonModule")):
            what = f"{name}: pythonPackageSpec has neither executorImageUri nor pythonModule"
            yield refused(at, what, "name the image, the module, and packageUris")
        if not pool.machine_type and not job.spec.get("persistentResourceId"):
            yield Finding(
                at,
                f"{name} has no machineSpec.machineType",
                "the API accepts it, but only the machines of a persistent resource need none",
                "name a machine type, such as n1-standard-8",
                severity=Severity.CANNOT_START,
            )


@vertex_rule(f"{_API}/CustomJobSpec#Scheduling", Severity.NOTE)
def scheduling_is_current(job: Evidence) -> Iterator[Finding]:
    """The scheduling strategy is not deprecated, and FLEX_START sets how long to wait."""
    scheduling = job.spec.get("scheduling") or {}
    strategy, at = str(scheduling.get("strategy")), job.at("scheduling", "strategy")
    replacement = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}.get(strategy)
    if replacement:
        yield Finding(at, f"{strategy} is deprecated", "the service may stop accepting it", f"write {replacement}")
    if strategy == "FLEX_START" and not scheduling.get("maxWaitDuration"):
        why, fix = "the job ends after 24 hours without machines", "add maxWaitDuration; 0s waits without a limit"
        yield Finding(at, "FLEX_START without maxWaitDuration", why, fix)


@vertex_rule(
    f'{_API}/DiskSpec; {_DOCUMENTATION}/training/configure-compute#boot_disk_options; {WORKER_SPECS} ("[100, 64000]")'
)
def boot_disks_are_valid(job: Evidence) -> Iterator[Finding]:
    """Boot disks have a type and size that exist."""
    types = ["pd-ssd", "pd-standard", "hyperdisk-balanced"]
    for pool in pools(job):
        disk = pool.spec.get("diskSpec") or {}
        kind, size = disk.get("bootDiskType"), disk.get("bootDiskSizeGb")
        if kind and kind not in types:
            what = f"bootDiskType '{kind}'{unknown(str(kind), types)}"
            yield refused(pool.at("diskSpec", "bootDiskType"), what, "use one of them")
        if size is not None and not 100 <= parse_count(size) <= 64000:
            what = f"{size} GB; valid are 100 to 64000"
            yield refused(pool.at("diskSpec", "bootDiskSizeGb"), what, "use 100 or more")


@vertex_rule(f"{_API}/CustomJobSpec#ContainerSpec; {_DOCUMENTATION}/training/code-requirements#environment-variables")
def environment_variables_are_valid(job: Evidence) -> Iterator[Finding]:
    """A container has at most 100 environment variables, with valid names, each once; none is set by the service."""
    for pool in pools(job):
        for task in ("containerSpec", "pythonPackageSpec"):
            entries = [one for one in (pool.spec.get(task) or {}).get("env") or [] if isinstance(one, dict)]
            names = [str(one.get("name") or "") for one in entries]
            if len(names) > 100:
                yield refused(pool.at(task, "env"), f"{len(names)} variables; at most 100", "remove some")
            for index, name in enumerate(names):
                at, note = pool.at(task, "env", index), Severity.NOTE
                if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                    why = "the service refuses the job: it must be a valid C identifier"
                    fix = "use letters, digits and underscores, and no digit first"
                    yield Finding(at, f"'{name}' is no name of a variable", why, fix)
                if name in names[:index]:
                    yield Finding(at, f"{name} is there twice", "one of the two values is lost", "keep one", note)
                if _RESERVED_VARIABLES.fullmatch(name):
                    why = "the trainer may get either value"
                    yield Finding(at, f"{name} is set by the service", why, "remove it", note)


#: Location of a name in the spec, its form, and the form in words.
_NAMES = (
    (
        ("baseOutputDirectory", "outputUriPrefix"),
        r"gs://[a-z0-9][\w.-]{2,}(/.*)?",
        "gs://bucket/folder, with 3 or more characters before the slash",
    ),
    (("network",), r"projects/\d+/global/networks/[\w-]+", "projects/<number, not name>/global/networks/<name>"),
    (("serviceAccount",), r"[^@\s]+@[^@\s]+\.[^@\s]+", "name@project.iam.gserviceaccount.com"),
    (
        ("tensorboard",),
        r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+",
        "projects/<project>/locations/<region>/tensorboards/<id>",
    ),
)


@vertex_rule(f"{_API}/CustomJobSpec (network, serviceAccount, tensorboard, baseOutputDirectory)")
def resource_names_are_valid(job: Evidence) -> Iterator[Finding]:
    """Buckets, networks, service accounts and TensorBoards are named as the API requires."""
    directory = job.spec.get("baseOutputDirectory")
    if directory is not None and not directory.get("outputUriPrefix"):
        what = "baseOutputDirectory without outputUriPrefix"
        fix = "add outputUriPrefix: gs://bucket/folder, or remove baseOutputDirectory"
        yield refused(job.at("baseOutputDirectory"), what, fix)
    for location, form, words in _NAMES:
        value = mapping(job.spec, *location[:-1]).get(location[-1])
        if value is not None and not re.fullmatch(form, str(value)):
            yield refused(job.at(*location), f"{'.'.join(location)}: '{value}'", f"write {words}")


@vertex_rule(f"{_DOCUMENTATION}/experiments/tensorboard-training")
def tensorboard_can_be_written(job: Evidence) -> Iterator[Finding]:
    """A job with a TensorBoard has a service account and an output folder, in the same region."""
    board = job.spec.get("tensorboard")
    if not board:
        return
    at = job.at("tensorboard")
    if not job.spec.get("serviceAccount"):
        yield refused(at, "a tensorboard without serviceAccount", "add serviceAccount")
    if not job.spec.get("baseOutputDirectory"):
        why = "AIP_TENSORBOARD_LOG_DIR is not set, and the trainer writes no logs"
        fix = "add baseOutputDirectory"
        yield Finding(at, "a tensorboard without baseOutputDirectory", why, fix, Severity.NOTE)
    place = re.search(r"/locations/([^/]+)/", str(board))
    if job.region and place and place[1] != job.region:
        what = f"the TensorBoard is in {place[1]}, the job in {job.region}"
        yield refused(at, what, "use a TensorBoard in the job's region")


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
