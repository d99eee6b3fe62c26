"""The build plan of a target: what every executor (local Docker, bake, Cloud Build) is told, in one value."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts import locks
from scripts.cli import ROOT, UserError
from scripts.spec import Spec

#: Name of the local image repository.
NAME = os.environ.get("IMAGE_NAME", "trainyard")

#: Prefix of our own OCI labels.
LABELS = "io.trainyard"

#: The time every file of ours has inside an image: 1980-01-01, the earliest that zip archives can hold. It is not the
#: commit's time, since then each commit would be a new framework layer.
FILE_EPOCH = 315532800


@cache
def _git(*arguments: str) -> str | None:
    """What git prints, or None outside a repository."""
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def revision() -> str:
    """``REVISION`` if set, else the commit, with ``-dirty`` if files differ from it; ``unknown`` outside a repository.

    An upload to Cloud Build is no repository: there the variable carries the commit.
    """
    given = os.environ.get("REVISION")
    if given:
        return given
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git("status", "--porcelain", "--", "images", "trainers", "launcher") else commit


def source_date_epoch() -> int:
    """``SOURCE_DATE_EPOCH`` if set, else the commit's time: seconds since 1970.

    Raises:
        UserError: the variable is not a number.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        if not given.isdigit():
            raise UserError(f"SOURCE_DATE_EPOCH={given!r} is not a number of seconds since 1970")
        return int(given)
    return int(_git("log", "-1", "--format=%ct") or FILE_EPOCH)


def _files(folder: Path) -> list[Path]:
    """What of a folder reaches an image, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def content_hash(spec: Spec, index: str, base: str) -> str:
    """8 hexadecimal digits that change whenever anything that goes into the image changes.

    Covers the rendered Dockerfile, both locks, the trainers, the launcher, the image's own trainers and the base: two
    builds with one hash are the same image, so a tag that carries it never needs to move.
    """
    digest = hashlib.sha256(f"{index}\n{base}\n".encode())
    inputs = [
        spec.folder / "Dockerfile",
        locks.framework_lock(spec, index),
        locks.requirements_lock(spec, index),
    ]
    inputs += _files(ROOT / "trainers") + _files(ROOT / "launcher")
    if spec.trainers.folder:
        inputs += _files(spec.folder / spec.trainers.folder)
    for path in inputs:
        digest.update(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]


@dataclass(frozen=True)
class Plan:
    """How one image is built and what it will be called.

    Attributes:
        index: name of the package index the framework comes from.
        base: reference of the base image, with a digest where a registry gave one.
        base_digest: that digest, or empty.
        workshop: reference of the image in which wheels are installed; the base if empty.
        notes: loud remarks: every fallback that was taken, for the log and the summary.
        tag: the immutable tag.
        moving: the tags that `promote` moves.
    """

    spec: Spec
    index: str
    index_url: str
    base: str
    base_digest: str
    notes: tuple[str, ...]
    tag: str
    moving: tuple[str, ...]
    workshop: str = ""

    @property
    def candidate(self) -> str:
        """The local reference of an image that was built but not yet verified and trained in."""
        return f"{NAME}:{self.spec.target}-candidate"

    @property
    def local(self) -> str:
        """The local reference of the last image that passed everything."""
        return f"{NAME}:{self.spec.target}"

    def build_args(self) -> dict[str, str]:
        """Values of the Dockerfile's ARGs."""
        created = datetime.datetime.fromtimestamp(source_date_epoch(), tz=datetime.UTC)
        held = self.spec.held
        if self.spec.on_framework:
            where = {"PYTHON": held.interpreter, "SITE": held.site} if held else {}
            framework = where | {"FRAMEWORK_VERSION": self.spec.framework.version}
        else:
            framework = {"INDEX_URL": self.index_url, "WORKSHOP": self.workshop or self.base}
        return framework | {
            "BASE": self.base,
            "BASE_DIGEST": self.base_digest,
            "LOCK": locks.suffix(self.index),
            "INDEX": self.index,
            "REVISION": revision(),
            "CREATED": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "VERSION": self.tag,
            "SOURCE_DATE_EPOCH": str(source_date_epoch()),
        }


_OCI = "org.opencontainers.image"

#: Label -> the build argument whose value it takes.
LABELS_FROM_ARGUMENTS = {
    f"{_OCI}.created": "CREATED",
    f"{_OCI}.revision": "REVISION",
    f"{_OCI}.version": "VERSION",
    f"{_OCI}.base.name": "BASE",
    f"{_OCI}.base.digest": "BASE_DIGEST",
    f"{LABELS}.index": "INDEX",
}


def labels(spec: Spec) -> dict[str, str]:
    """The labels that the spec alone decides."""
    return {
        f"{_OCI}.title": f"{NAME}/{spec.target}",
        f"{_OCI}.description": spec.summary,
        f"{_OCI}.licenses": "Apache-2.0",
        f"{LABELS}.target": spec.target,
        f"{LABELS}.accelerator": spec.accelerator,
        f"{LABELS}.framework": f"{spec.framework.name}=={spec.framework.version}",
    }


def version_tag(spec: Spec) -> str:
    """The tag of a target's version. A tag cannot hold the ``+`` before a local version: it becomes ``_``."""
    return f"{spec.target}-{spec.framework.version.replace('+', '_')}"


def make_plan(
    spec: Spec,
    *,
    index: str,
    index_url: str,
    base: str,
    base_digest: str,
    notes: tuple[str, ...],
    workshop: str = "",
) -> Plan:
    """Put together a plan from what was found out about this host's network."""
    day = datetime.datetime.fromtimestamp(source_date_epoch(), tz=datetime.UTC).strftime("%Y%m%d")
    if spec.held:
        day = spec.held.day  # a nightly is of the day its base was looked into, whatever the commit
    version = version_tag(spec)
    return Plan(
        spec=spec,
        index=index,
        index_url=index_url,
        base=base,
        base_digest=base_digest,
        notes=notes,
        tag=f"{version}-{day}-{content_hash(spec, index, base_digest or base)}",
        moving=(spec.target, version),
        workshop=workshop,
    )
