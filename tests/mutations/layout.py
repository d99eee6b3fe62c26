"""An image that was saved as an OCI layout, and changed copies of it (https://github.com/opencontainers/image-spec).

A changed copy refers to the layers of the original, which the engine has, and holds only the layers that are new. Those
are made of ranges of the original tars, so that every entry that is not changed keeps its bytes.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from tests.engine import ENGINE
from trainyard.oci.image_store import CHUNK

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

#: Prefix of the name of a file that removes another one, and the file that empties a folder
#: (https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts).
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"

_BLOCK = tarfile.BLOCKSIZE

#: The end of a tar.
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True)
class Entry:
    """An entry of a layer.

    Attributes:
        path: without a leading slash; ``.`` for the root.
        layer: index of its layer, 0 for the lowest.
        start, end: its range of bytes in the layer's tar, headers and padding included.
    """

    path: str
    layer: int
    info: tarfile.TarInfo
    start: int
    end: int


@dataclass(frozen=True)
class Member:
    """An entry to write; ``info.size`` is set to the length of ``data``."""

    info: tarfile.TarInfo
    data: bytes = b""

    def bytes(self) -> bytes:
        """Header, content and padding."""
        info = copy.copy(self.info)
        info.size = len(self.data)
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        return header + self.data + bytes(-len(self.data) % _BLOCK)

    @property
    def path(self) -> str:
        return normalized(self.info.name)


@dataclass(frozen=True)
class Change:
    """What differs in the files of an image.

    Attributes:
        members: entries that are new, or that replace those of the same path.
        removed: paths that are removed with all that is below them.
    """

    members: tuple[Member, ...] = ()
    removed: tuple[str, ...] = ()

    @cached_property
    def _replaced(self) -> frozenset[str]:
        return frozenset(member.path for member in self.members)

    def drops(self, path: str) -> bool:
        """Whether an entry of the original is not in the changed image."""
        return path in self._replaced or any(path == one or path.startswith(f"{one}/") for one in self.removed)


def _meaning(info: tarfile.TarInfo) -> tuple[object, ...]:
    """What of a header a container sees."""
    attributes = {name: value for name, value in info.pax_headers.items() if name.startswith("SCHILY.xattr.")}
    return info.type, info.mode, info.uid, info.gid, info.linkname, attributes


@dataclass(frozen=True)
class Range:
    """Bytes of a file."""

    file: Path
    start: int
    end: int

    def chunks(self) -> Iterator[bytes]:
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            left = self.end - self.start
            while left:
                chunk = stream.read(min(CHUNK, left))
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Blob:
    """A blob that is made of ranges of files and of bytes. It is not held in memory."""

    parts: tuple[Range | bytes, ...]
    media_type: str = LAYER

    def chunks(self) -> Iterator[bytes]:
        """Its content."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            else:
                yield from part.chunks()

    @cached_property
    def size(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.end - part.start for part in self.parts)

    @cached_property
    def digest(self) -> str:
        """``sha256:...``. Layers are not compressed, so that it is the diff id, too."""
        found = hashlib.sha256()
        for chunk in self.chunks():
            found.update(chunk)
        return f"sha256:{found.hexdigest()}"

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class Layer:
    """A layer, uncompressed in ``file``."""

    descriptor: dict[str, Any]
    diff_id: str
    file: Path
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of the tar."""
        return self.file.stat().st_size


@dataclass(frozen=True)
class Draft:
    """A changed copy of an image: its configuration, the descriptors of its layers, and the layers that are new."""

    config: dict[str, Any]
    layers: list[dict[str, Any]]
    blobs: list[Blob] = field(default_factory=list)

    @cached_property
    def _documents(self) -> tuple[Blob, Blob]:
        """Configuration and manifest."""
        config = _document(self.config, "application/vnd.oci.image.config.v1+json")
        manifest = {
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config.descriptor, "layers": self.layers
        }  # fmt: skip
        return config, _document(manifest, MANIFEST)

    @property
    def digest(self) -> str:
        """The digest of its manifest."""
        return self._documents[1].digest

    def archive(self, reference: str) -> Iterator[bytes]:
        """What ``docker load`` reads: an OCI layout in a tar, without the layers that the engine has."""
        config, manifest = self._documents
        named = manifest.descriptor | {"annotations": {"io.containerd.image.name": f"docker.io/library/{reference}"}}
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}
        files = {"oci-layout": _document({"imageLayoutVersion": "1.0.0"}, ""), "index.json": _document(index, INDEX)}
        for blob in (config, manifest, *self.blobs):
            files[f"blobs/{blob.digest.replace(':', '/')}"] = blob
        for name, blob in files.items():
            info = tarfile.TarInfo(name)
            info.size = blob.size
            yield info.tobuf(tarfile.PAX_FORMAT)
            yield from blob.chunks()
            yield bytes(-blob.size % _BLOCK)
        yield _END

    def load(self, reference: str) -> None:
        """Load it into the engine, which must have the original image, as ``reference``.

        Raises:
            docker.errors.APIError, docker.errors.ImageLoadError: the engine refuses it.
        """
        ENGINE.client.images.load(self.archive(reference))  # type: ignore[arg-type]
        ENGINE.client.images.get(reference)


def _document(data: dict[str, Any], media_type: str) -> Blob:
    return Blob((json.dumps(data).encode(),), media_type)


def normalized(name: str) -> str:
    """A path without leading and trailing slashes; ``.`` for the root."""
    return posixpath.normpath(name.lstrip("/") or ".")


class SavedImage:
    """An image in a folder that holds an OCI layout. Uncompressed layers are written into ``folder``, too."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs" / "sha256"
        index = json.loads((folder / "index.json").read_bytes())
        manifest = self._manifest(index["manifests"][0])
        self.config: dict[str, Any] = self._read(manifest["config"])
        pairs = zip(manifest["layers"], self.config["rootfs"]["diff_ids"], strict=True)
        self.layers = [self._layer(number, descriptor, diff_id) for number, (descriptor, diff_id) in enumerate(pairs)]

    def _read(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads((self._blobs / _name(descriptor["digest"])).read_bytes()))

    def _manifest(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        """The manifest of the image, which is the first that an index lists: attestations are listed after it."""
        found = self._read(descriptor)
        return self._manifest(found["manifests"][0]) if "manifests" in found else found

    def _layer(self, number: int, descriptor: dict[str, Any], diff_id: str) -> Layer:
        file = self._blobs / f"{_name(diff_id)}.tar"
        if not file.is_file():
            with (self._blobs / _name(descriptor["digest"])).open("rb") as packed, file.open("wb") as output:
                for chunk in _uncompressed(packed):
                    output.write(chunk)
        return Layer(descriptor, diff_id, file, tuple(_entries(file, number)))

    @cached_property
    def visible(self) -> dict[str, Entry]:
        """Path -> the entry that a container sees, in an order in which they can be unpacked."""
        found: dict[str, Entry] = {}
        for layer in self.layers:
            found = _stacked(found, layer)
        return found

    @cached_property
    def visible_by_layer(self) -> list[list[Entry]]:
        """What a container sees, by the layer that it comes from."""
        found: list[list[Entry]] = [[] for _ in self.layers]
        for entry in self.visible.values():
            found[entry.layer].append(entry)
        return found

    @cached_property
    def linked(self) -> frozenset[str]:
        """The paths of hard links, and those that they link to: changing one entry alone would break the tar."""
        links = [entry for layer in self.layers for entry in layer.entries if entry.info.islnk()]
        return frozenset({entry.path for entry in links} | {normalized(entry.info.linkname) for entry in links})

    def content(self, entry: Entry, size: int | None = None) -> bytes:
        """The content of a file, or its first ``size`` bytes."""
        with self.layers[entry.layer].file.open("rb") as stream:
            stream.seek(entry.info.offset_data)
            return stream.read(entry.info.size if size is None else min(size, entry.info.size))

    def differs(self, change: Change) -> bool:
        """Whether a change makes a difference to what a container sees."""
        return any(path in self.visible for path in change.removed) or any(map(self._is_new, change.members))

    def _is_new(self, member: Member) -> bool:
        entry = self.visible.get(member.path)
        return entry is None or _meaning(entry.info) != _meaning(member.info) or self.content(entry) != member.data

    def original(self) -> Draft:
        """The image itself."""
        return Draft(copy.deepcopy(self.config), [layer.descriptor for layer in self.layers])

    def configured(self, config: dict[str, Any]) -> Draft:
        """The image with another configuration."""
        return Draft(config, [layer.descriptor for layer in self.layers])

    def rewritten(self, number: int, change: Change) -> Draft:
        """The image with a change in one of its layers."""
        kept = [entry for entry in self.layers[number].entries if not change.drops(entry.path)]
        new = self._blob(kept, change.members)
        draft = self.original()
        draft.layers[number] = new.descriptor
        draft.config["rootfs"]["diff_ids"][number] = new.digest
        draft.blobs.append(new)
        return draft

    def inserted(self, position: int, change: Change, created_by: str, config: dict[str, Any] | None = None) -> Draft:
        """The image with a change in one more layer.

        Args:
            position: number of layers below it.
            created_by: its instruction in the history.
            config: the configuration to start from, if it is another one, too.
        """
        removed = [_whiteout(path) for path in change.removed]
        parents = self._parents([*change.members, *removed])
        new = Blob((*(member.bytes() for member in (*parents, *removed, *change.members)), _END))
        draft = self.configured(copy.deepcopy(config or self.config))
        draft.layers.insert(position, new.descriptor)
        draft.config["rootfs"]["diff_ids"].insert(position, new.digest)
        history = draft.config.setdefault("history", [])
        history.insert(self._history_index(position), {"created": self.config.get("created"), "created_by": created_by})
        draft.blobs.append(new)
        return draft

    def squashed(self, change: Change | None = None) -> Draft:
        """The image in one layer, with a change in it."""
        change = change or Change()
        new = self._blob([entry for entry in self.visible.values() if not change.drops(entry.path)], change.members)
        config = copy.deepcopy(self.config)
        config["rootfs"]["diff_ids"] = [new.digest]
        config["history"] = [{"created": self.config.get("created"), "created_by": "COPY / / # buildkit"}]
        return Draft(config, [new.descriptor], [new])

    def _blob(self, entries: Iterable[Entry], members: Iterable[Member]) -> Blob:
        """A layer of entries of this image, then new ones."""
        ranges: list[Range] = []
        for entry in entries:
            file = self.layers[entry.layer].file
            if ranges and ranges[-1].file == file and ranges[-1].end == entry.start:
                ranges[-1] = Range(file, ranges[-1].start, entry.end)
            else:
                ranges.append(Range(file, entry.start, entry.end))
        return Blob((*ranges, *(member.bytes() for member in members), _END))

    def _parents(self, members: Iterable[Member]) -> list[Member]:
        """The folders above entries, as they are in the image: a layer of a build has them, too."""
        paths: set[str] = set()
        for member in members:
            above = posixpath.dirname(member.path)
            while above:
                paths.add(above)
                above = posixpath.dirname(above)
        found = (self.visible.get(path) for path in sorted(paths))
        return [Member(entry.info) for entry in found if entry is not None and entry.info.isdir()]

    def _history_index(self, position: int) -> int:
        """Where the history entry of a layer with ``position`` layers below it is inserted."""
        history = self.config.get("history") or []
        made = [index for index, entry in enumerate(history) if not entry.get("empty_layer")]
        below = position - (len(self.layers) - len(made))  # the lowest layers of some bases are not in the history
        if below <= 0:
            return 0
        return made[below - 1] + 1


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _uncompressed(packed: IO[bytes]) -> Iterator[bytes]:
    start = packed.read(4)
    packed.seek(0)
    stream: IO[bytes] = packed
    if start == b"\x28\xb5\x2f\xfd":
        stream = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(packed))
    elif start[:2] == b"\x1f\x8b":
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=packed))
    while chunk := stream.read(CHUNK):
        yield chunk


