"""MNIST as a careful user trains it: the whole data set as one tensor on the device, a one-cycle rate, fused Adam.

No DataLoader, no dropout, and nothing is read from the device within an epoch. What remains open is the grid.

    python -m benchmarks.peers.mnist_tuned FOLDER DEVICE SEED ACCURACY SETTINGS

FOLDER has the four IDX files of MNIST; SETTINGS is a JSON object of network, batch, rate, epochs, bf16.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def read(folder: Path, split: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``float[n, 1, 28, 28]``, normalized, and ``int64[n]``: headers have 16 and 8 bytes (yann.lecun.com)."""
    pixels, numbers = ((folder / f"{split}-{name}-ubyte").read_bytes() for name in ("images-idx3", "labels-idx1"))
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8, offset=16).view(-1, 1, 28, 28).to(device)
    labels = torch.frombuffer(bytearray(numbers), dtype=torch.uint8, offset=8).to(device)
    return (images.float() / 255 - 0.1307) / 0.3081, labels.long()


def network(name: str) -> nn.Sequential:
    """Return a network for ``float[n, 1, 28, 28]``: two convolutions of 5x5, with batch norm (``small``) or wider."""
    if name == "small":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 5, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(folder: Path, device: str, seed: int, target: float, settings: dict[str, Any]) -> tuple[float, float]:
    """Return seconds until a test reaches ``target``, or until the last, and the accuracy of that test in percent."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = (read(folder, split, device) for split in ("train", "t10k"))
    model = network(settings["network"]).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch, steps = settings["batch"], len(labels) // settings["batch"]
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["rate"], fused=True)
    total = steps * settings["epochs"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings["rate"], total_steps=total)
    accuracy, start = 0.0, time.monotonic()
    for _ in range(settings["epochs"]):
        order = torch.randperm(len(labels), device=device)
        for chosen in order[: steps * batch].split(batch):
            with torch.autocast(device, torch.bfloat16, enabled=settings["bf16"]):
                loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=settings["bf16"]):
            accuracy = 100 * int((model(test_images).argmax(1) == test_labels).sum()) / len(test_labels)
        if accuracy >= target:
            break
        model.train()
    return time.monotonic() - start, accuracy


if __name__ == "__main__":
    where, device, number, goal, point = sys.argv[1:]
    print(json.dumps(train(Path(where), device, int(number), float(goal), json.loads(point))))
