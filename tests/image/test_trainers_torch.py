"""The PyTorch trainers in the xla image: on the CPU, on XLA's CPU backend, on several devices and processes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from tests.image.trainer_box import (
    COUNT,
    FLOAT32,
    FLOAT64,
    INSTRUCTION_SETS,
    MNIST_FORWARD,
    MNIST_GRADIENT,
    PYTHON,
    TENSORS,
    Box,
    Ended,
    box,
    few_digits,
)
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

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


def test_mnist_learns_digits_on_xla_and_its_exports_give_the_same_answers(here: Box) -> None:
    ended = here.trainer("torch_xla.mnist", "--datadir=/data/digits", "--epochs=10", "--export-dir=/tmp/model",
                         "--output-dir=/tmp/out", "--logdir=/tmp/board")  # fmt: skip
    found = ended.learned()
    # 11 runs (seeds 0 to 2, fp32 and bf16, both frameworks; one CPU model) have 99.02 % on average and a standard
    # deviation of 0.19. The floor is five of them below.
    assert found["accuracy"] >= 98.05
    assert found["loss_last"] < found["loss_first"] / 5
    assert found["device"].startswith("xla:0")
    assert not [line for line in ended.lines if line.startswith(("WARNING", "ERROR"))], ended.output
    assert found["compile_count"] == 2, "one graph to train and one to test"
    loaded = here.python(f"""{COUNT}
import json, torch, onnx.reference
from trainers.common import mnist
images, labels = mnist.read_split("/data/digits", "test")
program = torch.export.load("/tmp/model/model.pt2").module()
probabilities = program(torch.from_numpy(images.copy())).detach().numpy()
session = onnx.reference.ReferenceEvaluator("/tmp/model/model.onnx")
with_onnx = session.run(None, {{"images": images[:20]}})[0]
# The softmax turns the error of the logits, relative to the largest, into one of the probabilities.
bound = {MNIST_FORWARD * FLOAT32} * abs(numpy.log(probabilities)).max()
print(json.dumps([*count(probabilities, labels, {MNIST_FORWARD * FLOAT32}),
                  bool(abs(with_onnx - probabilities[:20]).max() <= bound)]))
""")
    assert loaded.code == 0, loaded.output
    right, close, alike = json.loads(loaded.lines[-1])
    assert abs(right - round(found["accuracy"] * 3.6)) <= close and alike, "360 digits; only near ties may differ"
    files = here.run("ls", "/tmp/out", "/tmp/board").output
    assert "report.json" in files and "events.out.tfevents" in files


def test_the_same_seed_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    again = here.trainer("torch.mnist", *SHORT, *CPU).learned()
    assert again["weights_sha256"] == whole["weights_sha256"]
    other = here.trainer("torch.mnist", *SHORT, *CPU, "--seed=1").learned()
    assert other["weights_sha256"] != whole["weights_sha256"]


def test_a_killed_and_resumed_run_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/killed --checkpoint-steps=5"
    here.run("sh", "-c", f"{RUN} {folder} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid")
    step = random.randrange(5, 60)  # of 66; a file a fifth step, so that some kills come while one is written
    reached = f'[ "$(ls -d /tmp/killed/*/run.json 2>/dev/null | tail -n 1)" ">" /tmp/killed/step-{step:09d} ]'
    here.run("bash", "-c", f"until {reached}; do sleep 0.01; done; sleep 0.0$RANDOM; kill -9 $(cat /tmp/killed.pid)")
    resumed = here.trainer("torch.mnist", *SHORT, *CPU, *folder.split()).learned()
    assert resumed["resumed_from"] >= step, f"killed after step {step}"
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]
    kept = here.run("ls", "-A", "/tmp/killed").output.split()
    assert kept == ["step-000000060", "step-000000065", "step-000000066"]


def test_sigterm_saves_the_step_and_ends_with_143(here: Box) -> None:
    endless = RUN.replace("epochs=3", "epochs=1000")
    (ended,) = here.run_parallel(f"sh -c '{endless} --checkpoint-dir=/tmp/termed & echo $! >/tmp/term.pid; "
                             "until grep -q ^step.1/ /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143, ended.output
    saved = ended.summary["global_step"]
    assert ended.summary["status"] == "preempted" and saved > 0
    words = ("--datadir=/data/digits", "--epochs=1000", *CPU, f"--num-steps={saved + 5}")
    resumed = here.trainer("torch.mnist", *words, "--checkpoint-dir=/tmp/termed").learned()
    straight = here.trainer("torch.mnist", *words).learned()
    assert resumed["resumed_from"] == saved
    assert resumed["weights_sha256"] == straight["weights_sha256"]


def test_four_xla_devices_resumed_halfway_give_the_same_bits(here: Box) -> None:
    part = (*SHORT, "--batch-size=16", "--test-batch-size=128")
    four = here.trainer("torch_xla.mnist", *part, CPU_NUM_DEVICES="4").learned()
    kept = (*part, "--checkpoint-dir=/tmp/spmd")
    stopped = here.trainer("torch_xla.mnist", *kept, "--num-steps=30", CPU_NUM_DEVICES="4").learned()
    resumed = here.trainer("torch_xla.mnist", *kept, CPU_NUM_DEVICES="4").learned()
    assert (four["replicas"], four["global_batch"], resumed["resumed_from"]) == (4, 64, 30)
    assert stopped["compile_count"] == four["compile_count"] == 2
    assert resumed["compile_count"] == 2, "loading a checkpoint adds no graph"
    assert resumed["weights_sha256"] == four["weights_sha256"] and resumed["test_loss"] == four["test_loss"]


# The trainer in float64, with the weights that it starts from in float32. Every process writes the images and shifts of
# its batches, and the weights that it ends with, into a file.
FLOAT64_TRAINER = """
import os, sys
import numpy, torch
from trainers.torch import _peers, mnist

