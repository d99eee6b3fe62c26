"""Devices and processes of the PyTorch trainers: which device, joining the processes, and what XLA needs besides.

CPUs, CUDA and torch_tpu use one process per device with DistributedDataParallel, started by the launcher, torchrun or
:func:`start`. torch_xla uses one process per host and SPMD, a mesh over all devices (:class:`Xla`). Some methods of
:class:`Device` do nothing but under XLA.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NoReturn

import numpy as np
import torch
from torch import distributed, nn

from trainers.common import exits, flags, order
from trainers.common.exits import USAGE, UserError
from trainers.common.run import Run, State, Test

# Compute capabilities of NVIDIA GPUs. From 7.0 on they multiply fp16 matrices in Tensor Cores:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities; what Triton compiles for:
# https://github.com/triton-lang/triton#compatibility
TENSOR_CORES = TRITON = (7, 0)
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
    count = processes_to_start(args)
    if count > 1:
        if kind_of(args) == "tpu":  # torch_tpu 0.2 needs these variables before the first process starts
            torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=count)  # type: ignore[attr-defined]
        return start(count)
    end_with_parent()
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
    return Xla(args, kind) if kind == "xla" else Device(args, kind)


class Device:
    """This process's device: a CPU, or an accelerator that ``torch.accelerator`` supports (CUDA, torch_tpu).

    Implements :class:`trainers.common.log.Devices` and :class:`trainers.common.order.Peers`.
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
            self.chief = self.chief and not exits.follows()
        self.precision = self._precision() if args.precision == "auto" else args.precision
        if self.precision == "fp16" and kind not in ("cpu", "cuda"):
            raise UserError(f"--precision fp16: for GPUs and CPUs; {kind} has bf16", USAGE)
        if kind == "cuda":
            torch.backends.cudnn.benchmark = not args.deterministic
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(args.seed % 2**63)
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
                # With its device, NCCL connects now rather than in the first collective, and barrier() knows it.
                device = self.device if self.kind == "cuda" else None
                distributed.init_process_group(backend, timeout=self.timeout, device_id=device)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"rank {self.rank} of {self.processes} cannot join the others: {reason}") from None

    def _precision(self) -> str:
        """Return the precision of ``--precision auto``: that in which the device multiplies fastest."""
        if self.kind == "cpu":
            return "bf16" if flags.cpu_has_bf16() else "fp32"
        if self.kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability(self.device) >= TENSOR_CORES else "fp32"

    def autocast(self) -> torch.autocast:
        """Return a context for the forward pass in this device's ``precision``."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.precision != "fp32")

    def test_of_export(self, test: Test) -> Test | None:
        """Return ``test`` in fp32, in which exported models compute; None if that is its precision."""

        def in_fp32(poll: Callable[[], None]) -> tuple[float, ...]:
            self.precision = "fp32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            return test(poll)

        return in_fp32 if self.precision != "fp32" else None

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return a scaler of the loss, without which small gradients are 0 in fp16; otherwise it does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

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

    def parallel(self, model: nn.Module) -> nn.Module:
        """Return ``model``, in DistributedDataParallel if there are several processes."""
        if self.processes == 1:
            return model
        ids = None if self.kind == "cpu" else [self.device.index]
        return nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True, **OWN_BUFFERS)

    def optimizer(self, args: argparse.Namespace, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of ``--optimizer`` for parameter ``groups``, with its state."""
        optimizer: torch.optim.Optimizer
        fused = self.kind in ("cpu", "cuda")
        if args.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, fused=fused, capturable=self.kind in ("cuda", "xla"))
        else:
            optimizer = torch.optim.SGD(groups, momentum=args.momentum, nesterov=args.momentum > 0, fused=fused)
        self.init_optimizer(optimizer)
        return optimizer

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

    def load(self, parts: dict[str, Any], state: State) -> None:
        """Load the ``state`` of a checkpoint into ``parts``: modules, optimizers and others, by their names in it.

        Learning rates stay: every step sets its own, and a checkpoint saved on CUDA holds tensors for them. Weights
        that the checkpoint lacks, such as averages, start as those of its model. Raises :class:`UserError` if it is of
        another model.
        """
        try:
            for name, part in parts.items():
                if isinstance(part, nn.Module):
                    self.load_weights(part, state.get(name, state["model"]))
                elif isinstance(part, torch.optim.Optimizer):
                    self.load_optimizer(part, state[name])
                elif name in state:
                    part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the checkpoint is of another model or optimizer ({reason[:120]}): use the flags it was made with, or"
                " another --checkpoint-dir",
                USAGE,
            ) from None

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load ``state`` into ``optimizer``, except for the learning rates."""
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def state(self, parts: dict[str, Any]) -> State:
        """Return the state of ``parts`` on the CPU, for a checkpoint."""
        states = {name: part.state_dict() for name, part in parts.items()}
        return self.to_cpu({name: state for name, state in states.items() if state})  # empty: an unused scaler

    @staticmethod
    def write(state: State, file: IO[bytes]) -> None:
        """Write the checkpoint ``state``, which holds tensors and primitives only."""
        torch.save(state, file)

    @staticmethod
    def read(file: IO[bytes]) -> State:
        """Read a checkpoint; loading one cannot execute code."""
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

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

    def broadcast(self, content: Any) -> Any:
        """Return the ``content`` passed by the process of rank 0."""
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
            digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
            counts = " and ".join(str(len(array)) for array in arrays)
            order.check_alike(self, what, f"{counts} (SHA-256 {digest[:12]})")

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of the chief's ``read()``, on every process: only the chief needs access to the folder."""
        return self.broadcast(read() if self.chief or self.processes == 1 else None)

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

    def digest(self, model: nn.Module) -> str:
        """Return :func:`weights_sha256` of the parameters and buffers of ``model``."""
        return weights_sha256(model.state_dict())

    def close(self, args: argparse.Namespace) -> None:
        """Leave the process group."""
        if self.processes > 1:
            distributed.barrier()
            distributed.destroy_process_group()


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


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256, in hexadecimal, of the names and bytes of ``weights``."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- torch_xla ------------------------------------------------------------------------------------------------------


