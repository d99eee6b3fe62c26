"""Rules about machine types, GPUs and TPUs of Vertex AI, and the regions that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.common.rule_engine import Finding, Severity
from trainyard.spec.gpus import respelled
from trainyard_jobs.model import machines
from trainyard_jobs.rules.evidence import Evidence, unknown
from trainyard_jobs.rules.worker_pools import WORKER_SPECS, parse_count, pools, refused, tpu_pools, vertex_rule

#: An acceleratorType that the API may get after this was written; its last TPU of now is TPU_V5_LITEPOD.
_NEWER_TPU = re.compile(r"TPU_V([6-9]|[1-9][0-9])\w*")

_COMPUTE = "https://cloud.google.com/vertex-ai/docs/training/configure-compute"


@vertex_rule(f"{_COMPUTE}#machine-types")
def machine_types_exist(job: Evidence) -> Iterator[Finding]:
    """Machine types exist."""
    for pool in pools(job):
        name = pool.machine_type
        if name and name not in machines.machine_types():
            family, right = name.partition("-")[0], respelled(name, machines.machine_types())
            near = [one for one in machines.machine_types() if one.partition("-")[0] == family]
            newer = machines.may_be_newer(name) and not right
            known = f"machine type '{name}' is not in the table of {machines.table().sources['cpus'].checked}"
            guess = f" (did you mean '{right}'?)" if right else unknown(name, near) if near else ""
            yield Finding(
                pool.at("machineSpec", "machineType"),
                f"{known if newer else f'unknown machine type {name!r}'}{guess}",
                "the service refuses machine types that it does not have, after it accepted the job",
                "correct it; if it is new, add it to scripts/trainyard_jobs/model/machines.yaml",
                severity=Severity.NOTE if newer else Severity.REFUSE,
            )


@vertex_rule(f"{_COMPUTE}#gpus")
def gpus_match_machines(job: Evidence) -> Iterator[Finding]:
    """The machine type supports the type and number of GPUs."""
    for pool in pools(job):
        at = pool.at("machineSpec")
        yield from gpu_findings(at, pool.machine_type, pool.accelerator, pool.count, must_name_own_gpus=True)


def gpu_findings(where: str, machine: str, kind: str, count: int, *, must_name_own_gpus: bool) -> Iterator[Finding]:
    """Findings about ``count`` GPUs of type ``kind`` on a machine type.

    Args:
        must_name_own_gpus: whether a job must also name the GPUs that a machine type always has.
    """
    why = "the job is refused, or waits for a machine that does not exist"
    known = machines.table()
    own = machines.gpu_of_machine(machine)
    if kind in known.gpus_gone:
        gone = f"{kind} is not available since {known.gpus_gone[kind].since}"
        yield Finding(where, gone, why, "use NVIDIA_TESLA_T4 or NVIDIA_L4")
    elif kind.startswith("NVIDIA") and count < 1:
        yield Finding(where, f"{kind} without acceleratorCount", "the machine gets no GPU", "add acceleratorCount: 1")
    elif own and must_name_own_gpus and (kind, count) != own and known.gpus[own[0]].vertex:
        what = f"{machine} has {own[1]} {own[0]}; the job asks for {f'{count} {kind}' if kind else 'none'}"
        yield Finding(where, what, why, f"write acceleratorType: {own[0]}, acceleratorCount: {own[1]}")
    elif kind in known.gpus and not own and not machines.may_be_newer(machine):
        for what, remediation, severity in _misfits(machine, kind, count):
            yield Finding(where, what, why, remediation, severity)


def _misfits(machine: str, kind: str, count: int) -> Iterator[tuple[str, str, Severity]]:
    """Yield why a machine type that includes no GPUs cannot have ``count`` of a kind, what to do, how severe it is."""
    gpu = machines.table().gpus[kind]
    family, _, cpus = machine.rpartition("-")
    severity = Severity.REFUSE
    if gpu.machines:
        fitting = [name for name, number in gpu.machines.items() if number == count] or list(gpu.machines)
        what = f"{kind} on {machine or 'no machine type'}: it is part of other machine types"
        yield what, f"use {' or '.join(fitting)}", severity
    elif not family.startswith("n1-"):
        what = f"{kind} on {machine or 'no machine type'}: it needs an n1 machine"
        fitting_count = count if count in gpu.counts else gpu.counts[0]
        yield what, f"use {machines.machine_for(kind, fitting_count)}", severity
    elif count not in gpu.n1_cpus:
        counts = ", ".join(map(str, gpu.counts))
        yield f"{count} {kind}; valid numbers are {counts}", f"use one of {counts}", severity
    elif cpus.isdigit() and int(cpus) > gpu.n1_cpus[count]:
        what = f"{machine} with {count} {kind}: that many GPUs allow at most {gpu.n1_cpus[count]} vCPUs"
        yield what, f"use a smaller machine, such as {machines.machine_for(kind, count)}, or more GPUs", severity
    elif (machines.n1_memory(machine) or 0) > gpu.n1_memory.get(count, 10**6):
        what = f"{machine} with {count} {kind}: that many allow at most {gpu.n1_memory[count]} GB of memory"
        yield what, f"use a smaller machine, such as {machines.machine_for(kind, count)}", Severity.CANNOT_START


@vertex_rule(f"{_COMPUTE}#tpu")
def tpu_counts_exist(job: Evidence) -> Iterator[Finding]:
    """A TPU v2 or v3 is on cloud-tpu, with a number of cores that such a slice has."""
    by_type = {
        one.vertex.count: one.generation for one in machines.slices().values() if one.vertex and one.vertex.count
    }
    for pool in pools(job):
        kind, name = pool.machine.get("acceleratorType"), pool.machine.get("machineType")
        if (name == "cloud-tpu") != (kind in by_type):
            if (name == "cloud-tpu" or kind in by_type) and not _NEWER_TPU.fullmatch(str(kind)):
                at = pool.at("machineSpec", "acceleratorType" if kind else "machineType")
                fix = f"use cloud-tpu with {' or '.join(map(str, by_type))}, and these with cloud-tpu"
                yield refused(at, f"machineType '{name}' with acceleratorType '{kind}'", fix)
            continue
        if kind not in by_type:
            continue
        counts = [one.cores for one in machines.slices().values() if one.generation == by_type[kind]]
        if pool.count not in counts:
            what = f"{pool.machine.get('acceleratorCount')} cores of {kind}"
            fix = f"give the number of cores, one of {', '.join(map(str, counts))}"
            yield refused(pool.at("machineSpec", "acceleratorCount"), what, fix)


@vertex_rule(
    f'{WORKER_SPECS} ("required for the TPU v5 versions"); '
    "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"
)
def tpu_topologies_match_machines(job: Evidence) -> Iterator[Finding]:
    """A TPU v5e or v6e is given by its machine type and a matching topology alone."""
    for pool in pools(job):
        kind, topology = pool.machine_type, pool.machine.get("tpuTopology")
        generation = machines.generation_of_machine(kind)
        at = pool.at("machineSpec", "tpuTopology" if topology else "machineType")
        if generation is None or kind == "cloud-tpu":
            # A machine type that is not in the table may be a newer TPU: machine_types_exist notes it.
            if topology and not machines.may_be_newer(kind):
                what = f"tpuTopology with {kind or 'no machine type'}"
                yield refused(at, what, "remove it: only ct5lp-hightpu-* and ct6e-standard-* have a topology")
            continue
        about = machines.table().tpus[generation]
        if about.vertex is None:
            what = f"{kind} (TPU {generation}) is not available for jobs"
            yield refused(at, what, "use a v2, v3, v5e or v6e, or GKE")
            continue
        if pool.accelerator:
            at = pool.at("machineSpec", "acceleratorType")
            fix = "remove acceleratorType and acceleratorCount: the topology implies them"
            yield refused(at, f"acceleratorType with {kind}", fix)
        fitting = [one for one in about.slices if machines.slice_on(kind, one)]
        if not topology or topology not in fitting:
            what = f"{kind} with topology {topology}" if topology else f"{kind} without tpuTopology"
            yield refused(at, what, f"give tpuTopology as one of {', '.join(fitting)}")


@vertex_rule(f'{WORKER_SPECS} ("TPU jobs only allow 1 replica")')
def tpu_jobs_are_one_replica(job: Evidence) -> Iterator[Finding]:
    """A TPU job has one pool with one replica."""
    replicas = sum(max(0, parse_count(pool.spec.get("replicaCount", 0))) for pool in pools(job))
    if replicas > 1 and any(tpu_pools(job)):
        yield Finding(
            job.at("workerPoolSpecs"),
            f"{replicas} replicas in a job with a TPU",
            "the service refuses the job: it creates the machines of a slice itself",
            "keep one pool with replicaCount: 1, and ask for a larger slice by its count or topology",
        )


@vertex_rule("https://cloud.google.com/vertex-ai/docs/training/use-spot-vms")
def spot_is_not_for_tpu_pods(job: Evidence) -> Iterator[Finding]:
    """TPU slices of several machines are not on Spot VMs."""
    strategy = (job.spec.get("scheduling") or {}).get("strategy")
    for pool in tpu_pools(job):
        small = machines.slice_on(pool.machine_type, str(pool.machine.get("tpuTopology")))
        if strategy in ("SPOT", "LOW_COST") and (small.pod if small else pool.count > 8):
            what = f"{strategy} with a TPU slice of several machines (pool {pool.number})"
            yield refused(job.at("scheduling", "strategy"), what, "remove the strategy, or use a slice of one machine")


@vertex_rule(
    "gcloud 528, SUPPORTED_TRAINING_REGIONS in command_lib/ai/constants.py; "
    "https://cloud.google.com/tpu/docs/regions-zones; "
    "https://docs.cloud.google.com/compute/docs/gpus/gpu-regions-zones, as in catalogs/v8/gcp/vms.csv of "
    "https://github.com/skypilot-org/skypilot-catalog"
)
def region_has_accelerator(job: Evidence) -> Iterator[Finding]:
    """The region has training jobs, and the GPUs or the TPU that the job asks for."""
    region = job.region
    if region is None:
        return
    table = machines.table()
    if region not in table.vertex_regions:
        newer = machines.REGION.fullmatch(region)
        what = f"'{region}' is not in the table of regions of {table.sources['vertex_regions'].checked}"
        what = what if newer else f"no training jobs in '{region}'"
        yield Finding(
            job.at("workerPoolSpecs"),
            f"{what}{unknown(region, table.vertex_regions)}",
            "gcloud 528 refuses the region; a newer gcloud may have it",
            "use another region",
            severity=Severity.NOTE if newer else Severity.REFUSE,
        )
        return
    for pool in pools(job):
        regions = table.gpus[pool.accelerator].regions if pool.accelerator in table.gpus else []
        if regions and region not in regions:
            yield Finding(
                pool.at("machineSpec", "acceleratorType"),
                f"{region} has no {pool.accelerator}",
                "the job waits for machines that the region does not have",
                f"use one of {', '.join(regions)}",
                severity=Severity.CANNOT_START,
            )
    for pool in tpu_pools(job):
        tpu = pool.slice
        if tpu and region not in tpu.regions:
            yield Finding(
                pool.at("machineSpec"),
                f"{region} has no {tpu.accelerator_type}",
                "the job waits for a TPU that the region does not have",
                f"use one of {', '.join(tpu.regions)}",
                severity=Severity.NOTE if table.tpus[tpu.generation].grows else Severity.CANNOT_START,
            )
