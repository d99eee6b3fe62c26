"""``trainyard list``."""

from __future__ import annotations

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "List the targets, and which are built on this host; or the layers of an image.",
    "trainyard list",
    "trainyard list --layers trainyard:mine    # the layers of an image, and what is in each",
    "trainyard list --ends     # until when each is supported, and why (images/matrix.yaml)",
    "trainyard list --json",
)
@options.flag("--ends", help="Show until when each is supported.")
@options.option("--layers", "image", metavar="IMAGE", help="Show the layers of this image: sizes and wheels.")
@options.json_output
@click.pass_obj
def command(context: Context, ends: bool, image: str | None, as_json: bool) -> None:
    """List the targets of the catalogue: platforms, the images on this host, and contents.

    With --json, also packages, trainers and GPUs; docs/images.md describes each.
    """
    from rich.table import Column, Table

    from trainyard.common import console
    from trainyard.lint import waivers
    from trainyard.spec.model import catalogue, each_platform

    if image:
        from trainyard.image import layer_picture

        rows = layer_picture.rows(context, image)
        console.show(layer_picture.drawn(rows))
        console.result({"image": image, "layers": rows}, as_json=as_json)
        return
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
    columns = ("target", "contents", "platforms", "local image")
    one_line = [Column(name, no_wrap=True, ratio=1 if name == "contents" else None) for name in columns]
    table = Table(*one_line, box=None, expand=True, pad_edge=False)
    found = {}
    for spec in catalogue(context):
        local = {one.platform: _version(context, one.local_name) for one in each_platform(spec)}
        prefix = f"{spec.target}-"
        versions = [image["version"].removeprefix(prefix) for image in local.values() if image]
        platforms = " ".join(name.removeprefix("linux/") for name in spec.platforms)
        table.add_row(spec.target, spec.summary, platforms, (versions or ["-"])[0])
        found[spec.target] = {
            "summary": spec.summary,
            "packages": spec.packages,
            "platforms": spec.platforms,
            "trainers": list(spec.trainer_commands()),
            "local": local[spec.platforms[0]],
            "images": local,
            "gpus": {one.platform: one.device_code.as_dict(one.arch) for one in each_platform(spec) if one.device_code},
        }
    console.show(table)
    console.result(found, as_json=as_json)


def _version(context: Context, target: str) -> dict[str, str]:
    """Return ``digest`` and ``version`` of a target's image; empty if there is none, or no engine is running."""
    from trainyard.spec.naming import NAME, TAG

    local = context.engine.existing_image(f"{NAME}:{target}")
    return {"digest": str(local.id), "version": local.labels.get(TAG, "")} if local else {}
