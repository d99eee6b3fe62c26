"""What is read of a project, of its static table and of what its build backend tells, and when that is asked again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.common.context import Context
from trainyard.common.errors import UserError
from trainyard.image import ask_backend, build_backends
from trainyard.image.build_backends import Answer
from trainyard.spec import model
from trainyard.spec.workspace import Told, Workspace, WorkspaceDocument
from trainyard.workspace import python_projects, requirements
from trainyard.workspace.project import Project

METADATA = """\
Metadata-Version: 2.2
Name: My.Model
Version: 1.3.dev2+g0123abcd.d20261127
Requires-Python: >=3.10
Requires-Dist: einops>=0.7
Requires-Dist: helper @ file:///trainyard/project/helper
Requires-Dist: ruff>=1; python_version > "3" and extra == "dev"
Provides-Extra: dev
Provides-Extra: empty

A description.
"""
TOLD = Told(METADATA, "[console_scripts]\ntrain = pkg.train:main [dev]\n\n[pkg.models]\nsmall = pkg\n", ("lib",))
SETUP_PY = {"setup.py": "raise SystemExit('it ran')\n", "lib/pkg/__init__.py": ""}
POETRY = (
    '[tool.poetry]\nname = "x"\n[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'
)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def workspace(root: Path, told: Told | None = None, **document: object) -> Workspace:
    (root / "trainyard.yaml").write_text(json.dumps({"extends": "cpu", **document}), encoding="utf-8")
    described = WorkspaceDocument.model_validate({"extends": "cpu", **document})
    return Workspace(root / "trainyard.yaml", described, told={root: told} if told else {})


def read(root: Path, told: Told | None = None) -> Project:
    project = python_projects.read(root, told)
    assert project
    return project


# What a build backend tells


@pytest.mark.parametrize("files", [SETUP_PY, {"pyproject.toml": POETRY, "lib/pkg/__init__.py": ""}])
def test_a_project_without_a_table_is_what_its_build_backend_tells(tmp_path: Path, files: dict[str, str]) -> None:
    project = read(written(tmp_path, files), TOLD)
    assert (project.name, project.version, project.requires_python) == ("My.Model", "1.3.dev2", ">=3.10")
    assert project.dependencies == ("einops>=0.7", "helper @ file:///trainyard/project/helper")
    assert project.optional_dependencies == {"dev": ('ruff>=1; python_version > "3" and extra == "dev"',), "empty": ()}
    assert (project.scripts, project.entry_points["pkg.models"]) == ({"train": "pkg.train:main"}, {"small": "pkg"})
    assert project.import_roots == (tmp_path / "lib",)
    assert not project.pending and not project.unknown


def test_a_static_table_comes_before_what_its_build_backend_tells(tmp_path: Path) -> None:
    text = '[project]\nname = "mine"\ndynamic = ["version", "scripts"]\ndependencies = ["tqdm"]\n'
    project = read(written(tmp_path, {"pyproject.toml": text, "lib/x.py": ""}), TOLD)
    assert (project.name, project.version, project.dependencies) == ("mine", "1.3.dev2", ("tqdm",))
    assert project.scripts == {"train": "pkg.train:main"} and project.optional_dependencies == {}


@pytest.mark.parametrize(
    ("version", "public"),
    [("1.0+cpu", "1.0+cpu"), ("1.0+g0123abc", "1.0"), ("1.0+d20261127", "1.0"), ("0+unknown", "0+unknown")],
)
def test_a_version_is_without_its_commit_and_day(tmp_path: Path, version: str, public: str) -> None:
    written(tmp_path, SETUP_PY)
    assert read(tmp_path, Told(f"Metadata-Version: 2.1\nName: a\nVersion: {version}\n")).version == public


def test_its_requirements_are_those_that_its_build_backend_tells(tmp_path: Path) -> None:
    written(tmp_path, {"a/pyproject.toml": POETRY, "helper/setup.py": ""})
    (tmp_path / ".git").mkdir()
    found = workspace(tmp_path / "a", TOLD, requirements={"file": "pyproject.toml", "extras": ["dev"]})
    wanted = requirements.read(found, "3.13")
    assert [line.text for line in wanted.lines] == [
        "einops>=0.7", "ruff>=1; python_version > \"3\" and python_version > '0'",
    ]  # fmt: skip
    assert [source.location for source in wanted.sources] == [str(tmp_path / "helper")]


def test_what_is_no_project_for_setuptools_is_none(tmp_path: Path) -> None:
    written(tmp_path, {"pyproject.toml": "[tool.black]\n", "setup.cfg": "[flake8]\n"})
    assert python_projects.read(tmp_path) is None
    written(tmp_path, {"setup.cfg": "[metadata]\n"})
    assert read(tmp_path).pending
    assert python_projects.read(tmp_path, Told("Metadata-Version: 2.1\nName: UNKNOWN\nVersion: 0.0.0\n")) is None


def test_a_build_backend_that_failed_is_one_line_where_it_matters(tmp_path: Path) -> None:
    text = '[project]\nname = "mine"\ndynamic = ["version"]\n[build-system]\nbuild-backend = "hatchling.build"\n'
    written(tmp_path, {"pyproject.toml": text})
    project = read(tmp_path, Told(failure="ValueError: no version"))
    assert project.unknown["version"].startswith(
        f"{tmp_path}/pyproject.toml:5: the build backend hatchling.build failed: ValueError: no version: version is "
    )
    written(tmp_path, {"pyproject.toml": POETRY})
    with pytest.raises(
        UserError, match=r":5: the build backend poetry\.core\.masonry\.api failed: E: its dependencies are not"
    ):
        requirements.read(workspace(tmp_path, Told(failure="E")), "3.13")
    assert requirements.read(workspace(tmp_path, Told(failure="E"), requirements=["tqdm"]), "3.13").lines


# What has to be asked

STATIC = '[project]\nname = "my-pkg"\nversion = "1"\n[build-system]\nrequires = ["hatchling"]\n'


@pytest.mark.parametrize(
    ("files", "pending"),
    [
        ({"pyproject.toml": '[project]\nname = "x"\nversion = "1"\n', "train.py": ""}, ""),
        ({"pyproject.toml": STATIC, "src/my_pkg/__init__.py": ""}, ""),
        ({"pyproject.toml": STATIC, "my_pkg.py": ""}, ""),
        ({"pyproject.toml": STATIC, "lib/my_pkg/__init__.py": ""}, "the folders of its modules"),
        ({"pyproject.toml": STATIC + '[project.scripts]\na = "b.c:d"\n', "src/b/c.py": ""}, ""),
        (
            {"pyproject.toml": STATIC + '[project.scripts]\na = "b.c:d"\n', "my_pkg.py": ""},
            "the folders of its modules",
        ),
        ({"pyproject.toml": STATIC + "[tool.uv]\npackage = false\n"}, ""),
        ({"pyproject.toml": STATIC.replace('version = "1"', 'dynamic = ["version", "readme"]')}, "version"),
        (
            {"pyproject.toml": STATIC, "my_pkg.py": "", "setup.py": "setup(ext_modules=[x])"},
            "the folders of its modules",
        ),
        ({"pyproject.toml": POETRY}, "name, version, dependencies and scripts"),
        ({"setup.py": ""}, "name, version, dependencies and scripts"),
    ],
)
def test_a_build_backend_is_asked_for_what_no_static_table_says(
    tmp_path: Path, files: dict[str, str], pending: str
) -> None:
    found = workspace(written(tmp_path, files))
    assert [project.pending for project in python_projects.pending(found)] == ([pending] if pending else [])
    assert [pending in note and "'trainyard lock' asks it" in note for note in python_projects.notes(found)] == (
        [True] if pending else []
    )
    assert python_projects.pending(workspace(tmp_path, Told(failure="any"))) == []


@pytest.mark.parametrize("folder", ["", "setup.cfg"])
def test_a_folder_without_a_build_is_no_project(tmp_path: Path, folder: str) -> None:
    written(tmp_path, {"train.py": "", **({"setup.cfg": "[metadata]\nname = a\n"} if folder else {})})
    assert python_projects.read(tmp_path) is None


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("requires = 'x'", "requires: expected a list"),
        ("requires = ['--index-url=https://host']", "requires: '--index-url=https://host' is no requirement"),
        ("requires = ['x @ git+https://host/x']", "requires: x has an address"),
        ("build-backend = '--x'", "build-backend: not an object"),
        ("backend-path = 1", "backend-path: expected a list"),
    ],
)
def test_a_mistake_in_a_build_system_is_one_line(tmp_path: Path, system: str, said: str) -> None:
    written(tmp_path, {"pyproject.toml": f"[build-system]\n{system}\n"})
    with pytest.raises(UserError, match=r"pyproject\.toml:2: build-system\.") as error:
        python_projects.backend(tmp_path)
    assert said in str(error.value)


def test_without_builds_none_is_asked(tmp_path: Path) -> None:
    backends = build_backends.Backends(Context(state=tmp_path / "state", no_build=True), "debian-13")
    written(tmp_path / "a", {"pyproject.toml": POETRY})
    with pytest.raises(UserError, match=r"poetry\.core\.masonry\.api tells name.*, and '--no-build' lets none run"):
        backends.told(read(tmp_path / "a"))
    with pytest.raises(UserError, match=r"^reqs:1: \./a: the build backend poetry.* '--no-build' lets none run"):
        backends.wheel("reqs:1: ./a", tmp_path / "a", ["pyproject.toml"], tmp_path / "out")


# What runs in the container


def test_the_folders_of_modules_are_those_that_an_installation_makes_importable(tmp_path: Path) -> None:
    project = written(
        tmp_path / "project",
        {"src/a/__init__.py": "", "lib/b/__init__.py": "", "lib/c.py": "", "other/d/__init__.py": "", "tests/e.py": ""},
    )
    finder = (
        "import importlib.machinery, importlib.util, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        places = {{'b': {str(project / 'lib/b/__init__.py')!r}, 'c': {str(project / 'lib/c.py')!r}}}\n"
        "        if name in places:\n"
        "            return importlib.util.spec_from_file_location(name, places[name])\n"
        "sys.meta_path.append(Finder)\n"
    )
    site = written(tmp_path / "site", {"x.pth": f"{project}/src\nimport _finder\n", "_finder.py": finder})
    command = [sys.executable, "-I", ask_backend.__file__, "--roots", str(site), str(project), str(tmp_path / "found")]
    subprocess.run(command, check=True, cwd="/")
    assert sorted(json.loads((tmp_path / "found").read_text())) == ["lib", "src"]


def test_what_a_build_backend_reads_and_starts_is_recorded(tmp_path: Path) -> None:
    library = Path(ask_backend.__file__).with_name("record_reads.py").read_text(encoding="utf-8")
    project = written(tmp_path / "project", {"a.txt": "", "b.txt": "", "c.txt": ""})
    written(tmp_path / "library", {"sitecustomize.py": library})
    (tmp_path / "site").mkdir()
    code = "import subprocess, sys; open('a.txt'); subprocess.run([sys.executable, '-c', 'open(\"b.txt\")'])\n"
    code += "subprocess.run(['/bin/true'])"
    variables = {
        "PYTHONPATH": str(tmp_path / "library"),
        "TRAINYARD_RECORD": str(tmp_path / "record"),
        "TRAINYARD_PROJECT": str(project),
        "TRAINYARD_SITE": str(tmp_path / "site"),
    }
    subprocess.run([sys.executable, "-s", "-c", code], check=True, cwd=project, env=variables)
    lines = (tmp_path / "record").read_text().splitlines()
    assert {"read a.txt", "read b.txt", "run true"} <= set(lines) and "read c.txt" not in lines


@pytest.mark.parametrize(("image", "asked_in"), [("", [""]), ("trainyard:cpu", ["", "trainyard:cpu"])])
def test_a_build_backend_that_lacks_a_module_of_the_target_is_asked_in_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, asked_in: list[str]
) -> None:
    asked: list[str] = []

    def answer(_: object, *arguments: object) -> Answer:
        asked.append(str((*arguments, "")[4]))
        log = "" if asked[-1] else "ModuleNotFoundError: No module named 'torch'\n"
        return Answer({"metadata": METADATA} if asked[-1] else {"failure": "x"}, log, frozenset(), frozenset())

    monkeypatch.setattr(build_backends.Backends, "_run", answer)
    monkeypatch.setattr(build_backends.Backends, "_target_image", image)
    written(tmp_path / "a", SETUP_PY)
    backends = build_backends.Backends(Context(state=tmp_path / "state"), "debian-13", model.load("cpu"))
    told = backends.told(read(tmp_path / "a"))
    assert asked == asked_in
    assert told.failure == ("" if image else "ModuleNotFoundError: No module named 'torch' (which cpu has: after "
                            "'trainyard image cpu' it is asked in that image)")  # fmt: skip
    assert backends.told(read(tmp_path / "a")) == told and asked == asked_in  # it is kept


# What is kept


def kept(root: Path, reads: set[str], programs: set[str] = frozenset()) -> tuple[build_backends.Backends, Path]:  # type: ignore[assignment]
    backends = build_backends.Backends(Context(state=root / "state", no_build=True), "debian-13")
    folder, names = root / "a", ["pyproject.toml", "train.py", "pkg.py"]
    path = backends._kept(python_projects.backend(folder), sorted(names))
    answer = Answer({}, "", frozenset(reads), frozenset(programs))
    build_backends._keep(path, TOLD, folder, names, answer, "")
    return backends, folder


def test_an_answer_holds_until_a_file_that_was_read_or_the_names_change(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {"pyproject.toml": POETRY, "train.py": "", "pkg.py": "__version__ = '1'\n"})
    backends, folder = kept(tmp_path, {"pyproject.toml", "pkg.py"})
    assert backends.told(read(folder)) == TOLD
    written(folder, {"train.py": "edited = 1\n"})
    assert backends.told(read(folder)) == TOLD
    for change in ({"pkg.py": "__version__ = '2'\n"}, {"pkg.py": "__version__ = '1'\n", "more.py": ""}):
        written(folder, change)
        with pytest.raises(UserError, match="--no-build"):
            backends.told(read(folder))


def test_an_answer_with_a_program_that_may_have_read_anything_holds_for_the_same_files(tmp_path: Path) -> None:
    written(tmp_path / "a", {"pyproject.toml": POETRY, "train.py": "", "pkg.py": ""})
    backends, folder = kept(tmp_path, set(), {"python3", "make"})
    assert backends.told(read(folder)) == TOLD
    written(folder, {"train.py": "edited = 1\n"})
    with pytest.raises(UserError, match="--no-build"):
        backends.told(read(folder))


# What it says of a failure


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Traceback ...\n  File x\nValueError: no version\n\nnote: this\n", "ValueError: no version"),
        ("a\nerror: command 'gcc' failed: No such file\nb\n", "error: command 'gcc' failed: No such file"),
        ("https://me:secret@host/x is not there", "https://host/x is not there"),
        ("", "its hook for metadata failed"),
    ],
)
def test_a_failure_is_its_last_error(log: str, said: str) -> None:
    assert Answer({"failure": "its hook for metadata failed"}, log, frozenset(), frozenset()).failure == said


@pytest.mark.parametrize(
    ("program", "compiles"),
    [
        ("gcc", True),
        ("x86_64-linux-gnu-gcc-14", True),
        ("cargo", True),
        ("cmake", True),
        ("git", False),
        ("cat", False),
    ],
)
def test_a_failure_after_a_compiler_was_started_is_that_of_compiling(program: str, compiles: bool) -> None:
    assert Answer({"failure": "x"}, "", frozenset(), frozenset({program})).compiles is compiles
    assert not Answer({}, "", frozenset(), frozenset({program})).compiles


@pytest.mark.parametrize("text", ["", "[]", '{"metadata": 1}', '{"roots": [1]}', "[" * 100_000])
def test_an_answer_of_another_form_is_a_failure(text: str) -> None:
    assert build_backends._facts(text.encode()) == {"failure": "it wrote no answer"}


@pytest.mark.needs("git")
def test_the_version_of_a_commit_is_told_as_git_archive_tells_it(tmp_path: Path) -> None:
    assert build_backends._archival(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"], ["tag", "v1.2"]):
        subprocess.run([*git, *words], check=True)
    node, describe = build_backends._archival(tmp_path).splitlines()
    assert node.startswith("node: ") and describe == "describe-name: v1.2"
