"""The ``tf.distribute`` strategy of the TensorFlow trainers: one device, several, several machines, or TPUs.

The environment selects the strategy: ``TF_CONFIG`` with several workers, a TPU's address in ``TPU_NAME`` (ignored if
``LAUNCHER_REHEARSE=1``, because a rehearsal has no TPU), the GPUs present, else the CPU. Every worker passes the
global batch, of which each replica takes the rows of its number, so the same code serves all strategies.

When a worker exits early, the next collective of the others fails; :func:`report_lost_worker` reports that in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainers.common import cpu, order, rehearsal
from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError

# Raised by a collective when another worker has exited, was killed or lost its network.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


class Cluster:
    """A strategy and this process's rank; implements :class:`trainers.common.run.DistributedContext`."""

    def __init__(self, args: argparse.Namespace) -> None:
        _use_gfile()
        workers, self.rank = _place_in_cluster()
        self.processes = 1
        kind = _kind(args.strategy, workers)
        on_cpu = kind != "tpu" and not tf.config.list_physical_devices("GPU")
        self.jit = args.jit_compile and kind != "tpu"
        if self.jit and args.deterministic:
            raise UserError("--deterministic: XLA has no deterministic max pooling; leave out --jit-compile", USAGE)
        if args.deterministic or (on_cpu and not self.jit):
            # On the CPU the cost is not measurable, and sums over threads, and so resumed runs, are bit-exact.
            tf.config.experimental.enable_op_determinism()
        keras.utils.set_random_seed(args.seed)
        if kind == "multiworker":
            self.processes = workers
            print(f"Worker {self.rank} of {workers} waits for the others of TF_CONFIG", file=sys.stderr)
            self.strategy: tf.distribute.Strategy = tf.distribute.MultiWorkerMirroredStrategy()
        elif kind == "tpu":
            self.strategy = _tpu_strategy()
        else:
            devices = _devices(args.num_cores, on_cpu)
            if kind == "one" or len(devices) == 1:
                self.strategy = tf.distribute.OneDeviceStrategy(devices[0])
            else:
                self.strategy = tf.distribute.MirroredStrategy(devices)
        self.replicas = int(self.strategy.num_replicas_in_sync)
        if self.processes == 1:
            self.rank = 0
        self.chief = self.rank == 0 and not rehearsal.follows()
        self.label = f"{'TPU' if kind == 'tpu' else 'CPU' if on_cpu else 'GPU'}:0/{self.rank}"
        if args.precision == "bf16" or (args.precision == "auto" and (kind == "tpu" or _has_bf16(on_cpu))):
            keras.mixed_precision.set_global_policy("mixed_bfloat16")
        if self.jit and self.replicas > 1:
            raise UserError(f"--jit-compile: needs a single device, this run has {self.replicas}", USAGE)
        self._functions: list[Any] = []
        self._slots: Callable[..., Any] | None = None
        self._first_calls = 0.0

    # --- used by the trainers ----------------------------------------------------------------------------

    def function(self, body: Callable[..., Any], *signature: tf.TensorSpec) -> Callable[..., Any]:
        """``body`` as a ``tf.function`` with a fixed signature, whose traces are counted and timed."""
        traced = tf.function(body, input_signature=signature)
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

    def run(self, body: Callable[..., Any], *inputs: Any) -> Any:
        """Run ``body(*inputs)`` on every replica; returns per-replica values."""
        return self.strategy.run(tf.function(body, jit_compile=True) if self.jit else body, inputs)

    def on_each_replica(self, array: np.ndarray) -> Any:
        """A copy of ``array`` on every replica's device, to be passed to :meth:`run`.

        Not a variable: variables are broadcast from the first worker, and collectives do not support uint8.
        """
        return self.strategy.experimental_distribute_values_from_function(lambda context: tf.constant(array))

    def my_rows(self, batch: tf.Tensor) -> tf.Tensor:
        """This replica's rows of the global ``batch``. Call it in replica context."""
        size = batch.shape[0] // self.replicas
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.slice(batch, [replica * size] + [0] * (len(batch.shape) - 1), [size, *batch.shape[1:]])

    def share(self, batch: np.ndarray) -> np.ndarray:
        """This process's rows of the global ``batch``."""
        return order.share(batch, self.rank if self.processes > 1 else 0, self.processes)

    def my_part(self, rows: tf.Tensor) -> tf.Tensor:
        """This replica's rows of this process's ``rows``. Call it in replica context."""
        here = self.replicas // self.processes
        size = rows.shape[0] // here
        place = tf.distribute.get_replica_context().replica_id_in_sync_group % here
        return tf.slice(rows, [place * size] + [0] * (len(rows.shape) - 1), [size, *rows.shape[1:]])

    def sum(self, values: Any) -> tf.Tensor:
        """Per-replica ``values`` summed over all replicas."""
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

    def blend(self, averages: Sequence[Any], variables: Sequence[Any], decay: float) -> None:
        """Move each of ``averages`` towards its variable by ``1 - decay`` of the difference. Not inside :meth:`run`."""
        for average, variable in zip(averages, variables, strict=True):
            self.strategy.extended.update(
                average.value, lambda slow, fast: slow.assign_add((fast - slow) * (1 - decay)), args=(variable.value,)
            )

    def check_alike(self, what: str, *counts: int) -> None:
        """Raise :class:`UserError` on every worker unless all have the same ``counts``.

        Workers with different data would take different numbers of steps and wait for each other forever.
        """
        for count in counts:
            found = self._of_all(count)
            if len(set(found)) > 1:
                self._settle()
                raise UserError(
                    f"the workers see different data: {', '.join(map(str, found))} {what}; --datadir must hold the same"
                    " for all"
                )

    def close(self) -> None:
        """Wait for the other workers: the chief would report one that exits while it still writes as lost."""
        self._of_all(0)
        self._settle()

    def _settle(self) -> None:
        """Wait until every worker has the result of the last collective, which fails if one of them exits too early."""
        with contextlib.suppress(*_LOST):
            self._of_all(0)

    def _of_all(self, value: int) -> list[int]:
        """The ``value`` of each process, by rank."""
        if self.processes == 1:
            return [value]
        if self._slots is None:
            self._slots = tf.function(lambda slots: self.sum(self.strategy.run(tf.identity, (slots,))))
        mine = np.zeros(self.processes, np.int64)
        mine[self.rank] = value
        # Every local replica adds the same value.
        return (self._slots(tf.constant(mine)).numpy() // (self.replicas // self.processes)).tolist()  # type: ignore[no-any-return]

    # --- trainers.common.run.DistributedContext ----------------------------------------------------------

    def agree(self, code: int) -> int:
        """The largest ``code`` passed by any process."""
        agreed = max(self._of_all(code))
        if agreed:
            self._settle()
        return agreed

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of ``read()``; raises :class:`UserError` on every process if they do not read the same step."""
        state = read()
        step = json.loads(str(state["run"]))["global_step"] if state else -1
        found = self._of_all(step)
        if len(set(found)) > 1:
            self._settle()
            raise UserError(
                f"worker {self.rank} finds step {step}, others find another: --checkpoint-dir must be a folder that all"
                " workers share, such as gs://..."
            )
        return state

    def compilations(self) -> tuple[int, float]:
        """The number of traced functions, and the seconds that their first calls took."""
        return sum(function.experimental_get_tracing_count() for function in self._functions), self._first_calls

    def versions(self) -> dict[str, str]:
        """Versions of TensorFlow and Keras."""
        return {"tensorflow": tf.__version__, "keras": keras.__version__}

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace with TensorFlow's profiler into ``folder``, for TensorBoard's profile plugin."""
        tf.profiler.experimental.start(folder)
        return tf.profiler.experimental.stop  # type: ignore[no-any-return]


def report_lost_worker(main: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``main``, with a :class:`UserError` instead of a traceback if a collective fails because a worker was lost."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return main(args)
        except _LOST as error:
            workers, rank = _place_in_cluster()
            if workers == 1:
                raise
            reason = error.message.splitlines()[0].rpartition("}} ")[2]
            raise UserError(
                f"worker {rank} lost another worker, whose log says why ({reason}); start all of them again to resume"
            ) from None

    return guarded


def _use_gfile() -> None:
    """Open ``gs://`` with TensorFlow's client; without fsspec only local files are supported."""
    with contextlib.suppress(ImportError):
        from trainers.tf import _gfile

        _gfile.register()


def _place_in_cluster() -> tuple[int, int]:
    """The number of workers in ``TF_CONFIG``, including the chief, and this process's rank; (1, 0) without it."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return 1, 0
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        counts = {role: len(cluster.get(role) or ()) for role in ("chief", "master", "worker")}
        role, index = task.get("type") or "worker", int(task.get("index") or 0)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"TF_CONFIG is invalid: {error}", USAGE) from None
    leaders = counts["chief"] + counts["master"]
    return max(1, leaders + counts["worker"]), index + (leaders if role == "worker" else 0)


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
        return cpu.has_bf16()
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


def sha256(weights: list[np.ndarray]) -> str:
    """The SHA-256, in hexadecimal, of the bytes of ``weights``."""
    digest = hashlib.sha256()
    for array in weights:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
