"""Read the stored parts of a local image: manifest, configuration, layers as streams, attestations.

They are read from the engine's content store if this process can (same host, as root; 2.6 s for a 1.9 GB image), else
from ``docker image save`` (45 MB/s on the same host: 10 s). Nothing is written to disk and no layer is held in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import posixpath
import queue
import re
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import zstandard

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed
from trainyard.oci import image_index
from trainyard.oci.documents import InvalidAnswer, hashed
from trainyard.spec import architectures
from trainyard.spec.architectures import Architecture

S = TypeVar("S")
T = TypeVar("T")

#: Bytes read at a time.
CHUNK = 1 << 20

#: A layer from a registry may unpack to so many times its size, or to ALWAYS_UNPACKED bytes, but never to more than
#: MOST_UNPACKED. Zeros shrink to a thousandth, the layers of our images to a half or a fifth (docs/images.md).
GROWTH, ALWAYS_UNPACKED, MOST_UNPACKED = 100, 256 << 20, 256 << 30

#: Most bytes that are read at once: headers of tars, and files of up to 4 MiB that are looked into.
LONGEST_HEADER = 16 << 20


@dataclass(frozen=True)
class LayerBlob(Generic[T]):
    """A layer's blob.

    Attributes:
        digest: of the compressed blob; empty if the engine does not keep blobs.
        stored: bytes of the blob, compressed.
        found: what the reader returned.
    """

    digest: str
    stored: int
    found: T


@dataclass(frozen=True)
class Parts(Generic[T]):
    """An image's documents, and a reader's result for each of its layers, bottom first.

    Attributes:
        manifest: of the image, not of its index; empty if the engine does not keep it.
    """

    manifest: bytes
    config: bytes
    config_digest: str
    layers: list[LayerBlob[T]]

    def holding(self, results: list[S]) -> Parts[S]:
        """Return the same image with another reader's results, bottom first."""
        layers = [LayerBlob(layer.digest, layer.stored, new) for layer, new in zip(self.layers, results, strict=True)]
        return dataclasses.replace(cast(Parts[S], self), layers=layers)


class NoLayout(StepFailed):
    """Report that the engine saves images in an older format than OCI layouts."""


Reader = Callable[[io.BufferedReader], T]


def read(engine: Engine, reference: str, reader: Reader[T]) -> Parts[T]:
    """Return the parts of a local image. ``reader`` gets each layer's blob as a stream, in any order.

    Raises:
        UserError: there is no such image.
        StepFailed: it cannot be read.
    """
    image = engine.image(reference, made_by="trainyard image")
    digest = str(image.id)
    # Of an index, the engine has the image that it describes, and maybe others.
    architecture = architectures.given() or architectures.of_image(engine, reference)
    if store := _store_with(engine, digest):
        return _read_store(store, digest, architecture, reader)
    return _read_saved(engine, reference, digest, architecture, reader)


@dataclass(frozen=True)
class Expected:
    """Check the tar of a layer from a registry, which no engine has unpacked yet.

    Attributes:
        diff_id: digest of the tar.
        packed: size of its blob in bytes; the tar may have :data:`GROWTH` times as many.
    """

    diff_id: str
    packed: int

    def checked(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks of the tar.

        Raises:
            InvalidAnswer: it is larger, or it ended and is another one.
        """
        limit, size = min(MOST_UNPACKED, max(ALWAYS_UNPACKED, GROWTH * self.packed)), 0
        digest = hashlib.new(self.diff_id.partition(":")[0] if hashed(b"", self.diff_id) else "sha256")
        for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise InvalidAnswer(
                    f"the layer {self.diff_id} grows from {self.packed:,} bytes to more than {limit:,}: if that is "
                    "right, 'docker pull' the image, and read it there"
                )
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != self.diff_id.partition(":")[2]:
            raise InvalidAnswer(f"the layer {self.diff_id} is another one at the registry: ask who runs it")


def members(
    stream: io.BufferedReader, expected: Expected | None = None
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the entries of a layer, a tar that is plain or compressed with gzip or zstd; each with the tar it is from.

    Args:
        expected: of a layer from a registry.
    Raises:
        StepFailed: it is none of these, it is truncated, or see :class:`Expected`.
    """
    chunks = _uncompressed(stream)
    file = _Chunks(_ahead(expected.checked(chunks) if expected else chunks))
    try:
        # Not tarfile's stream mode, which copies what it skips: 5.5 s instead of 2.9 s for 1.5 GB.
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                file.in_header = False
                yield tar, member
                file.in_header = True
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member it has read
        file.seek(sys.maxsize)  # what follows the last entry belongs to the digests, too
    except (tarfile.TarError, zstandard.ZstdError, EOFError, OSError) as error:
        raise StepFailed(f"a layer cannot be read ({error}): build the image again") from None


def _uncompressed(stream: io.BufferedReader) -> Iterator[bytes]:
    start = stream.peek(4)[:4]
    reader: IO[bytes] = stream
    if start == b"\x28\xb5\x2f\xfd":
        reader = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(stream, read_size=CHUNK))
    elif start[:2] == b"\x1f\x8b":
        reader = cast(IO[bytes], gzip.GzipFile(fileobj=stream, mode="rb"))
    while chunk := reader.read(CHUNK):
        yield chunk


