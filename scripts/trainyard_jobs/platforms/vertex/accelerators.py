"""Rules about machine types, GPUs and TPUs of Vertex AI, and the regions that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import VERTEX, Evidence, unknown
from trainyard_jobs.rules.worker_pools import machine_of, parse_count, pools, tpu_pools

#: An acceleratorType that the API may get after this was written; its last TPU of now is TPU_V5_LITEPOD.
_NEWER_TPU = re.compile(r"TPU_V([6-9]|[1-9][0-9])\w*")


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source="https://cloud.google.com/vertex-ai/docs/training/configure-compute#machine-types",
)
def machine_types_exist(job: Evidence) -> Iterator[Finding]:
    """Machine types exist."""
    for number, pool in pools(job):
        name = str(machine_of(pool).get("machineType") or "")
        if name and name not in machines.machine_types():
            family = name.partition("-")[0]
            near = [one for one in machines.machine_types() if one.partition("-")[0] == family]
            yield Finding(
                job.at("workerPoolSpecs", number, "machineSpec", "machineType"),
                f"unknown machine type '{name}'{unknown(name, near) if near else ''}",
                "the service refuses machine types that it does not have, after it accepted the job",
                "correct it; if it is new, add it to scripts/trainyard_jobs/model/machines.yaml",
                severity=Severity.NOTE if machines.may_be_newer(name) else Severity.REFUSE,
            )


@rule(
    *VERTEX, severity=Severity.REFUSE, source="https://cloud.google.com/vertex-ai/docs/training/configure-compute#gpus"
)
def gpus_match_machines(job: Evidence) -> Iterator[Finding]:
    """The machine type supports the type and number of GPUs."""
    for number, pool in pools(job):
        yield from gpu_findings(
            job.at("workerPoolSpecs", number, "machineSpec"),
            str(machine_of(pool).get("machineType", "")),
            str(machine_of(pool).get("acceleratorType") or ""),
            parse_count(machine_of(pool).get("acceleratorCount") or 0),
            must_name_own_gpus=True,
        )


def gpu_findings(where: str, machine: str, kind: str, count: int, *, must_name_own_gpus: bool) -> Iterator[Finding]:
    """Findings about ``count`` GPUs of type ``kind`` on a machine type.

    Args:
        must_name_own_gpus: whether a job must also name the GPUs that a machine type always has.
    """
    why = "the job is refused, or waits for a machine that does not exist"
    known = machines.table()
    own = machines.gpu_of_machine(machine)
    if kind in known.gpus_gone:
        yield Finding(
            where, f"{kind} is not available since {known.gpus_gone[kind]}", why, "use NVIDIA_TESLA_T4 or NVIDIA_L4"
        )
    elif kind.startswith("NVIDIA") and count < 1:
        yield Finding(where, f"{kind} without acceleratorCount", "the machine gets no GPU", "add acceleratorCount: 1")
    elif own and must_name_own_gpus and (kind, count) != own:
        what = f"{machine} has {own[1]} {own[0]}; the job asks for {f'{count} {kind}' if kind else 'none'}"
        yield Finding(where, what, why, f"write acceleratorType: {own[0]}, acceleratorCount: {own[1]}")
    elif kind in known.gpus and not own and not machines.may_be_newer(machine):
        gpu = known.gpus[kind]
        family, _, cpus = machine.rpartition("-")
        if gpu.machines:
            fitting = [one for one, number in gpu.machines.items() if number == count] or list(gpu.machines)
            yield Finding(
                where,
                f"{kind} on {machine or 'no machine type'}: it is part of other machine types",
                why,
                f"use {' or '.join(fitting)}",
            )
        elif not family.startswith("n1-"):
            yield Finding(
                where,
                f"{kind} on {machine or 'no machine type'}: it needs an n1 machine",
                why,
                f"use {machines.machine_for(kind, count if count in gpu.counts else gpu.counts[0])}",
            )
        elif count not in gpu.n1_cpus:
            counts = ", ".join(map(str, gpu.counts))
            yield Finding(where, f"{count} {kind}; valid numbers are {counts}", why, f"use one of {counts}")
        elif cpus.isdigit() and int(cpus) > gpu.n1_cpus[count]:
            most = gpu.n1_cpus[count]
            yield Finding(
                where,
                f"{machine} with {count} {kind}: that many GPUs allow at most {most} vCPUs",
                why,
                f"use a smaller machine, such as {machines.machine_for(kind, count)}, or more GPUs",
            )
        elif (machines.n1_memory(machine) or 0) > gpu.n1_memory.get(count, 10**6):
            yield Finding(
                where,
                f"{machine} with {count} {kind}: that many allow at most {gpu.n1_memory[count]} GB of memory",
                why,
                f"use a smaller machine, such as {machines.machine_for(kind, count)}",
                severity=Severity.CANNOT_START,
            )


@rule(
    *VERTEX, severity=Severity.REFUSE, source="https://cloud.google.com/vertex-ai/docs/training/configure-compute#tpu"
)
def tpu_counts_exist(job: Evidence) -> Iterator[Finding]:
    """A TPU v2 or v3 is on cloud-tpu, with a number of cores that such a slice has."""
    by_type = {
        one.vertex.count: one.generation for one in machines.slices().values() if one.vertex and one.vertex.count
    }
    why = "the service refuses the job"
    for number, pool in pools(job):
        machine = machine_of(pool)
        kind, name = machine.get("acceleratorType"), machine.get("machineType")
        at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorType" if kind else "machineType")
        if (name == "cloud-tpu") != (kind in by_type):
            if (name == "cloud-tpu" or kind in by_type) and not _NEWER_TPU.fullmatch(str(kind)):
                what = f"machineType '{name}' with acceleratorType '{kind}'"
                yield Finding(
                    at, what, why, f"use cloud-tpu with {' or '.join(map(str, by_type))}, and these with cloud-tpu"
                )
            continue
        if kind not in by_type:
            continue
        counts = [one.cores for one in machines.slices().values() if one.generation == by_type[kind]]
        if parse_count(machine.get("acceleratorCount") or 0) not in counts:
            at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorCount")
            yield Finding(
                at,
                f"{machine.get('acceleratorCount')} cores of {kind}",
                why,
                f"give the number of cores, one of {', '.join(map(str, counts))}",
            )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/utils/worker_spec_utils.py "
        '("required for the TPU v5 versions"); '
        "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"
    ),
)
def tpu_topologies_match_machines(job: Evidence) -> Iterator[Finding]:
    """A TPU v5e or v6e is given by its machine type and a matching topology alone."""
    why = "the service refuses the job"
    for number, pool in pools(job):
        machine = machine_of(pool)
        kind, topology = str(machine.get("machineType", "")), machine.get("tpuTopology")
        generation = machines.generation_of_machine(kind)
        at = job.at("workerPoolSpecs", number, "machineSpec", "tpuTopology" if topology else "machineType")
        if generation is None or kind == "cloud-tpu":
            # A machine type that is not in the table may be a newer TPU: machine_types_exist notes it.
            if topology and not machines.may_be_newer(kind):
                yield Finding(
                    at,
                    f"tpuTopology with {kind or 'no machine type'}",
                    why,
                    "remove it: only ct5lp-hightpu-* and ct6e-standard-* have a topology",
                )
            continue
        about = machines.table().tpus[generation]
        if about.vertex is None:
            yield Finding(
                at, f"{kind} (TPU {generation}) is not available for jobs", why, "use a v2, v3, v5e or v6e, or GKE"
            )
            continue
        if machine.get("acceleratorType"):
            at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorType")
            yield Finding(
                at,
                f"acceleratorType with {kind}",
                why,
                "remove acceleratorType and acceleratorCount: the topology implies them",
            )
        fitting = [one for one in about.slices if machines.slice_on(kind, one)]
        if not topology or topology not in fitting:
            what = f"{kind} with topology {topology}" if topology else f"{kind} without tpuTopology"
            yield Finding(at, what, why, f"give tpuTopology as one of {', '.join(fitting)}")


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "https://github.com/googleapis/python-aiplatform/blob/main/google/cloud/aiplatform/utils/worker_spec_utils.py "
        '("TPU jobs only allow 1 replica")'
    ),
)
def tpu_jobs_are_one_replica(job: Evidence) -> Iterator[Finding]:
    """A TPU job has one pool with one replica."""
    number = next((number for number, _ in tpu_pools(job)), None)
    replicas = sum(max(0, parse_count(pool.get("replicaCount", 0))) for _, pool in pools(job))
    if number is not None and replicas > 1:
        yield Finding(
            job.at("workerPoolSpecs"),
            f"{replicas} replicas in a job with a TPU",
            "the service refuses the job: it creates the machines of a slice itself",
            "keep one pool with replicaCount: 1, and ask for a larger slice by its count or topology",
        )


@rule(*VERTEX, severity=Severity.REFUSE, source="https://cloud.google.com/vertex-ai/docs/training/use-spot-vms")
def spot_is_not_for_tpu_pods(job: Evidence) -> Iterator[Finding]:
    """TPU slices of several machines are not on Spot VMs."""
    strategy = (job.spec.get("scheduling") or {}).get("strategy")
    for number, pool in tpu_pools(job):
        machine = machine_of(pool)
        small = machines.slice_on(str(machine.get("machineType")), str(machine.get("tpuTopology")))
        pod = small.pod if small else parse_count(machine.get("acceleratorCount") or 0) > 8
        if strategy in ("SPOT", "LOW_COST") and pod:
            yield Finding(
                job.at("scheduling", "strategy"),
                f"{strategy} with a TPU slice of several machines (pool {number})",
                "the service refuses the job",
                "remove the strategy, or use a slice of one machine",
            )


@rule(
    *VERTEX,
    severity=Severity.REFUSE,
    source=(
        "gcloud 528, SUPPORTED_TRAINING_REGIONS in command_lib/ai/constants.py; "
        "https://cloud.google.com/tpu/docs/regions-zones; "
        "https://docs.cloud.google.com/compute/docs/gpus/gpu-regions-zones, as in catalogs/v8/gcp/vms.csv of "
        "https://github.com/skypilot-org/skypilot-catalog"
    ),
)
def region_has_accelerator(job: Evidence) -> Iterator[Finding]:
    """The region has training jobs, and the GPUs or the TPU that the job asks for."""
    region = job.region
    if region is None:
        return
    known = machines.table().vertex_regions
    where = job.at("workerPoolSpecs")
    if region not in known:
        yield Finding(
            where,
            f"no training jobs in '{region}'{unknown(region, known)}",
            "gcloud 528 refuses the region; a newer gcloud may have it",
            "use another region",
            severity=Severity.NOTE if machines.REGION.fullmatch(region) else Severity.REFUSE,
        )
        return
    for number, pool in pools(job):
        kind = str(machine_of(pool).get("acceleratorType") or "")
        regions = machines.table().gpus[kind].regions if kind in machines.table().gpus else []
        if regions and region not in regions:
            yield Finding(
                job.at("workerPoolSpecs", number, "machineSpec", "acceleratorType"),
                f"{region} has no {kind}",
                "the job waits for machines that the region does not have",
                f"use one of {', '.join(regions)}",
                severity=Severity.CANNOT_START,
            )
    for number, pool in tpu_pools(job):
        machine = machine_of(pool)
        tpu = _slice(machine)
        if tpu and region not in tpu.regions:
            yield Finding(
                job.at("workerPoolSpecs", number, "machineSpec"),
                f"{region} has no {tpu.accelerator_type}",
                "the job waits for a TPU that the region does not have",
                f"use one of {', '.join(tpu.regions)}",
                severity=Severity.NOTE if machines.table().tpus[tpu.generation].grows else Severity.CANNOT_START,
            )


def _slice(machine: dict[str, Any]) -> machines.TpuSlice | None:
    """The TPU slice of a MachineSpec; None without one."""
    if machine.get("machineType") != "cloud-tpu":
        return machines.slice_on(str(machine.get("machineType")), str(machine.get("tpuTopology")))
    cores = parse_count(machine.get("acceleratorCount") or 0)
    return next(
        (
            one
            for one in machines.slices().values()
            if one.vertex and one.vertex.count == machine.get("acceleratorType") and one.cores == cores
        ),
        None,
    )
