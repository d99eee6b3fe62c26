"""Read TFRecord files of images, which only TensorFlow's trainers do: importing this module makes them known.

A record is its length (8 bytes, little endian), a masked CRC32C of those, the data, and a masked CRC32C of the data:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details. tf.data reads them in their order
only; the trainers read any of them, as of tar shards.
"""

from __future__ import annotations

import struct
from typing import IO

import tensorflow as tf
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c

from trainers.common import images
from trainers.common.files import UserError
from trainers.common.images import Damaged


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def scan(file: IO[bytes], path: str) -> list[tuple[int, int, int]]:
    """Return offset, length, with the checksum, and label (-1: in the record) of each record in ``file``.

    Raises :class:`UserError` if the file is damaged.
    """
    found: list[tuple[int, int, int]] = []
    at, end = 0, file.seek(0, 2)
    while at < end:
        file.seek(at)
        header = file.read(12)
        if len(header) < 12 or _masked_crc(header[:8]) != header[8:]:
            raise UserError(f"{path}: record {len(found)} has a damaged header; download the file again if it is a"
                            " TFRecord file")  # fmt: skip
        length = struct.unpack("<Q", header[:8])[0] + 4
        if at + 12 + length > end:
            raise UserError(f"{path}: ends within record {len(found)}; download it again")
        found.append((at + 12, length, -1))
        at += 12 + length
    return found


def parse(content: bytes, where: str) -> tuple[bytes, int]:
    """Return image/encoded and image/class/label (or image and label) of the tf.train.Example in a record.

    Raises :class:`Damaged` if the record is damaged, :class:`UserError` if it has none of them.
    """
    if len(content) < 4 or _masked_crc(content[:-4]) != content[-4:]:
        raise Damaged(f"{where}: its checksum is wrong; download the file again")
    try:
        features = tf.train.Example.FromString(content[:-4]).features.feature
    except DecodeError:
        raise Damaged(f"{where}: not a tf.train.Example") from None
    image = [features[name].bytes_list.value for name in ("image/encoded", "image") if name in features]
    label = [features[name].int64_list.value for name in ("image/class/label", "label") if name in features]
    if not image or not label or not image[0] or not label[0]:
        names = ", ".join(sorted(features)) or "nothing"
        raise UserError(f"{where}: no image/encoded and image/class/label among {names}")
    return image[0][0], label[0][0]


images.FORMATS.append(images.Format("*.tfrecord", r"-\d{5}-of-\d{5}$|\.tfrecords?$", scan, parse))
