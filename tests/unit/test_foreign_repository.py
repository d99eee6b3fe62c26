"""Check that an untrusted repository runs no code on this host, that no file outside it is read or written, and that no
password is copied into its image."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests import locks, workspaces

from trainyard.common import git, settings
from trainyard.common.errors import UserError
from trainyard.image import facts, smoke_command, workspace_files
from trainyard.image.smoke_failure import HostFiles
from trainyard.oci import secret_scan
from trainyard.spec import pylock, repository_files
from trainyard.workspace import check, code_files, indexes, requirements

SECRET = "what only the user may read"
PASSWORD = "not-a-real-password"
YAML = "extends: tf-cpu\nrun: python train.py\nrequirements: requirements.txt\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository, entered, with a file of the user's beside it."""
    for name in ("GLOBAL", "SYSTEM"):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", "/dev/null")
    (tmp_path / "private").write_text(SECRET, encoding="utf-8")
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for name, text in {"trainyard.yaml": YAML, "train.py": "print('loss 1')\n", "requirements.txt": ""}.items():
        (folder / name).write_text(text, encoding="utf-8")
    workspaces.enter(folder, monkeypatch)
    return folder


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def refused() -> list[str]:
    return check.check(workspaces.repository()).refused


def trainyard(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "trainyard", *words]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def commit(folder: Path) -> None:
    for words in (["add", "--all"], ["-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


# Passwords


@pytest.mark.parametrize(
    ("name", "text", "line", "instead"),
    [
        (
            "requirements.txt",
            "einops\n--extra-index-url http://me:{}@index.example.test:80/simple\n",
            2,
            "'${NAME}' in",
        ),
        ("requirements.txt", "-r dev/reqs.in\n", 0, ""),
        ("conf/base-requirements.in", "x @ git+https://${{USER}}:{}@host/x\n", 1, "'${NAME}' in its place"),
        ("deps.list", "# ours\n--index-url=https://me:{}@host/simple\n", 2, "~/.netrc"),
        (
            "pyproject.toml",
            '[[tool.uv.index]]\nurl = "https://me:{}@host/s"\nname = "my-corp"\n',
            2,
            "UV_INDEX_<NAME>_PASSWORD",
        ),
        ("uv.toml", '[[index]]\nname = "corp"\nurl = "https://me:{}@host/simple"\n', 3, "UV_INDEX_<NAME>_PASSWORD"),
        ("Pipfile", '[[source]]\nurl = "https://me:{}@host/simple"\n', 2, "~/.netrc"),
        ("environment.yml", "dependencies:\n- pip:\n  - --index-url https://me:{}@host/simple\n", 3, "~/.netrc"),
        ("trainyard.yaml", YAML + "environment: {{PIP_INDEX_URL: 'https://me:{}@host/simple'}}\n", 4, "~/.netrc"),
    ],
)
def test_an_address_with_a_password_that_installers_read_is_refused(
    root: Path, name: str, text: str, line: int, instead: str
) -> None:
    write(root, {name: text.format(PASSWORD), "dev/reqs.in": ""})
    found = refused()
    assert [one.startswith(f"{name}:{line}: an address with a password") for one in found] == [True] * bool(line)
    assert all(instead in one and PASSWORD not in one for one in found)


@pytest.mark.parametrize(
    "text",
    [
        "# as in --index-url https://user:password@example.com/simple\n--index-url https://${USER}:${TOKEN}@host/simple\n",
        "--index-url https://__token__:<token>@host/simple\n",
        "x @ git+https://host:8443/x@v1\ny @ git+ssh://git@host/y\n",
        "--index-url https://{env:USER}:{env:TOKEN}@host/simple\n# redis://:b4dwords@localhost:6379/0\n",
    ],
)
def test_references_and_placeholders_in_requirements_are_not_refused(root: Path, text: str) -> None:
    write(root, {"conf/requirements.txt": text})
    checked = check.check(workspaces.repository())
    assert (checked.refused, checked.notes) == ([], [])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("conf/requirements.txt", "--index-url https://me:hunter2@host/simple\n".encode("utf-16")),
        ("requirements.txt", b"--index-url https://me:$ecret99@host/simple\n"),
        ("setup.sh", b"python -m pip install -q --index-url=https://me:hunter2@host/simple x\n"),
        ("Dockerfile", b"RUN pip install git+https://me:hunter2@host/x\n"),
    ],
)
def test_what_pip_reads_is_refused_in_any_file(root: Path, name: str, data: bytes) -> None:
    write(root, {"conf/other.txt": ""})
    (root / name).write_bytes(data)
    (refused,) = check.check(workspaces.repository()).refused
    assert refused.startswith(f"{name}:1: an address with a password")


