"""Make the index of a target's images: one reference for all platforms.

Each image of a target with several platforms has a tag that ends with its architecture. The index has the tag without
it: ``<target>-<version>-<day>-<hash>``, where the hash follows from the tags of the images. What is promoted, rolled
back and named in jobs is the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.oci import image_index
from trainyard.oci.documents import labels_in
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import Named
from trainyard.release import claims
from trainyard.spec import state
from trainyard.spec.architectures import PLATFORMS, Architecture
from trainyard.spec.naming import DEVELOPMENT, LABELS, NAME, TAG, UNTESTED


@dataclass(frozen=True)
class PlatformIndex:
    """Hold an index as it is, or will be, at a registry; ``tag``: its immutable tag."""

    manifest: Manifest
    tag: str


def passed_here(kept: Path, digest: str) -> bool:
    """Return whether a digest passed verify and smoke here; ``kept``: the folder of its results."""
    results = (state.recall(kept, "verify", digest), state.recall(kept, "smoke", digest))
    return all(result and result["passed"] for result in results)


def images_of_host(named: Named, context: Context) -> dict[Architecture, str]:
    """Return the digests of the images of a target that passed on this host."""
    digests = {}
    for architecture in named.architectures:
        digest = context.engine.digest_of(f"{NAME}:{named.local_name_for(architecture)}")
        if digest and passed_here(named.kept_for(context.state, architecture), digest):
            digests[architecture] = digest
    return digests


def labels_of(repository: Repository, manifest: Manifest) -> dict[str, str]:
    """Return the labels of an image at a registry; of an index, those of its first image."""
    return labels_in(repository.config(next(iter(image_index.members(repository, manifest).values()))))


def check_same(repository: Repository, members: Mapping[str, Manifest]) -> dict[str, str]:
    """Return the labels of an image or of the first of an index, ``members``: platform -> manifest.

    Raises:
        UserError: two are not of one target and one version, or one is for another platform than the index says.
    """
    first: dict[str, str] = {}
    for platform, manifest in members.items():
        config = repository.config(manifest)
        labels = labels_in(config)
        own = f"{config.get('os')}/{config.get('architecture')}"
        if own != "/".join(platform.split("/")[:2]):  # a variant is not in every configuration
            raise UserError(
                f"{repository.name}@{manifest.digest[:19]} is for {own}, and its image index says {platform}: push it "
                "again"
            )
        for name in (f"{LABELS}.target", f"{LABELS}.framework"):
            if first and labels.get(name) != first.get(name):
                raise UserError(
                    f"{repository.name}: the images of the image index differ: {name} is {first.get(name)!r}, and "
                    f"{labels.get(name)!r} for {platform}: build all platforms from one commit, and push them again"
                )
        first = first or labels
    return first


def check_passed(named: Named, repository: Repository, version: str, members: Mapping[str, Manifest]) -> None:
    """Check that an image or index, whose tag or digest is ``version``, is of a target and passed verify and smoke.

    Raises:
        UserError: it is of another target, it was never tested, one of its images did not pass, or see
            :func:`check_same`.
    """
    labels = check_same(repository, members)
    target = labels.get(f"{LABELS}.target")
    if target != named.name:
        raise UserError(f"{version} at {repository.name} is an image of target '{target}', not '{named.name}'")
    if labels.get(f"{LABELS}.tested") == UNTESTED or version.startswith(DEVELOPMENT):
        raise UserError(
            f"{version} at {repository.name} was made by 'trainyard push --code-only', and its code was never tested: "
            f"run '{named.command('image')}' and '{named.command('push')}'"
        )
    state = repository.state
    folders = {one.platform: named.kept_for(state, one) for one in named.architectures}
    for platform, member in members.items():
        passed = passed_here(folders.get(platform, state / named.name), member.digest)
        if not passed and not claims.passed(repository, member.digest):
            raise UserError(
                f"{member.digest[:19]} ({platform}) never passed verify and smoke, neither on this host nor by its "
                f"claims at {repository.name}: run '{named.command('image', PLATFORMS.get(platform))}' and "
                f"'{named.command('push', PLATFORMS.get(platform))}'"
            )


def images_at(named: Named, repository: Repository, versions: Sequence[str]) -> dict[Architecture, str]:
    """Return the digests of images of a target at a registry, which may have been built and pushed on several hosts.

    Args:
        versions: their tags or digests; of an index, all its images count.
    Raises:
        UserError: none is given, the registry lacks one of them, two of them are for one platform, one is for a
            platform that the target is not made for, or see :func:`check_passed`.
    """
    if not versions:
        raise UserError(
            f"no image of {named.name} to make an index of: give the tags or digests that were pushed with '--images'"
        )
    digests: dict[Architecture, str] = {}
    for version in versions:
        manifest = repository.manifest(version)
        if manifest is None:
            raise UserError(f"{repository.name} has no {version}: run '{named.command('push')}' where it was built")
        members = image_index.members(repository, manifest)
        check_passed(named, repository, version, members)
        for platform, member in members.items():
            if platform not in named.platforms:
                raise UserError(
                    f"{version} at {repository.name} is for {platform}, and {named.name} is made for "
                    f"{', '.join(named.platforms)} ('platforms' of its spec)"
                )
            other = digests.setdefault(PLATFORMS[platform], member.digest)
            if other != member.digest:
                raise UserError(f"{other[:19]} and {member.digest[:19]} are both for {platform}: give one of them")
    return digests


def make(repository: Repository, digests: Mapping[Architecture, str]) -> PlatformIndex:
    """Return the index of images of one target and version that are at a registry; see :func:`check_same`."""
    manifests = {architecture: repository.existing(digest) for architecture, digest in digests.items()}
    members = {architecture.platform: manifest for architecture, manifest in manifests.items()}
    labels = check_same(repository, members)
    tags = {one: labels_of(repository, manifest).get(TAG, "") for one, manifest in manifests.items()}
    tag = index_tag(tags)
    annotations = {TAG: tag, f"{LABELS}.target": labels.get(f"{LABELS}.target", "")}
    return PlatformIndex(image_index.make(manifests, annotations), tag)


def index_tag(tags: Mapping[Architecture, str]) -> str:
    """Return the immutable tag of an index, from those of its images: the day is that of the newest."""
    parts = [tag.removesuffix(f"-{architecture.name}").rsplit("-", 2) for architecture, tag in tags.items()]
    version, day = parts[0][0], max(part[1] for part in parts)
    digest = hashlib.sha256("\n".join(sorted(tags.values())).encode())
    return f"{version}-{day}-{digest.hexdigest()[:8]}"


def version_of_host(named: Named, repository: Repository, architecture: Architecture, context: Context) -> str:
    """Return the digest of this host's image, or of the index of its images if the target has several platforms.

    Raises:
        UserError: there is no image that passed.
    """
    if len(named.platforms) > 1:
        images = images_of_host(named, context)
        if images and all(repository.has(digest) for digest in images.values()):
            return make(repository, images).manifest.digest
    reference = f"{NAME}:{named.local_name_for(architecture)}"
    return context.engine.digest(reference, made_by=named.command("image", architecture))
