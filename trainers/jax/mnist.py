# ruff: noqa: E402
"""Train on MNIST in JAX: a small network in Flax NNX, with the data set as one array on the devices.

    python -m trainers.jax.mnist --datadir FOLDER --epochs 5
    python -m trainers.jax.mnist --datadir FOLDER --epochs 30 --model vit --optimizer adamw --clip-norm 1

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import flags, mnist_data, order
from trainers.jax import FLAGS

MODEL = flags.Flag("model", flags.one_of("cnn", "small", "vit"), "cnn", "cnn: two convolutions, 0.2 million weights;"
                   " small: two with batch normalization, 18,000 weights, learns in the fewest steps; vit: a vision"
                   " transformer, 0.1 million weights")  # fmt: skip

if __name__ == "__main__":  # before jax is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in JAX.", (*FLAGS, *mnist_data.FLAGS, MODEL), adamw_lr=3e-3)

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

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels from 0 to 1


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maxima of the 2x2 squares of ``x[n, height, width, channels]``.

    XLA's CPU backend takes a sixth of the time for the gradient of this, compared with that of ``nnx.max_pool``.
    """
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class CNN(nnx.Module):
    """Classify with two 5x5 convolutions, pooled before the ReLU (a quarter of the work), and two linear layers.

    Its calls return logits ``[n, 10]`` of images ``[n, 28, 28, 1]``, as those of the other models do.
    """

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (5, 5), padding="VALID", dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (5, 5), padding="VALID", dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(64 * 4 * 4, 128, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(128, mnist_data.CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv in (self.conv1, self.conv2):
            x = nnx.relu(max_pool(conv(x)))
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Small(nnx.Module):
    """Classify with two 5x5 convolutions, each pooled and batch-normalized before its ReLU, and a linear layer."""

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (5, 5), padding="VALID", use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (5, 5), padding="VALID", use_bias=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(32 * 4 * 4, mnist_data.CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = nnx.relu(norm(max_pool(conv(x))))
        return self.head(x.reshape(x.shape[0], -1))


class Block(nnx.Module):
    """Apply attention and MLP of a vision transformer, each with its normalization before it."""

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
    """Classify with a vision transformer of 16 patches, four layers and 10 % dropout."""

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, 64, (7, 7), strides=(7, 7), padding="VALID", dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 16, 64)))
        self.blocks = nnx.List([Block(64, dtype, rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(64, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(64, mnist_data.CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 16, 64) + self.positions
        for block in self.blocks:
            x = block(x, rngs)
        return self.head(self.norm(x).mean(axis=1))


def network(args: argparse.Namespace, device: Devices) -> nnx.Module:
    """Return the model of ``--model``, in eval mode the same function in all processes."""
    model: nnx.Module = {"cnn": CNN, "small": Small, "vit": ViT}[args.model](device.dtype, nnx.Rngs(args.seed))
    return model


def normalised(pixels: jax.Array) -> jax.Array:
    """Return ``uint8[n, 28, 28]`` as ``float[n, 28, 28, 1]`` normalized to mean 0 and deviation 1 over MNIST."""
    return ((pixels.astype(jnp.float32) / 255 - MEAN) / DEVIATION)[..., None]


def gather_crops(images: jax.Array, batch: jax.Array) -> jax.Array:
    """Return the crops ``uint8[n, 28, 28]`` that ``batch`` lists, as rows of image, row and column offset, label."""
    side = jnp.arange(mnist_data.SIDE)
    image, row, column = batch[:, 0], batch[:, 1, None] + side, batch[:, 2, None] + side
    return images[image[:, None, None], row[:, :, None], column[:, None, :]]


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Return linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that none is 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


@nnx.jit
def train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, batch: jax.Array, seed: int, loss: jax.Array
) -> jax.Array:
    """Train one step; returns its loss, or ``loss``, that of the step before, if that one was not finite.

    Dropout depends on ``seed`` and the number of the step, so that a resumed run has the same masks.
    """
    key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])

    def loss_fn(model: nnx.Module) -> jax.Array:
        logits = model(normalised(gather_crops(images, batch)), nnx.Rngs(dropout=key)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 3]).mean()

    step_loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return jnp.where(jnp.isfinite(loss), step_loss, loss)


