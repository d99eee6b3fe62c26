"""What tests cost: the CPU minutes that `make test` prints, and with ARGS=--usage minutes and disk of each file."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import cpu_time, usage


class Report:
    """What pytest reports of one phase of a test."""

    def __init__(self, nodeid: str, duration: float) -> None:
        self.nodeid, self.duration = nodeid, duration


def test_long_files_have_a_line_each_and_the_others_share_one(tmp_path: Path) -> None:
    counted = usage.Usage(tmp_path)
    for nodeid, seconds in (("a.py::first", 50), ("a.py::second", 40), ("b.py::first", 600), ("c.py::x", 12)):
        counted.pytest_runtest_logreport(Report(nodeid, seconds))  # type: ignore[arg-type]
    counted.highest.update({"b.py": 12 * 10**9, "c.py": 3 * 10**9})
    assert counted.lines() == [
        "  10.0 min   12.0 GB  b.py",
        "   1.5 min    0.0 GB  a.py",
        "   0.2 min    3.0 GB  all others",
    ]


def test_the_disk_is_sampled_while_a_file_runs(tmp_path: Path) -> None:
    counted = usage.Usage(tmp_path, interval=0.01)
    counted.before -= 10**9
    counted.pytest_runtest_logstart("a.py::first")
    until = time.monotonic() + 30
    while "a.py" not in counted.highest and time.monotonic() < until:
        time.sleep(0.01)
    assert counted.highest["a.py"] > 0


#: proc_pid_stat(5) of a process with spaces in its name: 10 ms of CPU time, and 290 ms of its children.
STAT = "12 (a (b) c) S 1 12 12 0 -1 4194560 6 3 4 2 0 1 9 20 20 0 12 0 121 37 18"


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    """The cgroups and the processes of a host with an engine."""
    for number, comm in (("12", "dockerd"), ("13", "bash")):
        folder = tmp_path / "proc" / number
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "stat").write_text(STAT)
        (folder / "cgroup").write_text("0::/\n")
    return tmp_path / "cgroup", tmp_path / "proc"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("docker/cpu.stat", "usage_usec 2000000\nuser_usec 1\n"),
        ("cpuacct/docker/cpuacct.usage", "2000000000\n"),
        ("cpu,cpuacct/docker/cpuacct.usage", "2000000000\n"),
    ],
)
def test_the_engine_beside_the_cgroup_of_its_containers_is_added(host: tuple[Path, Path], file: str, text: str) -> None:
    (host[0] / file).parent.mkdir(parents=True)
    (host[0] / file).write_text(text)
    assert cpu_time.of_engine(*host) == pytest.approx(2.3)


def test_an_engine_that_systemd_runs_is_in_the_slice_of_its_containers(host: tuple[Path, Path]) -> None:
    (host[0] / "system.slice").mkdir(parents=True)
    (host[0] / "system.slice" / "cpu.stat").write_text("usage_usec 2000000\n")
    assert cpu_time.of_engine(*host) is None, "the slice of others"
    (host[1] / "12" / "cgroup").write_text("0::/system.slice/docker.service\n")
    assert cpu_time.of_engine(*host) == 2.0


def test_children_count_once_they_have_ended_and_the_sum_is_in_reference_loops(host: tuple[Path, Path]) -> None:
    used = cpu_time.Parts(lambda: cpu_time.of_engine(*host), steps=100_000)
    used.ended("checks")
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    used.ended("tests")
    assert 0.5 <= used.seconds["tests"] < 0.5 + used.seconds["checks"]
    title, checks, tests, together, unread = used.lines()
    assert (title, checks[6:], tests) == ("CPU minutes:", "  checks", "   0.0  tests")
    assert re.fullmatch(r" +\d+\.\d  together: [\d,]+ reference loops of 0\.\d\d s", together)
    assert unread == "not counted: the engine and its containers, whose cgroups cannot be read here"


def test_the_engine_is_a_part_of_its_own(host: tuple[Path, Path]) -> None:
    engine = iter((60.0, 180.0))
    used = cpu_time.Parts(lambda: next(engine), steps=1_000)
    used.ended("checks")
    assert used.lines()[2] == "   2.0  the engine and its containers"
