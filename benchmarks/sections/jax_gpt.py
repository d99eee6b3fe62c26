"""Measure tokens per second of the language model in JAX, against a loop in plain JAX, and the first step with a cache.

The same model, batch and precision (fp32). The tuned loop is the best point of a grid. Every run is a new process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, gpt

TARGET = "jax"
DEVICES = ("cpu",)
TIMES_TUNED = 1.0
_STEPS, _WARM_UP = 210, 10
_SIZES = (12, 64, 4, 128, 4)  # batch, block size, layers, width, heads of --model tiny
prepare = gpt.prepare


def ours(data: Path, cache: Path, *words: str, **variables: str) -> dict[str, Any]:
    """Return the tokens per second of ``trainers.jax.gpt`` after its first steps, and seconds to its first step."""
    metrics = cache / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "trainers.jax.gpt", f"--datadir={data}", f"--cache-dir={cache}", "--model=tiny",
               "--device=cpu", "--precision=fp32", "--sample-tokens=0", f"--metrics-file={metrics}",
               *words]  # fmt: skip
    began = time.time()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])
    events = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = {event["global_step"]: event["time"] for event in events if event["event"] == "train"}
    found = {"first_step": times[1] - began}
    if _STEPS in times:
        tokens = (_STEPS - _WARM_UP) * _SIZES[0] * _SIZES[1]
        found["tokens_per_second"] = tokens / (times[_STEPS] - times[_WARM_UP])
    return found


def peer(folder: Path, settings: Any) -> float:
    """Return the tokens per second of the peer."""
    numbers = map(str, (_STEPS, *_SIZES, 0.001))
    command = [sys.executable, "-m", "benchmarks.peers.jax_llama", str(folder), json.dumps(asdict(settings)), *numbers]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])
    return float(json.loads(ended.stdout.splitlines()[-1])["tokens_per_second"])


def measure(data: Path, device: str, rounds: int) -> Result:
    """Measure by turns; rates are the best of ``rounds``, ratios and seconds medians over them."""
    from benchmarks.peers import jax_llama

    words = (f"--num-steps={_STEPS}", "--max-steps=2000", f"--log-steps={_WARM_UP}", "--eval-steps=2000")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gpt.as_tokens(data, folder)
        grid = [peer(folder, settings) for settings in jax_llama.GRID]
        chosen = jax_llama.GRID[grid.index(max(grid))]
        rates: dict[str, list[float]] = {"ours": [], "usual": [], "tuned": []}
        for _ in range(rounds):
            rates["ours"].append(ours(data, folder, *words)["tokens_per_second"])
            rates["usual"].append(peer(folder, jax_llama.GRID[0]))
            rates["tuned"].append(peer(folder, chosen))
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
        one = ("--num-steps=1", "--max-steps=2000")
        ours(data, folder, *one, **cache)
        cold = [ours(data, folder, *one)["first_step"] for _ in range(rounds)]
        warm = [ours(data, folder, *one, **cache)["first_step"] for _ in range(rounds)]
    best = {name: max(found) for name, found in rates.items()}
    ratio = {name: statistics.median(mine / other for mine, other in zip(rates["ours"], rates[name], strict=True))
             for name in ("usual", "tuned")}  # fmt: skip
    what, made = "Llama of bytes in JAX, --model tiny, fp32", [name for name, on in asdict(chosen).items() if on]
    first, again = statistics.median(cold), statistics.median(warm)
    rows = [
        Row(what, best["ours"], best["usual"], "tokens/s", ratio["usual"], TIMES_TUNED, "plain JAX"),
        Row(what, best["ours"], best["tuned"], "tokens/s", ratio["tuned"], TIMES_TUNED,
            f"tuned: plain JAX, {', '.join(made) or 'as it is'}"),
        Row("start to the end of step 1, compilation cache", again, first, "s", first / again, 0.0, "without a cache"),
    ]  # fmt: skip
    detail = {
        "rates": rates,
        "grid": dict(zip(map(str, jax_llama.GRID), grid, strict=True)),
        "cold": cold,
        "warm": warm,
    }
    return Result(rows, detail)
