"""Labelled images in class folders, TFRecord files or tar shards, decoded by threads in any order.

All formats provide random access (a file, or a byte range of a TFRecord or tar file). So the order depends on seed,
epoch and step only, whatever the format, and the number of shards need not be a multiple of the number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import re
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.common import index, order, paths, storage, tarshard, tfrecord
from trainers.common.exits import USAGE, Damaged, UserError
from trainers.common.order import ALONE, Peers, check_alike
from trainers.common.storage import Entry

_SUFFIXES = tuple(f".{suffix}" for suffix in tarshard.SUFFIXES)
_HELD_OUT = 10  # one image in ten is for the test if a data set has no test split
# Bytes between two records that are rather read than requested separately: about two images, such as those that are
# left out for the test. Against the fake Cloud Storage, a request takes the processor time of 190 KB, besides 20 ms.
_GAP = 256 << 10
_RUN = 8 << 20  # most bytes of one request
_LOCAL_GROUP = 8  # images per task for local files, so that passing them between threads costs little
READERS = (
    64  # threads that wait for remote storage: with 20 ms a request 3,200 images a second, more than Python decodes
)
_DAMAGED_SHARE = 1000  # one image in so many may be damaged
_SAMPLE = 64  # images that processes compare: one request each at a time, as READERS
Box = tuple[float, float, float, float]  # left, upper, right, lower in pixels; left > right mirrors
Sample = tuple[bytes, int, str]  # encoded image, label, a name for messages


class Images:
    """A data set of ``count`` images; ``classes`` are their names, if the data has them."""

    count: int
    classes: list[str]
    slow = False  # whether each read takes a request

    def read(self, number: int) -> Sample:
        """Image ``number``. Raises :class:`Damaged` if only this one cannot be read."""
        (found,) = self.read_many([number])
        if isinstance(found, Damaged):
            raise found
        return found

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        """The images ``numbers``, which :meth:`groups` put together. Raises :class:`UserError` if reading fails."""
        raise NotImplementedError

    def groups(self, numbers: np.ndarray) -> list[np.ndarray]:
        """The places in ``numbers``, except those of padding (-1), in groups to read at once."""
        wanted = np.flatnonzero(numbers >= 0)
        size = 1 if self.slow else _LOCAL_GROUP
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    def fingerprint(self) -> str:
        """A short text that is equal for equal data sets, wherever they are: number, classes, names, sizes, labels."""
        digest = hashlib.sha256("\0".join(self.classes).encode(errors="surrogateescape"))
        for part in self._identity():
            digest.update(part)
        return f"{self.count} images with fingerprint {digest.hexdigest()[:12]}"

    def sample(self) -> str:
        """A short text that is equal for data sets with equal contents and labels of :data:`_SAMPLE` of their images.

        The index of shards has no labels and no contents, and copies of a shard can have the same size.
        """
        numbers = np.linspace(0, self.count - 1, min(self.count, _SAMPLE)).astype(int)
        with ThreadPoolExecutor(READERS if self.slow else 1) as pool:
            read = list(pool.map(lambda number: self.read_many([number])[0], numbers.tolist()))
        digest = hashlib.sha256()
        for found in read:
            content, label = (b"", -1) if isinstance(found, Damaged) else found[:2]
            digest.update(f"{label} {len(content)} ".encode() + content)
        return f"{len(read)} images with fingerprint {digest.hexdigest()[:12]}"

    def _identity(self) -> Iterator[bytes | memoryview]:
        raise NotImplementedError

    def part(self, chosen: np.ndarray) -> Images:
        """The data set of the images with the numbers ``chosen``."""
        return _Part(self, chosen)


class _Part(Images):
    def __init__(self, whole: Images, chosen: np.ndarray) -> None:
        self.whole, self.chosen = whole, chosen
        self.count, self.classes, self.slow = len(chosen), whole.classes, whole.slow

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        return self.whole.read_many([int(self.chosen[number]) for number in numbers])

    def groups(self, numbers: np.ndarray) -> list[np.ndarray]:
        return self.whole.groups(np.where(numbers >= 0, self.chosen[numbers], -1))

    def _identity(self) -> Iterator[bytes | memoryview]:
        yield from self.whole._identity()
        yield self.chosen.tobytes()


class _ClassFolders(Images):
    """``folder/<class>/*.jpg``. Names are kept in one array: a million take 30 MB, as strings 80 MB."""

    def __init__(self, folder: str, classes: list[str], own: list[str], listed: list[list[str]]) -> None:
        """``listed`` are the names in the folders ``own``, whose labels are their places in ``classes``."""
        self.folder, self.classes = folder, classes
        self.slow = storage.is_slow(folder)
        kept = [[os.fsencode(name) for name in names if name.lower().endswith(_SUFFIXES)] for names in listed]
        self.names = np.array([name for names in kept for name in names], "S")
        place = {name: label for label, name in enumerate(classes)}
        self.labels = np.repeat(np.array([place[name] for name in own], np.int32), [len(names) for names in kept])
        self.count = len(self.labels)

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        found: list[Sample | Damaged] = []
        for number in numbers:
            label = int(self.labels[number])
            path = paths.join(self.folder, self.classes[label], os.fsdecode(bytes(self.names[number])))
            try:
                found.append((paths.read_file(path), label, path))
            except OSError as error:
                found.append(Damaged(f"{path}: cannot be read: {error.strerror}"))
        return found

    def _identity(self) -> Iterator[bytes | memoryview]:
        yield self.names.tobytes()
        yield self.labels.tobytes()


class _Shards(Images):
    """The records of TFRecord or tar files."""

    def __init__(self, folder: str, records: index.Index) -> None:
        self.folder, self.index, self.table = folder, records, records.table
        self.paths = [paths.join(folder, shard.name) for shard in records.shards]
        self.is_tar = bool(records.shards) and index.kind_of(records.shards[0].name) == "tar"
        self.slow = storage.is_slow(folder)
        self.count, self.classes = len(self.table), []

    def _span(self, record: np.void) -> tuple[int, int]:
        """The first byte to read of a record, and the first behind its data and its checksum or label."""
        start, end = int(record["offset"]), int(record["offset"]) + int(record["length"])
        if not self.is_tar:
            return start, end + tfrecord.FOOTER
        start -= tarshard.BLOCK  # the member's header, for its name
        if record["label"] == index.IN_FILE:
            label = int(record["offset"]) + int(record["label_at"])
            return min(start, label), max(end, label + tarshard.MOST_DIGITS)
        return start, end

    def groups(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Remote records that are close to each other in a file, such as those of a test, are one request."""
        if not self.slow:
            return super().groups(numbers)
        wanted = np.flatnonzero(numbers >= 0)
        places = wanted[np.argsort(numbers[wanted], kind="stable")]
        groups: list[list[int]] = []
        shard, begin, end = -1, 0, 0
        owners = np.searchsorted(self.index.starts, numbers[places], "right") - 1
        for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
            first, last = self._span(self.table[numbers[place]])
            if owner == shard and -_GAP < first - end < _GAP and last - begin <= _RUN:
                groups[-1].append(place)
                end = max(end, last)
            else:
                groups.append([place])
                shard, begin, end = owner, first, last
        return [np.array(group) for group in groups]

    def read_many(self, numbers: Sequence[int]) -> list[Sample | Damaged]:
        if not self.slow:
            return [self._read(number, *self._span(self.table[number])) for number in numbers]
        spans = [self._span(self.table[number]) for number in numbers]
        begin, end = min(first for first, _ in spans), max(last for _, last in spans)
        owner = int(np.searchsorted(self.index.starts, numbers[0], "right")) - 1
        content = memoryview(storage.read_range(self.paths[owner], begin, min(end, self.index.shards[owner].size)))
        return [
            self._parse(number, owner, content[first - begin : last - begin], first)
            for number, (first, last) in zip(numbers, spans, strict=True)
        ]

    def _read(self, number: int, first: int, last: int) -> Sample | Damaged:
        owner = int(np.searchsorted(self.index.starts, number, "right")) - 1
        content = memoryview(storage.read_range(self.paths[owner], first, min(last, self.index.shards[owner].size)))
        return self._parse(number, owner, content, first)

    def _parse(self, number: int, owner: int, content: memoryview, first: int) -> Sample | Damaged:
        record = self.table[number]
        offset, length = int(record["offset"]) - first, int(record["length"])
        where = f"{self.paths[owner]}: record {number - self.index.starts[owner]}"
        try:
            if not self.is_tar:
                data = tfrecord.checked(content[: length + tfrecord.FOOTER], where)
                return *tfrecord.image_and_label(data, where), where
            where = f"{self.paths[owner]}: {tarshard.name_in(bytes(content[offset - tarshard.BLOCK : offset]))}"
            label = int(record["label"])
            if label == index.IN_FILE:
                at = offset + int(record["label_at"])
                label = tarshard.label_of(bytes(content[at : at + tarshard.MOST_DIGITS]))
            return bytes(content[offset : offset + length]), label, where
        except ValueError as error:
            return Damaged(f"{where}: has no number as its label ({error})")
        except Damaged as error:
            return error

    def _identity(self) -> Iterator[bytes | memoryview]:
        for shard in self.index.shards:
            yield f"{shard.name} {shard.size} {shard.count} {shard.digest}\n".encode(errors="surrogateescape")


# --- finding them ---------------------------------------------------------------------------------------------


def _split_word(name: str) -> str:
    """The split in the name of a shard, such as "validation" in ``imagenet1k-validation-00.tar``; "" if none."""
    words = (re.sub(r"\d+$", "", word) for word in re.split(r"[-_.]", name.lower()))
    return next((word for word in words if word in index.SPLIT_WORDS), "")


Place = tuple[str, "list[str] | None"]  # a folder, and the shards in it; None: whatever it contains


def _place(datadir: str, found: dict[str, Entry], split: str) -> Place | None:
    for word in index.SPLITS[split]:
        if word in found and found[word].folder:
            return paths.join(datadir, word), None
        shards = [name for name in found if index.kind_of(name) and _split_word(name) == word]
        if shards:
            return datadir, shards
    return None


def find(
    datadir: str, split: str, spare: str = "", peers: Peers = ALONE, found: dict[str, Entry] | None = None
) -> Images:
    """The images of ``split`` ("train" or "test") in ``datadir``.

    Looks for ``<split>/<class>/*.jpg``, tar shards (WebDataset: ``key.jpg`` and ``key.cls``) and TFRecord files whose
    name contains the split, in ``datadir`` or its folder ``<split>``. Labels of class folders are the places of their
    names in the training split. Without a test split, every tenth image (in a fixed random order) is for the test.

    ``spare`` is a folder for the index of shards if ``datadir`` is not writable; ``peers`` share the work of making it;
    ``found`` is the contents of ``datadir`` if they are known. Raises :class:`UserError` if no images are found, or if
    the test has a class that the training split lacks.
    """
    found = storage.entries(datadir) if found is None else found
    if not found and not paths.is_folder(datadir):
        raise UserError(f"{datadir}: no such folder; --datadir must have images")
    train, test = _place(datadir, found, "train"), _place(datadir, found, "test")
    if test and not train:
        raise UserError(f"{datadir}: has test images in {test[0]}, but no training images: neither train/ nor *train*")
    if split == "test" and test:
        classes = _class_names(train[0]) if train and train[1] is None else None
        return _open(test, datadir, found, spare, peers, classes)
    if test and train:
        return _open(train, datadir, found, spare, peers)
    everything = _open(train or (datadir, None), datadir, found, spare, peers)
    chosen = order.permutation(everything.count, 0, 0)
    held_out = np.arange(everything.count) % _HELD_OUT == 0
    return everything.part(np.sort(chosen[held_out if split == "test" else ~held_out]))


def find_both(args: argparse.Namespace, peers: Peers = ALONE) -> tuple[Images, Images]:
    """The training and test images of ``--datadir``; raises :class:`UserError` if ``peers`` have different ones."""
    if not args.datadir:
        raise UserError("no data: give --datadir (class folders, TFRecord or tar shards) or --fake-data", USAGE)
    spare = getattr(args, "output_dir", "") or getattr(args, "checkpoint_dir", "")
    found = storage.entries(args.datadir)
    train, test = (find(args.datadir, split, spare, peers, found) for split in ("train", "test"))
    check_alike(peers, "training images", train.fingerprint())
    check_alike(peers, "test images", test.fingerprint())
    if peers.processes > 1:
        check_alike(peers, "contents and labels of some training images", train.sample())
        check_alike(peers, "contents and labels of some test images", test.sample())
    return train, test


def fingerprints(train: Images, test: Images) -> dict[str, str]:
    """Return values that are equal for equal data sets, wherever they are, by a name for messages."""
    return {"training images": train.fingerprint(), "test images": test.fingerprint(),
            "contents or labels of training images": train.sample(),
            "contents or labels of test images": test.sample()}  # fmt: skip


def _class_names(folder: str, found: dict[str, Entry] | None = None) -> list[str]:
    found = storage.entries(folder) if found is None else found
    return [name for name, entry in found.items() if entry.folder and not name.startswith(".")]


def _open(
    place: Place,
    datadir: str,
    found: dict[str, Entry],
    spare: str,
    peers: Peers,
    classes: list[str] | None = None,
) -> Images:
    """The images in ``place``; ``found`` is the contents of ``datadir``, ``classes`` are those of the training."""
    folder, names = place
    contents = found if folder == datadir else storage.entries(folder)
    shards = names or [name for name in contents if index.kind_of(name)]
    chosen = [name for name in shards if name.endswith(".tar")] or shards
    opened: Images
    if chosen:
        opened = _Shards(folder, index.load(folder, contents, chosen, spare, peers))
    else:
        own = _class_names(folder, contents)
        unknown = set(own) - set(own if classes is None else classes)
        listed = storage.names_of([paths.join(folder, name) for name in own])
        if unknown:
            raise UserError(
                f"{folder}: has the class {min(unknown)}, which the training images lack; add its folder there, or"
                " remove it here", USAGE)  # fmt: skip
        opened = _ClassFolders(folder, own if classes is None else classes, own, listed)
        if classes is None and opened.count and len(set(opened.labels.tolist())) < len(own):
            empty = paths.join(folder, own[int(np.bincount(opened.labels, minlength=len(own)).argmin())])
            raise UserError(f"{empty}: has no images ({', '.join(_SUFFIXES)}); add some, or remove the folder")
    if not opened.count:
        raise UserError(f"{folder}: has no images: neither <class>/*.jpg, nor *.tar, nor *.tfrecord")
    return opened


# --- pixels ---------------------------------------------------------------------------------------------------


def uniform(count: int, columns: int, *key: int) -> np.ndarray:
    """Random ``float64[count, columns]`` in [0, 1) that depend on the integers ``key`` only."""
    return (order.random_bits(count * columns, *key) >> np.uint64(11)).reshape(count, columns) * 2.0**-53


def random_box(chance: np.ndarray, width: int, height: int, least_area: float, mirror: bool = True) -> Box:
    """A random crop as for Inception (https://arxiv.org/abs/1409.4842): ``least_area`` to 1 of the area, aspect ratio
    from 3/4 to 4/3, with ``mirror`` mirrored half the time.

    ``chance`` has five numbers in [0, 1): for area, ratio, left, upper and mirroring.
    """
    area = width * height * (least_area + chance[0] * (1 - least_area))
    ratio = math.exp((2 * chance[1] - 1) * math.log(4 / 3))
    wide, high = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, upper = chance[2] * (width - wide), chance[3] * (height - high)
    box = (left, upper, left + wide, upper + high)
    return (box[2], box[1], box[0], box[3]) if mirror and chance[4] < 0.5 else box


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
            pixels = np.asarray(_colour(image).resize((side, side), Image.Resampling.BILINEAR, box))
    except UnidentifiedImageError:  # whose message is the address of a Python object
        raise Damaged(f"{where}: is no readable image (of an unknown format, or empty); replace or remove it") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Damaged(f"{where}: is no readable image ({error}); replace or remove it") from None
    return mirrored(pixels) if mirror else pixels


def _colour(image: Any) -> Any:
    """The Pillow ``image`` in the mode RGB."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits of grey, as of medical scans: Pillow would make all above 255 white
        from PIL import Image

        image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # without this step, Pillow prints a warning
    return image.convert("RGB")


# --- the frame header of a JPEG, without decoding the image -----------------------------------------------------------

# Markers and headers: ITU-T T.81, annex B, https://www.w3.org/Graphics/JPEG/itu-t81.pdf
_FRAMES = (0xC0, 0xC1, 0xC2)  # start of a Huffman-coded frame: baseline, extended, progressive
_OTHER_FRAMES = {*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic; the rest are tables
_ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a segment: TEM, RST0 to RST7, SOI
_IMAGE_OR_END = (0xDA, 0xD9)


@dataclass(frozen=True)
class Frame:
    """The frame header of a JPEG: the image's size in pixels and its components: 1 grey, 3 colour, 4 CMYK."""

    width: int
    height: int
    components: int


def frame(content: bytes) -> Frame | None:
    """The frame header in ``content``; None if it is no 8-bit Huffman-coded JPEG with its height in the header."""
    at = 2
    if content[:2] != b"\xff\xd8":
        return None
    while at + 10 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker in _FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", content, at + 4)
            return Frame(width, height, components) if precision == 8 and height and width else None
        if marker in _OTHER_FRAMES or marker in _IMAGE_OR_END:
            return None
        if marker == 0xFF:  # padding
            at += 1
        else:
            at += 2 if marker in _ALONE else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return None


# --- loading -------------------------------------------------------------------------------------------------------

Decode = Callable[[bytes, str, int, Callable[[int, int], Box]], np.ndarray]


class _Batch:
    """A batch that is being filled: it is ready when all its images are, or when one failed."""

    def __init__(self, numbers: np.ndarray, side: int) -> None:
        self.numbers = numbers
        self.pixels = np.empty((len(numbers), side, side, 3), np.uint8)
        self.pixels[numbers < 0] = 0
        self.labels = np.full(len(numbers), -1, np.int64)
        self.left = int((numbers >= 0).sum())
        self.error: BaseException | None = None
        self.ready, self.lock = threading.Event(), threading.Lock()
        if not self.left:
            self.ready.set()

    def done(self, count: int) -> None:
        """Count ``count`` images that are in place."""
        with self.lock:
            self.left -= count
            if not self.left:
                self.ready.set()

    def fail(self, error: BaseException) -> None:
        """Make :meth:`result` raise ``error``."""
        self.error = self.error or error
        self.ready.set()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and labels, as soon as they are complete."""
        self.ready.wait()
        if self.error:
            raise self.error
        return self.pixels, self.labels


class Loader:
    """Reads with ``readers`` threads, decodes with ``workers`` threads, ``ahead`` batches in advance.

    Reading waits and decoding computes (decoders release the GIL), so their numbers are independent: by default
    :data:`READERS` for remote storage, and as many readers as workers for local files. ``decode`` is that of this
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
        """Pixels ``uint8[n, side, side, 3]`` and labels ``int64[n]`` of the image numbers of each array in ``plan``.

        ``choose(image number, width, height)`` returns the box. Image number -1 is padding: black, with label -1. A
        damaged image is replaced by the next one of the data set; with ``replace`` false it becomes padding.
        """
        waiting: deque[_Batch] = deque()
        closed = threading.Event()

        def guarded(batch: _Batch, work: Callable[..., None], *arguments: object) -> None:
            try:
                if not closed.is_set() and not batch.error:
                    work(batch, *arguments)
            except BaseException as error:  # raised again in the thread that waits for the batch
                batch.fail(error)

        def read(batch: _Batch, places: np.ndarray) -> None:
            samples = self.images.read_many(batch.numbers[places].tolist())
            for start in range(0, len(samples), _LOCAL_GROUP):
                part = slice(start, start + _LOCAL_GROUP)
                self.pool.submit(guarded, batch, fill, places[part].tolist(), samples[part])

        def fill(batch: _Batch, places: list[int], samples: list[Sample | Damaged]) -> None:
            for place, sample in zip(places, samples, strict=True):
                self._place(batch, place, sample, side, choose, replace)
            batch.done(len(places))

        try:
            for numbers in plan:
                batch = _Batch(numbers, side)
                waiting.append(batch)
                for places in self.images.groups(numbers):
                    self.reading.submit(guarded, batch, read, places)
                if len(waiting) > self.ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            closed.set()

    def _place(
        self, batch: _Batch, place: int, sample: Sample | Damaged, side: int,
        choose: Callable[[int, int, int], Box], replace: bool,
    ) -> None:  # fmt: skip
        """Decode ``sample`` into its ``place`` of ``batch``, or the next image that is not damaged."""
        number = int(batch.numbers[place])
        while True:
            try:
                if isinstance(sample, Damaged):
                    raise sample
                content, label, where = sample
                batch.pixels[place] = self.decode(content, where, side, lambda w, h, n=number: choose(n, w, h))  # type: ignore[misc]
                batch.labels[place] = label
                return
            except Damaged as error:
                self._skip(number, error)
            if not replace:
                batch.pixels[place] = 0
                return
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

    def all(self, side: int, share: float = 1.0, replace: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """All images, or their centers if ``share`` < 1: pixels ``uint8[n, side, side, 3]``, labels ``int64[n]``.

        ``replace`` is that of :meth:`batches`.
        """
        plan = np.array_split(np.arange(self.images.count), max(1, self.images.count // 64))

        def choose(number: int, width: int, height: int) -> Box:
            return (0, 0, width, height) if share == 1 else centre_box(width, height, share)

        pixels, labels = zip(*self.batches(plan, side, choose, replace), strict=True)
        return np.concatenate(pixels), np.concatenate(labels)
