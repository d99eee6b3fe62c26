# ruff: noqa: E402
"""ImageNet (or any large set of labelled images) in TensorFlow, with the models of keras.applications.

    python -m trainers.tf.imagenet --datadir FOLDER --epochs 18 --progressive 128,160 --image-size 192
    python -m trainers.tf.imagenet --datadir gs://BUCKET/FOLDER --epochs 90 --ema 0.9999 --accumulate 2

FOLDER holds class folders, TFRecord files or tar shards; threads decode while the device trains. The same
command continues a run from its last checkpoint.
"""

from __future__ import annotations

from trainers.common import exits, flags, imagenet_data, order
from trainers.common.flags import Flag, one_of
from trainers.tf import import_tensorflow

MODEL = Flag("model", one_of("resnet50", "resnet101", "mobilenetv2"), "resnet50", "model of keras.applications")

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("imagenet", "ImageNet in TensorFlow.", (*flags.TF, *imagenet_data.FLAGS, MODEL),
                       epochs=18, lr=0.5, batch_size=256, test_batch_size=256)  # fmt: skip
    import_tensorflow()

import argparse
import contextlib
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


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then a cosine to 0; both at the middle of ``step``, so that no step has rate 0."""
    position = (min(step, total_steps - 1) + 0.5) / total_steps
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))


def export(args: argparse.Namespace, weights: list[np.ndarray]) -> list[str]:
    """Write the trained model into --export-dir: images ``uint8[n, side, side, 3]`` to probabilities, in float32."""
    from trainers.tf import _export

    keras.config.set_dtype_policy("float32")
    model = network(args)
    model.set_weights(weights)
    images = keras.Input((args.image_size, args.image_size, 3), dtype="uint8", name="images")
    served = keras.Model(images, layers.Softmax()(model(layers.Rescaling(1.0)(images))), name="imagenet_served")
    return _export.write(served, args.export_dir, lambda image: centre(image, args.image_size))


def average_decay(step: int, most: float) -> float:
    """The decay of the averaged weights after ``step``, from 0: low at first, when the weights change fast.

    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    return min(most, (1 + step) / (10 + step))


