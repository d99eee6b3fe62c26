"""Cloud TPU VMs: a script that creates a slice, runs the image on every worker, follows its logs and deletes it."""

from __future__ import annotations

import shlex

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.kubernetes.gke_objects import object_name
from trainyard_jobs.model import machines
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.pods import gcloud_args
from trainyard_jobs.pods.gcloud_args import Pod


def pod(request: Request) -> Pod:
    """The slice as the Cloud TPU API names it.

    Raises:
        UserError: no TPU was requested, or one that the Cloud TPU API does not offer, or an option that TPU VMs lack.
    """
    unsupported = {
        "--tune": request.tuning,
        "--tensorboard": request.tensorboard,
        "--timeout": request.timeout,
        "--machine": request.machine,
        "--workers": request.workers > 1,
        "--slices": request.slices > 1,
    }
    writing.refuse("tpu-vm", unsupported, ": it runs one slice, given by '--accelerator', until the training ends")
    tpu = request.tpu
    if tpu is None:
        raise UserError("'--platform tpu-vm' needs a TPU, as in '--accelerator v5litepod-4'")
    if tpu.runtime_version is None:
        offered = [one.accelerator_type for one in machines.slices().values() if one.runtime_version]
        raise UserError(f"the Cloud TPU API has no {tpu.accelerator_type}, which GKE has; it has {', '.join(offered)}")
    if machines.slices().get(tpu.accelerator_type) != tpu:
        fix = f"give '--accelerator {tpu.accelerator_type}', whose topology the API chooses, or use '--platform gke'"
        raise UserError(f"TPU VMs are requested by number: {fix}")
    if request.reservation not in (None, "any"):
        why = "the Cloud TPU API uses the project's reservation"
        raise UserError(f"'--reservation {request.reservation}': {why}: give '--reservation any'")
    zone = request.zone or next((one for one in tpu.zones if one.startswith(f"{request.place}-")), None)
    if zone is None or not tpu.may_be_in(zone):
        where = f"'--zone {zone}'" if zone else f"'--region {request.place}'"
        raise UserError(f"{where} has no {tpu.accelerator_type}; it is in {', '.join(tpu.zones)}")
    return Pod(
        name=object_name(request.name),
        zone=zone,
        accelerator_type=tpu.accelerator_type,
        version=tpu.runtime_version,
        spot=request.spot,
        project=request.project,
        service_account=request.service_account,
        network=request.network,
        reserved=bool(request.reservation),
        labels=request.labels,
    )


def script(request: Request) -> str:
    """Return a shell script that always deletes the slice at its end, on errors and Ctrl-C too."""
    where, (args, env) = pod(request), request.with_output()
    writing.check_tpu(request)
    lines = [
        "set -euo pipefail",
        "",
        shlex.join(gcloud_args.create(where)),
        "# The slice is billed until it is deleted: do so however this script ends.",
        f"trap {shlex.quote(shlex.join(gcloud_args.delete(where)))} EXIT",
        "",
        "# Start the container on every worker, in the background: a lost connection does not stop the training.",
        shlex.join(gcloud_args.run(where, request.image, args, env)),
        "",
        "# Follow the logs, with [i] before each line of worker i; the exit status is that of a failed container.",
        shlex.join(gcloud_args.logs(where)),
        "",
    ]
    return "\n".join(lines)


class TpuVm(Platform):
    """Cloud TPU VMs. A job is a shell script, which no other command reads."""

    name = "tpu-vm"
    file_name = "job.sh"
    options = frozenset({"labels", "network", "reservation"})

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        command = ["bash", file or self.file_name]
        head = writing.script_header(request, f"Run it with: {shlex.join(command)}")
        text = "#!/usr/bin/env bash\n" + head + script(request)
        return RenderedJob(text, command, request)

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        submission.require_program("gcloud")
        with submission.temporary_file(job.text, self.file_name) as path:
            status = submission.run_visibly(["bash", str(path)])
        if status:
            raise StepFailed(f"the script of the TPU VM ended with status {status}; see its output above")
        return Submission(object_name(job.request.name), "SUCCEEDED")
