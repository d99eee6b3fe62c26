"""Push an image that passed verify and smoke to a registry under its immutable tag, and attach claims about it.

The tag is ``<registry>/trainyard:<target>-<version>-<day>-<hash>``. It never changes: if the registry has it with
another digest, the push is refused. Floating tags are moved by :mod:`trainyard.release.promotion`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.common import stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import provenance
from trainyard.oci import inventory, registry
from trainyard.oci.reference import Reference
from trainyard.oci.registry import Repository
from trainyard.oci.statements import Signer
from trainyard.recipe import Named
from trainyard.release import audit, claims, platform_index, predicates, pushed_code
from trainyard.sandbox.containers import recipe_of
from trainyard.spec import state
from trainyard.spec.architectures import PLATFORMS, Architecture
from trainyard.spec.naming import LABELS, NAME, TAG, candidate_tag
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blob:
    """Describe a blob at a registry: a layer, named after its stage, or the configuration; ``size`` in bytes."""

    name: str
    digest: str
    diff_id: str
    size: int


def blobs(verified: dict[str, Any]) -> list[Blob]:
    """Return the blobs of an image, from the result of verify."""
    layers = verified["layers"]
    return [
        *(Blob(layer["stage"], layer["digest"], layer["diff_id"], layer["compressed"]) for layer in layers),
        Blob("configuration", verified["config"]["digest"], "", verified["config"]["size"]),
    ]


def upload_report(parts: list[Blob], blob_status: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what a push did with each blob: ``name``, ``digest``, ``size`` in bytes, ``uploaded``.

    Args:
        blob_status: start of a blob's digest -> ``uploaded`` or ``exists``. A blob without status counts as uploaded:
            the engine reports every layer that the registry has, but uploads configurations without an event
            (Docker 26).
    """
    existing = tuple(f"sha256:{start}" for start, status in blob_status.items() if status == "exists")
    there = {blob for blob in parts if blob.digest.startswith(existing) or blob.diff_id.startswith(existing)}
    return [_reported(blob, uploaded=blob not in there) for blob in parts]


def _reported(blob: Blob, *, uploaded: bool) -> dict[str, Any]:
    return {"name": blob.name, "digest": blob.digest, "size": blob.size, "uploaded": uploaded}


@dataclass(frozen=True)
class Source:
    """Name the images that are pushed.

    Attributes:
        in_place: target that is built where the base of this one is out of reach; empty if there is none.
        architecture: which of them, where one is meant.
        folder: of the repository that they are of.
    """

    named: Named
    context: Context
    architecture: Architecture
    folder: Path
    in_place: str = ""

    def on(self, architecture: Architecture) -> Source:
        """Return the source of the image for another platform."""
        return replace(self, architecture=architecture)

    @property
    def local_name(self) -> str:
        """Return the tag of the image on this host."""
        return self.named.local_name_for(self.architecture)

    @property
    def kept(self) -> Path:
        """Return the folder of what this host keeps about the image."""
        return self.named.kept_for(self.context.state, self.architecture)

    def command(self, name: str) -> str:
        """Return a command for the image, for messages."""
        return self.named.command(name, self.architecture)


def image_to_push(source: Source) -> Any:
    """Return the local image ``trainyard:<target>``, or the target's candidate if there is none.

    Raises:
        UserError: there is neither; the line says if the fallback of the target was built.
    """
    engine, name, in_place = source.context.engine, source.local_name, source.in_place
    candidate = candidate_tag(name)
    if image := engine.find(f"{NAME}:{name}"):
        return image
    if in_place and engine.find(f"{NAME}:{in_place}") and not engine.find(candidate):
        raise UserError(
            f"no local image {NAME}:{name}: {in_place} was built in its place; 'trainyard push {in_place}' pushes that "
            "under its name"
        )
    return engine.image(candidate, made_by=source.command("image"))


def check_level(source: Source, level: str) -> None:
    """Raise a :class:`UserError` if the code of an image was started and did not run, by its label ``level``."""
    if level == "started":
        raise UserError(
            f"{source.named.name} was only started, its code has not run: give 'smoke' in {source.named.source} and "
            f"run '{source.command('image')}', or push it with --allow-untested"
        )


