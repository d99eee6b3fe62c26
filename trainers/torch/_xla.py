"""The PyTorch trainers' seam to torch_xla: every call of it is here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import distributed, nn

from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError
from trainers.torch._device import PROCESS_TIMEOUT, Device


class Xla(Device):
    """torch_xla: one process per host, all its devices (and all hosts') in one SPMD mesh."""

    kind = "xla"
    memory_format = torch.contiguous_format  # XLA picks the layout itself

    def __init__(self, args: argparse.Namespace) -> None:
        self._cores = args.num_cores
        super().__init__(args)

    def _find(self) -> torch.device:
        on_cpu = os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
        if on_cpu and self._cores:
            os.environ.setdefault("CPU_NUM_DEVICES", str(self._cores))
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA announces deprecations of its own at each compilation
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as xr

        self._xla, self._xm, self._metrics = torch_xla, xm, metrics
        cache = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
        if cache and not on_cpu:  # XLA's CPU backend does not serialise executables
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
        # torch_xla finds its own rendezvous; gloo is only for agreeing on stops and for reading checkpoints.
        if self.processes > 1:
            distributed.init_process_group("gloo", init_method="xla://", timeout=PROCESS_TIMEOUT)

    def _has_bf16(self) -> bool:
        return os.environ.get("PJRT_DEVICE", "").upper() == "TPU"

    def parallel(self, model: nn.Module) -> nn.Module:
        """``model`` itself: the partitioner adds the all-reduce of the gradients."""
        return model

    def place(self, model: nn.Module) -> nn.Module:
        """``model``, its weights the same on all devices."""
        model = super().place(model)
        for tensor in (*model.parameters(), *model.buffers()):
            self._replicate(tensor)
        return model

    def put(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The same data on every device."""
        tensor = super().put(array)
        self._replicate(tensor)
        return tensor

    def load_weights(self, model: nn.Module, weights: State) -> None:
        """Give ``model`` the tensors ``weights`` as data of the device: a copy onto what is there would be computed by
        the next step, whose graph would then be another than that of all other steps."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = self.put(weights[name])

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """As on other devices, and the optimizer's tensors as data of the device too."""
        super().load(model, optimizer, state)
        for entry in optimizer.state.values():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = self.put(value.cpu())

    def _replicate(self, tensor: torch.Tensor) -> None:
        """Say what is so by default: results carry a sharding, and without one on its inputs the first step would
        be another graph than all later ones."""
        if self._mesh is not None:
            self._xs.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())

    def put_share(self, rows: np.ndarray) -> torch.Tensor:
        """This host's ``rows``, sharded over its own devices; all hosts' rows are one global batch."""
        if self._mesh is None:
            return super().put(rows)
        tensor = torch.as_tensor(rows)
        spec = self._xs.ShardingSpec(self._mesh, ("data",) + (None,) * (tensor.dim() - 1), minibatch=True)
        return self._xm.send_cpu_data_to_device([tensor], self.torch_device, spec)[0]  # type: ignore[no-any-return]

    def end_step(self) -> None:
        """Cut the graph here and start it."""
        self._xla.sync()

    def sum(self, values: torch.Tensor) -> list[float]:
        """``values``: under SPMD they are sums over all devices already."""
        return values.cpu().tolist()  # type: ignore[no-any-return]

    def compilations(self) -> tuple[int, float]:
        """Graphs XLA compiled, and the seconds that took."""
        data = self._metrics.metric_data("CompileTime")
        return (int(data[0]), data[1] / 1e9) if data else (0, 0.0)

    def profile(self, folder: str) -> Callable[[], None]:
        """Trace with XLA's profiler into ``folder`` (TensorBoard's profile plugin)."""
        import torch_xla.debug.profiler as profiler

        profiler.start_trace(folder)
        return profiler.stop_trace  # type: ignore[no-any-return]

    def close(self, args: argparse.Namespace) -> None:
        """Print the metrics report if asked to."""
        if args.metrics_debug and self.chief:
            print(self._metrics.metrics_report())
