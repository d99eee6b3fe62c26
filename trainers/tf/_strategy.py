"""The ``tf.distribute`` strategy of the TensorFlow trainers, and what they need besides it.

The environment selects the strategy: ``TF_CONFIG`` with several workers, a TPU's address in ``TPU_NAME`` (ignored if
``LAUNCHER_REHEARSE=1``, because a rehearsal has no TPU), the GPUs present, else the CPU. Each replica receives its part
of every batch, so the same code serves all strategies.

When a worker exits early, the next collective of the others fails; :func:`main` reports that in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NoReturn, TypeVar

import keras
import numpy as np
import tensorflow as tf

from trainers.common import exits, flags, order
from trainers.common.exits import USAGE, UserError
from trainers.common.run import Run, State, Test

# Raised by a collective when another worker has exited, was killed or lost its network; and by a TPU that was lost.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_CONNECT, _PAUSE, _REPORT = 2.0, 0.2, 30.0  # seconds: to connect to a worker, between attempts, between messages
_JOIN = 3600.0  # seconds until a worker gives up waiting for the others, as TensorFlow does
Host = TypeVar("Host")
Placed = TypeVar("Placed")


def main(train: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``train(args)`` and exit with the code it returns, as :func:`trainers.common.exits.guard` does."""
    exits.guard(lambda given: _run(train, given), args, name)


