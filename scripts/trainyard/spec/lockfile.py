"""Read locks: hash-pinned requirement files with names, versions and hashes only.

A target has one pair of locks per package index that it can be built from::

    images/<target>/framework.lock                 the big wheels, default index
    images/<target>/requirements.lock              everything else
    images/<target>/framework.pytorch-cpu.lock     the same two, with torch from PyTorch's CPU index
    images/<target>/requirements.pytorch-cpu.lock

If the base holds the framework, base.json, the record of its contents, takes the place of the framework's lock.

A user's repository has one ``trainyard.lock`` instead; the same files are written from it into its build folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from packaging.utils import canonicalize_name

from trainyard import installation
from trainyard.console import UserError
from trainyard.spec import workspace_lock
from trainyard.spec.model import Spec, base_contents_file, relative

_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)")


def read(path: Path, command: str = "") -> dict[str, str]:
    """Canonical name -> version of every package that a lock pins or base.json lists.

    Args:
        command: what writes the lock, for messages; ``make lock`` for the target of its folder if empty.
    Raises:
        UserError: the lock is missing, unreadable, or pins a package without a hash.
    """
    command = command or installation.command("lock", TARGET=path.parent.name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{relative(path)} is missing: run '{command}'") from None
    if path.suffix == ".json":
        return {str(name): str(version) for name, version in json.loads(text)["packages"].items()}
    pins: dict[str, str] = {}
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        if not entry.strip() or entry.startswith("#"):
            continue
        match = _PIN.match(entry)
        if not match or "--hash=sha256:" not in entry:
            raise UserError(f"{relative(path)}: not a hash-pinned requirement: {entry[:80]!r}; run '{command}'")
        pins[canonicalize_name(match[1])] = match[2]
    return pins


def hashes(path: Path) -> dict[tuple[str, str], list[str]]:
    """(canonical name, version) -> the SHA-256 sums of the files that a lock accepts for it.

    Raises:
        UserError: see :func:`read`.
    """
    pins = read(path)
    found: dict[tuple[str, str], list[str]] = {}
    for entry in re.sub(r"\\\n", " ", path.read_text(encoding="utf-8")).splitlines():
        match = _PIN.match(entry)
        if match and (name := canonicalize_name(match[1])) in pins:
            found[name, match[2]] = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
    return found


def suffix(index: str) -> str:
    """Suffix in the file names of an index's locks: empty for the default index."""
    return "" if index == "default" else f".{index}"


def framework_lock(spec: Spec, index: str) -> Path:
    """The file that pins the framework: a lock, or the record of a base image that has it installed.

    Raises:
        UserError: that of a user's repository has no readable trainyard.lock.
    """
    if spec.workspace:
        workspace_lock.split(spec.workspace, spec.build_folder)
    if spec.framework_in_base:
        return base_contents_file(spec)
    return spec.framework_folder / f"framework{suffix(index)}.lock"


def requirements_lock(spec: Spec, index: str) -> Path:
    """The lock of everything that the framework does not need by itself.

    Raises:
        UserError: that of a user's repository has no readable trainyard.lock.
    """
    if spec.workspace:
        workspace_lock.split(spec.workspace, spec.build_folder)
    return spec.build_folder / f"requirements{suffix(index)}.lock"


def compiled_lock(spec: Spec) -> Path | None:
    """The lock of the source distributions that are compiled for a user's image; None if there are none.

    Raises:
        UserError: there is no readable trainyard.lock.
    """
    if not (spec.workspace and spec.workspace.document.build):
        return None
    workspace_lock.split(spec.workspace, spec.build_folder)
    return spec.build_folder / "compiled.lock"


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
