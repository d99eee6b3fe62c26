"""Drawn flowers of five kinds as JPEG files: a data set that a model can learn, in every format of the trainers."""

from __future__ import annotations

import colorsys
import io
import math
import random
import struct
import tarfile
from pathlib import Path

CLASSES = ("daisy", "dandelion", "rose", "sunflower", "tulip")
# Petals and hue (0 to 1) of each kind. Neighbours share one of the two: neither alone tells all kinds apart.
_KINDS = {"daisy": (12, 0.12), "dandelion": (24, 0.15), "rose": (5, 0.96), "sunflower": (16, 0.12), "tulip": (3, 0.90)}


def draw(kind: str, chance: random.Random, width: int = 160, height: int = 120) -> bytes:
    """A flower of ``kind`` on a green background of ``width`` x ``height``, as JPEG."""
    from PIL import Image, ImageDraw, ImageFilter

    petals, hue = _KINDS[kind]
    soil = [int(255 * part) for part in colorsys.hsv_to_rgb(chance.uniform(0.25, 0.45), 0.5, chance.uniform(0.2, 0.5))]
    image = Image.new("RGB", (width, height), (soil[0], soil[1], soil[2]))
    pen = ImageDraw.Draw(image)
    x, y = width * chance.uniform(0.4, 0.6), height * chance.uniform(0.4, 0.6)
    radius, turn = height * chance.uniform(0.3, 0.42), chance.uniform(0, 2 * math.pi)
    shades = [
        colorsys.hsv_to_rgb((hue + chance.gauss(0, 0.015)) % 1, 0.85, chance.uniform(0.75, 1)) for _ in range(petals)
    ]
    half = min(0.45, math.pi / petals)
    for petal, shade in enumerate(shades):
        angle = turn + 2 * math.pi * petal / petals
        points = [(x, y)]
        for step in range(-6, 7):
            reach = radius * math.cos(step / 6 * 1.2)
            points.append(
                (x + reach * math.cos(angle + half * step / 6), y + reach * math.sin(angle + half * step / 6))
            )
        pen.polygon(points, fill=(int(255 * shade[0]), int(255 * shade[1]), int(255 * shade[2])))
    core = radius * {"sunflower": 0.45, "daisy": 0.25}.get(kind, 0.12)
    dark = 60 if kind == "sunflower" else 200
    pen.ellipse([x - core, y - core, x + core, y + core], fill=(dark, int(dark * 0.7), 20))
    buffer = io.BytesIO()
    image.filter(ImageFilter.GaussianBlur(chance.uniform(0, 1.2))).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def pictures(count: int, seed: int) -> list[tuple[int, bytes]]:
    """``count`` pairs of label and JPEG, the kinds in turn; the same for the same ``seed``."""
    chance = random.Random(seed)
    return [(number % len(CLASSES), draw(CLASSES[number % len(CLASSES)], chance)) for number in range(count)]


def write_folder(folder: Path, made: list[tuple[int, bytes]]) -> None:
    """``<class>/<number>.jpg``."""
    for number, (label, content) in enumerate(made):
        path = folder / CLASSES[label] / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_tar(path: Path, made: list[tuple[int, bytes]]) -> None:
    """A WebDataset shard: ``<number>.jpg`` and ``<number>.cls``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, (label, content) in enumerate(made):
            for suffix, data in (("jpg", content), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def write_tfrecord(path: Path, made: list[tuple[int, bytes]]) -> None:
    """Serialised tf.train.Example records with image/encoded and image/class/label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for label, content in made:
            image = _entry("image/encoded", _field(1, _field(1, content)))
            number = _entry("image/class/label", _field(3, _field(1, _varint(label))))
            data = _field(1, image + number)
            length = struct.pack("<Q", len(data))
            file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _entry(key: str, feature: bytes) -> bytes:
    return _field(1, _field(1, key.encode()) + _field(2, feature))


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
    return byte


_TABLE = [_crc_of_byte(byte) for byte in range(256)]


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write(folder: str | Path, form: str = "folder", train: int = 500, test: int = 100, seed: int = 0) -> Path:
    """Write ``train`` and ``test`` pictures into ``folder``; the pictures are the same in every form.

    Args:
        form: "folder", "tfrecord" or "tar"; the shards of the latter two have up to 200 pictures each.
    Returns:
        ``folder``.
    """
    folder = Path(folder)
    for split, count, start in (("train", train, seed), ("test", test, seed + 1_000_003)):
        made = pictures(count, start)
        if form == "folder":
            write_folder(folder / split, made)
            continue
        shards = -(-count // 200)
        for shard in range(shards):
            part = made[shard * 200 : (shard + 1) * 200]
            if form == "tar":
                write_tar(folder / f"{split}-{shard:05d}.tar", part)
            else:
                write_tfrecord(folder / f"{split}-{shard:05d}-of-{shards:05d}", part)
    return folder
