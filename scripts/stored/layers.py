"""What is stored in an image, layer by layer.

Layers are walked where the engine has unpacked them (scripts/stored/unpacked.py), or else streamed as they are stored
(scripts/stored/blobs.py): nothing is written to disk and no more than one small file is held in memory.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scripts import engine
from scripts.stored import blobs, leaks, unpacked

Kind = Literal["base", "below", "copied", "added"]

#: Bytes up to which a file is searched for credentials and certificates; the longest CA bundle seen has 0.3 MB.
TEXT_LIMIT = 2 << 20

#: Compiled code and data: nothing is searched in files of these kinds.
_BINARY = (".pyc", ".so", ".a", ".png", ".jpg", ".gz", ".zip", ".npy", ".pb", ".whl")

#: What a whiteout's file name starts with (OCI image layer specification, "Whiteouts").
_WHITEOUT = ".wh."


@dataclass(frozen=True)
class File:
    """A stored file, symbolic or hard link: bytes of content (0 for links) and permission bits."""

    size: int
    mode: int


@dataclass(frozen=True)
class Suspect:
    """A file that looks like a credential: its path, the kind, and the SHA-256 that RECORD files write."""

    path: str
    kind: str
    hash: str


@dataclass(frozen=True)
class Bundle:
    """A PEM file: its certificates' fingerprints (:func:`scripts.stored.leaks.certificates`), and its own SHA-256."""

    path: str
    certificates: frozenset[str]
    hash: str


@dataclass
class Contents:
    """What one layer stores; paths have no leading slash, directories are left out.

    Attributes:
        files: path -> file.
        removed: paths that the layer hides (whiteouts).
        suspects: files that look like credentials.
        bundles: files with certificates.
        records: path -> SHA-256 of the files that installed packages say are theirs (their RECORD).
    """

    files: dict[str, File] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    records: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Layer:
    """A layer of an image.

    Attributes:
        digest: of the blob as it is stored and pushed; empty where the engine does not keep blobs.
        diff_id: digest of the uncompressed tar.
        created_by: the instruction that made it.
        stage: the build stage it comes from; ``base``, or ``added`` for what came on top.
        kind: ``base``; ``below``: the distribution's packages on it; ``copied`` from a stage; ``added`` on top.
        stored: bytes of the blob, compressed.
    """

    digest: str
    diff_id: str
    created_by: str
    stage: str
    kind: Kind
    stored: int
    contents: Contents

    @property
    def ours(self) -> bool:
        """Whether this project's Dockerfile, or something after it, made the layer."""
        return self.kind != "base"


@dataclass(frozen=True)
class Stored:
    """An image as it is stored: its OCI configuration, its layers, and the sizes of its two documents in bytes."""

    config: dict[str, Any]
    layers: list[Layer]
    config_digest: str
    config_size: int
    manifest_size: int


def stages(dockerfile: str) -> tuple[list[tuple[str, str]], list[str]]:
    """How a rendered Dockerfile's final stage is layered.

    Returns:
        The instructions below it that may make a layer, (stage, keyword), bottom first; the stages it copies from.
    """
    blocks = {}
    for block in re.split(r"(?m)^FROM ", dockerfile)[1:]:
        name = re.match(r"\S+ AS (\S+)", block)
        blocks[name[1] if name else ""] = block
    final = blocks.get("", "")
    below: list[tuple[str, str]] = []
    stage = final.split(maxsplit=1)[0] if final else ""
    while stage in blocks:
        made = re.findall(r"(?m)^(RUN|COPY|ADD|WORKDIR)\b", blocks[stage])
        below = [*((stage, keyword) for keyword in made), *below]
        stage = blocks[stage].split(maxsplit=1)[0]
    return below, re.findall(r"(?m)^COPY --link --from=(\S+)", final)


def name_layers(made_by: list[str], dockerfile: str) -> list[tuple[str, Kind]]:
    """The stage and the kind of each layer, given the instruction that made each, bottom first."""
    below, copies = stages(dockerfile)
    # The uppermost ones: a base may be made by a Dockerfile of ours, too.
    ours = [number for number, command in enumerate(made_by) if _is_copy(command)][-len(copies) :] if copies else []
    first = ours[0] if ours else len(made_by)
    names: list[tuple[str, Kind]] = [("base", "base")] * first
    for number in range(first - 1, -1, -1):
        if not below or made_by[number].split(" ", 1)[0] != below[-1][1]:
            break
        names[number] = (below.pop()[0], "below")
    for command in made_by[first:]:
        names.append((copies.pop(0), "copied") if copies and _is_copy(command) else ("added", "added"))
    return names


def _is_copy(command: str) -> bool:
    return command.startswith("COPY /out /")


