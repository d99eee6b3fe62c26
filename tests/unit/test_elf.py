"""The libraries that programs load."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from tests.unit.test_mutations import shared_library

from trainyard.oci.layers import needed_libraries


def test_a_program_names_the_libraries_that_it_loads() -> None:
    assert any(name.startswith("libc.so") for name in needed_libraries(Path(sys.executable).resolve(), "bin/python")[0])


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"#!/bin/sh\n", lambda data: data[:100]])
def test_what_is_no_program_needs_nothing(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    path = tmp_path / "program"
    path.write_bytes(damage(Path(sys.executable).resolve().read_bytes()))
    assert needed_libraries(path, "bin/python") == ((), ())


def test_the_folders_of_a_library_are_those_of_the_image(tmp_path: Path) -> None:
    """With DT_RUNPATH (tag 29), in which $ORIGIN is the folder of the file."""
    library = bytearray(shared_library("libb.so.1", "$ORIGIN/../b.libs:${ORIGIN}:/usr/lib/c"))
    tag = library.rindex(struct.pack("<Q", 1))
    library[tag : tag + 8] = struct.pack("<Q", 29)
    (tmp_path / "a.so").write_bytes(library)
    found = needed_libraries(tmp_path / "a.so", "opt/site-packages/a/a.so")
    assert found == (("libb.so.1",), ("opt/site-packages/b.libs", "opt/site-packages/a", "usr/lib/c"))
