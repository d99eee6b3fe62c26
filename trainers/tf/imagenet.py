# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in TensorFlow, with the models of keras.applications.

    python -m trainers.tf.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    python -m trainers.tf.imagenet --datadir gs://BUCKET/FOLDER --epochs 90 --ema 0.9999 --accumulate 2

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data
from trainers.common.flags import Flag, one_of
from trainers.tf import _quiet
from trainers.tf._flags import FLAGS

MODEL = Flag("model", one_of("resnet50", "resnet101", "mobilenetv2"), "resnet50", "model of keras.applications")

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in TensorFlow.", (*FLAGS, *imagenet_data.FLAGS, MODEL),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip
    _quiet.import_tensorflow()

import argparse
import contextlib
from collections.abc import Callable
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


def network(args: argparse.Namespace) -> keras.Model:
    """Logits ``float[n, classes]`` of images ``[n, side, side, 3]`` from 0 to 255, of any side."""
    build = {
        "resnet50": keras.applications.ResNet50,
        "resnet101": keras.applications.ResNet101,
        "mobilenetv2": keras.applications.MobileNetV2,
    }[args.model]
    images = keras.Input((None, None, 3), name="images")
    body = build(include_top=False, weights=None, input_shape=(None, None, 3), pooling="avg", name="body")
    features = body(layers.Rescaling(1 / 58, -2.05)(images))  # about mean 0 and deviation 1
    return keras.Model(images, layers.Dense(args.num_classes, dtype="float32", name="head")(features), name="imagenet")


