# ruff: noqa: E402
"""Train on flowers (or any small set of labelled images) in JAX, from scratch or from pretrained weights.

    python -m trainers.jax.flowers --datadir flower_photos --epochs 30
    python -m trainers.jax.flowers --datadir flower_photos --model resnet50 --weights resnet50.safetensors --epochs 15

All images are decoded once and stay on the devices as bytes; cropping, scaling and mirroring happen there, as two
matrix products per batch. The same command continues a run from its last checkpoint. On SIGTERM a run completes its
step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data, order
from trainers.common.flags import Flag, one_of
from trainers.jax import FLAGS

MODEL = Flag("model", one_of("small", "vit", "resnet18", "resnet34", "resnet50"), "small", "small: four stages, 2.8"
             " million weights; vit: a vision transformer, 1.2 million weights; the others are torchvision's and accept"
             " --weights")  # fmt: skip

if __name__ == "__main__":  # before jax is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in JAX.", (*FLAGS, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip

import argparse
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers.common.run import Run
from trainers.jax import _devices, _export
from trainers.jax._devices import Devices

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights


def conv(into: int, out: int, size: int, dtype: jnp.dtype, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """Return a convolution without bias, padded by half of its ``size`` as in PyTorch."""
    start = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # He's, as in torchvision
    return nnx.Conv(into, out, (size, size), stride, padding=size // 2, use_bias=False, kernel_init=start, dtype=dtype,
                    rngs=rngs)  # fmt: skip


def norm(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Return a batch normalization with the averages of PyTorch's."""
    return nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)


class Unit(nnx.Module):
    """Apply a convolution, batch norm and ReLU."""

    def __init__(self, into: int, out: int, dtype: jnp.dtype, rngs: nnx.Rngs, stride: int = 1) -> None:
        self.conv, self.bn = conv(into, out, 3, dtype, rngs, stride), norm(out, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.bn(self.conv(x)))


class Small(nnx.Module):
    """Classify a few thousand images: each stage halves the picture, doubles the width and adds a residual."""

    def __init__(self, classes: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.stem = Unit(3, 32, dtype, rngs, 2)
        self.stages = nnx.List([
            nnx.List([Unit(width // 2, width, dtype, rngs, 2), *(Unit(width, width, dtype, rngs) for _ in range(2))])
            for width in (64, 128, 256)
        ])  # fmt: skip
        self.fc = nnx.Linear(256, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.stem(x)
        for down, first, second in self.stages:
            x = down(x)
            x = x + second(first(x))
        return self.fc(x.mean(axis=(1, 2)))


class Encoder(nnx.Module):
    """Apply attention and MLP of a vision transformer, each with its normalization before it, and 10 % dropout."""

    def __init__(self, width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)), rngs=rngs)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))), rngs=rngs)


class ViT(nnx.Module):
    """Classify with a vision transformer of 64 patches and six layers, for images of ``side`` pixels."""

    def __init__(self, classes: int, side: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        if side % 8:
            raise exits.UserError(f"--model vit: --image-size {side} is not a multiple of 8", exits.USAGE)
        patch = (side // 8, side // 8)
        self.patches = nnx.Conv(3, 128, patch, strides=patch, padding="VALID", dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 64, 128)))
        self.encoders = nnx.List([Encoder(128, dtype, rngs) for _ in range(6)])
        self.norm = nnx.LayerNorm(128, dtype=dtype, rngs=rngs)
        self.fc = nnx.Linear(128, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 64, 128) + self.positions
        for encoder in self.encoders:
            x = encoder(x, rngs)
        return self.fc(self.norm(x).mean(axis=1))


