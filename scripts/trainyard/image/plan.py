"""The build plan of a target: the arguments, labels and tags that local builds and Cloud Build share."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainyard import settings
from trainyard.console import UserError
from trainyard.settings import ROOT
from trainyard.spec import lockfile
from trainyard.spec.model import Spec
from trainyard.spec.naming import FILE_EPOCH, LABELS, NAME, candidate_tag, version_tag


@cache
def _git(*arguments: str) -> str | None:
    """What git prints, or None outside a repository."""
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


@cache
def _build_facts() -> dict[str, Any]:
    """``revision`` and ``time`` of the commit that a wheel was built from (scripts/hatch_build.py)."""
    try:
        found: dict[str, Any] = json.loads(Path(settings.__file__).with_name("_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def revision() -> str:
    """The commit, with ``-dirty`` if files differ from it; ``unknown`` if there is neither a repository nor a wheel.

    ``TRAINYARD_REVISION`` replaces it: an upload to Cloud Build has no repository.
    """
    given = settings.variable("REVISION")
    if given:
        return given
    if settings.CHECKOUT is None:
        return str(_build_facts().get("revision", "unknown"))
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git("status", "--porcelain", "--", "images", "trainers", "launcher") else commit


def source_date_epoch() -> int:
    """``SOURCE_DATE_EPOCH`` if set, else the commit's time: seconds since 1970.

    Raises:
        UserError: the variable is not a number.
    """
    given = settings.standard_variable("SOURCE_DATE_EPOCH")
    if given:
        if not given.isdigit():
            raise UserError(f"SOURCE_DATE_EPOCH={given!r} is not a number of seconds since 1970")
        return int(given)
    if settings.CHECKOUT is None:
        return int(_build_facts().get("time") or FILE_EPOCH)
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
        lockfile.framework_lock(spec, index),
        lockfile.requirements_lock(spec, index),
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
    """How one image is built, and its tags.

    Attributes:
        index: name of the package index the framework comes from.
        base: reference of the base image, with a digest where a registry gave one.
        base_digest: that digest, or empty.
        build_base: reference of the image in which wheels are installed; the base if empty.
        notes: every fallback that was taken, a sentence each, for the log and the summary.
        tag: the immutable tag.
        floating_tags: the tags that `promote` moves.
    """

    spec: Spec
    index: str
    index_url: str
    base: str
    base_digest: str
    notes: tuple[str, ...]
    tag: str
    floating_tags: tuple[str, ...]
    build_base: str = ""

    @property
    def candidate(self) -> str:
        """The local reference of an image that was built but not yet verified and trained in."""
        return candidate_tag(self.spec.target)

    @property
    def local(self) -> str:
        """The local reference of the last image that passed everything."""
        return f"{NAME}:{self.spec.target}"

    def build_args(self) -> dict[str, str]:
        """Values of the Dockerfile's ARGs."""
        created = datetime.datetime.fromtimestamp(source_date_epoch(), tz=datetime.UTC)
        contents = self.spec.base_contents
        if self.spec.framework_in_base:
            where = {"PYTHON": contents.interpreter, "SITE": contents.site} if contents else {}
            framework = where | {"FRAMEWORK_VERSION": self.spec.framework.version}
        else:
            framework = {"INDEX_URL": self.index_url, "BUILD_BASE": self.build_base or self.base}
        return framework | {
            "BASE": self.base,
            "BASE_DIGEST": self.base_digest,
            "LOCK": lockfile.suffix(self.index),
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


def make_plan(
    spec: Spec,
    *,
    index: str,
    index_url: str,
    base: str,
    base_digest: str,
    notes: tuple[str, ...],
    build_base: str = "",
) -> Plan:
    """Assemble a plan from the index and the base that this host can reach."""
    day = datetime.datetime.fromtimestamp(source_date_epoch(), tz=datetime.UTC).strftime("%Y%m%d")
    if spec.base_contents:
        day = spec.base_contents.day  # a nightly has the day on which its base was inspected, whatever the commit
    version = version_tag(spec)
    return Plan(
        spec=spec,
        index=index,
        index_url=index_url,
        base=base,
        base_digest=base_digest,
        notes=notes,
        tag=f"{version}-{day}-{content_hash(spec, index, base_digest or base)}",
        floating_tags=(spec.target, version),
        build_base=build_base,
    )