torch.Tensor.float = torch.Tensor.double
rows, models, shifted = [], [], mnist.shifted

def recording(images, batch, most):
    rows.append(batch.numpy())
    return shifted(images, batch, most)

def network(args):
    models.append(made := mnist.cnn(args).double())
    return made

def train(args):
    code = mnist.main(args, network)
    rank = os.environ.get("RANK") or 0
    weights = {name: value.numpy() for name, value in models[0].state_dict().items()}
    numpy.savez(f"{path}-{rank}.npz", train=rows, **weights)
    return code

mnist.shifted, mnist.cnn = recording, mnist.network
path, *words = sys.argv[1:]
_peers.run(train, mnist.parse_args([*words, f"--checkpoint-dir={path}-checkpoints"]), "mnist")
"""


def float64(here: Box, count: int, path: str, *words: str) -> Ended:
    here.run("sh", "-c", f"cat >/tmp/float64.py <<'END'\n{FLOAT64_TRAINER}\nEND")
    return here.run("launch", "--", PYTHON, "/tmp/float64.py", path, *words, LAUNCHER_NPROC=str(count))


def test_two_processes_equal_one(here: Box) -> None:
    """In float64, where rounding is far below the effect of any wrong, missing or repeated sample."""
    run = ("--datadir=/data/digits", "--epochs=1", "--precision=fp32", *CPU)
    one = float64(here, 1, "/tmp/one", *run, "--test-batch-size=100").learned()
    two = float64(here, 2, "/tmp/two", *run, "--batch-size=32", "--test-batch-size=77").learned()
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["global_step"] == one["global_step"] == 22 and two["global_batch"] == one["global_batch"] == 64
    compared = here.python(f"""{TENSORS}
import json, numpy
one, *two = (dict(numpy.load(f"/tmp/{{name}}.npz")) for name in ("one-0", "two-0", "two-1"))
weights = [name for name in one if name != "train"]
moments = [tensors(f"/tmp/{{name}}-checkpoints/step-000000022", "momentum_buffer") for name in ("one", "two")]
print(json.dumps({{
    "same batches": numpy.array_equal(numpy.concatenate([part["train"] for part in two], axis=1), one["train"]),
    "ranks differ": max(abs(two[0][name] - two[1][name]).max() for name in weights),
    "differ": max(*(abs(one[name] - two[0][name]).max() for name in weights),
                  *(float(abs(value - moments[1][name]).max()) for name, value in moments[0].items())),
}}))
""")
    found = json.loads(compared.lines[-1])
    assert found["same batches"], "in each step, the ranks' rows one after the other are the rows of the one process"
    assert found["ranks differ"] == 0, "both ranks apply the same averaged gradients"
    # Weights, momentum buffers and their updates are at most about 1, so each of 22 steps adds at most this much. One
    # wrong label, even in the last step, changes the momentum buffers by 1e-2.
    assert found["differ"] <= 22 * MNIST_GRADIENT * FLOAT64
    assert two["accuracy"] == one["accuracy"], (
        "every one of the 360 test images counts once: 100 and 77 do not divide it"
    )
    assert abs(two["test_loss"] - one["test_loss"]) <= 1.5e-6, "the summary rounds to six decimals"


STEP = ("--datadir=/data/step", "--epochs=1", "--test-batch-size=20")
TWO_PROCESSES = (*CPU, "--batch-size=32")


@pytest.fixture(scope="module")
def exact_step(here: Box, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The summary of one step on 64 digits and a test on 53 in float64; its checkpoint is in /tmp/exact-checkpoints."""
    here.put(few_digits(tmp_path_factory.mktemp("step"), 64, 53), "step")
    return float64(here, 1, "/tmp/exact", *STEP, *CPU, "--precision=fp32").learned()


