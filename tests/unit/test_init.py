"""``trainyard init``: what it proposes for repositories as they are found, and what it never does."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from trainyard.spec import model
from trainyard.workspace import check, init, python_projects

Command = Callable[..., tuple[int, str, str]]

TRAIN = """\
import argparse
import torch
from torch.utils.data import DataLoader
{more}
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    for epoch in range(args.epochs):
        loss = torch.zeros(1, requires_grad=True).sum()
        loss.backward()
        print("loss", loss)

if __name__ == "__main__":
    main()
"""

KERAS = """\
import sys
import keras
{more}
def main():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.fit([[1.0]], [[1.0]])

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``repository({"train.py": "..."})``: a folder with these files, which becomes the current folder."""

    def make(files: dict[str, str], name: str = "project") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        monkeypatch.chdir(folder)
        return folder

    return make


@pytest.fixture
def proposed(repository: Callable[..., Path], trainyard: Command) -> Callable[..., tuple[dict[str, object], str]]:
    """``proposed(files, "--target", "cpu")``: the document that init --yes writes, and what it says."""

    def propose(files: dict[str, str], *words: str) -> tuple[dict[str, object], str]:
        folder = repository(files)
        status, out, err = trainyard("init", "--yes", *words)
        assert status == 0, err
        assert out.splitlines()[0] == str(folder / "trainyard.yaml")
        model.load(None)
        return yaml.safe_load((folder / "trainyard.yaml").read_text(encoding="utf-8")), err

    return propose


Proposed = Callable[..., tuple[dict[str, object], str]]


# Layouts


def test_a_standalone_script_with_requirements(proposed: Proposed) -> None:
    files = {"train.py": TRAIN.format(more="import einops"), "requirements.txt": "torch\neinops>=0.7\n"}
    document, said = proposed(files)
    assert document == {
        "extends": "cpu",
        "name": "project",
        "requirements": "requirements.txt",
        "code": ["."],
        "run": "python train.py",
    }
    assert "smoke: none yet ('trainyard image' tries the command with --epochs=1, and writes what passes" in said
    assert "extends: cpu (train.py:2 uses torch)\n" in said
    assert "requirements: requirements.txt (it lists requirements)\n" in said


def test_a_package_in_src_with_a_command_of_the_project(proposed: Proposed) -> None:
    pyproject = (
        '[project]\nname = "My_Model"\nversion = "1"\ndependencies = ["tqdm>=4"]\n'
        '[project.scripts]\nmy-train = "mymodel.train:main"\nmy-eval = "mymodel.evaluate:main"\n'
    )
    files = {
        "pyproject.toml": pyproject,
        "src/mymodel/__init__.py": "",
        "src/mymodel/train.py": TRAIN.format(more="from mymodel.net import Net\nimport tqdm"),
        "src/mymodel/net.py": "import torch\n",
        "src/mymodel/evaluate.py": TRAIN.format(more=""),
    }
    document, _ = proposed(files)
    assert (document["name"], document["requirements"], document["run"]) == ("my-model", "pyproject.toml", "my-train")


@pytest.mark.parametrize(
    ("files", "run", "path"),
    [
        # Modules that only a folder above the program has, which is a package itself.
        (
            {
                "training/__init__.py": "",
                "training/swin/__init__.py": "",
                "training/swin/net.py": "import torch\n",
                "training/swin/train.py": TRAIN.format(more="from swin.net import Net"),
            },
            "python -m training.swin.train",
            "/workspace/training",
        ),
        # The folder of the module itself.
        (
            {"deep/pack/__init__.py": "", "deep/pack/train.py": TRAIN.format(more="from pack import net")}
            | {"deep/pack/net.py": "import torch\n"},
            "python -m pack.train",
            "/workspace/deep",
        ),
        # How the documents start it.
        (
            {
                "scripts/train.py": TRAIN.format(more=""),
                "README.md": "    torchrun --nproc_per_node=8 -m scripts.train\n",
            },
            "python -m scripts.train",
            None,
        ),
        (
            {"pack/__init__.py": "", "pack/train.py": TRAIN.format(more="import beside"), "pack/beside.py": ""}
            | {"README.md": "Run `python pack/train.py --epochs 3`.\n"},
            "python pack/train.py",
            None,
        ),
        # A module of the package that has the name of one of Python's.
        (
            {"src/pack/__init__.py": "", "src/pack/train.py": TRAIN.format(more="from typing import Any")}
            | {"src/pack/typing.py": "from typing import *\n"},
            "python -m pack.train",
            None,
        ),
    ],
)
def test_a_program_is_started_as_its_documents_and_imports_need_it(
    proposed: Proposed, files: dict[str, str], run: str, path: str | None
) -> None:
    document, said = proposed(files)
    assert document["run"] == run
    assert document.get("environment") == ({"PYTHONPATH": path} if path else None)
    assert "add the package" not in said


def test_a_module_of_a_package_is_run_with_m(proposed: Proposed) -> None:
    files = {
        "src/mymodel/__init__.py": "",
        "src/mymodel/train.py": TRAIN.format(more="from . import net"),
        "src/mymodel/net.py": "import torch\n",
    }
    assert proposed(files)[0]["run"] == "python -m mymodel.train"


def test_a_package_with_a_main_module(proposed: Proposed) -> None:
    files = {"trainer/__init__.py": "", "trainer/__main__.py": TRAIN.format(more="")}
    assert proposed(files)[0]["run"] == "python -m trainer"


@pytest.mark.parametrize(
    ("own", "requirements"),
    [
        (
            {"setup.py": "raise SystemExit('it ran')\n", "setup.cfg": "[options]\ninstall_requires = pandas\n"},
            "setup.py",
        ),
        (
            {
                "pyproject.toml": "[tool.poetry.dependencies]\npandas = '^2'\n[build-system]\n"
                "requires = ['poetry-core']\n"
                "build-backend = 'poetry.core.masonry.api'\n"
            },
            "pyproject.toml",
        ),
    ],
)
def test_what_only_a_build_backend_tells_is_left_to_lock(
    proposed: Proposed, own: dict[str, str], requirements: str
) -> None:
    files = {
        **own,
        "flat/__init__.py": "",
        "flat/fit.py": KERAS.format(more="import pandas"),
    }
    document, said = proposed(files)
    assert (document["extends"], document["name"], document["run"]) == ("tf-cpu", "project", "python -m flat.fit")
    assert document.get("requirements") == requirements
    assert "tells name, version, dependencies and scripts: 'trainyard lock' asks it, in a container" in said
    assert "smoke" not in document


ENVIRONMENT = """\
name: x
channels: [conda-forge]
dependencies:
  - python={python}
  - pytorch=2.4
  - conda-forge::tabulate
  - numpy>=1.26
  - scikit-learn=1.5.2=py311h123_0
  - pandas 2.*
  - ffmpeg
  - torchaudio
  - own-lib
  - _libgcc_mutex=0.1=main
  - pip
  - pip:
    - einops>=0.7
    - -e .
