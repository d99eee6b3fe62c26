# ruff: noqa: E402
"""Flowers (or any small set of labelled images) in PyTorch, from scratch or from pretrained weights.

    python -m trainers.torch.flowers --datadir flower_photos --epochs 30
    python -m trainers.torch.flowers --datadir flower_photos --model resnet50 --weights resnet50.pth --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there, as two
matrix products per batch.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data
from trainers.common.flags import Flag, one_of
from trainers.torch._flags import FLAGS

MODEL = Flag("model", one_of("small", "resnet18", "resnet34", "resnet50"), "small", "small: four stages, 2.8 million"
             " weights; the others are torchvision's and accept --weights")  # fmt: skip

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in PyTorch.", (*FLAGS, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from trainers.common.checkpoints import State
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine
from trainers.torch import _checkpoint, _device, _export, _launch, _select
from trainers.torch._device import Device

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights


def unit(into: int, out: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two units with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.units = nn.Sequential(unit(width, width), unit(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """``features`` plus the output of the units."""
        return features + self.units(features)


def small(classes: int) -> nn.Sequential:
    """A network for a few thousand images: each stage halves the picture, doubles the width and adds a residual."""
    stages: list[nn.Module] = [unit(3, 32, 2)]
    for width in (64, 128, 256):
        stages += [unit(width // 2, width, 2), Residual(width)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


def network(args: argparse.Namespace, classes: int) -> nn.Module:
    """The model of ``--model``, with the pretrained weights of ``--weights`` in all but the last layer.

    Raises :class:`UserError` if ``--weights`` does not fit the model.
    """
    if args.model == "small":
        if args.weights:
            raise exits.UserError("--weights needs --model resnet18, resnet34 or resnet50", exits.USAGE)
        return small(classes)
    try:
        from torchvision import models
    except ImportError as error:
        raise exits.UserError(f"--model {args.model} needs torchvision of torch's own index: {error}") from None
    model: nn.Module = models.get_model(args.model, weights=None, num_classes=classes)
    if args.weights:
        try:
            weights = torch.load(args.weights, map_location="cpu", weights_only=True)
            weights = {name: value for name, value in weights.items() if not name.startswith("fc.")}
            missing, unexpected = model.load_state_dict(weights, strict=False)
        except Exception as error:  # a missing file, a damaged archive, other shapes: all raise different types
            reason = str(error).splitlines()[0]
            raise exits.UserError(f"--weights {args.weights}: no weights of {args.model}: {reason}") from None
        if unexpected or {name for name in missing if not name.startswith("fc.")}:
            raise exits.UserError(f"--weights {args.weights}: no weights of {args.model}: {[*unexpected, *missing][0]}")
    return model


def parameter_groups(args: argparse.Namespace, model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups for the optimizer. With ``--weights``, pretrained layers have a lower learning rate."""
    if not args.weights:
        return _device.decay_groups(model, args.weight_decay)
    head = list(model.fc.parameters())
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("fc.")]
    return [{"params": head, "weight_decay": args.weight_decay},
            {"params": body, "weight_decay": args.weight_decay, "lr_scale": PRETRAINED_SCALE}]  # fmt: skip


