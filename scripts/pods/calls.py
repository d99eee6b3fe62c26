"""Running gcloud, and what its answers say about a pod."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.cli import StepFailed, UserError
from scripts.pods import gcloud
from scripts.pods.gcloud import Pod
from scripts.repository import last_words

Finished = subprocess.CompletedProcess[str]

#: States that a TPU VM does not leave by itself (tpu.v2 discovery document: Node.state).
TAKEN = ("PREEMPTED", "TERMINATED")
HALTED = ("STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")

#: States of a queued resource whose TPU VM was taken (tpu.v2 discovery document: QueuedResourceState.state).
SUSPENDED = ("SUSPENDING", "SUSPENDED")


@dataclass(frozen=True)
class Node:
    """A TPU VM as the API tells of it.

    Attributes:
        state: such as CREATING or READY; empty if the API names none.
        health: HEALTHY, one of UNHEALTHY_..., or empty if the API names none.
        addresses: internal address of every worker, in their order; empty before it is READY.
    """

    state: str
    health: str
    addresses: tuple[str, ...]
    accelerator_type: str
    version: str

    @property
    def ready(self) -> bool:
        """Whether containers can be started on it."""
        return self.state == "READY" and self.health in ("", "HEALTHY") and bool(self.addresses)

    def __str__(self) -> str:
        return self.state if self.health in ("", "HEALTHY") else f"{self.state}, {self.health}"


def need_gcloud() -> None:
    """
    Raises:
        UserError: gcloud is not installed.
    """
    if not shutil.which("gcloud"):
        raise UserError("gcloud is not installed: cloud.google.com/sdk/docs/install")


def call(command: Sequence[str], *, timeout: float | None = None) -> Finished:
    """Run a command of :mod:`scripts.pods.gcloud`, away from the terminal's Ctrl-C, which is ours to handle."""
    return subprocess.run(
        list(command),
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        start_new_session=True,
        check=False,
    )


def words(done: Finished) -> str:
    """The line of gcloud's that says what went wrong; where it only says that it lacks the project, what to do."""
    line = last_words(done)
    if line == "{":  # an operation's error, as JSON over several lines
        match = re.search(r'"message": "((?:[^"\\]|\\.)*)"', done.stderr)
        return str(json.loads(f'"{match[1]}"')) if match else "gcloud gave no reason"
    if line.startswith("Error parsing [") or "[core/project]" in line:
        return "gcloud knows no project: give PROJECT=, or run 'gcloud config set project <project>'"
    return re.sub(r" This command is authenticated .*", "", line)


#: What no second try mends.
HOPELESS = re.compile(
    "PERMISSION_DENIED|Permission denied|UNAUTHENTICATED|INVALID_ARGUMENT|gcloud knows no project|gcloud auth login|"
    "Reauthentication|invalid_grant"
)


def not_there(done: Finished) -> bool:
    """Whether gcloud says that there is no such thing."""
    return "NOT_FOUND" in done.stderr or "was not found" in done.stderr


def _read(command: Sequence[str], name: str) -> dict[str, Any] | None:
    done = call(command)
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    if not_there(done):
        return None
    raise StepFailed(f"{name}: {words(done)}")


def node(pod: Pod) -> Node | None:
    """The TPU VM, or None if there is none of that name.

    Raises:
        StepFailed: gcloud could not say; one line.
    """
    found = _read(gcloud.describe(pod), pod.name)
    if found is None:
        return None
    endpoints = found.get("networkEndpoints") or []
    return Node(
        state=found.get("state", ""),
        health=found.get("health", "").replace("HEALTH_UNSPECIFIED", ""),
        addresses=tuple(endpoint["ipAddress"] for endpoint in endpoints if endpoint.get("ipAddress")),
        accelerator_type=found.get("acceleratorType", ""),
        version=found.get("runtimeVersion", ""),
    )


def queued(pod: Pod) -> tuple[str, str] | None:
    """State of the queued resource and, if that failed, why; None if there is none of that name.

    Raises:
        StepFailed: gcloud could not say; one line.
    """
    found = _read(gcloud.describe_queued(pod), pod.name)
    if found is None:
        return None
    state = found.get("state") or {}
    why = ((state.get("failedData") or {}).get("error") or {}).get("message", "")
    return state.get("state", ""), why
