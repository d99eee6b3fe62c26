# ruff: noqa: E402
"""Flowers (or any small set of labelled images) in PyTorch, from scratch or from pretrained weights.

    python -m trainers.torch.flowers --datadir flower_photos --epochs 30
    python -m trainers.torch.flowers --datadir flower_photos --model resnet50 --weights model.safetensors --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there, as two
matrix products per batch. The same command continues a run from its last checkpoint. On SIGTERM a run completes its
step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data
from trainers.common.flags import Flag, one_of

MODEL = Flag("model", one_of("small", "vit", "resnet18", "resnet34", "resnet50", "vit_b_16"), "small", "small: four"
             " stages, 2.8 million weights; vit: a vision transformer, 1.2 million weights; the others are"
             " torchvision's and accept --weights")  # fmt: skip

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in PyTorch.", (*flags.TORCH, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip

import argparse
import io
import math
import pickle
import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainers.common import paths
from trainers.common.run import Run
from trainers.torch import _device, _export
from trainers.torch._device import Device

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights
# What becomes torchvision's name of a weight of a vision transformer: parts of timm's, and of torchvision's own in its
# older files. Those of ResNets are the same in both. https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/vision_transformer.py
RENAMED = {
    r"^cls_token$": "class_token",
    r"^pos_embed$": "encoder.pos_embedding",
    r"^patch_embed\.proj\.": "conv_proj.",
    r"^blocks\.": "encoder.layers.encoder_layer_",
    r"\.norm1\.": ".ln_1.",
    r"\.attn\.qkv\.": ".self_attention.in_proj_",
    r"\.attn\.proj\.": ".self_attention.out_proj.",
    r"\.norm2\.": ".ln_2.",
    r"\.mlp\.(fc|linear_)1\.": ".mlp.0.",
    r"\.mlp\.(fc|linear_)2\.": ".mlp.3.",
    r"^norm\.": "encoder.ln.",
    r"^head\.": "heads.head.",
}


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


def vit(classes: int, side: int) -> nn.Module:
    """A vision transformer of 64 patches and six layers, for images of ``side`` pixels."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(  # type: ignore[no-any-return]
        image_size=side, patch_size=side // 8, num_layers=6, num_heads=4, hidden_dim=128, mlp_dim=256, dropout=0.1,
        num_classes=classes,
    )  # fmt: skip


def network(args: argparse.Namespace, classes: int) -> nn.Module:
    """The model of ``--model``, with the pretrained weights of ``--weights`` in all but the last layer.

    Raises :class:`UserError` if ``--weights`` or ``--image-size`` does not fit the model.
    """
    if args.weights and args.model in ("small", "vit"):
        raise exits.UserError("--weights needs --model resnet18, resnet34, resnet50 or vit_b_16", exits.USAGE)
    if args.image_size % (multiple := {"vit": 8, "vit_b_16": 16}.get(args.model, 1)):
        raise exits.UserError(
            f"--model {args.model}: --image-size {args.image_size} is not a multiple of {multiple}", exits.USAGE
        )
    if args.model == "small":
        return small(classes)
    try:
        from torchvision import models
    except ImportError as error:
        raise exits.UserError(f"--model {args.model} needs torchvision of torch's own index: {error}") from None
    if args.model == "vit":
        return vit(classes, args.image_size)
    options = {"image_size": args.image_size} if args.model == "vit_b_16" else {}
    model: nn.Module = models.get_model(args.model, weights=None, num_classes=classes, **options)
    if args.weights:
        load_pretrained(model, args)
    return model


def renamed(name: str) -> str:
    """Return torchvision's name of the weight that timm calls ``name``."""
    for pattern, new in RENAMED.items():
        name = re.sub(pattern, new, name)
    return name


def head(name: str) -> str:
    """Return the prefix of the weights of the last layer of torchvision's model ``name``."""
    return "heads." if name.startswith("vit") else "fc."


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in ``path``, a file of safetensors or ``torch.save()``, which cannot execute code.

    Raises what its library does, and ``ValueError`` where that is not clear.
    """
    content = paths.read_file(path)
    if path.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(content)
        except SafetensorError as error:
            raise ValueError(f"it is no safetensors file, or not a whole one ({error})") from None
    try:
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it is no file of torch.save(model.state_dict())") from None
    if not isinstance(weights, dict):
        raise ValueError(f"it is a {type(weights).__name__}, not a model.state_dict()")
    return weights


def load_pretrained(model: nn.Module, args: argparse.Namespace) -> None:
    """Load ``--weights``, with the names of torchvision or timm, into all but the last layer of ``model``.

    A vision transformer's embeddings of positions are resized to ``--image-size``.

    Raises :class:`UserError` with the first difference if they are of another model.
    """
    last, reason = head(args.model), ""
    try:
        read = read_weights(args.weights)
        given = {new: value for name, value in read.items() if not (new := renamed(name)).startswith(last)}
        if args.model == "vit_b_16" and "encoder.pos_embedding" in given:
            from torchvision.models.vision_transformer import interpolate_embeddings

            given = interpolate_embeddings(args.image_size, 16, given)
        reason = difference(given, model.state_dict(), last)
    except Exception as error:  # a missing file, a damaged archive, embeddings of no square: of many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    if reason:
        raise exits.UserError(f"--weights {args.weights}: no weights of {args.model}: {reason}")
    model.load_state_dict(given, strict=False)


def difference(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], last: str) -> str:
    """Return how ``given`` differs from weights like ``expected`` without those of the layer ``last``, "" if it does
    not. Old files lack the numbers of batches that batch norm has seen."""
    for name, value in expected.items():
        if name in given and given[name].shape != value.shape:
            return f"{name} has the shape {list(given[name].shape)}, not {list(value.shape)}"
        if name not in given and not name.startswith(last) and not name.endswith("num_batches_tracked"):
            return f"{name} is missing"
    return next((f"{name} is not among them" for name in sorted(given) if name not in expected), "")


def parameter_groups(args: argparse.Namespace, model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups for the optimizer. With ``--weights``, pretrained layers have a lower learning rate."""
    if not args.weights:
        return _device.parameter_groups(model, args.weight_decay)
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[name.startswith(head(args.model))].append(parameter)
    return [{"params": parts[True], "weight_decay": args.weight_decay},
            {"params": parts[False], "weight_decay": args.weight_decay, "lr_scale": PRETRAINED_SCALE}]  # fmt: skip


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


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1


