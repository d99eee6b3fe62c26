"""Machine types, accelerators and TPU slices: the table in machines.yaml, typed.

Sources of every entry are named at the top of that file.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from trainyard.common.errors import UserError, nearest
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import Strict

TABLE = Path(__file__).with_name("machines.yaml")

#: When AI Platform Training stopped accepting jobs (https://cloud.google.com/ai-platform/training/docs/deprecations).
AI_PLATFORM_SHUT_DOWN = "31 January 2025"

#: Days after which `make check` asks to compare a table with its source again.
MAX_AGE = 180

#: The form of the names of Google Cloud's regions: https://docs.cloud.google.com/compute/docs/regions-zones.
REGION = re.compile(
    r"(africa|asia|australia|europe|me|northamerica|southamerica|us)-(north|south|central)?(east|west|north|south|central)?[0-9]+"
)

T = TypeVar("T")
#: A value that plain documents hold as text: keys of mappings, dates.
FromText = Annotated[T, Field(strict=False)]


class Source(Strict):
    """What a table was compared with, and on which day; None for a table that does not change any more."""

    url: str
    checked: FromText[datetime.date] | None = None


class Vertex(Strict):
    """How a CustomJob requests a TPU: by accelerator type and count of cores, or by machine type and topology."""

    count: str | None = None
    topology: bool = False


class Tpu(Strict):
    """A generation of TPUs; machines.yaml describes the fields."""

    prefix: str
    counts: str = Field(pattern="^(chips|cores)$")
    gke_accelerator: str | None
    runtime: str | None
    vertex: Vertex | None
    chips: dict[str, int]
    slices: dict[str, str]
    any_multiple_of_4: bool = False
    zones: list[str]
    zones_of_pods: list[str] = Field(default_factory=list)
    grows: bool = False


class GpuModel(Strict):
    """Name the model of a type of GPU.

    Attributes:
        model: in images/gpus.yaml, which has its compute capability.
        arm: whether its machines have Arm CPUs.
    """

    model: str
    arm: bool = False

    @property
    def architecture(self) -> str:
        """Return the architecture of its machines."""
        return "arm64" if self.arm else "amd64"


class Gpu(GpuModel):
    """Describe a type of GPU: on machine types that include it, or attached to an n1 machine."""

    gke_accelerator: str
    machines: dict[str, int] = Field(default_factory=dict)
    n1_cpus: dict[FromText[int], int] = Field(default_factory=dict)
    gpudirect: str | None = None
    vertex: bool = True
    n1_memory: dict[FromText[int], int] = Field(default_factory=dict)
    regions: list[str] = Field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs that a machine can have, sorted."""
        return sorted({*self.machines.values(), *self.n1_cpus})


class GoneGpu(GpuModel):
    """Describe a type of GPU that Compute Engine no longer has; ``since``: the day that its support ended."""

    since: FromText[datetime.date]


class GkeDrivers(Strict):
    """Give the branches of the NVIDIA driver that a version of GKE installs, by the node label's value."""

    default: str
    latest: str


class Tier(Strict):
    """The machines of a scale tier of AI Platform."""

    master: str
    worker: str = ""
    workers: int = 0
    server: str = ""
    servers: int = 0


class Table(Strict):
    """The contents of machines.yaml."""

    sources: dict[str, Source]
    tpus: dict[str, Tpu]
    gpus: dict[str, Gpu]
    gpus_gone: dict[str, GoneGpu]
    gke_drivers: dict[str, GkeDrivers]
    cpus: dict[str, list[int]]
    cpu_series: list[str]
    complete: list[str]
    arm: list[str]
    vertex_regions: list[str]
    ai_platform_regions: list[str]
    ai_platform_tpu_regions: list[str]
    ai_platform_machines: dict[str, str]
    ai_platform_tiers: dict[str, Tier]
    ai_platform_tpus: dict[str, list[int]]
    ai_platform_tpu_runtimes: list[str]


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice: connected chips, and the machines that have them.

    Attributes:
        accelerator_type: its name in the Cloud TPU API, such as ``v5litepod-16``.
        generation: ``v2`` to ``v6e``, ``tpu7x``.
        topology: chips along each axis, such as ``4x4`` or ``2x2x2``.
        hosts: machines (TPU VMs, GKE nodes) of the slice.
        machine_type: of each of them, on GKE and Vertex AI (``cloud-tpu`` for v2 and v3, which have none).
        gke_accelerator: the node label's value, or None where GKE does not have it.
        runtime_version: software version of a TPU VM, or None where the Cloud TPU API does not have it.
        vertex: how a CustomJob requests it; None if it cannot.
    """

    accelerator_type: str
    generation: str
    chips: int
    topology: str
    hosts: int
    chips_per_host: int
    machine_type: str
    gke_accelerator: str | None
    runtime_version: str | None
    zones: tuple[str, ...]
    vertex: Vertex | None

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions of :attr:`zones`, in their order."""
        return tuple(dict.fromkeys(zone.rpartition("-")[0] for zone in self.zones))

    def may_be_in(self, zone: str) -> bool:
        """Whether a zone has it, or may have got it since the table was written."""
        region, _, name = zone.rpartition("-")
        newer = table().tpus[self.generation].grows and REGION.fullmatch(region) and re.fullmatch(r"(ai\d)?[a-z]", name)
        return zone in self.zones or bool(newer)

    @property
    def cores(self) -> int:
        """TensorCores, as Vertex AI and AI Platform count v2 and v3."""
        return self.chips * 2

    @property
    def pod(self) -> bool:
        """Whether it has more than one machine."""
        return self.hosts > 1


