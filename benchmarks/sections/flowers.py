"""Accuracy on drawn flowers after the same wall time: ours, and the three-convolution model of the Vertex AI guide."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row

TARGET = "tf-cpu"
DEVICES = ("cpu",)
BETTER = 1.01  # times the accuracy of the peer
_WORDS = ("--image-size=48", "--batch-size=25", "--epochs=8", "--num-workers=2")


def prepare(folder: Path) -> None:
    """Class folders of drawn flowers, few enough that a network without augmentation learns them by heart."""
    from trainyard.datasets import flowers as flowers_data

    flowers_data.write(folder, "folder", train=300, test=500)


def _run(*words: str) -> tuple[dict[str, Any], float]:
    """The last line of JSON that a Python module prints, and the seconds from its start to its end."""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1]), time.monotonic() - start


def measure(data: Path, device: str, rounds: int) -> Result:
    """Both with seeds 0, 1, ... by turns; the peer trains for as long as our whole process took. Medians."""
    import numpy as np

    runs = []
    for seed in range(rounds):
        ours, seconds = _run("trainers.tf.flowers", f"--datadir={data}", f"--seed={seed}", *_WORDS)
        peer, _ = _run("benchmarks.peers.flowers_keras", str(data), str(seconds), str(seed))
        runs.append({"seed": seed, "seconds": seconds, "ours": ours["accuracy"], "peer": peer})
    good = float(np.median([run["ours"] for run in runs]))
    other = float(np.median([run["peer"]["accuracy"] for run in runs]))
    what = f"drawn flowers, test accuracy after {np.median([run['seconds'] for run in runs]):.0f} s, median"
    return Result([Row(what, good, other, "%", good / other, BETTER, "three-conv Keras tutorial")], {"runs": runs})
