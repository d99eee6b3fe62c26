"""Devices and processes of the PyTorch trainers: which device, joining the processes, and what XLA needs besides.

CPUs, CUDA and torch_tpu use one process per device with DistributedDataParallel, started by the launcher, torchrun or
:mod:`trainers.torch._launch`. torch_xla uses one process per host and SPMD, a mesh over all devices
(:mod:`trainers.torch._xla`). Some methods of :class:`Device` do nothing but under XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed, nn

from trainers.common import cpu, exits, order, paths
from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError

_BACKENDS = {"cuda": "nccl", "tpu": "tpu_dist"}  # for collectives between accelerators; the CPU's is gloo
# Substrings of the errors that gloo and NCCL raise after another process has exited.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
         "Timed out waiting", "NCCL communicator was aborted", "remote process exited")  # fmt: skip
# The option of DistributedDataParallel for buffers that each process keeps: Device.broadcast_buffers() sends them when
# they are needed. PyTorch 2.15 has renamed it; remove the older name when torch_xla needs 2.15 or later.
_RENAMED = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
OWN_BUFFERS = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def main(train: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``train(args)``, in one process per device, and exit with the code it returns."""
    exits.guard(lambda given: _run(train, given), args, name)


def _run(train: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    exits.end_idle_replica()
    from trainers.torch import _launch

    count = processes_to_start(args)
    if count > 1:
        if kind_of(args) == "tpu":  # torch_tpu 0.2 needs these variables before the first process starts
            torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=count)  # type: ignore[attr-defined]
        return _launch.run(count)
    _launch.end_with_parent()
    rank = os.environ.get("RANK") or "0"
    try:
        return train(args)
    except UserError as error:
        if rank == "0":
            raise
        raise UserError(f"rank {rank}: {error}", error.code) from None
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if any(sign in str(error) for sign in _LOST):
            raise UserError(
                f"rank {rank} lost another process of the run, whose log says why ({reason[:120]});"
                f" checkpoints are kept: run the same command {exits.again(args.resume)} to resume"
            ) from None
        if isinstance(error, torch.OutOfMemoryError):
            raise UserError(f"rank {rank}: {reason[:200]}: lower --batch-size or --test-batch-size") from None
        raise


def kind_of(args: argparse.Namespace) -> str:
    """The kind of device that ``--device`` selects: "cpu", "xla", or the type of the accelerator ("cuda", "tpu").

    ``--device auto`` prefers torch_xla if it is installed, then an accelerator, then the CPU. Raises
    :class:`UserError` if the requested device is not available.
    """
    has_xla = importlib.util.find_spec("torch_xla") is not None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = {"cpu", *(["xla"] if has_xla else []), *([accelerator.type] if accelerator else [])}
    kind = args.device
    if kind == "auto":
        kind = "xla" if has_xla else accelerator.type if accelerator else "cpu"
    if kind not in present:
        raise UserError(f"--device {kind}: not available here; available: {', '.join(sorted(present))}", USAGE)
    return kind  # type: ignore[no-any-return]


