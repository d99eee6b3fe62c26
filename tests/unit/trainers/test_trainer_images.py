"""Test images from class folders and tar shards: the same images, any order, clear errors for damage."""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from far_storage import FarStorage
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from trainers.common import flowers_data, imagenet_data, images
from trainers.common.arguments import Parser
from trainers.common.files import UserError

from trainyard.sandbox.datasets import flowers as drawn

FORMS = ("folder", "tar")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: drawn.write(tmp_path_factory.mktemp(form), form, train=20, test=7) for form in FORMS}


def contents(source: images.Images) -> list[tuple[bytes, int]]:
    return sorted(source.read(index)[:2] for index in range(source.count))


def test_all_formats_have_the_same_images(made: dict[str, Path]) -> None:
    for split, count in (("train", 20), ("test", 7)):
        one, two = (contents(images.find(str(made[form]), split)) for form in FORMS)
        assert len(one) == count and one == two
    assert images.find(str(made["folder"]), "train").classes == list(drawn.CLASSES)


def test_without_splits_a_tenth_of_the_images_is_for_the_test(made: dict[str, Path]) -> None:
    folder = str(made["folder"] / "train")
    train, test = images.find(folder, "train"), images.find(folder, "test")
    assert (train.count, test.count) == (18, 2)
    assert sorted(contents(train) + contents(test)) == contents(images.find(str(made["folder"]), "train"))


def centre(number: int, width: int, height: int) -> images.Box:
    return images.centre_box(width, height)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_loader_returns_images_in_the_requested_order(made: dict[str, Path], form: str, workers: int) -> None:
    source = images.find(str(made[form]), "train")
    plan = [np.array(batch) for batch in ([3, 1, 4], [19, -1, 0], [2, 2, 2], [5, 6, 7], [8, 9, 10], [1, 1, 1])]
    got = list(images.Loader(source, workers, ahead=2).batches(plan, 32, centre))
    assert [labels.tolist() for _, labels in got] == [
        [source.read(number)[1] if number >= 0 else -1 for number in batch] for batch in plan
    ]
    assert np.array_equal(got[2][0][0], got[2][0][1]) and got[1][0][1].max() == 0
    for (pixels, _), batch in zip(got, plan, strict=True):
        for shown, number in zip(pixels, batch, strict=True):
            if number >= 0:
                content, _, where = source.read(int(number))
                assert np.array_equal(shown, images.decode(content, where, 32, lambda w, h: centre(0, w, h)))


def test_a_box_is_cropped_resized_and_mirrored() -> None:
    gradient = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (100, 1, 3))
    buffer = io.BytesIO()
    Image.fromarray(gradient).save(buffer, "PNG")
    cut = images.decode(buffer.getvalue(), "x", 10, lambda w, h: (50, 0, 150, h))
    # Pixel x of the gradient is x, so an output pixel is the mean position of the ten input pixels that it covers: 54.5
    # and 144.5. At the edges of the box the filter also covers its neighbours, which changes that by less than half.
    assert cut.shape == (10, 10, 3) and 54 <= cut[5, 0, 0] <= 55 and 144 <= cut[5, 9, 0] <= 145
    mirrored = images.decode(buffer.getvalue(), "x", 10, lambda w, h: (150, 0, 50, h))
    assert np.array_equal(mirrored, cut[:, ::-1])


def encoded(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def whole(content: bytes) -> np.ndarray:
    return images.decode(content, "x", 64, lambda width, height: (0, 0, width, height))


def test_sixteen_bits_of_grey_become_eight() -> None:
    """Do without Pillow's own conversion, which makes everything above 255 of 65,535 white."""
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    assert np.array_equal(whole(encoded(Image.fromarray(ramp)))[..., 0], ramp >> 8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_images_of_any_mode_have_the_colours_that_pillow_gives_them(mode: str) -> None:
    """Print no warning for each image with a palette and transparency."""
    ramp = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1))
    picture = Image.fromarray(np.stack([ramp, ramp.T, 255 - ramp], -1)).convert(mode)
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    form = "JPEG" if mode == "CMYK" else "PNG"
    shown = whole(encoded(picture, form, **options)).astype(int)
    # Of a JPEG: its quantization, at Pillow's default quality, of a smooth picture.
    assert abs(shown - np.asarray(picture.convert("RGB")).astype(int)).mean() <= (2 if mode == "CMYK" else 0)


def test_an_empty_file_is_reported_in_words() -> None:
    with pytest.raises(
        UserError, match=r"^x: is no readable image \(of an unknown format, or empty\); replace or remove"
    ):
        whole(b"")


def test_a_class_whose_folder_has_no_images_is_an_error(tmp_path: Path) -> None:
    """Refuse, for example, a folder of images in a format that is not read."""
    folder = drawn.write(tmp_path, "folder", train=20, test=7)
    shutil.rmtree(folder / "test" / "rose")
    assert images.find(str(folder), "test").count == 6, "a test needs no images of each class"
    for picture in (folder / "train" / "rose").iterdir():
        picture.rename(picture.with_suffix(".tif"))
    with pytest.raises(UserError, match=r"train/rose: has no images \(\.jpg, .*\); add some, or remove the folder"):
        images.find(str(folder), "train")


