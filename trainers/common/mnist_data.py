"""The data of the MNIST trainers: MNIST's IDX files (gzipped or not), a download, or fake data.

IDX: two zero bytes, a type code (8: unsigned byte), the number of dimensions, each dimension as a big-endian 32-bit
integer, then the bytes: https://yann.lecun.org/exdb/mnist/
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import math
import os
import shutil
import struct
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from trainers.common import order, paths
from trainers.common.exits import USAGE, UserError
from trainers.common.flags import Flag, integer, number

SIDE = 28
CLASSES = 10
FLAGS = (
    Flag("download", None, None, "download MNIST if it is not in --datadir; default: only without --datadir",
         "data"),
    Flag("fake-images", integer(1), 60000, "training images of --fake-data; a sixth as many for the test", "data"),
    Flag("shift", integer(0), 2, "shift training images by up to this many pixels at random", "training"),
    Flag("weight-decay", number(0), 0.0, "on kernels and matrices", "training"),
)  # fmt: skip
_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_MD5 = {  # as in https://github.com/pytorch/vision/blob/main/torchvision/datasets/mnist.py
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
Split = tuple[np.ndarray, np.ndarray]


def load(args: argparse.Namespace) -> tuple[Split, Split]:
    """Training and test data, each images ``uint8[n, 28, 28]`` and labels ``int64[n]``.

    Fake data is random and depends on the seed only. Raises :class:`UserError` if files are missing or invalid.
    """
    if args.fake_data:
        test = max(1, args.fake_images // 6)
        return _fake(args.fake_images, args.seed, 1), _fake(test, args.seed, 2)
    folder = args.datadir or os.path.join(os.path.expanduser("~"), ".cache", "trainyard", "mnist")
    if args.download or (args.download is None and not args.datadir):
        fetch(folder, _MIRRORS, _MD5)
    train, test_split = load_mnist(folder, "train"), load_mnist(folder, "test")
    for images, labels in (train, test_split):
        if images.shape[1:] != (SIDE, SIDE) or labels.max() >= CLASSES:
            raise UserError(
                f"{folder}: {images.shape[1]}x{images.shape[2]} images with labels up to {labels.max()}; this trainer"
                f" takes {SIDE}x{SIDE} and {CLASSES} classes",
                USAGE,
            )
    return (train[0], train[1].astype(np.int64)), (test_split[0], test_split[1].astype(np.int64))


def _fake(count: int, seed: int, split: int) -> Split:
    bits = order.random_bits(count * (SIDE * SIDE // 8 + 1), seed, split)
    pixels = bits[:-count].view(np.uint8).reshape(count, SIDE, SIDE)
    return pixels, (bits[-count:] % CLASSES).astype(np.int64)


def padded(images: np.ndarray, most: int) -> np.ndarray:
    """``images`` with a black border of ``most`` pixels, for shifts of 0 to ``2*most``."""
    return np.pad(images, ((0, 0), (most, most), (most, most)))


def train_rows(labels: np.ndarray, args: argparse.Namespace, epoch: int) -> np.ndarray:
    """The samples of ``epoch`` in order: ``int64[n, 4]`` of image, row offset, column offset, label.

    The result depends on the arguments only, and each step uses its rows of it.
    """
    chosen = order.permutation(len(labels), args.seed, epoch)
    return np.column_stack([chosen, order.shifts(len(labels), args.shift, args.seed, epoch, 1), labels[chosen]])


def test_batches(labels: np.ndarray, shift: int, global_batch: int) -> np.ndarray:
    """Every test image once, centered: ``int64[batches, global_batch, 4]`` as for training; label -1 is padding."""
    indices, mask = order.padded_batches(len(labels), global_batch)
    centred = np.full_like(indices, shift)
    return np.stack([indices, centred, centred, np.where(mask, labels[indices], -1)], axis=-1)


# --- IDX files ---------------------------------------------------------------------------------------------------


def read_idx(path: str) -> np.ndarray:
    """The array in the IDX file ``path``; raises :class:`UserError` if it is damaged or not an IDX file of bytes."""
    content = b""
    try:
        with paths.open_file(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            head = unpacked.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
                raise UserError(f"{path}: is not an IDX file of unsigned bytes")
            sides = unpacked.read(4 * head[3])
            if len(sides) < 4 * head[3]:
                raise UserError(f"{path}: ends within the header; download it again")
            shape = struct.unpack(f">{head[3]}I", sides)
            size = math.prod(shape)
            content = unpacked.read(size + 1)  # not all that a small gzip file may become
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); download it again") from None
    except (MemoryError, OverflowError):
        raise UserError(f"{path}: {size} bytes expected, which do not fit into memory") from None
    if len(content) != size:
        raise UserError(f"{path}: {size} bytes expected, {len(content)} found; download it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def load_mnist(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images ``uint8[n, rows, columns]`` and labels ``uint8[n]`` of ``split`` ("train" or "test") in ``folder``.

    Looks for MNIST's four file names, with or without ``.gz``, in ``folder`` and in its ``MNIST/raw``, where
    torchvision puts them. Raises :class:`UserError` if files are missing, damaged or inconsistent.
    """
    if not paths.is_folder(folder):
        raise UserError(f"{folder}: no such folder; --datadir must hold MNIST's four IDX files")
    arrays = []
    for name in FILES[split]:
        path = _find(folder, name)
        if not path:
            raise UserError(f"{folder}: no {name}[.gz] in it; --datadir must hold MNIST's four IDX files")
        arrays.append(read_idx(path))
    images, labels = arrays
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(images):
        raise UserError(f"{folder}: {split} images {images.shape} and labels {labels.shape} do not match")
    return images, labels


def _find(folder: str, name: str) -> str:
    for place in (folder, paths.join(folder, "MNIST", "raw")):
        present = paths.names(place)
        # Some mirrors have a dot instead of the dash before idx: train-images.idx3-ubyte.
        for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
            if candidate in present:
                return paths.join(place, candidate)
    return ""


# --- the download --------------------------------------------------------------------------------------------------

_MAX_ATTEMPTS = 3  # times each mirror is tried
_PAUSE = 2.0  # seconds before the second attempt, doubled for each further one
_TIMEOUT = 20.0  # seconds without data


def fetch(folder: str, mirrors: Sequence[str], md5: Mapping[str, str], pause: float = _PAUSE) -> None:
    """Download the files of ``md5`` (name to checksum) that ``folder`` lacks, from the first mirror that works.

    Any number of processes may call this at the same time: one downloads, the others wait. ``pause`` is in seconds.
    Raises :class:`UserError` with the last error if all mirrors fail.
    """
    paths.make_folder(folder)
    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, checksum in md5.items():
            path = os.path.join(folder, name)
            if not os.path.exists(path) and not os.path.exists(path.removesuffix(".gz")):
                _fetch_one(path, [mirror + name for mirror in mirrors], checksum, pause)


def _fetch_one(path: str, addresses: Sequence[str], checksum: str, pause: float) -> None:
    reason = ""
    for attempt in range(_MAX_ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        for address in addresses:
            try:
                print(f"Downloading {address}", file=sys.stderr)
                with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer, paths.atomic_file(path) as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
                    file.seek(0)
                    found = hashlib.md5(file.read()).hexdigest()
                    if found != checksum:
                        raise ValueError(f"its MD5 is {found}, not {checksum}")
                return
            except (urllib.error.URLError, OSError, ValueError) as error:
                reason = f"{address}: {getattr(error, 'reason', error)}"
    raise UserError(f"cannot download {os.path.basename(path)} ({reason}); put the data into --datadir, or use"
                    " --fake-data")  # fmt: skip
