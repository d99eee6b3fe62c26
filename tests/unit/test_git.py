"""Reading a repository runs none of the programs that its configuration names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.image import build_backends, facts
from trainyard.spec.workspace import Workspace, WorkspaceDocument
from trainyard.workspace import code_files

SIGNED = """tree {tree}
author A <a@example.com> 1 +0000
committer A <a@example.com> 1 +0000
gpgsig -----BEGIN PGP SIGNATURE-----
 x
 -----END PGP SIGNATURE-----

signed
"""


def git(folder: Path, *arguments: str, text: str = "") -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a signed commit, which tells in the file `ran` beside it which of its programs were run."""
    for name in ("GLOBAL", "SYSTEM"):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", "/dev/null")
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "a.py").write_text("", encoding="utf-8")
    git(folder, "add", ".")
    signed = SIGNED.format(tree=git(folder, "write-tree"))
    commit = git(folder, "hash-object", "-t", "commit", "-w", "--stdin", text=signed)
    git(folder, "update-ref", "HEAD", commit)
    git(folder, "tag", "v1.0", commit)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("monitor", "post-index-change", "gpg", "upload-pack"):
        script = programs / name
        script.write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/ran\nexit 1\n", encoding="utf-8")
        script.chmod(0o755)
    settings = {
        "core.fsmonitor": f"{programs}/monitor",
        "core.hooksPath": str(programs),
        "log.showSignature": "true",
        "gpg.program": f"{programs}/gpg",
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": str(tmp_path),
        "remote.origin.uploadPack": f"{programs}/upload-pack",
    }
    for name, value in settings.items():
        git(folder, "config", name, value)
    (folder / "a.py").touch()  # git status writes the index anew, and runs a hook
    return folder


def missing_commit(repository: Path) -> None:
    (repository / ".git" / git(repository, "rev-parse", "--symbolic-full-name", "HEAD")).write_text("1" * 40 + "\n")


def workspace(repository: Path) -> Workspace:
    return Workspace(repository / "trainyard.yaml", WorkspaceDocument(extends="cpu"))


READERS: dict[str, Callable[[Path], object]] = {
    "the revision": lambda folder: facts.revision(folder),
    "the time": lambda folder: facts.source_date_epoch(folder),
    "the code": lambda folder: code_files.collect(workspace(folder)),
    "the version": build_backends._archival,
}


@pytest.mark.parametrize("whole", [True, False], ids=["a whole clone", "a partial clone"])
@pytest.mark.parametrize("reader", READERS)
def test_no_program_that_a_repository_names_is_run(repository: Path, reader: str, whole: bool) -> None:
    if not whole:
        missing_commit(repository)
    READERS[reader](repository)
    ran = repository.parent / "ran"
    assert not ran.exists(), ran.read_text(encoding="utf-8")


def test_what_is_read_is_what_git_has(repository: Path) -> None:
    assert facts.revision(repository) == f"{git(repository, 'rev-parse', 'HEAD')}-dirty", "programs/ is new"
    assert facts.source_date_epoch(repository) == 1
    assert "describe-name: v1.0" in build_backends._archival(repository)
