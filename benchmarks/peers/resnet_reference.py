"""ResNet-50 as torchvision's classification reference trains it without any option, written from its description.

fp32, the default memory format, SGD with rate 0.1, momentum 0.9 and weight decay 1e-4; loss and top-1/top-5 accuracy
read from the device in every step for the log.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torchvision import models


def images_per_second(batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: str, warm_up: int = 1) -> float:
    """The rate over ``batches`` of ``float[n, 3, side, side]`` and labels, but for the first ``warm_up``."""
    model = models.resnet50(weights=None).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model.train()
    count, start = 0, time.monotonic()
    for number, (images, labels) in enumerate(batches):
        if number == warm_up:
            count, start = 0, time.monotonic()
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        hits = output.topk(5, dim=1).indices == labels[:, None]
        hits[:, 0].float().sum().item()
        hits.float().sum().item()
        count += len(images)
    return count / (time.monotonic() - start)
