"""Build backends of the package index are asked in containers, and reach nothing of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import build_backends
from trainyard.spec import model
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import python_projects, requirements

pytestmark = pytest.mark.concurrent

Write = Callable[..., RepositorySpec]

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "protocol.file.allow=always")


def written(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def committed(folder: Path, *tags: str) -> None:
    words = [["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "a"], *(["tag", tag] for tag in tags)]
    for one in words:
        subprocess.run([*GIT, "-C", str(folder), *one], check=True, capture_output=True)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the files of a repository on tf-cpu, and commit them; its spec."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))

    def run(files: Mapping[str, str], *tags: str, more: str = "") -> RepositorySpec:
        written(root, {"trainyard.yaml": f"extends: tf-cpu\nrun: python -m mymodel.net\n{more}"} | dict(files))
        committed(root, *tags)
        spec = model.load(None)
        assert isinstance(spec, RepositorySpec)
        return spec

    return run


LIB = {"lib/mymodel/__init__.py": "'A model.'\n__version__ = '1.6'\n", "lib/mymodel/net.py": ""}


def built_by(requires: str, backend: str) -> str:
    return f"[build-system]\nrequires = [{requires}]\nbuild-backend = '{backend}'\n"


PROJECT = "[project]\nname = 'my-x'\ndynamic = ['version']\ndependencies = ['einops']\n"

SETUP = """\
from setuptools import find_packages, setup
setup(
    name="my-x", version=open("VERSION").read().strip(), packages=find_packages("lib"), package_dir={"": "lib"},
    install_requires=open("reqs.in").read().split(), entry_points={"console_scripts": ["t = mymodel.net:main"]},
)
"""

BACKENDS = {
    "poetry": {
        "pyproject.toml": "[tool.poetry]\nname = 'my-x'\nversion = '1.6'\ndescription = ''\nauthors = []\n"
        "packages = [{include = 'mymodel', from = 'lib'}]\n[tool.poetry.dependencies]\npython = '^3.10'\n"
        "einops = '^0.8'\n" + built_by("'poetry-core'", "poetry.core.masonry.api"),
        **LIB,
    },
    "setup.py": {"setup.py": SETUP, "VERSION": "1.6\n", "reqs.in": "einops\n", **LIB},
    "setup.cfg": {
        "setup.cfg": "[metadata]\nname = my-x\nversion = attr: mymodel.__version__\n[options]\npackages = find:\n"
        "package_dir =\n  = lib\ninstall_requires =\n  einops\n[options.packages.find]\nwhere = lib\n",
        "setup.py": "import setuptools\nsetuptools.setup()\n",
        **LIB,
    },
    "package-dir": {
        "pyproject.toml": PROJECT + built_by("'setuptools'", "setuptools.build_meta")
        + "[tool.setuptools]\npackages = ['mymodel']\npackage-dir = {mymodel = 'lib/mymodel'}\n"
        "[tool.setuptools.dynamic]\nversion = {file = 'VERSION'}\n",
        "VERSION": "1.6\n",
        **LIB,
    },
    "flit": {
        "pyproject.toml": PROJECT.replace("my-x", "mymodel").replace("['version']", "['version', 'description']")
        + built_by("'flit_core'", "flit_core.buildapi")
        + "[tool.flit.module]\nname = 'mymodel'\n",
        **{name.replace("lib/", "src/"): text for name, text in LIB.items()},
    },
    "pdm": {
        "pyproject.toml": PROJECT + built_by("'pdm-backend'", "pdm.backend")
        + "[tool.pdm.version]\nsource = 'file'\npath = 'lib/mymodel/__init__.py'\n"
        "[tool.pdm.build]\npackage-dir = 'lib'\n",
        **LIB,
    },
    "hatchling": {
        "pyproject.toml": "[project]\nname = 'my-x'\ndynamic = ['version', 'dependencies']\n"
        + built_by("'hatchling', 'hatch-requirements-txt'", "hatchling.build")
        + "[tool.hatch.version]\npath = 'lib/mymodel/__init__.py'\n[tool.hatch.build.targets.wheel]\n"
        "packages = ['lib/mymodel']\n[tool.hatch.metadata.hooks.requirements_txt]\nfiles = ['reqs.txt']\n",
        "reqs.txt": "einops\n",
        **LIB,
    },
    "uv": {
        "pyproject.toml": PROJECT.replace("dynamic = ['version']", "version = '1.6'")
        + built_by("'uv_build'", "uv_build")
        + "[tool.uv.build-backend]\nmodule-name = 'mymodel'\nmodule-root = 'lib'\n",
        **LIB,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
def test_any_build_backend_tells_metadata_and_the_folders_of_modules(
    write: Write, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = build_backends.asked(write(BACKENDS[name]))
    (project,) = python_projects.projects(spec.workspace)
    assert project.name in ("my-x", "mymodel") and project.version == "1.6" and not project.unknown
    (line,) = requirements.read(spec.workspace, "3.13").lines
    assert line.name == "einops"
    (root,) = project.import_roots
    assert root == project.folder / ("src" if name == "flit" else "lib")
    monkeypatch.setenv("TRAINYARD_NO_BUILD", "1")
    if name != "uv":  # a program, which may have read any file
        written(root, {"mymodel/net.py": "edited = 1\n"})
        assert build_backends.asked(model.load(None)).workspace.told == spec.workspace.told
    written(root, {"mymodel/another.py": ""})
    with pytest.raises(UserError, match="'--no-build' lets none run"):
        build_backends.asked(model.load(None))


@pytest.mark.parametrize(
    "system",
    [
        built_by("'setuptools', 'setuptools_scm'", "setuptools.build_meta") + "[tool.setuptools_scm]\n",
        built_by("'hatchling', 'hatch-vcs'", "hatchling.build") + "[tool.hatch.version]\nsource = 'vcs'\n",
    ],
)
def test_a_version_of_tags_counts_commits(write: Write, system: str) -> None:
    project = "[project]\nname = 'mymodel'\ndynamic = ['version']\n"
    write({"pyproject.toml": project + system, "mymodel/__init__.py": ""}, "v1.2")
    spec = build_backends.asked(write({"mymodel/net.py": ""}))
    (found,) = python_projects.projects(spec.workspace)
    assert found.version == "1.3.dev1"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"setup.py": "import setuptools as s\ns.setup(name='x', ext_modules=[s.Extension('x', ['x.c'])])\n"},
            "setuptools.build_meta compiles, and no compiler is there .*gcc",
        ),
        (
            {"pyproject.toml": "[project]\nname='x'\nversion='1'\n"
             + built_by("'scikit-build-core'", "scikit_build_core.build"),
             "CMakeLists.txt": "cmake_minimum_required(VERSION 3.20)\nproject(x LANGUAGES C)\n"},
            "scikit_build_core.build compiles, and no compiler is there",
        ),
    ],
)  # fmt: skip
def test_a_project_that_compiles_is_refused(write: Write, files: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"{said}.*'compiler:'.*name that in 'build'") as error:
        build_backends.asked(write({**files, "x.c": ""}))
    assert "\n" not in str(error.value)


def test_what_a_static_table_says_is_enough_if_its_build_backend_fails(write: Write) -> None:
    text = "[project]\nname = 'x-y'\nversion = '1'\n" + built_by("'setuptools'", "setuptools.build_meta")
    spec = build_backends.asked(write({"pyproject.toml": text, "data/a.py": "", "models/b.py": ""}))
    (project,) = python_projects.projects(spec.workspace)
    assert "setuptools.build_meta failed: error: Multiple top-level packages" in project.unknown["modules"]


def test_a_build_requirement_without_a_wheel_is_one_line(write: Write) -> None:
    text = "[project]\nname = 'x'\ndynamic = ['version']\n" + built_by("'pyperclip==1.8.2'", "setuptools.build_meta")
    with pytest.raises(StepFailed, match=r"pyproject\.toml:6: .*cannot be installed from wheels: .*pyperclip") as error:
        build_backends.asked(write({"pyproject.toml": text}))
    assert "\n" not in str(error.value)


def test_a_build_backend_that_does_not_end_is_given_up(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_backends, "_SECONDS", 5)
    started = time.monotonic()
    with pytest.raises(StepFailed, match="does not end: given up after 5 s"):
        build_backends.asked(write({"setup.py": "import time\ntime.sleep(3600)\n"}))
    assert time.monotonic() - started < 120


ATTACK = """\
import os, pathlib, socket
from setuptools import setup

