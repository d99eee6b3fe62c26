"""Training steps of ResNet-50 on fake images: ours, and torchvision's reference loop without options."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.sections import Result, Row

TARGET = "xla"
DEVICES = ("cpu", "cuda")
TIMES_FASTER = 2.0
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


def reference(device: str, side: int) -> float:
    """The same of the reference loop."""
    import torch
    from benchmarks.peers import resnet_reference

    batch, count = _BATCH[device], _STEPS[device] + _WARM_UP[device]
    different = [(torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))) for _ in range(4)]
    return float(resnet_reference.images_per_second([different[n % 4] for n in range(count)], device, _WARM_UP[device]))


def measure(data: Path, device: str, rounds: int) -> Result:
    """Best of ``rounds`` alternating, both at 224 pixels; then ours with progressive resizing."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        best["reference"] = max(best.get("reference", 0.0), reference(device, 224))
        for side in (224, *_PROGRESSIVE):
            best[str(side)] = max(best.get(str(side), 0.0), ours(device, side))
    every = (*_PROGRESSIVE, 224)
    progressive = len(every) / sum(1 / best[str(side)] for side in every)
    peer = best["reference"]
    rows = [
        Row("ResNet-50 at 224 px", best["224"], peer, "images/s", best["224"] / peer, TIMES_FASTER, "reference loop"),
        Row("ResNet-50, progressive 128, 160, 224", progressive, peer, "images/s", progressive / peer, TIMES_FASTER,
            "reference loop at 224"),
    ]  # fmt: skip
    if device == "cuda":
        rows.append(Row("ResNet-50 at 224 px", best["224"], ON_H200, "images/s", best["224"] / ON_H200, 1.0, "goal"))
    return Result(rows, {"best_images_per_second": best, "batch": _BATCH[device]})