def push(source: Source, address: str, *, reference: str | None = None, allow_untested: bool = False) -> dict[str, Any]:
    """Push an image.

    Args:
        address: ``host[:port]/path`` of the registry, here and below.
        reference: a local image to push instead of the target's.
        allow_untested: push a user's image whose code was started and did not run.
    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``tested`` (how far it was tested),
        ``blobs`` (:func:`upload_report`), ``bytes_uploaded`` (with the manifest), ``already_there`` (whether the
        registry had the tag), ``advisories`` (of the snapshot: :class:`trainyard.release.audit.Coverage`), ``seconds``.
    Raises:
        UserError: there is no such image, it did not pass verify and smoke, or the registry has its tag with another
            digest.
        StepFailed: a locked package has a known vulnerability without a waiver.
    """
    started = time.monotonic()
    engine = source.context.engine
    image = engine.image(reference, made_by="docker pull") if reference else image_to_push(source)
    digest = str(image.id)
    recipe = recipe_of(engine, image, made_by=source.command("image"))
    advisories = audit.require(recipe)
    passed = state.require(source.kept, digest, "verify", "smoke", made_by=source.command("image"))
    tag = str(image.labels.get(TAG) or "")
    if not tag:
        raise UserError(f"{digest[:19]} has no label {TAG}: run '{source.command('image')}'")
    level = str(image.labels.get(f"{LABELS}.tested") or "")
    if not allow_untested:
        check_level(source, level)
    repository = Repository(f"{address}/{NAME}", source.context.state)
    destination = f"{repository.name}:{tag}"
    parts = blobs(passed["verify"])
    before = registry.digest_of(engine, destination)
    same = before is not None and before in known_digests(image, repository.name)
    if before is not None and not same:
        raise UserError(
            f"{destination} is {before[:19]} at the registry, and immutable tags are never moved; this image is "
            f"{digest[:19]}: commit your changes and run '{source.command('image')}' to get a new tag"
        )
    if same:
        digest = str(before)
        reported = [_reported(blob, uploaded=False) for blob in parts]
    else:
        with stages.stage("push") as stage:
            reported = upload_report(parts, _upload(engine, image, destination, parts))
            there = sum(not blob["uploaded"] for blob in reported)
            size = in_units(sum(blob["size"] for blob in reported if blob["uploaded"]))
            stage.done = f"{size} uploaded, {there} of {len(parts)} blobs were there"
        after = registry.digest_of(engine, destination)
        if after is None or (after != digest and engine.stores_in_containerd):
            raise StepFailed(f"{destination} is {after or 'missing'} after the push of {digest}")
        digest = after
    manifest = 0 if same else int(passed["verify"]["manifest"]["size"])
    return {
        **repository.named(digest, tag),
        "tested": level,
        "blobs": reported,
        "bytes_uploaded": sum(blob["size"] for blob in reported if blob["uploaded"]) + manifest,
        "already_there": same,
        "advisories": asdict(advisories),
        "seconds": round(time.monotonic() - started, 1),
    }


def push_attached(
    source: Source,
    address: str,
    signer: Signer | None,
    *,
    reference: str | None = None,
    allow_untested: bool = False,
) -> dict[str, Any]:
    """Push an image as :func:`push` does, with the claims that :func:`attach_claims` makes.

    Returns:
        That of :func:`push`, and ``attached``: the kinds of the claims that the image did not have yet.
    """
    pushed = push(source, address, reference=reference, allow_untested=allow_untested)
    attached = attach_claims(source, address, pushed["digest"], signer, reference=reference)
    _remember(source, Repository(f"{address}/{NAME}", source.context.state), pushed)
    return pushed | {"attached": attached}


def _remember(source: Source, repository: Repository, pushed: dict[str, Any]) -> None:
    """Record what was pushed of a repository as that whose code ``push --code-only`` replaces."""
    if source.named.is_repository:
        tag = pushed["tag"].rpartition(":")[2]
        pushed_code.remember(source.named, source.architecture, source.folder, repository, tag, pushed["digest"])


def push_all(
    source: Source,
    address: str,
    signer: Signer | None,
    *,
    references: Mapping[Architecture, str] | None = None,
    allow_untested: bool = False,
) -> dict[str, Any]:
    """Push the images of several platforms with :func:`push_attached`, and an index of them.

    Args:
        references: the local images; those that passed on this host if None.
    Returns:
        That of :func:`push_index`; ``images``: platform -> result of :func:`push_attached`; and of all together
        ``tested``, ``bytes_uploaded``, ``already_there``, ``seconds``.
    Raises:
        UserError: no image of the target passed, their versions differ, or see :func:`push`.
    """
    started = time.monotonic()
    chosen = platform_index.images_of_host(source.named, source.context) if references is None else references
    if not chosen:
        image = image_to_push(source)  # reports that there is no image; else it did not pass
        state.require(source.kept, str(image.id), "verify", "smoke", made_by=source.command("image"))
    images = {
        one.platform: push_attached(
            source.on(one), address, signer, reference=chosen[one], allow_untested=allow_untested
        )
        for one in source.named.architectures
        if one in chosen
    }
    at_registry = {PLATFORMS[platform]: image["digest"] for platform, image in images.items()}
    index = push_index(source, Repository(f"{address}/{NAME}", source.context.state), at_registry, signer)
    return index | {
        "images": images,
        "tested": next(iter(images.values()))["tested"],
        "bytes_uploaded": index["bytes_uploaded"] + sum(one["bytes_uploaded"] for one in images.values()),
        "seconds": round(time.monotonic() - started, 1),
    }