def main(args: argparse.Namespace) -> int:  # noqa: C901 - the loop, to be read from top to bottom
    """Train, test, save and export as ``args`` say; returns the exit code."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers
    strategy = cluster.strategy

    # Data: threads decode the images of this worker, of which each replica has its part.
    data = imagenet_data.Data(args, cluster.share, peers=cluster)

    def place(batch: imagenet_data.Pixels) -> tuple[Any, Any]:
        """This worker's ``batch``, split over its replicas and on their devices."""
        return tuple(cluster.split(part, shared=False) for part in (batch[0], batch[1].astype(np.int32)))  # type: ignore[return-value]

    global_batch = args.batch_size * args.accumulate * cluster.replicas
    steps_per_epoch = order.steps_per_epoch(data.count, global_batch)
    total_steps = args.epochs * steps_per_epoch

    # Model, the average of its weights, and optimizer.
    keras.config.set_dtype_policy("mixed_bfloat16" if cluster.bf16 else "float32")
    peak = args.lr * (cluster.replicas if args.scale_lr else 1)
    with strategy.scope():
        model = network(args)
        average = network(args) if args.ema else None
        if args.optimizer == "adamw":
            optimizer = keras.optimizers.AdamW(weight_decay=args.weight_decay)
            optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) <= 1])
        else:
            optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
        optimizer.build(model.trainable_variables)
    _strategy.vary_dropout(model)
    if average:
        average.set_weights(model.get_weights())
    tested = average or model

    def gradients_of(pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The part of the step's loss that is due to these images, and its gradients."""
        images, classes = tf.cast(pixels, tf.float32), args.num_classes
        targets = tf.one_hot(labels, classes) * (1 - args.label_smoothing) + args.label_smoothing / classes
        if args.mixup or args.cutmix:  # blend with the next image where the mask is below 1
            shown, keep = mask[:, :, None], tf.reduce_mean(mask)
            images = images * shown + tf.roll(images, 1, 0) * (1 - shown)
            targets = targets * keep + tf.roll(targets, 1, 0) * (1 - keep)
        with tf.GradientTape() as tape:
            losses = tf.nn.softmax_cross_entropy_with_logits(targets, model(images, training=True))
            loss = tf.reduce_sum(losses) / global_batch
        return loss, tape.gradient(loss, model.trainable_variables)

    def train_step(pixels: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """On one replica: train on its part of the batch, in --accumulate parts; returns its part of the loss."""
        parts, variables = args.accumulate, model.trainable_variables
        pixels, labels = tf.reshape(pixels, [parts, -1, *pixels.shape[1:]]), tf.reshape(labels, [parts, -1])
        loss, gradients = tf.constant(0.0), [tf.zeros(variable.shape) for variable in variables]
        for part in tf.range(parts) if parts > 1 else range(1):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)  # more would need more memory
            more, further = gradients_of(pixels[part], labels[part], mask)
            loss, gradients = loss + more, [one + other for one, other in zip(gradients, further, strict=True)]
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        pairs = list(zip(gradients, variables, strict=True))
        if args.optimizer == "sgd":
            pairs = [(cluster.decay(gradient, variable, args.weight_decay), variable) for gradient, variable in pairs]
        optimizer.learning_rate.assign(rate)
        optimizer.apply_gradients(pairs)  # sums the gradients over the replicas
        return loss

    def test_step(pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """On one replica: correct first answers, sum of losses, correct among the best five; label -1 is padding."""
        logits = tested(tf.cast(pixels, tf.float32), training=False)
        hits = tf.cast(tf.math.top_k(logits, min(5, args.num_classes)).indices == labels[:, None], tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        real = tf.cast(labels >= 0, tf.float32)
        return tf.stack([tf.reduce_sum(hits[:, 0]), tf.reduce_sum(losses * real), tf.reduce_sum(hits)])

    if cluster.jit:
        train_step, test_step = (tf.function(body, jit_compile=True) for body in (train_step, test_step))

    @cluster.function  # tf.function, traced once for each image size
    def train_batch(
        pixels: Any, labels: Any, mask: tf.Tensor, rate: tf.Tensor, decay: tf.Tensor, loss: tf.Tensor
    ) -> tf.Tensor:
        """Train on a batch; returns its loss, or the first that was not finite."""
        losses = strategy.run(train_step, args=(pixels, labels, mask, rate))
        if average:
            cluster.update_average(average.variables, model.variables, decay)
        return tf.where(tf.math.is_finite(loss), cluster.sum(losses), loss)

    @cluster.function
    def test_batch(pixels: Any, labels: Any) -> tf.Tensor:
        return cluster.sum(strategy.run(test_step, args=(pixels, labels)))

    # A checkpoint holds arrays only, so that loading one cannot execute code.
    learned = [*model.variables, *(average.variables if average else ())]
    variables = [*learned, *optimizer.variables]
    checkpoints = Checkpoints(
        args.checkpoint_dir,
        args.keep_checkpoints,
        write=lambda state, file: np.savez(file, **state),
        read=lambda file: dict(np.load(file, allow_pickle=False)),
        not_finite=lambda state: _strategy.not_finite(state, len(learned)),
    )
    run = {"trainer": "tf.imagenet", "model": args.model, "optimizer": args.optimizer,
           "seed": args.seed, "global_batch": global_batch, "train_images": data.count,
           "data": data.fingerprints, "flags": flags.deciding(args, "bf16" if cluster.bf16 else "fp32")}  # fmt: skip
    stop = exits.Stop(cluster.maximum if cluster.processes > 1 else None, args.checkpoint_minutes)
    loss = tf.constant(0.0)  # of the last step, or the first that was not finite; the same on all workers
    warmup = min(0.5, args.warmup_epochs / args.epochs)
    step = saved = 0  # steps done, and of those the steps in the newest checkpoint

    with Log("tf.imagenet", args, cluster, global_batch, steps_per_epoch) as log:
        tracer = _strategy.Tracer(args, log.say)

        def snapshot() -> State:
            """All workers call this: variables that differ by replica are averaged."""
            state = _strategy.values(variables)
            log.check_weights(checkpoints.not_finite(state))
            return {**state, "run": json.dumps(run), "log": log.state(), "step": step}

        def save() -> None:
            nonlocal saved
            if args.checkpoint_dir and saved < step:
                log.check_finite(float(loss))  # every resumed run would fail on a checkpoint with NaN
                with log.paused():
                    state = snapshot()
                    log.saved(step, checkpoints.save(state, step) if cluster.chief else "")
                saved = step
                stop.saved()

        def test(epoch: int) -> float:
            """Test on every image exactly once; returns the accuracy in percent."""
            stop.restart()
            sums = np.zeros(3)
            batches = cluster.prefetch(data.test(args.test_batch_size * cluster.replicas), place)
            for pixels, labels in batches:
                if code := stop.poll():
                    raise exits.UserError(f"stopped while testing epoch {epoch}; {log.where_saved()}", code)
                sums += test_batch(pixels, labels).numpy()
            log.check_weights(checkpoints.not_finite(_strategy.values(learned)))
            return log.test(epoch, data.test_count, *sums[:2].tolist(), top5=100 * float(sums[2]) / data.test_count)

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
            stop.restart()
            side = data.side(epoch)
            with contextlib.closing(cluster.prefetch(data.train(epoch, step - first, global_batch), place)) as batches:
                while step < min(end, last_step) and not (code := stop.poll()):
                    tracer.step()
                    with log.waiting():
                        batch = next(batches)
                    rate = learning_rate(step, total_steps, peak, warmup)
                    decay = average_decay(step, args.ema)
                    mask = tf.constant(data.mask(epoch, step - first, side))
                    loss = train_batch(*batch, mask, tf.constant(rate), tf.constant(decay), loss)
                    log.step(epoch, step)
                    if (step - first) % args.log_steps == 0:  # only then is the loss read from the device
                        log.train(epoch, step, float(loss), rate)
                    step += 1
                    if stop.save_due or (args.checkpoint_steps and step % args.checkpoint_steps == 0):
                        save()
            log.check_finite(float(loss))  # waits until the device has done all steps, so that the time is right
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
        weights = tested.get_weights()  # on all workers: batch norm's averages are gathered from all of them
        if args.export_dir and cluster.chief and status not in ("stopped", "preempted"):
            log.exported(args.export_dir, export(args, weights))
        log.finish(status, code, _strategy.sha256(weights))
    cluster.close()
    return code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "imagenet")
