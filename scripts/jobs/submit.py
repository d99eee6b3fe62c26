"""Submitting a job with the user's own gcloud or kubectl, and following its log until it ends."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.cli import StepFailed, UserError, say
from scripts.jobs import ai_platform, gke, vertex
from scripts.jobs.request import Request

#: Seconds between two looks at what a platform does, unless POLL says otherwise: gcloud's own 60 leave people waiting.
INTERVAL = 10

#: Seconds after a job's end in which its last lines arrive: gcloud leaves 5 s for entries that come late.
LAST_LINES = 8

#: The descriptor of stderr, for children.
STDERR = 2

_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")

_INSTALL = {
    "gcloud": "cloud.google.com/sdk/docs/install",
    "kubectl": "kubernetes.io/docs/tasks/tools",
}


def _need(program: str) -> None:
    if not shutil.which(program):
        raise UserError(f"{program} is not installed: {_INSTALL.get(program, program)}")


def _ask(command: Sequence[str]) -> Any:
    """What a command prints, as JSON.

    Raises:
        UserError: the program is not installed. StepFailed: it failed; its own words end the line.
    """
    _need(command[0])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        said = next((line for line in lines if line.startswith(("ERROR:", "error:", "Error"))), lines[-1])
        raise StepFailed(f"'{shlex.join(command[:4])}' failed: {said}")
    return json.loads(done.stdout)


def _follow(command: Sequence[str]) -> int:
    """Let a command's output through, to people: stdout is for the result. Its status."""
    say(f"$ {shlex.join(command)}")
    return subprocess.run(command, stdout=STDERR, check=False).returncode


def _follow_until_ended(command: Sequence[str], describe: Sequence[str], interval: int) -> str:
    """Let a log through until the job has ended; its last state.

    `stream-logs` itself never ends for a job that was not over when it began: it looks at the job's end once, before
    its loop (gcloud 528, api_lib/ai/custom_jobs/client.py, CheckJobComplete).
    """
    say(f"$ {shlex.join(command)}")
    log = subprocess.Popen(command, stdout=STDERR)
    try:
        while True:
            state = str(_ask(describe)["state"])
            if state.removeprefix("JOB_STATE_") in _ENDED:
                # Its last lines: gcloud asks for what is older than 5 s only, once an interval.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    log.wait(timeout=LAST_LINES + interval)
                return state
            with contextlib.suppress(subprocess.TimeoutExpired):
                log.wait(timeout=interval)
                time.sleep(interval)  # the log has ended by itself: go on looking at the state
    finally:
        log.terminate()
        log.wait()


def _file(text: str, suffix: str) -> Path:
    with tempfile.NamedTemporaryFile("w", suffix=suffix, delete=False, encoding="utf-8") as file:
        file.write(text)
    return Path(file.name)


def submit(request: Request, text: str, *, interval: int = INTERVAL) -> dict[str, Any]:
    """Submit a configuration and follow it to its end.

    Args:
        text: what `make job` prints.
        interval: seconds between two looks.
    Returns:
        ``name`` (the platform's), ``state``.
    Raises:
        UserError: gcloud or kubectl is missing. StepFailed: it was refused, or the job failed.
    """
    path = _file(text, ".sh" if request.platform == "tpu-vm" else ".yaml")
    try:
        return _PLATFORMS[request.platform](request, path, interval)
    finally:
        path.unlink()


def _vertex(request: Request, path: Path, interval: int) -> dict[str, Any]:
    tuned = request.tuning is not None
    name = str(_ask([*vertex.submit_command(request, str(path)), "--format=json"])["name"])
    say(f"submitted as {name}")
    number = name.rpartition("/")[2]
    at = [f"--region={request.place}", *([f"--project={request.project}"] if request.project else [])]
    group = ["gcloud", "ai", vertex.group(tuned)]
    log = [*group, "stream-logs", number, *at, f"--polling-interval={interval}"]
    try:
        state = _follow_until_ended(log, [*group, "describe", number, *at, "--format=json"], interval)
    except KeyboardInterrupt:
        _goes_on([*group, "cancel", number, *at])
        raise
    return _ended(name, state, succeeded="JOB_STATE_SUCCEEDED")


