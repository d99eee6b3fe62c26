"""The TensorFlow trainers in the tf-cpu image: MNIST on one device, with its logs, checkpoints and exports."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainers.common import mnist

from tests.image.trainer_box import (
    COUNT,
    FLOAT32,
    MNIST_FORWARD,
    MNIST_GRADIENT,
    PYTHON,
    VARIABLES,
    Box,
    Ended,
    box,
    few_digits,
    serve_storage,
    step_differs,
)
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = pytest.mark.concurrent

SHORT = ("--datadir=/data/digits", "--epochs=3")
RUN = f"{PYTHON} -m trainers.tf.mnist --datadir=/data/digits --epochs=3"
# As in a custom job on Vertex AI, where Cloud Storage is mounted at /gcs.
VERTEX = {"AIP_MODEL_DIR": "/gcs/bucket/model", "AIP_CHECKPOINT_DIR": "/gcs/bucket/checkpoints",
          "AIP_TENSORBOARD_LOG_DIR": "/gcs/bucket/board", "CLOUD_ML_TRIAL_ID": "4"}  # fmt: skip


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("tf-cpu"), tmpfs={"/full": "size=2m,mode=1777", "/gcs": "mode=1777"}) as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits")), "digits")
        yield started


@pytest.fixture(scope="module")
def whole(here: Box) -> dict[str, object]:
    """The summary of an uninterrupted run."""
    return here.trainer("tf.mnist", *SHORT).learned()


@pytest.fixture(scope="module")
def trained(here: Box) -> Ended:
    """A run of ten epochs, in the environment of a tuning trial on Vertex AI."""
    return here.trainer(
        "tf.mnist", "--datadir=/data/digits", "--epochs=10", "--output-dir=/tmp/out", "--profile=3", **VERTEX
    )


def test_mnist_learns_digits(trained: Ended) -> None:
    found = trained.learned()
    # 11 runs (seeds 0 to 2, fp32 and bf16, both frameworks; one CPU model) have 99.02 % on average and a standard
    # deviation of 0.19. The floor is five of them below.
    assert found["accuracy"] >= 98.05
    assert found["loss_last"] < found["loss_first"] / 5
    assert not [line for line in trained.lines if line.startswith(("WARNING", "ERROR"))], trained.output
    exports = "exported_accuracy" in found
    features = Path("/proc/cpuinfo").read_text().split()
    assert exports == bool({"avx512_bf16", "amx_bf16"} & set(features)), (
        "it is tested in bf16 there, and exported in fp32"
    )


def test_its_exports_give_the_same_answers_in_a_new_process(here: Box, trained: Ended) -> None:
    loaded = here.python(f"""{COUNT}
import json, keras, tensorflow as tf
from trainers.common import mnist
images, labels = mnist.read_split("/data/digits", "test")
model = tf.saved_model.load("/gcs/bucket/model/saved_model")
served = model.signatures["serving_default"](images=tf.constant(images))["output_0"].numpy()
again = keras.models.load_model("/gcs/bucket/model/model.keras").predict(images, verbose=0)
# The softmax turns the error of the logits, relative to the largest, into one of the probabilities.
bound = {MNIST_FORWARD * FLOAT32} * abs(numpy.log(numpy.maximum(served, 1e-30))).max()
right = count(served, labels, {MNIST_FORWARD * FLOAT32})
print(json.dumps([*right, bool(abs(served - again).max() <= bound)]))
""")
    assert loaded.code == 0, loaded.output
    right, close, alike = json.loads(loaded.lines[-1])
    found = trained.learned()
    accuracy = found.get("exported_accuracy", found["accuracy"])
    assert abs(right - round(accuracy * 3.6)) <= close, "360 digits; only near ties may differ"
    said = [line for line in trained.lines if line.startswith("Exported model: ")]
    expected = f"Exported model: test accuracy {accuracy:.2f} % in fp32"
    assert said == [expected] * ("exported_accuracy" in found)
    assert alike and right >= 0.9805 * 360


def test_a_run_writes_logs_metrics_tensorboard_events_and_a_report(here: Box, trained: Ended) -> None:
    read = here.python("""
