"""The seam between the PyTorch trainers and what they run on: CPU, CUDA, torch_tpu and torch_xla.

One object answers what differs: where tensors live, autocast, the end of a step, sums over processes, what goes
into a checkpoint. CPU and accelerators use one process per device (torchrun or :mod:`trainers.torch._launch`, DDP);
torch_xla uses one process per host and SPMD: a mesh over all devices, batches sharded along its axis "data".
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from trainers.common import cpu, order, rehearsal
from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError

PROCESS_TIMEOUT = datetime.timedelta(minutes=10)  # a rank that has been silent for so long is not coming back
_BACKENDS = {"cuda": "nccl", "tpu": "tpu_dist"}  # of collectives between accelerators; gloo has those of the CPU


class Device:
    """The CPU, and what all devices have in common; implements :class:`trainers.common.run.World`."""

    kind = "cpu"
    memory_format = torch.channels_last  # the one that convolutions are fastest in

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

    # --- the trainers' side ------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """``model`` on the device, in its memory format."""
        return model.to(self.torch_device, memory_format=self.memory_format)

    def parallel(self, model: nn.Module) -> nn.Module:
        """``model`` as to be called in a training step: gradients come out averaged over all replicas."""
        if self.processes == 1:
            return model
        ids = None if self.kind == "cpu" else [self.torch_device.index]
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def sgd(self, parameters: Iterable[Any], momentum: float) -> torch.optim.SGD:
        """Nesterov SGD over ``parameters`` (or groups of them); see :func:`set_learning_rate`.

        The momentum buffers exist from the start, so that step 0 is no special case.
        """
        optimizer = torch.optim.SGD(
            parameters, lr=0.0, momentum=momentum, nesterov=momentum > 0, fused=self.kind in ("cpu", "cuda")
        )
        for group in optimizer.param_groups:
            for parameter in group["params"] if momentum else ():
                # Made on the CPU: for XLA a zero made on the device would be part of the first step's graph only.
                zeros = torch.zeros_like(parameter, device="cpu")
                optimizer.state[parameter]["momentum_buffer"] = self.put(zeros)
        return optimizer

    def load_weights(self, model: nn.Module, weights: State) -> None:
        """Give ``model`` the tensors ``weights``."""
        model.load_state_dict(weights)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Give both what a checkpoint's ``state`` has under "model" and "optimizer", but for learning rates: every step
        sets its own, and a checkpoint of CUDA has tensors for them."""
        rates = [group["lr"] for group in optimizer.param_groups]
        self.load_weights(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def repeated(
        self, step: Callable[..., None], changed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., None]:
        """``step``, made cheap to call many times on tensors like ``inputs``; ``changed`` is all that it writes to."""
        return step

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 where it was chosen; needs no gradient scaling."""
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def put(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The same data on every device."""
        tensor = torch.as_tensor(array)
        if self.kind == "cuda":
            return tensor.pin_memory().to(self.torch_device, non_blocking=True)
        return tensor.to(self.torch_device)

    def share(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a global ``batch`` that this process has to provide."""
        return order.share(batch, self.rank, self.processes)

    def put_share(self, rows: np.ndarray) -> torch.Tensor:
        """What :meth:`share` chose, on this process's devices."""
        return self.put(rows)

    def put_batch(self, batch: np.ndarray) -> torch.Tensor:
        """This process's share of a global ``batch`` on its devices."""
        return self.put_share(self.share(batch))

    def end_step(self) -> None:
        """Called after each training or test step."""

    def sum(self, values: torch.Tensor) -> list[float]:
        """``values`` added up over all processes."""
        if self.processes > 1:
            distributed.all_reduce(values)
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def to_cpu(self, state: Any) -> Any:
        """``state`` (nested dicts and lists) with its tensors on the CPU."""
        if isinstance(state, torch.Tensor):
            return state.detach().cpu()
        if isinstance(state, dict):
            return {key: self.to_cpu(value) for key, value in state.items()}
        return [self.to_cpu(value) for value in state] if isinstance(state, (list, tuple)) else state

    # --- trainers.common.run.World -----------------------------------------------------------------------

    def agree(self, code: int) -> int:
        """The largest ``code`` of any process."""
        if self.processes == 1:
            return code
        codes = torch.tensor([code])
        distributed.all_reduce(codes, distributed.ReduceOp.MAX)
        return int(codes)

    def agreed_state(self, read: Callable[[], State | None]) -> State | None:
        """What the chief reads, on every process: only the chief needs to see the checkpoint folder."""
        box = [read() if self.chief or self.processes == 1 else None]
        if self.processes == 1:
            return box[0]
        distributed.broadcast_object_list(box)
        return box[0]

    def compilations(self) -> tuple[int, float]:
        """Nothing is compiled in eager mode."""
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        """Releases of torch and what is installed with it."""
        found = {"torch": torch.__version__}
        for name in ("torchvision", "torch_xla", "torch_tpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace the chief with torch's profiler into ``folder``/trace.json (open in Perfetto)."""
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


def kind_of(args: argparse.Namespace) -> str:
    """The kind of device ``args.device`` asks for; raises :class:`UserError` if it is not there."""
    has_xla = importlib.util.find_spec("torch_xla") is not None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = {"cpu", *(["xla"] if has_xla else []), *([accelerator.type] if accelerator else [])}
    kind = args.device
    if kind == "auto":
        kind = "xla" if has_xla else accelerator.type if accelerator else "cpu"
    if kind not in present:
        raise UserError(f"--device {kind}: not available here; there is {', '.join(sorted(present))}", USAGE)
    return kind  # type: ignore[no-any-return]


def find(args: argparse.Namespace) -> Device:
    """The device ``args.device`` asks for; raises :class:`UserError` if it is not there."""
    kind = kind_of(args)
    if kind == "xla":
        from trainers.torch._xla import Xla

        return Xla(args)
    if kind == "cpu":
        return Device(args)
    from trainers.torch._accelerator import Accelerator

    return Accelerator(args, kind)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with ``weight_decay`` on matrices and kernels, none on biases and batch norm."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a step of ``optimizer`` on ``model`` writes to: parameters, buffers and the optimizer's own tensors."""
    own = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *own]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set all groups to ``learning_rate``, times their own ``lr_scale`` if they have one."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def weights_sha256(model: nn.Module) -> str:
    """A hash of every bit of the parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
