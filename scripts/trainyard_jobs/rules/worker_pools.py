"""Access to the worker pools of a Vertex AI job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import Evidence


def pools(job: Evidence) -> Iterator[tuple[int, dict[str, Any]]]:
    """Position and content of every pool that is not empty; an empty one only keeps a position."""
    found = job.spec.get("workerPoolSpecs")
    for number, pool in enumerate(found if isinstance(found, list) else []):
        if isinstance(pool, dict) and pool:
            yield number, pool


def machine_of(pool: dict[str, Any]) -> dict[str, Any]:
    """The MachineSpec of a pool; empty if there is none."""
    found = pool.get("machineSpec")
    return found if isinstance(found, dict) else {}


def parse_count(value: object) -> int:
    """A count, which may be text; -1 if it is none, which the schema rules report."""
    return int(str(value)) if re.fullmatch(r"\d+", str(value)) else -1


def tpu_pools(job: Evidence) -> Iterator[tuple[int, dict[str, Any]]]:
    """Position and content of the pools that ask for a TPU."""
    for number, pool in pools(job):
        machine = machine_of(pool)
        if generation_of(machine):
            yield number, pool


def generation_of(machine: dict[str, Any]) -> str | None:
    """TPU generation of a MachineSpec, or None."""
    for generation, tpu in machines.table().tpus.items():
        if tpu.vertex and tpu.vertex.count and tpu.vertex.count == machine.get("acceleratorType"):
            return generation
    name = str(machine.get("machineType", ""))
    return None if name == "cloud-tpu" else machines.generation_of_machine(name)
