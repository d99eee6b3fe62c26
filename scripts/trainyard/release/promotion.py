"""Move a target's floating tags at a registry to an image that passed, and back; nothing is pulled or pushed.

``<target>`` and ``<target>-<version>`` are moved. What they pointed to before is kept as ``<tag>.previous``, which
:func:`rollback` returns to.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from packageurl import PackageURL

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import image_index, statements
from trainyard.oci.documents import InvalidAnswer, hashed
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.statements import Signer, Trust
from trainyard.oci.transport import MAX_ATTEMPTS
from trainyard.recipe import Named, version_tag
from trainyard.release import claims, platform_index, predicates
from trainyard.release.platform_index import labels_of
from trainyard.release.predicates import Claim
from trainyard.spec import state
from trainyard.spec.naming import LABELS, NAME

#: Seconds that each further reading of the tags waits longer than the one before.
_WAIT = 0.2

logger = logging.getLogger(__name__)


def check_promoted(named: Named) -> None:
    """Raise a :class:`UserError` for a fallback, whose images are never promoted."""
    if named.fallback_for:
        raise _fallback_refused(named.name, named.fallback_for)


def image_to_promote(named: Named, repository: Repository, version: str) -> Manifest:
    """Return the manifest or index of a tag or digest at a registry.

    Raises:
        UserError: it is of a fallback, the registry has no such image, or see
            :func:`trainyard.release.platform_index.check_passed`.
    """
    check_promoted(named)
    manifest = repository.manifest(version)
    if manifest is None:
        raise UserError(f"{repository.name} has no {version}: run '{named.command('push')}' first")
    platform_index.check_passed(named, repository, version, image_index.members(repository, manifest))
    if replaced := labels_of(repository, manifest).get(f"{LABELS}.fallback-for"):
        raise _fallback_refused(f"{version} at {repository.name}", replaced)
    return manifest


def _fallback_refused(what: str, replaced: str) -> UserError:
    return UserError(
        f"{what} is a fallback, built where the base of {replaced} was out of reach, and never promoted: run "
        f"'trainyard image {replaced}' where the base can be pulled"
    )


def framework_version(repository: Repository, manifest: Manifest) -> str:
    """Return the framework's version by the image's label ``<name>==<version>``; the current spec may be newer."""
    return labels_of(repository, manifest).get(f"{LABELS}.framework", "").rpartition("==")[2]


@dataclass(frozen=True)
class Demanded:
    """Name the signed claims without which no image is promoted.

    Attributes:
        trust: whose claims count.
        kinds: see :data:`trainyard.release.predicates.ABOUT_IMAGES`.
        signer: who signs a summary of the check; there is none if None.
    """

    trust: Trust
    kinds: Sequence[str]
    signer: Signer | None = None


def promote(
    named: Named, source: Repository, version: str, *, to: str | None = None, demanded: Demanded | None = None
) -> dict[str, Any]:
    """Move the floating tags of a target to an image.

    Args:
        source: repository that the image was pushed to, ``version``: its tag or digest there.
        to: registry and path whose tags are moved; that of ``source`` if None.
        demanded: signed claims that the image must have.
    Returns:
        ``digest``, ``tags`` (tag -> the digest that it had before, or None), ``repository``, ``tested`` (how far the
        image was tested, by its label; empty without), ``claims`` (the kinds that were demanded).
    Raises:
        UserError: see :func:`image_to_promote`; or ``to`` is at another registry, or its tags are immutable.
        StepFailed: a claim that is demanded is missing or not valid.
    """
    destination = Repository(f"{to}/{NAME}", source.state) if to else source
    manifest = image_to_promote(named, source, version)
    summary = _checked_claims(source, manifest, demanded) if demanded else None
    if destination.host != source.host:
        raise UserError(f"'--to {to}': must be at {source.host}, where the image is")
    if destination.name != source.name:
        destination.mount(manifest, source)
        _copy_claims(manifest, source, destination)
    with _locked(destination):
        _warn_if_mixed(named.name, destination)
        tags = (version_tag(named.name, framework_version(source, manifest)), named.name)
        before = {tag: destination.manifest(tag) for tag in tags}
        moved = {tag: one for tag, one in before.items() if one is None or one.digest != manifest.digest}
        if moved and summary and demanded and demanded.signer:
            claims.attach(destination, manifest, demanded.signer, [summary])
        for tag, one in moved.items():
            if one:
                destination.put(one, f"{tag}.previous")
            destination.put(manifest, tag)
        if moved:
            _settle(named.name, destination, manifest)
    return {
        "digest": manifest.digest,
        "tags": {tag: one.digest if one else None for tag, one in moved.items()},
        "repository": destination.name,
        "tested": labels_of(source, manifest).get(f"{LABELS}.tested", ""),
        "claims": list(demanded.kinds) if demanded else [],
    }


def _locked(repository: Repository) -> AbstractContextManager[None]:
    """Return the lock for moving a repository's tags, which other processes on this host wait for."""
    name = f"tags-{hashed(repository.name.encode())[7:23]}"
    return state.file_lock(repository.state, name, f"another process moves tags of {repository.name}: waiting for it")


