"""Read and write the locks of targets, which packaging, uv and pip read, too.

They are PEP 751 files (https://packaging.python.org/en/latest/specifications/pylock-toml/): ``pylock.toml`` beside
image.yaml, and ``pylock.NAME.toml`` for another package index than the default one, each for all platforms. A wheel or
source distribution is named by its file, as no address belongs in a lock: uv and pip install it from a folder with its
files, or as ``trainyard lock --export`` writes it, with the addresses of an index. What is Trainyard's is in tables
``tool.trainyard``: ``day`` of a nightly, ``base.<architecture>`` with the contents of a base that holds the framework;
of a package, ``framework`` or ``added``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, PylockSelectError, PylockValidationError
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from pydantic import ValidationError

from trainyard.spec import lock, markers, yaml_source
from trainyard.spec.architectures import ARCHITECTURES, UV_GLIBC
from trainyard.spec.catalog import indexes
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import DEFAULT, Lock, Pin, Section, Unreadable
from trainyard.spec.yaml_source import relative

#: Name of the lock of the default index; also that of uv's output.
FILE = "pylock.toml"

_TITLE = "# Written by 'trainyard lock'. Do not edit.\n"
_HEAD = re.compile(rf"{re.escape(_TITLE)}# checksum: ([0-9a-f]{{64}})\n")

#: Names of manylinux before PEP 600, by the glibc that they stand for: https://peps.python.org/pep-0600/#legacy-manylinux-tags
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def file_name(index: str) -> str:
    """Return the name of the lock of a package index."""
    return FILE if index == DEFAULT else f"pylock.{index}.toml"


def index_of(name: str) -> str:
    """Return the package index of a lock by the name of its file; the default one if that says none."""
    return next((index for index in indexes() if file_name(index) == name), DEFAULT)


def file_names() -> list[str]:
    """Return the names that the locks of a target may have."""
    return [file_name(index) for index in (DEFAULT, *indexes())]


def files(folder: Path) -> dict[str, Path]:
    """Return name of a package index -> path of its lock, for those that are in the folder of a target."""
    return {index_of(name): folder / name for name in file_names() if os.path.lexists(folder / name)}


def marker(arch: str, python: str = "") -> str:
    """Return the environment marker of an architecture's images, with the minor version of Python if one is given."""
    parts = [f"python_full_version == '{python}.*'"] if python else []
    parts += ["sys_platform == 'linux'", f"platform_machine == '{ARCHITECTURES[arch].machine}'"]
    return " and ".join([*parts, "implementation_name == 'cpython'"])


@cache
def tags(python: str, arch: str, glibc: str = UV_GLIBC) -> Sequence[Tag]:
    """Return the tags of wheels that CPython can use in an image, the best first.

    Args:
        python: minor version, such as ``3.13``.
        glibc: version of the base's C library, by default the newest that locks are made for.
    """
    machine = ARCHITECTURES[arch].machine
    platforms = []
    for number in range(int(glibc.split(".")[1]), 4, -1):
        platforms.append(f"manylinux_2_{number}_{machine}")
        platforms += [f"{_LEGACY[number]}_{machine}"] if number in _LEGACY else []
    platforms.append(f"linux_{machine}")
    major, _, minor = python.partition(".")
    version = int(major), int(minor)
    interpreter = f"cp{major}{minor}"
    own = cpython_tags(version, [interpreter], platforms)
    return [*own, *compatible_tags(version, interpreter, platforms)]


@dataclass(frozen=True, order=True)
class File:
    """Describe a wheel or a source distribution.

    Attributes:
        size: in bytes; 0 if no index says.
        url: its address at an index, which a lock does not have.
    """

    name: str
    sha256: str
    size: int = 0
    url: str = field(default="", compare=False)

    @property
    def is_wheel(self) -> bool:
        return self.name.endswith(".whl")

    def text(self, *, addresses: bool) -> str:
        """Return the inline table."""
        where = {"url": self.url} if addresses else {"path": self.name}
        size = {"size": self.size} if self.size else {}
        return value({**where, **size, "hashes": {"sha256": self.sha256}})


@dataclass(frozen=True)
class Entry:
    """Describe a package of one platform.

    Attributes:
        name: canonical.
        files: the wheels that the platform can use, or else the source distribution.
        framework: whether the framework needs it by itself.
        added: whether an image that extends a target requires it and the target does not.
    """

    name: str
    version: str
    files: tuple[File, ...]
    framework: bool = False
    added: bool = False

    @property
    def pin(self) -> Pin:
        hashes = tuple(sorted(file.sha256 for file in self.files))
        return Pin(self.name, self.version, hashes, max(file.size for file in self.files), self.added)


