"""The options of ``trainyard job``, a row each: :data:`ROWS`.

The command line declares them, a request is made of them, and docs/jobs.md lists them. To add one, add a row, and its
name to ``options`` of the platforms that have it if not all do.

What parses or checks a value raises a :class:`~trainyard.common.errors.UserError` that names the option if it is
invalid.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainyard.common.errors import UserError
from trainyard.oci import secret_scan

#: The worker pools of Vertex AI, in their order (https://cloud.google.com/vertex-ai/docs/training/distributed-training).
POOLS = ("chief", "workers", "servers", "evaluators")

#: The value of ``--pool``: how many machines, their type, and their GPUs as ``--accelerator`` has them.
POOL = r"(?:([1-9]\d*)x)?([a-z][a-z0-9-]*)(?:\+(\w[\w:-]*))?"

#: Levels of ``PLACEMENT`` -> node label, from the largest part of a data center to the smallest:
#: https://docs.cloud.google.com/ai-hypercomputer/docs/workloads/schedule-gke-workloads-tas
_LEVELS = {
    "block": "cloud.google.com/gce-topology-block",
    "subblock": "cloud.google.com/gce-topology-subblock",
    "host": "cloud.google.com/gce-topology-host",
}

#: The name of a bucket: https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = "[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"


@dataclass(frozen=True)
class Disk:
    """A disk of every machine: its type, None for the platform's default, and its size in GiB."""

    type: str | None
    size: int


@dataclass(frozen=True)
class Mount:
    """Mount in the containers a bucket of Cloud Storage or an NFS ``server``, or a ``folder`` of it ("" for all), a
    PersistentVolumeClaim, or a ``folder`` of the machines.
    """

    path: str
    bucket: str = ""
    folder: str = ""
    read_only: bool = False
    server: str = ""
    claim: str = ""

    @property
    def kind(self) -> str:
        """Return what is mounted, for :attr:`trainyard_jobs.platforms.base.Platform.mounts`."""
        return "gs" if self.bucket else "nfs" if self.server else "pvc" if self.claim else "folder"


@dataclass(frozen=True)
class Placement:
    """Machines that are to be close to each other: the node label that they share, and whether they have to."""

    label: str
    required: bool


def disk(text: str) -> Disk:
    """Parse ``200`` or ``hyperdisk-balanced:200``."""
    match = re.fullmatch(r"(?:([a-z][a-z0-9-]*):)?([1-9]\d*)", text)
    if not match:
        raise UserError(f"'--disk {text}' is neither a size in GB (200) nor a type and a size (hyperdisk-balanced:200)")
    return Disk(match[1], int(match[2]))


def mounts(text: str) -> tuple[Mount, ...]:
    """Parse ``gs://bucket/folder:/data:ro nfs://10.0.0.2/share:/out pvc://claim:/work /shared:/shared``, folders.

    Each has a path in the containers.
    """
    found = []
    for word in text.split():
        # The name of a claim: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
        source = rf"(?:(gs|nfs)://({_BUCKET}))?(?:/([^:,]*))?|(pvc)://([a-z0-9][a-z0-9.-]*)"
        match = re.fullmatch(rf"(?:{source}):(/[^:,]+?)/?(:ro)?", word)
        if not match:
            forms = (
                "gs://BUCKET[/FOLDER]:/PATH[:ro], as in gs://bucket/data:/data:ro, nfs://SERVER/FOLDER:/PATH[:ro], "
                "pvc://CLAIM:/PATH[:ro], or /FOLDER:/PATH[:ro] of the machines"
            )
            raise UserError(f"'--mount': {word!r} is not {forms}")
        of = {"bucket" if match[1] == "gs" else "server": match[2]} if match[1] else {"claim": match[5] or ""}
        found.append(Mount(match[6], folder=(match[3] or "").strip("/"), read_only=bool(match[7]), **of))
    paths = [one.path for one in found]
    if "/dev/shm" in paths:
        raise UserError("'--mount': /dev/shm is not for files: it is the shared memory of a container")
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise UserError(f"'--mount': {twice} is given twice")
    return tuple(found)


