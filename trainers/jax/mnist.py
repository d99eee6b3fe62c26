"""Classify MNIST in JAX: a small network in Flax NNX, with the data set as one array on the devices.

    python -m trainers.jax.mnist --datadir FOLDER --epochs 5
    python -m trainers.jax.mnist --datadir FOLDER --epochs 30 --model vit --optimizer adamw --clip-norm 1

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint, on any
number of devices for which the global batch is the same. On SIGTERM a run completes its step, saves and exits with 143.

JAX takes seconds to import, and is imported in the functions that need it; the networks are in _networks.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import trainers
from trainers.common import files, mnist
from trainers.common.arguments import add, classification, integer
from trainers.common.job import Job
from trainers.jax import parser

if TYPE_CHECKING:
    import jax
    import optax
    from flax import nnx

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels from 0 to 1
PLATFORMS = ("cpu", "cuda", "tpu")  # that an exported program runs on


def parse_args(argv: list[str] | None = None, prog: str = "mnist") -> argparse.Namespace:
    """Return the options of the command line."""
    options = parser(prog, "MNIST in JAX.")
    add(options.learning, "--model", "cnn", "cnn: two convolutions, 0.2 million weights; small: two with batch norm,"
        " 18,000; vit: a vision transformer, 0.1 million", choices=("cnn", "small", "vit"))  # fmt: skip
    add(options.learning, "--shift", 2, "shift images by up to so many pixels at random", type=integer())
    add(options.data, "--fake-images", 60000, "images of --fake-data", type=integer(1))
    return classification(options, argv, sgd=0.03, adamw=0.003)


def network(args: argparse.Namespace, dtype: Any) -> nnx.Module:
    """Return the model of ``--model``: logits ``[n, 10]`` of images ``[n, 28, 28, 1]``."""
    from flax import nnx

    from trainers.jax import _networks

    models = {"cnn": _networks.CNN, "small": _networks.SmallDigits, "vit": _networks.ViTDigits}
    return models[args.model](dtype, nnx.Rngs(args.seed))


def normalized(pixels: jax.Array) -> jax.Array:
    """Return ``uint8[n, 28, 28]`` as ``float[n, 28, 28, 1]`` with mean 0 and deviation 1 over MNIST."""
    return ((pixels.astype("float32") / 255 - MEAN) / DEVIATION)[..., None]


def shifted(images: jax.Array, rows: jax.Array) -> jax.Array:
    """Return crops ``uint8[n, 28, 28]`` of images with a border, as ``rows`` list: image, row and column offset."""
    side = np.arange(mnist.SIDE)
    down, across = rows[:, 1, None] + side, rows[:, 2, None] + side
    return images[rows[:, 0, None, None], down[:, :, None], across[:, None, :]]


def make_optimizer(args: argparse.Namespace, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the optimizer of ``--optimizer``, with weight decay for kernels and matrices."""
    import jax
    import optax

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda value: value.ndim > 1, params)

    clip = optax.clip_by_global_norm(args.clip_norm) if args.clip_norm else optax.identity()
    if args.optimizer == "adamw":
        return optax.chain(clip, optax.adamw(schedule, weight_decay=args.weight_decay, mask=decayed))
    sgd = optax.sgd(schedule, args.momentum or None, nesterov=args.momentum > 0)
    return optax.chain(clip, optax.add_decayed_weights(args.weight_decay, decayed), sgd)


def warmup_cosine(peak: float, total: int) -> optax.Schedule:
    """Return the learning rate by the number of steps done: up over a fifth of ``total``, then a cosine to 0."""
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, total // 5, total)
    return lambda step: schedule(step + 0.5)  # in the middle of a step: none has the rate 0


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, rows: jax.Array, seed: int) -> jax.Array:
    """Train on the images and labels that ``rows`` list; returns the loss."""
    import jax
    import optax
    from flax import nnx

    key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])  # of dropout: a resumed run has the same masks

    def loss_of(model: nnx.Module) -> jax.Array:
        logits = model(normalized(shifted(images, rows)), nnx.Rngs(dropout=key)).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 3]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def test_step(model: nnx.Module, images: jax.Array, rows: jax.Array) -> jax.Array:
    """Return correct answers and the sum of losses; rows with the label -1 fill the last batch and do not count."""
    import jax.numpy as jnp
    import optax

    labels = rows[:, 3]
    logits = model(normalized(shifted(images, rows))).astype("float32")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.stack([(logits.argmax(axis=1) == labels).sum(), (losses * (labels >= 0)).sum()])


def padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Return ``rows`` in batches of ``size``, the last one filled with rows of -1."""
    filled = np.pad(rows, ((0, -len(rows) % size), (0, 0)), constant_values=-1)
    return filled.reshape(-1, size, rows.shape[1])


def save(model: nnx.Module, optimizer: nnx.Optimizer, folder: str) -> None:
    """Write this process's part of a checkpoint, also to gs://."""
    import orbax.checkpoint as ocp
    from flax import nnx

    with ocp.StandardCheckpointer() as checkpointer:
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        checkpointer.save(files.join(folder, "state"), state, force=True)  # also over a damaged one


