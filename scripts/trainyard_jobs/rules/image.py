"""Rules about the content of a job's images: mistakes that no API can find."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.oci.reference import DOCKER_HUB, Reference, why_unusable
from trainyard.oci.transport import is_loopback
from trainyard.spec import gpus
from trainyard.spec.naming import NAME
from trainyard_jobs.kubernetes import gke_objects, train_jobs
from trainyard_jobs.model import gpu_support, machines
from trainyard_jobs.model.image_metadata import Contents, Targets
from trainyard_jobs.model.machines import Hosts
from trainyard_jobs.rules import fields, named_images, worker_pools
from trainyard_jobs.rules.evidence import GOOGLE, KINDS, VERTEX, Evidence
from trainyard_jobs.rules.job_templates import pod_templates
from trainyard_jobs.rules.worker_pools import Pool
from trainyard_jobs.schema.kubernetes_defaults import mapping

#: Days before the last day of an image from which it is named.
NOTICE = 60

#: Who can run an image that is only on this machine, and what to do about it.
WHO_RUNS_IT = "'trainyard job rehearse' can run it, and a cluster that was given it, but no other machine"
PUSH_IT = "push it ('trainyard push') to a registry that the platform reaches"

#: TPU generation -> framework -> first version that supports it on Vertex AI, None if no version does
#: (https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm).
_FIRST: dict[str, dict[str, str | None]] = {
    "v5e": {"tensorflow": "2.15", "torch": "2.1", "jax": "0.4.6"},
    "v6e": {"tensorflow": None, "torch": "2.1", "jax": "0.4.37"},
}


@dataclass(frozen=True)
class NamedImage:
    """Describe an image that a job names.

    Attributes:
        at: ``file:line`` of the reference.
        device: the accelerator of the machine, ``tpu`` or ``gpu``; empty without one, or where it does not matter.
        generation: of the TPU; empty without one.
        hosts: the machines that it runs on.
        gpu: type of the GPUs that it gets, as in ``NVIDIA_L4``; empty without one, or if it is not known.
        gke_driver: the NVIDIA driver that the job selects of GKE; empty if it leaves that to the node pool, None on
            other platforms.
    """

    reference: str
    at: str
    device: str = ""
    generation: str = ""
    hosts: Hosts = machines.UNKNOWN_HOSTS
    gpu: str = ""
    gke_driver: str | None = None


def named(job: Evidence) -> Iterator[NamedImage]:
    """Yield every image that a job names."""
    if job.job.kind == "gke":
        yield from _of_kubernetes(job)
    elif job.job.kind == "ai-platform":
        for role in ("master", "worker", "parameterServer", "evaluator"):
            reference = mapping(job.spec, f"{role}Config").get("imageUri")
            if isinstance(reference, str):
                yield NamedImage(reference, job.at(f"{role}Config", "imageUri"), gpu=_of_ai_platform(job.spec, role))
    else:
        for pool in worker_pools.pools(job):
            hosts = machines.hosts_of(pool.machine_type)
            reference = mapping(pool.spec, "containerSpec").get("imageUri")
            if isinstance(reference, str):
                at, generation = pool.at("containerSpec", "imageUri"), machines.generation_of_machine(pool.machine_type)
                yield NamedImage(reference, at, _device(pool), generation or "", hosts, _gpu(pool))
            reference = mapping(pool.spec, "pythonPackageSpec").get("executorImageUri")
            if isinstance(reference, str):
                at = pool.at("pythonPackageSpec", "executorImageUri")
                yield NamedImage(reference, at, hosts=hosts, gpu=_gpu(pool))


def _of_kubernetes(job: Evidence) -> Iterator[NamedImage]:
    for template in pod_templates(job):
        selector = template.selector
        generation, hosts = gke_objects.generation_of(selector) or "", gke_objects.hosts_of(selector)
        device = "tpu" if selector.get(gke_objects.ACCELERATOR) else "gpu" if selector.get(gke_objects.GPU) else ""
        for place, container in template.all_containers():
            at, own = job.at(*place, "image", document=template.document), device if "containers" in place else ""
            if isinstance(container.get("image"), str):
                gpu, driver = _of_nodes(selector) if _requests_gpus(container) else ("", None)
                yield NamedImage(container["image"], at, own, generation, hosts, gpu, driver)
    for number, document in enumerate(job.job.documents):
        reference = mapping(document, "spec", "trainer").get("image")
        if train_jobs.is_train_job(document) and isinstance(reference, str):
            gpu, driver = _of_nodes(train_jobs.node_selector(document, job.job.documents))
            yield NamedImage(reference, job.at("spec", "trainer", "image", document=number), gpu=gpu, gke_driver=driver)


def _requests_gpus(container: dict[str, Any]) -> bool:
    """Return whether a container gets GPUs of its node."""
    return any(gke_objects.GPU_RESOURCE in mapping(container, "resources", kind) for kind in ("limits", "requests"))


def _of_nodes(selector: dict[str, Any]) -> tuple[str, str]:
    """Return ``gpu`` and ``gke_driver`` of :class:`NamedImage` by the labels of the nodes."""
    return gke_objects.gpu_of(selector), str(selector.get(gke_objects.GPU_DRIVER) or "")


def _of_ai_platform(spec: dict[str, Any], role: str) -> str:
    """Return the type of the GPUs of a role of an AI Platform job; empty without one."""
    tier = machines.table().ai_platform_tiers.get(str(spec.get("scaleTier")))
    machine = str(spec.get(f"{role}Type") or (tier.master if tier and role == "master" else ""))
    legacy = machines.table().ai_platform_machines.get(machine, "")
    own = mapping(spec, f"{role}Config", "acceleratorConfig").get("type")
    return str(own or legacy.partition("+")[2].partition("x")[2])


def _gpu(pool: Pool) -> str:
    """Return the type of the GPUs of a pool's machine; empty without one."""
    own = machines.gpu_of_machine(pool.machine_type)
    return pool.accelerator or (own[0] if own else "")


