"""``trainyard dev rules``."""

from __future__ import annotations

from typing import Any

import click

from trainyard.common import options, settings

GROUP = "build"


@options.command(
    "List the rules for images and job files, with severity and source.",
    "trainyard dev rules",
    "trainyard dev rules image target",
    "trainyard dev rules gke --json",
)
@click.argument("subjects", metavar="[SUBJECT | RULE]...", nargs=-1, envvar=f"{settings.PREFIX}SUBJECT")
@options.json_output
def command(subjects: tuple[str, ...], as_json: bool) -> None:
    """List the rules of 'trainyard verify' and 'trainyard job check'.

    SUBJECT limits the list: image (every image), target (an image of a target, compared with its spec), custom-job,
    hyperparameter-tuning-job, ai-platform, gke, or the id of a rule.

    \b
    Severities:
      refuse        The platform, or the promise that an image is what its tag says, refuses it.
      cannot start  The platform accepts it, but it will not run.
      note          Shown; fails nothing.
    """
    from trainyard.common import console
    from trainyard.lint.image import core

    root: Any = click.get_current_context().find_root().command
    rules = core.select(root.rules(), subjects)
    if as_json:
        console.result({"rules": [core.as_dict(one) for one in rules]}, as_json=True)
    else:
        click.echo("\n\n".join(core.describe(one) for one in rules))
