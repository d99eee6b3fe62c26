# ruff: noqa: E402
"""Flowers (or any small set of labelled images) in TensorFlow, from scratch or from pretrained weights.

    python -m trainers.tf.flowers --datadir flower_photos --epochs 30
    python -m trainers.tf.flowers --datadir flower_photos --model resnet50 --weights notop.weights.h5 --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there. The
same command continues a run from its last checkpoint.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data
from trainers.common.flags import Flag, one_of
from trainers.tf import import_tensorflow

MODEL = Flag("model", one_of("small", "resnet50", "mobilenetv2", "efficientnetb0"), "small", "small: four stages, 2.4"
             " million weights; the others are of keras.applications and accept --weights without a top")  # fmt: skip

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in TensorFlow.", (*flags.TF, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip
    import_tensorflow()

import argparse
import functools
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainers.common.run import Run, Test
from trainers.tf import _strategy, _tfrecord  # noqa: F401 - TFRecord files of --datadir
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
    elif side < 32:
        raise exits.UserError(f"--image-size {side}: keras.applications needs at least 32", exits.USAGE)
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


def learning_rate(step: int, total_steps: int, peak: float, warmup: float = 0.2) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


def test_step(
    model: keras.Model, images: tf.Tensor, batches: tf.Tensor, boxes: tf.Tensor, number: tf.Tensor
) -> tf.Tensor:
    """Return a replica's correct answers and sum of losses; rows with label -1 are padding and do not count."""
    rows, side = batches[number], model.inputs[0].shape[1]
    labels = rows[:, 1]
    logits = model(gather_crops(images, rows[:, 0], boxes[number], side), training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    correct = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses * tf.cast(labels >= 0, tf.float32))])


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers

    # Data: all images as bytes on each device. A batch is rows of (image, label) and boxes to crop, of which each
    # replica has its part.
    data = flowers_data.Data(args, cluster)
    cluster.check_alike("training and test images", data.images, data.labels, data.test_images, data.test_labels)
    classes = len(data.classes)
    images, test_images = cluster.replicate(data.images), cluster.replicate(data.test_images)
    test_rows, test_boxes = data.test_rows(args.test_batch_size * cluster.replicas)
    test_batches = cluster.split(test_rows.astype(np.int32), axis=1), cluster.split(test_boxes, axis=1)
    global_batch = args.batch_size * cluster.replicas

    with cluster.strategy.scope():
        model = network(args, classes, args.weights)
        head = [v for v in model.trainable_variables if "head" in v.path or not args.weights]
        pretrained = [v for v in model.trainable_variables if args.weights and "head" not in v.path]
        parts = [(head, 1.0), (pretrained, PRETRAINED_SCALE)] if pretrained else [(head, 1.0)]
        optimizers = [_strategy.optimizer_of(args, part) for part, _ in parts]  # one for each learning rate
    _strategy.vary_dropout(model)

    def train_step(
        images: tf.Tensor, batches: tf.Tensor, boxes: tf.Tensor, rates: tf.Tensor, number: tf.Tensor
    ) -> tf.Tensor:
        """On one replica: train on its part of the batch; returns its part of the loss."""
        rows, trained = batches[number], [v for part, _ in parts for v in part]
        targets = tf.one_hot(rows[:, 1], classes) * (1 - args.label_smoothing) + args.label_smoothing / classes
        pixels = gather_crops(images, rows[:, 0], boxes[number], args.image_size)
        with tf.GradientTape() as tape:
            logits = model(pixels, training=True)
            loss = tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(targets, logits)) / global_batch
        gradients = tape.gradient(loss, trained)
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        if args.optimizer == "sgd":  # AdamW has its own
            gradients = cluster.add_decay(gradients, trained, args.weight_decay)
        for optimizer, (part, scale) in zip(optimizers, parts, strict=True):
            optimizer.learning_rate.assign(rates[number] * scale)
            optimizer.apply_gradients(zip(gradients[: len(part)], part, strict=True))  # sums over the replicas
            gradients = gradients[len(part) :]
        return loss

    def tester(model: keras.Model) -> Test:
        batches = [(test_images, *test_batches, tf.constant(number)) for number in range(len(test_rows))]
        return cluster.tester(functools.partial(test_step, model), lambda: batches)

    def export(folder: str) -> list[str]:
        from trainers.tf import _export

        trained = cluster.in_float32(lambda: network(args, classes, ""))
        pixels = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
        answers = layers.Softmax()(trained(layers.Rescaling(1.0)(pixels)))
        served = keras.Model(pixels, answers, name="flowers_served")
        return _export.write(served, folder, lambda image: resized(image, args.image_size))

    loop = _strategy.Loop(args, cluster, train_step)
    states = {f"optimizer{number}": optimizer for number, optimizer in enumerate(optimizers)}
    with Run("tf.flowers", args, cluster, global_batch=global_batch, train_count=len(data.labels),
             test_count=len(data.test_labels), data=data.fingerprints, model=model, **states) as run:  # fmt: skip
        for epoch in run.epochs(tester(model)):
            rows, boxes = data.train_rows(epoch)  # depend on seed and epoch only
            batches = (cluster.split_epoch(part, global_batch) for part in (rows.astype(np.int32), boxes))
            first = (epoch - 1) * run.steps_per_epoch
            steps = range(first, first + run.steps_per_epoch)
            rates = [learning_rate(step, run.total_steps, run.peak) for step in steps]
            inputs = images, *batches, cluster.replicate(np.array(rates, np.float32))
            for step, count in run.steps(loop.counts(run)):
                loss = loop.train(inputs, step - first, count)
                run.end_step(loss, rates[step - first + count - 1], count)
        run.finish(export, cluster.test_of_export(lambda: network(args, classes, ""), tester), classes=data.classes)
    cluster.close()
    return run.code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "flowers")
