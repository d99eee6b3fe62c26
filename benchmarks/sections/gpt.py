"""Tokens per second of a language model of bytes: ours, nanoGPT's loop, and a tuned one.

The same model, batch and precision. The tuned loop is the best point of a grid. Every run is a process.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, relative_range, run, training, tried

TARGET = "cpu"
DEVICES = ("cpu", "cuda")
DATA = ("text",)
TIMES_TUNED = 1.0
_MODEL = {"cpu": "tiny", "cuda": "base"}
# Batch, block size, layers, width, heads of --model.
SIZES = {"cpu": (12, 64, 4, 128, 4), "cuda": (64, 256, 6, 384, 6)}
_STEPS, WARM_UP = {"cpu": 110, "cuda": 220}, 10
_RATE = 0.002
_GRID = [
    {"fused": fused, "in_memory": in_memory, "compiled": compiled}
    for fused, in_memory, compiled in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))
]


def as_tokens(data: Path, folder: Path) -> None:
    """Write the text as nanoGPT has it: train.bin of uint16."""
    import numpy as np

    parts: list[np.ndarray] = []
    for path in sorted((data / "train").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            parts += [np.frombuffer(json.loads(line)["text"].encode(), np.uint8), np.array([256], np.uint16)]
    np.concatenate(parts).astype(np.uint16).tofile(folder / "train.bin")


def tokens_per_second(events: list[dict[str, Any]], steps: int, tokens: int) -> float:
    """Return the rate of ours after the first steps; ``tokens`` are those of a step."""
    times = {event["global_step"]: event["time"] for event in events}
    return float((steps - WARM_UP) * tokens / (times[steps] - times[WARM_UP]))


def has_bf16() -> bool:
    """Return whether the processor multiplies bf16, for which the trainer takes it by default."""
    return any(
        word in Path("/proc/cpuinfo").read_text(encoding="utf-8").split() for word in ("avx512_bf16", "amx_bf16")
    )


def compared(
    grid: list[dict[str, Any]], ours: Callable[[], float], peer: Callable[[dict[str, Any]], dict[str, Any]],
    rounds: int, what: str, plain: str,
) -> Result:  # fmt: skip
    """Compare ours with the first and the best point of a grid; rates are the best of ``rounds``, ratios medians."""
    points, chosen = tried(grid, peer, "tokens_per_second")
    rates: dict[str, list[float]] = {"ours": [], "plain": [], "tuned": []}
    for _ in range(rounds):
        rates["ours"].append(ours())
        for name, settings in (("plain", grid[0]), ("tuned", chosen)):
            rates[name].append(peer(settings)["tokens_per_second"])
    added = ", ".join(name for name, on in chosen.items() if on) or "as it is"
    rows = []
    for name, against in (("plain", plain), ("tuned", f"tuned: {plain}, {added}")):
        ratio = statistics.median(mine / other for mine, other in zip(rates["ours"], rates[name], strict=True))
        rows.append(Row(what, max(rates["ours"]), max(rates[name]), "tokens/s", ratio, TIMES_TUNED, against,
                        relative_range(rates[name])))  # fmt: skip
    return Result(rows, {"rates": rates, "grid": points, "chosen": chosen})


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns, in bf16 where the processor has it."""
    precision = "bf16" if device == "cuda" or has_bf16() else "fp32"
    steps, (batch, block_size, *_) = _STEPS[device], SIZES[device]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        as_tokens(data, folder)

        def ours() -> float:
            events = training(
                "trainers.torch.gpt", folder, f"--datadir={data}", f"--cache-dir={folder}", f"--model={_MODEL[device]}",
                f"--device={device}", f"--precision={precision}", "--num-cores=1", "--sample-tokens=0",
                f"--num-steps={steps}", "--max-steps=2000", f"--log-steps={WARM_UP}",
            )  # fmt: skip
            return tokens_per_second(events, steps, batch * block_size)

        def peer(settings: dict[str, Any]) -> dict[str, Any]:
            numbers = map(str, (steps, *SIZES[device], int(precision == "bf16"), _RATE))
            said: dict[str, Any] = json.loads(
                run("benchmarks.peers.nanogpt", str(folder), device, json.dumps(settings), *numbers)
            )
            return said

        return compared(
            _GRID, ours, peer, rounds, f"Llama of bytes, --model {_MODEL[device]}, {precision}", "nanoGPT's loop"
        )