def _run(train: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """``train(args)``, with a :class:`UserError` for a lost worker or TPU and for a device without memory."""
    exits.end_idle_replica()
    try:
        return train(args)
    except UserError as error:
        if error.code not in (exits.FAILED, USAGE):  # all workers raise it, after a collective
            for cluster in Cluster.joined:
                cluster.settle()
        raise
    except tf.errors.ResourceExhaustedError as error:
        raise UserError(f"{_reason(error)}: lower --batch-size or --test-batch-size") from None
    except _LOST as error:
        for cluster in Cluster.joined:
            if cluster.processes > 1:
                raise UserError(
                    f"worker {cluster.rank} lost another worker, whose log says why ({_reason(error)});"
                    f" start all of them {exits.again(args.resume)} to resume"
                ) from None
            if cluster.kind == "tpu":
                raise UserError(f"lost the TPU ({_reason(error)}); run {exits.again(args.resume)} to resume") from None
        raise


def _reason(error: tf.errors.OpError) -> str:
    """The first line of a TensorFlow ``error``, without the names of graph nodes before it."""
    return (str(error.message).splitlines() or [type(error).__name__])[0].rpartition("}} ")[2]


class Cluster:
    """Hold a strategy and this process's rank: the device of a :class:`trainers.common.run.Run`.

    Implements :class:`trainers.common.log.Devices` and :class:`trainers.common.order.Peers`.
    """

    joined: list[Cluster] = []  # noqa: RUF012 - the one of this process, for main()

    def __init__(self, args: argparse.Namespace) -> None:
        """Choose the strategy, seed everything, and wait for the other workers.

        Raises :class:`UserError` if TF_CONFIG is invalid, or flags or the TPU cannot be used.
        """
        workers, self.rank = _place_in_cluster()
        self.processes = 1
        self.kind = _kind(args.strategy, workers)
        self.strategy: tf.distribute.Strategy
        on_cpu = self.kind != "tpu" and not tf.config.list_physical_devices("GPU")
        self.jit = args.jit_compile and self.kind != "tpu"  # TPUs compile everything
        if args.precision == "fp16":
            raise UserError("--precision fp16: the TensorFlow trainers have bf16 and fp32", USAGE)
        if self.jit and args.deterministic:
            raise UserError("--deterministic: XLA has no deterministic max pooling; leave out --jit-compile", USAGE)
        if args.deterministic or (on_cpu and not self.jit):
            # On the CPU the cost is not measurable, and sums over threads, and so resumed runs, are bit-exact.
            tf.config.experimental.enable_op_determinism()
        keras.utils.set_random_seed(args.seed)
        if self.kind == "multiworker":
            self.processes = workers
            self.strategy = self._join()
        elif self.kind == "tpu":
            self.strategy = _tpu_strategy()
        else:
            devices = _devices(args.num_cores, on_cpu)
            if self.kind == "one" or len(devices) == 1:
                self.strategy = tf.distribute.OneDeviceStrategy(devices[0])
            else:
                self.strategy = tf.distribute.MirroredStrategy(devices)
        # TensorFlow's handler, for several workers or a TPU node, would let the process go on.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.replicas = int(self.strategy.num_replicas_in_sync)
        if self.processes == 1:
            self.rank = 0
        self.chief = self.rank == 0
        if os.environ.get("LAUNCHER_REHEARSE"):
            self.chief = self.chief and not exits.follows()
        self.label = f"{'TPU' if self.kind == 'tpu' else 'CPU' if on_cpu else 'GPU'}:0/{self.rank}"
        auto = "bf16" if self.kind == "tpu" or _has_bf16(on_cpu) else "fp32"
        self.precision = auto if args.precision == "auto" else args.precision
        keras.config.set_dtype_policy("mixed_bfloat16" if self.precision == "bf16" else "float32")
        if self.jit and self.replicas > 1:
            raise UserError(f"--jit-compile: needs a single device, this run has {self.replicas}", USAGE)
        self.weights: list[np.ndarray] = []  # of the model of the last digest()
        self._functions: list[Any] = []
        self._first_calls = 0.0
        self._adder: Callable[..., Any] | None = None
        Cluster.joined[:] = [self]

    def _join(self) -> tf.distribute.Strategy:
        try:
            _wait_for_others(json.loads(os.environ["TF_CONFIG"]), self.rank)
            return tf.distribute.MultiWorkerMirroredStrategy()
        except (tf.errors.OpError, ValueError, RuntimeError, OSError) as error:
            reason = _reason(error) if isinstance(error, tf.errors.OpError) else str(error).partition("\n")[0]
            raise UserError(
                f"worker {self.rank} of {self.processes} cannot join the others of TF_CONFIG: {reason}"
            ) from None

    # --- data on the replicas ----------------------------------------------------------------------------

    def replicate(self, array: np.ndarray) -> Any:
        """A copy of ``array`` on every replica's device, an argument of ``strategy.run``.

        Not a variable: variables are broadcast from the first worker, and collectives do not support uint8.
        """
        return self._place(lambda replica: array)

    def split(self, array: np.ndarray, axis: int = 0, *, shared: bool = True) -> Any:
        """Each replica's part of ``array`` along ``axis``, on its device: an argument of ``strategy.run``.

        ``array`` is the global batch, or with ``shared=False`` this worker's :meth:`share` of it.
        """
        parts = np.split(array, self.replicas if shared else self.replicas // self.processes, axis)
        return self._place(lambda replica: parts[replica % len(parts)])

    def split_epoch(self, rows: np.ndarray, global_batch: int) -> Any:
        """Return each replica's part of the batches ``[steps, batch, columns]`` that ``rows`` fill."""
        steps = len(rows) // global_batch
        return self.split(rows[: steps * global_batch].reshape(steps, global_batch, -1), axis=1)

    def _place(self, part: Callable[[int], np.ndarray]) -> Any:
        devices = self.strategy.extended.worker_devices  # those of this worker

        def place(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            replica = context.replica_id_in_sync_group
            with tf.device(devices[replica % len(devices)]):
                return tf.constant(part(replica))

        return self.strategy.experimental_distribute_values_from_function(place)

    def share(self, batch: np.ndarray) -> np.ndarray:
        """This process's rows of the global ``batch``."""
        size = len(batch) // self.processes
        rank = self.rank if self.processes > 1 else 0
        return batch[rank * size : (rank + 1) * size]

    def prefetch(self, batches: Generator[Host], place: Callable[[Host], Placed]) -> Generator[Placed]:
        """``place(batch)`` of each of ``batches``, of which the next is made in a thread while one is used.

        So a batch is copied to the devices while they train on the one before. ``place`` must not make collectives:
        their order would differ between workers. Close the iterator to close ``batches``.
        """

        def make() -> Placed | None:
            batch = next(batches, None)
            return None if batch is None else place(batch)

        pool = ThreadPoolExecutor(1, thread_name_prefix="place")
        coming = pool.submit(make)
        try:
            while (placed := coming.result()) is not None:
                coming = pool.submit(make)
                yield placed
        finally:
            # After the batch that is being made, and without waiting for it: a checkpoint may have to be saved soon.
            pool.submit(batches.close)
            pool.shutdown(wait=False)

    # --- functions ---------------------------------------------------------------------------------------

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """``tf.function(body)``, whose traces are counted and whose first call is timed, for the log."""
        traced = tf.function(body)
        self._functions.append(traced)
        called = False

        def call(*inputs: Any) -> Any:
            nonlocal called
            start = time.monotonic()
            result = traced(*inputs)
            if not called:
                called, self._first_calls = True, self._first_calls + time.monotonic() - start
            return result

        return call

    def run(self, step: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Return ``step(*inputs)`` on each replica with its part of the inputs, compiled with ``--jit-compile``."""
        return self.strategy.run(tf.function(step, jit_compile=True) if self.jit else step, inputs)

    def tester(self, step: Callable[..., tf.Tensor], batches: Callable[[], Iterable[tuple[Any, ...]]]) -> Test:
        """Return a function for :meth:`Run.epochs`: what ``step(*batch)`` returns, summed over replicas and batches."""
        summed = self.function(lambda *batch: self.sum(self.run(step, batch)))

        def test(poll: Callable[[], None]) -> tuple[float, ...]:
            sums = np.zeros(1)
            for batch in batches():
                poll()
                sums = sums + summed(*batch).numpy()
            return tuple(map(float, sums))

        return test

    def sum(self, values: Any) -> tf.Tensor:
        """Per-replica ``values`` summed over all replicas."""
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

    def clip_by_global_norm(self, gradients: Sequence[tf.Tensor], norm: float) -> list[tf.Tensor]:
        """This replica's ``gradients``, scaled so that the norm of their sum over all replicas is at most ``norm``.

        The optimizer's own ``global_clipnorm`` would clip each replica's part, before they are summed. Call this in
        replica context.
        """
        total = gradients
        if self.replicas > 1:
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients))
        scale = norm / tf.maximum(tf.linalg.global_norm(total), norm)
        return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]

    def add_decay(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any], decay: float) -> list[tf.Tensor]:
        """Return ``gradients`` plus weight ``decay`` on kernels and matrices, none on biases and normalizations.

        As in ``torch.optim.SGD``; a replica adds its part of it, because the optimizer sums gradients over replicas.
        """
        return [gradient + decay / self.replicas * tf.cast(variable.value, gradient.dtype)
                if decay and len(variable.shape) > 1 else gradient
                for gradient, variable in zip(gradients, variables, strict=True)]  # fmt: skip

    def update_average(self, averages: Sequence[Any], variables: Sequence[Any], decay: tf.Tensor) -> None:
        """Move each of ``averages`` towards its variable by ``1 - decay`` of the difference; in cross-replica
        context."""

        def move(slow: Any, fast: Any, decay: tf.Tensor) -> None:
            slow.assign_add(tf.cast(1 - decay, slow.dtype) * (fast - slow))

        for average, variable in zip(averages, variables, strict=True):
            if variable.dtype in ("float32", "float64", "bfloat16", "float16"):
                self.strategy.extended.update(average.value, move, args=(variable.value, decay))

    # --- all processes; they must make the same calls ------------------------------------------------------

    def maximum(self, values: list[float]) -> list[float]:
        """The element-wise maximum of ``values`` over all processes."""
        return self._gathered(np.array(values, np.float64)).max(axis=0).tolist()  # type: ignore[no-any-return]

    def gather(self, content: bytes) -> list[bytes]:
        """The ``content`` passed by each process, by rank."""
        sizes = self._gathered(np.array([len(content)], np.float64))[:, 0].astype(int)
        padded = np.zeros(sizes.max(), np.int32)  # collectives do not support bytes
        padded[: len(content)] = np.frombuffer(content, np.uint8)
        rows = self._gathered(padded).astype(np.uint8)
        self.settle()  # the caller may raise an error, in all processes
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, content: bytes) -> bytes:
        """The ``content`` passed by the process of rank 0."""
        content = content if self.rank == 0 else b""
        size = int(self.maximum([len(content)])[0])
        words = np.zeros(-(-size // 4), np.int32)
        if self.rank == 0:
            words[:] = np.frombuffer(content.ljust(4 * len(words), b"\0"), np.int32)
        return self._added(words).tobytes()[:size]

    def _gathered(self, mine: np.ndarray) -> np.ndarray:
        """The array ``mine`` of each process, of the same shape in all of them, as ``[processes, ...]``."""
        slots = np.zeros((self.processes, *mine.shape), mine.dtype)
        slots[self.rank if self.processes > 1 else 0] = mine
        return self._added(slots)

    def _added(self, array: np.ndarray) -> np.ndarray:
        """``array`` added up over all processes."""
        if self.processes == 1:
            return array
        if self._adder is None:
            # Each local replica would add the same: all but the first add zeros.
            def own(value: tf.Tensor) -> tf.Tensor:
                place = tf.distribute.get_replica_context().replica_id_in_sync_group
                return value * tf.cast(place % (self.replicas // self.processes) == 0, value.dtype)

            self._adder = tf.function(lambda value: self.sum(self.strategy.run(own, (value,))), reduce_retracing=True)
        return self._adder(tf.constant(array)).numpy()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until every worker has the result of the last collective, which fails if one of them exits too early."""
        with contextlib.suppress(*_LOST):
            self.maximum([0.0])

    def close(self) -> None:
        """Wait for the other workers: the chief would report one that exits while it still writes as lost."""
        self.maximum([0.0])
        self.settle()

    def check_alike(self, what: str, *arrays: np.ndarray) -> None:
        """Raise :class:`UserError` on every worker unless all have the same ``arrays``, which are ``what``."""
        if self.processes > 1:
            digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
            counts = " and ".join(str(len(array)) for array in arrays)
            order.check_alike(self, what, f"{counts} (SHA-256 {digest[:12]})")

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of ``read()``; raises :class:`UserError` on every process if they do not read the same step."""
        self.settle()  # what the chief has written is complete
        state = read()
        step = int(state["step"]) if state else -1
        found = self._gathered(np.array([step], np.int32))[:, 0].tolist()
        self.settle()  # the caller may raise an error, in all processes
        if len(set(found)) > 1:
            raise UserError(
                f"worker {self.rank} finds step {step}, others find another: --checkpoint-dir must be a folder that all"
                " workers share, such as gs://..."
            )
        return state

    # --- trainers.common.run.Run --------------------------------------------------------------------------

    def state(self, parts: dict[str, Any]) -> State:
        """Return the variables of ``parts`` as arrays, by number and name, models first; ``weights`` is their number.

        All processes call this: variables that differ by replica are averaged.
        """
        count = sum(len(part.variables) for part in parts.values() if isinstance(part, keras.Model))
        return {"weights": count, **{name: np.asarray(variable) for name, variable in _named(parts).items()}}

    def load(self, parts: dict[str, Any], state: State) -> None:
        """Assign the ``state`` of a checkpoint; raises :class:`UserError` if it is of another network."""
        named = _named(parts)
        shapes = {name: value.shape for name, value in state.items() if name[:4].isdigit()}
        if shapes != {name: tuple(variable.shape) for name, variable in named.items()}:
            raise UserError("the checkpoint is of another network: run with the --model and options it was made with,"
                            " or use another --checkpoint-dir", USAGE)  # fmt: skip
        for name, variable in named.items():
            variable.assign(state[name])

    @staticmethod
    def write(state: State, file: IO[bytes]) -> None:
        """Write the checkpoint ``state``, arrays and primitives only."""
        np.savez(file, **state)

    @staticmethod
    def read(file: IO[bytes]) -> State:
        """Read a checkpoint; loading one cannot execute code."""
        with np.load(file, allow_pickle=False) as saved:
            return {name: array if name[:4].isdigit() else array.item() for name, array in saved.items()}

    @staticmethod
    def not_finite(state: State) -> str:
        """Return the name of a weight with NaN or infinity in ``state``, or ""."""
        names = sorted(name for name in state if name[:4].isdigit())[: state["weights"]]
        return next((name[5:] for name in names if not np.isfinite(state[name]).all()), "")

    def digest(self, model: keras.Model) -> str:
        """Return the SHA-256, in hexadecimal, of the bytes of the weights of ``model``, which it keeps as ``weights``.

        All processes call this: averages of batch norm are gathered from all of them. Only the chief exports.
        """
        self.weights = model.get_weights()
        digest = hashlib.sha256()
        for array in self.weights:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def in_float32(self, network: Callable[[], keras.Model]) -> keras.Model:
        """Return the model ``network()`` in float32, with ``weights``."""
        keras.config.set_dtype_policy("float32")
        model = network()
        model.set_weights(self.weights)
        return model

    def test_of_export(self, network: Callable[[], keras.Model], tester: Callable[[keras.Model], Test]) -> Test | None:
        """Return a test of ``network()`` in float32, in which it is exported; None if it was tested in float32."""

        def test(poll: Callable[[], None]) -> tuple[float, ...]:
            with self.strategy.scope():
                model = self.in_float32(network)
            return tester(model)(poll)

        return test if self.precision != "fp32" else None

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace this process into ``folder``, for TensorBoard; returns what ends it."""
        tf.profiler.experimental.start(folder)
        return tf.profiler.experimental.stop  # type: ignore[no-any-return]

    def mean(self, loss: Any) -> float:
        """Return ``loss``, a sum over all replicas and so the same in all processes; waits for the device."""
        return float(loss)

    def seed_step(self, step: int) -> None:
        """Do nothing: random numbers come from the variables of Keras' seed generators."""

    def end_step(self) -> None:
        """Do nothing: the functions of the steps have ended."""

    # --- trainers.common.log.Devices ----------------------------------------------------------------------

    def compilations(self) -> tuple[int, float]:
        """The number of traced functions, and the seconds that their first calls took."""
        return sum(function.experimental_get_tracing_count() for function in self._functions), self._first_calls

    def versions(self) -> dict[str, str]:
        """Versions of TensorFlow and Keras."""
        return {"tensorflow": tf.__version__, "keras": keras.__version__}


class Loop:
    """Training steps on the devices, several per call of one ``tf.function``.

    A call takes at most ``--steps-per-execution``, and no more than take about a second: a signal is noticed between
    calls only. All workers use the slowest one's time, so that they take the same steps.
    """

    SECONDS = 1.0

    def __init__(self, args: argparse.Namespace, cluster: Cluster, train_step: Callable[..., tf.Tensor]) -> None:
        """Take ``train_step(*data, number)``: it trains a replica on its part of a batch, and returns its loss."""
        self._args, self._cluster = args, cluster
        self._most = 1  # the first call traces, too
        self._loss = 0.0  # of the last step, or the first that was not finite; the same on all workers

        @cluster.function
        def train_steps(data: tuple[Any, ...], first: tf.Tensor, count: tf.Tensor, loss: tf.Tensor) -> tf.Tensor:
            for number in tf.range(first, first + count):
                losses = cluster.run(train_step, (*data, number))
                loss = tf.where(tf.math.is_finite(loss), cluster.sum(losses), loss)
            return loss

        self._train_steps = train_steps

    def counts(self, run: Run) -> Generator[int]:
        """Yield for each call the number of steps that it is to take, for :meth:`Run.steps`."""
        while True:
            yield min(self._most, run.due)

    def train(self, data: tuple[Any, ...], first: int, count: int) -> float:
        """Take ``count`` steps of ``data`` from number ``first`` on; returns the last loss, or the first that was not
        finite."""
        start = time.monotonic()
        inputs = map(tf.constant, (first, count, self._loss))
        self._loss = float(self._train_steps(data, *inputs))
        (seconds,) = self._cluster.maximum([(time.monotonic() - start) / count])
        # Doubled at most, so that one fast step does not lead to a long call.
        self._most = max(1, min(self._args.steps_per_execution, 2 * self._most, int(self.SECONDS / max(seconds, 1e-9))))
        return self._loss


def optimizer_of(args: argparse.Namespace, variables: Sequence[Any]) -> keras.optimizers.Optimizer:
    """Return the optimizer of ``--optimizer`` for ``variables``; for SGD's decay, see :meth:`Cluster.add_decay`."""
    if args.optimizer == "adamw":
        optimizer = keras.optimizers.AdamW(weight_decay=args.weight_decay)
        optimizer.exclude_from_weight_decay([variable for variable in variables if len(variable.shape) <= 1])
    else:
        optimizer = keras.optimizers.SGD(momentum=args.momentum, nesterov=args.momentum > 0)
    optimizer.build(variables)
    return optimizer


def _named(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of ``parts``, by number and name, models first."""
    ordered = sorted(parts.values(), key=lambda part: not isinstance(part, keras.Model))
    variables = [variable for part in ordered for variable in part.variables]
    return {f"{number:04d} {variable.path}": variable for number, variable in enumerate(variables)}


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


def _place_in_cluster() -> tuple[int, int]:
    """The number of workers in ``TF_CONFIG``, including the chief, and this process's rank; (1, 0) without it.

    Rewrites ``TF_CONFIG`` for MultiWorkerMirroredStrategy, which refuses the role "master" of AI Platform and waits for
    parameter servers. Raises :class:`UserError` for what is invalid, on which TensorFlow fails later or waits forever.
    https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return 1, 0
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        members = {role: list(cluster.get(role) or ()) for role in ("chief", "master", "worker")}
        role, index = task.get("type"), int(task.get("index") or 0)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"TF_CONFIG is invalid: {error}", USAGE) from None
    chiefs = members["chief"] + members["master"]
    workers = len(chiefs) + len(members["worker"])
    if workers < 2:
        return 1, 0
    if len(chiefs) > 1:
        raise UserError(f"TF_CONFIG: has {len(chiefs)} chiefs ({', '.join(map(str, chiefs))}), at most 1 is possible",
                        USAGE)  # fmt: skip
    if not role:
        raise UserError("TF_CONFIG: task.type is missing: set it to the role of this process, chief or worker", USAGE)
    _check_addresses(cluster, members)
    own = {"chief": chiefs, "master": chiefs, "worker": members["worker"]}.get(role)
    if own is None:
        raise UserError(f"TF_CONFIG: task.type is {role!r}, which is not one of chief, master, worker", USAGE)
    if not 0 <= index < len(own):
        raise UserError(f"TF_CONFIG: task.index is {index}, but cluster.{role} has {len(own)} members", USAGE)
    role = "chief" if own is chiefs else "worker"
    trained = {name: found for name, found in (("chief", chiefs), ("worker", members["worker"])) if found}
    os.environ["TF_CONFIG"] = json.dumps({**config, "cluster": trained, "task": {"type": role, "index": index}})
    return workers, index + (len(chiefs) if role == "worker" else 0)


def _wait_for_others(config: dict[str, Any], rank: int) -> None:
    """Return when all other workers of the ``TF_CONFIG`` accept connections: here, or already in TensorFlow.

    TensorFlow waits for them as well, but SIGTERM does not end the process there, because TensorFlow handles it:
    https://github.com/openxla/xla/blob/main/xla/tsl/distributed_runtime/preemption/preemption_notifier.cc
    Remove this when a process that waits in ``MultiWorkerMirroredStrategy()`` ends on SIGTERM. Raises ``OSError`` if
    this worker's port is in use, and ``TimeoutError`` after an hour.
    """
    addresses = [address for role in ("chief", "worker") for address in config["cluster"].get(role, ())]
    missing = {place for place in range(len(addresses)) if place != rank}
    began = said = time.monotonic()
    both = socket.has_dualstack_ipv6()
    family, port = (socket.AF_INET6 if both else socket.AF_INET), int(addresses[rank].rpartition(":")[2])
    with socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=max(128, len(addresses))):
        print(f"Worker {rank} of {len(addresses)} waits for the others of TF_CONFIG", file=sys.stderr)
        while missing:
            for place in sorted(missing):
                host, _, number = addresses[place].rpartition(":")
                with contextlib.suppress(OSError):
                    socket.create_connection((host.strip("[]"), int(number)), _CONNECT).close()
                    missing.discard(place)
            names = ", ".join(addresses[place] for place in sorted(missing)[:5])
            if missing and time.monotonic() - began > _JOIN:
                raise TimeoutError(f"{len(missing)} workers do not answer after {_JOIN:.0f} s: {names}")
            if missing and time.monotonic() - said > _REPORT:
                said = time.monotonic()
                print(f"Worker {rank} waits for {len(missing)} workers: {names}", file=sys.stderr)
            if missing:
                time.sleep(_PAUSE)


def _check_addresses(cluster: dict[str, Any], members: dict[str, list[Any]]) -> None:
    seen: dict[str, str] = {}
    for role, addresses in members.items():
        if not isinstance(cluster.get(role) or [], list):
            raise UserError(f"TF_CONFIG: cluster.{role} must be a list of addresses such as 10.0.0.2:2222", USAGE)
        for number, address in enumerate(addresses):
            place = f"cluster.{role}[{number}]"
            host, _, port = str(address).rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise UserError(f"TF_CONFIG: {place} is {address!r}, which has no port such as in 10.0.0.2:2222", USAGE)
            if address in seen:
                raise UserError(f"TF_CONFIG: {place} and {seen[address]} have the same address {address}", USAGE)
            seen[address] = place


def _kind(requested: str, workers: int) -> str:
    if requested != "auto":
        if requested == "multiworker" and workers < 2:
            raise UserError("--strategy multiworker: needs a TF_CONFIG with at least 2 workers", USAGE)
        return requested
    if workers > 1:
        return "multiworker"
    rehearsed = os.environ.get("LAUNCHER_REHEARSE") == "1"
    if not rehearsed and (os.environ.get("TPU_NAME") or os.environ.get("PJRT_DEVICE") == "TPU"):
        return "tpu"
    return "mirrored"


def _has_bf16(on_cpu: bool) -> bool:
    """Whether all devices multiply bfloat16 in hardware; NVIDIA GPUs do from compute capability 8.0 (Ampere) on."""
    if on_cpu:
        return flags.cpu_has_bf16()
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return all(found.get("compute_capability", (0, 0)) >= (8, 0) for found in details)


def _tpu_strategy() -> tf.distribute.Strategy:
    address = os.environ.get("TPU_NAME") or "local"
    try:
        _reach(address)
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        raise UserError(f"TPU {address} cannot be used: {str(error).splitlines()[0]}") from None


def _reach(address: str, seconds: float = 30) -> None:
    """Raise ``OSError`` if no server listens at ``grpc://host:port``; TensorFlow would wait for it forever."""
    for place in address.split(","):
        host, _, port = place.removeprefix("grpc://").rpartition(":")
        if place.startswith("grpc://") and host:
            socket.create_connection((host, int(port)), seconds).close()


def _devices(requested: int, on_cpu: bool) -> list[str]:
    if on_cpu:
        count = max(requested, 1)
        if count > 1:
            parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        return [f"/cpu:{number}" for number in range(count)]
    present = len(tf.config.list_physical_devices("GPU"))
    if requested > present:
        raise UserError(f"--num-cores {requested}: there are {present} GPUs", USAGE)
    return [f"/gpu:{number}" for number in range(requested or present)]
