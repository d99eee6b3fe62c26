"""Join the processes of a JAX trainer, one per host, and make a mesh of the devices of all of them.

Arrays are replicated on the mesh or sharded along its axis ``data``. What :func:`jax.jit` compiles for them sums over
the devices where that is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import socket
from collections.abc import Callable
from typing import IO, Any, NoReturn

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainers.common import exits, order, paths
from trainers.common.exits import USAGE, UserError
from trainers.common.run import State

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # --device -> the name that JAX_PLATFORMS has for it
_COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of each compilation, in jax/_src/dispatch.py
# Substrings of the errors of collectives and of the coordination service after another process has exited.
_LOST = ("Connection closed by peer", "Connection reset by peer", "coordination service", "Gloo", "heartbeat")
_BF16_CAPABILITY = 8.0  # of NVIDIA GPUs: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities


def main(train: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``train(args)`` and exit with the code it returns."""
    exits.guard(lambda given: _run(train, given), args, name)


def _run(train: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    exits.end_idle_replica()
    try:
        return train(args)
    except UserError as error:
        if (rank := os.environ.get("JAX_PROCESS_ID") or "0") == "0":
            raise
        raise UserError(f"process {rank}: {error}", error.code) from None
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        if "RESOURCE_EXHAUSTED" in reason:
            raise UserError(f"{reason}: lower --batch-size or --test-batch-size") from None
        if any(sign in reason for sign in _LOST):
            raise UserError(
                f"another process of the run was lost, whose log says why ({reason}); checkpoints are kept: run the"
                f" same command {exits.again(args.resume)} to resume"
            ) from None
        raise


def _join() -> None:
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

    ``kind`` is that of the devices. Programs for a CPU are for its instruction set, and another machine may resume the
    run. JAX itself reads JAX_COMPILATION_CACHE_DIR: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if kind == "cpu" or not checkpoints or paths.is_remote(checkpoints) or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return ""
    return os.path.join(os.path.abspath(checkpoints), "compiled")


class Devices:
    """Hold the devices of a run, as a mesh with the axes ``data`` and ``tensor``.

    Implements :class:`trainers.common.log.Devices` and :class:`trainers.common.order.Peers`.
    """

    def __init__(self, args: argparse.Namespace, tensor: int = 1) -> None:
        """Find the devices of ``--device`` after joining the other processes; ``tensor`` of them share their rows.

        Raises :class:`UserError` if there are none, or fewer than ``--num-cores``.
        """
        if args.device != "auto":
            jax.config.update("jax_platforms", _PLATFORMS[args.device])
        if args.num_cores and (args.device == "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu"):
            jax.config.update("jax_num_cpu_devices", args.num_cores)
        if args.deterministic:
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
        _join()
        try:
            devices = jax.devices()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if "gloo" in reason:  # the collectives of CPUs, which look this host up by its name
                raise UserError(f"the name of this host, {socket.gethostname()}, has no address, by which the processes"
                                " could meet: add it to /etc/hosts") from None  # fmt: skip
            raise UserError(f"--device {args.device}: not available here: {reason}", USAGE) from None
        if args.num_cores and args.num_cores * jax.process_count() > len(devices):
            present = f"there are {jax.local_device_count()} devices; --device cpu splits a CPU into more"
            raise UserError(f"--num-cores {args.num_cores}: {present}", USAGE)
        if args.num_cores:
            per_host = [[one for one in devices if one.process_index == rank] for rank in range(jax.process_count())]
            devices = [one for host in per_host for one in host[: args.num_cores]]
        self.kind: str = devices[0].platform
        self.name: str = devices[0].device_kind
        self.rank, self.processes = jax.process_index(), jax.process_count()
        if len(devices) % tensor:
            raise UserError(f"--tensor {tensor}: does not divide {len(devices)} devices", USAGE)
        self.replicas = len(devices) // tensor
        self.label = f"{self.kind}/{self.rank}"
        self.chief = self.rank == 0 and not exits.follows()
        self.precision = self._precision(devices[0]) if args.precision == "auto" else args.precision
        if self.precision == "fp16":
            raise UserError("--precision fp16: the JAX trainers have fp32 and bf16", USAGE)
        self.dtype = jax.numpy.bfloat16 if self.precision == "bf16" else jax.numpy.float32  # of activations
        grid = np.array(devices).reshape(self.replicas, tensor)
        self.mesh = jax.sharding.Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.sharded = NamedSharding(self.mesh, PartitionSpec("data"))
        if folder := compiled_folder(self.kind, args.checkpoint_dir):
            jax.config.update("jax_compilation_cache_dir", folder)
        self._compilations: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _precision(self, device: jax.Device) -> str:
        if self.kind == "gpu":
            return "bf16" if float(device.compute_capability) >= _BF16_CAPABILITY else "fp32"
        return "bf16" if self.kind == "tpu" else "fp32"  # XLA's CPU backend computes bf16 in fp32, and converts

    # --- arrays -----------------------------------------------------------------------------------------

    def replicate(self, tree: Any) -> Any:
        """Return the arrays of ``tree``, the same in all processes, on every device."""

        def put(array: np.ndarray | jax.Array) -> jax.Array:
            host = np.asarray(array)
            return self.from_callback(host.shape, PartitionSpec(), lambda *index: host[index])

        return jax.tree.map(put, tree)

    def from_callback(self, shape: tuple[int, ...], spec: PartitionSpec, part: Callable[..., np.ndarray]) -> jax.Array:
        """Return an array of ``shape``, spread over the mesh as ``spec`` says; ``part(*slices)`` is a part of it."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: part(*index))

    def put_batch(self, batch: np.ndarray) -> jax.Array:
        """Return a global ``batch``, the same in all processes, with its rows spread over the devices."""
        rows = order.share(batch, self.rank, self.processes)
        rows = rows.astype(np.int32) if rows.dtype == np.int64 else rows
        return jax.make_array_from_process_local_data(self.sharded, rows, batch.shape)

    def place(self, *parts: nnx.Module) -> None:
        """Replicate the arrays of modules and optimizers on every device."""
        for part in parts:
            nnx.update(part, self.replicate(nnx.state(part)))

    # --- checkpoints ------------------------------------------------------------------------------------

    def state(self, parts: dict[str, Any]) -> State:
        """Return the arrays of ``parts``, modules and optimizers, on the host, for a checkpoint."""
        return {name: {key: np.asarray(value) for key, value in _arrays(part).items()} for name, part in parts.items()}

    def load(self, parts: dict[str, Any], state: State) -> None:
        """Load the ``state`` of a checkpoint into ``parts``; raise :class:`UserError` if it is of another model."""
        for name, part in parts.items():
            mine, saved = _arrays(part), state.get(name, {})
            differing = [key for key in {**mine, **saved}
                         if key not in mine or key not in saved or mine[key].shape != saved[key].shape]  # fmt: skip
            if differing:
                raise UserError(
                    f"the checkpoint is of another model or optimizer ({name}/{differing[0]} differs): use the flags it"
                    " was made with, or another --checkpoint-dir",
                    USAGE,
                )
            state_of_part = nnx.state(part)
            for path, variable in nnx.to_flat_state(state_of_part):
                variable.set_value(self.replicate(saved[_name(path)]))
            nnx.update(part, state_of_part)

    @staticmethod
    def write(state: State, file: IO[bytes]) -> None:
        """Write the checkpoint ``state``, which holds arrays, numbers and text only."""
        parts = {name: value if isinstance(value, dict) else {"": value} for name, value in state.items()}
        np.savez(file, **{f"{name}/{key}".rstrip("/"): array for name, part in parts.items()
                          for key, array in part.items()})  # fmt: skip

    @staticmethod
    def read(file: IO[bytes]) -> State:
        """Read a checkpoint; loading one cannot execute code."""
        state: State = {}
        for name, array in np.load(file, allow_pickle=False).items():
            part, slash, key = name.partition("/")
            if slash:
                state.setdefault(part, {})[key] = array
            else:
                state[part] = array.item()
        return state

    @staticmethod
    def not_finite(state: State) -> str:
        """Return the name of a weight with NaN or infinity in ``state``, or ""."""
        return next((name for name, value in state["model"].items() if not np.isfinite(value).all()), "")

    def digest(self, model: nnx.Module) -> str:
        """Return :func:`sha256` of ``model``."""
        return sha256(self.state({"model": model})["model"])

    # --- processes --------------------------------------------------------------------------------------

    def maximum(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum of ``values`` over all processes."""
        numbers = np.asarray(values, np.float32)
        return multihost_utils.process_allgather(numbers).reshape(-1, len(values)).max(axis=0).tolist()  # type: ignore[no-any-return]

    def gather(self, content: bytes) -> list[bytes]:
        """Return the ``content`` passed by each process, by rank."""
        if self.processes == 1:
            return [content]
        lengths = multihost_utils.process_allgather(np.int32(len(content)))
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(content)] = np.frombuffer(content, np.uint8)
        every = multihost_utils.process_allgather(padded)
        return [row[:length].tobytes() for row, length in zip(every, lengths, strict=True)]

    def broadcast(self, content: bytes) -> bytes:
        """Return the ``content`` passed by the process of rank 0."""
        if self.processes == 1:
            return content
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
        padded = np.zeros(length, np.uint8)
        if self.rank == 0:
            padded[:] = np.frombuffer(content, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes()

    def check_alike(self, what: str, *arrays: np.ndarray) -> None:
        """Raise :class:`UserError` on every process unless all have the same ``arrays``, which are ``what``."""
        if self.processes > 1:
            digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
            counts = " and ".join(str(len(array)) for array in arrays)
            order.check_alike(self, what, f"{counts} (SHA-256 {digest[:12]})")

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """Return the result of the chief's ``read()``, on every process: only the chief needs access to the folder."""
        if self.processes == 1:
            return read()
        file, error = io.BytesIO(), ""
        if self.rank == 0:
            try:
                if state := read():
                    self.write(state, file)
            except UserError as problem:
                error = str(problem)
        if error := self.broadcast(error.encode()).decode():
            raise UserError(error)
        content = self.broadcast(file.getvalue())
        return self.read(io.BytesIO(content)) if content else None

    # --- what Run and Log call --------------------------------------------------------------------------

    def seed_step(self, step: int) -> None:
        """Do nothing: a step derives its random numbers from the seed and its number."""

    def end_step(self) -> None:
        """Do nothing: JAX has started the step, and its result is waited for where it is read."""

    def mean(self, value: jax.Array) -> float:
        """Return ``value``, which is that of the global batch; waits for the devices."""
        return float(value)

    def _compiled(self, event: str, seconds: float, **_: object) -> None:
        if event == _COMPILED:
            self._compilations.append(seconds)

    def compilations(self) -> tuple[int, float]:
        """Return the number of programs that XLA compiled, and the seconds it took."""
        return len(self._compilations), sum(self._compilations)

    def versions(self) -> dict[str, str]:
        """Return the versions of JAX and of the packages that the trainers use with it."""
        import flax

        return {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "flax": flax.__version__,
                "optax": optax.__version__}  # fmt: skip

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace with JAX's profiler into ``folder``, for TensorBoard's profile plugin and Perfetto."""
        if not self.chief:
            return lambda: None
        jax.profiler.start_trace(folder)
        return jax.profiler.stop_trace  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the other processes, after all of them have come here."""
        if self.processes > 1:
            jax.distributed.shutdown()


def optimizer(args: argparse.Namespace, rate: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum, or AdamW, with ``--weight-decay`` on matrices and kernels.

    ``rate`` is the schedule: the learning rate as a function of the number of steps that are done.
    """

    def decayed(params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda value: value.ndim > 1, params)

    clip = optax.clip_by_global_norm(args.clip_norm) if args.clip_norm else optax.identity()
    if args.optimizer == "adamw":
        return optax.chain(clip, optax.adamw(rate, weight_decay=args.weight_decay, mask=decayed))
    sgd = optax.sgd(rate, args.momentum or None, nesterov=args.momentum > 0)
    return optax.chain(clip, optax.add_decayed_weights(args.weight_decay, decayed), sgd)


def sha256(weights: dict[str, np.ndarray]) -> str:
    """Return the SHA-256, in hexadecimal, of the names and bytes of ``weights``."""
    digest = hashlib.sha256()
    for name, array in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _arrays(part: nnx.Module) -> dict[str, jax.Array]:
    """Return path -> array of a module or an optimizer."""
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(part))}