import glob, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
board = EventAccumulator("/gcs/bucket/board").Reload()
print(json.dumps({
    "board": {tag: [(point.step, float(make_ndarray(point.tensor_proto))) for point in board.Tensors(tag)]
              for tag in board.Tags()["tensors"]},
    "events": [json.loads(line) for line in open("/tmp/out/metrics.jsonl")],
    "report": json.load(open("/tmp/out/report.json")),
    "tuning": [json.loads(line) for line in open("/tmp/hypertune/output.metrics")],
    "trace": glob.glob("/tmp/out/plugins/profile/*/*.xplane.pb"),
}))
""")
    found = json.loads(read.lines[-1])
    trains = [event for event in found["events"] if event["event"] == "train"]
    tests = [event for event in found["events"] if event["event"] == "test"]
    assert (len(trains), len(tests)) == (1 + 220 // 20, 10)
    assert [step for step, _ in found["board"]["test/accuracy"]] == [event["global_step"] for event in tests]
    assert {"train/loss", "train/images_per_second", "train/lr", "test/test_loss"} <= set(found["board"])
    assert found["report"]["summary"] == trained.summary and len(found["report"]["loss"]) == len(trains)
    assert len(found["trace"]) == 1
    # cloudml-hypertune's own format: what is compared here was written by that package.
    assert len(found["tuning"]) == 10 and set(found["tuning"][-1]) == {
        "timestamp", "trial", "training/hptuning/metric", "global_step", "checkpoint_path"}  # fmt: skip
    reported = 100 * float(found["tuning"][-1]["training/hptuning/metric"])
    assert round(reported, 6) == trained.summary["accuracy"], "the summary rounds to six decimals"
    assert (found["tuning"][-1]["trial"], found["tuning"][-1]["global_step"]) == ("4", "220")


@pytest.mark.slow("test_a_killed_and_resumed_run_gives_the_same_bits")
def test_the_same_seed_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    again = here.trainer("tf.mnist", *SHORT).learned()
    assert again["weights_sha256"] == whole["weights_sha256"]
    other = here.trainer("tf.mnist", *SHORT, "--seed=1").learned()
    assert other["weights_sha256"] != whole["weights_sha256"]


def test_a_killed_and_resumed_run_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/killed --checkpoint-steps=5"
    here.run("sh", "-c", f"{RUN} {folder} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid")
    step = random.randrange(5, 60)  # of 66; a checkpoint each fifth step, so that some kills come while one is written
    reached = f'[ "$(ls -d /tmp/killed/*/run.json 2>/dev/null | tail -n 1)" ">" /tmp/killed/step-{step:09d} ]'
    here.run("bash", "-c", f"until {reached}; do sleep 0.01; done; sleep 0.0$RANDOM; kill -9 $(cat /tmp/killed.pid)")
    resumed = here.trainer("tf.mnist", *SHORT, *folder.split()).learned()
    assert resumed["resumed_from"] >= step, f"killed after step {step}"
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]


def test_sigterm_saves_the_step_and_ends_with_143(here: Box) -> None:
    endless = RUN.replace("epochs=3", "epochs=1000")
    (ended,) = here.run_parallel(f"sh -c '{endless} --checkpoint-dir=/tmp/termed & echo $! >/tmp/term.pid; "
                             "until grep -q accuracy /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143, ended.output
    saved = ended.summary["global_step"]
    words = ("--datadir=/data/digits", "--epochs=1000", f"--num-steps={saved + 5}")
    resumed = here.trainer("tf.mnist", *words, "--checkpoint-dir=/tmp/termed").learned()
    straight = here.trainer("tf.mnist", *words).learned()
    assert resumed["resumed_from"] == saved
    assert resumed["weights_sha256"] == straight["weights_sha256"]


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(here: Box) -> None:
    """The loss is logged after the first step only; the weights are checked in each test."""
    ended = here.trainer("tf.mnist", *SHORT, "--lr=1e38", "--checkpoint-dir=/tmp/nan", "--log-steps=1000")
    assert (ended.code, ended.summary["status"]) == (22, "diverged") and "lower --lr" in ended.output
    assert here.run("ls", "/tmp/nan").output == ""


@pytest.mark.parametrize(
    "trainer", ["tf.mnist", "tf.flowers", pytest.param("tf.imagenet", marks=pytest.mark.slow("with flowers"))]
)
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(here: Box, trainer: str, tmp_path: Path) -> None:
    """The only step makes them so; its loss, of the weights before, is finite."""
    data, size = ["--datadir=/data/digits"], 1437
    if trainer != "tf.mnist":
        size = 16
        data = [f"--datadir={here.put(flowers_data.write(tmp_path, 'tar', train=size, test=7), 'flowers')}",
                "--image-size=32", "--test-batch-size=7", "--num-workers=1"]  # fmt: skip
    more = ("--num-classes=5", "--warmup-epochs=0", "--ema=0.5") if trainer == "tf.imagenet" else ()
    folder = f"/tmp/{trainer}-not-finite"
    run = (*data, *more, f"--batch-size={size}", "--epochs=1", "--lr=3e38", "--weight-decay=1e3")
    ended = here.trainer(trainer, *run, f"--checkpoint-dir={folder}", f"--export-dir={folder}/model", "--keep-best")
    assert (ended.code, ended.summary["status"]) == (22, "diverged"), ended.output
    assert "is not finite by step 1: lower --lr" in ended.output and "Traceback" not in ended.output
    kept = here.run("sh", "-c", f"cd {folder} && find . -type f ! -name '*.index'")  # that of the data's shards stays
    assert kept.output == ""


def test_a_test_with_weights_that_are_not_finite_exports_nothing(here: Box) -> None:
    run = ("--datadir=/data/digits", "--batch-size=1437", "--epochs=1", "--lr=3e38", "--weight-decay=1e3",
           "--export-dir=/tmp/no-model")  # fmt: skip
    ended = here.trainer("tf.mnist", *run)
    assert ended.code == 22 and "kernel is not finite by step 1: lower --lr" in ended.output, ended.output
    assert here.run("ls", "-A", "/tmp/no-model").output == ""


@pytest.mark.slow("test_weights_that_are_not_finite_are_neither_saved_nor_exported")
def test_a_checkpoint_with_weights_that_are_not_finite_is_left_out(here: Box, whole: dict[str, object]) -> None:
    run = (*SHORT, "--checkpoint-dir=/tmp/poisoned", "--keep-checkpoints=9")
    here.trainer("tf.mnist", *run).learned()
    poisoned = here.python("""
