"""MNIST in PyTorch/XLA: :mod:`trainers.torch.mnist` with one process a host, and SPMD over the devices of all hosts.

    PJRT_DEVICE=TPU python -m trainers.torch_xla.mnist --datadir FOLDER --epochs 5
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python -m trainers.torch_xla.mnist --datadir FOLDER --batch-size 16

XLA compiles a graph for each shape, so that all batches have the same one, and there are two graphs: one trains, one
tests. The log lines are those of pytorch/xla.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from trainers.common import files, mnist
from trainers.common.arguments import Parser, add, classification, integer


def parse_args(argv: list[str] | None = None, prog: str = "mnist") -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser(prog, "MNIST in PyTorch/XLA.")
    add(parser.learning, "--model", "cnn", "cnn, small (with batch norm), vit: see trainers.torch.mnist",
        choices=("cnn", "small", "vit"))  # fmt: skip
    add(parser.learning, "--shift", 2, "shift images by up to so many pixels at random", type=integer())
    add(parser.data, "--fake-images", 60000, "images of --fake-data", type=integer(1))
    add(parser.output, "--metrics-debug", False, "print torch_xla's metrics report at the end")
    return classification(parser, argv, sgd=0.03, adamw=0.003)


def main(args: argparse.Namespace, network: Callable[..., Any] | None = None, name: str = "mnist") -> int:
    """Train, test, save and export as ``args`` say; returns the exit status. ``network(args)`` makes the model."""
    import torch
    import torch.nn.functional as F
    import torch_xla

    from trainers.torch._peers import learning_rate
    from trainers.torch.mnist import ABOUT, export, make_optimizer, normalized, serving, shifted
    from trainers.torch.mnist import network as reference
    from trainers.torch_xla._spmd import Mesh, XlaJob

    peers = Mesh(args)
    (all_images, labels, all_test_images, test_labels), data = mnist.load(args)
    images, test_images = peers.put(all_images), peers.put(all_test_images)
    global_batch, test_batch = args.batch_size * peers.replicas, args.test_batch_size * peers.replicas
    epoch_steps, test_count = mnist.steps_per_epoch(len(labels), global_batch), len(test_images)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.replicas if args.scale_lr else 1)
    # Rows of image and label; behind the last image, rows of the first one with the label -1 fill the last batch.
    rows = np.zeros((-(-test_count // test_batch) * test_batch, 2), np.int64)
    rows[:test_count] = np.column_stack([np.arange(test_count), test_labels])
    rows[test_count:, 1] = -1

    model = peers.place((network or reference)(args))
    optimizer = make_optimizer(model, args, peers)
    peers.place(model, optimizer)

    @functools.lru_cache(1)
    def order(epoch: int) -> np.ndarray:
        chosen = mnist.order(len(labels), args.shift, args.seed, epoch)
        return np.column_stack([chosen, labels[chosen[:, 0]]])

    def train_step(step: int, rate: float) -> torch.Tensor:
        first = step % epoch_steps * global_batch
        batch = peers.put_batch(order(step // epoch_steps)[first : first + global_batch])
        with peers.autocast:
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

    def test() -> dict[str, float]:
        model.eval()
        sums = peers.put(torch.zeros(2))
        for first in range(0, len(rows), test_batch):
            batch = peers.put_batch(rows[first : first + test_batch])
            with torch.no_grad(), peers.autocast:
                logits = model(normalized(test_images[batch[:, 0]])).float()
            loss = F.cross_entropy(logits, batch[:, 1], ignore_index=-1, reduction="sum")
            sums = sums + torch.stack([(logits.argmax(dim=1) == batch[:, 1]).sum().float(), loss])
            torch_xla.sync()
            if job.stop():
                return {}
        model.train()
        correct, loss_sum = peers.sum(sums)
        return {"accuracy": 100 * correct / test_count, "test_loss": loss_sum / test_count}

    def save(folder: str) -> None:  # one host does: all have the same weights
        state = peers.state(model, optimizer)
        if peers.rank == 0:
            with files.atomic_file(files.join(folder, "state.pt")) as file:
                torch.save(state, file)

    def load(folder: str) -> None:
        with files.open_file(files.join(folder, "state.pt")) as file:
            peers.load(model, optimizer, torch.load(file, map_location="cpu", weights_only=True))

    def export_on_cpu(folder: str) -> list[str]:
        example = torch.zeros(2, mnist.SIDE, mnist.SIDE, dtype=torch.uint8)
        return export(serving(model), example, folder, model=args.model, **ABOUT) if folder else []

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(labels), "data": data}  # fmt: skip
    with XlaJob(f"torch_xla.{name}", args, peers, about, model, total=total, every=epoch_steps,
                count=global_batch) as job:  # fmt: skip
        job.replicas = job.more["replicas"] = peers.replicas
        step = job.resume(load)
        if job.due("test", step):
            job.log(step, **test())
        while not job.stop(step):
            peers.seed(args.seed, step)
            rate = peak * learning_rate(step, total, warmup=0.2 * total)
            loss = train_step(step, rate)
            step += 1
            if job.due("log", step):
                job.log(step, loss=peers.mean(loss), lr=rate)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, save)
        job.compilations()
        return job.finish(step, save, export_on_cpu)


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "mnist")