def _device(pool: Pool) -> str:
    """Return the accelerator of a pool's machine: ``tpu``, ``gpu``; empty without one."""
    if (
        pool.accelerator.startswith("TPU")
        or pool.machine_type == "cloud-tpu"
        or machines.generation_of_machine(pool.machine_type)
    ):
        return "tpu"
    return "gpu" if pool.accelerator.startswith("NVIDIA") else ""


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source="https://github.com/distribution/reference (regexp.go), as kubelet and Docker read names: InvalidImageName; "
    "https://cloud.google.com/artifact-registry/docs/docker/names",
)
def images_are_named(job: Evidence) -> Iterator[Finding]:
    """Every image has the name of one: no scheme, no capitals in its path, a repository at Artifact Registry."""
    for image in named(job):
        if image.reference and (wrong := why_unusable(image.reference)):
            yield Finding(image.at, wrong, "the image cannot be pulled, whatever the registry has", "correct the name")


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source="RFC 6761, section 6.3, and RFC 1122, section 3.2.1.3 (every machine is its own localhost and 127.0.0.1); "
    "https://github.com/distribution/reference/blob/main/normalize.go (a name without a registry is Docker Hub's)",
)
def images_can_be_pulled(job: Evidence) -> Iterator[Finding]:
    """No image of a job is only on this machine: built here and not pushed, or at a registry on it.

    A cluster of which the file does not say that it is GKE's may be on this machine, and have the image: as in
    https://kind.sigs.k8s.io/docs/user/local-registry/ and https://kind.sigs.k8s.io/docs/user/quick-start/#loading-an-image-into-your-cluster.
    """
    elsewhere = job.job.kind in GOOGLE or gke_objects.is_for_gke(job.job.documents)
    severity = Severity.CANNOT_START if elsewhere else Severity.NOTE
    for reference, at in {image.reference: image.at for image in reversed(list(named(job)))}.items():
        if place := only_here(reference):
            yield Finding(at, f"{reference} is {place}", WHO_RUNS_IT, PUSH_IT, severity=severity)


def only_here(reference: str) -> str:
    """Return where an image is that no other machine can pull; empty if others may be able to."""
    if is_loopback(reference):
        return "at a registry on this machine"
    ours = not why_unusable(reference) and Reference.parse(reference).name == f"{DOCKER_HUB}/library/{NAME}"
    return "a local name of Trainyard's, which names no registry" if ours else ""


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source="docs/jobs.md#checking-a-job (looked up on this host and at the registry, without pulling)",
)
def images_exist(job: Evidence) -> Iterator[Finding]:
    """Every image exists."""
    for image in named(job):
        reference, at, known = image.reference, image.at, job.images.get(image.reference)
        if reference in job.missing and reference in job.images:
            if only_here(reference) and job.job.kind in GOOGLE:  # images_can_be_pulled has named it
                continue
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
        elif known and known.local and _names_no_registry(reference) and not only_here(reference):
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
    worker = mapping(job.spec, "workerConfig")
    version = str(worker.get("tpuTfVersion") or "")
    image = worker.get("imageUri") or mapping(job.spec, "masterConfig").get("imageUri")
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


