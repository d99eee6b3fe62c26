"""The files that a user's image is built from, in the state folder: Dockerfile, locks, wheels and the code's layer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from trainyard.image import dockerfile, repository_lock
from trainyard.spec.model import RepositorySpec, relative
from trainyard.spec.workspace import Workspace
from trainyard.workspace import code_layer, indexes, wheels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Hold what the image of a repository is built from.

    Attributes:
        spec: with the lock that the files were written from.
        code: diff id of the code's layer; empty if there is none.
    """

    spec: RepositorySpec
    code: str


def prepare(spec: RepositorySpec) -> Prepared:
    """Write everything that the image of a repository is built from into ``spec.build_folder``.

    A lock that is missing, or that the requirements have changed since, is resolved first.

    Raises:
        UserError: the code, the requirements or the lock have a mistake; the message says where.
        StepFailed: the requirements could not be resolved.
    """
    exists = spec.lock_file.is_file()
    if exists:
        repository_lock.check_tool(spec)
    if not repository_lock.is_current(spec):
        logger.info(f"{'updating' if exists else 'writing'} {relative(spec.lock_file)}: commit it")
        spec = repository_lock.lock(spec)
    folder = spec.build_folder
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "wheels"
    built.mkdir(exist_ok=True)
    wheels.ensure(spec, built)
    (folder / "code.tar").unlink(missing_ok=True)
    code = ""
    if spec.has_code:
        layer = code_layer.write(spec.workspace, folder / "code.tar", spec.site)
        code = layer.diff_id
        for note in layer.notes:
            logger.warning(note)
    dockerfile.write(dockerfile.rendered(spec))
    return Prepared(spec, code)


def write_secrets(workspace: Workspace, folder: Path) -> dict[str, Path]:
    """Write the build's secrets into ``folder``: the private indexes and their credentials.

    Returns:
        Id of a secret of the Dockerfile -> its file. Files are empty where there is nothing to keep.
    """
    configuration, netrc = indexes.build_configuration(workspace)
    found = {"uv": folder / "uv.toml", "netrc": folder / "netrc"}
    for path, text in zip(found.values(), (configuration, netrc), strict=True):
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    return found
