"""The runs of pytest that `trainyard dev test` makes: suites by folder and by package, in parts of about equal time."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tests import cpu_time

ROOT = Path(__file__).resolve().parent.parent

#: Folders of tests/, in the order they run in.
FOLDERS = ("unit", "image", "cloud")

#: Suite -> patterns of its files under tests/; ``*`` stands for slashes too. All other files are of ``builder``.
PACKAGES = {
    "builder": (),
    "jobs": (
        "unit/test_check_*", "unit/test_corpus.py", "unit/test_job*", "unit/test_platforms.py", "unit/test_pod*",
        "unit/test_rehears*", "image/test_rehearse.py", "cloud/test_authorize_tpu.py", "cloud/test_docs_jobs.py",
        "cloud/test_gcloud_job_files.py", "cloud/test_jobs.py", "cloud/test_pod*", "cloud/test_sky_pilot.py",
    ),
    "launcher": ("unit/launcher/*", "image/test_launcher_*", "cloud/test_launcher_*"),
    "trainers": ("unit/trainers/*", "image/test_trainers_*", "image/test_gpt.py"),
}  # fmt: skip

#: Under tests/, and minutes of a file that it does not have.
MINUTES, SHORT = "minutes.json", 0.1

#: Seconds that pytest gets to end after a signal: fixtures remove containers, which took 12 s (2026-11).
_END = 60

#: pytest's exit status if options such as ``-k`` select no test of a folder.
#: https://docs.pytest.org/en/stable/reference/exit-codes.html
NOTHING_SELECTED = 5


def run(suite: str | None, arguments: list[str], *, big: bool = False, part: str = "") -> int:
    """Run a suite, or all of them; the exit status of the first run of pytest that failed, else 0.

    Args:
        suite: a folder of tests/ or a package of :data:`PACKAGES`; None for all.
        arguments: more arguments for pytest.
        big: also run the tests marked `big` or `slow`.
        part: `2/3` for the second of three parts of the files, which take about the same time; empty for all.
    """
    more = [*(["--big"] if big else []), *arguments]
    may_be_empty = arguments or part or suite in PACKAGES
    failed, used = 0, cpu_time.Parts()
    used.ended("checks")
    for runs in _runs(ROOT / "tests", suite, part):
        commands = [[sys.executable, "-m", "pytest", *words, *more] for words in runs.values()]
        for name, status in zip(runs, _beside_each_other(commands), strict=True):
            used.ended(name)
            failed = failed or (0 if status == NOTHING_SELECTED and may_be_empty else status)
    if not suite:
        print(*used.lines(), sep="\n", flush=True)
    return failed


def _beside_each_other(commands: Iterable[list[str]]) -> Iterator[int]:
    """Run commands at the same time and yield their exit statuses; the output of the first comes at once.

    That of each other comes when those before it have ended. After a signal, all end as after Ctrl-C, so that pytest
    prints the failures that it has seen, and whatever they have started is killed.
    """
    left: list[tuple[subprocess.Popen[bytes], IO[bytes] | None]] = []
    try:
        for command in commands:
            output: IO[bytes] | None = tempfile.TemporaryFile() if left else None  # noqa: SIM115
            # Signals reach it from here alone, once, whether this process got them or its group.
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            left.append((process, output))
        while left:
            status = left[0][0].wait()
            _print(left.pop(0)[1])
            yield status
    finally:
        for process, _ in left:
            _signal_group(process, signal.SIGINT)
        try:
            for process, output in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END)
                _print(output)
        finally:
            for process, _ in left:
                _signal_group(process, signal.SIGKILL)
                process.wait()


def _print(output: IO[bytes] | None) -> None:
    if output:
        with output:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def minutes() -> dict[str, float]:
    """Return the minutes that each file of tests takes with `--big`, by its path under tests/."""
    known: dict[str, float] = json.loads((ROOT / "tests" / MINUTES).read_text(encoding="utf-8"))
    return defaultdict(lambda: SHORT, known)


def name_of(path: Path) -> str:
    """Return the path of a file of tests relative to tests/."""
    return os.path.relpath(path, ROOT / "tests")


def suite_of(file: str) -> str:
    """Return the suite, by package, of a file whose path is under tests/."""
    return next(
        (suite for suite, patterns in PACKAGES.items() if any(fnmatch.fnmatch(file, one) for one in patterns)),
        "builder",
    )


def parts(minutes: dict[str, float], count: int) -> list[list[str]]:
    """Return the files in ``count`` parts: each file, the longest first, joins the part that takes least until then.

    Args:
        minutes: of each file.
    """
    found: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for file in sorted(minutes, key=lambda file: (-minutes[file], file)):
        least = totals.index(min(totals))
        found[least].append(file)
        totals[least] += minutes[file]
    return [sorted(files) for files in found]


def _runs(tests: Path, suite: str | None, part: str) -> list[dict[str, list[str]]]:
    """Return the words of the runs of pytest, folders or files and options, by name: those at the same time together.

    Unit tests use all cores. Of those that use the engine, the ones marked ``concurrent`` run three at a time, by file,
    after the others. Those run one by one, and wait half of their time for the engine: unit tests run beside them.
    """
    unit, engine = _chosen(tests, suite, part)
    of_units = {"unit tests": [*unit, "--numprocesses=auto"]} if unit else {}
    if not engine:
        return [of_units]
    three = ["--concurrent=only", "--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]
    one_by_one = {"images and clouds, one by one": [*engine, "--concurrent=without"]}
    return [{**one_by_one, **of_units}, {"images and clouds, three at a time": [*engine, *three]}]


def _chosen(tests: Path, suite: str | None, part: str) -> tuple[list[str], list[str]]:
    """Return the folders or files of unit tests, and those of tests that use the engine."""
    folders = [suite] if suite in FOLDERS else list(FOLDERS)
    if suite in PACKAGES or part:
        names = (str(path.relative_to(tests)) for folder in folders for path in (tests / folder).rglob("test_*.py"))
        files = [name for name in names if suite not in PACKAGES or suite_of(name) == suite]
        chosen = _part(files, part) if part else sorted(files)
    else:
        chosen = folders
    found = [f"tests/{name}" for name in chosen]
    unit = [name for name in found if name.startswith("tests/unit")]
    return unit, [name for name in found if name not in unit]


def _part(files: list[str], part: str) -> list[str]:
    """Return the files of a part such as `2/3`."""
    number, count = map(int, part.split("/"))
    known = minutes()
    return parts({file: known[file] for file in files}, count)[number - 1]


def main() -> None:
    """Run what the options ask for. The others are pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--suite", choices=[*FOLDERS, *PACKAGES])
    parser.add_argument("--part", default="", metavar="NUMBER/COUNT")
    parser.add_argument("--big", action="store_true")
    given, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(run(given.suite, arguments, big=given.big, part=given.part))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
