"""MNIST in TensorFlow: a small Keras network, with the data set as one tensor on the device.

    python -m trainers.tf.mnist --datadir FOLDER --epochs 5

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import flags, mnist_data, order
from trainers.tf import import_tensorflow

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in TensorFlow.", (*flags.TF, *mnist_data.FLAGS))
    import_tensorflow()

import argparse
import functools
import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainers.common.run import Run, Test
from trainers.tf import _strategy
from trainers.tf._strategy import Cluster


def network(args: argparse.Namespace) -> keras.Model:
    """Logits ``float[n, 10]`` of images ``uint8[n, 28, 28]``; the preprocessing is part of the model.

    Two 5x5 convolutions, pooled before the ReLU (a quarter of the work, the same result), and two linear layers.
    """
    return keras.Sequential(
        [
            keras.Input((mnist_data.SIDE, mnist_data.SIDE), dtype="uint8"),
            layers.Reshape((mnist_data.SIDE, mnist_data.SIDE, 1)),
            layers.Rescaling(1 / 255 / 0.3081, -0.1307 / 0.3081),  # to MNIST's mean 0 and deviation 1
            layers.Conv2D(32, 5),
            layers.MaxPool2D(),
            layers.ReLU(),
            layers.Conv2D(64, 5),
            layers.MaxPool2D(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(mnist_data.CLASSES, dtype="float32"),
        ],
        name="mnist",
    )


def gather_crops(images: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """The crops ``uint8[n, 28, 28]`` that ``batch`` lists, as rows of image, row offset, column offset and label."""
    side = tf.range(mnist_data.SIDE, dtype=batch.dtype)
    rows, columns = batch[:, 1, None] + side, batch[:, 2, None] + side
    chosen = tf.gather(images, batch[:, 0])
    return tf.gather(tf.gather(chosen, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


def test_step(model: keras.Model, images: tf.Tensor, batches: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return a replica's correct answers and sum of losses; rows with label -1 are padding and do not count."""
    batch = batches[number]
    labels = batch[:, 3]
    logits = model(gather_crops(images, batch), training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    correct = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses * tf.cast(labels >= 0, tf.float32))])


def main(
    args: argparse.Namespace, network: Callable[[argparse.Namespace], keras.Model] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code. ``network(args)`` makes the model."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers

    # Data: all images as bytes on each device. A batch is rows of (image, row offset, column offset, label), of which
    # each replica has its part.
    (images, labels), (test_images, test_labels) = mnist_data.load(args)
    cluster.check_alike("training and test images", images, labels, test_images, test_labels)
    fingerprints = order.fingerprints(images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    images = cluster.replicate(mnist_data.padded(images, args.shift))
    test_images = cluster.replicate(mnist_data.padded(test_images, args.shift))
    test_rows = mnist_data.test_batches(test_labels, args.shift, args.test_batch_size * cluster.replicas)
    test_batches = cluster.split(test_rows.astype(np.int32), axis=1)
    global_batch = args.batch_size * cluster.replicas

    with cluster.strategy.scope():
        model = network(args)
        optimizer = _strategy.optimizer_of(args, model.trainable_variables)
    _strategy.vary_dropout(model)

    def train_step(images: tf.Tensor, batches: tf.Tensor, rates: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """On one replica: train on its part of the batch; returns its part of the loss."""
        batch, variables = batches[number], model.trainable_variables
        with tf.GradientTape() as tape:
            logits = model(gather_crops(images, batch), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 3], logits)
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, variables)
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        if args.optimizer == "sgd":  # AdamW has its own
            gradients = cluster.add_decay(gradients, variables, args.weight_decay)
        optimizer.learning_rate.assign(rates[number])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums the gradients over the replicas
        return loss

    def tester(model: keras.Model) -> Test:
        batches = [(test_images, test_batches, tf.constant(number)) for number in range(len(test_rows))]
        return cluster.tester(functools.partial(test_step, model), lambda: batches)

    def export(folder: str) -> list[str]:
        from trainers.tf import _export

        trained = cluster.in_float32(lambda: network(args))
        served = keras.Model(trained.inputs, layers.Softmax()(trained.outputs[0]), name="mnist")
        return _export.write(served, folder)

    loop = _strategy.Loop(args, cluster, train_step)
    with Run(f"tf.{name}", args, cluster, global_batch=global_batch, train_count=len(labels),
             test_count=len(test_labels), data=fingerprints, model=model, optimizer=optimizer) as run:  # fmt: skip
        for epoch in run.epochs(tester(model)):
            rows = mnist_data.train_rows(labels, args, epoch)  # depends on seed and epoch only
            batches = cluster.split_epoch(rows.astype(np.int32), global_batch)
            first = (epoch - 1) * run.steps_per_epoch
            steps = range(first, first + run.steps_per_epoch)
            rates = [learning_rate(step, run.total_steps, run.peak) for step in steps]
            data = images, batches, cluster.replicate(np.array(rates, np.float32))
            for step, count in run.steps(loop.counts(run)):
                loss = loop.train(data, step - first, count)
                run.end_step(loss, rates[step - first + count - 1], count)
        run.finish(export, cluster.test_of_export(lambda: network(args), tester))
    cluster.close()
    return run.code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "mnist")