@pytest.mark.parametrize(
    ("words", "devices", "instructions"),
    [
        pytest.param(TWO_PROCESSES, "1", "native", id="two processes"),
        pytest.param(TWO_PROCESSES, "1", "avx2", id="two processes, AVX2"),
        pytest.param(TWO_PROCESSES, "1", "sse4", id="two processes, SSE4"),
        pytest.param(("--batch-size=64",), "1", "native", id="one XLA device"),
        pytest.param(("--batch-size=16",), "4", "native", id="four XLA devices"),
        pytest.param(("--batch-size=16",), "4", "sse4", id="four XLA devices, SSE4"),
    ],
)
def test_the_first_step_and_test_in_float32_equal_those_in_float64(
    here: Box, exact_step: dict[str, float], words: tuple[str, ...], devices: str, instructions: str
) -> None:
    folder = f"/tmp/step-{instructions}-{devices}-{len(words)}"
    variables = {"CPU_NUM_DEVICES": devices, **INSTRUCTION_SETS[instructions]}
    run = (*STEP, *words, "--precision=fp32", f"--checkpoint-dir={folder}")
    if words == TWO_PROCESSES:
        found = here.processes(2, "torch.mnist", *run, **variables).learned()
    else:
        found = here.trainer("torch_xla.mnist", *run, **variables).learned()
    assert (found["global_batch"], found["global_step"]) == (64, 1)
    compared = here.python(f"""{TENSORS}
import json
# After the first step, the momentum buffer is the gradient.
exact = tensors("/tmp/exact-checkpoints/step-000000001", "momentum_buffer")
given = tensors("{folder}/step-000000001", "momentum_buffer")
print(json.dumps([float(abs(given[name] - one).max() / abs(one).max()) for name, one in exact.items()]))
""")
    errors = json.loads(compared.lines[-1])
    assert len(errors) == 8
    # A wrong, missing or repeated image changes the gradient by about 1/64, and the mean loss by about 1/53.
    assert max(errors) <= MNIST_GRADIENT * FLOAT32 < 1 / 64 / 4
    assert abs(found["test_loss"] / exact_step["test_loss"] - 1) <= MNIST_GRADIENT * FLOAT32


def test_torchrun_gives_the_same_bits_as_the_launcher(here: Box) -> None:
    run = ("--datadir=/data/digits", "--num-steps=3", "--batch-size=32", *CPU)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trainers.torch.mnist")
    # Both set the number of threads if it is not given, to different numbers; it decides the order of sums.
    started = here.run(PYTHON, *torchrun, *run, OMP_NUM_THREADS="1").learned()
    launched = here.processes(2, "torch.mnist", *run, OMP_NUM_THREADS="1").learned()
    assert (started["processes"], launched["processes"]) == (2, 2)
    assert launched["weights_sha256"] == started["weights_sha256"]
    alone = here.run(PYTHON, "-m", "trainers.torch.mnist", *run, "--num-cores=2")
    assert (alone.code, len(alone.lines)) == (2, 1) and "start with torchrun --nproc-per-node 2" in alone.output


def test_a_signal_to_one_process_stops_both_at_the_same_step(here: Box) -> None:
    members = [
        f"env RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 OMP_NUM_THREADS=1 "
        f"sh -c '{RUN.replace('epochs=3', 'epochs=500')} --checkpoint-dir=/tmp/agreed & echo $! >/tmp/pid{rank}; "
        f"wait $(cat /tmp/pid{rank})'"
        for rank in (0, 1)
    ]
    signaller = "sh -c 'until grep -q accuracy /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/pid1)'"
    chief, other, _ = here.run_parallel(*members, signaller)
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = chief.summary["global_step"]
    assert f"step-{saved:09d}" in here.run("ls", "/tmp/agreed").output


