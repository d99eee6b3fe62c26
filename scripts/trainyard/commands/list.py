"""``trainyard list``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "List the targets, and which are built on this host.",
    "trainyard list",
    "trainyard list --ends     # until when each is looked after, and why (images/matrix.yaml)",
    "trainyard list --json",
)
@options.flag("--ends", help="Show until when each is looked after.")
@options.json_output
@click.pass_obj
def command(context: Context, ends: bool, as_json: bool) -> None:
    """List the targets of the catalogue: contents, platforms, trainers, and the images on this host."""
    from rich.table import Table

    from trainyard.common import console
    from trainyard.lint import waivers
    from trainyard.oci import docker_engine
    from trainyard.spec.model import catalogue, each_platform

    if ends:
        until = {spec.target: spec.ends for spec in catalogue(context)}
        table = Table("target", "last day", "of", "then", "waived until")
        for target, (first, *others) in until.items():
            then = "\n".join(f"{end.what} {end.day}" for end in others)
            waived = "\n".join(f"{waiver.expires}" for waiver in waivers.of_end(target))
            table.add_row(target, f"{first.day}", first.what, then, waived)
        console.show(table)
        days = {target: [{"day": f"{end.day}", "of": end.what} for end in found] for target, found in until.items()}
        console.result(days, as_json=as_json)
        return
    table = Table("target", "contents", "platforms", "trainers", "local image")
    found = {}
    for spec in catalogue(context):
        local = {one.platform: docker_engine.version(one.local_name) for one in each_platform(spec)}
        versions = [image["version"] for image in local.values() if image]
        trainers = list(spec.trainer_commands())
        table.add_row(
            spec.target, spec.summary, "\n".join(spec.platforms), " ".join(trainers), "\n".join(versions) or "-"
        )
        found[spec.target] = {
            "summary": spec.summary,
            "packages": spec.packages,
            "platforms": spec.platforms,
            "trainers": trainers,
            "local": local[spec.platforms[0]],
            "images": local,
            "gpus": {one.platform: one.device_code.as_dict(one.arch) for one in each_platform(spec) if one.device_code},
        }
    console.show(table)
    console.result(found, as_json=as_json)
