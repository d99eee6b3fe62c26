"""The layer of a user's code: its bytes, and that the code imports from it as it does in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import awkward_code

from trainyard.common.errors import StepFailed, UserError
from trainyard.spec.workspace import Site, Workspace, WorkspaceDocument
from trainyard.workspace import code_files, code_layer, python_projects

Write = Callable[..., Workspace]

#: Of an image with Python 3.11; this Python runs its commands.
SITE = Site("opt/venv/lib/python3.11/site-packages", "opt/venv/bin", sys.executable)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files into an own repository; its workspace."""
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)  # the top of the repository, for hosts without git
    monkeypatch.setattr(code_files.shutil, "which", lambda name: None)
    monkeypatch.chdir(folder)

    def write(files: dict[str, str], *code: str, root: str = ".") -> Workspace:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        file = (folder / root / "trainyard.yaml").resolve()
        file.write_text("extends: cpu\n", encoding="utf-8")
        return Workspace(file, WorkspaceDocument(extends="cpu", code=list(code) or ["."]))

    return write


def layer(workspace: Workspace, path: Path) -> code_layer.CodeLayer:
    return code_layer.write(workspace, path, SITE)


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[Workspace], Path]:
    """Write the layer of a workspace and unpack it; the folder, which /workspace of the .pth file refers to."""

    def unpack(workspace: Workspace) -> Path:
        layer(workspace, tmp_path / "code.tar")
        folder = tmp_path / "unpacked"
        with tarfile.open(tmp_path / "code.tar") as tar:
            tar.extractall(folder, filter="tar")
        pth = folder / SITE.packages / "_workspace.pth"
        pth.write_text(pth.read_text(encoding="utf-8").replace("/workspace", f"{folder}/workspace"), encoding="utf-8")
        return folder

    return unpack


def python(folder: Path, code: str) -> str:
    """What code prints that runs with the site directory of an unpacked layer, as in the image, somewhere else."""
    start = f"import site; site.addsitedir({str(folder / SITE.packages)!r})\n"
    command = [sys.executable, "-I", "-c", start + code]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_it_has_the_bytes_that_buildkit_exports(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    awkward_code.write(tmp_path / "code")
    workspace = Workspace(tmp_path / "code" / "trainyard.yaml", WorkspaceDocument(extends="cpu"))
    site = Site("opt/requirements", "opt/requirements/bin", "/usr/bin/env python3")
    written = code_layer.write(workspace, tmp_path / "code.tar", site)
    assert written.diff_id == awkward_code.DIFF_ID
    assert written.size == (tmp_path / "code.tar").stat().st_size
    assert (tmp_path / "code.tar").stat().st_mode & 0o777 == 0o600, "the code may be private"


def test_it_depends_on_the_code_alone(tmp_path: Path) -> None:
    found = set()
    old = os.umask(0o077)
    try:
        for name, umask in (("a", 0o077), ("b", 0o002)):
            os.umask(umask)
            (tmp_path / name / "deep").mkdir(parents=True)
            folder = tmp_path / name / "deep" if name == "b" else tmp_path / name
            for file in ("one.py", "two.py") if name == "a" else ("two.py", "one.py"):
                (folder / file).write_text("x = 1\n", encoding="utf-8")
            (folder / "trainyard.yaml").write_text(f"extends: cpu # {name}\n", encoding="utf-8")
            (folder / "pylock.trainyard.toml").write_text(name, encoding="utf-8")
            workspace = Workspace(
                folder / "trainyard.yaml", WorkspaceDocument(extends="cpu", code=["one.py", "two.py"])
            )
            found.add(layer(workspace, tmp_path / f"{name}.tar"))
    finally:
        os.umask(old)
    assert len(found) == 1


def test_its_entries_have_the_owners_modes_and_times_of_an_image(repository: Write, tmp_path: Path) -> None:
    workspace = repository({"pkg/a.py": "", "train.sh": "", "pyproject.toml": awkward_code.PYPROJECT})
    (workspace.root / "train.sh").chmod(0o700)
    written = layer(workspace, tmp_path / "code.tar")
    with tarfile.open(tmp_path / "code.tar") as tar:
        shown = {member.name: (member.uid, member.gid, oct(member.mode)) for member in tar}
        assert {member.mtime for member in tar} == {315532800}
        assert not any(member.uname or member.gname for member in tar)
    assert shown == {
        "data": (1000, 0, "0o775"),
        "dataset": (1000, 0, "0o777"),
        "datasets": (1000, 0, "0o777"),
        "opt": (0, 0, "0o755"),
        "opt/venv": (0, 0, "0o755"),
        "opt/venv/bin": (0, 0, "0o755"),
        "opt/venv/bin/train": (0, 0, "0o755"),
        "opt/venv/lib": (0, 0, "0o755"),
        "opt/venv/lib/python3.11": (0, 0, "0o755"),
        SITE.packages: (0, 0, "0o755"),
        f"{SITE.packages}/_workspace.pth": (0, 0, "0o644"),
        f"{SITE.packages}/my_package-1.0.dist-info": (0, 0, "0o755"),
        f"{SITE.packages}/my_package-1.0.dist-info/METADATA": (0, 0, "0o644"),
        f"{SITE.packages}/my_package-1.0.dist-info/entry_points.txt": (0, 0, "0o644"),
        "workspace": (1000, 0, "0o775"),
        "workspace/pkg": (1000, 0, "0o775"),
        "workspace/pkg/a.py": (1000, 0, "0o664"),
        "workspace/pyproject.toml": (1000, 0, "0o664"),
        "workspace/train.sh": (1000, 0, "0o775"),
    }
    assert written.files == 3


def test_a_file_that_changes_meanwhile_leaves_no_layer(
    repository: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = repository({"a.py": "x = 1\n"})
    collect = code_files.collect

    def changed(found: Workspace) -> list[code_files.CodeFile]:
        files = collect(found)
        (workspace.root / "a.py").write_text("x = 12\n", encoding="utf-8")
        return files

    monkeypatch.setattr(code_files, "collect", changed)
    with pytest.raises(StepFailed, match=r"^a\.py changed while it was read"):
        layer(workspace, tmp_path / "out" / "code.tar")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "code"),
    [
        pytest.param(
            {"src/mymodel/__init__.py": "", "src/mymodel/net.py": "", "configs/a.yaml": ""},
            ["src", "configs"],
            id="src",
        ),
        pytest.param({"src/mymodel/net.py": ""}, ["src"], id="namespace"),
        pytest.param({"mymodel/__init__.py": "", "mymodel/net.py": ""}, ["."], id="flat"),
        pytest.param({"src/__init__.py": "", "src/mymodel.py": "", "mymodel/net.py": ""}, ["."], id="src is a package"),
    ],
)
def test_code_imports_as_in_the_repository(
    repository: Write, unpacked: Callable[[Workspace], Path], files: dict[str, str], code: list[str]
) -> None:
    folder = unpacked(repository(files, *code))
    assert python(folder, "import mymodel.net; print(mymodel.net.__name__)") == "mymodel.net"


