"""The tables that all specs share, read once and checked: images/bases.yaml, indexes.yaml and conflicts.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, Field, WithJsonSchema
from ruamel.yaml.comments import CommentedMap

from trainyard.common.errors import UserError, nearest
from trainyard.common.settings import ROOT
from trainyard.spec import yaml_source
from trainyard.spec.architectures import PLATFORMS
from trainyard.spec.yaml_source import M, Strict, relative, validated

IMAGES = ROOT / "images"


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} is not a version specifier (PEP 440), as in '>=0.0.50'") from None
    return text


def _line(text: str) -> str:
    """Return ``text`` without the line break at its end, which `summary: |` has."""
    text = text.rstrip("\r\n")
    if re.search(r"[\r\n\0]", text):
        raise ValueError("it has a line break or a NUL, which no Dockerfile and no path can have: write one line")
    return text


#: Text that becomes part of an instruction of a Dockerfile, or of a path.
Line = Annotated[str, AfterValidator(_line)]


def _installed(name: str) -> str:
    # No name ends so. A "+" means to install it, or is part of a name such as g++:
    # https://manpages.debian.org/stable/apt/apt-get.8.en.html#install
    if name.endswith("-"):
        raise ValueError(f"apt-get removes {name[:-1]} for '{name}': write '{name[:-1]}'")
    return name


#: A package name as https://www.debian.org/doc/debian-policy/ch-controlfields.html#source defines it.
DebianPackage = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$"), AfterValidator(_installed)]
Specifier = Annotated[str, AfterValidator(_specifier)]


def _platform(text: str) -> str:
    if text not in PLATFORMS:
        raise ValueError(f"{text!r} is not a platform of images{nearest(text, PLATFORMS)}: {', '.join(PLATFORMS)}")
    return text


def _each_once(names: list[str]) -> list[str]:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is listed twice")
    return names


#: What an image is for, as Docker writes it: ``linux/amd64``.
Platform = Annotated[str, AfterValidator(_platform), WithJsonSchema({"type": "string", "enum": list(PLATFORMS)})]
Platforms = Annotated[
    list[Platform], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_each_once)
]


#: The interpreter of Debian's python3.
DEBIAN_PYTHON = "/usr/bin/python3"


class Base(Strict):
    """A base image; see images/bases.yaml.

    Attributes:
        image: reference at a registry.
        build_base: reference of the image in which wheels are installed, with the same Python; None: the base itself.
        bootstrap: Debian suite from which an equivalent can be bootstrapped; None if that is impossible.
        python: minor version of its Python, as in ``3.11``.
        glibc: version of its C library, which decides which wheels run on it.
        interpreter: path of its Python; Debian's packages of Python are not installed beside another one.
        packages: Debian packages that every image installs on it.
        shared: whether the layers that images on several bases share have byte code for its Python.
        framework: Python packages of the framework, if the base holds it; the image uses the versions in the base.
    """

    image: str
    build_base: str | None = None
    bootstrap: str | None = None
    python: str
    glibc: str
    interpreter: Line = DEBIAN_PYTHON
    packages: list[DebianPackage]
    shared: bool = False
    framework: list[str] = Field(default_factory=list)


class Index(Strict):
    """A package index in addition to the default one; see images/indexes.yaml."""

    url: str
    packages: list[str]


class Conflict(Strict):
    """Packages that cannot share an image although their requirements allow it; see images/conflicts.yaml.

    Attributes:
        packages: name -> affected versions, all if empty; the conflict applies if every package matches.
        python: affected versions of Python; all if empty.
        differing: whether it applies only if their versions differ.
        constraint: what locks are resolved with, and nothing is refused; where that has no solution, it is a warning.
            ``{name}`` stands for a version.
        reason: what happens, ``source``: how that is known, ``until``: when the entry can be removed.
    """

    packages: dict[str, Specifier] = Field(min_length=1)
    python: Specifier = ""
    differing: bool = False
    constraint: str = ""
    reason: str
    source: str
    until: str

    def holds(self, versions: Mapping[str, str], python: str) -> bool:
        """Whether an image with this Python and ``versions`` (canonical name -> version) has all that is affected."""
        found = [versions.get(canonicalize_name(name)) for name in self.packages]
        return (
            SpecifierSet(self.python).contains(python)
            and all(
                version is not None and SpecifierSet(meant).contains(version, prereleases=True)
                for version, meant in zip(found, self.packages.values(), strict=True)
            )
            and not (self.differing and len(set(found)) == 1)
        )

    def words(self, versions: Mapping[str, str], python: str) -> str:
        """A clause for messages: what conflicts, with its versions, and the reason."""
        names = [canonicalize_name(name) for name in self.packages]
        parts = [f"{name} {versions[name]}" for name in names] + ([f"Python {python}"] if self.python else [])
        return f"{' and '.join(parts)} cannot share an image: {self.reason}"


def table(path: Path, model: type[M]) -> dict[str, M]:
    """A document whose keys are names and whose values are of ``model``."""
    found = {}
    for name, node in yaml_source.read(path).items():
        if not isinstance(node, CommentedMap):
            raise UserError(f"{relative(path)}: {name}: expected 'key: value' pairs")
        found[str(name)] = validated(path, model, node, yaml_source.plain(node))
    return found


@cache
def bases() -> dict[str, Base]:
    """The base images of images/bases.yaml by name."""
    return table(IMAGES / "bases.yaml", Base)


def plain_bases() -> dict[str, Base]:
    """Return the bases without a framework, by name, in the order in which they are tried."""
    return {name: base for name, base in bases().items() if not base.framework}


def pythons_of(names: Iterable[str]) -> str:
    """Return bases with their Python, for messages: ``debian-12 (Python 3.11), debian-13 (Python 3.13)``."""
    return ", ".join(f"{name} (Python {bases()[name].python})" for name in names)


@cache
def indexes() -> dict[str, Index]:
    """The package indexes of images/indexes.yaml by name."""
    return table(IMAGES / "indexes.yaml", Index)


@cache
def conflicts() -> dict[str, Conflict]:
    """Return the package combinations that images/conflicts.yaml excludes, by name; none without a catalogue."""
    file = IMAGES / "conflicts.yaml"
    return table(file, Conflict) if file.is_file() else {}


class Required(Strict):
    """Say what the wheels of a release require, and how that is known."""

    requires: list[str] = Field(min_length=1)
    source: str


@cache
def metadata() -> list[dict[str, Any]]:
    """Return images/requires.yaml in the form of uv's ``dependency-metadata``; nothing without a catalogue."""
    file = IMAGES / "requires.yaml"
    known = table(file, Required) if file.is_file() else {}
    keys = ("name", "version", "requires-dist")
    return [dict(zip(keys, (*release.split("=="), row.requires), strict=True)) for release, row in known.items()]


