"""Images per second of random 224 px crops from 500x375 JPEGs: ours, torchvision's loader, and decoding alone.

The floor is the loop that people write: Pillow, full size, RGB, on as many threads. Decoding alone with torchvision's
faster decoder, which ours uses, is reported beside it.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

from benchmarks.sections import Result, Row

TARGET = "xla"
DEVICES = ("cpu",)
TIMES_TORCHVISION, OF_FLOOR = 1.4, 0.8
_IMAGES, _WIDTH, _HEIGHT, _QUALITY, _SIDE = 512, 500, 375, 90, 224


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
    """Best of ``rounds``, all cores, alternating."""
    import numpy as np
    from benchmarks.peers import imagefolder
    from trainers.common import images
    from trainers.torch import _decode

    workers = len(os.sched_getaffinity(0))
    source = images.find(str(data), "train")
    chances = images.uniform(source.count, 5, 0, 1)
    plan = np.array_split(np.arange(source.count), max(1, source.count // 64))
    files = [source.read(number)[2] for number in range(source.count)]

    def ours() -> None:
        loader = images.Loader(source, workers, decode=_decode.decode)
        for _ in loader.batches(plan, _SIDE, lambda number, w, h: images.random_box(chances[number], w, h, 0.08)):
            pass

    parts = {
        "floor": lambda: imagefolder.decode(files, workers),
        "fast_floor": lambda: imagefolder.decode_fast(files, workers),
        "ours": ours,
        "torchvision": lambda: imagefolder.load(data / "train", _SIDE, workers),
    }
    best = dict.fromkeys(parts, 0.0)
    for _, (name, part) in itertools.product(range(rounds), parts.items()):
        start = time.monotonic()
        part()
        best[name] = max(best[name], source.count / (time.monotonic() - start))
    rows = [
        Row("random 224 px crops", best["ours"], best[peer], "images/s", best["ours"] / best[peer], target, against)
        for peer, target, against in (("torchvision", TIMES_TORCHVISION, "ImageFolder + DataLoader"),
                                      ("floor", OF_FLOOR, "decoding alone, Pillow"),
                                      ("fast_floor", 0.0, "decoding alone, torchvision"))
    ]  # fmt: skip
    return Result(rows, {"images": source.count, "workers": workers, "images_per_second": best})