def test_in_other_text_an_address_with_a_password_is_a_note_unless_it_is_an_example(root: Path) -> None:
    examples = "https://user:password@host.com redis://a:b4dwords@localhost postgres://a:b4dwords@db:5432 "
    examples += "https://a:b4dwords@api.example.com https://a:${B}@host.com https://a:{b}@host.com"
    write(root, {"README.md": examples, "a.py": f"# {examples}\nURL = 'https://me:{PASSWORD}@db.company.com/x'\n"})
    checked = check.check(workspaces.repository())
    assert checked.refused == [] and len(checked.notes) == 1
    assert checked.notes[0].startswith("a.py:2: an address with a password is copied into the image: ")
    write(root, {"b.py": f"URL = 'https://me:{PASSWORD}@db.company.com/x'\n"})
    assert "copied into the image (1 more file like this): " in check.check(workspaces.repository()).notes[0]


# Programs


def test_the_line_of_an_address_is_found_among_many() -> None:
    many, real = (
        b"https://user:${TOKEN}@host.org/ https://me:hunter2@localhost/\n" * 50_000,
        b"https://me:hunter2@host.org\n",
    )
    find = secret_scan.address_with_password
    assert find(many, "a.txt") == (0, False)
    assert find(many + real * 50_000, "a.txt") == (50_001, False)
    assert find(b"\n" + many + b"-i " + real, "a.txt") == (50_002, True)
    assert find(many.replace(b"\n", b" ") + real, "requirements.txt") == (1, True)


def test_filters_of_the_repository_are_not_run_and_those_of_the_user_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "gitconfig"
    own.write_text('[filter "users"]\n\tclean = sed s/loss/LOSS/\n', encoding="utf-8")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own))
    write(root, {".gitattributes": "*.py filter=users\n*.txt filter=own\n*.lfs filter=users\n", "a.lfs": "loss"})
    commit(root)
    ran = f"touch {tmp_path}/ran; cat"
    for name in ("filter.own.clean", "filter.own.process", "filter.users.clean", "lfs.extension.x.clean"):
        subprocess.run(["git", "config", name, ran], check=True)
    subprocess.run(["git", "config", "filter.own.required", "true"], check=True)
    for name in ("train.py", "requirements.txt", "a.lfs"):
        (root / name).touch()
    assert not facts.revision(root).endswith("-dirty"), "the user's filter made what git has"
    assert not (tmp_path / "ran").exists()


def test_a_filter_that_cannot_be_switched_off_ends_the_command(root: Path) -> None:
    subprocess.run(["git", "config", "filter.a=b.clean", "false"], check=True)
    with pytest.raises(UserError, match=r"has the filter 'filter\.a=b\.clean': remove it"):
        git.run(root, "status")


def test_a_submodule_runs_nothing_either_and_its_changes_count(root: Path, tmp_path: Path) -> None:
    module = root / "module"
    subprocess.run(["git", "init", "--quiet", str(module)], check=True)
    write(module, {"a.txt": "", ".gitattributes": "*.txt filter=own\n"})
    commit(module)
    commit(root)
    subprocess.run(["git", "-C", str(module), "config", "filter.own.clean", f"touch {tmp_path}/ran"], check=True)
    (module / "a.txt").touch()
    assert not facts.revision(root).endswith("-dirty")
    write(module, {"a.txt": "changed"})
    facts._git.cache_clear()
    assert facts.revision(root).endswith("-dirty")
    assert not (tmp_path / "ran").exists()


