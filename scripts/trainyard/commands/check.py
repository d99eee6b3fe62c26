"""``trainyard check``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "workspace"


@options.command(
    "Check the code, command and requirements of your repository.",
    "trainyard check",
    "trainyard check ./services/text",
)
@options.target
@options.json_output
@click.pass_obj
def command(context: Context, target: str | None, as_json: bool) -> None:
    """Check the repository of the current folder, or of the folder TARGET, without an engine or a network.

    'trainyard image', 'trainyard lock' and 'trainyard push --code-only' do so before anything else. Refused are a
    command whose file is missing, a folder of 'code' that does not exist, credentials, files over 50 MB and mistakes in
    files of requirements. Code of more than 1 GB and imports that no requirement provides are warnings.

    The exit status is 1 if something is refused.
    """
    from trainyard.common import console, errors
    from trainyard.spec.units import in_units
    from trainyard.workspace import check
    from trainyard.workspace.loading import load

    loaded = load(target, context=context)
    spec = loaded.repository(f"{loaded.target} is a target of the catalogue: 'trainyard dev check' checks those")
    found = check.check(spec)
    for line in found.refused:
        console.fail(line)
    facts = {"passed": not found.refused, "refused": found.refused, "notes": found.notes}
    console.result(facts | {"files": len(found.files), "bytes": found.size}, as_json=as_json)
    if found.refused:
        raise errors.StepFailed(f"{len(found.refused)} of these must be corrected before 'trainyard image'")
    console.say(f"{spec.where}: {len(found.files)} files, {in_units(found.size)}: nothing prevents an image")
