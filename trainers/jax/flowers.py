"""Classify flowers (or any small set of labelled images) in JAX, from scratch or from pretrained weights.

    python -m trainers.jax.flowers --datadir flower_photos --epochs 30
    python -m trainers.jax.flowers --datadir flower_photos --model resnet50 --weights resnet50.safetensors --epochs 15

All images are decoded once and stay on the devices as bytes; cropping, scaling and mirroring happen there, as two
matrix products per batch. The same command continues a run from its last checkpoint. On SIGTERM a run completes its
step, saves and exits with 143. JAX is imported in the functions that need it; the networks are in _networks.py.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import files, flowers_data, mnist
from trainers.common.arguments import add, classification
from trainers.common.job import Job
from trainers.jax import mnist as reference
from trainers.jax import parser

if TYPE_CHECKING:
    import jax
    import optax
    from flax import nnx

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1
PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights


def parse_args(argv: list[str] | None = None, prog: str = "flowers") -> argparse.Namespace:
    """Return the options of the command line."""
    options = parser(prog, "Flowers in JAX.")
    add(options.learning, "--model", "small", "small: four stages, 2.8 million weights; vit: a vision transformer, 1.2"
        " million; the others are torchvision's and accept --weights",
        choices=("small", "vit", "resnet18", "resnet34", "resnet50"))  # fmt: skip
    flowers_data.options(options)
    defaults = {"epochs": 30, "batch_size": 32, "test_batch_size": 100, "weight_decay": 5e-4}
    return classification(options, argv, defaults, sgd=0.05, adamw=0.001)


def network(args: argparse.Namespace, classes: int, dtype: Any) -> nnx.Module:
    """Return the model of ``--model``, with the pretrained weights of ``--weights`` in all but the last layer."""
    from flax import nnx

    from trainers.jax import _networks

    if args.weights and not args.model.startswith("resnet"):
        raise files.UserError("--weights needs --model resnet18, resnet34 or resnet50", files.USAGE)
    rngs = nnx.Rngs(args.seed)
    if args.model == "small":
        return _networks.Small(classes, dtype, rngs)
    if args.model == "vit":
        return _networks.ViT(classes, args.image_size, dtype, rngs)
    model = _networks.ResNet(args.model, classes, dtype, rngs)
    if args.weights:
        _networks.load_pretrained(model, args.weights)
    return model


def optimizer_of(args: argparse.Namespace, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the optimizer of ``--optimizer``; with ``--weights``, pretrained layers have a lower learning rate."""
    import jax
    import optax

    def pretrained(params: nnx.State) -> Any:
        return jax.tree.map_with_path(lambda path, _: path[0].key != "fc", params)

    slower = optax.masked(optax.scale(PRETRAINED_SCALE), pretrained) if args.weights else optax.identity()
    return optax.chain(reference.make_optimizer(args, schedule), slower)


def resampling(start: jax.Array, end: jax.Array, source: int, target: int) -> jax.Array:
    """Return matrices ``[n, target, source]`` that resize the spans from ``start`` to ``end`` to ``target`` pixels.

    Spans are fractions of a side of ``source`` pixels; ``start`` > ``end`` mirrors. Bilinear, with antialiasing.
    """
    import jax.numpy as jnp

    steps = (np.arange(target) + 0.5) / target
    centres = (start[:, None] + (end - start)[:, None] * steps) * source - 0.5
    reach = jnp.maximum(jnp.abs(end - start) * source / target, 1.0)[:, None, None]
    distance = jnp.abs(centres[:, :, None] - np.arange(source))
    weights = jnp.maximum(1 - distance / reach, 0.0)
    return weights / weights.sum(axis=2, keepdims=True)


