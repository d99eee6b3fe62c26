"""Loading JPEGs as torchvision's guide recommends for speed: v2 transforms on uint8 tensors, workers that persist.

https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import io
from torchvision.transforms import v2


@dataclass(frozen=True)
class Settings:
    """One point of the grid: worker processes, and batches that each of them loads in advance."""

    workers: int
    prefetch: int


GRID = tuple(Settings(*point) for point in itertools.product((2, 3, 4), (2, 4)))


class Crops(Dataset[torch.Tensor]):
    """Random crops ``uint8[3, side, side]`` of ``files``; a device normalizes them faster, a batch at a time."""

    def __init__(self, files: Sequence[str], side: int) -> None:
        self.files = files
        self.crop = v2.Compose([v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.crop(io.decode_jpeg(io.read_file(self.files[index]), mode=io.ImageReadMode.RGB))


def loader(files: Sequence[str], side: int, settings: Settings, batch: int = 64) -> DataLoader[torch.Tensor]:
    """A loader of shuffled batches, whose processes start with its first epoch."""
    return DataLoader(
        Crops(files, side), batch, shuffle=True, num_workers=settings.workers, prefetch_factor=settings.prefetch,
        persistent_workers=True,
    )  # fmt: skip
