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
            (folder / "trainyard.lock").write_text(name, encoding="utf-8")
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
        pytest.param(
            {"lib/mymodel/net.py": "", "pyproject.toml": "[tool.setuptools.packages.find]\nwhere = ['lib']\n"},
            ["."],
            id="where",
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "pyproject.toml": "[tool.setuptools.package-dir]\n'' = 'lib'\n"},
            ["."],
            id="package-dir",
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "pyproject.toml": "[tool.setuptools.package-dir]\nmymodel = 'lib/mymodel'\n"},
            ["."],
            id="package-dir of one",
        ),
        pytest.param(
            {
                "lib/mymodel/net.py": "",
                "pyproject.toml": "[tool.hatch.build.targets.wheel]\npackages = ['lib/mymodel']\n",
            },
            ["."],
            id="hatch packages",
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "pyproject.toml": "[tool.hatch.build.targets.wheel]\nsources = ['lib']\n"},
            ["."],
            id="hatch sources",
        ),
        pytest.param(
            {
                "lib/mymodel/net.py": "",
                "pyproject.toml": "[tool.poetry]\npackages = [{include = 'mymodel', from = 'lib'}]\n",
            },
            ["."],
            id="poetry",
        ),
        pytest.param(
            {"mymodel/net.py": "", "pyproject.toml": "[tool.uv.build-backend]\nmodule-root = ''\n"}, ["."], id="uv flat"
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "pyproject.toml": "[tool.pdm.build]\npackage-dir = 'lib'\n"}, ["."], id="pdm"
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "setup.cfg": "[metadata]\nname = x\n[options]\npackage_dir =\n  = lib\n"},
            ["."],
            id="setup.cfg",
        ),
        pytest.param(
            {"lib/mymodel/net.py": "", "setup.cfg": "[metadata]\nname = x\n[options.packages.find]\nwhere = lib\n"},
            ["."],
            id="setup.cfg where",
        ),
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
    ("files", "version"),
    [
        ({"pkg/__init__.py": '__version__ = "1.2"'}, "1.2"),
        ({"src/pkg/__init__.py": '"""Doc."""\n__version__: str = "1.2"'}, "1.2"),
        ({"pkg/about.py": 'VERSION = "v1.2"', "+": "[tool.hatch.version]\npath='pkg/about.py'\n"}, "1.2"),
        ({"V": "release: 1.2", "+": "[tool.hatch.version]\npath='V'\npattern='release: (?P<version>.*)'\n"}, "1.2"),
        ({"pkg/a.py": "V = '1.2'", "+": "[tool.setuptools.dynamic]\nversion={attr='pkg.a.V'}\n"}, "1.2"),
        ({"VERSION": "1.2\n", "+": "[tool.setuptools.dynamic]\nversion={file=['VERSION']}\n"}, "1.2"),
        ({"pkg.py": "__version__ = '1.2'", "+": "[tool.pdm.version]\nsource='file'\npath='pkg.py'\n"}, "1.2"),
        ({"PKG-INFO": "Metadata-Version: 2.1\nName: PKG\nVersion: 1.2\n"}, "1.2"),
        ({"PKG-INFO": "Metadata-Version: 2.1\nName: other\nVersion: 1.2\n"}, None),
        ({"pkg/__init__.py": "__version__ = find()"}, None),
        ({"+": "[tool.setuptools_scm]\n"}, None),
    ],
)
def test_dynamic_versions_are_read_from_the_file_that_the_backend_is_told(
    repository: Write, files: dict[str, str], version: str | None
) -> None:
    text = "[project]\nname='pkg'\ndynamic=['version', 'readme']\n" + files.pop("+", "")
    [project] = python_projects.projects(repository(files | {"pyproject.toml": text}))
    assert project.version == version
    assert ("version" in project.unknown) is (version is None)


@pytest.mark.needs("git")
@pytest.mark.parametrize(("commits", "version"), [(0, "1.2"), (2, "1.3.dev2")])
def test_versions_from_tags_count_commits_as_setuptools_scm_does(tmp_path: Path, commits: int, version: str) -> None:
    def git(*arguments: str) -> None:
        words = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments]
        subprocess.run(words, check=True, capture_output=True)

    text = "[project]\nname='pkg'\ndynamic=['version']\n[tool.setuptools_scm]\n"
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "a")
    git("tag", "v1.2")
    for _ in range(commits):
        git("commit", "--quiet", "--allow-empty", "-m", "b")
    project = python_projects.read(tmp_path)
    assert project and project.version == version