def _ahead(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same chunks, produced in another thread: decompression runs while Python parses."""
    waiting: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=8)

    def produce() -> None:
        try:
            for chunk in chunks:
                waiting.put(chunk)
            waiting.put(None)
        except Exception as error:  # raised again where the chunks are read
            waiting.put(error)

    threading.Thread(target=produce, daemon=True).start()
    while (item := waiting.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


class _Chunks(io.RawIOBase):
    """Read chunks as a file that supports the forward seeks of tarfile."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._chunk, self._at, self._position = chunks, b"", 0, 0
        self.in_header = True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def _more(self) -> bool:
        """Get the next chunk if the current one is used up; False at the end."""
        while self._at == len(self._chunk):
            following = next(self._chunks, None)
            if following is None:
                return False
            self._chunk, self._at = following, 0
        return True

    def read(self, size: int | None = -1) -> bytes:
        wanted, parts = (sys.maxsize if size is None or size < 0 else size), []
        if wanted > LONGEST_HEADER:  # contents are read in smaller pieces
            raise tarfile.ReadError(f"an entry has a header of {wanted:,} bytes")
        while wanted and self._more():
            parts.append(self._chunk[self._at : self._at + wanted])
            self._at += len(parts[-1])
            wanted -= len(parts[-1])
        data = b"".join(parts) if len(parts) != 1 else parts[0]
        # tarfile before Python 3.11.10 and 3.12.6 looks for digits in quadratic time (CVE-2024-6232).
        if self.in_header and re.search(rb"\d{256}", data):
            raise tarfile.ReadError("an entry has a header with more digits than a name may have")
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Go forward only: tarfile needs nothing else for a file that it reads in order."""
        while self._position < position and self._more():
            step = min(len(self._chunk) - self._at, position - self._position)
            self._at += step
            self._position += step
        return self._position


def _store_with(engine: Engine, digest: str) -> Path | None:
    """Return the readable content store of an engine on this host that has ``digest``, which guarantees the content.

    Blobs are in the engine's own folder, or in the system's containerd.
    """
    root = str(engine.client.info().get("DockerRootDir") or "")
    for parent in (Path(root) / "containerd" / "daemon", Path("/var/lib/containerd")):
        store = parent / "io.containerd.content.v1.content" / "blobs" / "sha256"
        with contextlib.suppress(OSError), (store / digest.removeprefix("sha256:")).open("rb"):
            return store
    return None


def _image_of(document: dict[str, Any], architecture: Architecture) -> str | None:
    """Return the digest of the image for an architecture in an index, else of its first; None for a manifest."""
    return image_index.digest_for(document, architecture) or next(iter(image_index.images(document).values()), None)


@contextlib.contextmanager
def _blobs_of(store: Path, digest: str) -> Iterator[Callable[[str], Path]]:
    """Yield what gives the file of a blob by its digest; a file that is missing is an image that is incomplete."""
    try:
        yield lambda name: store / name.removeprefix("sha256:")
    except OSError as error:
        raise StepFailed(
            f"{digest[:19]} is incomplete in the engine's store ({error}): build the image again"
        ) from None


def _read_store(store: Path, digest: str, architecture: Architecture, reader: Reader[T]) -> Parts[T]:
    with _blobs_of(store, digest) as blob:
        raw = blob(digest).read_bytes()
        inner = _image_of(json.loads(raw), architecture)
        raw = blob(inner).read_bytes() if inner else raw
        manifest = json.loads(raw)
        config = blob(manifest["config"]["digest"]).read_bytes()
        layers = []
        for entry in manifest["layers"]:
            with blob(entry["digest"]).open("rb") as stream:
                layers.append(LayerBlob(str(entry["digest"]), int(entry["size"]), reader(stream)))
    return Parts(raw, config, str(manifest["config"]["digest"]), layers)


def _saved(engine: Engine, reference: str, reader: Reader[T]) -> tuple[dict[str, bytes], dict[str, tuple[int, T]]]:
    """Return the JSON documents of ``docker image save``, and ``reader``'s results for layers, by their names there."""
    documents: dict[str, bytes] = {}
    blobs: dict[str, tuple[int, T]] = {}
    same: dict[str, str] = {}
    chunks = engine.client.api.get_image(reference, chunk_size=CHUNK)
    with tarfile.open(fileobj=_Chunks(_ahead(iter(chunks))), mode="r|", bufsize=CHUNK) as outer:
        for member in outer:
            if member.issym():  # a repeated layer, as the classic image store writes it
                same[member.name] = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
            if not member.isreg():
                continue
            content = cast(io.BufferedReader, outer.extractfile(member))
            if content.peek(1)[:1] in (b"{", b"["):
                documents[member.name] = content.read()
            elif member.name.startswith("blobs/") or member.name.endswith("/layer.tar"):
                blobs[member.name] = (member.size, reader(content))
    return documents, blobs | {name: blobs[other] for name, other in same.items() if other in blobs}


def _read_saved(engine: Engine, reference: str, digest: str, architecture: Architecture, reader: Reader[T]) -> Parts[T]:
    documents, blobs = _saved(engine, reference, reader)
    try:
        manifest = json.loads(documents["manifest.json"])[0]
        config = documents[manifest["Config"]]
        names = [str(name) for name in manifest["Layers"]]
        in_blobs = blob_path(digest) in documents
        layers = [LayerBlob(f"sha256:{name.rsplit('/', 1)[-1]}" if in_blobs else "", *blobs[name]) for name in names]
    except (KeyError, IndexError, ValueError) as error:
        raise StepFailed(
            f"{reference}: 'docker image save' returned an image that cannot be read ({error!r})"
        ) from None
    kept = documents.get(blob_path(digest), b"")
    inner = _image_of(json.loads(kept), architecture) if kept else None
    return Parts(documents.get(blob_path(inner), b"") if inner else kept, config, hashed(config), layers)


def documents(engine: Engine, reference: str) -> dict[str, bytes]:
    """Return digest -> text of every JSON document of a local image: index, manifests, configurations, attestations.

    Raises:
        UserError: there is no such image. StepFailed: it cannot be read.
    """
    digest = engine.digest(reference)
    store = _store_with(engine, digest)
    if store is None:
        saved, prefix = _saved(engine, reference, lambda stream: None)[0], blob_path("")
        return {f"sha256:{name.removeprefix(prefix)}": text for name, text in saved.items() if name.startswith(prefix)}
    texts, waiting = {}, [digest]
    with _blobs_of(store, digest) as blob:
        for name in waiting:
            texts[name] = blob(name).read_bytes()
            data = json.loads(texts[name])
            named = [*data.get("manifests", []), data.get("config"), *data.get("layers", [])]
            waiting += [str(entry["digest"]) for entry in named if entry and "json" in entry.get("mediaType", "")]
    return texts


def save(engine: Engine, reference: str, folder: Path) -> None:
    """Write a local image into ``folder`` as an OCI layout (https://github.com/opencontainers/image-spec).

    Raises:
        UserError: there is no such image.
        NoLayout: the engine does not save OCI layouts, as Docker does since version 25.
    """
    engine.digest(reference)
    chunks = _Chunks(iter(engine.client.api.get_image(reference, chunk_size=CHUNK)))
    chunks.in_header = False  # the engine writes the headers, and layers may have any digits
    with tarfile.open(fileobj=chunks, mode="r|", bufsize=CHUNK) as archive:
        # Python 3.11.2 of Debian 12, which the builder image has, knows no filters.
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **filters)  # type: ignore[arg-type]
    if not (folder / "oci-layout").is_file():
        raise NoLayout(f"{reference}: the engine did not save an OCI layout, which Docker 25 and newer do")


def blob_path(digest: str) -> str:
    """Return where an OCI layout keeps a blob."""
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