"""


def test_what_a_conda_environment_and_the_code_name_is_required(proposed: Proposed) -> None:
    train = TRAIN.format(more="import tabulate, numpy, sklearn, pandas, scipy, torchaudio, own_lib\n")
    document, said = proposed({"environment.yml": ENVIRONMENT.format(python="3.11"), "train.py": train})
    assert document["requirements"] == [
        "einops>=0.7",
        "tabulate",
        "scikit-learn==1.5.2.*",
        "pandas==2.*",
        "torchaudio",
        "own-lib",
        "scipy",
    ]
    assert document["base"] == "debian-12"
    assert "base: debian-12 (environment.yml:4 asks for python=3.11)\n" in said
    assert re.search(r"environment.yml:5 lists torch==2.4.\*: the image has [\d.]+, unless 'framework: ", said)
    assert "environment.yml: conda packages are not installed if the code is not known to import them: ffmpeg\n" in said
    assert "numpy" not in said


def test_condas_package_with_the_name_of_a_module_is_the_modules(proposed: Proposed) -> None:
    files = {
        "train.py": "import modelcif\n" + TRAIN.format(more=""),
        "environment.yml": "dependencies:\n  - modelcif=0.7\n  - pip:\n    - einops\n    - -e .\n"
        "    - git+https://github.com/NVIDIA/dllogger.git\n",
    }
    document, said = proposed(files)
    assert document["requirements"] == ["einops", "modelcif==0.7.*"]
    assert "environment.yml: lists 'git+https://github.com/NVIDIA/dllogger.git' for pip, which is not read" in said
    assert "'-e .'" not in said


def test_a_module_that_python_has_no_longer_chooses_a_base_with_an_earlier_one(
    proposed: Proposed, trainyard: Command
) -> None:
    document, said = proposed({"train.py": "from uu import decode\n" + TRAIN.format(more="")})
    assert document["base"] == "debian-12"
    assert "base: debian-12 (train.py:1 imports uu, which Python 3.13 has no longer)\n" in said
    text = Path("trainyard.yaml").read_text(encoding="utf-8")
    Path("trainyard.yaml").write_text(text.replace("base: debian-12", "base: debian-13"), encoding="utf-8")
    said = trainyard("check")[2]
    assert "train.py:1 imports uu, which Python 3.13 has no longer: 'base' chooses an earlier one" in said


@pytest.mark.parametrize(
    ("python", "said"), [("3.13.2", ""), ("3.9", "asks for python=3.9: the image has Python 3.13, and the bases are ")]
)
def test_a_python_of_conda_that_no_other_base_has_leaves_the_targets(
    proposed: Proposed, python: str, said: str
) -> None:
    document, err = proposed({"environment.yml": ENVIRONMENT.format(python=python), "train.py": TRAIN.format(more="")})
    assert "base" not in document
    assert said in err
    assert ("asks for python" in err) == bool(said)


@pytest.mark.parametrize(
    ("files", "base", "why"),
    [
        ({".python-version": "3.12\n"}, "python-3.12", ".python-version asks for Python 3.12"),
        ({".python-version": "# pyenv\ncpython-3.10.4\n"}, "python-3.10", ".python-version asks for Python 3.10"),
        ({".python-version": "pypy3.10\nmy-env\n3.13.1\n"}, "", ""),
        ({"runtime.txt": "python-3.11.9\n"}, "debian-12", "runtime.txt asks for Python 3.11"),
        ({"python": ">=3.12,<3.13"}, "python-3.12", "pyproject.toml requires Python >=3.12,<3.13"),
        ({"python": ">=3.10"}, "", ""),
        ({"python": ">=3.12", ".python-version": "3.14"}, "python-3.14", ".python-version asks for Python 3.14"),
        ({"python": ">=3.12", ".python-version": "3.11"}, "", ".python-version asks for Python 3.11: the image has"),
    ],
)
def test_the_base_has_the_python_that_files_of_the_repository_ask_for(
    proposed: Proposed, files: dict[str, str], base: str, why: str
) -> None:
    given = {name: text for name, text in files.items() if name != "python"} | {"train.py": TRAIN.format(more="")}
    if python := files.get("python"):
        given["pyproject.toml"] = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = "{python}"\n'
    document, said = proposed(given)
    assert document.get("base", "") == base
    assert (f"base: {base} ({why})\n" if base else why) in said


#: An entry of [tool.poetry.dependencies] -> the requirements it becomes. The ranges are those of the tables at
#: https://python-poetry.org/docs/dependency-specification/.
POETRY = {
    'x = "^1.2.3"': ["x>=1.2.3,<2.0.0"],
    'x = "^1.2"': ["x>=1.2,<2.0"],
    'x = "^1"': ["x>=1,<2"],
    'x = "^0.2.3"': ["x>=0.2.3,<0.3.0"],
    'x = "^0.0.3"': ["x>=0.0.3,<0.0.4"],
    'x = "^0.0"': ["x>=0.0,<0.1"],
    'x = "^0"': ["x>=0,<1"],
    'x = "~1.2.3"': ["x>=1.2.3,<1.3.0"],
    'x = "~1.2"': ["x>=1.2,<1.3"],
    'x = "~1"': ["x>=1,<2"],
    'x = "*"': ["x"],
    'x = "1.*"': ["x==1.*"],
    'x = "1.2.*"': ["x==1.2.*"],
    'x = "1.2.3"': ["x==1.2.3"],
    'x = ">= 1.2, < 1.5, !=1.3.1"': ["x>=1.2,<1.5,!=1.3.1"],
    'x = "^1.2a1"': ["x>=1.2a1,<2.0"],
    'x = ">=1.0 <2.0"': ["x>=1.0,<2.0"],
    'x = {version = "^2.1", extras = ["b", "a"]}': ["x[a,b]>=2.1,<3.0"],
    'x = {version = "^2", python = "<3.11"}': ['x>=2,<3 ; python_version < "3.11"'],
    "x = {version = '1.0', markers = \"sys_platform == 'linux'\"}": ['x==1.0 ; sys_platform == "linux"'],
    'x = [{version = "<=1.9", python = "<3.8"}, {version = "^2.0", python = ">=3.8"}]': [
        'x<=1.9 ; python_version < "3.8"',
        'x>=2.0,<3.0 ; python_version >= "3.8"',
    ],
    'x = {git = "https://example.com/x.git", tag = "v1"}': ["x @ git+https://example.com/x.git@v1"],
    'x = {url = "https://example.com/x-1.0-py3-none-any.whl"}': ["x @ https://example.com/x-1.0-py3-none-any.whl"],
}


def test_imports_alone_name_the_packages_that_the_target_lacks(proposed: Proposed) -> None:
    more = "import json, cv2, numpy, yaml\nfrom sklearn import metrics\nimport helpers\nimport in_house"
    document, said = proposed({"train.py": TRAIN.format(more=more), "helpers.py": "import tabulate\n"})
    assert document["requirements"] == ["opencv-python-headless", "scikit-learn", "tabulate"]
    assert "train.py:7 imports in_house: add the package that provides it to 'requirements'" in said


def test_all_requirements_are_named(proposed: Proposed) -> None:
    modules = "einops, pandas, scipy, tabulate, wandb, timm, peft"
    document, said = proposed({"train.py": TRAIN.format(more=f"import {modules}\n")})
    assert document["requirements"] == modules.split(", ")
    assert f"requirements: {modules} (the code imports them)" in said


def test_optional_imports_are_not_required(proposed: Proposed) -> None:
    more = "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
    assert "requirements" not in proposed({"train.py": TRAIN.format(more=more)})[0]


def test_a_file_that_lacks_an_import_is_completed(proposed: Proposed) -> None:
    files = {"train.py": TRAIN.format(more="import einops"), "requirements.txt": "tqdm\n"}
    document, said = proposed(files)
    assert document["requirements"] == {"file": "requirements.txt", "packages": ["einops"]}
    assert "train.py:4 imports einops, for which requirements.txt lists no package: einops is added" in said


@pytest.mark.parametrize(
    ("listed", "module"),
    [
        ("opencv-python", "cv2"), ("opencv_contrib_python_headless", "cv2"), ("opencv-python-rolling", "cv2"),
        ("faiss-gpu", "faiss"), ("faiss-gpu-cu12", "faiss"), ("onnxruntime-gpu", "onnxruntime"),
        ("xgboost-cpu", "xgboost"), ("pycryptodomex", "Cryptodome"), ("pillow-simd", "PIL"), ("pyzmq", "zmq"),
        ("polars-lts-cpu", "polars"), ("psycopg2-binary", "psycopg2"), ("psycopg[binary]", "psycopg"),
        ("protobuf", "google.protobuf.text_format"), ("google-cloud-storage", "google.cloud.storage"),
        ("google-auth", "google.auth"), ("ruamel.yaml", "ruamel.yaml"), ("ray[default]", "ray"),
        ("scikit-learn-intelex", "sklearnex"), ("cupy-cuda13x", "cupy"), ("biopython", "Bio"),
    ],
)  # fmt: skip
def test_a_listed_package_that_provides_an_import_has_no_rival(proposed: Proposed, listed: str, module: str) -> None:
    files = {"train.py": TRAIN.format(more=f"import {module}"), "requirements.txt": f"torch\n{listed}\n"}
    document, said = proposed(files)
    assert document["requirements"] == "requirements.txt"
    assert "train.py:4" not in said


@pytest.mark.parametrize(
    ("listed", "statement", "module", "added"),
    [
        ("pypng", "import cv2", "cv2", "opencv-python-headless"),
        ("pycryptodomex", "from Crypto.Cipher import AES", "Crypto", "pycryptodome"),
        ("torch", "import torch_geometric", "torch_geometric", "torch-geometric"),
    ],
)
def test_a_package_that_provides_another_module_does_not_count(
    proposed: Proposed, listed: str, statement: str, module: str, added: str
) -> None:
    files = {"train.py": TRAIN.format(more=statement), "requirements.txt": f"{listed}\n"}
    document, said = proposed(files)
    assert document["requirements"] == {"file": "requirements.txt", "packages": [added]}
    assert f"train.py:4 imports {module}, for which requirements.txt lists no package: {added} is added" in said


def test_an_extra_that_lists_an_import_is_taken(proposed: Proposed) -> None:
    pyproject = (
        '[project]\nname = "x"\nversion = "1"\ndependencies = ["tqdm"]\n'
        '[project.optional-dependencies]\ndocs = ["sphinx"]\ntraining = ["einops>=0.7"]\n'
    )
    document, _ = proposed({"pyproject.toml": pyproject, "train.py": TRAIN.format(more="import einops")})
    assert document["requirements"] == {"file": "pyproject.toml", "extras": ["training"]}


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0+cpu", "2.6.0"])
def test_a_uv_lock_counts_whatever_framework_it_pins(proposed: Proposed, version: str) -> None:
    files = {
        "pyproject.toml": '[project]\nname = "x"\nversion = "1"\ndependencies = ["torch>=2"]\n',
        "uv.lock": f'version = 1\n[[package]]\nname = "torch"\nversion = "{version}"\n',
        "train.py": TRAIN.format(more=""),
    }
    assert proposed(files)[0]["requirements"] == "uv.lock"


# Targets


@pytest.mark.parametrize(
    ("more", "target"),
    [
        ("", "cpu"),
        ("torch.zeros(1).cuda()", "gpu"),
        ("import torch_xla.core.xla_model as xm", "xla"),
        ("try:\n    import torch_xla\nexcept ImportError: pass\n", "cpu"),
        ("import tensorboard", "cpu"),
    ],
)
def test_the_target_is_that_of_the_framework_and_device(proposed: Proposed, more: str, target: str) -> None:
    assert proposed({"train.py": TRAIN.format(more=more)})[0]["extends"] == target


def test_code_that_asks_for_a_gpu_extends_the_image_of_this_machine(
    proposed: Proposed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(init, "NVIDIA_DRIVER", tmp_path / "version")
    more = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    document, said = proposed({"train.py": TRAIN.format(more=more)})
    assert document["extends"] == "cpu"
    assert "train.py:4 uses a GPU where there is one: --target gpu is the image for GPUs" in said
    (tmp_path / "version").touch()
    (Path.cwd() / "trainyard.yaml").unlink()
    assert init.Repository(Path.cwd()).propose().target == "gpu"


@pytest.mark.parametrize(
    ("more", "target", "said"),
    [
        ("device = torch.device('cuda')", "gpu", "train.py:4 needs a GPU"),
        ("torch.nn.Linear(1, 1).to('cuda:0')", "gpu", "train.py:4 needs a GPU"),
        ("assert torch.cuda.is_available(), 'no GPU'", "gpu", "4 needs a GPU (assert torch.cuda.is_available())"),
        (
            "if not torch.cuda.is_available():\n    print(1)\n    raise SystemExit\n",
            "gpu",
            "train.py:4 needs a GPU (if not",
        ),
        ("def main():\n    assert torch.cuda.is_available()\n", "gpu", "train.py:5 needs a GPU (assert"),
        ("if gpus:\n    assert torch.cuda.is_available()\n", "cpu", ""),
        ("if not torch.cuda.is_available():\n    device = None\n", "cpu", ""),
        ("device = 'cuda' if gpus else 'cpu'", "cpu", ""),
        ("parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')", "cpu", ""),
    ],
)
def test_a_program_without_a_fallback_for_its_gpu_extends_the_target_for_gpus(
    proposed: Proposed, more: str, target: str, said: str
) -> None:
    document, err = proposed({"train.py": TRAIN.format(more=more)})
    assert document["extends"] == target
    assert said in err and ("needs a GPU" in err) == (target == "gpu")


def test_tensorflow_with_a_tpu_strategy(proposed: Proposed) -> None:
    more = "import tensorflow as tf\nstrategy = tf.distribute.TPUStrategy()"
    assert proposed({"train.py": KERAS.format(more=more)})[0]["extends"] == "tf-tpu"


def test_tensorflows_nightly_in_the_requirements(proposed: Proposed) -> None:
    files = {"train.py": KERAS.format(more="import tensorflow as tf"), "requirements.txt": "tf-nightly\n"}
    assert proposed(files)[0]["extends"] == "tf-nightly"


def test_two_frameworks_are_named(proposed: Proposed) -> None:
    files = {"train.py": TRAIN.format(more="import net\nimport tensorflow"), "net.py": "import torch\n"}
    document, said = proposed(files)
    assert document["extends"] == "cpu"
    assert "train.py:2 uses torch, and train.py:5 uses tensorflow: --target chooses the other" in said


def test_a_target_without_the_codes_framework_is_named(proposed: Proposed) -> None:
    document, said = proposed({"train.py": TRAIN.format(more="")}, "--target", "tf-cpu")
    assert document["extends"] == "tf-cpu"
    assert "train.py:2 uses torch, and tf-cpu does not contain torch" in said


def test_a_library_with_several_backends_gets_that_of_the_target_alone(proposed: Proposed) -> None:
    """Its other backends are imported under a condition, or are modules with the name of a framework."""
    backends = "import os\nfrom . import utils\nif os.environ['BACKEND'] == 'torch':\n    from . import pytorch\n"
    files = {
        "train.py": KERAS.format(more="import library\nimport jax"),
        "library/__init__.py": backends,
        "library/pytorch.py": "import torch\nimport einops\n",
        "library/utils.py": "import torch\n",
        "library/torch.py": "import optax\n",
    }
    document, _ = proposed(files, "--target", "tf-cpu")
    assert "requirements" not in document


# Commands


def test_the_file_that_trains_is_preferred(proposed: Proposed) -> None:
    files = {
        "main.py": "if __name__ == '__main__':\n    print('no training')\n",
        "evaluate.py": TRAIN.format(more=""),
        "tests/test_train.py": TRAIN.format(more=""),
        "tools/train_tokenizer.py": "if __name__ == '__main__':\n    print(1)\n",
        "scripts/train.py": TRAIN.format(more=""),
    }
    assert proposed(files)[0]["run"] == "python scripts/train.py"


def test_the_program_of_a_repository_comes_before_those_of_its_projects_and_its_packaging(proposed: Proposed) -> None:
    files = {
        "projects/PointRend/train_net.py": TRAIN.format(more=""),
        "pip_build.py": TRAIN.format(more=""),
        "tools/train_net.py": TRAIN.format(more=""),
    }
    assert proposed(files)[0]["run"] == "python tools/train_net.py"


def test_the_program_that_the_documents_start_comes_before_others_of_its_kind(proposed: Proposed) -> None:
    programs = {name: TRAIN.format(more="") for name in ("train.py", "legacy_train.py", "examples/train_it.py")}
    assert proposed({**programs, "README.md": "    torchrun --nproc-per-node=2 examples/train_it.py --epochs 3\n"})[0][
        "run"
    ] == ("python examples/train_it.py")


def test_a_module_of_another_program_is_no_program(proposed: Proposed) -> None:
    files = {
        "train.py": "import torch\nprint(torch.__version__)\ndef train(loss):\n    loss.backward()\n",
        "main.py": "import train\nif __name__ == '__main__':\n    train.train(1)\n",
    }
    assert proposed(files)[0]["run"] == "python main.py"


def test_what_the_readme_starts_comes_before_a_better_name_that_a_document_of_a_folder_starts(
    proposed: Proposed,
) -> None:
    files = {
        "README.md": "accelerate launch examples/nlp_example.py\n",
        "examples/nlp_example.py": TRAIN.format(more=""),
        "examples/parallel/README.md": "accelerate launch trainer.py\n",
        "examples/parallel/trainer.py": TRAIN.format(more=""),
    }
    assert proposed(files)[0]["run"] == "python examples/nlp_example.py"


BESIDE = {"forecast/train.py": TRAIN.format(more=""), "forecast/requirements.txt": "torch\nmatplotlib>=3.9\n"}


def test_the_list_beside_the_program_is_taken_if_there_is_none_at_the_top(proposed: Proposed) -> None:
    assert proposed(BESIDE)[0]["requirements"] == "forecast/requirements.txt"


def test_the_list_beside_the_program_is_named_if_the_one_at_the_top_is_taken(proposed: Proposed) -> None:
    document, said = proposed({**BESIDE, "requirements.txt": "torch\n"})
    assert document["requirements"] == "requirements.txt"
    assert "forecast/requirements.txt: lists requirements and is not read: 'requirements: forecast/requirements" in said
    assert "'trainyard init forecast' makes an image of that folder" in said


OWN = {
    "v1/pyproject.toml": '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\n'
    'name = "own"\nversion = "1"\nrequires-python = "<3.13"\ndependencies = ["torch", "einops"]\n'
    '[project.optional-dependencies]\nplots = ["matplotlib"]\n',
    "v1/src/own/__init__.py": "",
    "v1/train.py": TRAIN.format(more="import matplotlib\nimport own"),
}


def test_the_project_beside_the_program_is_taken_with_its_extras_python_and_modules(proposed: Proposed) -> None:
    document, said = proposed(OWN)
    assert document["requirements"] == {"file": "v1/pyproject.toml", "extras": ["plots"]}
    assert document["base"] == "debian-12"
    assert document["code"] == [".", "v1"]
    assert "base: debian-12 (v1/pyproject.toml requires Python <3.13)" in said


def test_requirements_beside_the_program_that_no_key_can_name_are_told_with_its_folder(proposed: Proposed) -> None:
    files = {"v1/environment.yml": "dependencies: [einops]\n", "v1/train.py": TRAIN.format(more="")}
    assert (
        "v1: its own requirements are not read (environment.yml lists them): 'trainyard init v1'" in proposed(files)[1]
    )


def test_requirements_that_a_build_backend_tells_are_completed_by_what_its_files_do_not_name(
    proposed: Proposed,
) -> None:
    files = {
        "v1/setup.py": "from setuptools import setup\nsetup(install_requires=['pyyaml>=6'])\n",
        "v1/train.py": TRAIN.format(more="import einops, yaml"),
    }
    document, said = proposed(files)
    assert document["requirements"] == {"file": "v1/setup.py", "packages": ["einops"]}
    assert "v1/train.py:4 imports einops, for which v1/setup.py lists no package: einops is added" in said


def test_a_script_without_functions_is_run_and_a_librarys_training_loop_is_not(proposed: Proposed) -> None:
    files = {
        "library/__init__.py": "",
        "library/training.py": "import torch\ndef fit(optimizer, loss):\n    loss.backward()\n    optimizer.step()\n",
        "experiment.py": "import torch\nfor _ in range(3):\n    torch.zeros(1, requires_grad=True).sum().backward()\n",
    }
    document, said = proposed(files)
    assert "run" not in document
    assert "no command that trains was found: write 'run' in trainyard.yaml" in said
    Path("trainyard.yaml").unlink()
    Path("experiment.py").rename("train.py")
    from trainyard.workspace import init

    assert init.Repository(Path.cwd()).propose().run == "python train.py"


def test_notebooks_are_named_if_no_program_trains(proposed: Proposed) -> None:
    files = {f"part{number}.ipynb": "{}" for number in range(4)}
    document, said = proposed({**files, "requirements.txt": "torch\n"})
    assert "run" not in document
    assert "part0.ipynb, part1.ipynb, part2.ipynb, ...: the image is an environment without these notebooks: " in said
    assert "'trainyard image part0.ipynb' makes a program of one" in said
    Path("train.py").write_text(TRAIN.format(more=""), encoding="utf-8")
    from trainyard.workspace import init

    assert not any(".ipynb" in note for note in init.Repository(Path.cwd()).propose().notes)


def test_an_extension_of_the_repository_is_compiled(proposed: Proposed) -> None:
    setup = "from setuptools import setup\nsetup(name='mine', version='1', ext_modules=get_extensions())\n"
    document, said = proposed({"train.py": TRAIN.format(more=""), "setup.py": setup})
    assert document["build"] == {"packages": ["g++", "ninja-build"], "sources": ["."]}
    assert "build: sources: [.] (setup.py:2: ext_modules: extension modules)" in said
    assert "not compiled" not in said


def test_cuda_needs_the_compiler_of_the_images_cuda(proposed: Proposed) -> None:
    setup = (
        "from setuptools import setup\nsetup(name='mine', version='1', ext_modules=[CUDAExtension('a', ['b.cu'])])\n"
    )
    train, wanted = TRAIN.format(more=""), "--extra-index-url https://download.pytorch.org/whl/cu130\ntorch\n"
    document, _ = proposed({"train.py": train, "setup.py": setup, "requirements.txt": wanted})
    assert document["extends"] == "gpu"
    runtime = next(pin.version for pin in model.load("gpu").locked().pins if pin.name == "nvidia-cuda-runtime")
    of = ".".join(runtime.split(".")[:2])
    assert document["build"]["requires"] == [
        f"nvidia-cuda-nvcc=={of}.*", f"nvidia-cuda-crt=={of}.*", f"nvidia-nvvm=={of}.*"
    ]  # fmt: skip


def test_an_extension_in_rust_is_named(proposed: Proposed) -> None:
    """Name it: its crates come from a network, which builds do not have."""
    project = "[build-system]\nrequires = ['maturin']\nbuild-backend = 'maturin'\n"
    document, said = proposed({"train.py": TRAIN.format(more=""), "pyproject.toml": project})
    assert "build" not in document
    assert (
        "maturin: extensions of the repository are not compiled for the image: a build has no network for its" in said
    )


def test_a_shell_script_is_run_if_no_python_file_trains(proposed: Proposed) -> None:
    files = {"train.sh": "#!/bin/sh\npython -c 'import torch'\n", "net.py": "import torch\n"}
    folder_document, _ = proposed(files)
    assert folder_document["run"] == "bash train.sh"


@pytest.mark.parametrize("words", [(), ("--yes",)])
def test_which_of_two_files_that_train_alike_is_a_question(
    repository: Callable[..., Path], trainyard: Command, words: tuple[str, ...]
) -> None:
    folder = repository({"a/train.py": TRAIN.format(more=""), "b/train.py": TRAIN.format(more="")})
    status, out, err = trainyard("init", *words)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == (
        "init: a/train.py and b/train.py are equally likely: choose the one that trains, as in "
        "'trainyard init --run \"python a/train.py\"', "
        "or one folder for each image, as in 'trainyard init a'"
    )
    assert not (folder / "trainyard.yaml").exists()
    assert trainyard("init", "--run", "python b/train.py")[0] == 0


def test_many_files_that_train_alike_are_one_short_line(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "train.py").write_text(TRAIN.format(more=""), encoding="utf-8")
    assert (
        init.Repository(tmp_path)
        .propose()
        .question.startswith("0/train.py, 1/train.py, 2/train.py and 6 others are equally likely: ")
    )


@pytest.mark.parametrize("git", [False, True])
def test_ignored_files_and_environments_are_not_looked_at(proposed: Proposed, tmp_path: Path, git: bool) -> None:
    if git:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    files = {
        ".gitignore": "/old/\n",
        "old/train.py": KERAS.format(more=""),
        "train.py": TRAIN.format(more=""),
        ".venv/pyvenv.cfg": "",
        ".venv/lib/tensorflow.py": "import tensorflow\n",
        "env/pyvenv.cfg": "",
        "env/train.py": KERAS.format(more=""),
    }
    document, said = proposed(files)
    assert (document["extends"], document["run"]) == ("cpu", "python train.py")
    assert "tensorflow" not in said


def test_a_large_repository_lists_its_code(proposed: Proposed) -> None:
    files = {
        "train.py": TRAIN.format(more="import net"),
        "net/__init__.py": "import torch\n",
        "configs/a.yaml": "x: 1\n",
        "data/big.bin": "x" * 20_000_001,
        "tests/test_net.py": "",
        "weights.bin": "x" * 100,
    }
    assert proposed(files)[0]["code"] == ["configs", "net", "train.py"]


def test_python_2_and_other_oddities_do_not_end_it(proposed: Proposed) -> None:
    files = {"old.py": "print 'x'\n", "binary.py": "\x00\x01", "train.py": TRAIN.format(more="'\\d'")}
    assert proposed(files)[0]["run"] == "python train.py"


# What it never does


def test_a_trainyard_yaml_is_not_overwritten(repository: Callable[..., Path], trainyard: Command) -> None:
    folder = repository({"train.py": TRAIN.format(more=""), "trainyard.yaml": "extends: cpu\n"})
    status, out, err = trainyard("init", "--yes")
    assert (status, out) == (2, "")
    assert err == "init: trainyard.yaml exists already: edit it, or remove it first\n"
    assert (folder / "trainyard.yaml").read_text(encoding="utf-8") == "extends: cpu\n"


def test_an_empty_folder_needs_a_target(repository: Callable[..., Path], trainyard: Command) -> None:
    folder = repository({})
    status, out, err = trainyard("init", "--yes")
    assert (status, out) == (2, "")
    assert "choose a target, as in 'trainyard init --target cpu'; targets: cpu, gpu" in err
    assert len(err.splitlines()) == 1
    assert trainyard("init", "--yes", "--target", "xla")[0] == 0
    assert isinstance(model.load(None), model.RepositorySpec)
    assert yaml.safe_load((folder / "trainyard.yaml").read_text(encoding="utf-8")) == {
        "extends": "xla",
        "name": "project",
    }


def test_a_misspelt_target_names_the_nearest(repository: Callable[..., Path], trainyard: Command) -> None:
    repository({"train.py": TRAIN.format(more="")})
    status, _, err = trainyard("init", "--yes", "--target", "tf-cpuu")
    assert status == 2
    assert err.startswith("init: unknown target 'tf-cpuu' (did you mean 'tf-cpu'?)")


def test_an_invalid_name_leaves_nothing(repository: Callable[..., Path], trainyard: Command) -> None:
    folder = repository({"train.py": TRAIN.format(more="")})
    status, _, err = trainyard("init", "--yes", "--name", "My Image")
    assert status == 2
    assert "name" in err and len(err.splitlines()) <= 4
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_folder_that_is_called_like_a_target_gets_another_name(
    repository: Callable[..., Path], trainyard: Command
) -> None:
    repository({"train.py": TRAIN.format(more="")}, name="cpu")
    assert trainyard("init", "--yes")[0] == 0
    assert model.load(None).target == "my-cpu"


def test_values_that_yaml_would_read_otherwise_are_quoted(proposed: Proposed) -> None:
    command = 'python train.py --name "a: b" --flag=on # x'
    document, _ = proposed({"train.py": TRAIN.format(more="")}, "--run", command)
    assert document["run"] == command
    assert model.load(None).trainer_commands()["run"] == ["python", "train.py", "--name", "a: b", "--flag=on", "#", "x"]


# The schema and the dev container


def test_the_first_line_names_a_schema_in_the_repository(proposed: Proposed) -> None:
    proposed({"train.py": TRAIN.format(more="")})
    first = Path("trainyard.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=.trainyard/schema.json"
    schema = json.loads(Path(".trainyard/schema.json").read_text(encoding="utf-8"))
    assert "extends" in schema["properties"]


@pytest.mark.parametrize(("target", "gpus"), [("cpu", False), ("gpu", True)])
def test_a_dev_container_opens_the_repository_in_its_image(proposed: Proposed, target: str, gpus: bool) -> None:
    proposed({"train.py": TRAIN.format(more="")}, "--target", target, "--devcontainer")
    found = json.loads(Path(".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert found["image"] == "trainyard:project"
    assert found["workspaceMount"].endswith("target=/workspace,type=bind")
    assert (found["workspaceFolder"], found["remoteUser"]) == ("/workspace", "trainer")
    assert (found.get("hostRequirements") == {"gpu": "optional"}) is gpus


#: The properties of a dev container that is made of an image, and the types of those that have one: the definitions
#: devContainerCommon, nonComposeBase and imageContainer of
#: https://github.com/devcontainers/spec/blob/main/schemas/devContainer.base.schema.json, which allows no others.
DEVCONTAINER_SCHEMA = {
    "type": "object",
    "required": ["image"],
    "additionalProperties": False,
    "properties": {
        **{name: {} for name in
           ("features", "overrideFeatureInstallOrder", "secrets", "forwardPorts", "portsAttributes",
            "otherPortsAttributes", "mounts", "capAdd", "securityOpt", "initializeCommand", "onCreateCommand",
            "updateContentCommand", "postCreateCommand", "postStartCommand", "postAttachCommand", "waitFor",
            "userEnvProbe", "appPort", "runArgs", "shutdownAction")},
        **{name: {"type": "string"} for name in
           ("name", "image", "remoteUser", "containerUser", "workspaceFolder", "workspaceMount")},
        **{name: {"type": "boolean"} for name in ("overrideCommand", "updateRemoteUserUID", "init", "privileged")},
        "containerEnv": {"type": "object", "additionalProperties": {"type": "string"}},
        "remoteEnv": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "customizations": {"type": "object", "additionalProperties": {"type": "object"}},
        "hostRequirements": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "cpus": {"type": "integer", "minimum": 1},
                **{name: {"type": "string", "pattern": r"^\d+([tgmk]b)?$"} for name in ("memory", "storage")},
                "gpu": {"oneOf": [{"enum": [True, False, "optional"]}, {"type": "object"}]},
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("target", sorted(set(model.targets()) - {"xla-nightly"}))
def test_the_dev_container_is_valid(target: str, proposed: Proposed) -> None:
    proposed({"train.py": TRAIN.format(more="")}, "--target", target, "--devcontainer")
    found = json.loads(Path(".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    jsonschema.Draft201909Validator(DEVCONTAINER_SCHEMA).validate(found)
    mount = dict(part.split("=", 1) for part in found["workspaceMount"].split(","))
    assert mount == {"source": "${localWorkspaceFolder}", "target": found["workspaceFolder"], "type": "bind"}


@pytest.mark.parametrize(
    "wrong", [{"workspacefolder": "/x"}, {"overrideCommand": "yes"}, {"hostRequirements": {"g": 1}}]
)
def test_a_dev_container_with_a_mistake_is_not_valid(wrong: dict[str, object]) -> None:
    validator = jsonschema.Draft201909Validator(DEVCONTAINER_SCHEMA)
    assert validator.is_valid({"image": "trainyard:cpu"})
    assert not validator.is_valid({"image": "trainyard:cpu"} | wrong)


def test_a_dev_container_is_added_to_a_repository_once(repository: Callable[..., Path], trainyard: Command) -> None:
    folder = repository({"trainyard.yaml": "extends: cpu\n"})
    path = folder / ".devcontainer" / "devcontainer.json"
    assert trainyard("init", "--devcontainer")[:2] == (0, f"{path}\n")
    path.write_text("{}")
    status, _, err = trainyard("init", "--devcontainer")
    assert (status, err) == (2, "init: .devcontainer/devcontainer.json exists already: edit it, or remove it first\n")
    assert path.read_text() == "{}"


@pytest.mark.parametrize("folder", ["/", "~"])
def test_a_system_or_a_home_folder_is_no_repository(
    folder: str, tmp_path: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are not read: /proc alone has files that not even root may read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(Path(folder).expanduser())
    status, out, err = trainyard("init", "--yes")
    shown = Path(folder).expanduser()
    assert (status, out) == (2, "")
    assert err == f"init: {shown} is not the folder of a repository: change to the one that has your code\n"
    assert not (shown / "trainyard.yaml").exists()


def test_a_home_folder_with_a_git_repository_is_one(
    repository: Callable[..., Path], trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository({"train.py": TRAIN.format(more="")})
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    monkeypatch.setenv("HOME", str(folder))
    assert trainyard("init", "--yes")[:2] == (0, f"{folder}/trainyard.yaml\n{folder}/.trainyard/schema.json\n")


# On a terminal


def test_an_interrupted_question_ends_with_a_line(repository: Callable[..., Path]) -> None:
    folder = repository({"train.py": TRAIN.format(more="")})
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "init"], cwd=folder, stdin=inner, stderr=inner, stdout=subprocess.DEVNULL
    )
    os.close(inner)
    os.write(outer, b"\x04")  # end of input
    status = process.wait(timeout=60)
    shown = os.read(outer, 65536).decode()
    os.close(outer)
    assert status == 130
    assert "init: interrupted" in shown.splitlines()[-1] and "target" not in shown.splitlines()[-1]
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_on_a_terminal_every_value_can_be_changed(repository: Callable[..., Path]) -> None:
    folder = repository({"train.py": TRAIN.format(more=""), "pretrain.py": TRAIN.format(more="")})
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "init"],
        cwd=folder,
        stdin=inner,
        stderr=inner,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(inner)
    os.write(outer, b"xla\npython pretrain.py\nother\n")
    out, _ = process.communicate(timeout=60)
    shown = os.read(outer, 65536).decode()
    os.close(outer)
    assert (process.returncode, out.splitlines()[0]) == (0, str(folder / "trainyard.yaml")), shown
    document = yaml.safe_load((folder / "trainyard.yaml").read_text(encoding="utf-8"))
    assert (document["extends"], document["run"], document["name"]) == ("xla", "python pretrain.py", "other")


def test_without_a_terminal_it_says_that_it_asks_nothing(repository: Callable[..., Path], trainyard: Command) -> None:
    repository({"train.py": TRAIN.format(more="")})
    status, _, err = trainyard("init")
    assert status == 0
    assert err.startswith("no terminal: takes what was found, as --yes does\n")


def test_a_script_without_a_main_program_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\nimport torch\nfrom model import step\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--epochs', type=int, default=10)\n"
        "for epoch in range(parser.parse_args().epochs):\n    print('loss', step(torch.ones(1)))\n",
        encoding="utf-8",
    )
    (tmp_path / "model.py").write_text("def step(x):\n    return x\n", encoding="utf-8")
    assert init.Repository(tmp_path).propose(None).run == "python train.py"


def test_a_module_that_only_defines_functions_is_no_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n\ndef train():\n    return torch.ones(1)\n", encoding="utf-8")
    assert not init.Repository(tmp_path).propose(None).run


def test_a_module_that_lists_its_names_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "trainer.py").write_text(
        "import torch\n__all__ = []\n__all__.extend(['Trainer'])\n\nclass Trainer:\n    def fit(self, loss):\n"
        "        loss.backward()\n",
        encoding="utf-8",
    )
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.py").write_text(
        "from package.trainer import Trainer\n\nif __name__ == '__main__':\n    Trainer().fit(1)\n", encoding="utf-8"
    )
    assert init.Repository(tmp_path).propose(None).run == "python examples/train.py"


@pytest.fixture
def monorepo(repository: Callable[..., Path]) -> Callable[..., Path]:
    """Make a git repository with trainers that import ``common``: ``monorepo({"common.py": ""}, "text/train.py")``."""

    def make(files: dict[str, str], *trainers: str) -> Path:
        folder = repository(files | dict.fromkeys(trainers, TRAIN.format(more="from common import x\n")))
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        return folder

    return make


LIBRARY = {"libs/common/__init__.py": "x = 1\n"}


def test_a_trainer_of_a_monorepo_has_the_library_that_it_imports(
    monorepo: Callable[..., Path], trainyard: Command
) -> None:
    files = LIBRARY | {"services/text/requirements.txt": "einops\n"}
    folder = monorepo(files, "services/text/train.py", "services/vision/train.py")
    status, out, err = trainyard("init", "services/text", "--yes")
    assert (status, out.splitlines()[0]) == (0, str(folder / "services/text/trainyard.yaml"))
    assert "code: ../../libs (train.py:4 imports common)\n" in err
    assert "WARNING" not in err
    assert err.endswith("; then run 'trainyard image services/text/'\n")
    spec = model.load("services/text/")
    assert spec.workspace.document.code == [".", "../../libs"]
    assert spec.target == "text"
    found = check.check(spec.repository(""))
    assert ([file.path for file in found.files], found.refused, found.notes) == (
        ["libs/common/__init__.py", "requirements.txt", "train.py"],
        [],
        [],
    )
    assert [path.name for path in python_projects.import_roots(spec.workspace)] == ["libs"]


@pytest.mark.parametrize("other", ["common/__init__.py", "common.py"])
def test_a_module_that_two_folders_have_is_the_users(
    monorepo: Callable[..., Path], trainyard: Command, other: str
) -> None:
    monorepo({**LIBRARY, other: ""}, "text/train.py")
    _, _, err = trainyard("init", "text", "--yes")
    assert "train.py:4 imports common: add the package that provides it to 'requirements'" in err
    assert model.load("text/").workspace.document.code == ["."]


@pytest.mark.parametrize(("file", "entry"), [("common.py", "../common.py"), ("common/__init__.py", "../common")])
def test_a_module_at_the_top_of_the_repository_is_taken_alone(
    monorepo: Callable[..., Path], trainyard: Command, file: str, entry: str
) -> None:
    monorepo({file: "x = 1\n"}, "text/train.py")
    assert trainyard("init", "text", "--yes")[0] == 0
    spec = model.load("text/").repository("")
    assert spec.workspace.document.code == [".", entry]
    assert file in [one.path for one in check.check(spec).files]


def test_trainers_of_other_folders_are_named(monorepo: Callable[..., Path], trainyard: Command) -> None:
    files = LIBRARY | {"tools/prepare.py": TRAIN.format(more="")}
    monorepo(files, "train.py", "vision/train.py", "text/finetune.py", "examples/a/train.py")
    _, _, err = trainyard("init", "--yes")
    note = "also found: vision/train.py, text/finetune.py; for an image of it: 'trainyard init vision'"
    assert f"WARNING: {note}\n" in err


def test_trainers_that_train_alike_may_have_a_folder_each(monorepo: Callable[..., Path], trainyard: Command) -> None:
    monorepo(LIBRARY, "text/train.py", "vision/train.py")
    status, _, err = trainyard("init", "--yes")
    assert status == 2
    assert err.endswith("\"', or one folder for each image, as in 'trainyard init text'\n")
    _, _, err = trainyard("init", "--run", "python text/train.py")
    assert "also found: vision/train.py; for an image of it: 'trainyard init vision'\n" in err


def test_what_no_image_may_have_is_left_out_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": "import torch\nloss.backward()\n",
        ".env": "KEY=1\n",
        "old.git/config": "[core]\n",
        "a/b.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "old.git" / "HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    status, _, err = trainyard("init", "--yes")
    assert status == 0 and ".env: an environment file, which everybody who can pull" in err, err
    assert "code: [a, train.py]" in (tmp_path / "trainyard.yaml").read_text(encoding="utf-8")
    assert trainyard("check")[0] == 0
