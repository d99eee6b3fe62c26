"""``trainyard image``."""

from __future__ import annotations

from typing import Any

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Build, verify and smoke-test an image, and tag it if it passes.",
    "trainyard image                        # the repository of the current folder",
    "trainyard image tf-cpu",
    "trainyard image examples/patches",
    "trainyard image xla --force",
    "trainyard image --from my-image:latest",
)
@options.target
@options.option(
    "--from",
    "reference",
    variable="FROM",
    metavar="IMAGE",
    help="Build nothing: verify and test an image that your own Dockerfile made FROM one of Trainyard's.",
)
@options.builder
@options.compression
@options.flag("--no-cache", help="Build every stage again.")
@options.flag("--force", help="Verify and smoke-test again, even if this digest has passed.")
@click.option("--events", type=int, hidden=True, help="File descriptor for events (trainyard.release.events).")
@options.data
@options.no_build
@options.offline
@options.quiet
@options.smoke_network
@options.verbose
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    reference: str | None,
    compression: str,
    no_cache: bool,
    force: bool,
    events: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build TARGET's image, verify it and test it; only if it passes, tag it trainyard:<target>.

    A target of the catalogue trains. In a user's repository, the command 'run' of trainyard.yaml is run as 'smoke'
    says, offline without --smoke-network. Without 'smoke', arguments for a short run are tried in the image, and those
    that pass are written to trainyard.yaml; if none do, it is started with --help. If it fails, the candidate
    trainyard:<target>-candidate is kept for inspection, and the tags stay as they were.

    Where the base of an upstream nightly is out of reach, its fallback is built, under the name of that
    (trainyard:xla-nightly-fallback).

    With --from, an image that 'docker build' made is tested in the same way, with the command of trainyard.yaml if
    there is one, else with its own, which is started with --help. It is not recorded as passed: push it with 'docker
    push'.
    """
    from trainyard.common import console

    if reference:
        found = _from(context, target, reference)
    else:
        found = _made(context, target, events, compression=compression, no_cache=no_cache, force=force)
    if quiet and not as_json:
        click.echo(found["digest"])
    console.result(found, as_json=as_json)


def _made(context: Context, target: str | None, events: int | None, **how: Any) -> dict[str, Any]:
    import contextlib
    import functools

    from trainyard.common import console, errors
    from trainyard.image import build, fallback, planning, smoke_search, smoke_test, workspace_files
    from trainyard.release import candidate
    from trainyard.release import events as progress
    from trainyard.workspace.loading import load

    emit = progress.ignore if events is None else progress.writer(events)
    try:
        spec, reason = fallback.choose(load(target, context=context))
        if reason:
            console.warn(reason)
        files = workspace_files.on_host(spec)
        smoke_test.network_of(spec.local_name, files, context)  # refuses an option before anything is resolved
        context.engine.set_up_in_checkout()
        made = None
        while made is None:
            with planning.planned(spec) as plan, contextlib.suppress(candidate.Rewritten):
                find = functools.partial(smoke_search.found, spec, files)
                made = candidate.make(plan, files, emit=emit, show=console.show, find=find, **how)
            if made is None:
                spec = load(target, context=context)
                files = workspace_files.on_host(spec)
    except (errors.UserError, errors.StepFailed, OSError) as error:
        emit("failed", reason=str(error))
        raise
    made["build"] = build.as_json(made["build"])
    emit("ready", result=made)
    _answer(made, candidate.closing_command(plan.recipe, made["smoke"], target, context.data))
    return made | {"digest": made["build"]["digest"], "fallback_for": spec.fallback_for}


def _from(context: Context, target: str | None, reference: str) -> dict[str, Any]:
    from trainyard.common import console
    from trainyard.image import recipes
    from trainyard.image.smoke_failure import HostFiles
    from trainyard.release import candidate
    from trainyard.release.candidate import Repository
    from trainyard.spec import workspace
    from trainyard.workspace.loading import load

    repository = None
    if target or workspace.find():
        loaded = load(target, context=context)
        spec = loaded.repository(
            f"--from takes no target of the catalogue: {loaded.target} is built from {loaded.where}; give the folder "
            f"of a {workspace.FILE}, or nothing"
        )
        files = HostFiles(spec.workspace.file, spec.workspace.data, bool(spec.workspace.given_data))
        repository = Repository(spec.local_name, files, tuple(spec.run or ()), recipes.command_test(spec))
    context.engine.set_up_in_checkout()
    made = candidate.from_reference(reference, repository, context, show=console.show)
    _answer(made, made["run"])
    return made


def _answer(made: dict[str, Any], closing: str) -> None:
    from trainyard.common import console
    from trainyard.release import candidate

    for note in made["smoke"].get("notes", []):
        console.warn(note)
    for line in candidate.summary(made, closing):
        console.say(line)
