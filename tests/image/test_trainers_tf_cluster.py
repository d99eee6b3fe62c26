"""The TensorFlow trainers on several workers: the same results as one process, and a common end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from trainers.common import mnist, order

from tests.image.trainer_box import (
    COUNT,
    FLOAT32,
    INSTRUCTION_SETS,
    MNIST_FORWARD,
    MNIST_GRADIENT,
    PYTHON,
    Box,
    Ended,
    box,
    few_digits,
    step_differs,
)
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = pytest.mark.concurrent

FP32 = "--datadir=/data/digits --precision=fp32 --batch-size=32 --test-batch-size=77"
QUOTE = chr(39) + chr(34) + chr(39) + chr(34) + chr(39)  # a single quote within single quotes


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
    """Both workers, after they exited."""
    chief, other = here.run_parallel(*(member(rank, port, words, trainer, **more) for rank in (0, 1)), seconds=240)
    return chief, other


def signalled(here: Box, port: int, words: str, victim: int, signal: str, at: str) -> tuple[Ended, Ended]:
    """Both workers; ``victim`` receives ``signal`` once the chief has printed ``at``."""
    commands = [
        f"sh -c '{member(rank, port, words).replace(chr(39), QUOTE)}"
        f" & echo $! >/tmp/pid{rank}; wait $(cat /tmp/pid{rank})'"
        for rank in (0, 1)
    ]
    signaller = f"sh -c 'until grep -q \"{at}\" /tmp/out0; do sleep 0.05; done; kill -{signal} $(cat /tmp/pid{victim})'"
    chief, other, _ = here.run_parallel(*commands, signaller, seconds=240)
    return chief, other


@pytest.fixture(scope="module")
def pair(here: Box) -> dict[str, object]:
    """The summary of two workers without any interruption."""
    chief, other = both(here, 25601, f"{FP32} --epochs=8 --export-dir=/tmp/export{{rank}}", roles=("chief", "worker"))
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["processes"] == 2 and not other.summary, "only the chief logs"
    return chief.summary


def epochs_in(here: Box, folder: str) -> list[dict[str, float]]:
    """The test events in ``folder``, an epoch each."""
    lines = here.run("grep", '"event": "test"', f"{folder}/metrics.jsonl").lines
    return [json.loads(line) for line in lines]


def test_two_workers_give_the_same_bits_as_two_replicas_of_one_process(here: Box, pair: dict[str, object]) -> None:
    """Both compute the same sums, and the one over two replicas is the same in any order."""
    two = here.trainer("tf.mnist", *FP32.split(), "--epochs=8", "--num-cores=2").learned()
    assert (pair["processes"], two["processes"]) == (2, 1) and pair["global_batch"] == two["global_batch"] == 64
    assert pair["weights_sha256"] == two["weights_sha256"]
    assert (pair["accuracy"], pair["test_loss"]) == (two["accuracy"], two["test_loss"])


@pytest.mark.slow("the test above, and those of two replicas of one process in test_trainers_tf.py")
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_the_first_step_and_test_of_two_workers_equal_those_of_one_process(
    here: Box, tmp_path: Path, instructions: str
) -> None:
    """One step on 64 digits, and a test on 53 that fill no batch."""
    here.put(few_digits(tmp_path, 64, 53), "step")
    variables = INSTRUCTION_SETS[instructions]
    words = (
        f"--datadir=/data/step --epochs=1 --precision=fp32 --test-batch-size=20 --checkpoint-dir=/tmp/{instructions}"
    )
    one = here.trainer(
        "tf.mnist", *words.split(), "--batch-size=64", f"--checkpoint-dir=/tmp/one-{instructions}", **variables
    ).learned()
    prefix = "env " + " ".join(f"{name}={value}" for name, value in variables.items())
    port = 25731 + 10 * list(INSTRUCTION_SETS).index(instructions)
    commands = (f"{prefix} {member(rank, port, words + ' --batch-size=32')}" for rank in (0, 1))
    chief, other = here.run_parallel(*commands)
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert (chief.summary["global_batch"], chief.summary["global_step"]) == (one["global_batch"], one["global_step"])
    # A wrong, missing or repeated image changes the gradient by about 1/64, and the mean loss by about 1/53.
    assert (
        step_differs(here, f"/tmp/one-{instructions}", f"/tmp/{instructions}") <= MNIST_GRADIENT * FLOAT32 < 1 / 64 / 4
    )
    assert abs(chief.summary["test_loss"] / one["test_loss"] - 1) <= MNIST_GRADIENT * FLOAT32


def test_only_the_chiefs_model_is_kept(here: Box, pair: dict[str, object]) -> None:
    """The other worker waits until the chief has exported."""
    assert here.run("ls", "/tmp/export0").output.split() == ["model.keras", "saved_model"]
    assert here.run("ls", "/tmp/export1").code != 0
    assert "tmp" not in [name[:3] for name in here.run("ls", "/tmp").output.split()]
    found = here.python(f"""{COUNT}