def push_index(
    source: Source, repository: Repository, digests: Mapping[Architecture, str], signer: Signer | None
) -> dict[str, Any]:
    """Push an index of images that are at a registry; a warning names each platform that it lacks.

    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``platforms``, ``attached``,
        ``bytes_uploaded``, ``already_there`` (whether the registry had it).
    Raises:
        UserError: their targets or versions differ, or the registry has the tag with another digest.
    """
    index = platform_index.make(repository, digests)
    before = repository.manifest(index.tag)
    if before and before.digest != index.manifest.digest:
        raise UserError(
            f"{repository.name}:{index.tag} is {before.digest[:19]} at the registry, and immutable tags are never "
            f"moved; this image index is {index.manifest.digest[:19]}: commit your changes, and build all images again"
        )
    if not before:
        repository.tag(index.manifest, index.tag)
    attached = claims.attach(repository, index.manifest, signer, [predicates.signature()]) if signer else []
    for one in source.named.architectures:
        if one not in digests:
            again = source.named.command("image", one)
            logger.warning(f"the image index has no {one.platform}: no image for it passed; '{again}' makes one")
    made = {
        **repository.named(index.manifest.digest, index.tag),
        "platforms": [name for name in source.named.platforms if PLATFORMS[name] in digests],
        "attached": attached,
        "bytes_uploaded": 0 if before else len(index.manifest.body),
        "already_there": before is not None,
    }
    _remember(source, repository, made)
    return made


def known_digests(image: Any, repository: str) -> set[str]:
    """Return the digests that a local image may have at ``repository``.

    These are its ID, which is its digest with the containerd image store, and those that earlier pushes and pulls
    recorded.
    """
    names = [Reference.parse(name) for name in image.attrs.get("RepoDigests") or []]
    here = Reference.parse(repository)
    return {str(image.id)} | {named.digest for named in names if named.name == here.name}


def _upload(engine: Engine, image: Any, destination: str, parts: list[Blob]) -> dict[str, str]:
    """Push under a local tag that is removed afterwards; return the status of blobs for :func:`upload_report`."""
    named = Reference.parse(destination)
    blob_status: dict[str, str] = {}
    image.tag(named.name, named.tag)
    try:
        for start, status in registry.push(engine, destination):
            blob_status[start] = status
            for blob in parts:
                if status == "uploaded" and start in (blob.digest[7:19], blob.diff_id[7:19]):
                    stages.now(f"{blob.name}: {in_units(blob.size)} uploaded")
    finally:
        engine.client.api.remove_image(destination, noprune=True)
    return blob_status


def attach_claims(
    source: Source,
    address: str,
    digest: str,
    signer: Signer | None,
    *,
    reference: str | None = None,
) -> list[str]:
    """Attach what this host found out about the image ``digest`` to it at a registry.

    Without a signer that is SBOM, provenance, verify and smoke; with one a signature, too.

    Args:
        reference: the local image that was pushed; the target's if None.
    Returns:
        The kinds of the claims that the image did not have yet.
    """
    from trainyard.release import sbom  # its libraries take long to import

    repository = Repository(f"{address}/{NAME}", source.context.state)
    subject = repository.existing(digest)
    local = reference or str(image_to_push(source).id)
    known = claims.check(repository, digest, signer.trust if signer else None)
    made = [predicates.signature()] if signer else []
    if not any(one.valid and one.kind == "sbom" for one in known):
        made.append(predicates.sbom(sbom.make(inventory.local(source.context.engine, local, libraries=True))))
    if statement := provenance.statement(source.kept, digest):
        made.append(predicates.provenance(statement))
    passed_as = source.context.engine.digest(local, made_by=source.command("image"))
    passed = state.require(source.kept, passed_as, "verify", "smoke", made_by=source.command("image"))
    made += [predicates.verify(passed["verify"]), predicates.smoke(passed["smoke"])]
    return claims.attach(repository, subject, signer, made, known=known)
