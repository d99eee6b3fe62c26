"""Classify MNIST in TensorFlow: a small Keras network, trained by ``model.fit``.

    python -m trainers.tf.mnist --datadir FOLDER --epochs 5

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143: Running, a callback of Keras in _fit.py, sees to that.

TensorFlow takes seconds to import, and is imported in the functions that need it: --help and a wrong option need none.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from trainers.common import mnist
from trainers.common.arguments import add, classification, integer
from trainers.common.job import Job
from trainers.tf import Parser

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def parse_args(argv: list[str] | None = None, prog: str = "mnist") -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser(prog, "MNIST in TensorFlow.")
    add(parser.learning, "--shift", 2, "shift images by up to so many pixels at random", type=integer())
    add(parser.data, "--fake-images", 60000, "images of --fake-data", type=integer(1))
    return classification(parser, argv, sgd=0.03, adamw=0.001)


def network(args: argparse.Namespace) -> keras.Model:
    """Return the model: logits ``float[n, 10]`` of images ``uint8[n, 28, 28]``; the preprocessing is part of the model.

    Two 5x5 convolutions, pooled before the ReLU (a quarter of the work, the same result), and two linear layers.
    """
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((mnist.SIDE, mnist.SIDE), dtype="uint8"),
            layers.Reshape((mnist.SIDE, mnist.SIDE, 1)),
            layers.Rescaling(1 / 255 / 0.3081, -0.1307 / 0.3081),  # to MNIST's mean 0 and deviation 1
            layers.Conv2D(32, 5),
            layers.MaxPool2D(),
            layers.ReLU(),
            layers.Conv2D(64, 5),
            layers.MaxPool2D(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(mnist.CLASSES, dtype="float32"),
        ],
        name="mnist",
    )


def shifted(images: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Return the images that ``rows[n, 3]`` list, number and two offsets, of ``images`` with a border of ``most``."""
    side = np.arange(mnist.SIDE)
    down, across = (rows[:, 1, None] + side)[:, :, None], (rows[:, 2, None] + side)[:, None, :]
    return images[rows[:, 0, None, None], down, across]  # type: ignore[no-any-return]


def padded(images: np.ndarray, labels: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield batches of ``size`` images, labels, and weights that are 0 for what fills the last one."""
    numbers = np.arange(-(-len(labels) // size) * size).reshape(-1, size)
    for chosen in numbers:
        rest = np.minimum(chosen, len(labels) - 1)
        yield images[rest], labels[rest], (chosen < len(labels)).astype(np.float32)


def main(
    args: argparse.Namespace, network: Callable[[argparse.Namespace], keras.Model] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status. ``network(args)`` makes the model."""
    import keras
    import tensorflow as tf

    from trainers.tf._export import write
    from trainers.tf._fit import Checkpoint, fit, in_float32, make_optimizer, tester
    from trainers.tf._peers import Peers

    peers = Peers(args)  # chooses the strategy, and waits for the other workers
    (images, labels, test_images, test_labels), data = mnist.load(args)
    border = np.pad(images, ((0, 0), (args.shift,) * 2, (args.shift,) * 2))
    global_batch, test_batch = args.batch_size * peers.replicas, args.test_batch_size * peers.replicas
    epoch_steps = mnist.steps_per_epoch(len(labels), global_batch)
    total = args.epochs * epoch_steps

    def compiled(model: keras.Model) -> keras.Model:
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        correct = keras.metrics.SparseCategoricalAccuracy("accuracy")
        test_loss = keras.metrics.SparseCategoricalCrossentropy("test_loss", from_logits=True)
        optimizer = make_optimizer(args, total, 0.2, model.trainable_variables, peers)
        model.compile(optimizer, crossentropy, weighted_metrics=[correct, test_loss], jit_compile=peers.jit)
        return model

    with peers.strategy.scope():
        model = compiled(network(args))
    checkpoint = Checkpoint(peers, model, model.optimizer)

    @lru_cache(1)
    def order(epoch: int) -> np.ndarray:  # depends on seed and epoch only
        return mnist.order(len(labels), args.shift, args.seed, epoch)

    def batches(step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield this process's part of each batch after ``step`` steps: a resumed run continues with the next one."""
        for number in itertools.count(step):
            first = number % epoch_steps * global_batch
            rows = peers.share(order(number // epoch_steps)[first : first + global_batch])
            yield shifted(border, rows, args.shift), labels[rows[:, 0]]

    def test_batches() -> Iterator[tuple[np.ndarray, ...]]:
        return (tuple(map(peers.share, batch)) for batch in padded(test_images, test_labels, test_batch))

    def specs(size: int) -> list[tf.TensorSpec]:  # images, labels, and weights in a test
        return [tf.TensorSpec((size, mnist.SIDE, mnist.SIDE), "uint8"), tf.TensorSpec([size], "int64"),
                tf.TensorSpec([size], "float32")]  # fmt: skip

    def test_of(model: keras.Model) -> Callable[[], dict[str, float]]:
        return tester(model, peers.dataset(test_batches, tuple(specs(args.test_batch_size))), job.stop, peers)

    def export(folder: str) -> list[str]:
        if args.precision != "fp32":  # exported models compute in fp32
            with peers.strategy.scope():
                exact = compiled(in_float32(lambda: network(args), model))
            job.more["exported_accuracy"] = accuracy = test_of(exact)()["accuracy"]
            job.say(f"Exported model: test accuracy {accuracy:.2f} % in fp32")
        trained = in_float32(lambda: network(args), model)
        probabilities = keras.layers.Softmax()(trained.outputs[0])
        return write(keras.Model(trained.inputs, probabilities, name=name), folder) if folder else []

    about = {"optimizer": args.optimizer, "global_batch": global_batch, "train_images": len(labels), "data": data}
    with Job(f"tf.{name}", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        step = job.resume(checkpoint.load)
        test = test_of(model)
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        batched = peers.dataset(partial(batches, step), tuple(specs(args.batch_size)[:2]))
        step = fit(model, batched, job, step, test, checkpoint.save, peers)  # logs, tests, saves, and stops
        return job.finish(step, checkpoint.save, export)


if __name__ == "__main__":
    options = parse_args()
    from trainers.tf._peers import Peers

    Peers.run(main, options, "mnist")
