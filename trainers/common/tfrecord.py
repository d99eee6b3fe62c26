"""TFRecord files and the tf.train.Example messages in them, without TensorFlow.

A record is its length (8 bytes, little endian), a masked CRC32C of those, the data, and a masked CRC32C of the data:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. An Example is a map of features in
protocol buffer wire format:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from trainers.common.exits import Damaged, UserError

HEADER, FOOTER = 12, 4  # bytes before and after the data of a record
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


def masked_crc(data: bytes) -> int:
    """Return the CRC32C of ``data``, masked as in TFRecord files."""
    crc = _libraries()[0](data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _libraries() -> tuple[Callable[[bytes], int], Any]:
    """Return what computes a CRC32C, and the class of the message tf.train.Example, without lists of floats.

    Raises :class:`UserError` without their packages.
    """
    try:
        from google.protobuf import (  # type: ignore[import-untyped, unused-ignore]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
        from google_crc32c import value
    except ImportError as error:
        raise UserError(f"TFRecord files need {error.name}: pip install google-crc32c protobuf") from None
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3")
    for name, *fields in (
        ("Example", ("features", 1, "OPTIONAL", "Features")),
        ("Features", ("feature", 1, "REPEATED", "Entry")),  # a map
        ("Entry", ("key", 1, "OPTIONAL", "STRING"), ("value", 2, "OPTIONAL", "Feature")),
        ("Feature", ("bytes_list", 1, "OPTIONAL", "BytesList"), ("int64_list", 3, "OPTIONAL", "Int64List")),
        ("BytesList", ("value", 1, "REPEATED", "BYTES")),
        ("Int64List", ("value", 1, "REPEATED", "INT64")),
    ):
        message = file.message_type.add(name=name)
        for field, number, label, kind in fields:
            about = {"type": f"TYPE_{kind}"} if kind.isupper() else {"type_name": kind}
            message.field.add(name=field, number=number, label=f"LABEL_{label}", **about)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return value, message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


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


def image_and_label(data: bytes, where: str) -> tuple[bytes, int]:
    """Return the features image/encoded and image/class/label (or image and label) of a serialised tf.train.Example."""
    example = _libraries()[1]
    try:
        entries = example.FromString(data).features.feature
    except Exception:  # google.protobuf.message.DecodeError
        raise Damaged(f"{where}: not a tf.train.Example") from None
    lists = {entry.key: entry.value.bytes_list.value or entry.value.int64_list.value for entry in entries}
    features = {name: values[0] for name, values in lists.items() if values}
    image = features.get("image/encoded", features.get("image"))
    label = features.get("image/class/label", features.get("label"))
    if not isinstance(image, bytes) or not isinstance(label, int):
        raise UserError(
            f"{where}: no image/encoded and image/class/label among {', '.join(sorted(features)) or 'nothing'}"
        )
    return image, label
