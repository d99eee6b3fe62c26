"""What Vertex AI refuses, or takes and does not mean, in CustomJobs and tuning jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.jobs.pools import machine_of, pools, whole
from scripts.jobs.rules import VERTEX, Evidence, Flaw, rule, unknown

#: Pools in their order (vertex-ai/docs/training/distributed-training).
ROLES = ("chief", "workers", "parameter or reduction servers", "evaluators")

#: Variables that the service sets itself (vertex-ai/docs/training/code-requirements#environment-variables).
_OWN_VARIABLES = re.compile(r"AIP_\w+|CLOUD_ML_\w+|CLUSTER_SPEC|TF_CONFIG|TPU_CONFIG|TPU_NODE_NAME|MASTER_(ADDR|PORT)")


@rule(*VERTEX)
def pools_are_in_order(job: Evidence) -> Iterator[Flaw]:
    """The first pool is the chief with one replica; workers, servers and evaluators follow.

    vertex-ai/docs/training/distributed-training; google-cloud-aiplatform, worker_spec_utils.py ("Chief spec replica
    count cannot be greater than 1.").
    """
    found = job.spec.get("workerPoolSpecs")
    why = "the service refuses the job"
    if not isinstance(found, list) or not found:
        yield Flaw(job.at("workerPoolSpecs"), "there is no worker pool", why, "add workerPoolSpecs with one pool")
        return
    if len(found) > len(ROLES):
        yield Flaw(
            job.at("workerPoolSpecs", 4),
            f"{len(found)} pools; at most 4",
            why,
            f"they are, in order: {', '.join(ROLES)}",
        )
    if not found[0]:
        yield Flaw(job.at("workerPoolSpecs", 0), "the first pool is empty", why, "the chief is the first pool")
    if not found[-1] and len(found) > 1:
        yield Flaw(
            job.at("workerPoolSpecs", len(found) - 1),
            "the last pool is empty",
            why,
            "an empty pool {} only keeps the position of those behind it: leave it out",
        )
    for number, pool in pools(job):
        count = whole(pool.get("replicaCount", 0))
        at = job.at("workerPoolSpecs", number, "replicaCount")
        if number == 0 and count > 1:
            yield Flaw(
                at,
                f"{count} replicas in the first pool; it has exactly 1",
                why,
                f"keep 1 here, and add a second pool with {count - 1}",
            )
        elif count == 0:
            yield Flaw(
                at, f"pool {number} ({ROLES[min(number, 3)]}) has no replica", why, "give replicaCount: 1 or more"
            )


@rule(*VERTEX)
def pools_are_complete(job: Evidence) -> Iterator[Flaw]:
    """Every pool has a machine type, and either a container or a Python package.

    aiplatform v1: WorkerPoolSpec ("task" is a union of containerSpec and pythonPackageSpec), MachineSpec.machineType.
    """
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
            yield Flaw(at, f"pool {number} has {what}", why, "give exactly one of the two")
        if pool.get("containerSpec") and not (pool["containerSpec"] or {}).get("imageUri"):
            yield Flaw(at, f"pool {number}: containerSpec has no imageUri", why, "name the image")
        if not machine_of(pool).get("machineType"):
            yield Flaw(
                at, f"pool {number} has no machineSpec.machineType", why, "name a machine type, such as n1-standard-8"
            )


@rule(*VERTEX)
def scheduling_is_current(job: Evidence) -> Iterator[Flaw]:
    """The strategy is one that is not deprecated, and waits as long as it means to.

    aiplatform v1: Scheduling.strategy (ON_DEMAND and LOW_COST are deprecated), Scheduling.maxWaitDuration.
    """
    scheduling = job.spec.get("scheduling") or {}
    replacement = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}.get(str(scheduling.get("strategy")))
    if replacement:
        yield Flaw(
            job.at("scheduling", "strategy"),
            f"{scheduling['strategy']} is deprecated",
            "the service may stop taking it",
            f"write {replacement}",
            note=True,
        )
    if scheduling.get("strategy") == "FLEX_START" and not scheduling.get("maxWaitDuration"):
        yield Flaw(
            job.at("scheduling", "strategy"),
            "FLEX_START without maxWaitDuration",
            "the job ends after 24 hours without machines",
            "say how long it may wait; 0s is for ever",
            note=True,
        )


@rule(*VERTEX)
def disks_are_possible(job: Evidence) -> Iterator[Flaw]:
    """Boot disks are of a type and size that exist.

    aiplatform v1: DiskSpec; google-cloud-aiplatform, worker_spec_utils.py ("[100, 64000]").
    """
    types = ["pd-ssd", "pd-standard", "hyperdisk-balanced"]
    for number, pool in pools(job):
        disk = pool.get("diskSpec") or {}
        kind, size = disk.get("bootDiskType"), disk.get("bootDiskSizeGb")
        why = "the service refuses the job"
        if kind and kind not in types:
            yield Flaw(
                job.at("workerPoolSpecs", number, "diskSpec", "bootDiskType"),
                f"bootDiskType '{kind}'{unknown(str(kind), types)}",
                why,
                "take one of them",
            )
        if size is not None and not 100 <= whole(size) <= 64000:
            yield Flaw(
                job.at("workerPoolSpecs", number, "diskSpec", "bootDiskSizeGb"),
                f"{size} GB; 100 to 64000",
                why,
                "take 100 or more",
            )


@rule(*VERTEX)
def variables_are_yours(job: Evidence) -> Iterator[Flaw]:
    """Environment variables are at most 100 a container, each once, and none that the service sets.

    aiplatform v1: ContainerSpec.env; vertex-ai/docs/training/code-requirements#environment-variables.
    """
    for number, pool in pools(job):
        for task in ("containerSpec", "pythonPackageSpec"):
            entries = [one for one in (pool.get(task) or {}).get("env") or [] if isinstance(one, dict)]
            names = [str(one.get("name")) for one in entries]
            if len(names) > 100:
                yield Flaw(
                    job.at("workerPoolSpecs", number, task, "env"),
                    f"{len(names)} variables; at most 100",
                    "the service refuses the job",
                    "leave some out",
                )
            for index, name in enumerate(names):
                at = job.at("workerPoolSpecs", number, task, "env", index)
                if name in names[:index]:
                    yield Flaw(at, f"{name} is there twice", "one of the two is lost", "keep one")
                if _OWN_VARIABLES.fullmatch(name):
                    yield Flaw(
                        at,
                        f"{name} is set by the service",
                        "the trainer may see the one or the other",
                        "leave it out",
                        note=True,
                    )


@rule(*VERTEX)
def names_have_their_form(job: Evidence) -> Iterator[Flaw]:
    """Buckets, networks, service accounts and TensorBoards are named as the API wants them.

    aiplatform v1: CustomJobSpec.network, .serviceAccount, .tensorboard, GcsDestination.outputUriPrefix.
    """
    output = (job.spec.get("baseOutputDirectory") or {}).get("outputUriPrefix")
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
            yield Flaw(
                job.at(*location), f"{'.'.join(location)}: '{value}'", "the service refuses the job", f"write {words}"
            )


@rule(*VERTEX)
def tensorboard_can_be_written(job: Evidence) -> Iterator[Flaw]:
    """A job with a TensorBoard has a service account, and a folder for the logs, in the same region.

    vertex-ai/docs/experiments/tensorboard-training: the service account is required, logs go to
    AIP_TENSORBOARD_LOG_DIR below baseOutputDirectory.
    """
    board = job.spec.get("tensorboard")
    if not board:
        return
    at = job.at("tensorboard")
    for key, why in (
        ("serviceAccount", "the service refuses the job"),
        ("baseOutputDirectory", "AIP_TENSORBOARD_LOG_DIR is not set, and the trainer writes no logs"),
    ):
        if not job.spec.get(key):
            yield Flaw(at, f"a tensorboard without {key}", why, f"add {key}")
    place = re.search(r"/locations/([^/]+)/", str(board))
    if job.region and place and place[1] != job.region:
        yield Flaw(
            at,
            f"the TensorBoard is in {place[1]}, the job in {job.region}",
            "the service refuses the job",
            "take one of the same region",
        )
