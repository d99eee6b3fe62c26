"""Remove what Trainyard left on this host, and only that.

make clean              candidates, what interrupted runs left (containers, networks, volumes)
make clean TARGET=xla   also that target's images and records
make clean ALL=1        also every image, base and record of Trainyard
"""

from __future__ import annotations

import os
import shutil

import docker.errors
from docker.models.images import Image

from scripts import cli, engine
from scripts.cli import STATE, say
from scripts.plan import LABELS, NAME
from scripts.spec import load


def leftovers() -> list[str]:
    """Remove containers, networks and volumes that are ours and that no living process uses; their names."""
    client = engine.client()
    ours: dict[str, str | list[str] | bool] = {"label": engine.OWNED}
    removed = []
    for container in client.containers.list(all=True, filters=ours):
        if not engine.in_use(container.labels):
            container.remove(force=True)
            removed.append(str(container.name))
    for network in client.networks.list(filters=ours):
        if not engine.in_use(network.attrs.get("Labels")):
            network.remove()
            removed.append(str(network.name))
    for volume in client.volumes.list(filters=ours):
        if not engine.in_use(volume.attrs.get("Labels")):
            volume.remove(force=True)
            removed.append(str(volume.name))
    return removed


#: How tags end that a verb gives an image only until it has an answer.
UNFINISHED = ("-candidate", "-reproduce", "-provenance")


def _remove(images: list[Image], wanted: str | None, tag_suffix: str | tuple[str, ...] = "") -> list[str]:
    """Remove the tags of ``images`` that belong to target ``wanted`` (any if None) and end with ``tag_suffix``."""
    removed = []
    for image in images:
        if wanted is not None and image.labels.get(f"{LABELS}.target") != wanted:
            continue
        for tag in image.tags:
            if tag.startswith(
                (f"{NAME}:", f"{NAME}-base:", f"{NAME}-builder:", f"{NAME}-cloud-builder:", f"{NAME}-tpu-worker:")
            ) and tag.endswith(tag_suffix):
                engine.client().images.remove(tag, force=True)
                removed.append(tag)
    return removed


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    target = load(options.target).target if options.target else None
    removed = leftovers()
    images = engine.client().images.list()
    everything = bool(os.environ.get("ALL"))
    removed += _remove(images, None, "" if everything else UNFINISHED)
    if target and not everything:
        removed += _remove(engine.client().images.list(), target)
        shutil.rmtree(STATE / target, ignore_errors=True)
    if everything:
        shutil.rmtree(STATE, ignore_errors=True)
    if os.environ.get("CACHE"):
        try:
            engine.client().api.prune_builds()
        except docker.errors.APIError as error:
            say(f"build cache left alone: {error.explanation}")
    for name in removed:
        say(f"removed {name}")
    cli.result({"removed": removed}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