@cache
def _debian() -> dict[str, dict[str, str]]:
    """Return the contents of images/libraries.yaml; nothing without a catalogue."""
    file = IMAGES / "libraries.yaml"
    return yaml_source.plain(yaml_source.read(file)) if file.is_file() else {}


def libraries(base: str) -> dict[str, str]:
    """Return library -> the Debian package that has it on a base."""
    packages = _debian()["all"] | _debian()[base] if base in _debian() else {}
    return {library: package for package, names in packages.items() for library in names.split()}


def brought(packages: Iterable[str]) -> set[str]:
    """Return Debian packages with libraries, and those of them that are installed with them."""
    found, waiting = set[str](), [*packages]
    while waiting:
        found.add(name := waiting.pop())
        waiting += {*_debian().get("brings", {}).get(name, "").split()} - found
    return found


def gone(base: str) -> dict[str, str]:
    """Return Debian package that a base's archive does not have -> what has its contents; empty if nothing has."""
    found: Any = _debian().get("gone", {})
    suite = "debian-13" if base.startswith("python-") else base
    return {**found.get("all", {}), **found.get(suite, {})} if base in _debian() else {}


def packages_with(names: Iterable[str], base: str) -> str:
    """Return the Debian packages that have libraries on a base, ``libgl1, libx11-6``."""
    of = libraries(base)
    unknown = ", ".join(library for library in names if library not in of)
    rest = [f"the Debian package or the wheel that has {unknown}"] if unknown else []
    return ", ".join([*sorted({of[library] for library in names if library in of}), *rest])


def conflict(versions: Mapping[str, str], python: str) -> str | None:
    """Why packages of these versions (canonical name -> version) cannot share an image; None if they can.

    Args:
        python: version of the image's Python, as in ``3.11``.
    """
    held = (one for one in conflicts().values() if not one.constraint and one.holds(versions, python))
    return next((one.words(versions, python) for one in held), None)
