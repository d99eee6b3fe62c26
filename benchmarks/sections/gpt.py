"""Tokens per second of a language model of bytes: ours, nanoGPT's loop, and a tuned one; and seconds to a loss.

The same model, batch and precision. The tuned loop is the best point of a grid. Every run is a new process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row

TARGET = "cpu"
DEVICES = ("cpu", "cuda")
TIMES_NANOGPT, TIMES_TUNED = 1.0, 1.0
VAL_LOSS = 1.7  # nats per byte of every tenth document, which AdamW has after half of its steps
_MODEL = {"cpu": "tiny", "cuda": "base"}
# Batch, block size, layers, width, heads of --model.
_SIZES = {"cpu": (12, 64, 4, 128, 4), "cuda": (64, 256, 6, 384, 6)}
_STEPS, _WARM_UP = {"cpu": 110, "cuda": 220}, 10
_LEARN = ("--optimizer=muon", "--lr=0.002", "--max-steps=2000", "--eval-steps=250")
_PEER_RATE = 0.002  # for both: Muon scales its updates to those of AdamW


def prepare(folder: Path) -> None:
    """Return the documentation of the Python that prepares."""
    from trainyard.sandbox.datasets import text

    text.write(folder)


def as_tokens(data: Path, folder: Path) -> None:
    """Write the text as nanoGPT has it: train.bin and val.bin of uint16."""
    import numpy as np

    for split in ("train", "val"):
        parts: list[np.ndarray] = []
        for path in sorted((data / split).glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                parts += [np.frombuffer(json.loads(line)["text"].encode(), np.uint8), np.array([256], np.uint16)]
        np.concatenate(parts).astype(np.uint16).tofile(folder / f"{split}.bin")


def ours(data: Path, device: str, precision: str, cache: Path, *words: str) -> dict[str, Any]:
    """Return the tokens per second of ``trainers.torch.gpt`` after its first steps; with ``words``, its summary."""
    metrics = cache / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    steps = _STEPS[device]
    given = words or (f"--num-steps={steps}", "--max-steps=2000", f"--log-steps={_WARM_UP}")
    command = [sys.executable, "-m", "trainers.torch.gpt", f"--datadir={data}", f"--cache-dir={cache}",
               f"--model={_MODEL[device]}", f"--device={device}", f"--precision={precision}", "--num-cores=1",
               "--sample-tokens=0", f"--metrics-file={metrics}", *given]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 21):
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])
    if words:
        summary: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return summary
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = {event["global_step"]: event["time"] for event in events if event["event"] == "train"}
    batch, block_size = _SIZES[device][:2]
    return {"tokens_per_second": (steps - _WARM_UP) * batch * block_size / (times[steps] - times[_WARM_UP])}


def peer(folder: Path, device: str, precision: str, settings: Any, steps: int, rate: float, loss: float = 0.0) -> Any:
    """Return what the peer prints."""
    numbers = map(str, (steps, *_SIZES[device], int(precision == "bf16"), rate, loss))
    command = [sys.executable, "-m", "benchmarks.peers.nanogpt", str(folder), device, json.dumps(asdict(settings))]
    ended = subprocess.run([*command, *numbers], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])
    return json.loads(ended.stdout.splitlines()[-1])


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns; rates are the best of ``rounds``, ratios medians over them, seconds to the loss medians."""
    from benchmarks.peers import nanogpt
    from trainers.common.flags import cpu_has_bf16

    precision = "bf16" if device == "cuda" or cpu_has_bf16() else "fp32"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        as_tokens(data, folder)
        grid: list[dict[str, Any]] = []
        for settings in nanogpt.GRID:
            try:
                rate = peer(folder, device, precision, settings, _STEPS[device], _PEER_RATE)["tokens_per_second"]
                grid.append({**asdict(settings), "tokens_per_second": rate})
            except RuntimeError as error:  # torch.compile where there is no C++ compiler
                grid.append({**asdict(settings), "tokens_per_second": 0.0, "error": str(error)[:200]})
        chosen = nanogpt.GRID[max(range(len(grid)), key=lambda number: float(grid[number]["tokens_per_second"]))]
        rates: dict[str, list[float]] = {"ours": [], "nanogpt": [], "tuned": []}
        seconds: dict[str, list[float]] = {"ours": [], "tuned": []}
        for _ in range(rounds):
            rates["ours"].append(ours(data, device, precision, folder)["tokens_per_second"])
            for name, settings in (("nanogpt", nanogpt.GRID[0]), ("tuned", chosen)):
                found = peer(folder, device, precision, settings, _STEPS[device], _PEER_RATE)
                rates[name].append(found["tokens_per_second"])
            learned = ours(data, device, precision, folder, *_LEARN, f"--target-loss={VAL_LOSS}")
            seconds["ours"].append(learned["train_seconds"] if learned["status"] == "reached" else float("inf"))
            other = peer(folder, device, precision, chosen, 2000, _PEER_RATE, VAL_LOSS)
            seconds["tuned"].append(other["seconds"])
    best = {name: max(found) for name, found in rates.items()}
    ratio = {name: statistics.median(mine / other for mine, other in zip(rates["ours"], rates[name], strict=True))
             for name in ("nanogpt", "tuned")}  # fmt: skip
    mine, other = (statistics.median(seconds[name]) for name in ("ours", "tuned"))
    memory = ", text in memory" if chosen.in_memory else ""
    tuned = (f"tuned loop: {'fused AdamW' if chosen.fused else 'AdamW'}{memory},"
             f" {'torch.compile' if chosen.compiled else 'eager'}, {precision}")  # fmt: skip
    what = f"Llama of bytes, --model {_MODEL[device]}, {precision}"
    rows = [
        Row(what, best["ours"], best["nanogpt"], "tokens/s", ratio["nanogpt"], TIMES_NANOGPT, "nanoGPT's loop"),
        Row(what, best["ours"], best["tuned"], "tokens/s", ratio["tuned"], TIMES_TUNED, tuned),
        Row(f"validation loss {VAL_LOSS:g}, Muon, median", mine, other, "s", other / mine, 0.0, f"{tuned}, AdamW"),
    ]
    return Result(rows, {"rates": rates, "seconds": seconds, "grid": grid, "chosen": asdict(chosen)})
