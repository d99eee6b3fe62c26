"""Rules about the content of a job's images: mistakes that no API can find."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.waivers import today
from trainyard.oci.reference import Reference
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects, train_jobs
from trainyard_jobs.model import machines
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.model.machines import Hosts
from trainyard_jobs.rules import named_images, worker_pools
from trainyard_jobs.rules.evidence import KINDS, VERTEX, Evidence
from trainyard_jobs.rules.job_templates import job_templates
from trainyard_jobs.schema.kubernetes_defaults import mapping

#: Days before the last day of an image from which it is named.
NOTICE = 60

#: TPU generation -> framework -> first version that supports it on Vertex AI, None if no version does
#: (https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm).
_FIRST: dict[str, dict[str, str | None]] = {
    "v5e": {"tensorflow": "2.15", "torch": "2.1", "jax": "0.4.6"},
    "v6e": {"tensorflow": None, "torch": "2.1", "jax": "0.4.37"},
}


def references(job: Evidence) -> Iterator[tuple[str, int, Location]]:
    """Every image a job names: reference, document, location from the top of the spec (or document)."""
    if job.job.kind == "gke":
        for template in job_templates(job):
            for index, container in enumerate(template.containers):
                if isinstance(container.get("image"), str):
                    yield container["image"], template.document, (*template.pod_at, "containers", index, "image")
        for number, document in enumerate(job.job.documents):
            image = mapping(mapping(document.get("spec")).get("trainer")).get("image")
            if train_jobs.is_train_job(document) and isinstance(image, str):
                yield image, number, ("spec", "trainer", "image")
    elif job.job.kind == "ai-platform":
        for role in ("master", "worker", "parameterServer", "evaluator"):
            config = job.spec.get(f"{role}Config")
            if isinstance(config, dict) and isinstance(config.get("imageUri"), str):
                yield config["imageUri"], 0, (f"{role}Config", "imageUri")
    else:
        for number, pool in worker_pools.pools(job):
            for task, key in (("containerSpec", "imageUri"), ("pythonPackageSpec", "executorImageUri")):
                found = (pool.get(task) or {}).get(key)
                if isinstance(found, str):
                    yield found, 0, ("workerPoolSpecs", number, task, key)


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source="docs/jobs.md#checking-a-job (looked up on this host and at the registry, without pulling)",
)
def images_exist(job: Evidence) -> Iterator[Finding]:
    """Every image exists."""
    for reference, document, location in references(job):
        at = job.at(*location, document=document)
        known = job.images.get(reference)
        if reference in job.missing and reference in job.images:
            yield Finding(
                at,
                f"{reference} could not be looked up: {job.missing[reference]}",
                "its content is unknown and not checked",
                "check again where the registry can be reached",
                severity=Severity.NOTE,
            )
        elif reference in job.missing:
            yield Finding(
                at,
                f"{reference}: {job.missing[reference]}",
                "the job retries, and fails without having started",
                "push it ('trainyard push'), or correct the name",
            )
        elif known and known.local and _names_no_registry(reference):
            yield Finding(
                at,
                f"{reference} is on this host, and names no registry",
                "'trainyard job rehearse' runs it; a cloud platform looks for it on Docker Hub",
                "push it, and name its registry",
                severity=Severity.NOTE,
            )


@rule(
    *KINDS,
    severity=Severity.REFUSE,
    source="docs/supply-chain.md#admission-policies (evaluated with --require-signed)",
)
def images_are_signed(job: Evidence) -> Iterator[Finding]:
    """Every image has a valid signature, where signatures are demanded."""
    if job.unsigned is None:
        return
    images, others = named_images.look(job.job)
    for at, reference in images:
        if reference in job.unsigned:
            yield Finding(
                at,
                f"{reference} is not signed as demanded: {job.unsigned[reference]}",
                "anyone with write access to the registry may have replaced it; admission policies refuse it",
                "push it with a key ('trainyard push --key signing.pem'), or with an identity "
                "('trainyard push --keyless')",
            )
    for at, what in others:
        yield Finding(
            at,
            what,
            "signatures are checked of the images that the file names",
            "have an admission policy demand signatures of all images",
            severity=Severity.NOTE,
        )


def _names_no_registry(reference: str) -> bool:
    try:
        return Reference.parse(reference).names_docker_hub
    except UserError:  # an image ID
        return True


@rule(
    "ai-platform",
    severity=Severity.CANNOT_START,
    source=(
        "discovery document ml v1, ReplicaConfig.tpuTfVersion "
        "(the TPU's runtime must match the TensorFlow that talks to it)"
    ),
)
def tpu_runtime_matches_image(job: Evidence) -> Iterator[Finding]:
    """tpuTfVersion is the version of the framework in the image."""
    worker = job.spec.get("workerConfig")
    version = str(worker.get("tpuTfVersion") or "") if isinstance(worker, dict) else ""
    master = job.spec.get("masterConfig")
    image = (worker or {}).get("imageUri") or (master.get("imageUri") if isinstance(master, dict) else None)
    contents = job.images.get(str(image))
    if not version or contents is None or not contents.versions:
        return
    wanted = "torch-xla" if version.startswith("pytorch-") else "tensorflow"
    have = contents.versions.get("torch-xla", "") if wanted == "torch-xla" else contents.tensorflow
    if _minor(have) != _minor(version.removeprefix("pytorch-")):
        yield Finding(
            job.at("workerConfig", "tpuTfVersion"),
            f"tpuTfVersion {version}, but the image has {contents.framework or 'no framework'} (by {contents.source})",
            "the TPU's runtime and the trainer's framework speak different protocols: the first step hangs or fails",
            f"use an image with {wanted} {version.removeprefix('pytorch-')}"
            + (f", or write tpuTfVersion: {_minor(have)} if TPUs support it" if have else ""),
        )


def _minor(version: str) -> str:
    """``2.11.1+cpu`` as ``2.11``."""
    return ".".join(re.split(r"[.+]", version)[:2])


@rule(
    *VERTEX,
    severity=Severity.CANNOT_START,
    source="https://cloud.google.com/vertex-ai/docs/training/pre-built-containers",
)
def prebuilt_images_match_accelerator(job: Evidence) -> Iterator[Finding]:
    """A prebuilt image is for the machine's accelerator."""
    for number, pool in worker_pools.pools(job):
        image = str((pool.get("pythonPackageSpec") or {}).get("executorImageUri") or "")
        match = re.search(r"/vertex-ai/training/\w+-(cpu|gpu|tpu|xla)\.[\w.-]+?(:(\w+))?$", image)
        at = job.at("workerPoolSpecs", number, "pythonPackageSpec", "executorImageUri")
        device = _device_of_pool(pool)
        if match and match[3] != "latest":
            yield Finding(at, f"{image} without :latest", "prebuilt images have no other tag", "add :latest")
        if match and device and match[1] != device:
            yield Finding(
                at,
                f"an image for {match[1]} with a {device}",
                "the accelerator is paid for and idle",
                f"use the {device} image",
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
    """Every image with the accelerator that it runs on: reference, document, location, device, TPU generation."""
    if job.job.kind == "gke":
        for template in job_templates(job):
            selector = template.selector
            label = selector.get(gke_objects.ACCELERATOR)
            generation = next((name for name, tpu in machines.table().tpus.items() if tpu.gke_accelerator == label), "")
            device = "tpu" if label else "gpu" if selector.get(gke_objects.GPU) else ""
            for index, container in enumerate(template.containers):
                place = (*template.pod_at, "containers", index, "image")
                yield str(container.get("image")), template.document, place, device, generation if label else ""
    elif job.job.kind != "ai-platform":
        for number, pool in worker_pools.pools(job):
            machine = pool.get("machineSpec")
            name = str(machine.get("machineType")) if isinstance(machine, dict) else ""
            place = ("workerPoolSpecs", number, "containerSpec", "imageUri")
            generation = machines.generation_of_machine(name) or ""
            image = str((pool.get("containerSpec") or {}).get("imageUri"))
            yield image, 0, place, _device_of_pool(pool), generation


@rule(
    *VERTEX,
    "gke",
    severity=Severity.CANNOT_START,
    source="docs/jobs.md#checking-a-job (by the image's record, labels or packages)",
)
def images_support_accelerator(job: Evidence) -> Iterator[Finding]:
    """The framework in the image is built for the accelerator that the job asks for."""
    for reference, document, location, device, _ in _placed(job):
        contents = job.images.get(reference)
        if not device or contents is None or not contents.device or contents.device == device:
            continue
        yield Finding(
            job.at(*location, document=document),
            f"a {device.upper()} job with an image for {contents.device.upper()}s: {contents.framework} "
            f"(by {contents.source})",
            f"the trainer runs on the host's CPU, and the {device.upper()} is paid for and idle",
            f"use a target for it ({'xla' if device == 'tpu' else 'gpu or tf-gpu'}; see 'trainyard list')",
        )


@rule(*KINDS, severity=Severity.NOTE, source="images/matrix.yaml")
def images_are_supported(job: Evidence) -> Iterator[Finding]:
    """The image is looked after for 60 days more: its framework, base, Python and CUDA."""
    for reference, document, location in references(job):
        contents = job.images.get(reference)
        if contents is None or not (last := contents.supported_until):
            continue
        if datetime.date.fromisoformat(last) - datetime.timedelta(days=NOTICE) < today():
            yield Finding(
                job.at(*location, document=document),
                f"{reference} is looked after until {last} (by {contents.source})",
                "later faults of what it contains are not mended",
                "use a newer version ('trainyard list --ends')",
            )


def _on_hosts(job: Evidence) -> Iterator[tuple[str, int, Location, Hosts]]:
    """Every image with the machines that it runs on: reference, document, location, machines."""
    if job.job.kind == "gke":
        for template in job_templates(job):
            nodes = gke_objects.hosts_of(template.selector)
            for index, container in enumerate(template.containers):
                place = (*template.pod_at, "containers", index, "image")
                yield str(container.get("image")), template.document, place, nodes
    elif job.job.kind != "ai-platform":
        for number, pool in worker_pools.pools(job):
            name = str(mapping(pool.get("machineSpec")).get("machineType") or "")
            for task, key in (("containerSpec", "imageUri"), ("pythonPackageSpec", "executorImageUri")):
                reference = str(mapping(pool.get(task)).get(key))
                place = ("workerPoolSpecs", number, task, key)
                yield reference, 0, place, machines.hosts_of(name)


@rule(
    *VERTEX,
    "gke",
    severity=Severity.CANNOT_START,
    source="https://cloud.google.com/kubernetes-engine/docs/how-to/prepare-arm-workloads-for-deployment",
)
def images_have_the_architecture(job: Evidence) -> Iterator[Finding]:
    """Every image is for the architecture of its machines."""
    for reference, document, location, hosts in _on_hosts(job):
        contents = job.images.get(reference)
        if contents is None or not (what := hosts.mismatch(contents.platforms)):
            continue
        yield Finding(
            job.at(*location, document=document),
            what,
            "the container does not start: no matching manifest, or exec format error",
            f"{hosts.remediation()}, or use other machines",
        )


@rule(
    *VERTEX,
    severity=Severity.CANNOT_START,
    source=(
        "https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm "
        "(v5e: TensorFlow 2.15, PyTorch 2.1, JAX 0.4.6; v6e: no TensorFlow)"
    ),
)
def frameworks_support_tpu(job: Evidence) -> Iterator[Finding]:
    """The framework in the image supports the TPU's generation."""
    for reference, document, location, device, generation in _placed(job):
        contents = job.images.get(reference)
        if device != "tpu" or contents is None or generation not in _FIRST:
            continue
        for framework, first in _FIRST[generation].items():
            have = contents.tensorflow if framework == "tensorflow" else _version(contents, framework)
            if not have or (first and _at_least(have, first)):
                continue
            what = f"{framework} {have} on a TPU {generation}; " + (
                f"it needs {first} or later" if first else "not supported"
            )
            yield Finding(
                job.at(*location, document=document),
                what,
                "the trainer does not find the TPU",
                "use a PyTorch or JAX image" if first is None else "use a newer image",
            )


def _version(contents: Contents, framework: str) -> str:
    """Version of a framework in an image, or of torch_xla for torch; empty if it has neither."""
    names = (framework, "torch-xla") if framework == "torch" else (framework,)
    return next((contents.versions[name] for name in names if contents.versions.get(name)), "")


def _at_least(have: str, first: str) -> bool:
    try:
        return Version(have) >= Version(first)
    except InvalidVersion:
        return True
