"""The loops of the PyTorch trainers: randomness, averages, several processes, which checkpoint, which model.

In the xla image, on PyTorch's own CPU backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from trainers.common import mnist

from tests.image.trainer_box import COUNT, FLOAT32, MNIST_FORWARD, PYTHON, TENSORS, Box, Ended, box, few_digits
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

SMALL = ("--image-size=32", "--batch-size=5", "--test-batch-size=7", "--num-workers=2", "--precision=fp32")


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("xla"), OMP_NUM_THREADS="1") as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits"), gz=True), "digits")
        started.put(few_digits(tmp_path_factory.mktemp("few"), 298, 53), "few")
        yield started


@pytest.fixture(scope="module")
def flowers(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    return here.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tar", train=103, test=53), "flowers")


def imagenet(here: Box, flowers: str, *words: str) -> Ended:
    return here.trainer(
        "torch.imagenet", "--device=cpu", f"--datadir={flowers}", "--num-classes=5", "--warmup-epochs=0", *SMALL, *words
    )


def one_line(ended: Ended, trainer: str) -> str:
    """The line with which a trainer has reported an error."""
    said = [line for line in ended.lines if line.startswith(f"{trainer}: ")]
    assert len(said) == 1 and "Traceback" not in ended.output, ended.output
    return said[0]


def test_dropout_depends_on_seed_step_and_rank(here: Box) -> None:
    checked = here.python("""
import torch
from trainers.torch import mnist
from trainers.torch._peers import Peers
peers = Peers(mnist.parse_args(["--device=cpu"]))
def mask(seed, step, rank):
    peers.rank = rank
    peers.seed(seed, step)
    return tuple(torch.nn.functional.dropout(torch.ones(200)).tolist())
masks = [mask(seed, step, rank) for seed in (0, 1) for step in (0, 1, 70_000) for rank in (0, 1)]
assert len(set(masks)) == 12, "different for each seed, step and rank"
assert mask(1, 1, 1) == masks[9], "the same again"
print("good")
""")
    assert checked.lines[-1] == "good", checked.output


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resuming_is_exact_with_dropout_and_any_optimizer(here: Box, optimizer: str) -> None:
    run = ("--datadir=/data/few", "--model=vit", "--epochs=2", "--test-batch-size=53", "--batch-size=32",
           f"--optimizer={optimizer}", "--clip-norm=0.5", "--weight-decay=0.1", "--precision=fp32")  # fmt: skip
    folder = f"--checkpoint-dir=/tmp/dropout-{optimizer}"
    whole = here.trainer("torch.mnist", "--device=cpu", *run).learned()
    here.trainer("torch.mnist", "--device=cpu", *run, folder, "--num-steps=5").learned()
    resumed = here.trainer("torch.mnist", "--device=cpu", *run, folder).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (5, whole["weights_sha256"])
    other = here.trainer("torch.mnist", "--device=cpu", *(word for word in run if "clip" not in word)).learned()
    assert other["weights_sha256"] != whole["weights_sha256"], "gradients were clipped"


def test_the_average_of_the_weights_starts_with_a_low_decay(here: Box) -> None:
    """After n steps with weights w, from average 0: the product of 1 - 1/10, 1 - 2/11... until the decay is reached."""
    checked = here.python("""
import torch
from torch import nn
from trainers.torch._images import Average
model, trained = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
for tensor in (*model.parameters(), *model.buffers()):
    tensor.data.zero_()
for tensor in (*trained.parameters(), *trained.buffers()):
    tensor.data.fill_(1)
average, left = Average(model, trained, 0.9), 1.0
for step in range(120):
    average.update(step)
    left *= min(0.9, (1 + step) / (10 + step))
    for name, value in model.state_dict().items():
        # One rounding of a number below 1 per step.
        expected = 1 if name == "num_batches_tracked" else 1 - left
        assert (value - expected).abs().max() <= (step + 1) * 2.0**-23, (step, name, value, expected)
