"""``trainyard bisect``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context
from trainyard.common.settings import PREFIX

GROUP = "build"


@options.command(
    "Find the package that broke an image.",
    "trainyard bisect HEAD~1            # the lock of that commit was good, that of the folder is bad",
    "trainyard bisect good.lock bad.lock",
    "trainyard bisect localhost:5000/ml/trainyard:mine-2.15.0-20261126-2f6d0e0c",
    "trainyard bisect main --command 'python tools/evaluate.py'",
    "trainyard bisect main --performance 1.1 --measure 'step took ([0-9.]+) ms'",
)
@click.argument("good", envvar=f"{PREFIX}GOOD", required=False)
@click.argument("bad", envvar=f"{PREFIX}BAD", required=False)
@options.option(
    "--target",
    metavar="TARGET",
    shell_complete=options.targets,
    help="Image that is tried; by default that of the current folder.",
)
@options.option(
    "--command", metavar="COMMAND", callback=options.words, help="Command that fails in a bad image. Default: smoke's."
)
@options.option(
    "--performance",
    type=options.Number(min=1, min_open=True),
    metavar="FACTOR",
    help="How many times as long BAD takes, at least, or how many times as large or small its number is.",
)
@options.option(
    "--measure",
    metavar="REGEX",
    help="Regular expression whose group is the number of --performance, in lines of the output. Default: time.",
)
@options.option("--runs", type=options.Count(min=1), default=3, help="Runs of which --performance takes the median.")
@options.flag("--force", help="Try again what an earlier run has tried.")
@options.builder
@options.data
@options.offline
@options.verbose
@options.json_output
@click.pass_obj
def command(
    context: Context,
    good: str | None,
    bad: str | None,
    target: str | None,
    command: tuple[str, ...],
    performance: float | None,
    measure: str | None,
    runs: int,
    force: bool,
    as_json: bool,
) -> None:
    """Find the smallest set of packages that turns an image with those of GOOD into one that is as bad as BAD.

    GOOD and BAD are each the path of a lock, a commit of the repository, or an image, local or at a registry.
    Without BAD it is the lock of TARGET. All else in the image is as it is now.

    Images with some packages of GOOD and the others of BAD are built and tested, where uv finds that they resolve. The
    smoke test tells good from bad, or a command, which runs in the same way: without a network, with the folder
    smoke.data at /data. With status 125 it says that it cannot tell. An image that fails with another exception than
    BAD is passed over.

    What was tried is recorded: after Ctrl-C, the same command goes on.
    """
    from trainyard.common import console, errors
    from trainyard.release import bisect
    from trainyard.workspace.loading import load

    if not good:
        raise errors.UserError(
            "nothing that was good: give a lock, a commit or an image, as in 'trainyard bisect HEAD~1'"
        )
    check = bisect.Check(command, performance, measure or "", runs)
    spec = bisect.repository(load(target, context=context))
    bad_side = bisect.side(bad, spec)
    good_side = bisect.side(good, spec, bad_side)
    context.engine.set_up_in_checkout()
    context.engine.require_emulation(spec.platform)
    try:
        found = bisect.bisect(spec, good_side, bad_side, check, again=force)
    finally:
        context.engine.untag(bisect.reference(spec))
    for line in found.lines():
        console.say(line)
    console.result(found.as_dict(), as_json=as_json)
