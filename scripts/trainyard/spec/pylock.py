"""Read and write locks, which packaging, uv and pip read, too.

They are PEP 751 files (https://packaging.python.org/en/latest/specifications/pylock-toml/): ``pylock.toml`` beside
image.yaml and ``pylock.trainyard.toml`` beside trainyard.yaml, and ``pylock.NAME.toml`` or
``pylock.trainyard-NAME.toml`` for another package index than the default one, each for all platforms. A wheel or
source distribution is named by its file, as no address belongs in a lock: uv and pip install it from a folder with its
files, or as ``trainyard lock --export`` writes it, with the addresses of an index. What source distributions are
compiled with is in the dependency group ``build``. What is Trainyard's is in tables ``tool.trainyard``: ``day`` of a
nightly, ``origin`` of the lock of a repository, ``base.<architecture>`` with the contents of a base that holds the
framework; of a package, its role, and what its wheel was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, PylockSelectError, PylockValidationError
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from pydantic import ValidationError

from trainyard.common.installation import check_writable
from trainyard.spec import markers, repository_files, yaml_source
from trainyard.spec.architectures import ARCHITECTURES, UV_GLIBC
from trainyard.spec.catalog import indexes
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import DEFAULT, File, Lock, Locked, Made, Origin, Pin, Role, Unreadable, ordered
from trainyard.spec.yaml_source import relative

#: Name of the lock of a target, for the default index; also that of uv's output.
FILE = "pylock.toml"

#: The same of a user's repository, which may itself have a pylock.toml.
REPOSITORY_FILE = "pylock.trainyard.toml"

_TITLE = "# Written by 'trainyard lock'. Do not edit.\n"
_HEAD = re.compile(rf"{re.escape(_TITLE)}# checksum: ([0-9a-f]{{64}})\n")

#: The lines that git puts around the two sides of a conflict:
#: https://git-scm.com/docs/git-merge#_how_conflicts_are_presented
_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)")

#: The dependency group of what source distributions are compiled with, and the marker of its packages.
_GROUP = "build"
_OF_GROUP = f"'{_GROUP}' in dependency_groups"

#: Names of manylinux before PEP 600, by the glibc that they stand for: https://peps.python.org/pep-0600/#legacy-manylinux-tags
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def file_of(lock_file: Path, index: str) -> Path:
    """Return the path of the lock of a package index.

    Args:
        lock_file: that of the default index.
    """
    if index == DEFAULT:
        return lock_file
    separator = "." if lock_file.name == FILE else "-"
    return lock_file.with_name(f"{lock_file.name.removesuffix('.toml')}{separator}{index}.toml")


def index_of(name: str) -> str:
    """Return the package index of a lock by the name of its file; the default one if that says none."""
    known = sorted(indexes(), key=len, reverse=True)
    return next((index for index in known if re.search(rf"[.-]{re.escape(index)}\.toml$", name)), DEFAULT)


def file_names(lock_file: Path) -> list[str]:
    """Return the names that the locks beside an image.yaml or trainyard.yaml may have."""
    return [file_of(lock_file, index).name for index in (DEFAULT, *indexes())]


def files(lock_file: Path) -> dict[str, Path]:
    """Return name of a package index -> path of its lock, for those that are there."""
    paths = {index: file_of(lock_file, index) for index in (DEFAULT, *indexes())}
    return {index: path for index, path in paths.items() if os.path.lexists(path)}


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


@cache
def _fitting(python: str, arch: str, glibc: str) -> frozenset[Tag]:
    return frozenset(tags(python, arch, glibc))


def file(found: PackageWheel | PackageSdist) -> File:
    """Return a file of a PEP 751 package.

    Raises:
        ValueError: it has no SHA-256.
    """
    if not found.hashes.get("sha256"):
        raise ValueError(f"{found.filename} has no SHA-256")
    return File(found.filename, found.hashes["sha256"], found.size or 0, found.url or "")


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
    return tuple(sorted(map(file, usable)))


def text(lock: Lock, index: str = DEFAULT, exported: Mapping[Made, str] | None = None) -> str:
    """Return the lock of a package index as it is written.

    Args:
        exported: if given, files have the addresses of an index, and what is made has this for a source, in TOML.
    """
    locked = lock.indexes[index]
    grouped = any(pin.role == _GROUP for one in locked.values() for pin in one.pins)
    body = [
        'lock-version = "1.0"',
        *_array("environments", [value(marker(arch)) for arch in locked]),
        f'requires-python = "=={lock.python}.*"',
        *([f"dependency-groups = {value([_GROUP])}", "default-groups = []"] if grouped else []),
        'created-by = "trainyard"',
        *([] if any(one.pins for one in locked.values()) else ["packages = []"]),
        *_packages(locked, exported),
        *([] if exported is not None else _own(lock, locked)),
        "",
    ]
    return with_checksum("\n".join(body))


def _packages(locked: Mapping[str, Locked], exported: Mapping[Made, str] | None) -> Iterator[str]:
    merged: dict[tuple[str, str, Role, Made | None], dict[str, Pin]] = {}
    for arch, one in locked.items():
        for pin in one.pins:
            merged.setdefault((pin.name, pin.version, pin.role, pin.made), {})[arch] = pin
    for (name, version, role, made), of in sorted(merged.items(), key=lambda item: (*item[0][:3], str(item[0][3]))):
        yield from ("", "[[packages]]", f"name = {value(name)}", f"version = {value(version)}")
        machines = " or ".join(f"platform_machine == '{ARCHITECTURES[arch].machine}'" for arch in of)
        conditions = [_OF_GROUP] if role == _GROUP else []
        if len(of) < len(locked):
            conditions.append(f"({machines})" if conditions and len(of) > 1 else machines)
        yield from [f"marker = {value(' and '.join(conditions))}"] if conditions else []
        if made and exported is not None:
            yield exported[made]
            continue
        every = sorted({file for pin in of.values() for file in pin.files})
        tables = {file: _file(file, addresses=exported is not None) for file in every}
        yield from (f"sdist = {table}" for file, table in tables.items() if not file.is_wheel)
        wheels = [table for file, table in tables.items() if file.is_wheel]
        yield from _array("wheels", wheels) if wheels else ()
        about = ({role: True} if role else {}) | ({"made": made.key} if made else {})
        about |= {"commit": made.commit} if made and made.commit else {}
        yield from [f"tool = {value({'trainyard': about})}"] if about and exported is None else []


def _file(file: File, *, addresses: bool) -> str:
    where = {"url": file.url} if addresses else {"path": file.name}
    return value({**where, **({"size": file.size} if file.size else {}), "hashes": {"sha256": file.sha256}})


def _own(lock: Lock, locked: Mapping[str, Locked]) -> Iterator[str]:
    if lock.day:
        yield from ("", "[tool.trainyard]", f"day = {value(lock.day)}")
    if lock.origin:
        yield from ("", "[tool.trainyard.origin]")
        yield from (f"{name} = {value(given)}" for name, given in asdict(lock.origin).items() if given)
    for arch, base in ((arch, one.base) for arch, one in locked.items() if one.base):
        yield from ("", f"[tool.trainyard.base.{arch}]")
        for name, given in base.model_dump().items():
            if not isinstance(given, dict):
                yield f"{name} = {value(given)}"
        for name in ("packages", "requires"):
            yield from ("", f"[tool.trainyard.base.{arch}.{name}]")
            yield from (f"{_key(key)} = {value(item)}" for key, item in getattr(base, name).items())


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


def loads(text: str, command: str, index: str = DEFAULT) -> Lock:
    """Return what the text of a lock has, for a package index.

    Args:
        command: what writes the lock, such as ``trainyard lock cpu``.
    Raises:
        ValueError: it has conflicts of a merge, or is not as ``trainyard lock`` wrote it; the message goes on after the
            name of the file.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if _CONFLICT.match(line):
            raise ValueError(f":{number}: conflicts of a merge: take one side, then run '{command}'")
    head = _HEAD.match(text)
    if not head:
        raise ValueError(f": no '# checksum:' line, so not a lock: run '{command}'")
    body = text[head.end() :].removeprefix("\n")
    if hashlib.sha256(body.encode()).hexdigest() != head[1]:
        raise ValueError(f": changed since 'trainyard lock' wrote it: restore it, or run '{command}' again")
    try:
        return _parsed(tomllib.loads(body), index)
    except (KeyError, TypeError, ValueError, PylockValidationError, PylockSelectError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f": written by another version of Trainyard ({reason}): run '{command}' again") from None


