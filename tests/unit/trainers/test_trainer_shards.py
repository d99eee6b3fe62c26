"""Test the records of tar shards: read once, kept, made again after a change, shared by processes."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest
from far_storage import FarStorage
from trainers.common import images, order, shards, storage
from trainers.common.files import UserError

from trainyard.sandbox.datasets import flowers as drawn

ROOT = Path(__file__).resolve().parents[3]
T = TypeVar("T")


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def samples(first: int, count: int, size: int = 300) -> list[tuple[str, bytes]]:
    pairs = [((f"{number:05d}.jpg", bytes([number % 251]) * (size + number)), (f"{number:05d}.cls", b"%d" % number))
             for number in range(first, first + count)]  # fmt: skip
    return [member for pair in pairs for member in pair]


@pytest.fixture
def far(tmp_path: Path, mount: Callable[[Path], FarStorage]) -> FarStorage:
    (tmp_path / "far").mkdir()
    return mount(tmp_path / "far")


def both(folder: str, **more: str) -> tuple[images.Images, images.Images]:
    return images.find_both(argparse.Namespace(datadir=folder, **more))


# --- reading ----------------------------------------------------------------------------------------------------


def opened(far: FarStorage) -> list[str]:
    """Return the shards that were read from their beginning, sorted."""
    return sorted(path for path, start, _ in far.ranges if path.endswith(".tar") and start == 0)


def test_shards_are_read_once_in_large_blocks_and_not_at_all_at_the_next_start(far: FarStorage) -> None:
    drawn.write(far.folder / "d", "tar", train=410, test=7)
    shards_there = {f"d/{path.name}": path.stat().st_size for path in (far.folder / "d").iterdir()}
    train, test = images.find_splits("far://d")
    assert (train.count, test.count) == (410, 7) and opened(far) == sorted(shards_there)
    assert sum(end > start for _, start, end in far.ranges) == len(shards_there), "each is smaller than a block"
    first, prints = train.read(300), (train.fingerprint(), test.fingerprint())
    far.ranges.clear()
    train, test = images.find_splits("far://d")
    assert {path.rpartition(".")[2] for path, _, _ in far.ranges} == {"index"}, "only the index is read"
    assert train.read(300) == first and (train.fingerprint(), test.fingerprint()) == prints


def test_shards_are_read_again_after_a_change(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"train-{number}.tar", samples(number * 10, 5))
    write_tar(tmp_path / "val-0.tar", samples(0, 3))
    before = both(str(tmp_path))[0]
    path = tmp_path / "train-1.tar"
    size = path.stat().st_size
    write_tar(path, samples(500, 5))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    assert path.stat().st_size == size, "the same size, another time"
    after = both(str(tmp_path))[0]
    assert [after.read(number)[1] for number in range(15)] == [*range(5), *range(500, 505), *range(20, 25)]
    write_tar(tmp_path / "train-3.tar", samples(30, 2))
    assert both(str(tmp_path))[0].count == before.count + 2


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"x\n" * 50])
def test_an_index_that_is_damaged_or_cut_off_is_made_again(damage: bytes, tmp_path: Path) -> None:
    drawn.write(tmp_path, "tar", train=10, test=5)
    labels = [both(str(tmp_path))[0].read(number)[1] for number in range(10)]
    for path in tmp_path.glob("*.index"):
        content = path.read_bytes()
        path.write_bytes(damage or content[:-10])
        train, _ = both(str(tmp_path))
        assert [train.read(number)[1] for number in range(10)] == labels and path.read_bytes() == content


def test_the_index_is_kept_in_the_output_folder_if_the_data_are_not_writable(
    far: FarStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn.write(far.folder / "d", "tar", train=10, test=5)
    original = far.open

    def refuse(path: str, mode: str, **options: Any) -> IO[bytes]:
        if mode == "wb":
            raise OSError("Forbidden: no permission storage.objects.create")
        return original(path, mode, **options)

    monkeypatch.setattr(far, "open", refuse)
    both("far://d", output_dir=str(tmp_path / "out"))
    assert not list((far.folder / "d").glob("*.index"))
    far.ranges.clear()
    assert both("far://d", output_dir=str(tmp_path / "out"))[0].count == 10
    assert opened(far) == []
    assert "cannot be saved" not in capsys.readouterr().err, "not for few shards"
    monkeypatch.setattr(shards, "LARGE", 0)
    both("far://d")
    said = capsys.readouterr().err
    assert "this happens once" in said and "cannot be saved" in said and opened(far)


def test_a_million_records_take_little_memory(tmp_path: Path) -> None:
    """Measure: objects per record would take 228 MB; the process itself, with NumPy, takes about 35 MB."""
    count = 1_281_167
    for name in ("train-0.tar", "val-0.tar"):
        write_tar(tmp_path / name, samples(0, 1))
    both(str(tmp_path))
    largest = bytes(count * shards.RECORD.itemsize)
    for path in tmp_path.glob("*.index"):
        path.write_bytes(path.read_bytes().partition(b" ")[0] + b" %d\n" % count + largest)
    program = (
        "import argparse, re; from trainers.common import images;"
        f"train, _ = images.find_both(argparse.Namespace(datadir={str(tmp_path)!r}));"
        "print(train.count, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    records, kilobytes = map(int, ended.stdout.split())
    # The records of both splits, 26 MB each, and while one is read, the file that they are in.
    assert records == count and kilobytes < 150_000, kilobytes


# --- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_other_members_are_no_obstacle(form: int, tmp_path: Path) -> None:
    """Read long names from headers of their own, of a kind for each form."""
    folder = "/".join(["a-folder-of-some-depth"] * 6)
    long = "/".join([folder, "x" * (90 if form == tarfile.USTAR_FORMAT else 150)])
    names = [f"{name}{suffix}" for name in (f"{folder}/1", f"{long}2", "é/3") for suffix in (".jpg", ".cls", ".txt")]
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w", format=form) as archive:
            for name, kind in (("folder", tarfile.DIRTYPE), ("link.jpg", tarfile.SYMTYPE)):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "x"
                archive.addfile(member)
            for number, name in enumerate(names):
                member = tarfile.TarInfo(name)
                member.size = 2
                archive.addfile(member, io.BytesIO(b"%2d" % number))
    train, _ = both(str(tmp_path))
    assert [train.read(number)[:2] for number in range(train.count)] == [(b" 0", 1), (b" 3", 4), (b" 6", 7)]


def test_a_damaged_header_within_a_shard_is_reported(tmp_path: Path) -> None:
    """Report what Python's tarfile takes for the end."""
    drawn.write(tmp_path, "tar", train=10, test=5)
    path = tmp_path / "train-00000.tar"
    content = bytearray(path.read_bytes())
    content[content.index(b"00007.jpg")] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.tar: damaged tar file \(a damaged header\); download it again"):
        both(str(tmp_path))