def test_nan_has_its_own_exit_code_and_is_not_saved(here: Box) -> None:
    ended = here.trainer("torch.mnist", *SHORT, *CPU, "--lr=1e9", "--checkpoint-dir=/tmp/nan")
    assert (ended.code, ended.summary["status"]) == (22, "diverged")
    assert "lower --lr" in ended.output
    assert here.run("ls", "/tmp/nan").output == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--datadir=/nowhere"], 1, "mnist: /nowhere: no train-images-idx3-ubyte[.gz] in it"),
        (
            ["--datadir=/data/digits", "--device=cuda"],
            2,
            "mnist: --device cuda: not available here; available: cpu",
        ),
        (["--datadir=/data/digits", "--batch_size=5000", "--device=cpu"], 1, "do not fill one step of 5000"),
        (["--datadir=/data/digits", "--export-dir=/proc/model"], 1, "mnist: /proc/model: cannot be created"),
        (["--datadir=/data/digits", "--export-dir=/usr"], 1, "mnist: /usr: cannot be written: Permission denied"),
        (["--batch_size=none"], 2, "mnist: --batch-size: 'none' is not an integer of at least 1"),
    ],
)
def test_a_user_error_is_one_line(here: Box, words: list[str], code: int, message: str) -> None:
    ended = here.trainer("torch.mnist", *words)
    assert ended.code == code and message in ended.output
    assert len(ended.lines) == 1, ended.output


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    """The folder holds 1 MB: one checkpoint of this network, but not two."""
    here.run("sh", "-c", "dd if=/dev/zero of=/full/ballast bs=1k count=300 2>/dev/null")
    run = (*SHORT, *CPU, "--checkpoint-dir=/full", "--checkpoint-steps=1")
    assert here.trainer("torch.mnist", *run, "--num-steps=1").code in (0, 1)
    before = here.run("ls", "-A", "/full").output
    ended = here.trainer("torch.mnist", *run)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert len(said) == 1 and "cannot be saved" in said[0] and "Traceback" not in ended.output
    assert here.run("ls", "-A", "/full").output == before, "no file lost, no partial file"


def test_a_full_disk_leaves_no_partial_export(here: Box) -> None:
    """The folder holds 1 MB: the weights, but not the programs as well."""
    here.run("sh", "-c", "rm -rf /full/* /full/.s*; dd if=/dev/zero of=/full/ballast bs=1k count=200 2>/dev/null")
    ended = here.trainer("torch.mnist", "--datadir=/data/digits", "--epochs=1", *CPU, "--export-dir=/full/model")
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert ended.code == 1 and len(said) == 1 and "Traceback" not in ended.output, ended.output
    assert "/full/model: the model cannot be exported (No space left on device); make room and run again" in said[0]
    assert here.run("ls", "-A", "/full/model").output == ""


def test_the_accuracy_is_reported_to_hyperparameter_tuning(here: Box) -> None:
    found = here.trainer("torch.mnist", *SHORT, *CPU, CLOUD_ML_TRIAL_ID="4").learned()
    last = here.python("""
import json
print(json.loads(open("/tmp/hypertune/output.metrics").read().splitlines()[-1])["training/hptuning/metric"])
""")
    assert round(100 * float(last.output), 6) == found["accuracy"], "the summary rounds to six decimals"


FLOWERS = ("--image-size=48", "--batch-size=25", "--device=cpu", "--precision=fp32", "--num-workers=2")
#: Least accuracy in percent on 60 test images of five kinds; chance gives 20. The runs are in float32: by default, the
#: precision depends on the CPU.
FLOOR = 90