print("good")
""")
    assert checked.lines[-1] == "good", checked.output


def test_a_short_run_with_averaged_weights_has_learned(here: Box, flowers: str) -> None:
    """With a constant decay of 0.9999, 40 steps would leave 99.6 % of the random weights: 20 % are right by chance."""
    found = imagenet(here, flowers, "--model=resnet18", "--epochs=4", "--lr=0.02", "--batch-size=10", "--ema=0.9999")
    assert found.learned()["accuracy"] >= 45


def test_averaged_weights_are_tested_with_their_flag_only(here: Box, flowers: str) -> None:
    run = ("--epochs=1", "--ema=0.5", "--num-workers=2", "--checkpoint-dir=/tmp/averaged")
    whole = imagenet(here, flowers, *run, "--model=resnet18").learned()
    again = imagenet(here, flowers, *run, "--model=resnet18", "--eval-only").learned()
    assert (again["weights_sha256"], again["accuracy"]) == (whole["weights_sha256"], whole["accuracy"])
    assert again["global_step"] == whole["global_step"]
    raw = imagenet(here, flowers, *run[:1], *run[2:], "--model=resnet18", "--eval-only")
    assert raw.code == 2 and "averaged weights (--ema)" in one_line(raw, "imagenet")


# The trainer with a network whose loss on a batch is the mean of those on its parts: without batch norm.
LINEAR = """
import sys
from torch import nn
from trainers.torch import _images, _peers, imagenet
class Scaled(nn.Sequential):
    calls = 0
    def forward(self, images):
        Scaled.calls += 1
        return super().forward(images * float(sys.argv[1] if Scaled.calls == 1 else 1))
def network(args):
    return Scaled(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, args.num_classes))