class Block(nnx.Module):
    """Apply a residual block of a ResNet: two 3x3 convolutions, or (``bottleneck``) 1x1, 3x3 and 1x1.

    Its parts have torchvision's names, as those of :class:`ResNet` do.
    """

    def __init__(self, into: int, width: int, stride: int, bottleneck: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        out = width * 4 if bottleneck else width
        sizes = ((into, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1))
        if not bottleneck:
            sizes = ((into, width, 3, stride), (width, out, 3, 1))
        for number, (before, after, size, step) in enumerate(sizes, 1):
            setattr(self, f"conv{number}", conv(before, after, size, dtype, rngs, step))
            setattr(self, f"bn{number}", norm(after, dtype, rngs))
        self.count = len(sizes)
        self.downsample = nnx.data(None)
        if stride > 1 or into != out:
            self.downsample = nnx.List([conv(into, out, 1, dtype, rngs, stride), norm(out, dtype, rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            y = nnx.relu(y) if number < self.count else y
        if self.downsample is not None:
            x = self.downsample[1](self.downsample[0](x))
        return nnx.relu(x + y)


BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}  # of each of four layers


class ResNet(nnx.Module):
    """Classify as torchvision's ResNets do: https://arxiv.org/abs/1512.03385, with the stride in conv2."""

    def __init__(self, name: str, classes: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1 = conv(3, 64, 7, dtype, rngs, 2), norm(64, dtype, rngs)
        into, bottleneck = 64, name == "resnet50"
        for number, blocks in enumerate(BLOCKS[name]):
            layer = []
            for position in range(blocks):
                stride = 2 if number and not position else 1
                layer.append(Block(into, 64 << number, stride, bottleneck, dtype, rngs))
                into = (64 << number) * (4 if bottleneck else 1)
            setattr(self, f"layer{number + 1}", nnx.List(layer))
        self.fc = nnx.Linear(into, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                x = block(x)
        return self.fc(x.mean(axis=(1, 2)))


# A variable of Flax -> the tensor of PyTorch that has its values.
_TORCH = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def load_pretrained(model: ResNet, path: str) -> None:
    """Load all but the last layer from a safetensors file with torchvision's names, which are timm's, too.

    Raises:
        UserError: it is no such file, or of another model.
    """
    try:
        from safetensors.numpy import load_file

        tensors = load_file(path)
    except Exception as error:  # a missing file, a damaged header, a missing package: all raise different types
        reason = str(error).splitlines()[0]
        raise exits.UserError(f"--weights {path}: cannot be read as safetensors: {reason}") from None
    state = nnx.state(model)
    wanted = {}
    for keys, variable in nnx.to_flat_state(state):
        if keys[0] != "fc":
            wanted[".".join(map(str, (*keys[:-1], _TORCH[keys[-1]])))] = variable
    known = {name for name in tensors if not name.startswith("fc.") and not name.endswith(".num_batches_tracked")}
    if differing := sorted(wanted.keys() ^ known):
        lacks = "lacks" if differing[0] in wanted else "has"
        raise exits.UserError(f"--weights {path}: is of another model: it {lacks} {differing[0]}")
    for name, variable in wanted.items():
        value = tensors[name].astype(np.float32)
        value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value  # PyTorch: out, in, y, x
        if value.shape != variable.get_value().shape:
            raise exits.UserError(f"--weights {path}: is of another model: {name} has shape {tensors[name].shape}")
        variable.set_value(jnp.asarray(value))
    nnx.update(model, state)


def network(args: argparse.Namespace, classes: int, device: Devices) -> nnx.Module:
    """Return the model of ``--model``, with the pretrained weights of ``--weights`` in all but the last layer.

    Raises :class:`UserError` if ``--weights`` does not fit the model.
    """
    if args.weights and not args.model.startswith("resnet"):
        raise exits.UserError("--weights needs --model resnet18, resnet34 or resnet50", exits.USAGE)
    rngs = nnx.Rngs(args.seed)
    if args.model == "small":
        return Small(classes, device.dtype, rngs)
    if args.model == "vit":
        return ViT(classes, args.image_size, device.dtype, rngs)
    model = ResNet(args.model, classes, device.dtype, rngs)
    if args.weights:
        load_pretrained(model, args.weights)
    return model


def make_optimizer(args: argparse.Namespace, rates: np.ndarray) -> optax.GradientTransformation:
    """Return the optimizer of ``--optimizer``; with ``--weights``, pretrained layers have a lower learning rate."""
    optimizer = _devices.optimizer(args, lambda step: jnp.asarray(rates)[step])
    if not args.weights:
        return optimizer

    def pretrained(params: nnx.State) -> nnx.State:
        return jax.tree.map_with_path(lambda path, _: path[0].key != "fc", params)

    return optax.chain(optimizer, optax.masked(optax.scale(PRETRAINED_SCALE), pretrained))


def resampling(start: jax.Array, end: jax.Array, source: int, target: int) -> jax.Array:
    """Return matrices ``[n, target, source]`` that resize the spans from ``start`` to ``end`` to ``target`` pixels.

    Spans are fractions of a side of ``source`` pixels; ``start`` > ``end`` mirrors. Bilinear, with antialiasing.
    """
    steps = (jnp.arange(target) + 0.5) / target
    centres = (start[:, None] + (end - start)[:, None] * steps) * source - 0.5
    reach = jnp.maximum(jnp.abs(end - start) * source / target, 1.0)[:, None, None]
    distance = jnp.abs(centres[:, :, None] - jnp.arange(source))
    weights = jnp.maximum(1 - distance / reach, 0.0)
    return weights / weights.sum(axis=2, keepdims=True)


def gather_crops(images: jax.Array, numbers: jax.Array, boxes: jax.Array, side: int) -> jax.Array:
    """Return ``float[n, side, side, 3]`` in 0 to 255: the ``boxes`` (upper, lower, left, right) of the images."""
    down = resampling(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    across = resampling(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    tall = jnp.einsum("nyh,nhwc->nywc", down, images[numbers].astype(jnp.float32))
    return jnp.einsum("nxw,nywc->nyxc", across, tall)


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1


def normalised(pixels: jax.Array) -> jax.Array:
    """Return ``[n, y, x, 3]`` of 0 to 255 normalized to mean 0 and deviation 1 over ImageNet."""
    return (pixels.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(DEVIATION)


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Return linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that none is 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@nnx.jit(static_argnames=("side", "smoothing"))
def train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, batch: jax.Array, boxes: jax.Array, seed: int,
    loss: jax.Array, side: int, smoothing: float,
) -> jax.Array:  # fmt: skip
    """Train one step; returns its loss, or ``loss``, that of the step before, if that one was not finite.

    Dropout depends on ``seed`` and the number of the step, so that a resumed run has the same masks.
    """
    key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])
    pixels = normalised(gather_crops(images, batch[:, 0], boxes, side))

    def loss_fn(model: nnx.Module) -> jax.Array:
        logits = model(pixels, nnx.Rngs(dropout=key)).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(batch[:, 1], logits.shape[1]), smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    step_loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return jnp.where(jnp.isfinite(loss), step_loss, loss)


@nnx.jit(static_argnames="side")
def test_step(model: nnx.Module, images: jax.Array, batch: jax.Array, boxes: jax.Array, side: int) -> jax.Array:
    """Return correct answers and the sum of losses of a batch; rows with label -1 are padding and do not count."""
    labels = batch[:, 1]
    logits = model(normalised(gather_crops(images, batch[:, 0], boxes, side))).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.stack([(logits.argmax(axis=1) == labels).sum(), (losses * (labels >= 0)).sum()])


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    device = Devices(args)  # joins the other processes

    # Data: all images as bytes on each device. A batch is rows of (image, label), and the boxes to crop.
    data = flowers_data.Data(args, device)
    device.check_alike("training and test images", data.images, data.labels, data.test_images, data.test_labels)
    images, test_images = device.replicate(data.images), device.replicate(data.test_images)
    test_batches = list(zip(*data.test_rows(args.test_batch_size * device.replicas), strict=True))
    global_batch = args.batch_size * device.replicas

    model = network(args, len(data.classes), device)
    total_steps = args.epochs * order.steps_per_epoch(len(data.labels), global_batch)
    peak = args.lr * (device.replicas if args.scale_lr else 1)
    rates = np.array([learning_rate(step, total_steps, peak) for step in range(total_steps)], np.float32)
    optimizer = nnx.Optimizer(model, make_optimizer(args, rates), wrt=nnx.Param)
    device.place(model, optimizer)
    loss = device.replicate(np.float32(0))  # of the last step, or the first that was not finite

    def test(poll: Callable[[], None]) -> tuple[float, float]:
        model.eval()
        sums = np.zeros(2, np.float32)
        for rows, boxes in test_batches:
            poll()
            sums = sums + test_step(model, test_images, device.put_batch(rows), device.put_batch(boxes),
                                    args.image_size)  # fmt: skip
        model.train()
        correct, loss_sum = np.asarray(sums).tolist()
        return correct, loss_sum

    def export(folder: str) -> list[str]:
        example = jax.ShapeDtypeStruct((args.image_size, args.image_size, 3), jnp.uint8)
        return _export.write(model, normalised, example, folder, model=args.model, num_classes=len(data.classes),
                             classes=data.classes, mean=MEAN, std=DEVIATION, image_size=args.image_size)  # fmt: skip

    with Run("jax.flowers", args, device, global_batch=global_batch, train_count=len(data.labels),
             test_count=len(data.test_labels), data=data.fingerprints, model=model,
             optimizer=optimizer) as run:  # fmt: skip
        for epoch in run.epochs(test):
            rows, boxes = data.train_rows(epoch)  # depend on seed and epoch only
            first = run.step_in_epoch * global_batch
            batches = (tuple(device.put_batch(part[at:][:global_batch]) for part in (rows, boxes))
                       for at in range(first, len(rows), global_batch))  # fmt: skip
            for step, batch in run.steps(batches):
                loss = train_step(model, optimizer, images, *batch, np.uint32(args.seed), loss, side=args.image_size,
                                  smoothing=args.label_smoothing)  # fmt: skip
                run.end_step(loss, float(rates[step]))
        run.finish(export, classes=data.classes)
    device.close()
    return run.code


if __name__ == "__main__":
    _devices.main(main, ARGS, "flowers")
