"""Join the processes of a JAX run, one a host, and make one mesh of the devices of all of them."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainers.common import files, job
from trainers.common.files import USAGE, UserError

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # --device -> the name that JAX_PLATFORMS has for it
BF16_CAPABILITY = 8.0  # of NVIDIA GPUs: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
# Parts of the errors of collectives and of the coordination service after another process has ended.
LOST = ("Connection closed by peer", "Connection reset by peer", "coordination service", "Gloo", "heartbeat")


class Peers:
    """Join the processes of a run as :class:`trainers.common.job.Peers`; ``mesh`` has the axes ``data`` and ``tensor``.

    A model is a module of Flax, or a dict whose "weights" are a tree of arrays, which the training replaces.
    """

    def __init__(self, args: argparse.Namespace, tensor: int = 1) -> None:
        """Find the devices; ``tensor`` of them share the rows of a batch. Raises :class:`UserError`."""
        if args.device != "auto":
            jax.config.update("jax_platforms", PLATFORMS[args.device])
        if args.num_cores and "cpu" in (args.device, os.environ.get("JAX_PLATFORMS")):
            jax.config.update("jax_num_cpu_devices", args.num_cores)
        if args.deterministic:
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs tracebacks of errors that it raises, too
        join()
        try:
            devices = jax.devices()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if "gloo" in reason:  # the collectives of CPUs, which look this host up by its name
                raise UserError(f"the name of this host, {socket.gethostname()}, has no address, by which the processes"
                                " could meet: add it to /etc/hosts") from None  # fmt: skip
            raise UserError(f"--device {args.device}: not available here: {reason}", USAGE) from None
        self.rank, self.size = jax.process_index(), jax.process_count()
        self.processes = self.size  # the name that trainers.common.images has for it
        if args.num_cores * self.size > len(devices):
            raise UserError(f"--num-cores {args.num_cores}: there are {jax.local_device_count()} devices; --device cpu"
                            " splits a CPU into more", USAGE)  # fmt: skip
        if args.num_cores:
            ours = [[one for one in devices if one.process_index == rank] for rank in range(self.size)]
            devices = [one for host in ours for one in host[: args.num_cores]]
        if len(devices) % tensor:
            raise UserError(f"--tensor {tensor}: does not divide {len(devices)} devices", USAGE)
        self.kind, self.replicas = devices[0].platform, len(devices) // tensor
        self.label, self.device_name = f"{self.kind}/{self.rank}", devices[0].device_kind
        args.precision = fastest_precision(devices[0]) if args.precision == "auto" else args.precision
        if args.precision == "fp16":
            raise UserError("--precision fp16: the JAX trainers have fp32 and bf16", USAGE)
        self.dtype = jnp.bfloat16 if args.precision == "bf16" else jnp.float32  # of activations
        self.mesh = jax.make_mesh((self.replicas, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2,
                                  devices=devices)  # fmt: skip
        if folder := compiled_folder(self.kind, args.checkpoint_dir):
            jax.config.update("jax_compilation_cache_dir", folder)

    def spread(self, *axes: str | None) -> NamedSharding:
        """Return the sharding of arrays whose dimensions are spread over these axes of the mesh; none: replicated."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put(self, array: Any, *axes: str | None) -> jax.Array:
        """Return an ``array``, of which all processes have the same, on the devices; see :meth:`spread`."""
        host = np.asarray(array)
        host = host.astype(np.int32) if host.dtype == np.int64 else host
        return jax.make_array_from_callback(host.shape, self.spread(*axes), lambda index: host[index])

    def place(self, *parts: nnx.Module) -> None:
        """Replicate the arrays of modules and optimizers on every device."""
        for part in parts:
            nnx.update(part, jax.tree.map(self.put, nnx.state(part)))

    def attention(self, heads: int, head_dim: int) -> str | None:
        """Return an implementation of attention for :func:`jax.nn.dot_product_attention`: cuDNN's where it can be."""
        x = jax.ShapeDtypeStruct((1, 128, heads, head_dim), self.dtype)
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        try:
            jax.jit(attend).lower(x, x, x)
            return "cudnn"
        except (RuntimeError, ValueError, NotImplementedError):  # no cuDNN, or not for this GPU, precision or width
            return None

    def maximum(self, values: list[float]) -> list[float]:
        numbers = np.asarray(values, np.float32)
        return multihost_utils.process_allgather(numbers).reshape(-1, len(values)).max(axis=0).tolist()  # type: ignore[no-any-return]

    def gather(self, content: Any) -> list[Any]:
        if self.size == 1:
            return [content]
        mine = np.frombuffer(pickle.dumps(content), np.uint8)
        lengths = multihost_utils.process_allgather(np.int32(len(mine)))
        every = multihost_utils.process_allgather(np.pad(mine, (0, max(lengths) - len(mine))))
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(every, lengths, strict=True)]

    def broadcast(self, content: Any) -> Any:
        return self.gather(content if self.rank == 0 else None)[0]

    def wait(self) -> None:
        jax.block_until_ready(jax.live_arrays())

    def not_finite(self, model: Any) -> str:
        parts = [(name, {str(shard.index): shard.data for shard in array.addressable_shards})
                 for name, array in named(model)]  # fmt: skip
        found = jax.device_get([[is_finite(data) for data in shards.values()] for _, shards in parts])
        return next((name for (name, _), sound in zip(parts, found, strict=True) if not all(sound)), "")

    def digest(self, model: Any) -> str:
        digest = hashlib.sha256()
        for name, array in sorted(named(model), key=lambda pair: pair[0]):
            digest.update(name.encode() + whole(array).tobytes())
        return digest.hexdigest()

    def profile(self, folder: str) -> Callable[[], None]:
        if self.rank:
            return lambda: None
        jax.profiler.start_trace(folder)
        return jax.profiler.stop_trace  # type: ignore[no-any-return]

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