_images.imagenet_network = network
_peers.run(imagenet.main, imagenet.parse_args(sys.argv[2:]), "imagenet")
"""


def test_the_loss_of_accumulated_batches_is_that_of_all_of_them(here: Box) -> None:
    run = ("--device=cpu", "--fake-data", "--fake-images=40", "--image-size=32", "--num-classes=5", "--epochs=1",
           "--log-steps=1", "--precision=fp32")  # fmt: skip
    one = here.python(LINEAR, "1", *run, "--batch-size=20").learned()
    parts = here.python(LINEAR, "1", *run, "--batch-size=5", "--accumulate=4").learned()
    # A mean of 20 losses, or of 4 means of 5; the summary rounds to six decimals.
    assert abs(parts["loss_first"] - one["loss_first"]) <= 20 * FLOAT32 * one["loss_first"] + 1e-6
    diverged = here.python(LINEAR, "nan", *run, "--batch-size=5", "--accumulate=4")
    assert diverged.code == 22, "the loss of the first part is checked, too"
    assert "the loss is not finite by step" in one_line(diverged, "imagenet")


def test_the_tested_model_of_two_processes_is_the_saved_one(here: Box, flowers: str) -> None:
    run = ("--model=resnet18", "--epochs=1", "--lr=0.005", "--num-cores=2", "--checkpoint-dir=/tmp/buffers")
    trained = imagenet(here, flowers, *run)
    again = imagenet(here, flowers, *run, "--eval-only").learned()
    first = trained.learned()
    assert (again["test_loss"], again["accuracy"]) == (first["test_loss"], first["accuracy"])
    assert "Warning" not in trained.output, trained.output


def test_two_processes_with_different_data_end_with_one_line(here: Box) -> None:
    members = [
        f"env RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29561 {PYTHON} -m"
        f" trainers.torch.mnist --device=cpu --datadir=/data/{data} --epochs=1"
        for rank, data in enumerate(("digits", "few"))
    ]
    for ended in here.run_parallel(*members):
        assert ended.code == 1
        assert "the processes see different data" in one_line(ended, "mnist")
        assert "'train_images': 1437" in ended.output and "'train_images': 298" in ended.output


# The trainer with steps of two seconds.
SLOW = """
import sys, time
from trainers.torch import _peers, mnist
step = mnist.train_step
mnist.train_step = lambda *given: (time.sleep(2), step(*given))[1]
_peers.run(mnist.main, mnist.parse_args(["--device=cpu", *sys.argv[1:]]), "mnist")
"""


def test_two_processes_with_slow_steps_have_saved_soon_after_sigterm_to_one(here: Box) -> None:
    here.run("sh", "-c", f"cat >/tmp/slow.py <<'END'\n{SLOW}\nEND")
    members = [
        f"env RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29562 PYTHONPATH=/opt/trainyard "
        f"sh -c '{PYTHON} /tmp/slow.py --datadir=/data/digits --epochs=9 --log-steps=1 --checkpoint-dir=/tmp/slow & "
        f"echo $! >/tmp/slow{rank}; wait $(cat /tmp/slow{rank})'"
        for rank in (0, 1)
    ]
    signaller = ("sh -c 'until grep -q ^step.3/ /tmp/out0; do sleep 0.1; done; touch /tmp/signalled; "
                 "kill -TERM $(cat /tmp/slow1)'")  # fmt: skip
    chief, other, _ = here.run_parallel(*members, signaller)
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = f"/tmp/slow/step-{chief.summary['global_step']:09d}/run.json"
    took = here.python(f"import os; print(os.path.getmtime('{saved}') - os.path.getmtime('/tmp/signalled'))")
    # The step of the signal and at most one more, of two seconds each; a second to save on a busy machine.
    assert float(took.output) <= 5


# The trainer, with an accuracy that falls after the second of three epochs.
FALLING = """
import sys
from trainers.torch import _peers, mnist
test, accuracies = mnist.evaluate, [50, 90, 70]
mnist.evaluate = lambda *given: test(*given) | {"accuracy": accuracies.pop(0)}
_peers.run(mnist.main, mnist.parse_args(["--device=cpu", "--precision=fp32", *sys.argv[1:]]), "mnist")
"""


def test_the_best_checkpoint_is_kept_tested_and_exported(here: Box) -> None:
    run = ("--datadir=/data/digits", "--epochs=3")
    kept = (*run, "--checkpoint-dir=/tmp/best", "--keep-checkpoints=1")
    whole = here.python(FALLING, *kept, "--keep-best", "--export-dir=/tmp/best-model").learned()
    assert (whole["accuracy"], whole["max_accuracy"], whole["global_step"]) == (70, 90, 66)
    run = (*run, "--precision=fp32")
    kept = (*kept, "--precision=fp32")
    second = here.trainer("torch.mnist", "--device=cpu", *run, "--num-steps=44").learned()
    assert whole["weights_sha256"] == second["weights_sha256"], "exported: the weights after the second epoch"
    assert here.run("ls", "-A", "/tmp/best-model").output.split() == ["model.onnx", "model.pt2", "model.safetensors"]
    exported = here.python("""
from safetensors.torch import load_file
from trainers.torch import _peers, mnist
model = mnist.network(mnist.parse_args([]))
model.load_state_dict(load_file("/tmp/best-model/model.safetensors"))
print(_peers.weights_sha256(model.state_dict()))
""")
    assert exported.lines[-1] == second["weights_sha256"], exported.output
    assert here.run("ls", "/tmp/best").output.split() == ["step-000000044", "step-000000066"]
    best = here.trainer("torch.mnist", "--device=cpu", *kept, "--keep-best", "--eval-only").learned()
    assert (best["global_step"], best["weights_sha256"]) == (44, second["weights_sha256"])
    newest = here.trainer("torch.mnist", "--device=cpu", *kept, "--eval-only").learned()
    assert newest["global_step"] == 66 and newest["weights_sha256"] != second["weights_sha256"]


# The trainer in an image without safetensors and onnxscript.
PLAIN = """
import sys
sys.modules["safetensors"] = sys.modules["onnxscript"] = None
from trainers.torch import _peers, mnist
_peers.run(mnist.main, mnist.parse_args(["--device=cpu", *sys.argv[1:]]), "mnist")
"""


def test_the_accuracy_of_the_exported_model_is_stated(here: Box) -> None:
    """Tests in bf16 and in fp32 differ by a few images; so may the program's by near ties."""
    run = ("--device=cpu", "--datadir=/data/digits", "--epochs=2", "--precision=bf16", "--export-dir=/tmp/stated")
    ended = here.trainer("torch.mnist", *run)
    stated = ended.learned()["exported_accuracy"]
    assert f"Exported model: test accuracy {stated:.2f} % in fp32" in ended.lines, ended.output
    counted = here.python(f"""{COUNT}
import json, torch
from trainers.common import mnist
images, labels = mnist.read_split("/data/digits", "test")
answers = torch.export.load("/tmp/stated/model.pt2").module()(torch.from_numpy(images.copy())).detach().numpy()
print(json.dumps(count(answers, labels, {MNIST_FORWARD} * {FLOAT32})))
""")
    right, close = json.loads(counted.lines[-1])
    assert abs(right - round(stated * 3.6)) <= close, "360 images"
    trained = here.trainer("torch.mnist", *run[:3], "--precision=fp32", "--export-dir=/tmp/stated").learned()
    assert "exported_accuracy" not in trained, "that of the test"


