"""The TensorFlow trainers in the tf-cpu image: one device, several replicas, several workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import digits, flowers_data
from tests.image.trainer_box import PYTHON, Box, box

SHORT = ("--datadir=/data/digits", "--epochs=3")
RUN = f"{PYTHON} -m trainers.tf.mnist --datadir=/data/digits --epochs=3"


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("tf-cpu"), tmpfs={"/full": "size=2m,mode=1777"}) as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits")), "digits")
        yield started


@pytest.fixture(scope="module")
def whole(here: Box) -> dict[str, object]:
    """The summary of an uninterrupted run."""
    return here.trainer("tf.mnist", *SHORT).learned()


def test_mnist_learns_real_digits_and_its_exports_answer_alike(here: Box) -> None:
    ended = here.trainer("tf.mnist", "--datadir=/data/digits", "--epochs=10", "--export-dir=/tmp/model",
                         "--output-dir=/tmp/out", "--logdir=/tmp/board")  # fmt: skip
    found = ended.learned()
    assert found["accuracy"] >= 98.5 and found["train_seconds"] < 60
    assert found["loss_last"] < found["loss_first"] / 5
    assert not [line for line in ended.lines if line.startswith(("WARNING", "ERROR"))], ended.output
    assert found["compile_count"] == 2, "one function to train and one to test, traced once"
    loaded = here.python("""
import keras, numpy, tensorflow as tf
from trainers.common import idx
images, labels = idx.load_mnist("/data/digits", "test")
model = tf.saved_model.load("/tmp/model/saved_model")
served = model.serve(tf.constant(images)).numpy()
again = keras.models.load_model("/tmp/model/model.keras").predict(images, verbose=0)
assert abs(served - again).max() < 1e-4 and abs(served.sum(1) - 1).max() < 1e-4
print(100 * (served.argmax(1) == labels).mean())
""")
    assert loaded.code == 0, loaded.output
    # The trainer tests in bfloat16 where the CPU has it, the export is float32: at most one of 360 may differ.
    assert abs(float(loaded.lines[-1]) - found["accuracy"]) <= 100 / 360 + 1e-6
    files = here.run("ls", "/tmp/out", "/tmp/board").output
    assert "report.png" in files and "report.json" in files and "events.out.tfevents" in files


def test_the_same_seed_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    again = here.trainer("tf.mnist", *SHORT).learned()
    assert again["weights_sha256"] == whole["weights_sha256"]
    other = here.trainer("tf.mnist", *SHORT, "--seed=1").learned()
    assert other["weights_sha256"] != whole["weights_sha256"]


def test_killed_anywhere_and_resumed_is_the_uninterrupted_run(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/killed --checkpoint-steps=5"
    here.run("sh", "-c", f"{RUN} {folder} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid")
    here.until("/tmp/killed.log", "Epoch=2 Step=0")
    here.run("sh", "-c", "kill -9 $(cat /tmp/killed.pid)")
    resumed = here.trainer("tf.mnist", *SHORT, *folder.split()).learned()
    assert resumed["resumed_from"] >= 20
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]


def test_sigterm_saves_the_step_and_ends_with_143(here: Box) -> None:
    endless = RUN.replace("epochs=3", "epochs=1000")
    (ended,) = here.together(f"sh -c '{endless} --checkpoint-dir=/tmp/termed & echo $! >/tmp/term.pid; "
                             "until grep -q Epoch=2 /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143, ended.output
    saved = ended.summary["global_step"]
    words = ("--datadir=/data/digits", "--epochs=1000", f"--num-steps={saved + 5}")
    resumed = here.trainer("tf.mnist", *words, "--checkpoint-dir=/tmp/termed").learned()
    straight = here.trainer("tf.mnist", *words).learned()
    assert resumed["resumed_from"] == saved
    assert resumed["weights_sha256"] == straight["weights_sha256"]


def test_two_replicas_equal_one_and_two_workers_equal_two_replicas(here: Box) -> None:
    fp32 = ("--datadir=/data/digits", "--epochs=1", "--precision=fp32")
    one = here.trainer("tf.mnist", *fp32).learned()
    two = here.trainer("tf.mnist", *fp32, "--batch-size=32", "--num-cores=2", "--test-batch-size=77").learned()
    assert (two["replicas"], two["global_batch"]) == (2, one["global_batch"])
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    cluster = {"worker": ["127.0.0.1:45671", "127.0.0.1:45672"]}
    commands = [
        "env TF_CONFIG='" + json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) + "' "
        f"{PYTHON} -m trainers.tf.mnist {' '.join(fp32)} --batch-size=32 --test-batch-size=77"
        " --checkpoint-dir=/tmp/shared"
        for index in (0, 1)
    ]
    chief, other = here.together(*commands)
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["processes"] == 2 and not other.summary, "only the chief speaks"
    assert chief.summary["test_loss"] == pytest.approx(two["test_loss"], rel=1e-5)


def test_workers_that_see_different_checkpoints_say_so(here: Box) -> None:
    """Worker 1 has a folder of its own, where there is nothing: both end with the reason, neither hangs."""
    cluster = {"worker": ["127.0.0.1:45681", "127.0.0.1:45682"]}
    words = "--datadir=/data/digits --epochs=1 --batch-size=32 --num-steps=4"
    shared = here.trainer("tf.mnist", *words.split(), "--num-cores=2", "--checkpoint-dir=/tmp/only0")
    assert shared.code == 0, shared.output
    commands = [
        "env TF_CONFIG='" + json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) + "' "
        f"{PYTHON} -m trainers.tf.mnist {words} --checkpoint-dir=/tmp/only{index}"
        for index in (0, 1)
    ]
    for ended in here.together(*commands, seconds=90):
        assert ended.code == 1 and "must be a folder that all workers share" in ended.output, ended.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--datadir=/nowhere"], 1, "mnist: /nowhere: no such folder"),
        (["--datadir=/data/digits", "--strategy=multiworker"], 2, "needs a TF_CONFIG with at least 2 workers"),
        (["--datadir=/data/digits", "--batch_size=5000"], 1, "do not fill one step of 5000"),
        (["--strategy=both"], 2, "mnist: --strategy: 'both' is none of auto, one, mirrored, multiworker, tpu"),
    ],
)
def test_wrong_input_is_one_clear_line(here: Box, words: list[str], code: int, said: str) -> None:
    ended = here.trainer("tf.mnist", *words)
    assert ended.code == code and said in ended.output
    assert len(ended.lines) == 1, ended.output


def test_a_rehearsal_does_not_look_for_the_tpu(here: Box) -> None:
    ended = here.trainer("tf.mnist", *SHORT, "--num-steps=2", TPU_NAME="grpc://192.0.2.1:8470", LAUNCHER_REHEARSE="1")
    assert ended.learned()["device"] == "CPU:0/0"


def test_a_full_disk_is_one_clear_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    run = (*SHORT, "--checkpoint-dir=/full", "--checkpoint-steps=1")
    assert here.trainer("tf.mnist", *run, "--num-steps=1").code == 0
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=800 2>/dev/null")
    before = here.run("ls", "-A", "/full").output
    ended = here.trainer("tf.mnist", *run)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert len(said) == 1 and "cannot be saved" in said[0] and "step 1 is intact" in said[0], ended.output
    assert here.run("ls", "-A", "/full").output == before, "nothing lost, nothing half written left"


def test_flowers_learns_and_its_export_answers_alike(here: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = here.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tfrecord", train=300, test=60), "flowers")
    run = (f"--datadir={data}", "--image-size=48", "--batch-size=25", "--epochs=8", "--num-workers=2")
    whole = here.trainer("tf.flowers", *run, "--export-dir=/tmp/flowers-model").learned()
    assert whole["accuracy"] >= 90 and whole["compile_count"] == 2
    loaded = here.python(f"""
