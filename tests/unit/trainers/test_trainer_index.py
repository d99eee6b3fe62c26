"""The index of shards: read once, kept, brought up to date, shared by processes, and taken from other tools."""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from far_storage import FarStorage
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from trainers.common import exits, images, index, order, storage, tarshard, tfrecord
from trainers.common.exits import UserError

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


def write_tfrecord(path: Path, contents: Sequence[bytes]) -> None:
    with path.open("wb") as file:
        for data in contents:
            length = struct.pack("<Q", len(data))
            file.write(length + struct.pack("<I", tfrecord.masked_crc(length)))
            file.write(data + struct.pack("<I", tfrecord.masked_crc(data)))


@pytest.fixture
def far(tmp_path: Path, mount: Callable[[Path], FarStorage]) -> FarStorage:
    (tmp_path / "far").mkdir()
    return mount(tmp_path / "far")


def start_again(far: FarStorage) -> None:
    """As a new process would: nothing is in memory."""
    index._map.cache_clear()
    far.ranges.clear()


def both(folder: str, **more: str) -> tuple[images.Images, images.Images]:
    return images.find_both(argparse.Namespace(datadir=folder, **more))


# --- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_shards_are_read_once_in_large_blocks_and_not_at_all_at_the_next_start(
    form: str, far: FarStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn.write(far.folder / "d", form, train=410, test=7)
    monkeypatch.setattr(index, "BLOCK", 64 << 10)
    shards = {f"d/{path.name}": path.stat().st_size for path in (far.folder / "d").iterdir()}
    train, test = both("far://d")
    assert (train.count, test.count) == (410, 7)
    assert sum(far.bytes_of(path) for path in shards) == sum(shards.values()), "every byte of every shard once"
    assert all(end - start == 64 << 10 or end == shards[path] for path, start, end in far.ranges if path in shards)
    first, prints = train.read(300), (train.fingerprint(), test.fingerprint())
    start_again(far)
    train, test = both("far://d")
    assert {path for path, _, _ in far.ranges} == {f"d/{index.NAME}"}, "only the index is read"
    assert train.read(300) == first and (train.fingerprint(), test.fingerprint()) == prints


def test_many_shards_are_read_at_a_time(far: FarStorage) -> None:
    for number in range(20):
        write_tar(far.folder / "d" / f"train-{number:03d}.tar", samples(number * 10, 10))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    far.gather = index.READS
    both("far://d")
    assert far.most_at_once == index.READS


def test_blocks_within_a_large_record_are_not_read(far: FarStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 4096)
    write_tar(far.folder / "d" / "train-0.tar", samples(0, 4, size=200_000))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 2))
    train, _ = both("far://d")
    assert train.count == 4
    assert far.bytes_of("train-0.tar") < 200_000, "of 800,000"


def test_only_a_shard_that_changed_is_read_again(far: FarStorage) -> None:
    for number in range(3):
        write_tar(far.folder / "d" / f"train-{number}.tar", samples(number * 10, 5))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    before = both("far://d")[0]
    path = far.folder / "d" / "train-1.tar"
    size = path.stat().st_size
    write_tar(path, samples(500, 5))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    assert path.stat().st_size == size, "the same size, another time"
    start_again(far)
    after = both("far://d")[0]
    assert {name for name, _, _ in far.ranges} == {"d/train-1.tar", f"d/{index.NAME}"}
    assert [after.read(number)[1] for number in range(15)] == [*range(5), *range(500, 505), *range(20, 25)]
    assert after.fingerprint() != before.fingerprint()