@pytest.fixture(scope="module")
def flowers(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    return here.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tar", train=300, test=60), "flowers")


def test_flowers_learns_and_its_export_has_the_same_weights_and_answers(here: Box, flowers: str) -> None:
    run = (f"--datadir={flowers}", *FLOWERS, "--epochs=8", "--checkpoint-dir=/tmp/flowers-kept")
    whole = here.trainer("torch.flowers", *run, "--export-dir=/tmp/flowers-model").learned()
    assert whole["accuracy"] >= FLOOR
    loaded = here.python(f"""{TENSORS}
import json
from trainers.common import images
from trainers.torch import _images
pixels, labels = images.Loader(images.find("{flowers}", "test"), 2).all(48)
exported = torch.export.load("/tmp/flowers-model/model.pt2")
served = _images.Served(_images.small(5)).eval()
served.model.load_state_dict(tensors("/tmp/flowers-kept/step-000000096"))
weights = exported.state_dict
assert all(torch.equal(value, weights[name]) for name, value in served.state_dict().items())
with torch.no_grad():
    answers, expected = exported.module()(torch.from_numpy(pixels)), served(torch.from_numpy(pixels))
terms = sum(layer.weight[0].numel() for layer in served.modules() if hasattr(layer, "weight"))
bound = terms * {FLOAT32} * float(expected.log().abs().max())
print(json.dumps([bool((answers - expected).abs().max() <= bound), 100 * (answers.argmax(1).numpy() == labels).mean()]))
""")
    alike, accuracy = json.loads(loaded.lines[-1])
    # Its accuracy may differ from the trainer's, which resizes a larger copy of each image.
    assert alike and accuracy >= FLOOR, loaded.output


def test_imagenet_learns_counts_top5_exactly_and_resumes(here: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Twelve labels for five kinds of flowers: the best answer is uncertain, so top-1 and top-5 differ."""
    folder = tmp_path_factory.mktemp("imagenet")
    for split, count, seed in (("train", 150, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        flowers_data.write_tar(folder / f"{split}-00000.tar", made)
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
    counted = here.python(f"""{COUNT}
import json, torch
from trainers.common import images
from torchvision import models
from trainers.torch import _decode
batches = images.Loader(images.find("{data}", "test"), 2, decode=_decode.decode).batches(
    [numpy.arange(53)], 32, lambda number, width, height: images.centre_box(width, height))
pixels, labels = next(batches)
answers = torch.export.load("/tmp/imagenet-model/model.pt2").module()(torch.from_numpy(pixels)).detach().numpy()
tests = [json.loads(line) for line in open("/tmp/imagenet/metrics.jsonl") if '"event": "test"' in line]
terms = sum(layer.weight[0].numel() for layer in models.resnet18().modules() if hasattr(layer, "weight"))
from safetensors import safe_open
from safetensors.torch import load_file
from trainers.torch import _peers
model = models.resnet18(num_classes=12)
model.load_state_dict(load_file("/tmp/imagenet-model/model.safetensors"))
about = safe_open("/tmp/imagenet-model/model.safetensors", "pt").metadata()
print(json.dumps([count(answers, labels, terms * {FLOAT32}, most) for most in (1, 5)] +
                 [tests[-1]["top5"], [test["test_loss"] for test in tests],
                  _peers.weights_sha256(model.state_dict()), about]))
""")
    (first, first_close), (fifth, fifth_close), top5, losses, exported, about = json.loads(counted.lines[-1])
    assert exported == whole["weights_sha256"], "the averaged weights, which were tested"
    assert (about["format"], about["model"], about["num_classes"], about["image_size"]) == (
        "pt",
        "resnet18",
        "12",
        "32",
    )
    assert json.loads(about["mean"]) == [0.485, 0.456, 0.406], "as for torchvision's models"
    assert losses[-1] < losses[0]
    assert abs(first - round(whole["accuracy"] * 0.53)) <= first_close, "53 images; only near ties may differ"
    assert abs(fifth - round(top5 * 0.53)) <= fifth_close and fifth > first


@pytest.mark.parametrize("trainer", ["torch.flowers", "torch.imagenet"])
def test_a_truncated_image_is_one_line(here: Box, trainer: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = flowers_data.write(tmp_path_factory.mktemp("broken"), train=30, test=5)
    for name in ("00002", "00007"):  # one of so few is skipped
        broken = folder / "train" / "rose" / f"{name}.jpg"
        broken.write_bytes(broken.read_bytes()[:400])
    data = here.put(folder, "broken")
    few = ("--batch-size=10", "--test-batch-size=10", "--image-size=32", "--epochs=1", "--device=cpu")
    ended = here.trainer(trainer, f"--datadir={data}", *few)
    assert ended.code == 1
    said = [line for line in ended.lines if line.startswith(f"{trainer.split('.')[1]}: ")]
    assert len(said) == 1 and ".jpg: is no readable image" in said[0] and "(2 damaged images" in said[0], ended.output
    assert "Traceback" not in ended.output
