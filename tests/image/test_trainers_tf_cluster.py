"""The TensorFlow trainers on several workers: what one process does, they do together, and they end together."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.datasets import digits
from scripts.datasets import flowers as flowers_data
from tests.image.trainer_box import PYTHON, Box, Ended, box
from trainers.common import idx, order

FP32 = "--datadir=/data/digits --precision=fp32 --batch-size=32 --test-batch-size=77"


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("tf-cpu"), tmpfs={"/full": "size=2m,mode=1777"}) as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits")), "digits")
        yield started


def member(
    rank: int, port: int, words: str, trainer: str = "mnist", roles: tuple[str, str] = ("worker", "worker")
) -> str:
    """The shell command of worker ``rank`` of two, as Vertex AI starts it; ``{rank}`` in ``words`` is its number."""
    cluster: dict[str, list[str]] = {}
    for number, role in enumerate(roles):
        cluster.setdefault(role, []).append(f"127.0.0.1:{port + number}")
    index = roles[:rank].count(roles[rank])
    config = json.dumps({"cluster": cluster, "task": {"type": roles[rank], "index": index}})
    return f"env TF_CONFIG='{config}' {PYTHON} -m trainers.tf.{trainer} {words.format(rank=rank)}"


def both(here: Box, port: int, words: str, trainer: str = "mnist", **more: tuple[str, str]) -> tuple[Ended, Ended]:
    """Both workers, run to their end."""
    chief, other = here.together(*(member(rank, port, words, trainer, **more) for rank in (0, 1)), seconds=240)
    return chief, other


def signalled(here: Box, port: int, words: str, victim: int, signal: str, at: str) -> tuple[Ended, Ended]:
    """Both workers, ``victim`` getting ``signal`` once the chief has said ``at``."""
    commands = [
        f"sh -c '{member(rank, port, words).replace(chr(39), chr(39) + chr(34) + chr(39) + chr(34) + chr(39))}"
        f" & echo $! >/tmp/pid{rank}; wait $(cat /tmp/pid{rank})'"
        for rank in (0, 1)
    ]
    signaller = f"sh -c 'until grep -q \"{at}\" /tmp/out0; do sleep 0.05; done; kill -{signal} $(cat /tmp/pid{victim})'"
    chief, other, _ = here.together(*commands, signaller, seconds=240)
    return chief, other


@pytest.fixture(scope="module")
def pair(here: Box) -> dict[str, object]:
    """The summary of two workers that nothing happens to."""
    chief, other = both(here, 45601, f"{FP32} --epochs=8 --export-dir=/tmp/export{{rank}}", roles=("chief", "worker"))
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["processes"] == 2 and not other.summary, "only the chief speaks"
    return chief.summary


def epochs_in(here: Box, folder: str) -> list[dict[str, float]]:
    """The test events in ``folder``, an epoch each."""
    lines = here.run("grep", '"event": "test"', f"{folder}/metrics.jsonl").lines
    return [json.loads(line) for line in lines]


def test_two_workers_equal_two_replicas_and_one_process(here: Box, pair: dict[str, object]) -> None:
    """The same global batch: what differs is the order of float32 sums, which SGD makes larger with each step."""
    words = ("--datadir=/data/digits", "--precision=fp32", "--epochs=8")
    parts = ("--batch-size=32", "--test-batch-size=77", "--num-cores=2")
    two = here.trainer("tf.mnist", *words, *parts, "--output-dir=/tmp/two").learned()
    one = here.trainer("tf.mnist", *words, "--batch-size=64", "--output-dir=/tmp/one").learned()
    assert (
        (pair["replicas"], pair["global_batch"]) == (two["replicas"], two["global_batch"]) == (2, one["global_batch"])
    )
    assert pair["test_loss"] == pytest.approx(two["test_loss"], rel=1e-5)
    first, *_, last = zip(epochs_in(here, "/tmp/one"), epochs_in(here, "/tmp/two"), strict=True)
    assert first[1]["loss"] == pytest.approx(first[0]["loss"], rel=1e-3), "after 22 steps"
    assert last[1]["correct"] == pytest.approx(last[0]["correct"], abs=3), "of 360, after 176 steps"


def test_only_the_chiefs_model_is_kept(here: Box, pair: dict[str, object]) -> None:
    """The other worker saved as well, into a temporary folder that is gone."""
    assert here.run("ls", "/tmp/export0").output.split() == ["model.keras", "saved_model"]
    assert here.run("ls", "/tmp/export1").code != 0
    assert "tmp" not in [name[:3] for name in here.run("ls", "/tmp").output.split()]
    found = here.python("""
