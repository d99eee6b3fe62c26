"""Find the unpacked layers of a local image: one folder each, if this process can read them.

Reading them is faster than decompressing their blobs: 2.4 s instead of 13 s for a 6 GB image (2026-11). The root of a
running container is an overlay mount whose lower directories are the image's layers. This works as root with an engine
on the same host that uses overlayfs; otherwise no folders are found.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker.errors

from trainyard.oci import docker_engine
from trainyard.oci.probe_runner import PYTHONS

#: Attribute of a directory that hides the one below (https://docs.kernel.org/filesystems/overlayfs.html).
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True)
class Entry:
    """Describe an entry of a layer; its path has no leading slash.

    Attributes:
        file: where its content can be read; None for a whiteout, which hides the path in the layers below.
        size: bytes of content; 0 if it is not a regular file, and for further hard links to a file.
    """

    path: str
    file: Path | None
    size: int
    mode: int


@contextlib.contextmanager
def folders(reference: str, count: int) -> Iterator[list[Path]]:
    """Yield the folders of an image's ``count`` layers, bottom first, which last as the context; none if not readable.

    A container that holds the mount runs meanwhile.
    """
    with contextlib.ExitStack() as undo:
        lower: list[Path] = []
        for python in PYTHONS:
            container = docker_engine.client().containers.create(
                reference,
                ["-c", "import time; time.sleep(600)"],
                entrypoint=[python],
                network_mode="none",
                read_only=True,
                labels=docker_engine.resource_labels("verify"),
            )
            undo.callback(container.remove, force=True)
            try:
                container.start()
            except docker.errors.APIError:  # no such program
                continue
            container.reload()
            lower = _lower(int(container.attrs["State"]["Pid"]))[:count]
            break
        yield lower if len(lower) == count and all(os.access(folder, os.R_OK | os.X_OK) for folder in lower) else []


def _lower(process: int) -> list[Path]:
    """Return the lower directories of the overlay mount that is a process's root, bottom first."""
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


def entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below ``folder`` after its path there, in a fixed order; folders before what is in them."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as found:
            inside = sorted(found, key=lambda entry: entry.name)
        for entry in inside:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            yield path, entry


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether an entry hides what lower layers have under its name: a device with the number 0/0."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def walk(folder: Path) -> Iterator[Entry]:
    """Yield the entries of a layer except plain directories, in a fixed order."""
    seen: set[int] = set()
    for path, entry in entries(folder):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            if _is_opaque(entry.path):
                yield Entry(path, None, 0, 0)
        elif is_whiteout(status):
            yield Entry(path, None, 0, 0)
        else:
            content = stat.S_ISREG(status.st_mode) and status.st_ino not in seen
            if status.st_nlink > 1:
                seen.add(status.st_ino)
            yield Entry(path, Path(entry.path), status.st_size if content else 0, stat.S_IMODE(status.st_mode))


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
