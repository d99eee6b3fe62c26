"""Source distributions of a user's repository are compiled in a stage of their own, with the framework mounted.

Three are of the package index: one with setup.py alone, one that Cython compiles, and torchsort, whose setup.py
imports torch and does not declare it. Three are made here: fast uses OpenMP, runs ninja in its setup.py, and keeps a
variable of its build; squares and scale are extensions of torch in C++ and CUDA, with the classes of
https://docs.pytorch.org/docs/stable/cpp_extension.html.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import workspaces
from tests.engine import ENGINE
from tests.fakes.package_index import PackageIndex, source_distribution
from trainyard.common import settings
from trainyard.spec.model import load

pytestmark = pytest.mark.concurrent

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

TORCH_SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, {extension}
setup(name="{name}", version="1.0", packages=["{name}"], ext_modules=[{extension}("{name}._C", {sources})],
      cmdclass={{"build_ext": BuildExtension}})
"""

SQUARES = """
#include <torch/extension.h>
torch::Tensor sum(const torch::Tensor& values) { return (values * values).sum(); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("sum", &sum); }
"""

KERNEL = """
__global__ void multiply(float* values, float factor, int count) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] *= factor;
}
cudaError_t launch(float* values, float factor, int count) {
    multiply<<<(count + 255) / 256, 256>>>(values, factor, count);
    return cudaGetLastError();
}
"""

SCALE = """
#include <torch/extension.h>
#include <cuda_runtime.h>
cudaError_t launch(float* values, float factor, int count);
void scale(torch::Tensor values, double factor) {
    auto error = launch(values.data_ptr<float>(), factor, values.numel());
    TORCH_CHECK(error == cudaSuccess, "launch: ", cudaGetErrorName(error));
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("scale", &scale); }
"""


def of_torch(name: str, extension: str, sources: dict[str, str]) -> dict[str, str]:
    """The files of a source distribution with one extension of torch."""
    return {
        "PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: 1.0\nRequires-Dist: torch\n",
        "pyproject.toml": '[build-system]\nrequires = ["setuptools", "torch"]\n'
        'build-backend = "setuptools.build_meta"\n',
        "setup.py": TORCH_SETUP.format(name=name, extension=extension, sources=list(sources)),
        f"{name}/__init__.py": "import torch\nfrom . import _C\n",
    } | sources


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


#: Suffix of extension modules in the image.
SUFFIX = f"cpython-{load('tf-cpu').python_version.replace('.', '')}-x86_64-linux-gnu.so"

#: What is needed to compile for GPUs; the version is that of the image's CUDA, which the test fills in.
CUDA_COMPILER = "requires: [nvidia-cuda-nvcc=={0}, nvidia-cuda-crt=={0}, nvidia-nvvm=={0}]"


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """Address of an index with what is made here, on the engine's bridge, where builds reach it."""
    network = ENGINE.client.networks.get("bridge").attrs["IPAM"]["Config"][0]
    own = PackageIndex()
    own.address = network.get("Gateway") or network["Subnet"].rpartition(".")[0] + ".1"
    squares = of_torch("squares", "CppExtension", {"squares/ops.cpp": SQUARES})
    scale = of_torch("scale", "CUDAExtension", {"scale/bind.cpp": SCALE, "scale/kernel.cu": KERNEL})
    with own as found:
        found.add(source_distribution("fast", "2.0", FILES))
        found.add(source_distribution("squares", "1.0", squares), source_distribution("scale", "1.0", scale))
        yield found.url


@pytest.fixture
def repository(index: str, tmp_path: Path) -> Path:
    """A user's git repository whose packages may come from ``index``."""
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "uv.toml").write_text(f'[[index]]\nname = "own"\nurl = "{index}"\n', encoding="utf-8")
    return folder


