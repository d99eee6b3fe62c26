"""What the platforms' writers share: comments at the top of job files, checks of what is requested and written."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainyard.common.errors import UserError, nearest
from trainyard.oci.transport import is_loopback
from trainyard.spec.naming import JOB_MARK
from trainyard_jobs.kubernetes.gke_objects import is_for_gke
from trainyard_jobs.model import gpu_support, machines, yaml_writer
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.model.request import Gpus, Request
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.platforms.base import Platform, RenderedJob
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.image import PUSH_IT, WHO_RUNS_IT, fitting, named, only_here
from trainyard_jobs.schema import job_file

#: How a cluster gets the networks and the NCCL plugin of its GPU machines.
_GPUDIRECT = "https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"


def redirected_stdout() -> str | None:
    """Path of the file that stdout is redirected to, relative to the current folder if below it; None if it is not."""
    try:
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            path = Path(os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}"))
            return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    except (OSError, ValueError):  # no /proc, or stdout is not a file descriptor
        pass
    return None


def header(request: Request, command: list[str], file: str) -> str:
    """Return the comment at the top of a job file: its name, its image, and the commands that check and submit it."""
    framework = request.recipe.framework if request.recipe else None
    contents = f"; {framework.name} {framework.version}" if framework else ""
    return yaml_writer.comment(
        [
            f"{request.name}: {request.image}{contents}",
            f"{JOB_MARK}; check it with `trainyard job check {shlex.quote(file)}`. Submit it with:",
            shlex.join(command),
        ]
    )


def script_header(request: Request, how: str, *more: str) -> str:
    """Return the comment at the top of a job that no command of Trainyard checks; ``how`` says how to submit it."""
    return yaml_writer.comment([f"{request.name}: {request.image}", f"{JOB_MARK}. {how}", *more])


def _takes(platform: Platform, request: Request, **machine: Any) -> bool:
    try:
        return bool(platform.write(Request(request.name, request.image, request.recipe, **machine)))
    except UserError:
        return False


def check_device(request: Request, platform: Platform, platforms: Iterable[Platform]) -> None:
    """Check that the image of a target is for the accelerator that a job asks for, or for CPUs if it asks for none.

    Raises:
        UserError: it is for another, or has no code for the GPUs; the line names what fits, of all ``platforms``, too.
    """
    own = machines.table().ai_platform_machines.get(request.machine or "", "")  # some have GPUs
    recipe, contents = request.recipe, request.contents
    if recipe is None or contents is None or request.pool or "+" in own:
        return
    asked, image = "tpu" if request.tpu else "gpu" if request.gpus else "cpu", contents.device
    framework = contents.framework or recipe.framework.name
    known = f"an image for {image.upper()}s: {framework} (by {contents.source})"
    instead = fitting(request.targets, framework, asked)
    if asked == "cpu" != image:
        gpus, tpu = (Gpus("NVIDIA_TESLA_T4", 1), None) if image == "gpu" else (None, machines.slice_of("v5litepod-4"))
        having = [one.name for one in platforms if _takes(one, request, gpus=gpus, tpu=tpu)]
        fix = f"say which, as in '--accelerator {'T4' if gpus else 'v5litepod-4'}'"
        if platform.name not in having:
            fix = f"'--platform {platform.name}' has none for it; these have: {', '.join(having)}"
        fix += f"; {instead}; '--image' takes any" if _takes(platform, request) else ""
        raise UserError(f"no '--accelerator', and {known}: {fix}")
    if asked != image:
        raise UserError(f"invalid job: a {asked.upper()} job with {known}: {instead}")
    misfit = gpu_support.misfit(contents, request.gpus.type, request.targets) if request.gpus else None
    if misfit and misfit.fatal:
        raise UserError(f"invalid job: {misfit.what}: {misfit.remediation}")


def check_machine(request: Request) -> None:
    """Check that it is known which GPUs a machine type of Google Cloud has, which the job asks for.

    Raises:
        UserError: the machine type is not in the table, and its series is not one without GPUs.
    """
    table, known, machine = machines.table(), machines.machine_types(), request.machine or ""
    series = {"", *table.cpu_series, *(family.partition("-")[0] for family in table.cpus)}
    if machine not in known and machine.partition("-")[0] not in series and not request.gpus and not request.tpu:
        what = f"'--machine {machine}' is not in the table of {table.sources['gpus'].checked}{nearest(machine, known)}"
        raise UserError(f"{what}: correct it, or say with '--accelerator' which GPUs it has")


def local_images(platform: Platform, job: RenderedJob, *, submit: bool) -> Iterator[str]:
    """Yield a line for each image that only this machine has; a :class:`UserError` if it is submitted where none is."""
    images, own = {job.request.image}, platform.name == "slurm"  # may be on this machine, as a cluster of Kubernetes
    if platform.kinds or platform.in_kubernetes:
        parsed = job_file.parse(job.text, Path(platform.file_name))
        images = {one.reference for one in named(Evidence(parsed, "", {}))}
        own = platform.in_kubernetes and not is_for_gke(parsed.documents)
    for image in sorted(filter(only_here, images)):
        line = f"{image} is {only_here(image)}: {WHO_RUNS_IT}: {PUSH_IT}, and give '--registry'"
        if submit and not (own and is_loopback(image)):
            raise UserError(line)
        yield line


def machine_notes(request: Request) -> tuple[str, ...]:
    """Lines about a machine type that is not in the table, or whose CPUs need another image."""
    found = []
    if request.machine and request.machine not in machines.machine_types():
        day = machines.table().sources["cpus"].checked
        without = "" if request.gpus or request.tpu else ", nor for accelerators without '--accelerator'"
        found.append(f"{request.machine} is not in the table of {day}: nothing was checked for it{without}")
    gpu = machines.table().gpus[request.gpus.type] if request.gpus else None
    if request.gpus and gpu and gpu.arm:
        found.append(f"machines with {request.gpus.type} have Arm CPUs: the image needs a variant for linux/arm64")
    return tuple(found)


def network_notes(request: Request) -> tuple[str, ...]:
    """Lines about the networks that a group of GPU machines needs, on platforms whose clusters their users set up."""
    gpu = machines.table().gpus[request.gpus.type] if request.gpus else None
    # Only the largest machines have it: of A3 High, a3-highgpu-8g.
    if not request.gpus or not gpu or not gpu.gpudirect or request.gpus.count < gpu.counts[-1] or request.workers == 1:
        return ()
    return (
        f"machines with {request.gpus.type} use their full bandwidth to each other through GPUDirect-{gpu.gpudirect} "
        "only. This job does not set it up: without the cluster's networks and NCCL plugin for it, NCCL uses TCP, "
        f"which is slow: {_GPUDIRECT}",
    )


def checked(text: str, request: Request, images: Mapping[str, Contents | None] | None = None) -> str:
    """The text of a job, if no rule refuses it.

    An image on this machine is no reason: it can be rehearsed, and ``trainyard job`` warns about it.

    Raises:
        UserError: the first finding, and how to fix it.
    """
    job = job_file.parse(text, Path(Platform.file_name))
    found = all_rules.check(Evidence(job, request.place, images or {}, targets=request.targets))
    failed = [finding for finding in found if finding.fails and finding.rule != "images_can_be_pulled"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise UserError(f"invalid job: {failed[0].what}: {failed[0].remediation}{more}")
    return text


def rendered(request: Request, command: list[str], file: str, body: str, notes: Iterable[str]) -> RenderedJob:
    """Return a job with its comment at the top, if no rule refuses it; see :func:`checked`."""
    text = checked(header(request, command, file) + body, request, {request.image: request.contents})
    return RenderedJob(text, command, request, notes=tuple(notes))


def refuse(platform: str, request: Request, *options: str, why: str = "") -> None:
    """Refuse the options that a platform lacks.

    Args:
        options: their attributes of a request.
        why: the end of the message.
    Raises:
        UserError: one of them was given.
    """
    for name in options:
        if getattr(request, name) != getattr(Request, name):
            raise UserError(f"'--platform {platform}' has no '--{name.replace('_', '-')}'{why}")


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that have a value: no text, list or mapping that is empty, not None or false."""
    return {key: value for key, value in fields.items() if value}
