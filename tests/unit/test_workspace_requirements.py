"""A workspace's requirements are read from the files of its tools, with the file and line of everything."""

from __future__ import annotations

import base64
import os
import subprocess
import textwrap
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from tests import workspaces
from tests.fakes.package_index import PackageIndex, wheel
from tests.fakes.server import Listener

from trainyard.common.errors import StepFailed, UserError
from trainyard.spec import model
from trainyard.spec.lock import File, Made, Pin
from trainyard.spec.workspace import Workspace
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Line, Source

Write = Callable[..., Workspace]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the files of a repository (their names with ``__`` for ``/`` and ``_`` for ``.``); its workspace."""
    root = tmp_path / "repository"
    (root / ".git").mkdir(parents=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))

    def run(yaml: str = "", **files: str) -> Workspace:
        names = {"requirements": "requirements.txt", "pyproject": "pyproject.toml", "uv": "uv.toml"}
        (root / "trainyard.yaml").write_text("extends: tf-cpu\nrun: python train.py\n" + yaml, encoding="utf-8")
        for name, text in files.items():
            path = root / names.get(name, name.replace("__", "/").replace("_txt", ".txt").replace("_toml", ".toml"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        found = model.load(None).workspace
        assert found is not None
        return found

    return run


def texts(ws: Workspace) -> list[str]:
    return [f"{line.where} {line.text}" for line in requirements.read(ws, "3.11").lines]


def test_a_requirements_file_is_read_with_what_it_includes(write: Write) -> None:
    ws = write(
        "requirements: requirements.txt\n",
        requirements="""\
            # what it needs
            einops >= 0.5   # a range
            requests[socks] \\
                ; python_version < "3.12" \\
                --hash=sha256:{sha}
            -r more__more.txt
            -c limits.txt
        """.replace("more__more", "more/more").replace("{sha}", "00" * 32),
        more__more_txt="tqdm\n",
        limits_txt="tqdm<5\n",
    )
    assert texts(ws) == [
        "requirements.txt:2 einops >= 0.5",
        'requirements.txt:3 requests[socks] ; python_version < "3.12"',
        "more/more.txt:1 tqdm",
    ]
    assert [line.text for line in requirements.read(ws, "3.11").constraints] == ["tqdm<5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("einops\nbad==\n", "requirements.txt:2: 'bad=='"),
        ("-r missing.txt\n", "requirements.txt:1: no file 'missing.txt'"),
        ("-r requirements.txt\n", "requirements.txt:1: '-r requirements.txt' includes itself"),
        ("--find-links ./wheels\n", "requirements.txt:1: '--find-links ./wheels': a folder of this machine"),
        ("--no-binary flash-attn\n", "requirements.txt:1: '--no-binary flash-attn': what is compiled is listed"),
        (
            "tqdm\neinops==1 --hash=sha256:zz\n",
            "requirements.txt:2: 'sha256:zz' is no hash that pip takes: write sha256: and 64",
        ),
        (
            "einops==1 --hash sha256:\n",
            "requirements.txt:1: 'sha256:' is no hash that pip takes: write sha256: and 64",
        ),
        (
            f"einops==1 --hash=md5:{'0' * 32}\n",
            f"requirements.txt:1: 'md5:{'0' * 32}' is no hash that pip takes: write sha256:",
        ),
        (
            f"a==1 --hash=sha256:{'0' * 64}\ntqdm==1\n--require-hashes\n",
            "requirements.txt:2: 'tqdm==1' has no --hash, and requirements.txt:3 requires hashes",
        ),
        (
            "--require-hashes\nhttps://host/a-1-py3-none-any.whl\n",
            "requirements.txt:2: 'https://host/a-1-py3-none-any.whl' has no --hash, and requirements.txt:1",
        ),
        ("--no-index\n", "requirements.txt:1: '--no-index' has no place in an image"),
        ("x @ git+https://${NO_SUCH_TOKEN}@host/x\n", "requirements.txt:1: the environment variable NO_SUCH_TOKEN"),
    ],
)
def test_a_mistake_in_a_requirements_file_is_one_line_with_its_place(write: Write, text: str, message: str) -> None:
    ws = write("requirements: requirements.txt\n", requirements=text)
    with pytest.raises(UserError) as error:
        requirements.read(ws, "3.11")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_hashes_are_required_of_the_lines_of_the_image_alone(write: Write) -> None:
    sha = f"--hash=sha256:{'0' * 64}"
    address = f"https://host/b-1-py3-none-any.whl#sha256={'0' * 64}"
    text = f"--require-hashes\na==1 {sha}\nwin==1 ; sys_platform == 'win32'\n{address}\nc==1\n-c limits.txt\n"
    ws = write("requirements: requirements.txt\n", requirements=text, limits_txt=f"c==1 {sha}\n")
    assert len(requirements.read(ws, "3.11").lines) == 3


def test_messages_never_show_a_password(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    ws = write(
        "requirements: requirements.txt\n",
        requirements="--index-url https://user:hunter2@host/simple\nx @ git+https://hunter2@host/x\n",
    )
    wanted = requirements.read(ws, "3.11")
    assert "hunter2" not in repr(wanted.sources[0])
    assert "hunter2" not in wanted.sources[0].shown
    found = indexes.of_project(ws, wanted.addresses)
    assert "hunter2" not in repr(found)
    assert indexes.environment(found) == {
        "UV_INDEX_REQUIREMENTS_1_USERNAME": "user",
        "UV_INDEX_REQUIREMENTS_1_PASSWORD": "hunter2",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x @ https://user:hunter2/a@host/x.whl ; os_name == 'posix'", "x @ https://host/x.whl ; os_name == 'posix'"),
        ("https://user:a@hunter2@host/x.whl", "https://host/x.whl"),
        ("https://host/x-1.whl?X-Amz-Signature=hunter2&X=1#sha256=0a", "https://host/x-1.whl#sha256=0a"),
        ("cannot get `https://host/x.whl?sig=hunter2`: 403", "cannot get `https://host/x.whl`: 403"),
        ("git+https://host:8443/x@v1", "git+https://host:8443/x@v1"),
        ("git+https://user:hunter2@host:8443/x@v1", "git+https://host:8443/x@v1"),
        ("git+http://[::1]:8443/x@v1", "git+http://[::1]:8443/x@v1"),
        ("x[all]~=1.0 ; python_version<'3.12' # why?", "x[all]~=1.0 ; python_version<'3.12' # why?"),
    ],
)
def test_passwords_and_signatures_are_left_out_of_addresses_alone(text: str, shown: str) -> None:
    assert Line(text, Path("requirements.txt"), 1).shown == shown


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("requirements", "x @ https://user:hunter2@host/a b\n"),
        ("requirements", "x @ https://host/x.whl?sig=hunter2 b\n"),
        ("requirements", "--no-binary x https://user:hunter2@host\n"),
        ("pyproject", '[project]\nname = "m"\nversion = "1"\ndependencies = ["x @ https://user:hunter2@host/a b"]\n'),
    ],
)
def test_a_mistake_beside_a_password_does_not_show_it(write: Write, file: str, text: str) -> None:
    ws = write("requirements: requirements.txt\n" if file == "requirements" else "", **{file: text})
    with pytest.raises(UserError) as error:
        requirements.read(ws, "3.11")
    assert "https://host" in str(error.value) and "hunter2" not in str(error.value)


def test_a_misspelt_file_has_the_nearest_name(write: Write) -> None:
    ws = write("requirements: requirments.txt\n", requirements="tqdm\n")
    message = r"^trainyard\.yaml:3: requirements: no file 'requirments\.txt' \(did you mean 'requirements\.txt'\?\)$"
    with pytest.raises(UserError, match=message):
        requirements.read(ws, "3.11")


PROJECT = """\
    [project]
    name = "Mine"
    version = "1"
    requires-python = ">=3.10"
    dependencies = [
      "einops",
    ]
    [project.optional-dependencies]
    plots = ["matplotlib>=3"]
    all = ["mine[plots]", "rich"]
    [dependency-groups]
    train = ["tqdm", {include-group = "data"}]
    data = ["pyarrow"]
    [tool.uv]
    constraint-dependencies = ["rich<20"]
    override-dependencies = ["typer>=0.1"]