def test_the_line_about_no_images_has_the_forms_that_the_framework_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"neither <class>/\*\.jpg nor \*\.tar \(of TFRecord files, which only"):
        images.find(str(tmp_path), "train")
    monkeypatch.setattr(
        images, "FORMATS", [*images.FORMATS, images.Format("*.tfrecord", "tfrecord", images.shards.tar)]
    )
    with pytest.raises(UserError, match=r"neither <class>/\*\.jpg nor \*\.tar nor \*\.tfrecord$"):
        images.find(str(tmp_path), "train")


def test_empty_folders_hidden_ones_and_lost_and_found_are_no_classes(tmp_path: Path) -> None:
    """Leave out lost+found of a disk, and the folder of a class that was moved away."""
    folder = drawn.write(tmp_path, "folder", train=20, test=7)
    for split in ("train", "test"):
        for name in ("aaa-empty", "lost+found", ".ipynb_checkpoints"):
            (folder / split / name).mkdir()
        (folder / split / ".ipynb_checkpoints" / "x.jpg").touch()
        (folder / split / "lost+found" / "x.jpg").touch()
    train, test = (images.find(str(folder), split) for split in ("train", "test"))
    assert (train.count, test.count) == (20, 7) and train.classes == test.classes == list(drawn.CLASSES)


@pytest.mark.parametrize("form", FORMS)
def test_pipes_and_sockets_among_the_images_are_not_waited_for(form: str, tmp_path: Path) -> None:
    folder = drawn.write(tmp_path, form, train=20, test=7)
    for name in ("train-99999.tar", "train/rose/0.jpg") if form == "folder" else ("train-99999.tar",):
        os.mkfifo(folder / name)
    assert images.find(str(folder), "train").count == 20


