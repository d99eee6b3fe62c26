"""Names, labels and limits of the objects of jobs on GKE, for what writes, checks and rehearses them.

https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../tpu-multislice; the JobSet API is
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from trainyard.common.errors import UserError
from trainyard.spec.yaml_source import LONGEST_NUMBER
from trainyard_jobs.model import machines
from trainyard_jobs.model.machines import UNKNOWN_HOSTS, Hosts

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"

#: Node labels: kind and topology of TPUs, kind of GPUs, Spot VMs.
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GPU = "cloud.google.com/gke-accelerator"
SPOT = "cloud.google.com/gke-spot"

#: Node label: the NVIDIA driver that GKE installs, "default" or "latest"; "disabled" if it installs none
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/node-auto-provisioning#choose-driver-version).
GPU_DRIVER = "cloud.google.com/gke-gpu-driver-version"

#: Node labels: a node's architecture, its machine type and its series:
#: https://kubernetes.io/docs/reference/labels-annotations-taints/,
#: https://cloud.google.com/kubernetes-engine/docs/concepts/autopilot-compute-classes
ARCH = "kubernetes.io/arch"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
SERIES = "cloud.google.com/machine-family"

#: Node labels: Flex Start VMs
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/dws-flex-start-training), and reservations
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations).
FLEX_START = "cloud.google.com/gke-flex-start"
RESERVATION_AFFINITY = "cloud.google.com/reservation-affinity"
RESERVATION_NAME = "cloud.google.com/reservation-name"

#: Kueue: the label that names a job's LocalQueue, and the annotations of its pods that place them close to each other
#: (https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/).
QUEUE = "kueue.x-k8s.io/queue-name"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"

#: The driver of Cloud Storage FUSE, and the annotation of pods that use it
#: (https://docs.cloud.google.com/kubernetes-engine/docs/how-to/cloud-storage-fuse-csi-driver-ephemeral).
BUCKET_DRIVER = "gcsfuse.csi.storage.gke.io"
BUCKET_VOLUMES = "gke-gcsfuse/volumes"

#: Resources that containers request: chips, GPUs.
TPU_RESOURCE = "google.com/tpu"
GPU_RESOURCE = "nvidia.com/gpu"

#: Label of a JobSet's pods, and the annotation that gives each of its Jobs a separate node pool.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

#: Seconds that GKE leaves a pod on a Spot VM that is preempted: 15 of the machine's 30
#: (https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).
SPOT_GRACE = 15

#: Most characters of a name that we give: pods append indexes and a random ending to it, and a label has at most 63.
_MAX_NAME = 40

#: A name of most objects (https://kubernetes.io/docs/concepts/overview/working-with-objects/names).
NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

#: Units of quantities, as powers of 10 and of 1024.
_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def is_for_gke(documents: Sequence[Mapping[str, object]]) -> bool:
    """Return whether objects name what only GKE has: its labels, annotations, drivers and TPUs."""
    return bool(re.search(r"'(cloud\.google\.com/|google\.com/tpu|gke-gcsfuse/|[\w.]+\.gke\.io)", str(documents)))


def hosts_of(selector: Mapping[str, object]) -> Hosts:
    """The nodes that a node selector allows, by the label that decides their architecture."""
    gpu = str(selector.get(GPU) or "")
    of_gpus = {one.gke_accelerator: "arm64" if one.arm else "amd64" for one in machines.table().gpus.values()}
    found = {
        ARCH: str(selector.get(ARCH) or ""),
        INSTANCE_TYPE: machines.architecture_of(str(selector.get(INSTANCE_TYPE) or "")),
        SERIES: machines.architecture_of(str(selector.get(SERIES) or "")),
        GPU: of_gpus.get(gpu, ""),
        ACCELERATOR: "amd64" if selector.get(ACCELERATOR) else "",
    }
    known = (Hosts(f"nodes with {label}: {selector[label]}", arch) for label, arch in found.items() if arch)
    return next(known, UNKNOWN_HOSTS)


def gpu_of(selector: Mapping[str, object]) -> str:
    """Return the type of the GPUs of the nodes, by their label or machine type; empty without one, or if unknown."""
    label = selector.get(GPU)
    known = (name for name, gpu in machines.table().gpus.items() if gpu.gke_accelerator == label)
    own = machines.gpu_of_machine(str(selector.get(INSTANCE_TYPE) or ""))
    return next(known, "") if label else own[0] if own else ""


def generation_of(selector: Mapping[str, object]) -> str | None:
    """Return the TPU generation of the nodes; None without a TPU, and for one that machines.yaml does not have."""
    label = selector.get(ACCELERATOR)
    known = machines.table().tpus.items()
    return next((name for name, tpu in known if label and tpu.gke_accelerator == label), None)


def object_name(name: str) -> str:
    """A name as all objects of a job and the Cloud TPU API accept it (RFC 1035 label: with a letter first).

    Raises:
        UserError: it contains no letter or digit.
    """
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found:
        raise UserError(f"NAME={name!r} has no letter or digit")
    if not found[0].isalpha():
        found = f"job-{found}"
    return found[:_MAX_NAME].rstrip("-")


def quantity(value: object) -> Fraction | None:
    """Read a resource quantity, such as ``500m``, ``64Gi`` or ``8``; None if it is none.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
    """
    match = re.fullmatch(
        r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3}|)", str(value)
    )  # fmt: skip
    if not match or isinstance(value, bool) or len(match[0]) > LONGEST_NUMBER:
        return None
    number, suffix = Fraction(match[1].rstrip(".") if match[1].rstrip(".") else "0"), match[2]
    if suffix in _BINARY:
        return number * int(1024 ** _BINARY[suffix])
    if suffix in _POWERS:
        return number * Fraction(10) ** _POWERS[suffix]
    return number * Fraction(10) ** int(suffix[1:])