import shutil
from trainers.tf import mnist
from trainers.tf._fit import Checkpoint, make_optimizer
from trainers.tf._peers import Peers
args = mnist.parse_args([])
peers, model = Peers(args), mnist.network(args)
variables = model.trainable_variables
checkpoint = Checkpoint(peers, model, make_optimizer(args, 66, 0.2, variables, peers))
shutil.copytree("/tmp/poisoned/step-000000066", "/tmp/poisoned/step-000000067")
with open("/tmp/poisoned/step-000000067/state.data-00000-of-00001", "r+b") as file:
    file.seek(1000)
    byte = file.read(1)[0]
    file.seek(1000)
    file.write(bytes([byte ^ 1]))
checkpoint.load("/tmp/poisoned/step-000000066")
variables[2].assign(variables[2] + float("inf"))
checkpoint.save("/tmp/poisoned/step-000000066")
""")
    assert poisoned.code == 0, poisoned.output
    resumed = here.trainer("tf.mnist", *run)
    found = resumed.learned()
    assert (found["resumed_from"], found["weights_sha256"]) == (44, whole["weights_sha256"])
    notes = [line for line in resumed.lines if line.startswith("note: ")]
    assert len(notes) == 2 and "step-000000066 cannot be used (its weight " in notes[1], resumed.output
    assert "step-000000067 cannot be used (" in notes[0], "TensorFlow has a checksum of each variable"


def test_a_run_that_does_not_resume_moves_the_earlier_checkpoints_and_keeps_its_own(here: Box) -> None:
    run = (*SHORT, "--checkpoint-dir=/tmp/fresh", "--keep-checkpoints=1")
    here.trainer("tf.mnist", *run).learned()
    stopped = here.trainer("tf.mnist", *run, "--no-resume", "--num-steps=2")
    assert stopped.learned() and "step 2 is saved, run again without --no-resume to resume" in stopped.output
    found = here.run("sh", "-c", "cd /tmp/fresh && ls -d * old-*/*").output.split()
    assert found[-1] == "step-000000002" and found[1].endswith("Z/step-000000066") and len(found) == 3
    assert here.trainer("tf.mnist", *run, "--num-steps=3").learned()["resumed_from"] == 2


def test_other_data_are_refused_unless_they_are_accepted_and_changed_flags_named(here: Box, tmp_path: Path) -> None:
    digits.write_idx(tmp_path)
    path = str(tmp_path / mnist.FILES["train"][1])
    digits.write_array(path, (mnist.read_idx(path) + 1) % 10)
    other = here.put(tmp_path, "relabelled")
    here.run("cp", "-r", "/data/digits", "/tmp/digits-moved")
    run = ("--epochs=2", "--checkpoint-dir=/tmp/data")
    here.trainer("tf.mnist", *run, "--datadir=/data/digits", "--num-steps=1").learned()
    refused = here.trainer("tf.mnist", *run, f"--datadir={other}")
    assert refused.code == 2 and "are of other data (other labels): use the same data" in refused.output
    words = (
        "--datadir=/tmp/digits-moved",
        "--batch-size=32",
        "--num-cores=2",
        "--lr=0.1",
        "--shift=1",
        "--num-steps=2",
    )
    moved = here.trainer("tf.mnist", *run, *words)
    assert moved.learned()["resumed_from"] == 1
    assert "Resuming with --lr 0.1, was 0.03; --shift 1, was 2" in moved.lines
    accepted = here.trainer("tf.mnist", *run, f"--datadir={other}", "--accept-other-data", "--num-steps=3")
    assert accepted.learned()["resumed_from"] == 2 and "Resuming with other data (other labels); " in accepted.output


def test_a_step_compiled_with_xla_equals_one_without(here: Box, tmp_path: Path) -> None:
    """One step on 64 digits, and a test on 53."""
    here.put(few_digits(tmp_path, 64, 53), "step")
    words = ("--datadir=/data/step", "--epochs=1", "--precision=fp32")
    plain = here.trainer("tf.mnist", *words, "--checkpoint-dir=/tmp/plain").learned()
    dumped = {"XLA_FLAGS": "--xla_dump_to=/tmp/xla-dump"}
    compiled = here.trainer("tf.mnist", *words, "--jit-compile", "--checkpoint-dir=/tmp/compiled", **dumped).learned()
    assert compiled["global_step"] == 1 and here.run("ls", "/tmp/xla-dump").lines, "XLA compiled it"
    assert step_differs(here, "/tmp/plain", "/tmp/compiled") <= MNIST_GRADIENT * FLOAT32
    assert abs(compiled["test_loss"] / plain["test_loss"] - 1) <= MNIST_GRADIENT * FLOAT32


def test_fake_data_train_through_the_same_meter(here: Box) -> None:
    found = here.trainer("tf.mnist", "--fake-data", "--fake-images=1280", "--epochs=1").learned()
    assert found["images_per_second"] > 0 and found["global_step"] == 20
    assert 2 < found["test_loss"] < 3, "random labels cannot be learned"


def test_few_files_stand_behind_it(here: Box) -> None:
    """A reader of mnist.py needs no more than eight other modules for a run from files; it needed 23."""
    ended = here.python("""