def test_the_top_of_the_repository_imports_too_and_installed_packages_come_first(
    repository: Write, unpacked: Callable[[Workspace], Path]
) -> None:
    folder = unpacked(repository({"helper.py": "", "src/pkg.py": "", "packaging.py": "raise SystemExit(1)"}))
    (folder / SITE.packages / "packaging.py").write_text("", encoding="utf-8")
    python(folder, "import helper, pkg, packaging")


def test_package_data_is_found(repository: Write, unpacked: Callable[[Workspace], Path]) -> None:
    folder = unpacked(repository({"src/pkg/__init__.py": "", "src/pkg/words.txt": "hello"}))
    assert (
        python(folder, "from importlib.resources import files; print(files('pkg').joinpath('words.txt').read_text())")
        == "hello"
    )


def test_metadata_and_commands_of_a_project_are_there_as_if_it_were_installed(
    repository: Write, unpacked: Callable[[Workspace], Path]
) -> None:
    plugin = '[project.entry-points."pkg.models"]\nsmall = "mypackage.train"\n'
    module = "import sys\ndef main():\n    print('trained', sys.argv[1:])\n    return 3\n"
    folder = unpacked(repository({"pyproject.toml": awkward_code.PYPROJECT + plugin, "src/mypackage/train.py": module}))
    assert python(folder, "from importlib.metadata import version; print(version('my-package'))") == "1.0"
    plugins = "from importlib.metadata import entry_points\n[one] = entry_points(group='pkg.models')\n"
    assert python(folder, f"{plugins}print(one.load().__name__)") == "mypackage.train"
    requires = python(
        folder, "from importlib.metadata import requires; print(*requires('my-package'), sep='\\n')"
    ).splitlines()
    assert requires == [
        "numpy>=1",
        "tomli; python_version < '3.11'",
        "pytest ; (python_version > '3') and extra == \"dev\"",
        'ruff ; extra == "dev"',
    ]
    command = folder / SITE.commands / "train"
    environment = {"PYTHONPATH": str(folder / "workspace" / "src")}
    ended = subprocess.run([command, "--epochs=1"], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "trained ['--epochs=1']\n")


