"""Locks of users' repositories."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainyard.image import base_image, repository_lock
from trainyard.spec import lock as locks
from trainyard.spec import model
from trainyard.spec.lock import Lock, Origin, Pin, Section
from trainyard.spec.model import RepositorySpec, Spec


def added(name: str, version: str = "1.0", size: int = 40_000) -> Pin:
    """Return a package that a user requires and the target does not.

    Args:
        size: bytes of its wheel.
    """
    return Pin(name, version, (hashlib.sha256(f"{name}-{version}".encode()).hexdigest(),), size, added=True)


def empty(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a repository, and change to it; no engine, registry, netrc or uv settings count there.

    Returns:
        uv's file of the user's settings, which is empty.
    """
    (root / ".git").mkdir(parents=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRAINYARD_BUILD", str(root.parent / "state"))
    monkeypatch.setattr(
        base_image, "lockable_reference", lambda name, _context: f"{model.bases()[name].image}@sha256:{'a' * 64}"
    )
    settings = root.parent / "user.toml"
    settings.touch()
    monkeypatch.setenv("UV_CONFIG_FILE", str(settings))
    monkeypatch.setenv("NETRC", str(root.parent / "none"))
    return settings


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
    return repository_lock.is_current(fresh(spec))


def versions(spec: Spec, kind: str = "requirements", index: str = "default") -> dict[str, str]:
    """Return canonical name -> version of what a section of a target's lock pins."""
    return {pin.name: pin.version for pin in locks.parse(spec.locked(index).text(kind))}


def write_lock(folder: Path, **pins: str) -> None:
    """Write the lock of an image.yaml, as in ``write_lock(folder, framework="torch==2.9.1", requirements="a==1")``.

    The pins have the hash of no file.
    """
    entries = {Section("amd64", kind): f"{pin} --hash=sha256:{'0' * 64}\n" for kind, pin in pins.items()}
    locks.write(folder / locks.FILE, Lock(entries))


def lock(spec: Spec, *more: Pin) -> None:
    """Write a trainyard.lock that is up to date with the requirements, and has ``more`` besides the target's packages.

    The target's base does not hold the framework.
    """
    assert isinstance(spec, RepositorySpec)
    own = "".join(pin.text() for pin in more)
    sections: dict[Section, str] = {}
    for one in model.each_platform(spec):
        locked = spec.extends.on(one.arch).locked()
        entries = {"framework": locked.text("framework"), "requirements": locked.text("requirements") + own}
        entries |= dict.fromkeys(("compiled", "build-requires"), "") if spec.workspace.document.build else {}
        sections |= {Section(one.arch, kind): text for kind, text in entries.items()}
    inputs = repository_lock.inputs(spec, Lock(sections))
    origin = Origin("0.1.0", "00000000", spec.extends.target, spec.base_spec().image, inputs)
    locks.write(spec.lock_file, Lock(sections, origin=origin))


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
