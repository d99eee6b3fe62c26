"""Keras' ``model.fit`` as a job: the callback that keeps its promises, optimizers, exact tests, and checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainers.common import files
from trainers.common.files import UserError
from trainers.common.job import Job
from trainers.tf._peers import Peers

Test = Callable[[], dict[str, float]]


class Running(keras.callbacks.Callback):
    """Log, test, save and stop when ``job`` says so, in ``model.fit`` or :func:`train_workers`.

    ``step`` is the number of steps taken so far; ``after(step)`` is called after each.
    """

    def __init__(self, job: Job, step: int, test: Test, save: Callable[[str], Any],
                 after: Callable[[int], Any] = lambda step: None) -> None:  # fmt: skip
        super().__init__()
        self.job, self.step, self.test, self.save, self.after = job, step, test, save, after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        job, model = self.job, self.model
        self.step = step = self.step + 1
        self.after(step)
        if job.due("log", step):  # the mean loss since the last line: not finite if one was not
            job.log(step, loss=model.get_metrics_result()["loss"], lr=model.optimizer.learning_rate)
            model.reset_metrics()
        if job.due("test", step):
            job.log(step, **self.test())
        if job.due("save", step):
            job.save(step, self.save)
        model.stop_training = job.stop(step)


def fit(model: keras.Model, data: Any, running: Running, peers: Peers) -> None:
    """Train ``model`` on the batches of ``data`` until ``running`` stops it."""
    if peers.size > 1:
        return train_workers(model, data, running, peers)
    model.fit(data, steps_per_epoch=running.job.last - running.step, callbacks=[running], shuffle=False, verbose=0)


def train_workers(model: keras.Model, data: Any, running: Running, peers: Peers) -> None:
    """Do what ``model.fit`` does, which fails with several workers: "unsupported type PerReplica".

    https://github.com/keras-team/keras/issues/20585
    """

    @tf.function
    def train(batch: Any) -> None:
        peers.strategy.run(model.train_step, (batch,))

    running.set_model(model)
    model.stop_training = False
    model.reset_metrics()
    for number, batch in enumerate(data):
        train(batch)
        running.on_train_batch_end(number)
        if model.stop_training:
            break


def tester(model: keras.Model, data: Iterable[Any], stop: Callable[[], bool], peers: Peers) -> Test:
    """Return what tests ``model`` on ``data``, images, labels and weights that are 0 for padding: see its metrics.

    Percentages, and means of losses, over all replicas; nothing if the run has to stop.
    """

    @tf.function(jit_compile=True if peers.jit else None)
    def add(batch: Any) -> None:
        peers.strategy.run(model.test_step, (batch,))

    def test() -> dict[str, float]:
        model.reset_metrics()
        for batch in data:
            add(batch)
            if stop():
                return {}
        found = model.get_metrics_result()
        model.reset_metrics()
        return {name: float(value) * (1 if "loss" in name else 100) for name, value in found.items() if name != "loss"}

    return test


def rates(peak: float, total: int, warmup: float) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a schedule of ``total`` steps: up to ``peak`` in a part ``warmup`` of them, then a cosine to 0."""
    up = int(warmup * total)
    first = {"warmup_target": peak, "warmup_steps": up} if up else {}
    return keras.optimizers.schedules.CosineDecay(peak / (2 * up) if up else peak, max(1, total - up), **first)


def make_optimizer(
    args: argparse.Namespace, schedule: Any, variables: Sequence[Any], peers: Peers, slow: Sequence[Any] = (),
    scale: float = 1.0,
) -> keras.optimizers.Optimizer:  # fmt: skip
    """Return the optimizer of ``--optimizer`` for ``variables``; the rate of those that are ``slow`` is scaled.

    Keras' weight decay does not pass through the momentum, which would multiply it. It clips the gradients of a replica
    before they are summed: a norm of ``--clip-norm`` in all.
    """
    kind = keras.optimizers.AdamW if args.optimizer == "adamw" else keras.optimizers.SGD
    late = {number for number, variable in enumerate(variables) if any(variable is one for one in slow)}

    class Optimizer(kind):  # type: ignore[misc, valid-type]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            rate = learning_rate * (scale if self._get_variable_index(variable) in late else 1.0)
            super().update_step(gradient, variable, rate)

    options: dict[str, Any] = {"global_clipnorm": args.clip_norm / peers.replicas if args.clip_norm else None}
    if args.optimizer == "adamw":
        options["weight_decay"] = args.weight_decay
    else:
        options |= {"momentum": args.momentum, "nesterov": args.momentum > 0}
        options["weight_decay"] = args.weight_decay / (1 - args.momentum) if args.weight_decay else None
    optimizer = Optimizer(schedule, name=args.optimizer, **options)
    optimizer.exclude_from_weight_decay([variable for variable in variables if len(variable.shape) <= 1])
    optimizer.build(variables)
    return optimizer


def checkpoint_of(*parts: Any) -> tf.train.Checkpoint:
    """Return a checkpoint of all variables of models and optimizers, those of their random numbers among them."""
    return tf.train.Checkpoint(**{
        f"part{number}": [variable.value for variable in part.variables] for number, part in enumerate(parts)
    })  # fmt: skip


def save(checkpoint: tf.train.Checkpoint, peers: Peers, folder: str) -> None:
    """Write ``checkpoint`` into ``folder``; only the chief does."""
    if peers.rank == 0:
        checkpoint.write(files.join(folder, "state"))


def load(checkpoint: tf.train.Checkpoint, peers: Peers, folder: str) -> None:
    """Load ``checkpoint``, whose checksums TensorFlow compares; raises if it is damaged or of another network."""
    if "run.json" not in files.names(folder):
        raise UserError(f"worker {peers.rank} does not find it: --checkpoint-dir must be a folder that all workers share")
    try:
        checkpoint.read(files.join(folder, "state")).assert_consumed()
    except (AssertionError, ValueError):
        raise UserError("it is of another network, or lacks a part") from None


def in_float32(network: Callable[[], keras.Model], trained: keras.Model) -> keras.Model:
    """Return the model ``network()`` in float32, with the weights of the ``trained`` one."""
    weights = trained.get_weights()
    keras.config.set_dtype_policy("float32")
    model = network()
    model.set_weights(weights)
    return model


def vary_dropout(model: keras.Model) -> None:
    """Make layers with randomness, such as dropout, draw other numbers on each replica.

    Their numbers depend on the layer's seed and the number of draws before. Both are variables of the ``model``, and so
    part of its checkpoints, but the same on all replicas.
    """
    for layer in getattr(model, "layers", ()):
        vary_dropout(layer)
    generator = getattr(model, "seed_generator", None)
    if generator is not None:
        draw = generator.next

        def next_seed(ordered: bool = True) -> tf.Tensor:
            seed, context = draw(ordered), tf.distribute.get_replica_context()
            replica = context.replica_id_in_sync_group if context else 0
            # A prime: seeds of layers are random numbers below 2**31, which differ by more than a few.
            return seed + tf.stack([tf.cast(replica, seed.dtype) * 1_000_003, tf.constant(0, seed.dtype)])

        generator.next = next_seed