def _entries(file: Path, number: int) -> Iterator[Entry]:
    with tarfile.open(file, "r:") as tar:
        for info in tar:
            stored = info.size if info.isreg() else 0
            end = info.offset_data + stored + -stored % _BLOCK
            yield Entry(normalized(info.name), number, info, info.offset, end)


def _stacked(below: dict[str, Entry], layer: Layer) -> dict[str, Entry]:
    """What a container sees of a layer on top of what it sees below."""
    hidden = {path for entry in layer.entries for path in _hidden(entry, below)}
    found = {path: entry for path, entry in below.items() if not _within(path, hidden)}
    for entry in layer.entries:
        if posixpath.basename(entry.path).startswith(WHITEOUT):
            continue
        if not entry.info.isdir():
            found.pop(entry.path, None)  # behind the hard links of its layer; folders stay in front of what is in them
        found[entry.path] = entry
    return found


def _hidden(entry: Entry, below: dict[str, Entry]) -> Iterator[str]:
    """The paths that an entry of a higher layer hides, with all below; ``path/`` if only what is below."""
    folder, name = posixpath.split(entry.path)
    if name == OPAQUE:
        yield f"{folder}/"
    elif name.startswith(WHITEOUT):
        yield posixpath.join(folder, name.removeprefix(WHITEOUT))
    elif not entry.info.isdir() and entry.path in below and below[entry.path].info.isdir():
        yield entry.path


def _within(path: str, hidden: set[str]) -> bool:
    if path in hidden:
        return True
    above = posixpath.dirname(path)
    while above:
        if above in hidden or f"{above}/" in hidden:
            return True
        above = posixpath.dirname(above)
    return False


def _whiteout(path: str) -> Member:
    folder, name = posixpath.split(path)
    return Member(tarfile.TarInfo(posixpath.join(folder, WHITEOUT + name)))