def _parsed(data: Mapping[str, Any], index: str) -> Lock:
    pylock = Pylock.from_dict(data)
    python = str(pylock.requires_python).removeprefix("==").removesuffix(".*")
    own = (pylock.tool or {}).get("trainyard", {})
    if not re.fullmatch(r"\d+\.\d+", python) or not re.fullmatch(r"(\d{8})?", own.get("day", "")):
        raise ValueError(f"requires-python '{pylock.requires_python}', day '{own.get('day', '')}'")
    bases = {arch: BaseContents.model_validate(about) for arch, about in own.get("base", {}).items()}
    # Packages of the group may also be in the image, in another version: select() takes each name once.
    of_group = [one for one in data["packages"] if _OF_GROUP in one.get("marker", "")]
    parts: list[tuple[Pylock, list[str]]] = [(pylock, [])]
    if of_group:
        others = [one for one in data["packages"] if one not in of_group]
        parts = [
            (Pylock.from_dict({**data, "packages": others}), []),
            (Pylock.from_dict({**data, "packages": of_group}), [_GROUP]),
        ]
    locked = {}
    for arch, architecture in ARCHITECTURES.items():
        environment = markers.environment(python, architecture.machine)
        if any(one.evaluate(environment, context="requirement") for one in pylock.environments or ()):
            pins = [
                _pin(package, python, arch)
                for part, group in parts
                for package, _ in part.select(
                    environment=environment,  # type: ignore[arg-type]
                    tags=tags(python, arch),
                    dependency_groups=group,
                )
            ]
            locked[arch] = Locked(ordered(pins), bases.get(arch))
            if bool(locked[arch].framework) == bool(locked[arch].base):
                raise ValueError(f"no framework for {arch}, or two")
    if origin := own.get("origin"):
        origin = Origin(**origin)
    return Lock(python, {index: locked}, own.get("day", ""), origin)


