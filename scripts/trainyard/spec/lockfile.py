"""Read locks: hash-pinned requirement files with names, versions and hashes only.

A target has one pair of locks per package index that it can be built from::

    images/<target>/framework.lock                 the big wheels, default index
    images/<target>/requirements.lock              everything else
    images/<target>/framework.pytorch-cpu.lock     the same two, with torch from PyTorch's CPU index
    images/<target>/requirements.pytorch-cpu.lock
    images/<target>/framework.arm64.lock           the big wheels for linux/arm64, default index

If the base holds the framework, base.json, the record of its contents, takes the place of the framework's lock. A
nightly whose spec names packages without versions has nightly.json beside its locks, with those versions.

A user's repository has one ``trainyard.lock`` instead; the same files are written from it into its build folder.

An entry ends with the bytes of its file, from which the image's layers are made up::

    torch==2.15.0 \\
        --hash=sha256:...  # 539136850 bytes

``, added`` after the bytes marks what a user's repository requires and its target does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from trainyard.common.console import UserError
from trainyard.spec import workspace_lock
from trainyard.spec.model import Spec, base_contents_file, nightly_versions_file, relative

_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)")
_SIZE = re.compile(r"  # (\d+) bytes(, added)?$")


@dataclass(frozen=True)
class Pin:
    """An entry of a lock.

    Attributes:
        name: canonical.
        hashes: SHA-256 of the files that are accepted, hexadecimal.
        size: bytes of the file that is installed, packed; 0 if the index does not say.
        added: whether a user's repository requires it and its target does not.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    size: int = 0
    added: bool = False

    def text(self) -> str:
        """The entry as a lock has it."""
        about = f"  # {self.size} bytes{', added' if self.added else ''}" if self.size or self.added else ""
        return f"{self.requirement()}{about}\n"

    def requirement(self) -> str:
        """The entry without its size, as an installer reads it."""
        return " \\\n    ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{one}" for one in self.hashes)])


def read(path: Path, command: str = "") -> dict[str, str]:
    """Canonical name -> version of every package that a lock pins or base.json lists.

    Args:
        command: what writes the lock, for messages; ``make lock`` for the target of its folder if empty.
    Raises:
        UserError: the lock is missing, unreadable, or pins a package without a hash.
    """
    command, text = _text(path, command)
    if path.suffix == ".json":
        return {str(name): str(version) for name, version in json.loads(text)["packages"].items()}
    return {pin.name: pin.version for pin in _parsed(path, text, command)}


def pinned(path: Path, command: str = "") -> list[Pin]:
    """The entries of a lock; none of base.json, which has no hashes.

    Raises:
        UserError: see :func:`read`.
    """
    command, text = _text(path, command)
    return [] if path.suffix == ".json" else _parsed(path, text, command)


def mark_added(pins: Iterable[Pin], of_target: Iterable[Pin]) -> list[Pin]:
    """The pins, each marked as added unless ``of_target`` has it with the same version and hashes."""
    shared = {(pin.name, pin.version, pin.hashes) for pin in of_target}
    return [replace(pin, added=(pin.name, pin.version, pin.hashes) not in shared) for pin in pins]


def _text(path: Path, command: str) -> tuple[str, str]:
    """What writes a lock, and its text."""
    command = command or f"trainyard lock {path.parent.name}"
    try:
        return command, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{relative(path)} is missing: run '{command}'") from None


def _parsed(path: Path, text: str, command: str) -> list[Pin]:
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{relative(path)}: {error}; run '{command}'") from None


def parse(text: str) -> list[Pin]:
    """The entries in the text of a lock.

    Raises:
        ValueError: one of them is not a pin with a hash.
    """
    found = []
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        if not entry.strip() or entry.startswith("#"):
            continue
        match = _PIN.match(entry)
        hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]+)", entry))
        if not match or not hashes:
            raise ValueError(f"not a hash-pinned requirement: {entry[:80]!r}")
        size = _SIZE.search(entry)
        found.append(
            Pin(canonicalize_name(match[1]), match[2], hashes, int(size[1]) if size else 0, bool(size and size[2]))
        )
    return found


def framework_lock(spec: Spec, index: str) -> Path:
    """The file that pins the framework: a lock, or the record of a base image that has it installed.

    Raises:
        UserError: a user's repository has no readable trainyard.lock, or a nightly was never locked.
    """
    _split(spec)
    if spec.framework_in_base:
        return base_contents_file(spec)
    if not spec.locked:
        raise UserError(f"{relative(nightly_versions_file(spec))} is missing: run '{spec.command('lock')}'")
    return spec.framework_folder / f"framework{spec.suffix(index)}.lock"


def requirements_lock(spec: Spec, index: str) -> Path:
    """The lock of everything that the framework does not need by itself.

    Raises:
        UserError: that of a user's repository has no readable trainyard.lock.
    """
    _split(spec)
    return spec.build_folder / f"requirements{spec.suffix(index)}.lock"


def compiled_lock(spec: Spec) -> Path | None:
    """The lock of the source distributions that are compiled for a user's image; None if there are none.

    Raises:
        UserError: there is no readable trainyard.lock.
    """
    return _lock_of_compilation(spec, "compiled")


def build_requires_lock(spec: Spec) -> Path | None:
    """The lock of what :func:`compiled_lock` is compiled with; None if nothing is compiled.

    Raises:
        UserError: there is no readable trainyard.lock.
    """
    return _lock_of_compilation(spec, "build-requires")


def _lock_of_compilation(spec: Spec, name: str) -> Path | None:
    if not (spec.workspace and spec.workspace.document.build):
        return None
    _split(spec)
    path = spec.build_folder / f"{name}{spec.suffix('default')}.lock"
    return path if path.is_file() else None  # markers may leave nothing to compile for a platform


def _split(spec: Spec) -> None:
    """Write the sections of a user's trainyard.lock as the files that the image of ``spec`` is built from."""
    if spec.workspace:
        workspace_lock.split(spec.workspace, spec.build_folder, spec.architecture)


def installed(spec: Spec, index: str) -> dict[str, str]:
    """Canonical name -> version of every package the image holds when built from ``index``.

    Raises:
        UserError: see :func:`read`.
    """
    paths = [framework_lock(spec, index), requirements_lock(spec, index), compiled_lock(spec)]
    found: dict[str, str] = {}
    for path in paths:
        if path is not None:
            found |= read(path, spec.command("lock"))
    return found
