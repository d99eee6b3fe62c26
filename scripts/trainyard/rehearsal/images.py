"""The local image to run for a reference of the job file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from docker.models.images import Image

from trainyard import installation
from trainyard.console import UserError, nearest
from trainyard.oci import docker_engine
from trainyard.oci.reference import Reference
from trainyard.spec.naming import LABELS, NAME

_VERSION = "org.opencontainers.image.version"


@dataclass(frozen=True)
class LocalImage:
    """A local image that is run for a reference.

    Attributes:
        id: the image's ID.
        note: a line for the user, if it is not the image of that reference; else "".
        has_launcher: whether Trainyard built it.
    """

    id: str
    note: str
    has_launcher: bool


def find(reference: str, replacement: str = "") -> LocalImage:
    """The image to run for ``reference``: the local one of that name, the target's image that its tag means, or pulled.

    Args:
        replacement: a local image to run instead (IMAGE=).
    Raises:
        UserError: there is no such image.
    """
    client = docker_engine.client()
    if replacement:
        found = docker_engine.image(replacement, made_by=installation.command("image"))
        return _of(found, f"{replacement} replaces {reference}" if replacement != reference else "")
    images = client.images.list()
    for image in images:
        names = (*image.tags, *(image.attrs.get("RepoDigests") or ()), image.id)
        # With the containerd image store, the ID of an image is its digest at registries.
        if reference in names or reference.endswith(f"@{image.id}"):
            return _of(image, "")
    named = Reference.parse(reference)
    name, tag = named.repository.rpartition("/")[2], named.version
    tagged = [(Reference.parse(one), image) for image in images for one in image.tags]
    candidates = {one.tag: image for one, image in tagged if one.familiar_name == NAME}
    local = matching(tag, {one: image.labels for one, image in candidates.items()})
    if local:
        target = candidates[local].labels[f"{LABELS}.target"]
        return _of(
            candidates[local],
            f"the local {NAME}:{local} is used for {reference} (its label {LABELS}.target is {target})",
        )
    if not named.names_docker_hub:
        with contextlib.suppress(UserError):
            return _of(docker_engine.pull(reference), "")
    tags = sorted(candidates)
    others = f"; local images of {NAME}: {', '.join(tags)}" if tags else ""
    raise UserError(
        f"no local image for {reference}{nearest(tag, tags) or nearest(name, tags)}: build it "
        f"('{installation.command('image', TARGET=_target(tag))}'), or give a local one with "
        f"{installation.option('IMAGE', '...')}{others}"
    )


def matching(tag: str, local: Mapping[str, Mapping[str, str]]) -> str | None:
    """The tag of the local image that ``tag`` means; None if there is none.

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


def _target(tag: str) -> str:
    """The target of a tag such as xla-2.9.0-20261120-58b92eea."""
    return re.split(r"-\d", tag)[0]


def _of(image: Image, note: str) -> LocalImage:
    return LocalImage(str(image.id), note, f"{LABELS}.target" in image.labels)
