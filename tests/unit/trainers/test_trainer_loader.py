"""Test splits and labels, reading apart from decoding, damaged samples, and storage that fails."""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from far_storage import FarStorage
from hypothesis import given
from hypothesis import strategies as st
from trainers.common import imagenet_data, images, order
from trainers.common.arguments import Parser
from trainers.common.files import FAILED, USAGE, UserError

from trainyard.sandbox.datasets import flowers as drawn
from trainyard.sandbox.fakes.storage import Storage


@pytest.fixture
def far(tmp_path: Path, mount: Callable[[Path], FarStorage]) -> FarStorage:
    (tmp_path / "far").mkdir()
    return mount(tmp_path / "far")


class HttpError(Exception):
    """Tell an error as gcsfs does."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self.code = code


def middle(number: int, width: int, height: int) -> images.Box:
    return images.centre_box(width, height)


def labels_of(source: images.Images) -> list[int]:
    return sorted(source.read(number)[1] for number in range(source.count))


# --- splits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("imagenet1k-train-{}.tar", "imagenet1k-validation-{}.tar"),
        ("train_{}.tar", "val_{}.tar"),
        ("inat.train.{}.tar", "inat.valid.{}.tar"),
        ("train{}.tar", "test{}.tar"),
    ],
)
def test_training_and_validation_shards_in_one_folder_are_not_merged(train: str, test: str, tmp_path: Path) -> None:
    drawn.write_tar(tmp_path / train.format("00000"), drawn.pictures(20, 0))
    drawn.write_tar(tmp_path / test.format("00000"), drawn.pictures(7, 1))
    for split, made in (("train", drawn.pictures(20, 0)), ("test", drawn.pictures(7, 1))):
        found = images.find(str(tmp_path), split)
        assert sorted(found.read(number)[:2] for number in range(found.count)) == sorted(
            (content, label) for label, content in made
        )


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_without_test_images_a_tenth_of_the_training_images_is_held_out(form: str, tmp_path: Path) -> None:
    drawn.write(tmp_path, form, train=40, test=0)
    if form == "folder":
        assert not (tmp_path / "test").exists()
    train, test = (images.find(str(tmp_path), split) for split in ("train", "test"))
    assert (train.count, test.count) == (36, 4)
    together = [found.read(number)[0] for found in (train, test) for number in range(found.count)]
    assert len(set(together)) == 40, "no test image is trained on"


def test_test_images_alone_are_an_error(tmp_path: Path) -> None:
    drawn.write_tar(tmp_path / "val-0.tar", drawn.pictures(5, 0))
    with pytest.raises(UserError, match=r"has test images in .*, but no training images"):
        images.find(str(tmp_path), "train")


def test_a_validation_set_that_lacks_a_class_keeps_the_labels(tmp_path: Path) -> None:
    drawn.write_folder(tmp_path / "train", drawn.pictures(10, 0))
    drawn.write_folder(tmp_path / "val", [pair for pair in drawn.pictures(10, 1) if pair[0] in (1, 4)])
    train, test = (images.find(str(tmp_path), split) for split in ("train", "test"))
    assert train.classes == test.classes == list(drawn.CLASSES)
    assert labels_of(train) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and labels_of(test) == [1, 1, 4, 4]


def test_a_class_that_only_the_validation_set_has_is_a_usage_error(tmp_path: Path) -> None:
    drawn.write_folder(tmp_path / "train", [pair for pair in drawn.pictures(10, 0) if pair[0] != 2])
    drawn.write_folder(tmp_path / "val", drawn.pictures(10, 1))
    with pytest.raises(UserError, match=r"val: has the class rose, which the training images lack") as raised:
        images.find(str(tmp_path), "test")
    assert raised.value.code == USAGE and "\n" not in str(raised.value)


# --- reading and decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_reading_waits_for_more_images_at_a_time_than_are_decoded(
    form: str, far: FarStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have every read wait until 50 wait at a time, while two threads decode."""
    monkeypatch.setattr(images, "_GAP", -1)  # these images are so small that neighbours would be read together
    drawn.write(far.folder / "d", form, train=200, test=5)
    source = images.find("far://d", "train")
    far.gather, far.most_at_once = 50, 0
    plan = np.array_split(order.permutation(200, 0, 1), 10)
    got = list(images.Loader(source, 2, ahead=4).batches(plan, 32, middle))
    assert [labels.tolist() for _, labels in got] == [[source.read(n)[1] for n in batch] for batch in plan]
    assert 50 <= far.most_at_once <= images.READERS


