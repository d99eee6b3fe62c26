"""What `make job` was asked for, checked and typed; the platforms' modules write their configurations from it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from scripts import plan
from scripts.cli import UserError, nearest
from scripts.jobs import contents, machines
from scripts.jobs.machines import TpuSlice
from scripts.jobs.tuning import Tuning
from scripts.published.tags import Repository
from scripts.spec import Spec

PLATFORMS = ("vertex", "ai-platform", "gke", "tpu-vm")


@dataclass(frozen=True)
class Gpus:
    """GPUs of one machine: their ``acceleratorType``, and how many."""

    type: str
    count: int


@dataclass(frozen=True)
class Request:
    """A job, whatever its platform.

    Attributes:
        name: display name, job id or object name.
        spec: the image's spec; None for an image that is not ours.
        args: what the container gets: the trainer's name and its flags.
        machine: machine type, or None for the platform's choice.
        workers: machines (or, with a TPU, always 1: a slice counts its own).
        slices: TPU slices of the same kind that train together (GKE).
        output: gs:// folder for checkpoints, model and logs.
        timeout: seconds after which the platform ends the job, or None for the platform's own limit.
        tpu_version: AI Platform's tpuTfVersion.
    """

    platform: str
    name: str
    image: str
    spec: Spec | None = None
    args: tuple[str, ...] = ()
    machine: str | None = None
    gpus: Gpus | None = None
    tpu: TpuSlice | None = None
    workers: int = 1
    slices: int = 1
    spot: bool = False
    service_account: str | None = None
    tensorboard: str | None = None
    output: str | None = None
    region: str | None = None
    zone: str | None = None
    project: str | None = None
    timeout: int | None = None
    tpu_version: str | None = None
    tuning: Tuning | None = None

    @property
    def place(self) -> str:
        """The region: the one given, that of the zone, the first that has the TPU, or us-central1."""
        if self.region:
            return self.region
        if self.zone:
            return self.zone.rpartition("-")[0]
        return self.tpu.regions[0] if self.tpu else "us-central1"

    def with_output_flag(self) -> tuple[str, ...]:
        """The arguments where the platform sets no AIP_* variables: our trainers then take the folder as a flag."""
        given = any(word.partition("=")[0].replace("_", "-") == "--job-dir" for word in self.args)
        return self.args if not self.output or given else (*self.args, f"--job-dir={self.output}")


def accelerator(text: str) -> tuple[Gpus | None, str | None]:
    """GPUs or the name of a TPU slice out of ``T4``, ``2xNVIDIA_L4``, ``nvidia-tesla-a100:8`` or ``v5litepod-16``.

    Raises:
        UserError: it is neither; the nearest is named.
    """
    if re.fullmatch(r"(v\d\w*|tpu\d\w*)-\d+", text.lower()):
        return None, text
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*?)(?::(\d+))?", text)
    if not match or (match[1] and match[3]):
        raise UserError(
            f"ACCELERATOR={text!r} is neither GPUs (T4, 2xNVIDIA_L4, nvidia-a100-80gb:8) nor a TPU slice (v5litepod-16)"
        )
    wanted = match[2].upper().replace("-", "_")
    known = machines.table().gpus
    short = {_short(name): name for name in known}
    name = wanted if wanted in known else short.get(_short(wanted))
    if name is None:
        words = [*short, *machines.slices()]
        raise UserError(f"no accelerator '{match[2]}'{nearest(match[2], words)}; there are: {', '.join(words)}")
    return Gpus(name, int(match[1] or match[3] or 1)), None


def _short(name: str) -> str:
    """``NVIDIA_TESLA_T4`` as ``T4``."""
    return re.sub(r"^(NVIDIA_)?(TESLA_)?", "", name)


def seconds(text: str, variable: str = "TIMEOUT") -> int:
    """``3600``, ``90m``, ``12h`` or ``2d`` in seconds.

    Raises:
        UserError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)([smhd]?)", text)
    if not match or not int(match[1]):
        raise UserError(f"{variable}={text!r} is not a duration such as 90m, 12h or 2d")
    return int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def words(text: str, variable: str = "ARGS") -> tuple[str, ...]:
    """A make variable as a shell would split it.

    Raises:
        UserError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{variable}={text!r}: {str(error).lower()}") from None


def image_of(spec: Spec | None, image: str | None, address: str | None) -> str:
    """The image's reference: the one given, or that of the target's version at a registry, or this host's own."""
    if image:
        return image
    if spec is None:
        raise UserError(
            "no image: give TARGET=xla REGISTRY=us-central1-docker.pkg.dev/<project>/<repository>, or IMAGE="
        )
    if address:
        # An image on a base that was never looked into has no version yet: its tag is the target's alone.
        version = "" if spec.framework.version == "unlocked" else f"-{spec.framework.version}"
        return f"{address}/{plan.NAME}:{spec.target}{version}"
    return f"{plan.NAME}:{spec.target}"


def pinned(reference: str) -> str:
    """The image by its digest, so that a restarted job gets the very same one.

    Raises:
        UserError: its registry has none of that name. StepFailed: it does not answer.
    """
    host, path, tag = contents.parts(reference)
    if not host:
        raise UserError(f"PIN=1: {reference} names no registry: give REGISTRY=")
    found = Repository(f"{host}/{path}").manifest(tag)
    if found is None:
        raise UserError(f"PIN=1: {host} has no {path}:{tag}: run 'make push' first")
    return f"{host}/{path}@{found.digest}"


def trainer_of(spec: Spec | None, trainer: str | None) -> tuple[str, ...]:
    """The first of the container's arguments: a trainer of the image.

    Raises:
        UserError: the image has none of that name.
    """
    if spec is None:
        return (trainer,) if trainer else ()
    known = spec.trainer_commands()
    name = trainer or spec.trainers.default
    if name not in known:
        raise UserError(f"{spec.target} has no trainer '{name}'{nearest(name, known)}; it has: {', '.join(known)}")
    return (name,)
