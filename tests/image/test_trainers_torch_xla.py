"""Train PyTorch/XLA's trainers in the xla image, on two devices of a CPU: the same bits after any end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.image.trainer_box import PYTHON, Box, box
from trainyard.sandbox.datasets import text

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

IMAGES = ("--fake-data", "--fake-images=43", "--epochs=3", "--batch-size=4", "--test-batch-size=8")
LOADED = ("--num-workers=1", "--image-size=32")
#: Of each trainer, options with which it learns in seconds from all that it can have.
RUNS = {
    "mnist": (*IMAGES, "--model=small", "--optimizer=adamw"),
    "flowers": (*IMAGES, *LOADED),
    "imagenet": (*IMAGES, *LOADED, "--model=squeezenet1_1", "--num-classes=12", "--ema=0.5", "--mixup=0.2",
                 "--cutmix=1"),
    "gpt": ("--datadir=/data/text", "--cache-dir=/tmp/packed", "--layers=2", "--width=32", "--heads=2",
            "--batch-size=4", "--block-size=32", "--max-steps=15", "--eval-steps=5", "--eval-tokens=600",
            "--sample-tokens=12"),
}  # fmt: skip


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("xla"), PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2") as started:
        started.put(text.write(tmp_path_factory.mktemp("text")), "text")
        yield started


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_loses_a_checkpoint_and_is_stopped_ends_with_the_same_bits(here: Box, name: str) -> None:
    whole = here.trainer(f"torch_xla.{name}", *RUNS[name]).learned()
    # One to train, one to test, one to sample; two more where the weight of an average is as large as another number.
    graphs = {"gpt": 3, "imagenet": 4}.get(name, 2)
    assert (whole["replicas"], whole["compile_count"]) == (2, graphs)
    run = (*RUNS[name], f"--checkpoint-dir=/tmp/{name}", "--checkpoint-steps=2", "--log-steps=1")
    command = f"{PYTHON} -m trainers.torch_xla.{name} {' '.join(run)}"

    def ended(signal: str, reached: str) -> int:
        script = (f"rm -f /tmp/log; {command} >/tmp/log 2>&1 & until {reached}; do sleep 0.01; done; kill -{signal} $!;"
                  " wait $!")  # fmt: skip
        return here.run("bash", "-c", script).code

    assert ended("KILL", f"[ -e /tmp/{name}/step-000000006/run.json ]") == 137
    here.run("bash", "-c", f"truncate -s 5000 $(dirname $(ls /tmp/{name}/step-*/run.json | tail -n 1))/state.pt")
    assert ended("TERM", "grep -q Resumed /tmp/log 2>/dev/null") == 143
    assert "cannot be used" in here.run("cat", "/tmp/log").output
    resumed = here.trainer(f"torch_xla.{name}", *run).learned()
    assert 4 <= resumed["resumed_from"] < 15
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["compile_count"] == graphs or (name == "imagenet" and resumed["compile_count"] < graphs)


@pytest.mark.parametrize("words", [("mnist", "--model=small"), ("mnist", "--optimizer=adamw")], ids=" ".join)
def test_the_second_step_on_one_device_has_the_graph_of_the_first(here: Box, words: tuple[str, ...]) -> None:
    """Numbers that are 0 in the first step: batches that batch norm has seen, and AdamW's steps."""
    found = here.trainer("torch_xla.mnist", *IMAGES, *words[1:], CPU_NUM_DEVICES="1").learned()
    assert (found["replicas"], found["compile_count"]) == (1, 2)


def test_a_language_model_exports_the_weights_that_it_was_tested_with(here: Box) -> None:
    """Export one matrix for the output and the embeddings, which share it."""
    ended = here.trainer("torch_xla.gpt", *RUNS["gpt"], "--lr=0.03", "--export-dir=/tmp/llama")
    found = ended.learned()
    assert [line for line in ended.lines if line.startswith("sample: ")], ended.output
    same = ("--max-steps=1", "--eval-steps=1", "--warmup-steps=0", "--lr=1e-30", "--weight-decay=0")
    again = here.trainer("torch.gpt", *RUNS["gpt"], "--init-from=/tmp/llama", *same, "--device=cpu", "--precision=fp32")
    assert abs(again.learned()["val_loss"] - found["val_loss"]) < 1e-4


@pytest.mark.parametrize("name", RUNS)
def test_a_loss_that_is_not_finite_ends_with_22_and_saves_nothing(here: Box, name: str) -> None:
    ended = here.trainer(f"torch_xla.{name}", *RUNS[name], "--lr=1e30", f"--checkpoint-dir=/tmp/nan-{name}")
    said = [line for line in ended.lines if line.startswith(f"{name}: ")]
    assert ended.code == 22 and len(said) == 1 and "is not finite" in said[0], ended.output
    assert here.run("ls", f"/tmp/nan-{name}").output == ""
