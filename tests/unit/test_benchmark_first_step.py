"""The figures of benchmarks/first_step.py."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from benchmarks import first_step

from trainyard.common.errors import StepFailed


@pytest.mark.needs("fincore")
def test_bytes_in_the_page_cache_are_counted_and_files_without_any_are_not(tmp_path: Path) -> None:
    (tmp_path / "just written").write_bytes(b"x" * 3 * mmap.PAGESIZE)
    (tmp_path / "empty").touch()
    assert first_step.cached(sorted(tmp_path.iterdir())) == [3 * mmap.PAGESIZE]


def test_the_table_has_each_layer_of_which_much_is_read_and_sums_up_the_others() -> None:
    def layer(name: str, read: int, files_read: int) -> dict[str, object]:
        return {"name": name, "size": 10**9, "files": 100, "read": read, "files_read": files_read}

    layers = [layer("numpy", 4 * 10**6, 1), layer("torch", 5 * 10**8, 7), layer("Debian packages", 10**6, 2)]
    assert first_step.rows({"layers": layers}) == [
        ("torch", "500.0 MB", "1.00 GB (50 %)", "7 of 100"),
        ("2 others", "5.0 MB", "2.00 GB (0 %)", "3 of 200"),
        ("**all**", "505.0 MB", "3.00 GB (17 %)", "10 of 300"),
    ]


def test_the_layers_of_an_image_are_below_those_of_its_container() -> None:
    mounts = "proc /proc proc rw 0 0\noverlay / overlay rw,lowerdir=/s/9/fs:/s/2/fs:/s/1/fs,upperdir=/s/10/fs 0 0\n"
    assert first_step.layer_folders(mounts, 2) == [Path("/s/1/fs"), Path("/s/2/fs")]


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("overlay / overlay rw,lowerdir=/s/1/fs,upperdir=/s/2/fs 0 0", "is overlay of 1 folders, not an overlay of 2"),
        ("overlay / overlay rw,lowerdir=2/fs:1/fs 0 0", "is overlay of 2 folders, not an overlay of 2"),
        ("/dev/sda / btrfs rw 0 0", "is btrfs of 1 folders, not an overlay of 2"),
    ],
    ids=["too few", "relative", "no overlay"],
)
def test_a_root_that_cannot_be_read_by_layer_is_one_line(root: str, words: str) -> None:
    with pytest.raises(StepFailed, match=words):
        first_step.layer_folders(root, 2)