import tensorflow as tf
from trainers.common import images
pixels, labels = images.Loader(images.find("{data}", "test"), 2).all(48)
model = tf.saved_model.load("/tmp/flowers-model/saved_model")
print(100 * (model.serve(tf.constant(pixels)).numpy().argmax(1) == labels).mean())
""")
    # The trainer scales its own larger copy of an image down once more: a few pixels, at most two pictures differ.
    assert abs(float(loaded.lines[-1]) - whole["accuracy"]) <= 100 * 2 / 60 + 1e-6, loaded.output


def test_imagenet_counts_top5_exactly_and_resumes(here: Box, tmp_path: Path) -> None:
    """Twelve labels for five kinds of flowers: nobody can be sure of the first guess, so top-1 and top-5 differ."""
    for split, count, seed in (("train", 75, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        flowers_data.write_tar(tmp_path / f"{split}-00000.tar", made)
    data = here.put(tmp_path, "imagenet")
    run = (f"--datadir={data}", "--num-classes=12", "--model=mobilenetv2", "--image-size=40", "--progressive=32",
           "--epochs=2", "--batch-size=25", "--test-batch-size=20", "--lr=0.05", "--warmup-epochs=1", "--cutmix=1",
           "--mixup=0.2", "--precision=fp32", "--num-workers=2")  # fmt: skip
    outputs = ("--export-dir=/tmp/imagenet-model", "--output-dir=/tmp/imagenet")
    whole = here.trainer("tf.imagenet", *run, *outputs).learned()
    assert whole["compile_count"] == 3, "one function for each of two sizes to train, one to test"
    here.trainer("tf.imagenet", *run, "--checkpoint-dir=/tmp/imagenet-kept", "--num-steps=5").learned()
    resumed = here.trainer("tf.imagenet", *run, "--checkpoint-dir=/tmp/imagenet-kept").learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (5, whole["weights_sha256"])
    counted = here.python(f"""
import json, numpy, tensorflow as tf
from trainers.common import images
batches = images.Loader(images.find("{data}", "test"), 2).batches(
    [numpy.arange(53)], 40, lambda number, width, height: images.centre_box(width, height))
pixels, labels = next(batches)
model = tf.saved_model.load("/tmp/imagenet-model/saved_model")
best = numpy.argsort(-model.serve(tf.constant(pixels)).numpy(), axis=1)[:, :5]
tests = [json.loads(line) for line in open("/tmp/imagenet/metrics.jsonl") if '"event": "test"' in line]
hits = best == labels[:, None]
print(json.dumps([100 * hits[:, 0].mean(), 100 * hits.any(1).mean(), tests[-1]["top5"]]))
""")
    top1, top5, reported = json.loads(counted.lines[-1])
    assert top1 == pytest.approx(whole["accuracy"], abs=1e-4)
    assert top5 == pytest.approx(reported, abs=1e-4) and top5 > top1
