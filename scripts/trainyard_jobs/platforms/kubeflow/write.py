"""Kubeflow Trainer: a TrainJob on the runtime ``torch-distributed``, in any Kubernetes cluster.

https://www.kubeflow.org/docs/components/trainer/; the API is pkg/apis/trainer/v1alpha1/trainjob_types.go of
https://github.com/kubeflow/trainer. Its Torch plugin sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
PET_MASTER_ADDR and PET_MASTER_PORT, which the launcher in the image reads (docs/launcher.md).
"""

from __future__ import annotations

from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.kubernetes.gke_objects import JOBSET_NAME, object_name
from trainyard_jobs.kubernetes.train_jobs import NODE
from trainyard_jobs.model import yaml_writer
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.platforms.gke import write as gke
from trainyard_jobs.schema import kubernetes

#: The runtime that Kubeflow Trainer installs for PyTorch (manifests/base/runtimes/torch_distributed.yaml).
RUNTIME = "torch-distributed"

#: The owner of the patches of the runtime that the job makes.
MANAGER = "trainyard.dev/job"

#: The entrypoint of the catalogue's images, for runtimes that replace it by a command
#: (the runtime of Kubeflow Trainer 2.0 does: manifests/base/runtimes/torch_distributed.yaml).
ENTRYPOINT = ("tini", "--", "launch")


def train_job(request: Request) -> dict[str, Any]:
    """The TrainJob.

    Raises:
        UserError: Kubeflow does not run what is requested.
    """
    unsupported = {
        "--tune": request.tuning,
        "--tensorboard": request.tensorboard,
        "--slices": request.slices > 1,
    }
    writing.refuse("kubeflow", unsupported)
    if request.tpu:
        raise UserError(f"the runtime {RUNTIME} runs jobs with GPUs or CPUs: use '--platform gke' for TPUs")
    name = object_name(request.name)
    labels = gke.object_labels(request)
    spec: dict[str, Any] = {"runtimeRef": {"name": RUNTIME}, "trainer": _trainer(request)}
    if request.timeout:
        spec["activeDeadlineSeconds"] = request.timeout
    if patch := _pod_patch(request, name):
        node = {"name": NODE, "template": {"spec": {"template": patch}}}
        runtime = {"template": {"spec": {"replicatedJobs": [node]}}}
        spec["runtimePatches"] = [{"manager": MANAGER, "trainingRuntimeSpec": runtime}]
    return {
        "apiVersion": kubernetes.TRAIN_JOB_VERSION,
        "kind": "TrainJob",
        "metadata": {"name": name} | ({"labels": labels} if labels else {}),
        "spec": spec,
    }


def _trainer(request: Request) -> dict[str, Any]:
    args, env = request.with_output()
    found: dict[str, Any] = {"image": request.image}
    if request.spec:
        found["command"] = list(ENTRYPOINT)
    if args:
        found["args"] = list(args)
    if env:
        found["env"] = [{"name": key, "value": value} for key, value in env.items()]
    found["numNodes"] = request.workers
    if devices := gke.devices(request):
        found["resourcesPerNode"] = {"requests": devices, "limits": devices}
    return found


def _pod_patch(request: Request, name: str) -> dict[str, Any]:
    """What the pods of the runtime get in addition: nodes, volumes, service account. Their shared memory is larger."""
    volumes = gke.volumes(request)
    spec: dict[str, Any] = {}
    if request.service_account:
        spec["serviceAccountName"] = request.service_account
    if selector := gke.selector(request):
        spec["nodeSelector"] = selector
    if tolerations := gke.tolerations(request):
        spec["tolerations"] = tolerations
    spec["volumes"] = [volume for _, volume, _ in volumes]
    spec["containers"] = [{"name": NODE, "volumeMounts": gke.volume_mounts(volumes)}]
    return {"metadata": gke.pod_metadata(request, name), "spec": spec}


class Kubeflow(Platform):
    """Kubeflow Trainer."""

    name = "kubeflow"
    options = frozenset({"flex-start", "reservation", "queue", "placement", "disk", "mount", "labels"})

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        found = train_job(request)
        shown = gke.submit_command(self.file_name)
        text = writing.header(request, shown) + yaml_writer.dump(found)
        writing.checked(self, text, request, writing.expected_contents(request))
        notes = [*writing.machine_notes(request), *writing.network_notes(request)]
        if request.spec is None:
            notes.append(f"the image's entrypoint has to start the training from PET_NNODES and the like of {RUNTIME}")
        return RenderedJob(text, gke.submit_command(file or self.file_name), request, notes=tuple(notes))

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        submission.require_program("kubectl")
        name = object_name(job.request.name)
        with submission.temporary_file(job.text, self.file_name) as path:
            if submission.run_visibly(gke.submit_command(str(path))):
                option = "'--name'"
                raise StepFailed(f"kubectl could not create the job; see above ({option} gives it another name)")
        resource = f"trainjob/{name}"
        # Kubeflow Trainer runs a TrainJob as a JobSet of its name.
        labels = f"{JOBSET_NAME}={name}"
        try:
            state = gke.follow_pods(resource, labels, job.request.workers, interval)
        except KeyboardInterrupt:
            submission.say_still_running(["kubectl", "delete", resource])
            raise
        return submission.submission(resource, state, succeeded=("Complete",))
