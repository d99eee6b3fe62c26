"""The PyTorch trainers in the xla image: on the CPU, on XLA's CPU backend, on several devices and processes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from scripts.datasets import digits
from scripts.datasets import flowers as flowers_data
from tests.image.trainer_box import PYTHON, Box, box

SHORT = ("--datadir=/data/digits", "--epochs=3")
CPU = ("--device=cpu",)
RUN = f"{PYTHON} -m trainers.torch.mnist --datadir=/data/digits --epochs=3 --device=cpu"


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("xla"), tmpfs={"/full": "size=1m,mode=1777"}, PJRT_DEVICE="CPU") as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits"), gz=True), "digits")
        yield started


@pytest.fixture(scope="module")
def whole(here: Box) -> dict[str, object]:
    """The summary of an uninterrupted run on the CPU."""
    return here.trainer("torch.mnist", *SHORT, *CPU).learned()


def test_mnist_learns_real_digits_on_xla_and_its_exports_answer_alike(here: Box) -> None:
    ended = here.trainer("torch.mnist", "--datadir=/data/digits", "--epochs=10", "--export-dir=/tmp/model",
                         "--output-dir=/tmp/out", "--logdir=/tmp/board")  # fmt: skip
    found = ended.learned()
    assert found["accuracy"] >= 98.5 and found["train_seconds"] < 60
    assert found["loss_last"] < found["loss_first"] / 5
    assert found["device"].startswith("xla:0")
    assert not [line for line in ended.lines if line.startswith(("WARNING", "ERROR"))], ended.output
    assert found["compile_count"] == 2, "one graph to train and one to test"
    loaded = here.python("""
