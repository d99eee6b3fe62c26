"""What the ImageNet trainers train on: images decoded as they are needed, in an order that is a pure function."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np

from trainers.common import images, order
from trainers.common.exits import USAGE, UserError
from trainers.common.flags import Flag, number, sizes, whole

FLAGS = (
    Flag("image-size", whole(16), 224, "pixels on each side that the network sees", "data"),
    Flag("progressive", sizes, [], "train on these sizes one after the other, the last part of the epochs on"
         " --image-size: 128,160", "data"),
    Flag("num-classes", whole(2), 1000, "classes of the data", "data"),
    Flag("label-offset", whole(0), 0, "label of the first class: 1 for the usual ImageNet TFRecords", "data"),
    Flag("num-workers", whole(1), 8, "threads that decode images", "data"),
    Flag("prefetch-factor", whole(1), 4, "batches decoded in advance", "data"),
    Flag("fake-images", whole(1), 1_281_167, "training images of --fake-data; a twentieth tests", "data"),
    Flag("least-area", number(0.05, 1), 0.25, "smallest share of an image that a random crop keeps"),
    Flag("warmup-epochs", number(0), 5.0, "epochs in which the learning rate rises"),
    Flag("weight-decay", number(0), 5e-5, "on kernels and matrices"),
    Flag("label-smoothing", number(0, 0.9), 0.1, "share of the target spread over all classes"),
    Flag("mixup", number(0), 0.0, "alpha of mixup; 0: off"),
    Flag("cutmix", number(0), 0.0, "alpha of CutMix; 0: off; with --mixup one of them is drawn for each step"),
    Flag("ema", number(0, 0.99999), 0.0, "decay of the averaged weights that are tested and exported; 0: off"),
    Flag("accumulate", whole(1), 1, "batches whose gradients make one step"),
)  # fmt: skip
_FAKE_POOL = 64  # different fake images: enough to be no constant, few enough to take no time
Pixels = tuple[np.ndarray, np.ndarray]


class Data:
    """Training and test images: streams of pixels ``uint8[n, side, side, 3]`` and labels ``int64[n]``."""

    def __init__(
        self,
        args: argparse.Namespace,
        share: Callable[[np.ndarray], np.ndarray],
        decode: images.Decode = images.decode,
    ) -> None:
        """``share`` picks a process's rows of a global batch; ``decode`` may be a framework's own."""
        self.args, self.share = args, share
        if args.fake_data:
            self.count, self.test_count = args.fake_images, max(1, args.fake_images // 20)
            return
        if not args.datadir:
            raise UserError("no data: give --datadir (class folders, TFRecord or tar shards) or --fake-data", USAGE)
        train, test = images.find(args.datadir, "train"), images.find(args.datadir, "test")
        if len(train.classes) > args.num_classes:
            raise UserError(
                f"{args.datadir}: {len(train.classes)} class folders, but --num-classes {args.num_classes}", USAGE
            )
        self.count, self.test_count = train.count, test.count
        self.train_loader = images.Loader(train, args.num_workers, args.prefetch_factor, decode)
        self.test_loader = images.Loader(test, args.num_workers, args.prefetch_factor, decode)

    def side(self, epoch: int) -> int:
        """The image size of ``epoch``: ``--progressive``'s, then ``--image-size``, for equal parts of the epochs."""
        every = [*self.args.progressive, self.args.image_size]
        return every[(epoch - 1) * len(every) // self.args.epochs]

    def train(self, epoch: int, first_step: int, global_batch: int) -> Iterator[Pixels]:
        """This process's part of each batch of ``epoch`` from ``first_step`` on.

        Order and crops depend on seed and epoch alone: a run that resumes sees the very next batch.
        """
        chosen = order.permutation(self.count, self.args.seed, epoch)
        steps = range(first_step, self.count // global_batch)
        plan = (self.share(chosen[step * global_batch :][:global_batch]) for step in steps)
        if self.args.fake_data:
            return self._fake(plan, self.side(epoch))
        chances = images.uniform(self.count, 5, self.args.seed, epoch, 1)

        def choose(number: int, width: int, height: int) -> images.Box:
            return images.random_box(chances[number], width, height, self.args.least_area)

        return self._checked(self.train_loader.batches(plan, self.side(epoch), choose))

    def test(self, global_batch: int) -> Iterator[Pixels]:
        """This process's part of the test set, every image exactly once; label -1 is padding."""
        indices, mask = order.padded_batches(self.test_count, global_batch)
        plan = (self.share(batch) for batch in np.where(mask, indices, -1))
        if self.args.fake_data:
            return self._fake(plan, self.args.image_size)
        return self._checked(
            self.test_loader.batches(plan, self.args.image_size, lambda number, w, h: images.centre_box(w, h))
        )

    def _checked(self, batches: Iterator[Pixels]) -> Iterator[Pixels]:
        offset, classes = self.args.label_offset, self.args.num_classes
        for pixels, labels in batches:
            real = labels >= 0
            moved = np.where(real, labels - offset, -1)
            if (moved[real] < 0).any() or (moved >= classes).any():
                raise UserError(
                    f"labels from {labels[real].min()} to {labels.max()} with --label-offset {offset} and --num-classes"
                    f" {classes}: they must come out from 0 to {classes - 1}", USAGE)  # fmt: skip
            yield pixels, moved

    def _fake(self, plan: Iterator[np.ndarray], side: int) -> Iterator[Pixels]:
        size = side * side * 3
        bits = order.random_bits(_FAKE_POOL * size // 8 + 1, self.args.seed, side)
        pool = bits.view(np.uint8)[: _FAKE_POOL * size].reshape(_FAKE_POOL, side, side, 3)
        for numbers in plan:
            yield pool[numbers % _FAKE_POOL], np.where(numbers >= 0, numbers % self.args.num_classes, -1)

    def mask(self, epoch: int, step: int, side: int) -> np.ndarray:
        """How much of each pixel stays in this step, ``float32[side, side]``; the rest comes from the next image.

        One number everywhere for mixup (Zhang et al. 2017), a rectangle of zeros for CutMix (Yun et al. 2019), ones
        without either; the label keeps the mean.
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