found = sorted(name for name, value in os.environ.items() if "correct-horse" in value)
for place in ({host!r}, "/trainyard/library/ask_backend.py", "/trainyard/site/setuptools/__init__.py", "/etc/passwd"):
    try:
        pathlib.Path(place).write_text("changed")
        found.append(place)
    except OSError:
        pass
for address in (("1.1.1.1", 53), ("172.17.0.1", 22)):
    try:
        socket.create_connection(address, 2)
        found.append(address[0])
    except OSError:
        pass
pathlib.Path("{name}.py").write_text("FOUND = " + repr(found) + "; SEEN = " + repr(sorted(os.environ)))
setup(name="{name}", version="1", py_modules=["{name}"], install_requires={requires!r},
      extras_require={{"-".join(found).replace("/", ".").strip(".") or "nothing": []}})
"""


@pytest.mark.needs("git")
def test_no_build_backend_reaches_this_machine(write: Write, tmp_path: Path) -> None:
    """Of the repository, of a folder, of a git repository, and of one that this one needs."""
    host = tmp_path / "written"

    def attack(name: str, *requires: str) -> str:
        return ATTACK.format(name=name, host=str(host), requires=list(requires))

    for name, requires in (("inner", ()), ("outer", (f"inner @ git+file://{tmp_path}/inner",))):
        written(tmp_path / name, {"setup.py": attack(name, *requires)})
        committed(tmp_path / name)
    write(
        {
            "setup.py": attack("own"),
            "libs/folder/setup.py": attack("folder"),
            "requirements.txt": f"./libs/folder\nouter @ git+file://{tmp_path}/outer\n",
        },
        more="requirements: requirements.txt\n",
    )
    environment = os.environ | {"AWS_SECRET_ACCESS_KEY": "correct-horse", "UV_INDEX_X_PASSWORD": "correct-horse"}
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", "lock"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not host.exists()
    spec = model.load(None)
    assert isinstance(spec, RepositorySpec)
    (own,) = [one for one in python_projects.projects(build_backends.asked(spec).workspace) if one.name == "own"]
    assert list(own.optional_dependencies) == ["nothing"]
    made = {one.name.partition("-")[0]: one for one in (spec.build_folder / "wheels").glob("*.whl")}
    assert made.keys() == {"folder", "inner", "outer"} <= spec.locked().versions.keys()
    for name, wheel in made.items():
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(f"{name}.py").decode()
        assert text.startswith("FOUND = []; "), text
        assert "AWS" not in text and "UV_" not in text, text
