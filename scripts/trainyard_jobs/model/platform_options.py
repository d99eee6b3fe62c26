"""Options of `make job` that only some platforms have: capacity, queues, storage, labels, networks, encryption."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainyard.console import UserError

#: Attribute of a :class:`~trainyard_jobs.model.request.Request` -> the option that sets it.
OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "flex_start",
        "max_wait",
        "reservation",
        "queue",
        "priority",
        "placement",
        "disk",
        "mounts",
        "labels",
        "kms_key",
        "network",
        "network_attachment",
        "persistent_resource",
        "container_runtime",
    )
} | {"mounts": "--mount"}

#: Levels of ``PLACEMENT`` -> node label, from the largest part of a data center to the smallest:
#: https://docs.cloud.google.com/ai-hypercomputer/docs/workloads/schedule-gke-workloads-tas
_LEVELS = {
    "block": "cloud.google.com/gce-topology-block",
    "subblock": "cloud.google.com/gce-topology-subblock",
    "host": "cloud.google.com/gce-topology-host",
}


#: Option -> form of the name that it takes, and the form in words: no platform takes others. Of keys:
#: https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/EncryptionSpec; of persistent resources:
#: https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.persistentResources/create
_NAMES = {
    "--kms-key": (
        r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+",
        "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY",
    ),
    "--reservation": (r"[\w./-]+", "the name of a reservation"),
    "--persistent-resource": (
        r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        "its ID: at most 63 lowercase letters, digits and -, a letter first",
    ),
}


@dataclass(frozen=True)
class Disk:
    """A disk of every machine: its type, None for the platform's default, and its size in GiB."""

    type: str | None
    size: int


@dataclass(frozen=True)
class Mount:
    """A bucket of Cloud Storage, or a folder of it ("" for all of it), as a folder of the containers."""

    bucket: str
    folder: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Placement:
    """Machines that are to be close to each other: the node label that they share, and whether they have to."""

    label: str
    required: bool


def disk(text: str) -> Disk:
    """``200`` or ``hyperdisk-balanced:200``.

    Raises:
        UserError: it is neither.
    """
    match = re.fullmatch(r"(?:([a-z][a-z0-9-]*):)?([1-9]\d*)", text)
    if not match:
        raise UserError(f"'--disk {text}' is neither a size in GB (200) nor a type and a size (hyperdisk-balanced:200)")
    return Disk(match[1], int(match[2]))


def mounts(text: str) -> tuple[Mount, ...]:
    """``gs://bucket/folder:/data:ro gs://other:/out``: folders of Cloud Storage, each with a path in the containers.

    Raises:
        UserError: one of them is invalid, or two have one path.
    """
    found = []
    for word in text.split():
        # Names of buckets: https://cloud.google.com/storage/docs/buckets#naming
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/([^:]*))?:(/[^:]+?)/?(:ro)?", word)
        if not match:
            raise UserError(
                f"'--mount': {word!r} is not gs://BUCKET[/FOLDER]:/PATH[:ro], as in gs://bucket/data:/data:ro"
            )
        found.append(Mount(match[1], (match[2] or "").strip("/"), match[3], bool(match[4])))
    paths = [one.path for one in found]
    if "/dev/shm" in paths:
        raise UserError("'--mount': /dev/shm is not for files: it is the shared memory of a container")
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise UserError(f"'--mount': {twice} is given twice")
    return tuple(found)


def labels(text: str) -> tuple[tuple[str, str], ...]:
    """``team=vision,run=1`` as pairs that every platform accepts.

    Google Cloud's labels (https://docs.cloud.google.com/resource-manager/docs/labels-overview#requirements) that are
    valid in Kubernetes too (https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set).

    Raises:
        UserError: one of them is invalid.
    """
    found = {}
    for word in text.split(","):
        key, equals, value = word.strip().partition("=")
        ends = r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", r"([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?"
        if not equals or not all(re.fullmatch(valid, one) for valid, one in zip(ends, (key, value), strict=True)):
            form = "key=value of lowercase letters, digits, - and _, at most 63 of each"
            raise UserError(f"'--labels': {word.strip()!r} is not {form}")
        found[key] = value
    return tuple(found.items())


def name(option: str, text: str | None) -> str | None:
    """The name of a resource, as the API takes it; None if there is none.

    Raises:
        UserError: the API refuses such a name.
    """
    form, words = _NAMES[option]
    if text and not re.fullmatch(form, text):
        raise UserError(f"'{option} {text}' is not {words}")
    return text


def placement(text: str) -> Placement:
    """``block`` (required), ``preferred:block``, or another node label instead of the level's name.

    Raises:
        UserError: it is neither a level nor a label.
    """
    words = text.split(":")
    level = words[-1]
    label = _LEVELS.get(level) or (level if re.fullmatch(r"[\w.-]+/[\w.-]+", level) else None)
    if len(words) > 2 or (len(words) == 2 and words[0] not in ("preferred", "required")) or not label:
        raise UserError(
            f"'--placement {text}' is not one of {', '.join(_LEVELS)} or a node label, "
            "after 'preferred:' if the machines may also be further apart"
        )
    return Placement(label, words[0] != "preferred")