@cache
def _fitting(python: str, arch: str, glibc: str) -> frozenset[Tag]:
    return frozenset(tags(python, arch, glibc))


def usable_files(package: Package, python: str, arch: str, glibc: str = UV_GLIBC) -> tuple[File, ...]:
    """Return the wheels of a package that fit; if there are none, the source distribution, if there is one.

    Raises:
        ValueError: a file has no SHA-256, or a wheel's name is none.
    """
    fitting = _fitting(python, arch, glibc)
    usable: list[PackageWheel | PackageSdist] = []
    for wheel in package.wheels or ():
        if not fitting.isdisjoint(parse_wheel_filename(wheel.filename)[-1]):
            usable.append(wheel)
    if not usable and package.sdist:
        usable.append(package.sdist)
    if lacking := next((file for file in usable if "sha256" not in file.hashes), None):
        raise ValueError(f"{lacking.filename} has no SHA-256")
    return tuple(sorted(File(file.filename, file.hashes["sha256"], file.size or 0, file.url or "") for file in usable))


@dataclass(frozen=True)
class Content:
    """Hold what a lock has.

    Attributes:
        python: minor version.
        entries: name of an architecture -> its packages, sorted by name.
        day: when the versions of a nightly were chosen, as in 20261121 (UTC).
        base: name of an architecture -> the contents of its base, if that holds the framework.
    """

    python: str
    entries: Mapping[str, Sequence[Entry]]
    day: str = ""
    base: Mapping[str, BaseContents] = field(default_factory=dict)

    def text(self, *, addresses: bool = False) -> str:
        """Return the lock as it is written.

        Args:
            addresses: whether files have the addresses of an index.
        """
        body = "\n".join(
            [
                'lock-version = "1.0"',
                *_array("environments", [value(marker(arch)) for arch in self.entries]),
                f'requires-python = "=={self.python}.*"',
                'created-by = "trainyard"',
                *([] if any(self.entries.values()) else ["packages = []"]),
                *self._packages(addresses),
                *self._own(),
                "",
            ]
        )
        return with_checksum(body)

    def _packages(self, addresses: bool) -> Iterable[str]:
        merged: dict[tuple[str, str, bool, bool], dict[str, tuple[File, ...]]] = {}
        for arch, entries in self.entries.items():
            for entry in entries:
                key = (entry.name, entry.version, entry.framework, entry.added)
                merged.setdefault(key, {})[arch] = entry.files
        for (name, version, framework, added), of in sorted(merged.items()):
            every = sorted({file for files in of.values() for file in files})
            yield from ("", "[[packages]]", f"name = {value(name)}", f"version = {value(version)}")
            if len(of) < len(self.entries):
                machines = (f"platform_machine == '{ARCHITECTURES[arch].machine}'" for arch in of)
                yield f"marker = {value(' or '.join(machines))}"
            yield from (f"sdist = {file.text(addresses=addresses)}" for file in every if not file.is_wheel)
            wheels = [file.text(addresses=addresses) for file in every if file.is_wheel]
            yield from _array("wheels", wheels) if wheels else ()
            roles = {"framework": True} if framework else {"added": True} if added else {}
            yield from [f"tool = {value({'trainyard': roles})}"] if roles else []

    def _own(self) -> Iterable[str]:
        if self.day:
            yield from ("", "[tool.trainyard]", f"day = {value(self.day)}")
        for arch, base in self.base.items():
            yield from ("", f"[tool.trainyard.base.{arch}]")
            for name, given in base.model_dump().items():
                if not isinstance(given, dict):
                    yield f"{name} = {value(given)}"
            for name in ("packages", "requires"):
                yield from ("", f"[tool.trainyard.base.{arch}.{name}]")
                yield from (f"{key} = {value(item)}" for key, item in getattr(base, name).items())

    @cached_property
    def sections(self) -> dict[tuple[str, str], str]:
        """Return architecture and kind -> the entries of a section."""
        texts: dict[tuple[str, str], str] = {}
        for arch, entries in self.entries.items():
            kinds = {"requirements": [entry for entry in entries if not entry.framework]}
            if base := self.base.get(arch):
                texts[arch, "base"] = base.text()
            else:
                kinds["framework"] = [entry for entry in entries if entry.framework]
            # Layers are made up from sizes; beside a base that holds the framework there is one.
            pins = {kind: [replace(one.pin, size=0) if base else one.pin for one in of] for kind, of in kinds.items()}
            texts |= {(arch, kind): "".join(pin.text() for pin in of) for kind, of in pins.items()}
        return texts