def resampling(start: torch.Tensor, end: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Matrices ``[n, target, source]`` that resize the spans from ``start`` to ``end`` (fractions of a side of
    ``source`` pixels) to ``target`` pixels: bilinear, with antialiasing; ``start`` > ``end`` mirrors."""
    steps = (torch.arange(target, device=start.device) + 0.5) / target
    centres = (start[:, None] + (end - start)[:, None] * steps) * source - 0.5
    reach = ((end - start).abs() * source / target).clamp(min=1.0)[:, None, None]
    distance = (centres[:, :, None] - torch.arange(source, device=start.device)).abs()
    weights = (1 - distance / reach).clamp(min=0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def gather_crops(images: torch.Tensor, numbers: torch.Tensor, boxes: torch.Tensor, side: int) -> torch.Tensor:
    """``float[n, 3, side, side]`` in 0 to 255: the ``boxes`` (upper, lower, left, right) of ``images[numbers]``."""
    down = resampling(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    across = resampling(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    tall = torch.einsum("nyh,nhwc->nywc", down, images[numbers].float())
    return torch.einsum("nxw,nywc->ncyx", across, tall)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """``[n, 3, y, x]`` of 0 to 255 normalized to mean 0 and deviation 1 over ImageNet, as pretrained weights expect."""
    mean = torch.tensor([123.675, 116.28, 103.53], device=pixels.device)[:, None, None]
    deviation = torch.tensor([58.395, 57.12, 57.375], device=pixels.device)[:, None, None]
    return (pixels - mean) / deviation


class Served(nn.Module):
    """The exported model: probabilities ``[n, classes]`` of images ``uint8[n, side, side, 3]``, incl. preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(normalised(images.permute(0, 3, 1, 2).float())).softmax(dim=1)


class Trainer:
    """Model, optimizer and data on a device, with the training step and the test."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        self.args, self.device = args, device
        self.data = flowers_data.Data(args)
        self.images, self.test_images = device.put(self.data.images), device.put(self.data.test_images)
        self.model = device.place(network(args, len(self.data.classes)))
        self.parallel = device.parallel(self.model)
        self.optimizer = device.sgd(parameter_groups(args, self.model), args.momentum)
        # The last loss, or the first that was not finite: kept on the device, read only when it is logged.
        self.loss = device.put(torch.zeros(1))

    def step(self, batch: torch.Tensor, boxes: torch.Tensor, learning_rate: float) -> None:
        """Train on ``batch`` (image number, label) cropped to ``boxes``."""
        _device.set_learning_rate(self.optimizer, learning_rate)
        with self.device.autocast():
            pixels = gather_crops(self.images, batch[:, 0], boxes, self.args.image_size)
            logits = self.parallel(normalised(pixels).contiguous(memory_format=self.device.memory_format))
        loss = F.cross_entropy(logits.float(), batch[:, 1], label_smoothing=self.args.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = torch.where(torch.isfinite(self.loss), loss.detach(), self.loss)
        self.device.end_step()

    @torch.no_grad()
    def test(self, run: Run) -> tuple[float, int, float]:
        """Correct answers, images and the sum of losses over the test set, every image exactly once."""
        rows, boxes = self.data.test_rows(self.args.test_batch_size * self.device.replicas)
        sums = self.device.put(torch.zeros(2))
        self.model.eval()
        for number in run.testing(range(len(rows))):
            batch, places = self.device.put_batch(rows[number]), self.device.put_batch(boxes[number])
            with self.device.autocast():
                crops = gather_crops(self.test_images, batch[:, 0], places, self.args.image_size)
                logits = self.model(normalised(crops))
            correct = (logits.argmax(dim=1) == batch[:, 1]).sum()
            loss = F.cross_entropy(logits.float(), batch[:, 1], ignore_index=-1, reduction="sum")
            sums = sums + torch.stack([correct.float(), loss])
            self.device.end_step()
        self.model.train()
        correct, loss = self.device.sum(sums)
        return correct, len(self.data.test_labels), loss

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        return self.device.to_cpu({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        self.device.load(self.model, self.optimizer, state)


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _select.find(args)
    trainer = Trainer(args, device)
    with Run("torch.flowers", args, device, len(trainer.data.labels)) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        for epoch in run.epochs():
            rows, boxes = trainer.data.train_rows(epoch)
            for step in run.steps():
                mine = slice(step * run.global_batch, (step + 1) * run.global_batch)
                with run.meter.waiting():
                    batch, places = device.put_batch(rows[mine]), device.put_batch(boxes[mine])
                learning_rate = warmup_cosine(run.global_step, run.total_steps, args.lr)
                trainer.step(batch, places, learning_rate)
                run.log(step, trainer.loss.item, learning_rate)
            if not run.ended:
                run.tested(*trainer.test(run))
        digest = _device.weights_sha256(trainer.model)
        if device.chief and args.export_dir and run.ended in ("", "reached"):
            served = Served(trainer.model.to("cpu", memory_format=torch.contiguous_format)).eval()
            example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
            run.exported(args.export_dir, _export.write(served, example, args.export_dir))
        code = run.finish(digest, classes=trainer.data.classes)
    device.close(args)
    return code


if __name__ == "__main__":
    _launch.main(main, ARGS, "flowers")
