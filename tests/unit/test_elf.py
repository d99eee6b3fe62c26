"""The libraries that programs load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainyard.oci.layers import needed_libraries


def test_a_program_names_the_libraries_that_it_loads() -> None:
    assert any(name.startswith("libc.so") for name in needed_libraries(Path(sys.executable).resolve()))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"#!/bin/sh\n", lambda data: data[:100]])
def test_what_is_no_program_needs_nothing(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    path = tmp_path / "program"
    path.write_bytes(damage(Path(sys.executable).resolve().read_bytes()))
    assert needed_libraries(path) == ()
