"""train.py of examples/gpt, without its repository: it learns, stops, resumes with the same bits, refuses wrong flags.

In the xla image, with ``--device cpu`` unless a test says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.image.trainer_box import PYTHON, Box, Ended, box
from trainyard.common.settings import ROOT

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

GPT = ROOT / "examples/gpt"

# With dropout, so that the same batches alone would not give the same weights.
STEPS = ("--device=cpu", "--dropout=0.2", "--max-steps=40", "--eval-interval=20")
TWO = "LAUNCHER_NPROC=2 OMP_NUM_THREADS=1 launch --"

# Prints how many values two checkpoints have, and the names of those that differ in a bit.
COMPARE = """
import json, sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def values(state, name=""):
    if isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from values(value, f"{name}.{key}")
    else:
        yield name, state
def read(folder):
    dcp_to_torch_save(folder, "/tmp/read.pt")
    return dict(values(torch.load("/tmp/read.pt")))
one, other = map(read, sys.argv[1:])
assert one.keys() == other.keys()
same = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
print(json.dumps([len(one), [name for name in one if not same(one[name], other[name])]]))
"""


@pytest.fixture(scope="module")
def gpt(built_image: Callable[[str], str]) -> Iterator[Box]:
    with box(built_image("xla"), PJRT_DEVICE="CPU", PYTHONDONTWRITEBYTECODE="1") as started:
        started.put(GPT, "gpt")
        yield started


def train(gpt: Box, *words: str) -> Ended:
    return gpt.run(PYTHON, "/data/gpt/train.py", *words)


def stopped(gpt: Box, command: str, folder: str, signal: str = "TERM") -> tuple[Ended, float]:
    """``command``, which gets a signal once its first checkpoint in ``folder`` is complete; seconds until it ended."""
    ended = gpt.run(
        "bash",
        "-c",
        f"{command} --checkpoint-dir={folder} & pid=$!\n"
        f"until ls {folder}/*/.metadata >/dev/null 2>&1; do sleep 0.1; kill -0 $pid || exit 99; done\n"
        f"before=$(date +%s%N); kill -{signal} $pid; wait $pid; code=$?\n"
        "echo; echo $(($(date +%s%N) - before)); exit $code",
    )
    assert ended.code != 99, ended.output
    return ended, int(ended.lines[-1]) / 1e9


def differences(gpt: Box, one: str, other: str) -> list[str]:
    """Names of the values in which the checkpoints after step 40 in two folders differ."""
    ended = gpt.python(COMPARE, f"{one}/step-00000040", f"{other}/step-00000040")
    assert ended.code == 0, ended.output
    count, names = json.loads(ended.lines[-1])
    assert count > 100, "weights, and two moments of each"
    return list(names)


def test_the_validation_loss_of_gpt_falls(gpt: Box) -> None:
    ended = train(gpt, "--device=cpu", "--max-steps=200", "--eval-interval=20", "--checkpoint-dir=/tmp/falls")
    assert ended.code == 0, ended.output
    losses = [float(line.split("val loss ")[1].split(",")[0]) for line in ended.lines if "val loss" in line]
    assert len(losses) == 10
    assert losses[0] > 3.5 > 2.6 > losses[-1], losses


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_gpt_continues_with_the_same_bits(gpt: Box, processes: int) -> None:
    command = f"{'' if processes == 1 else TWO} {PYTHON} /data/gpt/train.py {' '.join(STEPS)}"
    straight, cut = f"/tmp/straight{processes}", f"/tmp/cut{processes}"
    assert gpt.run("sh", "-c", f"{command} --checkpoint-dir={straight}").code == 0
    ended, seconds = stopped(gpt, command, cut)
    assert ended.code == 143, ended.output
    assert "SIGTERM: saved step" in ended.output, ended.output
    assert seconds < 15
    again = gpt.run("sh", "-c", f"{command} --checkpoint-dir={cut}")
    assert again.code == 0, again.output
    assert "from step 0" not in again.output
    assert f"on {processes} x cpu" in again.output
    assert differences(gpt, straight, cut) == []


def test_another_seed_gives_other_weights(gpt: Box) -> None:
    """What the comparison of the tests above would see."""
    for seed in (1, 2):
        ended = train(gpt, *STEPS, f"--seed={seed}", f"--checkpoint-dir=/tmp/seed{seed}")
        assert ended.code == 0, ended.output
    assert any("model" in name for name in differences(gpt, "/tmp/seed1", "/tmp/seed2"))


def test_gpt_continues_from_the_last_complete_checkpoint_after_sigkill(gpt: Box) -> None:
    command = f"{PYTHON} /data/gpt/train.py --device=cpu --max-steps=100000 --eval-interval=1"
    assert stopped(gpt, command, "/tmp/killed", "KILL")[0].code == 137
    # As if it had been killed while it wrote the checkpoint of a later step: its data, but not yet .metadata.
    gpt.run("sh", "-c", "mkdir /tmp/killed/step-00099999; echo half >/tmp/killed/step-00099999/__0_0.distcp")
    last = gpt.run("sh", "-c", "ls -d /tmp/killed/*/.metadata").lines[-1]
    step = int(last.split("step-")[1].split("/")[0])
    ended = train(gpt, "--device=cpu", f"--max-steps={step + 1}", "--checkpoint-dir=/tmp/killed")
    assert ended.code == 0, ended.output
    assert f"from step {step}\n" in ended.output
    assert "step-00099999" not in gpt.run("ls", "/tmp/killed").output, "incomplete checkpoints are removed"


def test_gpt_keeps_two_checkpoints(gpt: Box) -> None:
    ended = train(gpt, "--device=cpu", "--max-steps=9", "--eval-interval=2", "--checkpoint-dir=/tmp/kept")
    assert ended.code == 0, ended.output
    assert gpt.run("ls", "/tmp/kept").lines == ["step-00000008", "step-00000009"]


def test_gpt_trains_in_bfloat16(gpt: Box) -> None:
    for dtype in ("float32", "bfloat16"):
        ended = train(gpt, *STEPS, f"--dtype={dtype}", f"--checkpoint-dir=/tmp/{dtype}")
        assert ended.code == 0, ended.output
    assert any("model" in name for name in differences(gpt, "/tmp/float32", "/tmp/bfloat16"))


def test_gpt_trains_and_resumes_with_torch_xla(gpt: Box) -> None:
    words = ("--model=small", "--dtype=float32", "--eval-interval=10", "--checkpoint-dir=/tmp/xla")
    for steps, first in ((10, 0), (20, 10)):
        ended = train(gpt, *words, f"--max-steps={steps}")
        assert ended.code == 0, ended.output
        assert f"on 1 x xla:0, from step {first}" in ended.output
    assert "sample: " in ended.output


@pytest.mark.parametrize(
    ("word", "says"),
    [("--lr=high", "argument --lr: invalid float value: 'high'"), ("--data=/no", "argument --data: /no is not a file"),
     ("--steps=3", "unrecognized arguments: --steps=3")],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_of_gpt(gpt: Box, word: str, says: str) -> None:
    ended = train(gpt, word)
    assert ended.code == 2
    assert ended.lines[-1] == f"train.py: error: {says}"
