"""MNIST in PyTorch: a small convolutional network, with the data set as one tensor on the device.

    python -m trainers.torch.mnist --datadir FOLDER --epochs 5

FOLDER holds MNIST's four IDX files, gzipped or not.
"""

from __future__ import annotations

from trainers.common import flags, mnist_data
from trainers.torch._flags import FLAGS

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in PyTorch.", (*FLAGS, *mnist_data.FLAGS))

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainers.common.checkpoints import State
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine
from trainers.torch import _checkpoint, _device, _export, _launch, _select
from trainers.torch._device import Device


def network() -> nn.Sequential:
    """Logits ``[n, 10]`` of images ``[n, 1, 28, 28]``: two 5x5 convolutions, pooled before the ReLU (a quarter of
    the work, the same result), and two linear layers. No dropout and no batch norm, so no randomness and no state."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, mnist_data.CLASSES),
    )


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """``uint8[n, 28, 28]`` as ``float[n, 1, 28, 28]`` normalized to mean 0 and deviation 1 over MNIST."""
    return ((pixels.float() / 255 - 0.1307) / 0.3081).unsqueeze(1)


def gather_crops(images: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The crops ``uint8[n, 28, 28]`` that ``batch`` lists, as rows of image, row offset, column offset and label."""
    side = torch.arange(mnist_data.SIDE, device=batch.device)
    image, row, column = batch[:, 0], batch[:, 1, None] + side, batch[:, 2, None] + side
    return images[image[:, None, None], row[:, :, None], column[:, None, :]]


class Served(nn.Module):
    """The exported model: probabilities ``[n, 10]`` of raw images ``uint8[n, 28, 28]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(normalised(images)).softmax(dim=1)


class Trainer:
    """Model, optimizer and data on a device, with the training step and the test."""

    network = staticmethod(network)  # override this in a subclass to train another model

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        self.args, self.device = args, device
        (images, self.labels), (test_images, self.test_labels) = mnist_data.load(args)
        self.images = device.put(mnist_data.padded(images, args.shift))
        self.test_images = device.put(mnist_data.padded(test_images, args.shift))
        self.model = device.place(self.network())
        self.parallel = device.parallel(self.model)
        self.optimizer = device.sgd(self.model.parameters(), args.momentum)
        # The last loss, or the first that was not finite: kept on the device, read only when it is logged.
        self.loss = device.put(torch.zeros(1))
        self._train: Callable[[torch.Tensor], None] = self._train_eagerly

    def prepare(self) -> None:
        """Capture the training step where the device supports it; not counted as training time."""
        example = self.device.put(np.zeros((self.args.batch_size, 4), np.int64))
        changed = [*_device.trained(self.model, self.optimizer), self.loss]
        self._train = self.device.capture_graph(self._train_eagerly, changed, [example])

    def step(self, batch: torch.Tensor, learning_rate: float) -> None:
        """Train on ``batch`` (see :func:`mnist_data.train_rows`)."""
        _device.set_learning_rate(self.optimizer, learning_rate)
        self._train(batch)
        self.device.end_step()

    def _train_eagerly(self, batch: torch.Tensor) -> None:
        with self.device.autocast():
            logits = self.parallel(normalised(gather_crops(self.images, batch)))
        loss = F.cross_entropy(logits.float(), batch[:, 3])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(torch.where(torch.isfinite(self.loss), loss.detach(), self.loss))

    @torch.no_grad()
    def test(self, run: Run) -> tuple[float, int, float]:
        """Correct answers, images and the sum of losses over the test set, every image exactly once."""
        global_batch = self.args.test_batch_size * self.device.replicas
        sums = self.device.put(torch.zeros(2))
        for rows in run.testing(mnist_data.test_batches(self.test_labels, self.args.shift, global_batch)):
            batch = self.device.put_batch(rows)
            with self.device.autocast():
                logits = self.model(normalised(gather_crops(self.test_images, batch)))
            labels = batch[:, 3]
            correct = (logits.argmax(dim=1) == labels).sum()
            loss = F.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="sum")
            sums = sums + torch.stack([correct.float(), loss])
            self.device.end_step()
        correct, loss = self.device.sum(sums)
        return correct, len(self.test_labels), loss

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        return self.device.to_cpu({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        self.device.load(self.model, self.optimizer, state)


def main(args: argparse.Namespace, kind: type[Trainer] = Trainer, name: str = "torch.mnist") -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _select.find(args)
    trainer = kind(args, device)
    with Run(name, args, device, len(trainer.labels)) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        trainer.prepare()
        for epoch in run.epochs():
            with run.meter.training(), run.meter.waiting():
                rows = mnist_data.train_rows(trainer.labels, args, epoch)
            for step in run.steps():
                with run.meter.waiting():
                    batch = device.put_batch(rows[step * run.global_batch :][: run.global_batch])
                learning_rate = warmup_cosine(run.global_step, run.total_steps, args.lr)
                trainer.step(batch, learning_rate)
                run.log(step, trainer.loss.item, learning_rate)
            if not run.ended:
                run.tested(*trainer.test(run))
        if device.chief and args.export_dir and run.ended in ("", "reached"):
            served = Served(trainer.model.to("cpu", memory_format=torch.contiguous_format)).eval()
            example = torch.zeros(2, mnist_data.SIDE, mnist_data.SIDE, dtype=torch.uint8)
            run.exported(args.export_dir, _export.write(served, example, args.export_dir))
        code = run.finish(_device.weights_sha256(trainer.model))
    device.close(args)
    return code


if __name__ == "__main__":
    _launch.main(main, ARGS, "mnist")
