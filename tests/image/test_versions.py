"""Users' repositories with other versions of a framework than the catalogue's: built, and trained in.

Each has a requirements.txt with the version, and a command that trains a small model and fails if that does not learn.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from trainyard.spec import model

#: Target -> requirements of the framework that images of it are built with, the oldest first.
VERSIONS = {
    "cpu": (
        "torch==2.4.1",
        "torch==2.5.1",
        "torch>=2.6,<2.7",
        "torch==2.7.1",
        "torch==2.8.0",
        "torch==2.9.1",
        "torch==2.10.0",
        "torch==2.12.1",
        "torch==2.14.1",
    ),
    "tf-cpu": (
        "tensorflow==2.16.2",
        "tensorflow==2.17.1",
        "tensorflow==2.18",
        "tensorflow==2.19.1",
        "tensorflow==2.20.0",
    ),
}

TORCH = """\
import sys

import torch

points, layer = torch.randn(256, 10), torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(50):
    loss = ((layer(points) - points.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"torch {torch.__version__.partition('+')[0]} loss {loss.item():.4f}")
sys.exit(loss.item() > 0.1)
"""

TENSORFLOW = """\
import sys

import numpy
import tensorflow as tf

points = numpy.random.default_rng(0).normal(size=(256, 10)).astype("float32")
net = tf.keras.Sequential([tf.keras.layers.Dense(1)])
net.compile(tf.keras.optimizers.SGD(0.1), "mse")
loss = net.fit(points, points.sum(1), epochs=20, verbose=0).history["loss"][-1]
print(f"tensorflow {tf.__version__} loss {loss:.4f}")
sys.exit(loss > 0.1)
"""

#: Target -> the program that trains.
PROGRAMS = {"cpu": TORCH, "tf-cpu": TENSORFLOW}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-1500:]}"
    return done.stdout


def trainyard(folder: Path, *words: str) -> str:
    return run(folder, sys.executable, "-m", "trainyard", *words)


@pytest.fixture
def name(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A name for the image, which is removed: its build cache has up to 15 GB of a version."""
    found = "versions-" + re.sub(r"[^a-z0-9]+", "-", request.node.callspec.params["requirement"]).strip("-")
    yield found
    tags = run(tmp_path, "docker", "images", "--quiet", "--filter", f"label=io.trainyard.target={found}").split()
    if tags:
        run(tmp_path, "docker", "rmi", "--force", *dict.fromkeys(tags))


CASES = [(target, requirement) for target, requirements in VERSIONS.items() for requirement in requirements]


@pytest.mark.big("cpu", "tf-cpu")
@pytest.mark.parametrize(("target", "requirement"), CASES, ids=[requirement for _, requirement in CASES])
def test_a_repository_trains_with_the_version_that_it_pins(
    target: str, requirement: str, name: str, tmp_path: Path
) -> None:
    """With what `trainyard init` writes alone."""
    (tmp_path / "train.py").write_text(PROGRAMS[target], encoding="utf-8")
    (tmp_path / "requirements.txt").write_text(f"{requirement}\n", encoding="utf-8")
    run(tmp_path, "git", "init", "-q", ".")
    trainyard(tmp_path, "init", "--target", target, "--name", name)
    trainyard(tmp_path, "image")
    version = model.load(str(tmp_path)).version
    assert Requirement(requirement).specifier.contains(version)
    assert f" {version} loss " in trainyard(tmp_path, "run")


@pytest.mark.big("cpu", "tf-cpu")
@pytest.mark.parametrize(("target", "framework"), [("cpu", "torch==2.6.0"), ("tf-cpu", "tensorflow==2.16.2")])
def test_the_trainers_of_the_catalogue_train_with_the_oldest_version_that_they_support(
    target: str, framework: str, tmp_path: Path
) -> None:
    """Without a command, the image is the target with that framework: its smoke test is that of the target's trainer,
    which has to learn, and the image is an environment."""
    (tmp_path / "trainyard.yaml").write_text(
        f"extends: {target}\nname: versions-oldest-{target}\nframework: {framework}\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", "image"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tested   environment" in done.stderr
