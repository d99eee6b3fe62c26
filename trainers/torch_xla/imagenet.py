"""Classify ImageNet in PyTorch/XLA: :mod:`trainers.torch.imagenet`, with SPMD over the devices of all hosts.

Each host is one process, and decodes its part of a batch.

    PJRT_DEVICE=TPU python -m trainers.torch_xla.imagenet --datadir FOLDER --epochs 18
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trainers.common import imagenet_data, mnist, order
from trainers.common.arguments import Parser, add, classification

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch_xla._spmd import Mesh


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("imagenet", "ImageNet in PyTorch/XLA.")
    add(parser.learning, "--model", "resnet50", "any classification model of torchvision: resnet18, vit_b_16...")
    add(parser.output, "--metrics-debug", False, "print torch_xla's metrics report at the end")
    defaults = {"epochs": 18, "batch_size": 256, "test_batch_size": 256, "weight_decay": 5e-5}
    imagenet_data.options(parser)
    return classification(parser, argv, defaults, sgd=0.5, adamw=0.001)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, normalise: nn.Module, mesh: Mesh, args: argparse.Namespace,
    pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, rate: float,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch, in ``--accumulate`` parts; returns its loss."""
    import torch

    from trainers.torch._images import loss_of

    loss = torch.zeros((), device=mesh.device)
    optimizer.zero_grad()
    for part, targets in zip(pixels.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True):
        images = normalise(part)
        if args.mixup or args.cutmix:
            images = images * mask + images.roll(1, 0) * (1 - mask)
        with mesh.autocast:
            logits = model(images).float()
        part_loss = loss_of(logits, targets, mask, args) / args.accumulate
        part_loss.backward()
        loss = loss + part_loss.detach()
    if args.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return loss


def evaluate(
    model: nn.Module, data: imagenet_data.Data, size: int, normalise: nn.Module, mesh: Mesh, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent and the mean loss, every image exactly once; nothing if the run has to
    stop."""
    import torch
    import torch.nn.functional as F
    import torch_xla

    model.eval()
    sums = mesh.put(torch.zeros(3))
    with contextlib.closing(data.test(size)) as batches:
        for pixels, targets in batches:
            labels = mesh.put_batch(targets, whole=False)
            with torch.no_grad(), mesh.autocast:
                logits = model(normalise(mesh.put_batch(pixels, whole=False))).float()
            # The padding's label, -1, never hits.
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
            sums = sums + torch.stack([hits[:, 0].sum().float(), loss, hits.sum().float()])
            torch_xla.sync()
            if stop():
                return {}
    model.train()
    first, loss_sum, fifth = (value / data.test_count for value in mesh.sum(sums))
    return {"accuracy": 100 * first, "test_loss": loss_sum, "top5": 100 * fifth}


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    import torch
    import torch_xla
    from torch import nn

    from trainers.torch import _decode
    from trainers.torch._images import DEVIATION, MEAN, Average, Normalise, Served, imagenet_network
    from trainers.torch._peers import learning_rate
    from trainers.torch.mnist import export, make_optimizer
    from trainers.torch_xla._spmd import Mesh, XlaJob
    from trainers.torch_xla.mnist import load, save

    mesh = Mesh(args)
    data = imagenet_data.Data(args, lambda batch: order.share(batch, mesh.rank, mesh.size), _decode.decode, mesh)
    global_batch = args.batch_size * args.accumulate * mesh.replicas
    epoch_steps = mnist.steps_per_epoch(data.count, global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (mesh.replicas if args.scale_lr else 1)
    warmup = min(0.5, args.warmup_epochs / args.epochs) * total

    model = imagenet_network(args)
    copied = copy.deepcopy(model) if args.ema else None
    model = mesh.place(model)
    average = Average(mesh.place(copied), model, args.ema) if copied else None
    tested, normalise = average.model if average else model, mesh.place(Normalise())
    optimizer = make_optimizer(model, args, mesh)
    mesh.place(model, optimizer)
    own = (nn.ModuleDict({"model": model, "average": tested}) if average else model, optimizer, mesh)

    def batches(step: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        while True:  # depend on seed and epoch only
            epoch = step // epoch_steps + 1
            with contextlib.closing(data.train(epoch, step % epoch_steps, global_batch)) as epoch_batches:
                for pixels, labels in epoch_batches:
                    yield pixels, labels, data.mask(epoch, step % epoch_steps, data.side(epoch))
                    step += 1

    def export_on_cpu(folder: str) -> list[str]:
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        about = {"num_classes": args.num_classes, "classes": data.classes, "mean": MEAN, "std": DEVIATION}
        return export(Served(tested), example, folder, model=args.model, image_size=args.image_size,
                      **about) if folder else []  # fmt: skip

    about = {"model": args.model + " with averaged weights (--ema)" * bool(args.ema), "optimizer": args.optimizer,
             "global_batch": global_batch, "train_images": data.count, "data": data.fingerprints}  # fmt: skip
    with XlaJob("torch_xla.imagenet", args, mesh, about, tested, total=total, every=epoch_steps,
                count=global_batch) as job:  # fmt: skip
        test = partial(evaluate, tested, data, args.test_batch_size * mesh.replicas, normalise, mesh, job.stop)
        step = job.resume(partial(load, *own))
        if job.due("test", step):
            job.log(step, **test())
        stream = batches(step)
        while not job.stop(step):
            mesh.seed(args.seed, step)  # for dropout
            (*batch, mask), rate = next(stream), peak * learning_rate(step, total, warmup)
            on_mesh = [mesh.put_batch(part, whole=False) for part in batch]
            loss = train_step(model, optimizer, normalise, mesh, args, *on_mesh, mesh.put(mask), rate)
            if average:
                average.update(step)
            torch_xla.sync()
            step += 1
            if job.due("log", step):
                job.log(step, loss=mesh.mean(loss), lr=rate)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, partial(save, *own))
        return job.finish(step, partial(save, *own), export_on_cpu)


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "imagenet")
