"""How long the command line takes to print its help, beside an interpreter that does nothing.

    python -m benchmarks.cli [RUNS]

The cases alternate, so that other work on the machine disturbs all of them alike; the median of RUNS (21) is compared
with the limit. It exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

#: Case -> words after the interpreter or command, and the limit in milliseconds; none for the floor.
CASES: dict[str, tuple[list[str], int | None]] = {
    "python3 -c pass": ([sys.executable, "-c", "pass"], None),
    "trainyard --help": (["trainyard", "--help"], 150),
    "trainyard image --help": (["trainyard", "image", "--help"], 200),
}


def measure(command: list[str]) -> float:
    """Milliseconds from start to exit."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - started)


def main(runs: int) -> int:
    """Print a line per case: median and fastest time in milliseconds, and the limit; 1 if a median exceeds it."""
    installed = str(Path(sys.executable).with_name("trainyard"))
    commands = {
        case: [installed if word == "trainyard" else word for word in words] for case, (words, _) in CASES.items()
    }
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(runs):
        for case, command in commands.items():
            times[case].append(measure(command))
    failed = 0
    print(f"{'case':24} {'median':>8} {'fastest':>8} {'limit':>8}   (ms, {runs} runs)")
    for case, (_, limit) in CASES.items():
        median = statistics.median(times[case])
        print(f"{case:24} {median:8.0f} {min(times[case]):8.0f} {limit or '':>8}")
        failed |= limit is not None and median > limit
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 21))
