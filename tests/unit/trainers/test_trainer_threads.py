"""Test what PyTorch's trainers set for memory and threads before PyTorch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("given", "faults"), [({}, False), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, True)], ids=["default", "user's"]
)
def test_memory_of_a_step_is_kept_for_the_next_unless_the_user_says_otherwise(
    given: dict[str, str], faults: bool
) -> None:
    """Allocate and free 100 MB in blocks of 1 MB by turns, as activations are; a page has 4 KB."""
    code = """
import ctypes, resource
import trainers.torch
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(1 << 20) for _ in range(100)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT), **given},
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert (int(ended.stdout) > 10_000) == faults, ended.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, "3000 None", id="neither idle nor shared cores are much slower"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7 None", id="given"),
        pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, "None PASSIVE", id="another policy is given"),
    ],
)
def test_threads_of_openmp_spin_briefly_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    code = "import os, trainers.torch; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    ended = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT), **given},
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert ended.stdout == f"{expected}\n"
