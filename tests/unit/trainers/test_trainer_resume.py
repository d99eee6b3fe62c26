"""What a run finds in its checkpoint folder: another run's checkpoints, unusable ones, those of other data or flags."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_storage import FarStorage
from toy_checkpoints import checkpoints, state
from trainers.common import exits, flags, flowers_data, imagenet_data, images, mnist_data, order, paths
from trainers.common.log import Log
from trainers.common.run import check_same_run

from trainyard.sandbox.datasets import flowers as drawn


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- --no-resume ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "far"])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    mount: Callable[[Path], FarStorage],
) -> str:
    """A checkpoint folder at ``tmp_path / "run"``, local or on remote storage."""
    (tmp_path / "run").mkdir()
    if request.param == "local":
        return str(tmp_path / "run")
    mount(tmp_path)
    return "far://run"


def moved(folder: Path) -> list[str]:
    """The folders of checkpoints of earlier runs, the oldest first: named by the second, and by numbers within it."""
    names = sorted((path.name for path in (folder / "run").glob("old-*")), key=lambda name: (len(name) > 20, name))
    assert all(re.fullmatch(r"old-\d{8}T\d{6}Z(-2)?", name) for name in names)
    return names


def test_a_run_that_does_not_resume_keeps_its_checkpoints_and_those_of_the_earlier_run(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = checkpoints(place, 2)
    earlier.prepare(resume=True)
    for step in (30, 44, 66):
        earlier.save(state(step), step)
    earlier.save_best(state(44))
    (tmp_path / "run" / "trainyard-0123.index").touch()
    fresh = checkpoints(place, 2)
    fresh.prepare(resume=False)
    fresh.save(state(5, 0.1), 5)
    assert fresh.newest() == state(5, 0.1)
    (old,) = moved(tmp_path)
    assert files(tmp_path / "run") == [f"{old}/best.ckpt", f"{old}/step-000000044.ckpt", f"{old}/step-000000066.ckpt",
                                       "step-000000005.ckpt", "trainyard-0123.index"]  # fmt: skip
    assert f"note: the checkpoints of an earlier run are in {place}/{old} now\n" in capsys.readouterr().err


def test_checkpoints_that_were_moved_are_never_replaced(place: str, tmp_path: Path) -> None:
    for weight in (0.1, 0.2, 0.3):
        run = checkpoints(place, 2)
        run.prepare(resume=False)
        run.save(state(7, weight), 7)
    first, second = moved(tmp_path)
    names = [f"{first}/step-000000007.ckpt", f"{second}/step-000000007.ckpt", "step-000000007.ckpt"]
    assert sorted(names) == files(tmp_path / "run")
    assert [json.loads((tmp_path / "run" / name).read_text())["weight"] for name in names] == [0.1, 0.2, 0.3]


def test_a_best_checkpoint_that_no_run_continues_is_not_replaced(tmp_path: Path) -> None:
    run = checkpoints(tmp_path, 2)
    run.save_best(state(44))
    run.prepare(resume=True)
    run.save_best(state(1))
    assert len(files(tmp_path)) == 2 and run.best() == state(1)


def test_checkpoints_that_cannot_be_moved_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checkpoints(tmp_path, 2)
    run.save(state(7), 7)

    def refuse(path: str, target: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(exits.UserError, match=r"step-000000007.ckpt: cannot be moved to .*: Permission denied"):
        run.prepare(resume=False)


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_written_is_kept_behind_later_checkpoints_that_cannot_be_used(keep: int, tmp_path: Path) -> None:
    run = checkpoints(tmp_path, keep)
    for step in (30, 44):
        Path(run.path(step)).write_bytes(b"damaged")
    for step in (1, 2, 3):
        run.save(state(step), step)
        assert run.newest() == state(step)
    assert run.steps() == [*range(4 - keep, 4), 30, 44]


def test_messages_do_not_say_to_run_again_what_would_start_over(tmp_path: Path) -> None:
    args = flags.parse("toy", "", (), ["--no-resume", f"--checkpoint-dir={tmp_path}"])
    log = Log("toy", args, OneDevice(), 10, 7)
    log.saved(7, "")
    assert log.where_saved() == "step 7 is saved, run again without --no-resume to resume"
    run = checkpoints(tmp_path, 2)
    run.prepare(resume=False)
    (tmp_path / "step-000000007.ckpt").mkdir()
    with pytest.raises(exits.UserError, match="run the same command again without --no-resume to resume"):
        run.save(state(7), 7)


# --- weights that are not finite --------------------------------------------------------------------------------


class OneDevice:
    label, replicas, processes, chief = "cpu/0", 1, 1, True
    others = 0.0  # what another process passes to maximum()

    def maximum(self, values: list[float]) -> list[float]:
        return [max(value, self.others) for value in values]

    def compilations(self) -> tuple[int, float]:
        return 0, 0.0

    def versions(self) -> dict[str, str]:
        return {}


def run_of(folder: Path, *words: str) -> argparse.Namespace:
    return flags.parse("toy", "", (), [f"--checkpoint-dir={folder}", *words])


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_the_newest_sound_checkpoint_is_used_and_the_other_named(
    weight: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoints(tmp_path, 3)
    run.save(state(22), 22)
    run.save(state(44, weight), 44)
    assert run.newest() == state(22)
    said = capsys.readouterr().err
    assert said == f"note: {run.path(44)} cannot be used (its weight weight is not finite); trying the one before\n"
    run.save_best(state(44, weight))
    with pytest.raises(exits.UserError, match=r"best.ckpt cannot be used \(its weight weight is not finite\)"):
        run.best()


@pytest.mark.parametrize("member", ["run", "log", "step", "weight"])
def test_a_file_that_is_no_checkpoint_of_a_trainer_is_one_line(
    member: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoints(tmp_path, 3)
    run.save({name: value for name, value in state(22).items() if name != member}, 22)
    with pytest.raises(exits.UserError, match="none of its 1 checkpoints can be used"):
        run.newest()
    assert "step-000000022.ckpt cannot be used (" in capsys.readouterr().err


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("words", [["--epochs=1"], ["--epochs=5", "--eval-only"], ["--epochs=1", "--keep-best"]])
def test_a_final_test_whose_loss_is_not_finite_ends_the_run(
    loss: float, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(exits.Diverged, match="the test loss is not finite by step 10: lower --lr") as raised,
        Log("toy", run_of(tmp_path, *words), OneDevice(), 10, 10) as log,
    ):
        log.step(1, 9)
        log.test(1, 200, 20, loss)
    assert raised.value.code == 22
    said = capsys.readouterr().out
    assert '"status": "diverged", "exit_code": 22' in said and "Accuracy=" not in said


def test_a_test_whose_loss_is_not_finite_yet_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after few steps, when the averages of batch norm are those of the weights at the start."""
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(tmp_path / "metrics"))
    log = Log("toy", run_of(tmp_path, "--epochs=3", "--keep-best"), OneDevice(), 10, 10)
    log.step(1, 9)
    assert log.test(1, 200, 100, math.inf) == -1 and log.best is None
    assert "The test loss is not finite by step 10: this accuracy does not count\n" in capsys.readouterr().out
    assert not (tmp_path / "metrics").exists()
    log.step(2, 19)
    assert log.test(2, 200, 40, 50.0) == log.best == 20
    log.load(log.state(), 20)
    log.step(3, 29)
    assert log.test(3, 200, 100, math.nan) == -1 and log.best == 20, "the best of the run is exported"