def test_decoding_a_large_jpeg_at_a_fraction_of_its_size_changes_it_by_less_than_one_percent() -> None:
    content = drawn.draw("rose", random.Random(1), 1600, 1200)
    fast = images.decode(content, "x", 64, lambda w, h: (0, 0, w, h)).astype(int)
    with Image.open(io.BytesIO(content)) as picture:
        slow = np.asarray(picture.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    # Integer arithmetic in libjpeg and Pillow: the same on every CPU. 1 % of 255: too little to see.
    assert abs(fast - slow).mean() < 2.55


@given(st.lists(st.floats(0, 0.999), min_size=5, max_size=5), st.integers(8, 3000), st.integers(8, 3000))
def test_random_boxes_are_within_the_image_and_of_the_stated_aspect_ratio(
    chance: list[float], width: int, height: int
) -> None:
    left, upper, right, lower = images.random_box(np.array(chance), width, height, 0.35)
    # left = chance * (width - wide) and right = left + wide are three float64 operations, each rounded by 2**-53.
    above = 1 + 4 * 2**-53
    assert 0 <= min(left, right) < max(left, right) <= width * above
    assert 0 <= upper < lower <= height * above
    assert (left > right) == (chance[4] < 0.5)
    wide, high = abs(right - left), lower - upper
    # As right - left loses what left + wide rounded, up to 2**-53 of the image's size, on sides of at least a pixel.
    rounded = 1 + 16 * 2**-53 * max(width, height)
    clipped = wide * rounded >= width or high * rounded >= height
    assert clipped or 3 / 4 / rounded <= wide / high <= 4 / 3 * rounded


def test_without_mirroring_a_random_box_is_the_same_but_never_mirrored() -> None:
    for chance in images.uniform(100, 5, 0):
        left, upper, right, lower = images.random_box(chance, 500, 375, 0.35)
        assert images.random_box(chance, 500, 375, 0.35, mirror=False) == (
            min(left, right), upper, max(left, right), lower,
        )  # fmt: skip


def test_a_truncated_jpeg_is_reported_with_its_path(made: dict[str, Path], tmp_path: Path) -> None:
    folder = drawn.write(tmp_path, "folder", train=5, test=1)
    for broken in (folder / "train").glob("*/0000[23].jpg"):
        broken.write_bytes(broken.read_bytes()[:500])
    with pytest.raises(UserError, match=r"/0000[23].jpg: is no readable image .*; replace or remove it"):
        images.Loader(images.find(str(folder), "train"), 2).all(32)


def test_a_damaged_tar_file_and_a_missing_label_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(UserError, match=r"train-0\.tar: damaged tar file"):
        images.find(str(tmp_path), "train")
    drawn.write_tar(tmp_path / "train-0.tar", drawn.pictures(2, 0))
    content = (tmp_path / "train-0.tar").read_bytes().replace(b"00001.cls", b"00001.txt")
    # The header's checksum must fit the new name.
    at = content.index(b"00001.txt")
    head = bytearray(content[at : at + 512])
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    (tmp_path / "train-0.tar").write_bytes(content[:at] + bytes(head) + content[at + 512 :])
    with pytest.raises(UserError, match=r"00001 must have an image .* and its label in 00001.cls"):
        images.find(str(tmp_path), "train")


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_folder_without_images_is_an_error(what: str, tmp_path: Path) -> None:
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    with pytest.raises(UserError, match="no such folder" if what == "missing" else "has no images: neither <class>"):
        images.find(str(folder), "train")


def test_flowers_samples_depend_on_seed_and_epoch_only(made: dict[str, Path]) -> None:
    args = argparse.Namespace(
        fake_data=False, datadir=str(made["tar"]), image_size=16, num_workers=2, seed=3, least_area=0.5
    )
    data = flowers_data.Data(args)
    rows, boxes = data.train_rows(1)
    again = data.train_rows(1)
    assert np.array_equal(rows, again[0]) and np.array_equal(boxes, again[1])
    assert not np.array_equal(rows, data.train_rows(2)[0])
    assert sorted(rows[:, 0]) == list(range(20)) and np.array_equal(rows[:, 1], data.labels[rows[:, 0]])
    # In float64 a box may end 2**-52 above 1, which float32 rounds to 1.
    assert boxes.min() >= 0 and boxes.max() <= 1 and (boxes[:, 2] > boxes[:, 3]).any()
    tests, whole = data.test_rows(5)
    assert tests.shape == (2, 5, 2) and (tests[..., 1] >= 0).sum() == 7
    assert (whole == [0, 1, 0, 1]).all()


# --- fingerprints -----------------------------------------------------------------------------------------------


def data_of(folder: Path, form: str) -> dict[str, str]:
    """Return the fingerprints of the images in ``folder``, which are the same in both trainers."""
    parsed = []
    for data in (flowers_data, imagenet_data):
        data.options(parser := Parser("toy", ""))
        parsed.append(parser.parse([f"--datadir={folder}", "--image-size=16", "--num-workers=1"]))
    decoded, streamed = flowers_data.Data(parsed[0]), imagenet_data.Data(parsed[1], lambda rows: rows)
    assert decoded.fingerprints == streamed.fingerprints
    return decoded.fingerprints


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_data_that_were_moved_are_the_same(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn.write(tmp_path / "here", form, train=30, test=5)
    first = data_of(tmp_path / "here", form)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for path in (tmp_path / "there").rglob("*"):
        os.utime(path, (1, 1))
    listed, scanned = os.listdir, os.scandir
    monkeypatch.setattr(os, "listdir", lambda folder: listed(folder)[::-1])

    class Reversed:
        def __init__(self, folder: str) -> None:
            with scanned(folder) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Reversed)
    assert data_of(tmp_path / "there", form) == first


def test_data_at_far_storage_are_the_same(tmp_path: Path, mount: Callable[[Path], FarStorage]) -> None:
    drawn.write(tmp_path / "d", "folder", train=30, test=5)
    near = images.fingerprints(*images.find_both(argparse.Namespace(datadir=str(tmp_path / "d"))))
    mount(tmp_path)
    assert images.fingerprints(*images.find_both(argparse.Namespace(datadir="far://d"))) == near


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_with_other_contents_or_labels_are_other_data(split: str, tmp_path: Path) -> None:
    drawn.write(tmp_path, "folder", train=30, test=5)
    first = data_of(tmp_path, "folder")
    rose, tulip = (sorted((tmp_path / split / name).iterdir())[0] for name in ("rose", "tulip"))
    content = rose.read_bytes()
    rose.write_bytes(tulip.read_bytes())
    tulip.write_bytes(content)
    name = {"train": "training", "test": "test"}[split]
    second = data_of(tmp_path, "folder")
    differing = [what for what in first if first[what] != second[what]]
    assert differing == [f"contents or labels of {name} images"]
    shutil.move(tmp_path / "train" / "rose", tmp_path / "train" / "rosa")
    if split == "train":
        shutil.move(tmp_path / "test" / "rose", tmp_path / "test" / "rosa")
        assert data_of(tmp_path, "folder")["training images"] != first["training images"], "another name of a class"


def test_shards_with_other_labels_are_other_data(tmp_path: Path) -> None:
    pictures = drawn.pictures(20, 0)
    for name, shift in (("a", 0), ("b", 1)):
        relabelled = [((number + shift) % 5, image) for number, image in pictures]
        drawn.write_tar(tmp_path / name / "train-00000.tar", relabelled)
        drawn.write_tar(tmp_path / name / "test-00000.tar", pictures)
    first, second = (data_of(tmp_path / name, "tar") for name in ("a", "b"))
    assert [what for what in first if first[what] != second[what]] == [
        "training images", "contents or labels of training images"
    ]  # fmt: skip


@pytest.mark.parametrize("words", ["128,four", "7", "", "128,"])
def test_sizes_that_are_none_are_an_error(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a list of sizes"):
        imagenet_data.sizes(words)
    assert imagenet_data.sizes("128,160") == [128, 160]