@pytest.mark.parametrize("damage", [b"", b"trainyard index 0\n", b"trainyard index 1\n" + b"\xff" * 40])
def test_a_damaged_index_is_made_again(damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn.write(tmp_path, "tar", train=10, test=5)
    labels = [both(str(tmp_path))[0].read(number)[1] for number in range(10)]
    (tmp_path / index.NAME).write_bytes(damage)
    capsys.readouterr()
    train, _ = both(str(tmp_path))
    assert [train.read(number)[1] for number in range(10)] == labels
    assert not damage or "trainyard.index cannot be used" in capsys.readouterr().err


def test_an_index_that_is_cut_off_is_made_again(tmp_path: Path) -> None:
    drawn.write(tmp_path, "tar", train=10, test=5)
    both(str(tmp_path))
    content = (tmp_path / index.NAME).read_bytes()
    (tmp_path / index.NAME).write_bytes(content[:-10])
    assert both(str(tmp_path))[0].count == 10
    assert (tmp_path / index.NAME).stat().st_size == len(content)


def test_the_index_is_kept_in_the_output_folder_if_the_data_are_not_writable(
    far: FarStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn.write(far.folder / "d", "tfrecord", train=10, test=5)

    def refuse(path: str, mode: str) -> None:
        raise OSError("Forbidden: no permission storage.objects.create")

    monkeypatch.setattr(far, "open", refuse)
    both("far://d", output_dir=str(tmp_path / "out"))
    assert not (far.folder / "d" / index.NAME).exists()
    far.ranges.clear()
    assert both("far://d", output_dir=str(tmp_path / "out"))[0].count == 10
    assert far.ranges == []
    capsys.readouterr()
    monkeypatch.setattr(index, "LARGE", 0)
    both("far://d")
    assert "cannot be saved" in capsys.readouterr().err and far.ranges


@pytest.mark.parametrize("large", [False, True])
def test_only_shards_that_take_a_while_have_messages(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "train-0.tar", samples(0, 3))
    (tmp_path / "data" / index.NAME).mkdir()  # the index cannot be written
    if large:
        monkeypatch.setattr(index, "LARGE", 0)
    found = storage.entries(str(tmp_path / "data"))
    assert index.load(str(tmp_path / "data"), found, ["train-0.tar"]).shards
    said = capsys.readouterr().err
    assert ("this happens once" in said, "cannot be saved" in said) == (large, large)


def test_the_module_indexes_a_folder(tmp_path: Path) -> None:
    drawn.write(tmp_path / "a", "tar", train=10, test=5)
    drawn.write(tmp_path / "b" / "x", "tfrecord", train=10, test=5)
    (tmp_path / "b" / "x").rename(tmp_path / "b" / "train")
    command = [sys.executable, "-m", "trainers.common.index"]
    for folder, said in (("a", "a: 15 records in 2 shards"), ("b", "b/train: 15 records in 2 shards")):
        ended = subprocess.run([*command, tmp_path / folder], cwd=ROOT, capture_output=True, text=True, check=True)
        assert ended.stdout.strip().endswith(said)
    assert (tmp_path / "a" / index.NAME).exists() and (tmp_path / "b" / "train" / index.NAME).exists()
    (tmp_path / "none").mkdir()
    ended = subprocess.run([*command, tmp_path / "none"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == exits.USAGE and ended.stderr.count("\n") == 1 and "has no *.tar" in ended.stderr


def test_a_million_records_take_little_memory(tmp_path: Path) -> None:
    """Objects per record would take 228 MB; the process itself, with NumPy, takes about 35 MB."""
    count = 1_281_167
    for name in ("train-0.tar", "val-0.tar"):
        write_tar(tmp_path / name, samples(0, 1))
    found = storage.entries(str(tmp_path))
    table = np.zeros(count + 1, index.RECORD)
    shards = [index.Shard(name, found[name].size, found[name].version, records, "")
              for name, records in (("train-0.tar", count), ("val-0.tar", 1))]  # fmt: skip
    (tmp_path / index.NAME).write_bytes(index.Index(shards, table).to_bytes())
    program = (
        "import argparse, re; from trainers.common import images;"
        f"train, _ = images.find_both(argparse.Namespace(datadir={str(tmp_path)!r}));"
        "print(train.count, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    records, kilobytes = map(int, ended.stdout.split())
    assert records == count and kilobytes < 100_000


# --- formats ----------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"\A([a-z.0-9]{1,90}/){0,3}[a-zé][a-z0-9]{0,40}\.(jpg|txt)\Z")


@settings(max_examples=examples(60))
@given(st.lists(NAMES, min_size=1, max_size=6, unique=True), st.sampled_from([0, 1, 2]), st.integers(0, 2000))
def test_members_are_those_of_pythons_tarfile(names: list[str], form: int, size: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = size + number
            try:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
            except ValueError:  # ustar cannot store such a name
                assert form == tarfile.USTAR_FORMAT
    content = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        expected = [(found.name, found.offset_data, found.size) for found in archive if found.isfile()]
    assert list(tarshard.members(lambda at, count: content[at : at + count], len(content))) == expected


@pytest.mark.parametrize("cut", [100, 600, 1200])
def test_a_tar_file_that_is_cut_off_is_reported(cut: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", samples(0, 2, size=2000))
    write_tar(tmp_path / "val-0.tar", samples(0, 2))
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"train-0\.tar: (damaged tar file \(.*\); download it again|.* must have)"):
        both(str(tmp_path))


@pytest.mark.parametrize("prefix", ["./", "v1.0/", "a.b/c.d/"])
def test_samples_are_keyed_by_the_base_name_up_to_its_first_dot(prefix: str, tmp_path: Path) -> None:
    """As https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py has it."""
    members = [(prefix + name, content) for name, content in samples(0, 5)]
    extra = [(prefix + "00000.seg.png", b"mask"), (prefix + ".hidden.jpg", b"x"), (prefix + "README", b"x")]
    write_tar(tmp_path / "train-0.tar", [*members, *extra])
    write_tar(tmp_path / "val-0.tar", members)
    train, _ = both(str(tmp_path))
    assert [train.read(number)[:2] for number in range(train.count)] == [
        (content, number) for number, (name, content) in enumerate(members[::2])
    ]


def idx_of_tfrecord(path: Path) -> None:
    with path.open("rb") as file:
        spans = tfrecord.spans(file, str(path))
    Path(f"{path}.idx").write_text("".join(f"{offset - 12} {length + 16}\n" for offset, length in spans))


def idx_of_tar(path: Path) -> None:
    with tarfile.open(path) as archive:
        found = [(member.name.partition(".")[2], member.offset_data, member.size, member.name) for member in archive]
    lines = [f"v1.2 {len(found) // 2}"]
    lines += [" ".join(str(part) for member in pair for part in member)
              for pair in zip(found[::2], found[1::2], strict=True)]  # fmt: skip
    path.with_suffix(".idx").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_index_files_of_dali_replace_reading(form: str, far: FarStorage) -> None:
    drawn.write(far.folder / "d", form, train=210, test=7)
    expected = [both("far://d")[0].read(number)[:2] for number in range(210)]
    (far.folder / "d" / index.NAME).unlink()
    for path in [*(far.folder / "d").iterdir()]:
        (idx_of_tar if form == "tar" else idx_of_tfrecord)(path)
    start_again(far)
    train, _ = both("far://d")
    assert all(path.endswith((".idx", ".index")) for path, _, _ in far.ranges), "no shard is read"
    assert [train.read(number)[:2] for number in range(210)] == expected
    assert [sample[1] for sample in train.read_many(list(range(20)))] == [label for _, label in expected[:20]]  # type: ignore[index]


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_an_index_file_of_dali_that_does_not_fit_is_not_used(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn.write(tmp_path, form, train=20, test=5)
    for path in [*tmp_path.iterdir()]:
        (idx_of_tar if form == "tar" else idx_of_tfrecord)(path)
    expected = [both(str(tmp_path))[0].read(number)[:2] for number in range(20)]
    drawn.write(tmp_path, form, train=40, test=5)
    train, _ = both(str(tmp_path))
    assert train.count == 40 and [train.read(number)[:2] for number in range(20)] == expected
    assert "does not fit train-00000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"nsamples": 9}, r"train-0\.tar: has nsamples 5, but 9 in index\.json; download it again"),
        ({"filesize": 9}, r"has filesize \d+, but 9 in index\.json"),
        ({"url": "gs://b/train-7.tar"}, r"index\.json: lists train-7\.tar, which is missing; download it"),
    ],
)
def test_webdatasets_list_of_shards_is_compared(change: dict[str, object], message: str, tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / f"train-{number}.tar", samples(number * 5, 5))
    write_tar(tmp_path / "val-0.tar", samples(0, 3))
    listed: list[dict[str, object]] = [
        {
            "url": f"gs://b/train-{number}.tar",
            "nsamples": 5,
            "filesize": (tmp_path / f"train-{number}.tar").stat().st_size,
        }
        for number in range(2)
    ]
    listed.append({**listed[0], **change})
    content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed}
    (tmp_path / "index.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text("[1, 2]")
    if not message:
        assert both(str(tmp_path))[0].count == 10
        return
    with pytest.raises(UserError, match=message) as raised:
        both(str(tmp_path))
    assert "\n" not in str(raised.value)


# --- several processes ------------------------------------------------------------------------------------------


class Rank:
    """One of several processes, each a thread."""

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
    """The results of ``work`` in ``count`` processes, or what they raise."""
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
    """Another process renames its temporary file between listing it and looking at it: a link shows the same."""
    write_tar(tmp_path / "train-0.tar", samples(0, 3))
    (tmp_path / ".index.tmp").symlink_to("renamed")
    assert list(storage.entries(str(tmp_path))) == ["train-0.tar"]


def test_processes_share_the_work_of_the_index(far: FarStorage) -> None:
    for number in range(7):
        write_tar(far.folder / "d" / f"train-{number}.tar", samples(number * 10, 3 + number))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    size = sum(path.stat().st_size for path in (far.folder / "d").iterdir())
    found = together(
        3, lambda rank: (images.find("far://d", "train", "", rank), images.find("far://d", "test", "", rank))
    )
    assert far.bytes_of(".tar") == size, "each shard is read by one of them"
    labels = [number * 10 + place for number in range(7) for place in range(3 + number)]
    for pair in found:
        assert isinstance(pair, tuple)
        assert [pair[0].read(place)[1] for place in range(pair[0].count)] == labels


def test_processes_with_equal_shards_but_for_the_labels_end_with_one_line(tmp_path: Path) -> None:
    """The TFRecord files have the same names and sizes, and the records the same places."""
    pictures = drawn.pictures(20, 0)
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        for split in ("train", "test"):
            relabelled = [((label + rank) % 5 if split == "train" else label, content) for label, content in pictures]
            drawn.write_tfrecord(folder / f"{split}-00000-of-00001", relabelled)
    sizes = [sorted((path.name, path.stat().st_size) for path in (tmp_path / rank).iterdir()) for rank in "01"]
    assert sizes[0] == sizes[1]
    errors = together(
        2, lambda rank: images.find_both(argparse.Namespace(datadir=str(tmp_path / str(rank.rank))), rank)
    )
    for error in errors:
        assert isinstance(error, UserError) and "(contents and labels of some training images)" in str(error)
    alike = argparse.Namespace(datadir=str(tmp_path / "0"))
    assert not [
        found for found in together(2, lambda rank: images.find_both(alike, rank)) if isinstance(found, UserError)
    ]


def test_an_index_is_made_in_rounds_that_are_saved(far: FarStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        write_tar(far.folder / "d" / f"train-{number:02d}.tar", samples(number, 1))
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    far.seconds = 0.02
    monkeypatch.setattr(index, "ROUND", 0.01)
    saved: list[int] = []
    save = index._save
    monkeypatch.setattr(index, "_save", lambda *words: (saved.append(len(words[3].shards)), save(*words)))
    assert both("far://d")[0].count == 40
    assert len(saved) > 2 and saved[-2] == 40 and saved == sorted(saved)


def test_a_damaged_shard_ends_all_processes_with_the_same_line(far: FarStorage) -> None:
    for number in range(4):
        write_tar(far.folder / "d" / f"train-{number}.tar", samples(number * 10, 3))
    (far.folder / "d" / "train-2.tar").write_bytes(b"<html>" * 500)
    write_tar(far.folder / "d" / "val-0.tar", samples(0, 3))
    args = argparse.Namespace(datadir="far://d")
    errors = {str(error) for error in together(3, lambda rank: images.find_both(args, rank))}
    assert len(errors) == 1 and "train-2.tar: damaged tar file" in errors.pop()


@pytest.mark.parametrize("form", ["folder", "tar", "tfrecord"])
def test_processes_with_different_data_end_with_an_error(form: str, tmp_path: Path) -> None:
    for rank, count in enumerate((30, 28)):
        drawn.write(tmp_path / str(rank), form, train=count, test=5)
    errors = together(
        2, lambda rank: images.find_both(argparse.Namespace(datadir=str(tmp_path / str(rank.rank))), rank)
    )
    assert all("the processes see different data: rank 0 has" in str(error) for error in errors)
    assert all(isinstance(error, UserError) for error in errors)


@pytest.mark.parametrize("form", ["folder", "tar", "tfrecord"])
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
