"""Classify MNIST in PyTorch: a small network, with the data set as one tensor on the device.

    python -m trainers.torch.mnist --datadir FOLDER --epochs 5
    torchrun --nproc-per-node 2 -m trainers.torch.mnist --datadir FOLDER --model vit --optimizer adamw --clip-norm 1

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint, with any
number of processes whose global batch is the same. On SIGTERM a run completes its step, saves and exits with 143.

PyTorch takes seconds to import, and is imported in the functions that need it: --help and a wrong option need none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trainers
from trainers.common import files, mnist
from trainers.common.arguments import Parser, add, classification, integer
from trainers.common.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch._peers import Peers

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels from 0 to 1
ABOUT = {"classes": list(map(str, range(mnist.CLASSES))), "mean": [MEAN], "std": [DEVIATION], "image_size": mnist.SIDE}


def parse_args(argv: list[str] | None = None, prog: str = "mnist") -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser(prog, "MNIST in PyTorch.")
    add(parser.learning, "--model", "cnn", "cnn: two convolutions, 0.2 million weights; small: two with batch norm,"
        " 18,000; vit: torchvision's transformer, 0.1 million", choices=("cnn", "small", "vit"))  # fmt: skip
    add(parser.learning, "--shift", 2, "shift images by up to so many pixels at random", type=integer())
    add(parser.running, "--device", "auto", "auto: an accelerator if there is one; tpu: torch_tpu",
        choices=("auto", "cpu", "cuda", "tpu"))  # fmt: skip
    add(parser.data, "--fake-images", 60000, "images of --fake-data", type=integer(1))
    return classification(parser, argv, sgd=0.03, adamw=0.003)


def network(args: argparse.Namespace) -> nn.Module:
    """Return the model of ``--model``: logits ``[n, 10]`` of images ``[n, 1, 28, 28]``."""
    from torch import nn

    if args.model == "cnn":  # pooled before the ReLU: a quarter of the work, the same result
        return nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, mnist.CLASSES))  # fmt: skip
    if args.model == "small":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 5, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, mnist.CLASSES))  # fmt: skip
    try:
        from torchvision.models import VisionTransformer
    except ImportError as error:
        raise files.UserError(f"--model vit needs torchvision of torch's own index: {error}") from None
    model = VisionTransformer(image_size=mnist.SIDE, patch_size=7, num_layers=4, num_heads=4, hidden_dim=64,
                              mlp_dim=128, dropout=0.1, num_classes=mnist.CLASSES)  # fmt: skip
    model.conv_proj = nn.Conv2d(1, 64, kernel_size=7, stride=7)  # torchvision's takes three colors
    return model  # type: ignore[no-any-return]


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Return ``uint8[n, 28, 28]`` as ``float[n, 1, 28, 28]`` with mean 0 and deviation 1 over MNIST."""
    return ((pixels.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)


def shifted(images: torch.Tensor, rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return the images of ``rows[n, 3]``: number, and offsets from 0 to 2 ``most``, into a black border."""
    import torch
    import torch.nn.functional as F

    side = torch.arange(mnist.SIDE, device=rows.device)
    number, down, across = rows[:, 0, None, None], rows[:, 1, None] + side, rows[:, 2, None] + side
    return F.pad(images[rows[:, 0]], (most,) * 4)[
        torch.arange(len(number), device=rows.device)[:, None, None], down[:, :, None], across[:, None, :]]  # fmt: skip


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, rate: float, peers: Peers,
    clip_norm: float,
) -> torch.Tensor:  # fmt: skip
    """Train on a batch; returns its loss."""
    import torch
    import torch.nn.functional as F

    with peers.autocast:
        logits = model(normalized(x))
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    peers.scaler.scale(loss).backward()
    if clip_norm:
        peers.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    peers.scaler.step(optimizer)
    peers.scaler.update()
    return loss.detach()


def evaluate(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, size: int, peers: Peers, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the accuracy in percent and the mean loss, every image exactly once; nothing if the run has to stop."""
    import torch
    import torch.nn.functional as F

    peers.share_buffers(model)
    model.eval()
    sums = torch.zeros(2, device=images.device)
    with torch.no_grad():
        for first in range(peers.rank * size, len(labels) + peers.rank * size, size * peers.size):
            x, y = images[first : first + size], labels[first : first + size]  # empty in a process behind the last
            with peers.autocast:
                logits = model(normalized(x)).float()
            sums += torch.stack([(logits.argmax(dim=1) == y).sum(), F.cross_entropy(logits, y, reduction="sum")])
            if stop():
                return {}
    model.train()
    correct, loss = peers.sum(sums)
    return {"accuracy": 100 * correct / len(labels), "test_loss": loss / len(labels)}


def serving(model: nn.Module) -> nn.Module:
    """Return what is exported: probabilities ``[n, 10]`` of images ``uint8[n, 28, 28]``, with the preprocessing."""
    from torch import nn

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(normalized(images)).softmax(dim=1)

    return Served()


def export(served: nn.Module, example: torch.Tensor, folder: str, **about: object) -> list[str]:
    """Write model.safetensors, with the weights of ``served.model``, and model.pt2 and model.onnx; return their names.

    ``example`` is a batch of at least two. All appear once all are complete; without the package of a format, a note
    says so. Raises :class:`UserError` if ``folder`` cannot be written.
    """
    import torch

    served = served.to("cpu", memory_format=torch.contiguous_format).eval()
    batch = {0: torch.export.Dim("batch", min=1, max=65536)}
    with torch.no_grad():
        program = torch.export.export(served, (example,), dynamic_shapes=(batch,))
    torch.export.save(program, content := io.BytesIO())  # in memory: its writer ends the process if the disk is full
    about |= {"format": "pt", "trainyard": trainers.__version__, "torch": torch.__version__}
    try:
        with files.complete_files(folder) as fresh:
            with open(os.path.join(fresh, "model.pt2"), "wb") as file:
                file.write(content.getbuffer())
            try:
                from safetensors.torch import save

                weights = {name: value.clone().contiguous() for name, value in served.model.state_dict().items()}
                described = {name: text if isinstance(text, str) else json.dumps(text) for name, text in about.items()}
                with open(os.path.join(fresh, "model.safetensors"), "wb") as file:
                    file.write(save(weights, described))
            except ImportError:
                print("note: model.safetensors is not written: pip install safetensors", file=sys.stderr)
            try:
                import onnxscript  # noqa: F401 - the exporter's own requirement

                logging.disable(logging.WARNING)  # the exporter reports its progress
                with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
                    names = {"input_names": ["images"], "output_names": ["probabilities"]}
                    made = torch.onnx.export(program, dynamo=True, **names)
                made.save(os.path.join(fresh, "model.onnx"))
            except ImportError as error:
                print(f"note: model.onnx is not written: pip install {error.name}", file=sys.stderr)
            finally:
                logging.disable(logging.NOTSET)
            return sorted(os.listdir(fresh))
    except OSError as error:
        raise files.UserError(f"{folder}: the model cannot be exported ({error.strerror or error}); make room and run"
                              " again: with --checkpoint-dir that takes the last test and the export only"
                              ) from None  # fmt: skip


def make_optimizer(
    model: nn.Module, args: argparse.Namespace, peers: Peers, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of ``--optimizer``, with weight decay for kernels and matrices, or of ``groups``."""
    import torch

    groups = groups or [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    fused = peers.device.type in ("cpu", "cuda")
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, args.lr, fused=fused, capturable=peers.device.type == "xla")
    return torch.optim.SGD(groups, args.lr, momentum=args.momentum, nesterov=args.momentum > 0, fused=fused)


def state(model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers) -> dict[str, Any]:
    """Return what a checkpoint has, for :mod:`torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaler": peers.scaler.state_dict()}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers, folder: str) -> None:
    """Write this process's part of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    peers.share_buffers(model)
    dcp.save(state(model, optimizer, peers), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, peers: Peers, folder: str) -> None:
    """Load a checkpoint, which any number of processes has written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    dcp.load(saved := state(model, optimizer, peers), checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    peers.scaler.load_state_dict(saved["scaler"])


def main(
    args: argparse.Namespace, network: Callable[[argparse.Namespace], nn.Module] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status. ``network(args)`` makes the model."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from trainers.torch._peers import Peers, learning_rate

    peers = Peers(args)  # joins the other processes
    arrays, data = mnist.load(args)
    images, labels, test_images, test_labels = map(peers.put, arrays)
    batch_size, global_batch = args.batch_size, args.batch_size * peers.size
    epoch_steps = mnist.steps_per_epoch(len(labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.size if args.scale_lr else 1)
    model = network(args).to(peers.device, memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if peers.size > 1 else model
    optimizer = make_optimizer(model, args, peers)
    own = (model, optimizer, peers)

    @functools.lru_cache(1)
    def order(epoch: int) -> torch.Tensor:  # depends on seed and epoch only
        return peers.put(mnist.order(len(labels), args.shift, args.seed, epoch))

    def test() -> dict[str, float]:
        return evaluate(model, test_images, test_labels, args.test_batch_size, peers, job.stop)

    def export_and_test(folder: str) -> list[str]:
        peers.export_in_fp32(args, test, job)
        example = torch.zeros(2, mnist.SIDE, mnist.SIDE, dtype=torch.uint8)
        return export(serving(model), example, folder, model=args.model, **ABOUT) if folder else []

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(labels), "data": data}  # fmt: skip
    with Job(f"torch.{name}", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        where, scaled = (
            f"{peers.size} x {peers.device.type} in {args.precision}",
            "scaled" if args.scale_lr else "as given",
        )
        job.say(f"{total} steps of {global_batch} images on {where}, peak learning rate {peak:g}, {scaled}")
        step = job.resume(functools.partial(load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        while not job.stop(step):
            peers.seed(args.seed, step)  # for dropout
            rate = peak * learning_rate(step, total, warmup=0.2 * total)
            first = step % epoch_steps * global_batch + peers.rank * batch_size  # of this process's part of the batch
            rows = order(step // epoch_steps)[first : first + batch_size]
            x, y = shifted(images, rows, args.shift), labels[rows[:, 0]]
            loss = train_step(ddp, optimizer, x, y, rate, peers, args.clip_norm)
            step += 1
            if job.due("log", step):
                job.log(step, loss=peers.mean(loss), lr=rate)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, functools.partial(save, *own))
        return job.finish(step, functools.partial(save, *own), export_and_test)


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "mnist")
