"""Test the repository's extension modules: what they are compiled from, and how an image finds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.workspaces import lock

from trainyard.common.settings import ROOT
from trainyard.image import dockerfile
from trainyard.spec import model
from trainyard.workspace import code_layer

STEP = ROOT / "templates" / "steps" / "extensions.py"

MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "", -1, 0};
PyMODINIT_FUNC PyInit__C(void) { BODY return PyModule_Create(&module); }
"""

FILES = {
    "train.py": "import mine\n",
    "setup.py": "import helper\nopen('VERSION.txt')\nsetup(ext_modules=[Extension('mine._C', ['csrc/a.c'])])\n",
    "helper.py": "",
    "VERSION.txt": "1",
    "README.md": "",
    "configs/a.yaml": "a: 1\n",
    "csrc/a.c": "int x;\n",
    "csrc/CMakeLists.txt": "",
    "mine/__init__.py": "",
    "mine/net.py": "",
}


@pytest.fixture
def spec(tmp_path: Path) -> model.RepositorySpec:
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    text = "extends: cpu\nrun: python train.py\nbuild: {packages: [g++], sources: [.]}\n"
    (folder / "trainyard.yaml").write_text(text)
    return model.load(str(folder)).repository("")


def test_an_edit_of_what_is_not_compiled_changes_nothing(spec: model.RepositorySpec) -> None:
    found = set(code_layer.sources(spec.workspace))
    assert found == {"setup.py", "helper.py", "VERSION.txt", "csrc/a.c", "csrc/CMakeLists.txt"}
    before = code_layer.configuration(spec.workspace)
    (spec.folder / "train.py").write_text("import mine, os\n")
    (spec.folder / "mine" / "net.py").write_text("import os\n")
    (spec.folder / "configs" / "a.yaml").write_text("a: 2\n")
    assert code_layer.configuration(spec.workspace) == before
    (spec.folder / "csrc" / "a.c").write_text("int y;\n")
    assert code_layer.configuration(spec.workspace) != before


def test_they_are_compiled_in_a_layer_below_the_code(spec: model.RepositorySpec) -> None:
    lock(spec)
    text = dockerfile.dockerfile(model.load(str(spec.folder)))
    assert "extensions.tar /tmp/extensions.tar" in text
    assert "/steps/extensions.sh 'opt/venv/lib/python3.13/site-packages'" in text
    assert text.index("COPY --link --from=compiled") < text.index("COPY --link --from=code")


def compiled(folder: Path, body: str = "") -> Path:
    """Make a folder as a build leaves it, with one extension module of this Python."""
    (folder / "mine").mkdir(parents=True)
    source = folder / "a.c"
    source.write_text(MODULE.replace("BODY", body))
    suffix, include = sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include")
    if not shutil.which("cc") or not Path(include, "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of this Python")
    command = ["cc", "-shared", "-fPIC", f"-I{include}", "-o", str(folder / "mine" / f"_C{suffix}"), str(source)]
    subprocess.run(command, check=True)
    (folder / "mine" / "__init__.py").write_text("stale = True\n")
    return folder


def step(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, STEP, *words], capture_output=True, text=True, check=False)


def test_a_module_is_found_beside_a_package_that_is_elsewhere(tmp_path: Path) -> None:
    """As in an image, also where 'run --mount' covers /workspace; of the build's Python files none is taken."""
    site, code = tmp_path / "site", tmp_path / "code"
    (code / "mine").mkdir(parents=True)
    (code / "mine" / "__init__.py").touch()
    done = step(compiled(tmp_path / "built"), site)
    assert done.returncode == 0, done.stderr
    assert not (site / "mine" / "__init__.py").exists()
    program = (
        "import site, sys; site.addsitedir(sys.argv[1]); import mine, mine._C; print(mine.__file__, mine._C.__file__)"
    )
    command = [sys.executable, "-c", program, str(site)]
    found = subprocess.run(command, cwd=code, capture_output=True, text=True, check=True).stdout.split()
    assert [Path(one).parent for one in found] == [code / "mine", site / "mine"]
    absent = subprocess.run([*command[:2], program.replace("mine._C", "mine._D"), str(site)], cwd=code, check=False,
                            capture_output=True, text=True)  # fmt: skip
    assert absent.stderr.endswith("ModuleNotFoundError: No module named 'mine._D'\n")


def test_a_module_that_cannot_be_imported_ends_the_build(tmp_path: Path) -> None:
    body = 'PyErr_SetString(PyExc_ImportError, "no such symbol"); return 0;'
    done = step(compiled(tmp_path / "built", body), tmp_path / "site")
    assert (done.returncode, done.stderr) == (
        1,
        "error: mine._C, which was compiled, cannot be imported: no such symbol\n",
    )


def test_a_project_without_modules_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    done = step(tmp_path / "built", tmp_path / "site")
    assert done.returncode == 1 and "the project has no extension modules: remove '.' from 'sources'" in done.stderr
