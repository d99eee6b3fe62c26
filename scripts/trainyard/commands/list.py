"""``trainyard list``."""

from __future__ import annotations

import click

from trainyard import options

GROUP = "build"


@click.command(
    short_help="List the targets, and which are built on this host.",
    epilog="""\b
    Examples:
      trainyard list
      trainyard list --json
    """,
)
@options.json_output
def command(as_json: bool) -> None:
    """List the targets of the catalogue: contents, trainers, and the version of the image on this host."""
    from rich.table import Table

    from trainyard import console
    from trainyard.image import local_images
    from trainyard.spec.model import load, targets

    table = Table("target", "contents", "trainers", "local image")
    found = {}
    for target in targets():
        spec = load(target)
        local = local_images.version(target)
        table.add_row(target, spec.summary, " ".join(spec.trainer_commands()), local.get("version", "-"))
        found[target] = {
            "summary": spec.summary,
            "packages": spec.framework.packages,
            "trainers": list(spec.trainer_commands()),
            "local": local,
        }
    console.log.print(table)
    console.result(found, as_json=as_json)
