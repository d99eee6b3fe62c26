r"""Measure seconds of training until the network of ``mnist`` knows 97 % of the digits: in JAX against PyTorch.

Both trainers run in fp32, with the same flags, seeds and two threads, by turns, each run a process. The time begins
after the first step, so that imports and compilation, which are given apart, do not count. No image has both
frameworks: the packages of JAX are put beside those of the image with PyTorch, and the data are those of ``trainyard
dev dataset digits data``.

    uv pip install --target packages --python-version 3.13 --only-binary :all: jax flax optax orbax-checkpoint
    docker run --rm --network none --shm-size 2g --entrypoint /opt/venv/bin/python \
        -v $PWD:/src:ro -v $PWD/data:/data:ro -v $PWD/packages:/packages:ro \
        -e PYTHONPATH=/src:/src/scripts:/packages -e PYTHONDONTWRITEBYTECODE=1 -w /tmp \
        trainyard:cpu -m benchmarks.trainers jax_mnist --inside --data /data --rounds 5
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, mnist

TARGET = ""
DEVICES = ("cpu",)
TIMES_TORCH = 1 / 1.15
_FIRST_SEED = 10
prepare = mnist.prepare


def run(module: str, data: Path, seed: int) -> dict[str, Any]:
    """Return ``seconds`` from the first step to the accuracy, and ``first_step``: seconds from the start to its end.

    What is compiled later, for the test, counts as part of ``first_step``.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "-m", module, f"--datadir={data}", f"--seed={seed}", "--device=cpu", "--epochs=5",
                   "--num-cores=1", "--precision=fp32", "--log-steps=1", f"--target-accuracy={mnist.ACCURACY}",
                   f"--metrics-file={metrics}"]  # fmt: skip
        began = time.time()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{module}: {ended.stderr.strip().rpartition(chr(10))[2]}")
        events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    summary = json.loads(ended.stdout.splitlines()[-1])
    first = next(event for event in events if event["event"] == "train")
    last = [event for event in events if event["event"] == "test"][-1]
    compiling = summary["compile_seconds"] - first["compile_seconds"]  # the test
    return {"seconds": last["time"] - first["time"] - compiling, "first_step": first["time"] - began + compiling,
            "accuracy": summary["accuracy"], "epochs": summary["epochs"]}  # fmt: skip


def measure(data: Path, device: str, rounds: int) -> Result:
    """Return medians over the seeds, all of which must reach the accuracy."""
    modules = {"jax": "trainers.jax.mnist", "torch": "trainers.torch.mnist"}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in modules}
    for seed in range(_FIRST_SEED, _FIRST_SEED + rounds):
        for name, module in modules.items():
            runs[name].append(run(module, data, seed))
    reached = {name: sum(one["accuracy"] >= mnist.ACCURACY for one in some) for name, some in runs.items()}
    middle = {name: {key: statistics.median(one[key] for one in some) for key in ("seconds", "first_step")}
              for name, some in runs.items()}  # fmt: skip
    what = f"cnn, digits to {mnist.ACCURACY:g} % after the first step; reached by {reached['jax']} of {rounds} seeds"
    against = f"trainers.torch.mnist, same flags, fp32; reached by {reached['torch']} of {rounds} seeds"
    return Result([
        Row(what, middle["jax"]["seconds"], middle["torch"]["seconds"], "s",
            middle["torch"]["seconds"] / middle["jax"]["seconds"], TIMES_TORCH, against),
        Row("start to the end of step 1, and compilation of the test", middle["jax"]["first_step"],
            middle["torch"]["first_step"], "s", middle["torch"]["first_step"] / middle["jax"]["first_step"],
            against="trainers.torch.mnist"),
    ], {"runs": runs})  # fmt: skip
