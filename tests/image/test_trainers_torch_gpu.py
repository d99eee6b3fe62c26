"""Test PyTorch's trainers on GPUs, as far as a CPU and fakes of ``torch.cuda`` show it.

In the xla image, on PyTorch's own CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.image.trainer_box import Box, box, few_digits

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

IMAGENET = ("--device=cpu", "--fake-data", "--fake-images=24", "--image-size=32", "--num-classes=5", "--epochs=1",
            "--model=resnet18", "--batch-size=8", "--lr=0.02", "--log-steps=1")  # fmt: skip


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("xla"), OMP_NUM_THREADS="1") as started:
        started.put(few_digits(tmp_path_factory.mktemp("few"), 320, 53), "few")
        yield started


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_scaled_gradients_in_fp16_learn_and_resume_exactly(here: Box, optimizer: str) -> None:
    run = ("--device=cpu", "--datadir=/data/few", "--epochs=4", "--precision=fp16", "--clip-norm=1", "--log-steps=1",
           f"--optimizer={optimizer}", "--test-batch-size=53")  # fmt: skip
    whole = here.trainer("torch.mnist", *run, f"--checkpoint-dir=/tmp/whole-{optimizer}").learned()
    assert whole["accuracy"] > 40, "10 % are right by chance"
    kept = (*run, f"--checkpoint-dir=/tmp/fp16-{optimizer}")
    here.trainer("torch.mnist", *kept, "--num-steps=7").learned()
    assert here.trainer("torch.mnist", *kept).learned()["weights_sha256"] == whole["weights_sha256"]
    scale = here.python(f"""
import glob, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sorted(glob.glob("/tmp/whole-{optimizer}/step-*"))[-1], "/tmp/scaler.pt")
print(torch.load("/tmp/scaler.pt", weights_only=False)["scaler"]["scale"])
""")
    assert float(scale.lines[-1]) > 1, scale.output


def test_a_gpu_trains_in_the_precision_that_it_multiplies_fast(here: Box) -> None:
    found = here.python("""
import torch
from trainers.torch import _peers
for capability in ((6, 0), (7, 0), (7, 5), (8, 0), (9, 0)):
    torch.cuda.get_device_capability = lambda device: capability
    torch.cuda.is_bf16_supported = lambda including_emulation: capability >= (8, 0)
    print(*capability, _peers.fastest_precision(torch.device("cuda", 0)))
""")
    assert found.lines[-5:] == ["6 0 fp32", "7 0 fp16", "7 5 fp16", "8 0 bf16", "9 0 bf16"], found.output


def test_the_processes_of_gpus_join_with_their_devices(here: Box) -> None:
    found = here.python("""
import os, torch
from trainers.torch import _peers, mnist
os.environ.update(MASTER_ADDR="x", MASTER_PORT="1", RANK="1", WORLD_SIZE="2")
_peers.dist.init_process_group = lambda backend, timeout, device_id: print(backend, device_id)
for kind in ("cuda", "cpu"):
    _peers.find_device = lambda name, processes: torch.device(kind, 1)
    _peers.Peers(mnist.parse_args(["--precision=fp32"]))
""")
    assert found.lines[-2:] == ["cpu:gloo,cuda:nccl cuda:1", "gloo None"], found.output


def test_a_gpu_that_triton_does_not_support_trains_without_compiling(here: Box) -> None:
    found = here.python("""
import argparse, torch
from trainers.torch import _images
peers = argparse.Namespace(device=torch.device("cuda", 0), rank=0)
torch.compile = lambda model, dynamic: "compiled"
for capability in ((6, 1), (7, 0)):
    torch.cuda.get_device_capability = lambda device: capability
    print(_images.compiled("eager", "auto", peers))
print(_images.compiled("eager", "auto", argparse.Namespace(device=torch.device("cpu"))))
""")
    line = "Triton needs compute capability 7.0: training without torch.compile"
    assert found.lines[-4:] == [line, "eager", "compiled", "eager"], found.output


@pytest.mark.parametrize("processes", [1, 2])
def test_where_compiling_fails_a_line_says_so_and_the_steps_are_the_eager_ones(here: Box, processes: int) -> None:
    run = (*IMAGENET, f"--num-cores={processes}", "--accumulate=2", "--batch-size=4", "--progressive=24", "--epochs=2")
    eager = here.trainer("torch.imagenet", *run).learned()
    broken = here.trainer("torch.imagenet", *run, "--compile=on", CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR="/tmp/none")
    assert broken.learned()["weights_sha256"] == eager["weights_sha256"]
    said = [line for line in broken.lines if "training without it" in line]
    assert len(said) == 1 and said[0].startswith("torch.compile failed ("), broken.output
    assert "Traceback" not in broken.output


def test_compiled_steps_of_two_processes_learn_what_eager_ones_do(here: Box) -> None:
    """The graph of DistributedDataParallel, which has a part for each bucket of gradients."""
    run = (*IMAGENET, "--num-cores=2", "--batch-size=4", "--precision=fp32")
    eager = here.trainer("torch.imagenet", *run).learned()
    graph = here.trainer("torch.imagenet", *run, "--compile=on", TORCHINDUCTOR_CACHE_DIR="/home/trainer/graph")
    assert "training without it" not in graph.output, graph.output
    # On some CPUs the graph rounds as the eager steps do: what was compiled shows that it ran, not the weights.
    made = here.python("import pathlib; print(len(list(pathlib.Path('/home/trainer/graph').rglob('*.so'))))")
    assert int(made.lines[-1]) > 0, graph.output
    assert abs(eager["loss_first"] - graph.learned()["loss_first"]) < 1e-3