def crops(images: jax.Array, numbers: jax.Array, boxes: jax.Array, side: int) -> jax.Array:
    """Return ``float[n, side, side, 3]`` in 0 to 255: the ``boxes`` (upper, lower, left, right) of the images."""
    import jax.numpy as jnp

    down = resampling(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    across = resampling(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    tall = jnp.einsum("nyh,nhwc->nywc", down, images[numbers].astype(jnp.float32))
    return jnp.einsum("nxw,nywc->nyxc", across, tall)


def normalized(pixels: jax.Array) -> jax.Array:
    """Return ``[n, y, x, 3]`` of 0 to 255 normalized to mean 0 and deviation 1 over ImageNet."""
    return (pixels.astype("float32") / 255 - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)


def train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, rows: jax.Array, boxes: jax.Array, seed: int,
    side: int, smoothing: float,
) -> jax.Array:  # fmt: skip
    """Train on the crops ``boxes`` of the images and labels that ``rows`` list; returns the loss."""
    import jax
    import optax
    from flax import nnx

    key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])  # of dropout: a resumed run has the same masks
    pixels = normalized(crops(images, rows[:, 0], boxes, side))

    def loss_of(model: nnx.Module) -> jax.Array:
        logits = model(pixels, nnx.Rngs(dropout=key)).astype("float32")
        targets = optax.smooth_labels(jax.nn.one_hot(rows[:, 1], logits.shape[1]), smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def test_step(model: nnx.Module, images: jax.Array, rows: jax.Array, side: int) -> jax.Array:
    """Return correct answers and the sum of losses; rows with the label -1 fill the last batch and do not count."""
    import jax.numpy as jnp
    import optax

    labels, boxes = rows[:, 1], jnp.tile(jnp.array([0.0, 1, 0, 1]), (len(rows), 1))
    logits = model(normalized(crops(images, rows[:, 0], boxes, side))).astype("float32")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.stack([(logits.argmax(axis=1) == labels).sum(), (losses * (labels >= 0)).sum()])


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    from flax import nnx

    from trainers.jax._peers import Peers

    peers = Peers(args)  # joins the other processes
    data = flowers_data.Data(args, peers)
    images, test_images = peers.put(data.images), peers.put(data.test_images)
    global_batch, test_count = args.batch_size * peers.replicas, len(data.test_labels)
    epoch_steps = mnist.steps_per_epoch(len(data.labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.replicas if args.scale_lr else 1)
    schedule, model = reference.warmup_cosine(peak, total), network(args, len(data.classes), peers.dtype)
    optimizer = nnx.Optimizer(model, optimizer_of(args, schedule), wrt=nnx.Param)
    peers.place(model, optimizer)
    train, own = nnx.jit(train_step, static_argnames=("side", "smoothing")), (model, optimizer)
    tested = nnx.jit(test_step, static_argnames="side")
    order = functools.lru_cache(1)(data.train_rows)  # depends on seed and epoch only

    def evaluate() -> dict[str, float]:  # every image once
        rows, sums = np.column_stack([np.arange(test_count), data.test_labels]), np.zeros(2)
        model.eval()
        for batch in reference.padded(rows, args.test_batch_size * peers.replicas):
            sums = sums + tested(model, test_images, peers.put(batch, "data"), side=args.image_size)
            if job.stop():
                return {}
        model.train()
        correct, loss = np.asarray(sums).tolist()
        return {"accuracy": 100 * correct / test_count, "test_loss": loss / test_count}

    def export_chief(folder: str) -> list[str]:
        shape = (args.image_size, args.image_size, 3)
        return reference.export(model, normalized, shape, folder, model=args.model, num_classes=len(data.classes),
                                classes=data.classes, mean=MEAN, std=DEVIATION, image_size=args.image_size
                                ) if folder else []  # fmt: skip

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(data.labels), "data": data.fingerprints}  # fmt: skip
    with Job("jax.flowers", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        job.say(f"{total} steps of {global_batch} images on {peers.replicas} x {peers.kind} in {args.precision}, peak"
                f" of the learning rate {peak:g}")  # fmt: skip
        job.more |= {"replicas": peers.replicas, "classes": data.classes}
        step = job.resume(functools.partial(reference.load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **evaluate())
        while not job.stop(step):
            first = step % epoch_steps * global_batch
            rows, boxes = (peers.put(part[first:][:global_batch], "data") for part in order(step // epoch_steps))
            loss = train(model, optimizer, images, rows, boxes, np.uint32(args.seed), side=args.image_size,
                         smoothing=args.label_smoothing)  # fmt: skip
            step += 1
            if job.due("log", step):
                job.log(step, loss=loss, lr=schedule(step - 1))
            if job.due("test", step):
                job.log(step, **evaluate())
            if job.due("save", step):
                job.save(step, functools.partial(reference.save, *own))
        return job.finish(step, functools.partial(reference.save, *own), export_chief)


if __name__ == "__main__":
    arguments = parse_args()
    from trainers.jax._peers import run

    run(main, arguments, "flowers")
