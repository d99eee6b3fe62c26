"""TFRecord files and the tf.train.Example messages in them, without TensorFlow.

A record is its length (8 bytes, little endian), a masked CRC32C of those, the data, and a masked CRC32C of the data:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. An Example is a map of features in
protocol buffer wire format:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

import numpy as np

from trainers.common.exits import UserError

HEADER, FOOTER = 12, 4


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
    try:
        from google_crc32c import value as checksum

        crc: int = checksum(data)
    except ImportError:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
        crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def spans(file: IO[bytes], path: str) -> np.ndarray:
    """Offset and length in bytes of the data of each record in ``file``: ``int64[records, 2]``.

    Reads the headers only. Raises :class:`UserError` with ``path`` and the number of the record if one is damaged.
    """
    found: list[tuple[int, int]] = []
    end = file.seek(0, 2)
    at = 0
    while at < end:
        file.seek(at)
        header = file.read(HEADER)
        if len(header) < HEADER or masked_crc(header[:8]) != struct.unpack("<I", header[8:])[0]:
            raise UserError(
                f"{path}: record {len(found)} has a damaged header; download the file again if it is a TFRecord file"
            )
        length = struct.unpack("<Q", header[:8])[0]
        if at + HEADER + length + FOOTER > end:
            raise UserError(f"{path}: ends within record {len(found)}; download it again")
        found.append((at + HEADER, length))
        at += HEADER + length + FOOTER
    return np.array(found, np.int64).reshape(-1, 2)


def read(file: IO[bytes], offset: int, length: int, where: str) -> bytes:
    """The data of one record; raises :class:`UserError` with the name ``where`` if its checksum is wrong."""
    file.seek(offset)
    content = file.read(length + FOOTER)
    if len(content) < length + FOOTER or masked_crc(content[:-FOOTER]) != struct.unpack("<I", content[-FOOTER:])[0]:
        raise UserError(f"{where}: its checksum is wrong; download the file again")
    return content[:-FOOTER]


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
        raise UserError(f"{where}: not a tf.train.Example") from None
    if not isinstance(image, bytes) or not isinstance(label, int):
        raise UserError(
            f"{where}: no image/encoded and image/class/label among {', '.join(sorted(features)) or 'nothing'}"
        )
    return image, label


def _message(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number instead of a message")
    return value
