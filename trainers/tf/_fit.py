"""Run Keras' ``model.fit`` as a job: the callback that keeps its promises, optimizers, exact tests, and checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainers.common import files
from trainers.common.files import UserError
from trainers.common.job import Job
from trainers.tf._peers import Peers, reason_of

Test = Callable[[], dict[str, float]]


class Running(keras.callbacks.Callback):  # type: ignore[misc]
    """Log, test, save and stop when ``job`` says so, in ``model.fit`` or :func:`train_workers`.

    ``step`` is the number of steps taken so far; ``after(step)`` is called after each.
    """

    def __init__(
        self, job: Job, step: int, test: Test, save: Callable[[str], Any], after: Callable[[int], Any]
    ) -> None:
        super().__init__()
        self.job, self.step, self.test, self.save, self.after = job, step, test, save, after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do what is due after a step; ``logs`` are not read."""
        job, model = self.job, self.model
        self.step = step = self.step + 1
        self.after(step)
        if job.due("log", step):  # the mean loss since the last line: not finite if one was not
            loss = {metric.name: metric for metric in model.metrics}["loss"].result()  # others begin in a test
            job.log(step, loss=loss, lr=model.optimizer.learning_rate)
            model.reset_metrics()
        if job.due("test", step):
            job.log(step, **self.test())
        if job.due("save", step):
            job.save(step, self.save)
        model.stop_training = job.stop(step)


def fit(
    model: keras.Model, data: Any, job: Job, step: int, test: Test, save: Callable[[str], Any], peers: Peers,
    after: Callable[[int], Any] = lambda step: None,
) -> int:  # fmt: skip
    """Train ``model`` on the batches of ``data`` until ``job`` stops it; returns the number of steps so far."""
    if job.stop(step):
        return step
    job.say(f"{job.total} steps of {job.count} images on {peers.replicas} x {peers.label} in {job.args.precision}"
            + ", --lr is not scaled" * (peers.replicas > 1 and not job.args.scale_lr))  # fmt: skip
    if peers.replicas > 1:
        vary_dropout(model)
    running = Running(job, step, test, save, after)
    if peers.size > 1:
        train_workers(model, data, running, peers)
    else:
        model.fit(data, steps_per_epoch=job.last - step, callbacks=[running], shuffle=False, verbose=0)
    return running.step


def train_workers(model: keras.Model, data: Any, running: Running, peers: Peers) -> None:
    """Do what ``model.fit`` does, which fails with several workers: "unsupported type PerReplica".

    https://github.com/keras-team/keras/issues/20585
    """

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def train(batch: Any) -> None:
        peers.strategy.run(model.train_step, (batch,))

    running.set_model(model)
    model.stop_training = False
    model.reset_metrics()
    peers.iterator = iter(data)  # it stays as long as the process: ending it takes seconds, which a stop does not have
    for number, batch in enumerate(peers.iterator):
        train(batch)
        running.on_train_batch_end(number)
        if model.stop_training:
            break


def tester(model: keras.Model, data: Iterable[Any], stop: Callable[[], bool], peers: Peers) -> Test:
    """Return what tests ``model`` on ``data``, images, labels and weights that are 0 for padding: see its metrics.

    Percentages, and means of losses, over all replicas; nothing if the run has to stop.
    """

    @tf.function(autograph=False, jit_compile=peers.jit or None)  # type: ignore[untyped-decorator]
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


def make_optimizer(
    args: argparse.Namespace, total: int, warmup: float, variables: Sequence[Any], peers: Peers,
    slow: Sequence[Any] = (), scale: float = 1.0,
) -> keras.optimizers.Optimizer:  # fmt: skip
    """Return the optimizer of ``--optimizer`` for ``variables``; the rate of those that are ``slow`` is scaled.

    The rate goes up in a part ``warmup`` of ``total`` steps, then to 0 along a cosine. Keras' weight decay does not
    pass through the momentum, which would multiply it. Keras clips the gradients of a replica before they are summed:
    to a norm of at most ``--clip-norm`` in all.
    """
    peak, up = args.lr * (peers.replicas if args.scale_lr else 1), int(warmup * total)
    first = {"warmup_target": peak, "warmup_steps": up} if up else {}
    schedule = keras.optimizers.schedules.CosineDecay(peak / (2 * up) if up else peak, max(1, total - up), **first)
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
    optimizer = (Optimizer if late else kind)(schedule, name=args.optimizer, **options)
    optimizer.exclude_from_weight_decay([variable for variable in variables if len(variable.shape) <= 1])
    optimizer.build(variables)
    return optimizer


class Checkpoint:
    """Save and load all variables of models and optimizers, with the state of their random numbers."""

    def __init__(self, peers: Peers, *parts: Any) -> None:
        self.peers = peers
        self.saved = tf.train.Checkpoint(**{
            f"part{number}": {f"{place:04d} {one.path}": one.value for place, one in enumerate(part.variables)}
            for number, part in enumerate(parts)
        })  # fmt: skip

    def save(self, folder: str) -> None:
        """Write a checkpoint into ``folder``; only the chief does. Raises :class:`UserError` if the disk is full."""
        try:
            self.saved.write(files.join(folder, "state")) if self.peers.rank == 0 else None
        except tf.errors.OpError as error:  # "PATH; No space left on device"
            raise UserError(reason_of(error).rpartition("; ")[2]) from None

    def load(self, folder: str) -> None:
        """Load a checkpoint, with TensorFlow's checksums; raises if it is damaged or of another network."""
        if "run.json" not in files.names(folder):
            raise UserError(f"worker {self.peers.rank} does not find it: --checkpoint-dir must be a folder that all"
                            " workers share")  # fmt: skip
        try:
            self.saved.read(files.join(folder, "state")).assert_consumed()
        except (AssertionError, ValueError):
            raise UserError("it is of another network, or a part is missing") from None


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
