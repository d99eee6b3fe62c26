"""Model a rehearsal: replicas, and the restart policy of their platform.

Knows no platform and no Docker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainyard_jobs.model.machines import UNKNOWN_HOSTS, Hosts
from trainyard_jobs.model.options import Mount

#: A fictional project's number. CLOUD_ML_PROJECT_ID is the number, not the name:
#: https://cloud.google.com/vertex-ai/docs/training/code-requirements#environment-variables
PROJECT_NUMBER = "123456789012"
PROJECT = "rehearsal-project"
ZONE = "us-central1-b"


@dataclass(frozen=True)
class Replica:
    """One container of the job.

    Attributes:
        name: its name for the user: "chief", "worker-1", "host-3".
        hostname: its host name, by which other replicas reach it; ``aliases`` are further names.
        role: "chief", "worker", "server", "evaluator" or "host".
        ordinal: number in the prefix of its log lines, from 0.
        image: the reference in the job file.
        command, arguments: replace the image's ENTRYPOINT and CMD; None keeps them.
        environment: variables that the platform and the job file set.
        devices: paths of the device nodes that the platform attaches, such as "/dev/accel0".
        slice: the TPU slice it belongs to, whose hosts are preempted together; "" without one.
        group: the Kubernetes Job it belongs to, for its failure policy.
        attempt_variables: variables with the number of the restart (JobSet's annotation restart-attempt).
        mounts: folders other than /gcs: of buckets (Cloud Storage FUSE on GKE), or in memory without a bucket.
        hosts: the machines that the platform runs it on.
        cpus, memory: what the job limits it to, memory in bytes; 0 without a limit.
    """

    name: str
    hostname: str
    role: str
    ordinal: int
    image: str
    command: tuple[str, ...] | None = None
    arguments: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    slice: str = ""
    group: str = ""
    mounts: tuple[Mount, ...] = ()
    attempt_variables: tuple[str, ...] = ()
    hosts: Hosts = UNKNOWN_HOSTS
    cpus: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class End:
    """The end of a replica.

    Attributes:
        status: exit status; 128 + n after signal n.
        cause: "exit" (by itself), "preempted" or "killed" (requested by the user).
        restarts: restarts of this replica alone since the job's last start.
        job_restarts: restarts of the whole job.
        others: name of each other replica -> its exit status, None while it runs.
    """

    replica: Replica
    status: int
    cause: str
    restarts: int
    job_restarts: int
    others: Mapping[str, int | None]


@dataclass(frozen=True)
class Verdict:
    """What the platform does after an :class:`End`.

    ``action`` is "wait" (for the others), "restart" (this replica), "restart-job" (all of them), "succeeded" or
    "failed"; ``why`` describes the platform's rule; ``advice`` says how to avoid a failure.
    """

    action: str
    why: str = ""
    advice: str = ""


class Policy(Protocol):
    """The rules of a platform for the end of a replica."""

    def after(self, end: End) -> Verdict:
        """What the platform does."""


@dataclass(frozen=True)
class Rehearsal:
    """A job, ready to be run in containers.

    Attributes:
        platform: platform and kind of job for messages, such as "Vertex AI CustomJob".
        name: for the report and the containers' names.
        replicas: by ordinal.
        policy: what happens when one of them ends.
        attributes: host name -> attributes on its metadata server (TPU VMs).
        grace: seconds from SIGTERM to SIGKILL when a machine is preempted.
        notes: differences between the rehearsal and the job, for the user.
        metric_file: path to which a tuning trial writes its measurements; "" for other jobs.
        deadline: seconds after which the platform ends the job; 0 without a limit.
    """

    platform: str
    name: str
    replicas: tuple[Replica, ...]
    policy: Policy
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    grace: float = 30.0
    notes: tuple[str, ...] = ()
    metric_file: str = ""
    deadline: int = 0


@dataclass(frozen=True)
class Trial:
    """A trial of a tuning job: its number, from 1, and the values of its parameters as arguments of the trainer."""

    number: int
    parameters: Mapping[str, str]
    metric: str

    def arguments(self) -> list[str]:
        """The parameters as the platform passes them: ``--name=value`` after the job's own arguments."""
        return [f"--{name}={value}" for name, value in self.parameters.items()]


def variables(entries: object) -> dict[str, str]:
    """``[{"name": ..., "value": ...}]`` of a job file as a mapping; entries without a plain value are omitted."""
    found = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and "name" in entry and "valueFrom" not in entry:
            found[str(entry["name"])] = str(entry.get("value") or "")
    return found


def words(value: object) -> tuple[str, ...] | None:
    """A command or argument list of a job file; None to keep the image's."""
    return tuple(str(word) for word in value) if isinstance(value, list) and value else None


def count(value: object, default: int = 0) -> int:
    """A number, which proto3's JSON writes as a number or a string; ``default`` if it is neither."""
    text = str(value if value is not None else default)
    return int(text) if text.isdigit() else default
