"""Cloud TPU VMs: a script that creates a slice, runs the image on every worker, follows its logs and deletes it."""

from __future__ import annotations

import shlex

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.kubernetes.gke_objects import object_name
from trainyard_jobs.model import machines
from trainyard_jobs.model.request import FLEX_START, Request
from trainyard_jobs.platforms import submission, writing
from trainyard_jobs.platforms.base import Platform, RenderedJob, Submission
from trainyard_jobs.pods import gcloud_args, shell_commands
from trainyard_jobs.pods.gcloud_args import Pod


def pod(request: Request) -> Pod:
    """The slice as the Cloud TPU API names it.

    Raises:
        UserError: no TPU was requested, or one that the Cloud TPU API does not offer, or an option that TPU VMs lack.
    """
    lacking = ("tune", "tensorboard", *(() if request.flex_start else ("timeout",)), "machine", "workers")
    why = ": it runs slices, given by '--accelerator', until the training ends"
    writing.refuse("tpu-vm", request, *lacking, why=why)
    tpu = request.tpu
    if tpu is None:
        raise UserError("'--platform tpu-vm' needs a TPU, as in '--accelerator v5litepod-4'")
    if tpu.runtime_version is None:
        offered = [one.accelerator_type for one in machines.slices().values() if one.runtime_version]
        raise UserError(f"the Cloud TPU API has no {tpu.accelerator_type}, which GKE has; it has {', '.join(offered)}")
    if machines.slices().get(tpu.accelerator_type) != tpu:
        fix = f"give '--accelerator {tpu.accelerator_type}', whose topology the API chooses, or use '--platform gke'"
        raise UserError(f"TPU VMs are requested by number: {fix}")
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
        reserved=request.reservation == "any",
        reservation=None if request.reservation == "any" else request.reservation,
        flex_start=(request.timeout or FLEX_START) if request.flex_start else None,
        slices=request.slices,
        labels=request.labels,
    )


def _create(request: Request, where: Pod) -> list[str]:
    """Return the lines that create the slices, delete them at the end of the script, and wait for their queue.

    gcloud 528 ignores the end of a request that has no start: the script itself ends, too.
    """
    queued = bool(request.queued or where.reservation or where.flex_start or where.slices > 1)
    until = f"{request.max_wait}s" if request.max_wait else None
    create = gcloud_args.create_queued(where, valid_until=until) if queued else gcloud_args.create(where)
    delete = gcloud_args.delete(where, queued=queued)
    state = shlex.join([*gcloud_args.describe(where, queued=True)[:-1], "--format=value(state.state)"])
    limit = f"[ $SECONDS -lt {request.max_wait} ] || {{ echo no capacity after $SECONDS s >&2; exit 1; }}"
    wait = [
        f'until state="$({state})" && [ "$state" = ACTIVE ]; do',
        f"  case $state in FAILED|SUSPEND*|DELETING) echo {where.name}: $state >&2; exit 1 ;; esac",
        *([f"  {limit}"] if until else []),
        "  sleep 10",
        "done",
    ]
    return [
        shlex.join(create),
        "# The slice is billed until it is deleted: do so however this script ends.",
        f"trap {shlex.quote(shlex.join(delete))} EXIT",
        *(wait if queued else []),
    ]


def script(request: Request) -> str:
    """Return a shell script that always deletes the slice at its end, on errors and Ctrl-C too."""
    where, (args, env) = pod(request), request.with_output()
    secrets = dict(request.secret)
    start = shell_commands.start(request.image, args, env, entrypoint=request.command, secrets=secrets)
    lines = [
        "set -euo pipefail",
        "",
        *_create(request, where),
        "",
        "# Start the container on every worker, in the background: a lost connection does not stop the training.",
        shlex.join(gcloud_args.run(where, request.image, start)),
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
    options = frozenset({"labels", "network", "reservation", "flex-start", "max-wait", "queued", "env", "secret"})

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