import os, runpy, sys
leave = os._exit
def list_and_leave(code):
    files = [getattr(module, "__file__", "") for name, module in sys.modules.items() if name.startswith("trainers.")]
    print(*sorted(file for file in files if not file.endswith("__init__.py")), sep="\\n")
    sys.stdout.flush()
    leave(code)
os._exit = list_and_leave
sys.argv = ["mnist", "--datadir=/data/digits", "--num-steps=2"]
runpy.run_module("trainers.tf.mnist", run_name="__main__")
""")
    modules = [line for line in ended.lines if line.endswith(".py")]
    assert ended.code == 0 and 0 < len(modules) <= 8, ended.output


# For scripts in a container: two devices, and the trainers' own strategy of them.
TWO = """
import keras, numpy, tensorflow as tf
from trainers.tf import mnist
from trainers.tf._peers import Peers
peers = Peers(mnist.parse_args(["--num-cores=2", "--precision=fp32"]))
local = peers.strategy.experimental_local_results
"""


def test_the_next_batch_is_made_while_one_is_used_and_each_replica_receives_its_part_only(here: Box) -> None:
    """And an error in the data is raised at its place in the order."""
    ended = here.python(f"""{TWO}
import threading
made, second = [], threading.Event()
def batches():
    for number in range(4):
        made.append(number)
        if number:
            second.set()
        yield numpy.arange(8, dtype=numpy.int32) + 100 * number, numpy.full((2, 3), number, numpy.int32)
    raise ValueError("damaged")
