"""Seconds of training until ResNet-18 knows 97 % of scikit-learn's handwritten digits: ours against a tuned loop.

Both train at 64 pixels in the end, and each uses the best point of a grid, tried with another seed. Ours reads JPEG
files while it trains; the tuned loop has decoded them before its time starts. Every compared run is a process.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, _runs

TARGET = "xla"
DEVICES = ("cpu", "cuda")
ACCURACY = 97.0  # percent of the test images
TIMES_TUNED = 1.3
_SIDE, _TEST, _QUALITY = 64, 360, 95
_GRID_SEED, _FIRST_SEED = 100, 10
_GRID = tuple(
    (f"--epochs={epochs}", *sizes, *optimizer)
    for sizes, epochs, optimizer in itertools.product(
        ((), ("--progressive=48,56",)), (3, 4), (("--lr=0.05",), ("--optimizer=adamw", "--lr=0.002"))
    )
)


def prepare(folder: Path) -> None:
    """Class folders of JPEG files, 1,437 to train and 360 to test."""
    import numpy as np
    from PIL import Image

    from trainyard.sandbox.datasets.digits import load

    images, labels = load()
    places = np.random.default_rng(0).permutation(len(labels))
    for split, chosen in (("test", places[:_TEST]), ("train", places[_TEST:])):
        for number in chosen:
            path = folder / split / str(labels[number]) / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            gray = Image.fromarray(np.round(images[number] * (255 / 16)).astype(np.uint8))
            gray.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR).save(path, "JPEG", quality=_QUALITY)


def ours(datadir: Path, device: str, seed: int, *words: str) -> dict[str, Any]:
    """Seconds that ``trainers.torch.imagenet`` with the flags ``words`` trains, and the accuracy it ends with."""
    given = [f"--datadir={datadir}", "--model=resnet18", "--num-classes=10", f"--image-size={_SIDE}", "--batch-size=32",
             "--warmup-epochs=1", "--no-mirror", "--least-area=0.8", "--num-workers=2", "--num-cores=1",
             f"--device={device}", f"--seed={seed}", f"--target-accuracy={ACCURACY:g}"]  # fmt: skip
    return _runs.of_trainer("trainers.torch.imagenet", *given, *words)


def _to_target(run: dict[str, Any]) -> float:
    return _runs.to_accuracy(run, ACCURACY)


def measure(data: Path, device: str, rounds: int) -> Result:
    """Both with the same seeds by turns; medians."""
    from benchmarks.peers import resnet_digits

    def tuned(seed: int, settings: resnet_digits.Settings) -> dict[str, Any]:
        words = (str(data), device, str(seed), str(_SIDE), str(ACCURACY), json.dumps(asdict(settings)))
        return _runs.of_peer("benchmarks.peers.resnet_digits", *words)

    peers = [tuned(_GRID_SEED, settings) for settings in resnet_digits.GRID]
    own = [ours(data, device, _GRID_SEED, *words) for words in _GRID]
    settings = min(zip(peers, resnet_digits.GRID, strict=True), key=lambda point: _to_target(point[0]))[1]
    words = min(zip(own, _GRID, strict=True), key=lambda point: _to_target(point[0]))[1]
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "tuned": []}
    for seed in range(_FIRST_SEED, _FIRST_SEED + rounds):
        runs["ours"].append(ours(data, device, seed, *words))
        runs["tuned"].append(tuned(seed, settings))
    mine, other = (statistics.median(map(_to_target, runs[name])) for name in ("ours", "tuned"))
    against = (f"tuned loop: images in memory, batch {settings.batch}, one cycle of {settings.epochs} epochs at rate"
               f" {settings.rate:g}, bf16, channels_last, fused SGD")  # fmt: skip
    rows = [Row(f"ResNet-18, digits to {ACCURACY:g} %, median", mine, other, "s", other / mine, TIMES_TUNED, against)]
    return Result(rows, {
        "runs": runs,
        "grid": [{"settings": asdict(one), **found} for one, found in zip(resnet_digits.GRID, peers, strict=True)],
        "chosen": asdict(settings),
        "grid_of_ours": [{"flags": flags, **found} for flags, found in zip(_GRID, own, strict=True)],
        "chosen_of_ours": words,
    })  # fmt: skip
