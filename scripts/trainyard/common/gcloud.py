"""Running the Google Cloud CLI, and the line of its output that says what went wrong."""

from __future__ import annotations

import re
import shutil
import subprocess

from trainyard.common.errors import UserError

Finished = subprocess.CompletedProcess[str]


def require() -> None:
    """Check that gcloud is installed.

    Raises:
        UserError: it is not.
    """
    if not shutil.which("gcloud"):
        raise UserError("gcloud is not installed: see https://cloud.google.com/sdk/docs/install")


def run(*arguments: str) -> Finished:
    """Run ``gcloud ARGUMENTS --quiet``; its exit status and output.

    Raises:
        UserError: gcloud is not installed.
    """
    require()
    return subprocess.run(["gcloud", *arguments, "--quiet"], capture_output=True, text=True, check=False)


def error_line(finished: Finished) -> str:
    """The line of stderr that gives the error, without ``ERROR: (gcloud.<command>)``."""
    lines = [line for line in finished.stderr.splitlines() if line.startswith("ERROR:")] or finished.stderr.splitlines()
    return re.sub(r"^ERROR: (\(gcloud[^)]*\) )?", "", lines[0]) if lines else "gcloud printed no error"
