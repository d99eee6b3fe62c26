"""``trainyard init``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options, settings
from trainyard.common.context import Context

GROUP = "workspace"


@options.command(
    "Write trainyard.yaml for the repository in this folder.",
    "trainyard init",
    "trainyard init --yes",
    'trainyard init --target xla --run "python -m mymodel.train" --yes',
    "trainyard init services/text",
    "trainyard init train.py",
    "trainyard init --devcontainer",
)
@click.argument(
    "folder",
    required=False,
    envvar=f"{settings.PREFIX}FOLDER",
    type=click.Path(path_type=Path, exists=True),
)
@options.option(
    "--target",
    metavar="NAME",
    shell_complete=options.targets,
    help="Target to extend. Default: the one that the code needs.",
)
@options.option("--name", metavar="NAME", help="Name of the image. Default: the project's, or else the folder's.")
@options.option("--run", metavar="COMMAND", help="Command that trains. Default: the most likely one.")
@options.flag("--yes", help="Ask nothing: take what was found.")
@options.flag("--devcontainer", help="Also write .devcontainer/devcontainer.json, for editors.")
@options.json_output
@click.pass_obj
def command(
    context: Context,
    folder: Path | None,
    target: str | None,
    name: str | None,
    run: str | None,
    yes: bool,
    devcontainer: bool,
    as_json: bool,
) -> None:
    """Write trainyard.yaml in FOLDER, or the current one: what your image adds to a target of the catalogue.

    It is found in pyproject.toml, uv.lock, requirements.txt, environment.yml and what the code imports, none of which
    is run. On a terminal every value can be changed. No file is overwritten. The path of trainyard.yaml is printed on
    stdout.
    """
    import os

    from trainyard.common import console, errors
    from trainyard.spec import workspace
    from trainyard.spec.model import load, relative
    from trainyard.workspace import init, one_file

    given = Path(os.path.abspath(folder or ""))
    file = given if given.is_file() else None
    if file and (target or name or run or file.suffix not in workspace.ONE_FILE):
        raise errors.UserError(f"{relative(file)}: give a folder, or a .py file without --target, --name and --run")
    folder = file.parent if file else given
    path = folder / workspace.FILE
    written = []
    if not (path.exists() and devcontainer):
        if path.exists():
            raise errors.UserError(f"{relative(path)} exists already: edit it, or remove it first")
        written += one_file.keep(file) if file else _found(folder, target, name, run, yes)
    spec = load(str(folder), context=context)
    if devcontainer:
        written.append(init.write_devcontainer(spec))
    build = "trainyard image" if folder == Path.cwd() else f"trainyard image {relative(folder)}/"
    console.say(f"commit {', '.join(relative(one) for one in written)}; then run '{build}'")
    if as_json:
        console.result(
            {"files": [str(one) for one in written], "target": spec.workspace.document.extends},
            as_json=True,
        )
    else:
        click.echo("\n".join(map(str, written)))


def _found(folder: Path, target: str | None, name: str | None, run: str | None, yes: bool) -> list[Path]:
    """Write what is found in a repository, and what the user changes of it on a terminal; return the files."""
    import sys

    from trainyard.common import console, errors
    from trainyard.spec.model import targets
    from trainyard.workspace import init

    repository = init.Repository(folder)
    ask = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    if not ask and not yes:
        console.say("no terminal: takes what was found, as --yes does")
    proposal = repository.propose(target, name=name, run=run)
    if ask:
        if target is None:
            choices = click.Choice(targets())
            target = click.prompt("target", default=proposal.target, type=choices, err=True)
        if run is None:
            for number, one in enumerate(proposal.commands[1:4], start=2):
                console.say(f"  command {number}: {one}")
            run = click.prompt("command", default=proposal.run or "none", err=True)
            run = None if run == "none" else run
        name = click.prompt("name of the image", default=name or proposal.name, err=True)
        proposal = repository.propose(target, name=name, run=run)
    elif proposal.question:
        raise errors.UserError(proposal.question)
    for value, why in proposal.reasons.items():
        console.say(f"{value} ({why})")
    for note in proposal.notes:
        console.warn(note)
    return init.write(folder, init.text(proposal))