def _mixed(name: str, repository: Repository) -> tuple[Manifest | None, str, Manifest | None]:
    """Return the image under the target's tag, the tag of its version, and the image under that tag."""
    now = repository.manifest(name)
    if now is None:
        return None, "", None
    versioned = version_tag(name, framework_version(repository, now))
    return now, versioned, repository.manifest(versioned)


def _warn_if_mixed(name: str, repository: Repository) -> None:
    """Name the tags that a command which was killed, or another host, left on different images."""
    try:
        now, versioned, stored = _mixed(name, repository)
    except InvalidAnswer:
        raise
    except StepFailed as error:  # such as an index that promote refuses: moving the tag away from it is the way out
        logger.warning(f"{repository.name}:{name} is no image that can be read ({error}): it is moved now")
        return
    if now and (stored is None or stored.digest != now.digest):
        logger.warning(
            f"{repository.name}:{name} is {now.digest[:19]} and {versioned} is "
            f"{stored.digest[:19] if stored else 'missing'}: a promote or rollback was interrupted; both are moved now"
        )


def _settle(name: str, repository: Repository, manifest: Manifest) -> None:
    """Read the tags back, until both are the same image, after they were moved to ``manifest``.

    Registries have no transactions. Whoever moves tags moves the target's own tag last; if another host moves them at
    the same time, both read which image that tag has in the end, and give it the tag of its version.

    Raises:
        StepFailed: it is not ``manifest``, or the tags change all the time.
    """
    for attempt in range(MAX_ATTEMPTS):
        time.sleep(_WAIT * attempt)
        now, versioned, stored = _mixed(name, repository)
        if now and stored and stored.digest == now.digest:
            if now.digest == manifest.digest:
                return
            raise StepFailed(
                f"{repository.name}: {name} and {versioned} are {now.digest[:19]}, not {manifest.digest[:19]}: "
                "another process moved them at the same time; run this again if it should not have"
            )
        if now:
            repository.put(now, versioned)
    raise StepFailed(
        f"{repository.name}: {name} is {now.digest[:19] if now else 'missing'} and {versioned} is "
        f"{stored.digest[:19] if stored else 'missing'}: other processes move them all the time; run this again"
    )


def _checked_claims(repository: Repository, manifest: Manifest, demanded: Demanded) -> Claim:
    """Return a summary, to be signed, of a check of the claims that are demanded (:func:`claims.require_all`)."""
    found = claims.require_all(repository, manifest, demanded.trust, demanded.kinds)
    resource = PackageURL("oci", name=NAME, version=manifest.digest, qualifiers={"repository_url": repository.name})
    now = datetime.datetime.now(datetime.UTC)
    return predicates.summary(resource.to_string(), demanded.kinds, [claim.digest for claim in found], now)


def _copy_claims(manifest: Manifest, source: Repository, destination: Repository) -> None:
    """Attach the claims about an image, and about those of an image index, to the same images elsewhere."""
    images = image_index.images(manifest.document).values()
    for one in (manifest, *(source.existing(digest) for digest in images)):
        statements.copy(one, source, destination)


def rollback(name: str, repository: Repository) -> dict[str, Any]:
    """Swap ``<tag>`` and ``<tag>.previous`` of the target and of the version that it now has.

    Returns:
        ``repository``, and ``tags``: tag -> (digest that it has now, digest that it had).
    Raises:
        UserError: there is no previous image.
    """
    with _locked(repository):
        now = repository.manifest(name)
        before = repository.manifest(f"{name}.previous")
        if now is None or before is None:
            raise UserError(f"{repository.name}:{name} was never promoted twice: there is no previous image")
        _warn_if_mixed(name, repository)
        framework_version(repository, before)  # raises, before anything is moved, if its documents have changed
        moved, wanted = {}, before
        # The target's own tag is last: see _settle.
        for tag in (version_tag(name, framework_version(repository, now)), name):
            now, before = repository.manifest(tag), repository.manifest(f"{tag}.previous")
            if now is None or before is None:  # the first image of its version: the version's tag is not moved
                continue
            repository.put(before, tag)
            repository.put(now, f"{tag}.previous")
            moved[tag] = [before.digest, now.digest]
        _settle(name, repository, wanted)
    return {"repository": repository.name, "tags": moved}
