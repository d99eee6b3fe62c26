"""Build a target twice without cache: the same digest, or every file that differs, where and how.

    make reproduce TARGET=tf-cpu

The image itself is left alone: what is built here is called trainyard:<target>-reproduce and is removed again, with
the build cache that it left. Only hashes of the first image are kept while the second is built, so a disk needs room
for one of them (twice: a stage's files and the layer made of them). Wheels come from the installer's cache, by hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts import build, cli, engine, state
from scripts.cli import StepFailed, UserError, log, say
from scripts.plan import NAME
from scripts.spec import Spec, load
from scripts.stored import blobs, layers
from scripts.units import in_units

#: Differences that are told one by one; the rest is counted.
SHOWN = 40

#: Room on the engine's disk that a build takes, as a multiple of the image's size: the files of a stage, the layer that
#: is copied from it, and the packed layer (a 12.8 GB image took 26 GB at its peak; design's facts).
ROOM = 2.5

#: What usually makes a file differ -> ends of its path, or folders it lies in (with a slash at the end).
CAUSES = {
    "byte code: compiled by time instead of by hash, or in another order": (".pyc",),
    "the installer's record of where a package came from": ("/INSTALLER", "/direct_url.json", "/uv_cache.json"),
    "a list of what is installed, with times or in no order": ("/RECORD", "dpkg/status", "dpkg/available"),
    "the package manager's caches and logs": ("var/lib/apt/", "var/cache/", "var/log/"),
    "the linker's cache": ("etc/ld.so.cache",),
}


@dataclass(frozen=True)
class Entry:
    """What a layer says of a path; ``content`` is the SHA-256 of a file, or where a link points to."""

    kind: str
    mode: int
    owner: str
    mtime: float
    size: int
    content: str
    extra: str


@dataclass(frozen=True)
class Listing:
    """A layer: the stage that made it, the digest of its tar, its paths in their order."""

    stage: str
    diff_id: str
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Build:
    """What is kept of a build once its image is gone. ``config`` is the image's OCI configuration."""

    digest: str
    config: dict[str, Any]
    layers: list[Listing]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """A path, or a part of the configuration, that is not the same in both builds, and how it differs."""

    layer: str
    path: str
    reasons: tuple[str, ...]
    cause: str = ""


def entries(stream: io.BufferedReader) -> dict[str, Entry]:
    """Every path of a layer, in the tar's order, with the hash of what it holds."""
    found: dict[str, Entry] = {}
    for tar, member in blobs.members(stream):
        content = member.linkname
        if member.isreg():
            content = _sha256(tar, member)
        # Names and times of the extended header that the fields beside it hold already.
        extra = {key: value for key, value in member.pax_headers.items() if key not in ("path", "linkpath", "mtime")}
        found[posixpath.normpath(member.name).lstrip("/")] = Entry(
            kind={tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard link"}.get(
                member.type, "file"
            ),
            mode=member.mode,
            owner=f"{member.uid}:{member.gid}",
            mtime=float(member.mtime),
            size=member.size,
            content=content,
            extra=json.dumps(extra, sort_keys=True),
        )
    return found