def centre(image: tf.Tensor, side: int, share: float = 0.875) -> tf.Tensor:
    """The center of an ``image`` ``uint8[height, width, 3]``, resized to ``side`` pixels, as for the test."""
    height, width = tf.unstack(tf.shape(image)[:2])
    most = tf.cast(tf.round(tf.cast(tf.minimum(height, width), tf.float32) * share), tf.int32)
    middle = tf.image.crop_to_bounding_box(image, (height - most) // 2, (width - most) // 2, most, most)
    return tf.image.resize(middle, [side, side], antialias=True)


class Trainer:
    """Model, optimizer and data under a strategy, with the training and test functions."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster) -> None:
        self.args, self.cluster = args, cluster
        self.data = imagenet_data.Data(args, cluster.share)
        self.test_batch = args.test_batch_size * cluster.replicas
        cluster.check_alike("training and test images", self.data.count, self.data.test_count)
        with cluster.strategy.scope():
            self.model = network(args)
            self.average = network(args) if args.ema else None
            self.optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
            self.optimizer.build(self.model.trainable_variables)
        if self.average:
            self.average.set_weights(self.model.get_weights())
        self.tested = self.average or self.model
        self._train: dict[int, Callable[..., Any]] = {}  # one function per image size
        self._test = cluster.function(self._test_step, *self._batch_of(self.test_batch, args.image_size))
        self.loss = tf.constant(0.0)

    def _batch_of(self, count: int, side: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        here = count // self.cluster.processes
        return tf.TensorSpec([here, side, side, 3], tf.uint8), tf.TensorSpec([here], tf.int32)

    def _train_step(
        self, pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor, rate: tf.Tensor, seen: tf.Tensor
    ) -> tf.Tensor:
        """Train on a batch; returns its loss, or the first that was not finite."""
        loss = self.cluster.sum(self.cluster.run(self._replica_step, pixels, labels, mask, rate))
        if self.average:
            self.cluster.blend(self.average.variables, self.model.variables, self.args.ema)
        return tf.where(tf.math.is_finite(seen), loss, seen)

    def _replica_step(self, pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """One step of the optimizer with the gradients of ``--accumulate`` batches; returns this replica's loss."""
        parts, variables = self.args.accumulate, self.model.trainable_variables
        mine, targets = self.cluster.my_part(pixels), self.cluster.my_part(labels)
        pixels, labels = tf.reshape(mine, [parts, -1, *mine.shape[1:]]), tf.reshape(targets, [parts, -1])
        loss, gradients = tf.constant(0.0), [tf.zeros(variable.shape) for variable in variables]
        for part in tf.range(parts) if parts > 1 else range(1):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)  # more would need more memory
            more, further = self._gradients(pixels[part], labels[part], mask)
            loss, gradients = loss + more, [one + other for one, other in zip(gradients, further, strict=True)]
        self.optimizer.learning_rate.assign(rate)
        pairs = zip(gradients, variables, strict=True)  # summed over replicas by the optimizer
        self.optimizer.apply_gradients([(self._decayed(*pair), pair[1]) for pair in pairs])
        return loss

    def _gradients(self, pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The part of the step's loss that is due to these images, and its gradients."""
        images, smoothing, classes = tf.cast(pixels, tf.float32), self.args.label_smoothing, self.args.num_classes
        targets = tf.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
        if self.args.mixup or self.args.cutmix:
            shown, keep = mask[:, :, None], tf.reduce_mean(mask)
            images = images * shown + tf.roll(images, 1, 0) * (1 - shown)
            targets = targets * keep + tf.roll(targets, 1, 0) * (1 - keep)
        with tf.GradientTape() as tape:
            losses = tf.nn.softmax_cross_entropy_with_logits(targets, self.model(images, training=True))
            loss = tf.reduce_sum(losses) / (self.args.batch_size * self.args.accumulate * self.cluster.replicas)
        return loss, tape.gradient(loss, self.model.trainable_variables)

    def _decayed(self, gradient: tf.Tensor, variable: Any) -> tf.Tensor:
        """``gradient`` with weight decay on kernels and matrices, none on biases and batch norm."""
        if len(variable.shape) <= 1:
            return gradient
        return gradient + self.args.weight_decay / self.cluster.replicas * tf.cast(variable.value, gradient.dtype)

    def _test_step(self, pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return self.cluster.sum(self.cluster.run(self._replica_test, pixels, labels))

    def _replica_test(self, pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Correct first answers, correct among the best five, and the sum of losses; label -1 is padding."""
        mine = self.cluster.my_part(labels)
        logits = self.tested(tf.cast(self.cluster.my_part(pixels), tf.float32), training=False)
        guesses = tf.math.top_k(logits, min(5, self.args.num_classes)).indices
        hits = tf.cast(guesses == mine[:, None], tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(mine, 0), logits)
        real = tf.cast(mine >= 0, tf.float32)
        return tf.stack([tf.reduce_sum(hits[:, 0]), tf.reduce_sum(hits), tf.reduce_sum(losses * real)])

    def train(self, pixels: np.ndarray, labels: np.ndarray, mask: np.ndarray, rate: float) -> None:
        """Train on this process's part of a batch, blended with the next image where ``mask`` is below 1."""
        side = pixels.shape[1]
        if side not in self._train:
            scalar = tf.TensorSpec([], tf.float32)
            batch = self._batch_of(self.args.batch_size * self.args.accumulate * self.cluster.replicas, side)
            self._train[side] = self.cluster.function(
                self._train_step, *batch, tf.TensorSpec([side, side], tf.float32), scalar, scalar
            )
        inputs = (tf.constant(pixels), tf.constant(labels, tf.int32), tf.constant(mask), tf.constant(rate, tf.float32))
        self.loss = self._train[side](*inputs, self.loss)

    def test(self, run: Run) -> tuple[float, int, float, float]:
        """Correct answers, images, sum of losses and top-5 accuracy in percent; every test image exactly once."""
        sums = np.zeros(3)
        for pixels, labels in run.testing(self.data.test(self.test_batch)):
            sums += self._test(tf.constant(pixels), tf.constant(labels, tf.int32)).numpy()
        return sums[0], self.data.test_count, sums[2], 100 * sums[1] / self.data.test_count

    def _state(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables, *(self.average.variables if self.average else ())]

    def snapshot(self) -> State:
        """The contents of a checkpoint."""
        return _checkpoint.values(self._state())

    def restore(self, state: State) -> None:
        """Load ``state``, the contents of a checkpoint."""
        _checkpoint.assign(self._state(), state)

    def served(self, weights: list[np.ndarray]) -> keras.Model:
        """The exported model: probabilities ``[n, classes]`` of images ``uint8[n, side, side, 3]``, in float32."""
        keras.mixed_precision.set_global_policy("float32")
        model = network(self.args)
        model.set_weights(weights)
        images = keras.Input((self.args.image_size, self.args.image_size, 3), dtype="uint8", name="images")
        return keras.Model(images, layers.Softmax()(model(layers.Rescaling(1.0)(images))), name="imagenet_served")


def train_epoch(trainer: Trainer, run: Run, epoch: int, learning_rate: Callable[[int], float]) -> None:
    """Train the remaining steps of ``epoch``."""
    side = trainer.data.side(epoch)
    with contextlib.closing(trainer.data.train(epoch, run.position, run.global_batch)) as batches:  # type: ignore[type-var]
        for step in run.steps():
            with run.meter.waiting():
                pixels, labels = next(batches)
            rate = learning_rate(run.global_step)
            trainer.train(pixels, labels, trainer.data.mask(epoch, step, side), rate)
            run.log(step, trainer.loss.numpy, rate)


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)
    trainer = Trainer(args, cluster)
    with Run("tf.imagenet", args, cluster, trainer.data.count) as run:
        checkpoints = _checkpoint.folder(args.checkpoint_dir, args.keep_checkpoints)
        if state := run.restore(checkpoints, trainer.snapshot):
            trainer.restore(state)
        warmup = min(0.5, args.warmup_epochs / args.epochs)
        for epoch in run.epochs():
            train_epoch(trainer, run, epoch, lambda step: warmup_cosine(step, run.total_steps, args.lr, warmup))
            if not run.ended:
                first, count, loss, top5 = trainer.test(run)
                run.tested(first, count, loss, top5=top5)
        weights = trainer.tested.get_weights()  # on every worker: batch norm's averages are gathered from all of them
        _export.hand_over(run, cluster, lambda: trainer.served(weights), lambda image: centre(image, args.image_size))
        code = run.finish(_strategy.sha256(weights))
    cluster.close()
    return code


if __name__ == "__main__":
    exits.guard(_strategy.report_lost_worker(main), ARGS, "imagenet")