@pytest.fixture
def trainyard(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """``trainyard("build", document)``: the command in the repository with this trainyard.yaml."""
    environment = settings.environment(TRAINYARD_BUILD=str(tmp_path / "state"))

    def run(command: str, document: str) -> Finished:
        (repository / "trainyard.yaml").write_text(document, encoding="utf-8")
        words = [sys.executable, "-m", "trainyard", command]
        return subprocess.run(
            words, cwd=repository, env=environment, capture_output=True, text=True, timeout=1500, check=False
        )

    yield run
    for image in ENGINE.images(label="io.trainyard.target=compiled"):
        for tag in image.tags:
            ENGINE.untag(tag)


def seen() -> dict[str, object]:
    """What train.py prints in the image."""
    command = ["docker", "run", "--rm", "trainyard:compiled-candidate"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


def layers() -> list[str]:
    return list(ENGINE.client.images.get("trainyard:compiled-candidate").attrs["RootFS"]["Layers"])


def test_extensions_are_compiled_and_the_image_has_no_compiler(
    repository: Path, trainyard: Callable[..., Finished], tmp_path: Path
) -> None:
    """One test, since every build of it takes a minute: what fails, what works, and what another variable changes."""
    (repository / "train.py").write_text(TRAIN, encoding="utf-8")
    lacking = trainyard("build", DOCUMENT.format(value="one"))
    assert lacking.returncode == 1
    log = tmp_path / "state" / "compiled" / "build.log"
    assert lacking.stderr.splitlines()[-1].endswith(
        f"compiled: the image lacks libgomp.so.1, which fast.{SUFFIX} needs: add libgomp1 to 'system:' (log: {log})"
    )
    copied = re.findall(r"\[compiled \d+/\d+\] COPY --from=(\S+)", log.read_text(encoding="utf-8"))
    assert not copied, "copies of the framework and the requirements would have gigabytes"

    built = trainyard("build", DOCUMENT.format(value="one") + "system: [libgomp1]\n")
    assert built.returncode == 0, built.stderr[-3000:]
    found = seen()
    assert [str(file).rpartition("/")[2] for file in found.pop("files")] == [  # type: ignore[attr-defined]
        f"{name}.{SUFFIX}" for name in ("ahocorasick", "cymem", "fast")
    ]
    assert found.pop("threads") >= 1  # type: ignore[operator]
    assert found == {"found": [[8, 1]], "size": 0, "value": "one", "programs": [], "modules": []}

    before = layers()
    assert trainyard("build", DOCUMENT.format(value="two") + "system: [libgomp1]\n").returncode == 0
    assert seen()["value"] == "two"
    changed = set(layers()) ^ set(before)
    assert len(layers()) == len(before) and len(changed) == 4, "those of the stages 'compiled' and 'about'"


TORCH_DOCUMENT = """\
extends: cpu
name: compiled
run: python train.py
requirements: []
system: [libgomp1]
smoke: {expect: 'sum 0\\.00, sorted 0 1 2'}
build:
  packages: [g++, ninja-build]
  sources: [squares, torchsort==0.1.9]
"""

TORCH_TRAIN = """
import torch, torchsort
from squares import _C
values = torch.tensor([[2.0, 0.0, 1.0]], requires_grad=True)
order = torchsort.soft_sort(values, regularization_strength=0.01).round()
optimizer = torch.optim.SGD([values], lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    loss = _C.sum(values)
    loss.backward()
    optimizer.step()
print(f"sum {loss.item():.2f}, sorted {' '.join(str(int(one)) for one in order[0])}")
"""


@pytest.mark.big("cpu")
def test_extensions_of_torch_train_whether_or_not_they_declare_torch(
    repository: Path, trainyard: Callable[..., Finished]
) -> None:
    (repository / "train.py").write_text(TORCH_TRAIN, encoding="utf-8")
    built = trainyard("image", TORCH_DOCUMENT)
    assert built.returncode == 0, built.stderr[-3000:]
    labels = ENGINE.client.images.get("trainyard:compiled").labels
    assert labels["io.trainyard.tested"] == "trained"


CUDA_DOCUMENT = """\
extends: gpu
name: compiled
run: python train.py
requirements: []
build:
  packages: [g++, ninja-build]
  sources: [scale]
"""

CUDA_TRAIN = """
import json, torch
from pathlib import Path
from scale import _C
try:
    _C.scale(torch.ones(3), 2.0)
except RuntimeError as error:
    print(json.dumps({
        "said": str(error).splitlines()[0],
        "compiler": [str(one) for one in Path("/opt").rglob("nvcc")],
    }))
"""


@pytest.mark.big("gpu")
def test_cuda_is_compiled_without_a_gpu_and_with_the_compiler_of_the_package_index(
    repository: Path, trainyard: Callable[..., Finished]
) -> None:
    """Without a GPU the compiled kernel is launched, and CUDA's runtime says that there is no device or no driver."""
    (repository / "train.py").write_text(CUDA_TRAIN, encoding="utf-8")
    lacking = trainyard("build", CUDA_DOCUMENT)
    assert "scale==1.0: it compiles CUDA code: " in lacking.stderr.splitlines()[-1]

    version = workspaces.repository(str(repository)).locked().versions["nvidia-cuda-runtime"]
    compiler = f"  {CUDA_COMPILER.format(version)}\n"
    lacking = trainyard("build", CUDA_DOCUMENT + compiler)
    assert "a build has no GPU to compile for: set TORCH_CUDA_ARCH_LIST" in lacking.stderr.splitlines()[-1]

    built = trainyard("build", f"{CUDA_DOCUMENT}{compiler}  environment: {{TORCH_CUDA_ARCH_LIST: '9.0'}}\n")
    assert built.returncode == 0, built.stderr[-3000:]
    found = seen()
    assert found.pop("said") in ("launch: cudaErrorNoDevice", "launch: cudaErrorInsufficientDriver")
    assert found == {"compiler": []}
