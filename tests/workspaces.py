"""Locks of users' repositories, without a resolution."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trainyard.image import workspace_resolver
from trainyard.spec import lockfile, model, workspace_lock
from trainyard.spec.lockfile import Pin
from trainyard.spec.model import Spec
from trainyard.spec.workspace_lock import SPLIT_HEADER, WorkspaceLock


def added(name: str, version: str = "1.0", size: int = 40_000) -> Pin:
    """A package that a user requires and the target does not; ``size``: bytes of its wheel."""
    return Pin(name, version, (hashlib.sha256(f"{name}-{version}".encode()).hexdigest(),), size, added=True)


def lock(spec: Spec, *more: Pin) -> None:
    """Write a trainyard.lock that is up to date with the requirements, and has ``more`` besides the target's packages.

    The target's base does not hold the framework.
    """
    assert spec.workspace
    own = "".join(pin.text() for pin in more)
    sections: dict[str, str] = {}
    for one in model.each_platform(spec):
        parent = model.load(spec.workspace.parent, one.arch)
        entries = {
            "framework": _entries(lockfile.framework_lock(parent, "default")),
            "requirements": _entries(lockfile.requirements_lock(parent, "default")) + own,
        }
        entries |= dict.fromkeys(("compiled", "build-requires"), "") if spec.workspace.document.build else {}
        sections |= {workspace_lock.section(name, one.architecture): text for name, text in entries.items()}
    inputs = workspace_resolver.inputs(spec, sections)
    workspace_lock.write(
        spec.workspace,
        WorkspaceLock("0.1.0", "00000000", spec.workspace.parent, spec.base_spec().image, inputs, sections),
    )


def lock_without_resolution(folder: str) -> None:
    """:func:`lock` the repository of a folder."""
    lock(model.load(folder))


def _entries(path: Path) -> str:
    return path.read_text(encoding="utf-8").removeprefix(SPLIT_HEADER)