import json, keras
from trainers.common import mnist
images, labels = mnist.read_split("/data/digits", "test")
probabilities = keras.models.load_model("/tmp/export0/model.keras").predict(images, verbose=0)
print(json.dumps(count(probabilities, labels, {MNIST_FORWARD * FLOAT32})))
""")
    right, close = json.loads(found.lines[-1])
    assert abs(right - round(float(str(pair["accuracy"])) * 3.6)) <= close, "360 digits; only near ties may differ"


@pytest.mark.slow(
    "test_sigterm_during_slow_steps_saves_within_five_seconds and test_a_killed_worker_ends_the_other_with_one_line_and"
    "_both_resume"
)
def test_sigterm_to_one_worker_stops_both_at_the_same_step(here: Box, pair: dict[str, object]) -> None:
    words = f"{FP32} --epochs=8 --checkpoint-dir=/tmp/termed --log-steps=1"
    chief, other = signalled(here, 25611, words, victim=1, signal="TERM", at="step 24/176")
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = chief.summary["global_step"]
    assert 24 < saved < 176 and f"step-{saved:09d}" in here.run("ls", "/tmp/termed").output
    chief, other = both(here, 25621, words)
    assert (chief.code, other.code, chief.summary["resumed_from"]) == (0, 0, saved), chief.output + other.output
    assert chief.summary["weights_sha256"] == pair["weights_sha256"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_a_worker_that_waits_for_another_ends_it_with_143(here: Box, rank: int) -> None:
    """Within TensorFlow's own waiting, it would go on until it is killed."""
    alone = member(rank, 25751 + 2 * rank, FP32).replace(chr(39), QUOTE)
    (ended,) = here.run_parallel(
        f"sh -c '{alone} & echo $! >/tmp/pid; until grep -q waits /tmp/out0; do sleep 0.1; done; sleep 1;"
        " touch /tmp/asked; kill -TERM $(cat /tmp/pid); wait $(cat /tmp/pid); code=$?; touch /tmp/over; exit $code'",
        seconds=60,
    )
    assert ended.code == 143, ended.output
    asked, over = (float(here.run("stat", "-c", "%.Y", f"/tmp/{name}").output) for name in ("asked", "over"))
    assert over - asked < 5, "GKE kills after 15 seconds"


@pytest.mark.slow("the test above; every test with two workers, of which one is ready first")
def test_a_worker_waits_for_one_that_starts_later_and_says_for_which(here: Box) -> None:
    first, second = (member(rank, 25761, "--fake-data --fake-images=640 --epochs=1") for rank in (0, 1))
    chief, other = here.run_parallel(first, f"sh -c 'sleep 35; exec {second.replace(chr(39), QUOTE)}'")
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert "Worker 0 waits for 1 workers: 127.0.0.1:25762" in chief.output


