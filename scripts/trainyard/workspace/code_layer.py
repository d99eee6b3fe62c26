"""The image layer with a user's code, byte for byte as BuildKit exports it, without an engine.

A build unpacks the same tar in a stage and copies it with ``COPY --link``; BuildKit then writes the layer anew from the
files. The diff id, the digest of the uncompressed layer, is the same if this module does what these do:

- the order, depth first and by the bytes of the names:
  https://github.com/moby/buildkit/blob/v0.13.2/util/overlay/overlay_linux.go (``Changes``);
- names, times and formats:
  https://github.com/containerd/containerd/blob/v1.7.24/archive/tar.go (``ChangeWriter.HandleChange``);
- the headers: https://github.com/golang/go/blob/go1.21.0/src/archive/tar/writer.go.

Engines that keep images in graph drivers write layers with another module, and get another diff id.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.spec.naming import FILE_EPOCH, FOLDER
from trainyard.spec.workspace import Site, Workspace
from trainyard.workspace import code_files, python_projects
from trainyard.workspace.code_files import CodeFile
from trainyard.workspace.lines import text_of
from trainyard.workspace.project import Project

#: Endings of files that no compiler reads.
_TEXTS = (".py", ".md", ".rst", ".txt", ".yaml", ".yml", ".json", ".ipynb", ".sh", ".csv", ".png", ".gitignore")

#: Owner of the code: the image's user, in group 0, which containers with any other uid are in.
_USER = 1000


@dataclass(frozen=True)
class CodeLayer:
    """A layer that was written.

    Attributes:
        diff_id: ``sha256:`` and the digest of the tar.
        size: bytes of the tar; ``files``: how many files of the code it has.
        notes: lines about what the image does not know of the code's projects.
    """

    diff_id: str
    size: int
    files: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A file, folder or symbolic link of a layer.

    Attributes:
        mode: with the type, as in ``st_mode``; ``uid``: of its owner, in group 0.
        size: bytes of ``content``.
        link: what a symbolic link refers to.
    """

    mode: int
    uid: int = 0
    size: int = 0
    content: Callable[[], Iterable[bytes]] = tuple
    link: str = ""


def write(workspace: Workspace, path: Path, site: Site, code: Sequence[CodeFile] = ()) -> CodeLayer:
    """Write the layer of the code as an uncompressed tar.

    It has the code below /workspace, /data and other names of it, and in ``site`` what ``pip install --editable`` would
    write: a .pth file with the code's import roots, and the metadata and commands of its projects. It depends on
    nothing else: not on the folder of the checkout, its times, owners or umask.

    Args:
        path: of the tar, replaced when it is complete.
        code: its files, if they are known.
    Raises:
        UserError: a file must not be in the image, or a project's file has a mistake.
        StepFailed: a file changed while it was read.
    """
    code = code or code_files.collect(workspace)
    projects = python_projects.projects(workspace)
    entries = {
        f"{FOLDER[1:]}/{file.path}": Entry(
            (stat.S_IFREG if file.link is None else stat.S_IFLNK) | file.mode,
            _USER,
            file.size,
            file.chunks if file.link is None else tuple,
            file.link or "",
        )
        for file in code
    }
    entries["data"] = Entry(stat.S_IFDIR | 0o775, _USER)  # ../data for code that downloads; jobs may mount one there
    for name in ("dataset", "datasets"):
        entries[name] = Entry(stat.S_IFLNK | 0o777, _USER, link="data")
    for name, (text, mode) in _site_files(workspace, [file.path for file in code], projects, site).items():
        entries[name] = _file(text.encode(), mode)
    digest = hashlib.sha256()
    size = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", 1 << 20, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            size = write_tar(file, entries, digest.update)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    notes = tuple(note for project in projects for note in project.unknown.values())
    return CodeLayer(f"sha256:{digest.hexdigest()}", size, len(code), notes)


def sources(workspace: Workspace) -> dict[str, CodeFile]:
    """Return the files that extension modules are compiled from, by their paths below trainyard.yaml's folder.

    Python files and texts are among them only if setup.py or another file of the project's build names or imports them,
    so that an edit of others compiles nothing.
    """
    top = f"{code_files.destination(workspace, workspace.root)}/".removeprefix("./")
    files = {file.path[len(top) :]: file for file in code_files.collect(workspace) if file.path.startswith(top)}
    script = text_of(workspace.root / "setup.py")
    named = script + "".join(text_of(workspace.root / name) for name in ("setup.cfg", "pyproject.toml"))
    imported = set(re.findall(r"\b(?:from|import)\s+(\w+)", script))

    def needed(path: str) -> bool:
        name = os.path.basename(path)
        if not name.endswith(_TEXTS) or name in ("setup.py", "CMakeLists.txt") or name in named:
            return True
        modules = {path.split("/")[0], name.removesuffix(".py")}
        return name.endswith(".py") and not (script and imported.isdisjoint(modules))

    return {path: file for path, file in files.items() if needed(path)}


