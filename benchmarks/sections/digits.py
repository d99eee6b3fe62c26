"""Seconds of training to 97 % of scikit-learn's digits: ours, and a tuned loop.

Each side has the best point of its grid, tried with other seeds than those that are compared. Every run is a process,
of which the training and its tests count, not its start or its data. Each has one thread: with two, another
program on the machine disturbs both for seconds.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, has_bf16, relative_range, run, training

TARGET = "cpu"
DEVICES = ("cpu", "cuda")
DATA = ("digits",)
ACCURACY = 97.0  # percent
TIMES_TUNED = 1.0
_GRID_SEEDS, _FIRST_SEED = (100, 101), 10  # the slower run counts
_THREADS = {"OMP_NUM_THREADS": "1"}
_POINTS = [
    {"batch": batch, "rate": rate, "epochs": epochs}
    for batch, rate, epochs in itertools.product((32, 64), (0.003, 0.01), (2, 3, 4))
]


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns, with the same seeds; medians of the seeds with which both reach the accuracy."""

    def ours(point: dict[str, Any], seed: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            try:
                summary = training(
                    "trainers.torch.mnist", Path(folder), f"--datadir={data}", f"--device={device}", f"--seed={seed}",
                    "--num-cores=1", "--model=small", "--shift=0", "--optimizer=adamw", f"--lr={point['rate']}",
                    f"--epochs={point['epochs']}", f"--batch-size={point['batch']}",
                    f"--target-accuracy={ACCURACY:g}", kind="summary", **_THREADS,
                )[-1]  # fmt: skip
            except RuntimeError:  # the accuracy is not reached
                return math.inf
        return float(summary["train_seconds"])

    def peer(point: dict[str, Any], seed: int) -> float:
        said = run(
            "benchmarks.peers.mnist_tuned", str(data), device, str(seed), str(ACCURACY), json.dumps(point), **_THREADS
        )
        seconds, accuracy = json.loads(said)
        return float(seconds) if accuracy >= ACCURACY else math.inf

    def best(grid: list[dict[str, Any]], side: Callable[[dict[str, Any], int], float]) -> tuple[Any, list[Any]]:
        slowest = [max(side(point, seed) for seed in _GRID_SEEDS) for point in grid]
        return grid[slowest.index(min(slowest))], [slowest, grid]

    peers = [
        {**point, "network": network, "bf16": bf16}
        for network, bf16, point in itertools.product(
            ("small", "lenet"), (False, True)[: 1 + has_bf16(device)], _POINTS
        )
    ]
    (own, own_grid), (tuned, peer_grid) = best(_POINTS, ours), best(peers, peer)
    runs = [(ours(own, seed), peer(tuned, seed)) for seed in range(_FIRST_SEED, _FIRST_SEED + rounds)]
    reached = [sum(seconds < math.inf for seconds in side) for side in zip(*runs, strict=True)]
    both = [(mine, other) for mine, other in runs if max(mine, other) < math.inf]
    ratio = statistics.median(other / mine for mine, other in both)
    mine, other = (statistics.median(seconds) for seconds in zip(*both, strict=True))
    against = (
        f"tuned loop: {tuned['network']}, batch {tuned['batch']}, one-cycle to {tuned['rate']:g},"
        f" {'bf16' if tuned['bf16'] else 'fp32'}; reached by {reached[1]} of {rounds} seeds"
    )
    row = Row(f"digits to {ACCURACY:g} %; reached by {reached[0]} of {rounds} seeds", mine, other, "s", ratio,
              TIMES_TUNED, against, relative_range([seconds for _, seconds in both]))  # fmt: skip
    return Result([row], {"runs": runs, "grid": peer_grid, "grid_of_ours": own_grid, "chosen": tuned, "ours": own})