def _ai_platform(request: Request, path: Path, interval: int) -> dict[str, Any]:
    """The service is shut down; a private endpoint or a rehearsal's may still be there."""
    command = ai_platform.submit_command(request, str(path))
    job = ai_platform.job_id(request.name)
    _ask([*command, "--format=json"])
    at = [f"--project={request.project}"] if request.project else []
    group = ["gcloud", "ai-platform", "jobs"]
    log = [*group, "stream-logs", job, *at, f"--polling-interval={interval}"]
    try:
        state = _follow_until_ended(log, [*group, "describe", job, *at, "--format=json"], interval)
    except KeyboardInterrupt:
        _goes_on([*group, "cancel", job, *at])
        raise
    return _ended(job, state, succeeded="SUCCEEDED")


def _gke(request: Request, path: Path, interval: int) -> dict[str, Any]:
    _need("kubectl")
    if _follow(gke.submit_command(request, str(path))):
        raise StepFailed("kubectl did not create it; see above (NAME= gives it another name)")
    what = gke.kind(request)
    try:
        state = _follow_pods(what, *gke.pods(request), interval)
    except KeyboardInterrupt:
        _goes_on(["kubectl", "delete", what])
        raise
    return _ended(what, state, succeeded=("Complete", "Completed"))


def _follow_pods(what: str, labels: str, count: int, interval: int) -> str:
    """Let the logs of all pods through until the job has ended, also those of pods that replace others.

    Returns:
        the condition that ended it: Complete or Failed of a Job, Completed or Failed of a JobSet.
    """
    followed: set[str] = set()
    told = ""
    while True:
        for one in _ask(["kubectl", "get", what, "--output=json"]).get("status", {}).get("conditions") or []:
            if one["type"] in ("Complete", "Completed", "Failed") and one["status"] == "True":
                return str(one["type"])
        pods = _ask(["kubectl", "get", "pods", f"--selector={labels}", "--output=json"])["items"]
        started = {_uid(pod) for pod in pods if pod.get("status", {}).get("phase", "Pending") != "Pending"}
        if len(started) >= count and started - followed:
            followed |= started
            _follow(["kubectl", "logs", "--follow", f"--selector={labels}", "--prefix", "--tail=-1",
                     f"--max-log-requests={len(pods)}"])  # fmt: skip
            continue
        words = f"{len(started)} of {count} pods have started{_waiting(pods)}"
        if words != told and not started & followed:
            say(told := words)
        time.sleep(interval)


def _uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("uid") or pod["metadata"]["name"])


def _waiting(pods: list[dict[str, Any]]) -> str:
    """Why pods have not started, in Kubernetes' words: `` (ImagePullBackOff)``; empty if it does not say."""
    reasons: list[str] = []
    for pod in pods:
        status = pod.get("status", {})
        reasons += [one["reason"] for one in status.get("conditions") or [] if one.get("reason") == "Unschedulable"]
        states = [one.get("state", {}).get("waiting", {}) for one in status.get("containerStatuses") or []]
        reasons += [one["reason"] for one in states if one.get("reason") not in (None, "ContainerCreating")]
    return f" ({', '.join(dict.fromkeys(reasons))})" if reasons else ""


def _tpu_vm(request: Request, path: Path, _interval: int) -> dict[str, Any]:
    _need("gcloud")
    status = _follow(["bash", str(path)])
    if status:
        raise StepFailed(f"the TPU VM's script ended with status {status}; see above")
    return {"name": gke.object_name(request.name), "state": "SUCCEEDED"}


def _goes_on(cancel: list[str]) -> None:
    say(f"no longer followed; the job itself goes on, and costs money. To end it: {shlex.join(cancel)}")


def _ended(name: str, state: str, *, succeeded: str | tuple[str, ...]) -> dict[str, Any]:
    if state not in succeeded:
        raise StepFailed(f"{name} ended as {state}; its log stands above")
    say(f"{name}: {state}")
    return {"name": name, "state": state}


_PLATFORMS = {"vertex": _vertex, "ai-platform": _ai_platform, "gke": _gke, "tpu-vm": _tpu_vm}
