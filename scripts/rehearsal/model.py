"""What a rehearsal is made of: replicas, the TPU beside them, and the rules of the platform that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

#: A fictional project's number, as CLOUD_ML_PROJECT_ID and the metadata server give it (S11: the number, not the name).
PROJECT_NUMBER = "123456789012"
PROJECT = "rehearsal-project"
ZONE = "us-central1-b"


@dataclass(frozen=True)
class Mount:
    """A folder of a replica beside /gcs: a bucket (GKE's Cloud Storage FUSE volumes), or memory when it is empty."""

    path: str
    bucket: str = ""


@dataclass(frozen=True)
class Replica:
    """One container of the job.

    Attributes:
        name: as users name it: "chief", "worker-1", "host-3".
        hostname: its own name, and what the others reach it by; ``aliases`` are further names.
        role: "chief", "worker", "server", "evaluator" or "host".
        ordinal: number of its log lines, 0 and up.
        image: the reference in the job file.
        command, arguments: what replaces the image's ENTRYPOINT and CMD; None keeps them.
        environment: what the platform and the job file set.
        devices: paths of the device nodes the platform attaches, such as "/dev/accel0".
        slice: the TPU slice it belongs to; its hosts come and go together. "" without one.
        group: the Kubernetes Job it belongs to, for its failure policy.
        attempt_variables: variables that hold the number of the restart (JobSet's annotation restart-attempt).
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


@dataclass(frozen=True)
class TpuNode:
    """A TPU node beside the job, as the Cloud TPU API shows it: AI Platform's `cloud_tpu` worker."""

    name: str
    accelerator_type: str
    endpoints: tuple[str, ...]
    project: str = PROJECT
    zone: str = ZONE


@dataclass(frozen=True)
class End:
    """A replica's end.

    Attributes:
        replica: which.
        status: exit status; 128 + n after signal n.
        cause: "exit" (by itself), "preempted" or "killed" (asked for by the user).
        restarts: how often this replica was restarted by itself since the job's last start.
        job_restarts: how often the whole job was restarted.
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
    "failed"; ``why`` is the platform's rule in words; ``advice`` what the user can do about a failure.
    """

    action: str
    why: str = ""
    advice: str = ""


class Policy(Protocol):
    """A platform's rules for the end of a replica."""

    def after(self, end: End) -> Verdict:
        """What the platform does."""


@dataclass(frozen=True)
class Rehearsal:
    """A job, ready to be run in containers.

    Attributes:
        platform: in words, such as "Vertex AI CustomJob".
        name: for the report and the containers' names.
        replicas: by ordinal.
        policy: what happens when one of them ends.
        node: the TPU node beside them.
        attributes: hostname -> attributes of its metadata server (TPU VMs).
        grace: seconds from SIGTERM to SIGKILL when a machine is taken away.
        notes: what this rehearsal cannot imitate of the job, for the user.
        metric_file: where a tuning trial writes its measurements; "" outside tuning.
    """

    platform: str
    name: str
    replicas: tuple[Replica, ...]
    policy: Policy
    node: TpuNode | None = None
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    grace: float = 30.0
    notes: tuple[str, ...] = ()
    metric_file: str = ""


@dataclass(frozen=True)
class Trial:
    """One trial of a tuning job: its number, from 1, and the values of its parameters as the trainer gets them."""

    number: int
    parameters: Mapping[str, str]
    metric: str

    def arguments(self) -> list[str]:
        """The parameters as the platform passes them: ``--name=value`` after the job's own arguments."""
        return [f"--{name}={value}" for name, value in self.parameters.items()]


def variables(entries: object) -> dict[str, str]:
    """``[{"name": ..., "value": ...}]`` of a job file as a mapping; entries without a plain value are left out."""
    found = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and "name" in entry and "valueFrom" not in entry:
            found[str(entry["name"])] = str(entry.get("value") or "")
    return found


def words(value: object) -> tuple[str, ...] | None:
    """A command or argument list of a job file; None when the image's own stays."""
    return tuple(str(word) for word in value) if isinstance(value, list) and value else None


def count(value: object, default: int = 0) -> int:
    """A count, which Google's JSON writes as a number or a string."""
    text = str(value if value is not None else default)
    return int(text) if text.isdigit() else default
