"""Make one SPMD mesh of torch_xla of the devices of all hosts, and write pytorch/xla's log lines."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from torch import nn

from trainers.common.files import USAGE, UserError
from trainers.common.job import Job
from trainers.torch._peers import Peers


class Mesh(Peers):
    """Join the hosts of a run, with ``replicas`` devices: weights are on each, batches are spread over them.

    Results carry a sharding. If what a first step reads had none, its graph would differ from the one of later steps,
    and be compiled separately; so would one that starts by copying into tensors. So all tensors are new device data.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        on_cpu = os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
        if on_cpu and args.num_cores:
            os.environ.setdefault("CPU_NUM_DEVICES", str(args.num_cores))
        cache = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
        if cache and not on_cpu:  # XLA's CPU backend cannot serialize executables
            xr.initialize_cache(cache)
        self._mesh, self.replicas = None, 1
        if args.num_cores != 1 and (not on_cpu or int(os.environ.get("CPU_NUM_DEVICES") or 1) > 1):
            import torch_xla.distributed.spmd as xs

            xr.use_spmd()
            self._xs, self.replicas = xs, xr.global_runtime_device_count()
            self._mesh = xs.Mesh(np.arange(self.replicas), (self.replicas,), ("data",))
        if args.num_cores not in (0, self.replicas):
            raise UserError(
                f"--num-cores {args.num_cores}: must be 0, 1 or all {self.replicas} XLA devices here", USAGE
            )
        self.rank, self.size = xr.process_index(), xr.process_count()
        self.processes = self.size
        if self.size > 1:  # torch_xla has its own rendezvous; gloo only serves maximum(), gather() and the like
            dist.init_process_group("gloo", init_method="xla://")
        self.device = torch_xla.device() if hasattr(torch_xla, "device") else xm.xla_device()
        self.label = f"{self.device}/{self.rank}"
        if args.precision == "fp16":
            raise UserError("--precision fp16: for GPUs and CPUs; xla has bf16", USAGE)
        fastest = "bf16" if xr.device_type() == "TPU" else "fp32"
        args.precision = fastest if args.precision == "auto" else args.precision
        self.autocast = torch.autocast("xla", torch.bfloat16, enabled=args.precision != "fp32")
        torch.manual_seed(args.seed)

    def _replicated(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._mesh is not None:
            self._xs.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())
        return tensor

    def put(self, array: Any) -> torch.Tensor:
        """Return an ``array``, a copy on each device.

        Not by ``to()``: that makes a single 0 or 1 a constant of the first graph, and the next step needs another one.
        https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/csrc/tensor.cpp (GetIrValueForTensor)
        """
        return self._replicated(xm.send_cpu_data_to_device([torch.as_tensor(array)], self.device)[0])

    def put_batch(self, batch: np.ndarray, whole: bool = True) -> torch.Tensor:
        """Return a global ``batch``, spread over the devices: each host puts its rows of it.

        If it is not ``whole``, it has this host's rows only.
        """
        count = len(batch) // self.size if whole else len(batch)
        rows = torch.as_tensor(batch[self.rank * count :][:count] if whole else batch)
        if self._mesh is None:
            return rows.to(self.device)
        spec = self._xs.ShardingSpec(self._mesh, ("data",) + (None,) * (rows.dim() - 1), minibatch=True)
        return xm.send_cpu_data_to_device([rows], self.device, spec)[0]  # type: ignore[no-any-return]

    def place(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Return ``model`` on the devices, its weights replicated; and the state of ``optimizer``, or zeros for it."""
        if optimizer is None:

            @cache  # model.to() copies a shared weight for each module that uses it
            def moved(tensor: torch.Tensor) -> torch.Tensor:
                data = self.put(tensor.detach())
                return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data

            for module in model.modules():
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    setattr(module, name, moved(tensor))
            return model
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                zeros, entry = torch.zeros_like(parameter, device="cpu"), optimizer.state[parameter]
                if not entry and isinstance(optimizer, torch.optim.AdamW):
                    entry |= {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                elif not entry and group.get("momentum"):
                    entry["momentum_buffer"] = zeros
                entry |= {name: self.put(value.cpu()) for name, value in entry.items() if torch.is_tensor(value)}
        return model

    def share_buffers(self, model: nn.Module) -> None:
        """Do nothing: under SPMD all devices have the same."""

    def export_in_fp32(self, args: argparse.Namespace, test: Any, of: Any) -> None:
        """Do nothing: the graph would be compiled again."""

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what a checkpoint has, on the CPU."""
        return on_cpu({"model": model.state_dict(), "optimizer": optimizer.state_dict()})  # type: ignore[no-any-return]

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state, as new device data."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.shape != state["model"][name].shape:
                raise ValueError(f"{name} has another shape")
            tensor.data = self.put(state["model"][name])
        optimizer.load_state_dict(state["optimizer"])
        self.place(model, optimizer)

    def seed(self, *key: int) -> None:
        """Seed the random numbers of the devices by ``key``."""
        digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
        torch_xla.manual_seed(int.from_bytes(digest, "little") >> 1)

    def sum(self, values: torch.Tensor) -> list[float]:
        """Return ``values``, which already are sums over all devices under SPMD."""
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def mean(self, value: torch.Tensor) -> float:
        """Return ``value``, which already is the mean over all devices under SPMD."""
        return float(value.cpu())

    def wait(self) -> None:
        xm.wait_device_ops()

    def not_finite(self, model: nn.Module) -> str:
        parameters = {name for name, _ in model.named_parameters()}
        for name, value in on_cpu(model.state_dict()).items():
            if value.isnan().any() or (name in parameters and value.isinf().any()):
                return str(name)
        return ""

    def digest(self, model: nn.Module) -> str:
        from trainers.torch._peers import weights_sha256

        return weights_sha256(on_cpu(model.state_dict()))

    def profile(self, folder: str) -> Callable[[], None]:
        import torch_xla.debug.profiler as profiler

        profiler.start_trace(folder)
        return profiler.stop_trace  # type: ignore[no-any-return]


def on_cpu(state: Any) -> Any:
    """Return ``state``, nested dictionaries and lists, with its tensors on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, (list, tuple)) else state


class XlaJob(Job):
    """Run a job with the log lines of pytorch/xla, so that its log analyzers work.

    Rate is 0.6 times the images per second of a device since the last line plus 0.4 times the previous Rate, or what
    RATE_TRACKER_SMOOTHING says in place of the 0.4; GlobalRate is all images by the whole time.
    https://github.com/pytorch/xla/blob/master/torch_xla/core/xla_model.py and
    https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py
    """

    peers: Mesh
    rate: float | None = None

    def line(self, kind: str, step: int, numbers: dict[str, float]) -> str:
        """Return the line of the log about training or a test; of language models, those of :class:`Job`."""
        if self.unit != "images":
            return super().line(kind, step, numbers)
        now, epoch = time.strftime("%H:%M:%S"), (step - 1) // self.every + 1
        if kind == "test":
            accuracy = f"Accuracy={numbers['accuracy']:.2f}"
            return (f"| Test Device={self.peers.label} Step=0 Epoch={epoch} {accuracy} Time={now}\n"
                    f"Epoch {epoch} test end {now}, {accuracy}")  # fmt: skip
        rate = numbers["images_per_second"] / self.peers.replicas
        kept = float(os.environ.get("RATE_TRACKER_SMOOTHING") or 0.4) if self.rate is not None else 0.0
        self.rate = (1 - kept) * rate + kept * (self.rate or 0.0)
        images = (step - self._first) * self.count / self.peers.replicas
        whole = images / max(time.monotonic() - self._began, 1e-9)
        return (f"| Training Device={self.peers.label} Epoch={epoch} Step={(step - 1) % self.every} "
                f"Loss={numbers['loss']:.5f} Rate={self.rate:.2f} GlobalRate={whole:.2f} Time={now}")  # fmt: skip

    def finish(self, *given: Any) -> int:
        """End as :meth:`Job.finish`; the summary says how many graphs XLA compiled, and in how many seconds."""
        data = metrics.metric_data("CompileTime")
        self.more |= {"replicas": self.peers.replicas, "compile_count": int(data[0]) if data else 0,
                      "compile_seconds": data[1] / 1e9 if data else 0.0}  # fmt: skip
        if self.args.metrics_debug and self.chief:
            print(metrics.metrics_report())
        return super().finish(*given)
