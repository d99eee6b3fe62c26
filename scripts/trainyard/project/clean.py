"""Clean-up of this host: what Trainyard made, and nothing else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection

import docker.errors
from docker.models.images import Image

from trainyard.common.context import Context
from trainyard.common.docker_engine import OWNED, Engine, in_use
from trainyard.common.errors import UserError
from trainyard.sandbox.containers import remove_labelled
from trainyard.spec import state
from trainyard.spec.model import each_platform, load
from trainyard.spec.naming import LABELS, NAME

logger = logging.getLogger(__name__)

#: Suffixes of tags that an image has only while it is being made or looked at.
TEMPORARY_SUFFIXES = ("-candidate", "-fetched", "-reproduce", "-provenance")

#: Local repositories that commands and tests tag images in.
REPOSITORIES = (NAME, *(f"{NAME}-{kind}" for kind in ("base", "builder", "cloud-builder", "registry", "tpu-worker")))


def leftovers(engine: Engine) -> list[str]:
    """Remove Trainyard's containers, networks and volumes that no living process uses; their names."""
    return remove_labelled(engine, OWNED, unless=in_use)


def clean(context: Context, target: str | None = None, *, everything: bool = False, cache: bool = False) -> list[str]:
    """Remove leftovers and images with temporary tags; the names of what was removed.

    The tags of an image that another command makes are kept.

    Args:
        context: of the command.
        target: also remove this target's images and records.
        everything: also remove all of Trainyard's images and records.
        cache: also remove the engine's build cache.

    Raises:
        UserError: there is no such target, or another command uses what would be removed.
    """
    spec = load(target, context=context) if target else None
    folders = [one.kept for one in each_platform(spec)] if spec else []
    with state.locked(context.state) as busy:
        used = busy if everything else busy & {name for one in folders for name in (one.name, f"candidate-{one.name}")}
        if used:
            raise UserError(
                f"another command holds the lock {min(used)} of {context.state}: run this when it has ended"
            )
        removed = leftovers(context.engine)
        kept = {f"{NAME}:{name.removeprefix('candidate-')}{suffix}" for name in busy for suffix in TEMPORARY_SUFFIXES}
        removed += _remove_tags(context.engine, context.engine.images(), "" if everything else TEMPORARY_SUFFIXES, kept)
        if everything:
            folders = [one for one in context.state.iterdir() if one.is_dir()] if context.state.is_dir() else []
        elif spec:
            removed += _remove_tags(context.engine, context.engine.images(label=f"{LABELS}.target={spec.target}"))
        for folder in folders:
            if (folder / state.MARKER).is_file():
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir() and folder.name != "locks":
                logger.info(f"kept {folder}: no file {state.MARKER} in it says that Trainyard made it")
    if cache:
        try:
            context.engine.client.api.prune_builds()
        except docker.errors.APIError as error:
            logger.info(f"build cache not removed: {error.explanation}")
    return removed


def _remove_tags(
    engine: Engine, images: list[Image], suffixes: str | tuple[str, ...] = "", kept: Collection[str] = ()
) -> list[str]:
    """Remove the tags of ``images`` in Trainyard's repositories that end with one of ``suffixes``, and are not kept."""
    prefixes = tuple(f"{repository}:" for repository in REPOSITORIES)
    removed = [tag for image in images for tag in image.tags if tag.startswith(prefixes) and tag.endswith(suffixes)]
    removed = [tag for tag in removed if tag not in kept]
    for tag in removed:
        engine.untag(tag)
    return removed