def labels(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``team=vision,run=1`` into pairs, whose characters each platform checks."""
    return pairs(map(str.strip, text.split(",")), "--labels", key="(?s).+", form="key=value")


#: Forms of a key and of a value, in words: of labels of Google Cloud
#: (https://docs.cloud.google.com/resource-manager/docs/labels-overview#requirements), and of Kubernetes
#: (https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set).
_WORD = r"(?=.{1,63}$)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_GOOGLE_LABEL = r"[a-z][a-z0-9_-]{0,62}", r"[a-z0-9_-]{0,63}", "lowercase letters, digits, - and _"
_KUBERNETES_LABEL = (
    rf"([a-z0-9][-a-z0-9.]*/)?{_WORD}",
    rf"({_WORD})?",
    "letters, digits, -, _ and ., with a letter or digit at both ends",
)


def check_labels(pairs: Iterable[tuple[str, str]], *, kubernetes: bool = False) -> None:
    """Check that Google Cloud, or Kubernetes, takes labels.

    Raises:
        UserError: it does not.
    """
    key_form, value_form, words = _KUBERNETES_LABEL if kubernetes else _GOOGLE_LABEL
    for key, value in pairs:
        if not re.fullmatch(key_form, key) or not re.fullmatch(value_form, value):
            raise UserError(f"'--labels': '{key}={value}' is not key=value of {words}, at most 63 of each")


def folder(text: str) -> str:
    """``gs://bucket/run``, the URL of another storage, or a path where the container has a volume.

    Raises:
        UserError: it is below the container's working folder, which ends with the job, or its bucket has no valid name.
    """
    bucket = re.match(r"gs://([^/]*)", text)
    if bucket and not re.fullmatch(_BUCKET, bucket[1]):
        form = "3 to 222 lowercase letters, digits, '-', '_' and '.', with a letter or digit at both ends"
        raise UserError(f"'--output {text}': '{bucket[1]}' is no bucket's name, which has {form}")
    if not re.match(r"/|[a-z][a-z0-9+.-]*://", text):
        raise UserError(f"'--output {text}' is neither a folder of Cloud Storage nor an absolute path: gs://{text}?")
    return text


def pairs(
    given: Iterable[str], option: str, *, key: str = r"[A-Za-z_]\w*", value: str = "(?s).*", form: str = "NAME=VALUE"
) -> tuple[tuple[str, str], ...]:
    """Return each ``NAME=VALUE`` as a pair; the last of a name counts.

    Args:
        key, value: patterns of the two; ``form``: both in words.
    """
    found = {}
    for word in given:
        name, equals, rest = word.partition("=")
        if not equals or not re.fullmatch(key, name) or not re.fullmatch(value, rest):
            shown = name if option == "--env" else word  # a value may be a credential
            raise UserError(f"'{option}': {shown!r} is not {form}")
        found[name] = rest
    return tuple(found.items())


def variables(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of ``--env``, which everyone who can read the job can read.

    Raises:
        UserError: one of them is invalid, or looks like a credential.
    """
    found = pairs(given, "--env")
    for name, value in found:
        if kinds := secret_scan.in_setting(name, value):
            why = "everyone who can read the job could read it"
            raise UserError(f"'--env {name}=...' looks like {kinds[0]}, and {why}: use '--secret {name}=SOURCE'")
    return found


def whole_cpus(text: str) -> int:
    """Return the value of ``--cpu``, rounded up."""
    return math.ceil(float(text[:-1]) / 1000 if text.endswith("m") else float(text))


def mebibytes(text: str) -> int:
    """Return the value of ``--memory`` in MiB."""
    return int(text[:-2]) * (2**10 if text.endswith("Gi") else 1)


def placement(text: str) -> Placement:
    """Parse ``block`` (required), ``preferred:block``, or another node label instead of the level's name."""
    words = text.split(":")
    level = words[-1]
    label = _LEVELS.get(level) or (level if re.fullmatch(r"[\w.-]+/[\w.-]+", level) else None)
    if len(words) > 2 or (len(words) == 2 and words[0] not in ("preferred", "required")) or not label:
        raise UserError(
            f"'--placement {text}' is not one of {', '.join(_LEVELS)} or a node label, "
            "after 'preferred:' if the machines may also be further apart"
        )
    return Placement(label, words[0] != "preferred")


def seconds(text: str, option: str = "--timeout") -> int:
    """Return ``3600``, ``90m``, ``12h`` or ``2d`` in seconds."""
    match = re.fullmatch(r"(\d+)([smhd]?)", text)
    if not match or not int(match[1]):
        raise UserError(f"'{option} {text}' is not a duration such as 90m, 12h or 2d")
    return int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def words(text: str, option: str = "--args") -> tuple[str, ...]:
    """Return an option's value as a shell would split it."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"'{option} {text}': {str(error).lower()}") from None


@dataclass(frozen=True)
class Option:
    """An option of ``trainyard job``.

    Attributes:
        name: without dashes at its start, such as ``kms-key``.
        help: the line of ``--help``, and its meaning in docs/jobs.md.
        metavar: its value in ``--help``; empty for a flag.
        kind: ``text``, ``flag``, ``number`` (1 or more), or the values to choose from.
        field: attribute of a :class:`~trainyard_jobs.model.request.Request` that it sets; empty if it sets none alone.
        parse: returns the attribute's value for the text that was given.
        empty: the attribute's value if the option was not given.
        more: what docs/jobs.md says besides.
        everywhere: all platforms have it; if not, ``options`` of those that have it contains its name.
        repeated: it may be given several times; ``parse`` takes all values.
        values: returns what the shell completes.
    """

    name: str
    help: str
    metavar: str = ""
    kind: str | tuple[str, ...] = "text"
    field: str = ""
    parse: Callable[[str], Any] | None = None
    empty: Any = None
    more: str = ""
    everywhere: bool = True
    repeated: bool = False
    values: Callable[[], Iterable[str]] | None = None

    @property
    def parameter(self) -> str:
        """Return the name under which the command line gives its value."""
        return self.name.replace("-", "_")

    def value(self, given: Any) -> Any:
        """Return the value of :attr:`field`."""
        if not given:
            return self.empty
        return self.parse(given) if self.parse else given


def _everywhere(name: str, help_: str, metavar: str = "", **more: Any) -> Option:
    """Return an option that sets the attribute of its name, on every platform."""
    return Option(name, help_, metavar, field=name.replace("-", "_"), **more)


def _restricted(name: str, help_: str, metavar: str = "", **more: Any) -> Option:
    """Return an option that sets the attribute of its name, on some platforms."""
    return Option(name, help_, metavar, **{"field": name.replace("-", "_"), "everywhere": False, **more})


def _repeated(name: str, help_: str, metavar: str, parse: Callable[[Iterable[str]], Any]) -> Option:
    """Return a restricted option that may be given several times."""
    return _restricted(name, f"{help_} May be repeated.", metavar, parse=parse, empty=(), repeated=True)


def _named(option: str, form: str, words: str) -> Callable[[str], str]:
    """Return what takes the name of a resource in the form that its API takes, and raises UserError for others."""

    def parse(text: str) -> str:
        if not re.fullmatch(form, text):
            raise UserError(f"'--{option} {text}' is not {words}")
        return text

    return parse


def _each(given: Iterable[str], *, option: str, form: str) -> tuple[str, ...]:
    """Return values that have a form; one that has not is a :class:`UserError`."""
    found = tuple(dict.fromkeys(given))
    if wrong := next((one for one in found if not re.fullmatch(form, one)), None):
        raise UserError(f"'{option}': {wrong!r} has not the form that Kubernetes takes")
    return found


def platforms() -> list[str]:
    """Return the names of the platforms, which are those of their folders, with dashes."""
    folder = Path(__file__).parents[1] / "platforms"
    return sorted(path.parent.name.replace("_", "-") for path in folder.glob("*/write.py"))


def accelerators() -> list[str]:
    """Return TPU slices and GPUs of machines.yaml, without its model, which takes half a second to import."""
    import yaml

    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    slices = [
        f"{tpu['prefix']}-{math.prod(map(int, topology.split('x'))) * (2 if tpu['counts'] == 'cores' else 1)}"
        for tpu in table["tpus"].values()
        for topology in tpu["slices"]
    ]
    return [*dict.fromkeys(slices), *(name.removeprefix("NVIDIA_").removeprefix("TESLA_") for name in table["gpus"])]


#: Every option that says what to write, in the order of ``--help``.
ROWS: tuple[Option, ...] = (
    Option("trainer", "Trainer of the image. Default: the image's.", "NAME"),
    Option("image", "Any image, instead of TARGET's at the registry.", "REFERENCE"),
    Option("pin", "Name the image by its digest, so that a restarted job gets exactly the same one.", kind="flag"),
    Option("args", "Flags of the trainer, split as a shell splits words.", "WORDS"),
    _everywhere(
        "command",
        "Program of the image that replaces its entrypoint.",
        "WORDS",
        parse=partial(words, option="--command"),
        empty=(),
    ),
    Option(
        "preflight",
        "Test all machines before the training, and name the one that is not fit.",
        kind="flag",
        more="[preflight.md](preflight.md).",
    ),
    Option(
        "accelerator",
        "GPUs or a TPU slice: T4, 2xNVIDIA_L4, v5litepod-16, ...",
        "NAME",
        more="The tables below.",
        values=accelerators,
    ),
    _everywhere(
        "machine",
        "Machine type. Default: one that fits the accelerator.",
        "TYPE",
        more="A type with GPUs implies the accelerator.",
    ),
    _everywhere("workers", "Number of machines. Default: 1.", kind="number", empty=1),
    _everywhere("slices", "Number of TPU slices that train together. Default: 1.", kind="number", empty=1),
    _everywhere("spot", "Use Spot VMs, which are cheaper and can be preempted.", kind="flag", empty=False),
    _everywhere("timeout", "End the job after this time: 90m, 12h, 2d.", "DURATION", parse=seconds),
    _everywhere(
        "output",
        "Folder for checkpoints, model and logs.",
        "gs://...",
        parse=folder,
        more="A preempted job resumes from it.",
    ),
    Option("name", "Display name, job ID or object name. Default: TARGET-TRAINER."),
    _everywhere("region", "Region, such as us-central1. Default: one that has the accelerator."),
    _everywhere("zone", "Zone of a TPU VM, such as us-central1-a."),
    _everywhere("project", "Google Cloud project. Default: gcloud's."),
    _everywhere("service-account", "Service account that the job runs as.", "EMAIL"),
    _everywhere("tensorboard", "projects/PROJECT/locations/REGION/tensorboards/ID.", "RESOURCE"),
    _restricted(
        "flex-start",
        "Wait for capacity, which the job then keeps for at most 7 days (DWS).",
        kind="flag",
        empty=False,
    ),
    _restricted(
        "max-wait",
        "With --flex-start or --queued: how long to wait.",
        "DURATION",
        parse=partial(seconds, option="--max-wait"),
    ),
    _restricted(
        "reservation",
        "Reservation of machines to use, or 'any'.",
        "NAME",
        parse=_named("reservation", r"[\w./-]+", "the name of a reservation"),
        more="On Vertex AI: `projects/PROJECT/zones/ZONE/reservations/NAME`.",
    ),
    _restricted("queued", "Wait for a TPU VM in the queue, at most --max-wait.", kind="flag", empty=False),
    _restricted("queue", "LocalQueue of Kueue (GKE), or partition (Slurm).", "NAME"),
    _restricted("priority", "PriorityClass (GKE), or QOS (Slurm).", "NAME"),
    _restricted(
        "placement",
        "With --queue, on GKE: machines in one block, subblock or preferred:block.",
        "LEVEL",
        parse=placement,
        more="Also `host`, or a node label.",
    ),
    _restricted(
        "disk",
        "Disk of each machine, as in hyperdisk-balanced:500.",
        "[TYPE:]GB",
        parse=disk,
        more="The boot disk on Vertex AI and SkyPilot; a volume at `/mnt/disk` on Kubernetes, where the type is a "
        "storage class.",
    ),
    _restricted(
        "mount",
        "Folders of Cloud Storage: 'gs://bucket/data:/data:ro'; of NFS: 'nfs://10.0.0.2/share:/data'; of a "
        "PersistentVolumeClaim: 'pvc://claim:/data'; of the nodes (Slurm): '/shared:/shared'.",
        "LIST",
        field="mounts",
        parse=mounts,
        empty=(),
        more="Vertex AI has every bucket below `/gcs`, and NFS below `/mnt/nfs`.",
    ),
    _repeated("env", "Variable of the containers, no credential.", "NAME=VALUE", variables),
    _repeated(
        "secret", "Variable with a secret as value.", "VARIABLE=SOURCE", partial(pairs, option="--secret", value=".+")
    ),
    _restricted(
        "cpu",
        "CPUs of each container.",
        "NUMBER",
        parse=_named("cpu", r"[1-9]\d*m?|\d+\.\d+", "a number: 8, 0.5, 500m"),
    ),
    _restricted(
        "memory", "Memory of each container.", "SIZE", parse=_named("memory", r"[1-9]\d*[MG]i", "a size: 32Gi, 900Mi")
    ),
    _restricted(
        "namespace",
        "Namespace of Kubernetes.",
        "NAME",
        parse=_named("namespace", r"[a-z0-9-]{1,63}", "a name of a-z, 0-9 and -"),
    ),
    _repeated(
        "node-selector", "Label of the nodes.", "KEY=VALUE", partial(pairs, option="--node-selector", key=r"[\w./-]+")
    ),
    _repeated(
        "pool",
        "Machines of chief, workers, servers or evaluators.",
        "ROLE=MACHINE",
        partial(pairs, option="--pool", key="|".join(POOLS), value=POOL, form="/".join(POOLS) + "=[Nx]MACHINE[+GPUS]"),
    ),
    _repeated(
        "toleration",
        "Taint that the pods tolerate.",
        "KEY[=VALUE][:EFFECT]",
        partial(_each, option="--toleration", form=r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"),
    ),
    _repeated(
        "image-pull-secret",
        "Secret of Kubernetes with the registry's credentials.",
        "NAME",
        partial(_each, option="--image-pull-secret", form=r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"),
    ),
    _restricted(
        "array",
        "Job array (Slurm): a task for each number, which has its own folder below --output.",
        "0-9[%4]",
        parse=_named("array", r"[0-9][0-9,:-]*(%[1-9][0-9]*)?", "an array of sbatch: 0-9, 1,3,5 or 0-99%4"),
    ),
    _restricted(
        "requeue", "Start again after a node failed or the job was preempted (Slurm).", kind="flag", empty=False
    ),
    _restricted("web-access", "Allow a shell in the running containers.", kind="flag", empty=False),
    _restricted("labels", "Labels of the job.", "A=B,...", parse=labels, empty=()),
    _restricted(
        "kms-key",
        "Cloud KMS key that encrypts what the job stores.",
        "RESOURCE",
        # https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/EncryptionSpec
        parse=_named(
            "kms-key",
            r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+",
            "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY",
        ),
    ),
    _restricted("network", "VPC network that the machines are connected to.", "NAME"),
    _restricted("network-attachment", "Network attachment of Private Service Connect.", "NAME"),
    _restricted(
        "persistent-resource",
        "Persistent resource of Vertex AI that runs the job.",
        "ID",
        # https://docs.cloud.google.com/vertex-ai/docs/reference/rest/v1/projects.locations.persistentResources/create
        parse=_named(
            "persistent-resource",
            r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
            "its ID: at most 63 lowercase letters, digits and -, a letter first",
        ),
    ),
    _restricted(
        "container-runtime",
        "What starts containers on a Slurm cluster. Default: pyxis.",
        kind=("pyxis", "apptainer"),
    ),
    Option(
        "tune",
        "Flags that trials vary: 'lr=1e-3:1e-1:log batch-size=32,64 epochs=2:8'.",
        "SEARCH",
        more="A tuning job: [vertex.md](jobs/vertex.md#tuning).",
    ),
    Option("metric", "Metric that the trainer reports. Default: accuracy.", "NAME"),
    Option("goal", "What to do with the metric. Default: maximize.", kind=("maximize", "minimize")),
    Option("trials", "Number of trials. Default: 8.", kind="number"),
    Option("parallel", "Number of trials at a time. Default: 2.", kind="number"),
    Option("algorithm", "GRID_SEARCH or RANDOM_SEARCH. Default: the service's.", "NAME"),
    _everywhere(
        "tpu-version",
        "tpuTfVersion of AI Platform. Default: the framework's.",
        "VERSION",
        more="[ai-platform.md](jobs/ai-platform.md#check-or-write-a-job).",
    ),
)