"""


def test_extras_and_groups_of_a_project_are_read(write: Write) -> None:
    ws = write("requirements: {file: pyproject.toml, extras: [all], groups: [train]}\n", pyproject=PROJECT)
    assert texts(ws) == [
        "pyproject.toml:6 einops",
        "pyproject.toml:9 matplotlib>=3",
        "pyproject.toml:10 rich",
        "pyproject.toml:12 tqdm",
        "pyproject.toml:13 pyarrow",
    ]
    wanted = requirements.read(ws, "3.11")
    assert [line.text for line in wanted.constraints] == ["rich<20"]
    assert [line.text for line in wanted.overrides] == ["typer>=0.1"]
    assert [(line.text, line.number) for line in wanted.requires_python] == [(">=3.10", 4)]
    assert wanted.provided == {"mine"}


def test_without_requirements_they_are_those_of_the_projects_of_the_code(write: Write) -> None:
    assert texts(write(pyproject=PROJECT)) == ["pyproject.toml:6 einops"]
    assert texts(write("requirements: []\n", pyproject=PROJECT)) == []


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("extras: [plot]", "pyproject.toml:8: no extra 'plot' (did you mean 'plots'?); there are: all, plots"),
        ("groups: [trian]", "pyproject.toml:11: no group 'trian' (did you mean 'train'?); there are: train, data"),
    ],
)
def test_an_unknown_extra_or_group_has_the_nearest_name(write: Write, yaml: str, message: str) -> None:
    ws = write(f"requirements: {{file: pyproject.toml, {yaml}}}\n", pyproject=PROJECT)
    with pytest.raises(UserError) as error:
        requirements.read(ws, "3.11")
    assert str(error.value) == message


def test_an_editable_install_of_the_repository_asks_for_its_dependencies_alone(write: Write) -> None:
    ws = write("requirements: requirements.txt\n", requirements="-e .[plots]\ntqdm\n", pyproject=PROJECT)
    wanted = requirements.read(ws, "3.11")
    assert sorted(line.text for line in wanted.lines) == ["einops", "matplotlib>=3", "tqdm"]
    assert wanted.sources == ()


UV_LOCK = """\
version = 1
requires-python = ">=3.10"