def test_without_the_packages_of_a_format_a_note_says_so_and_the_others_are_exported(here: Box) -> None:
    ended = here.python(PLAIN, "--datadir=/data/few", "--epochs=1", "--test-batch-size=53", "--export-dir=/tmp/plain")
    notes = [line for line in ended.lines if line.startswith("note: ")]
    assert ended.learned() and here.run("ls", "-A", "/tmp/plain").output.split() == ["model.pt2"]
    assert sorted(notes) == ["note: model.onnx is not written: pip install onnxscript",
                             "note: model.safetensors is not written: pip install safetensors"]  # fmt: skip


def test_eval_only_without_a_checkpoint_is_one_line(here: Box) -> None:
    ended = here.trainer(
        "torch.mnist", "--device=cpu", "--datadir=/data/few", "--eval-only", "--checkpoint-dir=/tmp/nothing"
    )
    assert (ended.code, one_line(ended, "mnist")) == (2, "mnist: --eval-only: /tmp/nothing has no checkpoint")


def test_checkpoints_are_saved_by_the_clock(here: Box) -> None:
    here.run("sh", "-c", f"cat >/tmp/slow.py <<'END'\n{SLOW}\nEND")
    run = ("--datadir=/data/few", "--epochs=1", "--num-steps=4", "--checkpoint-dir=/tmp/clock")
    here.run(PYTHON, "/tmp/slow.py", *run, "--checkpoint-minutes=0.05", PYTHONPATH="/opt/trainyard").learned()
    # Steps of two seconds or more: three seconds have passed after the second. Without the clock, there is the last.
    kept = here.run("ls", "/tmp/clock").output.split()
    assert len(kept) > 1 and kept[-1] == "step-000000004"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model=vit_b_16", "--image-size=50"], "--model vit_b_16 does not take images of 50 pixels"),
        (["--model=vit_b_16", "--progressive=16"], "--model vit_b_16 does not take images of 16 pixels"),
        (["--model=inception_v3"], "--model inception_v3 does not take images of 32 pixels"),
        (["--model=resnet999"], "--model resnet999: torchvision has alexnet, "),
        (["--model=fcn_resnet50"], "--model fcn_resnet50: torchvision has alexnet, "),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(here: Box, flowers: str, words: list[str], message: str) -> None:
    ended = imagenet(here, flowers, *words)
    assert ended.code == 2 and message in one_line(ended, "imagenet"), ended.output


@pytest.mark.parametrize("model", ["googlenet", "vit_b_16"])
def test_a_model_with_special_needs_trains(here: Box, flowers: str, model: str) -> None:
    found = imagenet(here, flowers, f"--model={model}", "--num-steps=2", "--optimizer=adamw", "--clip-norm=1").learned()
    assert found["global_step"] == 2


def test_resuming_with_another_model_is_one_line(here: Box) -> None:
    run = ("--datadir=/data/few", "--epochs=1", "--num-steps=1", "--checkpoint-dir=/tmp/models")
    here.trainer("torch.mnist", "--device=cpu", *run).learned()
    for words in (("--model=vit",), ("--optimizer=adamw",)):
        ended = here.trainer("torch.mnist", "--device=cpu", *run, *words)
        assert ended.code == 2 and "use the same value, or another --checkpoint-dir" in one_line(ended, "mnist")