@worker_pools.vertex_rule(
    "https://cloud.google.com/vertex-ai/docs/training/pre-built-containers", Severity.CANNOT_START
)
def prebuilt_images_match_accelerator(job: Evidence) -> Iterator[Finding]:
    """A prebuilt image is for the machine's accelerator."""
    for pool in worker_pools.pools(job):
        image = str(mapping(pool.spec, "pythonPackageSpec").get("executorImageUri") or "")
        match = re.search(r"/vertex-ai/training/\w+-(cpu|gpu|tpu|xla)\.[\w.-]+?(:(\w+))?$", image)
        at, device = pool.at("pythonPackageSpec", "executorImageUri"), _device(pool)
        if match and match[3] != "latest":
            yield Finding(at, f"{image} without :latest", "prebuilt images have no other tag", "add :latest")
        if match and device and match[1] != device:
            what = f"an image for {match[1]} with a {device}"
            yield Finding(at, what, "the accelerator is paid for and idle", f"use the {device} image")


@rule(
    *VERTEX,
    "gke",
    severity=Severity.CANNOT_START,
    source="docs/jobs.md#checking-a-job (by the image's record, labels or packages)",
)
def images_support_accelerator(job: Evidence) -> Iterator[Finding]:
    """The framework in the image is built for the accelerator that the job asks for."""
    for image in named(job):
        device, contents = image.device, job.images.get(image.reference)
        if not device or contents is None or not contents.device or contents.device == device:
            continue
        yield Finding(
            image.at,
            f"a {device.upper()} job with an image for {contents.device.upper()}s: {contents.framework} "
            f"(by {contents.source})",
            f"the trainer runs on the host's CPU, and the {device.upper()} is paid for and idle",
            fitting(job.targets, contents.framework, device),
        )


@rule(
    *VERTEX,  # AI Platform starts no jobs
    "gke",
    severity=Severity.NOTE,
    source="docs/launcher-contract.md#r9.1 (the launcher starts on the CPU, with a warning), by the image's record, "
    "labels or packages",
)
def images_get_their_accelerator(job: Evidence) -> Iterator[Finding]:
    """A job with an image for GPUs or TPUs asks for an accelerator."""
    if _may_have_accelerators(job):
        return
    for reference, at in {image.reference: image.at for image in reversed(list(named(job)))}.items():
        contents = job.images.get(reference)
        if contents is not None and contents.device in ("gpu", "tpu"):
            yield Finding(
                at,
                f"an image for {contents.device.upper()}s in a job that asks for no accelerator: "
                f"{contents.framework or reference} (by {contents.source})",
                "the framework finds the CPU alone: the training is slow, which only its log says, or fails",
                f"ask for {contents.device.upper()}s, or use an image for CPUs",
            )


def _may_have_accelerators(job: Evidence) -> bool:
    """Return whether a job asks for GPUs or TPUs, or its file does not say what it gets."""
    if job.job.kind != "gke":
        pools, known = worker_pools.pools(job), machines.machine_types()
        return any(_device(pool) or _gpu(pool) or pool.machine_type not in known for pool in pools)
    documents = job.job.documents
    # GPUs and TPUs are extended resources, whose names have a slash, or claims of Dynamic Resource Allocation.
    return any(train_jobs.is_train_job(one) and not train_jobs.runtime_of(one, documents) for one in documents) or any(
        ("limits" in location and "/" in str(location[-1])) or "claims" in location
        for document in documents
        for location, _ in fields.walk(document)
    )


def fitting(targets: Targets, framework: str, device: str) -> str:
    """Return which targets are for ``cpu``, ``gpu`` or ``tpu`` and a framework, ``jax 0.12.0``, in words."""
    known, family = targets(), re.split("[_ ]", framework)[0]
    own = [recipe for recipe in known if recipe.framework.name.partition("_")[0] == family] or known
    kind = {"gpu": "nvidia", "cpu": "none"}.get(device, device)
    names = dict.fromkeys(recipe.name for recipe in own if recipe.accelerator.kind == kind)
    return f"targets for {device.upper()}s: {', '.join(names)}" if names else f"use an image for {device.upper()}s"


