"""Classify ImageNet (or any large set of labelled images) in TensorFlow, with the models of keras.applications.

    python -m trainers.tf.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    python -m trainers.tf.imagenet --datadir gs://BUCKET/FOLDER --epochs 90 --ema 0.9999 --accumulate 2

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains. What is learned in a
step is in Learner, which ``model.fit`` trains. The same command continues a run from its last checkpoint. On SIGTERM a
run completes its step, saves and exits with 143: Running, a callback of Keras in _fit.py, sees to that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import imagenet_data, mnist
from trainers.common.arguments import add, classification
from trainers.common.job import Job
from trainers.tf import Parser

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from trainers.tf._peers import Peers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("imagenet", "ImageNet in TensorFlow.")
    add(parser.learning, "--model", "resnet50", "model of keras.applications",
        choices=("resnet50", "resnet101", "mobilenetv2"))  # fmt: skip
    imagenet_data.options(parser)
    defaults = {"epochs": 18, "batch_size": 256, "test_batch_size": 256, "weight_decay": 5e-5}
    args = classification(parser, argv, defaults, sgd=0.5, adamw=0.001)
    if min([*args.progressive, args.image_size]) < 32:
        parser.error("--image-size and --progressive: keras.applications needs at least 32")
    return args


def network(args: argparse.Namespace) -> keras.Model:
    """Return the model: logits ``float[n, classes]`` of images ``[n, side, side, 3]`` from 0 to 255, of any side."""
    import keras
    from keras import layers

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
    """Return the center of an ``image`` ``uint8[height, width, 3]``, resized to ``side`` pixels, as for the test."""
    import tensorflow as tf

    height, width = tf.unstack(tf.shape(image)[:2])
    most = tf.cast(tf.round(tf.cast(tf.minimum(height, width), tf.float32) * share), tf.int32)
    middle = tf.image.crop_to_bounding_box(image, (height - most) // 2, (width - most) // 2, most, most)
    return tf.image.resize(middle, [side, side], antialias=True)


def learner(args: argparse.Namespace, network: keras.Model) -> keras.Model:
    """Return ``network`` with a step that adds up the gradients of --accumulate parts of a batch.

    An image is blended with the next one, and so are their labels, where the mask of a step is below 1.
    """
    import keras
    import tensorflow as tf

    class Learner(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.mean = network, keras.metrics.Mean("loss")

        def call(self, given: Any, training: bool = False) -> tf.Tensor:
            return self.network(given[0] if isinstance(given, tuple) else given, training=training)

        def train_step(self, data: Any) -> dict[str, tf.Tensor]:
            (pixels, mask), labels = data
            parts, variables = args.accumulate, self.trainable_variables
            shown, keep = mask[:, :, :, None], tf.reduce_mean(mask)
            loss, gradients = tf.constant(0.0), [tf.zeros(variable.shape) for variable in variables]
            for images, targets in zip(tf.split(pixels, parts), tf.split(labels, parts), strict=True):
                with tf.control_dependencies(gradients):  # one after the other, in the memory of one
                    images = tf.cast(images, tf.float32)
                if args.mixup or args.cutmix:
                    images = images * shown + tf.roll(images, 1, 0) * (1 - shown)
                    targets = targets * keep + tf.roll(targets, 1, 0) * (1 - keep)
                with tf.GradientTape() as tape:
                    more = self.compute_loss(y=targets, y_pred=network(images, training=True)) / parts
                further = tape.gradient(more, variables)
                loss, gradients = loss + more, [one + other for one, other in zip(gradients, further, strict=True)]
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums them over the replicas
            self.mean.update_state(loss * tf.distribute.get_strategy().num_replicas_in_sync)
            return {"loss": self.mean.result()}

    return Learner()


def averager(slow: keras.Model, fast: keras.Model, most: float, peers: Peers) -> Callable[[int], None]:
    """Return what moves the weights of ``slow`` towards ``fast`` after a number of steps.

    Their part that stays is low at first, when the weights change fast, and at most ``most``:
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    import tensorflow as tf

    def move(average: Any, new: Any, decay: tf.Tensor) -> None:
        average.assign_add(tf.cast(1 - decay, average.dtype) * (new - average))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def update(decay: tf.Tensor) -> None:
        for average, variable in zip(slow.variables, fast.variables, strict=True):
            if "float" in variable.dtype:
                peers.strategy.extended.update(average.value, move, args=(variable.value, decay))

    return lambda step: update(tf.constant(min(most, step / (9 + step))))


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
    data = imagenet_data.Data(args, peers.share, peers=peers)
    one_hot = np.eye(args.num_classes, dtype=np.float32)
    local, global_batch = peers.replicas // peers.size, args.batch_size * args.accumulate * peers.replicas
    epoch_steps = mnist.steps_per_epoch(data.count, global_batch)
    total, warmup = args.epochs * epoch_steps, min(0.5, args.warmup_epochs / args.epochs)

    def compiled(model: keras.Model) -> keras.Model:
        optimizer = make_optimizer(args, total, warmup, model.trainable_variables, peers)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=args.label_smoothing)
        metrics = [keras.metrics.CategoricalAccuracy("accuracy"), keras.metrics.TopKCategoricalAccuracy(5, "top5"),
                   keras.metrics.CategoricalCrossentropy("test_loss", from_logits=True)]  # fmt: skip
        model.compile(optimizer, loss, weighted_metrics=metrics, jit_compile=peers.jit)
        return model

    with peers.strategy.scope():
        model = compiled(learner(args, network(args)))
        average = compiled(network(args)) if args.ema else None  # of the model's weights
    if average:
        average.set_weights(model.get_weights())
    tested = average or model
    checkpoint = Checkpoint(peers, model, model.optimizer, *([average] if average else []))

    def batches(step: int) -> Iterator[Any]:
        """Yield this process's part of each batch after ``step`` steps: a resumed run continues with the next one."""
        for epoch in range(step // epoch_steps, args.epochs):
            first = max(0, step - epoch * epoch_steps)
            for number, (pixels, labels) in enumerate(data.train(epoch + 1, first, global_batch), first):
                mask = data.mask(epoch + 1, number, data.side(epoch + 1))
                yield (pixels, np.stack([mask] * local)), one_hot[labels]

    def test_batches() -> Iterator[Any]:
        for pixels, labels in data.test(args.test_batch_size * peers.replicas):
            yield pixels, one_hot[labels], (labels >= 0).astype(np.float32)

    def specs(size: int, side: int | None) -> tuple[Any, ...]:  # images, labels, and weights in a test
        return (tf.TensorSpec((size, side, side, 3), "uint8"), tf.TensorSpec((size, args.num_classes), "float32"),
                tf.TensorSpec([size], "float32"))  # fmt: skip

    def test_of(model: keras.Model) -> Callable[[], dict[str, float]]:
        data = peers.dataset(test_batches, specs(args.test_batch_size, args.image_size))
        return tester(model, data, job.stop, peers)

    def export(folder: str) -> list[str]:
        if args.precision != "fp32":  # exported models compute in fp32
            with peers.strategy.scope():
                exact = compiled(in_float32(lambda: network(args), tested))
            job.more["exported_accuracy"] = accuracy = test_of(exact)()["accuracy"]
            job.say(f"Exported model: test accuracy {accuracy:.2f} % in fp32")
        trained = in_float32(lambda: network(args), tested)
        images = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
        served = keras.Model(images, layers.Softmax()(trained(layers.Rescaling(1.0)(images))), name="imagenet_served")
        return write(served, folder, lambda image: centre(image, args.image_size)) if folder else []

    about = {"model": args.model + " with averaged weights (--ema)" * bool(args.ema), "optimizer": args.optimizer,
             "global_batch": global_batch, "train_images": data.count, "data": data.fingerprints}  # fmt: skip
    with Job("tf.imagenet", args, peers, about, tested, total=total, every=epoch_steps, count=global_batch) as job:
        step = job.resume(checkpoint.load)
        test = test_of(tested)
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        after = averager(average, model, args.ema, peers) if average else lambda step: None
        side = None if args.progressive else args.image_size
        images, labels, _ = specs(args.batch_size * args.accumulate, side)
        given = (images, tf.TensorSpec((1, side, side), "float32")), labels
        batched = peers.dataset(partial(batches, step), given)
        step = fit(model, batched, job, step, test, checkpoint.save, peers, after)  # logs, tests, saves, and stops
        return job.finish(step, checkpoint.save, export)


if __name__ == "__main__":
    options = parse_args()
    from trainers.tf._peers import Peers

    Peers.run(main, options, "imagenet")
