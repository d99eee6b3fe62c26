"""The device interface of the PyTorch trainers, and its implementation for the CPU.

A :class:`Device` has everything that differs between devices: where tensors are placed, autocast, the end of a step,
sums over processes, and the contents of a checkpoint. CPUs and accelerators use one process per device with
DistributedDataParallel, started by torchrun or :mod:`trainers.torch._launch`; torch_xla uses one process per host and
SPMD: a mesh over all devices, with batches sharded along its axis "data". :mod:`trainers.torch._select` chooses one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from trainers.common import cpu, order, rehearsal
from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError

PROCESS_TIMEOUT = datetime.timedelta(minutes=10)  # for a collective: a rank that takes longer has failed
_BACKENDS = {"cuda": "nccl", "tpu": "tpu_dist"}  # for collectives between accelerators; the CPU's is gloo


class Device:
    """The CPU, and the base class of all devices; implements :class:`trainers.common.run.DistributedContext`."""

    kind = "cpu"
    memory_format = torch.channels_last  # the fastest for convolutions

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.processes = int(os.environ.get("WORLD_SIZE") or 1)
        self.replicas = self.processes
        self.torch_device = self._find()
        self._join()
        self.label = f"{self.torch_device}/{self.rank}"
        self.chief = self.rank == 0 and not rehearsal.follows()
        self.dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        if args.precision == "auto" and self._has_bf16():
            self.dtype = torch.bfloat16
        torch.manual_seed(args.seed)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _find(self) -> torch.device:
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        if local > 1 and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        return torch.device("cpu")

    def _join(self) -> None:
        if self.processes > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not os.environ.get(name)]
            if missing:
                raise UserError(f"WORLD_SIZE={self.processes} without {', '.join(missing)}: start with torchrun", USAGE)
            backend = "gloo" if self.kind == "cpu" else f"cpu:gloo,{self.kind}:{_BACKENDS[self.kind]}"
            try:
                distributed.init_process_group(backend, timeout=PROCESS_TIMEOUT)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"rank {self.rank} of {self.processes} cannot join the others: {reason}") from None

    def _has_bf16(self) -> bool:
        return cpu.has_bf16()

    # --- used by the trainers ----------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """``model`` on the device, in its memory format."""
        return model.to(self.torch_device, memory_format=self.memory_format)

    def parallel(self, model: nn.Module) -> nn.Module:
        """``model``, wrapped for training steps so that gradients are averaged over all replicas."""
        if self.processes == 1:
            return model
        ids = None if self.kind == "cpu" else [self.torch_device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def sgd(self, parameters: Iterable[Any], momentum: float) -> torch.optim.SGD:
        """Nesterov SGD over ``parameters`` (or groups of them); see :func:`set_learning_rate`.

        The momentum buffers exist from the start, so that step 0 is the same operation as every later step.
        """
        optimizer = torch.optim.SGD(
            parameters, lr=0.0, momentum=momentum, nesterov=momentum > 0, fused=self.kind in ("cpu", "cuda")
        )
        for group in optimizer.param_groups:
            for parameter in group["params"] if momentum else ():
                # On the CPU: under XLA, zeros created on the device would be part of the first step's graph only.
                zeros = torch.zeros_like(parameter, device="cpu")
                optimizer.state[parameter]["momentum_buffer"] = self.put(zeros)
        return optimizer

    def load_weights(self, model: nn.Module, weights: State) -> None:
        """Load the tensors ``weights`` into ``model``."""
        model.load_state_dict(weights)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load ``state["model"]`` and ``state["optimizer"]`` of a checkpoint, except for the learning rates.

        Every step sets its own learning rate, and a checkpoint saved on CUDA holds tensors for them.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        self.load_weights(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def capture_graph(
        self, step: Callable[..., None], changed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., None]:
        """A function that does what ``step`` does to tensors shaped like ``inputs``, at less cost per call if possible.

        ``changed`` lists all tensors that ``step`` writes to. Here: ``step`` itself.
        """
        return step

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to bfloat16 if that is the precision of the run. bfloat16 needs no gradient scaling."""
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def put(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """``array`` on the device; with several devices in one process, a copy on each."""
        tensor = torch.as_tensor(array)
        if self.kind == "cuda":
            return tensor.pin_memory().to(self.torch_device, non_blocking=True)
        return tensor.to(self.torch_device)

    def share(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a global ``batch`` that this process has to provide."""
        return order.share(batch, self.rank, self.processes)

    def put_share(self, rows: np.ndarray) -> torch.Tensor:
        """The ``rows`` that :meth:`share` returned, on this process's devices."""
        return self.put(rows)

    def put_batch(self, batch: np.ndarray) -> torch.Tensor:
        """This process's share of a global ``batch`` on its devices."""
        return self.put_share(self.share(batch))

    def end_step(self) -> None:
        """Called after each training or test step."""

    def sum(self, values: torch.Tensor) -> list[float]:
        """``values`` summed over all processes."""
        if self.processes > 1:
            distributed.all_reduce(values)
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def to_cpu(self, state: Any) -> Any:
        """``state`` (nested dictionaries and lists) with its tensors moved to the CPU."""
        if isinstance(state, torch.Tensor):
            return state.detach().cpu()
        if isinstance(state, dict):
            return {key: self.to_cpu(value) for key, value in state.items()}
        return [self.to_cpu(value) for value in state] if isinstance(state, (list, tuple)) else state

    # --- trainers.common.run.DistributedContext ----------------------------------------------------------

    def agree(self, code: int) -> int:
        """The largest ``code`` passed by any process."""
        if self.processes == 1:
            return code
        codes = torch.tensor([code])
        distributed.all_reduce(codes, distributed.ReduceOp.MAX)
        return int(codes)

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """The result of the chief's ``read()``, on every process: only the chief needs access to the folder."""
        box = [read() if self.chief or self.processes == 1 else None]
        if self.processes == 1:
            return box[0]
        distributed.broadcast_object_list(box)
        return box[0]

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


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with ``weight_decay`` on matrices and kernels, none on biases and batch norm."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that a step of ``optimizer`` on ``model`` writes to: parameters, buffers and optimizer state."""
    own = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *own]


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
