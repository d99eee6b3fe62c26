"""A pytest plugin for `--usage`: minutes of each file of tests, and how full the disk became.

`make test ARGS=--usage` prints them after each run of pytest.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from pathlib import Path

import pytest

#: Files that take less are one line.
SHORT = 60.0


class Usage:
    """Adds up the durations that pytest reports, and samples the used bytes of the disk that has the checkout.

    Args:
        interval: seconds between two looks at the disk. Layers of several GB take longer than that to write.
    """

    def __init__(self, root: Path, interval: float = 2.0) -> None:
        self.root, self.interval = root, interval
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.highest: defaultdict[str, int] = defaultdict(int)
        self.before = self._used()
        self._file = ""
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _used(self) -> int:
        return shutil.disk_usage(self.root).used

    def _sample(self) -> None:
        while not self._ended.wait(self.interval):
            above = self._used() - self.before
            self.highest[self._file] = max(self.highest[self._file], above)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file = nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._ended.set()
        terminalreporter.section("minutes, and GB of disk above the start of the run")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """A line for each file that takes SHORT seconds and more, the longest first, and one for all others."""
        longest = sorted(self.seconds, key=lambda file: -self.seconds[file])
        shown = [file for file in longest if self.seconds[file] >= SHORT]
        others = [file for file in longest if self.seconds[file] < SHORT]
        rows = [(file, self.seconds[file], self.highest[file]) for file in shown]
        others_seconds = sum(self.seconds[file] for file in others)
        rows.append(("all others", others_seconds, max((self.highest[file] for file in others), default=0)))
        return [f"{seconds / 60:6.1f} min {used / 1e9:6.1f} GB  {file}" for file, seconds, used in rows]
