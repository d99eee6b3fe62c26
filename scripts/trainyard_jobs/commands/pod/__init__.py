"""``trainyard pod``."""

from __future__ import annotations

import functools
from typing import Any

import click

from trainyard.common import options
from trainyard_jobs.model import options as job_options

GROUP = "jobs"

DURATION = "90s|30m|6h"

#: Where the context keeps the arguments of xla_dist.
_XLA_DIST = f"{__name__}.xla_dist"


class PodCommand(options.Group):
    """Also takes the arguments of torch_xla's xla_dist, whose flags are different: ``--tpu NAME ... -- PROGRAM``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any(word.startswith("--tpu") for word in args):
            from trainyard_jobs.pods import xla_dist

            if xla_dist.is_xla_dist(args):
                ctx.meta[_XLA_DIST] = tuple(args)
                args = []
        return super().parse_args(ctx, args)


@click.command(
    cls=PodCommand,
    short_help="Train on a Cloud TPU pod: create it, run, follow the logs, delete it.",
    epilog="""\b
    Examples:
      trainyard pod xla --name run1 --accelerator v5litepod-16 --registry HOST/PROJECT/REPOSITORY
      trainyard pod xla --name run1 --accelerator v4-16 --spot --args "--epochs 2" --output gs://bucket/run1
      trainyard pod --action logs --name run1 --zone us-central2-b
      trainyard pod --tpu=run1 --docker-image=IMAGE -- python train.py      # like torch_xla's xla_dist
    """,
)
@options.target
@options.option(
    "--action",
    type=click.Choice(["create", "check", "run", "logs", "stop", "status", "delete"]),
    help="Do only this part, instead of everything from create to delete.",
)
@options.option("--name", help="Name of the TPU VM, and of its queued resource.")
@options.option(
    "--accelerator",
    metavar="TYPE",
    shell_complete=options.one_of(job_options.accelerators),
    help="TPU slice, such as v5litepod-16.",
)
@options.option(
    "--zone",
    metavar="ZONE[,ZONE...]|any",
    help="Zones to try in turn until one has capacity. Default: gcloud's compute/zone, or the accelerator's first.",
)
@options.option("--project", help="Google Cloud project. Default: gcloud's.")
@options.option("--version", help="Software version of the TPU VM. Default: the one for PyTorch.")
@options.option("--network", help="VPC network. Default: the project's network 'default'.")
@options.option("--subnetwork", help="Subnetwork of the VPC network.")
@options.flag("--internal", help="Give the workers no external IP addresses; ssh uses the internal ones.")
@options.option("--service-account", metavar="EMAIL", help="Account of the workers, which pulls the image.")
@options.option("--ssh-user", metavar="USER", help="User name on the workers. Default: the local user name.")
@options.flag("--spot", help="Use Spot VMs; the run is restarted after a preemption.")
@options.flag("--queued", help="Create the TPU VM through a queued resource, which waits for capacity.")
@options.option("--valid-until", metavar=DURATION, help="With --queued: how long the request is valid.")
@options.flag("--keep", help="Do not delete the TPU VM at the end.")
@options.registry
@options.option("--image", metavar="REFERENCE", help="Image to run, instead of TARGET's.")
@options.option("--trainer", help="Trainer of TARGET. Default: its default trainer.")
@options.option("--args", help="Arguments of the trainer, split as a shell splits them.")
@options.option("--output", metavar="gs://FOLDER", help="Checkpoints, model and logs: the trainer's --job-dir.")
@options.option("--command", help="Program to run in the image instead of a trainer.")
@options.option("--env", metavar="'A=1 B=2'", help="Environment variables of the containers.")
@options.option("--flags", help="Additional flags of docker run, as in '-v data:/data'.")
@options.option("--wait", metavar=DURATION, help="Limit for becoming READY once it is being created. Default: 30m.")
@options.option("--queue-wait", metavar=DURATION, help="Limit for waiting in the queue. Default: none.")
@options.option("--check-wait", metavar=DURATION, help="Limit for the workers to connect to each other. Default: 30s.")
@options.option("--poll", metavar=DURATION, help="Interval of polling states. Default: 10s.")
@options.option(
    "--grace", metavar=DURATION, help="Time for a last checkpoint when containers are stopped. Default: 15s."
)
@options.option("--restarts", type=options.Count(min=0), help="Fail after this number of restarts. Default: 50.")
@options.json_output
@click.pass_context
def command(ctx: click.Context, /, target: str | None, action: str | None, as_json: bool, **given: Any) -> int:
    """Train on a Cloud TPU pod: create it, run TARGET's image on every worker, follow the logs, delete it.

    Workers are checked for ssh and for the network between them before the run. After a preemption, the TPU VM is
    created again and the run restarted. Ctrl-C deletes what this command created. A TPU VM that exists is used and not
    deleted. The exit status is that of the first worker that failed.
    """
    from trainyard.common import console
    from trainyard.image import recipes
    from trainyard.release import pushes
    from trainyard.workspace import loading
    from trainyard_jobs.pods import actions

    spec = functools.cache(lambda: loading.load(target, context=ctx.obj))
    chosen = actions.Options(
        recipe=lambda: recipes.outline(spec()) if target else None,
        pushed=lambda place: pushes.last(ctx.obj.state / spec().target, place, spec().folder),
        logs_to_stderr=as_json,
        **given,
    )
    code, facts = actions.perform(action, chosen, ctx.meta.get(_XLA_DIST, ()))
    console.result(facts, as_json=as_json)
    return code
