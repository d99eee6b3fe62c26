"""MNIST in TensorFlow: a small Keras network, with the data set as one tensor on the device.

    python -m trainers.tf.mnist --datadir FOLDER --epochs 5

FOLDER holds MNIST's four IDX files, gzipped or not.
"""

from __future__ import annotations

from trainers.common import exits, flags, mnist_data
from trainers.tf import _quiet
from trainers.tf._flags import FLAGS

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in TensorFlow.", (*FLAGS, *mnist_data.FLAGS))
    _quiet.import_tensorflow()

import argparse

import keras
import numpy as np
import tensorflow as tf

from trainers.common.checkpoints import State
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine
from trainers.tf import _checkpoint, _export, _strategy
from trainers.tf._strategy import Cluster


def network() -> keras.Model:
    """Logits ``float[n, 10]`` of images ``uint8[n, 28, 28]``; the preprocessing is part of the model.

    Two 5x5 convolutions, pooled before the ReLU (a quarter of the work, the same result), and two linear layers.
    No dropout and no batch norm, so no randomness and no state.
    """
    layers = keras.layers
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


class Trainer:
    """Model, optimizer and data under a strategy, with the training and test functions."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        self.args, self.cluster = args, cluster
        (images, self.labels), (test_images, self.test_labels) = mnist_data.load(args)
        cluster.check_alike("training and test images", len(images), len(test_images))
        self.test_batch = args.test_batch_size * cluster.replicas
        self.images = cluster.on_each_replica(mnist_data.padded(images, args.shift))
        self.test_images = cluster.on_each_replica(mnist_data.padded(test_images, args.shift))
        with cluster.strategy.scope():
            self.model = network()
            self.optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
            self.optimizer.build(self.model.trainable_variables)
        batch = args.batch_size * cluster.replicas
        rates, rows = tf.TensorSpec([None], tf.float32), tf.TensorSpec([None, batch, 4], tf.int32)
        self._train = cluster.function(self._train_steps, rows, rates, tf.TensorSpec([], tf.float32))
        self._test = cluster.function(self._test_step, tf.TensorSpec([self.test_batch, 4], tf.int32))
        self.loss = tf.constant(0.0)

    def _train_steps(self, rows: tf.Tensor, rates: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Train on each of ``rows[steps, batch, 4]``; returns the last loss, or the first that was not finite."""
        for step in tf.range(tf.shape(rows)[0]):
            loss = self.cluster.sum(self.cluster.run(self._replica_step, self.images, rows[step], rates[step]))
            seen = tf.where(tf.math.is_finite(seen), loss, seen)
        return seen

    def _replica_step(self, images: tf.Tensor, batch: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        mine = self.cluster.my_rows(batch)
        with tf.GradientTape() as tape:
            logits = self.model(gather_crops(images, mine), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(mine[:, 3], logits)
            loss = tf.reduce_sum(losses) / batch.shape[0]  # gradients are summed over replicas
        self.optimizer.learning_rate.assign(rate)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def _test_step(self, rows: tf.Tensor) -> tf.Tensor:
        return self.cluster.sum(self.cluster.run(self._replica_test, self.test_images, rows))

    def _replica_test(self, images: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
        """Correct answers and the sum of losses; rows with label -1 are padding and do not count."""
        mine = self.cluster.my_rows(batch)
        labels = mine[:, 3]
        logits = self.model(gather_crops(images, mine), training=False)
        real = tf.cast(labels >= 0, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        correct = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float32)
        return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses * real)])

    def train(self, rows: np.ndarray, rates: list[float]) -> None:
        """Train on the steps ``rows[steps, batch, 4]`` (see :func:`mnist_data.train_rows`)."""
        self.loss = self._train(tf.constant(rows, tf.int32), tf.constant(rates, tf.float32), self.loss)

    def test(self, run: Run) -> tuple[float, int, float]:
        """Correct answers, images and the sum of losses over the test set, every image exactly once."""
        sums = np.zeros(2)
        for rows in run.testing(mnist_data.test_batches(self.test_labels, self.args.shift, self.test_batch)):
            sums += self._test(tf.constant(rows, tf.int32)).numpy()
        return sums[0], len(self.test_labels), sums[1]

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        return _checkpoint.values([*self.model.variables, *self.optimizer.variables])

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        _checkpoint.assign([*self.model.variables, *self.optimizer.variables], state)

    def served(self, weights: list[np.ndarray]) -> keras.Model:
        """The exported model: probabilities ``[n, 10]`` of raw images ``uint8[n, 28, 28]``, in float32."""
        keras.mixed_precision.set_global_policy("float32")
        model = network()
        model.set_weights(weights)
        return keras.Model(model.inputs, keras.layers.Softmax()(model.outputs[0]), name="mnist")


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)
    trainer = Trainer(args, cluster)
    with Run("tf.mnist", args, cluster, len(trainer.labels)) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        for epoch in run.epochs():
            with run.meter.waiting():
                rows = mnist_data.train_rows(trainer.labels, args, epoch)
                rows = rows[: run.steps_per_epoch * run.global_batch].reshape(-1, run.global_batch, 4)
            for step, count in run.chunks(args.steps_per_execution):
                done = run.global_step
                rates = [warmup_cosine(done + i, run.total_steps, args.lr) for i in range(count)]
                trainer.train(rows[step : step + count], rates)
                run.log(step + count - 1, trainer.loss.numpy, rates[-1])
            if not run.ended:
                run.tested(*trainer.test(run))
        weights = trainer.model.get_weights()
        _export.hand_over(run, cluster, lambda: trainer.served(weights))
        code = run.finish(_strategy.sha256(weights))
    cluster.close()
    return code


if __name__ == "__main__":
    exits.guard(_strategy.report_lost_worker(main), ARGS, "mnist")
