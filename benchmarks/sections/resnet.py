"""Training steps of ResNet-50 on fake images: ours, and a tuned loop.

The tuned loop is the best point of a grid. Its images are float tensors in memory; ours normalizes bytes in each step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, has_bf16, relative_range, run, training, tried

TARGET = "cpu"
DEVICES = ("cpu", "cuda")
DATA = ()
OF_TUNED = 0.98
_PROGRESSIVE = (128, 160)  # before 224, each for a third of the epochs
_BATCH, _STEPS, _WARM_UP = {"cpu": 16, "cuda": 256}, {"cpu": 4, "cuda": 60}, {"cpu": 1, "cuda": 10}
_GRID = [
    {"bf16": bf16, "channels_last": channels_last, "compiled": compiled}
    for bf16, channels_last, compiled in ((0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1))
]


def ours(device: str, side: int) -> float:
    """Images per second of ``trainers.torch.imagenet`` after its first steps, with its defaults for ``device``."""
    batch, warm_up = _BATCH[device], _WARM_UP[device]
    steps = _STEPS[device] + warm_up
    with tempfile.TemporaryDirectory() as folder:
        # The loss is read, which waits for the device, every warm_up steps; the run ends before the test.
        events = training(
            "trainers.torch.imagenet", Path(folder), "--fake-data", f"--fake-images={2 * steps * batch}",
            f"--num-steps={steps + 1}", f"--batch-size={batch}", f"--image-size={side}", "--epochs=1", "--lr=0.1",
            f"--device={device}", "--num-cores=1", f"--log-steps={warm_up}",
        )  # fmt: skip
    times = {event["global_step"]: event["time"] for event in events}
    return float((steps - warm_up) * batch / (times[steps] - times[warm_up]))


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns at 224 pixels, and ours at the sizes of progressive resizing; best rates, and medians of ratios."""

    def tuned(settings: dict[str, Any]) -> dict[str, Any]:
        numbers = map(str, (_BATCH[device], _STEPS[device] + _WARM_UP[device], _WARM_UP[device]))
        return dict(json.loads(run("benchmarks.peers.resnet_tuned", device, *numbers, json.dumps(settings))))

    points = [point for point in _GRID if not point["bf16"] or has_bf16(device)]
    grid, chosen = tried(points, tuned, "images_per_second")
    rates: dict[str, list[float]] = {name: [] for name in ("ours", "tuned", *map(str, _PROGRESSIVE))}
    for _ in range(rounds):
        rates["ours"].append(ours(device, 224))
        rates["tuned"].append(tuned(chosen)["images_per_second"])
        for side in _PROGRESSIVE:
            rates[str(side)].append(ours(device, side))
    most = {name: max(found) for name, found in rates.items()}
    sizes = [most[str(side)] for side in _PROGRESSIVE] + [most["ours"]]
    progressive = len(sizes) / sum(1 / rate for rate in sizes)
    ratio = statistics.median(mine / other for mine, other in zip(rates["ours"], rates["tuned"], strict=True))
    against = f"tuned loop: fused SGD, {', '.join(name for name, on in chosen.items() if on)}"
    rows = [
        Row("ResNet-50 at 224 px", most["ours"], most["tuned"], "images/s", ratio, OF_TUNED, against,
            relative_range(rates["tuned"])),
        Row("ResNet-50, progressive 128, 160, 224", progressive, most["tuned"], "images/s",
            progressive / most["tuned"], 0.0, "tuned loop at 224 px"),
    ]  # fmt: skip
    return Result(rows, {"rates": rates, "grid": grid, "chosen": chosen, "batch": _BATCH[device]})
