# ruff: noqa: E402
"""Flowers (or any small set of labelled images) in TensorFlow, from scratch or from pretrained weights.

    python -m trainers.tf.flowers --datadir flower_photos --epochs 30
    python -m trainers.tf.flowers --datadir flower_photos --model resnet50 --weights notop.weights.h5 --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data
from trainers.common.flags import Flag, one_of
from trainers.tf import _quiet
from trainers.tf._flags import FLAGS

MODEL = Flag("model", one_of("small", "resnet50", "mobilenetv2", "efficientnetb0"), "small", "small: four stages, 2.4"
             " million weights; the others are of keras.applications and accept --weights without a top")  # fmt: skip

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in TensorFlow.", (*FLAGS, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip
    _quiet.import_tensorflow()

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainers.common.checkpoints import State
from trainers.common.run import Run
from trainers.common.schedule import warmup_cosine
from trainers.tf import _checkpoint, _export, _strategy
from trainers.tf._strategy import Cluster

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights


def unit(features: Any, width: int, stride: int = 1) -> Any:
    """Convolution, batch norm, ReLU."""
    features = layers.Conv2D(width, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal")(features)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(features))


def small(features: Any) -> Any:
    """A network body for a few thousand images: each stage halves the size, doubles the width and adds a residual."""
    features = unit(features, 32, 2)
    for width in (64, 128, 256):
        features = unit(features, width, 2)
        features = layers.Add()([features, unit(unit(features, width), width)])
    return features


def network(args: argparse.Namespace, classes: int, weights: str) -> keras.Model:
    """Logits ``float[n, classes]`` of images ``[n, side, side, 3]`` from 0 to 255, including the preprocessing."""
    side = args.image_size
    images = keras.Input((side, side, 3), name="images")
    if args.model == "small":
        if weights:
            raise exits.UserError("--weights needs --model resnet50, mobilenetv2 or efficientnetb0", exits.USAGE)
        features = small(layers.Rescaling(1 / 58, -2.05)(images))  # about mean 0 and deviation 1
    else:
        build, prepare = {
            "resnet50": (keras.applications.ResNet50, keras.applications.resnet.preprocess_input),
            "mobilenetv2": (keras.applications.MobileNetV2, keras.applications.mobilenet_v2.preprocess_input),
            "efficientnetb0": (keras.applications.EfficientNetB0, keras.applications.efficientnet.preprocess_input),
        }[args.model]
        body = build(include_top=False, weights=None, input_shape=(side, side, 3), name="body")
        if weights:
            try:
                body.load_weights(weights)
            except (OSError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise exits.UserError(
                    f"--weights {weights}: no weights of {args.model} without its top: {reason}"
                ) from None
        features = body(prepare(images))
    features = layers.GlobalAveragePooling2D()(features)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="head")(features), name="flowers")


def gather_crops(images: tf.Tensor, numbers: tf.Tensor, boxes: tf.Tensor, side: int) -> tf.Tensor:
    """``float[n, side, side, 3]`` in 0 to 255: the ``boxes`` (upper, lower, left, right) of ``images[numbers]``.

    Two matrix products per image, because XLA has no ``CropAndResize``. The result is that of ``tf.image.resize`` with
    antialiasing, except at the border of a box, where pixels outside of the box contribute.
    """
    pixels = tf.cast(tf.gather(images, numbers), tf.float32)
    rows = interpolation(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    columns = interpolation(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    return tf.einsum("nqw,npwc->npqc", columns, tf.einsum("nph,nhwc->npwc", rows, pixels))


def interpolation(first: tf.Tensor, last: tf.Tensor, size: int, side: int) -> tf.Tensor:
    """Weights ``float[n, side, size]`` that resize the pixels between ``first`` and ``last`` to ``side`` pixels.

    ``first`` and ``last`` are ``float[n]``, as fractions of ``size``; first > last mirrors.
    """
    reach = (last - first)[:, None] * size
    middle = first[:, None] * size + reach * (tf.range(side, dtype=tf.float32) + 0.5) / side
    width = tf.maximum(1.0, tf.abs(reach) / side)  # of the triangle filter: wider when shrinking
    away = tf.abs(middle[:, :, None] - tf.range(size, dtype=tf.float32) - 0.5) / width[:, :, None]
    near = tf.maximum(0.0, 1.0 - away)
    return near / tf.reduce_sum(near, axis=2, keepdims=True)


def resized(image: tf.Tensor, side: int) -> tf.Tensor:
    """An ``image`` ``uint8[height, width, 3]`` resized to ``side`` pixels, as for the test."""
    return tf.image.resize(image, [side, side], antialias=True)


class Trainer:
    """Model, optimizer and data under a strategy, with the training and test functions."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        self.args, self.cluster = args, cluster
        self.data = flowers_data.Data(args)
        cluster.check_alike("training and test images", len(self.data.labels), len(self.data.test_labels))
        self.images = cluster.on_each_replica(self.data.images)
        self.test_images = cluster.on_each_replica(self.data.test_images)
        self.test_batch = args.test_batch_size * cluster.replicas
        with cluster.strategy.scope():
            self.model = network(args, len(self.data.classes), args.weights)
            self.optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
            self.optimizer.build(self.model.trainable_variables)
        batch = args.batch_size * cluster.replicas
        self._train = cluster.function(
            self._train_steps, tf.TensorSpec([None, batch, 2], tf.int32), tf.TensorSpec([None, batch, 4], tf.float32),
            tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.float32),
        )  # fmt: skip
        self._test = cluster.function(
            self._test_step,
            tf.TensorSpec([self.test_batch, 2], tf.int32),
            tf.TensorSpec([self.test_batch, 4], tf.float32),
        )
        self.loss = tf.constant(0.0)

    def _train_steps(self, rows: tf.Tensor, boxes: tf.Tensor, rates: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Train on each of ``rows[steps, batch, 2]``; returns the last loss, or the first that was not finite."""
        for step in tf.range(tf.shape(rows)[0]):
            losses = self.cluster.run(self._replica_step, self.images, rows[step], boxes[step], rates[step])
            seen = tf.where(tf.math.is_finite(seen), self.cluster.sum(losses), seen)
        return seen

    def _replica_step(self, images: tf.Tensor, batch: tf.Tensor, boxes: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        mine = self.cluster.my_rows(batch)
        pixels = gather_crops(images, mine[:, 0], self.cluster.my_rows(boxes), self.args.image_size)
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            logits = self.model(pixels, training=True)
            classes = len(self.data.classes)
            targets = (
                tf.one_hot(mine[:, 1], classes) * (1 - self.args.label_smoothing) + self.args.label_smoothing / classes
            )
            loss = tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(targets, logits)) / batch.shape[0]
        gradients = tape.gradient(loss, variables)  # summed over replicas by the optimizer
        self.optimizer.learning_rate.assign(rate)
        self.optimizer.apply_gradients(
            [
                (self._adjusted(gradient, variable), variable)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
        )
        return loss

    def _adjusted(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """``gradient`` with weight decay on kernels and matrices, scaled down for pretrained layers."""
        if len(variable.shape) > 1:
            gradient += self.args.weight_decay * tf.cast(variable.value, gradient.dtype) / self.cluster.replicas
        return gradient * PRETRAINED_SCALE if self.args.weights and "head" not in variable.path else gradient

    def _test_step(self, rows: tf.Tensor, boxes: tf.Tensor) -> tf.Tensor:
        return self.cluster.sum(self.cluster.run(self._replica_test, self.test_images, rows, boxes))

    def _replica_test(self, images: tf.Tensor, batch: tf.Tensor, boxes: tf.Tensor) -> tf.Tensor:
        """Correct answers and the sum of losses; rows with label -1 are padding and do not count."""
        mine = self.cluster.my_rows(batch)
        labels = mine[:, 1]
        logits = self.model(
            gather_crops(images, mine[:, 0], self.cluster.my_rows(boxes), self.args.image_size), training=False
        )
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        correct = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float32)
        return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses * tf.cast(labels >= 0, tf.float32))])

    def train(self, rows: np.ndarray, boxes: np.ndarray, rates: list[float]) -> None:
        """Train on the steps ``rows[steps, batch, 2]`` (image number, label) cropped to ``boxes[steps, batch, 4]``."""
        self.loss = self._train(
            tf.constant(rows, tf.int32), tf.constant(boxes, tf.float32), tf.constant(rates, tf.float32), self.loss
        )

    def test(self, run: Run) -> tuple[float, int, float]:
        """Correct answers, images and the sum of losses over the test set, every image exactly once."""
        rows, boxes = self.data.test_rows(self.test_batch)
        sums = np.zeros(2)
        for number in run.testing(range(len(rows))):
            sums += self._test(tf.constant(rows[number], tf.int32), tf.constant(boxes[number], tf.float32)).numpy()
        return sums[0], len(self.data.test_labels), sums[1]

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        return _checkpoint.values([*self.model.variables, *self.optimizer.variables])

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        _checkpoint.assign([*self.model.variables, *self.optimizer.variables], state)

    def served(self, weights: list[np.ndarray]) -> keras.Model:
        """The exported model: probabilities ``[n, classes]`` of images ``uint8[n, side, side, 3]``, in float32."""
        keras.mixed_precision.set_global_policy("float32")
        model = network(self.args, len(self.data.classes), "")
        model.set_weights(weights)
        images = keras.Input((self.args.image_size, self.args.image_size, 3), dtype="uint8", name="images")
        answers = layers.Softmax()(model(layers.Rescaling(1.0)(images)))
        return keras.Model(images, answers, name="flowers_served")


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)
    trainer = Trainer(args, cluster)
    with Run("tf.flowers", args, cluster, len(trainer.data.labels)) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        for epoch in run.epochs():
            with run.meter.waiting():
                used = run.steps_per_epoch * run.global_batch
                rows, boxes = (part[:used].reshape(run.steps_per_epoch, run.global_batch, -1)
                               for part in trainer.data.train_rows(epoch))  # fmt: skip
            for step, count in run.chunks(args.steps_per_execution):
                done = run.global_step
                rates = [warmup_cosine(done + i, run.total_steps, args.lr) for i in range(count)]
                trainer.train(rows[step : step + count], boxes[step : step + count], rates)
                run.log(step + count - 1, trainer.loss.numpy, rates[-1])
            if not run.ended:
                run.tested(*trainer.test(run))
        weights = trainer.model.get_weights()  # on every worker: batch norm's averages are gathered from all of them
        _export.hand_over(run, cluster, lambda: trainer.served(weights), lambda image: resized(image, args.image_size))
        code = run.finish(_strategy.sha256(weights), classes=trainer.data.classes)
    cluster.close()
    return code


if __name__ == "__main__":
    exits.guard(_strategy.report_lost_worker(main), ARGS, "flowers")
