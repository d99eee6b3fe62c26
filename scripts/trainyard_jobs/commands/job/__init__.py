"""``trainyard job``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainyard.common import options
from trainyard.common.context import Context
from trainyard_jobs.model import options as job_options

GROUP = "jobs"

#: Seconds between two queries of a submitted job's state: gcloud's default of 60 delays the log too long.
POLL_INTERVAL = 10

_POSITIVE = options.Count(min=1)


def _declare_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options that say what to write."""
    for row in reversed(job_options.ROWS):
        if row.kind == "flag":
            function = options.flag(f"--{row.name}", help=row.help)(function)
        elif row.kind == "number":
            function = options.option(f"--{row.name}", type=_POSITIVE, help=row.help)(function)
        elif isinstance(row.kind, tuple):
            choice = click.Choice(row.kind, case_sensitive=False)
            function = options.option(f"--{row.name}", type=choice, help=row.help)(function)
        else:
            about: dict[str, Any] = {"metavar": row.metavar or None, "help": row.help, "multiple": row.repeated}
            if row.values:
                about["shell_complete"] = options.one_of(row.values)
            function = options.option(f"--{row.name}", **about)(function)
    return function


@click.command(
    cls=options.Group,
    short_help="Write a training job for a platform, or submit it.",
    epilog="""\b
    Examples:
      trainyard job xla --platform vertex --accelerator v5litepod-4 --registry HOST/PATH >job.yaml
      trainyard job cpu --platform vertex --workers 2 --spot --output gs://bucket/run --submit
      trainyard job cpu --platform vertex --tune "lr=1e-3:1e-1:log batch-size=32,64" >tune.yaml
      trainyard job xla --platform gke --accelerator v5litepod-16 --slices 2 >jobset.yaml
      trainyard job xla --platform tpu-vm --accelerator v5litepod-16 >run.sh
      trainyard job gpu --platform kubeflow --accelerator 8xA100 --workers 2 >train.yaml
      trainyard job gpu --platform slurm --accelerator 8xA100 --workers 2 --queue ml >train.sbatch
      trainyard job gpu --platform skypilot --accelerator 8xA100 --spot >task.yaml
      trainyard job tf-cpu --platform ai-platform --machine n1-highcpu-16 >old.yaml
      trainyard job --platform vertex --from old.yaml >job.yaml
      trainyard job --code . --platform vertex --accelerator v5litepod-4 --submit
      trainyard job --recipe recipe.json registry.example/team/image:tag --platform vertex >job.yaml
    """,
)
@options.target
@options.option(
    "--platform",
    metavar="NAME",
    shell_complete=options.one_of(job_options.platforms),
    help="Platform that runs the job; the examples show each.",
)
@options.option(
    "--code",
    metavar="FOLDER",
    is_flag=False,
    flag_value=".",
    help="Push the code of the repository in FOLDER first, as 'trainyard push --code-only', and run that image.",
)
@options.recipe
@options.registry
@_declare_rows
@options.option(
    "--from", "source", metavar="FILE", help="Convert this AI Platform job instead of writing one for TARGET."
)
@options.flag("--dry-run", help="Let the platform check the job, where it can, instead of printing it.")
@options.flag("--submit", help="Submit the job and follow its log until it ends, instead of printing it.")
@options.option(
    "--poll", type=_POSITIVE, default=POLL_INTERVAL, help="Seconds between two queries of a submitted job's state."
)
@options.json_output
@click.pass_obj
def command(
    context: Context,
    /,
    platform: str | None,
    code: str | None,
    recipe: Path | None,
    source: str | None,
    dry_run: bool,
    submit: bool,
    poll: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Write a job that runs a trainer of TARGET's image on a platform; the command that submits it is on stderr.

    Without TARGET, in a repository with a trainyard.yaml, it runs the repository's own command in the image that was
    pushed last. With --code, the repository's code replaces that of the image first: no engine is needed. With
    --recipe, it runs the image TARGET, whose recipe a file has.

    The job has passed 'trainyard job check', but for its image. --submit submits it instead, unless only this machine
    has the image; the exit status is 0 only if it succeeds; Ctrl-C stops following its log and leaves it running.
    """
    import dataclasses
    import shlex

    from trainyard import recipe as recipes
    from trainyard.common import console
    from trainyard.common.errors import UserError
    from trainyard.image.recipes import outlines
    from trainyard.release import pushes
    from trainyard.spec import model
    from trainyard.workspace import loading
    from trainyard_jobs import platforms
    from trainyard_jobs.model import request
    from trainyard_jobs.platforms import submission, writing
    from trainyard_jobs.platforms.base import Conversion
    from trainyard_jobs.schema import job_file

    chosen = platforms.by_name(platform)
    if submit and dry_run:
        raise UserError("'--submit' runs the job, '--dry-run' does not: leave out one of them")
    file = None if submit else writing.redirected_stdout()
    if source:
        said = [row.name for row in job_options.ROWS if row.field and not row.everywhere and given[row.parameter]]
        if said or given["command"]:
            raise UserError(f"'--from' converts what the file says: leave out '--{[*said, 'command'][0]}'")
        conversion = Conversion(**{one.name: given[one.name] for one in dataclasses.fields(Conversion)})
        rendered = chosen.convert(job_file.load(Path(source)), conversion, file)
    else:
        if code:
            given |= _push_code(context, code, given)
        known, folder = [], None
        if recipe:
            known, given["image"] = [recipes.read(recipe)], given["image"] or given["target"]
        elif given["target"] or not given["image"]:
            spec = loading.load(given["target"], context=context)
            known, folder = outlines(spec), spec.folder
        parsed = request.parse_request(
            given,
            known,
            lambda place: pushes.last(context.state / known[0].name, place, folder),
            lambda: outlines(*model.recommended()),
            tpu_machine=chosen.tpu_machine,
        )
        platforms.check_options(chosen, parsed, given["name"])
        rendered = chosen.write(parsed, file)
    for warning in (*writing.local_images(chosen, rendered, submit=submit), *rendered.warnings):
        console.warn(warning)
    for note in rendered.notes:
        console.say(note)
    if dry_run:
        submission.try_out(chosen, rendered)
        console.say(f"'--platform {chosen.name}' accepts the job; nothing was started")
        console.result({"platform": chosen.name, "accepted": True}, as_json=as_json)
        return
    if submit:
        console.result(dataclasses.asdict(chosen.submit(rendered, interval=poll)), as_json=as_json)
        return
    if not as_json:
        click.echo(rendered.text, nl=False)
    console.say(f"submit it with:\n  {shlex.join(rendered.command)}")
    console.result({"config": rendered.text, "command": rendered.command}, as_json=as_json)


def _push_code(context: Context, folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Replace the code of the image of the repository in ``folder``; the options that name the result."""
    from trainyard.common import console, errors
    from trainyard.release import code_push, repository_code
    from trainyard.spec import workspace
    from trainyard.workspace import loading

    for name in ("target", "image"):
        if given[name]:
            raise errors.UserError(f"--code names the image: remove {name.upper()}")
    file = None if workspace.is_one_file(folder) else workspace.find(Path(folder))
    if file is None and not workspace.is_one_file(folder):
        raise errors.UserError(f"no {workspace.FILE} in {folder} or above it: run 'trainyard init' there")
    target = str(file.parent) if file else folder
    code = repository_code.of(loading.load(target, context=context))
    made = code_push.push(code, code_push.address(code, given["registry"]), context.state)
    console.say(f"{made['tag']}: {'pushed, not tested' if made['changed'] else 'the code has not changed'}")
    return {"target": target, "image": made["reference"]}
