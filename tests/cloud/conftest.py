"""Packages of clients, each in a separate folder, because their requirements contradict ours or each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# To write the locks again, in this folder:
#   for name in cloud-tpu-client google-api-client skypilot; do
#     echo "# Locked from $name.in by the command in conftest.py. Do not edit." >$name.lock
#     uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --no-annotate --only-binary :all: \
#       --python-version 3.11 --python-platform linux $name.in >>$name.lock
#   done


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Install the packages of a lock into a separate folder, for CPython 3.11 on Linux as in the images."""
    made: dict[Path, Path] = {}

    def install(lock: Path) -> Path:
        if lock not in made:
            folder = tmp_path_factory.mktemp("packages")
            command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", str(folder)]
            command += ["--python-version", "3.11", "--only-binary", ":all:"]
            command += ["--require-hashes", "--requirement", str(lock)]
            subprocess.run(command, check=True, timeout=300)
            made[lock] = folder
        return made[lock]

    return install
