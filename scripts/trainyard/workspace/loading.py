"""Load what a command is given: a target, the folder of a repository, or one Python file or notebook."""

from __future__ import annotations

from pathlib import Path

from trainyard.common.context import Context
from trainyard.spec import model, workspace
from trainyard.spec.model import Spec


def load(target: str | None, arch: str | None = None, context: Context | None = None) -> Spec:
    """Return the spec of a target, a repository, or one file, which is described first.

    Raises:
        UserError, StepFailed: see :func:`trainyard.spec.model.load` and
            :func:`trainyard.workspace.one_file.describe`.
    """
    if workspace.is_one_file(target):
        from trainyard.workspace import one_file  # libraries that no other target needs

        one_file.describe(Path(target))
    return model.load(target, arch, context)
