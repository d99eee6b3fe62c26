"""Names that are nearly right: of images, accelerators and machines.

The documents that each case links say which names there are. Names that may be newer than those documents are valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.corpus.case import Case, Document, dumped
from tests.unit.corpus.google_jobs import JOB_SPEC, pool, pools
from tests.unit.corpus.kubernetes import ACCELERATOR, GPU, MACHINE, TOPOLOGY, TPU, gpu, job

Entry = tuple[str, str, Document, bool]

REFERENCE = "https://github.com/distribution/reference/blob/v0.6.0/reference_test.go"
REGISTRY = "https://cloud.google.com/artifact-registry/docs/docker/names"
PLAN_TPUS = "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"
HOW_TO_TPUS = "https://cloud.google.com/kubernetes-engine/docs/how-to/tpus"
GPUS = "https://cloud.google.com/kubernetes-engine/docs/concepts/gpus"
A4X_MAX = "https://docs.nvidia.com/aicr/integrator-guide/gke-a-4-x-max-networking.md"
TRAINER = "https://github.com/kubeflow/trainer/blob/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3"

DIGEST = f"sha256:{'0' * 64}"

#: Where a reference is from, the reference, and whether it names an image.
REFERENCES: list[tuple[str, str, bool]] = [
    (REFERENCE, "debian", True),
    (REFERENCE, "Docker.Example:5000/team/img", True),
    (REFERENCE, "quay.io/img:Tag_1", True),
    (REGISTRY, f"us-docker.pkg.dev/my-project/ml/img@{DIGEST}", True),
    (REGISTRY, "us-central1-docker.pkg.dev/example.com/my-project/ml/img:1", True),
    (REGISTRY, "gcr.io/my-project/img", True),
    (REFERENCE, "https://us-docker.pkg.dev/my-project/ml/img", False),
    (REFERENCE, "docker://debian", False),
    (REFERENCE, "us-docker.pkg.dev/PROJECT_ID/ml/img", False),
    (REFERENCE, "gcr.io/my-project/Trainer:1", False),
    (REFERENCE, "gcr.io/my-project/img:", False),
    (REFERENCE, "gcr.io/my-project/img:a b", False),
    (REFERENCE, "gcr.io/my-project/img@sha256:12", False),
    (REGISTRY, "us-docker.pkg.dev/my-project/img:1", False),
    (REGISTRY, f"europe-west4-docker.pkg.dev/my-project@{DIGEST}", False),
]


def _images() -> Iterator[Entry]:
    for source, name, valid in REFERENCES:
        yield f"image {name} on Vertex AI", source, pools(pool(containerSpec={"imageUri": name})), valid
        yield f"image {name} on GKE", source, job(container={"image": name}), valid
        first = {"initContainers": [{"name": "first", "image": name}]}
        yield f"image {name} of an init container", source, job(pod=first), valid
        trained = {"trainer": {"image": name}}
        yield f"image {name} of a TrainJob", source, train_job(**trained), valid


def train_job(api: str = "trainer.kubeflow.org/v1alpha1", **spec: Any) -> Document:
    spec = {"runtimeRef": {"name": "torch-distributed"}, **spec}
    return {"apiVersion": api, "kind": "TrainJob", "metadata": {"name": "train"}, "spec": spec}


def _vertex() -> Iterator[Entry]:
    for name, valid in (("NVIDIA_B300", True), ("NVIDIA_T4", False), ("NVIDIA_TESLA_L4", False), ("NVIDIA_H100", False),
                        ("nvidia-tesla-t4", False), ("NVIDIA_A100_80", True)):  # fmt: skip
        yield f"accelerator {name}", JOB_SPEC, pools(pool("n1-custom-8-32768", name, 1)), valid
    for name, valid in (("n9-standard-8", True), ("N1-Standard-8", False), ("n1_standard_8", False),
                        ("a4x-maxgpu-4g-metal", True)):  # fmt: skip
        yield f"machine {name}", JOB_SPEC, pools(pool(name)), valid


def tpu_job(label: str, topology: str, chips: int, *, pods: int = 1, env: str = "", **spec: Any) -> Document:
    container = {"resources": {"limits": {TPU: chips}}} | ({"env": [{"name": env, "value": "0"}]} if env else {})
    pod = {"nodeSelector": {ACCELERATOR: label, TOPOLOGY: topology}, "subdomain": "svc"}
    return job(pod=pod, container=container, completions=pods, parallelism=pods, backoffLimit=0, **spec)


def _gke() -> Iterator[Entry]:
    for name, valid in (("nvidia-l4", True), ("nvidia-l4-vws", True), ("nvidia-b300", True), ("nvidia-L4", False),
                        ("nvidia-t4", False), ("nvidia-h100", False), ("NVIDIA_TESLA_T4", False)):  # fmt: skip
        yield f"GPU {name}", GPUS, gpu(name, 1), valid
    yield "GPU nvidia-gb300", A4X_MAX, gpu("nvidia-gb300", 4, **{MACHINE: "a4x-maxgpu-4g-metal"}), True
    yield "5 GPUs nvidia-gb300", A4X_MAX, gpu("nvidia-gb300", 5), False
    yield "a machine in capitals", GPUS, job(pod={"nodeSelector": {MACHINE: "G2-standard-8"}}), False
    yield "a machine that is new", GPUS, job(pod={"nodeSelector": {MACHINE: "g9-standard-8"}}), True
    for name, valid in (("tpu7x", True), ("tpu7", True), ("tpu-v4-lite-device", True), ("tpu-v7x-slice", False),
                        ("tpu-v7x", False), ("TPU7X", False)):  # fmt: skip
        yield f"TPU {name}", PLAN_TPUS, tpu_job(name, "2x2x1", 4), valid
    for name in ("tpu-v6e-podslice", "tpu-v6e", "tpu-v5e-slice", "tpu_v6e_slice"):
        yield f"TPU {name}", PLAN_TPUS, tpu_job(name, "2x2", 4), False
    for topology, chips, valid in (("1x1", 1, True), ("2x2", 4, True), ("2x4", 8, True), ("4x4", 4, False)):
        yield f"tpu-v5-lite-device {topology}", PLAN_TPUS, tpu_job("tpu-v5-lite-device", topology, chips), valid
    slices = "tpu-v6e-slice", "4x4", 4
    yield "4 hosts of a slice, Indexed", HOW_TO_TPUS, tpu_job(*slices, pods=4, completionMode="Indexed"), True
    yield "4 hosts of a slice, not Indexed", HOW_TO_TPUS, tpu_job(*slices, pods=4), False
    yield "4 hosts with an index of their own", HOW_TO_TPUS, tpu_job(*slices, pods=4, env="TPU_WORKER_ID"), True
    yield "4 slices of one host", HOW_TO_TPUS, tpu_job("tpu-v6e-slice", "2x2", 4, pods=4), True


def _kubeflow() -> Iterator[Entry]:
    crd = f"{TRAINER}/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
    for version, valid in (("v1alpha1", True), ("v1beta1", True), ("v1", False), ("v2", False)):
        yield f"TrainJob of {version}", crd, train_job(f"trainer.kubeflow.org/{version}"), valid
    runtime = f"{TRAINER}/manifests/base/runtimes/torch_distributed.yaml"
    requested = {"trainer": {"resourcesPerNode": {"requests": {GPU: 1}}}}
    limited = {"trainer": {"resourcesPerNode": {"requests": {GPU: 1}, "limits": {GPU: 1}}}}
    yield "TrainJob with a limit", runtime, train_job(**limited), True
    yield "TrainJob without a limit", runtime, train_job(**requested), False
    yield (
        "TrainJob without a limit, of our own runtime",
        runtime,
        train_job(runtimeRef={"name": "ours"}, **requested),
        True,
    )


def corpus() -> Iterator[Case]:
    """All of them."""
    for part in (_images, _vertex, _gke, _kubeflow):
        for name, source, document, valid in part():
            yield Case(f"names: {name}", source, dumped(document), valid)