def test_a_weight_that_is_not_finite_ends_all_processes(tmp_path: Path) -> None:
    device = OneDevice()
    log = Log("toy", run_of(tmp_path), device, 10, 7)
    log.step(2, 9)
    log.check_weights("")
    with pytest.raises(exits.Diverged, match=r"the weight conv1.bias is not finite by step 10: lower --lr"):
        log.check_weights("conv1.bias")
    device.others = 1.0
    with pytest.raises(exits.Diverged, match="a weight of another process is not finite by step 10"):
        log.check_weights("")


def test_a_run_that_diverged_after_a_checkpoint_says_how_to_leave_that_one_out(tmp_path: Path) -> None:
    log = Log("toy", run_of(tmp_path), OneDevice(), 10, 7)
    log.saved(7, "")
    with pytest.raises(exits.Diverged, match=f"; if that fails after step 7, move its checkpoint out of {tmp_path}$"):
        log.check_finite(math.nan)


# --- other data, other flags ------------------------------------------------------------------------------------

RUN: dict[str, Any] = {"model": "resnet18", "seed": 0, "data": {"images": "0a", "labels": "1b"}, "flags": {"lr": 0.1}}


def resume(saved: dict[str, Any], now: dict[str, Any], *words: str) -> list[str]:
    """What is said when a run ``now`` resumes from a checkpoint of ``saved``, with further flags ``words``."""
    said: list[str] = []
    check_same_run(json.loads(json.dumps(saved)), now, run_of(Path("folder"), *words), said.append)
    return said


def test_the_same_run_resumes_silently() -> None:
    assert resume(RUN, RUN) == []


def test_another_run_cannot_be_continued() -> None:
    with pytest.raises(exits.UserError, match="folder: its checkpoints have model resnet18, this run has v") as raised:
        resume(RUN, {**RUN, "model": "vit"}, "--accept-other-data")
    assert raised.value.code == exits.USAGE


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ({**RUN, "data": {"images": "0a", "labels": "2c"}}, "are of other data (other labels): "),
        ({**RUN, "data": {"images": "0d", "labels": "2c"}}, "are of other data (other images, labels): "),
        ({"model": "resnet18", "seed": 0}, "are of data that they do not name: "),
    ],
)
def test_other_data_are_one_line_unless_they_are_accepted(saved: dict[str, Any], line: str) -> None:
    with pytest.raises(exits.UserError) as raised:
        resume(saved, RUN)
    assert raised.value.code == exits.USAGE
    assert str(raised.value).startswith(f"folder: its checkpoints {line}") and "--accept-other-data" in str(
        raised.value
    )
    (said,) = resume(saved, RUN, "--accept-other-data")
    assert said.startswith("Resuming with ") and "\n" not in said


