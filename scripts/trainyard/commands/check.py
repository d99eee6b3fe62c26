"""``trainyard check``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "workspace"


@options.command(
    "Check the code, command and requirements of your repository.",
    "trainyard check",
    "trainyard check --online          # resolves the requirements, too, and writes nothing",
    "trainyard check ./services/text",
)
@options.target
@options.flag("--online", help="Resolve the requirements too, and ask addresses and git repositories; write nothing.")
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, online: bool, as_json: bool) -> None:
    """Check the repository of the current folder, or of the folder TARGET, without an engine; by default, without a
    network.

    Refused is what 'trainyard lock' or 'trainyard image' would refuse before a build: a command whose file is missing,
    credentials, files over 50 MB, mistakes in files of requirements, requirements that exclude each other or the
    Python of every base. Code of more than 1 GB and imports that no requirement provides are warnings.

    With --online, package indexes, addresses and git repositories are asked, too. No build backend runs.

    The exit status is 1 if something is refused.
    """
    from trainyard.common import console, errors
    from trainyard.image import repository_check
    from trainyard.spec.units import in_units
    from trainyard.workspace import check
    from trainyard.workspace.loading import load

    loaded = load(target, context=context)
    spec = loaded.repository(f"{loaded.target} is a target of the catalogue: 'trainyard dev check' checks those")
    if online and context.offline:
        raise errors.UserError("--online asks package indexes: leave it out, or TRAINYARD_OFFLINE")
    found = check.check(spec)
    verdict = repository_check.complete(spec, found, online=online)
    for line in found.refused:
        console.fail(line)
    facts = {"passed": not found.refused, "refused": found.refused, "notes": found.notes}
    console.result(facts | {"files": len(found.files), "bytes": found.size}, as_json=as_json)
    if found.refused:
        raise errors.StepFailed(f"{len(found.refused)} of these must be corrected before 'trainyard image'")
    console.say(f"{spec.where}: {len(found.files)} files, {in_units(found.size)}: {verdict}")
