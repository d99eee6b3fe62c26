# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in TensorFlow, with the models of keras.applications.

    python -m trainers.tf.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    python -m trainers.tf.imagenet --datadir gs://BUCKET/FOLDER --epochs 90 --ema 0.9999 --accumulate 2

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains. The same
command continues a run from its last checkpoint.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data
from trainers.common.flags import Flag, one_of
from trainers.tf import import_tensorflow

MODEL = Flag("model", one_of("resnet50", "resnet101", "mobilenetv2"), "resnet50", "model of keras.applications")

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in TensorFlow.", (*flags.TF, *imagenet_data.FLAGS, MODEL),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip
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


def network(args: argparse.Namespace) -> keras.Model:
    """Logits ``float[n, classes]`` of images ``[n, side, side, 3]`` from 0 to 255, of any side."""
    build = {
        "resnet50": keras.applications.ResNet50,
        "resnet101": keras.applications.ResNet101,
        "mobilenetv2": keras.applications.MobileNetV2,
    }[args.model]
    if min([*args.progressive, args.image_size]) < 32:
        raise exits.UserError("--image-size and --progressive: keras.applications needs at least 32", exits.USAGE)
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


def losses_of(
    model: keras.Model, pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor, args: argparse.Namespace
) -> tf.Tensor:
    """Return the loss of each image; where ``mask`` is below 1, it is blended with the next image."""
    images, classes = tf.cast(pixels, tf.float32), args.num_classes
    targets = tf.one_hot(labels, classes) * (1 - args.label_smoothing) + args.label_smoothing / classes
    if args.mixup or args.cutmix:
        shown, keep = mask[:, :, None], tf.reduce_mean(mask)
        images = images * shown + tf.roll(images, 1, 0) * (1 - shown)
        targets = targets * keep + tf.roll(targets, 1, 0) * (1 - keep)
    return tf.nn.softmax_cross_entropy_with_logits(targets, model(images, training=True))


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


def average_decay(step: int, most: float) -> float:
    """The decay of the averaged weights after ``step``, from 0: low at first, when the weights change fast.

    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    return min(most, (1 + step) / (10 + step))


def test_step(model: keras.Model, pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return a replica's correct first answers, sum of losses, correct among the best five; -1 is padding."""
    logits = model(tf.cast(pixels, tf.float32), training=False)
    hits = tf.cast(tf.math.top_k(logits, min(5, logits.shape[1])).indices == labels[:, None], tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    real = tf.cast(labels >= 0, tf.float32)
    return tf.stack([tf.reduce_sum(hits[:, 0]), tf.reduce_sum(losses * real), tf.reduce_sum(hits)])


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers

    # Data: threads decode the images of this worker, of which each replica has its part.
    data = imagenet_data.Data(args, cluster.share, peers=cluster)

    def place(batch: imagenet_data.Pixels) -> tuple[Any, Any]:
        """This worker's ``batch``, split over its replicas and on their devices."""
        pixels, labels = batch
        return cluster.split(pixels, shared=False), cluster.split(labels.astype(np.int32), shared=False)

    global_batch = args.batch_size * args.accumulate * cluster.replicas
    warmup = min(0.5, args.warmup_epochs / args.epochs)

    with cluster.strategy.scope():
        model = network(args)
        average = network(args) if args.ema else None  # of the model's weights
        optimizer = _strategy.optimizer_of(args, model.trainable_variables)
    _strategy.vary_dropout(model)
    if average:
        average.set_weights(model.get_weights())

    def train_step(pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """On one replica: train on its part of the batch, in --accumulate parts; returns its part of the loss."""
        parts, variables = args.accumulate, model.trainable_variables
        pixels, labels = tf.reshape(pixels, [parts, -1, *pixels.shape[1:]]), tf.reshape(labels, [parts, -1])
        loss, gradients = tf.constant(0.0), [tf.zeros(variable.shape) for variable in variables]
        for part in tf.range(parts) if parts > 1 else range(1):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)  # more would need more memory
            with tf.GradientTape() as tape:
                # The part of the step's loss that is due to these images.
                losses = losses_of(model, pixels[part], labels[part], mask, args)
                more = tf.reduce_sum(losses) / global_batch
            further = tape.gradient(more, variables)
            loss, gradients = loss + more, [one + other for one, other in zip(gradients, further, strict=True)]
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        if args.optimizer == "sgd":  # AdamW has its own
            gradients = cluster.add_decay(gradients, variables, args.weight_decay)
        optimizer.learning_rate.assign(rate)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums the gradients over the replicas
        return loss

    @cluster.function  # tf.function, traced once for each image size
    def train_batch(pixels: Any, labels: Any, mask: Any, rate: Any, decay: Any, loss: tf.Tensor) -> tf.Tensor:
        """Train on a batch; returns its loss, or the first that was not finite."""
        losses = cluster.run(train_step, (pixels, labels, mask, rate))
        if average:
            cluster.update_average(average.variables, model.variables, decay)
        return tf.where(tf.math.is_finite(loss), cluster.sum(losses), loss)

    def tester(model: keras.Model) -> Test:
        size = args.test_batch_size * cluster.replicas
        return cluster.tester(functools.partial(test_step, model), lambda: cluster.prefetch(data.test(size), place))

    def export(folder: str) -> list[str]:
        from trainers.tf import _export

        trained = cluster.in_float32(lambda: network(args))
        images = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
        served = keras.Model(images, layers.Softmax()(trained(layers.Rescaling(1.0)(images))), name="imagenet_served")
        return _export.write(served, folder, lambda image: centre(image, args.image_size))

    loss = tf.constant(0.0)  # of the last step, or the first that was not finite; the same on all workers
    with Run("tf.imagenet", args, cluster, global_batch=global_batch, train_count=data.count,
             test_count=data.test_count, data=data.fingerprints, model=model, average=average,
             optimizer=optimizer) as run:  # fmt: skip
        for epoch in run.epochs(tester(run.tested)):
            batches = cluster.prefetch(data.train(epoch, run.step_in_epoch, global_batch), place)
            for step, batch in run.steps(batches):
                mask = tf.constant(data.mask(epoch, run.step_in_epoch, data.side(epoch)))
                rate, decay = learning_rate(step, run.total_steps, run.peak, warmup), average_decay(step, args.ema)
                loss = train_batch(*batch, mask, tf.constant(rate), tf.constant(decay), loss)
                run.end_step(loss, rate)
        run.finish(export, cluster.test_of_export(lambda: network(args), tester))
    cluster.close()
    return run.code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "imagenet")
