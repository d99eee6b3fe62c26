"""Train a language model in PyTorch/XLA: :mod:`trainers.torch.gpt`, with SPMD over the devices of all hosts.

    PJRT_DEVICE=TPU python -m trainers.torch_xla.gpt --datadir FOLDER --tokenizer tokenizer.json --model 124m

Weights are on each device, and windows of text are spread over them. There are three graphs: one
trains, one validates, one samples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trainers.common import language
from trainers.common.arguments import Parser, add

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch_xla._spmd import Mesh


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("gpt", "A language model of Llama's architecture in PyTorch/XLA.")
    language.options(parser)
    add(parser.running, "--activation-checkpointing", False, "compute activations again in the backward pass")
    add(parser.output, "--metrics-debug", False, "print torch_xla's metrics report at the end")
    args = parser.parse(argv)
    if args.optimizer == "muon":
        parser.error("--optimizer muon: only in trainers.torch.gpt")
    return args


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: list[torch.Tensor], rate: float, mesh: Mesh,
    clip_norm: float,
) -> torch.Tensor:  # fmt: skip
    """Train on the parts of a global batch; returns its loss."""
    import torch
    import torch_xla

    loss = torch.zeros((), device=mesh.device)
    optimizer.zero_grad()
    for part in windows:
        with mesh.autocast:
            part_loss = model(part[:, :-1], part[:, 1:]) / len(windows)
        part_loss.backward()
        loss = loss + part_loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    torch_xla.sync()  # ends the graph of this step, and runs it
    return loss


def evaluate(
    model: nn.Module, windows: list[np.ndarray], count: int, mesh: Mesh, bytes_per_token: float,
    stop: Callable[[], bool],
) -> dict[str, float]:  # fmt: skip
    """Return the mean loss of ``count`` tokens and bits per byte; nothing if the run has to stop."""
    import torch
    import torch_xla

    model.eval()
    total = mesh.put(torch.zeros(1))
    for part in map(mesh.put_batch, windows):
        with torch.no_grad(), mesh.autocast:
            total = total + model(part[:, :-1].clamp(min=0), part[:, 1:], "sum")
        torch_xla.sync()
        if stop():
            return {}
    model.train()
    loss = mesh.sum(total)[0] / count
    return {"val_loss": loss, **({"bits_per_byte": loss / math.log(2) / bytes_per_token} if bytes_per_token else {})}


def main(args: argparse.Namespace) -> int:
    """Train, validate, save and export as ``args`` say; returns the exit status."""
    from trainers.torch._llama import GPT, make_optimizers
    from trainers.torch.gpt import export, load_pretrained, sample, schedule
    from trainers.torch_xla._spmd import Mesh, XlaJob
    from trainers.torch_xla.mnist import load, save

    mesh = Mesh(args)
    text = language.load(args, print if mesh.rank == 0 else lambda line: None)
    config = language.configure(args, mesh.device.type, text.tokenizer.vocab_size)
    block_size, size = config.max_position_embeddings, args.batch_size * mesh.replicas
    global_batch, per_epoch = size * args.accumulate, language.windows_of(text.train, block_size)
    count = min(len(text.val) - 1, args.eval_tokens) // block_size
    starts = [np.arange(first, min(first + size, count)) * block_size for first in range(0, count, size)]
    validation = [language.windows(text.val, chosen, block_size) for chosen in starts]
    validation = [np.pad(part, ((0, size - len(part)), (0, 0)), constant_values=-1) for part in validation]
    model = GPT(config, recompute=args.activation_checkpointing)
    if args.init_from:
        load_pretrained(model, args.init_from)
    weights = sum(weight.numel() for weight in model.parameters())
    model = mesh.place(model)
    (optimizer,) = make_optimizers(model, args)
    mesh.place(model, optimizer)
    own = (model, optimizer, mesh)

    def windows(step: int) -> list[torch.Tensor]:
        first = step * global_batch  # depend on seed and place only
        parts = (np.arange(first + n * size, first + (n + 1) * size) for n in range(args.accumulate))
        chosen = (language.window_starts(part, per_epoch, block_size, args.seed) for part in parts)
        return [mesh.put_batch(language.windows(text.train, part, block_size)) for part in chosen]

    about = {"model": str(config), "optimizer": args.optimizer, "global_batch": global_batch,
             "train_tokens": len(text.train), "data": text.fingerprints}  # fmt: skip
    with XlaJob("torch_xla.gpt", args, mesh, about, model, total=args.max_steps, every=args.eval_steps,
                metric="val_loss", count=global_batch * block_size, unit="tokens") as job:  # fmt: skip
        job.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {job.count:,} in a step, on"
                f" {mesh.replicas} x {mesh.device} in {args.precision}")  # fmt: skip
        test = partial(evaluate, model, validation, count * block_size, mesh, text.bytes_per_token(), job.stop)
        step = job.resume(partial(load, *own))
        if job.due("test", step):
            job.log(step, **test())
        while not job.stop(step):
            rate = schedule(step, args)
            loss = train_step(model, optimizer, windows(step), rate, mesh, args.clip_norm)
            step += 1
            if job.due("log", step):
                job.log(step, loss=mesh.mean(loss), lr=rate)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, partial(save, *own))
        if args.sample_tokens and not job.stop() and step >= args.max_steps:
            start = text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else text.val[: block_size // 2]
            tokens = sample(model, [*map(int, start)], args.sample_tokens, text.tokenizer.vocab_size, block_size, mesh)
            job.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        return job.finish(step, partial(save, *own), partial(export, model, config, text))


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "gpt")
