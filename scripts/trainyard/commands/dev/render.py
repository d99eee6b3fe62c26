"""``trainyard dev render``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "project"


@options.command(
    "Write the generated files: Dockerfiles, bake file, pipelines, pages.",
    "trainyard dev render",
    "trainyard dev render examples/patches",
    "trainyard dev render tf-cpu --stdout",
)
@options.target
@options.flag("--stdout", help="Print TARGET's Dockerfile and write nothing.")
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, stdout: bool, as_json: bool) -> None:
    """Write the committed files that are generated from the specs; with TARGET, those that its image is built from.

    In a repository with a trainyard.yaml and without TARGET, write that image's Dockerfile to the state folder.
    """
    from trainyard.common import console, installation
    from trainyard.image import dockerfile
    from trainyard.spec import workspace
    from trainyard.spec.model import load, relative

    only = load(target, context=context) if target or stdout or workspace.find() else None
    if stdout and only:
        print(dockerfile.dockerfile(only), end="")
        return
    if only is None:
        installation.checkout("'trainyard dev render' without TARGET")
    from trainyard.project import generated

    written = generated.write(click.get_current_context().find_root().command, only)
    for path in written:
        console.say(f"wrote {relative(path)}")
    if not written:
        console.say("all generated files are up to date")
    console.result({"written": [relative(path) for path in written]}, as_json=as_json)
