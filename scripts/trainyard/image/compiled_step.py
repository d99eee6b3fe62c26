"""Compile a training step with torch.compile on the CPU, and compare it with the same step without.

The smoke test copies this file into a container of the image. It ends with status 0 if both steps end with the same
weights; its last line is a JSON object with the seconds of the first compiled step. Python 3.8 to 3.14.
"""

from __future__ import annotations

import json
import time
from typing import Any

#: Greatest difference of a weight between the two, which add up in another order.
TOLERANCE = 1e-4


def network() -> Any:
    """Return a small network with a convolution, a normalization and an attention, the same at each call."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.LayerNorm(8)
            self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.norm(nn.functional.gelu(self.image(images)).flatten(2).transpose(1, 2))
            query, key, value = self.mixed(tokens).chunk(3, dim=-1)
            return self.out(nn.functional.scaled_dot_product_attention(query, key, value).mean(1))

    torch.manual_seed(0)
    return Net()


def train(compiled: bool) -> tuple[list[Any], float]:
    """Train three steps; the weights, and the seconds of the first step."""
    import torch
    from torch import nn

    net, images, classes = network(), torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    forward, update = net, optimizer.step
    if compiled:
        forward, update = torch.compile(net, fullgraph=True), torch.compile(optimizer.step)
    first = 0.0
    for step in range(3):
        started = time.monotonic()
        nn.functional.cross_entropy(forward(images), classes).backward()
        update()
        optimizer.zero_grad()
        first = first or time.monotonic() - started if step == 0 else first
    return [weights.detach() for weights in net.parameters()], first


def main() -> None:
    """Compare the two, and print the result."""
    import torch

    torch.manual_seed(1)
    state = torch.get_rng_state()
    eager, _ = train(False)
    torch.set_rng_state(state)
    compiled, seconds = train(True)
    difference = max(float((before - after).abs().max()) for before, after in zip(eager, compiled))  # noqa: B905
    if not difference < TOLERANCE:
        raise SystemExit(f"a compiled training step gives other weights than the same step without: by {difference:g}")
    from torch._inductor import metrics

    if not metrics.generated_kernel_count:
        raise SystemExit("torch.compile compiled nothing: the step ran as it is")
    print(json.dumps({"compile_seconds": round(seconds, 1), "kernels": metrics.generated_kernel_count}))


if __name__ == "__main__":
    main()
