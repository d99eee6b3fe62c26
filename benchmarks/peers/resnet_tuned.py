"""ResNet as a careful user trains it: the plain loop, and what PyTorch's performance tuning guide adds to it.

bfloat16 autocast, channels_last and fused SGD, eagerly or with torch.compile; nothing is read from the device within a
step: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html

    python -m benchmarks.peers.resnet_tuned DEVICE BATCH STEPS WARM_UP SETTINGS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchvision import models


@dataclass(frozen=True)
class Settings:
    """One point of the grid."""

    bf16: bool
    channels_last: bool
    compiled: bool


def images_per_second(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: str, settings: Settings, warm_up: int
) -> float:
    """The rate over ``batches`` of ``float[n, 3, side, side]`` and labels, but for the first ``warm_up``.

    Compiling takes place in the first batch. torch.compile raises an error where there is no C++ compiler.
    """
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    model = models.resnet50(weights=None).to(device, memory_format=layout)  # type: ignore[call-overload]
    forward = torch.compile(model, dynamic=False) if settings.compiled else model
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    model.train()
    count, start = 0, time.monotonic()
    for number, (images, labels) in enumerate(batches):
        if number == warm_up:
            _wait(device)
            count, start = 0, time.monotonic()
        images = images.to(device, memory_format=layout, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=bool(settings.bf16)):
            loss = criterion(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += len(images)
    _wait(device)
    return count / (time.monotonic() - start)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def batches(device: str, batch: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random float images of 224 pixels and labels, four different batches by turns."""
    different = [
        (torch.randn(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last),
         torch.randint(0, 1000, (batch,))) for _ in range(4)
    ]  # fmt: skip
    if device == "cuda":  # from where a copy does not wait
        different = [(images.pin_memory(), labels.pin_memory()) for images, labels in different]
    return [different[number % 4] for number in range(count)]


if __name__ == "__main__":
    where, size, steps, first, given = sys.argv[1:]
    data = batches(where, int(size), int(steps))
    print(json.dumps({"images_per_second": images_per_second(data, where, Settings(**json.loads(given)), int(first))}))
