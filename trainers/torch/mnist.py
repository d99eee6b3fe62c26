# ruff: noqa: E402
"""MNIST in PyTorch: a small network, with the data set as one tensor on the device.

    python -m trainers.torch.mnist --datadir FOLDER --epochs 5
    python -m trainers.torch.mnist --datadir FOLDER --epochs 30 --model vit --optimizer adamw --clip-norm 1

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, mnist_data, order

MODEL = flags.Flag("model", flags.one_of("cnn", "small", "vit"), "cnn", "cnn: two convolutions, 0.2 million weights;"
                   " small: two with batch normalization, 18,000 weights, learns in the fewest steps; vit: a vision"
                   " transformer of torchvision's, 0.1 million weights")  # fmt: skip

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in PyTorch.", (*flags.TORCH, *mnist_data.FLAGS, MODEL), adamw_lr=3e-3)

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainers.common.run import Run
from trainers.torch import _device, _export
from trainers.torch._device import Device

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels from 0 to 1


def network(args: argparse.Namespace) -> nn.Module:
    """Logits ``[n, 10]`` of images ``[n, 1, 28, 28]``: the model of ``--model``."""
    return {"cnn": cnn, "small": small, "vit": vit}[args.model]()


def cnn() -> nn.Sequential:
    """Two 5x5 convolutions, pooled before the ReLU (a quarter of the work, the same result), and two linear layers."""
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


def small() -> nn.Sequential:
    """Two 5x5 convolutions, each pooled and batch-normalized before its ReLU, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, mnist_data.CLASSES),
    )


def vit() -> nn.Module:
    """A vision transformer of 16 patches, four layers and 10 % dropout."""
    try:
        from torchvision.models import VisionTransformer
    except ImportError as error:
        raise exits.UserError(f"--model vit needs torchvision of torch's own index: {error}") from None
    model = VisionTransformer(
        image_size=mnist_data.SIDE, patch_size=7, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, dropout=0.1,
        num_classes=mnist_data.CLASSES,
    )  # fmt: skip
    model.conv_proj = nn.Conv2d(1, 64, kernel_size=7, stride=7)  # torchvision's takes three colors
    return model  # type: ignore[no-any-return]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """``uint8[n, 28, 28]`` as ``float[n, 1, 28, 28]`` normalized to mean 0 and deviation 1 over MNIST."""
    return ((pixels.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)


def gather_crops(images: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The crops ``uint8[n, 28, 28]`` that ``batch`` lists, as rows of image, row offset, column offset and label."""
    side = torch.arange(mnist_data.SIDE, device=batch.device)
    image, row, column = batch[:, 0], batch[:, 1, None] + side, batch[:, 2, None] + side
    return images[image[:, None, None], row[:, :, None], column[:, None, :]]


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(
    model: nn.Module, images: torch.Tensor, batches: list[torch.Tensor], device: Device, poll: Callable[[], None]
) -> tuple[float, float]:
    """Correct answers and the sum of losses over the test set, every image exactly once."""
    device.broadcast_buffers(model)
    model.eval()
    sums = device.to_device(torch.zeros(2))
    for rows in batches:
        poll()
        batch = device.put_batch(rows)
        with device.autocast():
            logits = model(normalised(gather_crops(images, batch))).float()
        labels = batch[:, 3]  # -1: padding, which never is the answer
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([(logits.argmax(dim=1) == labels).sum().float(), loss])
        device.end_step()
    model.train()
    correct, loss_sum = device.sum(sums)
    return correct, loss_sum


class Served(nn.Module):
    """The exported model: probabilities ``[n, 10]`` of images ``uint8[n, 28, 28]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(normalised(images)).softmax(dim=1)


def main(
    args: argparse.Namespace, network: Callable[[argparse.Namespace], nn.Module] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code. ``network(args)`` makes the model."""
    device = _device.init(args)  # seeds, and joins the other processes

    # Data: all images as bytes on the device. A batch is rows of (image, row offset, column offset, label).
    (images, labels), (test_images, test_labels) = mnist_data.load(args)
    device.check_alike("training and test images", images, labels, test_images, test_labels)
    fingerprints = order.fingerprints(images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    images = device.to_device(mnist_data.padded(images, args.shift))
    test_images = device.to_device(mnist_data.padded(test_images, args.shift))
    test_batches = mnist_data.test_batches(test_labels, args.shift, args.test_batch_size * device.replicas)
    global_batch = args.batch_size * device.replicas

    model = device.place(network(args))
    ddp = device.parallel(model)
    optimizer = device.optimizer(args, _device.parameter_groups(model, args.weight_decay))
    scaler = device.grad_scaler()
    # Of the last step, or the first that was not finite. Not of shape []: torch_xla would take the first one for a
    # constant, and compile the first step and the others separately.
    loss = device.to_device(torch.zeros(1))

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        with device.autocast():
            logits = ddp(normalised(gather_crops(images, batch)))
        step_loss = F.cross_entropy(logits.float(), batch[:, 3])
        optimizer.zero_grad()
        scaler.scale(step_loss).backward()
        if args.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss.copy_(torch.where(torch.isfinite(loss), step_loss.detach(), loss))

    def test(poll: Callable[[], None]) -> tuple[float, float]:
        return evaluate(model, test_images, test_batches, device, poll)

    def export(folder: str) -> list[str]:
        example = torch.zeros(2, mnist_data.SIDE, mnist_data.SIDE, dtype=torch.uint8)
        classes = list(map(str, range(mnist_data.CLASSES)))
        return _export.write(Served(model), example, folder, model=getattr(args, "model", name), classes=classes,
                             mean=[MEAN], std=[DEVIATION], image_size=mnist_data.SIDE)  # fmt: skip

    with Run(f"torch.{name}", args, device, global_batch=global_batch, train_count=len(labels),
             test_count=len(test_labels), data=fingerprints, model=model, optimizer=optimizer,
             scaler=scaler) as run:  # fmt: skip
        if _device.can_capture(device) and not args.eval_only:
            changed = [*_device.changed_by_step(model, optimizer), loss]
            example = device.to_device(torch.zeros(args.batch_size, 4, dtype=torch.int64))
            train_step = _device.CapturedStep(train_step, changed, [example])  # type: ignore[assignment]
        for epoch in run.epochs(test):
            rows = mnist_data.train_rows(labels, args, epoch)  # depends on seed and epoch only
            first = run.step_in_epoch * global_batch
            batches = (device.put_batch(rows[at:][:global_batch]) for at in range(first, len(rows), global_batch))
            for step, batch in run.steps(batches):
                rate = learning_rate(step, run.total_steps, run.peak)
                _device.set_learning_rate(optimizer, rate)
                loss = train_step(batch)
                run.end_step(loss, rate)
        run.finish(export, device.test_of_export(test))
    device.close(args)
    return run.code


if __name__ == "__main__":
    _device.main(main, ARGS, "mnist")