def test_variables_of_a_git_hook_do_not_change_the_repository(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    write(other, {"b.py": ""})
    commit(other)
    commit(root)
    here = git.run(root, "rev-parse", "HEAD").stdout
    variables = {
        "GIT_DIR": str(other / ".git"),
        "GIT_WORK_TREE": str(other),
        "GIT_INDEX_FILE": str(other / ".git/index"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert git.run(root, "rev-parse", "HEAD").stdout == here
    assert "train.py" in code_files.listing(workspaces.repository().workspace)
    assert not variables.keys() & settings.environment().keys()


def test_modules_of_the_repository_are_not_imported_by_uv(root: Path, tmp_path: Path) -> None:
    for name in ("uv", "sysconfig", "netrc"):
        write(root, {f"{name}.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n"})
    indexes._stored("https://host.example/simple", "me")
    done = subprocess.run([*settings.UV, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("uv ") and not (tmp_path / "ran").exists()


# Writing


def test_init_writes_through_no_link(root: Path, tmp_path: Path) -> None:
    yaml, private = root / "trainyard.yaml", tmp_path / "private"
    yaml.unlink()
    write(root, {"train.py": "import tensorflow\n"})
    yaml.symlink_to(tmp_path / "made")
    assert "trainyard.yaml exists already" in trainyard("init", "--yes").stderr
    yaml.unlink()
    (root / ".trainyard").symlink_to(tmp_path)
    assert ".trainyard: a symbolic link: replace it by a folder" in trainyard("init", "--yes").stderr
    assert not yaml.exists() and not (tmp_path / "schema.json").exists()
    (root / ".trainyard").unlink()
    (root / ".trainyard").write_text("")
    assert "schema.json: cannot be written (File exists)" in trainyard("init", "--yes").stderr.splitlines()[-1]
    (root / ".trainyard").unlink()
    (root / ".trainyard").mkdir()
    (root / ".trainyard/schema.json").symlink_to(private)
    (root / ".devcontainer").mkdir()
    (root / ".devcontainer/devcontainer.json").symlink_to(tmp_path / "made")
    done = trainyard("init", "--yes", "--devcontainer")
    assert "devcontainer.json exists already" in done.stderr
    assert not (root / ".trainyard/schema.json").is_symlink() and yaml.is_file()
    assert private.read_text(encoding="utf-8") == SECRET and not (tmp_path / "made").exists()


def test_a_lock_is_written_through_no_link_and_by_two_at_once(root: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    for name in (".pylock.trainyard.toml.new", "pylock.trainyard.toml"):
        (root / name).symlink_to(private)
    lock = locks.lock(locks.pin("einops==0.8.0"))
    writers = [threading.Thread(target=pylock.write, args=(root / pylock.REPOSITORY_FILE, lock)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert private.read_text(encoding="utf-8") == SECRET
    assert (root / "pylock.trainyard.toml").read_text(encoding="utf-8") == pylock.text(lock)
    assert not list(root.glob(f"*{repository_files.PARTIAL}"))
    assert (root / "pylock.trainyard.toml").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Reading


@pytest.mark.parametrize(
    "files",
    [
        {"requirements.txt": "-r ../private\n"},
        {"requirements.txt": "-c linked/private\n"},
        {"requirements.txt": "../private\n"},
        {"trainyard.yaml": YAML.replace("requirements.txt", "../private")},
        {"trainyard.yaml": YAML + "smoke: {data: ..}\n"},
        {"trainyard.yaml": YAML + "smoke: {data: /}\n"},
        {"trainyard.yaml": YAML + "smoke: {data: linked}\n"},
    ],
)
def test_nothing_outside_of_the_repository_is_read(root: Path, tmp_path: Path, files: dict[str, str]) -> None:
    write(root, files)
    (root / "linked").symlink_to(tmp_path)
    (root / ".dockerignore").write_text("linked\n", encoding="utf-8")
    done = trainyard("check")
    assert done.returncode in (1, 2) and "outside of the repository" in done.stderr, done.stderr
    assert SECRET not in done.stderr and "only the user" not in done.stderr


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "requirements.txt", "setup.cfg", ".dockerignore", "pylock.trainyard.toml"]
)
@pytest.mark.parametrize("command", ["check", "init"])
def test_files_that_are_read_by_name_are_no_links_out(root: Path, tmp_path: Path, name: str, command: str) -> None:
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(tmp_path / "private")
    if command == "init":
        (root / "trainyard.yaml").unlink()
    done = trainyard(command)
    assert f"{name}: a symbolic link out of the repository: replace it by a file" in done.stderr
    assert SECRET not in done.stderr


def test_what_is_inside_the_git_repository_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in decision 15: an image's folder includes what it shares with others."""
    write(root, {"base.txt": "einops\n", "services/text/train.py": "", "libs/x/pyproject.toml": ""})
    service = root / "services/text"
    write(service, {"trainyard.yaml": YAML, "requirements.txt": "-r ../../base.txt\n-r linked.txt\n../../libs/x\n"})
    (service / "linked.txt").symlink_to("../../base.txt")
    (service / "pyproject.toml").symlink_to("../../pyproject.toml")
    write(root, {"pyproject.toml": '[project]\nname = "a"\nversion = "1"\n', "data/a": ""})
    write(service, {"trainyard.yaml": YAML + "smoke: {data: ../../data}\n"})
    monkeypatch.chdir(service)
    wanted = requirements.read(workspaces.repository().workspace, "3.11")
    assert [line.text for line in wanted.lines] == ["einops"]
    assert [one.location for one in wanted.sources] == [str(root / "libs/x")]


@pytest.mark.parametrize("target", ["../other", "/proc/self"])
def test_a_tracked_folder_that_became_a_link_is_not_followed(root: Path, tmp_path: Path, target: str) -> None:
    write(tmp_path, {"other/environ": SECRET})
    write(root, {"conf/environ": "", "conf/deep/environ": ""})
    commit(root)
    subprocess.run(["rm", "-r", str(root / "conf")], check=True)
    (root / "conf").symlink_to(target)
    workspace = workspaces.repository().workspace
    assert not [path for path in code_files.listing(workspace) if path.startswith("conf/")]
    with pytest.raises(UserError, match=r"conf: a symbolic link to .*, which is not in the image"):
        code_files.collect(workspace)


def test_a_submodule_that_became_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    for folder in (root / "module", tmp_path / "other"):
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        write(folder, {"a.py": ""})
        commit(folder)
    commit(root)
    subprocess.run(["rm", "-r", str(root / "module")], check=True)
    (root / "module").symlink_to("../other")
    assert [one for one in refused() if "module: a git submodule that is not checked out" in one]


# Data


def packed(files: HostFiles | None, file: Path) -> list[str]:
    assert files and files.data is not None
    with file.open("w+b") as stream:
        smoke_command._pack(files.data, stream, files)
        return sorted(tarfile.open(fileobj=stream).getnames())


def test_data_of_the_repository_has_no_link_out_and_data_of_the_command_line_may(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root, {"data/a/b": "", "more/c": "", "trainyard.yaml": YAML + "smoke: {data: data}\n"})
    (root / "data/more").symlink_to("../more")
    workspace = workspaces.repository().workspace
    own = HostFiles(workspace.file, workspace.data)
    assert packed(own, tmp_path / "tar") == ["a", "a/b", "more", "more/c"]
    for loop in ("data/a/above", "more/above"):  # the second one by way of data/more
        (root / loop).symlink_to(root / "data")
        with pytest.raises(UserError, match="above: a symbolic link to a folder above it: remove it"):
            packed(own, tmp_path / "tar")
        (root / loop).unlink()
    (root / "more/out").symlink_to("../../private")
    with pytest.raises(UserError, match="is outside of the repository"):
        packed(own, tmp_path / "tar")
    write(tmp_path, {"outside/a": ""})
    (tmp_path / "outside/b").symlink_to("../private")
    monkeypatch.setenv("TRAINYARD_DATA", str(tmp_path / "outside"))
    given = workspaces.repository()
    assert packed(workspace_files.on_host(given), tmp_path / "tar") == ["a", "b"]
    assert given.workspace.config_hash == workspace.config_hash
    assert given.context.variables()["TRAINYARD_DATA"] == str(tmp_path / "outside"), "a child process has it, too"


def test_data_from_outside_is_given_on_the_command_line(root: Path, tmp_path: Path) -> None:
    done = trainyard("image", f"--data={tmp_path / 'none'}")
    assert done.returncode == 2 and "does not exist" in done.stderr
    for words in (["image"], ["update"], ["bisect"], ["dev", "smoke"]):
        assert "--data" in trainyard(*words, "--help").stdout


def test_sources_outside_are_not_looked_at(root: Path, tmp_path: Path) -> None:
    write(tmp_path, {"other.py": "import lightgbm\n"})
    write(root, {"train.py": "import helper\n"})
    (root / "helper.py").symlink_to(tmp_path / "other.py")
    for command in ("check", "init"):
        assert "lightgbm" not in trainyard(command, *(["--yes", "--target=tf-cpu"] if command == "init" else [])).stderr
        (root / "trainyard.yaml").unlink(missing_ok=True)