def scan(stream: io.BufferedReader) -> Contents:
    """Read one layer: a tar, plain or compressed with gzip or zstd.

    Raises:
        StepFailed: it is none of these, or it ends too early.
    """
    found = Contents()
    for tar, member in blobs.members(stream):
        _look_at(found, tar, member)
    return found


def _look_at(found: Contents, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = posixpath.normpath(member.name).lstrip("/")
    folder, name = posixpath.split(path)
    if name.startswith(_WHITEOUT):
        found.removed.append(
            folder if name.startswith(_WHITEOUT * 2) else posixpath.join(folder, name.removeprefix(_WHITEOUT))
        )
        return
    if member.isdir():
        return

    def content() -> bytes:
        file = tar.extractfile(member)
        return file.read() if file else b""

    _note(found, path, File(member.size if member.isreg() else 0, member.mode), content)


def walk(folder: Path) -> Contents:
    """The same of a layer that the engine has unpacked into ``folder``."""
    found = Contents()
    for entry in unpacked.walk(folder):
        if entry.file is None:
            found.removed.append(entry.path)
        else:
            _note(found, entry.path, File(entry.size, entry.mode), entry.file.read_bytes)
    return found


def _note(found: Contents, path: str, file: File, content: Callable[[], bytes]) -> None:
    """Add a file to what a layer stores, and what is conspicuous about it; ``content`` reads it."""
    found.files[path] = file
    if not file.size:
        return
    folder, name = posixpath.split(path)
    named = leaks.in_name(path)
    if named is None and (file.size > TEXT_LIMIT or name.endswith(_BINARY) or ".so." in name):
        return
    data = content() if file.size <= TEXT_LIMIT else b""
    kinds = [named] if named else leaks.in_text(data, path)
    if kinds:
        found.suspects += [Suspect(path, kind, _record_hash(data)) for kind in kinds]
    certificates = leaks.certificates(data)
    if certificates:
        found.bundles.append(Bundle(path, certificates, _record_hash(data)))
    if name == "RECORD" and folder.endswith(".dist-info"):
        found.records.update(_record(data, posixpath.dirname(folder)))


def _record_hash(data: bytes) -> str:
    """SHA-256 as RECORD files write it (PyPA's "Recording installed projects": urlsafe base64 without padding)."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _record(data: bytes, site: str) -> Iterator[tuple[str, str]]:
    """Path -> SHA-256 of a RECORD file in the site directory ``site``."""
    for row in csv.reader(io.StringIO(data.decode("utf-8", "replace"))):
        if len(row) >= 2 and row[1].startswith("sha256="):
            yield posixpath.normpath(posixpath.join(site, row[0])), row[1].removeprefix("sha256=")


def above_the_lowest(stored: Stored) -> Stored:
    """The same for an image of somebody's own: the lowest layer is its base, whatever is above was added."""
    found = [
        layer if number == 0 else dataclasses.replace(layer, stage="added", kind="added")
        for number, layer in enumerate(stored.layers)
    ]
    return dataclasses.replace(stored, layers=found)


def read(reference: str, dockerfile: str) -> Stored:
    """Everything that is stored in a local image.

    Args:
        reference: of the image; ``dockerfile``: text of the rendered Dockerfile, which names the layers.
    Raises:
        UserError: there is no such image.
        StepFailed: its layers cannot be read.
    """
    count = len(engine.image(reference, made_by="make image").attrs["RootFS"]["Layers"])
    with unpacked.folders(reference, count) as folders:
        if not folders:
            return put_together(blobs.read(reference, scan), dockerfile)
        contents = [walk(folder) for folder in folders]
        parts = blobs.read(reference, lambda stream: None)
    return put_together(parts.holding(contents), dockerfile)


def made_by(config: dict[str, Any], count: int) -> list[str]:
    """The instructions that made the ``count`` layers of an OCI configuration, bottom first; empty where unknown."""
    found = [str(entry.get("created_by", "")) for entry in config.get("history", []) if not entry.get("empty_layer")]
    found += [""] * (count - len(found))
    # BuildKit writes the instruction itself, the classic builder a shell's line.
    return [re.sub(r"^/bin/sh -c #\(nop\) +", "", command) for command in found]


def put_together(parts: blobs.Parts[Contents], dockerfile: str) -> Stored:
    """The image that these parts are, its layers named after the stages of ``dockerfile``."""
    document = json.loads(parts.config)
    instructions = made_by(document, len(parts.layers))
    names = name_layers(instructions, dockerfile)
    diff_ids = [str(diff_id) for diff_id in document["rootfs"]["diff_ids"]]
    layers = [
        Layer(layer.digest, diff_id, command, stage, kind, layer.stored, layer.found)
        for layer, diff_id, command, (stage, kind) in zip(parts.layers, diff_ids, instructions, names, strict=False)
    ]
    return Stored(document, layers, parts.config_digest, len(parts.config), len(parts.manifest))
