"""Tokens per second of the language model in JAX, against a loop in plain JAX, and the first step with a cache.

The same model, batch and precision (fp32). The tuned loop is the best point of a grid. Every run is a process.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sections import Result, Row, gpt, run, training

TARGET = "jax"
DEVICES = ("cpu",)
DATA = gpt.DATA
_STEPS = 210
_GRID = [
    dict(zip(("in_memory", "joined", "constants"), on, strict=True))
    for on in itertools.product((False, True), repeat=3)
]


def measure(data: Path, device: str, rounds: int) -> Result:
    """By turns; rates as in :mod:`benchmarks.sections.gpt`, seconds to the first step medians."""
    sizes = gpt.SIZES["cpu"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gpt.as_tokens(data, folder)

        def trained(*words: str, **variables: str) -> list[dict[str, Any]]:
            return training(
                "trainers.jax.gpt", folder, f"--datadir={data}", f"--cache-dir={folder}", "--model=tiny",
                "--device=cpu", "--precision=fp32", "--sample-tokens=0", "--max-steps=2000", *words, **variables,
            )  # fmt: skip

        def ours() -> float:
            events = trained(f"--num-steps={_STEPS}", f"--log-steps={gpt.WARM_UP}", "--eval-steps=2000")
            return gpt.tokens_per_second(events, _STEPS, sizes[0] * sizes[1])

        def peer(settings: dict[str, Any]) -> dict[str, Any]:
            numbers = map(str, (_STEPS, *sizes, 0.001))
            said: dict[str, Any] = json.loads(
                run("benchmarks.peers.jax_llama", str(folder), json.dumps(settings), *numbers)
            )
            return said

        def first_step(**variables: str) -> float:
            began = time.time()
            return float(trained("--num-steps=1", **variables)[0]["time"] - began)

        found = gpt.compared(_GRID, ours, peer, rounds, "Llama of bytes in JAX, --model tiny, fp32", "plain JAX")
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
        first_step(**cache)
        cold = [first_step() for _ in range(rounds)]
        warm = [first_step(**cache) for _ in range(rounds)]
    first, again = statistics.median(cold), statistics.median(warm)
    row = Row("start to the end of step 1, compilation cache", again, first, "s", first / again, 0.0, "without a cache")
    return Result([*found.rows, row], {**found.detail, "cold": cold, "warm": warm})
