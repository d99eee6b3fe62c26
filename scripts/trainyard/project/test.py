"""Run the tests of a checkout with pytest."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import NoReturn

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.installation import checkout


def run(suite: str | None, arguments: list[str], *, require: str = "", big: bool = False, part: str = "") -> NoReturn:
    """Become tests/suites.py, which runs a suite, or all of them, and gets the signals that this process would get.

    Args:
        suite: None for all.
        arguments: more arguments for pytest.
        require: programs that must be on PATH, separated by commas or spaces. Without it, tests marked with a program
            that is missing are left out (tests/conftest.py).
        big: also run the tests marked ``big`` or ``slow``: of images of many GB, or mostly covered by quicker ones.
        part: ``2/3`` for the second of three parts of the files, which take about the same time; empty for all.

    Raises:
        UserError: the package does not run from a checkout, or there is no such part.
        StepFailed: a program of ``require`` is missing.
    """
    root = checkout("'trainyard dev test'")
    check_programs(require)
    match = re.fullmatch(r"(\d{1,3})/(\d{1,3})", part)
    if part and not (match and 1 <= int(match[1]) <= int(match[2])):
        raise UserError(f"no part {part!r} of the tests: write the first of three as 1/3")
    options = [f"--suite={suite}"] if suite else []
    options += [f"--part={part}"] if part else []
    options += ["--big"] if big else []
    # The commands that tests run must not find this command's variables.
    mine = {f"{settings.PREFIX}{name}" for name in ("SUITE", "ARGS", "REQUIRE", "ALL", "PART")}
    environment = {name: value for name, value in settings.environment().items() if name not in mine}
    command = [sys.executable, "-m", "tests.suites", *options, *arguments]
    os.chdir(root)
    os.execve(command[0], command, environment)


def check_programs(require: str) -> None:
    """Check that programs, separated by commas or spaces, are on PATH.

    Raises:
        StepFailed: one is not.
    """
    if missing := [name for name in require.replace(",", " ").split() if not shutil.which(name)]:
        raise StepFailed(f"required, and not on PATH: {', '.join(missing)}")
