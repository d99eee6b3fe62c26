"""Seconds to 95 % on drawn flowers: ours, the Keras tutorial with its augmentation, and a tuned version of it.

From the start of the process, so importing TensorFlow, decoding, tracing and the tests after each epoch count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row

TARGET = "tf-cpu"
DEVICES = ("cpu",)
ACCURACY = 95.0  # percent of the test pictures
TIMES_TUTORIAL = 1.5
_MOST_SECONDS = 30  # of a peer; one that needs more counts as this long
_WORDS = ("--image-size=48", "--batch-size=25", "--epochs=8", "--num-workers=2", f"--target-accuracy={ACCURACY}")
_GRID_SEED = 100  # not one of those that are compared


def prepare(folder: Path) -> None:
    """Class folders of drawn flowers, few enough that a network without augmentation learns them by heart."""
    from trainyard.sandbox.datasets import flowers as flowers_data

    flowers_data.write(folder, "folder", train=300, test=500)


def _run(*words: str) -> dict[str, Any]:
    """``seconds`` of the Python module ``words`` from start to end, and what its last line of JSON says."""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - start
    found = json.loads(ended.stdout.splitlines()[-1])
    return {"seconds": seconds, **{key: found[key] for key in ("accuracy", "epochs")}}


def _peer(data: Path, seed: int, settings: Any) -> dict[str, Any]:
    words = (str(data), str(seed), str(ACCURACY), str(_MOST_SECONDS), json.dumps(asdict(settings)))
    return _run("benchmarks.peers.flowers_keras", *words)


def measure(data: Path, device: str, rounds: int) -> Result:
    """All with seeds 0, 1, ... by turns; medians. The grid is tried with another seed."""
    from benchmarks.peers import flowers_keras

    grid = [{"settings": asdict(settings), **_peer(data, _GRID_SEED, settings)} for settings in flowers_keras.GRID]
    reached = [point["seconds"] if point["accuracy"] >= ACCURACY else float("inf") for point in grid]
    chosen = flowers_keras.GRID[reached.index(min(reached))]
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "tutorial": [], "tuned": []}
    for seed in range(rounds):
        runs["ours"].append(_run("trainers.tf.flowers", f"--datadir={data}", f"--seed={seed}", *_WORDS))
        runs["tutorial"].append(_peer(data, seed, flowers_keras.Settings()))
        runs["tuned"].append(_peer(data, seed, chosen))
    # A run of ours that misses the accuracy makes the comparison worthless, one of a peer makes it a lower bound.
    mine = statistics.median(run["seconds"] if run["accuracy"] >= ACCURACY else float("inf") for run in runs["ours"])
    rows = []
    names = {"tutorial": "Keras tutorial with augmentation",
             "tuned": f"tuned: batch norm, {chosen.side} px, Adam {chosen.rate:g}"}  # fmt: skip
    for name, against in names.items():
        other = statistics.median(run["seconds"] for run in runs[name])
        count = sum(run["accuracy"] >= ACCURACY for run in runs[name])
        rows.append(Row(f"drawn flowers to {ACCURACY:g} %, median", mine, other, "s", other / mine,
                        TIMES_TUTORIAL if name == "tutorial" else 0.0,
                        f"{against}, reached by {count} of {rounds} seeds in {_MOST_SECONDS} s"))  # fmt: skip
    return Result(rows, {"runs": runs, "grid": grid, "chosen": asdict(chosen)})
