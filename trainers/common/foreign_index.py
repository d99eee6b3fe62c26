"""Indexes that other tools have made beside the shards: DALI's ``.idx`` files, and WebDataset's shard lists.

- tfrecord2idx: a line per record with its offset and its size, header and checksums included:
  https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx
- wds2idx: ``v1.2`` and the number of samples, then a line per sample with suffix, offset, size and name of each
  member: https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py; versions 1.0 and 1.1 have no names
- wids: JSON with a list of the shards and the number of samples of each:
  https://github.com/webdataset/webdataset/blob/main/wids/wids_specs.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from trainers.common import paths, tarshard, tfrecord
from trainers.common.exits import UserError
from trainers.common.paths import Entry

_MOST_JSON = 64 << 20  # bytes of a shard list; larger files are something else
_END_OF_TAR = 20 * tarshard.BLOCK  # bytes: a tar file is filled up to a multiple of 20 blocks


def find(folder: str, shard: str, kind: str, found: dict[str, Entry]) -> np.ndarray | None:
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
