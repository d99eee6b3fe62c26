"""The index of TFRecord and tar shards: where each record is, so that records can be read in any order.

    python -m trainers.common.index FOLDER

writes ``FOLDER/trainyard.index``; a training run does the same if it finds none. All shards are read once, in blocks
of several MB, many at a time, by all processes of the run. Only new and changed shards are read again.

Reading everything is faster than reading only the headers unless records are large: each header says where the next
one is, so headers cost one request after the other, 20 ms each in an object store, in which time a single connection
carries several records of 100 KB. Blocks that are completely within one record are left out.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from trainers.common import exits, paths, storage, tarshard, tfrecord
from trainers.common.exits import UserError
from trainers.common.order import ALONE, Peers, check_alike
from trainers.common.storage import Entry

NAME = "trainyard.index"
#: The words for each split in names of folders and shards.
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "validation", "valid")}
SPLIT_WORDS = (*SPLITS["train"], *SPLITS["test"])
BLOCK = 8 << 20  # bytes per request: at 20 ms a request and 100 MB/s a connection, 80 % of the time is transfer
READS = 16  # requests at a time, with up to READS * BLOCK = 128 MB of blocks in memory
ROUND = 60.0  # seconds of reading before the processes exchange results, far below the timeout of a collective
_PART = 2 << 20  # bytes per request of an index that is downloaded: it takes no more memory than that
LARGE = 1 << 30  # bytes of shards from which on indexing takes long enough, a second or more, to be worth messages
_PROGRESS = 10.0  # seconds between progress lines
_MAGIC = b"trainyard index 1\n"
_HEADER = struct.Struct("<Q")  # length of the JSON that follows
#: A record. ``label`` is -1 if the record itself contains it, and :data:`IN_FILE` if it is in the file's bytes from
#: ``offset + label_at`` on.
RECORD = np.dtype([("offset", "<i8"), ("length", "<u4"), ("label", "<i4"), ("label_at", "<i4")])
IN_FILE = -2


def kind_of(name: str) -> str:
    """What the shard ``name`` is: "tar", "tfrecord", or "" if it is no shard."""
    if name.endswith(".tar"):
        return "tar"
    if re.search(r"-\d{5}-of-\d{5}$|\.tfrecords?$", name):
        return "tfrecord"
    return ""


@dataclass(frozen=True)
class Shard:
    """A file of records, and how many it has."""

    name: str
    size: int  # bytes
    version: str  # of storage.Entry
    count: int
    digest: str  # of its records, so that data can be compared without reading the table


class Index:
    """The records of ``shards``, in this order, in one array of :data:`RECORD`."""

    def __init__(self, shards: Sequence[Shard], table: np.ndarray) -> None:
        self.shards, self.table = list(shards), table
        self.starts = np.cumsum([0, *(shard.count for shard in self.shards)])

    def to_bytes(self) -> bytes:
        """The contents of an index file."""
        header = json.dumps([list(astuple(shard)) for shard in self.shards]).encode()
        header += b" " * (-(len(_MAGIC) + _HEADER.size + len(header)) % 64)
        return _MAGIC + _HEADER.pack(len(header)) + header + self.table.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes | np.ndarray) -> Index:
        """The index in the contents of a file, without copying them. Raises ``ValueError`` if they are damaged."""
        start = len(_MAGIC) + _HEADER.size
        if bytes(content[: len(_MAGIC)]) != _MAGIC or len(content) < start:
            raise ValueError("no index of this version")
        end = start + _HEADER.unpack(bytes(content[len(_MAGIC) : start]))[0]
        shards = [Shard(*fields) for fields in json.loads(bytes(content[start:end]))]
        count = sum(shard.count for shard in shards)
        if len(content) != end + count * RECORD.itemsize:
            raise ValueError("it is cut off")
        return cls(shards, np.frombuffer(content, RECORD, count, end))

    def select(self, names: Sequence[str]) -> Index:
        """The records of the shards ``names``, in this order; consecutive shards are not copied."""
        places = {shard.name: place for place, shard in enumerate(self.shards)}
        chosen = [places[name] for name in names]
        parts = [slice(self.starts[place], self.starts[place + 1]) for place in chosen]
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True:
            table = self.table[parts[0].start : parts[-1].stop] if chosen else self.table[:0]
        else:
            table = np.concatenate([self.table[part] for part in parts])
        return Index([self.shards[place] for place in chosen], table)

    def merge(self, other: Index) -> Index:
        """The shards of both, by name; of those in both, that of ``other``."""
        owner = {shard.name: self for shard in self.shards} | {shard.name: other for shard in other.shards}
        names = sorted(owner)
        if not names:
            return self
        places = {id(index): {shard.name: place for place, shard in enumerate(index.shards)} for index in (self, other)}
        shards, parts = [], []
        for name in names:
            place = places[id(owner[name])][name]
            shards.append(owner[name].shards[place])
            parts.append(owner[name].table[owner[name].starts[place] : owner[name].starts[place + 1]])
        return Index(shards, np.concatenate(parts))


EMPTY = Index([], np.empty(0, RECORD))


# --- making it ------------------------------------------------------------------------------------------------


class _Window:
    """The bytes of one file in blocks, each read at most once, some of them ahead; blocks left behind are dropped."""

    def __init__(self, path: str, size: int, pool: ThreadPoolExecutor, ahead: int, read: Callable[[int], None]) -> None:
        self.path, self.size, self.pool, self.ahead, self.read = path, size, pool, ahead, read
        self.blocks: dict[int, Future[bytes]] = {}
        self.last = -1

    def _fetch(self, block: int) -> bytes:
        start = block * BLOCK
        found = storage.read_range(self.path, start, min(start + BLOCK, self.size))
        self.read(len(found))
        return found

    def view(self, at: int, count: int) -> bytes | memoryview:
        """``count`` bytes from ``at`` on. ``at`` must not decrease."""
        if count <= 0:
            return b""
        first, last = at // BLOCK, (at + count - 1) // BLOCK
        for block in [block for block in self.blocks if block < first]:
            del self.blocks[block]
        if first > self.last + 1:
            self.ahead = 0  # records are larger than blocks, so that blocks read ahead would be left out
        for block in range(first, min(last + self.ahead, (self.size - 1) // BLOCK) + 1):
            if block not in self.blocks:
                self.blocks[block] = self.pool.submit(self._fetch, block)
        self.last = max(self.last, last)
        start = at - first * BLOCK
        if first == last:
            return memoryview(self.blocks[first].result())[start : start + count]
        joined = b"".join(self.blocks[block].result() for block in range(first, last + 1))
        return joined[start : start + count]


class _Progress:
    """Counts what is read; process 0 prints a line every :data:`_PROGRESS` seconds."""

    def __init__(self, folder: str, shards: int, peers: Peers) -> None:
        self.folder, self.shards, self.peers = folder, shards, peers
        self.start = self.printed = time.monotonic()
        self.done = self.bytes = 0
        self.lock = threading.Lock()

    def read(self, count: int) -> None:
        """Count ``count`` bytes."""
        with self.lock:
            self.bytes += count
            now = time.monotonic()
            if self.peers.rank == 0 and now - self.printed > _PROGRESS:
                self.printed = now
                self.say()

    def say(self) -> None:
        """Print what has been read."""
        seconds = max(time.monotonic() - self.start, 1e-3)
        others = f" (process 0 of {self.peers.processes})" if self.peers.processes > 1 else ""
        print(
            f"Indexing {self.folder}: {self.done} of {self.shards} shards, {self.bytes / 1e9:.1f} GB,"
            f" {self.bytes / seconds / 1e6:.0f} MB/s{others}",
            file=sys.stderr,
        )


def _records(name: str, table: np.ndarray) -> np.ndarray:
    """``int64[n, 2]`` of TFRecord or ``int64[n, 3]`` of tar as :data:`RECORD`."""
    found = np.zeros(len(table), RECORD)
    if len(table) and table[:, 1].max() >= 1 << 32:
        raise UserError(f"{name}: has a record of {table[:, 1].max()} bytes; records must be smaller than 4 GB")
    found["offset"], found["length"] = table[:, 0], table[:, 1]
    found["label"] = table[:, 2] if table.shape[1] > 2 else -1
    return found


def _scan(folder: str, name: str, entry: Entry, window: _Window) -> np.ndarray:
    path = paths.join(folder, name)
    scan = tarshard.scan if kind_of(name) == "tar" else tfrecord.scan
    return _records(path, scan(window.view, entry.size, path))


def read_shards(
    folder: str, found: dict[str, Entry], names: Sequence[str], progress: _Progress, seconds: float = float("inf")
) -> Index:
    """Read the shards ``names`` of ``folder``, no further shard after ``seconds``; ``found`` is the folder's contents.

    Index files of other tools beside a shard are used instead of reading it. Raises :class:`UserError` if a shard is
    damaged.
    """
    deadline = time.monotonic() + seconds
    side_by_side = min(READS, len(names)) or 1
    with ThreadPoolExecutor(READS) as reading, ThreadPoolExecutor(side_by_side) as parsing:

        def one(name: str) -> tuple[Shard, np.ndarray] | None:
            if time.monotonic() > deadline:
                return None
            entry = found[name]
            table = find_foreign(folder, name, kind_of(name), found)
            if table is None:
                # Two blocks in flight or more per shard: one is parsed while the next arrives.
                window = _Window(
                    paths.join(folder, name), entry.size, reading, max(1, READS // side_by_side), progress.read
                )
                records = _scan(folder, name, entry, window)
            else:
                records = _records(name, table[:, :3])
                if table.shape[1] > 3:
                    records["label_at"] = table[:, 3]
            with progress.lock:
                progress.done += 1
            digest = hashlib.sha256(records.tobytes()).hexdigest()[:16]
            return Shard(name, entry.size, entry.version, len(records), digest), records

        futures = [parsing.submit(one, name) for name in names]
        try:
            pairs = [pair for future in futures if (pair := future.result())]
        except UserError:
            for future in futures:
                future.cancel()
            raise
    if not pairs:
        return EMPTY
    return Index([shard for shard, _ in pairs], np.concatenate([records for _, records in pairs]))


def _make(folder: str, found: dict[str, Entry], index: Index, missing: list[str], spare: str, peers: Peers) -> Index:
    """``index`` with the ``missing`` shards, each read by one of the ``peers``; saved after every :data:`ROUND`."""
    progress, begun = _Progress(folder, -(-len(missing) // peers.processes), peers), len(missing)
    large = sum(found[name].size for name in missing) >= LARGE
    if peers.rank == 0 and large:
        print(f"Indexing {folder}: {begun} shards; this happens once", file=sys.stderr)
    while missing:
        try:
            # By size: the largest first, dealt in turn, so that the processes finish together.
            dealt = sorted(missing, key=lambda name: (-found[name].size, name))[peers.rank :: peers.processes]
            mine = b"+" + read_shards(folder, found, dealt, progress, ROUND).to_bytes()
        except UserError as error:
            mine = b"-" + str(error).encode()
        parts = peers.gather(mine)
        failed = next((part[1:].decode() for part in parts if part[:1] == b"-"), "")
        if failed:
            raise UserError(failed)
        for part in parts:
            made = Index.from_bytes(part[1:])
            # Copies of the data on several hosts have other times: the index is that of process 0's copy.
            made.shards = [replace(shard, version=found[shard.name].version) for shard in made.shards]
            index = index.merge(made)
        kept = {shard.name for shard in index.shards}
        missing = [name for name in missing if name not in kept]
        if peers.rank == 0:
            _save(folder, found, spare, index, large)
    if peers.rank == 0 and large:
        progress.say()
    return index


# --- keeping it -----------------------------------------------------------------------------------------------


def places(folder: str, spare: str) -> list[str]:
    """Where the index of ``folder`` is looked for: beside the data, then in the folder ``spare`` ("": none)."""
    other = f"trainyard-{hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:12]}.index"
    return [paths.join(folder, NAME), *([paths.join(spare, other)] if spare else [])]


def _save(folder: str, found: dict[str, Entry], spare: str, index: Index, large: bool) -> None:
    """Write ``index`` beside the data or into ``spare``, and update ``found``, the contents of ``folder``.

    If it cannot be written, a note says so where the shards are ``large``.
    """
    reasons = []
    for path in places(folder, spare):
        try:
            paths.make_folder(path.rpartition("/")[0])
            with paths.atomic_file(path) as file:
                file.write(index.to_bytes())
            found.update({name: entry for name, entry in storage.entries(folder).items() if name == NAME})
            return
        except (UserError, OSError) as error:
            reasons.append(getattr(error, "strerror", None) or str(error))
    if not large:
        return
    print(
        f"note: the index of {folder} cannot be saved ({'; '.join(reasons)}), so every start makes it again; give a"
        " writable --output-dir, or run python -m trainers.common.index where the folder is writable",
        file=sys.stderr,
    )


@functools.lru_cache(maxsize=4)  # training and test images of one folder have one index
def _map(path: str, entry: Entry) -> np.ndarray:
    """The contents of an index file, mapped into memory, so that only what is used takes memory."""
    if not paths.is_remote(path):
        return np.memmap(path, np.uint8, "r")
    with tempfile.TemporaryFile() as local:
        for start in range(0, entry.size, _PART):
            local.write(storage.read_range(path, start, min(start + _PART, entry.size)))
        local.flush()
        return np.memmap(local, np.uint8, "r")


def _read(path: str, found: dict[str, Entry]) -> Index:
    """The index in the file ``path``, empty if there is none; ``found`` is the contents of its folder."""
    entry = found.get(path.rpartition("/")[2])
    if entry is None or not entry.size:
        return EMPTY
    try:
        return Index.from_bytes(_map(path, entry))
    except (ValueError, TypeError, UserError, OSError) as error:
        print(f"note: {path} cannot be used ({error}) and is made again", file=sys.stderr)
        return EMPTY


def _kept(folder: str, found: dict[str, Entry], spare: str) -> Index:
    """What the index files have of the shards that have not changed since."""
    index = EMPTY
    for number, path in enumerate(places(folder, spare)):
        kept = _read(path, storage.entries(spare) if number else found)
        fresh = [shard.name for shard in kept.shards if found.get(shard.name) == Entry(shard.size, shard.version)]
        if fresh:
            index = index.merge(kept.select(fresh)) if index.shards else kept.select(fresh)
    return index


def load(folder: str, found: dict[str, Entry], names: Sequence[str], spare: str = "", peers: Peers = ALONE) -> Index:
    """The records of the shards ``names`` of ``folder``, from its index, which is made or completed if necessary.

    ``found`` is the contents of the folder; ``spare`` is a folder for the index if ``folder`` is not writable. Raises
    :class:`UserError` if a shard is damaged or does not match an index of another tool.
    """
    alone = peers.processes == 1
    listing = json.dumps([[name, found[name].size] for name in sorted(names)]).encode()
    size = sum(found[name].size for name in names)
    here = f"{len(names)} shards of {size} bytes, fingerprint {hashlib.sha256(listing).hexdigest()[:12]}"
    check_alike(peers, folder, here)
    # With several processes one reads the index, so that all agree on what is missing.
    index = _kept(folder, found, spare) if alone or peers.rank == 0 else EMPTY
    if not alone:
        index = Index.from_bytes(peers.broadcast(index.to_bytes()))
    kept = {shard.name for shard in index.shards}
    missing = [name for name in names if name not in kept]
    if missing:
        index = _make(folder, found, index, missing, spare, peers)
    chosen = index.select(sorted(names))
    check_shard_list(folder, found, {shard.name: (shard.size, shard.count) for shard in chosen.shards})
    return chosen


# --- indexes of other tools -------------------------------------------------------------------------------------------

# Indexes that other tools have made beside the shards: DALI's ``.idx`` files, and WebDataset's shard lists.
#
# - tfrecord2idx: a line per record with its offset and its size, header and checksums included:
#   https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx
# - wds2idx: ``v1.2`` and the number of samples, then a line per sample with suffix, offset, size and name of each
#   member: https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py; versions 1.0 and 1.1 have no names
# - wids: JSON with a list of the shards and the number of samples of each:
#   https://github.com/webdataset/webdataset/blob/main/wids/wids_specs.py

_MOST_JSON = 64 << 20  # bytes of a shard list; larger files are something else
_END_OF_TAR = 20 * tarshard.BLOCK  # bytes: a tar file is filled up to a multiple of 20 blocks


def find_foreign(folder: str, shard: str, kind: str, found: dict[str, Entry]) -> np.ndarray | None:
    """The records of ``shard`` from its ``.idx`` file, if ``folder``, whose contents are ``found``, has one that fits.

    Returns, per record, the offset and the length in bytes of the data: ``int64[n, 2]`` for ``kind`` "tfrecord". For
    "tar", ``int64[n, 4]``, with a third column of -2 and the offset of the label relative to the first.
    """
    for name in dict.fromkeys((f"{shard}.idx", f"{shard.rpartition('.')[0]}.idx", f"{shard.partition('.')[0]}.idx")):
        if name in found:
            path = paths.join(folder, name)
            try:
                lines = paths.read_file(path).decode().split("\n")
                parse = _tar if kind == "tar" else _tfrecord
                return parse([line for line in lines if line], found[shard].size)
            except (ValueError, IndexError, FileNotFoundError) as error:
                print(f"note: {path} does not fit {shard} ({error}); the shard is read instead", file=sys.stderr)
    return None


def _tfrecord(lines: list[str], size: int) -> np.ndarray:
    table = np.array([line.split() for line in lines], np.int64).reshape(-1, 2)
    ends = table[:, 0] + table[:, 1]
    starts = np.concatenate([[0], ends])
    if (table[:, 0] != starts[:-1]).any() or starts[-1] != size or (table[:, 1] < 16).any():
        raise ValueError(f"its records do not add up to the {size} bytes of the file")
    table[:, 0] += tfrecord.HEADER
    table[:, 1] -= tfrecord.HEADER + tfrecord.FOOTER
    return table


def _tar(lines: list[str], size: int) -> np.ndarray:
    version, count = lines[0].split()
    fields = {"v1.0": 3, "v1.1": 3, "v1.2": 4}.get(version)
    if fields is None or int(count) != len(lines) - 1:
        raise ValueError(f"{lines[0]} and {len(lines) - 1} lines")
    table = np.empty((len(lines) - 1, 4), np.int64)
    last = 0
    for number, line in enumerate(lines[1:]):
        words = line.split(" ")
        if len(words) % fields:
            raise ValueError(f"line {number + 2}: {len(words)} words")
        parts = {words[at].lower(): (int(words[at + 1]), int(words[at + 2])) for at in range(0, len(words), fields)}
        image = next((parts[suffix] for suffix in tarshard.SUFFIXES if suffix in parts), None)
        if image is None or "cls" not in parts:
            raise ValueError(f"line {number + 2}: no image, or no cls")
        table[number] = (*image, -2, parts["cls"][0] - image[0])
        last = max(last, *(offset + length for offset, length in parts.values()))
    padded = -(-last // tarshard.BLOCK) * tarshard.BLOCK
    if not padded <= size <= padded + 2 * tarshard.BLOCK + _END_OF_TAR:
        raise ValueError(f"its last member ends at {last} of {size} bytes")
    return table


def _shard_lists(folder: str, found: dict[str, Entry]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The JSON files of ``folder`` that are WebDataset's shard lists, with their lists."""
    lists = []
    for name, entry in found.items():
        if not name.endswith(".json") or not 0 < entry.size < _MOST_JSON:
            continue
        try:
            content = json.loads(paths.read_file(paths.join(folder, name)))
        except (ValueError, FileNotFoundError):
            continue
        if isinstance(content, dict) and content.get("wids_version") == 1:
            shards = content.get("shardlist")
            if isinstance(shards, list) and all(isinstance(shard, dict) and "url" in shard for shard in shards):
                lists.append((name, shards))
    return lists


