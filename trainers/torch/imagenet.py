"""Classify ImageNet (or any large set of labelled images) in PyTorch, with torchvision's models.

    python -m trainers.torch.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    torchrun --nproc-per-node 8 -m trainers.torch.imagenet --datadir FOLDER --epochs 90 --ema 0.9999

FOLDER holds class folders or tar shards; threads decode while the device trains. The same command
continues a run from its last checkpoint. On SIGTERM a run completes its step, saves and exits with 143.
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
from trainers.common.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch._peers import Peers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("imagenet", "ImageNet in PyTorch.")
    add(parser.learning, "--model", "resnet50", "any classification model of torchvision: resnet18, vit_b_16...")
    add(parser.running, "--compile", "auto", "use torch.compile; auto: on CUDA only", choices=("auto", "on", "off"))
    add(parser.running, "--device", "auto", "auto: an accelerator if there is one; tpu: torch_tpu",
        choices=("auto", "cpu", "cuda", "tpu"))  # fmt: skip
    defaults = {"epochs": 18, "batch_size": 256, "test_batch_size": 256, "weight_decay": 5e-5}
    imagenet_data.options(parser)
    return classification(parser, argv, defaults, sgd=0.5, adamw=0.001)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, normalise: nn.Module, peers: Peers, args: argparse.Namespace,
    seed: Callable[[], None], pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, rate: float,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch, in ``--accumulate`` parts, with the random numbers of ``seed()``; returns its loss."""
    import torch

    from trainers.torch._images import loss_of

    seed()
    loss = torch.zeros((), device=peers.device)
    parts = list(zip(pixels.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True))
    for number, (part, targets) in enumerate(parts, 1):
        # Gradients are averaged over the processes once per step, with its last part.
        with model.no_sync() if number < len(parts) and hasattr(model, "no_sync") else contextlib.nullcontext():
            images = normalise(part)
            if args.mixup or args.cutmix:
                images = images * mask + images.roll(1, 0) * (1 - mask)
            with peers.autocast:
                logits = model(images.contiguous(memory_format=torch.channels_last)).float()
            part_loss = loss_of(logits, targets, mask, args) / len(parts)
            if number == 1:  # not before the forward pass, which would have to allocate their memory again
                optimizer.zero_grad()
            peers.scaler.scale(part_loss).backward()
        loss += part_loss.detach()
    if args.clip_norm:
        peers.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    peers.scaler.step(optimizer)
    peers.scaler.update()
    return loss


def evaluate(
    model: nn.Module, data: imagenet_data.Data, size: int, normalise: nn.Module, peers: Peers, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent and the mean loss, every image exactly once; nothing if the run has to
    stop."""
    import torch
    import torch.nn.functional as F

    peers.share_buffers(model)
    model.eval()
    sums = torch.zeros(3, device=peers.device)
    with contextlib.closing(data.test(size * peers.size)) as batches:
        for pixels, targets in batches:
            labels = peers.put(targets)
            images = normalise(peers.put(pixels)).contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), peers.autocast:
                logits = model(images).float()
            # The padding's label, -1, never hits.
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
            sums += torch.stack([hits[:, 0].sum().float(), loss, hits.sum().float()])
            if stop():
                return {}
    model.train()
    first, loss_sum, fifth = (value / data.test_count for value in peers.sum(sums))
    return {"accuracy": 100 * first, "test_loss": loss_sum, "top5": 100 * fifth}


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from trainers.torch import _decode
    from trainers.torch._images import (
        DEVIATION,
        MEAN,
        Average,
        EagerIfCompilingFails,
        Normalise,
        Served,
        compiled,
        imagenet_network,
    )  # fmt: skip
    from trainers.torch._peers import Peers, learning_rate
    from trainers.torch.mnist import export, load, make_optimizer, save

    peers = Peers(args)  # joins the other processes
    data = imagenet_data.Data(args, lambda batch: order.share(batch, peers.rank, peers.size), _decode.decode, peers)
    global_batch = args.batch_size * args.accumulate * peers.size
    epoch_steps = mnist.steps_per_epoch(data.count, global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.size if args.scale_lr else 1)
    warmup = min(0.5, args.warmup_epochs / args.epochs) * total

    model = imagenet_network(args)
    copied = copy.deepcopy(model) if args.ema else None
    model = model.to(peers.device, memory_format=torch.channels_last)
    average = Average(copied.to(peers.device, memory_format=torch.channels_last), model, args.ema) if copied else None
    tested, normalise = average.model if average else model, Normalise().to(peers.device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if peers.size > 1 else model
    optimizer = make_optimizer(model, args, peers)
    own = (nn.ModuleDict({"model": model, "average": tested}) if average else model, optimizer, peers)

    def batches(step: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        while True:  # depend on seed and epoch only
            epoch = step // epoch_steps + 1
            with contextlib.closing(data.train(epoch, step % epoch_steps, global_batch)) as epoch_batches:
                for pixels, labels in epoch_batches:
                    yield pixels, labels, data.mask(epoch, step % epoch_steps, data.side(epoch))
                    step += 1

    def test() -> dict[str, float]:
        return evaluate(tested, data, args.test_batch_size, normalise, peers, job.stop)

    def export_and_test(folder: str) -> list[str]:
        peers.export_in_fp32(args, test, job)
        example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
        about = {"num_classes": args.num_classes, "classes": data.classes, "mean": MEAN, "std": DEVIATION}
        return export(Served(tested), example, folder, model=args.model, image_size=args.image_size,
                      **about) if folder else []  # fmt: skip

    about = {"model": args.model + " with averaged weights (--ema)" * bool(args.ema), "optimizer": args.optimizer,
             "global_batch": global_batch, "train_images": data.count, "data": data.fingerprints}  # fmt: skip
    with Job("torch.imagenet", args, peers, about, tested, total=total, every=epoch_steps, count=global_batch) as job:
        step = job.resume(partial(load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        # torch.compile is around DistributedDataParallel, which so sends gradients while others are computed.
        forward, stream = compiled(ddp, args.compile, peers), batches(step)
        training = partial(train_step, forward, optimizer, normalise, peers, args)
        attempt = EagerIfCompilingFails(training, model, job.say) if forward is not ddp else training
        while not job.stop(step):
            seed = partial(peers.seed, args.seed, step)
            rate, batch = peak * learning_rate(step, total, warmup), [peers.put(part) for part in next(stream)]
            loss = attempt(seed, *batch, rate)
            step += 1
            if average:
                average.update(step - 1)
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

    run(main, options, "imagenet")
