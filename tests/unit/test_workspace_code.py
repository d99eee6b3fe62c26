"""Which files of a user's repository become its code in an image, and what is refused before anything is built."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pathspec import GitIgnoreSpec
from tests.examples import examples

from trainyard.common.errors import UserError
from trainyard.spec.workspace import Workspace, WorkspaceDocument
from trainyard.workspace import code_files
from trainyard.workspace.dockerignore import Matcher

#: Made of parts: this file must not look like one with a credential.
PRIVATE_KEY = f"-----BEGIN {'RSA PRIVATE'} KEY-----\n{'a' * 64}\n"


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture(autouse=True)
def no_settings_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")


@pytest.fixture(params=["git", "no git", "no repository"])
def repository(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in each of the ways that a repository can be on a host."""
    folder = tmp_path / "repository"
    folder.mkdir()
    if request.param != "no repository":
        git(tmp_path, "init", "--quiet", "repository")
    if request.param != "git":
        monkeypatch.setattr(code_files.shutil, "which", lambda name: None)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def in_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, **files: str | bytes) -> None:
    """Write files: dots and slashes of their names are written as ``_dot_`` and ``__``."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def workspace(folder: Path, *code: str) -> Workspace:
    paths = list(code) or ["."]
    lines = "".join(f"  - {path}\n" for path in paths)
    (folder / "trainyard.yaml").write_text(f"extends: cpu\ncode:\n{lines}", encoding="utf-8")
    return Workspace(folder / "trainyard.yaml", WorkspaceDocument(extends="cpu", code=paths))


def paths(found: Workspace) -> list[str]:
    return [file.path for file in code_files.collect(found)]


def test_the_code_is_what_neither_gitignore_nor_dockerignore_leave_out(repository: Path) -> None:
    write(
        repository,
        train_dot_py="",
        pkg__a_dot_py="",
        pkg__b_dot_log="",
        pkg___dot_gitignore="*.log\n!keep.log\n",
        pkg__keep_dot_log="",
        data__big="",
        notes__a_dot_md="",
        notes__b_dot_md="",
        _dot_gitignore="/data/\n",
        _dot_dockerignore="notes/*\n!notes/b.md\n",
    )
    assert paths(workspace(repository)) == [
        ".dockerignore", ".gitignore", "notes/b.md", "pkg/.gitignore", "pkg/a.py", "pkg/keep.log", "train.py",
    ]  # fmt: skip


def test_what_tools_write_is_no_code(repository: Path) -> None:
    write(
        repository,
        train_dot_py="",
        __pycache____train_dot_cpython="",
        pkg__old_dot_pyc="",
        env__pyvenv_dot_cfg="",
        env__lib__x_dot_py="",
        _dot_devcontainer__devcontainer_dot_json="{}",
        _dot_trainyard__x="",
        _dot_DS_Store="",
        pylock_dot_trainyard_dot_toml="",
        src__x_dot_egg_info="",
        sub__trainyard_dot_yaml="",
    )
    (repository / "src" / "x.egg_info").rename(repository / "src" / "x.egg-info")
    assert paths(workspace(repository)) == ["sub/trainyard.yaml", "train.py"]


def test_only_the_paths_of_code_are_taken(repository: Path) -> None:
    write(repository, src__a_dot_py="", configs__b_dot_yaml="", configs__sub__c_dot_yaml="", other__c_dot_py="")
    assert paths(workspace(repository, "src", "configs/b.yaml")) == ["configs/b.yaml", "src/a.py"]
    assert paths(workspace(repository, "src", "src/a.py", "./src")) == ["src/a.py"]


def test_an_ignored_folder_between_stays_ignored(repository: Path) -> None:
    write(repository, _dot_gitignore="out/\n", out__code__a_dot_py="", a_dot_py="")
    assert paths(workspace(repository, "a.py", "out/code")) == ["a.py"]


def test_code_beside_the_workspace_keeps_its_place_in_the_repository(in_git: Path) -> None:
    write(in_git, projects__train__main_dot_py="", libs__x__x_dot_py="", libs__x__y_dot_md="", libs__y__y_dot_py="")
    write(in_git, libs__x___dot_dockerignore="*.md\n")
    found = workspace(in_git / "projects" / "train", ".", "../../libs/x")
    assert paths(found) == ["libs/x/.dockerignore", "libs/x/x.py", "main.py"]


def test_two_files_for_one_place_are_refused_with_both_names(in_git: Path) -> None:
    write(in_git, libs__x__a_dot_py="", train__libs__x__a_dot_py="")
    with pytest.raises(UserError, match=r"libs/x/a\.py and .*libs/x/a\.py would both be /workspace/libs/x/a\.py"):
        paths(workspace(in_git / "train", ".", "../libs/x"))


def test_code_outside_of_the_repository_is_refused(repository: Path) -> None:
    (repository.parent / "other").mkdir()
    with pytest.raises(UserError, match=r"^trainyard\.yaml:4: code: '\.\./other' is outside of "):
        paths(workspace(repository, ".", "../other"))


def test_a_misspelt_path_is_refused_with_the_nearest_one(repository: Path) -> None:
    write(repository, src__a_dot_py="")
    with pytest.raises(UserError, match=r"^trainyard\.yaml:3: code: 'scr' does not exist \(did you mean 'src'\?\)$"):
        paths(workspace(repository, "scr"))


def test_a_repository_without_files_is_refused(repository: Path) -> None:
    write(repository, _dot_gitignore="*\n", a_dot_py="")
    with pytest.raises(UserError, match=r"^trainyard\.yaml:2: code: no files"):
        paths(workspace(repository))


def test_links_within_the_code_are_kept_and_others_refused(repository: Path) -> None:
    write(repository, pkg__a_dot_py="x = 1\n")
    (repository / "alias").symlink_to("pkg/a.py")
    (repository / "folder").symlink_to("pkg")
    found = {file.path: file for file in code_files.collect(workspace(repository))}
    assert (found["alias"].link, found["folder"].link, found["pkg/a.py"].link) == ("pkg/a.py", "pkg", None)
    for target in ("/etc/hostname", "../elsewhere"):
        (repository / "zzz").symlink_to(target)
        with pytest.raises(UserError, match=rf"^zzz: a symbolic link to {target}, .*\.dockerignore"):
            paths(workspace(repository))
        (repository / "zzz").unlink()


def test_sockets_are_refused_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("control")
        with pytest.raises(UserError, match=r"^control: neither a file nor a folder nor a symbolic link: "):
            paths(workspace(tmp_path))


def test_names_that_are_not_utf_8_are_refused(repository: Path) -> None:
    (Path(os.fsdecode(os.fsencode(repository) + b"/caf\xe9.py"))).touch()
    with pytest.raises(UserError, match=r"^caf\\udce9\.py: a file name that is not UTF-8"):
        paths(workspace(repository))


@pytest.mark.parametrize("name", [".wh.train.py", "pkg/.wh..wh..opq", ".wh.pkg/a.py"])
def test_names_that_would_remove_other_files_of_the_image_are_refused(repository: Path, name: str) -> None:
    write(repository, train_dot_py="")
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).touch()
    with pytest.raises(UserError, match=rf"^{re.escape(name)}: a name that begins with '\.wh\.' .*: rename it, or add"):
        paths(workspace(repository))
    (repository / name).rename(repository / "a.wh.py")
    assert paths(workspace(repository)) == ["a.wh.py", "train.py"]


def test_large_files_are_refused_and_counted(repository: Path) -> None:
    write(repository, train_dot_py="")
    for name in ("a.bin", "b.bin"):
        with (repository / name).open("wb") as file:
            file.truncate(code_files.LARGEST + 1)
    with pytest.raises(UserError, match=r"^a\.bin: 50\.0 MB, more than .*\.dockerignore.*\(1 more file like this\)$"):
        paths(workspace(repository))
    write(repository, _dot_dockerignore="*.bin\n")
    assert paths(workspace(repository)) == [".dockerignore", "train.py"]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [(".env", "A=1", "an environment file"), ("config/key.txt", PRIVATE_KEY, "a private key"), (".netrc", "", "netrc")],
)
def test_credentials_are_refused_without_being_shown(repository: Path, name: str, text: str, kind: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"^{name}: {kind}") as error:
        paths(workspace(repository))
    assert "aaaa" not in str(error.value)


def contents(found: Workspace) -> dict[str, bytes]:
    return {file.path: b"".join(file.chunks()) for file in code_files.collect(found)}


def test_a_checkout_with_crlf_is_the_same_code_as_one_with_lf(in_git: Path) -> None:
    write(in_git, a_dot_py="x = 1\ny = 2\n", table_dot_csv="a\r\nb\r\n", mixed="a\r\nb\n", binary=b"\0\r\n")
    git(in_git, "add", ".")
    linux = contents(workspace(in_git))
    write(in_git, a_dot_py="x = 1\r\ny = 2\r\n")
    assert contents(workspace(in_git)) == linux
    assert linux["table.csv"] == b"a\r\nb\r\n"


def test_scripts_have_lf_line_ends(repository: Path) -> None:
    write(repository, train="#!/bin/sh\r\necho\r\n", notes_dot_txt="a\r\n")
    assert contents(workspace(repository)) == {"train": b"#!/bin/sh\necho\n", "notes.txt": b"a\r\n"}


def test_sizes_are_those_of_the_content(repository: Path) -> None:
    write(repository, train="#!/bin/sh\r\necho\r\n", a_dot_py="x = 1\n")
    for file in code_files.collect(workspace(repository)):
        assert file.size == len(b"".join(file.chunks()))


def test_a_file_is_executable_where_git_says_so_if_the_file_system_has_no_modes(in_git: Path) -> None:
    write(in_git, train_dot_sh="", a_dot_py="", new_dot_sh="")
    git(in_git, "add", "train.sh", "a.py")
    git(in_git, "update-index", "--chmod=+x", "train.sh")
    (in_git / "a.py").chmod(0o755)
    modes = {file.path: file.mode for file in code_files.collect(workspace(in_git))}
    assert modes == {"a.py": 0o775, "new.sh": 0o664, "train.sh": 0o664}
    git(in_git, "config", "core.fileMode", "false")
    modes = {file.path: file.mode for file in code_files.collect(workspace(in_git))}
    assert modes == {"a.py": 0o664, "new.sh": 0o664, "train.sh": 0o775}


def test_a_tracked_file_that_was_removed_is_no_code_and_one_that_is_ignored_is(in_git: Path) -> None:
    write(in_git, a_dot_py="", b_dot_py="", c_dot_log="")
    git(in_git, "add", ".")
    write(in_git, _dot_gitignore="*.log\n", d_dot_log="")
    (in_git / "b.py").unlink()
    assert paths(workspace(in_git)) == [".gitignore", "a.py", "c.log"]


def test_submodules_are_code_once_they_are_checked_out(in_git: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "--quiet")
    write(library, x_dot_py="")
    git(library, "add", ".")
    git(library, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "--quiet", "-m", "a")
    git(in_git, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(library), "libs/x")
    assert paths(workspace(in_git)) == [".gitmodules", "libs/x/x.py"]
    assert paths(workspace(in_git, "libs/x/x.py")) == ["libs/x/x.py"]
    git(in_git, "submodule", "deinit", "--force", "libs/x")
    with pytest.raises(UserError, match=r"^libs/x: a git submodule that is not checked out: git submodule update"):
        paths(workspace(in_git))


def test_a_folder_that_the_repository_around_it_ignores_is_not_its_part(in_git: Path) -> None:
    write(in_git, _dot_gitignore="build/\n", build__unpacked__train_dot_py="", build__unpacked__a_dot_log="")
    write(in_git, build__unpacked___dot_gitignore="*.log\n")
    assert paths(workspace(in_git / "build" / "unpacked")) == [".gitignore", "train.py"]


def test_what_git_refuses_is_one_line(in_git: Path) -> None:
    write(in_git, a_dot_py="")
    (in_git / ".git" / "index").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"git ls-files: .*index") as error:
        paths(workspace(in_git))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("patterns", "path", "left_out"),
    [
        # https://github.com/moby/patternmatcher/blob/v0.6.0/patternmatcher_test.go
        (["**"], "dir/file", True),
        (["dir/**"], "dir/dir2/file", True),
        (["abc/**"], "abc", False),
        (["**/dir"], "dir/file", True),
        (["**/dir2/*"], "dir/dir2/file", True),
        (["**file"], "dir/file", True),
        (["**.pyc"], "dir/x.pyc", True),
        (["**/file*.txt"], "dir/dir/file.txt", True),
        (["**/**/*.txt2"], "dir/dir/file.txt", False),
        (["a**/*.txt"], "a/dir/dir/file.txt", True),
        (["a/*.txt"], "a/dir/file.txt", False),
        (["a[b-d]e"], "ace", True),
        (["a[^b-d]e"], "ace", False),
        ([".*"], "foo", False),
        (["abc.def"], "abcZdef", False),
        (["abc?def"], "abcZdef", True),
        (["a\\*b"], "a*b", True),
        (["a.|)$(}+{bc"], "a.|)$(}+{bc", True),
        (["**", "!util/docker/web"], "util/docker/web/foo", False),
        (["**", "!util/docker/web", "util/docker/web/foo"], "util/docker/web/foo", True),
        (["/a/b/", "# comment", "", "  "], "a/b/c", True),
        (["./a/../b"], "b", True),
        (["a"], "b/a", False),
    ],
)
def test_dockerignore_means_what_it_means_to_docker(patterns: list[str], path: str, left_out: bool) -> None:
    assert Matcher(patterns)(path) is left_out


@pytest.mark.parametrize("line", ["!", "[", "a[z-a]"])
def test_a_line_of_dockerignore_that_is_no_pattern_is_named(repository: Path, line: str) -> None:
    write(repository, a_dot_py="", _dot_dockerignore=f"# data\n{line}\n")
    with pytest.raises(UserError, match=r"^\.dockerignore:2: "):
        paths(workspace(repository))


#: Expressions with backtracking try these for longer than anybody waits.
SLOW = ["*a" * 40 + "b", "**/a/" * 40 + "b", "*[!b]" * 40 + "b", "**a" * 40 + "b", "a**/" * 40 + "b", "*?" * 40 + "b"]


@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("file", [".gitignore", ".dockerignore"])
def test_a_pattern_takes_no_exponential_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, pattern: str
) -> None:
    deep = tmp_path / ("a/" * 60)
    deep.mkdir(parents=True)
    for folder in (tmp_path, deep):
        (folder / ("a" * 250)).touch()
        (folder / ("a" * 250 + "b")).touch()
    (tmp_path / file).write_text(f"{pattern}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "a" * 250 in paths(workspace(tmp_path))


def random_patterns(count: int) -> Iterator[tuple[str, str]]:
    """Patterns, and five paths for each, of few letters."""
    choose = random.Random(1).choice
    parts = ["a", "b", "/", "*", "*", "**", "**/", "/**/", "?", "[ab]", "[!b]", "[^a]", ".", "\\*"]
    for _ in range(count):
        pattern = "".join(choose(parts) for _ in range(choose(range(1, 10))))
        for _ in range(5):
            names = ("".join(choose("aab.*") for _ in range(choose(range(1, 4)))) for _ in range(choose(range(1, 5))))
            yield pattern, "/".join(names)


def test_gitignore_means_the_same_when_it_takes_linear_time() -> None:
    for pattern, path in random_patterns(examples(2000)):
        try:
            before = GitIgnoreSpec.from_lines([pattern])
        except ValueError:
            continue
        expected = before.check_file(path)
        if not re.search(r"\[[!^]", pattern):
            assert code_files._without_retries(before).check_file(path) == expected, (pattern, path)


@pytest.mark.parametrize(("pattern", "path"), [("a[!b]c", "a/c"), ("*[!b]*c", "a/bc"), ("/a[^b]*", "a/c")])
def test_a_set_of_gitignore_contains_no_slash(pattern: str, path: str, in_git: Path) -> None:
    """As for git: https://git-scm.com/docs/gitignore#_pattern_format."""
    (in_git / ".gitignore").write_text(f"{pattern}\n", encoding="utf-8")
    asked = subprocess.run(["git", "check-ignore", "--quiet", "--no-index", path], check=False)
    found = code_files._without_retries(GitIgnoreSpec.from_lines([pattern])).check_file(path)
    assert bool(found.include) is (asked.returncode == 0)


def as_go_compiles(pattern: str) -> re.Pattern[str]:
    """The regular expression of https://github.com/moby/patternmatcher/blob/v0.6.0/patternmatcher.go (``compile``)."""
    made = ""
    while pattern:
        match = re.match(r"\*\*/?|\*|\?|\[\^?[^]]*\]|\\.|.", pattern)
        assert match
        part, pattern = match[0], pattern[match.end() :]
        if part.startswith("**"):
            within = not made and part == "**" and not re.search(r"[*?\[\]\\]", pattern)
            made += ".*" if within or not pattern else "(.*/)?"
        else:
            made += {"*": "[^/]*", "?": "[^/]"}.get(part) or (part if len(part) > 2 else re.escape(part[-1]))
    return re.compile(made)


def test_all_positions_at_once_find_what_a_regular_expression_finds() -> None:
    for pattern, path in random_patterns(examples(2000)):
        cleaned = os.path.normpath(pattern).lstrip("/")
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        expected = any(as_go_compiles(cleaned).fullmatch(one) for one in above)
        assert Matcher([f"./{pattern}"])(path) is expected, (pattern, path)
