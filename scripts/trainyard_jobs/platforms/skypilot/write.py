"""SkyPilot: a task that runs the image on every node of a cluster, on any cloud that it finds machines on.

Fields of tasks: https://docs.skypilot.co/en/latest/reference/yaml-spec.html; their schema is sky/utils/schemas.py of
https://github.com/skypilot-org/skypilot. SkyPilot's machines have Docker; with ``image_id``, SkyPilot would install its
own runtime in the image instead of running its entrypoint.
"""

from __future__ import annotations

import shlex
from typing import Any

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.kubernetes.gke_objects import object_name
from trainyard_jobs.model import options, yaml_writer
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.pods import shell_commands

#: GPUs that SkyPilot names differently from the last part of Google's names
#: (https://docs.skypilot.co/en/latest/compute/gpus.html).
_ACCELERATORS = {
    "NVIDIA_A100_80GB": "A100-80GB",
    "NVIDIA_H100_80GB": "H100",
    "NVIDIA_H100_MEGA_80GB": "H100-MEGA",
    "NVIDIA_H200_141GB": "H200",
    "NVIDIA_RTX_PRO_6000": "RTXPRO6000",
}

#: How the launcher learns about the group: https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html.
_GROUP = (
    '--env=NNODES="$SKYPILOT_NUM_NODES" --env=NODE_RANK="$SKYPILOT_NODE_RANK" '
    '--env=MASTER_ADDR="$(head -n1 <<<"$SKYPILOT_NODE_IPS")"'
)


def _check(request: Request) -> None:
    """Check that SkyPilot can run what is requested."""
    writing.refuse("skypilot", request, "tune", "tensorboard", "slices", "timeout", "service_account")
    for name, source in request.secret:
        if source != "env":
            raise UserError(
                f"'--secret {name}={source}': SkyPilot takes secrets from your environment: write {name}=env"
            )
    if request.tpu and (request.workers > 1 or request.tpu.runtime_version is None):
        fix = "leave out '--workers', and request a slice that the API has"
        raise UserError(f"SkyPilot creates a TPU slice through the Cloud TPU API: {fix}")


def resources(request: Request) -> dict[str, Any]:
    """The machines: of any cloud that has the GPUs, or of Google Cloud if what is requested or the image is there."""
    found: dict[str, Any] = {}
    # Only machines of Google Cloud have a token for its registry.
    at_google = shell_commands.GOOGLE_REGISTRY.fullmatch(request.image.partition("/")[0])
    if request.tpu or request.machine or request.region or request.zone or at_google:
        place = request.place if request.region or request.zone else ""
        found["infra"] = "/".join(part for part in ("gcp", place, request.zone or "") if part)
    if request.machine:
        found["instance_type"] = request.machine
    if request.tpu:
        found["accelerators"] = f"tpu-{request.tpu.accelerator_type}:1"
        found["accelerator_args"] = {"runtime_version": request.tpu.runtime_version}
    elif request.gpus:
        short = request.gpus.type.removeprefix("NVIDIA_").removeprefix("TESLA_")
        found["accelerators"] = f"{_ACCELERATORS.get(request.gpus.type, short)}:{request.gpus.count}"
    if request.spot:
        found["use_spot"] = True
    if request.cpu:
        found["cpus"] = f"{options.whole_cpus(request.cpu)}+"
    if request.memory:
        found["memory"] = f"{options.mebibytes(request.memory) / 2**10:g}+"
    if request.disk:
        found["disk_size"] = request.disk.size
    if request.labels:
        found["labels"] = dict(request.labels)
    return found


def run(request: Request) -> str:
    """The shell script that every node runs."""
    args, env = request.with_output()
    # A slice's workers find each other through the Cloud TPU API.
    group = _GROUP if request.workers > 1 else ""
    flags = ["--privileged"] if request.tpu else ["--gpus=all"] if request.gpus else []
    flags += [f"--volume={one.path}:{one.path}{':ro' if one.read_only else ''}" for one in request.mounts]
    start, more, first = shell_commands.docker_words(request.command, [name for name, _ in request.secret])
    flags += [*(f"--env={name}={value}" for name, value in env.items()), *more]
    container = [*start, "run", "--rm", "--net=host", "--shm-size=16g", *flags]
    image = shlex.join([request.image, *first, *args])
    command = " ".join(part for part in (shlex.join(container), group, image) if part)
    return "\n".join(line for line in ("set -e", shell_commands.login(request.image), command) if line) + "\n"


def task(request: Request) -> dict[str, Any]:
    """The task."""
    found: dict[str, Any] = {"name": object_name(request.name), "num_nodes": request.workers}
    if machines := resources(request):
        found["resources"] = machines
    if request.mounts:
        found["file_mounts"] = {
            one.path: {"source": "/".join(part for part in (f"gs://{one.bucket}", one.folder) if part), "mode": "MOUNT"}
            for one in request.mounts
        }
    if request.secret:
        found["secrets"] = dict.fromkeys((name for name, _ in request.secret), None)
    return found | {"run": run(request)}


class SkyPilot(Platform):
    """SkyPilot."""

    name = "skypilot"
    file_name = "task.yaml"
    mounts = ("gs",)
    options = frozenset({"disk", "mount", "labels", "env", "secret", "cpu", "memory"})
    dry_run = ("sky", "launch", "--dryrun", "--yes")

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        _check(request)
        writing.check_machine(request)
        if request.disk and request.disk.type:
            raise UserError(f"SkyPilot chooses the type of the disk: give its size alone, '--disk {request.disk.size}'")
        command = self._command(request, file or self.file_name)
        head = writing.script_header(request, "Submit it with:", shlex.join(command))
        text = head + yaml_writer.dump(task(request))
        return RenderedJob(text, command, request, notes=writing.machine_notes(request))

    @staticmethod
    def _command(request: Request, file: str) -> list[str]:
        """A managed job, which SkyPilot recovers after a preemption, or a cluster that is deleted at the end."""
        how = ["jobs", "launch", "--yes"] if request.spot else ["launch", "--yes", "--down"]
        return ["sky", *how, *(f"--secret={name}" for name, _ in request.secret), file]

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        submission.require_program("sky")
        with submission.temporary_file(job.text, self.file_name) as path:
            status = submission.run_visibly(self._command(job.request, str(path)))
        if status:
            raise StepFailed(f"'sky' ended with status {status}; see its output above")
        return Submission(object_name(job.request.name), "SUCCEEDED")