def test_a_run_that_does_not_resume_moves_the_earlier_checkpoints_and_keeps_its_own(here: Box) -> None:
    run = ("--datadir=/data/few", "--epochs=3", "--checkpoint-dir=/tmp/fresh", "--keep-checkpoints=1")
    here.trainer("torch.mnist", "--device=cpu", *run).learned()
    stopped = here.trainer("torch.mnist", "--device=cpu", *run, "--no-resume", "--num-steps=2")
    assert stopped.learned() and "step 2 is saved, run again without --no-resume to resume" in stopped.output
    found = here.run("sh", "-c", "cd /tmp/fresh && ls -d * old-*/*").output.split()
    assert found[-1] == "step-000000002" and found[1].endswith("Z/step-000000012") and len(found) == 3
    assert here.trainer("torch.mnist", "--device=cpu", *run).learned()["resumed_from"] == 2


@pytest.mark.parametrize("trainer", ["torch.mnist", "torch.flowers", "torch.imagenet"])
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(here: Box, flowers: str, trainer: str) -> None:
    """The only step makes them so; its loss, of the weights before, is finite."""
    data = ("--datadir=/data/few",) if trainer == "torch.mnist" else (f"--datadir={flowers}", *SMALL[:1], SMALL[-1])
    size, model = (298, "small") if trainer == "torch.mnist" else (103, "resnet18")
    more = ("--num-classes=5", "--ema=0.5", "--warmup-epochs=0") if trainer == "torch.imagenet" else ()
    folder = f"/tmp/{trainer}-not-finite"
    run = (*data, *more, "--device=cpu", f"--model={model}", f"--batch-size={size}", "--epochs=1", "--lr=3e38",
           "--weight-decay=1e3")  # fmt: skip
    saving = here.trainer(trainer, *run, f"--checkpoint-dir={folder}", f"--export-dir={folder}/model", "--keep-best")
    for ended in (saving, here.trainer(trainer, *run, f"--export-dir={folder}/model")):
        assert (ended.code, ended.summary["status"]) == (22, "diverged"), ended.output
        assert "is not finite by step 1: lower --lr" in one_line(ended, trainer.partition(".")[2])
    kept = here.run("sh", "-c", f"cd {folder} && find . -type f ! -name '*.index'")  # that of the data's shards stays
    assert kept.output == ""


def test_a_checkpoint_with_weights_that_are_not_finite_is_left_out(here: Box) -> None:
    run = ("--datadir=/data/few", "--epochs=1", "--checkpoint-dir=/tmp/poisoned", "--checkpoint-steps=1")
    whole = here.trainer("torch.mnist", "--device=cpu", *run).learned()
    poisoned = here.python(f"""{TENSORS}
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save("/tmp/poisoned/step-000000004", "/tmp/poisoned.pt")
state = torch.load("/tmp/poisoned.pt", weights_only=False)
next(iter(state["model"].values())).view(-1)[0] = float("nan")
dcp.save(state, checkpoint_id="/tmp/poisoned/step-000000004")
""")
    assert poisoned.code == 0, poisoned.output
    here.run("sh", "-c", "cd /tmp/poisoned; cp -r step-000000004 step-000000005; echo [] >step-000000005/.metadata")
    resumed = here.trainer("torch.mnist", "--device=cpu", *run)
    found = resumed.learned()
    assert (found["resumed_from"], found["weights_sha256"]) == (3, whole["weights_sha256"])
    notes = [line for line in resumed.lines if line.startswith("note: ")]
    assert len(notes) == 2 and "step-000000004 cannot be used (its weight 0.weight is not finite)" in notes[1]


