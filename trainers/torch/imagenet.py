# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in PyTorch, with torchvision's models.

    python -m trainers.torch.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    torchrun --nproc-per-node 8 -m trainers.torch.imagenet --datadir FOLDER --epochs 90 --ema 0.9999

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains. The same command
continues a run from its last checkpoint. On SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data, order
from trainers.common.flags import Flag, one_of

MORE = (
    Flag("model", str, "resnet50", "any classification model of torchvision: resnet18, resnet50, vit_b_16..."),
    Flag("compile", one_of("auto", "on", "off"), "auto", "use torch.compile; auto: on CUDA only"),
)

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in PyTorch.", (*flags.TORCH, *imagenet_data.FLAGS, *MORE),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip

import argparse
import contextlib
import copy
import functools
import json
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainers.common.checkpoints import Checkpoints, State, check_same_run
from trainers.common.log import Log
from trainers.torch import _decode, _device
from trainers.torch._device import Device


def network(args: argparse.Namespace) -> nn.Module:
    """torchvision's model ``--model`` with random weights.

    Raises :class:`UserError` if torchvision has no such model, or if it does not take images of the sizes that
    ``--image-size`` and ``--progressive`` ask for.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise exits.UserError(f"torchvision of torch's own index is needed: {error}") from None
    if args.model not in models.list_models(module=models):
        raise exits.UserError(
            f"--model {args.model}: torchvision has {', '.join(models.list_models(module=models))}", exits.USAGE
        )
    options: dict[str, object] = {}
    if args.model in ("googlenet", "inception_v3"):  # without the additional outputs that these models train with
        options = {"aux_logits": False, "init_weights": True}
    elif args.model.startswith("vit_"):  # with a position embedding for each patch
        options = {"image_size": args.image_size}
    elif args.model.startswith("maxvit"):
        options = {"input_size": (args.image_size, args.image_size)}
    side = args.image_size
    try:
        model: nn.Module = models.get_model(args.model, weights=None, num_classes=args.num_classes, **options)
        # Shapes only, without computing: on the device "meta".
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        for side in (args.image_size, *args.progressive):
            torch.func.functional_call(model, shapes, torch.empty(2, 3, side, side, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise exits.UserError(
            f"--model {args.model} does not take images of {side} pixels ({reason}): use another --image-size, or leave"
            " out --progressive",
            exits.USAGE,
        ) from None
    return model


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1


class Normalise(nn.Module):
    """``uint8[n, side, side, 3]`` as ``float[n, 3, side, side]`` with mean 0 and deviation 1 over ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers are on the device from the start; tensors made from lists would be copied to it in each step.
        self.register_buffer("mean", 255 * torch.tensor(MEAN), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(DEVIATION), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels``, normalized."""
        return ((pixels.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


class Served(nn.Module):
    """The exported model: class probabilities of images ``uint8[n, side, side, 3]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.normalise = model, Normalise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of ``images``."""
        return self.model(self.normalise(images)).softmax(dim=1)


class Average:
    """The exponential moving average of a model's weights and buffers (``--ema``), in ``model``.

    Its decay rises with the steps, or the random weights at the start would dominate for 1 / (1 - decay) steps:
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """

    def __init__(self, model: nn.Module, trained: nn.Module, decay: float) -> None:
        """Average the weights of ``trained`` in ``model``, a copy of it."""
        self.model, self.decay = model, decay
        slow, fast = (list(one.state_dict(keep_vars=True).values()) for one in (model, trained))
        pairs = list(zip(slow, fast, strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counts = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after ``step``, counted from 0."""
        slow, fast = map(list, zip(*self.floats, strict=True))
        torch._foreach_lerp_(slow, fast, 1 - min(self.decay, (1 + step) / (10 + step)))
        for average, value in self.counts:
            average.copy_(value)


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    device: Device,
    normalise: nn.Module,
    poll: Callable[[], None],
) -> tuple[float, float, float]:
    """Correct answers, the sum of losses, and correct answers among the best five; every test image exactly once."""
    device.broadcast_buffers(model)
    model.eval()
    sums = device.to_device(torch.zeros(3))
    for pixels, targets in batches:
        poll()
        labels = device.put_share(targets)
        images = normalise(device.put_share(pixels)).contiguous(memory_format=device.memory_format)
        with torch.autocast(device.device.type, torch.bfloat16, enabled=device.bf16):
            logits = model(images).float()
        # The padding's label, -1, never hits.
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([hits[:, 0].sum().float(), loss, hits.sum().float()])
        device.end_step()
    model.train()
    first, loss_sum, fifth = device.sum(sums)
    return first, loss_sum, fifth


