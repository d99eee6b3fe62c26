"""Classify MNIST in PyTorch/XLA: :mod:`trainers.torch.mnist`, one process a host, and SPMD over all devices.

    PJRT_DEVICE=TPU python -m trainers.torch_xla.mnist --datadir FOLDER --epochs 5
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python -m trainers.torch_xla.mnist --datadir FOLDER --batch-size 16

XLA compiles a graph for each shape, so that all batches have the same one, and there are two graphs: one trains, one
tests. The log lines have the form of pytorch/xla.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import files, mnist
from trainers.common.arguments import Parser, add, classification, integer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch_xla._spmd import Mesh


def parse_args(argv: list[str] | None = None, prog: str = "mnist") -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser(prog, "MNIST in PyTorch/XLA.")
    add(parser.learning, "--model", "cnn", "cnn, small (with batch norm), vit: see trainers.torch.mnist",
        choices=("cnn", "small", "vit"))  # fmt: skip
    add(parser.learning, "--shift", 2, "shift images by up to so many pixels at random", type=integer())
    add(parser.data, "--fake-images", 60000, "images of --fake-data", type=integer(1))
    add(parser.output, "--metrics-debug", False, "print torch_xla's metrics report at the end")
    return classification(parser, argv, sgd=0.03, adamw=0.003)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, batch: torch.Tensor, rate: float,
    mesh: Mesh, args: argparse.Namespace,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch, rows of image, two offsets and label; returns its loss."""
    import torch
    import torch.nn.functional as F
    import torch_xla

    from trainers.torch.mnist import normalized, shifted

    with mesh.autocast:
        logits = model(normalized(shifted(images, batch, args.shift)))
    loss = F.cross_entropy(logits.float(), batch[:, 3])
    optimizer.zero_grad()
    loss.backward()
    if args.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    torch_xla.sync()  # ends the graph of this step, and runs it
    return loss.detach()


def evaluate(
    model: nn.Module, images: torch.Tensor, labels: np.ndarray, size: int, mesh: Mesh, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the accuracy in percent and the mean loss, every image exactly once; nothing if the run has to stop.

    Behind the last image, the first one with the label -1 fills the last batch.
    """
    import torch
    import torch.nn.functional as F
    import torch_xla

    from trainers.torch.mnist import normalized

    count = len(labels)
    rows = np.zeros((-(-count // size) * size, 2), np.int64)
    rows[:count], rows[count:, 1] = np.column_stack([np.arange(count), labels]), -1
    model.eval()
    sums = mesh.put(torch.zeros(2))
    for first in range(0, len(rows), size):
        batch = mesh.put_batch(rows[first : first + size])
        with torch.no_grad(), mesh.autocast:
            logits = model(normalized(images[batch[:, 0]])).float()
        loss = F.cross_entropy(logits, batch[:, 1], ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([(logits.argmax(dim=1) == batch[:, 1]).sum().float(), loss])
        torch_xla.sync()
        if stop():
            return {}
    model.train()
    correct, loss_sum = mesh.sum(sums)
    return {"accuracy": 100 * correct / count, "test_loss": loss_sum / count}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, folder: str) -> None:
    """Write a checkpoint; one host does, because all have the same weights."""
    import torch

    state = mesh.state(model, optimizer)
    if mesh.rank == 0:
        with files.atomic_file(files.join(folder, "state.pt")) as file:
            torch.save(state, file)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, folder: str) -> None:
    """Load a checkpoint; it has tensors and numbers only, so that this cannot execute code."""
    import torch

    with files.open_file(files.join(folder, "state.pt")) as file:
        mesh.load(model, optimizer, torch.load(file, map_location="cpu", weights_only=True))


def main(args: argparse.Namespace, network: Callable[..., Any] | None = None, name: str = "mnist") -> int:
    """Train, test, save and export as ``args`` say; returns the exit status. ``network(args)`` makes the model."""
    import torch

    from trainers.torch._peers import learning_rate
    from trainers.torch.mnist import ABOUT, export, make_optimizer, serving
    from trainers.torch.mnist import network as reference
    from trainers.torch_xla._spmd import Mesh, XlaJob

    mesh = Mesh(args)
    (images, labels, test_images, test_labels), data = mnist.load(args)
    images, test_images = mesh.put(images), mesh.put(test_images)
    global_batch, test_batch = args.batch_size * mesh.replicas, args.test_batch_size * mesh.replicas
    epoch_steps = mnist.steps_per_epoch(len(labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (mesh.replicas if args.scale_lr else 1)
    model = mesh.place((network or reference)(args))
    optimizer = make_optimizer(model, args, mesh)
    mesh.place(model, optimizer)
    own = (model, optimizer, mesh)

    @lru_cache(1)
    def order(epoch: int) -> np.ndarray:  # depends on seed and epoch only
        chosen = mnist.order(len(labels), args.shift, args.seed, epoch)
        return np.column_stack([chosen, labels[chosen[:, 0]]])

    def export_on_cpu(folder: str) -> list[str]:
        example = torch.zeros(2, mnist.SIDE, mnist.SIDE, dtype=torch.uint8)
        return export(serving(model), example, folder, model=args.model, **ABOUT) if folder else []

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(labels), "data": data}  # fmt: skip
    with XlaJob(f"torch_xla.{name}", args, mesh, about, model, total=total, every=epoch_steps,
                count=global_batch) as job:  # fmt: skip
        test = partial(evaluate, model, test_images, test_labels, test_batch, mesh, job.stop)
        step = job.resume(partial(load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        while not job.stop(step):
            mesh.seed(args.seed, step)  # for dropout
            rate, first = peak * learning_rate(step, total, warmup=0.2 * total), step % epoch_steps * global_batch
            batch = mesh.put_batch(order(step // epoch_steps)[first : first + global_batch])
            loss = train_step(model, optimizer, images, batch, rate, mesh, args)
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

    run(main, options, "mnist")
