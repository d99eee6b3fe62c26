"""Run a cloudbuild.yaml here, with the local Docker engine, as Cloud Build would run it.

    make cloudbuild-local           ./cloudbuild.yaml on the files that `gcloud builds submit` would upload
    make cloudbuild-local SUBSTITUTIONS=_TARGETS=tf-cpu,_REGISTRY=localhost:5000/team
    make cloudbuild-local CONFIG=../other/cloudbuild.yaml SOURCE=../other IMAGES=gcr.io/my/builder=my/builder

A builder image of Google's that cannot be pulled (docker, git, make, gcloud, gsutil) gets a stand-in built from the
project's base. Whatever happens, no container, volume or network of the run is left.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path
from typing import BinaryIO

from rich.table import Table

from scripts import cli, engine
from scripts.cli import ROOT, StepFailed, UserError, log, say
from scripts.cloud import config as cloud_config
from scripts.cloud.config import Build
from scripts.cloud.executor import SUCCESS, Executor, Result


def source_files(folder: Path) -> list[str]:
    """The files that `gcloud builds submit` would upload, relative to ``folder``.

    gcloud itself is asked where it is installed, since it alone knows .gcloudignore; then git; then every file counts.
    """
    commands = [
        ["gcloud", "meta", "list-files-for-upload", str(folder)],
        ["git", "-C", str(folder), "ls-files", "--cached", "--others", "--exclude-standard"],
    ]
    for command in commands:
        if not shutil.which(command[0]):
            continue
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return sorted(name for name in found.stdout.splitlines() if (folder / name).is_file())
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def source_archive(folder: Path) -> BinaryIO:
    """A tar of :func:`source_files`, open for reading."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in source_files(folder):
            tar.add(folder / name, arcname=name, recursive=False)
    file.seek(0)
    return file


def pairs(text: str, what: str) -> dict[str, str]:
    """``A=b,C=d`` as a dictionary; like gcloud, ``^:^A=b:C=d,e`` sets another delimiter (gcloud topic escaping).

    Raises:
        UserError: an entry has no ``=``.
    """
    delimiter = ","
    if text.startswith("^") and text.count("^") >= 2:
        _, delimiter, text = text.split("^", 2)
    found = {}
    for entry in filter(None, text.split(delimiter)):
        key, equals, value = entry.partition("=")
        if not equals:
            raise UserError(f"{what}: {entry!r} is not NAME=VALUE")
        found[key] = value
    return found


def built_in(project: str, build_id: str) -> dict[str, str]:
    """The built-in substitutions of a build that was submitted by hand: no trigger, so no commit."""
    return {"PROJECT_ID": project, "PROJECT_NUMBER": "0", "BUILD_ID": build_id, "LOCATION": "local"}


def table(build: Build, result: Result) -> Table:
    """Every step's end, for people."""
    found = Table(
        "step", "image", "status", "seconds", title=f"{result.status} in {result.seconds} s", title_justify="left"
    )
    for step, outcome in zip(build.steps, result.steps, strict=True):
        took = f"{outcome.ended - outcome.started:.1f}" if outcome.ended else ""
        found.add_row(step.id or str(step.number), step.name, outcome.status, took)
    return found


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("--config", default=os.environ.get("CONFIG") or str(ROOT / "cloudbuild.yaml"))
    parser.add_argument("--source", default=os.environ.get("SOURCE"), help="folder; by default the configuration's")
    parser.add_argument("--substitutions", default=os.environ.get("SUBSTITUTIONS", ""), help="_A=b,_C=d")
    parser.add_argument("--images", default=os.environ.get("IMAGES", ""), help="NAME=LOCAL,...: local images to use")
    parser.add_argument("--project", default=os.environ.get("PROJECT", "local-project"))
    options = parser.parse_args(arguments)
    config = Path(options.config)
    try:
        text = config.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no file {config}: give one with CONFIG=") from None
    identity = f"local-{secrets.token_hex(8)}"
    build = cloud_config.load(
        cloud_config.read(text, config.name),
        where=config.name,
        given=pairs(options.substitutions, "SUBSTITUTIONS"),
        built_in=built_in(options.project, identity),
    )
    folder = Path(options.source) if options.source else config.resolve().parent
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give one with SOURCE=")
    engine.client()
    say(f"build {identity} on {socket.gethostname()}: {len(build.steps)} steps")
    executor = Executor(build, source_archive(folder), images=pairs(options.images, "IMAGES"))
    result = executor.run()
    log.print(table(build, result))
    for name, digest in result.images.items():
        say(f"{name} {digest}")
    cli.result(
        {
            "id": identity,
            "status": result.status,
            "detail": result.detail,
            "seconds": result.seconds,
            "images": result.images,
            "steps": [
                {"id": step.id, "status": outcome.status, "seconds": round(outcome.ended - outcome.started, 1)}
                for step, outcome in zip(build.steps, result.steps, strict=True)
            ],
        },
        as_json=options.json,
    )
    if result.status != SUCCESS:
        raise StepFailed(f"{result.status}: {result.detail}")
    return 0


if __name__ == "__main__":
    cli.run(main)