[[package]]
name = "einops"
version = "0.8.0"
source = { registry = "https://index.example/simple" }

[[package]]
name = "numpy"
version = "1.26.0"
source = { registry = "https://index.example/simple" }
resolution-markers = ["python_full_version < '3.11'"]

[[package]]
name = "numpy"
version = "2.3.0"
source = { registry = "https://index.example/simple" }
resolution-markers = ["python_full_version >= '3.11'"]

[[package]]
name = "mine"
version = "1"
source = { editable = "." }
"""


def test_a_uv_lock_constrains_the_versions_of_the_projects_dependencies(write: Write) -> None:
    ws = write("requirements: uv.lock\n", pyproject=PROJECT)
    (ws.root / "uv.lock").write_text(UV_LOCK, encoding="utf-8")
    assert texts(ws) == ["pyproject.toml:6 einops"]
    constraints = [f"{line.where} {line.text}" for line in requirements.read(ws, "3.11").constraints]
    assert constraints == ["pyproject.toml:15 rich<20", "uv.lock:6 einops==0.8.0", "uv.lock:17 numpy==2.3.0"]


def test_uv_sources_choose_an_index_a_path_or_a_repository_for_the_image(write: Write, tmp_path: Path) -> None:
    ws = write(
        pyproject="""\
            [project]
            name = "mine"
            version = "1"
            dependencies = ["torch", "inner", "tool>=1", "other"]
            [tool.uv.sources]
            torch = [
              {index = "mac", marker = "sys_platform == 'darwin'"},
              {index = "company", marker = "sys_platform == 'linux'"},
            ]
            inner = {path = "libs/inner", editable = true}
            tool = {git = "https://host.example/tool", tag = "v1", subdirectory = "python"}
        """
    )
    wanted = requirements.read(ws, "3.11")
    assert [line.text for line in wanted.lines] == ["torch", "other"]
    assert wanted.index_of == {"torch": {"index": "company"}}
    assert [(one.name, one.location) for one in wanted.sources] == [
        ("inner", str(tmp_path / "repository/libs/inner")),
        ("tool", "git+https://host.example/tool@v1#subdirectory=python"),
    ]


def test_the_indexes_of_a_build_are_named_without_credentials_which_are_in_a_netrc(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine known.example login me password from-netrc\nmachine other.example login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("UV_INDEX_COMPANY_USERNAME", "ci")
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "from-variable")
    monkeypatch.setenv("TOKEN", "from-address")
    write(
        "requirements: requirements.txt\n",
        requirements="--extra-index-url https://user:${TOKEN}@third.example/simple\n",
        pyproject="""\
            [[tool.uv.index]]
            name = "company"
            url = "https://packages.example/simple"
            explicit = true
            [[tool.uv.index]]
            name = "known"
            url = "https://known.example/simple"
            default = true
        """,
    )
    configuration, secrets = indexes.build_configuration(workspaces.repository())
    assert "from-" not in configuration
    assert 'url = "https://known.example/simple"\ndefault = true' in configuration
    assert 'url = "https://packages.example/simple"' in configuration
    assert secrets.splitlines() == [
        "machine known.example login me password from-netrc",
        "machine packages.example login ci password from-variable",
        "machine third.example login user password from-address",
    ]


def test_a_workspace_without_indexes_needs_no_configuration(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "none"))
    for name in [one for one in os.environ if one.startswith("UV_") and "INDEX" in one]:
        monkeypatch.delenv(name)
    write(requirements="tqdm\n")
    assert indexes.build_configuration(workspaces.repository()) == ("", "")


def test_indexes_on_one_host_with_different_credentials_are_refused(write: Write) -> None:
    write(
        "requirements: requirements.txt\n",
        requirements="--index-url https://a:1@host.example/a\n--extra-index-url https://b:2@host.example/b\n",
    )
    with pytest.raises(UserError, match=r"^requirements\.txt:2: indexes .* are on one host with different credentials"):
        indexes.build_configuration(workspaces.repository())


def test_an_index_that_is_a_folder_is_refused(write: Write) -> None:
    ws = write(uv='[[index]]\nname = "local"\nurl = "./wheels"\n')
    with pytest.raises(UserError, match=r"^uv\.toml:3: index 'local' is no http"):
        indexes.of_project(ws)


def test_a_keyring_is_asked_as_uv_asks_it(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "keyring"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$*" = "get https://packages.example/simple me" ] && echo from-keyring\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("UV_KEYRING_PROVIDER", "subprocess")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    write(uv='[[index]]\nname = "company"\nurl = "https://me@packages.example/simple"\n')
    assert (
        indexes.build_configuration(workspaces.repository())[1]
        == "machine packages.example login me password from-keyring\n"
    )


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("git+https://me:pw@host/x/y.git@v1", ("https://host/x/y.git", "v1")),
        ("git+ssh://git@host:22/x/y.git", ("ssh://git@host:22/x/y.git", "")),
        ("git+ssh://git:pw@host/x@main", ("ssh://git@host/x", "main")),
        ("git+file:///srv/x", ("file:///srv/x", "")),
    ],
)
def test_the_address_of_a_git_repository_has_no_password(location: str, address: tuple[str, str]) -> None:
    assert wheels.git_address(location) == address


def test_a_wheel_is_normalised_to_the_same_bytes_whatever_made_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first.whl", tmp_path / "second.whl"
    body = wheel("mine", "1")[1]
    first.write_bytes(body)
    with zipfile.ZipFile(first) as archive, zipfile.ZipFile(second, "w", zipfile.ZIP_DEFLATED) as other:
        for entry in reversed(archive.infolist()):
            text = archive.read(entry).replace(b"Generator: test", b"Generator: another (2.0)")
            other.writestr(zipfile.ZipInfo(entry.filename, (2026, 11, 22, 10, 0, 0)), text)
    for path in (first, second):
        wheels.normalise(path, path.with_suffix(".out"))
    assert first.with_suffix(".out").read_bytes() == second.with_suffix(".out").read_bytes()
    with zipfile.ZipFile(first.with_suffix(".out")) as archive:
        assert archive.namelist()[-1].endswith("RECORD")
        assert archive.testzip() is None


def source(tmp_path: Path, location: str, name: str = "") -> Source:
    return Source(Line(location, tmp_path / "requirements.txt", 1), location, name)


def test_a_wheel_that_is_given_is_taken_as_it_is(tmp_path: Path) -> None:
    name, body = wheel("given", "2", tag="cp311-cp311-manylinux_2_17_x86_64")
    (tmp_path / name).write_bytes(body)
    (made,) = wheels.build([source(tmp_path, str(tmp_path / name))], tmp_path / "out", {}, workspaces.make)
    assert (made.name, made.version, made.file.read_bytes()) == ("given", "2", body)


def test_a_source_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requirements\.txt:1: .* there is no "):
        wheels.build([source(tmp_path, str(tmp_path / "none"))], tmp_path / "out", {}, workspaces.make)


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a project without build dependencies: its backend is a file of it."""
    folder = tmp_path / "tool"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tool"\nversion = "1"\n'
    )
    (folder / "backend.py").write_text(
        textwrap.dedent("""\
            import os, zipfile
            def build_wheel(folder, *_):
                tag = open("tag").read().strip()
                with zipfile.ZipFile(os.path.join(folder, f"tool-1-{tag}.whl"), "w") as archive:
                    archive.writestr("tool.py", open("tool.py").read())
                    archive.writestr("tool-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tool\\nVersion: 1\\n")
                    archive.writestr("tool-1.dist-info/WHEEL", f"Wheel-Version: 1.0\\nTag: {tag}\\n")
                    archive.writestr("tool-1.dist-info/RECORD", "")
                return f"tool-1-{tag}.whl"
        """)
    )
    (folder / "tag").write_text("py3-none-any\n")
    (folder / "tool.py").write_text("x = 1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "v1")
    return folder


def test_a_git_repository_is_built_at_its_revision_and_again_at_the_locked_commit(
    repository: Path, tmp_path: Path
) -> None:
    wanted = source(tmp_path, f"git+file://{repository}", "tool")
    (first,) = wheels.build([wanted], tmp_path / "out", {}, workspaces.make)
    assert first.commit == git(repository, "rev-parse", "v1")
    (repository / "tool.py").write_text("x = 2\n")
    git(repository, "commit", "--quiet", "-am", "second")
    (newest,) = wheels.build([wanted], tmp_path / "out", {}, workspaces.make)
    (kept,) = wheels.build([wanted], tmp_path / "out", {wheels.key(wanted): first.commit}, workspaces.make)
    (tagged,) = wheels.build(
        [source(tmp_path, f"git+file://{repository}@v1", "tool")], tmp_path / "out", {}, workspaces.make
    )
    assert kept.sha256 == tagged.sha256 == first.sha256 != newest.sha256
    file = File(first.file.name, first.sha256, first.file.stat().st_size)
    made = Made(wheels.key(wanted), first.commit)
    assert first.pin == Pin("tool", "1", (file,), "added", made) and str(repository) not in repr(first.pin)


class GitServer(Listener):
    """Bare repositories of a folder, for a user name and a password."""

    def __init__(self, folder: Path, credentials: str) -> None:
        self._folder, self._wanted = folder, f"Basic {base64.b64encode(credentials.encode()).decode()}"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        folder, wanted = str(self._folder), self._wanted

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=folder)  # type: ignore[arg-type]

            def do_GET(self) -> None:
                if self.headers.get("Authorization") == wanted:
                    super().do_GET()
                    return
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def test_git_gets_a_password_for_the_repository_and_its_submodules_in_no_argument(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(served / "part"))
    (repository / ".gitmodules").write_text('[submodule "part"]\npath = part\nurl = ../part\n')
    git(repository, "add", ".gitmodules")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{git(repository, 'rev-parse', 'HEAD')},part")
    git(repository, "commit", "--quiet", "-m", "with a part")
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(served / "tool"))
    for name in ("tool", "part"):
        git(served / name, "update-server-info")
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "false"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(tmp_path / "trace"))
    with GitServer(served, "me:hunter2/%") as server:
        location = f"git+http://me:hunter2%2F%25@{server.host}/tool"
        (made,) = wheels.build([source(tmp_path, location, "tool")], tmp_path / "out", {}, workspaces.make)
        assert made.commit == git(repository, "rev-parse", "HEAD")
        with pytest.raises(StepFailed) as error:
            wheels.build(
                [source(tmp_path, location.replace("hunter2", "hunter3"))], tmp_path / "out", {}, workspaces.make
            )
    assert "hunter" not in str(error.value)
    trace = (tmp_path / "trace").read_text()
    assert "submodule" in trace and "hunter" not in trace