def test_neighbours_in_a_remote_shard_are_read_with_one_request(far: FarStorage) -> None:
    drawn.write(far.folder / "d", "tar", train=200, test=5)
    source = images.find("far://d", "train")
    far.ranges.clear()
    pixels, labels = images.Loader(source, 2).all(32)
    assert len(far.ranges) == 3, "three batches of 67 or 66 images"
    expected = [source.read(number) for number in range(200)]
    assert labels.tolist() == [label for _, label, _ in expected]
    assert np.array_equal(pixels[77], images.decode(*expected[77][::2], 32, lambda w, h: (0, 0, w, h)))
    far.ranges.clear()
    plan = np.array_split(order.block_permutation(200, 0, 1, 20), 4)
    list(images.Loader(source, 2).batches(plan, 32, middle))
    assert len(far.ranges) <= 11 + 3, "11 runs, of which 3 can be cut by the end of a batch"


@pytest.mark.parametrize(("left_out", "requests"), [(1, 1), (2, 1), (3, 2)])
def test_a_run_from_which_images_are_left_out_is_one_request(left_out: int, requests: int, far: FarStorage) -> None:
    """Read images of 100 KB, as in ImageNet; the ones in between are for the test."""
    made = [(number % 5, bytes([number]) * 100_000) for number in range(20)]
    (far.folder / "d").mkdir()
    drawn.write_tar(far.folder / "d" / "train-0.tar", made)
    drawn.write_tar(far.folder / "d" / "val-0.tar", made[:1])
    source = images.find("far://d", "train")
    far.ranges.clear()
    chosen = np.delete(np.arange(20), range(7, 7 + left_out))
    groups = source.groups(chosen)
    read = {
        int(number): sample
        for group in groups
        for number, sample in zip(chosen[group], source.read_many(chosen[group].tolist()), strict=True)
    }
    assert len(far.ranges) == len(groups) == requests
    assert [read[number][:2] for number in chosen.tolist()] == [made[number][::-1] for number in chosen.tolist()]  # type: ignore[index]


def test_the_number_of_reading_threads_is_a_parameter(far: FarStorage) -> None:
    drawn.write(far.folder / "d", "folder", train=60, test=5)
    source = images.find("far://d", "train")
    far.gather, far.most_at_once = 5, 0
    list(images.Loader(source, 2, readers=5).batches([np.arange(60)], 32, middle))
    assert far.most_at_once == 5


@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 9), st.integers(1, 9))
def test_an_epoch_in_blocks_has_every_sample_once_in_runs(count: int, block: int, seed: int, epoch: int) -> None:
    chosen = order.block_permutation(count, seed, epoch, block)
    assert sorted(chosen) == list(range(count))
    assert (np.diff(chosen) != 1).sum() <= count // block + 1
    if block == 1:
        assert np.array_equal(chosen, order.permutation(count, seed, epoch))


def test_epochs_in_blocks_differ() -> None:
    first, second = (order.block_permutation(1000, 0, epoch, 32) for epoch in (1, 2))
    edges = [set(chosen[np.flatnonzero(np.diff(chosen) != 1) + 1] % 32) for chosen in (first, second)]
    assert edges[0] != edges[1], "runs start at other samples"


# --- damage -----------------------------------------------------------------------------------------------------


def many(folder: Path, count: int, damaged: list[int]) -> images.Images:
    """Return ``count`` equal images of which some are damaged, and a Loader's limit of one in 1,000."""
    good = drawn.pictures(1, 0)[0][1]
    made = [(number % 5, good[:300] if number in damaged else good) for number in range(count)]
    drawn.write_tar(folder / "train-0.tar", made)
    drawn.write_tar(folder / "val-0.tar", made[:5])
    return images.find(str(folder), "train")


def test_damaged_images_are_skipped_and_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = images.Loader(many(tmp_path, 2000, [3, 4]), 2)
    for _ in range(2):
        ((pixels, labels),) = loader.batches([np.array([2, 3, 4, 7])], 32, middle)
        assert labels.tolist() == [2, 0, 0, 2], "3 and 4 are replaced by 5"
        assert (pixels == pixels[0]).all()
        ((pixels, labels),) = loader.batches([np.array([2, 3, 4, 7])], 32, middle, replace=False)
        assert labels.tolist() == [2, -1, -1, 2] and pixels[1].max() == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert len(lines) == 2 and "(2 of at most 2 so far)" in lines[1]
    assert all("train-0.tar: the image at byte " in line for line in lines)
    assert all("is no readable image" in line and "skipped" in line for line in lines)