import keras
from trainers.common import idx
images, labels = idx.load_mnist("/data/digits", "test")
print(100 * (keras.models.load_model("/tmp/export0/model.keras").predict(images, verbose=0).argmax(1) == labels).mean())
""")
    assert float(found.lines[-1]) == pytest.approx(pair["accuracy"])


def test_sigterm_to_one_worker_stops_both_at_the_same_step(here: Box, pair: dict[str, object]) -> None:
    words = f"{FP32} --epochs=8 --checkpoint-dir=/tmp/termed --log-steps=1 --steps-per-execution=1"
    chief, other = signalled(here, 45611, words, victim=1, signal="TERM", at="Epoch=2 Step=2")
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = chief.summary["global_step"]
    assert 24 < saved < 176 and f"step-{saved:09d}.ckpt" in here.run("ls", "/tmp/termed").output
    chief, other = both(here, 45621, words)
    assert (chief.code, other.code, chief.summary["resumed_from"]) == (0, 0, saved), chief.output + other.output
    assert chief.summary["weights_sha256"] == pair["weights_sha256"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_other_with_one_line_and_both_resume(
    here: Box, pair: dict[str, object], victim: int
) -> None:
    step = random.randrange(22)
    folder = f"/tmp/killed{victim}"
    words = f"{FP32} --epochs=8 --checkpoint-dir={folder} --checkpoint-steps=5 --log-steps=1 --steps-per-execution=1"
    ends = signalled(here, 45631 + 10 * victim, words, victim, "KILL", at=f"Epoch=2 Step={step}")
    assert ends[victim].code == 137
    said = [line for line in ends[1 - victim].lines if line.startswith("mnist: ")]
    assert ends[1 - victim].code == 1 and len(said) == 1 and "lost another worker" in said[0], ends[1 - victim].output
    assert "Traceback" not in ends[1 - victim].output
    chief, other = both(here, 45651 + 10 * victim, words)
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["resumed_from"] >= 20, f"killed at step {step} of epoch 2"
    assert chief.summary["weights_sha256"] == pair["weights_sha256"], f"killed at step {step} of epoch 2"


def test_a_full_disk_ends_both_workers(here: Box) -> None:
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=1200 2>/dev/null")
    chief, other = both(here, 45671, f"{FP32} --epochs=1 --checkpoint-dir=/full --checkpoint-steps=2")
    assert (chief.code, other.code) == (1, 1), chief.output + other.output
    assert "cannot be saved (No space left on device)" in chief.output
    assert "lost another worker" in other.output and "Traceback" not in chief.output + other.output
    assert here.run("ls", "-A", "/full").output.split() == ["ballast"], "nothing half written stays"


def test_workers_that_see_different_checkpoints_say_so(here: Box) -> None:
    """Worker 1 has a folder of its own, where there is nothing: both end with the reason, neither hangs."""
    words = "--datadir=/data/digits --epochs=1 --batch-size=32 --num-steps=4"
    here.trainer("tf.mnist", *words.split(), "--num-cores=2", "--checkpoint-dir=/tmp/only0").learned()
    for ended in both(here, 45681, words + " --checkpoint-dir=/tmp/only{rank}"):
        assert ended.code == 1 and "must be a folder that all workers share" in ended.output, ended.output


def test_workers_that_see_different_data_say_so(here: Box, tmp_path: Path) -> None:
    made = digits.write_idx(tmp_path / "digits1")
    for name in idx.FILES["train"]:
        idx.write(str(made / name), idx.read(str(made / name))[:1400])
    here.put(made, "digits1")
    here.run("ln", "-s", "/data/digits", "/tmp/data0")
    here.run("ln", "-s", "/data/digits1", "/tmp/data1")
    for ended in both(here, 45691, "--epochs=1 --datadir=/tmp/data{rank}"):
        assert ended.code == 1 and "the workers see different data: 1437, 1400 training" in ended.output, ended.output


# One shard for two workers, 75 and 53 images for batches of 16: nothing divides anything.
SMALL = "--num-classes=12 --model=mobilenetv2 --image-size=32 --batch-size=8 --test-batch-size=10 --epochs=1"


def imagenet(folder: Path, broken: int | None = None) -> Path:
    for split, count, seed in (("train", 75, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        if split == "train" and broken is not None:
            made[broken] = (0, made[broken][1][:500])
        flowers_data.write_tar(folder / f"{split}-00000.tar", made)
    return folder


def test_fewer_shards_than_workers_and_uneven_data_train_as_one_process(here: Box, tmp_path: Path) -> None:
    words = f"--datadir={here.put(imagenet(tmp_path), 'imagenet')} {SMALL}"
    two = here.trainer("tf.imagenet", *words.split(), "--num-cores=2", "--output-dir=/tmp/split").learned()
    chief, other = both(here, 45701, words + " --output-dir=/tmp/workers", "imagenet")
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["global_step"] == two["global_step"] == 75 // 16
    assert chief.summary["test_loss"] == pytest.approx(two["test_loss"], rel=1e-3)
    tests = epochs_in(here, "/tmp/split") + epochs_in(here, "/tmp/workers")
    assert [test["count"] for test in tests] == [53, 53]
    assert all(0 <= test["correct"] <= 53 and test["correct"] == round(test["correct"]) for test in tests)


def test_a_damaged_picture_in_one_workers_share_ends_both(here: Box, tmp_path: Path) -> None:
    second_half = order.permutation(75, 0, 1)[8:16]  # of the first batch: worker 1 decodes it
    broken = int(np.min(second_half))
    data = here.put(imagenet(tmp_path, broken), "broken")
    chief, other = both(here, 45711, f"--datadir={data} {SMALL}", "imagenet")
    assert (chief.code, other.code) == (1, 1), chief.output + other.output
    assert f"train-00000.tar: {broken:05d}.jpg: is no readable image" in other.output
    assert "lost another worker" in chief.output and "Traceback" not in chief.output + other.output
