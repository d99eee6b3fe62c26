"""Find which bytes of which tar shard are an image, and its label, so that images can be read in any order.

Members whose names are equal up to the first dot of the base name form a sample, such as ``a/0001.jpg`` and
``a/0001.cls``: https://github.com/webdataset/webdataset#the-webdataset-format. Python's tarfile reads the headers of
all shards once; the result is kept in a file, 20 bytes a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from trainers.common import files, storage
from trainers.common.files import UserError
from trainers.common.order import Peers, check_alike
from trainers.common.storage import Entry

SUFFIXES = ("jpg", "jpeg", "png", "bmp", "webp")
#: A record: the number of its shard, its bytes there, and its label; -1 if that is in these bytes.
RECORD = np.dtype([("shard", "<i4"), ("offset", "<i8"), ("length", "<u4"), ("label", "<i4")])
LARGE = 1 << 30  # bytes of shards from which on reading them takes long enough to be worth messages
_READS = 16  # shards at a time
_BLOCK = 8 << 20  # bytes per request: at 20 ms a request and 100 MB/s a connection, 80 % of the time is transfer
_PROGRESS = 10.0  # seconds between progress lines
_LABEL = 20  # most bytes of a .cls file
#: Offset, length and label of the records in an open shard, whose path is for messages.
Scan = Callable[[IO[bytes], str], Sequence[tuple[int, int, int]]]


def tar(file: IO[bytes], path: str) -> list[tuple[int, int, int]]:
    """Return the samples of the tar shard ``file``: offset and length of the image, and the label.

    Raises :class:`UserError` if the shard is damaged, or if a sample lacks its image or label.
    """
    samples: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key, suffix = folder + slash + stem, suffix.lower()
                if not stem or not member.isreg():  # hidden files belong to no sample
                    continue
                if suffix == "cls":
                    file.seek(member.offset_data)
                    content = file.read(wanted := min(member.size, _LABEL))
                    if len(content) < wanted:
                        raise tarfile.ReadError("unexpected end of data")
                    label = content.partition(b"\0")[0]
                    if not label.strip().isdigit():
                        raise UserError(f"{path}: {member.name} has {label!r}: write the number of the class")
                    labels[key] = int(label)
                elif suffix in SUFFIXES:
                    samples.setdefault(key, (member.offset_data, member.size))
            file.seek(archive.offset)  # where tarfile takes a damaged header for the end
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError("a damaged header")
    except tarfile.TarError as error:
        raise UserError(f"{path}: damaged tar file ({error}); download it again") from None
    if unpaired := samples.keys() ^ labels.keys():
        key = min(unpaired)
        raise UserError(f"{path}: {key} must have an image (such as {key}.jpg) and its label in {key}.cls")
    return [(*place, labels[key]) for key, place in samples.items()]


def load(
    folder: str, names: list[str], found: dict[str, Entry], spare: str, peers: Peers, scan: Scan = tar
) -> np.ndarray:
    """Return the records of the shards ``names`` of ``folder``, in this order; ``found`` is its contents.

    They are kept beside the shards, or in the folder ``spare``, and read again if a name, size or version changes.
    ``peers`` read a part each. Raises :class:`UserError` on all of them if a shard is damaged.
    """
    size = sum(found[name].size for name in names)
    sizes = _digest([[name, found[name].size] for name in names])
    check_alike(peers, folder, f"{len(names)} shards of {size} bytes, fingerprint {sizes[:12]}")
    key = _digest([[name, found[name].size, found[name].version] for name in names]).encode()
    file = f"trainyard-{_digest(names)[:12]}.index"
    kept = [files.join(place, file) for place in (folder, spare) if place]
    # One process looks, so that all agree; copies of the data on several hosts have other times. And some collectives
    # cannot send nothing.
    content = peers.broadcast(b"+" + (_read(kept, key) if peers.rank == 0 else b""))[1:]
    if not content:
        table = _make(folder, names, peers, scan, size >= LARGE)
        content = table.tobytes()
        if peers.rank == 0:
            _save(kept, key + b" %d\n" % len(table) + content, size >= LARGE)
    return np.frombuffer(content, RECORD)


def _digest(names: list[Any]) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


@contextlib.contextmanager
def _reader(path: str) -> Iterator[IO[bytes]]:
    if not files.is_remote(path):
        with open(path, "rb") as file:
            yield file
        return
    ahead = {"block_size": _BLOCK, "cache_type": "readahead"}  # gcsfs' default asks for each header separately
    with files.remote(path) as filesystem, filesystem.open(path, "rb", **ahead) as file:
        yield file


def _make(folder: str, names: list[str], peers: Peers, scan: Scan, large: bool) -> np.ndarray:
    def one(number: int) -> bytes:
        path = files.join(folder, names[number])
        try:
            with _reader(path) as file:
                rows = scan(file, path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        if any(row[1] >> 32 for row in rows):
            raise UserError(f"{path}: has a record of 4 GB or more")
        return np.array([(number, *row) for row in rows], RECORD).tobytes()

    parts: list[bytes] = []
    at_once, said = _READS * peers.processes, time.monotonic() - _PROGRESS
    with ThreadPoolExecutor(_READS) as pool:
        for start in range(0, len(names), at_once):  # in rounds, far below the timeout of a collective
            if large and peers.rank == 0 and time.monotonic() - said >= _PROGRESS:
                said = time.monotonic()
                print(f"Indexing {folder}: {start} of {len(names)} shards; this happens once", file=sys.stderr)
            dealt = range(len(names))[start : start + at_once][peers.rank :: peers.processes]
            try:
                mine = b"+" + b"".join(pool.map(one, dealt))
            except UserError as error:
                mine = b"-" + str(error).encode()
            parts += (gathered := peers.gather(mine))
            if failed := [part[1:].decode() for part in gathered if part[:1] == b"-"]:
                raise UserError(failed[0])
    table = np.frombuffer(b"".join(part[1:] for part in parts), RECORD)
    return table[np.argsort(table["shard"], kind="stable")]


def _read(kept: list[str], key: bytes) -> bytes:
    """Return the records in the first of the files ``kept`` that begins with ``key``; empty if none does."""
    for path in kept:
        with contextlib.suppress(OSError, UserError):
            head, _, content = storage.read_file(path).partition(b"\n")
            if head == key + b" %d" % (len(content) // RECORD.itemsize) and not len(content) % RECORD.itemsize:
                return content
    return b""


def _save(kept: list[str], content: bytes, large: bool) -> None:
    """Write ``content`` to the first of ``kept`` that can be written; if none can, a note says so where ``large``."""
    reasons = []
    for path in kept:
        try:
            files.make_folder(path.rpartition("/")[0])
            with files.atomic_file(path) as file:
                file.write(content)
            return
        except (UserError, OSError) as error:
            reasons.append(getattr(error, "strerror", None) or str(error))
    if large:
        print(f"note: the index of shards cannot be saved ({'; '.join(reasons)}), so every start makes it again; give a"
              " writable --output-dir", file=sys.stderr)  # fmt: skip