def _sha256(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    hashed, file = hashlib.sha256(), tar.extractfile(member)
    while file and (chunk := file.read(blobs.CHUNK)):
        hashed.update(chunk)
    return hashed.hexdigest()


def listings(reference: str, dockerfile: str) -> tuple[dict[str, Any], list[Listing]]:
    """The configuration of a local image and the listings of its layers, bottom first."""
    parts = blobs.read(reference, entries)
    config: dict[str, Any] = json.loads(parts.config)
    names = layers.name_layers(layers.made_by(config, len(parts.layers)), dockerfile)
    found = [
        Listing(stage, str(diff_id), layer.found)
        for layer, diff_id, (stage, _) in zip(parts.layers, config["rootfs"]["diff_ids"], names, strict=False)
    ]
    return config, found


def how(one: Entry, other: Entry) -> tuple[str, ...]:
    """In what ways an entry differs from another, each with both values."""
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
    """What usually makes such a file differ; empty if nothing is known."""
    if any(reason.startswith("content") for reason in reasons):
        for words, marks in CAUSES.items():
            if any(path.endswith(mark) or (mark.endswith("/") and mark in path) for mark in marks):
                return words
    return ""


def between(one: Listing, other: Listing) -> Iterator[Difference]:
    """What differs between two layers; by each path, or in the order of their paths if every path is the same."""
    if one.diff_id == other.diff_id:
        return
    same = True
    for path in sorted({*one.entries, *other.entries}):
        first, second = one.entries.get(path), other.entries.get(path)
        if first is None or second is None:
            reasons: tuple[str, ...] = (f"only in the {'second' if first is None else 'first'} build",)
        else:
            reasons = how(first, second)
        if reasons:
            same = False
            yield Difference(one.stage, path, reasons, cause(path, reasons))
    if same:
        moved = next(
            (pair for pair in zip(one.entries, other.entries, strict=False) if pair[0] != pair[1]), ("(the tar)", "")
        )
        words = f"order: here the other build has {moved[1]}" if moved[1] else "the tar's own format"
        yield Difference(one.stage, moved[0], (words,))


def compare(one: Build, other: Build) -> list[Difference]:
    """Everything that two builds of one target do not have in common; empty if and only if their digests agree."""
    if one.digest == other.digest:
        return []
    found: list[Difference] = []
    if len(one.layers) != len(other.layers):
        found.append(Difference("", "layers", (f"{len(one.layers)}, then {len(other.layers)}",)))
    for first, second in zip(one.layers, other.layers, strict=False):
        found += between(first, second)
    for key in sorted({*one.config, *other.config} - {"rootfs"}):
        if one.config.get(key) != other.config.get(key):
            found.append(Difference("configuration", key, _changed(one.config.get(key), other.config.get(key))))
    return found or [Difference("", "compression", ("the same layers, packed to other bytes",))]


def _changed(one: Any, other: Any) -> tuple[str, ...]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        return tuple(f"{key}: {json.dumps(one.get(key))}, then {json.dumps(other.get(key))}" for key in keys)
    return (f"{json.dumps(one)}, then {json.dumps(other)}",)


def _remove(reference: str, before: set[str]) -> None:
    """Remove an image, and the build cache that came after ``before`` was looked at; what is in use stays."""
    engine.forget(reference)
    engine.drop_cached(engine.cached() - before)


def _need_room(spec: Spec) -> None:
    """Refuse to begin what would fill the engine's disk; nothing is known of an engine elsewhere.

    Raises:
        UserError: there is too little room; the line says how much is there and how much it takes.
    """
    root = Path(str(engine.client().info().get("DockerRootDir") or ""))
    if not root.is_dir():
        return
    known = state.last(spec.target, "verify") or {}
    size = int(known.get("size") or spec.budget.size)
    free = shutil.disk_usage(root).free
    if free < ROOM * size:
        raise UserError(
            f"{root} has {in_units(free)} free, and a build of {spec.target} ({in_units(size)}) without cache takes "
            f"{in_units(ROOM * size)}: make room, as with 'make clean CACHE=1'"
        )


def once(spec: Spec, number: int) -> Build:
    """Build ``spec`` without cache, note what came out, and remove it and what it left in the cache."""
    reference = f"{NAME}:{spec.target}-reproduce"
    before = engine.cached()
    started = time.monotonic()
    say(f"build {number} of 2")
    try:
        _, facts = build.build(spec, compression=os.environ.get("COMPRESSION") or "zstd", no_cache=True, name=reference)
        dockerfile = (spec.folder / "Dockerfile").read_text(encoding="utf-8")
        config, found = listings(reference, dockerfile)
        say(f"build {number} of 2: {facts['digest']} in {facts['seconds']} s")
        return Build(str(facts["digest"]), config, found, round(time.monotonic() - started, 1))
    finally:
        _remove(reference, before)


def reproduce(spec: Spec) -> tuple[list[Build], list[Difference]]:
    """Build ``spec`` twice; both builds, and what differs between them.

    Raises:
        UserError: the engine's disk has too little room.
        StepFailed: a build failed.
    """
    _need_room(spec)
    builds = [once(spec, number) for number in (1, 2)]
    return builds, compare(*builds)


def table(found: list[Difference]) -> Table:
    """What differs, for people."""
    shown = Table("layer", "path", "how", "usual cause")
    for one in found[:SHOWN]:
        shown.add_row(one.layer, one.path, "\n".join(one.reasons), one.cause)
    if len(found) > SHOWN:
        shown.add_row("", f"and {len(found) - SHOWN} more (JSON=1 gives all)", "", "")
    return shown


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    spec = load(options.target)
    builds, found = reproduce(spec)
    digests = [one.digest for one in builds]
    result = {
        "target": spec.target,
        "digests": digests,
        "seconds": [one.seconds for one in builds],
        "same": not found,
        "differences": [asdict(one) for one in found],
    }
    cli.result(result, as_json=options.json)
    if found:
        log.print(table(found))
        names = ", ".join(dict.fromkeys(one.layer for one in found if one.layer))
        raise StepFailed(f"{spec.target} is not reproducible: {len(found)} differences in {names or 'its packing'}")
    say(f"{spec.target} is reproducible: {digests[0]} twice, {' and '.join(f'{one.seconds:.0f} s' for one in builds)}")
    return 0


if __name__ == "__main__":
    cli.run(main)
