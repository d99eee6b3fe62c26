"""Packages of clients, each in a separate folder, because their requirements contradict ours or each other.

Also Slurm and Open MPI, for the tests that need them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cloud import slurm_cluster
from tests.cloud.slurm_cluster import Slurm

# To write the locks again, in this folder:
#   for name in cloud-tpu-client google-api-client jax skypilot; do
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


@pytest.fixture(scope="module")
def schedulers() -> None:
    """Install Slurm and Open MPI where they are missing."""
    slurm_cluster.install()
    assert [program for program in slurm_cluster.PROGRAMS if not shutil.which(program)] == []


@pytest.fixture(scope="module")
def slurm(schedulers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster of two nodes on this host."""
    yield from slurm_cluster.started(tmp_path_factory.mktemp("slurm"))
