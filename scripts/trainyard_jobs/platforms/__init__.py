"""The platforms that jobs run on, behind one interface (:mod:`trainyard_jobs.platforms.base`)."""

from __future__ import annotations

from trainyard.common.errors import UserError, nearest
from trainyard_jobs.kubernetes.gke_objects import NAME, object_name
from trainyard_jobs.model.options import ROWS, check_labels
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms.ai_platform.write import AiPlatform
from trainyard_jobs.platforms.all_rules import RULES as RULES
from trainyard_jobs.platforms.base import Platform
from trainyard_jobs.platforms.gke.write import Gke
from trainyard_jobs.platforms.kubeflow.write import Kubeflow
from trainyard_jobs.platforms.skypilot.write import SkyPilot
from trainyard_jobs.platforms.slurm.write import Slurm
from trainyard_jobs.platforms.tpu_vm.write import TpuVm
from trainyard_jobs.platforms.vertex.write import Vertex
from trainyard_jobs.platforms.writing import check_device
from trainyard_jobs.schema.job_file import JobFile

#: Every platform. To add one, write its folder and add an instance here.
PLATFORMS: tuple[Platform, ...] = (
    Vertex(),
    AiPlatform(),
    Gke(),
    TpuVm(),
    Kubeflow(),
    Slurm(),
    SkyPilot(),
)

#: A platform and an option that it lacks -> what to do instead.
_INSTEAD = {
    ("vertex", "secret"): "a CustomJob has no field for it: let the code read Secret Manager as '--service-account'",
    ("vertex", "cpu"): "'--machine' decides it",
    ("vertex", "memory"): "'--machine' decides it",
    ("ai-platform", "env"): "its jobs have no variables: give flags with '--args'",
    ("slurm", "secret"): "sbatch passes your environment on: export the variable before 'sbatch'",
}


def by_name(name: str | None) -> Platform:
    """The platform of a name.

    Raises:
        UserError: there is none; the message lists the names.
    """
    known = [platform.name for platform in PLATFORMS]
    if name not in known:
        given = f"unknown platform '{name}'{nearest(name, known)}" if name else "no '--platform' given"
        raise UserError(f"{given}; platforms: {', '.join(known)}")
    return next(platform for platform in PLATFORMS if platform.name == name)


def having(option: str) -> str:
    """Return the names of the platforms that have an option, such as ``kms-key``, for messages and pages."""
    return ", ".join(one.name for one in PLATFORMS if option in one.options)


def check_options(platform: Platform, request: Request, name: str | None = None) -> None:
    """Check that a platform has the options that a request uses, and takes its name and labels.

    Args:
        name: the one that was given; what the request has without one is made valid.
    Raises:
        UserError: it lacks one, and the message names the platforms that have it; or it does not take a value.
    """
    check_labels(request.labels, kubernetes=platform.in_kubernetes)
    if platform.in_kubernetes and name and not NAME.fullmatch(name):
        form = "use a-z, 0-9, dashes and dots, with a letter or digit at both ends of each part"
        raise UserError(f"'--name {name}' is no name of a Kubernetes object: {form}, as in {object_name(name)}")
    if not (platform.name == "ai-platform" and request.tpu):  # its TPUs were separate from the image's machine
        check_device(request, platform, PLATFORMS)
    if request.image.startswith("/") and platform.name != "slurm":
        raise UserError(f"'--image {request.image}' is a file, which Slurm alone starts: name an image at a registry")
    for mount in request.mounts if "mount" in platform.options else ():
        if mount.kind not in platform.mounts:
            shown = f"/{mount.folder}:" if mount.kind == "folder" else f"{mount.kind}://"
            others = ", ".join(one.name for one in PLATFORMS if "mount" in one.options and mount.kind in one.mounts)
            raise UserError(
                f"'--mount {shown}...': '--platform {platform.name}' mounts no such folder; these do: {others}"
            )
    for row in ROWS:
        if not row.everywhere and getattr(request, row.field) and row.name not in platform.options:
            instead = _INSTEAD.get((platform.name, row.name), "")
            lacks = f"'--platform {platform.name}' has no '--{row.name}'{instead and f': {instead}'}"
            raise UserError(f"{lacks}; these have it: {having(row.name)}")


def of_job_file(job: JobFile) -> Platform:
    """The platform that runs a job file, by its kind.

    Raises:
        UserError: none does.
    """
    for platform in PLATFORMS:
        if job.kind in platform.kinds:
            return platform
    raise UserError(f"{job.path}: no platform runs a {job.kind}")