class Xla(Device):
    """torch_xla's devices. No other code calls torch_xla.

    One process per host, with the devices of all hosts in one SPMD mesh.
    """

    memory_format = torch.contiguous_format  # XLA chooses layouts itself

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self._cores = args.num_cores
        super().__init__(args, kind)

    def _find(self, args: argparse.Namespace) -> torch.device:
        on_cpu = os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
        if on_cpu and self._cores:
            os.environ.setdefault("CPU_NUM_DEVICES", str(self._cores))
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA logs deprecation warnings at every compilation
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as xr

        self._xla, self._xm, self._xr, self._metrics = torch_xla, xm, xr, metrics
        cache = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
        if cache and not on_cpu:  # XLA's CPU backend cannot serialize executables
            xr.initialize_cache(cache)
        self._mesh = None
        if self._cores != 1 and (not on_cpu or int(os.environ.get("CPU_NUM_DEVICES") or 1) > 1):
            import torch_xla.distributed.spmd as xs

            xr.use_spmd()
            self._xs = xs
            self.replicas = xr.global_runtime_device_count()
            self._mesh = xs.Mesh(np.arange(self.replicas), (self.replicas,), ("data",))
        else:
            self.replicas = 1
        if self._cores not in (0, self.replicas):
            raise UserError(f"--num-cores {self._cores}: must be 0, 1 or all {self.replicas} XLA devices here", USAGE)
        self.rank, self.processes = xr.process_index(), xr.process_count()
        return torch_xla.device() if hasattr(torch_xla, "device") else xm.xla_device()

    def _join(self) -> None:
        # torch_xla has its own rendezvous; gloo only serves maximum(), gather() and the like.
        if self.processes > 1:
            distributed.init_process_group("gloo", init_method="xla://", timeout=self.timeout)

    def _precision(self) -> str:
        return "bf16" if self._xr.device_type() == "TPU" else "fp32"  # also where torch_xla has chosen the device

    def place(self, model: nn.Module) -> nn.Module:
        """``model`` on the devices, with its weights replicated."""
        model = super().place(model)
        for tensor in (*model.parameters(), *model.buffers()):
            self._replicate(tensor)
        return model

    def to_device(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """``array``, replicated on all devices."""
        tensor = super().to_device(array)
        self._replicate(tensor)
        return tensor

    def load_weights(self, model: nn.Module, weights: State) -> None:
        """Load the tensors ``weights`` into ``model`` as new device data.

        Copying into the existing tensors would become part of the next step's graph, which would then be compiled
        separately.
        """
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.shape != weights[name].shape:
                raise ValueError(f"{name} has another shape")
            tensor.data = self.to_device(weights[name])

    def parallel(self, model: nn.Module) -> nn.Module:
        """Return ``model``: the compiler averages the gradients over the mesh."""
        return model

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """As on other devices, with the optimizer's tensors as new device data too."""
        super().load_optimizer(optimizer, state)
        for entry in optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = self.to_device(value.cpu())

    def _replicate(self, tensor: torch.Tensor) -> None:
        """Mark ``tensor`` as replicated, which is the default.

        Results carry a sharding. If the first step's inputs had none, its graph would differ from that of later steps.
        """
        if self._mesh is not None:
            self._xs.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())

    def put_share(self, rows: np.ndarray) -> torch.Tensor:
        """This host's ``rows``, sharded over its devices; the rows of all hosts form the global batch."""
        if self._mesh is None:
            return super().to_device(rows)
        tensor = torch.as_tensor(rows)
        spec = self._xs.ShardingSpec(self._mesh, ("data",) + (None,) * (tensor.dim() - 1), minibatch=True)
        return self._xm.send_cpu_data_to_device([tensor], self.device, spec)[0]  # type: ignore[no-any-return]

    def end_step(self) -> None:
        """End the graph of this step and start its execution."""
        self._xla.sync()

    def seed_step(self, step: int) -> None:
        """Seed the random numbers of the devices with (seed, ``step``)."""
        digest = hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=8).digest()
        self._xla.manual_seed(int.from_bytes(digest, "little") >> 1)

    def sum(self, values: torch.Tensor) -> list[float]:
        """``values`` on the host: under SPMD they already are sums over all devices."""
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def mean(self, value: torch.Tensor) -> float:
        """``value`` on the host: under SPMD it already is the mean over all devices."""
        return float(value.cpu())

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Nothing: under SPMD all devices have the same buffers."""

    def compilations(self) -> tuple[int, float]:
        """The number of graphs that XLA compiled, and the seconds it took."""
        data = self._metrics.metric_data("CompileTime")
        return (int(data[0]), data[1] / 1e9) if data else (0, 0.0)

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace with XLA's profiler into ``folder``, for TensorBoard's profile plugin."""
        import torch_xla.debug.profiler as profiler

        profiler.start_trace(folder)
        return profiler.stop_trace  # type: ignore[no-any-return]

    def close(self, args: argparse.Namespace) -> None:
        """Print torch_xla's metrics report with ``--metrics-debug``."""
        if args.metrics_debug and self.chief:
            print(self._metrics.metrics_report())