# MNIST with steps that take at least a second, on any machine.
SLOW = """
import sys, time, keras, tensorflow as tf
from trainers.tf import mnist
from trainers.tf._peers import Peers
class Wait(keras.layers.Layer):
    def call(self, inputs, training=False):
        if training:
            with tf.control_dependencies([tf.py_function(lambda: time.sleep(1), [], [])]):
                return tf.identity(inputs)
        return inputs
network = mnist.network
def slow(args):
    model = network(args)
    return keras.Sequential([*model.layers, Wait(dtype="float32")])
Peers.run(lambda args: mnist.main(args, slow), mnist.parse_args(), "mnist")
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow("with two workers")), 2])
def test_sigterm_during_slow_steps_saves_within_five_seconds(here: Box, tmp_path: Path, workers: int) -> None:
    """Workers must not agree only every 10 steps. GKE kills after 15 seconds."""
    (tmp_path / "slow.py").write_text(SLOW)
    script = f"{PYTHON} {here.put(tmp_path, 'slow')}/slow.py {FP32} --epochs=8 --checkpoint-dir=/tmp/slow{workers}"
    commands = [script]
    if workers == 2:
        module = f"{PYTHON} -m trainers.tf.mnist "
        commands = [member(rank, 25741, "").replace(module, script) for rank in (0, 1)]
    started = [
        f"sh -c '{line.replace(chr(39), QUOTE)} & echo $! >/tmp/pid{rank}; wait $(cat /tmp/pid{rank})'"
        for rank, line in enumerate(commands)
    ]
    # Some seconds after the first step, when a call is as long as it gets.
    signaller = (f"sh -c 'until grep -q ^step.1/ /tmp/out0; do sleep 0.1; done; sleep 6.5;"
                 f" kill -TERM $(cat /tmp/pid{workers - 1}); touch /tmp/signalled'")  # fmt: skip
    ends = here.run_parallel(*started, signaller)
    assert [ended.code for ended in ends] == [143] * workers + [0], ends[0].output
    times = [float(here.run("sh", "-c", f"stat -c %.Y {name}").output)
             for name in ("/tmp/signalled", f"/tmp/slow{workers}/*/run.json")]  # fmt: skip
    assert 0 <= times[1] - times[0] <= 5, ends[0].output


def test_an_invalid_tf_config_is_one_line(here: Box) -> None:
    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 5}}'
    ended = here.trainer("tf.mnist", "--fake-data", TF_CONFIG=config)
    assert ended.code == 2 and len(ended.lines) == 1, ended.output
    assert "TF_CONFIG: task.index is 5, but cluster.worker has 2 members" in ended.output


def test_what_is_wrong_in_a_tf_config_is_named(here: Box) -> None:
    two = {"worker": ["a:1", "b:1"]}
    messages: list[tuple[object, object, str]] = [
        (two, {"type": "worker", "index": -1}, "task.index is -1, but cluster.worker has 2 members"),
        ({"worker": ["a", "b"]}, {"type": "worker"}, "cluster.worker[0] is 'a', which has no port"),
        ({"worker": "a:1,b:1"}, {"type": "worker"}, "cluster.worker must be a list of addresses"),
        ({"worker": ["a:1", "a:1"]}, {"type": "worker"}, "cluster.worker[1] and cluster.worker[0] have the same"),
        (two, {}, "task.type is missing"),
        (two, {"type": "wrker"}, "task.type is 'wrker', which is not one of chief"),
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, {"type": "worker"}, "has 2 chiefs (a:1, b:1)"),
        ([1], {}, "TF_CONFIG is invalid"),
    ]
    configs = [json.dumps({"cluster": cluster, "task": task}) for cluster, task, _ in messages]
    ended = here.python(f"""
import os
from trainers.common.files import UserError
from trainers.tf import _peers
for text in {configs}:
    os.environ["TF_CONFIG"] = text
    try:
        print("accepted:", _peers.place_in_cluster())
    except UserError as error:
        print(error)
