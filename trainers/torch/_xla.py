"""torch_xla devices for the PyTorch trainers. No other module calls torch_xla."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import distributed, nn

from trainers.common.checkpoints import State
from trainers.common.exits import USAGE, UserError


class Xla:
    """What torch_xla changes in :class:`trainers.torch._device.Device`, which is the other base of a device's class.

    One process per host, with the devices of all hosts in one SPMD mesh.
    """

    memory_format = torch.contiguous_format  # XLA chooses layouts itself

    def __init__(self, args: argparse.Namespace) -> None:
        self._cores = args.num_cores
        super().__init__(args, "xla")

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

    def _has_bf16(self) -> bool:
        return self._xr.device_type() == "TPU"  # also where torch_xla itself has chosen the device

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

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """As on other devices, with the optimizer's tensors as new device data too."""
        super().load(model, optimizer, state)
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
