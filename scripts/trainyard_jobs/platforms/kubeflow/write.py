"""Kubeflow Trainer: a TrainJob on the runtime ``torch-distributed`` or ``jax-distributed``, in any Kubernetes cluster.

https://www.kubeflow.org/docs/components/trainer/; the API is pkg/apis/trainer/v1alpha1/trainjob_types.go of
https://github.com/kubeflow/trainer. Its plugins set variables such as PET_NNODES and JAX_COORDINATOR_ADDRESS, which the
launcher in the image reads (docs/launcher.md).
"""

from __future__ import annotations

from typing import Any

from trainyard.common.errors import UserError
from trainyard_jobs.kubernetes import train_jobs
from trainyard_jobs.kubernetes.gke_objects import JOBSET_NAME, object_name
from trainyard_jobs.kubernetes.train_jobs import NODE
from trainyard_jobs.model import yaml_writer
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.platforms.gke import write as gke
from trainyard_jobs.schema import kubernetes

#: Framework -> the runtime that Kubeflow Trainer installs for it (manifests/base/runtimes/jax_distributed.yaml).
RUNTIMES = {"jax": "jax-distributed"}

#: The runtime for other frameworks (manifests/base/runtimes/torch_distributed.yaml): its plugin sets more than others.
RUNTIME = "torch-distributed"

#: The owner of the patches of the runtime that the job makes.
MANAGER = "trainyard.dev/job"

#: The entrypoint of the catalogue's images, for runtimes that replace it by a command
#: (the runtime of Kubeflow Trainer 2.0 does: manifests/base/runtimes/torch_distributed.yaml).
ENTRYPOINT = ("tini", "--", "launch")


def runtime_of(request: Request) -> str:
    """Return the name of the runtime for the framework of an image; for an unknown one on TPUs, that of JAX."""
    if request.recipe is None:
        return RUNTIMES["jax"] if request.tpu else RUNTIME
    return RUNTIMES.get(request.recipe.framework.name, RUNTIME)


def train_job(request: Request) -> dict[str, Any]:
    """The TrainJob.

    Raises:
        UserError: Kubeflow does not run what is requested.
    """
    writing.refuse("kubeflow", request, "tune", "tensorboard", "slices")
    if request.tpu and runtime_of(request) != RUNTIMES["jax"]:
        fix = "use '--platform gke' for TPUs, or an image with JAX"
        raise UserError(f"the runtime {runtime_of(request)} runs jobs with GPUs or CPUs: {fix}")
    if request.tpu and request.workers > 1:
        raise UserError("the TPU slice determines the number of machines: leave out '--workers'")
    name = object_name(request.name)
    spec: dict[str, Any] = {"runtimeRef": {"name": runtime_of(request)}, "trainer": _trainer(request)}
    if request.timeout:
        spec["activeDeadlineSeconds"] = request.timeout
    if patch := _pod_patch(request, name):
        node = {"name": NODE, "template": {"spec": {"template": patch}}}
        template = {"metadata": {"annotations": gke.exclusive_pools(request)}} if gke.exclusive_pools(request) else {}
        runtime = {"template": template | {"spec": {"replicatedJobs": [node]}}}
        spec["runtimePatches"] = [{"manager": MANAGER, "trainingRuntimeSpec": runtime}]
    return {
        "apiVersion": kubernetes.TRAIN_JOB_VERSION,
        "kind": "TrainJob",
        "metadata": gke.metadata(request, labels=gke.object_labels(request)),
        "spec": spec,
    }


def _trainer(request: Request) -> dict[str, Any]:
    args, env = request.with_output()
    own = train_jobs.group_variables("jax" if runtime_of(request) == RUNTIMES["jax"] else "torch", "", 1, "1")
    if taken := [each["name"] for each in own if each["name"] in env]:
        raise UserError(f"'--env {taken[0]}': {taken[0]} is set by the runtime {runtime_of(request)}")
    # Without it, the Torch plugin makes a process for each CPU that is requested.
    one_process = bool(request.cpu) and not request.gpus and runtime_of(request) == RUNTIME
    trainer = {
        "image": request.image,
        "command": list(request.command or (ENTRYPOINT if request.recipe else ())),
        "args": list(args),
        "env": gke.variables(request, env),
        "numNodes": gke.hosts(request),
        "numProcPerNode": 1 if one_process else None,
        "resourcesPerNode": gke.resources(request),
    }
    return writing.without_empty(trainer)


def _pod_patch(request: Request, name: str) -> dict[str, Any]:
    """What the pods of the runtime get in addition: nodes, volumes, service account. Their shared memory is larger."""
    volumes = gke.volumes(request)
    spec = {
        "serviceAccountName": request.service_account,
        "nodeSelector": gke.selector(request),
        "tolerations": gke.tolerations(request),
        "imagePullSecrets": [{"name": one} for one in request.image_pull_secret],
        "volumes": [volume for _, volume, _ in volumes],
        "containers": [{"name": NODE, "volumeMounts": gke.volume_mounts(volumes)}],
    }
    return {"metadata": gke.pod_metadata(request, name), "spec": writing.without_empty(spec)}


class Kubeflow(Platform):
    """Kubeflow Trainer."""

    name = "kubeflow"
    in_kubernetes = True
    tpu_machine = True
    mounts = gke.MOUNTS
    options = gke.OPTIONS
    dry_run = gke.DRY_RUN

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        body = yaml_writer.dump(train_job(request))
        file = file or self.file_name
        notes = [*writing.machine_notes(request), *writing.network_notes(request)]
        if request.recipe is None and not request.command and not request.tpu:
            notes.append(f"the image's entrypoint has to start the training from PET_NNODES and the like of {RUNTIME}")
        return writing.rendered(request, gke.submit_command(file), file, body, notes)

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        name = object_name(job.request.name)
        # Kubeflow Trainer runs a TrainJob as a JobSet of its name.
        labels = f"{JOBSET_NAME}={name}"
        return gke.submit_objects(job, f"trainjob/{name}", labels, gke.hosts(job.request), interval)
