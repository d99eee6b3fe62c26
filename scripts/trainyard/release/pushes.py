"""The images of a workspace that were pushed from this host: one record per repository of a registry.

``trainyard push --code-only`` replaces the code of such an image without reading it from its registry again, and
``trainyard job`` names it by its digest.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainyard.spec.state import own


@dataclass(frozen=True)
class Push:
    """An image, or an image index of several platforms, that was pushed.

    Attributes:
        repository: ``host[:port]/path`` that it was pushed to.
        tag: its immutable tag.
        digest: its digest there, ``media_type`` and ``manifest``: its manifest or index, JSON.
        config: its configuration, JSON; empty for an index.
        images: those of an index.
        code_digest: digest of the image that the last code-only push made of it; empty if it has its own code again.
        code_tag: the tag of that.
        folder: of the repository that pushed it; empty if that is not known.
        time: when it was pushed, or recorded again by a push that had nothing to upload; seconds since 1970.
    """

    repository: str
    tag: str
    digest: str
    media_type: str
    manifest: str
    config: str
    images: tuple[Push, ...] = ()
    code_digest: str = ""
    code_tag: str = ""
    folder: str = ""
    time: float = 0

    @property
    def reference(self) -> str:
        """Return ``host[:port]/path@sha256:…`` of the image, with the code that was pushed last."""
        return f"{self.repository}@{self.code_digest or self.digest}"

    @property
    def address(self) -> str:
        """``host[:port]/path`` of the registry, as ``--registry`` names it: the repository without its last part."""
        return self.repository.rpartition("/")[0]


def _file(kept: Path, repository: str) -> Path:
    return kept / "pushes" / f"{hashlib.sha256(repository.encode()).hexdigest()[:16]}.json"


def record(kept: Path, push: Push) -> None:
    """Keep what was pushed, in place of what was pushed to the same repository before."""
    path = _file(kept, push.repository)
    own(kept)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(replace(push, time=time.time()))), encoding="utf-8")
    temporary.replace(path)


def forget(kept: Path, repository: str) -> None:
    """Remove the record of a repository."""
    _file(kept, repository).unlink(missing_ok=True)


def _read(path: Path) -> Push | None:
    """Return the record in a file; None if the file is missing or has none."""
    try:
        return TypeAdapter(Push).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def last(kept: Path, repository: str = "", folder: Path | None = None) -> Push | None:
    """What was pushed last of a workspace's image, to ``repository`` or to any; None if nothing was.

    Args:
        kept: the folder of what is kept about the image.
        repository: ``host[:port]/path``.
        folder: of the repository of files, of which others may have an image of the same name; None: any.
    """
    files = [_file(kept, repository)] if repository else kept.glob("pushes/*.json")
    found = (one for one in map(_read, files) if one and (not folder or one.folder in ("", str(folder))))
    return max(found, key=lambda one: one.time, default=None)
