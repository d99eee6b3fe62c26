"""Read the worker pools of a Vertex AI job, and make rules about such jobs and their findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import VERTEX, Evidence
from trainyard_jobs.schema.kubernetes_defaults import mapping, sequence

#: What Google's SDK requires of worker pools, as a source of rules.
WORKER_SPECS = (
    "https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/utils/worker_spec_utils.py"
)


def vertex_rule(
    source: str, severity: Severity = Severity.REFUSE
) -> Callable[[Callable[[Evidence], Iterator[Finding]]], Rule[Evidence]]:
    """Make a function a rule about CustomJobs and tuning jobs; see :func:`trainyard.common.rule_engine.rule`."""
    return rule(*VERTEX, severity=severity, source=source)


def refused(at: str, what: str, remediation: str, severity: Severity = Severity.REFUSE) -> Finding:
    """Return a finding about what the service does not take."""
    return Finding(at, what, "the service refuses the job", remediation, severity)


def parse_count(value: object) -> int:
    """Return a count, which may be text; -1 if it is none, which the schema rules report."""
    return int(str(value)) if re.fullmatch(r"\d{1,20}", str(value)) else -1


@dataclass(frozen=True)
class Pool:
    """Read a worker pool; ``number`` is its position."""

    job: Evidence
    number: int
    spec: dict[str, Any]

    def at(self, *location: int | str) -> str:
        """Return ``file:line`` of a value of the pool."""
        return self.job.at("workerPoolSpecs", self.number, *location)

    @property
    def machine(self) -> dict[str, Any]:
        """Return the MachineSpec; empty if there is none."""
        return mapping(self.spec, "machineSpec")

    @property
    def machine_type(self) -> str:
        return str(self.machine.get("machineType") or "")

    @property
    def accelerator(self) -> str:
        return str(self.machine.get("acceleratorType") or "")

    @property
    def count(self) -> int:
        """Return the number of accelerators, or of cores of a TPU."""
        return parse_count(self.machine.get("acceleratorCount") or 0)

    @property
    def generation(self) -> str | None:
        """Return the generation of the TPU; None without one."""
        for generation, tpu in machines.table().tpus.items():
            if tpu.vertex and tpu.vertex.count and tpu.vertex.count == self.accelerator:
                return generation
        return None if self.machine_type == "cloud-tpu" else machines.generation_of_machine(self.machine_type)

    @property
    def slice(self) -> machines.TpuSlice | None:
        """Return the TPU slice; None without one."""
        if self.machine_type != "cloud-tpu":
            return machines.slice_on(self.machine_type, str(self.machine.get("tpuTopology")))
        for tpu in machines.slices().values():
            if tpu.vertex and tpu.vertex.count == self.machine.get("acceleratorType") and tpu.cores == self.count:
                return tpu
        return None


def pools(job: Evidence) -> Iterator[Pool]:
    """Yield every pool that is not empty; an empty one only keeps a position."""
    for number, pool in enumerate(sequence(job.spec, "workerPoolSpecs")):
        if isinstance(pool, dict) and pool:
            yield Pool(job, number, pool)


def tpu_pools(job: Evidence) -> Iterator[Pool]:
    """Return the pools that ask for a TPU."""
    return (pool for pool in pools(job) if pool.generation)
