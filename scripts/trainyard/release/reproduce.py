"""Build a target twice without cache and compare: the same digest, or every file that differs and how.

The target's own image is not touched: the builds are tagged trainyard:<target>-reproduce and removed, together with
the build cache that they added. Only hashes of the first image are kept while the second is built, so that the disk
needs space for one at a time. Wheels come from the installer's cache, by hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import posixpath
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image import build
from trainyard.oci import builder, image_store, layers
from trainyard.spec import state
from trainyard.spec.model import Spec
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: Differences that are listed; the rest is counted.
SHOWN = 40

#: Space on the engine's disk that a build needs, as a multiple of the image's size: the files of a stage, the layer
#: that is copied from it, and the compressed layer. An image of 12.8 GB took 26 GB at its peak (2026-11).
SPACE_FACTOR = 2.5

#: Usual cause of a difference -> ends of paths, or folders (with a slash at the end).
CAUSES = {
    "byte code: compiled by time instead of by hash, or in another order": (".pyc",),
    "the installer's record of where a package came from": ("/INSTALLER", "/direct_url.json", "/uv_cache.json"),
    "a list of installed packages, with times or in no fixed order": ("/RECORD", "dpkg/status", "dpkg/available"),
    "the package manager's caches and logs": ("var/lib/apt/", "var/cache/", "var/log/"),
    "the linker's cache": ("etc/ld.so.cache",),
}


#: Type of an entry of a tar archive -> its name; any other is a file.
_KINDS = {tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard link"}


@dataclass(frozen=True)
class Entry:
    """Describe a path in a layer; ``content`` is the SHA-256 of a file, or the target of a link."""

    kind: str
    mode: int
    owner: str
    mtime: float
    size: int
    content: str
    extra: str


@dataclass(frozen=True)
class Listing:
    """Describe a layer: the stage that made it, the digest of its tar archive, its paths in their order."""

    stage: str
    diff_id: str
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Build:
    """Record a build whose image was removed. ``config`` is the image's OCI configuration."""

    digest: str
    config: dict[str, Any]
    layers: list[Listing]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Name a path or a part of the configuration that differs between the builds, and how it differs."""

    layer: str
    path: str
    reasons: tuple[str, ...]
    cause: str = ""


def entries(stream: io.BufferedReader) -> dict[str, Entry]:
    """Return every path of a layer, in the order of the tar archive, with the hash of its content."""
    found: dict[str, Entry] = {}
    for tar, member in image_store.members(stream):
        file = tar.extractfile(member) if member.isreg() else None
        # Without names and times, which are in other fields already.
        extra = {key: value for key, value in member.pax_headers.items() if key not in ("path", "linkpath", "mtime")}
        found[posixpath.normpath(member.name).lstrip("/")] = Entry(
            kind=_KINDS.get(member.type, "file"),
            mode=member.mode,
            owner=f"{member.uid}:{member.gid}",
            mtime=float(member.mtime),
            size=member.size,
            content=hashlib.file_digest(file, "sha256").hexdigest() if file else member.linkname,  # type: ignore[arg-type]
            extra=json.dumps(extra, sort_keys=True),
        )
    return found


def listings(engine: Engine, reference: str, dockerfile: str) -> tuple[dict[str, Any], list[Listing]]:
    """Return the configuration of a local image and the listings of its layers, bottom first."""
    parts = image_store.read(engine, reference, entries)
    config: dict[str, Any] = json.loads(parts.config)
    names = layers.name_layers(layers.made_by(config, len(parts.layers)), dockerfile)
    found = [
        Listing(stage, str(diff_id), layer.found)
        for layer, diff_id, (stage, _) in zip(parts.layers, config["rootfs"]["diff_ids"], names, strict=False)
    ]
    return config, found


def entry_differences(one: Entry, other: Entry) -> tuple[str, ...]:
    """Return how an entry differs from another, each difference with both values."""
    found = []
    if one.kind != other.kind:
        return (f"kind: {one.kind}, then {other.kind}",)
    if one.content != other.content:
        sizes = f"{one.size} bytes, then {other.size}" if one.size != other.size else f"{one.size} bytes both times"
        words = f"{one.content!r}, then {other.content!r}" if "link" in one.kind else sizes
        found.append(f"content: {words}")
    if one.mode != other.mode:
        found.append(f"mode: {one.mode:04o}, then {other.mode:04o}")
    if one.owner != other.owner:
        found.append(f"owner: {one.owner}, then {other.owner}")
    if one.mtime != other.mtime:
        found.append(f"mtime: {one.mtime:.0f}, then {other.mtime:.0f}")
    if one.extra != other.extra:
        found.append(f"extended attributes: {one.extra}, then {other.extra}")
    return tuple(found)


def cause(path: str, reasons: tuple[str, ...]) -> str:
    """Return the usual cause of such a difference; empty if none is known."""
    if any(reason.startswith("content") for reason in reasons):
        for words, marks in CAUSES.items():
            if any(path.endswith(mark) or (mark.endswith("/") and mark in path) for mark in marks):
                return words
    return ""


def layer_differences(one: Listing, other: Listing) -> Iterator[Difference]:
    """Yield the differences between two layers: of their paths or, if all of those are the same, of their order."""
    if one.diff_id == other.diff_id:
        return
    same = True
    for path in sorted({*one.entries, *other.entries}):
        first, second = one.entries.get(path), other.entries.get(path)
        if first is None or second is None:
            reasons: tuple[str, ...] = (f"only in the {'second' if first is None else 'first'} build",)
        else:
            reasons = entry_differences(first, second)
        if reasons:
            same = False
            yield Difference(one.stage, path, reasons, cause(path, reasons))
    if same:
        moved = next(
            (pair for pair in zip(one.entries, other.entries, strict=False) if pair[0] != pair[1]),
            ("(the archive)", ""),
        )
        words = f"order: the other build has {moved[1]} here" if moved[1] else "the format of the archive"
        yield Difference(one.stage, moved[0], (words,))


def compare(one: Build, other: Build) -> list[Difference]:
    """Return all differences between two builds of a target; empty if and only if their digests are equal."""
    if one.digest == other.digest:
        return []
    found: list[Difference] = []
    if len(one.layers) != len(other.layers):
        found.append(Difference("", "layers", (f"{len(one.layers)}, then {len(other.layers)}",)))
    for first, second in zip(one.layers, other.layers, strict=False):
        found += layer_differences(first, second)
    for key in sorted({*one.config, *other.config} - {"rootfs"}):
        if one.config.get(key) != other.config.get(key):
            found.append(Difference("configuration", key, _changed(one.config.get(key), other.config.get(key))))
    return found or [Difference("", "compression", ("the same layers with other compressed bytes",))]


def _changed(one: Any, other: Any) -> tuple[str, ...]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        return tuple(f"{key}: {json.dumps(one.get(key))}, then {json.dumps(other.get(key))}" for key in keys)
    return (f"{json.dumps(one)}, then {json.dumps(other)}",)


def require_space(spec: Spec) -> None:
    """Check that the engine's disk has space for a build without cache, if the engine builds and is on this host.

    Raises:
        UserError: there is too little; the message gives the free space and the space that is needed.
    """
    root = Path(str(spec.context.engine.client.info().get("DockerRootDir") or ""))
    if not (root.is_dir() and builder.current(spec.context).in_engine):
        return
    known = state.last(spec.kept, "verify")
    size = (known.get("size") if known else None) or spec.budget.size
    free = shutil.disk_usage(root).free
    if free < SPACE_FACTOR * size:
        raise UserError(
            f"{root} has {in_units(free)} free, and a build of {spec.target} ({in_units(size)}) without cache needs "
            f"{in_units(SPACE_FACTOR * size)}: free some, for example with 'trainyard clean --cache'"
        )


def build_once(spec: Spec, number: int, compression: str) -> Build:
    """Build ``spec`` without cache, record the result, and remove the image and the cache that it added."""
    reference = f"{NAME}:{spec.local_name}-reproduce"
    engine, used = spec.context.engine, builder.current(spec.context).name
    before = engine.cached(builder=used).keys()
    started = time.monotonic()
    logger.info(f"build {number} of 2")
    try:
        plan, facts = build.build(spec, compression=compression, no_cache=True, name=reference)
        dockerfile = spec.dockerfile(plan.index).read_text(encoding="utf-8")
        config, found = listings(engine, reference, dockerfile)
        logger.info(f"build {number} of 2: {facts['digest']} in {facts['seconds']} s")
        return Build(str(facts["digest"]), config, found, round(time.monotonic() - started, 1))
    finally:
        engine.untag(reference)
        engine.drop_cached(engine.cached(builder=used).keys() - before, builder=used)


def reproduce(spec: Spec, *, compression: str = "zstd") -> tuple[list[Build], list[Difference]]:
    """Build ``spec`` twice as :func:`trainyard.image.build.build` does; return both builds and their differences.

    Raises:
        UserError: the engine's disk has too little space.
        StepFailed: a build failed.
    """
    require_space(spec)
    with state.candidate_lock(spec.kept):  # or `clean` would remove its images
        builds = [build_once(spec, number, compression) for number in (1, 2)]
    return builds, compare(*builds)


def table(found: list[Difference]) -> Table:
    """Return the differences for people."""
    shown = Table("layer", "path", "difference", "usual cause")
    for one in found[:SHOWN]:
        shown.add_row(one.layer, one.path, "\n".join(one.reasons), one.cause)
    if len(found) > SHOWN:
        shown.add_row("", f"and {len(found) - SHOWN} more (--json lists all)", "", "")
    return shown


def result(spec: Spec, builds: list[Build], found: list[Difference]) -> dict[str, Any]:
    """Return ``target``, ``digests`` and ``seconds`` of both builds, ``same`` and ``differences`` for JSON."""
    return {
        "target": spec.target,
        "digests": [one.digest for one in builds],
        "seconds": [one.seconds for one in builds],
        "same": not found,
        "differences": [asdict(one) for one in found],
    }
