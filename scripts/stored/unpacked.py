"""The layers of a local image as the engine has unpacked them: one folder each, where this process may read them.

Walking them takes seconds where decompressing their blobs takes many: 2.4 s against 13 s for a 6 GB image (2026-11).
The kernel says where they are: the root of a running container is an overlay mount, whose lower directories are the
image's layers. That works with engines on this host that use overlayfs, as root; elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker.errors

from scripts import engine
from scripts.stored.inside import PYTHONS

#: What overlayfs marks a directory with that hides the one below it (kernel, Documentation/filesystems/overlayfs).
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True)
class Entry:
    """What one layer has at a path, which has no leading slash.

    Attributes:
        file: where it is to be read; None for a whiteout, which hides the path in the layers below.
        size: bytes of content; 0 for what is no regular file, and for every further name of the same file.
    """

    path: str
    file: Path | None
    size: int
    mode: int


@contextlib.contextmanager
def folders(reference: str, count: int) -> Iterator[list[Path]]:
    """The folders of an image's ``count`` layers, bottom first, for as long as the context lasts.

    None if they are out of reach.
    """
    with contextlib.ExitStack() as undo:
        found: list[Path] = []
        for python in PYTHONS:
            container = engine.client().containers.create(
                reference,
                ["-c", "import time; time.sleep(600)"],
                entrypoint=[python],
                network_mode="none",
                read_only=True,
                labels=engine.owned("verify"),
            )
            undo.callback(container.remove, force=True)
            try:
                container.start()
            except docker.errors.APIError:  # no such program
                continue
            container.reload()
            found = _lower(int(container.attrs["State"]["Pid"]))[:count]
            break
        yield found if len(found) == count and all(os.access(folder, os.R_OK | os.X_OK) for folder in found) else []


def _lower(process: int) -> list[Path]:
    """The lower directories of the overlay mount that is a process's root, bottom first."""
    try:
        lines = Path(f"/proc/{process}/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[4] == "/" and after.startswith("overlay "):
            options = after.split()[-1].split(",")
            lower = next((option for option in options if option.startswith("lowerdir=")), "lowerdir=")
            return [Path(folder) for folder in reversed(lower.removeprefix("lowerdir=").split(":"))]
    return []


def walk(folder: Path) -> Iterator[Entry]:
    """Everything but plain directories that a layer stores, in a fixed order."""
    seen: set[int] = set()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        if below and _is_opaque(folder / below):
            yield Entry(below, None, 0, 0)
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                yield Entry(path, None, 0, 0)
                continue
            content = stat.S_ISREG(status.st_mode) and status.st_ino not in seen
            if status.st_nlink > 1:
                seen.add(status.st_ino)
            yield Entry(path, Path(entry.path), status.st_size if content else 0, stat.S_IMODE(status.st_mode))


def _is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