@rule(*KINDS, severity=Severity.NOTE, source="images/matrix.yaml")
def images_are_supported(job: Evidence) -> Iterator[Finding]:
    """The image is supported for 60 days more: its framework, base, Python and CUDA."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    for image in named(job):
        contents = job.images.get(image.reference)
        if contents is None or not (last := contents.supported_until):
            continue
        if datetime.date.fromisoformat(last) - datetime.timedelta(days=NOTICE) < today:
            yield Finding(
                image.at,
                f"{image.reference} is supported until {last} (by {contents.source})",
                "later faults of what it contains are not mended",
                "use a newer version ('trainyard list --ends')",
            )


@rule(
    *VERTEX,
    "gke",
    severity=Severity.CANNOT_START,
    source="https://cloud.google.com/kubernetes-engine/docs/how-to/prepare-arm-workloads-for-deployment",
)
def images_have_the_architecture(job: Evidence) -> Iterator[Finding]:
    """Every image is for the architecture of its machines."""
    for image in named(job):
        contents = job.images.get(image.reference)
        if contents is not None and (what := image.hosts.mismatch(contents.platforms)):
            why = "the container does not start: no matching manifest, or exec format error"
            yield Finding(image.at, what, why, f"{image.hosts.remediation()}, or use other machines")


@worker_pools.vertex_rule(
    "https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm "
    "(v5e: TensorFlow 2.15, PyTorch 2.1, JAX 0.4.6; v6e: no TensorFlow)",
    Severity.CANNOT_START,
)
def frameworks_support_tpu(job: Evidence) -> Iterator[Finding]:
    """The framework in the image supports the TPU's generation."""
    for image in named(job):
        contents = job.images.get(image.reference)
        if image.device != "tpu" or contents is None or image.generation not in _FIRST:
            continue
        for framework, first in _FIRST[image.generation].items():
            have = contents.tensorflow if framework == "tensorflow" else _version(contents, framework)
            if not have or (first and _at_least(have, first)):
                continue
            needs = f"it needs {first} or later" if first else "not supported"
            what = f"{framework} {have} on a TPU {image.generation}; {needs}"
            fix = "use a PyTorch or JAX image" if first is None else "use a newer image"
            yield Finding(image.at, what, "the trainer does not find the TPU", fix)


def _version(contents: Contents, framework: str) -> str:
    """Version of a framework in an image, or of torch_xla for torch; empty if it has neither."""
    names = (framework, "torch-xla") if framework == "torch" else (framework,)
    return next((contents.versions[name] for name in names if contents.versions.get(name)), "")


def _at_least(have: str, first: str) -> bool:
    try:
        return Version(have) >= Version(first)
    except InvalidVersion:
        return True


@rule(
    *KINDS,
    severity=Severity.CANNOT_START,
    source=(
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#application-compatibility, by the image's "
        "record, labels or packages; images/gpus.yaml; images/matrix.yaml"
    ),
)
def images_have_code_for_the_gpu(job: Evidence) -> Iterator[Finding]:
    """The image has device code for the GPU that the job asks for."""
    for image in named(job):
        if misfit := gpu_support.misfit(job.images.get(image.reference), image.gpu, job.targets):
            severity = Severity.CANNOT_START if misfit.fatal else Severity.NOTE
            yield Finding(image.at, misfit.what, misfit.why, misfit.remediation, severity)


@rule("gke", severity=Severity.NOTE, source="https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpus")
def nodes_have_the_driver(job: Evidence) -> Iterator[Finding]:
    """The NVIDIA driver that GKE installs is new enough for the image."""
    # Never more than a note: a job file does not name the version of its cluster, nor the driver of its node pool.
    table = machines.table().gke_drivers
    for image in named(job):
        contents, mode = job.images.get(image.reference), image.gke_driver or "default"
        known = gpu_support.code_for(contents, image.gpu)
        if contents is None or known is None or image.gke_driver is None or mode not in ("default", "latest"):
            continue
        gpu, code = known
        least, first = Version(code.driver), Version(gpus.gpus()[gpu.model].driver)
        drivers = {version: getattr(row, mode) for version, row in table.items()}
        newest = max(drivers.values(), key=Version)
        # GKE installs another driver for GPUs that this one does not know.
        if not first <= Version(newest) < least:
            continue
        versions = [version for version, driver in drivers.items() if driver == newest]
        enough = next((version for version, row in table.items() if Version(row.latest) >= least), "")
        latest = f"select nodes with {gke_objects.GPU_DRIVER}: latest (GKE {enough} or later), or " if enough else ""
        yield Finding(
            image.at,
            f"{contents.framework or 'the image'} with CUDA {code.cuda} needs driver {code.driver} or later (by "
            f"{contents.source}); the {mode} driver of GKE {versions[0]} to {versions[-1]} is {newest}",
            "CUDA refuses a driver that is too old, and the trainer ends or runs on the host's CPU",
            f"{latest}use a node pool with driver {code.driver} or later",
        )
