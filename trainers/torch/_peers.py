"""Find the device of a process, and join the others of its run, which torchrun or the launcher has started."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trainers.common import job
from trainers.common.files import USAGE, UserError

BACKENDS = {"cuda": "nccl", "tpu": "tpu_dist"}  # of collectives between accelerators; CPUs have gloo
# PyTorch's checkpoints warn about objects, which need no fsync, and about a single process, which needs no group.
warnings.filterwarnings(
    "ignore", "fsync not supported|torch.distributed is (disabled|unavailable)|TypedStorage is deprecated"
)
# Parts of the errors that gloo and NCCL raise after another process has ended.
LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
        "Timed out waiting", "NCCL communicator was aborted", "remote process exited")  # fmt: skip


class Peers:
    """Join the processes of a run, each on one CPU or accelerator, as :class:`trainers.common.job.Peers`."""

    def __init__(self, args: argparse.Namespace, timeout: float = 600.0, scaled: bool = True) -> None:
        """Select the device and join the others; a collective takes ``timeout`` seconds at most.

        Without gradients that are ``scaled``, --precision auto is fp32 where it would be fp16. Raises
        :class:`UserError` for a device that is not there, and if the others cannot be joined.
        """
        self.rank, self.size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        self.processes = self.size
        if args.num_cores > self.size:
            raise UserError(f"--num-cores {args.num_cores}: `launch` starts processes; without it, start with torchrun"
                            f" --nproc-per-node {args.num_cores}", USAGE)  # fmt: skip
        self.device = find_device(args.device, self.size)
        kind, self.label = self.device.type, f"{self.device}/{self.rank}"
        if args.precision == "auto":
            fastest = fastest_precision(self.device)
            args.precision = "fp32" if fastest == "fp16" and not scaled else fastest
        if (precision := args.precision) == "fp16" and kind not in ("cpu", "cuda"):
            raise UserError(f"--precision fp16: for GPUs and CPUs; {kind} has bf16", USAGE)
        self.autocast = torch.autocast(kind, torch.float16 if precision == "fp16" else torch.bfloat16,
                                       enabled=precision != "fp32")  # fmt: skip
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")  # else small gradients would be 0
        if kind == "cuda":
            torch.backends.cudnn.benchmark = not args.deterministic
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(args.seed)
        if self.size == 1:
            return
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not os.environ.get(name)]:
            raise UserError(f"WORLD_SIZE={self.size} without {', '.join(missing)}: start with torchrun", USAGE)
        try:  # with its device, NCCL connects now rather than in the first collective
            dist.init_process_group("gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{BACKENDS[kind]}",
                                    timeout=datetime.timedelta(seconds=timeout),
                                    device_id=self.device if kind == "cuda" else None)  # fmt: skip
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"rank {self.rank} of {self.size} cannot join the others: {reason}") from None

    def seed(self, *key: int) -> None:
        """Seed random numbers by ``key`` and rank: a resumed run draws what it would have drawn."""
        # A hash, because PyTorch's generator for the CPU takes the last 32 bits of a seed only.
        digest = hashlib.blake2b(" ".join(map(str, (*key, self.rank))).encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)

    def put(self, array: np.ndarray) -> torch.Tensor:
        """Return an ``array`` on the device; from pinned memory, so that the copy is not waited for."""
        tensor = torch.as_tensor(array)
        return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(self.device, non_blocking=True)

    def sum(self, values: torch.Tensor) -> list[float]:
        """Return ``values`` summed over all processes."""
        values = values.detach().clone()
        if self.size > 1:
            dist.all_reduce(values)
        return values.tolist()  # type: ignore[no-any-return]

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean of ``value`` over all processes."""
        return self.sum(value.reshape(1))[0] / self.size

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes rank 0's averages of batch norm, to test and to save; each has its own."""
        for buffer in model.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)

    def export_in_fp32(self, args: argparse.Namespace, test: Callable[[], dict[str, float]], of: job.Job) -> None:
        """State the accuracy of an exported model, which computes in fp32, if that was not the precision of tests."""
        if args.precision != "fp32":
            self.autocast = torch.autocast(self.device.type, enabled=False)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            of.more["exported_accuracy"] = test()["accuracy"]
            of.say(f"Exported model: test accuracy {of.more['exported_accuracy']:.2f} % in fp32")

    def maximum(self, values: list[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()  # type: ignore[no-any-return]

    def gather(self, content: Any) -> list[Any]:
        found = [content] * self.size
        if self.size > 1:
            dist.all_gather_object(found, content)
        return found

    def broadcast(self, content: Any) -> Any:
        box = [content]
        if self.size > 1:
            dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def not_finite(self, model: nn.Module) -> str:
        named = [(name, getattr(value, "to_local", lambda value=value: value)()) for name, value in
                 (*model.named_parameters(), *model.named_buffers())]  # fmt: skip
        with torch.no_grad():  # a constant, such as a mask, may be infinite
            wrong = [value.isnan().any() if not value.requires_grad else ~value.isfinite().all() for _, value in named]
        return next((name for (name, _), bad in zip(named, torch.stack(wrong).tolist(), strict=True) if bad), "")

    def digest(self, model: nn.Module) -> str:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return weights_sha256(state)

    def profile(self, folder: str) -> Callable[[], None]:
        profiler = torch.profiler.profile()
        profiler.start()
        path = os.path.join(folder, "trace.json" if self.rank == 0 else f"trace-{self.rank}.json")
        return lambda: (profiler.stop(), profiler.export_chrome_trace(path))[0]

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__}
        for name in ("torchvision", "torch_xla", "torch_tpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found


def find_device(name: str, processes: int) -> torch.device:
    """Return the device of ``--device``; raises :class:`UserError` if it is not there."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (accelerator.type if accelerator else "cpu") if name == "auto" else name
    if kind == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        if local > 1 and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        return torch.device("cpu")
    if not accelerator or accelerator.type != kind:
        present = f"cpu, {accelerator.type}" if accelerator else "cpu"
        raise UserError(f"--device {kind}: not available here; available: {present}", USAGE)
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if kind == "tpu" and len(hosts) > 1 and not os.environ.get("RANK"):
        raise UserError(f"this is one of {len(hosts)} TPU hosts (TPU_WORKER_HOSTNAMES), but RANK is unset: every host"
                        " would train alone; start the trainer with `launch` on each of them", USAGE)  # fmt: skip
    if kind == "tpu" and processes > 1:  # torch_tpu binds each process to one chip, which is often index 0
        return torch.device("tpu", torch.accelerator.current_device_index())
    index, count = int(os.environ.get("LOCAL_RANK") or 0), torch.accelerator.device_count()
    if index >= count:
        raise UserError(f"LOCAL_RANK={index}, but this machine has {count} {kind} device(s)", USAGE)
    if count > 1 and processes == 1:
        print(
            f"note: 1 of {count} {kind} devices is used: `launch` or torchrun start a process for each", file=sys.stderr
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def fastest_precision(device: torch.device) -> str:
    """Return the precision in which a device multiplies fastest; fp16 on GPUs that have Tensor Cores but no bf16.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            features = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
            return "bf16" if "avx512_bf16" in features or "amx_bf16" in features else "fp32"
        return "fp32"
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "fp32"


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the names and bytes of ``weights``, which shows whether two runs have the same bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(
            name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def learning_rate(step: int, total: int, warmup: float, least: float = 0.0) -> float:
    """Return the part of the peak in the middle of ``step``: up over ``warmup`` steps, then a cosine to ``least``."""
    if step + 0.5 < warmup:
        return (step + 0.5) / warmup
    progress = (min(step, total - 1) + 0.5 - warmup) / max(total - warmup, 1)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))


def run(main: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``main(args)``, see :func:`trainers.common.job.run`; says which rank has failed, and that one is lost."""
    rank = os.environ.get("RANK") or "0"

    def guarded(args: argparse.Namespace) -> int:
        try:
            return main(args)
        except UserError as error:
            raise (error if rank == "0" else UserError(f"rank {rank}: {error}", error.code)) from None
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            if any(sign in str(error) for sign in LOST):
                raise UserError(f"rank {rank} lost another process of the run, whose log says why ({reason[:120]});"
                                " checkpoints are kept: run the same command again to resume") from None  # fmt: skip
            if isinstance(error, torch.OutOfMemoryError):
                raise UserError(f"rank {rank}: {reason[:200]}: lower --batch-size") from None
            raise

    job.run(guarded, args, name)
