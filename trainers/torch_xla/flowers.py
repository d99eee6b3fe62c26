"""Classify flowers in PyTorch/XLA: :mod:`trainers.torch.flowers` with one process a host, and SPMD over all devices.

PJRT_DEVICE=TPU python -m trainers.torch_xla.flowers --datadir flower_photos --epochs 30
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from trainers.common import flowers_data, mnist
from trainers.common.arguments import Parser, add, classification

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch_xla._spmd import Mesh


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("flowers", "Flowers in PyTorch/XLA.")
    add(parser.learning, "--model", "small", "see trainers.torch.flowers",
        choices=("small", "vit", "resnet18", "resnet34", "resnet50", "vit_b_16"))  # fmt: skip
    add(parser.output, "--metrics-debug", False, "print torch_xla's metrics report at the end")
    defaults = {"epochs": 30, "batch_size": 32, "test_batch_size": 100, "weight_decay": 5e-4}
    flowers_data.options(parser)
    return classification(parser, argv, defaults, sgd=0.05, adamw=0.001)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, rate: float, mesh: Mesh,
    args: argparse.Namespace,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch of normalized images; returns its loss."""
    import torch
    import torch.nn.functional as F
    import torch_xla

    with mesh.autocast:
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y, label_smoothing=args.label_smoothing)
    optimizer.zero_grad()
    loss.backward()
    if args.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    optimizer.step()
    torch_xla.sync()
    return loss.detach()


def evaluate(
    model: nn.Module, batch_of: Callable[[np.ndarray, np.ndarray], tuple[torch.Tensor, torch.Tensor]],
    batches: list[tuple[np.ndarray, np.ndarray]], count: int, mesh: Mesh, stop: Callable[[], bool],
) -> dict[str, float]:  # fmt: skip
    """Return the accuracy in percent and the mean loss, every image exactly once; nothing if the run has to stop."""
    import torch
    import torch.nn.functional as F
    import torch_xla

    model.eval()
    sums = mesh.put(torch.zeros(2))
    for rows, boxes in batches:
        x, y = batch_of(rows, boxes)
        with torch.no_grad(), mesh.autocast:
            logits = model(x).float()
        loss = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")  # -1: padding, which never is the answer
        sums = sums + torch.stack([(logits.argmax(dim=1) == y).sum().float(), loss])
        torch_xla.sync()
        if stop():
            return {}
    model.train()
    correct, loss_sum = mesh.sum(sums)
    return {"accuracy": 100 * correct / count, "test_loss": loss_sum / count}


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    import torch

    from trainers.torch._images import DEVIATION, MEAN, Normalise, Served, flowers_network, gather_crops
    from trainers.torch._peers import learning_rate
    from trainers.torch.flowers import parameter_groups
    from trainers.torch.mnist import export, make_optimizer
    from trainers.torch_xla._spmd import Mesh, XlaJob
    from trainers.torch_xla.mnist import load, save

    mesh = Mesh(args)
    data = flowers_data.Data(args, mesh)
    images, test_images = mesh.put(data.images), mesh.put(data.test_images)
    global_batch, count = args.batch_size * mesh.replicas, len(data.test_labels)
    test_batches = list(zip(*data.test_rows(args.test_batch_size * mesh.replicas), strict=True))
    epoch_steps = mnist.steps_per_epoch(len(data.labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (mesh.replicas if args.scale_lr else 1)
    model, normalise = mesh.place(flowers_network(args, len(data.classes))), mesh.place(Normalise())
    optimizer = make_optimizer(model, args, mesh, parameter_groups(args, model))
    mesh.place(model, optimizer)
    own = (model, optimizer, mesh)
    epoch_rows = lru_cache(1)(data.train_rows)  # depend on seed and epoch only

    def batch_of(pixels: torch.Tensor, rows: np.ndarray, boxes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        mine, places = mesh.put_batch(rows), mesh.put_batch(boxes)
        return normalise(gather_crops(pixels, mine[:, 0], places, args.image_size)), mine[:, 1]

    def export_on_cpu(folder: str) -> list[str]:
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        about = {"num_classes": len(data.classes), "classes": data.classes, "mean": MEAN, "std": DEVIATION}
        return export(Served(model), example, folder, model=args.model, image_size=args.image_size,
                      **about) if folder else []  # fmt: skip

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(data.labels), "data": data.fingerprints}  # fmt: skip
    with XlaJob("torch_xla.flowers", args, mesh, about, model, total=total, every=epoch_steps,
                count=global_batch) as job:  # fmt: skip
        test = partial(evaluate, model, partial(batch_of, test_images), test_batches, count, mesh, job.stop)
        step = job.resume(partial(load, *own))
        if job.due("test", step):
            job.log(step, **test())
        while not job.stop(step):
            mesh.seed(args.seed, step)  # for dropout
            rate = peak * learning_rate(step, total, warmup=0.2 * total)
            first, parts = step % epoch_steps * global_batch, epoch_rows(step // epoch_steps + 1)
            x, y = batch_of(images, *(part[first : first + global_batch] for part in parts))
            loss = train_step(model, optimizer, x, y, rate, mesh, args)
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

    run(main, options, "flowers")
