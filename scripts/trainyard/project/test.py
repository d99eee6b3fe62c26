"""The test suites, run with pytest."""

from __future__ import annotations

import shutil
import subprocess
import sys

from trainyard.common import settings
from trainyard.common.console import StepFailed
from trainyard.common.installation import checkout

#: Folders of tests/, in the order they run in.
SUITES = ("unit", "image", "cloud")

#: pytest's exit status if options such as ``-k`` select no test of a folder.
#: https://docs.pytest.org/en/stable/reference/exit-codes.html
NOTHING_SELECTED = 5


def run(suite: str | None, arguments: list[str], *, require: str = "", big: bool = False) -> int:
    """Run a suite, or all of them; the exit status of the first run of pytest that failed, else 0.

    Args:
        suite: one of :data:`SUITES`; None for all.
        arguments: more arguments for pytest.
        require: programs that must be on PATH, separated by commas or spaces. Without it, tests marked with a program
            that is missing are left out (tests/conftest.py).
        big: also run the tests marked ``big`` or ``slow``: of images of many GB, or mostly covered by quicker ones.

    Raises:
        UserError: the package does not run from a checkout.
        StepFailed: a program of ``require`` is missing.
    """
    root = checkout("'trainyard dev test'")
    check_programs(require)
    failed = 0
    for folders, options in _runs(suite):
        command = [sys.executable, "-m", "pytest", *folders, *options, *(["--big"] if big else []), *arguments]
        status = subprocess.run(command, cwd=root, env=_environment(), check=False).returncode
        failed = failed or (0 if status == NOTHING_SELECTED and arguments else status)
    return failed


def check_programs(require: str) -> None:
    """Check that programs, separated by commas or spaces, are on PATH.

    Raises:
        StepFailed: one is not.
    """
    if missing := [name for name in require.replace(",", " ").split() if not shutil.which(name)]:
        raise StepFailed(f"required, and not on PATH: {', '.join(missing)}")


def _environment() -> dict[str, str]:
    """The environment of pytest: the commands that tests run must not find this command's variables."""
    mine = {f"{settings.PREFIX}{name}" for name in ("SUITE", "ARGS", "REQUIRE", "ALL")}
    return {name: value for name, value in settings.environment().items() if name not in mine}


def _runs(suite: str | None) -> list[tuple[list[str], list[str]]]:
    """Folders and options of each run of pytest.

    Unit tests use all cores. Of those that use the engine, the ones marked ``concurrent`` run two at a time, by file,
    after the others.
    """
    runs = []
    if suite in (None, "unit"):
        runs.append((["tests/unit"], ["--numprocesses=auto"]))
    if suite != "unit":
        folders = [f"tests/{name}" for name in SUITES if name != "unit" and suite in (None, name)]
        runs.append((folders, ["--concurrent=without"]))
        runs.append((folders, ["--concurrent=only", "--numprocesses=2", "--dist=loadfile"]))
    return runs