# --- several processes without torchrun -----------------------------------------------------------------------------

# torchrun exits with 1 whatever the exit codes of its workers are. Here the trainer's own exit code is kept, so that a
# scheduler restarts a preempted run but not a diverged one.

_PARENT = "TRAINYARD_PARENT"  # the environment variable with the process ID of the process that starts the others
_PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
_GRACE = 30.0  # seconds that the other processes have to save and exit after one has failed


def start(count: int) -> int:
    """Run this process's command line in ``count`` processes; returns the exit code of the first that fails, else 0.

    SIGTERM, SIGHUP and SIGUSR1 are forwarded. SIGINT is ignored: a terminal sends it to all processes of the group.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                       timeout=datetime.timedelta(minutes=5))  # fmt: skip
    # The variables that torchrun sets. Sharing the agent's store avoids choosing a free port in advance.
    shared = {_PARENT: str(os.getpid()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
              "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
              "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}  # fmt: skip
    words = [sys.executable, *sys.orig_argv[1:]]
    running: dict[int, subprocess.Popen[bytes]] = {}

    def forward(number: int, frame: object) -> None:
        for child in running.values():
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[rank] = subprocess.Popen(words, env={**os.environ, **shared, **own})
    return _wait(running)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process, which :func:`start` started, when the process that did so ends.

    Without it, ranks would train on after ``kill -9`` of their parent, beside those of the command that resumes the
    run. No effect in other processes, such as those of torchrun.
    """
    parent = os.environ.get(_PARENT)
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has ended before
            raise exits.UserError("the process that started this one has ended", exits.PREEMPTED)


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """The exit code of the first process that fails; others are killed ``_GRACE`` seconds later."""
    code, deadline = 0, float("inf")
    while running:
        for rank, child in list(running.items()):
            ended = child.poll()
            if ended is None:
                continue
            del running[rank]
            if ended and not code:
                code, deadline = (ended if ended > 0 else 128 - ended), time.monotonic() + _GRACE
                if ended < 0:
                    print(f"rank {rank} was killed by {signal.Signals(-ended).name}", file=sys.stderr)
        if time.monotonic() > deadline:
            for child in running.values():
                child.kill()
        time.sleep(0.05)
    return code


