"""Test IDX files, the digits used in tests, sample order, augmentation offsets, padded test batches."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainers.common import mnist, order
from trainers.common.files import UserError

from trainyard.sandbox.datasets import digits


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits.write_idx(tmp_path_factory.mktemp("digits"))


def test_digits_are_mnist_files(digits_folder: Path, tmp_path: Path) -> None:
    images, labels = mnist.read_split(str(digits_folder), "train")
    test_images, test_labels = mnist.read_split(str(digits_folder), "test")
    assert (images.shape, test_images.shape) == ((1437, 28, 28), (360, 28, 28))
    assert set(labels) == set(test_labels) == set(range(10))
    assert images.max() > 250 and images[:, 0].max() == 0, "bright strokes within a black border"
    everything = {image.tobytes() for image in images}
    assert not everything & {image.tobytes() for image in test_images}, "no test image is trained on"
    packed = digits.write_idx(tmp_path / "gz", gz=True)
    assert np.array_equal(mnist.read_split(str(packed), "train")[0], images)


def test_the_same_seed_writes_the_same_bytes(digits_folder: Path, tmp_path: Path) -> None:
    for gz in (False, True):
        one, two = (digits.write_idx(tmp_path / f"{gz}{number}", gz=gz) for number in (1, 2))
        assert [file.read_bytes() for file in sorted(one.iterdir())] == [f.read_bytes() for f in sorted(two.iterdir())]
    other = digits.write_idx(tmp_path / "other", seed=1) / "train-labels-idx1-ubyte"
    assert other.read_bytes() != (digits_folder / "train-labels-idx1-ubyte").read_bytes()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_idx_files_read_back_as_written(tmp_path_factory: pytest.TempPathFactory, shape: list[int], gz: bool) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path_factory.mktemp("idx") / "x"
    digits.write_array(path, array, gz)
    assert np.array_equal(mnist.read_idx(f"{path}.gz" if gz else str(path)), array)


GOOD = b"\0\0\x08\x01\0\0\0\x03abc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x00", "it is not an IDX file of unsigned bytes"),
        (b"<html>403", "it is not an IDX file"),
        (GOOD[:6], "unpack requires a buffer of 4 bytes"),
        (GOOD[:-1], "cannot reshape array of size 2"),
        (GOOD + b"d", "cannot reshape array of size 4"),
        (gzip.compress(GOOD, mtime=0)[:-5], "Compressed file ended"),
        (b"\x1f\x8bnonsense", "Unknown compression method"),
    ],
)
def test_a_damaged_idx_file_is_reported_with_its_path(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"damaged \({message}.*; get it again") as raised:
        mnist.read_idx(str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_missing_folder_and_a_missing_file_are_reported(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{name}: no train-images-idx3-ubyte\[.gz\] in it; --datadir must hold"):
        mnist.read_split(str(tmp_path / name), "train")


def test_no_folder_is_one_line() -> None:
    with pytest.raises(UserError, match="--datadir: where are MNIST's four IDX files") as raised:
        mnist.load(arguments())
    assert raised.value.code == 2


@pytest.mark.parametrize(("shape", "labels"), [((3, 28, 28), 4), ((3, 32, 28), 3), ((0, 28, 28), 0)])
def test_images_and_labels_that_do_not_fit_are_refused(shape: tuple[int, ...], labels: int, tmp_path: Path) -> None:
    digits.write_array(str(tmp_path / mnist.FILES["test"][0]), np.zeros(shape, np.uint8))
    digits.write_array(str(tmp_path / mnist.FILES["test"][1]), np.zeros(labels, np.uint8))
    with pytest.raises(UserError, match="are not 28x28 images of 10 classes"):
        mnist.read_split(str(tmp_path), "test")


@given(st.integers(1, 500), st.integers(0, 9), st.integers(1, 9))
def test_an_epoch_has_every_sample_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(order.permutation(count, seed, epoch)) == list(range(count))


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert np.array_equal(order.permutation(100, 1, 2), order.permutation(100, 1, 2))
    assert not np.array_equal(order.permutation(100, 1, 2), order.permutation(100, 1, 3))
    assert not np.array_equal(order.permutation(100, 1, 2), order.permutation(100, 2, 2))
    # Pinned: another order would break resuming from checkpoints of an earlier release.
    assert order.permutation(8, 0, 1).tolist() == [3, 7, 4, 2, 1, 6, 5, 0]


@given(st.integers(1, 200), st.integers(1, 64))
def test_padded_batches_have_every_sample_exactly_once(count: int, batch: int) -> None:
    indices, mask = order.padded_batches(count, batch)
    assert indices.shape == mask.shape and indices.shape[1] == batch
    assert indices[mask].tolist() == list(range(count))


@given(st.integers(1, 8), st.integers(1, 8))
def test_shares_make_up_the_batch(ranks: int, size: int) -> None:
    batch = np.arange(ranks * size)
    assert np.concatenate([order.share(batch, rank, ranks) for rank in range(ranks)]).tolist() == batch.tolist()


def test_too_few_images_for_a_step_are_an_error() -> None:
    assert mnist.steps_per_epoch(100, 30) == 3
    with pytest.raises(UserError, match="the 100 training images do not fill one step of 101: lower --batch-size"):
        mnist.steps_per_epoch(100, 101)


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"datadir": "", "fake_data": False, "fake_images": 600, "seed": 0, **given})


def test_an_epoch_of_digits_has_each_once_with_offsets() -> None:
    rows = mnist.order(50, 1, 0, 1)
    assert sorted(rows[:, 0]) == list(range(50)) and set(rows[:, 1]) == set(rows[:, 2]) == {0, 1, 2}
    assert np.array_equal(rows, mnist.order(50, 1, 0, 1)) and not np.array_equal(rows, mnist.order(50, 1, 0, 2))
    assert mnist.order(8, 0, 0, 1)[:, 0].tolist() == order.permutation(8, 0, 1).tolist()


def test_fake_data_is_random_and_the_same_each_time() -> None:
    (images, labels, test_images, _), about = mnist.load(arguments(fake_data=True))
    assert images.shape == (600, 28, 28) and test_images.shape == (100, 28, 28)
    assert 100 < images.mean() < 155 and len(set(labels)) == 10
    assert mnist.load(arguments(fake_data=True))[1] == about != mnist.load(arguments(fake_data=True, seed=1))[1]
    assert not np.array_equal(images[:100], test_images)


def test_digits_with_other_labels_are_other_data(tmp_path: Path) -> None:
    folder = digits.write_idx(tmp_path)
    before = mnist.load(arguments(datadir=str(folder)))[1]
    path = folder / mnist.FILES["test"][1]
    digits.write_array(path, (mnist.read_idx(str(path)) + 1) % 10)
    after = mnist.load(arguments(datadir=str(folder)))[1]
    assert [what for what in before if before[what] != after[what]] == ["test labels"]
