"""MNIST as a careful user trains it: the whole data set as one tensor on the device, a one-cycle rate, fused Adam.

No DataLoader, no dropout, nothing read from the device within an epoch. What remains open is the grid.

    python -m benchmarks.peers.mnist_tuned FOLDER DEVICE SEED ACCURACY SETTINGS
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from trainers.common import mnist_data


@dataclass(frozen=True)
class Settings:
    """One point of the grid: ``network`` is ``classic`` (two 3x3 convolutions) or ``lenet`` (two 5x5, each pooled)."""

    network: str
    batch: int
    rate: float
    epochs: int
    bf16: bool


GRID = tuple(
    Settings(*point)
    for point in itertools.product(("classic", "lenet"), (32, 64), (3e-3, 6e-3), (2, 3, 4), (False, True))
)


def network(name: str) -> nn.Sequential:
    """Logits of ``float[n, 1, 28, 28]``."""
    if name == "classic":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(datadir: str, device: str, seed: int, target: float, settings: Settings) -> list[tuple[float, float]]:
    """Seconds of training and accuracy in percent after each epoch, until a test reaches ``target``."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = (
        (((torch.tensor(pixels, device=device).float() / 255 - 0.1307) / 0.3081)[:, None],
         torch.tensor(numbers, device=device).long())
        for pixels, numbers in (mnist_data.load_mnist(datadir, split) for split in ("train", "test"))
    )  # fmt: skip
    model = network(settings.network).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = len(labels) // settings.batch
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=steps * settings.epochs)
    seconds, tested = 0.0, []
    for _ in range(settings.epochs):
        start = time.monotonic()
        order = torch.randperm(len(labels), device=device)
        for step in range(steps):
            chosen = order[step * settings.batch : (step + 1) * settings.batch]
            with torch.autocast(device, torch.bfloat16, enabled=settings.bf16):
                loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += time.monotonic() - start
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=settings.bf16):
            right = int((model(test_images).argmax(1) == test_labels).sum())
        tested.append((seconds, 100 * right / len(test_labels)))
        if tested[-1][1] >= target:
            break
    return tested


if __name__ == "__main__":
    folder, where, number, accuracy, settings = sys.argv[1:]
    print(json.dumps(train(folder, where, int(number), float(accuracy), Settings(**json.loads(settings)))))
