"""Rules about the GPUs that an image has code for, and the driver that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec import gpus
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.model import gpu_support, machines
from trainyard_jobs.rules.evidence import KINDS, Evidence
from trainyard_jobs.rules.image import named


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source=(
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#application-compatibility, by the image's "
        "record, labels or packages; images/gpus.yaml; images/matrix.yaml"
    ),
)
def images_have_code_for_the_gpu(job: Evidence) -> Iterator[Finding]:
    """The image has device code for the GPU that the job asks for."""
    for image in named(job):
        if misfit := gpu_support.misfit(job.images.get(image.reference), image.gpu):
            severity = Severity.CANNOT_START if misfit.fatal else Severity.NOTE
            yield Finding(image.at, misfit.what, misfit.why, misfit.remediation, severity)


@rule("gke", severity=Severity.NOTE, source="https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpus")
def nodes_have_the_driver(job: Evidence) -> Iterator[Finding]:
    """The NVIDIA driver that GKE installs is new enough for the image."""
    # Never more than a note: a job file does not name the version of its cluster, nor the driver of its node pool.
    table = machines.table().gke_drivers
    for image in named(job):
        contents, mode = job.images.get(image.reference), image.gke_driver or "default"
        known = gpu_support.code_for(contents, image.gpu)
        if contents is None or known is None or image.gke_driver is None or mode not in ("default", "latest"):
            continue
        model, code = known
        least, first = Version(code.driver), Version(gpus.gpus()[model.model].driver)
        drivers = {version: getattr(row, mode) for version, row in table.items()}
        newest = max(drivers.values(), key=Version)
        # GKE installs another driver for GPUs that this one does not know.
        if not first <= Version(newest) < least:
            continue
        versions = [version for version, driver in drivers.items() if driver == newest]
        enough = next((version for version, row in table.items() if Version(row.latest) >= least), "")
        latest = f"select nodes with {gke_objects.GPU_DRIVER}: latest (GKE {enough} or later), or " if enough else ""
        yield Finding(
            image.at,
            f"{contents.framework or 'the image'} with CUDA {code.cuda} needs driver {code.driver} or later (by "
            f"{contents.source}); the {mode} driver of GKE {versions[0]} to {versions[-1]} is {newest}",
            "CUDA refuses a driver that is too old, and the trainer ends or runs on the host's CPU",
            f"{latest}use a node pool with driver {code.driver} or later",
        )
