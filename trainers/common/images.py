"""Find labelled images in class folders or tar shards, and decode them by threads in any order.

All formats provide random access (a file, or a byte range of a shard). So the order depends on seed, epoch and step
only, whatever the format, and the number of shards need not be a multiple of the number of processes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import io
import json
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.common import files, order, shards, storage
from trainers.common.files import USAGE, UserError
from trainers.common.mnist import random_bits
from trainers.common.order import ALONE, Peers, check_alike
from trainers.common.storage import Entry

_SUFFIXES = tuple(f".{suffix}" for suffix in shards.SUFFIXES)
#: The words for each split in names of folders and shards.
SPLITS = {"train": ("train", "training"), "test": ("test", "val", "validation", "valid")}
# The first of them in the name of a shard, as in imagenet1k-validation-00.tar or train0.tar.
_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLITS['train'] + SPLITS['test'])})\d*(?=[-_.]|$)")
_HELD_OUT = 10  # one image in ten is for the test if a data set has no test split
# Bytes between two records that are rather read than requested separately: about two images, such as those that are
# left out for the test. Against the fake Cloud Storage, a request takes the processor time of 190 KB, besides 20 ms.
_GAP = 256 << 10
_MOST = 128  # images of one request
_LOCAL_GROUP = 8  # images per task for local files, so that passing them between threads costs little
READERS = 64  # threads that wait for storage: with 20 ms a request 3,200 images a second, more than Python decodes
_DAMAGED_SHARE = 1000  # one image in so many may be damaged
_SAMPLE = 64  # images that processes compare: one request each at a time, as READERS
Box = tuple[float, float, float, float]  # left, upper, right, lower in pixels; left > right mirrors
Sample = tuple[bytes, int, str]  # encoded image, label, a name for messages


class Damaged(UserError):
    """Tell that a sample of the data cannot be decoded; a few of many are skipped."""


@dataclass(frozen=True)
class Format:
    """Describe shards whose names match ``pattern``; ``parse(record, where)`` is its image and label.

    ``shown`` is the pattern for messages.
    """

    shown: str
    pattern: str
    scan: shards.Scan
    parse: Callable[[bytes, str], tuple[bytes, int]] | None = None


FORMATS = [Format("*.tar", r"\.tar$", shards.tar)]  # a framework may add its own


class Images:
    """Hold a data set: a row of ``table`` for each image; ``classes`` are their names, if the data has them."""

    def __init__(self, folder: str, table: np.ndarray, classes: list[str]) -> None:
        self.folder, self.table, self.classes = folder, table, classes
        self.slow = storage.is_slow(folder)  # each read takes a request
        self.about = ""  # more of the data set's identity

    @property
    def count(self) -> int:
        """Return the number of images."""
        return len(self.table)

    def part(self, chosen: np.ndarray) -> Images:
        """Return the data set of the images with the numbers ``chosen``."""
        part = copy.copy(self)
        part.table = self.table[chosen]
        return part

    def read(self, number: int) -> Sample:
        """Return image ``number``. Raises :class:`Damaged` if only this one cannot be read."""
        (found,) = self.read_many([number])
        if isinstance(found, Damaged):
            raise found
        return found

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        """Return images that :meth:`groups` put together. Raises :class:`UserError` if reading fails."""
        raise NotImplementedError

    def groups(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the places in ``numbers`` that are not padding (-1), in groups to read at once."""
        wanted = np.flatnonzero(numbers >= 0)
        size = 1 if self.slow else _LOCAL_GROUP
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    def fingerprint(self) -> str:
        """Return a short text that is equal for data sets of equal number, classes, names, sizes and labels."""
        digest = hashlib.sha256("\0".join([*self.classes, self.about]).encode(errors="surrogateescape"))
        digest.update(self.table.data)
        return f"{self.count} images with fingerprint {digest.hexdigest()[:12]}"

    def sample(self) -> str:
        """Return a short text that is equal for equal contents and labels of :data:`_SAMPLE` of the images.

        Names and sizes say nothing about contents, and copies of a shard can have the same size.
        """
        numbers = np.linspace(0, self.count - 1, min(self.count, _SAMPLE)).astype(int)
        with ThreadPoolExecutor(READERS if self.slow else 1) as pool:
            read = list(pool.map(lambda number: self.read_many([number])[0], numbers.tolist()))
        digest = hashlib.sha256()
        for found in read:
            content, label = (b"", -1) if isinstance(found, Damaged) else found[:2]
            digest.update(f"{label} {len(content)} ".encode() + content)
        return f"{len(read)} images with fingerprint {digest.hexdigest()[:12]}"


