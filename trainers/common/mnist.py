"""Read MNIST's four IDX files, gzipped or not, and put their images in order.

IDX: two zero bytes, a type (8: unsigned byte), the number of dimensions, each of them as a big-endian 32-bit integer,
then the bytes. https://yann.lecun.org/exdb/mnist/
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import math
import struct
import zlib

import numpy as np

from trainers.common import files
from trainers.common.files import USAGE, UserError

SIDE, CLASSES = 28, 10
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def random_bits(count: int, *key: int) -> np.ndarray:
    """Return ``count`` random uint64 that depend on ``key`` only.

    NumPy keeps the stream of its generators, but not its distributions:
    https://numpy.org/neps/nep-0019-rng-policy.html
    """
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def order(count: int, shift: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples of ``epoch`` in random order, each with offsets from 0 to 2 ``shift``: ``int64[count, 3]``."""
    offsets = random_bits(2 * count, seed, epoch, 1) % np.uint64(2 * shift + 1)
    return np.column_stack([np.argsort(random_bits(count, seed, epoch), kind="stable"), offsets.reshape(count, 2)]
                           ).astype(np.int64)  # fmt: skip


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Return the number of full batches in ``count`` samples; raises :class:`UserError` if there is none."""
    if count < global_batch:
        raise UserError(f"the {count} training images do not fill one step of {global_batch}: lower --batch-size or use"
                        " fewer devices")  # fmt: skip
    return count // global_batch


def load(args: argparse.Namespace) -> tuple[list[np.ndarray], dict[str, str]]:
    """Return images ``uint8[n, 28, 28]`` and labels ``int64[n]`` to train on, those to test on, and fingerprints.

    Raises :class:`UserError` without data, or if a file is damaged.
    """
    arrays = _load(args)
    names = ("images", "labels", "test images", "test labels")
    digests = (hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in arrays)
    return arrays, dict(zip(names, digests, strict=True))


def _load(args: argparse.Namespace) -> list[np.ndarray]:
    if args.fake_data:
        counts = [args.fake_images, max(1, args.fake_images // 6)]
        made = [random_bits(count * (SIDE * SIDE // 8 + 1), args.seed, n + 1) for n, count in enumerate(counts)]
        return [array for bits, count in zip(made, counts, strict=True) for array in (
            bits[:-count].view(np.uint8).reshape(count, SIDE, SIDE), (bits[-count:] % CLASSES).astype(np.int64)
        )]  # fmt: skip
    if not args.datadir:
        raise UserError("--datadir: where are MNIST's four IDX files? Give their folder, or --fake-data", USAGE)
    return [array for split in FILES for array in read_split(args.datadir, split)]


def read_split(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of ``split`` ("train", "test") in ``folder``, or in its MNIST/raw; see :func:`load`."""
    images, labels = (read_idx(_find(folder, name)) for name in FILES[split])
    if images.shape != (len(labels), SIDE, SIDE) or labels.ndim != 1 or not len(labels) or labels.max() >= CLASSES:
        raise UserError(f"{folder}: {split} images {images.shape} and labels {labels.shape} are not {SIDE}x{SIDE}"
                        f" images of {CLASSES} classes", USAGE)  # fmt: skip
    return images, labels.astype(np.int64)


def _find(folder: str, name: str) -> str:
    for place in (folder, files.join(folder, "MNIST", "raw")):  # the latter is torchvision's
        present = files.names(place)
        for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):  # some mirrors have a dot
            if candidate in present:
                return files.join(place, candidate)
    raise UserError(f"{folder}: no {name}[.gz] in it; --datadir must hold MNIST's four IDX files")


def read_idx(path: str) -> np.ndarray:
    """Return the array in the IDX file ``path``; raises :class:`UserError` if it is damaged or has no bytes."""
    try:
        with files.open_file(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            head = unpacked.read(4)
            if head[:3] != b"\0\0\x08" or head[3:] not in (b"\1", b"\2", b"\3", b"\4"):
                raise ValueError("it is not an IDX file of unsigned bytes")
            shape = struct.unpack(f">{head[3]}I", unpacked.read(4 * head[3]))
            content = unpacked.read(math.prod(shape) + 1)  # not all that a small gzip file may become
            return np.frombuffer(bytearray(content), np.uint8).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError, MemoryError, OverflowError) as error:
        raise UserError(f"{path}: damaged ({error or type(error).__name__}); get it again") from None
