"""Locks of users' repositories, without a resolution."""

from __future__ import annotations

from trainyard.image import workspace_resolver
from trainyard.spec import workspace_lock
from trainyard.spec.model import Spec
from trainyard.spec.workspace_lock import WorkspaceLock
from trainyard.workspace import requirements


def lock(spec: Spec, text: str = "") -> None:
    """Write a trainyard.lock that is up to date with the requirements, and has ``text`` as theirs."""
    assert spec.workspace
    sections = {"framework": "torch==2.15.0\n", "requirements": text}
    wanted = requirements.read(spec.workspace, spec.base_spec().python)
    inputs = workspace_resolver._inputs(spec, wanted, [], sections)
    workspace_lock.write(
        spec.workspace, WorkspaceLock("0.1.0", "00000000", spec.workspace.parent, "debian", inputs, sections)
    )
