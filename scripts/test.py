"""Run the checks and the tests.

make test                 everything: checks, unit tests, and tests that build images and run in them
make test SUITE=unit      one folder of tests/: unit (no Docker, seconds), image, cloud
make test ARGS="-k lock"  with arguments for pytest
make test ALL=1           also the images that CI leaves out, 4 minutes and 20 GB of disk each
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from scripts import check, cli
from scripts.cli import ROOT, UserError, nearest

SUITES = ("unit", "image", "cloud")


def main(arguments: list[str]) -> int:
    cli.parser(__doc__, target=False).parse_args(arguments)
    suite = os.environ.get("SUITE")
    if suite and suite not in SUITES:
        raise UserError(f"SUITE={suite!r}: there are {', '.join(SUITES)}{nearest(suite, SUITES)}")
    if not suite:
        check.main([])
    try:
        more = shlex.split(os.environ.get("ARGS", ""))
    except ValueError as error:
        raise UserError(f"ARGS: {error}") from None
    failed = 0
    for folders, options in _runs(suite):
        command = [sys.executable, "-m", "pytest", *folders, *options, *more]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed = failed or (0 if status == NOTHING_SELECTED and more else status)
    return failed


#: pytest's exit status when ``-k`` and the like left no test of a folder.
NOTHING_SELECTED = 5


def _runs(suite: str | None) -> list[tuple[list[str], list[str]]]:
    """Folders and options of each pytest run: unit tests on all cores, those that share the engine one by one."""
    unit = (["tests/unit"], ["--numprocesses=auto"])
    if suite:
        return [unit] if suite == "unit" else [([f"tests/{suite}"], [])]
    return [unit, ([f"tests/{name}" for name in SUITES if name != "unit"], [])]


if __name__ == "__main__":
    cli.run(main)