@pytest.mark.parametrize("cut", [100, 600, 1200])
def test_a_tar_file_that_is_cut_off_is_reported(cut: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", samples(0, 2, size=2000))
    write_tar(tmp_path / "val-0.tar", samples(0, 2))
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"train-0\.tar: (damaged tar file \(.*\); download it again|.* must have)"):
        both(str(tmp_path))


def test_a_label_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", [("a/1.jpg", b"x"), ("a/1.cls", b"rose")])
    with pytest.raises(UserError, match=r"train-0\.tar: a/1\.cls has b'rose': write the number of the class$"):
        images.find(str(tmp_path), "train")


@pytest.mark.parametrize("prefix", ["./", "v1.0/", "a.b/c.d/"])
def test_samples_are_keyed_by_the_base_name_up_to_its_first_dot(prefix: str, tmp_path: Path) -> None:
    """Do as https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py does."""
    members = [(prefix + name, content) for name, content in samples(0, 5)]
    extra = [(prefix + "00000.seg.png", b"mask"), (prefix + ".hidden.jpg", b"x"), (prefix + "README", b"x")]
    write_tar(tmp_path / "train-0.tar", [*members, *extra])
    write_tar(tmp_path / "val-0.tar", members)
    train, _ = both(str(tmp_path))
    assert [train.read(number)[:2] for number in range(train.count)] == [
        (content, number) for number, (name, content) in enumerate(members[::2])
    ]


# --- several processes ------------------------------------------------------------------------------------------


class Rank:
    """Be one of several processes, each a thread."""

    def __init__(self, rank: int, processes: int, barrier: threading.Barrier, slots: list[bytes]) -> None:
        self.rank, self.processes, self.barrier, self.slots = rank, processes, barrier, slots

    def gather(self, content: bytes) -> list[bytes]:
        self.slots[self.rank] = content
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def broadcast(self, content: bytes) -> bytes:
        return self.gather(content)[0]


def together(count: int, work: Callable[[Rank], T]) -> list[T | UserError]:
    """Return the results of ``work`` in ``count`` processes, or what they raise."""
    barrier, slots = threading.Barrier(count, timeout=60), [b""] * count
    results: list[T | UserError | None] = [None] * count

    def one(rank: int) -> None:
        try:
            results[rank] = work(Rank(rank, count, barrier, slots))
        except UserError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results  # type: ignore[return-value]


