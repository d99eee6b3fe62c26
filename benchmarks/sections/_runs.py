"""Runs of the trainers until a test reaches an accuracy, as the sections compare them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def of_trainer(module: str, *words: str) -> dict[str, Any]:
    """Seconds that the trainer ``module`` with the flags ``words`` trains, its last accuracy, and its epochs.

    Raises :class:`RuntimeError` with the trainer's last words if it does not train.
    """
    ended = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    if not ended.stdout.strip():
        raise RuntimeError(f"{module} {' '.join(words)}: {ended.stderr.strip().rpartition(chr(10))[2]}")
    summary = json.loads(ended.stdout.splitlines()[-1])
    return {"seconds": summary["train_seconds"], "accuracy": summary["accuracy"], "epochs": summary["epochs"]}


def of_peer(module: str, *words: str) -> dict[str, Any]:
    """The same of a peer, which prints seconds and accuracy after each epoch."""
    ended = subprocess.run([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True, check=True)
    return last(json.loads(ended.stdout.splitlines()[-1]))


def last(epochs: list[tuple[float, float]]) -> dict[str, Any]:
    """Seconds and accuracy after each epoch, as one run."""
    return {"seconds": epochs[-1][0], "accuracy": epochs[-1][1], "epochs": len(epochs)}


def to_accuracy(run: dict[str, Any], accuracy: float) -> float:
    """Seconds until ``run`` reached ``accuracy`` in percent; infinite if it did not."""
    return float(run["seconds"]) if run["accuracy"] >= accuracy else float("inf")
