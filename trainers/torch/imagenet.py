# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in PyTorch, with torchvision's models.

    python -m trainers.torch.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    torchrun --nproc-per-node 8 -m trainers.torch.imagenet --datadir FOLDER --epochs 90 --ema 0.9999

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data
from trainers.common.flags import Flag, one_of
from trainers.torch._flags import FLAGS

MORE = (
    Flag("model", str, "resnet50", "any classification model of torchvision: resnet18, resnet50, vit_b_16..."),
    Flag("compile", one_of("auto", "on", "off"), "auto", "use torch.compile; auto: on CUDA only"),
)

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in PyTorch.", (*FLAGS, *imagenet_data.FLAGS, *MORE),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip

import argparse
import contextlib
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainers.common.checkpoints import State
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine
from trainers.torch import _checkpoint, _decode, _device, _export, _launch, _select
from trainers.torch._device import Device


def network(args: argparse.Namespace) -> nn.Module:
    """torchvision's model ``args.model`` with random weights."""
    try:
        from torchvision import models
    except ImportError as error:
        raise exits.UserError(f"torchvision of torch's own index is needed: {error}") from None
    if args.model not in models.list_models(module=models):
        raise exits.UserError(
            f"--model {args.model}: torchvision has {', '.join(models.list_models(module=models))}", exits.USAGE
        )
    return models.get_model(args.model, weights=None, num_classes=args.num_classes)  # type: ignore[no-any-return]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """``uint8[n, side, side, 3]`` as ``float[n, 3, side, side]`` normalized over ImageNet."""
    mean = torch.tensor([123.675, 116.28, 103.53], device=pixels.device)
    deviation = torch.tensor([58.395, 57.12, 57.375], device=pixels.device)
    return ((pixels.float() - mean) / deviation).permute(0, 3, 1, 2)


class Served(nn.Module):
    """The exported model: class probabilities of images ``uint8[n, side, side, 3]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(normalised(images)).softmax(dim=1)


class Trainer:
    """Model, optimizer and data on a device, with the training step and the test."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        self.args, self.device = args, device
        self.data = imagenet_data.Data(args, device.share, _decode.decode)
        model = network(args)
        self.average = device.place(copy.deepcopy(model)) if args.ema else None
        self.model = device.place(model)
        compiled = args.compile == "on" or (args.compile == "auto" and device.kind == "cuda")
        self.parallel = device.parallel(torch.compile(self.model) if compiled else self.model)
        self.optimizer = device.sgd(_device.decay_groups(self.model, args.weight_decay), args.momentum)
        # The last loss, or the first that was not finite: kept on the device, read only when it is logged.
        self.loss = device.put(torch.zeros(1))

    def step(self, pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, learning_rate: float) -> None:
        """Train on ``pixels`` (uint8), blended with the next image of the batch where ``mask`` is below 1."""
        _device.set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.zero_grad()
        parts = self.args.accumulate
        for number, (part, targets) in enumerate(zip(pixels.chunk(parts), labels.chunk(parts), strict=True)):
            # Gradients are averaged over the processes once per step, with its last part.
            local = number < parts - 1 and isinstance(self.parallel, nn.parallel.DistributedDataParallel)
            with self.parallel.no_sync() if local else contextlib.nullcontext():
                (self._loss(part, targets, mask) / parts).backward()
        self.optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                pairs = zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True)
                for slow, fast in pairs:
                    slow.lerp_(fast, 1 - self.args.ema) if slow.is_floating_point() else slow.copy_(fast)
        self.loss = torch.where(torch.isfinite(self.loss), self.step_loss, self.loss)
        self.device.end_step()

    def _loss(self, pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        images, smoothing = normalised(pixels), self.args.label_smoothing
        mixed = self.args.mixup or self.args.cutmix
        if mixed:
            images = images * mask + images.roll(1, 0) * (1 - mask)
        with self.device.autocast():
            logits = self.parallel(images.contiguous(memory_format=self.device.memory_format)).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if mixed:
            keep = mask.mean()
            loss = keep * loss + (1 - keep) * F.cross_entropy(logits, labels.roll(1), label_smoothing=smoothing)
        self.step_loss = loss.detach()
        return loss

    @torch.no_grad()
    def test(self, run: Run) -> tuple[float, int, float, float]:
        """Correct answers, images, sum of losses and top-5 accuracy in percent; every test image exactly once."""
        model = self.average or self.model
        model.eval()
        sums = self.device.put(torch.zeros(3))
        for pixels, targets in run.testing(self.data.test(self.args.test_batch_size * self.device.replicas)):
            labels = self.device.put_share(targets)
            images = normalised(self.device.put_share(pixels)).contiguous(memory_format=self.device.memory_format)
            with self.device.autocast():
                logits = model(images).float()
            # The padding's label, -1, never hits.
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
            sums = sums + torch.stack([hits[:, 0].sum().float(), loss, hits.sum().float()])
            self.device.end_step()
        model.train()
        first, loss, fifth = self.device.sum(sums)
        return first, self.data.test_count, loss, 100 * fifth / self.data.test_count

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return self.device.to_cpu(state)  # type: ignore[no-any-return]

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        self.device.load(self.model, self.optimizer, state)
        if self.average is not None:
            self.device.load_weights(self.average, state.get("average", state["model"]))


def train_epoch(trainer: Trainer, run: Run, epoch: int, learning_rate: Callable[[int], float]) -> None:
    """Train the remaining steps of ``epoch``."""
    data, device, side = trainer.data, trainer.device, trainer.data.side(epoch)
    with contextlib.closing(data.train(epoch, run.position, run.global_batch)) as batches:  # type: ignore[type-var]
        for step in run.steps():
            with run.meter.waiting():
                pixels, labels = next(batches)
            rate = learning_rate(run.global_step)
            mask = device.put(data.mask(epoch, step, side))
            trainer.step(device.put_share(pixels), device.put_share(labels), mask, rate)
            run.log(step, trainer.loss.item, rate)


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _select.find(args)
    trainer = Trainer(args, device)
    with Run("torch.imagenet", args, device, trainer.data.count) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        warmup = min(0.5, args.warmup_epochs / args.epochs)
        for epoch in run.epochs():
            train_epoch(trainer, run, epoch, lambda step: warmup_cosine(step, run.total_steps, args.lr, warmup))
            if not run.ended:
                first, count, loss, top5 = trainer.test(run)
                run.tested(first, count, loss, top5=top5)
        model = trainer.average or trainer.model
        digest = _device.weights_sha256(model)
        if device.chief and args.export_dir and run.ended in ("", "reached"):
            served = Served(model.to("cpu", memory_format=torch.contiguous_format)).eval()
            example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
            run.exported(args.export_dir, _export.write(served, example, args.export_dir))
        code = run.finish(digest)
    device.close(args)
    return code


if __name__ == "__main__":
    _launch.main(main, ARGS, "imagenet")
