"""Cloud TPU VMs: the commands that create a slice, run the image on every worker, follow the logs and delete it all."""

from __future__ import annotations

import shlex

from scripts.cli import UserError
from scripts.jobs import machines
from scripts.jobs.gke import object_name
from scripts.jobs.request import Request
from scripts.pods import gcloud
from scripts.pods.gcloud import Pod


def pod(request: Request) -> Pod:
    """The slice as the Cloud TPU API names it.

    Raises:
        UserError: no TPU was asked for, or one the Cloud TPU API does not have, or what TPU VMs cannot do.
    """
    for name, value in (
        ("TUNE", request.tuning),
        ("TENSORBOARD", request.tensorboard),
        ("TIMEOUT", request.timeout),
        ("MACHINE", request.machine),
        ("WORKERS", request.workers > 1),
        ("SLICES", request.slices > 1),
    ):
        if value:
            raise UserError(f"PLATFORM=tpu-vm has no {name}: one slice, by its ACCELERATOR, until the training ends")
    tpu = request.tpu
    if tpu is None:
        raise UserError("PLATFORM=tpu-vm needs a TPU, as in ACCELERATOR=v5litepod-4")
    if tpu.runtime_version is None:
        offered = [one.accelerator_type for one in machines.slices().values() if one.runtime_version]
        raise UserError(f"the Cloud TPU API has no {tpu.accelerator_type} (GKE has); it has {', '.join(offered)}")
    zone = request.zone or next((one for one in tpu.zones if one.startswith(f"{request.place}-")), None)
    if zone is None or zone not in tpu.zones:
        where = f"ZONE={zone}" if zone else f"REGION={request.place}"
        raise UserError(f"{where} has no {tpu.accelerator_type}; it is in {', '.join(tpu.zones)}")
    return Pod(
        name=object_name(request.name),
        zone=zone,
        accelerator_type=tpu.accelerator_type,
        version=tpu.runtime_version,
        spot=request.spot,
        project=request.project,
        service_account=request.service_account,
    )


def commands(request: Request) -> dict[str, list[str]]:
    """``create``, ``run``, ``logs``, ``delete``: each one's words."""
    where = pod(request)
    return {
        "create": gcloud.create(where),
        "run": gcloud.run(where, request.image, request.with_output_flag()),
        "logs": gcloud.logs(where),
        "delete": gcloud.delete(where),
    }


def script(request: Request) -> str:
    """The commands as a shell script that deletes the slice however it ends, also on Ctrl-C."""
    words = {name: shlex.join(command) for name, command in commands(request).items()}
    return "\n".join(
        [
            "set -euo pipefail",
            "",
            f"{words['create']}",
            "# Whatever happens from here on, nothing stays that costs money.",
            f"trap {shlex.quote(words['delete'])} EXIT",
            "",
            "# The container starts on every worker, in the background: a lost connection does not end the training.",
            f"{words['run']}",
            "",
            "# Follow the logs, [i] before each line of worker i; the status is that of a container that failed.",
            f"{words['logs']}",
            "",
        ]
    )
