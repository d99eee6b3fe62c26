"""The figures of benchmarks/first_step.py."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from benchmarks import first_step


@pytest.mark.needs("fincore")
def test_bytes_in_the_page_cache_are_counted_and_files_without_any_are_not(tmp_path: Path) -> None:
    (tmp_path / "just written").write_bytes(b"x" * 3 * mmap.PAGESIZE)
    (tmp_path / "empty").touch()
    assert first_step.cached(sorted(tmp_path.iterdir())) == [3 * mmap.PAGESIZE]


def test_the_table_has_each_layer_of_which_much_is_read_and_sums_up_the_others() -> None:
    def layer(name: str, read: int, files_read: int) -> dict[str, object]:
        return {"name": name, "size": 10**9, "files": 100, "read": read, "files_read": files_read, "packed": 10**8}

    layers = [layer("numpy", 4 * 10**6, 1), layer("torch", 5 * 10**8, 7), layer("Debian packages", 10**6, 2)]
    assert first_step.rows({"layers": layers}) == [
        ("torch", "500.0 MB", "1.00 GB (50 %)", "7 of 100"),
        ("2 others", "5.0 MB", "2.00 GB (0 %)", "3 of 200"),
        ("**all**", "505.0 MB", "3.00 GB (17 %)", "10 of 300"),
    ]
