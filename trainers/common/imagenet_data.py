"""Give the ImageNet trainers their data: images decoded while training, in an order that depends on seed and epoch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Generator, Iterator

import numpy as np

from trainers.common import images, order
from trainers.common.arguments import Parser, add, integer, number
from trainers.common.files import USAGE, UserError
from trainers.common.mnist import random_bits
from trainers.common.order import ALONE, Peers

_FAKE_POOL = 64  # distinct fake images: few, so that creating them is fast
Pixels = tuple[np.ndarray, np.ndarray]


def sizes(text: str) -> list[int]:
    """Return the sides in pixels that ``text`` lists: ``128,160,192``; raises ``ArgumentTypeError``."""
    if not re.fullmatch(r"\d+(,\d+)*", text) or min(map(int, text.split(","))) < 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes of at least 8 such as 128,160")
    return [int(side) for side in text.split(",")]


def options(parser: Parser) -> None:
    """Add the options of these data, and of what a step does with them."""
    learn, data = parser.learning, parser.data
    add(learn, "--image-size", 224, "pixels on each side of the network's input", type=integer(16))
    add(learn, "--progressive", [], "train on these sizes, such as 128,160, then on --image-size, for an equal number"
        " of epochs each", type=sizes)  # fmt: skip
    add(learn, "--num-classes", 1000, "classes of the data", type=integer(2))
    add(learn, "--label-offset", 0, "label of the first class: 1 for the usual ImageNet TFRecords", type=integer(0))
    add(data, "--num-workers", 8, "threads that decode images; others read", type=integer(1))
    add(learn, "--shuffle-block", 1, "shuffle runs of this many consecutive images, each read with one request: 16 or"
        " more for shards at gs:// that are shuffled themselves; 1 shuffles single images",
        type=integer(1))  # fmt: skip
    add(data, "--prefetch-factor", 4, "batches decoded in advance", type=integer(1))
    add(data, "--fake-images", 1_281_167, "training images of --fake-data; a twentieth as many to test",
        type=integer(1))  # fmt: skip
    add(learn, "--least-area", 0.25, "smallest fraction of an image that a random crop covers", type=number(0.05, 1))
    add(learn, "--mirror", True, "mirror half of the training images; not for digits, letters or hands")
    add(learn, "--warmup-epochs", 5.0, "epochs in which the learning rate rises", type=number(0))
    add(learn, "--label-smoothing", 0.1, "fraction of the target spread over all classes", type=number(0, 0.9))
    add(learn, "--mixup", 0.0, "alpha of mixup; 0: off", type=number(0))
    add(learn, "--cutmix", 0.0, "alpha of CutMix; 0: off; with --mixup, each step uses one of the two", type=number(0))
    add(learn, "--ema", 0.0, "decay of the averaged weights, which are tested and exported; 0: off",
        type=number(0, 0.99999))  # fmt: skip
    add(learn, "--accumulate", 1, "batches per step, whose gradients are accumulated", type=integer(1))


class Data:
    """Decode training and test images into streams of pixels ``uint8[n, side, side, 3]`` and labels ``int64[n]``."""

    def __init__(
        self,
        args: argparse.Namespace,
        share: Callable[[np.ndarray], np.ndarray],
        decode: images.Decode = images.decode,
        peers: Peers = ALONE,
    ) -> None:
        """Find the images. ``share`` returns this process's rows of a global batch; ``decode`` may be a framework's;
        ``peers`` make the index of shards together, and must have the same data.

        Raises :class:`UserError` if there is no data, more class folders than ``--num-classes``, or other data in
        another process.
        """
        self.args, self.share = args, share
        self.classes: list[str] = []  # their names, if the data has them
        if args.fake_data:
            self.count, self.test_count = args.fake_images, max(1, args.fake_images // 20)
            self.fingerprints = {"training images": f"{self.count} fake ones"}
            return
        train, test = images.find_both(args, peers)
        if len(train.classes) > args.num_classes:
            raise UserError(
                f"{args.datadir}: {len(train.classes)} class folders, but --num-classes {args.num_classes}", USAGE
            )
        self.fingerprints = images.fingerprints(train, test)
        self.count, self.test_count, self.classes = train.count, test.count, train.classes
        self.train_loader = images.Loader(train, args.num_workers, args.prefetch_factor, decode)
        self.test_loader = images.Loader(test, args.num_workers, args.prefetch_factor, decode)

    def side(self, epoch: int) -> int:
        """Return the side of images in ``epoch``, in pixels: of --progressive, then --image-size, in equal parts."""
        every: list[int] = [*self.args.progressive, self.args.image_size]
        epochs: int = self.args.epochs
        return every[(epoch - 1) * len(every) // epochs]

    def train(self, epoch: int, first_step: int, global_batch: int) -> Generator[Pixels]:
        """Yield this process's part of each batch of ``epoch``, starting with ``first_step``.

        Order and crops depend on seed and epoch only, so a resumed run continues with the next batch.
        """
        chosen = order.block_permutation(self.count, self.args.seed, epoch, self.args.shuffle_block)
        steps = range(first_step, self.count // global_batch)
        plan = (self.share(chosen[step * global_batch :][:global_batch]) for step in steps)
        if self.args.fake_data:
            return self._fake(plan, self.side(epoch))
        chances = images.uniform(self.count, 5, self.args.seed, epoch, 1)

        def choose(number: int, width: int, height: int) -> images.Box:
            return images.random_box(chances[number], width, height, self.args.least_area, self.args.mirror)

        return self._checked(self.train_loader.batches(plan, self.side(epoch), choose))

    def test(self, global_batch: int) -> Generator[Pixels]:
        """Yield this process's part of the test set, every image exactly once; label -1 is padding."""
        indices, mask = order.padded_batches(self.test_count, global_batch)
        plan = (self.share(batch) for batch in np.where(mask, indices, -1))
        if self.args.fake_data:
            return self._fake(plan, self.args.image_size)
        return self._checked(
            self.test_loader.batches(
                plan, self.args.image_size, lambda number, w, h: images.centre_box(w, h), replace=False
            )
        )

    def _checked(self, batches: Iterator[Pixels]) -> Generator[Pixels]:
        offset, classes = self.args.label_offset, self.args.num_classes
        for pixels, labels in batches:
            real = labels >= 0
            moved = np.where(real, labels - offset, -1)
            if (moved[real] < 0).any() or (moved >= classes).any():
                raise UserError(
                    f"labels from {labels[real].min()} to {labels.max()} with --label-offset {offset} and --num-classes"
                    f" {classes}: the difference must be from 0 to {classes - 1}", USAGE)  # fmt: skip
            yield pixels, moved

    def _fake(self, plan: Iterator[np.ndarray], side: int) -> Generator[Pixels]:
        size = side * side * 3
        bits = random_bits(_FAKE_POOL * size // 8 + 1, self.args.seed, side)
        pool = bits.view(np.uint8)[: _FAKE_POOL * size].reshape(_FAKE_POOL, side, side, 3)
        for numbers in plan:
            yield pool[numbers % _FAKE_POOL], np.where(numbers >= 0, numbers % self.args.num_classes, -1)

    def mask(self, epoch: int, step: int, side: int) -> np.ndarray:
        """Return the weight of each pixel in a step, ``float32[side, side]``; the rest comes from the next image.

        One number for mixup (https://arxiv.org/abs/1710.09412), a rectangle of zeros for CutMix
        (https://arxiv.org/abs/1905.04899), else ones. The weight of the label is the mean of the mask.
        """
        kinds = [name for name in ("mixup", "cutmix") if getattr(self.args, name)]
        mask = np.ones((side, side), np.float32)
        if not kinds:
            return mask
        chance = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.args.seed, epoch, step, 2))))
        kind = kinds[int(chance.integers(len(kinds)))]
        keep = chance.beta(getattr(self.args, kind), getattr(self.args, kind))
        if kind == "mixup":
            return mask * np.float32(keep)
        half, (row, column) = side * np.sqrt(1 - keep) / 2, chance.integers(side, size=2)
        upper, left = (max(0, round(middle - half)) for middle in (row, column))
        mask[upper : round(row + half), left : round(column + half)] = 0
        return mask