def _pin(package: Package, python: str, arch: str) -> Pin:
    about = (package.tool or {}).get("trainyard", {})
    if unknown := sorted(about.keys() - {*get_args(Role), "made", "commit"}):
        raise ValueError(f"'{unknown[0]}' of {package.name}")
    role: Role = next((role for role in get_args(Role) if about.get(role)), "")
    made = Made(about["made"], about.get("commit", "")) if "made" in about else None
    return Pin(package.name, str(package.version), usable_files(package, python, arch), role, made)


def read(lock_file: Path, command: str) -> Lock | Unreadable:
    """Return the lock of an image, of all package indexes, or why it cannot be used.

    Args:
        lock_file: that of the default index, ``command``: see :func:`loads`.
    Raises:
        UserError: a file is not text that can be read.
    """
    found: dict[str, Lock] = {}
    for index, path in files(lock_file).items():
        try:
            found[index] = loads(yaml_source.text(path), command, index)
        except ValueError as error:
            return Unreadable(f"{relative(path)}{error}")
    for index, lock in found.items():
        if DEFAULT in found and lock.origin and lock.origin != found[DEFAULT].origin:
            other = relative(file_of(lock_file, index))
            reason = f"{other}: not of the same 'trainyard lock' as {lock_file.name}: run '{command}'"
            return Unreadable(reason, rest=merged(found.values()))
    if DEFAULT not in found:
        return Unreadable(f"{relative(lock_file)} is missing: run '{command}'", missing=True)
    return merged(found.values())


def digest(lock_file: Path) -> str:
    """Return the SHA-256 of the files of a lock."""
    made = hashlib.sha256()
    for path in files(lock_file).values():
        made.update(path.read_bytes())
    return made.hexdigest()


def merged(locks: Iterable[Lock]) -> Lock:
    """Return the locks of several package indexes as one; what they do not differ in is that of the first."""
    every = list(locks)
    return replace(every[0], indexes={name: locked for one in every for name, locked in one.indexes.items()})


def changed(lock_file: Path, lock: Lock) -> dict[Path, str]:
    """Return path -> text of the files of a lock that change; empty for those of indexes that it lacks now."""
    texts = {file_of(lock_file, index): text(lock, index) for index in lock.indexes}
    known = files(lock_file).values()
    gone = {path: "" for path in known if path not in texts}
    return {path: new for path, new in texts.items() if path not in known or yaml_source.text(path) != new} | gone


def write(lock_file: Path, lock: Lock) -> list[Path]:
    """Write a lock, each of its files atomically, and return the paths of what changed.

    Raises:
        UserError: it is part of the installed package, or its folder cannot be written.
    """
    files_ = changed(lock_file, lock)
    for path, new in files_.items():
        check_writable(path)
        if new:
            repository_files.write(path.parent, path.name, new)
        else:
            path.unlink()
    return list(files_)
