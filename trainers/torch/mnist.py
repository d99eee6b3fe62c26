# ruff: noqa: E402
"""MNIST in PyTorch: a small network, with the data set as one tensor on the device.

    python -m trainers.torch.mnist --datadir FOLDER --epochs 5
    python -m trainers.torch.mnist --datadir FOLDER --epochs 30 --model vit --optimizer adamw --clip-norm 1

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, mnist_data, order

MODEL = flags.Flag("model", flags.one_of("cnn", "small", "vit"), "cnn", "cnn: two convolutions, 0.2 million weights;"
                   " small: two with batch normalization, 18,000 weights, learns in the fewest steps; vit: a vision"
                   " transformer of torchvision's, 0.1 million weights")  # fmt: skip

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in PyTorch.", (*flags.TORCH, *mnist_data.FLAGS, MODEL), adamw_lr=3e-3)

import argparse
import functools
import json
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainers.common.checkpoints import Checkpoints, State, check_same_run
from trainers.common.log import Log
from trainers.torch import _device
from trainers.torch._device import Device

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels from 0 to 1


def network(args: argparse.Namespace) -> nn.Module:
    """Logits ``[n, 10]`` of images ``[n, 1, 28, 28]``: the model of ``--model``."""
    return {"cnn": cnn, "small": small, "vit": vit}[args.model]()


def cnn() -> nn.Sequential:
    """Two 5x5 convolutions, pooled before the ReLU (a quarter of the work, the same result), and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, mnist_data.CLASSES),
    )


