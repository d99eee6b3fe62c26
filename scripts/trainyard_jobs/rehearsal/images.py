"""The local image to run for a reference of the job file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from docker.models.images import Image

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError, nearest
from trainyard.oci.reference import Reference
from trainyard.spec import architectures
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.naming import LABELS, NAME
from trainyard_jobs.model import image_metadata
from trainyard_jobs.model.image_metadata import ImageNotFoundError, ImageUnavailableError
from trainyard_jobs.model.machines import UNKNOWN_HOSTS, Hosts

_VERSION = "org.opencontainers.image.version"


@dataclass(frozen=True)
class LocalImage:
    """A local image that is run for a reference.

    Attributes:
        id: the image's ID.
        note: a line for the user, if it is not the image of that reference; else "".
        has_launcher: whether Trainyard built it.
        architecture: that it is run for, if it is another one than the engine's.
    """

    id: str
    note: str
    has_launcher: bool
    architecture: Architecture | None = None

    @property
    def platform(self) -> str | None:
        """The platform to give the engine; None for its own."""
        return self.architecture.platform if self.architecture else None

    def environment(self, engine: Engine) -> dict[str, str]:
        """Variables for its containers, if the engine emulates them."""
        return engine.emulated_environment(self.architecture.name) if self.architecture else {}


def find(engine: Engine, reference: str, replacement: str = "", hosts: Hosts = UNKNOWN_HOSTS) -> LocalImage:
    """The image to run for ``reference``: the local one of that name, the target's image that its tag means, or pulled.

    It is for the architecture of the job's machines. Where that is impossible, a local one for another architecture is
    run, with a note.

    Args:
        replacement: a local image to run instead (IMAGE=), whatever its architecture.
        hosts: the machines that the platform runs it on.
    Raises:
        UserError: there is no such image, it is not for those machines, or the engine cannot run it.
    """
    if replacement:
        image = engine.image(replacement, made_by="trainyard image")
        found = _of(engine, image, f"{replacement} replaces {reference}" if replacement != reference else "")
    else:
        found = _find(engine, reference, hosts, engine.images())
    if found.architecture:
        engine.require_emulation(found.architecture.platform)
    return found


def _find(engine: Engine, reference: str, hosts: Hosts, images: list[Image]) -> LocalImage:
    wanted = ARCHITECTURES.get(hosts.architecture)
    fitting = [image for image in images if wanted is None or image.attrs.get("Architecture") == wanted.name]
    if found := _named(engine, reference, fitting) or _meant(engine, reference, fitting):
        return found
    other = _named(engine, reference, images) or _meant(engine, reference, images)
    if not Reference.parse(reference).names_docker_hub and (pulled := _pulled(engine, reference, hosts, wanted, other)):
        return pulled
    if other:
        platform = other.platform or architectures.of_engine(engine).platform
        note = f"the local image for {platform} is run for {reference}: {hosts.words} run linux/{hosts.architecture}"
        return replace(other, note=note)
    raise _missing(reference, images)


def _named(engine: Engine, reference: str, images: list[Image]) -> LocalImage | None:
    """The local image of that name."""
    for image in images:
        names = (*image.tags, *(image.attrs.get("RepoDigests") or ()), image.id)
        # With the containerd image store, the ID of an image is its digest at registries.
        if reference in names or reference.endswith(f"@{image.id}"):
            return _of(engine, image, "")
    return None


def _ours(images: list[Image]) -> dict[str, Image]:
    """Tag -> local image of ours."""
    tagged = [(Reference.parse(one), image) for image in images for one in image.tags]
    return {one.tag: image for one, image in tagged if one.familiar_name == NAME}


def _meant(engine: Engine, reference: str, images: list[Image]) -> LocalImage | None:
    """The image of the target that the tag of a reference means."""
    candidates = _ours(images)
    local = matching(Reference.parse(reference).version, {one: image.labels for one, image in candidates.items()})
    if local is None:
        return None
    target = candidates[local].labels[f"{LABELS}.target"]
    return _of(
        engine,
        candidates[local],
        f"the local {NAME}:{local} is used for {reference} (its label {LABELS}.target is {target})",
    )


def _pulled(
    engine: Engine, reference: str, hosts: Hosts, wanted: Architecture | None, other: LocalImage | None
) -> LocalImage | None:
    """The image of that reference for the machines; None if it cannot be pulled, or if only ``other`` can be run.

    Raises:
        UserError: the registry has it for other machines, or the engine cannot run it and there is no other.
    """
    with contextlib.suppress(ImageNotFoundError, ImageUnavailableError):
        if what := hosts.mismatch(image_metadata.at_registry(reference).platforms):
            raise UserError(f"{reference}: {what}: {hosts.remediation()}, or use other machines")
    if wanted and not engine.can_run(wanted.platform):
        if other:
            return None
        engine.require_emulation(wanted.platform)
    with contextlib.suppress(UserError):
        return _of(engine, engine.pull(reference, wanted.platform if wanted else None), "", wanted)
    return None


def _missing(reference: str, images: list[Image]) -> UserError:
    named = Reference.parse(reference)
    name, tag = named.repository.rpartition("/")[2], named.version
    tags = sorted(_ours(images))
    others = f"; local images of {NAME}: {', '.join(tags)}" if tags else ""
    return UserError(
        f"no local image for {reference}{nearest(tag, tags) or nearest(name, tags)}: build it "
        f"('trainyard image {_target(tag)}'), or give a local one with "
        f"'--image ...'{others}"
    )


def matching(tag: str, local: Mapping[str, Mapping[str, str]]) -> str | None:
    """The tag of the local image that ``tag`` means; None if there is none.

    Args:
        tag: a target, `<target>-<version of the framework>`, or the immutable tag of a build.
        local: tag of each local image -> its labels.
    """

    def target(one: str) -> str:
        return local[one].get(f"{LABELS}.target", "")

    if tag in local and target(tag):
        return tag
    for one in local:
        if one not in {target(one), *(f"{target(one)}-{architecture}" for architecture in ARCHITECTURES)}:
            continue
        version = local[one].get(f"{LABELS}.framework", "").partition("==")[2]
        if tag in (local[one].get(_VERSION), target(one), f"{target(one)}-{version}"):
            return one
    return None


def _target(tag: str) -> str:
    """The target of a tag such as xla-2.9.0-20261120-58b92eea."""
    return re.split(r"-\d", tag)[0]


def _of(engine: Engine, image: Image, note: str, wanted: Architecture | None = None) -> LocalImage:
    """The image as it is run: for an architecture of an image index, else for its own."""
    chosen = wanted or ARCHITECTURES.get(str(image.attrs.get("Architecture")))
    foreign = chosen if chosen != architectures.of_engine(engine) else None
    return LocalImage(str(image.id), note, f"{LABELS}.target" in image.labels, foreign)
