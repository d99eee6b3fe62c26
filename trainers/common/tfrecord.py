"""TFRecord files and the tf.train.Example messages in them, without TensorFlow.

A record is its length (8 bytes, little endian), a masked CRC32C of those, the data, and a masked CRC32C of the data:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. An Example is a map of features in
protocol buffer wire format:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from trainers.common.exits import Damaged, UserError

try:
    from google_crc32c import value as _hardware_crc
except ImportError:
    _hardware_crc = None

HEADER, FOOTER = 12, 4  # bytes before and after the data of a record
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(byte)
    return table


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """The CRC32C of ``data``, masked as in TFRecord files. Uses google-crc32c if it is installed, as gcsfs requires."""
    if _hardware_crc is not None:
        crc: int = _hardware_crc(data)
    else:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scan(view: Callable[[int, int], bytes | memoryview], end: int, path: str) -> np.ndarray:
    """Offset and length in bytes of the data of each record in a file of ``end`` bytes: ``int64[records, 2]``.

    ``view(at, count)`` returns bytes of the file; only headers are asked for. Raises :class:`UserError` with ``path``
    and the number of the record if one is damaged.
    """
    found = array("q")
    at = 0
    while at < end:
        header = bytes(view(at, min(HEADER, end - at)))
        if len(header) < HEADER or masked_crc(header[:8]) != _CRC.unpack_from(header, 8)[0]:
            number = len(found) // 2
            raise UserError(
                f"{path}: record {number} has a damaged header; download the file again if it is a TFRecord file"
            )
        length = _LENGTH.unpack_from(header)[0]
        if at + HEADER + length + FOOTER > end:
            raise UserError(f"{path}: ends within record {len(found) // 2}; download it again")
        found.extend((at + HEADER, length))
        at += HEADER + length + FOOTER
    return np.frombuffer(found, np.int64).reshape(-1, 2) if found else np.empty((0, 2), np.int64)


def spans(file: IO[bytes], path: str) -> np.ndarray:
    """The same for an open ``file``."""

    def view(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    return scan(view, file.seek(0, 2), path)


def checked(content: bytes | memoryview, where: str) -> bytes:
    """The data of a record, of which ``content`` is the data and its checksum.

    Raises :class:`Damaged` with the name ``where`` if the checksum is wrong.
    """
    data = bytes(content[:-FOOTER])
    if len(content) < FOOTER or masked_crc(data) != _CRC.unpack(content[-FOOTER:])[0]:
        raise Damaged(f"{where}: its checksum is wrong; download the file again")
    return data


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The numbers and values of the fields of a protocol buffer message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size = varint()
        if size is None or at + size > len(data):
            raise ValueError(f"field of type {kind}")
        yield key >> 3, data[at : at + size]
        at += size


def image_and_label(data: bytes, where: str) -> tuple[bytes, int]:
    """The features image/encoded and image/class/label (or image and label) of a serialised tf.train.Example."""
    features: dict[str, bytes | int] = {}
    try:
        for _, example in _fields(data):
            for _, entry in _fields(_message(example)):
                pair = dict(_fields(_message(entry)))
                for kind, values in _fields(_message(pair.get(2, b""))):
                    for _, value in _fields(_message(values)):
                        # An int64 list is packed (bytes of varints) or one varint per field; bytes are bytes.
                        number = next(_fields(b"\x08" + value))[1] if kind == 3 and isinstance(value, bytes) else value
                        features.setdefault(_message(pair[1]).decode(), number)
        image = features.get("image/encoded", features.get("image"))
        label = features.get("image/class/label", features.get("label"))
    except (ValueError, IndexError, KeyError, StopIteration, UnicodeDecodeError):
        raise Damaged(f"{where}: not a tf.train.Example") from None
    if not isinstance(image, bytes) or not isinstance(label, int):
        raise UserError(
            f"{where}: no image/encoded and image/class/label among {', '.join(sorted(features)) or 'nothing'}"
        )
    return image, label


def _message(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number instead of a message")
    return value