def test_too_many_damaged_images_end_the_run_with_one_line(tmp_path: Path) -> None:
    loader = images.Loader(many(tmp_path, 2000, [3, 4, 5]), 2)
    with pytest.raises(
        UserError, match=r"is no readable image .* \(3 damaged images; 1 in 1000, at least 1, is skipped\)"
    ) as raised:
        list(loader.batches([np.arange(10)], 32, middle))
    assert "\n" not in str(raised.value) and raised.value.code == FAILED


def test_one_damaged_image_of_a_small_set_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = many(tmp_path, 10, [3])
    ((_, labels),) = images.Loader(small, 2).batches([np.array([2, 3])], 32, middle)
    assert labels.tolist() == [2, 4], "3 is replaced by 4"
    assert "skipped (1 of at most 1 so far)" in capsys.readouterr().err
    with pytest.raises(UserError, match="is no readable image"):  # rather than looking for another one forever
        list(images.Loader(small.part(np.array([3])), 2).batches([np.array([0])], 32, middle))


def test_a_test_image_that_is_damaged_counts_as_a_wrong_answer(tmp_path: Path) -> None:
    many(tmp_path, 1000, [1])
    (tmp_path / "val-0.tar").rename(tmp_path / "x")
    (tmp_path / "train-0.tar").rename(tmp_path / "val-0.tar")
    (tmp_path / "x").rename(tmp_path / "train-0.tar")
    imagenet_data.options(parser := Parser("toy", ""))
    args = parser.parse(["--datadir", str(tmp_path), "--image-size=32"])
    data = imagenet_data.Data(args, lambda rows: rows)
    labels = np.concatenate([labels for _, labels in data.test(64)])
    assert data.test_count == 1000 and (labels >= 0).sum() == 999 and labels[1] == -1


# --- storage that fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("Forbidden: https://storage\nno permission"), HttpError(503)])
def test_storage_that_fails_in_the_middle_of_an_epoch_is_one_line(error: Exception, far: FarStorage) -> None:
    drawn.write(far.folder / "d", "tar", train=60, test=5)
    loader = images.Loader(images.find("far://d", "train"), 2, ahead=1)
    batches = loader.batches(np.arange(60).reshape(6, 10), 32, middle)
    next(batches)
    far.failures = [error] * 1000
    with pytest.raises(UserError, match=r"far://d/train-00000\.tar: cannot be reached: (Forbidden|error)") as raised:
        list(batches)
    assert "\n" not in str(raised.value) and raised.value.code == FAILED


def test_an_object_that_disappears_is_one_line(far: FarStorage) -> None:
    drawn.write(far.folder / "d", "tar", train=20, test=5)
    loader = images.Loader(images.find("far://d", "train"), 2)
    (far.folder / "d" / "train-00000.tar").unlink()
    with pytest.raises(UserError, match=r"train-00000\.tar: was removed during the run"):
        loader.all(32)


def test_a_local_file_that_disappears_is_one_line(tmp_path: Path) -> None:
    drawn.write(tmp_path, "tar", train=20, test=5)
    source = images.find(str(tmp_path), "train")
    (tmp_path / "train-00000.tar").unlink()
    with pytest.raises(UserError, match=r"train-00000\.tar: cannot be read: No such file"):
        images.Loader(source, 2).all(32)


def test_a_loader_that_is_closed_early_stops_reading(far: FarStorage) -> None:
    drawn.write(far.folder / "d", "folder", train=200, test=5)
    source = images.find("far://d", "train")
    far.ranges.clear()
    far.seconds = 0.02
    batches = images.Loader(source, 2, ahead=4, readers=4).batches(np.arange(200).reshape(10, 20), 32, middle)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    time.sleep(0.1)
    read = len(far.ranges)
    time.sleep(0.2)
    assert len(far.ranges) == read < 200


def test_both_splits_come_from_one_call() -> None:
    with pytest.raises(UserError, match="no data: give --datadir") as raised:
        images.find_both(argparse.Namespace(datadir=""))
    assert raised.value.code == USAGE


def test_the_fake_storage_waits_before_each_answer(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x").write_bytes(b"abc")
    with Storage(tmp_path, delay=0.1) as storage:
        start = time.monotonic()
        with urllib.request.urlopen(f"{storage.url}/bucket/x") as answer:
            assert answer.read() == b"abc"
        assert time.monotonic() - start >= 0.1