def small() -> nn.Sequential:
    """Two 5x5 convolutions, each pooled and batch-normalized before its ReLU, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, mnist_data.CLASSES),
    )


def vit() -> nn.Module:
    """A vision transformer of 16 patches, four layers and 10 % dropout."""
    try:
        from torchvision.models import VisionTransformer
    except ImportError as error:
        raise exits.UserError(f"--model vit needs torchvision of torch's own index: {error}") from None
    model = VisionTransformer(
        image_size=mnist_data.SIDE, patch_size=7, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, dropout=0.1,
        num_classes=mnist_data.CLASSES,
    )  # fmt: skip
    model.conv_proj = nn.Conv2d(1, 64, kernel_size=7, stride=7)  # torchvision's takes three colors
    return model  # type: ignore[no-any-return]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """``uint8[n, 28, 28]`` as ``float[n, 1, 28, 28]`` normalized to mean 0 and deviation 1 over MNIST."""
    return ((pixels.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)


def gather_crops(images: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """The crops ``uint8[n, 28, 28]`` that ``batch`` lists, as rows of image, row offset, column offset and label."""
    side = torch.arange(mnist_data.SIDE, device=batch.device)
    image, row, column = batch[:, 0], batch[:, 1, None] + side, batch[:, 2, None] + side
    return images[image[:, None, None], row[:, :, None], column[:, None, :]]


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(
    model: nn.Module, images: torch.Tensor, batches: list[torch.Tensor], device: Device, poll: Callable[[], None]
) -> tuple[float, float]:
    """Correct answers and the sum of losses over the test set, every image exactly once."""
    device.broadcast_buffers(model)
    model.eval()
    sums = device.to_device(torch.zeros(2))
    for rows in batches:
        poll()
        batch = device.put_batch(rows)
        with torch.autocast(device.device.type, torch.bfloat16, enabled=device.bf16):
            logits = model(normalised(gather_crops(images, batch))).float()
        labels = batch[:, 3]  # -1: padding, which never is the answer
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([(logits.argmax(dim=1) == labels).sum().float(), loss])
        device.end_step()
    model.train()
    correct, loss_sum = device.sum(sums)
    return correct, loss_sum


def export(model: nn.Module, folder: str, name: str) -> list[str]:
    """Write the model ``name`` into ``folder``: its weights, and programs from images ``uint8[n, 28, 28]`` to
    probabilities."""
    from trainers.torch import _export

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.to("cpu", memory_format=torch.contiguous_format)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(normalised(images)).softmax(dim=1)

    example = torch.zeros(2, mnist_data.SIDE, mnist_data.SIDE, dtype=torch.uint8)
    classes = list(map(str, range(mnist_data.CLASSES)))
    return _export.write(
        Served().eval(),
        example,
        folder,
        model=name,
        classes=classes,
        mean=[MEAN],
        std=[DEVIATION],
        image_size=mnist_data.SIDE,
    )


def main(  # noqa: C901 - the loop, to be read from top to bottom
    args: argparse.Namespace, network: Callable[[argparse.Namespace], nn.Module] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code. ``network(args)`` makes the model."""
    device = _device.init(args)  # seeds, and joins the other processes

    # Data: all images as bytes on the device. A batch is rows of (image, row offset, column offset, label).
    (images, labels), (test_images, test_labels) = mnist_data.load(args)
    device.check_alike("training and test images", images, labels, test_images, test_labels)
    fingerprints = order.fingerprints(images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    train_count, test_count = len(labels), len(test_labels)
    images = device.to_device(mnist_data.padded(images, args.shift))
    test_images = device.to_device(mnist_data.padded(test_images, args.shift))
    test_batches = mnist_data.test_batches(test_labels, args.shift, args.test_batch_size * device.replicas)
    global_batch = args.batch_size * device.replicas
    steps_per_epoch = order.steps_per_epoch(train_count, global_batch)
    total_steps = args.epochs * steps_per_epoch

    # Model and optimizer. Under torch_xla, the compiler averages the gradients.
    model = device.place(network(args))
    ddp = model
    if device.processes > 1 and device.kind != "xla":
        ids = None if device.kind == "cpu" else [device.device.index]
        ddp = DistributedDataParallel(model, ids, gradient_as_bucket_view=True, **_device.OWN_BUFFERS)
    autocast = torch.autocast(device.device.type, torch.bfloat16, enabled=device.bf16)  # needs no gradient scaling
    peak = args.lr * (device.replicas if args.scale_lr else 1)
    groups = _device.parameter_groups(model, args.weight_decay)
    fused = device.kind in ("cpu", "cuda")
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, fused=fused, capturable=device.kind in ("cuda", "xla"))
    else:
        optimizer = torch.optim.SGD(groups, momentum=args.momentum, nesterov=args.momentum > 0, fused=fused)
    device.init_optimizer(optimizer)
    # Of the last step, or the first that was not finite. Not of shape []: torch_xla would take the first one for a
    # constant, and compile the first step and the others separately.
    loss = device.to_device(torch.zeros(1))

    def train_step(batch: torch.Tensor) -> None:
        with autocast:
            logits = ddp(normalised(gather_crops(images, batch)))
        step_loss = F.cross_entropy(logits.float(), batch[:, 3])
        optimizer.zero_grad()
        step_loss.backward()
        if args.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        loss.copy_(torch.where(torch.isfinite(loss), step_loss.detach(), loss))

    # A checkpoint holds tensors and primitives only, so that loading one cannot execute code.
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    checkpoints = Checkpoints(args.checkpoint_dir, args.keep_checkpoints, torch.save, load, device.not_finite)
    run = {"trainer": f"torch.{name}", "model": getattr(args, "model", ""), "optimizer": args.optimizer,
           "seed": args.seed, "global_batch": global_batch, "train_images": train_count, "data": fingerprints,
           "flags": flags.deciding(args, bf16=device.bf16)}  # fmt: skip
    stop = exits.Stop(device.maximum if device.processes > 1 else None, args.checkpoint_minutes)
    step = saved = 0  # steps done, and of those the steps in the newest checkpoint

    with Log(f"torch.{name}", args, device, global_batch, steps_per_epoch) as log:
        tracer = _device.Tracer(args, device, log.say)

        def snapshot() -> State:
            log.check_finite(device.mean(loss))  # every resumed run would fail on a checkpoint with NaN
            state = device.to_cpu({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            log.check_weights(device.not_finite(state))
            return {**state, "run": json.dumps(run), "log": log.state(), "step": step}

        def save() -> None:
            nonlocal saved
            if args.checkpoint_dir and saved < step:
                with log.paused():
                    state = snapshot()
                    log.saved(step, checkpoints.save(state, step) if device.chief else "")
                saved = step
                stop.saved()

        if args.checkpoint_dir and device.chief and not args.eval_only:
            checkpoints.prepare(args.resume)
        state = None
        if args.checkpoint_dir and args.resume:
            read = checkpoints.best if args.eval_only and args.keep_best else checkpoints.newest
            state = device.agreed_state(read)
            if state:
                check_same_run(json.loads(state["run"]), run, args, log.say)
                device.load(model, optimizer, state)
                step = saved = state["step"]
                log.load(state["log"], step)
        log.start(peak, **run)
        stop.install()
        if device.kind == "cuda" and device.processes == 1 and not args.eval_only:
            from trainers.torch import _graph

            changed = [*_graph.changed_by_step(model, optimizer), loss]
            example = device.to_device(torch.zeros(args.batch_size, 4, dtype=torch.int64))
            train_step = _graph.CapturedStep(train_step, changed, [example])  # type: ignore[assignment]

        def test(epoch: int) -> float:
            def poll() -> None:
                if code := stop.poll():
                    raise exits.UserError(f"stopped while testing epoch {epoch}; {log.where_saved()}", code)

            stop.restart()
            found = evaluate(model, test_images, test_batches, device, poll)
            log.check_weights(device.not_finite(device.to_cpu({"model": model.state_dict()})))
            return log.test(epoch, test_count, *found)

        status, code = "completed", 0
        if args.eval_only:
            if not state:
                raise exits.UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", exits.USAGE)
            test(step // steps_per_epoch)
        last_step = min(args.num_steps or total_steps, total_steps)
        for epoch in range(len(log.tests) + 1, 0 if args.eval_only else args.epochs + 1):
            rows = mnist_data.train_rows(labels, args, epoch)  # depends on seed and epoch only
            first, end = (epoch - 1) * steps_per_epoch, epoch * steps_per_epoch
            log.begin_epoch(epoch)
            stop.restart()
            while step < min(end, last_step) and not code:
                tracer.step()
                with log.waiting():
                    batch = device.put_batch(rows[(step - first) * global_batch :][:global_batch])
                rate = learning_rate(step, total_steps, peak)
                _device.set_learning_rate(optimizer, rate)
                device.seed_step(step)
                train_step(batch)
                device.end_step()
                log.step(epoch, step)
                if (step - first) % args.log_steps == 0:  # only then is the loss read from the device
                    log.train(epoch, step, device.mean(loss), rate)
                step += 1
                code = stop.poll()  # of SIGTERM, agreed by all processes
                if stop.save_due or (args.checkpoint_steps and step % args.checkpoint_steps == 0):
                    save()
            log.check_finite(device.mean(loss))  # waits until the device has done all steps, so that the time is right
            log.end_epoch(epoch, complete=step == end)
            if code or step < end or not args.checkpoint_steps or step == total_steps:
                save()
            if step < end:
                status = "preempted" if code else "stopped"
                break
            best, accuracy = log.best, test(epoch)
            if args.keep_best and (best is None or accuracy > best):
                state = snapshot()
                if device.chief:
                    checkpoints.save_best(state)
            if args.target_accuracy and accuracy >= args.target_accuracy:
                status = "reached"
                break

        tracer.close()
        if status == "completed" and log.tests[-1]["accuracy"] < args.target_accuracy:
            status, code = "missed", exits.TARGET_MISSED
        if args.keep_best and (state := device.agreed_state(checkpoints.best)):
            log.say(f"Best checkpoint: step {state['step']}")
            device.load(model, optimizer, state)
        digest = _device.weights_sha256(model)
        if args.export_dir and device.chief and status not in ("stopped", "preempted"):
            log.exported(args.export_dir, export(model, args.export_dir, getattr(args, "model", name)))
        log.finish(status, code, digest)
    device.close(args)
    return code


if __name__ == "__main__":
    _device.main(main, ARGS, "mnist")