def write_sources(workspace: Workspace, path: Path) -> None:
    """Write a tar of :func:`sources`."""
    entries = {
        name: Entry(stat.S_IFREG | file.mode, 0, file.size, file.chunks)
        for name, file in sources(workspace).items()
        if file.link is None
    }
    with path.open("wb") as file:
        write_tar(file, entries, lambda _: None)


def configuration(workspace: Workspace) -> str:
    """Return the SHA-256 of what an image has besides its code and its lock: settings, sources of extension modules."""
    if not workspace.compiles_own:
        return workspace.config_hash
    found = hashlib.sha256(workspace.config_hash.encode())
    for name, file in sorted(sources(workspace).items()):
        found.update(f"{name}\0{file.size}\0".encode())
        for chunk in file.chunks() if file.link is None else ():
            found.update(chunk)
    return found.hexdigest()


def _file(data: bytes, mode: int) -> Entry:
    return Entry(stat.S_IFREG | mode, 0, len(data), lambda: [data])


def _site_files(
    workspace: Workspace, code: list[str], projects: list[Project], site: Site
) -> dict[str, tuple[str, int]]:
    """Path in the image -> text and permission bits."""
    folders = {parent.as_posix() for folder in {os.path.dirname(path) for path in code} for parent in _upwards(folder)}
    roots = [code_files.destination(workspace, root).as_posix() for root in python_projects.import_roots(workspace)]
    lines = [f"{FOLDER}/{root}" for root in dict.fromkeys(roots) if root in folders]
    found = {f"{site.packages}/_workspace.pth": ("".join(f"{line}\n" for line in [*lines, FOLDER]), 0o644)}
    for project in projects:
        if not project.installed:
            continue
        if project.version is not None:
            info = f"{site.packages}/{canonicalize_name(project.name).replace('-', '_')}-{project.version}.dist-info"
            found[f"{info}/METADATA"] = (_metadata(project), 0o644)
            if project.entry_points:
                found[f"{info}/entry_points.txt"] = (_entry_points(project), 0o644)
        for name, value in project.scripts.items():
            found.setdefault(f"{site.commands}/{name}", (_command(value, site.shebang), 0o755))
    return found


def _metadata(project: Project) -> str:
    """The text of METADATA: https://packaging.python.org/en/latest/specifications/core-metadata/.

    Requirements are those of the project's file, so that the layer does not depend on how a library writes them.
    """
    lines = ["Metadata-Version: 2.1", f"Name: {project.name}", f"Version: {project.version}"]
    if project.requires_python:
        lines.append(f"Requires-Python: {project.requires_python}")
    lines += [f"Provides-Extra: {canonicalize_name(extra)}" for extra in project.optional_dependencies]
    lines += [f"Requires-Dist: {' '.join(line.split())}" for line in project.dependencies]
    for extra, requirements in project.optional_dependencies.items():
        lines += [f"Requires-Dist: {_of_extra(' '.join(line.split()), extra)}" for line in requirements]
    return "\n".join([*lines, ""])


def _of_extra(line: str, extra: str) -> str:
    """A requirement with the marker that it belongs to an extra."""
    marker = Requirement(line).marker
    if marker is None:
        return f'{line} ; extra == "{canonicalize_name(extra)}"'
    if "extra" in str(marker):
        return line
    text, _, words = line.rpartition(";")
    return f'{text.rstrip()} ; ({words.strip()}) and extra == "{canonicalize_name(extra)}"'


def _entry_points(project: Project) -> str:
    """The text of entry_points.txt: https://packaging.python.org/en/latest/specifications/entry-points/#file-format."""
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(values.items()))
        for group, values in sorted(project.entry_points.items())
    )
    return "\n".join(groups)


def _command(value: str, shebang: str) -> str:
    module, _, function = (part.strip() for part in value.partition(":"))
    name = function.split(".")[0]
    lines = [f"#!{shebang}", "import sys", "", f"from {module} import {name}", "", 'if __name__ == "__main__":']
    return "\n".join([*lines, f"    sys.exit({function}())", ""])