def test_a_network_with_a_constant_that_is_infinite_trains(here: Box) -> None:
    """Such as the mask of an attention, which is part of the checkpoint."""
    ended = here.python(
        """
import sys
import torch
from trainers.torch import _peers, mnist
class Masked(torch.nn.Sequential):
    def __init__(self, args):
        super().__init__(*mnist.network(args))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
_peers.run(lambda args: mnist.main(args, Masked), mnist.parse_args(sys.argv[1:]), "mnist")
""",
        "--device=cpu",
        "--datadir=/data/few",
        "--epochs=1",
        "--checkpoint-dir=/tmp/masked",
    )
    assert ended.learned()["global_step"] == 4


def test_other_data_are_refused_unless_they_are_accepted_and_changed_flags_named(
    here: Box, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = few_digits(tmp_path_factory.mktemp("relabelled"), 298, 53)
    path = str(folder / mnist.FILES["train"][1])
    digits.write_array(path, (mnist.read_idx(path) + 1) % 10)
    other = here.put(folder, "relabelled")
    here.run("cp", "-r", "/data/few", "/tmp/few-moved")
    run = ("--epochs=2", "--checkpoint-dir=/tmp/data")
    here.trainer("torch.mnist", "--device=cpu", *run, "--datadir=/data/few", "--num-steps=1").learned()
    refused = here.trainer("torch.mnist", "--device=cpu", *run, f"--datadir={other}")
    assert refused.code == 2 and "are of other data (other labels): use the same data" in one_line(refused, "mnist")
    words = ("--datadir=/tmp/few-moved", "--batch-size=32", "--lr=0.1", "--shift=1", "--num-steps=2")
    moved = here.processes(2, "torch.mnist", "--device=cpu", *run, *words)
    assert moved.learned()["resumed_from"] == 1
    assert "Resuming with --lr 0.1, was 0.03; --shift 1, was 2" in moved.lines
    accepted = here.trainer("torch.mnist", "--device=cpu", *run, f"--datadir={other}", "--accept-other-data")
    assert accepted.learned()["resumed_from"] == 2 and "Resuming with other data (other labels); " in accepted.output


def test_the_small_network_learns_digits_in_two_epochs_and_resumes_with_its_averages(here: Box) -> None:
    """Of ten seeds, the worst had 97.5 %."""
    run = ("--datadir=/data/digits", "--model=small", "--epochs=2", "--optimizer=adamw", "--lr=0.01", "--shift=1")
    whole = here.trainer("torch.mnist", "--device=cpu", *run).learned()
    assert whole["accuracy"] >= 95
    here.trainer("torch.mnist", "--device=cpu", *run, "--checkpoint-dir=/tmp/small", "--num-steps=30").learned()
    resumed = here.trainer("torch.mnist", "--device=cpu", *run, "--checkpoint-dir=/tmp/small").learned()
    assert (resumed["weights_sha256"], resumed["accuracy"]) == (whole["weights_sha256"], whole["accuracy"])


def test_without_mirroring_other_images_are_trained_on(here: Box, flowers: str) -> None:
    run = ("--num-steps=2", "--precision=fp32")
    mirrored = imagenet(here, flowers, *run).learned()
    assert imagenet(here, flowers, *run).learned()["weights_sha256"] == mirrored["weights_sha256"]
    assert imagenet(here, flowers, *run, "--no-mirror").learned()["weights_sha256"] != mirrored["weights_sha256"]


def test_vision_transformers_learn_digits_and_flowers(here: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Chance gives 10 % and 20 %."""
    recipe = ("--model=vit", "--optimizer=adamw", "--clip-norm=1", "--weight-decay=0.05")
    words = ("--datadir=/data/digits", "--epochs=20", "--batch-size=32", "--target-accuracy=80")
    assert here.trainer("torch.mnist", "--device=cpu", *words, *recipe).learned()["accuracy"] >= 80
    many = here.put(flowers_data.write(tmp_path_factory.mktemp("many"), "tar", train=300, test=60), "many")
    words = (f"--datadir={many}", "--image-size=48", "--epochs=15", "--batch-size=20", "--target-accuracy=60",
             "--num-workers=2")  # fmt: skip
    assert here.trainer("torch.flowers", "--device=cpu", *words, *recipe).learned()["accuracy"] >= 60
