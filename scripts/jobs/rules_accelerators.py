"""What of Vertex AI's machines, GPUs and TPUs goes together, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.jobs import machines
from scripts.jobs.pools import machine_of, pools, tpu_pools, whole
from scripts.jobs.rules import VERTEX, Evidence, Flaw, rule, unknown


@rule(*VERTEX)
def machines_are_known(job: Evidence) -> Iterator[Flaw]:
    """Machine types are those of docs/jobs.md.

    vertex-ai/docs/training/configure-compute#machine-types.
    """
    for number, pool in pools(job):
        name = machine_of(pool).get("machineType")
        if name and name not in machines.machine_types():
            near = [one for one in machines.machine_types() if one.partition("-")[0] == str(name).partition("-")[0]]
            yield Flaw(
                job.at("workerPoolSpecs", number, "machineSpec", "machineType"),
                f"machine type '{name}' is not in our table{unknown(str(name), near) if near else ''}",
                "the service refuses machine types it does not have, after the job was accepted",
                "correct it; if it is a new one, add it to scripts/jobs/machines.yaml",
                note=not near,
            )


@rule(*VERTEX)
def gpus_fit_their_machines(job: Evidence) -> Iterator[Flaw]:
    """The number and type of GPUs are ones that the machine type can have.

    vertex-ai/docs/training/configure-compute#gpus; the table of n1 machines as google/caliban and tensorflow/cloud
    have it.
    """
    for number, pool in pools(job):
        yield from gpu_findings(
            job.at("workerPoolSpecs", number, "machineSpec"),
            str(machine_of(pool).get("machineType", "")),
            str(machine_of(pool).get("acceleratorType") or ""),
            whole(machine_of(pool).get("acceleratorCount") or 0),
            own_gpus_are_said=True,
        )


def gpu_findings(where: str, machine: str, kind: str, count: int, *, own_gpus_are_said: bool) -> Iterator[Flaw]:
    """What is wrong with ``count`` GPUs of a kind on a machine.

    Args:
        own_gpus_are_said: whether machines that come with GPUs must be asked for them all the same.
    """
    why = "the job is refused, or waits for a machine that does not exist"
    known = machines.table()
    own = machines.gpu_of_machine(machine)
    if kind in known.gpus_gone:
        yield Flaw(where, f"{kind} is gone since {known.gpus_gone[kind]}", why, "take NVIDIA_TESLA_T4 or NVIDIA_L4")
    elif kind.startswith("NVIDIA") and count < 1:
        yield Flaw(where, f"{kind} without acceleratorCount", "the machine gets no GPU", "add acceleratorCount: 1")
    elif own and own_gpus_are_said and (kind, count) != own:
        what = f"{machine} has {own[1]} {own[0]}; the job asks for {f'{count} {kind}' if kind else 'none'}"
        yield Flaw(where, what, why, f"write acceleratorType: {own[0]}, acceleratorCount: {own[1]}")
    elif kind in known.gpus and not own:
        gpu = known.gpus[kind]
        family, _, cpus = machine.rpartition("-")
        if gpu.machines:
            fitting = [one for one, number in gpu.machines.items() if number == count] or list(gpu.machines)
            yield Flaw(
                where,
                f"{kind} comes with machines of its own, not with {machine or 'none'}",
                why,
                f"take {' or '.join(fitting)}",
            )
        elif not family.startswith("n1-"):
            yield Flaw(
                where,
                f"{kind} goes with n1 machines, not with {machine}",
                why,
                f"take {machines.machine_for(kind, count if count in gpu.counts else gpu.counts[0])}",
            )
        elif count not in gpu.n1_cpus:
            counts = ", ".join(map(str, gpu.counts))
            yield Flaw(where, f"{count} {kind}; there can be {counts}", why, f"take one of {counts}")
        elif cpus.isdigit() and int(cpus) > gpu.n1_cpus[count]:
            most = gpu.n1_cpus[count]
            yield Flaw(
                where,
                f"{machine} with {count} {kind}: at most {most} vCPUs go with that many",
                why,
                f"take a smaller machine, as {machines.machine_for(kind, count)}, or more GPUs",
            )


@rule(*VERTEX)
def tpu_counts_exist(job: Evidence) -> Iterator[Flaw]:
    """A TPU v2 or v3 is on cloud-tpu, with a number of cores that such a slice has.

    vertex-ai/docs/training/configure-compute#tpu; google-cloud-aiplatform's tests (cloud-tpu, TPU_V3, 32).
    """
    by_type = {
        one.vertex.count: one.generation for one in machines.slices().values() if one.vertex and one.vertex.count
    }
    why = "the service refuses the job"
    for number, pool in pools(job):
        machine = machine_of(pool)
        kind, name = machine.get("acceleratorType"), machine.get("machineType")
        at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorType" if kind else "machineType")
        if (name == "cloud-tpu") != (kind in by_type):
            if name == "cloud-tpu" or kind in by_type:
                what = f"machineType '{name}' with acceleratorType '{kind}'"
                yield Flaw(
                    at, what, why, f"cloud-tpu goes with {' or '.join(map(str, by_type))}, and these with cloud-tpu"
                )
            continue
        if kind not in by_type:
            continue
        counts = [one.cores for one in machines.slices().values() if one.generation == by_type[kind]]
        if whole(machine.get("acceleratorCount") or 0) not in counts:
            at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorCount")
            yield Flaw(
                at,
                f"{machine.get('acceleratorCount')} cores of {kind}",
                why,
                f"it counts cores: {', '.join(map(str, counts))}",
            )


@rule(*VERTEX)
def tpu_topologies_fit_their_machines(job: Evidence) -> Iterator[Flaw]:
    """A TPU v5e or v6e is named by its machine type and a topology that goes with it, and by nothing else.

    google-cloud-aiplatform, worker_spec_utils.py ("required for the TPU v5 versions") and its tests
    (ct5lp-hightpu-4t, 2x2); kubernetes-engine/docs/concepts/plan-tpus for the topologies.
    """
    why = "the service refuses the job"
    for number, pool in pools(job):
        machine = machine_of(pool)
        kind, topology = str(machine.get("machineType", "")), machine.get("tpuTopology")
        generation = machines.generation_of_machine(kind)
        at = job.at("workerPoolSpecs", number, "machineSpec", "tpuTopology" if topology else "machineType")
        if generation is None or kind == "cloud-tpu":
            if topology:
                yield Flaw(
                    at,
                    f"tpuTopology with {kind or 'no machine type'}",
                    why,
                    "a topology goes with ct5lp-hightpu-* and ct6e-standard-*: leave it out here",
                )
            continue
        about = machines.table().tpus[generation]
        if about.vertex is None:
            yield Flaw(
                at, f"{kind} (TPU {generation}) is not offered to jobs", why, "take a v2, v3, v5e or v6e, or GKE"
            )
            continue
        if machine.get("acceleratorType"):
            at = job.at("workerPoolSpecs", number, "machineSpec", "acceleratorType")
            yield Flaw(
                at,
                f"acceleratorType with {kind}",
                why,
                "leave acceleratorType and acceleratorCount out: the topology says it all",
            )
        fitting = [one for one in about.slices if machines.slice_on(kind, one)]
        if not topology or topology not in fitting:
            what = f"{kind} with topology {topology}" if topology else f"{kind} without tpuTopology"
            yield Flaw(at, what, why, f"give tpuTopology as one of {', '.join(fitting)}")


@rule(*VERTEX)
def tpu_jobs_are_one_replica(job: Evidence) -> Iterator[Flaw]:
    """A job on a TPU is one pool with one replica, whatever the size of the slice.

    google-cloud-aiplatform, worker_spec_utils.py: "TPU jobs only allow 1 replica".
    """
    number = next((number for number, _ in tpu_pools(job)), None)
    replicas = sum(max(0, whole(pool.get("replicaCount", 0))) for _, pool in pools(job))
    if number is not None and replicas > 1:
        yield Flaw(
            job.at("workerPoolSpecs"),
            f"{replicas} replicas in a job with a TPU",
            "the service refuses the job: it makes the machines of a slice itself",
            "keep one pool with replicaCount: 1, and ask for a bigger slice by its count or topology",
        )


@rule(*VERTEX)
def spot_is_not_for_tpu_pods(job: Evidence) -> Iterator[Flaw]:
    """Spot machines are not combined with TPU slices of several machines.

    vertex-ai/docs/training/use-spot-vms: Spot VMs are not available with TPU Pods.
    """
    strategy = (job.spec.get("scheduling") or {}).get("strategy")
    for number, pool in tpu_pools(job):
        machine = machine_of(pool)
        small = machines.slice_on(str(machine.get("machineType")), str(machine.get("tpuTopology")))
        pod = small.pod if small else whole(machine.get("acceleratorCount") or 0) > 8
        if strategy in ("SPOT", "LOW_COST") and pod:
            yield Flaw(
                job.at("scheduling", "strategy"),
                f"{strategy} with a TPU slice of several machines (pool {number})",
                "the service refuses the job",
                "leave the strategy out, or take a slice of one machine",
            )


@rule(*VERTEX)
def regions_have_it(job: Evidence) -> Iterator[Flaw]:
    """The region has training jobs, and the TPU that is asked for.

    gcloud 528, command_lib/ai/constants.py (SUPPORTED_TRAINING_REGIONS); tpu/docs/regions-zones.
    """
    region = job.region
    if region is None:
        return
    known = machines.table().vertex_regions
    where = job.at("workerPoolSpecs")
    if region not in known:
        yield Flaw(
            where,
            f"no training jobs in '{region}'{unknown(region, known)}",
            "gcloud refuses the region",
            "give another REGION",
        )
        return
    for number, pool in tpu_pools(job):
        machine = machine_of(pool)
        tpu = _slice(machine)
        if tpu and region not in tpu.regions:
            yield Flaw(
                job.at("workerPoolSpecs", number, "machineSpec"),
                f"{region} has no {tpu.accelerator_type}",
                "the job waits for a TPU that never comes",
                f"take one of {', '.join(tpu.regions)}",
            )


def _slice(machine: dict[str, Any]) -> machines.TpuSlice | None:
    """The slice a MachineSpec means, or None."""
    if machine.get("machineType") != "cloud-tpu":
        return machines.slice_on(str(machine.get("machineType")), str(machine.get("tpuTopology")))
    cores = whole(machine.get("acceleratorCount") or 0)
    return next(
        (
            one
            for one in machines.slices().values()
            if one.vertex and one.vertex.count == machine.get("acceleratorType") and one.cores == cores
        ),
        None,
    )
