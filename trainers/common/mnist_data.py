"""The data of the MNIST trainers: IDX files, a download, or fake data."""

from __future__ import annotations

import argparse
import os

import numpy as np

from trainers.common import download, idx, order
from trainers.common.exits import USAGE, UserError
from trainers.common.flags import Flag, integer

SIDE = 28
CLASSES = 10
FLAGS = (
    Flag("download", None, None, "download MNIST if it is not in --datadir; default: only without --datadir",
         "data"),
    Flag("fake-images", integer(1), 60000, "training images of --fake-data; a sixth as many for the test", "data"),
    Flag("shift", integer(0), 2, "shift training images by up to this many pixels at random", "training"),
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
        download.fetch(folder, _MIRRORS, _MD5)
    train, test_split = idx.load_mnist(folder, "train"), idx.load_mnist(folder, "test")
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
