"""MNIST as the classic PyTorch example trains it, written from its description.

Two 3x3 convolutions of 32 and 64 filters, dropout of 0.25 and 0.5, Adadelta with rate 1 times 0.7 an epoch, batches of
64 from a DataLoader whose data set makes a PIL image of each sample.

    python -m benchmarks.peers.mnist_classic FOLDER DEVICE SEED ACCURACY MOST_EPOCHS
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainers.common import mnist_data


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """The IDX files of ``folder``, one normalised image at a time."""

    def __init__(self, folder: str, split: str) -> None:
        self.images, self.labels = mnist_data.load_mnist(folder, split)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.from_numpy(np.array(Image.fromarray(self.images[index]))).float() / 255
        return ((pixels - 0.1307) / 0.3081)[None], int(self.labels[index])


def train(datadir: str, device: str, seed: int, target: float, most_epochs: int) -> list[tuple[float, float]]:
    """Seconds of training and accuracy in percent after each epoch, until a test reaches ``target``."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader = DataLoader(Digits(datadir, "train"), 64, shuffle=True)
    tests = DataLoader(Digits(datadir, "test"), 1000)
    seconds, tested = 0.0, [(0.0, 0.0)]
    while tested[-1][1] < target and len(tested) <= most_epochs:
        start = time.monotonic()
        network.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += time.monotonic() - start
        schedule.step()
        network.eval()
        with torch.no_grad():
            right = sum(int((network(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in tests)
        tested.append((seconds, 100 * right / len(tests.dataset)))  # type: ignore[arg-type]
    return tested[1:]


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))))
