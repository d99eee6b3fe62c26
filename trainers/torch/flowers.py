"""Classify flowers (or any small set of labelled images) in PyTorch, from scratch or from pretrained weights.

    python -m trainers.torch.flowers --datadir flower_photos --epochs 30
    python -m trainers.torch.flowers --datadir flower_photos --model resnet50 --weights model.safetensors --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there, as two
matrix products per batch. The same command continues a run from its last checkpoint. On SIGTERM a run completes its
step, saves and exits with 143. The networks are in _images.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import flowers_data, mnist, order
from trainers.common.arguments import Parser, add, classification
from trainers.common.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch._peers import Peers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("flowers", "Flowers in PyTorch.")
    add(parser.learning, "--model", "small", "small: four stages, 2.8 million weights; vit: a vision transformer, 1.2"
        " million weights; the others are torchvision's and accept --weights",
        choices=("small", "vit", "resnet18", "resnet34", "resnet50", "vit_b_16"))  # fmt: skip
    add(parser.running, "--device", "auto", "auto: an accelerator if there is one; tpu: torch_tpu",
        choices=("auto", "cpu", "cuda", "tpu"))  # fmt: skip
    defaults = {"epochs": 30, "batch_size": 32, "test_batch_size": 100, "weight_decay": 5e-4}
    flowers_data.options(parser)
    return classification(parser, argv, defaults, sgd=0.05, adamw=0.001)


def parameter_groups(args: argparse.Namespace, model: nn.Module) -> list[dict[str, Any]] | None:
    """Return groups for the optimizer, in which pretrained layers learn slower; None without ``--weights``."""
    from trainers.torch._images import PRETRAINED_SCALE, head

    if not args.weights:
        return None
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[name.startswith(head(args.model))].append(parameter)
    return [{"params": parts[True], "weight_decay": args.weight_decay, "lr_scale": 1.0},
            {"params": parts[False], "weight_decay": args.weight_decay, "lr_scale": PRETRAINED_SCALE}]  # fmt: skip


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, rate: float, peers: Peers,
    args: argparse.Namespace,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch of normalized images; returns its loss."""
    import torch
    import torch.nn.functional as F

    with peers.autocast:
        logits = model(x.contiguous(memory_format=torch.channels_last))
    loss = F.cross_entropy(logits.float(), y, label_smoothing=args.label_smoothing)
    optimizer.zero_grad()
    peers.scaler.scale(loss).backward()
    if args.clip_norm:
        peers.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    peers.scaler.step(optimizer)
    peers.scaler.update()
    return loss.detach()


def evaluate(
    model: nn.Module, batch_of: Callable[[np.ndarray, np.ndarray], tuple[torch.Tensor, torch.Tensor]],
    batches: list[tuple[np.ndarray, np.ndarray]], count: int, peers: Peers, stop: Callable[[], bool],
) -> dict[str, float]:  # fmt: skip
    """Return the accuracy in percent and the mean loss, every image exactly once; nothing if the run has to stop."""
    import torch
    import torch.nn.functional as F

    peers.share_buffers(model)
    model.eval()
    sums = torch.zeros(2, device=peers.device)
    for rows, boxes in batches:
        x, y = batch_of(rows, boxes)
        with torch.no_grad(), peers.autocast:
            logits = model(x).float()
        loss = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")  # -1: padding, which never is the answer
        sums += torch.stack([(logits.argmax(dim=1) == y).sum().float(), loss])
        if stop():
            return {}
    model.train()
    correct, loss_sum = peers.sum(sums)
    return {"accuracy": 100 * correct / count, "test_loss": loss_sum / count}


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from trainers.torch._images import DEVIATION, MEAN, Normalise, Served, flowers_network, gather_crops
    from trainers.torch._peers import Peers, learning_rate
    from trainers.torch.mnist import export, load, make_optimizer, save

    peers = Peers(args)  # joins the other processes
    data = flowers_data.Data(args, peers)  # all images as bytes on the device
    images, test_images = peers.put(data.images), peers.put(data.test_images)
    global_batch, count = args.batch_size * peers.size, len(data.test_labels)
    test_batches = list(zip(*data.test_rows(args.test_batch_size * peers.size), strict=True))
    epoch_steps = mnist.steps_per_epoch(len(data.labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.size if args.scale_lr else 1)
    model = flowers_network(args, len(data.classes)).to(peers.device, memory_format=torch.channels_last)
    normalise = Normalise().to(peers.device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if peers.size > 1 else model
    optimizer = make_optimizer(model, args, peers, parameter_groups(args, model))
    own = (model, optimizer, peers)
    epoch_rows = lru_cache(1)(data.train_rows)  # depend on seed and epoch only

    def batch_of(pixels: torch.Tensor, rows: np.ndarray, boxes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        mine, places = (peers.put(order.share(part, peers.rank, peers.size)) for part in (rows, boxes))
        return normalise(gather_crops(pixels, mine[:, 0], places, args.image_size)), mine[:, 1]

    def test() -> dict[str, float]:
        return evaluate(model, partial(batch_of, test_images), test_batches, count, peers, job.stop)

    def export_and_test(folder: str) -> list[str]:
        peers.export_in_fp32(args, test, job)
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        about = {"num_classes": len(data.classes), "classes": data.classes, "mean": MEAN, "std": DEVIATION}
        return export(Served(model), example, folder, model=args.model, image_size=args.image_size,
                      **about) if folder else []  # fmt: skip

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(data.labels), "data": data.fingerprints}  # fmt: skip
    with Job("torch.flowers", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        job.more["classes"] = data.classes
        step = job.resume(partial(load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        while not job.stop(step):
            peers.seed(args.seed, step)  # for dropout
            rate = peak * learning_rate(step, total, warmup=0.2 * total)
            first, parts = step % epoch_steps * global_batch, epoch_rows(step // epoch_steps + 1)
            x, y = batch_of(images, *(part[first : first + global_batch] for part in parts))
            loss = train_step(ddp, optimizer, x, y, rate, peers, args)
            step += 1
            if job.due("log", step):
                job.log(step, loss=peers.mean(loss), lr=rate)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, partial(save, *own))
        return job.finish(step, partial(save, *own), export_and_test)


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "flowers")
