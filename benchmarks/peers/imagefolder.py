"""Loading JPEGs as torchvision's reference does, and the floor below any loader: decoding each file, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image


def loader(folder: Path, side: int, workers: int, repeats: int, batch: int = 64) -> Callable[[], None]:
    """A function that loads every image ``repeats`` times, in processes that start with its first call: ImageFolder,
    RandomResizedCrop, a flip, ToTensor, Normalize, DataLoader."""
    import torch
    from torchvision import datasets, transforms

    crop = transforms.Compose(
        [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
         transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )  # fmt: skip
    images = datasets.ImageFolder(str(folder), crop)
    every = torch.utils.data.ConcatDataset([images] * repeats)
    found = torch.utils.data.DataLoader(every, batch, num_workers=workers, persistent_workers=True)

    def epoch() -> None:
        for _ in found:
            pass

    return epoch


def decode(files: Sequence[str], workers: int) -> None:
    """Every file to full-size RGB, on ``workers`` threads."""

    def one(path: str) -> None:
        with Image.open(path) as image:
            image.convert("RGB")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, files))


def decode_fast(files: Sequence[str], workers: int) -> None:
    """The same with torchvision's decoder."""
    import torch
    from torchvision import io

    def one(path: str) -> None:
        with open(path, "rb") as file:
            content = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        io.decode_jpeg(content, mode=io.ImageReadMode.RGB)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, files))
