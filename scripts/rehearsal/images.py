"""The local image that stands for the reference of a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from docker.models.images import Image

from scripts import engine
from scripts.cli import UserError, nearest
from scripts.plan import LABELS, NAME

_VERSION = "org.opencontainers.image.version"


@dataclass(frozen=True)
class StandIn:
    """A local image, by id, and the remark users should see; ``ours`` tells whether it has the launcher."""

    id: str
    note: str
    ours: bool


def stand_in(reference: str, replacement: str = "") -> StandIn:
    """The image to run where a job file names ``reference``: that very one if it is here, else ours of the same tag.

    Args:
        replacement: a local reference that is taken instead of all of this (IMAGE=).
    Raises:
        UserError: there is none.
    """
    client = engine.client()
    if replacement:
        found = engine.image(replacement, made_by="make image")
        return _of(found, f"{replacement} stands for {reference}" if replacement != reference else "")
    images = client.images.list()
    for image in images:
        if reference in (*image.tags, *(image.attrs.get("RepoDigests") or ()), image.id):
            return _of(image, "")
    name, tag = split(reference)
    candidates = {one.partition(":")[2]: image for image in images for one in image.tags if one.startswith(f"{NAME}:")}
    local = matching(tag, {one: image.labels for one, image in candidates.items()})
    if local:
        target = candidates[local].labels[f"{LABELS}.target"]
        return _of(
            candidates[local],
            f"the local {NAME}:{local} stands for {reference} (its label {LABELS}.target is {target})",
        )
    tags = sorted(candidates)
    others = f"; local images of {NAME}: {', '.join(tags)}" if tags else ""
    raise UserError(
        f"no local image for {reference}{nearest(tag, tags) or nearest(name, tags)}: build it ('make image TARGET="
        f"{_target(tag)}'), or name one that is here with IMAGE=...{others}"
    )


def matching(tag: str, local: Mapping[str, Mapping[str, str]]) -> str | None:
    """Which of our local images a tag means.

    Args:
        tag: a target, `<target>-<version of the framework>`, or the immutable tag of a build.
        local: tag of each local image -> its labels.
    """

    def target(one: str) -> str | None:
        return local[one].get(f"{LABELS}.target")

    if tag in local and target(tag):
        return tag
    for one in filter(lambda one: one == target(one), local):
        version = local[one].get(f"{LABELS}.framework", "").partition("==")[2]
        if tag in (local[one].get(_VERSION), f"{one}-{version}"):
            return one
    return None


def split(reference: str) -> tuple[str, str]:
    """Name and tag of a reference; a digest is its tag, "latest" the default."""
    name, _, digest = reference.partition("@")
    if digest:
        return name.rpartition("/")[2], digest
    last = name.rpartition("/")[2]
    base, _, tag = last.partition(":")
    return base, tag or "latest"


def _target(tag: str) -> str:
    """The target a tag such as xla-2.9.0-20261120-58b92eea is of."""
    return re.split(r"-\d", tag)[0]


def _of(image: Image, note: str) -> StandIn:
    return StandIn(str(image.id), note, f"{LABELS}.target" in image.labels)
