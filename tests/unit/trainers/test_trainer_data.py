"""IDX files, the digits used in tests, sample order, augmentation offsets, padded test batches, downloads."""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import http.server
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainers.common import mnist_data, order
from trainers.common.exits import UserError

from trainyard.sandbox.datasets import digits


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits.write_idx(tmp_path_factory.mktemp("digits"))


def test_digits_are_mnist_files(digits_folder: Path, tmp_path: Path) -> None:
    images, labels = mnist_data.load_mnist(str(digits_folder), "train")
    test_images, test_labels = mnist_data.load_mnist(str(digits_folder), "test")
    assert (images.shape, test_images.shape) == ((1437, 28, 28), (360, 28, 28))
    assert set(labels) == set(test_labels) == set(range(10))
    assert images.max() > 250 and images[:, 0].max() == 0, "bright strokes within a black border"
    everything = {image.tobytes() for image in images}
    assert not everything & {image.tobytes() for image in test_images}, "no test image is trained on"
    packed = digits.write_idx(tmp_path / "gz", gz=True)
    assert np.array_equal(mnist_data.load_mnist(str(packed), "train")[0], images)


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
    assert np.array_equal(mnist_data.read_idx(f"{path}.gz" if gz else str(path)), array)


GOOD = b"\0\0\x08\x01\0\0\0\x03abc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x00", "is not an IDX file of unsigned bytes"),
        (b"<html>403", "is not an IDX file"),
        (GOOD[:6], "ends within the header"),
        (GOOD[:-1], "3 bytes expected, 2 found"),
        (GOOD + b"d", "3 bytes expected, 4 found"),
        (gzip.compress(GOOD, mtime=0)[:-5], "damaged gzip file"),
        (b"\x1f\x8bnonsense", "damaged gzip file"),
    ],
)
def test_a_damaged_idx_file_is_reported_with_its_path(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        mnist_data.read_idx(str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_folder_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such folder"):
        mnist_data.load_mnist(str(tmp_path / "nowhere"), "train")
    with pytest.raises(UserError, match=r"no train-images-idx3-ubyte\[.gz\] in it"):
        mnist_data.load_mnist(str(tmp_path), "train")


def test_images_and_labels_must_be_of_the_same_number(tmp_path: Path) -> None:
    digits.write_array(str(tmp_path / mnist_data.FILES["test"][0]), np.zeros((3, 28, 28), np.uint8))
    digits.write_array(str(tmp_path / mnist_data.FILES["test"][1]), np.zeros(4, np.uint8))
    with pytest.raises(UserError, match="do not match"):
        mnist_data.load_mnist(str(tmp_path), "test")


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
    assert order.steps_per_epoch(100, 30) == 3
    with pytest.raises(UserError, match="the 100 training images do not fill one step of 101: lower --batch-size"):
        order.steps_per_epoch(100, 101)


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"datadir": "", "fake_data": False, "download": False, "fake_images": 600, "seed": 0,
                                 "shift": 2, **given})  # fmt: skip


def test_rows_pair_images_with_their_labels_and_offsets() -> None:
    labels = np.arange(50) % 10
    rows = mnist_data.train_rows(labels, arguments(shift=1), epoch=1)
    assert np.array_equal(rows[:, 3], labels[rows[:, 0]])
    assert set(rows[:, 1]) == set(rows[:, 2]) == {0, 1, 2}
    tests = mnist_data.test_batches(labels, 1, 32)
    assert tests.shape == (2, 32, 4) and (tests[..., 1:3] == 1).all()
    assert (tests[..., 3] >= 0).sum() == 50, "padding has label -1"


def test_fake_data_is_random_and_the_same_each_time() -> None:
    (images, labels), (test_images, _) = mnist_data.load(arguments(fake_data=True))
    assert images.shape == (600, 28, 28) and test_images.shape == (100, 28, 28)
    assert 100 < images.mean() < 155 and len(set(labels)) == 10
    assert np.array_equal(images, mnist_data.load(arguments(fake_data=True))[0][0])
    assert not np.array_equal(images[:100], test_images)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    for names in mnist_data.FILES.values():
        digits.write_array(str(tmp_path / names[0]), np.zeros((3, 32, 28), np.uint8))
        digits.write_array(str(tmp_path / names[1]), np.zeros(3, np.uint8))
    with pytest.raises(UserError, match="32x28 images"):
        mnist_data.load(arguments(datadir=str(tmp_path)))


@pytest.fixture
def busy() -> list[int]:
    """The statuses of the next answers of the mirror."""
    return []


@pytest.fixture
def mirror(tmp_path: Path, busy: list[int]) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server on loopback: its URL, its folder, and the requested paths."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    requested: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requested.append(self.path)

        def do_GET(self) -> None:
            if busy:
                self.send_error(busy.pop())
            else:
                super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", folder, requested
        server.shutdown()


def test_a_download_tries_the_next_mirror_and_happens_once(mirror: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    address, folder, requested = mirror
    (folder / "bad").mkdir()
    (folder / "bad" / "x.gz").write_bytes(b"not it")
    (folder / "x.gz").write_bytes(b"data")
    md5 = {"x.gz": hashlib.md5(b"data").hexdigest()}
    mirrors = [address + "none/", address + "bad/", address]
    target = str(tmp_path / "data")
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("forkserver")) as pool:
        for ended in [pool.submit(mnist_data.fetch, target, mirrors, md5) for _ in range(4)]:
            ended.result()
    assert (tmp_path / "data" / "x.gz").read_bytes() == b"data"
    assert len([path for path in requested if path == "/x.gz"]) == 1, "only one of four processes downloads"
    assert not list((tmp_path / "data").glob(".x.gz*")), "no partial file remains"


def test_a_transient_error_of_a_mirror_is_retried_after_a_pause(
    mirror: tuple[str, Path, list[str]], busy: list[int], tmp_path: Path
) -> None:
    address, folder, _ = mirror
    (folder / "x.gz").write_bytes(b"data")
    busy.append(503)
    began = time.monotonic()
    mnist_data.fetch(str(tmp_path), [address], {"x.gz": hashlib.md5(b"data").hexdigest()}, pause=0.2)
    assert (tmp_path / "x.gz").read_bytes() == b"data" and time.monotonic() - began >= 0.2


def test_a_download_without_a_working_mirror_is_a_one_line_error(
    mirror: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"cannot download x.gz .*(Not Found|not found).*--datadir") as raised:
        mnist_data.fetch(str(tmp_path / "data"), [mirror[0]], {"x.gz": "0"}, pause=0)
    assert "\n" not in str(raised.value)
