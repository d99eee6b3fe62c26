"""The PyTorch trainers' seam to CUDA and to torch_tpu."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from trainers.common.exits import USAGE, UserError
from trainers.torch._device import Device

_WARM_UP = 3  # steps before recording, in which libraries choose kernels and allocate (torch's note on CUDA graphs)


class Recorded:
    """A step recorded as a CUDA graph, replayed as one launch: a small network is bound by launching kernels.

    The step must not wait for the device, and its tensors keep their shapes and places. Recording changes nothing:
    ``changed``, all that the step writes to, is put back.
    """

    def __init__(
        self,
        step: Callable[..., None],
        changed: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        api: Any = torch.cuda,
    ) -> None:
        """Record ``step`` on tensors like ``inputs``; ``api`` is where streams and graphs come from."""
        self.inputs = [tensor.clone() for tensor in inputs]
        before = [tensor.detach().clone() for tensor in changed]
        aside = api.Stream()
        aside.wait_stream(api.current_stream())
        with api.stream(aside):
            for _ in range(_WARM_UP):
                step(*self.inputs)
        api.current_stream().wait_stream(aside)
        self.graph = api.CUDAGraph()
        with api.graph(self.graph):
            step(*self.inputs)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    def __call__(self, *inputs: torch.Tensor) -> None:
        """The step on ``inputs``."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()


class Accelerator(Device):
    """CUDA, or torch_tpu through the same ``torch.accelerator`` interface; one process per device."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self.kind = kind
        super().__init__(args)
        if kind == "cuda":
            torch.backends.cudnn.benchmark = not args.deterministic
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def _find(self) -> torch.device:
        index = int(os.environ.get("LOCAL_RANK") or 0)
        count = torch.accelerator.device_count()
        if index >= count:
            raise UserError(f"LOCAL_RANK={index}, but this machine has {count} {self.kind} device(s)", USAGE)
        torch.accelerator.set_device_index(index)
        return torch.device(self.kind, index)

    def sgd(self, parameters: Iterable[Any], momentum: float) -> torch.optim.SGD:
        """As on other devices; on CUDA the learning rates live on the device, where a recorded step reads them."""
        optimizer = super().sgd(parameters, momentum)
        for group in optimizer.param_groups if self.kind == "cuda" else ():
            group["lr"] = torch.zeros((), device=self.torch_device)
        return optimizer

    def repeated(
        self, step: Callable[..., None], changed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., None]:
        """On one CUDA device, ``step`` as a CUDA graph. DistributedDataParallel stays eager."""
        return Recorded(step, changed, inputs) if self.kind == "cuda" and self.processes == 1 else step

    def _has_bf16(self) -> bool:
        return self.kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
