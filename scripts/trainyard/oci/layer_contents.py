"""Read and keep what unpacked layers hold, entry by entry, so that an image can be compared with what was built.

Reading layers where the engine has unpacked them is faster than decompressing their blobs: 2.4 s instead of 13 s for a
6 GB image (2026-11). The root of a running container is an overlay mount whose lower directories are the image's
layers. This works as root with an engine of root on this machine that uses overlayfs; otherwise no folders are found.

The contents of every layer that a build made are kept in ``layers`` of the state folder, by the digest of the layer: an
image cannot vouch for itself. Whoever changes a layer changes its digest, so that a layer with a known digest is not
read again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import docker.errors

from trainyard.common.docker_engine import LOOKING, Engine, resource_labels
from trainyard.oci.probe_runner import PYTHONS
from trainyard.spec.state import file_lock, own

Kind = Literal["file", "link", "folder", "device", "whiteout"]

#: Documents about layers that are kept, the last used ones, two of each layer: up to 2 MB each.
KEPT = 600

#: The extended attribute with the capabilities of a program, which it has whoever starts it (capabilities(7)).
_CAPABILITY = "security.capability"

#: Attribute of a directory that hides the one below (https://docs.kernel.org/filesystems/overlayfs.html).
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True)
class Item:
    """Describe an entry of a layer.

    Attributes:
        mode: permission bits.
        user, group: ids of the owner.
        content: SHA-256 of a file (hexadecimal), target of a link, number of a device.
        capability: capabilities of a program, hexadecimal; empty if it has none.
    """

    kind: Kind
    mode: int
    user: int
    group: int
    content: str = ""
    capability: str = ""

    def differences(self, other: Item) -> str:
        """Return what of an entry differs from another, in words."""
        if self.kind != other.kind:
            return f"is a {self.kind}, not a {other.kind}"
        found = []
        if self.content != other.content:
            found.append(f"leads to {self.content}, not to {other.content}" if self.kind == "link" else "other content")
        if self.mode != other.mode:
            found.append(f"mode {self.mode:04o} instead of {other.mode:04o}")
        if (self.user, self.group) != (other.user, other.group):
            found.append(f"owner {self.user}:{self.group} instead of {other.user}:{other.group}")
        if self.capability != other.capability:
            found.append("other capabilities")
        return ", ".join(found)


Contents = Mapping[str, Item]


@contextlib.contextmanager
def folders(engine: Engine, reference: str, count: int) -> Iterator[list[Path]]:
    """Yield the folders of an image's ``count`` layers, bottom first, which last as the context; none if not readable.

    A container that holds the mount runs meanwhile.
    """
    with contextlib.ExitStack() as undo:
        lower: list[Path] = []
        for python in PYTHONS:
            try:
                # Docker 26 cannot unpack zstd layers that have Docker's media type, and does not unpack an image for
                # another platform when it is built: https://github.com/docker/cli/issues/5011
                container = engine.client.containers.create(
                    reference,
                    ["-c", "import time; time.sleep(600)"],
                    entrypoint=[python],
                    labels=resource_labels("verify"),
                    **LOOKING,
                )
                undo.callback(container.remove, force=True)
                container.start()
            except docker.errors.APIError:  # or no such program
                continue
            container.reload()
            lower = _lower(int(container.attrs["State"]["Pid"]), str(container.id))[:count]
            break
        yield lower if len(lower) == count and all(os.access(folder, os.R_OK | os.X_OK) for folder in lower) else []


def _lower(process: int, container: str) -> list[Path]:
    """Return the lower directories of the overlay mount that is a process's root, bottom first.

    None if the process is none of the container, which an engine on another machine has, as Docker Desktop's; nor if
    its users are others on this machine, as without root.
    """
    try:
        text = Path(f"/proc/{process}/mountinfo").read_text(encoding="utf-8")
        users = Path(f"/proc/{process}/uid_map").read_text(encoding="utf-8").split()[:2]
    except OSError:
        return []
    # Docker mounts files of its folder of the container, as /etc/hostname.
    if container not in text or users != ["0", "0"]:
        return []
    for line in text.splitlines():
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
        with os.scandir(folder / below) as scanned:
            inside = sorted(scanned, key=lambda entry: entry.name)
        for entry in inside:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            yield path, entry


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether an entry hides what lower layers have under its name: a device with the number 0/0."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(folder: str) -> bool:
    """Return whether a folder hides all that lower layers have in it."""
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def read(folder: Path) -> Contents:
    """Return the entries of a layer that the engine has unpacked into ``folder``; paths have no leading slash."""
    items: dict[str, Item] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        hashes = []
        for path, entry in entries(folder):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                hashes.append((path, status, threads.submit(_sha256, entry.path), _capability(entry.path)))
            else:
                items[path] = _special(entry.path, status)
        for path, status, digest, capability in hashes:
            mode = stat.S_IMODE(status.st_mode)
            items[path] = Item("file", mode, status.st_uid, status.st_gid, digest.result(), capability)
    return items


def _special(path: str, status: os.stat_result) -> Item:
    """Return an entry that is not a regular file."""
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return Item("link", mode, status.st_uid, status.st_gid, os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return Item("folder", mode, status.st_uid, status.st_gid)
    if is_whiteout(status):
        return Item("whiteout", 0, 0, 0)
    return Item("device", mode, status.st_uid, status.st_gid, f"{stat.S_IFMT(status.st_mode):o} {status.st_rdev}")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _capability(path: str) -> str:
    try:
        return os.getxattr(path, _CAPABILITY, follow_symlinks=False).hex()
    except OSError:
        return ""


def _file(state: Path, name: str) -> Path:
    return state / "layers" / f"{name.removeprefix('sha256:')}.json.gz"


def keep_document(state: Path, name: str, document: bytes, most: int = KEPT) -> None:
    """Keep a JSON document about a layer, and drop the documents that were used longest ago.

    Args:
        name: diff id of the layer, with a suffix if the document is not that of :func:`keep`.
        most: how many documents are kept.
    """
    path = _file(state, name)
    with file_lock(state, "layers"):
        own(path.parent)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(gzip.compress(document, compresslevel=1, mtime=0))
        temporary.replace(path)
        now = path.stat().st_mtime  # what is from the future was used before the clock was put back
        used = {file: file.stat().st_mtime for file in path.parent.glob("*.json.gz")}
        for old in sorted(used, key=lambda file: (used[file] <= now, used[file]))[:-most]:
            old.unlink()


def recall_document(state: Path, name: str) -> bytes | None:
    """Return a document of :func:`keep_document`; None if it is not kept, or damaged."""
    path = _file(state, name)
    try:
        document = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return document


def keep(state: Path, diff_id: str, contents: Contents, most: int = KEPT) -> None:
    """Keep the contents of a layer; ``most``: see :func:`keep_document`."""
    document = {name: astuple(item) for name, item in contents.items()}
    keep_document(state, diff_id, json.dumps(document).encode(), most)


def recall(state: Path, diff_id: str) -> Contents | None:
    """Return the contents of a layer that were kept; None if there are none."""
    try:
        document = json.loads(recall_document(state, diff_id) or b"")
    except ValueError:
        return None
    return {name: Item(*values) for name, values in document.items()}


def known(state: Path, diff_id: str) -> bool:
    """Return whether the contents of a layer are kept."""
    return _file(state, diff_id).is_file()


def take(engine: Engine, state: Path, reference: str) -> list[str]:
    """Keep the contents of those layers of a local image that are not known yet in the folder ``state``.

    Returns:
        Diff ids of all layers, bottom first; none if this process cannot read where the engine has unpacked them.
    """
    diff_ids = [str(diff_id) for diff_id in engine.image(reference, made_by="docker pull").attrs["RootFS"]["Layers"]]
    if all(known(state, diff_id) for diff_id in diff_ids):
        return diff_ids
    with folders(engine, reference, len(diff_ids)) as unpacked:
        for diff_id, folder in zip(diff_ids, unpacked, strict=False):
            if not known(state, diff_id):
                keep(state, diff_id, read(folder))
        return diff_ids if unpacked else []


def union(layers: Iterable[Contents]) -> dict[str, tuple[Item, ...]]:
    """Return path -> the entries of that path in the layers, bottom first."""
    united: dict[str, tuple[Item, ...]] = {}
    for contents in layers:
        for path, item in contents.items():
            united[path] = (*united.get(path, ()), item)
    return united
