"""The samples of WebDataset's tar shards: byte ranges of the images, and their labels.

Members whose names are equal up to the first dot of the base name form a sample, such as ``a/0001.jpg`` and
``a/0001.cls``: https://github.com/webdataset/webdataset#the-webdataset-format. Headers are those of POSIX (ustar, pax)
and GNU tar: https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from trainers.common.exits import UserError

BLOCK = 512
_EMPTY = bytes(BLOCK)
SUFFIXES = ("jpg", "jpeg", "png", "bmp", "webp")
MOST_DIGITS = 20  # characters of a label in a .cls file
View = Callable[[int, int], "bytes | memoryview"]


def _number(field: bytes) -> int:
    """A size in a header: octal digits, or, with the highest bit set, big endian (GNU tar, from 8 GB on)."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ((1 << 8 * len(field) - 1) - 1)
    return int(field.rstrip(b"\0 ") or b"0", 8)


def _pax(content: bytes) -> dict[bytes, bytes]:
    """The keys and values of an extended header; an entry is its length in decimal, a space, key=value, a line end."""
    found, at = {}, 0
    while at < len(content) and content[at] != 0:
        length = int(content[at : content.index(b" ", at)])
        if length < 5:
            raise ValueError("extended header")
        key, _, value = content[at : at + length - 1].partition(b" ")[2].partition(b"=")
        found[key] = value
        at += length
    return found


def name_in(head: bytes) -> str:
    """The name in the header of a member, cut off after 100 bytes if an extended header has it."""
    return _name(head).decode(errors="replace")


def _name(head: bytes) -> bytes:
    """The name in a header. The prefix is ustar's; GNU tar stores times in its place."""
    prefix = head[345:500].rstrip(b"\0") if head[257:263] == b"ustar\0" else b""
    return (prefix + b"/" if prefix else b"") + head[:100].partition(b"\0")[0]


def _override(kind: bytes, content: bytes, name: bytes, size: int) -> tuple[bytes, int]:
    """Name and size of the next member after an extended header of ``kind``, where it sets them."""
    if kind == b"L":
        return content.rstrip(b"\0"), size
    extended = _pax(content) if kind == b"x" else {}
    if any(key.startswith(b"GNU.sparse") for key in extended):
        raise ValueError("sparse files are not supported")
    return extended.get(b"path", name), int(extended.get(b"size", size))


def members(view: View, end: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size in bytes of each regular file in a tar file of ``end`` bytes.

    ``view(at, count)`` returns bytes of the file; only headers are asked for. Raises ``ValueError``.
    """
    at, name, size = 0, b"", -1
    while at + BLOCK <= end:
        head = bytes(view(at, BLOCK))
        at += BLOCK
        if head == _EMPTY:
            return
        # The sum of the header's bytes, with spaces for the checksum itself.
        if sum(head) - sum(head[148:156]) + 8 * 32 != _number(head[148:156]):
            raise ValueError("a header has a wrong checksum")
        length, kind = _number(head[124:136]), head[156:157]
        if kind in b"LxK":
            name, size = _override(kind, bytes(view(at, min(length, end - at))), name, size)
        elif kind == b"S":
            raise ValueError("sparse files are not supported")
        elif kind != b"g":
            length = 0 if kind in b"12346" else length if size < 0 else size  # links and devices have no content
            name = name or _name(head)
            if kind in b"0\x007":
                yield name.decode("utf-8", "surrogateescape"), at, length
            name, size = b"", -1
        at += -(-length // BLOCK) * BLOCK
    if at > end or end < BLOCK:
        raise ValueError("it ends within a member")


def key_of(name: str) -> tuple[str, str]:
    """Key and lowercase suffix of a member: its path up to the first dot of the base name, and what follows."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem else ("", "")  # hidden files belong to no sample


def label_of(content: bytes) -> int:
    """The label in a ``.cls`` file, of which ``content`` is the beginning. Raises ``ValueError``."""
    return int(content[:MOST_DIGITS].partition(b"\0")[0])


def scan(view: View, end: int, path: str) -> np.ndarray:
    """Offset, size and label of each sample in a tar file of ``end`` bytes, in order: ``int64[samples, 3]``.

    ``view`` is that of :func:`members`. Raises :class:`UserError` with ``path`` if the file is damaged, or if a sample
    lacks its image or label.
    """
    keys: dict[str, int] = {}
    found = array("q")  # per sample: offset, size, label
    try:
        for name, at, size in members(view, end):
            key, suffix = key_of(name)
            if suffix != "cls" and suffix not in SUFFIXES:
                continue
            place = keys.get(key)
            if place is None:
                place = keys[key] = len(found)
                found.extend((-1, 0, -1))
            if suffix == "cls":
                found[place + 2] = label_of(bytes(view(at, min(size, MOST_DIGITS))))
            elif found[place] < 0:
                found[place], found[place + 1] = at, size
    except (ValueError, IndexError) as error:
        raise UserError(f"{path}: damaged tar file ({error}); download it again") from None
    table = np.frombuffer(found, np.int64).reshape(-1, 3) if found else np.empty((0, 3), np.int64)
    incomplete = np.flatnonzero((table[:, 0] < 0) | (table[:, 2] < 0))
    if len(incomplete):
        key = list(keys)[incomplete[0]]
        raise UserError(f"{path}: {key} must have an image (such as {key}.jpg) and its label in {key}.cls")
    return table
