"""Test a framework's collectives between all processes of a job, as a program that ``launch --preflight`` starts.

It prints lines of JSON: ``step`` at each step and once a second, then ``result`` or ``error``, and waits until it is
killed or its standard input ends: no process leaves while others measure. The launcher has the time limits
(docs/launcher-contract-preflight.md, R17.5). The programs run by their path in the image's Python, where no module of a
user can take the place of this one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SMALL, LARGE = 2, 1 << 18  # numbers of float32 values: 8 bytes, and 1 MiB
REPEATS = 3  # of each measurement; the fastest counts


@dataclass
class Group:
    """The processes of a job, as a framework has joined them.

    ``total`` returns the least and the greatest of a number of values, each the sum of rank + 1 over all processes.
    ``swap`` exchanges a number of values with the process ``rank ^ k``; all processes call it with the same k, and it
    does nothing for one that has no such partner.
    """

    rank: int
    size: int
    total: Callable[[int], tuple[float, float]]
    swap: Callable[[int, int], None]
    backend: str


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def run(join: Callable[[], Group]) -> None:
    """Join the other processes, test an all-reduce, measure pairs, print the result, and wait for the launcher."""
    step = "join"

    def beat() -> None:
        while True:
            _say(step=step)
            time.sleep(1.0)

    threading.Thread(target=beat, daemon=True).start()
    threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
    try:
        group = join()
        step = "all-reduce"
        found, expected = group.total(LARGE), group.size * (group.size + 1) / 2
        if found != (expected, expected):
            raise ValueError(f"the sum over {group.size} processes is {found[0]:g} to {found[1]:g}, not {expected:g}")
        seconds = _fastest(lambda: group.total(LARGE))
        step, links = "pairs", []
        for k in (1 << bit for bit in range((group.size - 1).bit_length())):
            times = [_fastest(lambda k=k, count=count: group.swap(k, count)) for count in (SMALL, LARGE)]  # type: ignore[misc]
            links += [[group.rank ^ k, *times]] if group.rank ^ k < group.size else []
        step, about = "done", {"rank": group.rank, "backend": group.backend, "bytes": 4 * LARGE}
        _say(result={**about, "all_reduce": seconds, "links": links})
    # Each framework has its own exceptions, and some exit: Python would wait for the threads' locks, and abort.
    except BaseException as error:
        _say(error=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        os._exit(1)
    threading.Event().wait()


def _fastest(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls, after one that connects and compiles."""
    found = []
    for _ in range(REPEATS + 1):
        began = time.monotonic()
        act()
        found.append(time.monotonic() - began)
    return min(found[1:])
