"""The Cloud TPU API through gcloud: run a command, describe a TPU VM and its queued resource."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.common.errors import StepFailed
from trainyard.common.gcloud import Finished, error_line
from trainyard_jobs.pods import gcloud_args
from trainyard_jobs.pods.gcloud_args import Pod

#: States that a TPU VM does not leave by itself (Cloud TPU API v2, Node.state:
#: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#State).
PREEMPTED_STATES = ("PREEMPTED", "TERMINATED")
STOPPED_STATES = ("STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")

#: States of a queued resource whose TPU VM was preempted (QueuedResourceState.state:
#: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources#State).
SUSPENDED_STATES = ("SUSPENDING", "SUSPENDED")

#: Errors that a retry does not fix.
PERMANENT_ERRORS = re.compile(
    "PERMISSION_DENIED|Permission denied|UNAUTHENTICATED|INVALID_ARGUMENT|gcloud has no project|gcloud auth login|"
    "Reauthentication|invalid_grant"
)


@dataclass(frozen=True)
class Node:
    """A TPU VM as the API describes it.

    Attributes:
        state: such as CREATING or READY; empty if the API gives none.
        health: HEALTHY, one of UNHEALTHY_..., or empty if the API gives none.
        addresses: internal IP address of every worker, by index; empty before the TPU VM is READY.
        accelerator_type: such as ``v5litepod-16``.
    """

    state: str
    health: str
    addresses: tuple[str, ...]
    accelerator_type: str

    @property
    def ready(self) -> bool:
        """Whether containers can be started on it."""
        return self.state == "READY" and self.health in ("", "HEALTHY") and bool(self.addresses)

    def __str__(self) -> str:
        return self.state if self.health in ("", "HEALTHY") else f"{self.state}, {self.health}"


def error_message(finished: Finished) -> str:
    """The error of a gcloud command in one line; if only the project is missing, what to do about it."""
    line = error_line(finished)
    if line == "{":  # the error of an operation is JSON over several lines
        match = re.search(r'"message": "((?:[^"\\]|\\.)*)"', finished.stderr)
        return str(json.loads(f'"{match[1]}"')) if match else "gcloud printed no error"
    if line.startswith("Error parsing [") or "[core/project]" in line:
        return "gcloud has no project: set '--project', or run 'gcloud config set project <project>'"
    return re.sub(r" This command is authenticated .*", "", line)


def is_not_found(finished: Finished) -> bool:
    """Whether the command failed because the resource does not exist."""
    return "NOT_FOUND" in finished.stderr or "was not found" in finished.stderr


class TpuApi:
    """The Cloud TPU API; what describes a resource raises StepFailed if gcloud fails.

    Tests replace :meth:`call`, which everything else uses.
    """

    def call(self, command: Sequence[str]) -> Finished:
        """Run a command of :mod:`trainyard_jobs.pods.gcloud_args`.

        It runs in its own session: Ctrl-C reaches Trainyard, which has to clean up, and not gcloud.
        """
        return subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )

    def _describe(self, command: Sequence[str], name: str) -> dict[str, Any] | None:
        finished = self.call(command)
        if finished.returncode == 0:
            return dict(json.loads(finished.stdout))
        if is_not_found(finished):
            return None
        raise StepFailed(f"{name}: {error_message(finished)}")

    def node(self, pod: Pod) -> Node | None:
        """Return the TPU VM; None if none has this name."""
        found = self._describe(gcloud_args.describe(pod), pod.name)
        if found is None:
            return None
        endpoints = found.get("networkEndpoints") or []
        return Node(
            state=found.get("state", ""),
            health=found.get("health", "").replace("HEALTH_UNSPECIFIED", ""),
            addresses=tuple(endpoint["ipAddress"] for endpoint in endpoints if endpoint.get("ipAddress")),
            accelerator_type=found.get("acceleratorType", ""),
        )

    def queued_resource(self, pod: Pod) -> tuple[str, str] | None:
        """Return the state of the queued resource and, if it failed, its error; None if none has this name."""
        found = self._describe(gcloud_args.describe(pod, queued=True), pod.name)
        if found is None:
            return None
        state = found.get("state") or {}
        error = ((state.get("failedData") or {}).get("error") or {}).get("message", "")
        return state.get("state", ""), error