class Normalise(nn.Module):
    """``[n, 3, y, x]`` of 0 to 255 normalized to mean 0 and deviation 1 over ImageNet, as pretrained weights expect."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers are on the device from the start; tensors made from lists would be copied to it in each step.
        self.register_buffer("mean", 255 * torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(DEVIATION)[:, None, None], persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels``, normalized."""
        return (pixels - self.mean) / self.deviation


class Served(nn.Module):
    """The exported model: probabilities ``[n, classes]`` of images ``uint8[n, side, side, 3]``, incl. preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.normalise = model, Normalise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(self.normalise(images.permute(0, 3, 1, 2).float())).softmax(dim=1)


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: torch.Tensor,
    batches: list[tuple[np.ndarray, np.ndarray]],
    side: int,
    device: Device,
    normalise: nn.Module,
    poll: Callable[[], None],
) -> tuple[float, float]:
    """Correct answers and the sum of losses over the test set, every image exactly once."""
    device.broadcast_buffers(model)
    model.eval()
    sums = device.to_device(torch.zeros(2))
    for rows, boxes in batches:
        poll()
        batch, places = device.put_batch(rows), device.put_batch(boxes)
        with device.autocast():
            logits = model(normalise(gather_crops(images, batch[:, 0], places, side))).float()
        labels = batch[:, 1]  # -1: padding, which never is the answer
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([(logits.argmax(dim=1) == labels).sum().float(), loss])
        device.end_step()
    model.train()
    correct, loss_sum = device.sum(sums)
    return correct, loss_sum


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _device.init(args)  # seeds, and joins the other processes

    # Data: all images as bytes on the device. A batch is rows of (image, label), and the boxes to crop.
    data = flowers_data.Data(args, device)
    device.check_alike("training and test images", data.images, data.labels, data.test_images, data.test_labels)
    images, test_images = device.to_device(data.images), device.to_device(data.test_images)
    test_batches = list(zip(*data.test_rows(args.test_batch_size * device.replicas), strict=True))
    global_batch = args.batch_size * device.replicas

    model = device.place(network(args, len(data.classes)))
    normalise = device.place(Normalise())
    ddp = device.parallel(model)
    optimizer = device.optimizer(args, parameter_groups(args, model))
    scaler = device.grad_scaler()
    # Of the last step, or the first that was not finite. Not of shape []: torch_xla would take the first one for a
    # constant, and compile the first step and the others separately.
    loss = device.to_device(torch.zeros(1))

    def train_step(batch: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        with device.autocast():
            pixels = gather_crops(images, batch[:, 0], boxes, args.image_size)
            logits = ddp(normalise(pixels).contiguous(memory_format=device.memory_format))
        step_loss = F.cross_entropy(logits.float(), batch[:, 1], label_smoothing=args.label_smoothing)
        optimizer.zero_grad()
        scaler.scale(step_loss).backward()
        if args.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return torch.where(torch.isfinite(loss), step_loss.detach(), loss)

    def test(poll: Callable[[], None]) -> tuple[float, float]:
        return evaluate(model, test_images, test_batches, args.image_size, device, normalise, poll)

    def export(folder: str) -> list[str]:
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        return _export.write(Served(model), example, folder, model=args.model, num_classes=len(data.classes),
                             classes=data.classes, mean=MEAN, std=DEVIATION, image_size=args.image_size)  # fmt: skip

    with Run("torch.flowers", args, device, global_batch=global_batch, train_count=len(data.labels),
             test_count=len(data.test_labels), data=data.fingerprints, model=model, optimizer=optimizer,
             scaler=scaler) as run:  # fmt: skip
        for epoch in run.epochs(test):
            rows, boxes = data.train_rows(epoch)  # depend on seed and epoch only
            first = run.step_in_epoch * global_batch
            batches = (tuple(device.put_batch(part[at:][:global_batch]) for part in (rows, boxes))
                       for at in range(first, len(rows), global_batch))  # fmt: skip
            for step, batch in run.steps(batches):
                rate = learning_rate(step, run.total_steps, run.peak)
                _device.set_learning_rate(optimizer, rate)
                loss = train_step(*batch)
                run.end_step(loss, rate)
        run.finish(export, device.test_of_export(test), classes=data.classes)
    device.close(args)
    return run.code


if __name__ == "__main__":
    _device.main(main, ARGS, "flowers")
