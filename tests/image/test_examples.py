"""The repositories in examples/: train.py of examples/gpt alone, and both of them as a user has them.

The training tests run in the xla image, which every run of the tests builds, with ``--device cpu`` unless they say so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import wheels
from tests.image.trainer_box import PYTHON, Box, Ended, box
from trainyard.oci import docker_engine
from trainyard.settings import ROOT

GPT, KERAS = ROOT / "examples/gpt", ROOT / "examples/keras"
BuiltImage = Callable[[str], str]

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
def gpt(built_image: BuiltImage) -> Iterator[Box]:
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
    ended = train(gpt, *STEPS, "--dtype=bfloat16", "--checkpoint-dir=/tmp/bfloat16")
    assert ended.code == 0, ended.output
    assert any("model" in name for name in differences(gpt, "/tmp/straight1", "/tmp/bfloat16"))


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


# --- as users have them: a copy of the repository, and the installed package ------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trainyard``, installed from its wheel."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = wheels.build(wheels.clone(folder / "clone"), "wheel", folder / "dist")
    return wheels.install(wheel, folder / "environment")


def copy(example: Path, folder: Path) -> Path:
    """A copy of an example, in a new git repository."""
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__", "checkpoints", "output"))
    wheels.run("git", "init", "--quiet", cwd=folder)
    return folder


def labels(reference: str) -> dict[str, str]:
    return dict(docker_engine.client().images.get(reference).labels)


@pytest.fixture(scope="module")
def images() -> Iterator[list[str]]:
    """Names of images that are removed after the tests."""
    made: list[str] = []
    yield made
    for name in made:
        for image in docker_engine.client().images.list(filters={"label": [f"io.trainyard.target={name}"]}):
            for tag in image.tags:
                docker_engine.client().images.remove(tag, force=True)


def made(command: Path, folder: Path, images: list[str]) -> dict[str, str]:
    """The labels of the image that ``trainyard image`` makes of the repository in ``folder``."""
    images.append(folder.name)
    state = {"XDG_STATE_HOME": f"{folder}-state"}
    wheels.run(command, "lock", "--upgrade", cwd=folder, **state)
    built = json.loads(wheels.run(command, "image", "--json", cwd=folder, **state))
    return labels(built["digest"])


def test_keras_becomes_an_image_that_has_trained(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    built_image("tf-cpu")  # so that its layers are there
    found = made(command, copy(KERAS, tmp_path / "example-keras"), images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("tf-cpu", "trained")


def test_gpt_becomes_an_image_that_has_trained(
    built_image: BuiltImage, command: Path, images: list[str], tmp_path: Path
) -> None:
    """With PyTorch/XLA, as its trainyard.yaml proposes for TPUs: every run of the tests builds that target."""
    built_image("xla")
    folder = copy(GPT, tmp_path / "example-gpt")
    text = (folder / "trainyard.yaml").read_text()
    changed = text.replace("extends: cpu ", "extends: xla ").replace("[--model", "[--device=cpu, --model")
    assert changed.count("xla ") == 1 and changed.count("--device=cpu") == 1
    (folder / "trainyard.yaml").write_text(changed)
    found = made(command, folder, images)
    assert (found["io.trainyard.extends"], found["io.trainyard.tested"]) == ("xla", "trained")