def test_flags_that_have_changed_are_one_line() -> None:
    saved = {**RUN, "flags": {"epochs": 5, "lr": 0.01, "mirror": True, "progressive": [16, 24], "removed": 1}}
    now = {**RUN, "flags": {"epochs": 5, "lr": 0.1, "mirror": False, "progressive": [], "added": 2}}
    assert resume(saved, now) == [
        "Resuming with --lr 0.1, was 0.01; --no-mirror, was --mirror; --progressive not given, was 16,24"
    ]


@pytest.mark.parametrize("words", [(), ("--eval-only", "--checkpoint-dir=folder")])
def test_averaged_weights_are_not_left_out(words: tuple[str, ...]) -> None:
    """They are what earlier tests and exports of the run were of."""
    averaged, raw = ({**RUN, "flags": {"lr": 0.1, "ema": ema}} for ema in (0.9, 0.0))
    with pytest.raises(
        exits.UserError, match=r"folder: its checkpoints have averaged .* give --ema 0.9, too"
    ) as raised:
        resume(averaged, raw, *words)
    assert raised.value.code == exits.USAGE
    assert resume(raw, averaged, *words) == ["Resuming with --ema 0.9, was 0.0"]
    assert resume({**RUN, "flags": {"lr": 0.1, "ema": 0.99}}, averaged, *words) == ["Resuming with --ema 0.9, was 0.99"]


def test_flags_of_places_devices_and_reports_do_not_decide_what_a_run_learns() -> None:
    def deciding(*words: str) -> dict[str, Any]:
        known = (*flags.TF, *imagenet_data.FLAGS)
        return flags.deciding(flags.parse("toy", "", known, list(words)), "bf16")

    moved = ("--datadir=a", "--job-dir=b", "--output-dir=c", "--num-workers=2", "--num-cores=4", "--batch-size=16",
             "--num-steps=3", "--log-steps=1", "--no-resume", "--keep-checkpoints=9", "--precision=bf16")  # fmt: skip
    assert deciding(*moved) == deciding()
    changed = {"lr": 0.5, "epochs": 9, "image-size": 99, "scale-lr": True, "weight-decay": 0.5, "ema": 0.5}
    found = deciding(*(flags.words(name, value).replace(" ", "=") for name, value in changed.items()))
    assert found == {**deciding(), **changed} and found["precision"] == "bf16"


def data_of(folder: Path, form: str) -> dict[str, str]:
    """The fingerprints of the images in ``folder``; those of both trainers are the same."""
    words = [f"--datadir={folder}", "--image-size=16", "--num-workers=1"]
    decoded = flowers_data.Data(flags.parse("toy", "", flowers_data.FLAGS, words))
    streamed = imagenet_data.Data(flags.parse("toy", "", imagenet_data.FLAGS, words), lambda rows: rows)
    assert decoded.fingerprints == streamed.fingerprints
    return decoded.fingerprints


@pytest.mark.parametrize("form", ["folder", "tar", "tfrecord"])
def test_data_that_were_moved_are_the_same(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn.write(tmp_path / "here", form, train=30, test=5)
    first = data_of(tmp_path / "here", form)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for path in (tmp_path / "there").rglob("*"):
        os.utime(path, (1, 1))
    listed, scanned = os.listdir, os.scandir
    monkeypatch.setattr(paths.os, "listdir", lambda folder: listed(folder)[::-1])

    class Reversed:
        def __init__(self, folder: str) -> None:
            with scanned(folder) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self.entries

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(paths.os, "scandir", Reversed)
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
        (tmp_path / name).mkdir()
        drawn.write_tfrecord(
            tmp_path / name / "train-00000-of-00001", [((n + shift) % 5, image) for n, image in pictures]
        )
        drawn.write_tfrecord(tmp_path / name / "test-00000-of-00001", pictures)
    first, second = (data_of(tmp_path / name, "tfrecord") for name in ("a", "b"))
    assert [what for what in first if first[what] != second[what]] == ["contents or labels of training images"]


def test_digits_with_other_labels_are_other_data() -> None:
    args = flags.parse("toy", "", mnist_data.FLAGS, ["--fake-data", "--fake-images=60"])
    (pixels, labels), _ = mnist_data.load(args)
    first, second = (order.fingerprints(images=pixels, test_labels=given) for given in (labels, (labels + 1) % 10))
    assert first["images"] == second["images"] and first["test labels"] != second["test labels"]
    assert order.fingerprints(images=np.asfortranarray(pixels)) == order.fingerprints(images=pixels)
