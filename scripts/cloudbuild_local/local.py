"""Run a cloudbuild.yaml with the local Docker engine, on the files that ``gcloud builds submit`` would upload."""

from __future__ import annotations

import io
import logging
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.table import Table

from cloudbuild_local import config as cloud_config
from cloudbuild_local.config import Build
from cloudbuild_local.executor import Executor, Result
from trainyard.common import git
from trainyard.common.errors import UserError
from trainyard.oci import docker_engine
from trainyard.spec import yaml_source

logger = logging.getLogger(__name__)


def source_files(folder: Path) -> list[str]:
    """The files that `gcloud builds submit` would upload, relative to ``folder``.

    gcloud lists them if it is installed, because it implements .gcloudignore; else git; else they are all files.
    """
    names = _listed(folder)
    if names is None:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in map(os.fsdecode, names) if name and (folder / name).is_file())


def _listed(folder: Path) -> set[bytes] | None:
    """Return the names that gcloud or git lists; None if neither does."""
    if shutil.which("gcloud"):
        command = ["gcloud", "meta", "list-files-for-upload", str(folder)]
        found = subprocess.run(command, capture_output=True, check=False)
        if found.returncode == 0:
            return set(found.stdout.splitlines())
    if shutil.which("git"):
        found = git.run(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if found.returncode == 0:
            return set(found.stdout.split(b"\0"))
    return None


def source_archive(folder: Path) -> BinaryIO:
    """A tar archive of :func:`source_files`, open for reading."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in source_files(folder):
            tar.add(folder / name, arcname=name, recursive=False)
    file.seek(0)
    return file


def table(build: Build, result: Result) -> Table:
    """The results of the steps, for people."""
    found = Table(
        "step", "image", "status", "seconds", title=f"{result.status} in {result.seconds} s", title_justify="left"
    )
    for step, outcome in zip(build.steps, result.steps, strict=True):
        took = f"{outcome.ended - outcome.started:.1f}" if outcome.ended else ""
        found.add_row(step.id or str(step.number), step.name, outcome.status, took)
    return found


@dataclass(frozen=True)
class LocalBuild:
    """A build that ran locally, and its result."""

    id: str
    build: Build
    result: Result

    def facts(self) -> dict[str, Any]:
        """The result for programs."""
        steps = zip(self.build.steps, self.result.steps, strict=True)
        return {
            "id": self.id,
            "status": self.result.status,
            "detail": self.result.detail,
            "seconds": self.result.seconds,
            "images": self.result.images,
            "steps": [
                {"id": step.id, "status": outcome.status, "seconds": round(outcome.ended - outcome.started, 1)}
                for step, outcome in steps
            ],
        }


def run(
    config: Path,
    *,
    source: Path | None = None,
    substitutions: Mapping[str, str],
    images: Mapping[str, str],
    project: str,
    trigger: bool = False,
    engine_socket: bool = True,
) -> LocalBuild:
    """Run a configuration.

    Args:
        config: path of the cloudbuild.yaml.
        source: folder whose files are the build's source; that of ``config`` if None.
        substitutions: they override those of the configuration.
        images: image name -> local image to use for it.
        project: value of ``$PROJECT_ID``.
        trigger: whether it is the build of a trigger.
        engine_socket: whether the steps get the engine's socket.
    Raises:
        UserError: there is no such file or folder, or the configuration violates a rule of Cloud Build, or it has
            fields that the local executor does not support.
        StepFailed: the Docker engine failed. A build that fails is a result.
    """
    data = cloud_config.read_file(config)
    identity = f"local-{secrets.token_hex(8)}"
    values = cloud_config.built_in(project, identity)
    where = yaml_source.relative(config)
    build = cloud_config.load(data, where=where, given=substitutions, built_in=values, trigger=trigger)
    folder = source or config.resolve().parent
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the path of the folder with the build's source")
    docker_engine.client()
    if build.without_effect:
        logger.info(f"without effect in a local build: {', '.join(build.without_effect)}")
    logger.info(f"build {identity} on {socket.gethostname()}: {len(build.steps)} steps")
    executor = Executor(build, source_archive(folder), images=images, engine_socket=engine_socket)
    return LocalBuild(identity, build, executor.run())
