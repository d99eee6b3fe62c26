"""Running the user's gcloud and kubectl: submit a job, follow its log, and find out how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission

logger = logging.getLogger(__name__)

#: Seconds after a job's end within which its last log lines arrive: gcloud waits 5 s for late entries
#: (gcloud 528.0.0, googlecloudsdk/command_lib/logs/stream.py, upper_bound).
LAST_LINES = 8

#: File descriptor of stderr: a child's output is for people, stdout is for the result.
_STDERR = 2

#: Last states of a job: https://cloud.google.com/vertex-ai/docs/reference/rest/v1/JobState, and AI Platform's without
#: the prefix JOB_STATE_.
_FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")

_INSTALL = {
    "gcloud": "https://cloud.google.com/sdk/docs/install",
    "kubectl": "https://kubernetes.io/docs/tasks/tools/",
}


def require_program(program: str) -> None:
    """Check that a program is installed.

    Raises:
        UserError: it is not.
    """
    if not shutil.which(program):
        raise UserError(f"{program} is not installed: see {_INSTALL.get(program, program)}")


def run_json(command: Sequence[str]) -> Any:
    """Run a command that prints JSON; its result.

    Raises:
        UserError: the program is not installed.
        StepFailed: it failed; its error message ends the line.
    """
    require_program(command[0])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no error message"]
        error = next((line for line in lines if line.startswith(("ERROR:", "error:", "Error"))), lines[-1])
        raise StepFailed(f"'{shlex.join(command[:4])}' failed: {error}")
    return json.loads(done.stdout)


def run_visibly(command: Sequence[str]) -> int:
    """Run a command with its output on stderr; its exit status."""
    logger.info(f"$ {shlex.join(command)}")
    return subprocess.run(command, stdout=_STDERR, check=False).returncode


def try_out(platform: Platform, job: RenderedJob) -> None:
    """Let a platform check a job that it does not run.

    Raises:
        UserError: the platform cannot, or its program is not installed.
        StepFailed: the job was refused.
    """
    if not platform.dry_run:
        raise UserError(f"'--platform {platform.name}' has no '--dry-run': no request of its API only checks a job")
    require_program(platform.dry_run[0])
    with temporary_file(job.text, platform.file_name) as path:
        if run_visibly([*platform.dry_run, str(path)]):
            raise StepFailed(f"{platform.dry_run[0]} did not accept the job; see above")


def follow_google_job(
    name: str, group: Sequence[str], where: Sequence[str], *, succeeded: str, interval: int
) -> Submission:
    """Show the log of a job of ``gcloud ai`` or ``gcloud ai-platform`` until the job has ended.

    Args:
        name: of the job; its last part is what gcloud calls it.
        group: gcloud's group of commands, such as ``ai custom-jobs``; ``where``: its options for the place.
        succeeded: the state of a successful job.
    Raises:
        StepFailed: the job ended in another state.
    """
    place = [name.rpartition("/")[2], *where]
    log = ["gcloud", *group, "stream-logs", *place, f"--polling-interval={interval}"]
    try:
        state = _follow_until_ended(log, ["gcloud", *group, "describe", *place, "--format=json"], interval)
    except KeyboardInterrupt:
        say_still_running(["gcloud", *group, "cancel", *place])
        raise
    return submission(name, state, succeeded=(succeeded,))


def _follow_until_ended(command: Sequence[str], describe: Sequence[str], interval: int) -> str:
    """Show a log until the job has ended; the job's last state.

    `stream-logs` does not end for a job that was still running when it began: it tests for the job's end once, before
    its loop (gcloud 528.0.0, googlecloudsdk/api_lib/ai/custom_jobs/client.py, CheckJobComplete).
    """
    logger.info(f"$ {shlex.join(command)}")
    log = subprocess.Popen(command, stdout=_STDERR)
    try:
        while True:
            state = str(run_json(describe)["state"])
            if state.removeprefix("JOB_STATE_") in _FINAL_STATES:
                # gcloud requests entries older than 5 s only, once per interval: leave it time for the last lines.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    log.wait(timeout=LAST_LINES + interval)
                return state
            with contextlib.suppress(subprocess.TimeoutExpired):
                log.wait(timeout=interval)
                time.sleep(interval)  # the log command has ended by itself: continue to query the state
    finally:
        log.terminate()
        log.wait()


@contextlib.contextmanager
def temporary_file(text: str, file_name: str) -> Iterator[Path]:
    """A file with ``text`` and the suffix of ``file_name``, removed afterwards."""
    with tempfile.NamedTemporaryFile("w", suffix=Path(file_name).suffix, delete=False, encoding="utf-8") as file:
        file.write(text)
    try:
        yield Path(file.name)
    finally:
        Path(file.name).unlink()


def say_still_running(cancel: Sequence[str]) -> None:
    """Print that an interrupted command leaves the job running, and how to cancel it."""
    logger.info(
        f"stopped following the log; the job is still running, and is billed. To cancel it: {shlex.join(cancel)}"
    )


def submission(name: str, state: str, *, succeeded: Sequence[str]) -> Submission:
    """The result of a job that has ended.

    Raises:
        StepFailed: its state is not one of ``succeeded``.
    """
    if state not in succeeded:
        raise StepFailed(f"{name} ended as {state}; see its log above")
    logger.info(f"{name}: {state}")
    return Submission(name, state)
