"""``trainyard dev images``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"

#: Builds at a time by default: one downloads while another unpacks.
JOBS = 2


@options.command(
    "Build, verify and smoke-test several images at once.",
    "trainyard dev images",
    "trainyard dev images cpu tf-cpu examples/patches",
    "trainyard dev images --jobs 1",
)
@click.argument("targets", nargs=-1)
@options.option("--targets", "listed", metavar="TARGETS", help="The same as TARGET..., separated by spaces or commas.")
@options.option("--jobs", type=options.Count(min=1), default=JOBS, help="Builds that run at the same time.")
@options.builder
@options.compression
@options.flag("--no-cache", help="Build every stage again.")
@options.flag("--force", help="Verify and smoke-test again, even if a digest has passed.")
@options.json_output
@click.pass_obj
def command(
    context: Context,
    targets: tuple[str, ...],
    listed: str | None,
    jobs: int,
    compression: str,
    no_cache: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Run 'trainyard image' for TARGETS, all of the catalogue by default. One that fails does not stop the others.

    Stages that several images share are built once. The log of each target is build/<target>/image.log, and
    BuildKit's is build.log beside it.
    """
    from trainyard.common import console, stages
    from trainyard.release import batch

    chosen = batch.wanted(list(targets) or (listed or "").replace(",", " ").split(), context)
    arguments = [f"--compression={compression}", *(["--no-cache"] if no_cache else []), *(["--force"] if force else [])]
    context.engine.require()
    with stages.stage("images") as stage:
        batch.run(chosen, jobs, arguments)
        stage.done = f"{sum(job.stage == 'ready' for job in chosen)} of {len(chosen)} are ready"
    console.result(batch.result(chosen), as_json=as_json)
    batch.require_all_ready(chosen)