def test_a_revision_that_does_not_exist_is_one_line(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"requirements\.txt:1: git\+file://.*@v9: "):
        wheels.build([source(tmp_path, f"git+file://{repository}@v9")], tmp_path / "out", {}, workspaces.make)


def test_a_wheel_with_compiled_code_is_refused_with_its_line(repository: Path, tmp_path: Path) -> None:
    (repository / "tag").write_text("cp311-cp311-linux_x86_64\n")
    with pytest.raises(UserError, match=r"requirements\.txt:1: .* compiles code .* name 'tool==1' under 'build:'"):
        wheels.build([source(tmp_path, str(repository))], tmp_path / "out", {}, workspaces.make)


def test_a_download_that_fails_shows_no_signature(tmp_path: Path) -> None:
    with PackageIndex() as index, pytest.raises(StepFailed) as error:
        location = f"http://{index.host}/x-1-py3-none-any.whl?X-Amz-Signature=hunter2"
        wheels.build([source(tmp_path, location)], tmp_path / "out", {}, workspaces.make)
    assert str(error.value).endswith("/x-1-py3-none-any.whl: cannot be downloaded (Not Found)")
    assert "hunter2" not in str(error.value)


def test_addresses_that_would_run_a_program_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"git's addresses begin with"):
        wheels.build([source(tmp_path, "git+ext://sh -c touch% x")], tmp_path / "out", {}, workspaces.make)
