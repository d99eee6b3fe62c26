"""CUDA and torch_tpu devices for the PyTorch trainers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from trainers.common.exits import USAGE, UserError
from trainers.torch._device import Device

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
        step: Callable[..., None],
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
            step(*self.inputs)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    def __call__(self, *inputs: torch.Tensor) -> None:
        """Run the step on ``inputs``."""
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
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
        """As on other devices, but on CUDA with learning rates on the device, where a captured step reads them."""
        optimizer = super().sgd(parameters, momentum)
        for group in optimizer.param_groups if self.kind == "cuda" else ():
            group["lr"] = torch.zeros((), device=self.torch_device)
        return optimizer

    def capture_graph(
        self, step: Callable[..., None], changed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., None]:
        """``step`` as a CUDA graph on a single CUDA device; under DistributedDataParallel, ``step`` itself."""
        return CapturedStep(step, changed, inputs) if self.kind == "cuda" and self.processes == 1 else step

    def _has_bf16(self) -> bool:
        return self.kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
