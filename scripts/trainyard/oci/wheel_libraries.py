"""Find the libraries of others in wheels: by the SBOMs in a wheel (PEP 770), else by names and texts of its files.

wheel_libraries.yaml has the names and texts. A version is what one of these tells; none is guessed.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from trainyard.oci import documents
from trainyard.spec import yaml_source

#: Bytes of a file that are read at a time, and bytes before and behind plain text that are matched with it.
_CHUNK, _BEFORE, _BEHIND = 1 << 20, 32, 256

#: The file of a library, with the hashes of auditwheel or patchelf if it was copied into the wheel.
_NAME = re.compile(r"lib(?P<stem>.+?)(?P<hashes>([-.][0-9a-f]{8})*)\.so\.?(?P<number>[\d.]*)")

#: Files of wheels that are read: lists of its files and contents, and what may be a program or library; by paths that
#: are no longer than Linux opens (PATH_MAX).
_LONGEST = 4096
_READ = re.compile(
    r"(.*(?:-packages|opt/requirements)/.+\.dist-info)/(RECORD|sboms/.+)"
    r"|.*(?:-packages|opt/requirements)/(?!.+\.dist-info/).*(?:/[^/.]+|\.so[^/]*)"
)

#: NVIDIA's wheels, which have the version of the library; gigabytes of machine code, in which no text is looked for.
_NVIDIA, _NVIDIAS_FOLDER = "nvidia-", "-packages/nvidia/"


@dataclass(frozen=True)
class Library:
    """Describe a library in a wheel, and the files in the image that have it; what nothing tells is empty."""

    name: str
    version: str = ""
    purl: str = ""
    cpe: str = ""
    files: tuple[str, ...] = ()


@cache
def _table() -> dict[str, dict[str, Any]]:
    return dict(yaml_source.plain(yaml_source.read(Path(__file__).with_name("wheel_libraries.yaml"))))


@cache
def _texts() -> list[tuple[str, bytes, re.Pattern[bytes]]]:
    """Return name, plain text to look for, and expression to match around it, of each text of the table."""
    found = []
    for name, text in ((name, text) for name, row in _table().items() for text in row.get("texts", ())):
        whole = rf"{text}(?=[^\w.])" if text.endswith(")") else text  # no version that is cut where a chunk ends
        found.append((name, (text.partition("(")[0] or text.rpartition(")")[2]).encode(), re.compile(whole.encode())))
    return found


def _by_text(stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    data = b""
    while chunk := stream.read(_CHUNK):
        data = data[-2 * _BEHIND :] + chunk
        for name, plain, expression in _texts():
            at = data.find(plain)
            while at >= 0:
                if match := expression.search(data, max(0, at - _BEFORE), at + _BEHIND):
                    yield name, match[1].decode() if expression.groups else ""
                at = data.find(plain, at + len(plain))


def _in_file(path: str, stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield name and version, or ``""``, of the libraries that a program or library is or has in it."""
    if stream.read(4) != b"\x7fELF":
        return
    texts = {*_by_text(stream)} if _NVIDIAS_FOLDER not in path else set()
    yield from texts
    if match := _NAME.fullmatch(posixpath.basename(path)):
        stem, number = match["stem"], match["number"]
        rows = ((name, row) for name, row in _table().items() if re.fullmatch(row.get("files", ""), stem))
        if row := next(rows, None):
            yield row[0] or stem, number if row[1].get("release") and number.count(".") > 1 else ""
        elif match["hashes"] and not any(name.startswith(f"lib{stem}") for name, _ in texts):
            yield f"lib{stem}", ""


def _keys(name: str) -> set[str]:
    """Return what a name is compared by: ``FreeType`` is libfreetype, ``libjpeg / libjpeg-turbo`` is either."""
    return {re.sub(r"[^a-z0-9]", "", part.lower()).removeprefix("lib") for part in name.split("/")}


class Wheels:
    """Read the wheels of a layer."""

    def __init__(self) -> None:
        self._records, self._components = dict[str, set[str]](), dict[str, list[dict[str, Any]]]()
        self._found = dict[str, set[tuple[str, str]]]()

    def read(self, path: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
        """Read a file if it may say or have what is in a wheel, and return whether it was read."""
        match = _READ.fullmatch(path) if len(path) < _LONGEST else None
        if not match or not (file := tar.extractfile(member)):
            return False
        data = file.read(documents.DOCUMENT_LIMIT) if match[2] else b""
        if match[2] == "RECORD":
            self._records[match[1]] = {line.partition(",")[0] for line in data.decode("utf-8", "replace").splitlines()}
        elif match[2]:
            with contextlib.suppress(documents.InvalidAnswer):
                sbom = documents.parse(data, documents.SBOM, path)
                self._components.setdefault(match[1], []).extend(sbom.get("components") or ())
        else:
            self._found[path] = {*_in_file(path, file)}
        return True

    def of(self, wheel: str, version: str, folder: str) -> tuple[Library, ...]:
        """Return the libraries in a wheel with this canonical name, version and .dist-info folder."""
        libraries, optional = set[Library](), dict[str, str]()
        for one in self._components.get(folder, ()):
            name, stated, purl = (str(one.get(key) or "") for key in ("name", "version", "purl"))
            # "optional" is what may be absent: https://cyclonedx.org/docs/1.6/json/#components_items_scope
            if one.get("scope") == "optional" and re.fullmatch(r"[\w.]+", stated):
                optional |= dict.fromkeys(_keys(name), stated)
            elif one.get("scope") in (None, "required") and not purl.lower().startswith(f"pkg:pypi/{wheel}@"):
                libraries.add(Library(name, stated, purl))
        record, site = self._records.get(folder, ()), posixpath.dirname(folder)
        found = dict[str, dict[str, set[str]]]()
        for path, some in self._found.items():
            for name, told in some if posixpath.relpath(path, site) in record else ():
                told = told or next(filter(None, map(optional.get, _keys(name))), version * wheel.startswith(_NVIDIA))
                found.setdefault(name, {}).setdefault(told, set()).add(path)
        for name, versions in found.items():
            untold, product = versions.pop("", set()), _table().get(name, {}).get("cpe")
            known = {one for one in libraries if _keys(one.name) & _keys(name) and "pkg:cargo/" not in one.purl}
            for told, paths in (versions or {"": untold}).items():
                same = {one for one in known if one.version == told}
                if same or not known:  # otherwise, the SBOM in the wheel comes first
                    files = tuple(sorted(paths | untold if len(versions) == 1 else paths))
                    purl = max((one.purl for one in same), default="") or (f"pkg:generic/{name}@{told}" if told else "")
                    cpe = f"cpe:2.3:a:{product}:{told}:*:*:*:*:*:*:*" if told and product else ""
                    libraries = libraries - same | {Library(name, told, purl, cpe, files)}
        return tuple(sorted(libraries, key=lambda one: (one.name.lower(), one.version, one.purl)))