# --- CUDA graphs and torch.compile ----------------------------------------------------------------------------------

# Steps before the capture, in which libraries choose kernels and allocate memory:
# https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
_WARM_UP = 3


class CapturedStep:
    """A step captured as a CUDA graph and replayed as one launch: launching kernels is what limits a small network.

    The step must not synchronize with the device, and its tensors keep their shapes and addresses. The capture has no
    effect on the training: the tensors ``changed``, to which the step writes, are restored afterwards.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        changed: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        api: Any = torch.cuda,
    ) -> None:
        """Capture ``step`` on tensors shaped like ``inputs``; ``api`` has ``torch.cuda``'s streams and graphs."""
        self.inputs = [tensor.clone() for tensor in inputs]
        before = [tensor.detach().clone() for tensor in changed]
        side_stream = api.Stream()
        side_stream.wait_stream(api.current_stream())
        with api.stream(side_stream):
            for _ in range(_WARM_UP):
                step(*self.inputs)
        api.current_stream().wait_stream(side_stream)
        self.graph = api.CUDAGraph()
        with api.graph(self.graph):
            self.output = step(*self.inputs)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the step on ``inputs``; returns what it returned when it was captured, with its new values."""
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output


def changed_by_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that a step of ``optimizer`` on ``model`` writes to: parameters, buffers and optimizer state."""
    own = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *own]


class EagerIfCompilingFails:
    """A step whose forward pass is compiled, which runs without torch.compile from the first failure on.

    Compiling fails where there is no C compiler, for example. The forward pass and its gradient are compiled when the
    first batch of each shape arrives, and a failure changes nothing but the averages of batch norm.
    """

    def __init__(self, step: Callable[..., torch.Tensor], model: nn.Module, run: Run) -> None:
        """``step`` is a step of ``run`` that trains ``model``."""
        self.step, self.buffers, self.run = step, list(model.buffers()), run
        self.shapes: set[torch.Size] = set()
        self.failed = False

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run the step on ``batch``."""
        if self.failed or batch[0].shape in self.shapes:
            return self.step(*batch)
        before = [buffer.clone() for buffer in self.buffers]
        try:
            loss = self.step(*batch)
            self.shapes.add(batch[0].shape)
            return loss
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of Dynamo, Inductor, Triton and compilers; an error of the step comes again below
            lines = str(error).strip().splitlines() or [""]
            self.run.log.say(f"torch.compile failed ({type(error).__name__}: {lines[0][:200]}): training without it")
        self.failed = True
        torch.compiler.set_stance("force_eager")
        with torch.no_grad():
            for buffer, value in zip(self.buffers, before, strict=True):
                buffer.copy_(value)
        self.run.device.seed_step(self.run.step)  # which the attempt has changed
        return self.step(*batch)


def can_capture(device: Device) -> bool:
    """Return whether a step on ``device`` can be a CUDA graph: without collectives and the scaler of fp16."""
    return device.kind == "cuda" and device.processes == 1 and device.precision != "fp16"


def compiled(model: nn.Module, when: str, device: Device) -> nn.Module:
    """Return ``model``, compiled as ``--compile`` (``when``) says; itself where Triton does not support the GPU."""
    if when == "off" or (when == "auto" and device.kind != "cuda"):
        return model
    if device.kind == "cuda" and torch.cuda.get_device_capability(device.device) < TRITON:
        if device.chief:
            print(
                f"Triton needs compute capability {TRITON[0]}.{TRITON[1]}: training without torch.compile", flush=True
            )
        return model
    # A graph for each size of --progressive: one for all would be slower.
    return torch.compile(model, dynamic=False)  # type: ignore[no-any-return]
