"""``trainyard update``."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"

_GROUPS = ("security", "base", "patch", "minor", "framework", "major")


def _end_of_day(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """Let no release count that is later than a day (UTC)."""
    import dataclasses

    if not value or context.obj is None:
        return
    try:
        day = datetime.date.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a day: write it as in 2026-11-26") from None
    context.obj = dataclasses.replace(context.obj, as_of=f"{day}T23:59:59Z")


@options.command(
    "Take newer packages into a lock, if images with them are no worse.",
    "trainyard update                           # the repository of the current folder",
    "trainyard update --as-of 2026-11-01 --only security --only patch",
    "trainyard update --branch update --commit --report body.md    # for 'gh pr create --body-file body.md'",
    "trainyard update tf-cpu                    # the lock of a target of the catalogue",
    "trainyard update --proof --against main    # the lock as another program has changed it",
)
@options.target
@options.option("--as-of", metavar="DAY", callback=_end_of_day, expose_value=False, help="Take no later release.")
@options.option("--only", type=click.Choice(_GROUPS), multiple=True, help="Try this group alone; may be repeated.")
@options.option("--slower", type=options.Number(min=1), default=1.1, help="How many times as long a run may take.")
@options.option("--larger", type=options.Number(min=1), default=1.1, help="How many times as large an image may be.")
@options.option(
    "--measure", metavar="REGEX", help="Regular expression whose group is the time of a step, in lines of the output."
)
@options.option("--runs", type=options.Count(min=1), default=3, help="Runs of which medians are compared.")
@options.option("--branch", metavar="NAME", help="Create this branch for the new lock, and switch to it.")
@options.flag("--commit", help="Commit the new lock.")
@options.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE",
    help="Write the report to a file, too.",
)  # fmt: skip
@options.flag("--proof", help="Compare the lock with that of a commit; write nothing, and fail if it is worse.")
@options.option("--against", metavar="REV", help="What --proof compares with: a commit, a lock, or an image.")
@options.flag("--no-bisect", help="Leave out a group that is worse as a whole.")
@options.flag("--force", help="Try again what an earlier run has tried.")
@options.builder
@options.data
@options.offline
@options.verbose
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    only: tuple[str, ...],
    slower: float,
    larger: float,
    measure: str | None,
    runs: int,
    branch: str | None,
    commit: bool,
    report: Path | None,
    proof: bool,
    against: str | None,
    no_bisect: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Take newer packages into TARGET's lock, in groups, each only if an image with them is no worse.

    Groups are tried one after the other, each on top of what was taken before: security (releases that close an
    advisory), base, patch, minor, framework (with CUDA, never with anything else) and major. For each, the image is
    built, verified, smoke-tested and measured on both sides. A group that is worse is taken apart as 'trainyard bisect'
    does, and tried again without the culprits, which the next run leaves out, too.

    stdout is a report in Markdown. With --proof nothing is resolved: the lock that is there is compared with the one of
    a commit, by default HEAD if the lock has changes that are not committed, else where the branch began.

    The lock is written at the end. What was tried is recorded: after Ctrl-C, the same command goes on.
    """
    from trainyard.common import console, errors
    from trainyard.release import bisect, update, update_report
    from trainyard.release.trials import Bounds, Trials
    from trainyard.spec import architectures
    from trainyard.spec.state import file_lock
    from trainyard.workspace.loading import load

    if proof and (only or branch or commit or context.as_of):
        raise errors.UserError("'--proof' writes nothing: it takes no '--as-of', '--only', '--branch' or '--commit'")
    if report and not report.parent.is_dir():  # said before hours of work
        raise errors.UserError(f"'--report {report}': there is no folder {report.parent}")
    if against and not proof:
        raise errors.UserError("'--against' is for '--proof'")
    architectures.use_all()
    spec = load(target, context=context)
    bounds = Bounds(slower=slower, larger=larger, step=measure or "", runs=runs)
    trials = Trials(bisect.repository(spec, "update"), bounds, force=force)
    if branch or commit:
        update.check_git(spec, branch)
    started = None if proof else update.start(spec, trials, apart=not no_bisect)
    context.engine.set_up_in_checkout()
    context.engine.require_emulation(spec.platform)
    with file_lock(context.state, trials.spec.local_name, f"another process updates {spec.target}: waiting for it"):
        result = started.run(only) if started else update.proof(spec, trials, against, apart=not no_bisect)
    text = update_report.markdown(result)
    if started and result.taken:
        console.say(update.save(spec, started.lock, result, branch=branch, commit=commit))
    if not as_json:
        click.echo(text, nl=False)
    if report:
        report.write_text(text, encoding="utf-8")
    console.result(update_report.as_dict(result), as_json=as_json)
    if proof and any(step.reason for step in result.steps):
        raise errors.StepFailed(f"{result.name}: {result.steps[0].reason}")
