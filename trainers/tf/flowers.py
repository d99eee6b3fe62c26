"""Classify flowers (or any small set of labelled images) in TensorFlow, from scratch or from pretrained weights.

    python -m trainers.tf.flowers --datadir flower_photos --epochs 30
    python -m trainers.tf.flowers --datadir flower_photos --model resnet50 --weights notop.weights.h5 --epochs 15

All images are decoded once; cropping, scaling and mirroring happen on the device, in the first layer of what
``model.fit`` trains. The same command continues a run from its last checkpoint. On SIGTERM a run completes its step,
saves and exits with 143: Running, a callback of Keras in _fit.py, sees to that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import flowers_data, mnist
from trainers.common.arguments import add, classification
from trainers.common.files import UserError
from trainers.common.job import Job
from trainers.tf import Parser

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("flowers", "Flowers in TensorFlow.")
    add(parser.learning, "--model", "small", "small: four stages, 2.4 million weights; the others are of"
        " keras.applications and accept --weights without a top",
        choices=("small", "resnet50", "mobilenetv2", "efficientnetb0"))  # fmt: skip
    flowers_data.options(parser)
    defaults = {"epochs": 30, "batch_size": 32, "test_batch_size": 100, "weight_decay": 5e-4}
    args = classification(parser, argv, defaults, sgd=0.05, adamw=0.001)
    if args.weights and args.model == "small":
        parser.error("--weights: needs --model resnet50, mobilenetv2 or efficientnetb0")
    if args.image_size < 32 and args.model != "small":
        parser.error(f"--image-size {args.image_size}: keras.applications needs at least 32")
    return args


def unit(features: Any, width: int, stride: int = 1) -> Any:
    """Apply a 3x3 convolution to ``width`` channels, batch norm and ReLU."""
    from keras import layers

    features = layers.Conv2D(width, 3, stride, padding="same", use_bias=False, kernel_initializer="he_normal")(features)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(features))


def small(features: Any) -> Any:
    """Apply a network for a few thousand images: each stage halves the size, doubles the width and adds a residual."""
    from keras import layers

    features = unit(features, 32, 2)
    for width in (64, 128, 256):
        features = unit(features, width, 2)
        features = layers.Add()([features, unit(unit(features, width), width)])
    return features


def network(args: argparse.Namespace, classes: int, weights: str) -> keras.Model:
    """Return the model: logits ``float[n, classes]`` of images ``[n, side, side, 3]`` from 0 to 255.

    The preprocessing is part of it. Raises :class:`UserError` if the file ``weights`` is of another model.
    """
    import keras
    from keras import layers

    side = args.image_size
    images = keras.Input((side, side, 3), name="images")
    if args.model == "small":
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
                raise UserError(f"--weights {weights}: no weights of {args.model} without its top: {reason}") from None
        features = body(prepare(images))
    features = layers.GlobalAveragePooling2D()(features)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="head")(features), name="flowers")


def crops(images: tf.Tensor, boxes: tf.Tensor, side: int) -> tf.Tensor:
    """Return ``float[n, side, side, 3]`` in 0 to 255: the ``boxes`` (upper, lower, left, right) of ``images``.

    Two matrix products per image, because XLA has no ``CropAndResize``. The result is as of ``tf.image.resize`` with
    antialiasing, except at the border of a box, where pixels outside of the box contribute.
    """
    import tensorflow as tf

    pixels = tf.cast(images, tf.float32)
    rows = interpolation(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    columns = interpolation(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    return tf.einsum("nqw,npwc->npqc", columns, tf.einsum("nph,nhwc->npwc", rows, pixels))


def interpolation(first: tf.Tensor, last: tf.Tensor, size: int, side: int) -> tf.Tensor:
    """Return weights ``float[n, side, size]`` that resize the pixels between ``first`` and ``last`` to ``side`` pixels.

    ``first`` and ``last`` are ``float[n]``, as fractions of ``size``; first > last mirrors.
    """
    import tensorflow as tf

    reach = (last - first)[:, None] * size
    middle = first[:, None] * size + reach * (tf.range(side, dtype=tf.float32) + 0.5) / side
    width = tf.maximum(1.0, tf.abs(reach) / side)  # of the triangle filter: wider when shrinking
    away = tf.abs(middle[:, :, None] - tf.range(size, dtype=tf.float32) - 0.5) / width[:, :, None]
    near = tf.maximum(0.0, 1.0 - away)
    return near / tf.reduce_sum(near, axis=2, keepdims=True)


def resized(image: tf.Tensor, side: int) -> tf.Tensor:
    """Return an ``image`` ``uint8[height, width, 3]`` resized to ``side`` pixels, as for the test."""
    import tensorflow as tf

    return tf.image.resize(image, [side, side], antialias=True)


def main(args: argparse.Namespace) -> int:
    """Train, test, save and export as ``args`` say; returns the exit status."""
    import keras
    import tensorflow as tf
    from keras import layers

    from trainers.tf import _tfrecord  # noqa: F401 - TFRecord files of --datadir
    from trainers.tf._export import write
    from trainers.tf._fit import Checkpoint, fit, in_float32, make_optimizer, tester
    from trainers.tf._peers import Peers

    peers = Peers(args)  # chooses the strategy, and waits for the other workers
    data = flowers_data.Data(args, peers)
    classes, stored = len(data.classes), data.images.shape[1]
    one_hot = np.eye(classes, dtype=np.float32)
    global_batch, test_batch = args.batch_size * peers.replicas, args.test_batch_size * peers.replicas
    epoch_steps = mnist.steps_per_epoch(len(data.labels), global_batch)
    total = args.epochs * epoch_steps

    def compiled(body: keras.Model) -> keras.Model:
        """Return a model of images and boxes to crop; its layers but the head learn slowly if pretrained."""
        pixels, boxes = keras.Input((stored, stored, 3), dtype="uint8"), keras.Input((4,))
        cut = layers.Lambda(lambda given: crops(given[0], given[1], args.image_size), dtype="float32")([pixels, boxes])
        model = keras.Model((pixels, boxes), body(cut))
        variables = model.trainable_variables
        slow = [variable for variable in variables if args.weights and "head" not in variable.path]
        optimizer = make_optimizer(args, total, 0.2, variables, peers, slow, PRETRAINED_SCALE)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=args.label_smoothing)
        metrics = [keras.metrics.CategoricalAccuracy("accuracy"),
                   keras.metrics.CategoricalCrossentropy("test_loss", from_logits=True)]  # fmt: skip
        model.compile(optimizer, loss, weighted_metrics=metrics, jit_compile=peers.jit)
        return model

    with peers.strategy.scope():
        body = network(args, classes, args.weights)
        model = compiled(body)
    checkpoint = Checkpoint(peers, model, model.optimizer)

    @lru_cache(1)
    def order(epoch: int) -> tuple[np.ndarray, np.ndarray]:  # depends on seed and epoch only
        return data.train_rows(epoch + 1)

    def batches(step: int) -> Iterator[Any]:
        """Yield this process's part of each batch after ``step`` steps: a resumed run continues with the next one."""
        for number in count(step):
            first = number % epoch_steps * global_batch
            rows, boxes = (peers.share(part[first : first + global_batch]) for part in order(number // epoch_steps))
            yield (data.images[rows[:, 0]], boxes), one_hot[rows[:, 1]]

    def test_batches() -> Iterator[Any]:
        for rows, boxes in zip(*data.test_rows(test_batch), strict=True):
            (numbers, labels), boxes = peers.share(rows).T, peers.share(boxes)
            yield (data.test_images[numbers], boxes), one_hot[labels], (labels >= 0).astype(np.float32)

    def specs(size: int) -> tuple[Any, ...]:  # images and boxes, labels, and weights in a test
        return ((tf.TensorSpec((size, stored, stored, 3), "uint8"), tf.TensorSpec((size, 4), "float32")),
                tf.TensorSpec((size, classes), "float32"), tf.TensorSpec([size], "float32"))  # fmt: skip

    def test_of(model: keras.Model) -> Callable[[], dict[str, float]]:
        return tester(model, peers.dataset(test_batches, specs(args.test_batch_size)), job.stop, peers)

    def export(folder: str) -> list[str]:
        if args.precision != "fp32":  # exported models compute in fp32
            with peers.strategy.scope():
                exact = compiled(in_float32(lambda: network(args, classes, ""), body))
            job.more["exported_accuracy"] = accuracy = test_of(exact)()["accuracy"]
            job.say(f"Exported model: test accuracy {accuracy:.2f} % in fp32")
        trained = in_float32(lambda: network(args, classes, ""), body)
        pixels = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
        answers = layers.Softmax()(trained(layers.Rescaling(1.0)(pixels)))
        served = keras.Model(pixels, answers, name="flowers_served")
        return write(served, folder, lambda image: resized(image, args.image_size)) if folder else []

    about = {"model": args.model, "optimizer": args.optimizer, "global_batch": global_batch,
             "train_images": len(data.labels), "data": data.fingerprints}  # fmt: skip
    with Job("tf.flowers", args, peers, about, model, total=total, every=epoch_steps, count=global_batch) as job:
        job.more["classes"] = data.classes
        step = job.resume(checkpoint.load)
        test = test_of(model)
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        batched = peers.dataset(partial(batches, step), specs(args.batch_size)[:2])
        step = fit(model, batched, job, step, test, checkpoint.save, peers)  # logs, tests, saves, and stops
        return job.finish(step, checkpoint.save, export)


if __name__ == "__main__":
    options = parse_args()
    from trainers.tf._peers import Peers

    Peers.run(main, options, "flowers")
