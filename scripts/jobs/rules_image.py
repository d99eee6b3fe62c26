"""What a job's images hold, against what the job puts them on: the mistakes that no API can see."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from scripts.documents import Location
from scripts.jobs import contents, machines, pools, rules_gke
from scripts.jobs.contents import Contents
from scripts.jobs.rules import VERTEX, Evidence, Flaw, rule

_ALL = (*VERTEX, "ai-platform", "gke")

#: The first versions that drive a TPU v5e and v6e on Vertex AI (training/training-with-tpu-vm); None: none does.
_FIRST: dict[str, dict[str, str | None]] = {
    "v5e": {"tensorflow": "2.15", "torch": "2.1", "jax": "0.4.6"},
    "v6e": {"tensorflow": None, "torch": "2.1", "jax": "0.4.37"},
}


def references(job: Evidence) -> Iterator[tuple[str, int, Location]]:
    """Every image a job names: reference, document, location from the top of the spec (or document)."""
    if job.job.kind == "gke":
        for work in rules_gke.works(job):
            for index, container in enumerate(work.containers):
                if isinstance(container.get("image"), str):
                    yield container["image"], work.document, (*work.pod_at, "containers", index, "image")
    elif job.job.kind == "ai-platform":
        for role in ("master", "worker", "parameterServer", "evaluator"):
            config = job.spec.get(f"{role}Config")
            if isinstance(config, dict) and isinstance(config.get("imageUri"), str):
                yield config["imageUri"], 0, (f"{role}Config", "imageUri")
    else:
        for number, pool in pools.pools(job):
            for task, key in (("containerSpec", "imageUri"), ("pythonPackageSpec", "executorImageUri")):
                found = (pool.get(task) or {}).get(key)
                if isinstance(found, str):
                    yield found, 0, ("workerPoolSpecs", number, task, key)


@rule(*_ALL)
def images_are_there(job: Evidence) -> Iterator[Flaw]:
    """Every image that is named can be had.

    Looked up on this host and at its registry, without pulling; what cannot be looked up is a note.
    """
    for reference, document, location in references(job):
        at = job.at(*location, document=document)
        known = job.images.get(reference)
        if reference in job.missing and reference in job.images:
            yield Flaw(
                at,
                f"{reference} could not be looked up: {job.missing[reference]}",
                "nothing is known of what is in it",
                "look again where the registry can be reached",
                note=True,
            )
        elif reference in job.missing:
            yield Flaw(
                at,
                f"{reference}: {job.missing[reference]}",
                "the job waits, retries, and ends without having started",
                "push it (make push), or correct the name",
            )
        elif known and known.local and not contents.parts(reference)[0]:
            yield Flaw(
                at,
                f"{reference} is on this host, and names no registry",
                "`make rehearse` runs it; a cloud would look for it on Docker Hub",
                "push it, and write REGISTRY/... for the cloud",
                note=True,
            )


@rule("ai-platform")
def tpu_runtime_is_what_the_image_holds(job: Evidence) -> Iterator[Flaw]:
    """tpuTfVersion is the version of the framework that is in the image.

    ml v1: ReplicaConfig.tpuTfVersion: the runtime of the TPU, which must match the TensorFlow that talks to it.
    """
    worker = job.spec.get("workerConfig")
    version = str(worker.get("tpuTfVersion") or "") if isinstance(worker, dict) else ""
    master = job.spec.get("masterConfig")
    image = (worker or {}).get("imageUri") or (master.get("imageUri") if isinstance(master, dict) else None)
    held = job.images.get(str(image))
    if not version or held is None or not held.versions:
        return
    wanted = "torch-xla" if version.startswith("pytorch-") else "tensorflow"
    have = held.versions.get("torch-xla", "") if wanted == "torch-xla" else held.tensorflow
    if _minor(have) != _minor(version.removeprefix("pytorch-")):
        yield Flaw(
            job.at("workerConfig", "tpuTfVersion"),
            f"tpuTfVersion {version}, but the image holds {held.framework or 'no framework'} (by {held.source})",
            "the TPU's runtime and the trainer's framework speak different protocols: the first step hangs or fails",
            f"take an image with {wanted} {version.removeprefix('pytorch-')}"
            + (f", or write tpuTfVersion: {_minor(have)} if TPUs had it" if have else ""),
        )


def _minor(version: str) -> str:
    """``2.11.1+cpu`` as ``2.11``."""
    return ".".join(re.split(r"[.+]", version)[:2])


@rule("ai-platform", "custom-job", "hyperparameter-tuning-job")
def runtime_is_what_the_package_runs_on(job: Evidence) -> Iterator[Flaw]:
    """A prebuilt image's name and the machine's accelerator belong together.

    vertex-ai/docs/training/pre-built-containers: tf-cpu, tf-gpu and tf-tpu, with :latest.
    """
    if job.job.kind == "ai-platform":
        return
    for number, pool in pools.pools(job):
        image = str((pool.get("pythonPackageSpec") or {}).get("executorImageUri") or "")
        match = re.search(r"/vertex-ai/training/\w+-(cpu|gpu|tpu|xla)\.[\w.-]+?(:(\w+))?$", image)
        at = job.at("workerPoolSpecs", number, "pythonPackageSpec", "executorImageUri")
        device = _device_of_pool(pool)
        if match and match[3] != "latest":
            yield Flaw(at, f"{image} without :latest", "prebuilt images have no other tag", "add :latest")
        if match and device and match[1] != device:
            yield Flaw(
                at,
                f"an image for {match[1]} with a {device}",
                "the accelerator is paid for and idle",
                f"take the {device} image",
            )


def _device_of_pool(pool: dict[str, object]) -> str:
    machine = pool.get("machineSpec")
    if not isinstance(machine, dict):
        return ""
    kind, name = str(machine.get("acceleratorType") or ""), str(machine.get("machineType") or "")
    if kind.startswith("TPU") or name == "cloud-tpu" or machines.generation_of_machine(name):
        return "tpu"
    return "gpu" if kind.startswith("NVIDIA") else ""


def _placed(job: Evidence) -> Iterator[tuple[str, int, Location, str, str]]:
    """Every image with the device it is put on: reference, document, location, device, TPU generation."""
    if job.job.kind == "gke":
        for work in rules_gke.works(job):
            selector = work.selector
            label = selector.get("cloud.google.com/gke-tpu-accelerator")
            generation = next((name for name, tpu in machines.table().tpus.items() if tpu.gke_accelerator == label), "")
            device = "tpu" if label else "gpu" if selector.get("cloud.google.com/gke-accelerator") else ""
            for index, container in enumerate(work.containers):
                place = (*work.pod_at, "containers", index, "image")
                yield str(container.get("image")), work.document, place, device, generation if label else ""
    elif job.job.kind != "ai-platform":
        for number, pool in pools.pools(job):
            machine = pool.get("machineSpec")
            name = str(machine.get("machineType")) if isinstance(machine, dict) else ""
            place = ("workerPoolSpecs", number, "containerSpec", "imageUri")
            generation = machines.generation_of_machine(name) or ""
            image = str((pool.get("containerSpec") or {}).get("imageUri"))
            yield image, 0, place, _device_of_pool(pool), generation


@rule(*VERTEX, "gke")
def images_can_use_the_accelerator(job: Evidence) -> Iterator[Flaw]:
    """What an image holds was built for the accelerator that the job pays for.

    The image's own record, labels or packages: torch_xla, torch_tpu and tensorflow-tpu for TPUs, CUDA builds for GPUs.
    """
    for reference, document, location, device, _ in _placed(job):
        held = job.images.get(reference)
        if not device or held is None or not held.device or held.device == device:
            continue
        yield Flaw(
            job.at(*location, document=document),
            f"a {device.upper()} job with an image for {held.device.upper()}s: {held.framework} (by {held.source})",
            f"the trainer runs on the host's CPU, and the {device.upper()} is paid for and idle",
            f"take the target that is made for it ({'xla' if device == 'tpu' else 'gpu or tf-gpu'}; make list)",
        )


@rule(*VERTEX)
def frameworks_know_the_tpu(job: Evidence) -> Iterator[Flaw]:
    """The framework in the image is one that Vertex AI supports on that TPU.

    training/training-with-tpu-vm: v5e from TensorFlow 2.15, PyTorch 2.1, JAX 0.4.6; from v6e on no TensorFlow.
    """
    for reference, document, location, device, generation in _placed(job):
        held = job.images.get(reference)
        if device != "tpu" or held is None or generation not in _FIRST:
            continue
        for framework, first in _FIRST[generation].items():
            have = held.tensorflow if framework == "tensorflow" else _held(held, framework)
            if not have or (first and _at_least(have, first)):
                continue
            what = f"{framework} {have} on a TPU {generation}; " + (
                f"it takes {first} or newer" if first else "not supported"
            )
            yield Flaw(
                job.at(*location, document=document),
                what,
                "the trainer does not find the TPU",
                "take a PyTorch or JAX image" if first is None else "take a newer image",
            )


def _held(held: Contents, framework: str) -> str:
    return held.versions.get(framework, "") or (held.versions.get("torch-xla", "") if framework == "torch" else "")


def _at_least(have: str, first: str) -> bool:
    try:
        return Version(have) >= Version(first)
    except InvalidVersion:
        return True