import numpy, torch, onnx.reference
from trainers.common import idx
images, labels = idx.load_mnist("/data/digits", "test")
program = torch.export.load("/tmp/model/model.pt2").module()
answers = program(torch.from_numpy(images.copy())).argmax(1).numpy()
print(100 * (answers == labels).mean())
session = onnx.reference.ReferenceEvaluator("/tmp/model/model.onnx")
probabilities = session.run(None, {"images": images[:20]})[0]
assert (probabilities.argmax(1) == answers[:20]).all() and abs(probabilities.sum(1) - 1).max() < 1e-5
""")
    assert loaded.code == 0, loaded.output
    assert float(loaded.lines[-1]) == pytest.approx(found["accuracy"])
    files = here.run("ls", "/tmp/out", "/tmp/board").output
    assert "report.png" in files and "report.json" in files and "events.out.tfevents" in files


def test_the_same_seed_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    again = here.trainer("torch.mnist", *SHORT, *CPU).learned()
    assert again["weights_sha256"] == whole["weights_sha256"]
    other = here.trainer("torch.mnist", *SHORT, *CPU, "--seed=1").learned()
    assert other["weights_sha256"] != whole["weights_sha256"]


def test_killed_anywhere_and_resumed_is_the_uninterrupted_run(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/killed --checkpoint-steps=5"
    here.run("sh", "-c", f"{RUN} {folder} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid")
    step = random.randrange(5, 60)  # of 66; a file a fifth step, so that some kills come while one is written
    reached = f'[ "$(ls /tmp/killed 2>/dev/null | tail -n 1)" ">" step-{step:09d} ]'
    here.run("bash", "-c", f"until {reached}; do sleep 0.01; done; sleep 0.0$RANDOM; kill -9 $(cat /tmp/killed.pid)")
    resumed = here.trainer("torch.mnist", *SHORT, *CPU, *folder.split()).learned()
    assert resumed["resumed_from"] >= step, f"killed after step {step}"
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]
    kept = here.run("ls", "-A", "/tmp/killed").output.split()
    assert kept == ["step-000000060.ckpt", "step-000000065.ckpt", "step-000000066.ckpt"]


def test_sigterm_saves_the_step_and_ends_with_143(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/termed"
    (ended,) = here.together(f"sh -c '{RUN} {folder} & echo $! >/tmp/term.pid; "
                             "until grep -q Step=0 /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143, ended.output
    assert ended.summary["status"] == "preempted" and 0 < ended.summary["global_step"] < 66
    resumed = here.trainer("torch.mnist", *SHORT, *CPU, folder).learned()
    assert resumed["resumed_from"] == ended.summary["global_step"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_four_xla_devices_resumed_halfway_equal_one(here: Box) -> None:
    one = here.trainer("torch.mnist", *SHORT, "--batch-size=64").learned()
    part = ("--batch-size=16", "--test-batch-size=128", "--checkpoint-dir=/tmp/spmd")
    stopped = here.trainer("torch.mnist", *SHORT, *part, "--num-steps=30", CPU_NUM_DEVICES="4").learned()
    four = here.trainer("torch.mnist", *SHORT, *part, CPU_NUM_DEVICES="4").learned()
    assert (one["replicas"], four["replicas"]) == (1, 4)
    assert one["global_batch"] == four["global_batch"] == 64
    assert one["compile_count"] == stopped["compile_count"] == 2
    assert (four["resumed_from"], four["compile_count"]) == (30, 2), "what was loaded makes no graph of its own"
    assert four["loss_last"] == pytest.approx(one["loss_last"], rel=0.01)
    assert four["test_loss"] == pytest.approx(one["test_loss"], rel=0.01)


def test_two_processes_equal_one(here: Box) -> None:
    """At the tolerance of float32 sums in another order, grown over 66 steps; every test image counts once."""
    fp32 = ("--precision=fp32", *CPU)
    one = here.trainer("torch.mnist", *SHORT, *fp32, "--test-batch-size=100").learned()
    half = (*SHORT, *fp32, "--batch-size=32", "--test-batch-size=77")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trainers.torch.mnist")
    started = here.run(PYTHON, *torchrun, *half).learned()
    alone = here.trainer("torch.mnist", *half, "--num-cores=2").learned()
    assert alone["weights_sha256"] == started["weights_sha256"], "with torchrun or without"
    for two in (started, alone):
        assert (two["processes"], two["global_batch"]) == (2, one["global_batch"])
        assert two["test_loss"] == pytest.approx(one["test_loss"], rel=0.02)
        assert abs(two["accuracy"] - one["accuracy"]) <= 100 / 360 + 1e-9


def test_a_signal_to_one_process_stops_both_at_the_same_step(here: Box) -> None:
    members = [
        f"env RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 OMP_NUM_THREADS=1 "
        f"sh -c '{RUN.replace('epochs=3', 'epochs=500')} --checkpoint-dir=/tmp/agreed & echo $! >/tmp/pid{rank}; "
        f"wait $(cat /tmp/pid{rank})'"
        for rank in (0, 1)
    ]
    signaller = "sh -c 'until grep -q Epoch=2 /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/pid1)'"
    chief, other, _ = here.together(*members, signaller, seconds=90)
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = chief.summary["global_step"]
    assert f"step-{saved:09d}.ckpt" in here.run("ls", "/tmp/agreed").output


def test_nan_ends_with_its_own_code_and_saves_nothing(here: Box) -> None:
    ended = here.trainer("torch.mnist", *SHORT, *CPU, "--lr=1e9", "--checkpoint-dir=/tmp/nan")
    assert (ended.code, ended.summary["status"]) == (22, "diverged")
    assert "lower --lr" in ended.output
    assert here.run("ls", "/tmp/nan").output == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--datadir=/nowhere"], 1, "mnist: /nowhere: no such folder"),
        (["--datadir=/data/digits", "--device=cuda"], 2, "mnist: --device cuda: not available here; there is cpu, xla"),
        (["--datadir=/data/digits", "--batch_size=5000", "--device=cpu"], 1, "do not fill one step of 5000"),
        (["--batch_size=none"], 2, "mnist: --batch-size: 'none' is not a whole number of at least 1"),
    ],
)
def test_wrong_input_is_one_clear_line(here: Box, words: list[str], code: int, said: str) -> None:
    ended = here.trainer("torch.mnist", *words)
    assert ended.code == code and said in ended.output
    assert len(ended.lines) == 1, ended.output


def test_a_full_disk_is_one_clear_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    """The folder holds 1 MB: one checkpoint of this network, but not two."""
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=300 2>/dev/null")
    run = (*SHORT, *CPU, "--checkpoint-dir=/full", "--checkpoint-steps=1")
    assert here.trainer("torch.mnist", *run, "--num-steps=1").code in (0, 1)
    before = here.run("ls", "-A", "/full").output
    ended = here.trainer("torch.mnist", *run)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert len(said) == 1 and "cannot be saved" in said[0] and "Traceback" not in ended.output
    assert here.run("ls", "-A", "/full").output == before, "nothing lost, nothing half written left"


def test_hypertune_gets_the_accuracy(here: Box) -> None:
    found = here.trainer("torch.mnist", *SHORT, *CPU, CLOUD_ML_TRIAL_ID="4").learned()
    last = here.python("""