specs = tf.TensorSpec([4], "int32"), tf.TensorSpec((1, 3), "int32")
seen = []
try:
    for rows, other in peers.dataset(batches, specs):
        assert second.wait(10), "the second batch is made while the first is used"
        one, two = (part.numpy().tolist() for part in local(rows))
        base = 100 * len(seen)
        assert (one, two) == (list(range(base, base + 4)), list(range(base + 4, base + 8)))
        assert [part.device[-5:] for part in local(rows)] == ["CPU:0", "CPU:1"]
        seen.append(one)
        assert len(made) <= len(seen) + 4
except tf.errors.OpError:
    assert isinstance(peers.error, ValueError) and len(seen) == 4
    print("raised")
""")
    assert ended.code == 0 and ended.lines[-1] == "raised", ended.output


def test_gradients_are_clipped(here: Box) -> None:
    """Keras clips those of each replica: the sum of two is at most as long, and shorter where they differ."""
    # The first rate of the schedule, half a step up: 20 % of 66 steps are 13 of warm-up, to 0.03.
    norms = {}
    for cores, size in ((1, 64), (2, 32)):
        kept = ("--clip-norm=0.125", "--num-steps=1", "--precision=fp32", f"--checkpoint-dir=/tmp/clipped{cores}")
        here.trainer("tf.mnist", *SHORT, *kept, f"--num-cores={cores}", f"--batch-size={size}").learned()
        norm = here.python(f"""{VARIABLES}
saved = variables("/tmp/clipped{cores}/step-000000001")
print(sum((value.astype(float) ** 2).sum() for name, value in saved.items() if name.endswith("_momentum")) ** 0.5)
""")
        norms[cores] = float(norm.lines[-1]) / (0.03 / 26) / 0.125
    assert abs(norms[1] - 1) <= MNIST_GRADIENT * FLOAT32
    assert 0.5 < norms[2] <= 1 + MNIST_GRADIENT * FLOAT32


def test_replicas_drop_different_features_and_resume_with_the_same(here: Box) -> None:
    ended = here.python(f"""{TWO}
from trainers.tf._fit import Checkpoint, vary_dropout
with peers.strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.Dropout(0.5)])
vary_dropout(model)
@tf.function
def draw():
    return peers.strategy.run(lambda: model(tf.ones((1, 64)), training=True))
