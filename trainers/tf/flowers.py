# ruff: noqa: E402
"""Flowers (or any small set of labelled images) in TensorFlow, from scratch or from pretrained weights.

    python -m trainers.tf.flowers --datadir flower_photos --epochs 30
    python -m trainers.tf.flowers --datadir flower_photos --model resnet50 --weights notop.weights.h5 --epochs 15

All images are decoded once and stay on the device as bytes; cropping, scaling and mirroring happen there. The
same command continues a run from its last checkpoint.
"""

from __future__ import annotations

from trainers.common import exits, flags, flowers_data, order
from trainers.common.flags import Flag, one_of
from trainers.tf import import_tensorflow

MODEL = Flag("model", one_of("small", "resnet50", "mobilenetv2", "efficientnetb0"), "small", "small: four stages, 2.4"
             " million weights; the others are of keras.applications and accept --weights without a top")  # fmt: skip

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("flowers", "Flowers in TensorFlow.", (*flags.TF, *flowers_data.FLAGS, MODEL),
                       epochs=30, lr=0.05, batch_size=32, test_batch_size=100)  # fmt: skip
    import_tensorflow()

import argparse
import json
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainers.common.log import Log
from trainers.common.run import Checkpoints, State, check_same_run
from trainers.tf import _strategy
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


def export(args: argparse.Namespace, classes: int, weights: list[np.ndarray]) -> list[str]:
    """Write the trained model into --export-dir: images ``uint8[n, side, side, 3]`` to probabilities, in float32."""
    from trainers.tf import _export

    keras.config.set_dtype_policy("float32")
    model = network(args, classes, "")
    model.set_weights(weights)
    images = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
    answers = layers.Softmax()(model(layers.Rescaling(1.0)(images)))
    served = keras.Model(images, answers, name="flowers_served")
    return _export.write(served, args.export_dir, lambda image: resized(image, args.image_size))


