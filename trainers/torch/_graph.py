"""A training step as a CUDA graph: launching kernels is what limits a small network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Steps before the capture, in which libraries choose kernels and allocate memory:
# https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
_WARM_UP = 3


class CapturedStep:
    """A step captured as a CUDA graph and replayed as one launch.

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


def changed_by_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that a step of ``optimizer`` on ``model`` writes to: parameters, buffers and optimizer state."""
    own = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *own]
