"""MNIST in TensorFlow: a small Keras network, with the data set as one tensor on the device.

    python -m trainers.tf.mnist --datadir FOLDER --epochs 5

FOLDER holds MNIST's four IDX files, gzipped or not. The same command continues a run from its last checkpoint. On
SIGTERM a run completes its step, saves and exits with 143.
"""

from __future__ import annotations

from trainers.common import exits, flags, mnist_data, order
from trainers.tf import import_tensorflow

if __name__ == "__main__":  # before tensorflow is imported, so that --help and usage errors are immediate
    ARGS = flags.parse("mnist", "MNIST in TensorFlow.", (*flags.TF, *mnist_data.FLAGS))
    import_tensorflow()

import argparse
import json
import math
from collections.abc import Callable
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


def export(args: argparse.Namespace, model: Callable[..., keras.Model], weights: list[np.ndarray]) -> list[str]:
    """Write ``model(args)`` with ``weights`` into --export-dir: raw images ``uint8[n, 28, 28]`` to probabilities."""
    from trainers.tf import _export

    keras.config.set_dtype_policy("float32")
    trained = model(args)
    trained.set_weights(weights)
    served = keras.Model(trained.inputs, layers.Softmax()(trained.outputs[0]), name="mnist")
    return _export.write(served, args.export_dir)


def main(  # noqa: C901 - the loop, to be read from top to bottom
    args: argparse.Namespace, network: Callable[[argparse.Namespace], keras.Model] = network, name: str = "mnist"
) -> int:
    """Train, test, save and export as ``args`` say; returns the exit code. ``network(args)`` makes the model."""
    cluster = Cluster(args)  # chooses the strategy, seeds, and waits for the other workers
    strategy = cluster.strategy

    # Data: all images as bytes on each device. A batch is rows of (image, row offset, column offset, label), of which
    # each replica has its part.
    (images, labels), (test_images, test_labels) = mnist_data.load(args)
    cluster.check_alike("training and test images", images, labels, test_images, test_labels)
    fingerprints = order.fingerprints(images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    train_count, test_count = len(labels), len(test_labels)
    images = cluster.replicate(mnist_data.padded(images, args.shift))
    test_images = cluster.replicate(mnist_data.padded(test_images, args.shift))
    test_rows = mnist_data.test_batches(test_labels, args.shift, args.test_batch_size * cluster.replicas)
    test_batches = cluster.split(test_rows.astype(np.int32), axis=1)
    global_batch = args.batch_size * cluster.replicas
    steps_per_epoch = order.steps_per_epoch(train_count, global_batch)
    total_steps = args.epochs * steps_per_epoch

    # Model and optimizer.
    keras.config.set_dtype_policy("mixed_bfloat16" if cluster.bf16 else "float32")
    peak = args.lr * (cluster.replicas if args.scale_lr else 1)
    with strategy.scope():
        model = network(args)
        if args.optimizer == "adamw":
            optimizer = keras.optimizers.AdamW(weight_decay=args.weight_decay)
            optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) <= 1])
        else:
            optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
        optimizer.build(model.trainable_variables)
    _strategy.vary_dropout(model)

    def train_step(images: tf.Tensor, batches: tf.Tensor, rates: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """On one replica: train on its part of the batch; returns its part of the loss."""
        batch = batches[step]
        with tf.GradientTape() as tape:
            logits = model(gather_crops(images, batch), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 3], logits)
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        if args.clip_norm:
            gradients = cluster.clip_by_global_norm(gradients, args.clip_norm)
        pairs = list(zip(gradients, model.trainable_variables, strict=True))
        if args.optimizer == "sgd":
            pairs = [(cluster.decay(gradient, variable, args.weight_decay), variable) for gradient, variable in pairs]
        optimizer.learning_rate.assign(rates[step])
        optimizer.apply_gradients(pairs)  # sums the gradients over the replicas
        return loss

    def test_step(images: tf.Tensor, batches: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """On one replica: correct answers and the sum of losses; rows with label -1 are padding and do not count."""
        batch = batches[number]
        labels = batch[:, 3]
        logits = model(gather_crops(images, batch), training=False)
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
    variables = [*learned, *optimizer.variables]
    checkpoints = Checkpoints(
        args.checkpoint_dir,
        args.keep_checkpoints,
        write=lambda state, file: np.savez(file, **state),
        read=lambda file: dict(np.load(file, allow_pickle=False)),
        not_finite=lambda state: _strategy.not_finite(state, len(learned)),
    )
    run = {"trainer": f"tf.{name}", "model": getattr(args, "model", ""), "optimizer": args.optimizer,
           "seed": args.seed, "global_batch": global_batch, "train_images": train_count,
           "data": fingerprints, "flags": flags.deciding(args, "bf16" if cluster.bf16 else "fp32")}  # fmt: skip
    stop = exits.Stop(cluster.maximum if cluster.processes > 1 else None, args.checkpoint_minutes)
    pace = _strategy.Pace(args, cluster)
    loss = 0.0  # of the last step, or the first that was not finite; the same on all workers
    step = saved = 0  # steps done, and of those the steps in the newest checkpoint

    with Log(f"tf.{name}", args, cluster, global_batch, steps_per_epoch) as log:
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
                rows = mnist_data.train_rows(labels, args, epoch)[: steps_per_epoch * global_batch].astype(np.int32)
                batches = cluster.split(rows.reshape(steps_per_epoch, global_batch, -1), axis=1)
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
            log.exported(args.export_dir, export(args, network, weights))
        log.finish(status, code, _strategy.sha256(weights))
    cluster.close()
    return code


if __name__ == "__main__":
    _strategy.main(main, ARGS, "mnist")
