"""Repositories with a training script: a small one, examples/lora, and source distributions of the package index.

Those of others are unmodified, and were chosen after the code that handles them was written, for three ways in which
repositories are laid out.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import wheels
from trainyard.common.settings import ROOT


@dataclass(frozen=True)
class Repository:
    """A source distribution, and what its user does with it.

    Attributes:
        version, sha256: of the source distribution.
        target: of ``trainyard init``, ``options``: its other ones.
        by_hand: lines of trainyard.yaml -> what the user writes instead; an empty key stands for the end of the file.
        machine: options of ``trainyard job``: what the job runs on.
        arguments: of the command, in ``trainyard run`` and in the job.
        files: of a repository that is written here: path -> text.
        trained: part of a line that it prints.
        edit: a file, a part of one of its lines, and what takes its place; ``edited``: what it prints then.
    """

    name: str
    version: str
    sha256: str
    target: str
    options: tuple[str, ...]
    by_hand: dict[str, str]
    machine: tuple[str, ...]
    arguments: tuple[str, ...]
    trained: str
    edit: tuple[str, str, str]
    edited: str
    files: Mapping[str, str] = field(default_factory=dict)

    def download(self, folder: Path) -> Path:
        """Write it into ``folder``, or download it with pip and unpack it there; the folder of the repository."""
        if self.files:
            for name, text in self.files.items():
                (folder / self.name / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / self.name / name).write_text(text, encoding="utf-8")
            return folder / self.name
        wanted = folder / "sdist.txt"
        wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", self.name)
        wheels.run(*pip, "--require-hashes", "--requirement", wanted, "--dest", folder, cwd=folder)
        (found,) = folder.glob("*.tar.gz")
        with tarfile.open(found) as archive:
            archive.extractall(folder, filter="data")
        return folder / f"{self.name}-{self.version}"

    def write_by_hand(self, file: Path) -> None:
        """Change a trainyard.yaml as its user does."""
        text = file.read_text(encoding="utf-8")
        for line, other in self.by_hand.items():
            assert text.count(line) == 1 or not line, f"{line!r} is not one line of:\n{text}"
            text = text.replace(line, other) if line else text + other
        file.write_text(text, encoding="utf-8")

    def change_a_line(self, folder: Path) -> None:
        """Edit one line of the code."""
        name, part, other = self.edit
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(part) == 1
        (folder / name).write_text(text.replace(part, other), encoding="utf-8")


#: A src layout with a command, a requirement and code that trains with the framework of tests/miniature.
SMALL = Repository(
    "smallnet",
    "",
    "",
    "mini",
    ("--run=smallnet",),
    {"": "smoke:\n  args: [--steps=50]\n  expect: loss 0\n"},
    (),
    ("--steps=20",),
    "loss 0.",
    ("src/smallnet/train.py", '"loss"', '"edited: loss"'),
    "edited: loss 0.",
    {
        "pyproject.toml": """\
[project]
name = "smallnet"
version = "1.0"
license = "MIT"
requires-python = ">=3.11"
dependencies = ["numpy", "torch", "einops"]

[project.scripts]
smallnet = "smallnet.train:main"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
""",
        "src/smallnet/__init__.py": "",
        "src/smallnet/train.py": """\
import argparse
import pathlib

import einops
import numpy as np
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    labels = np.arange(40) % 4
    pathlib.Path("../data/cache").write_text("as torchvision's examples do")
    images = einops.repeat(np.eye(4, dtype=np.uint8)[labels] * 255, "n p -> n (p k)", k=2)
    model = torch.Classifier(8, 4)
    for _ in range(steps):
        loss, gradient = model.gradient(images, labels)
        model.weights -= 0.05 * gradient
    print("loss", round(loss / len(labels), 4))
