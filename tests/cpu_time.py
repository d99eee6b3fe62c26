"""CPU time of a whole run of the tests, in minutes and in loops of Python, so that machines compare.

Processes that a run started count when they have ended and were waited for. Containers and the engine are no children:
theirs is read from the cgroup that containers have in common, which keeps the time of those that are gone, and from the
engine's processes. What others do with the same engine meanwhile counts, too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

#: The files of the common cgroup: of cgroup v2 with the driver systemd, whose slice has the engine too; with cgroupfs;
#: of cgroup v1. https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files and
#: https://docs.kernel.org/admin-guide/cgroup-v1/cpuacct.html
SLICE = "system.slice/cpu.stat"
CONTAINERS = ("docker/cpu.stat", "cpuacct/docker/cpuacct.usage", "cpu,cpuacct/docker/cpuacct.usage")

#: Processes of the engine.
ENGINE = ("dockerd", "containerd", "buildkitd")

#: Steps of the reference loop: about 2 s of a core of 2024.
STEPS = 25_000_000


def reference_loop(steps: int) -> float:
    """Return the CPU seconds of a fixed loop in Python."""
    began, value = time.process_time(), 1
    for _ in range(steps):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return time.process_time() - began


def of_processes() -> float:
    """Return the CPU seconds of this process and of all of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def of_engine(cgroups: Path = Path("/sys/fs/cgroup"), processes: Path = Path("/proc")) -> float | None:
    """Return the CPU seconds of the engine and of all of its containers until now; None where they cannot be read."""
    engines = [one for one in processes.glob("[0-9]*") if _read(one / "comm").strip() in ENGINE]
    for name in (SLICE, *CONTAINERS):
        text = _read(cgroups / name)
        if not text or (name == SLICE and not any("/system.slice/" in _read(one / "cgroup") for one in engines)):
            continue
        if name.endswith("cpuacct.usage"):
            seconds = int(text) / 1e9
        else:
            seconds = int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
        return seconds if name == SLICE else seconds + sum(map(_of_process, engines))
    return None


def _of_process(folder: Path) -> float:
    """Return the CPU seconds of a process and its children: utime to cstime of proc_pid_stat(5)."""
    fields = _read(folder / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""


class Parts:
    """CPU seconds by part of a run, those of the engine apart.

    Args:
        engine: reads the engine's.
        steps: of the reference loop.
    """

    def __init__(self, engine: Callable[[], float | None] = of_engine, steps: int = STEPS) -> None:
        self.seconds: dict[str, float] = {}
        self._engine, self._steps = engine, steps
        self._first, self._last = engine(), 0.0

    def ended(self, part: str) -> None:
        """Count what processes took since the part before, or since the process began."""
        now = of_processes()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def lines(self) -> list[str]:
        """Return a line for each part and one for the sum, in CPU minutes, and the sum in reference loops."""
        seconds, engine = dict(self.seconds), self._engine()
        if engine is None or self._first is None:
            last = "not counted: the engine and its containers, whose cgroups cannot be read here"
        else:
            seconds["the engine and its containers"] = engine - self._first
            last = ""
        loop, total = reference_loop(self._steps), sum(seconds.values())
        shown = [f"{spent / 60:6.1f}  {part}" for part, spent in seconds.items()]
        sums = f"{total / 60:6.1f}  together: {total / loop:,.0f} reference loops of {loop:.2f} s"
        return ["CPU minutes:", *shown, sums, *([last] if last else [])]