import json
print(json.loads(open("/tmp/hypertune/output.metrics").read().splitlines()[-1])["training/hptuning/metric"])
""")
    assert float(last.output) == pytest.approx(found["accuracy"] / 100)


FLOWERS = ("--image-size=48", "--batch-size=25", "--device=cpu", "--num-workers=2")


@pytest.fixture(scope="module")
def flowers(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    return here.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tar", train=300, test=60), "flowers")


def test_flowers_learns_and_its_export_answers_alike(here: Box, flowers: str) -> None:
    run = (f"--datadir={flowers}", *FLOWERS, "--epochs=8")
    whole = here.trainer("torch.flowers", *run, "--export-dir=/tmp/flowers-model").learned()
    assert whole["accuracy"] >= 90
    loaded = here.python(f"""
import torch
from trainers.common import images
pixels, labels = images.Loader(images.find("{flowers}", "test"), 2).all(48)
program = torch.export.load("/tmp/flowers-model/model.pt2").module()
print(100 * (program(torch.from_numpy(pixels)).argmax(1).numpy() == labels).mean())
""")
    # The trainer scales its own larger copy of an image down once more: a few pixels, at most two pictures differ.
    assert abs(float(loaded.lines[-1]) - whole["accuracy"]) <= 100 * 2 / 60 + 1e-6, loaded.output


def test_imagenet_learns_counts_top5_exactly_and_resumes(here: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Twelve labels for five kinds of flowers: nobody can be sure of the first guess, so top-1 and top-5 differ."""
    folder = tmp_path_factory.mktemp("imagenet")
    for split, count, seed in (("train", 150, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        flowers_data.write_tfrecord(folder / f"{split}-00000-of-00001", made)
    data = here.put(folder, "imagenet")
    run = (f"--datadir={data}", "--num-classes=12", "--model=resnet18", "--image-size=32", "--progressive=24",
           "--epochs=6", "--batch-size=10", "--lr=0.02", "--warmup-epochs=1", "--ema=0.5", "--cutmix=1", "--mixup=0.2",
           "--accumulate=2", "--device=cpu", "--precision=fp32", "--num-workers=2", "--log-steps=1")  # fmt: skip
    whole = here.trainer(
        "torch.imagenet", *run, "--export-dir=/tmp/imagenet-model", "--output-dir=/tmp/imagenet"
    ).learned()
    here.trainer("torch.imagenet", *run, "--checkpoint-dir=/tmp/imagenet-kept", "--num-steps=5").learned()
    resumed = here.trainer("torch.imagenet", *run, "--checkpoint-dir=/tmp/imagenet-kept").learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (5, whole["weights_sha256"])
    counted = here.python(f"""
import json, numpy, torch
from trainers.common import images
from trainers.torch import _decode
batches = images.Loader(images.find("{data}", "test"), 2, decode=_decode.decode).batches(
    [numpy.arange(53)], 32, lambda number, width, height: images.centre_box(width, height))
pixels, labels = next(batches)
answers = torch.export.load("/tmp/imagenet-model/model.pt2").module()(torch.from_numpy(pixels)).detach().numpy()
best = numpy.argsort(-answers, axis=1)[:, :5]
tests = [json.loads(line) for line in open("/tmp/imagenet/metrics.jsonl") if '"event": "test"' in line]
hits = best == labels[:, None]
losses = [test["loss"] for test in tests]
print(json.dumps([100 * hits[:, 0].mean(), 100 * hits.any(1).mean(), tests[-1]["top5"], losses]))
""")
    top1, top5, reported, losses = json.loads(counted.lines[-1])
    assert losses[-1] < losses[0]
    assert top1 == pytest.approx(whole["accuracy"], abs=1e-4)
    assert top5 == pytest.approx(reported, abs=1e-4) and top5 > top1


@pytest.mark.parametrize("trainer", ["torch.flowers", "torch.imagenet"])
def test_a_truncated_picture_is_one_clear_line(
    here: Box, trainer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = flowers_data.write(tmp_path_factory.mktemp("broken"), train=30, test=5)
    broken = folder / "train" / "rose" / "00002.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    data = here.put(folder, "broken")
    few = ("--batch-size=10", "--test-batch-size=10", "--image-size=32", "--epochs=1", "--device=cpu")
    ended = here.trainer(trainer, f"--datadir={data}", *few)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith(f"{trainer.split('.')[1]}: ")]
    assert len(said) == 1 and "rose/00002.jpg: is no readable image" in said[0], ended.output
    assert "Traceback" not in ended.output
