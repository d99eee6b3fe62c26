"""Source distributions of a user's repository are compiled in a stage of their own, beside the framework.

Two are of the package index, one with setup.py alone and one that Cython compiles. One is made here: it uses OpenMP,
runs ninja in its setup.py, and keeps a variable of its build.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.package_index import PackageIndex, source_distribution
from trainyard import settings
from trainyard.oci import docker_engine

Finished = subprocess.CompletedProcess[str]

SETUP = """
import os, subprocess
from setuptools import Extension, setup
subprocess.run(["ninja", "--version"], check=True)
setup(name="fast", version="2.0", ext_modules=[Extension(
    "fast", ["fast.c"], extra_compile_args=["-fopenmp"], extra_link_args=["-fopenmp"],
    define_macros=[("VALUE", '"%s"' % os.environ["FAST_VALUE"])],
)])
"""

SOURCE = """
#include <Python.h>
#include <omp.h>
static PyModuleDef fast = {PyModuleDef_HEAD_INIT, "fast"};
PyMODINIT_FUNC PyInit_fast(void) {
    PyObject *module = PyModule_Create(&fast);
    PyModule_AddStringConstant(module, "value", VALUE);
    PyModule_AddIntConstant(module, "threads", omp_get_max_threads());
    return module;
}
"""

FILES = {
    "PKG-INFO": "Metadata-Version: 2.2\nName: fast\nVersion: 2.0\n",
    "pyproject.toml": '[build-system]\nrequires = ["setuptools", "numpy", "tensorflow-cpu"]\n'
    'build-backend = "setuptools.build_meta"\n',
    "setup.py": SETUP,
    "fast.c": SOURCE,
}

DOCUMENT = """\
extends: tf-cpu
name: compiled
run: python train.py
requirements: []
build:
  packages: [g++]
  sources: [fast, pyahocorasick==2.1.0, cymem==2.0.11]
  requires: [ninja]
  environment: {{FAST_VALUE: {value}}}
"""

TRAIN = """
import ahocorasick, cymem.cymem, fast, json, shutil
from importlib.metadata import packages_distributions
automaton = ahocorasick.Automaton()
automaton.add_word("layer", 1)
automaton.make_automaton()
print(json.dumps({
    "files": [ahocorasick.__file__, cymem.cymem.__file__, fast.__file__],
    "found": list(automaton.iter("the layer")),
    "size": cymem.cymem.Pool().size,
    "value": fast.value,
    "threads": fast.threads,
    "programs": [name for name in ("gcc", "g++", "x86_64-linux-gnu-gcc", "ninja", "cython") if shutil.which(name)],
    "modules": sorted({"Cython", "ninja"} & set(packages_distributions())),
}))
"""


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """Address of an index with fast alone, on the engine's bridge, where builds reach it."""
    network = docker_engine.client().networks.get("bridge").attrs["IPAM"]["Config"][0]
    own = PackageIndex()
    own.address = network.get("Gateway") or network["Subnet"].rpartition(".")[0] + ".1"
    with own as found:
        found.add(source_distribution("fast", "2.0", FILES))
        yield found.url


@pytest.fixture(scope="module")
def build(index: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Finished]]:
    """``build("1", "system: [libgomp1]")``: ``trainyard build`` of the repository."""
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "uv.toml").write_text(f'[[index]]\nname = "own"\nurl = "{index}"\n', encoding="utf-8")
    environment = settings.environment(TRAINYARD_BUILD=str(tmp_path_factory.mktemp("state")))

    def run(value: str, more: str = "") -> Finished:
        (folder / "trainyard.yaml").write_text(DOCUMENT.format(value=value) + more, encoding="utf-8")
        command = [sys.executable, "-m", "trainyard", "build", "--json"]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False
        )

    yield run
    docker_engine.untag("trainyard:compiled-candidate")


def seen() -> dict[str, object]:
    """What train.py prints in the image."""
    command = ["docker", "run", "--rm", "trainyard:compiled-candidate"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


def layers() -> list[str]:
    return list(docker_engine.client().images.get("trainyard:compiled-candidate").attrs["RootFS"]["Layers"])


def test_extensions_are_compiled_and_the_image_has_no_compiler(build: Callable[..., Finished]) -> None:
    """One test, since every build of it takes a minute: what fails, what works, and what another variable changes."""
    lacking = build("one")
    assert lacking.returncode == 1
    assert lacking.stderr.splitlines()[-1].endswith(
        "compiled: the image lacks libgomp.so.1, which fast.cpython-311-x86_64-linux-gnu.so needs: "
        "add libgomp1 to 'system:'"
    )

    built = build("one", "system: [libgomp1]\n")
    assert built.returncode == 0, built.stderr[-3000:]
    found = seen()
    assert [str(file).rpartition("/")[2] for file in found.pop("files")] == [  # type: ignore[attr-defined]
        f"{name}.cpython-311-x86_64-linux-gnu.so" for name in ("ahocorasick", "cymem", "fast")
    ]
    assert found.pop("threads") >= 1  # type: ignore[operator]
    assert found == {"found": [[8, 1]], "size": 0, "value": "one", "programs": [], "modules": []}

    before = layers()
    assert build("two", "system: [libgomp1]\n").returncode == 0
    assert seen()["value"] == "two"
    changed = set(layers()) ^ set(before)
    assert len(layers()) == len(before) and len(changed) == 2, "one layer, that of the stage 'compiled'"