def test_what_is_dynamic_and_unknown_is_one_line_each(repository: Write, tmp_path: Path) -> None:
    text = "[project]\nname='pkg'\ndynamic=['version', 'dependencies', 'scripts', 'classifiers']\n"
    workspace = repository({"pyproject.toml": text, "pkg.py": ""})
    written = layer(workspace, tmp_path / "code.tar")
    assert [note.partition(" is dynamic")[0] for note in written.notes] == [
        "pyproject.toml:3: version", "pyproject.toml:3: dependencies", "pyproject.toml:3: scripts",
    ]  # fmt: skip
    assert not [name for name in names(tmp_path / "code.tar") if "dist-info" in name]


@pytest.mark.parametrize(
    "settings",
    [
        "[tool.setuptools.dynamic]\ndependencies={file=['requirements.txt']}\n",
        "[tool.hatch.metadata.hooks.requirements_txt]\nfiles=['requirements.txt']\n",
    ],
)
def test_dynamic_dependencies_are_read_from_the_file_that_the_backend_is_told(repository: Write, settings: str) -> None:
    text = "[project]\nname='pkg'\nversion='1'\ndynamic=['dependencies']\n" + settings
    workspace = repository({"pyproject.toml": text, "requirements.txt": "# a\nnumpy>=1  # b\n\neinops\n"})
    [project] = python_projects.projects(workspace)
    assert (project.dependencies, dict(project.unknown)) == (("numpy>=1", "einops"), {})


SETUP_CFG = """\
[metadata]
name = pkg
version = attr: pkg.__version__
[options]
python_requires = >=3.10
install_requires =
    numpy>=1
    # a comment
    einops
[options.extras_require]
dev = pytest
[options.entry_points]
console_scripts =
    train = pkg.train:main
"""


def test_projects_of_setup_cfg_are_read(repository: Write) -> None:
    files = {"setup.cfg": SETUP_CFG, "setup.py": "from setuptools import setup\nsetup()\n"}
    [project] = python_projects.projects(repository(files | {"pkg/__init__.py": "__version__ = '3.1'\n"}))
    assert (project.name, project.version, project.requires_python) == ("pkg", "3.1", ">=3.10")
    assert project.dependencies == ("numpy>=1", "einops")
    assert (project.optional_dependencies, project.scripts) == ({"dev": ("pytest",)}, {"train": "pkg.train:main"})
    assert not project.unknown


SETUP_PY = """\
from setuptools import find_packages, setup
setup(
    name="pkg", version="3.2", packages=find_packages("lib"), package_dir={"": "lib"},
    install_requires=["numpy>=1"], extras_require={"dev": "pytest"},
    entry_points={"console_scripts": ["train = pkg:main"]},
)
"""


def test_literals_of_setup_py_are_read_without_running_it(
    repository: Write, unpacked: Callable[[Workspace], Path]
) -> None:
    workspace = repository({"setup.py": SETUP_PY, "lib/pkg.py": ""})
    [project] = python_projects.projects(workspace)
    assert (project.name, project.version, project.dependencies) == ("pkg", "3.2", ("numpy>=1",))
    assert (project.optional_dependencies, project.scripts) == ({"dev": ("pytest",)}, {"train": "pkg:main"})
    version = "import pkg; from importlib.metadata import version; print(version('pkg'))"
    assert python(unpacked(workspace), version) == "3.2"


def test_what_setup_py_computes_is_one_line_each(repository: Write) -> None:
    text = "from setuptools import setup\nsetup(\n  name='pkg',\n  version=read(),\n  install_requires=read(),\n)\n"
    [project] = python_projects.projects(repository({"setup.py": text, "pkg.py": ""}))
    assert [note.partition(":")[0] + note[8:11] for note in project.unknown.values()] == ["setup.py:4:", "setup.py:5:"]


def test_requirements_files_that_setup_cfg_names_are_read(repository: Write) -> None:
    text = "[metadata]\nname = pkg\nversion = 1\n[options]\ninstall_requires = file: requirements.txt\n"
    [project] = python_projects.projects(repository({"setup.cfg": text, "requirements.txt": "numpy\n# a\neinops\n"}))
    assert project.dependencies == ("numpy", "einops")


def test_source_distributions_of_setup_py_have_the_metadata_of_their_pkg_info(repository: Write) -> None:
    info = "Metadata-Version: 2.1\nName: pkg\nVersion: 4.0\nProvides-Extra: dev\nRequires-Dist: numpy\n"
    files = {
        "setup.py": "from setuptools import setup\nsetup(install_requires=read())\n",
        "PKG-INFO": info + 'Requires-Dist: ruff; extra == "dev"\n',
        "pkg.egg-info/entry_points.txt": "[console_scripts]\ntrain = pkg:main\n",
    }
    [project] = python_projects.projects(repository(files))
    assert (project.version, project.dependencies, project.scripts) == ("4.0", ("numpy",), {"train": "pkg:main"})
    assert project.optional_dependencies == {"dev": ('ruff; extra == "dev"',)}
    assert 'Requires-Dist: ruff; extra == "dev"' in code_layer._metadata(project)


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