checkpoint = Checkpoint(peers, model)
first = [part.numpy() for part in local(draw())]
checkpoint.save("/tmp/dropout")
open("/tmp/dropout/run.json", "w").close()
second, third = ([part.numpy() for part in local(draw())] for _ in range(2))
assert (first[0] != first[1]).any() and (second[0] != second[1]).any() and (first[0] != second[0]).any()
checkpoint.load("/tmp/dropout")
again = [part.numpy() for part in local(draw())]
assert (again[0] == second[0]).all() and (again[1] == second[1]).all()
""")
    assert ended.code == 0, ended.output


@pytest.mark.slow("test_a_killed_and_resumed_run_gives_the_same_bits, with SGD")
def test_adamw_learns_and_resumes_with_the_same_bits(here: Box) -> None:
    words = (*SHORT, "--optimizer=adamw", "--weight-decay=0.05", "--clip-norm=1")
    whole = here.trainer("tf.mnist", *words).learned()
    assert whole["accuracy"] >= 90, "chance gives 10 %"
    here.trainer("tf.mnist", *words, "--num-steps=30", "--checkpoint-dir=/tmp/adamw").learned()
    resumed = here.trainer("tf.mnist", *words, "--checkpoint-dir=/tmp/adamw").learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (30, whole["weights_sha256"])
    other = here.trainer("tf.mnist", *SHORT, "--checkpoint-dir=/tmp/adamw")
    assert other.code == 2 and "its checkpoints have optimizer adamw, this run has sgd" in other.output, other.output


def test_the_best_checkpoint_is_kept_tested_and_exported(here: Box) -> None:
    """Random labels: the accuracy goes up and down from epoch to epoch."""
    words = ("--fake-data", "--fake-images=1280", "--epochs=6", "--checkpoint-dir=/tmp/best", "--keep-best")
    ran = here.trainer("tf.mnist", *words, "--output-dir=/tmp/best-out")
    found = ran.learned()
    tests = [json.loads(line) for line in here.run("grep", '"event": "test"', "/tmp/best-out/metrics.jsonl").lines]
    best = max(tests, key=lambda test: float(test["accuracy"]))
    assert f"Best checkpoint: step {best['global_step']}" in ran.output
    evaluated = here.trainer("tf.mnist", *words, "--eval-only", "--export-dir=/tmp/best-model").learned()
    assert (evaluated["accuracy"], evaluated["test_loss"]) == (found["max_accuracy"], best["test_loss"])
    assert evaluated["weights_sha256"] == found["weights_sha256"]
    assert here.run("ls", "/tmp/best-model").output.split() == ["model.keras", "saved_model"]
    nothing = here.trainer("tf.mnist", *SHORT, "--eval-only", "--checkpoint-dir=/tmp/no-checkpoints")
    assert nothing.code == 2 and "--eval-only: /tmp/no-checkpoints has no checkpoint" in nothing.output


@pytest.mark.slow("tests/unit/trainers/test_trainer_loop.py")
def test_the_learning_rate_is_scaled_on_request_and_logged(here: Box) -> None:
    words = (*SHORT, "--num-steps=1", "--num-cores=2", "--batch-size=32")
    plain, scaled = (here.trainer("tf.mnist", *words, *more) for more in ((), ("--scale-lr",)))
    assert "--lr is not scaled" in plain.output and "is not scaled" not in scaled.output
    rates = [float(line.partition("lr ")[2].partition(",")[0]) for ended in (plain, scaled) for line in ended.lines
             if line.startswith("step 1/")]  # fmt: skip
    assert abs(rates[1] / rates[0] - 2) < 1e-3


def test_a_checkpoint_is_saved_when_minutes_have_passed(here: Box) -> None:
    """Every step takes longer than the thousandth of a second that is asked for."""
    words = ("--epochs=1", "--datadir=/data/digits", "--checkpoint-dir=/tmp/minutes", "--keep-checkpoints=99")
    here.trainer("tf.mnist", *words, "--checkpoint-minutes=0.00001").learned()
    assert len(here.run("ls", "/tmp/minutes").lines) > 3, "not only at the end of the epoch"


def test_a_checkpoint_of_another_network_is_refused(here: Box) -> None:
    here.trainer("tf.mnist", *SHORT, "--num-steps=2", "--momentum=0", "--checkpoint-dir=/tmp/other").learned()
    ended = here.trainer("tf.mnist", *SHORT, "--checkpoint-dir=/tmp/other")
    assert ended.code == 1 and "it is of another network, or a part is missing" in ended.output, ended.output
    assert "Traceback" not in ended.output


def test_data_checkpoints_exports_and_logs_can_be_on_cloud_storage(
    here: Box, whole: dict[str, object], tmp_path: Path
) -> None:
    cloud = serve_storage(here, tmp_path)
    here.container.exec_run(["cp", "-r", "/data/digits", "/buckets/bucket/"], user="root")
    words = ("--datadir=gs://bucket/digits", "--epochs=3", "--job-dir=gs://bucket/job", "--output-dir=gs://bucket/out")
    stopped = here.trainer("tf.mnist", *words, "--num-steps=30", **cloud).learned()
    resumed = here.trainer("tf.mnist", *words, **cloud).learned()
    assert (stopped["global_step"], resumed["resumed_from"]) == (30, 30)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    files = set(
        here.run("sh", "-c", "cd /buckets/bucket; find . -type f | sed 's/[0-9.]*[.][0-9a-f]*[.][0-9.]*$//'").lines
    )
    assert {"./job/model/model.keras", "./job/model/saved_model/saved_model.pb", "./job/logs/events.out.tfevents",
            "./job/checkpoints/step-000000066/run.json", "./out/report.json", "./out/metrics.jsonl",
            } <= files  # fmt: skip
    fresh = here.trainer("tf.mnist", *words, "--no-resume", "--num-steps=1", **cloud)
    moved = here.run("sh", "-c", "cd /buckets/bucket/job/checkpoints && ls -d step-* old-*/*").output.split()
    assert fresh.learned()["global_step"] == 1 and moved[-1] == "step-000000001", fresh.output
    assert {name.partition("Z/")[2] for name in moved[:-1]} >= {"step-000000030", "step-000000066"}
    nowhere = here.trainer("tf.mnist", "--datadir=gs://bucket/nowhere", **cloud)
    assert (nowhere.code, len(nowhere.lines)) == (
        1,
        1,
    ) and "gs://bucket/nowhere: no train-images-idx3" in nowhere.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--datadir=/nowhere"], 1, "mnist: /nowhere: no train-images-idx3-ubyte[.gz] in it"),
        (["--datadir=/data/digits", "--strategy=multiworker"], 2, "needs a TF_CONFIG with at least 2 workers"),
        (["--datadir=/data/digits", "--batch_size=5000"], 1, "do not fill one step of 5000"),
        (["--strategy=both"], 2, "mnist: --strategy: invalid choice: 'both'"),
    ],
)
def test_a_user_error_is_one_line(here: Box, words: list[str], code: int, message: str) -> None:
    ended = here.trainer("tf.mnist", *words)
    assert ended.code == code and message in ended.output
    assert len(ended.lines) == 1, ended.output


def test_a_tpu_that_cannot_be_reached_is_one_line(here: Box) -> None:
    ended = here.trainer("tf.mnist", *SHORT, TPU_NAME="grpc://127.0.0.1:8470")
    assert ended.code == 1 and len(ended.lines) == 1, ended.output
    assert "mnist: TPU grpc://127.0.0.1:8470 cannot be used: [Errno 111] Connection refused" in ended.output


def test_a_rehearsal_does_not_look_for_the_tpu(here: Box) -> None:
    ended = here.trainer("tf.mnist", *SHORT, "--num-steps=2", TPU_NAME="grpc://192.0.2.1:8470", LAUNCHER_REHEARSE="1")
    assert ended.learned()["device"] == "CPU:0/0"


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    run = (*SHORT, "--checkpoint-dir=/full", "--checkpoint-steps=1")
    assert here.trainer("tf.mnist", *run, "--num-steps=1").code == 0
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=800 2>/dev/null")
    before = here.run("ls", "-A", "/full").output
    ended = here.trainer("tf.mnist", *run)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert len(said) == 1 and "cannot be saved" in said[0] and "step 1 is intact" in said[0], ended.output
    assert here.run("ls", "-A", "/full").output == before, "no file lost, no partial file"


def test_a_full_disk_leaves_no_partial_export(here: Box) -> None:
    here.run("sh", "-c", "rm -rf /full/*; dd if=/dev/zero of=/full/ballast bs=1k count=800 2>/dev/null")
    ended = here.trainer("tf.mnist", "--datadir=/data/digits", "--epochs=1", "--export-dir=/full/model")
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert ended.code == 1 and len(said) == 1 and "the model cannot be exported" in said[0], ended.output
    assert "No space left on device" in said[0] and "Traceback" not in ended.output
    assert here.run("ls", "-A", "/full/model").output == ""