def processes_to_start(args: argparse.Namespace) -> int:
    """How many processes to start: ``--num-cores``, by default one per accelerator (CUDA, torch_tpu) and one on a CPU.

    1 for torch_xla, and if a launcher such as torchrun has already started several. Raises :class:`UserError` if
    ``--num-cores`` exceeds the accelerators present, or if this is one of several TPU hosts without a rank.
    """
    kind = kind_of(args)
    if kind == "xla" or any(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return 1
    if kind == "cpu":
        return args.num_cores or 1
    present = torch.accelerator.device_count()
    if args.num_cores > present:
        raise UserError(f"--num-cores {args.num_cores}: there are {present} {kind} devices", USAGE)
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if kind == "tpu" and len(hosts) > 1:
        raise UserError(f"this is one of {len(hosts)} TPU hosts (TPU_WORKER_HOSTNAMES), but RANK is unset: every host"
                        " would train alone; start the trainer with `launch` on each of them", USAGE)  # fmt: skip
    return args.num_cores or present


def init(args: argparse.Namespace) -> Device:
    """The device that ``--device`` selects, after this process has joined the others of the run."""
    kind = kind_of(args)
    if kind == "xla":
        from trainers.torch._xla import Xla

        class XlaDevice(Xla, Device):
            """torch_xla's devices of this host."""

        return XlaDevice(args)
    return Device(args, kind)


class Device:
    """This process's device: a CPU, or an accelerator that ``torch.accelerator`` supports (CUDA, torch_tpu).

    Implements :class:`trainers.common.log.Devices` and :class:`trainers.common.peers.Peers`.
    """

    memory_format = torch.channels_last  # the fastest for convolutions
    timeout = datetime.timedelta(minutes=10)  # for a collective: a rank that takes longer has failed

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self.kind, self.seed = kind, args.seed
        self._infinite: set[str] = set()  # weights that are not finite from the start, such as masks in buffers
        self.rank = int(os.environ.get("RANK") or 0)
        self.processes = int(os.environ.get("WORLD_SIZE") or 1)
        self.replicas = self.processes
        self.device = self._find(args)
        self._join()
        self.label = f"{self.device}/{self.rank}"
        self.chief = self.rank == 0
        if os.environ.get("LAUNCHER_REHEARSE"):
            from trainers.common import rehearsal

            self.chief = self.chief and not rehearsal.follows()
        self.bf16 = args.precision == "bf16" or (args.precision == "auto" and self._has_bf16())
        if kind == "cuda":
            torch.backends.cudnn.benchmark = not args.deterministic
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(args.seed)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _find(self, args: argparse.Namespace) -> torch.device:
        if self.kind == "cpu":
            local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
            if local > 1 and not os.environ.get("OMP_NUM_THREADS"):
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
            return torch.device("cpu")
        if self.kind == "tpu" and self.processes > 1:
            # torch_tpu binds each process to one chip, which is often index 0, and refuses any other index.
            return torch.device("tpu", torch.accelerator.current_device_index())
        index = int(os.environ.get("LOCAL_RANK") or 0)
        count = torch.accelerator.device_count()
        if index >= count:
            raise UserError(f"LOCAL_RANK={index}, but this machine has {count} {self.kind} device(s)", USAGE)
        torch.accelerator.set_device_index(index)
        return torch.device(self.kind, index)

    def _join(self) -> None:
        if self.processes > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not os.environ.get(name)]
            if missing:
                raise UserError(f"WORLD_SIZE={self.processes} without {', '.join(missing)}: start with torchrun", USAGE)
            backend = "gloo" if self.kind == "cpu" else f"cpu:gloo,{self.kind}:{_BACKENDS[self.kind]}"
            try:
                distributed.init_process_group(backend, timeout=self.timeout)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"rank {self.rank} of {self.processes} cannot join the others: {reason}") from None

    def _has_bf16(self) -> bool:
        if self.kind == "cpu":
            return cpu.has_bf16()
        return self.kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)

    # --- tensors ----------------------------------------------------------------------------------------

    def to_device(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """``array`` on the device; with several devices in one process, a copy on each."""
        tensor = torch.as_tensor(array)
        if self.kind == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """``model`` on the device, in the memory format that is the fastest there."""
        self._infinite.update(name for name, value in model.state_dict().items() if not value.isfinite().all())
        return model.to(self.device, memory_format=self.memory_format)

    def share(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a global ``batch`` that this process has to provide."""
        return order.share(batch, self.rank, self.processes)

    def put_share(self, rows: np.ndarray) -> torch.Tensor:
        """The ``rows`` that :meth:`share` returned, on this process's devices."""
        return self.to_device(rows)

    def put_batch(self, batch: np.ndarray) -> torch.Tensor:
        """This process's share of a global ``batch`` on its devices."""
        return self.put_share(self.share(batch))

    def end_step(self) -> None:
        """End the graph of this step (XLA)."""

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Create the state of ``optimizer``, which PyTorch creates in the first step.

        So the first step is the same operation as every later one, which XLA and CUDA graphs need. On CUDA, learning
        rates become tensors, which a captured step reads.
        """
        for group in optimizer.param_groups:
            if self.kind == "cuda":
                group["lr"] = torch.full((), float(group["lr"]), device=self.device)
            for parameter in group["params"]:
                # On the CPU: under XLA, zeros created on the device would be part of the first step's graph only.
                zeros = torch.zeros_like(parameter, device="cpu")
                if isinstance(optimizer, torch.optim.AdamW):
                    moves = group["capturable"] or group["fused"]
                    count = torch.zeros((), dtype=torch.float32)
                    optimizer.state[parameter] = {
                        "step": self.to_device(count) if moves else count,
                        "exp_avg": self.to_device(zeros),
                        "exp_avg_sq": self.to_device(zeros.clone()),
                    }
                elif group["momentum"]:
                    optimizer.state[parameter]["momentum_buffer"] = self.to_device(zeros)

    def load_weights(self, model: nn.Module, weights: State) -> None:
        """Load the tensors ``weights`` into ``model``."""
        model.load_state_dict(weights)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load ``state["model"]`` and ``state["optimizer"]`` of a checkpoint, except for the learning rates.

        Every step sets its own learning rate, and a checkpoint saved on CUDA holds tensors for them. Raises
        :class:`UserError` if the checkpoint is of another model.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            self.load_weights(model, state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the checkpoint is of another model or optimizer ({reason[:120]}): use the flags it was made with, or"
                " another --checkpoint-dir",
                USAGE,
            ) from None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def to_cpu(self, state: Any) -> Any:
        """``state`` (nested dictionaries and lists) with its tensors moved to the CPU."""
        if isinstance(state, torch.Tensor):
            return state.detach().cpu()
        if isinstance(state, dict):
            return {key: self.to_cpu(value) for key, value in state.items()}
        return [self.to_cpu(value) for value in state] if isinstance(state, (list, tuple)) else state

    def not_finite(self, state: State) -> str:
        """Return the name of a weight with NaN or infinity in ``state``, a checkpoint on the CPU, or ""."""
        weights = [*state["model"].items(), *state.get("average", {}).items()]
        return next((name for name, value in weights if name not in self._infinite and not value.isfinite().all()), "")

    # --- randomness -------------------------------------------------------------------------------------

    def seed_step(self, step: int) -> None:
        """Seed dropout and the like with (seed, ``step``, rank).

        So ranks have different masks, and a resumed run draws what it would have drawn, without saved generators.
        """
        # A hash, because PyTorch's generator for the CPU takes the last 32 bits of a seed only.
        digest = hashlib.blake2b(f"{self.seed} {step} {self.rank}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        torch.default_generator.manual_seed(seed)
        if self.kind == "cuda":  # torch.manual_seed() does more, in more time than a step of MNIST takes
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        elif self.kind != "cpu":
            torch.manual_seed(seed)

    # --- processes --------------------------------------------------------------------------------------

    def sum(self, values: torch.Tensor) -> list[float]:
        """``values`` summed over all processes; waits for the device."""
        values = values.detach().clone()
        if self.processes > 1:
            distributed.all_reduce(values)
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def mean(self, value: torch.Tensor) -> float:
        """The mean of the one-element ``value`` over all processes; waits for the device."""
        return self.sum(value.reshape(1))[0] / self.processes

    def maximum(self, values: list[float]) -> list[float]:
        """The element-wise maximum of ``values`` over all processes."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.processes > 1:
            distributed.all_reduce(numbers, distributed.ReduceOp.MAX)
        return numbers.tolist()  # type: ignore[no-any-return]

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all processes rank 0's buffers of ``model``, such as the averages of batch norm, for a test.

        DistributedDataParallel would do so in every step. A checkpoint holds rank 0's, so the tested model is the saved
        one; training does not read them.
        """
        if self.processes > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, 0)

    def broadcast(self, content: bytes) -> bytes:
        """The ``content`` passed by the process of rank 0."""
        box = [content]
        if self.processes > 1:
            distributed.broadcast_object_list(box)
        return box[0]

    def gather(self, content: bytes) -> list[bytes]:
        """The ``content`` passed by each process, by rank."""
        found = [content] * self.processes
        if self.processes > 1:
            distributed.all_gather_object(found, content)
        return found

    def check_alike(self, what: str, *arrays: np.ndarray) -> None:
        """Raise :class:`UserError` on every process unless all have the same ``arrays``, which are ``what``."""
        if self.processes > 1:
            from trainers.common import peers

            digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
            counts = " and ".join(str(len(array)) for array in arrays)
            peers.check_alike(self, what, f"{counts} (SHA-256 {digest[:12]})")

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of the chief's ``read()``, on every process: only the chief needs access to the folder."""
        box = [read() if self.chief or self.processes == 1 else None]
        if self.processes == 1:
            return box[0]
        distributed.broadcast_object_list(box)
        return box[0]

    # --- trainers.common.log.Devices --------------------------------------------------------------------

    def compilations(self) -> tuple[int, float]:
        """(0, 0.0): nothing is compiled in eager mode."""
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        """Versions of torch and of the related packages that are installed."""
        found = {"torch": torch.__version__}
        for name in ("torchvision", "torch_xla", "torch_tpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    # --- the rest ---------------------------------------------------------------------------------------

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace the chief process with ``torch.profiler`` into ``folder``/trace.json, which Perfetto opens."""
        if not self.chief:
            return lambda: None
        profiler = torch.profiler.profile()
        profiler.start()

        def stop() -> None:
            profiler.stop()
            profiler.export_chrome_trace(os.path.join(folder, "trace.json"))

        return stop

    def close(self, args: argparse.Namespace) -> None:
        """Leave the process group."""
        if self.processes > 1:
            distributed.barrier()
            distributed.destroy_process_group()


class Tracer:
    """Traces ``--profile`` steps after the first two, which compile and allocate, into ``--output-dir``."""

    def __init__(self, args: argparse.Namespace, device: Device, say: Callable[[str], None]) -> None:
        self._steps, self._device, self._say = args.profile, device, say
        self._folder = args.output_dir or args.logdir or "."
        self._done = 0
        self._open = contextlib.ExitStack()

    def step(self) -> None:
        """Call before each step."""
        if self._steps and self._done == 2:
            folder = self._open.enter_context(paths.local_folder(self._folder))
            self._open.callback(self._say, f"Trace written to {self._folder}")
            self._open.callback(self._device.profile(folder))
        elif self._done == 2 + self._steps:
            self.close()
        self._done += 1

    def close(self) -> None:
        """Write the trace, if it is not written yet."""
        self._open.close()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with ``weight_decay`` on matrices and kernels, none on biases and normalizations."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group to ``learning_rate``, times the group's ``lr_scale`` if it has
    one."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def weights_sha256(model: nn.Module) -> str:
    """The SHA-256, in hexadecimal, of the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