def test_alternatives_in_markers_stay_alternatives_of_an_extra(repository: Write) -> None:
    extra = "[project.optional-dependencies]\na=[\"b; os_name=='nt' or os_name=='posix'\"]\n"
    text = f"[project]\nname='x'\nversion='1'\n{extra}"
    [project] = python_projects.projects(repository({"pyproject.toml": text}))
    assert "b ; (os_name=='nt' or os_name=='posix') and extra == \"a\"\n" in code_layer._metadata(project)


def test_a_project_without_a_package_is_not_installed(repository: Write, tmp_path: Path) -> None:
    text = "[project]\nname='x'\nversion='1'\n[project.scripts]\nx='x:x'\n[tool.uv]\npackage=false\n"
    layer(repository({"pyproject.toml": text, "train.py": ""}), tmp_path / "code.tar")
    assert not [name for name in names(tmp_path / "code.tar") if "dist-info" in name or "/bin" in name]


UV_WORKSPACE = """\
[project]
name = "app"
version = "1"
dependencies = ["lib-a", "numpy"]
[tool.uv.sources]
lib-a = {workspace = true}
"""


def test_members_of_the_uv_workspace_that_the_code_needs_are_code(
    repository: Write, unpacked: Callable[[Workspace], Path]
) -> None:
    def member(name: str, needs: str = "") -> str:
        return (
            f"[project]\nname='{name}'\nversion='2'\ndependencies=[{needs!r}]\n"
            if needs
            else f"[project]\nname='{name}'\nversion='2'\n"
        )

    workspace = repository(
        {
            "pyproject.toml": "[tool.uv.workspace]\nmembers=['apps/*', 'libs/*']\nexclude=['libs/d']\n",
            "apps/app/pyproject.toml": UV_WORKSPACE,
            "apps/app/train.py": "",
            "libs/a/pyproject.toml": member("lib_a", "lib-b>=1") + "[tool.uv.sources]\nlib-b={workspace=true}\n",
            "libs/a/src/lib_a/__init__.py": "import lib_b",
            "libs/b/pyproject.toml": member("Lib.B"),
            "libs/b/lib_b.py": "",
            "libs/c/pyproject.toml": member("lib-c"),
            "libs/c/lib_c.py": "",
            "libs/d/pyproject.toml": "not TOML",
        },
        root="apps/app",
    )
    assert {project.name for project in python_projects.projects(workspace)} == {"app", "lib_a", "Lib.B"}
    folder = unpacked(workspace)
    assert sorted(path.name for path in (folder / "workspace" / "libs").iterdir()) == ["a", "b"]
    python(folder, "import lib_a, train")


def test_a_dependency_that_is_no_member_of_the_uv_workspace_is_refused(repository: Write) -> None:
    workspace = repository({"pyproject.toml": UV_WORKSPACE + "[tool.uv.workspace]\nmembers=[]\n"})
    with pytest.raises(UserError, match=r"^pyproject\.toml:4: 'lib-a' is not a member of the uv workspace"):
        python_projects.projects(workspace)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[project\n", "pyproject.toml:1: not valid TOML: "),
        ("\n[project]\nversion='1'\n", "pyproject.toml:2: [project] has no name"),
        ("[project]\nname='x'\nversion='one'\n", "pyproject.toml:3: 'one' is not a version"),
        ("[project]\nname='x'\nversion='1'\ndependencies=[\n'a b']\n", "pyproject.toml:5: 'a b' is not a requirement"),
        ("[project]\nname='x'\nversion='1'\ndependencies='numpy'\n", "pyproject.toml:4: dependencies: expected a list"),
        ("[project]\nname='x'\nversion='1'\nrequires-python='3'\n", "pyproject.toml:4: '3' is not a range of versions"),
        (
            "[project]\nname='x'\nversion='1'\n[project.scripts]\nt='a b:c'\n",
            "pyproject.toml:5: t = 'a b:c': not an object",
        ),
        (
            "[project]\nname='x'\nversion='1'\n[project.scripts]\nt='a.b'\n",
            "pyproject.toml:5: t = 'a.b': not an object",
        ),
        (
            "[project]\nname='x'\nversion='1'\n[project.scripts]\n'../t'='a:b'\n",
            "pyproject.toml:5: '../t' is not a name",
        ),
        ("[project]\nname='../x'\nversion='1'\n", "pyproject.toml:2: '../x' is not a name of a project"),
    ],
)
def test_mistakes_in_pyproject_toml_are_one_line(repository: Write, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        python_projects.projects(repository({"pyproject.toml": text}))
    assert str(error.value).startswith(words)
