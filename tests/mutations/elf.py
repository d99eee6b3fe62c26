"""What a 64-bit little-endian ELF file says about itself (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = b"\x7fELF\x02\x01"

#: ``e_machine`` of x86-64 and of AArch64, and where it is.
X86_64, AARCH64, MACHINE_OFFSET = 62, 183, 18

_DYNAMIC_SEGMENT, _LOADED_SEGMENT = 2, 1
_NEEDED, _STRING_TABLE = 1, 5


def needed(data: bytes) -> list[str]:
    """The names of the shared libraries that a program or library needs (``DT_NEEDED``)."""
    if not data.startswith(MAGIC):
        return []
    try:
        segments = list(_segments(data))
        dynamic = [pair for kind, offset, _, size in segments if kind == _DYNAMIC_SEGMENT
                   for pair in struct.iter_unpack("<QQ", data[offset : offset + size])]  # fmt: skip
        address = next(value for tag, value in dynamic if tag == _STRING_TABLE)
        strings = next(
            offset + address - start
            for kind, offset, start, size in segments
            if kind == _LOADED_SEGMENT and start <= address < start + size
        )
    except (struct.error, StopIteration):  # statically linked, or not complete
        return []
    names = [value for tag, value in dynamic if tag == _NEEDED]
    return [_string(data, strings + name) for name in names]


def other_machine(data: bytes) -> bytes:
    """The same file for another processor: AArch64, or x86-64 if it is for AArch64."""
    (machine,) = struct.unpack_from("<H", data, MACHINE_OFFSET)
    other = X86_64 if machine == AARCH64 else AARCH64
    return data[:MACHINE_OFFSET] + struct.pack("<H", other) + data[MACHINE_OFFSET + 2 :]


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Type, offset, address and size in the file of each segment."""
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, _, offset, address, _, stored = struct.unpack_from("<IIQQQQ", data, table + number * size)
        yield kind, offset, address, stored


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode("utf-8", "replace")
