"""Build and train in images of users' repositories with other versions of a framework than the catalogue's.

    python -m benchmarks.versions                     all, about 4 minutes each
    python -m benchmarks.versions torch==2.9.1        some
    python -m benchmarks.versions --save              also writes docs/versions.json, which docs/images.md shows

Each repository has a requirements.txt with the version, and a command that trains a small model and fails if that does
not learn, or if the framework has another version. `trainyard init`, `trainyard image` and `trainyard run` are run as a
user would, with nothing else written. The image is removed afterwards; its build cache stays, up to 15 GB a
version: `trainyard clean --cache` empties it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from trainyard.common.settings import ROOT
from trainyard.spec import model

RESULTS = ROOT / "docs" / "versions.json"

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

_TORCH = """\
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

_TENSORFLOW = """\
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
_PROGRAMS = {"cpu": _TORCH, "tf-cpu": _TENSORFLOW}


@dataclass(frozen=True)
class Result:
    """Describe an image that was built and trained in.

    Attributes:
        packages: the framework's, as ``torch==2.9.1``.
        size: bytes of its files, unpacked.
        seconds: of `trainyard image`.
    """

    target: str
    requirement: str
    packages: list[str]
    python: str
    base: str
    size: int
    seconds: float
    day: str


def build_and_train(target: str, requirement: str, folder: Path, *, init: bool = True) -> Result:
    """Make an image of a repository, train in it, and remove it.

    Args:
        folder: empty; the repository is made in it.
        init: write trainyard.yaml with `trainyard init`.
    Raises:
        RuntimeError: a command failed, or trained with another version; the message ends with its last lines.
    """
    name = "versions-" + "".join(letter if letter.isalnum() else "-" for letter in requirement).strip("-").lower()
    while "--" in name:
        name = name.replace("--", "-")
    (folder / "train.py").write_text(_PROGRAMS[target], encoding="utf-8")
    (folder / "requirements.txt").write_text(f"{requirement}\n", encoding="utf-8")
    _run(folder, "git", "init", "-q", ".")
    if init:
        _trainyard(folder, "init", "--target", target, "--name", name)
    started = time.monotonic()
    try:
        image = json.loads(_trainyard(folder, "image", "--json"))
        seconds = time.monotonic() - started
        spec = model.load(str(folder))
        if not Requirement(requirement).specifier.contains(spec.version):
            raise RuntimeError(f"{requirement}: the lock has {spec.version}")
        trained = _trainyard(folder, "run")
        if f" {spec.version} loss " not in trained:
            raise RuntimeError(f"{requirement}: trained with another version: {trained[-300:]}")
        day = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
        return Result(
            target,
            requirement,
            spec.packages,
            spec.python_version,
            spec.base,
            int(image["verify"]["size"]),
            round(seconds),
            day,
        )
    finally:
        tags = _run(folder, "docker", "images", "--quiet", "--filter", f"label=io.trainyard.target={name}").split()
        if tags:
            _run(folder, "docker", "rmi", "--force", *dict.fromkeys(tags))


def _trainyard(folder: Path, *words: str) -> str:
    return _run(folder, sys.executable, "-m", "trainyard", *words)


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return done.stdout


def _save(result: Result) -> None:
    """Replace the result of a requirement in docs/versions.json, which has the order of :data:`VERSIONS`."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    by_requirement = {row["requirement"]: row for row in [*known, asdict(result)]}
    order = [requirement for requirements in VERSIONS.values() for requirement in requirements]
    rows = [by_requirement[requirement] for requirement in order if requirement in by_requirement]
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Print a line for each version; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirements", nargs="*", help="of VERSIONS; all without")
    parser.add_argument("--save", action="store_true", help="write docs/versions.json")
    args = parser.parse_args()
    failed = 0
    for target, requirements in VERSIONS.items():
        for requirement in requirements:
            if args.requirements and requirement not in args.requirements:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = build_and_train(target, requirement, Path(folder))
                except RuntimeError as error:
                    failed += 1
                    print(f"{requirement}: FAILED: {error}", flush=True)
                    continue
            print(
                f"{requirement}: {', '.join(result.packages)}, Python {result.python}: {result.seconds} s", flush=True
            )
            if args.save:
                _save(result)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