""",
    },
)

#: A flat layout, 26 MB of examples, a dynamic version; the examples train with any of five frameworks.
DEEPXDE = Repository(
    "deepxde",
    "1.14.0",
    "7cbd7e394a35d8d4c640e2c7b2c6f5dce1698269507769bf48613b710e06f0b7",
    "tf-cpu",
    ("--run=python examples/function/func.py",),
    {
        # Which framework it uses is a variable, and what its TensorFlow part imports is in no list of the project.
        "requirements: pyproject.toml\n": "requirements: {file: pyproject.toml, packages: [tensorflow-probability, "
        "tf-keras]}\nenvironment: {DDE_BACKEND: tensorflow}\n",
        # It has no options: the whole training is its smoke test.
        "": "smoke: {expect: Best model at step}\n",
    },
    (),
    (),
    "Best model at step",
    ("deepxde/model.py", '"Training model...\\n"', '"Training of the edited model...\\n"'),
    "Training of the edited model...",
)

#: A flat layout with scripts in examples/, whose imports the project does not list.
E3NN = Repository(
    "e3nn",
    "0.5.6",
    "e28aa6f67d9c090300d390f9e08fb57211d60562971ae3237e30023ff17093b1",
    "xla",
    ("--run=python examples/tetris.py",),
    {"": "smoke: {expect: accuracy}\n"},
    ("--accelerator=v5litepod-1",),
    (),
    "Equivariance error",
    ("examples/tetris.py", "Testing equivariance directly...", "Testing the edited equivariance..."),
    "Testing the edited equivariance...",
)

#: A src layout with a command of [project.scripts], which has subcommands, and package data.
PYKEEN = Repository(
    "pykeen",
    "1.11.1",
    "702cb807c354a0d2fce0f0593db46e1fe15fba2a37e92bbb18cd1b9d0a85fe13",
    "xla",
    (),
    {
        "run: pykeen\n": "run: pykeen train transe --dataset nations\n",
        "": "smoke: {args: [--number-epochs=2], expect: hits_at_10}\n",
    },
    ("--accelerator=v5litepod-1",),
    ("--number-epochs=3",),
    "hits_at_10",
    ("src/pykeen/models/cli/builders.py", 'f"Training {model.__name__} with "', 'f"Edited: {model.__name__} with "'),
    "Edited: TransE with",
)

_LORA = ROOT / "examples" / "lora"

#: A script with a pyproject.toml, transformers and peft, and a checkpoint from the package index.
LORA = Repository(
    "lora",
    "",
    "",
    "cpu",
    (),
    {
        "": 'environment: {TQDM_DISABLE: "1"}\n'
        "smoke:\n"
        "  args: [--max_steps=6, --logging_steps=1, --block_size=64, --per_device_train_batch_size=1,"
        " --output_dir=/output]\n"
        "  expect: after 6 steps\n"
        "  resume: true\n"
    },
    (),
    ("--max_steps=2", "--block_size=64", "--per_device_train_batch_size=1"),
    "eval loss ",
    ("train.py", 'f"eval loss {first', 'f"edited: eval loss {first'),
    "edited: eval loss ",
    {
        path.relative_to(_LORA).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(_LORA.rglob("*"))
        if path.suffix in (".py", ".toml", ".txt")
    },
)

#: A script that needs Flax, trained on two machines in the job.
FLAX = Repository(
    "flaxline",
    "",
    "",
    "jax",
    (),
    {"": "smoke: {args: [--steps=2], expect: loss}\n"},
    ("--workers=2",),
    ("--steps=100",),
    "loss 0.0",
    ("train.py", 'f"process', 'f"edited: process'),
    "edited: process 0 of 2, 2 devices",
    {
        "requirements.txt": "flax\noptax\n",
        "train.py": """\
import argparse
import os

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@nnx.jit
def step(model, optimizer, x):
    def squares(model):
        return ((model(x) - 3 * x - 1) ** 2).mean()

    loss, gradients = nnx.value_and_grad(squares)(model)
    optimizer.update(model, gradients)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        count, number = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(address, count, number)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    x = jnp.linspace(-1, 1, 64)[:, None]
    for _ in range(steps):
        loss = step(model, optimizer, x)
    where = f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices"
    print(f"{where}: loss {float(loss):.5f}", flush=True)
""",
    },
)

#: Minutes of training, in images of GB.
LONG = (DEEPXDE, E3NN, PYKEEN, LORA, FLAX)