@jax.jit
def is_finite(array: jax.Array) -> jax.Array:
    """Return whether all elements are finite, as ``bool[]``."""
    return jnp.isfinite(array).all()


def named(model: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the weights of a model, and averages of batch norm, with their names."""
    tree = model["weights"] if isinstance(model, dict) else nnx.to_pure_dict(nnx.state(model))
    for path, array in jax.tree.leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), array


def whole(array: jax.Array) -> np.ndarray:
    """Return an ``array`` on the host, gathered from all processes."""
    return np.asarray(array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True))


def join() -> None:
    """Join the other processes, which the launcher's JAX_COORDINATOR_ADDRESS, _NUM_PROCESSES and _PROCESS_ID name."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address or os.environ.get("JAX_NUM_PROCESSES") == "1":
        return
    numbers = {name: os.environ.get(f"JAX_{name.upper()}") for name in ("num_processes", "process_id")}
    try:
        jax.distributed.initialize(address, **{name: int(text) for name, text in numbers.items() if text})
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"this process cannot join the others at {address}: {reason}") from None


def compiled_folder(kind: str, checkpoints: str) -> str:
    """Return the folder beside the ``checkpoints`` where a restarted run finds compiled programs; "" for none.

    ``kind`` is what the devices are. Programs for a CPU are for its instruction set, and another machine may resume the
    run. JAX itself reads JAX_COMPILATION_CACHE_DIR: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if kind == "cpu" or not checkpoints or files.is_remote(checkpoints) or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return ""
    return os.path.join(os.path.abspath(checkpoints), "compiled")


def fastest_precision(device: jax.Device) -> str:
    """Return the precision in which a device multiplies fastest; XLA's CPU backend computes bf16 in fp32."""
    gpu = device.platform == "gpu" and float(device.compute_capability) >= BF16_CAPABILITY
    return "bf16" if gpu or device.platform == "tpu" else "fp32"


def run(main: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``main(args)``, see :func:`trainers.common.job.run`; says which process has failed, and that one is lost."""
    rank, shown = os.environ.get("JAX_PROCESS_ID") or "0", sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if str(error) != "Event loop is closed":  # which TensorStore prints at times after a save has failed
            shown(kind, error, trace)

    def guarded(args: argparse.Namespace) -> int:
        try:
            code = main(args)
            if jax.process_count() > 1:
                jax.distributed.shutdown()  # after all of them have come here
            return code
        except UserError as error:
            raise (error if rank == "0" else UserError(f"process {rank}: {error}", error.code)) from None
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            if "RESOURCE_EXHAUSTED" in reason:
                raise UserError(f"{reason}: lower --batch-size or --test-batch-size") from None
            if any(sign in reason for sign in LOST):
                raise UserError(f"another process of the run was lost, whose log says why ({reason}); checkpoints are"
                                " kept: run the same command again to resume") from None  # fmt: skip
            raise

    sys.excepthook = show
    job.run(guarded, args, name)
