"""Locks of users' repositories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest
from pyproject_hooks import BuildBackendHookCaller

from tests import locks
from tests.fakes.package_index import PackageIndex
from trainyard.image import base_image, build_backends, dockerfile, lock_origin, repository_lock
from trainyard.spec import model, pylock
from trainyard.spec.lock import Lock, Locked, Origin, Pin, Role
from trainyard.spec.lock import versions as versions_of
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.workspace import python_projects, requirements, wheels


def added(name: str, version: str = "1.0", size: int = 40_000) -> Pin:
    """Return a package that a user requires and the target does not.

    Args:
        size: bytes of its wheel.
    """
    return locks.pin(f"{name}=={version}", "added", size)


def empty(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a repository, and :func:`enter` it; return what that returns."""
    (root / ".git").mkdir(parents=True)
    return enter(root, monkeypatch)


def enter(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder of a repository; no engine, registry, netrc or uv settings count there, and
    wheels of folders are made by :func:`make`.

    Returns:
        uv's file of the user's settings, which is empty.
    """
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(root.parent / "state"))
    monkeypatch.setattr(
        base_image, "lockable_reference", lambda name, _context: f"{model.bases()[name].image}@sha256:{'a' * 64}"
    )
    monkeypatch.setattr(build_backends.Backends, "wheel", lambda _, *arguments: make(*arguments))
    settings = root.parent / "user.toml"
    settings.touch()
    monkeypatch.setenv("UV_CONFIG_FILE", str(settings))
    monkeypatch.setenv("NETRC", str(root.parent / "none"))
    return settings


def make(where: str, folder: Path, _names: Iterable[str], out: Path) -> Path:
    """Make a wheel with a build backend that the tests wrote, in no container."""
    named = python_projects.backend(folder)
    hooks = BuildBackendHookCaller(str(folder), named.name, named.path, python_executable=sys.executable)
    out.mkdir(exist_ok=True)
    return out / str(hooks.build_wheel(str(out)))


def ensure_wheels(spec: RepositorySpec, folder: Path) -> None:
    """Make a folder hold the wheels of the folders that a repository requires, as a build does."""
    wanted = requirements.of_platform(spec)
    wheels.ensure(wanted.sources, spec.locked().requirements, spec.lock_file, folder, make)


def repository(folder: str | None = None, arch: str | None = None) -> RepositorySpec:
    """Load the repository of a folder, by default the current one."""
    spec = model.load(folder, arch)
    assert isinstance(spec, RepositorySpec)
    return spec


def fresh(spec: Spec) -> RepositorySpec:
    """Load the spec of a repository again, with the lock that is there now."""
    return repository(str(spec.folder), spec.arch)


def relock(spec: Spec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = (), check: bool = False) -> bool:
    """Lock a repository as ``trainyard lock`` does, and return whether its lock changed."""
    before = fresh(spec)
    locked = repository_lock.lock(before, upgrade=upgrade, upgrade_packages=upgrade_packages, check=check)
    return locked.lock != before.lock


def is_current(spec: Spec) -> bool:
    """Return whether the lock that is there now is up to date."""
    return lock_origin.is_current(fresh(spec))


def versions(spec: Spec, *roles: Role, index: str = "default") -> dict[str, str]:
    """Return canonical name -> version of what is locked in some roles, by default everything but the framework."""
    return versions_of(pin for pin in spec.locked(index).pins if pin.role in (roles or ("", "added")))


def write_lock(folder: Path, **pins: str) -> None:
    """Write the lock of an image.yaml: ``write_lock(folder, framework="torch==2.9.1", requirements="a==1 b==1")``."""
    locks.write(folder, locks.lock(*locks.pins(**pins)))


def lock(spec: Spec, *more: Pin) -> None:
    """Write a lock that is up to date with the requirements, and has ``more`` besides the target's packages.

    The target's base does not hold the framework.
    """
    assert isinstance(spec, RepositorySpec)
    locked: dict[str, Locked] = {}
    for one in model.each_platform(spec):
        locked[one.arch] = locks.locked(*spec.extends.on(one.arch).locked().pins, *more)
    content = Lock(spec.python_version, {"default": locked})
    inputs = lock_origin.inputs(spec, content)
    origin = Origin("0.1.0", "00000000", spec.extends.target, spec.base_spec().image, inputs)
    pylock.write(spec.lock_file, Lock(spec.python_version, {"default": locked}, origin=origin))


def render(spec: Spec) -> RepositorySpec:
    """Write what the recipe of a repository is made from, with no code, and return the spec with its lock."""
    locked = fresh(spec)
    dockerfile.write(dockerfile.rendered(locked))
    (locked.build_folder / "code.tar").touch()
    return locked


def lock_without_resolution(folder: str) -> None:
    """:func:`lock` the repository of a folder."""
    lock(model.load(folder))


def command_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``trainyard`` in a repository, with its state beside it. Raises CalledProcessError if it fails."""
    return subprocess.run(
        [sys.executable, "-m", "trainyard", *words],
        cwd=folder,
        env=os.environ | {"TRAINYARD_BUILD": str(folder.parent)},
        capture_output=True,
        text=True,
        check=True,
    )


class LockedOnce:
    """Hold a repository that extends ``tf-cpu``, locked once with an index on loopback, for tests that change copies.

    Attributes:
        index: the only index of the repository.
        root: the repository's folder.
    """

    def __init__(self, folder: Path, uv_environment: Mapping[str, str]) -> None:
        self.index = PackageIndex()
        self.root = folder / "repository"
        self._uv_environment = uv_environment

    def __enter__(self) -> Self:
        self.index.__enter__()
        subprocess.run(["git", "init", "--quiet", "--initial-branch=main", str(self.root)], check=True)
        settings = f'[[index]]\nname = "fake"\nurl = "{self.index.url}"\ndefault = true\n'
        (self.root / "uv.toml").write_text(settings, encoding="utf-8")
        (self.root / "train.py").write_text("print('trained')\n", encoding="utf-8")
        (self.root / "trainyard.yaml").write_text(
            "extends: tf-cpu\nrun: python train.py\nrequirements: requirements.txt\nsmoke: {args: []}\n",
            encoding="utf-8",
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.index.__exit__(*error)

    def lock(self, requirements: Iterable[str]) -> Path:
        """Write the lines of requirements.txt, and lock them; return the path of the lock."""
        (self.root / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
        with pytest.MonkeyPatch.context() as monkeypatch:
            self._enter(self.root, monkeypatch)
            assert relock(repository())
            return repository().lock_file

    def copy(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RepositorySpec:
        """Copy the repository into a folder, and enter the copy."""
        shutil.copytree(self.root.parent, folder, dirs_exist_ok=True)
        self._enter(folder / "repository", monkeypatch)
        return repository()

    def lend_index(self) -> Iterator[PackageIndex]:
        """Yield the index to a test, and forget afterwards what the test added to it."""
        files, uploaded = dict(self.index.files), dict(self.index.uploaded)
        yield self.index
        self.index.files, self.index.uploaded = files, uploaded
        self.index.seen.clear()

    def _enter(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        enter(root, monkeypatch)
        for name, value in self._uv_environment.items():
            monkeypatch.setenv(name, value)