@cache
def table() -> Table:
    """machines.yaml, validated."""
    return Table.model_validate(yaml_source.plain(yaml_source.read(TABLE)))


def outdated(today: datetime.date) -> list[str]:
    """A line for each table that was compared with its source more than :data:`MAX_AGE` days before ``today``."""
    return [
        f"{TABLE.name}: {name} was last compared with {source.url} on {source.checked}: compare it, and set the day"
        for name, source in table().sources.items()
        if source.checked and (today - source.checked).days > MAX_AGE
    ]


def sides(topology: str) -> list[int]:
    """Return the sides of a topology: [4, 8] of ``4x8``; empty if it is no topology."""
    return [int(side) for side in topology.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", topology) else []


def machine_of_topology(generation: str, topology: str) -> str | None:
    """The machine type of a generation's slices of a topology; None if there is no such topology.

    Slices of more than 64 chips of v4, v5p and TPU7x may have any three sides that are multiples of 4 and do not
    decrease: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
    """
    tpu = table().tpus[generation]
    if topology in tpu.slices or not tpu.any_multiple_of_4:
        return tpu.slices.get(topology)
    axes = sides(topology)
    fits = len(axes) == 3 and prod(axes) > 64 and axes == sorted(axes) and not any(side % 4 for side in axes)
    return next(machine for machine, chips in tpu.chips.items() if chips == 4) if fits else None


def _slice(generation: str, topology: str, machine_type: str) -> TpuSlice:
    tpu = table().tpus[generation]
    chips = prod(sides(topology))
    # A machine with 8 chips is a complete slice; larger slices consist of machines with 4.
    hosts = max(1, chips // tpu.chips[machine_type])
    number = chips * 2 if tpu.counts == "cores" else chips
    return TpuSlice(
        accelerator_type=f"{tpu.prefix}-{number}",
        generation=generation,
        chips=chips,
        topology=topology,
        hosts=hosts,
        chips_per_host=chips // hosts,
        machine_type=machine_type,
        gke_accelerator=tpu.gke_accelerator,
        runtime_version=tpu.runtime,
        zones=tuple(tpu.zones_of_pods if hosts > 1 and tpu.zones_of_pods else tpu.zones),
        vertex=tpu.vertex,
    )


@cache
def slices() -> dict[str, TpuSlice]:
    """Accelerator type -> slice, from the oldest generation to the newest, each from the smallest to the largest."""
    found = (
        _slice(generation, topology, machine)
        for generation, tpu in table().tpus.items()
        for topology, machine in tpu.slices.items()
    )
    return {one.accelerator_type: one for one in found}


def slice_of(accelerator_type: str, machine_type: str | None = None) -> TpuSlice:
    """The slice of an accelerator type of the Cloud TPU API (``v2-32``, ``v5litepod-16``).

    ``v5e-16`` is accepted too, and a topology instead of the number: ``v5p-4x4x12``, ``v6e-2x4``.

    Args:
        machine_type: another machine of the same generation to make it of, as GKE allows: 2x4 on two machines of 4.
    Raises:
        UserError: there is no such slice; the nearest is named.
    """
    name = re.sub("^v5e-", "v5litepod-", accelerator_type.lower())
    prefix, _, size = name.partition("-")
    generation = next((one for one, tpu in table().tpus.items() if tpu.prefix == prefix), None)
    own_machine = machine_of_topology(generation, size) if generation else None
    known = slices()
    if generation and own_machine:
        found = _slice(generation, size, own_machine)
    elif name in known:
        found = known[name]
    else:
        # v7x-8 is tpu7x-8, the only name without a v.
        same = [one for one in known if one.partition("-")[0] in (prefix, f"tpu{prefix[1:]}")]
        raise UserError(
            f"no TPU slice '{accelerator_type}'{nearest(name, same or known)}; there are: {', '.join(same or known)}"
        )
    if machine_type in (None, found.machine_type):
        return found
    chips = table().tpus[found.generation].chips
    if machine_type not in chips or found.chips % chips[machine_type] or (chips[machine_type] == 8 < found.chips):
        raise UserError(
            f"a {name} ({found.topology}) cannot be made of {machine_type}; it takes {found.machine_type}"
            f"{nearest(str(machine_type), chips)}"
        )
    return _slice(found.generation, found.topology, str(machine_type))


def slice_on(machine_type: str, topology: str) -> TpuSlice | None:
    """The slice of a machine type and a topology (GKE, Vertex AI); None if they cannot be combined."""
    for generation, tpu in table().tpus.items():
        usual = machine_of_topology(generation, topology) if machine_type in tpu.chips else None
        if usual and (machine_type == usual or (tpu.chips[machine_type] == 4 and prod(sides(topology)) % 4 == 0)):
            return _slice(generation, topology, machine_type)
    return None


def generation_of_machine(machine_type: str) -> str | None:
    """The TPU generation of a machine type; None for machine types without TPUs."""
    return next((generation for generation, tpu in table().tpus.items() if machine_type in tpu.chips), None)


def machine_types() -> list[str]:
    """Every machine type of the table, except those of AI Platform."""
    known = table()
    names = [f"{family}-{cpus}" for family, sizes in known.cpus.items() for cpus in sizes]
    names += [machine for gpu in known.gpus.values() for machine in gpu.machines]
    return names + [machine for tpu in known.tpus.values() for machine in tpu.chips]


def architecture_of(machine_type: str) -> str:
    """``arm64`` or ``amd64`` by the series of a machine type; empty for a series that is not in the table."""
    series = machine_type.partition("-")[0]
    if series in table().arm:
        return "arm64"
    return "amd64" if series in {known.partition("-")[0] for known in machine_types()} else ""


@dataclass(frozen=True)
class Hosts:
    """The machines that a container of a job runs on.

    Attributes:
        words: for messages: ``machines of type c4a-standard-4``; empty if unknown.
        architecture: ``arm64`` or ``amd64``; empty if unknown.
    """

    words: str = ""
    architecture: str = ""

    def mismatch(self, platforms: Collection[str]) -> str:
        """What is wrong with an image for these platforms; empty if it runs, or if one of both is unknown."""
        if not self.architecture or not platforms or f"linux/{self.architecture}" in platforms:
            return ""
        return f"{self.words} run linux/{self.architecture}; the image is for {', '.join(platforms)}"

    def remediation(self) -> str:
        """What to do about an image that does not run on them."""
        return f"push an image of a target that has linux/{self.architecture} ('trainyard list')"


#: Machines that nothing is known about.
UNKNOWN_HOSTS = Hosts()

#: The machines of TPU VMs.
TPU_VMS = Hosts("TPU VMs", "amd64")


def hosts_of(machine_type: str) -> Hosts:
    """The machines of a type."""
    return Hosts(f"machines of type {machine_type}", architecture_of(machine_type))


def may_be_newer(machine_type: str) -> bool:
    """Whether a machine type that is not in the table may exist: custom ones, and those of series that still grow."""
    series, _, rest = machine_type.partition("-")
    complete = series in table().complete and not rest.startswith("custom-")
    return bool(machine_type) and not complete and machine_type not in machine_types()


#: Memory of the n1 families in GB for each vCPU: https://docs.cloud.google.com/compute/docs/general-purpose-machines.
_N1_MEMORY = {"n1-standard": 3.75, "n1-highmem": 6.5, "n1-highcpu": 0.9}


def n1_memory(machine_type: str) -> float | None:
    """Memory of an n1 machine type in GB; None for other machine types."""
    family, _, cpus = machine_type.rpartition("-")
    return _N1_MEMORY[family] * int(cpus) if family in _N1_MEMORY and cpus.isdecimal() else None


def gpu_of_machine(machine_type: str) -> tuple[str, int] | None:
    """Type and number of the GPUs that a machine type includes; None if it includes none."""
    for name, gpu in table().gpus.items():
        if machine_type in gpu.machines:
            return name, gpu.machines[machine_type]
    return None


def gpu_model(name: str) -> GpuModel | None:
    """Return the model of a type of GPU, also of those that are gone; None if the table has no such type."""
    return table().gpus.get(name) or table().gpus_gone.get(name)


def machine_for(gpu: str, count: int) -> str:
    """The smallest machine type for ``count`` GPUs of a type; n1 with 8 vCPUs for each GPU if several would do.

    Raises:
        UserError: no machine has that many.
    """
    about = table().gpus[gpu]
    if count not in about.counts:
        raise UserError(f"no machine has {count} {gpu}; there are machines with {', '.join(map(str, about.counts))}")
    for machine, own in about.machines.items():
        if own == count:
            return machine
    fitting = [cpus for cpus in table().cpus["n1-standard"] if cpus <= min(8 * count, about.n1_cpus[count])]
    return f"n1-standard-{fitting[-1]}"
