"""Images per second of random 224 px crops from 500x375 JPEGs: ours, torchvision's loaders, and decoding alone.

Every side loads the same files eight times per epoch; an epoch that starts threads or processes is not counted. The
floors decode on as many threads as there are cores: with Pillow, and with torchvision's decoder, which ours uses.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.sections import Result, Row

TARGET = "xla"
DEVICES = ("cpu",)
TIMES_TUNED, OF_FLOOR = 1.5, 0.8
_IMAGES, _WIDTH, _HEIGHT, _QUALITY, _SIDE = 512, 500, 375, 90, 224
_REPEATS = 8  # of each file per epoch, so that an epoch takes seconds


def prepare(folder: Path) -> None:
    """Class folders of 500x375 JPEGs: parts of the two photographs that scikit-learn carries, 55 KB on average."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    chance = random.Random(0)
    for number in range(_IMAGES):
        whole = photographs[number % len(photographs)]
        left, upper = chance.randint(0, whole.width - _WIDTH), chance.randint(0, whole.height - _HEIGHT)
        path = folder / "train" / f"class{number % 8}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.crop((left, upper, left + _WIDTH, upper + _HEIGHT)).save(path, "JPEG", quality=_QUALITY)


def measure(data: Path, device: str, rounds: int) -> Result:
    """The sides by turns; medians, and the median of the rounds' ratios."""
    import numpy as np
    from benchmarks.peers import dataloader_v2, imagefolder
    from trainers.common import images
    from trainers.torch import _decode

    workers = len(os.sched_getaffinity(0))
    source = images.find(str(data), "train")
    count = source.count * _REPEATS
    files = [source.read(number % source.count)[2] for number in range(count)]
    chances = images.uniform(count, 5, 0, 1)
    shuffled = np.random.default_rng(0).permutation(count) % source.count
    plan = np.array_split(shuffled, count // 64)
    own = images.Loader(source, workers, decode=_decode.decode)

    def ours() -> None:
        for _ in own.batches(plan, _SIDE, lambda number, w, h: images.random_box(chances[number], w, h, 0.08)):
            pass

    def rate(side: Callable[[], object]) -> float:
        start = time.monotonic()
        side()
        return count / (time.monotonic() - start)

    def tuned(settings: dataloader_v2.Settings) -> Callable[[], object]:
        loader = dataloader_v2.loader(files, _SIDE, settings)
        return lambda: [None for _ in loader]

    grid = []
    for settings in dataloader_v2.GRID:
        side = tuned(settings)
        side()
        grid.append((rate(side), settings))
    _, chosen = max(grid, key=lambda point: point[0])
    sides: dict[str, Callable[[], object]] = {
        "floor": lambda: imagefolder.decode(files, workers),
        "fast_floor": lambda: imagefolder.decode_fast(files, workers),
        "ours": ours,
        "tuned": tuned(chosen),
        "imagefolder": imagefolder.loader(data / "train", _SIDE, workers, _REPEATS),
    }
    for side in sides.values():
        side()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            rates[name].append(rate(side))
    against = {
        "tuned": (f"tuned: v2 transforms, decode_jpeg, {chosen.workers} persistent workers", TIMES_TUNED),
        "imagefolder": ("ImageFolder, transforms v1, DataLoader with persistent workers", 0.0),
        "floor": ("decoding alone, Pillow", OF_FLOOR),
        "fast_floor": ("decoding alone, torchvision", 0.0),
    }
    rows = []
    for peer, (what, target) in against.items():
        ratio = statistics.median(mine / other for mine, other in zip(rates["ours"], rates[peer], strict=True))
        mine, other = (statistics.median(rates[name]) for name in ("ours", peer))
        rows.append(Row("random 224 px crops", mine, other, "images/s", ratio, target, what))
    figures = [{**asdict(settings), "images_per_second": found} for found, settings in grid]
    return Result(rows, {"images": count, "cores": workers, "rates": rates, "grid": figures, "chosen": asdict(chosen)})