@nnx.jit
def test_step(model: nnx.Module, images: jax.Array, batch: jax.Array) -> jax.Array:
    """Return correct answers and the sum of losses of a batch; rows with label -1 are padding and do not count."""
    labels = batch[:, 3]
    logits = model(normalised(gather_crops(images, batch))).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.stack([(logits.argmax(axis=1) == labels).sum(), (losses * (labels >= 0)).sum()])


def evaluate(
    model: nnx.Module, images: jax.Array, batches: np.ndarray, device: Devices, poll: Callable[[], None]
) -> tuple[float, float]:
    """Return correct answers and the sum of losses over the test set, every image exactly once."""
    model.eval()
    sums = jnp.zeros(2)
    for rows in batches:
        poll()
        sums = sums + test_step(model, images, device.put_batch(rows))
    model.train()
    correct, loss_sum = np.asarray(sums).tolist()
    return correct, loss_sum


def main(args: argparse.Namespace, network: Callable[..., nnx.Module] = network, name: str = "mnist") -> int:
    """Train, test, save and export as ``args`` say; returns the exit code. ``network(args, device)`` is the model."""
    device = Devices(args)  # joins the other processes

    # Data: all images as bytes on each device. A batch is rows of (image, row offset, column offset, label).
    (images, labels), (test_images, test_labels) = mnist_data.load(args)
    device.check_alike("training and test images", images, labels, test_images, test_labels)
    fingerprints = order.fingerprints(images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    images = device.replicate(mnist_data.padded(images, args.shift))
    test_images = device.replicate(mnist_data.padded(test_images, args.shift))
    test_batches = mnist_data.test_batches(test_labels, args.shift, args.test_batch_size * device.replicas)
    global_batch = args.batch_size * device.replicas

    model = network(args, device)
    total_steps = args.epochs * order.steps_per_epoch(len(labels), global_batch)
    peak = args.lr * (device.replicas if args.scale_lr else 1)
    rates = np.array([learning_rate(step, total_steps, peak) for step in range(total_steps)], np.float32)
    optimizer = nnx.Optimizer(model, _devices.optimizer(args, lambda step: jnp.asarray(rates)[step]), wrt=nnx.Param)
    device.place(model, optimizer)
    loss = device.replicate(np.float32(0))  # of the last step, or the first that was not finite

    def test(poll: Callable[[], None]) -> tuple[float, float]:
        return evaluate(model, test_images, test_batches, device, poll)

    def export(folder: str) -> list[str]:
        example = jax.ShapeDtypeStruct((mnist_data.SIDE, mnist_data.SIDE), jnp.uint8)
        return _export.write(model, normalised, example, folder, model=getattr(args, "model", name),
                             classes=list(map(str, range(mnist_data.CLASSES))), mean=[MEAN], std=[DEVIATION],
                             image_size=mnist_data.SIDE)  # fmt: skip

    with Run(f"jax.{name}", args, device, global_batch=global_batch, train_count=len(labels),
             test_count=len(test_labels), data=fingerprints, model=model, optimizer=optimizer) as run:  # fmt: skip
        for epoch in run.epochs(test):
            rows = mnist_data.train_rows(labels, args, epoch)  # depends on seed and epoch only
            first = run.step_in_epoch * global_batch
            batches = (device.put_batch(rows[at:][:global_batch]) for at in range(first, len(rows), global_batch))
            for step, batch in run.steps(batches):
                loss = train_step(model, optimizer, images, batch, np.uint32(args.seed), loss)
                run.end_step(loss, float(rates[step]))
        run.finish(export)
    device.close()
    return run.code


if __name__ == "__main__":
    _devices.main(main, ARGS, "mnist")
