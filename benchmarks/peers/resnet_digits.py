"""ResNet-18 on small images as a careful user trains it: decoded once into memory, shifted at random, one-cycle SGD.

bfloat16 autocast, channels_last and fused SGD; nothing is read from the device within an epoch. The size of the images
never changes. What remains open is the grid.

    python -m benchmarks.peers.resnet_digits FOLDER DEVICE SEED SIDE ACCURACY SETTINGS
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import io, models

SHIFT = 4  # pixels
CLASSES = 10


@dataclass(frozen=True)
class Settings:
    """One point of the grid."""

    batch: int
    rate: float
    epochs: int


GRID = tuple(Settings(*point) for point in itertools.product((32, 64), (0.05, 0.1), (3, 4)))


def load(folder: Path, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images ``float[n, 3, side, side]`` in the class folders of ``folder``, normalized, and their labels."""
    paths = sorted(folder.glob("*/*.jpg"))
    images = torch.stack([io.decode_jpeg(io.read_file(str(path)), io.ImageReadMode.RGB) for path in paths])
    resized = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return (resized - resized.mean()) / resized.std(), torch.tensor([int(path.parent.name) for path in paths])


def train(
    datadir: Path, device: str, seed: int, side: int, target: float, settings: Settings
) -> list[tuple[float, float]]:
    """Seconds of training and accuracy in percent after each epoch, until a test reaches ``target``."""
    torch.manual_seed(seed)
    images, labels = (tensor.to(device) for tensor in load(datadir / "train", side))
    test_images, test_labels = (tensor.to(device) for tensor in load(datadir / "test", side))
    images = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT), mode="replicate").contiguous(memory_format=torch.channels_last)
    model = models.resnet18(weights=None, num_classes=CLASSES)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = len(labels) // settings.batch
    optimizer = torch.optim.SGD(
        model.parameters(), settings.rate, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=steps * settings.epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    seconds, tested = 0.0, []
    for _ in range(settings.epochs):
        start = time.monotonic()
        model.train()
        order = torch.randperm(len(labels), device=device)
        offsets = torch.randint(0, 2 * SHIFT + 1, (steps, 2)).tolist()
        for step, (row, column) in enumerate(offsets):
            chosen = order[step * settings.batch : (step + 1) * settings.batch]
            batch = images[chosen, :, row : row + side, column : column + side]
            with torch.autocast(device, torch.bfloat16):
                loss = criterion(model(batch), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += time.monotonic() - start
        model.eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            parts = zip(test_images.split(120), test_labels.split(120), strict=True)
            right = sum(int((model(part).argmax(1) == answers).sum()) for part, answers in parts)
        tested.append((seconds, 100 * right / len(test_labels)))
        if tested[-1][1] >= target:
            break
    return tested


if __name__ == "__main__":
    folder, where, number, pixels, accuracy, settings = sys.argv[1:]
    found = train(Path(folder), where, int(number), int(pixels), float(accuracy), Settings(**json.loads(settings)))
    print(json.dumps(found))
