"""Targets whose framework has a few kilobytes: what they are made of, and a checkout whose catalogue has them.

The folders ``torch`` and ``torch_xla`` are the modules of wheels, which a package index on this host serves; with
``digits.py``, a trainer that needs no other framework, an image of such a target trains in seconds. Everything but the
framework is that of the project: commands, bases, templates, launcher, numpy's wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import wheels
from tests.engine import ENGINE
from tests.fakes import package_index
from tests.fakes.package_index import PackageIndex

HERE = Path(__file__).resolve().parent

#: Lines that targets share unless they extend another. numpy's version is the one of images/requirements.
COMMON = """\
requirements: [{numpy}]
trainers: {{package: torch, default: digits}}
budget: {{size: 700 MB}}
smoke: {{trainer: digits, accuracy: 0.9}}
"""

#: Name of a target -> the other lines of its image.yaml.
TARGETS = {
    "mini": """\
summary: A framework of a few kilobytes
base: debian-13
compiler: false
platforms: [linux/amd64, linux/arm64]
framework: {name: torch, packages: [torch==2.9.1], index: miniature}
""",
    "mini-strict": """\
extends: mini
summary: The same, of which more is asked than it learns
smoke: {trainer: digits, accuracy: 0.999}
""",
    "mini-xla": """\
summary: The same as PyTorch/XLA
base: debian-12
compiler: false
framework: {name: torch_xla, packages: [torch==2.9.1, "torch-xla[tpu]==2.9.0", libtpu==0.0.21], index: miniature}
accelerator: tpu
""",
    "mini-nightly": """\
summary: The same in a base that holds it
base: xla-nightly
nightly: true
framework: {name: torch_xla}
accelerator: tpu
""",
}

#: Names of the versions of those targets, and of the repositories that extend them, in tests.
DERIVED = ("mini-2.8", "mini-compiler", "mini-older")

#: Appended to images/indexes.yaml.
INDEX = "miniature:\n  url: {url}\n  packages: [torch, torch-xla, libtpu]\n"


def torch(version: str) -> tuple[str, bytes]:
    """Return file name and bytes of the framework's wheel."""
    text = f"__version__ = {version!r}\ncuda = None\n"
    return package_index.wheel("torch", version, ("numpy",), modules=_modules("torch") | {"torch/version.py": text})


def torch_xla(version: str) -> tuple[str, bytes]:
    """Return file name and bytes of the wheel that poses as PyTorch/XLA."""
    modules = _modules("torch_xla") | {"torch_xla/version.py": f"__version__ = {version!r}\n"}
    return package_index.wheel("torch_xla", version, ("torch", 'libtpu==0.0.21; extra == "tpu"'), modules=modules)


def _modules(name: str) -> dict[str, str]:
    """Return path in a wheel -> text of a folder's modules."""
    return {
        str(path.relative_to(HERE)): path.read_text(encoding="utf-8") for path in sorted((HERE / name).rglob("*.py"))
    }


class Miniature:
    """A checkout of the working tree whose catalogue has the targets above, and the index of their framework.

    Attributes:
        folder: the checkout.
        index: has the framework's wheels.
    """

    def __init__(self, folder: Path, index: PackageIndex) -> None:
        self.folder = folder
        self.index = index

    def call(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``trainyard`` of the checkout."""
        command = [sys.executable, "-m", "trainyard", *words]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
        environment = inherited | {"PYTHONPATH": str(self.folder / "scripts")} | variables
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def run(self, *words: str, **variables: str) -> str:
        """Run ``trainyard``, which must succeed; return its standard output."""
        done = self.call(*words, **variables)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
        return done.stdout

    def json(self, *words: str, **variables: str) -> Any:
        """Run ``trainyard`` with ``--json``, which must succeed; return its result."""
        return json.loads(self.run(*words, "--json", **variables))

    def add(self, *targets: str, **variables: str) -> None:
        """Add targets to the catalogue, lock them, and render what follows from that."""
        images = self.folder / "images"
        text = (images / "requirements" / "torch.in").read_text(encoding="utf-8")
        numpy = next(line.split()[0] for line in text.splitlines() if line.startswith("numpy=="))
        for name in targets:
            (images / name).mkdir()
            rest = "" if TARGETS[name].startswith("extends:") else COMMON.format(numpy=numpy)
            (images / name / "image.yaml").write_text(TARGETS[name] + rest, encoding="utf-8")
            self.run("lock", name, **variables)
        self.run("render", **variables)

    def built(self, target: str) -> str:
        """Build a target, which is added to the catalogue if it is not in it; return its image's reference."""
        if not (self.folder / "images" / target).exists():
            self.add(target)
        self.run("build", target)
        return f"trainyard:{target}-candidate"


@contextmanager
def checkout(folder: Path, address: str) -> Iterator[Miniature]:
    """Yield the checkout, made in a new folder; its index listens on an address of this host."""
    index = PackageIndex()
    index.address = address
    with index:
        index.add(torch("2.9.1"), torch_xla("2.9.0"), package_index.wheel("libtpu", "0.0.21"))
        made = Miniature(wheels.clone(folder / "checkout"), index)
        with (made.folder / "images" / "indexes.yaml").open("a", encoding="utf-8") as file:
            file.write(INDEX.format(url=index.url))
        shutil.copy(HERE / "digits.py", made.folder / "trainers" / "torch")
        yield made


def remove_images() -> None:
    """Remove the images of all targets above, their versions and repositories from the engine."""
    for name in (*TARGETS, *DERIVED):
        for image in ENGINE.images(label=f"io.trainyard.target={name}"):
            ENGINE.client.images.remove(str(image.id), force=True)
