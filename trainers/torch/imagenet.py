# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in PyTorch, with torchvision's models.

    python -m trainers.torch.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    torchrun --nproc-per-node 8 -m trainers.torch.imagenet --datadir FOLDER --epochs 90 --ema 0.9999

FOLDER holds class folders or tar shards; threads decode while the device trains. The same command
continues a run from its last checkpoint. On SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data
from trainers.common.flags import Flag, one_of

MORE = (
    Flag("model", str, "resnet50", "any classification model of torchvision: resnet18, resnet50, vit_b_16..."),
    Flag("compile", one_of("auto", "on", "off"), "auto", "use torch.compile; auto: on CUDA only"),
)

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in PyTorch.", (*flags.TORCH, *imagenet_data.FLAGS, *MORE),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip

import argparse
import contextlib
import copy
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainers.common.run import Run
from trainers.torch import _decode, _device, _export
from trainers.torch._device import Device


def network(args: argparse.Namespace) -> nn.Module:
    """torchvision's model ``--model`` with random weights.

    Raises :class:`UserError` if torchvision has no such model, or if it does not take images of the sizes that
    ``--image-size`` and ``--progressive`` ask for.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise exits.UserError(f"torchvision of torch's own index is needed: {error}") from None
    if args.model not in models.list_models(module=models):
        raise exits.UserError(
            f"--model {args.model}: torchvision has {', '.join(models.list_models(module=models))}", exits.USAGE
        )
    options: dict[str, object] = {}
    if args.model in ("googlenet", "inception_v3"):  # without the additional outputs that these models train with
        options = {"aux_logits": False, "init_weights": True}
    elif args.model.startswith("vit_"):  # with a position embedding for each patch
        options = {"image_size": args.image_size}
    elif args.model.startswith("maxvit"):
        options = {"input_size": (args.image_size, args.image_size)}
    side = args.image_size
    try:
        model: nn.Module = models.get_model(args.model, weights=None, num_classes=args.num_classes, **options)
        # Shapes only, without computing: on the device "meta".
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        for side in (args.image_size, *args.progressive):
            torch.func.functional_call(model, shapes, torch.empty(2, 3, side, side, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise exits.UserError(
            f"--model {args.model} does not take images of {side} pixels ({reason}): use another --image-size, or leave"
            " out --progressive",
            exits.USAGE,
        ) from None
    return model


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1


class Normalise(nn.Module):
    """``uint8[n, side, side, 3]`` as ``float[n, 3, side, side]`` with mean 0 and deviation 1 over ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers are on the device from the start; tensors made from lists would be copied to it in each step.
        self.register_buffer("mean", 255 * torch.tensor(MEAN), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(DEVIATION), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels``, normalized."""
        return ((pixels.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


class Served(nn.Module):
    """The exported model: class probabilities of images ``uint8[n, side, side, 3]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.normalise = model, Normalise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(self.normalise(images)).softmax(dim=1)


class Average:
    """The exponential moving average of a model's weights and buffers (``--ema``), in ``model``.

    Its decay rises with the steps, or the random weights at the start would dominate for 1 / (1 - decay) steps:
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """

    def __init__(self, model: nn.Module, trained: nn.Module, decay: float) -> None:
        """Average the weights of ``trained`` in ``model``, a copy of it."""
        self.model, self.decay = model, decay
        slow, fast = (list(one.state_dict(keep_vars=True).values()) for one in (model, trained))
        pairs = list(zip(slow, fast, strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counts = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after ``step``, counted from 0."""
        slow, fast = map(list, zip(*self.floats, strict=True))
        torch._foreach_lerp_(slow, fast, 1 - min(self.decay, (1 + step) / (10 + step)))
        for average, value in self.counts:
            average.copy_(value)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """The loss on images that are blended with the next image of the batch where ``mask`` is below 1."""
    loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
    if args.mixup or args.cutmix:
        keep = mask.mean()
        other = F.cross_entropy(logits, labels.roll(1), label_smoothing=args.label_smoothing)
        loss = keep * loss + (1 - keep) * other
    return loss


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    device: Device,
    normalise: nn.Module,
    poll: Callable[[], None],
) -> tuple[float, float, float]:
    """Correct answers, the sum of losses, and correct answers among the best five; every test image exactly once."""
    device.broadcast_buffers(model)
    model.eval()
    sums = device.to_device(torch.zeros(3))
    for pixels, targets in batches:
        poll()
        labels = device.put_share(targets)
        images = normalise(device.put_share(pixels)).contiguous(memory_format=device.memory_format)
        with device.autocast():
            logits = model(images).float()
        # The padding's label, -1, never hits.
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([hits[:, 0].sum().float(), loss, hits.sum().float()])
        device.end_step()
    model.train()
    first, loss_sum, fifth = device.sum(sums)
    return first, loss_sum, fifth


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _device.init(args)  # seeds, and joins the other processes
    data = imagenet_data.Data(args, device.share, _decode.decode, device)
    global_batch = args.batch_size * args.accumulate * device.replicas
    warmup = min(0.5, args.warmup_epochs / args.epochs)

    model = network(args)
    copied = copy.deepcopy(model) if args.ema else None
    model = device.place(model)
    average = Average(device.place(copied), model, args.ema) if copied else None
    normalise = device.place(Normalise())
    ddp = device.parallel(model)
    # Around DistributedDataParallel, which so sends gradients while others are computed.
    forward = _device.compiled(ddp, args.compile, device)
    optimizer = device.optimizer(args, _device.parameter_groups(model, args.weight_decay))
    scaler = device.grad_scaler()
    # Of the last step, or the first that was not finite. Not of shape []: torch_xla would take the first one for a
    # constant, and compile the first step and the others separately.
    loss = device.to_device(torch.zeros(1))

    def train_step(pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        step_loss = torch.zeros_like(loss)
        parts = list(zip(pixels.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True))
        for number, (part, targets) in enumerate(parts, 1):
            # Gradients are averaged over the processes once per step, with its last part.
            local = number < len(parts) and isinstance(ddp, DistributedDataParallel)
            with ddp.no_sync() if local else contextlib.nullcontext():
                images = normalise(part)
                if args.mixup or args.cutmix:
                    images = images * mask + images.roll(1, 0) * (1 - mask)
                with device.autocast():
                    logits = forward(images.contiguous(memory_format=device.memory_format)).float()
                part_loss = loss_of(logits, targets, mask, args) / len(parts)
                if number == 1:  # not before the forward pass, which would have to allocate their memory again
                    optimizer.zero_grad()
                scaler.scale(part_loss).backward()
            step_loss += part_loss.detach()
        if args.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return torch.where(torch.isfinite(loss), step_loss, loss)

    def test(poll: Callable[[], None]) -> tuple[float, float, float]:
        return evaluate(run.tested, data.test(args.test_batch_size * device.replicas), device, normalise, poll)

    def export(folder: str) -> list[str]:
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        return _export.write(Served(run.tested), example, folder, model=args.model, num_classes=args.num_classes,
                             classes=data.classes, mean=MEAN, std=DEVIATION, image_size=args.image_size)  # fmt: skip

    with Run("torch.imagenet", args, device, global_batch=global_batch, train_count=data.count,
             test_count=data.test_count, data=data.fingerprints, model=model, optimizer=optimizer,
             average=average and average.model, scaler=scaler) as run:  # fmt: skip
        if forward is not ddp:
            train_step = _device.EagerIfCompilingFails(train_step, model, run)  # type: ignore[assignment]
        for epoch in run.epochs(test):
            for step, (pixels, labels) in run.steps(data.train(epoch, run.step_in_epoch, global_batch)):
                mask = device.to_device(data.mask(epoch, run.step_in_epoch, data.side(epoch)))
                rate = learning_rate(step, run.total_steps, run.peak, warmup)
                _device.set_learning_rate(optimizer, rate)
                loss = train_step(device.put_share(pixels), device.put_share(labels), mask)
                if average:
                    average.update(step)
                run.end_step(loss, rate)
        run.finish(export, device.test_of_export(test))
    device.close(args)
    return run.code


if __name__ == "__main__":
    _device.main(main, ARGS, "imagenet")