def with_checksum(body: str) -> str:
    """Return the tables of a lock with the lines that precede them."""
    return f"{_TITLE}# checksum: {hashlib.sha256(body.encode()).hexdigest()}\n\n{body}"


def _array(name: str, items: Sequence[str]) -> list[str]:
    return [f"{name} = [{items[0]}]"] if len(items) == 1 else [f"{name} = [", *(f"    {item}," for item in items), "]"]


def value(given: Any) -> str:
    """Return a value in TOML, whose strings, numbers and booleans are those of JSON."""
    if isinstance(given, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {value(item)}" for key, item in given.items()) + " }"
    if isinstance(given, list | tuple):
        return "[" + ", ".join(map(value, given)) + "]"
    return json.dumps(given, default=str, ensure_ascii=False)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text)


def loads(text: str, command: str) -> Content:
    """Return what the text of a lock has.

    Args:
        command: what writes the lock, such as ``trainyard lock cpu``.
    Raises:
        ValueError: it has conflicts of a merge, or is not as ``trainyard lock`` wrote it; the message goes on after the
            name of the file.
    """
    lock.check_no_conflict(text, command)
    head = _HEAD.match(text)
    if not head:
        raise ValueError(f": no '# checksum:' line, so not a lock: run '{command}'")
    body = text[head.end() :].removeprefix("\n")
    if hashlib.sha256(body.encode()).hexdigest() != head[1]:
        raise ValueError(f": changed since 'trainyard lock' wrote it: restore it, or run '{command}' again")
    try:
        return _parsed(tomllib.loads(body))
    except (KeyError, TypeError, ValueError, PylockValidationError, PylockSelectError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f": written by another version of Trainyard ({reason}): run '{command}' again") from None


def _parsed(data: Mapping[str, Any]) -> Content:
    pylock = Pylock.from_dict(data)
    python = str(pylock.requires_python).removeprefix("==").removesuffix(".*")
    own = (pylock.tool or {}).get("trainyard", {})
    if not re.fullmatch(r"\d+\.\d+", python) or not re.fullmatch(r"(\d{8})?", own.get("day", "")):
        raise ValueError(f"requires-python '{pylock.requires_python}', day '{own.get('day', '')}'")
    entries = {}
    for arch, architecture in ARCHITECTURES.items():
        environment = markers.environment(python, architecture.machine)
        if any(one.evaluate(environment, context="requirement") for one in pylock.environments or ()):
            chosen = pylock.select(environment=environment, tags=tags(python, arch))  # type: ignore[arg-type]
            entries[arch] = tuple(_entry(package, python, arch) for package, _ in chosen)
    base = {arch: BaseContents.model_validate(about) for arch, about in own.get("base", {}).items()}
    return Content(python, entries, own.get("day", ""), base)


def _entry(package: Package, python: str, arch: str) -> Entry:
    roles = (package.tool or {}).get("trainyard", {})
    files = usable_files(package, python, arch)
    return Entry(package.name, str(package.version), files, bool(roles.get("framework")), bool(roles.get("added")))


def read(folder: Path, command: str) -> Lock | Unreadable:
    """Return the lock of a target, of all package indexes, or why it cannot be used.

    Args:
        folder: of its image.yaml, ``command``: see :func:`loads`.
    Raises:
        UserError: a file is not text that can be read.
    """
    contents: dict[str, Content] = {}
    for index, path in files(folder).items():
        try:
            contents[index] = loads(yaml_source.text(path), command)
        except ValueError as error:
            return Unreadable(f"{relative(path)}{error}")
    if DEFAULT not in contents:
        return Unreadable(f"{relative(folder / FILE)} is missing: run '{command}'", missing=True)
    return of_contents(contents)


def of_contents(contents: Mapping[str, Content]) -> Lock:
    """Return the lock of a target, from name of a package index -> what its file has."""
    sections = {
        Section(arch, kind, index): text
        for index, content in contents.items()
        for (arch, kind), text in content.sections.items()
    }
    return Lock(sections, next(iter(contents.values())).day if contents else "")