def load(model: nnx.Module, optimizer: nnx.Optimizer, folder: str) -> None:
    """Load a checkpoint, which any number of devices has written."""
    import orbax.checkpoint as ocp
    from flax import nnx

    state = nnx.state((model, optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(files.join(folder, "state"), nnx.to_pure_dict(state)))
    nnx.update((model, optimizer), state)


def export(
    network: nnx.Module, preprocess: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], folder: str, **about: Any
) -> list[str]:
    """Write model.safetensors, and model.stablehlo for ``jax.export.deserialize``; return their names.

    The program takes images ``uint8[n, *shape]`` and returns probabilities; its weights are constants in it.
    model.safetensors has the weights under the network's own names; ``about`` describes them. All files appear once
    all are complete; without the package safetensors, a note says that its file is not written.
    """
    import jax
    import jax.export
    from flax import nnx

    network.eval()
    definition, state = nnx.split(network)
    state = jax.tree.map(np.asarray, state)  # off the mesh

    def serve(images: jax.Array) -> jax.Array:
        return jax.nn.softmax(nnx.merge(definition, state)(preprocess(images)).astype("float32"), axis=1)

    images = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), *shape), "uint8")
    program = jax.export.export(jax.jit(serve), platforms=PLATFORMS)(images).serialize()
    about = {"format": "flax", **about, "trainyard": trainers.__version__, "jax": jax.__version__}
    try:
        with files.complete_files(folder) as fresh:
            with open(os.path.join(fresh, "model.stablehlo"), "wb") as file:
                file.write(program)
            try:
                from safetensors.numpy import save_file

                weights = {".".join(map(str, path)): np.ascontiguousarray(variable.get_value())
                           for path, variable in nnx.to_flat_state(state)}  # fmt: skip
                described = {name: text if isinstance(text, str) else json.dumps(text) for name, text in about.items()}
                save_file(weights, os.path.join(fresh, "model.safetensors"), described)
            except ImportError:
                print("note: model.safetensors is not written: pip install safetensors", file=sys.stderr)
            return sorted(os.listdir(fresh))
    except OSError as error:
        raise files.UserError(f"{folder}: the model cannot be exported ({error.strerror or error}); make room and run"
                              " again: with --checkpoint-dir that takes the last test and the export only"
                              ) from None  # fmt: skip


def main(args: argparse.Namespace, network: Callable[..., nnx.Module] = network, name: str = "mnist") -> int:
    """Train, test, save and export as ``args`` say; returns the exit status. ``network(args, dtype)`` is the model."""
    from flax import nnx

    from trainers.jax._peers import Peers

    peers = Peers(args)  # joins the other processes
    (images, labels, test_images, test_labels), data = mnist.load(args)
    edge = ((0, 0), (args.shift, args.shift), (args.shift, args.shift))
    pixels, test_pixels = (peers.put(np.pad(array, edge)) for array in (images, test_images))
    global_batch = args.batch_size * peers.replicas
    epoch_steps = mnist.steps_per_epoch(len(labels), global_batch)
    total, peak = args.epochs * epoch_steps, args.lr * (peers.replicas if args.scale_lr else 1)
    schedule, model = warmup_cosine(peak, total), network(args, peers.dtype)
    optimizer = nnx.Optimizer(model, make_optimizer(args, schedule), wrt=nnx.Param)
    peers.place(model, optimizer)
    train, tested, own = nnx.jit(train_step), nnx.jit(test_step), (model, optimizer)

    @functools.lru_cache(1)
    def order(epoch: int) -> np.ndarray:  # depends on seed and epoch only: image, row and column offset, label
        chosen = mnist.order(len(labels), args.shift, args.seed, epoch)
        return np.column_stack([chosen, labels[chosen[:, 0]]])

    def evaluate() -> dict[str, float]:  # every image once
        rows, sums = np.full((len(test_labels), 4), args.shift), np.zeros(2)
        rows[:, 0], rows[:, 3] = np.arange(len(rows)), test_labels
        model.eval()
        for batch in padded(rows, args.test_batch_size * peers.replicas):
            sums = sums + tested(model, test_pixels, peers.put(batch, "data"))
            if job.stop():
                return {}
        model.train()
        correct, loss = np.asarray(sums).tolist()
        return {"accuracy": 100 * correct / len(rows), "test_loss": loss / len(rows)}

    def export_chief(folder: str) -> list[str]:
        about = {"classes": list(map(str, range(mnist.CLASSES))), "mean": [MEAN], "std": [DEVIATION]}
        return export(model, normalized, (mnist.SIDE, mnist.SIDE), folder, model=getattr(args, "model", name),
                      image_size=mnist.SIDE, **about) if folder else []  # fmt: skip

    about = {"model": getattr(args, "model", name), "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(labels), "data": data}  # fmt: skip
    with Job(f"jax.{name}", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        job.say(f"{total} steps of {global_batch} images on {peers.replicas} x {peers.kind} in {args.precision}, peak"
                f" of the learning rate {peak:g}")  # fmt: skip
        job.more["replicas"] = peers.replicas
        step = job.resume(functools.partial(load, *own))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **evaluate())
        while not job.stop(step):
            first = step % epoch_steps * global_batch
            rows = peers.put(order(step // epoch_steps)[first : first + global_batch], "data")
            loss = train(model, optimizer, pixels, rows, np.uint32(args.seed))
            step += 1
            if job.due("log", step):
                job.log(step, loss=loss, lr=schedule(step - 1))
            if job.due("test", step):
                job.log(step, **evaluate())
            if job.due("save", step):
                job.save(step, functools.partial(save, *own))
        return job.finish(step, functools.partial(save, *own), export_chief)


if __name__ == "__main__":
    arguments = parse_args()
    from trainers.jax._peers import run

    run(main, arguments, "mnist")