class _ClassFolders(Images):
    """Hold ``folder/<class>/*.jpg``. The table has labels and names: a million take 30 MB, as strings 80 MB."""

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        found: list[Sample | Damaged] = []
        for label, name in self.table[numbers].tolist():
            path = files.join(self.folder, self.classes[label], os.fsdecode(name))
            try:
                found.append((storage.read_file(path), label, path))
            except OSError as error:
                found.append(Damaged(f"{path}: cannot be read: {error.strerror}"))
        return found


class _Shards(Images):
    """Hold the records of shards; :func:`shards.load` returns the table."""

    def __init__(self, folder: str, table: np.ndarray, names: list[str], found: dict[str, Entry], form: Format) -> None:
        super().__init__(folder, table, [])
        self.paths, self.parse = [files.join(folder, name) for name in names], form.parse
        self.about = json.dumps([[name, found[name].size] for name in names])

    def groups(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Put remote records that are close to each other in a shard, as in a test, into one request."""
        if not self.slow:
            return super().groups(numbers)
        wanted = np.flatnonzero(numbers >= 0)
        rows = self.table[numbers[wanted]]
        sorting = np.lexsort((rows["offset"], rows["shard"]))
        wanted, rows = wanted[sorting], rows[sorting]
        gaps = rows["offset"][1:] - (rows["offset"] + rows["length"])[:-1]
        cuts = np.flatnonzero((np.diff(rows["shard"]) != 0) | (gaps > _GAP)) + 1
        return [part[start : start + _MOST] for part in np.split(wanted, cuts) for start in range(0, len(part), _MOST)]

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        rows = self.table[numbers].tolist()
        if not self.slow:
            return [self._sample(row, self._bytes(row[0], row[1], row[1] + row[2])) for row in rows]
        begin, end = min(row[1] for row in rows), max(row[1] + row[2] for row in rows)
        content = self._bytes(rows[0][0], begin, end)
        return [self._sample(row, content[row[1] - begin : row[1] - begin + row[2]]) for row in rows]

    def _bytes(self, shard: int, start: int, end: int) -> bytes:
        path = self.paths[shard]
        if files.is_remote(path):
            return storage.read_range(path, start, end)
        try:
            with open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), end - start, start)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def _sample(self, row: tuple[int, int, int, int], content: bytes) -> Sample | Damaged:
        where = f"{self.paths[row[0]]}: the image at byte {row[1]}"
        try:
            return (*self.parse(content, where), where) if self.parse else (content, row[3], where)
        except Damaged as error:
            return error


# --- finding them ---------------------------------------------------------------------------------------------


def _place(datadir: str, found: dict[str, Entry], words: tuple[str, ...]) -> tuple[str, list[str] | None] | None:
    """Return the folder of the split with one of the names ``words``, and its shards; None: whatever it has."""
    splits = {name: _SPLIT.search(name.lower()) for name in found if _is_shard(name)}
    for word in words:
        if word in found and found[word].folder:
            return files.join(datadir, word), None
        if chosen := [name for name, split in splits.items() if split and split[1] == word]:
            return datadir, chosen
    return None


def _is_shard(name: str) -> bool:
    return any(re.search(form.pattern, name) for form in FORMATS)


def find(datadir: str, split: str, spare: str = "", peers: Peers = ALONE) -> Images:
    """Return the images of ``split`` ("train" or "test") in ``datadir``: see :func:`find_splits`."""
    return find_splits(datadir, spare, peers)[split == "test"]


def find_splits(datadir: str, spare: str = "", peers: Peers = ALONE) -> tuple[Images, Images]:
    """Return the images to train and to test in ``datadir``.

    Looks for ``<split>/<class>/*.jpg`` and tar shards (WebDataset: ``key.jpg`` and ``key.cls``) whose name contains the
    split, in ``datadir`` or its folder ``<split>``. Labels of class folders are the places of their names in the
    training split. Without a test split, every tenth image (in a fixed random order) is for the test.

    ``spare`` is a folder for the index of shards if ``datadir`` is not writable; ``peers`` share the work of making it.
    Raises :class:`UserError` if no images are found, or if the test has a class that the training split lacks.
    """
    found = storage.entries(datadir)
    if not found and not storage.is_folder(datadir):
        raise UserError(f"{datadir}: no such folder; --datadir must have images")
    train, test = (_place(datadir, found, words) for words in SPLITS.values())
    if test and not train:
        raise UserError(f"{datadir}: has test images in {test[0]}, but no training images: neither train/ nor *train*")
    images = _open(*(train or (datadir, None)), spare, peers)
    if test:
        return images, _open(*test, spare, peers, images.classes)
    chosen = order.permutation(images.count, 0, 0)
    held_out = np.arange(images.count) % _HELD_OUT == 0
    return images.part(np.sort(chosen[~held_out])), images.part(np.sort(chosen[held_out]))


def find_both(args: argparse.Namespace, peers: Peers = ALONE) -> tuple[Images, Images]:
    """Return the images of ``--datadir`` to train and to test; raises :class:`UserError` if ``peers`` have others."""
    if not args.datadir:
        raise UserError("no data: give --datadir (class folders or tar shards) or --fake-data", USAGE)
    spare = getattr(args, "output_dir", "") or getattr(args, "checkpoint_dir", "")
    found = find_splits(args.datadir, spare, peers)
    for what, mine in fingerprints(*found).items() if peers.processes > 1 else ():
        check_alike(peers, what, mine)
    return found


def fingerprints(train: Images, test: Images) -> dict[str, str]:
    """Return values that are equal for equal data sets, wherever they are, by a name for messages."""
    return {"training images": train.fingerprint(), "test images": test.fingerprint(),
            "contents or labels of training images": train.sample(),
            "contents or labels of test images": test.sample()}  # fmt: skip


def _open(folder: str, names: list[str] | None, spare: str, peers: Peers, classes: list[str] | None = None) -> Images:
    """Return the images in ``folder``, or in its shards ``names``; ``classes`` are of the training images."""
    contents = storage.entries(folder)
    for form in FORMATS:
        chosen = [name for name in names or contents if re.search(form.pattern, name) and not contents[name].folder]
        if chosen:
            table = shards.load(folder, chosen, contents, spare, peers, form.scan)
            images: Images = _Shards(folder, table, chosen, contents, form)
            break
    else:
        images = _class_folders(folder, contents, classes)
    if not images.count:
        shown = " nor ".join(["<class>/*.jpg", *(form.shown for form in FORMATS)])
        other = (
            "" if len(FORMATS) > 1 else " (of TFRecord files, which only the TensorFlow trainers read, make tar shards)"
        )
        raise UserError(f"{folder}: has no images: neither {shown}{other}")
    return images


def _class_folders(folder: str, contents: dict[str, Entry], classes: list[str] | None) -> Images:
    own = [name for name, about in contents.items() if about.folder and name[0] != "." and name != "lost+found"]
    with ThreadPoolExecutor(READERS if storage.is_slow(folder) else 1) as pool:
        read = pool.map(_listing, [files.join(folder, name) for name in own])
    listed = {name: images for name, images in zip(own, read, strict=True) if images is not None}
    labels = {name: label for label, name in enumerate(listed if classes is None else classes)}
    for name, images in listed.items():
        if name not in labels:
            raise UserError(f"{folder}: has the class {name}, which the training images lack; add its folder there, or"
                            " remove it here", USAGE)  # fmt: skip
        if not len(images):
            raise UserError(f"{files.join(folder, name)}: has no images ({', '.join(_SUFFIXES)}); add some, or remove"
                            " the folder")  # fmt: skip
    names = np.concatenate([np.empty(0, "S1"), *listed.values()])
    table = np.empty(len(names), [("label", "<i4"), ("name", names.dtype)])
    table["label"] = np.repeat([labels[name] for name in listed], [len(images) for images in listed.values()])
    table["name"] = names
    return _ClassFolders(folder, table, list(labels))


def _listing(folder: str) -> np.ndarray | None:
    """Return the images in ``folder``, sorted, without pipes and devices; None if it is empty."""
    try:
        if files.is_remote(folder):
            found = [(name, True) for name in files.names(folder) if name]
        else:
            with os.scandir(folder) as scanned:
                found = [(entry.name, entry.is_file()) for entry in scanned]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
    kept = [os.fsencode(name) for name, is_file in found if is_file and name.lower().endswith(_SUFFIXES)]
    return np.array(sorted(kept), "S") if found else None


# --- pixels ---------------------------------------------------------------------------------------------------


def uniform(count: int, columns: int, *key: int) -> np.ndarray:
    """Return random ``float64[count, columns]`` in [0, 1) that depend on the integers ``key`` only."""
    return (random_bits(count * columns, *key) >> np.uint64(11)).reshape(count, columns) * 2.0**-53


def random_box(chance: np.ndarray, width: int, height: int, least_area: float, mirror: bool = True) -> Box:
    """Return a random crop as for Inception (https://arxiv.org/abs/1409.4842): ``least_area`` to 1 of the area,
    aspect ratio from 3/4 to 4/3, with ``mirror`` mirrored half the time.

    ``chance`` has five numbers in [0, 1): for area, ratio, left, upper and mirroring.
    """
    area = width * height * (least_area + chance[0] * (1 - least_area))
    ratio = math.exp((2 * chance[1] - 1) * math.log(4 / 3))
    wide, high = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, upper = chance[2] * (width - wide), chance[3] * (height - high)
    box = (left, upper, left + wide, upper + high)
    return (box[2], box[1], box[0], box[3]) if mirror and chance[4] < 0.5 else box


def centre_box(width: int, height: int, share: float = 0.875) -> Box:
    """Return the central square of ``share`` of the shorter side; by default 224 of 256 pixels, as for ImageNet."""
    side = min(width, height) * share
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def decode(content: bytes, where: str, side: int, choose: Callable[[int, int], Box]) -> np.ndarray:
    """Return the box that ``choose(width, height)`` returns of an encoded image, resized to ``uint8[side, side, 3]``.

    A JPEG that is at least twice as large as needed is decoded at 1/2, 1/4 or 1/8 of its size. Raises
    :class:`Damaged` with the name ``where`` if the image is.
    """
    from PIL import Image, UnidentifiedImageError

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
            scaled = _colour(image).resize((side, side), Image.Resampling.BILINEAR, box)
            return np.asarray(scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else scaled)
    except UnidentifiedImageError:  # whose message is the address of a Python object
        raise Damaged(f"{where}: is no readable image (of an unknown format, or empty); replace or remove it") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Damaged(f"{where}: is no readable image ({error}); replace or remove it") from None


def _colour(image: Any) -> Any:
    """Return the Pillow ``image`` in the mode RGB."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits of grey, as of medical scans: Pillow would make all above 255 white
        from PIL import Image

        image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # without this step, Pillow prints a warning
    return image.convert("RGB")


# --- loading -------------------------------------------------------------------------------------------------------

Decode = Callable[[bytes, str, int, Callable[[int, int], Box]], np.ndarray]


class Loader:
    """Read with ``readers`` threads, decode with ``workers`` threads, ``ahead`` batches in advance.

    Reading waits and decoding computes (decoders release the GIL), so their numbers are independent: by default
    :data:`READERS` for remote storage, and as many readers as workers for local files. ``decode`` is of this
    module, or an equivalent one of a framework.

    A damaged image is reported and skipped, if not more than one in 1,000 of ``images`` (of fewer: one) is damaged.
    """

    def __init__(self, images: Images, workers: int, ahead: int = 4, decode: Decode = decode, readers: int = 0) -> None:
        self.images, self.workers, self.ahead, self.decode = images, workers, ahead, decode
        self.reading = ThreadPoolExecutor(readers or (READERS if images.slow else workers), thread_name_prefix="read")
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self.damaged: set[int] = set()
        self._lock = threading.Lock()

    def batches(
        self,
        plan: Iterable[np.ndarray],
        side: int,
        choose: Callable[[int, int, int], Box],
        replace: bool = True,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pixels ``uint8[n, side, side, 3]`` and labels ``int64[n]`` of the numbers of each array in ``plan``.

        ``choose(image number, width, height)`` returns the box. Image number -1 is padding: black, with label -1. A
        damaged image is replaced by the next one of the data set; with ``replace`` false it becomes padding.
        """
        closed = threading.Event()

        def start(numbers: np.ndarray) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
            """Begin to fill a batch; returns what waits for it."""
            pixels, labels = np.zeros((len(numbers), side, side, 3), np.uint8), np.full(len(numbers), -1, np.int64)

            def read(places: np.ndarray) -> list[Future[None]]:
                samples = [] if closed.is_set() else self.images.read_many(numbers[places])
                parts = [slice(begin, begin + _LOCAL_GROUP) for begin in range(0, len(samples), _LOCAL_GROUP)]
                return [self.pool.submit(fill, places[part].tolist(), samples[part]) for part in parts]

            def fill(places: list[int], samples: list[Sample | Damaged]) -> None:
                for place, sample in zip(places, samples, strict=True):
                    if not closed.is_set():
                        found = self._decoded(int(numbers[place]), sample, side, choose, replace)
                        if found:
                            pixels[place], labels[place] = found

            reads = [self.reading.submit(read, places) for places in self.images.groups(numbers)]

            def result() -> tuple[np.ndarray, np.ndarray]:
                for reading in reads:
                    for decoding in reading.result():
                        decoding.result()
                return pixels, labels

            return result

        waiting: deque[Callable[[], tuple[np.ndarray, np.ndarray]]] = deque()
        try:
            for numbers in plan:
                waiting.append(start(numbers))
                if len(waiting) > self.ahead:
                    yield waiting.popleft()()
            while waiting:
                yield waiting.popleft()()
        finally:
            closed.set()

    def _decoded(
        self, number: int, sample: Sample | Damaged, side: int, choose: Callable[[int, int, int], Box], replace: bool
    ) -> tuple[np.ndarray, int] | None:
        """Return pixels and label of ``sample``, or, if it is damaged, of the next image that is not; None: padding."""
        while True:
            try:
                if isinstance(sample, Damaged):
                    raise sample
                content, label, where = sample
                return self.decode(content, where, side, functools.partial(choose, number)), label
            except Damaged as error:
                self._skip(number, error)
            if not replace:
                return None
            number = (number + 1) % self.images.count
            (sample,) = self.images.read_many([number])

    def _skip(self, number: int, error: Damaged) -> None:
        """Report damaged image ``number`` once; raises :class:`UserError` if there are too many."""
        limit = min(max(1, self.images.count // _DAMAGED_SHARE), self.images.count - 1)
        with self._lock:
            if number in self.damaged:
                return
            self.damaged.add(number)
            count = len(self.damaged)
        if count > limit:
            raise UserError(f"{error} ({count} damaged images; 1 in {_DAMAGED_SHARE}, at least 1, is skipped)")
        print(f"note: {error}; skipped ({count} of at most {limit} so far)", file=sys.stderr)

    def all(self, side: int, replace: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return all images, whole: pixels ``uint8[n, side, side, 3]``, labels ``int64[n]``; ``replace`` as above."""
        plan = np.array_split(np.arange(self.images.count), max(1, self.images.count // 64))
        pixels, labels = zip(*self.batches(plan, side, lambda _, w, h: (0, 0, w, h), replace), strict=True)
        return np.concatenate(pixels), np.concatenate(labels)
