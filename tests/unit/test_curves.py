"""Test which lines of a training are read for losses, and the files that are written from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from trainyard.sandbox.curves import Curves, report


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("loss 1.23", [("loss", 1.23)]),
        ("step 0: train loss 4.2874, val loss 4.2823", [("train_loss", 4.2874), ("val_loss", 4.2823)]),
        ('{"loss": 1.5, "step": 30}', [("loss", 1.5)]),
        ("{'loss': '0.52', 'epoch': 0.5}", [("loss", 0.52)]),
        ("157/157 - 1s - loss: 0.5 - val_loss: 6e-1", [("loss", 0.5), ("val_loss", 0.6)]),
        ("Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.3", [("loss", 2.3)]),
        ("loss = tensor(1.25, grad_fn=<X>)", [("loss", 1.25)]),
        ("policy_loss=-0.1", [("policy_loss", -0.1)]),
        ("loss_scale: 3, --loss 7, loss: 3/4, loss function: 2, no loss", []),
    ],
)
def test_a_loss_is_read_in_the_form_of_every_framework(line: str, found: list[tuple[str, float]]) -> None:
    assert Curves().add(line, 0) == found


def test_a_step_is_the_lines_own_or_follows_the_last() -> None:
    curves = Curves()
    for line in ("step 5: loss 3", "loss 2", "iter 20 loss 1", "step 0 loss 0.5"):
        curves.add(line, 1.5)
    assert [step for _, step, _ in curves.points["loss"]] == [5, 6, 20, 21]


def test_a_line_shows_how_a_loss_went_and_one_value_shows_nothing() -> None:
    curves = Curves()
    for value in ("4", "2", "nan", "1"):
        curves.add(f"loss {value}, val loss 3" if value == "4" else f"loss {value}", 0)
    assert curves.lines() == ["loss █▃!▁ 4 to 1, lowest 1, 4 values"]


def test_the_files_are_csv_json_and_records_of_tensorboard(tmp_path: Path) -> None:
    """Compare with records whose values and steps TensorBoard 2.20 has read; it checks both checksums."""
    curves = Curves()
    curves.add("step 7: loss nan", 0.25)
    assert report(tmp_path, {"status": 0}, curves, 1e9) == [
        "run.json", "curves.csv", "events.out.tfevents.1000000000.trainyard"
    ]  # fmt: skip
    assert (tmp_path / "curves.csv").read_text() == "name,step,seconds,value\nloss,7,0.25,nan\n"
    assert json.loads((tmp_path / "run.json").read_text())["losses"] == {"loss": "nan"}
    data = (tmp_path / "events.out.tfevents.1000000000.trainyard").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    assert size == 26 and data[8:12] == bytes.fromhex("129bd82d")  # as tf.io.TFRecordWriter writes a length of 26
    assert data[12 : 12 + size].endswith(b"brain.Event:2")


def test_nothing_is_written_of_a_run_without_losses(tmp_path: Path) -> None:
    assert report(tmp_path, {}, Curves(), 0) == ["run.json"]