def check_shard_list(folder: str, found: dict[str, Entry], shards: dict[str, tuple[int, int]]) -> None:
    """Compare ``shards`` (name to bytes and samples) with WebDataset's shard lists in ``folder``.

    Raises :class:`UserError` if a list that has some of them also has a shard that is missing, or other figures.
    """
    if not all(name.endswith(".tar") for name in shards):
        return
    for name, listed in _shard_lists(folder, found):
        names = [str(shard["url"]).rpartition("/")[2] for shard in listed]
        if not set(names) & set(shards):
            continue
        for shard, entry in zip(names, listed, strict=True):
            if shard not in found:
                raise UserError(f"{paths.join(folder, name)}: lists {shard}, which is missing; download it")
            if shard not in shards:
                continue
            for key, mine in zip(("filesize", "nsamples"), shards[shard], strict=True):
                if entry.get(key, mine) != mine:
                    raise UserError(
                        f"{paths.join(folder, shard)}: has {key} {mine}, but {entry[key]} in {name}; download it again,"
                        " or remove the list"
                    )


def main(args: argparse.Namespace) -> int:
    """Index the shards of ``args.folder`` and its folders train, test, val..., and print one line for each."""
    done = False
    top = storage.entries(args.folder)
    inside = [paths.join(args.folder, name) for name in SPLIT_WORDS if name in top and top[name].folder]
    for folder in (args.folder, *inside):
        found = storage.entries(folder)
        names = [name for name in found if kind_of(name)]
        if names:
            index, done = load(folder, found, names, args.output_dir), True
            print(f"{folder}: {len(index.table)} records in {len(index.shards)} shards")
    if not done:
        raise UserError(f"{args.folder}: has no *.tar or *.tfrecord files to index", exits.USAGE)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="index", description="Index the TFRecord or tar shards of a folder.")
    _parser.add_argument("folder", help="local folder, or a URL such as gs://bucket/folder")
    _parser.add_argument("--output-dir", default="", help="keep the index here if the folder is not writable")
    exits.guard(main, _parser.parse_args(), "index")
