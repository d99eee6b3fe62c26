"""Names, labels and limits of the objects of jobs on GKE, for what writes, checks and rehearses them.

https://cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../tpu-multislice; the JobSet API is
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""

from __future__ import annotations

import re

from trainyard.console import UserError

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"

#: Node labels: kind and topology of TPUs, kind of GPUs, Spot VMs.
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GPU = "cloud.google.com/gke-accelerator"
SPOT = "cloud.google.com/gke-spot"

#: Resources that containers request: chips, GPUs.
TPU_RESOURCE = "google.com/tpu"
GPU_RESOURCE = "nvidia.com/gpu"

#: Label of a JobSet's pods, and the annotation that gives each of its Jobs a separate node pool.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

#: Seconds that GKE leaves a pod on a Spot VM that is preempted: 15 of the machine's 30
#: (https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms).
SPOT_GRACE = 15

#: Most characters of a name that we give: pods append indexes to it, and a label has at most 63 (RFC 1123).
_MAX_NAME = 40


def object_name(name: str) -> str:
    """A name as Kubernetes and the Cloud TPU API accept it (RFC 1123 label).

    Raises:
        UserError: it contains no letter or digit.
    """
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_NAME].rstrip("-")
    if not found:
        raise UserError(f"NAME={name!r} has no letter or digit")
    return found
