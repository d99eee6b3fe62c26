"""The platforms that jobs run on, behind one interface (:mod:`trainyard.platforms.base`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trainyard import installation
from trainyard.console import UserError, nearest
from trainyard.jobs import job_file
from trainyard.jobs.job_file import JobFile
from trainyard.lint.engine import Finding
from trainyard.lint.jobs import lookup
from trainyard.lint.jobs.evidence import validate
from trainyard.platforms import ai_platform, gke, tpu_vm, vertex
from trainyard.platforms.base import Platform

#: Every platform. To add one, write its module and add an instance here.
PLATFORMS: tuple[Platform, ...] = (vertex.Vertex(), ai_platform.AiPlatform(), gke.Gke(), tpu_vm.TpuVm())


def by_name(name: str | None) -> Platform:
    """The platform of a name.

    Raises:
        UserError: there is none; the message lists the names.
    """
    known = [platform.name for platform in PLATFORMS]
    if name not in known:
        given = (
            f"unknown platform '{name}'{nearest(name, known)}"
            if name
            else f"no {installation.option('PLATFORM')} given"
        )
        raise UserError(f"{given}; platforms: {', '.join(known)}")
    return next(platform for platform in PLATFORMS if platform.name == name)


def of_job_file(job: JobFile) -> Platform:
    """The platform that runs a job file, by its kind.

    Raises:
        UserError: none does.
    """
    for platform in PLATFORMS:
        if job.kind in platform.kinds:
            return platform
    raise UserError(f"{job.path}: no platform runs a {job.kind}")


def check_file(path: Path, *, region: str | None = None, offline: bool = False) -> tuple[JobFile, list[Finding]]:
    """A job file, and everything in it that breaks a rule of its platform.

    Args:
        region: where the job is to run.
        offline: do not look up the images that it names.
    Raises:
        UserError: the file cannot be read, or is not a job.
    """
    job = job_file.load(path)
    images, missing = ({}, {}) if offline else lookup.look_up(job)
    return job, of_job_file(job).check(job, region=region, images=images, missing=missing)


@contextlib.contextmanager
def explain_invalid_fields(job: JobFile) -> Iterator[None]:
    """Turn an error that a field of the wrong type causes in the body into a line that names the field.

    For what reads a job without checking it first: a job can be rehearsed although a platform would refuse it.

    Raises:
        UserError: the job does not match its schema; the message gives the line of the field.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError):
        for number, document in enumerate(job.documents):
            # Errors of a type first: an unknown field is ignored.
            for error in sorted(validate(job.kind, document), key=lambda error: error.empty is None):
                raise UserError(
                    f"{job.where(error.location, number)}: {'.'.join(map(str, error.location))}: {error.what}; "
                    f"'trainyard check-job {job.path}' lists every mistake"
                ) from None
        raise