def test_a_name_without_a_file_empties_no_listing(tmp_path: Path) -> None:
    """Show by a link what is seen when another process renames its temporary file behind the listing."""
    write_tar(tmp_path / "train-0.tar", samples(0, 3))
    (tmp_path / ".index.tmp").symlink_to("renamed")
    assert list(storage.entries(str(tmp_path))) == ["train-0.tar"]


def test_processes_share_the_work_of_the_index(far: FarStorage) -> None:
    for number in range(7):
        write_tar(far.folder / "d" / f"train-{number}.tar", samples(number * 10, 3 + number))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    names = sorted(f"d/{path.name}" for path in (far.folder / "d").iterdir())
    found = together(3, lambda rank: images.find_splits("far://d", "", rank))
    assert opened(far) == names, "each shard is read by one of them"
    labels = [number * 10 + place for number in range(7) for place in range(3 + number)]
    for pair in found:
        assert isinstance(pair, tuple)
        assert [pair[0].read(place)[1] for place in range(pair[0].count)] == labels


def test_processes_with_equal_sizes_of_shards_but_other_contents_end_with_one_line(tmp_path: Path) -> None:
    for rank in range(2):
        for split in ("train", "test"):
            made = [(number % 5, bytes([number]) * 300) for number in range(20)]
            if split == "train" and rank:
                made = [(label, bytes(300)) for label, _ in made]
            drawn.write_tar(tmp_path / str(rank) / f"{split}-00000.tar", made)
    sizes = [sorted((path.name, path.stat().st_size) for path in (tmp_path / rank).iterdir()) for rank in "01"]
    assert sizes[0] == sizes[1]
    errors = together(
        2, lambda rank: images.find_both(argparse.Namespace(datadir=str(tmp_path / str(rank.rank))), rank)
    )
    for error in errors:
        assert isinstance(error, UserError) and "(contents or labels of training images)" in str(error)
    alike = argparse.Namespace(datadir=str(tmp_path / "0"))
    assert not [
        found for found in together(2, lambda rank: images.find_both(alike, rank)) if isinstance(found, UserError)
    ]


def test_a_damaged_shard_ends_all_processes_with_the_same_line(far: FarStorage) -> None:
    for number in range(4):
        write_tar(far.folder / "d" / f"train-{number}.tar", samples(number * 10, 3))
    (far.folder / "d" / "train-2.tar").write_bytes(b"<html>" * 500)
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    args = argparse.Namespace(datadir="far://d")
    errors = {str(error) for error in together(3, lambda rank: images.find_both(args, rank))}
    assert len(errors) == 1 and "train-2.tar: damaged tar file" in errors.pop()


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_processes_with_different_data_end_with_an_error(form: str, tmp_path: Path) -> None:
    for rank, count in enumerate((30, 28)):
        drawn.write(tmp_path / str(rank), form, train=count, test=5)
    errors = together(
        2, lambda rank: images.find_both(argparse.Namespace(datadir=str(tmp_path / str(rank.rank))), rank)
    )
    assert all("the processes see different data: rank 0 has" in str(error) for error in errors)
    assert all(isinstance(error, UserError) for error in errors)


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_copies_of_the_same_data_are_alike(form: str, tmp_path: Path) -> None:
    for rank in range(2):
        drawn.write(tmp_path / str(rank), form, train=30, test=5)
    args = [argparse.Namespace(datadir=str(tmp_path / str(rank))) for rank in range(2)]
    assert together(2, lambda rank: images.find_both(args[rank.rank], rank)[0].count) == [30, 30]


def test_equal_names_with_other_labels_are_different_data(tmp_path: Path) -> None:
    for rank in range(2):
        drawn.write(tmp_path / str(rank), "folder", train=30, test=5)
    (tmp_path / "1" / "train" / "rose" / "00002.jpg").rename(tmp_path / "1" / "train" / "tulip" / "00002.jpg")
    args = [argparse.Namespace(datadir=str(tmp_path / str(rank))) for rank in range(2)]
    for error in together(2, lambda rank: images.find_both(args[rank.rank], rank)):
        assert "rank 0 has 30 images with fingerprint" in str(error)


def test_a_run_with_other_counts_of_images_is_refused_by_all() -> None:
    def check(rank: Rank) -> None:
        order.check_alike(rank, "training images", f"{(300, 298)[rank.rank]} images")

    for error in together(2, check):
        assert "rank 0 has 300 images, rank 1 298 images (training images)" in str(error)