def main(args: argparse.Namespace) -> int:  # noqa: C901 - the loop, to be read from top to bottom
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers
    strategy = cluster.strategy

    # Data: all images as bytes on each device. A batch is rows of (image, label) and boxes to crop, of which each
    # replica has its part.
    data = flowers_data.Data(args, cluster)
    cluster.check_alike("training and test images", data.images, data.labels, data.test_images, data.test_labels)
    train_count, test_count, classes = len(data.labels), len(data.test_labels), len(data.classes)
    images, test_images = cluster.replicate(data.images), cluster.replicate(data.test_images)
    test_rows, test_boxes = data.test_rows(args.test_batch_size * cluster.replicas)
    test_batches = cluster.split(test_rows.astype(np.int32), axis=1), cluster.split(test_boxes, axis=1)
    global_batch = args.batch_size * cluster.replicas
    steps_per_epoch = order.steps_per_epoch(train_count, global_batch)
    total_steps = args.epochs * steps_per_epoch

    # Model and optimizer.
    keras.config.set_dtype_policy("mixed_bfloat16" if cluster.bf16 else "float32")
    peak = args.lr * (cluster.replicas if args.scale_lr else 1)
    with strategy.scope():
        model = network(args, classes, args.weights)
        head = [v for v in model.trainable_variables if "head" in v.path or not args.weights]
        pretrained = [v for v in model.trainable_variables if args.weights and "head" not in v.path]
        parts = [(head, 1.0), (pretrained, PRETRAINED_SCALE)] if pretrained else [(head, 1.0)]
        optimizers = []  # one for each learning rate
        for part, _ in parts:
            if args.optimizer == "adamw":
                optimizer = keras.optimizers.AdamW(weight_decay=args.weight_decay)
                optimizer.exclude_from_weight_decay([v for v in part if len(v.shape) <= 1])
            else:
                optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
            optimizer.build(part)
            optimizers.append(optimizer)
    _strategy.vary_dropout(model)

    def train_step(images: tf.Tensor, batches: Any, rates: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """On one replica: train on its part of the batch; returns its part of the loss."""
        rows, boxes = batches[0][step], batches[1][step]
        targets = tf.one_hot(rows[:, 1], classes) * (1 - args.label_smoothing) + args.label_smoothing / classes
        pixels = gather_crops(images, rows[:, 0], boxes, args.image_size)
        with tf.GradientTape() as tape:
            logits = model(pixels, training=True)
            loss = tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(targets, logits)) / global_batch
        trained = [v for part, _ in parts for v in part]
        gradients = tape.gradient(loss, trained)
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        if args.optimizer == "sgd":
            pairs = zip(gradients, trained, strict=True)
            gradients = [cluster.decay(gradient, variable, args.weight_decay) for gradient, variable in pairs]
        for optimizer, (part, scale) in zip(optimizers, parts, strict=True):
            optimizer.learning_rate.assign(rates[step] * scale)
            optimizer.apply_gradients(zip(gradients[: len(part)], part, strict=True))  # sums over the replicas
            gradients = gradients[len(part) :]
        return loss

    def test_step(images: tf.Tensor, batches: Any, number: tf.Tensor) -> tf.Tensor:
        """On one replica: correct answers and the sum of losses; rows with label -1 are padding and do not count."""
        rows, boxes = batches[0][number], batches[1][number]
        labels = rows[:, 1]
        logits = model(gather_crops(images, rows[:, 0], boxes, args.image_size), training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        correct = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float32)
        return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses * tf.cast(labels >= 0, tf.float32))])

    if cluster.jit:
        train_step, test_step = (tf.function(body, jit_compile=True) for body in (train_step, test_step))

    @cluster.function  # tf.function
    def train_steps(batches: Any, rates: Any, first: tf.Tensor, count: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
        """Train ``count`` steps; returns the last loss, or the first that was not finite."""
        for step in tf.range(first, first + count):
            losses = strategy.run(train_step, args=(images, batches, rates, step))
            loss = tf.where(tf.math.is_finite(loss), cluster.sum(losses), loss)
        return loss

    @cluster.function
    def test_batch(number: tf.Tensor) -> tf.Tensor:
        return cluster.sum(strategy.run(test_step, args=(test_images, test_batches, number)))

    # A checkpoint holds arrays only, so that loading one cannot execute code.
    learned = model.variables
    variables = [*learned, *(v for optimizer in optimizers for v in optimizer.variables)]
    checkpoints = Checkpoints(
        args.checkpoint_dir,
        args.keep_checkpoints,
        write=lambda state, file: np.savez(file, **state),
        read=lambda file: dict(np.load(file, allow_pickle=False)),
        not_finite=lambda state: _strategy.not_finite(state, len(learned)),
    )
    run = {"trainer": "tf.flowers", "model": args.model, "optimizer": args.optimizer,
           "seed": args.seed, "global_batch": global_batch, "train_images": train_count,
           "data": data.fingerprints, "flags": flags.deciding(args, "bf16" if cluster.bf16 else "fp32")}  # fmt: skip
    stop = exits.Stop(cluster.maximum if cluster.processes > 1 else None, args.checkpoint_minutes)
    pace = _strategy.Pace(args, cluster)
    loss = 0.0  # of the last step, or the first that was not finite; the same on all workers
    step = saved = 0  # steps done, and of those the steps in the newest checkpoint

    with Log("tf.flowers", args, cluster, global_batch, steps_per_epoch) as log:
        tracer = _strategy.Tracer(args, log.say)

        def snapshot() -> State:
            """All workers call this: variables that differ by replica are averaged."""
            state = _strategy.values(variables)
            log.check_weights(checkpoints.not_finite(state))
            return {**state, "run": json.dumps(run), "log": log.state(), "step": step}

        def save() -> None:
            nonlocal saved
            if args.checkpoint_dir and saved < step:
                log.check_finite(loss)  # every resumed run would fail on a checkpoint with NaN
                with log.paused():
                    state = snapshot()
                    log.saved(step, checkpoints.save(state, step) if cluster.chief else "")
                saved = step
                stop.saved()

        def test(epoch: int) -> float:
            """Test on every image exactly once; returns the accuracy in percent."""
            stop.restart()
            sums = np.zeros(2)
            for number in range(len(test_rows)):
                if code := stop.poll():
                    raise exits.UserError(f"stopped while testing epoch {epoch}; {log.where_saved()}", code)
                sums += test_batch(tf.constant(number)).numpy()
            log.check_weights(checkpoints.not_finite(_strategy.values(learned)))
            return log.test(epoch, test_count, *sums.tolist())

        if args.checkpoint_dir and cluster.chief and not args.eval_only:
            checkpoints.prepare(args.resume)
        state = None
        if args.checkpoint_dir and args.resume:
            state = cluster.agreed_state(checkpoints.best if args.eval_only and args.keep_best else checkpoints.newest)
            if state:
                check_same_run(json.loads(str(state["run"])), run, args, log.say)
                _strategy.assign(variables, state)
                step = saved = int(state["step"])
                log.load(str(state["log"]), step)
        log.start(peak, **run)
        stop.install()

        status, code = "completed", 0
        if args.eval_only:
            if not state:
                raise exits.UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", exits.USAGE)
            test(step // steps_per_epoch)
        last_step = min(args.num_steps or total_steps, total_steps)
        for epoch in range(len(log.tests) + 1, 0 if args.eval_only else args.epochs + 1):
            first, end = (epoch - 1) * steps_per_epoch, epoch * steps_per_epoch
            log.begin_epoch(epoch)
            with log.waiting():  # for the rows of the epoch, which depend on seed and epoch only
                used = steps_per_epoch * global_batch
                rows, boxes = (part[:used].reshape(steps_per_epoch, global_batch, -1)
                               for part in data.train_rows(epoch))  # fmt: skip
                batches = cluster.split(rows.astype(np.int32), axis=1), cluster.split(boxes, axis=1)
                rates = [learning_rate(position, total_steps, peak) for position in range(first, end)]
                device_rates = cluster.replicate(np.array(rates, np.float32))
            stop.restart()
            while step < min(end, last_step) and not (code := stop.poll()):
                count = pace.start(step, first, min(end, last_step))
                tracer.step(count)
                position = tf.constant(step - first), tf.constant(count)
                loss = float(train_steps(batches, device_rates, *position, tf.constant(loss)))
                pace.end()
                step += count
                log.step(epoch, step - 1, count)
                if (step - 1 - first) % args.log_steps == 0:
                    log.train(epoch, step - 1, loss, rates[step - 1 - first])
                if stop.save_due or (args.checkpoint_steps and step % args.checkpoint_steps == 0):
                    save()
            log.check_finite(loss)
            log.end_epoch(epoch, complete=step == end)
            if step < end or not args.checkpoint_steps or step == total_steps:
                save()
            if step < end:
                status = "preempted" if code else "stopped"
                break
            best, accuracy = log.best, test(epoch)
            if args.keep_best and (best is None or accuracy > best):
                state = snapshot()
                if cluster.chief:
                    checkpoints.save_best(state)
            if args.target_accuracy and accuracy >= args.target_accuracy:
                status = "reached"
                break

        tracer.close()
        if status == "completed" and log.tests[-1]["accuracy"] < args.target_accuracy:
            status, code = "missed", exits.TARGET_MISSED
        if args.keep_best and (state := cluster.agreed_state(checkpoints.best)):
            log.say(f"Best checkpoint: step {int(state['step'])}")
            _strategy.assign(variables, state)
        weights = model.get_weights()  # on all workers: batch norm's averages are gathered from all of them
        if args.export_dir and cluster.chief and status not in ("stopped", "preempted"):
            log.exported(args.export_dir, export(args, classes, weights))
        log.finish(status, code, _strategy.sha256(weights), classes=data.classes)
    cluster.close()
    return code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "flowers")