def main(args: argparse.Namespace) -> int:  # noqa: C901 - the loop, to be read from top to bottom
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = _device.init(args)  # seeds, and joins the other processes
    data = imagenet_data.Data(args, device.share, _decode.decode, device)
    global_batch = args.batch_size * args.accumulate * device.replicas
    steps_per_epoch = order.steps_per_epoch(data.count, global_batch)
    total_steps = args.epochs * steps_per_epoch
    warmup = min(0.5, args.warmup_epochs / args.epochs)

    # Model and optimizer. Under torch_xla, the compiler averages the gradients.
    model = network(args)
    copied = copy.deepcopy(model) if args.ema else None
    model = device.place(model)
    average = Average(device.place(copied), model, args.ema) if copied else None
    normalise = device.place(Normalise())
    ddp = model
    if args.compile == "on" or (args.compile == "auto" and device.kind == "cuda"):
        # A graph for each size of --progressive: one for all would be slower.
        ddp = torch.compile(model, dynamic=False)
    if device.processes > 1 and device.kind != "xla":
        ids = None if device.kind == "cpu" else [device.device.index]
        ddp = DistributedDataParallel(ddp, ids, gradient_as_bucket_view=True, **_device.OWN_BUFFERS)
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

    def loss_of(pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The loss on ``pixels``, blended with the next image of the batch where ``mask`` is below 1."""
        images, smoothing = normalise(pixels), args.label_smoothing
        if args.mixup or args.cutmix:
            images = images * mask + images.roll(1, 0) * (1 - mask)
        with autocast:
            logits = ddp(images.contiguous(memory_format=device.memory_format)).float()
        found = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if args.mixup or args.cutmix:
            keep = mask.mean()
            found = keep * found + (1 - keep) * F.cross_entropy(logits, labels.roll(1), label_smoothing=smoothing)
        return found

    def train_step(pixels: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(loss)
        parts = list(zip(pixels.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True))
        for number, (part, targets) in enumerate(parts, 1):
            # Gradients are averaged over the processes once per step, with its last part.
            local = number < len(parts) and isinstance(ddp, DistributedDataParallel)
            with ddp.no_sync() if local else contextlib.nullcontext():
                part_loss = loss_of(part, targets, mask) / len(parts)
                if number == 1:  # not before the forward pass, which would have to allocate their memory again
                    optimizer.zero_grad()
                part_loss.backward()
                total += part_loss.detach()
        if args.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        return torch.where(torch.isfinite(loss), total, loss)

    # A checkpoint holds tensors and primitives only, so that loading one cannot execute code.
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    checkpoints = Checkpoints(args.checkpoint_dir, args.keep_checkpoints, torch.save, load, device.not_finite)
    run = {"trainer": "torch.imagenet", "model": args.model, "optimizer": args.optimizer, "seed": args.seed,
           "global_batch": global_batch, "train_images": data.count, "data": data.fingerprints,
           "flags": flags.deciding(args, bf16=device.bf16)}  # fmt: skip
    stop = exits.Stop(device.maximum if device.processes > 1 else None, args.checkpoint_minutes)
    step = saved = 0  # steps done, and of those the steps in the newest checkpoint

    with Log("torch.imagenet", args, device, global_batch, steps_per_epoch) as log:
        tracer = _device.Tracer(args, device, log.say)

        def snapshot() -> State:
            log.check_finite(device.mean(loss))  # every resumed run would fail on a checkpoint with NaN
            state = device.to_cpu({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if average:
                state["average"] = device.to_cpu(average.model.state_dict())
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

        def restore(state: State) -> None:
            device.load(model, optimizer, state)
            if average:
                device.load_weights(average.model, state.get("average", state["model"]))

        if args.checkpoint_dir and device.chief and not args.eval_only:
            checkpoints.prepare(args.resume)
        state = None
        if args.checkpoint_dir and args.resume:
            read = checkpoints.best if args.eval_only and args.keep_best else checkpoints.newest
            state = device.agreed_state(read)
            if state:
                check_same_run(json.loads(state["run"]), run, args, log.say)
                restore(state)
                step = saved = state["step"]
                log.load(state["log"], step)
        log.start(peak, **run)
        stop.install()

        def test(epoch: int) -> float:
            def poll() -> None:
                if code := stop.poll():
                    raise exits.UserError(f"stopped while testing epoch {epoch}; {log.where_saved()}", code)

            stop.restart()
            tested = average.model if average else model
            batches = data.test(args.test_batch_size * device.replicas)
            correct, loss_sum, top5 = evaluate(tested, batches, device, normalise, poll)
            log.check_weights(device.not_finite(device.to_cpu({"model": tested.state_dict()})))
            return log.test(epoch, data.test_count, correct, loss_sum, top5=100 * top5 / data.test_count)

        status, code = "completed", 0
        if args.eval_only:
            if not state:
                raise exits.UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", exits.USAGE)
            test(step // steps_per_epoch)
        last_step = min(args.num_steps or total_steps, total_steps)
        for epoch in range(len(log.tests) + 1, 0 if args.eval_only else args.epochs + 1):
            first, end = (epoch - 1) * steps_per_epoch, epoch * steps_per_epoch
            batches = data.train(epoch, step - first, global_batch)  # depends on seed and epoch only
            log.begin_epoch(epoch)
            stop.restart()
            with contextlib.closing(batches):  # type: ignore[type-var]
                while step < min(end, last_step) and not code:
                    tracer.step()
                    with log.waiting():
                        pixels, labels = next(batches)
                    mask = device.to_device(data.mask(epoch, step - first, data.side(epoch)))
                    rate = learning_rate(step, total_steps, peak, warmup)
                    _device.set_learning_rate(optimizer, rate)
                    device.seed_step(step)
                    loss = train_step(device.put_share(pixels), device.put_share(labels), mask)
                    if average:
                        average.update(step)
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
            restore(state)
        final = average.model if average else model
        digest = _device.weights_sha256(final)
        if args.export_dir and device.chief and status not in ("stopped", "preempted"):
            from trainers.torch import _export

            served = Served(final.to("cpu", memory_format=torch.contiguous_format)).eval()
            example = torch.zeros(2, args.image_size, args.image_size, 3, dtype=torch.uint8)
            about = {"model": args.model, "num_classes": args.num_classes, "classes": data.classes, "mean": MEAN,
                     "std": DEVIATION, "image_size": args.image_size}  # fmt: skip
            log.exported(args.export_dir, _export.write(served, example, args.export_dir, **about))
        log.finish(status, code, digest)
    device.close(args)
    return code


if __name__ == "__main__":
    _device.main(main, ARGS, "imagenet")
