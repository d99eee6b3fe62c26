"""Locks whose packages are on no index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from trainyard.spec import pylock
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import DEFAULT, File, Lock, Locked, Origin, Pin, Role, ordered


def pin(requirement: str, role: Role = "", size: int = 0, hashes: Sequence[str] = (), arch: str = "amd64") -> Pin:
    """Return the pin of a requirement such as ``torch==2.9.1``, of wheels or of what is compiled.

    Args:
        size: bytes of its wheels.
        hashes: SHA-256 of each; by default there is one, with the hash of the requirement.
        arch: that the wheels are for.
    """
    name, _, version = requirement.partition("==")
    machine = ARCHITECTURES[arch].machine
    stem, tag = f"{name.replace('-', '_')}-{version}", f"py3-none-manylinux_2_17_{machine}.whl"
    hashes = hashes or [hashlib.sha256(requirement.encode()).hexdigest()]
    if role == "compiled":
        return Pin(name, version, (File(f"{stem}.tar.gz", hashes[0], size),), role)
    files = tuple(File(f"{stem}-{number}-{tag}", sha, size) for number, sha in enumerate(hashes, 1))
    return Pin(name, version, files, role)


def pins(**roles: str) -> list[Pin]:
    """Return pins: ``pins(framework="torch==2.9.1", requirements="a==1 b==1")``."""
    named: dict[str, Role] = {"framework": "framework", "compiled": "compiled", "added": "added"}
    return [pin(word, named.get(role, "")) for role, words in roles.items() for word in words.split()]


def locked(*pins: Pin, base: BaseContents | None = None) -> Locked:
    """Return what is locked for a platform and an index."""
    return Locked(ordered(pins), base)


def lock(
    *pins: Pin, arch: str = "amd64", index: str = DEFAULT, python: str = "3.11", base: BaseContents | None = None,
    origin: Origin | None = None,
) -> Lock:  # fmt: skip
    """Return a lock for one platform and one index."""
    return Lock(python, {index: {arch: locked(*pins, base=base)}}, origin=origin)


def write(folder: Path, lock: Lock) -> None:
    """Write the lock of a target into its folder."""
    pylock.write(folder / pylock.FILE, lock)
