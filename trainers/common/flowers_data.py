"""Give the flowers trainers their data: all images, decoded once into one array, and random boxes to crop."""

from __future__ import annotations

import argparse

import numpy as np

from trainers.common import images, order
from trainers.common.arguments import Parser, add, integer, number
from trainers.common.mnist import random_bits
from trainers.common.order import ALONE, Peers

_FAKE_CLASSES = 5


def options(parser: Parser) -> None:
    """Add the options of these data, and of what a step does with them."""
    learn, data = parser.learning, parser.data
    add(learn, "--image-size", 128, "pixels on each side of the network's input", type=integer(16))
    add(data, "--num-workers", 4, "threads that decode images", type=integer(1))
    add(data, "--fake-images", 3670, "training images of --fake-data; a tenth as many for the test", type=integer(1))
    add(learn, "--least-area", 0.35, "smallest fraction of an image that a random crop covers", type=number(0.05, 1))
    add(learn, "--label-smoothing", 0.1, "fraction of the target spread over all classes", type=number(0, 0.9))
    add(learn, "--weights", "", "file of pretrained weights to start from; default: random weights")


class Data:
    """Hold the data set in memory: per split, images ``uint8[n, side, side, 3]`` and labels ``int64[n]``.

    ``fingerprints`` do not depend on the side. Raises :class:`UserError` if there is no data, or if another of the
    ``peers`` has other data.
    """

    def __init__(self, args: argparse.Namespace, peers: Peers = ALONE) -> None:
        self.args = args
        side = round(args.image_size * 1.15)  # a crop of 3/4 of the area is not enlarged
        if args.fake_data:
            self.classes = [str(label) for label in range(_FAKE_CLASSES)]
            self.fingerprints = {"training images": f"{args.fake_images} fake ones"}
            self.images, self.labels = _fake(args.fake_images, side, args.seed, 1)
            self.test_images, self.test_labels = _fake(max(1, args.fake_images // 10), side, args.seed, 2)
            return
        train, test = images.find_both(args, peers)
        self.fingerprints = images.fingerprints(train, test)
        self.images, self.labels = images.Loader(train, args.num_workers).all(side)
        self.test_images, self.test_labels = images.Loader(test, args.num_workers).all(side, replace=False)
        most = int(max(self.labels.max(), self.test_labels.max()))
        self.classes = train.classes or [str(label) for label in range(most + 1)]

    def train_rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of ``epoch`` in order: image and label ``int64[n, 2]``, and boxes ``float32[n, 4]``.

        A box is upper, lower, left, right as fractions of the side; left > right mirrors. The result depends on seed
        and epoch only, and each step uses its rows of it.
        """
        count = len(self.labels)
        chosen = order.permutation(count, self.args.seed, epoch)
        chances = images.uniform(count, 5, self.args.seed, epoch, 1)
        boxes = np.array([images.random_box(chance, 1, 1, self.args.least_area) for chance in chances], np.float32)
        return np.column_stack([chosen, self.labels[chosen]]), boxes[:, [1, 3, 0, 2]]

    def test_rows(self, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return every test image once, as ``int64[batches, global_batch, 2]``, and boxes; label -1 is padding."""
        indices, mask = order.padded_batches(len(self.test_labels), global_batch)
        boxes = np.tile(np.array([0, 1, 0, 1], np.float32), (*indices.shape, 1))
        return np.stack([indices, np.where(mask, self.test_labels[indices], -1)], axis=-1), boxes


def _fake(count: int, side: int, seed: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    bits = random_bits(count * side * side * 3 // 8 + 1, seed, split)
    pixels = bits.view(np.uint8)[: count * side * side * 3].reshape(count, side, side, 3)
    return pixels, (random_bits(count, seed, split, 1) % _FAKE_CLASSES).astype(np.int64)
