"""Choose the strategy of ``tf.distribute``, and be the workers of a run as :class:`trainers.common.job.Peers`.

The environment selects the strategy: ``TF_CONFIG`` with several workers, a TPU's address in ``TPU_NAME`` (ignored if
``LAUNCHER_REHEARSE=1``, because a rehearsal has no TPU), the GPUs present, else the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from trainers.common import job
from trainers.common.files import FAILED, USAGE, UserError
from trainers.tf import import_tensorflow

import_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

# Raised by a collective when another worker has exited, was killed or lost its network; and by a TPU that was lost.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
CONNECT, PAUSE, REPORT = 2.0, 0.2, 30.0  # seconds: to connect to a worker, between attempts, between messages
JOIN = 3600.0  # seconds until a worker gives up waiting for the others, as TensorFlow does
joined: list[Peers] = []  # the one of this process


class Peers:
    """Join the replicas of a strategy, some in each process, as :class:`trainers.common.job.Peers`."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Choose the strategy, seed, and wait for the other workers; sets ``args.precision`` if it is auto.

        Raises :class:`UserError` if TF_CONFIG is invalid, or options or the TPU cannot be used.
        """
        workers, rank = place_in_cluster()
        self.kind = kind = find_kind(args.strategy, workers)
        on_cpu = kind != "tpu" and not tf.config.list_physical_devices("GPU")
        self.jit = args.jit_compile and kind != "tpu"  # TPUs compile everything
        if args.precision == "fp16":
            raise UserError("--precision fp16: the TensorFlow trainers have bf16 and fp32", USAGE)
        if self.jit and args.deterministic:
            raise UserError("--deterministic: XLA has no deterministic max pooling; leave out --jit-compile", USAGE)
        if args.deterministic or (on_cpu and not self.jit):
            # On the CPU the cost is not measurable, and sums over threads, and so resumed runs, are bit-exact.
            tf.config.experimental.enable_op_determinism()
        keras.utils.set_random_seed(args.seed)
        self.rank, self.size = (rank, workers) if kind == "multiworker" else (0, 1)
        self.processes = self.size  # for trainers.common.order.Peers
        self.strategy: tf.distribute.Strategy
        if kind == "multiworker":
            self.strategy = join(rank, workers)
        elif kind == "tpu":
            self.strategy = tpu_strategy()
        else:
            devices = find_devices(args.num_cores, on_cpu)
            many = kind == "mirrored" and len(devices) > 1
            self.strategy = (tf.distribute.MirroredStrategy(devices) if many else
                             tf.distribute.OneDeviceStrategy(devices[0]))  # fmt: skip
        # TensorFlow's handler, for several workers or a TPU node, would let the process go on.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.replicas = int(self.strategy.num_replicas_in_sync)
        self.label = f"{'TPU' if kind == 'tpu' else 'CPU' if on_cpu else 'GPU'}:0/{self.rank}"
        if args.precision == "auto":
            args.precision = "bf16" if kind == "tpu" or has_bf16(on_cpu) else "fp32"
        keras.config.set_dtype_policy("mixed_bfloat16" if args.precision == "bf16" else "float32")
        if self.jit and self.replicas > 1:
            raise UserError(f"--jit-compile: needs a single device, this run has {self.replicas}", USAGE)
        self.iterator: Any = None  # of the batches in use
        self.error: Exception | None = None  # of the data, which TensorFlow replaces by its own
        joined[:] = [self]

    @staticmethod
    def run(main: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
        """Run ``main(args)`` as :func:`trainers.common.job.run` does; a lost worker and full memory are one line."""

        def guarded(args: argparse.Namespace) -> int:
            again = f"again{'' if args.resume else ' without --no-resume'} to resume"
            try:
                code = main(args)
                for peers in joined:  # the chief would report one that exits while it still writes as lost
                    peers.maximum([0.0])
                    peers.settle()
                return code
            except UserError as error:
                for peers in joined if error.code not in (FAILED, USAGE) else ():  # all workers raise it
                    peers.settle()
                raise
            except tf.errors.ResourceExhaustedError as error:
                raise UserError(f"{reason_of(error)}: lower --batch-size or --test-batch-size") from None
            except tf.errors.OpError as error:
                for peers in joined:
                    if peers.error:
                        raise peers.error from None
                    if isinstance(error, LOST) and peers.size > 1:
                        raise UserError(f"worker {peers.rank} lost another worker, whose log says why"
                                        f" ({reason_of(error)}); start all of them {again}") from None  # fmt: skip
                    if isinstance(error, LOST) and peers.kind == "tpu":
                        raise UserError(f"lost the TPU ({reason_of(error)}); run {again}") from None
                raise

        job.run(guarded, args, name)

    def share(self, batch: Any) -> Any:
        """Return this process's rows of a global ``batch``."""
        size = len(batch) // self.size
        return batch[self.rank * size : (self.rank + 1) * size]

    def dataset(self, batches: Callable[[], Iterator[Any]], specs: Any) -> Any:
        """Return the ``batches()`` of this process as a dataset that gives each of its replicas an equal part of them.

        ``specs`` describe a replica's part of a batch, nested like it. The next are made while one is used.
        """
        local = self.replicas // self.size

        def parts() -> Iterator[Any]:
            try:
                for batch in batches():
                    for replica in range(local):
                        yield tf.nest.map_structure(lambda array: np.split(array, local)[replica], batch)  # noqa: B023
            except Exception as error:
                self.error = error
                raise

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tf.data.Dataset.from_generator(parts, output_signature=specs).prefetch(2 * local)

        return self.strategy.distribute_datasets_from_function(make)

    def maximum(self, values: list[float]) -> list[float]:
        return self._gathered(np.array(values, np.float64)).max(axis=0).tolist()  # type: ignore[no-any-return]

    def gather(self, content: Any) -> list[Any]:
        packed = np.frombuffer(pickle.dumps(content), np.uint8)
        sizes = self._gathered(np.array([len(packed)], np.float64))[:, 0].astype(int)
        padded = np.zeros(sizes.max(), np.int32)  # collectives do not support bytes
        padded[: len(packed)] = packed
        rows = self._gathered(padded).astype(np.uint8)
        self.settle()  # the caller may raise an error, in all processes
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, content: Any) -> Any:
        return self.gather(content if self.rank == 0 else None)[0]

    def _gathered(self, mine: np.ndarray) -> np.ndarray:
        """Return the array ``mine`` of each process, of the same shape in all of them, as ``[processes, ...]``."""
        if self.size == 1:
            return mine[None]
        slots = np.zeros((self.size, *mine.shape), mine.dtype)
        slots[self.rank] = mine

        def own(value: tf.Tensor) -> tf.Tensor:  # each replica of this process would add the same: the first does
            place = tf.distribute.get_replica_context().replica_id_in_sync_group
            return value * tf.cast(place % (self.replicas // self.size) == 0, value.dtype)

        def added(value: tf.Tensor) -> tf.Tensor:
            return self.strategy.reduce("SUM", self.strategy.run(own, (value,)), axis=None)

        if not hasattr(self, "_added"):
            self._added = tf.function(added, autograph=False, reduce_retracing=True)
        return self._added(tf.constant(slots)).numpy()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until every worker has the result of the last collective, which fails if one of them exits too early."""
        with contextlib.suppress(*LOST):
            self.maximum([0.0])

    def wait(self) -> None:
        if self.size > 1:  # with several workers, sync_devices() fails
            self.maximum([0.0])
        else:
            tf.test.experimental.sync_devices()

    def not_finite(self, model: keras.Model) -> str:
        floats = [variable for variable in model.variables if "float" in variable.dtype]
        sound = [bool(tf.reduce_all(tf.math.is_finite(variable.value))) for variable in floats]
        return next((variable.path for variable, fine in zip(floats, sound, strict=True) if not fine), "")

    def digest(self, model: keras.Model) -> str:
        digest = hashlib.sha256()
        for array in model.get_weights():
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def profile(self, folder: str) -> Callable[[], None]:
        tf.profiler.experimental.start(folder)
        return tf.profiler.experimental.stop  # type: ignore[no-any-return]

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__, "keras": keras.__version__}


def reason_of(error: tf.errors.OpError) -> str:
    """Return the first line of a TensorFlow ``error``, without the names of graph nodes and operations around it."""
    line = (str(error.message).splitlines() or [type(error).__name__])[0]
    return line.rpartition("}} ")[2].partition(" [Op:")[0]


def join(rank: int, workers: int) -> tf.distribute.Strategy:
    """Return a strategy over all workers of ``TF_CONFIG``; raises :class:`UserError`."""
    try:
        wait_for_others(json.loads(os.environ["TF_CONFIG"]), rank)
        return tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, ValueError, RuntimeError, OSError) as error:
        reason = reason_of(error) if isinstance(error, tf.errors.OpError) else str(error).partition("\n")[0]
        raise UserError(f"worker {rank} of {workers} cannot join the others of TF_CONFIG: {reason}") from None


def place_in_cluster() -> tuple[int, int]:
    """Return the number of workers in ``TF_CONFIG``, chief included, and this process's rank; (1, 0) without it.

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
    check_addresses(cluster, members)
    own = {"chief": chiefs, "master": chiefs, "worker": members["worker"]}.get(role)
    if own is None:
        raise UserError(f"TF_CONFIG: task.type is {role!r}, which is not one of chief, master, worker", USAGE)
    if not 0 <= index < len(own):
        raise UserError(f"TF_CONFIG: task.index is {index}, but cluster.{role} has {len(own)} members", USAGE)
    role = "chief" if own is chiefs else "worker"
    trained = {name: found for name, found in (("chief", chiefs), ("worker", members["worker"])) if found}
    os.environ["TF_CONFIG"] = json.dumps({**config, "cluster": trained, "task": {"type": role, "index": index}})
    return workers, index + (len(chiefs) if role == "worker" else 0)


def check_addresses(cluster: dict[str, Any], members: dict[str, list[Any]]) -> None:
    """Raise :class:`UserError` if an address of ``TF_CONFIG``, in ``members`` by role, has no port or comes twice."""
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


def wait_for_others(config: dict[str, Any], rank: int) -> None:
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
                    socket.create_connection((host.strip("[]"), int(number)), CONNECT).close()
                    missing.discard(place)
            names = ", ".join(addresses[place] for place in sorted(missing)[:5])
            if missing and time.monotonic() - began > JOIN:
                raise TimeoutError(f"{len(missing)} workers do not answer after {JOIN:.0f} s: {names}")
            if missing and time.monotonic() - said > REPORT:
                said = time.monotonic()
                print(f"Worker {rank} waits for {len(missing)} workers: {names}", file=sys.stderr)
            if missing:
                time.sleep(PAUSE)


def find_kind(requested: str, workers: int) -> str:
    """Return the strategy for --strategy: one, mirrored, multiworker or tpu; raises :class:`UserError`."""
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


def has_bf16(on_cpu: bool) -> bool:
    """Return whether all devices multiply bfloat16 in hardware: NVIDIA GPUs since compute capability 8.0 (Ampere)."""
    if on_cpu:
        with contextlib.suppress(OSError):
            features = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
            return "avx512_bf16" in features or "amx_bf16" in features
        return False
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return all(found.get("compute_capability", (0, 0)) >= (8, 0) for found in details)


def tpu_strategy() -> tf.distribute.Strategy:
    """Return a strategy over the TPU of ``TPU_NAME``, else of this machine; raises :class:`UserError`."""
    address = os.environ.get("TPU_NAME") or "local"
    try:
        reach(address)
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        raise UserError(f"TPU {address} cannot be used: {str(error).splitlines()[0]}") from None


def reach(address: str, seconds: float = 30) -> None:
    """Raise ``OSError`` if no server listens at ``grpc://host:port``; TensorFlow would wait for it forever."""
    for place in address.split(","):
        host, _, port = place.removeprefix("grpc://").rpartition(":")
        if place.startswith("grpc://") and host:
            socket.create_connection((host, int(port)), seconds).close()


def find_devices(requested: int, on_cpu: bool) -> list[str]:
    """Return the devices for --num-cores, into which a CPU is split; raises :class:`UserError` for too many GPUs."""
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