def write_tar(file: BinaryIO, entries: dict[str, Entry], seen: Callable[[bytes], object]) -> int:
    """Write a layer; the bytes that it has.

    Args:
        entries: path without a leading slash -> entry; folders above them are added, with the owner of the code below
            /workspace and of root elsewhere.
        seen: called with everything that is written.
    """
    complete = dict(entries)
    for folder in {os.path.dirname(path) for path in entries}:
        for parent in _upwards(folder):
            ours = parent.parts[:1] == (FOLDER[1:],)
            mode = stat.S_IFDIR | (0o775 if ours else 0o755)
            complete.setdefault(parent.as_posix(), Entry(mode, _USER if ours else 0))
    size = 0
    for path in sorted(complete, key=lambda path: [os.fsencode(part) for part in path.split("/")]):
        for data in _blocks(path, complete[path]):
            file.write(data)
            seen(data)
            size += len(data)
    end = bytes(2 * _BLOCK)
    file.write(end)
    seen(end)
    return size + len(end)


def _upwards(folder: str) -> Iterator[PurePosixPath]:
    """A relative folder and those above it."""
    path = PurePosixPath(folder)
    return (one for one in (path, *path.parents) if one.name)


_BLOCK = 512

#: Lengths of the fields ``name``, ``linkname`` and ``prefix`` of a header.
_NAME = 100
_PREFIX = 155

#: Largest size that the field has room for in octal digits.
_LARGEST = 8**11 - 1


def _blocks(path: str, entry: Entry) -> Iterator[bytes]:
    """The header and the content of an entry, each padded to blocks."""
    kind = {stat.S_IFREG: b"0", stat.S_IFLNK: b"2", stat.S_IFDIR: b"5"}[stat.S_IFMT(entry.mode)]
    name = f"{path}/" if kind == b"5" else path
    prefix, field = _split(name)
    extended = {}
    if not field:
        extended["path"] = name
    if len(entry.link.encode()) > _NAME or not entry.link.isascii():
        extended["linkpath"] = entry.link
    if extended:
        records = b"".join(_record(key, extended[key]) for key in sorted(extended))
        folder, _, last = name.rpartition("/")
        # path.Join of Go: the last part is empty for folders.
        of_records = "/".join(part for part in (folder, "PaxHeaders.0", last) if part)
        ascii_name = _ascii(of_records)[:_NAME].rstrip(b"/")
        yield _header(ascii_name, b"x", 0, 0, len(records), 0, b"", b"")
        yield _padded(records)
        prefix, field = b"", _truncated(_ascii(name))
    yield _header(
        field, kind, stat.S_IMODE(entry.mode), entry.uid, entry.size, FILE_EPOCH, _ascii(entry.link)[:_NAME], prefix
    )
    count = 0
    for data in entry.content():
        count += len(data)
        yield data
    yield bytes(-count % _BLOCK)


def _split(name: str) -> tuple[bytes, bytes]:
    """The fields ``prefix`` and ``name`` for a path; both are empty if there is no room for it in them.

    ``splitUSTARPath`` of https://github.com/golang/go/blob/go1.21.0/src/archive/tar/writer.go.
    """
    data = name.encode()
    if not name.isascii():
        return b"", b""
    if len(data) <= _NAME:
        return b"", data
    length = len(data)
    if length > _PREFIX + 1:
        length = _PREFIX + 1
    elif data.endswith(b"/"):
        length -= 1
    place = data.rfind(b"/", 0, length)
    rest = len(data) - place - 1
    if place <= 0 or rest > _NAME or rest == 0 or place > _PREFIX:
        return b"", b""
    return data[:place], data[place + 1 :]


def _ascii(text: str) -> bytes:
    return text.encode("ascii", "ignore")


def _truncated(name: bytes) -> bytes:
    """Return a name as far as the field has room for it, without a slash at its end, which only folders have."""
    return name if len(name) <= _NAME else name[:_NAME].rstrip(b"/")


def _record(key: str, value: str) -> bytes:
    """A record of an extended header: its own length comes first (POSIX.1-2001 pax)."""
    rest = f" {key}={value}\n".encode()
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))
    return str(length).encode() + rest


def _header(name: bytes, kind: bytes, mode: int, uid: int, size: int, time: int, link: bytes, prefix: bytes) -> bytes:
    """A header of one block: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13_06."""
    assert size <= _LARGEST
    # The extended header of Go has no device numbers.
    device = b"" if kind == b"x" else b"0000000"
    fields = (
        (name, _NAME),
        (b"%07o" % mode, 8),
        (b"%07o" % uid, 8),
        (b"%07o" % 0, 8),
        (b"%011o" % size, 12),
        (b"%011o" % time, 12),
        (b" " * 8, 8),
        (kind, 1),
        (link, _NAME),
        (b"ustar\x0000", 8),
        (b"", 64),
        (device, 8),
        (device, 8),
        (prefix, 167),
    )
    block = b"".join(value.ljust(length, b"\0") for value, length in fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _BLOCK)