""")
    named = ended.lines[-len(messages) :]
    assert [line for line, (_, _, message) in zip(named, messages, strict=True) if message not in line] == []


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow("with worker 0"))])
def test_a_killed_worker_ends_the_other_with_one_line_and_both_resume(
    here: Box, pair: dict[str, object], victim: int
) -> None:
    step = random.randrange(23, 44)
    folder = f"/tmp/killed{victim}"
    words = f"{FP32} --epochs=8 --checkpoint-dir={folder} --checkpoint-steps=5 --log-steps=1"
    ends = signalled(here, 25631 + 10 * victim, words, victim, "KILL", at=f"step {step}/176")
    assert ends[victim].code == 137
    said = [line for line in ends[1 - victim].lines if line.startswith("mnist: ")]
    assert ends[1 - victim].code == 1 and len(said) == 1 and "lost another worker" in said[0], ends[1 - victim].output
    assert "Traceback" not in ends[1 - victim].output
    chief, other = both(here, 25651 + 10 * victim, words)
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["resumed_from"] >= 20, f"killed at step {step}"
    assert chief.summary["weights_sha256"] == pair["weights_sha256"], f"killed at step {step}"


def test_a_full_disk_ends_both_workers(here: Box) -> None:
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=1200 2>/dev/null")
    chief, other = both(here, 25671, f"{FP32} --epochs=1 --checkpoint-dir=/full --checkpoint-steps=2")
    assert (chief.code, other.code) == (1, 1), chief.output + other.output
    assert "cannot be saved (No space left on device)" in chief.output
    assert "cannot be saved (" in other.output and "Traceback" not in chief.output + other.output
    assert here.run("ls", "-A", "/full").output.split() == ["ballast"], "no partial file"


def test_workers_with_different_checkpoints_report_it(here: Box) -> None:
    """Worker 1 has another, empty folder: both workers exit with the reason."""
    words = "--datadir=/data/digits --epochs=1 --batch-size=32 --num-steps=4"
    here.trainer("tf.mnist", *words.split(), "--num-cores=2", "--checkpoint-dir=/tmp/only0").learned()
    for ended in both(here, 25681, words + " --checkpoint-dir=/tmp/only{rank}"):
        assert ended.code == 1 and "must be a folder that all workers share" in ended.output, ended.output


def test_workers_with_different_data_report_it(here: Box, tmp_path: Path) -> None:
    made = digits.write_idx(tmp_path / "digits1")
    for name in mnist.FILES["train"]:
        digits.write_array(made / name, mnist.read_idx(str(made / name))[:1400])
    here.put(made, "digits1")
    here.run("ln", "-s", "/data/digits", "/tmp/data0")
    here.run("ln", "-s", "/data/digits1", "/tmp/data1")
    for ended in both(here, 25691, "--epochs=1 --datadir=/tmp/data{rank}"):
        said = "the processes see different data: rank 0 has {"
        assert ended.code == 1 and said in ended.output and "rank 1 {" in ended.output, ended.output
        assert "'train_images': 1437" in ended.output and "'train_images': 1400" in ended.output, ended.output


# One shard for two workers; 75 and 53 images are no multiples of the batch size.
SMALL = "--num-classes=12 --model=mobilenetv2 --image-size=32 --batch-size=8 --test-batch-size=10 --epochs=1"


def imagenet(folder: Path, broken: Sequence[int] = ()) -> Path:
    for split, count, seed in (("train", 75, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        for number in broken if split == "train" else ():
            made[number] = (0, made[number][1][:500])
        flowers_data.write_tar(folder / f"{split}-00000.tar", made)
    return folder


@pytest.mark.slow("test_two_workers_give_the_same_bits_as_two_replicas_of_one_process")
def test_with_fewer_shards_than_workers_and_uneven_data_the_bits_are_those_of_one_process(
    here: Box, tmp_path: Path
) -> None:
    words = f"--datadir={here.put(imagenet(tmp_path), 'imagenet')} {SMALL}"
    two = here.trainer("tf.imagenet", *words.split(), "--num-cores=2", "--output-dir=/tmp/split").learned()
    # AI Platform calls the chief "master", which MultiWorkerMirroredStrategy refuses.
    chief, other = both(here, 25701, words + " --output-dir=/tmp/workers", "imagenet", roles=("master", "worker"))
    assert (chief.code, other.code) == (0, 0), chief.output + other.output
    assert chief.summary["global_step"] == two["global_step"] == 75 // 16
    assert chief.summary["weights_sha256"] == two["weights_sha256"]
    assert chief.summary["test_loss"] == two["test_loss"]
    tests = epochs_in(here, "/tmp/split") + epochs_in(here, "/tmp/workers")
    right = [test["accuracy"] * 0.53 for test in tests]
    assert all(0 <= number <= 53 and abs(number - round(number)) < 1e-4 for number in right), "of 53 test images"


@pytest.mark.slow("test_a_killed_worker_ends_the_other_with_one_line_and_both_resume; damaged images of one process")
def test_a_damaged_image_in_one_workers_share_ends_both(here: Box, tmp_path: Path) -> None:
    second_half = order.permutation(75, 0, 1)[8:16]  # of the first batch: worker 1 decodes it
    broken = sorted(second_half.tolist())[:2]  # one of so few is skipped
    data = here.put(imagenet(tmp_path, broken), "broken")
    chief, other = both(here, 25711, f"--datadir={data} {SMALL}", "imagenet")
    assert (chief.code, other.code) == (1, 1), chief.output + other.output
    assert any(f"train-00000.tar: {number:05d}.jpg: is no readable image" in other.output for number in broken)
    assert "lost another worker" in chief.output and "Traceback" not in chief.output + other.output


@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_a_replica_that_does_not_train_ends_with_one_line(here: Box, role: str) -> None:
    config = json.dumps({"cluster": {"chief": ["127.0.0.1:25721"]}, "task": {"type": role, "index": 0}})
    ended = here.trainer("tf.mnist", *FP32.split(), "--checkpoint-dir=/tmp/idle", TF_CONFIG=config)
    assert ended.code == 0, ended.output
    assert "which this trainer does not need" in ended.output.splitlines()[-1]
    assert "Traceback" not in ended.output
    assert here.run("ls", "/tmp/idle").code != 0, "nothing was written"
