"""Labelled images in class folders, TFRecord files or tar shards, decoded by threads in any order.

All formats provide random access (a file, or a byte range of a TFRecord or tar file). So the order depends on seed,
epoch and step only, whatever the format, and the number of shards need not be a multiple of the number of processes.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

import numpy as np

from trainers.common import order, paths, tfrecord
from trainers.common.exits import UserError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
_HELD_OUT = 10  # one image in ten is for the test if a data set has no test split
Box = tuple[float, float, float, float]  # left, upper, right, lower in pixels; left > right mirrors


@dataclass(frozen=True)
class Images:
    """A data set: ``read(i)`` returns image ``i`` of ``count`` as (encoded bytes, label, a name for messages)."""

    count: int
    classes: list[str]  # names, if the data has them
    read: Callable[[int], tuple[bytes, int, str]]

    def part(self, chosen: np.ndarray) -> Images:
        """The data set of the images with the numbers ``chosen``."""
        return Images(len(chosen), self.classes, lambda index: self.read(int(chosen[index])))


def find(datadir: str, split: str) -> Images:
    """The images of ``split`` ("train" or "test") in ``datadir``.

    Looks for ``<split>/<class>/*.jpg``, ``<split>*.tar`` (WebDataset: ``key.jpg`` and ``key.cls``),
    ``<split>*.tfrecord`` and ``<split>-00000-of-00010``, in ``datadir`` or its folder ``<split>``. Without splits,
    every tenth image (in a fixed random order) is for the test. Raises :class:`UserError` if no images are found.
    """
    if not paths.is_folder(datadir):
        raise UserError(f"{datadir}: no such folder; --datadir must have images")
    entries = paths.names(datadir)
    for name in _SPLITS[split]:
        inside = paths.join(datadir, name)
        if name in entries and paths.is_folder(inside):
            return _open(inside, paths.names(inside), f"{datadir}: its folder {name}")
        files = [entry for entry in entries if re.match(rf"{name}[-_.]", entry)]
        if files:
            return _open(datadir, files, f"{datadir}: its {name} files")
    everything = _open(datadir, entries, datadir)
    chosen = order.permutation(everything.count, 0, 0)
    held_out = np.arange(everything.count) % _HELD_OUT == 0
    return everything.part(np.sort(chosen[held_out if split == "test" else ~held_out]))


def _open(folder: str, names: list[str], what: str) -> Images:
    tars = [paths.join(folder, name) for name in names if name.endswith(".tar")]
    records = [
        paths.join(folder, name) for name in names if ".tfrecord" in name or re.search(r"-\d{5}-of-\d{5}$", name)
    ]
    found = _tar_shards(tars) if tars else _tfrecords(records) if records else _class_folders(folder, names)
    if not found.count:
        raise UserError(f"{what}: has no images: neither <class>/*.jpg, nor *.tar, nor *.tfrecord")
    return found


def _class_folders(folder: str, names: list[str]) -> Images:
    classes = [name for name in names if not name.startswith(".") and paths.is_folder(paths.join(folder, name))]
    files = [
        (paths.join(folder, name, file), label)
        for label, name in enumerate(classes)
        for file in paths.names(paths.join(folder, name))
        if file.lower().endswith(_SUFFIXES)
    ]

    def read(index: int) -> tuple[bytes, int, str]:
        path, label = files[index]
        with paths.open_file(path) as file:
            return file.read(), label, path

    return Images(len(files), classes, read)


class _OpenFiles(threading.local):
    """Open files per thread, so that threads do not share file positions."""

    def __init__(self) -> None:
        self.handles: dict[str, IO[bytes]] = {}

    def get(self, path: str) -> IO[bytes]:
        """An open handle of ``path``."""
        if path not in self.handles:
            if len(self.handles) >= 32:  # with 16 threads, half of the usual limit of 1,024 open files
                self.handles.pop(next(iter(self.handles))).close()
            self.handles[path] = paths.open_file(path)
        return self.handles[path]


def _tfrecords(files: list[str]) -> Images:
    tables = []
    for number, path in enumerate(files):
        with paths.open_file(path) as file:
            spans = tfrecord.spans(file, path)
        tables.append(np.column_stack([np.full(len(spans), number), spans, np.arange(len(spans))]))
    table, handles = np.concatenate(tables), _OpenFiles()

    def read(index: int) -> tuple[bytes, int, str]:
        number, offset, length, record = (int(value) for value in table[index])
        where = f"{files[number]}: record {record}"
        data = tfrecord.read(handles.get(files[number]), offset, length, where)
        return *tfrecord.image_and_label(data, where), where

    return Images(len(table), [], read)


def _tar_shards(files: list[str]) -> Images:
    members: list[tuple[str, int, int, int, str]] = []
    for path in files:
        keys: dict[str, dict[str, tarfile.TarInfo]] = {}
        labels: dict[str, int] = {}
        try:
            with paths.open_file(path) as file, tarfile.open(fileobj=file) as archive:
                for member in archive:
                    key, _, suffix = member.name.partition(".")
                    keys.setdefault(key, {})[suffix.lower()] = member
                    if suffix == "cls":
                        content = archive.extractfile(member)
                        labels[key] = int(content.read()) if content else -1
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise UserError(f"{path}: damaged tar file ({error}); download it again") from None
        for key, parts in keys.items():
            image = next((part for suffix, part in parts.items() if f".{suffix}" in _SUFFIXES), None)
            if image is None or key not in labels:
                raise UserError(f"{path}: {key} must have an image (such as {key}.jpg) and its label in {key}.cls")
            members.append((path, image.offset_data, image.size, labels[key], f"{path}: {image.name}"))
    handles = _OpenFiles()

    def read(index: int) -> tuple[bytes, int, str]:
        path, offset, size, label, where = members[index]
        file = handles.get(path)
        file.seek(offset)
        return file.read(size), label, where

    return Images(len(members), [], read)


# --- pixels ---------------------------------------------------------------------------------------------------


def uniform(count: int, columns: int, *key: int) -> np.ndarray:
    """Random ``float64[count, columns]`` in [0, 1) that depend on the integers ``key`` only."""
    return (order.random_bits(count * columns, *key) >> np.uint64(11)).reshape(count, columns) * 2.0**-53


def random_box(chance: np.ndarray, width: int, height: int, least_area: float) -> Box:
    """A random crop as for Inception (https://arxiv.org/abs/1409.4842): ``least_area`` to 1 of the area, aspect ratio
    from 3/4 to 4/3, mirrored half the time.

    ``chance`` has five numbers in [0, 1): for area, ratio, left, upper and mirroring.
    """
    area = width * height * (least_area + chance[0] * (1 - least_area))
    ratio = math.exp((2 * chance[1] - 1) * math.log(4 / 3))
    wide, high = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, upper = chance[2] * (width - wide), chance[3] * (height - high)
    box = (left, upper, left + wide, upper + high)
    return (box[2], box[1], box[0], box[3]) if chance[4] < 0.5 else box


def centre_box(width: int, height: int, share: float = 0.875) -> Box:
    """The central square of ``share`` of the shorter side. The default is 224 of 256 pixels, as usual for ImageNet."""
    side = min(width, height) * share
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def mirrored(pixels: np.ndarray) -> np.ndarray:
    """``uint8[rows, columns, 3]`` mirrored, channel by channel, which is four times as fast as all at once."""
    result = np.empty_like(pixels)
    for colour in range(pixels.shape[2]):
        result[..., colour] = pixels[:, ::-1, colour]
    return result


def decode(content: bytes, where: str, side: int, choose: Callable[[int, int], Box]) -> np.ndarray:
    """The box that ``choose(width, height)`` returns of an encoded image, resized to ``uint8[side, side, 3]``.

    A JPEG that is at least twice as large as needed is decoded at 1/2, 1/4 or 1/8 of its size. Raises
    :class:`UserError` with the name ``where`` if the image is damaged.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            left, upper, right, lower = choose(width, height)
            mirror, left, right = left > right, min(left, right), max(left, right)
            shrink = min(right - left, lower - upper) / side
            if shrink >= 2:
                image.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
            across, down = image.width / width, image.height / height
            box = (left * across, upper * down, min(right * across, image.width), min(lower * down, image.height))
            colour = image if image.mode == "RGB" else image.convert("RGB")
            pixels = np.asarray(colour.resize((side, side), Image.Resampling.BILINEAR, box))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{where}: is no readable image ({error}); replace or remove it") from None
    return mirrored(pixels) if mirror else pixels


Decode = Callable[[bytes, str, int, Callable[[int, int], Box]], np.ndarray]


class Loader:
    """Decodes batches with ``workers`` threads (decoders release the GIL), ``ahead`` batches in advance.

    ``decode`` is that of this module, or an equivalent one of a framework.
    """

    def __init__(self, images: Images, workers: int, ahead: int = 4, decode: Decode = decode) -> None:
        self.images, self.workers, self.ahead, self.decode = images, workers, ahead, decode
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")

    def batches(
        self, plan: Iterable[np.ndarray], side: int, choose: Callable[[int, int, int], Box]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pixels ``uint8[n, side, side, 3]`` and labels ``int64[n]`` of the image numbers of each array in ``plan``.

        ``choose(image number, width, height)`` returns the box. Image number -1 is padding: black, with label -1.
        """
        waiting: deque[tuple[np.ndarray, np.ndarray, list[Future[None]]]] = deque()

        def fill(pixels: np.ndarray, labels: np.ndarray, numbers: np.ndarray) -> None:
            for place, number in enumerate(numbers):
                if number < 0:
                    pixels[place] = 0
                else:
                    content, labels[place], where = self.images.read(int(number))
                    pixels[place] = self.decode(content, where, side, lambda w, h, n=int(number): choose(n, w, h))  # type: ignore[misc]

        def finished() -> tuple[np.ndarray, np.ndarray]:
            pixels, labels, parts = waiting.popleft()
            for part in parts:
                part.result()
            return pixels, labels

        try:
            for numbers in plan:
                pixels, labels = np.empty((len(numbers), side, side, 3), np.uint8), np.full(len(numbers), -1, np.int64)
                cuts = np.linspace(0, len(numbers), min(self.workers, len(numbers)) + 1).astype(int)
                parts = [
                    self.pool.submit(fill, pixels[start:end], labels[start:end], numbers[start:end])
                    for start, end in itertools.pairwise(cuts)
                ]
                waiting.append((pixels, labels, parts))
                if len(waiting) > self.ahead:
                    yield finished()
            while waiting:
                yield finished()
        finally:
            for _, _, parts in waiting:
                for part in parts:
                    part.cancel()

    def all(self, side: int, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """All images, or their centers if ``share`` < 1: pixels ``uint8[n, side, side, 3]``, labels ``int64[n]``."""
        plan = np.array_split(np.arange(self.images.count), max(1, self.images.count // 64))

        def choose(number: int, width: int, height: int) -> Box:
            return (0, 0, width, height) if share == 1 else centre_box(width, height, share)

        pixels, labels = zip(*self.batches(plan, side, choose), strict=True)
        return np.concatenate(pixels), np.concatenate(labels)
