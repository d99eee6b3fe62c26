"""What the platforms' writers share: the comment at the top of a job file, and the check of what was written."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from trainyard import installation
from trainyard.console import UserError
from trainyard.jobs import image_metadata, job_file, yaml_writer
from trainyard.jobs.image_metadata import Contents
from trainyard.jobs.request import Request
from trainyard.platforms.base import Platform


def redirected_stdout() -> str | None:
    """Path of the file that stdout is redirected to, relative to the current folder if below it; None if it is not."""
    try:
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            path = Path(os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}"))
            return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    except (OSError, ValueError):  # no /proc, or stdout is not a file descriptor
        pass
    return None


def written_by(request: Request) -> str:
    """The line of a job file that says what has written it, and what checks it, as its user runs them."""
    if request.spec and request.spec.workspace:
        return "Written by `trainyard job`; check it with `trainyard check-job job.yaml`."
    job, check = installation.command("job"), installation.command("check-job", FILE="job.yaml")
    return f"Written by `{job}`; check it with `{check}`."


def header(request: Request, command: list[str]) -> str:
    """The comment at the top of a job file: its name, its image, and the command that submits it."""
    contents = f"; {request.spec.framework.name} {request.spec.framework.version}" if request.spec else ""
    return yaml_writer.comment(
        [
            f"{request.name}: {request.image}{contents}",
            f"{written_by(request)} Submit it with:",
            shlex.join(command),
        ]
    )


def expected_contents(request: Request) -> Mapping[str, Contents | None]:
    """What the image of a target contains by its spec; empty for an image given by reference."""
    return {request.image: image_metadata.of_spec(request.image, request.spec)} if request.spec else {}


def checked(
    platform: Platform, text: str, request: Request, images: Mapping[str, Contents | None] | None = None
) -> str:
    """The text of a job, if no rule refuses it.

    Raises:
        UserError: the first finding, and how to fix it.
    """
    job = job_file.parse(text, Path(platform.file_name))
    failed = [finding for finding in platform.check(job, region=request.place, images=images) if finding.fails]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise UserError(f"invalid job: {failed[0].what}: {failed[0].remediation}{more}")
    return text
