"""Training steps of ResNet-50 on fake images: ours, torchvision's reference loop without options, and a tuned loop.

The tuned loop is the best point of a grid, at the same precision as ours. Its images are float tensors in memory; ours
normalizes bytes in each step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row

TARGET = "xla"
DEVICES = ("cpu", "cuda")
TIMES_REFERENCE, OF_TUNED = 2.0, 0.98
ON_H200 = 4500.0  # images per second of one H200-class GPU
_PROGRESSIVE = (128, 160)  # before 224, each for a third of the epochs
_BATCH, _STEPS = {"cpu": 16, "cuda": 256}, {"cpu": 4, "cuda": 60}
_WARM_UP = {"cpu": 1, "cuda": 10}


def prepare(folder: Path) -> None:
    """Nothing: the images are fake."""


def ours(device: str, side: int) -> float:
    """Images per second of ``trainers.torch.imagenet`` after its first steps, with its defaults for ``device``."""
    batch, warm_up = _BATCH[device], _WARM_UP[device]
    steps = _STEPS[device] + warm_up
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        # The loss is read, which waits for the device, every warm_up steps; the run ends before the test.
        words = ["--fake-data", f"--fake-images={2 * steps * batch}", f"--num-steps={steps + 1}",
                 f"--batch-size={batch}", f"--image-size={side}", "--epochs=1", "--lr=0.1", f"--device={device}",
                 "--num-cores=1", f"--log-steps={warm_up}", f"--metrics-file={metrics}"]  # fmt: skip
        command = [sys.executable, "-m", "trainers.torch.imagenet", *words]
        subprocess.run(command, capture_output=True, check=True)
        events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    logged = [event for event in events if event["event"] == "train"]
    first, last = (next(event for event in logged if event["step"] == step) for step in (warm_up, steps))
    return float((last["step"] - first["step"]) * batch / (last["time"] - first["time"]))


def _batches(device: str) -> list[Any]:
    """Batches of random float images of 224 pixels and labels, four different ones by turns."""
    import torch

    batch, count = _BATCH[device], _STEPS[device] + _WARM_UP[device]
    different = [
        (torch.randn(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last),
         torch.randint(0, 1000, (batch,))) for _ in range(4)
    ]  # fmt: skip
    if device == "cuda":  # from where a copy does not wait
        different = [(images.pin_memory(), labels.pin_memory()) for images, labels in different]
    return [different[number % 4] for number in range(count)]


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns, all at 224 pixels, and ours at the sizes of progressive resizing too.

    Rates are the best of ``rounds``; ratios to the tuned loop are medians over the rounds.
    """
    from benchmarks.peers import resnet_reference, resnet_tuned

    batches, warm_up = _batches(device), _WARM_UP[device]
    grid: list[dict[str, Any]] = []
    for settings in resnet_tuned.GRID:
        try:
            rate = resnet_tuned.images_per_second(batches, device, settings, warm_up)
            grid.append({**asdict(settings), "images_per_second": rate})
        except Exception as error:  # torch.compile raises many types where there is no C++ compiler
            reason = str(error).partition("\n")[0]
            grid.append({**asdict(settings), "images_per_second": 0.0, "error": f"{type(error).__name__}: {reason}"})
    at = max(range(len(grid)), key=lambda number: grid[number]["images_per_second"])
    chosen = resnet_tuned.GRID[at]
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(device, 224),
        "tuned": lambda: resnet_tuned.images_per_second(batches, device, chosen, warm_up),
        "reference": lambda: resnet_reference.images_per_second(batches, device, warm_up),
        **{str(side): lambda side=side: ours(device, side) for side in _PROGRESSIVE},  # type: ignore[misc]
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            rates[name].append(side())
    best = {name: max(found) for name, found in rates.items()}
    every = [best[str(side)] for side in _PROGRESSIVE] + [best["ours"]]
    progressive = len(every) / sum(1 / rate for rate in every)
    to_tuned = statistics.median(mine / other for mine, other in zip(rates["ours"], rates["tuned"], strict=True))
    tuned = (f"tuned loop: {'bf16' if chosen.bf16 else 'fp32'}{', channels_last' if chosen.channels_last else ''},"
             f" fused SGD, {'torch.compile' if chosen.compiled else 'eager'}")  # fmt: skip
    rows = [
        Row("ResNet-50 at 224 px", best["ours"], best["tuned"], "images/s", to_tuned, OF_TUNED, tuned),
        Row("ResNet-50 at 224 px", best["ours"], best["reference"], "images/s", best["ours"] / best["reference"],
            TIMES_REFERENCE, "reference loop, fp32 without options"),
        Row("ResNet-50, progressive 128, 160, 224", progressive, best["tuned"], "images/s",
            progressive / best["tuned"], 0.0, "tuned loop at 224 px"),
    ]  # fmt: skip
    if device == "cuda":
        rows.append(Row("ResNet-50 at 224 px", best["ours"], ON_H200, "images/s", best["ours"] / ON_H200, 1.0, "goal"))
    return Result(rows, {"rates": rates, "grid": grid, "chosen": asdict(chosen), "batch": _BATCH[device]})
