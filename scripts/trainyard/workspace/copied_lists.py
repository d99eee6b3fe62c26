"""Read the lists of requirements that ``init`` copies into trainyard.yaml, as no image is installed from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard.spec import yaml_source
from trainyard.workspace.dependency_tables import Toml, table, toml
from trainyard.workspace.lines import text_of

#: A requirement and its place, as ``Pipfile:4``.
Placed = tuple[str, str]

#: The words after ``pip install``, up to the end of that command.
_INSTALLS = re.compile(r"(?:\bpip3?|uv pip) install(?P<words>[^&;|\n]*)")

#: Options of pip and uv without a value; the next word is the value of every other one.
_SWITCH = re.compile(
    "-[qUvIy]+|--(upgrade|quiet|verbose|no-[a-z-]+|pre|user|force-reinstall|ignore-installed|system|break-system-packages"
    "|require-hashes|use-[a-z0-9-]+|prefer-binary|disable-pip-version-check|compile|compile-bytecode|yes|reinstall|exact)"
    "|--[a-z-]+=.*"
)

#: A package by its name; files, addresses and variables are none. And tools, which no program imports.
_PACKAGE = re.compile(r"[A-Za-z][\w.-]*(\[[\w,-]+\])?([=<>~!].*)?")
_ARCHIVE = re.compile(r".*\.(whl|zip|tar\.\w+)")
_TOOLS = frozenset(("pip", "uv", "wheel", "setuptools", "poetry", "pipenv", "pdm"))

#: Keys of a package of a Pipfile that are environment markers (https://pipenv.pypa.io/en/latest/specifiers.html).
_MARKERS = (
    "sys_platform", "platform_system", "platform_machine", "python_version", "python_full_version", "os_name",
    "implementation_name", "platform_python_implementation",
)  # fmt: skip


def _pipfile(path: Path) -> Iterator[Placed]:
    """Yield ``[packages]`` of a Pipfile (https://github.com/pypa/pipfile)."""
    source = toml(path)
    yield from _entries(source, table(source.data, "packages"), "[packages]")


def _pixi(path: Path) -> Iterator[Placed]:
    """Yield ``[pypi-dependencies]`` (https://pixi.sh/latest/reference/pixi_manifest/#pypi-dependencies)."""
    source = toml(path)
    yield from _entries(source, table(source.data, "pypi-dependencies"), "[pypi-dependencies]")


def of_pixi(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, versions and place of what a pixi.toml takes from conda's channels, and of Python."""
    source = toml(path)
    for name, value in table(source.data, "dependencies").items():
        version = str(value.get("version", "*") if isinstance(value, dict) else value)
        version = "" if version == "*" else f"={version}" if version[:1].isdigit() else version
        yield name, version, source.where(name, after="[dependencies]")


#: What a shell replaces by the output of a command:
#: https://www.gnu.org/software/bash/manual/html_node/Command-Substitution.html
_SUBSTITUTED = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")


def _entries(source: Toml, entries: Mapping[str, Any], after: str) -> Iterator[Placed]:
    """Yield the packages of a table with versions, as both formats have it; those of addresses are left to the user."""
    for name, value in entries.items():
        about = value if isinstance(value, dict) else {"version": value}
        version, named = str(about.get("version", "*")), about.get("extras")
        if {"git", "path", "file", "url"} & about.keys():
            continue
        extras = f"[{','.join(map(str, named))}]" if isinstance(named, list) and named else ""
        markers = [str(about["markers"])] if about.get("markers") else []
        markers += [f"{key} {about[key]}" for key in _MARKERS if key in about]
        marker = f" ; {' and '.join(markers)}" if markers else ""
        version = "" if version == "*" else f"=={version}" if version[:1].isdigit() else version
        yield f"{name}{extras}{version}{marker}", source.where(name, after=after)


def _cog(path: Path) -> Iterator[Placed]:
    """Yield ``python_packages`` (https://github.com/replicate/cog/blob/main/docs/yaml.md)."""
    data = yaml_source.read(path)
    build = yaml_source.plain(data).get("build")
    packages = build.get("python_packages") if isinstance(build, dict) else None
    for position, text in enumerate(packages if isinstance(packages, list) else ()):
        line = yaml_source.line_of(data, ("build", "python_packages", position))
        yield str(text), f"{path.name}:{line}"


def debian(root: Path, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the file that lists Debian packages, and these: apt.txt of repo2docker, or cog.yaml's system_packages.

    https://repo2docker.readthedocs.io/en/latest/configuration/
    """
    if "apt.txt" in names:
        lines = (line.partition("#")[0] for line in text_of(root / "apt.txt").splitlines())
        return "apt.txt", [word for line in lines for word in line.split()]
    build = yaml_source.plain(yaml_source.read(root / "cog.yaml")).get("build") if "cog.yaml" in names else None
    packages = build.get("system_packages") if isinstance(build, dict) else None
    return "cog.yaml", [str(one) for one in packages] if isinstance(packages, list) else []


def packages_of(command: str) -> Iterator[str]:
    """Yield the packages that a shell's command installs with pip or uv by their names."""
    command = _SUBSTITUTED.sub("$substituted", re.sub(r"(^|\s)#.*", "", command))
    for match in _INSTALLS.finditer(command):
        skip = False
        for word in match["words"].split():
            word = word.strip("\"'")
            if skip or word.startswith("-"):
                skip = not skip and not _SWITCH.fullmatch(word)
            elif _PACKAGE.fullmatch(word) and not _ARCHIVE.fullmatch(word) and word not in _TOOLS:
                yield word


def installed(path: Path) -> list[Placed]:
    """Return the packages that a Dockerfile installs with pip or uv by their names."""
    found: dict[str, str] = {}
    number = 1
    # Comments inside of a command are no part of it: https://docs.docker.com/reference/dockerfile/#format
    for lines in re.split(r"(?<!\\)\n", re.sub(r"(?m)^[ \t]*#.*$", r"\\", text_of(path))):
        before = re.match(r"(\\\n)*", lines)
        for word in packages_of(lines.replace("\\\n", " ")):
            found.setdefault(word, f"{path.name}:{number + (before[0].count(chr(10)) if before else 0)}")
        number += lines.count("\n") + 1
    return list(found.items())


#: What a converted notebook has in the place of a cell's command that installs.
INSTALL = "pass  # "


def of_cells(path: Path) -> tuple[list[Placed], list[str]]:
    """Return the packages that the cells of a converted notebook install, and the addresses, as notes."""
    found: dict[str, str] = {}
    notes = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if line.lstrip().startswith(INSTALL):
            command = line.partition(INSTALL)[2]
            for word in packages_of(command):
                found.setdefault(word, f"{path.name}:{number}")
            addresses = [word for word in command.split() if "://" in word]
            notes += [f"{path.name}:{number} installs {one}: list it in requirements.txt" for one in addresses]
    return list(found.items()), notes


#: Name of a file, as a regular expression -> what reads it, the preferred first.
_READERS: dict[str, Callable[[Path], Iterable[Placed]]] = {
    "Pipfile": _pipfile,
    r"pixi\.toml": _pixi,
    r"cog\.yaml": _cog,
    r"Dockerfile.*|.+\.dockerfile": installed,
}


def of_file(path: Path) -> list[Placed]:
    """Return the requirements of a file of these kinds; none of another file."""
    reader = next((reader for name, reader in _READERS.items() if re.fullmatch(name, path.name)), None)
    return list(reader(path)) if reader else []


def read(root: Path, names: Sequence[str]) -> tuple[str, list[Placed]]:
    """Return the first file at the top of a repository that lists something, and what; both empty without one."""
    for pattern in _READERS:
        for name in names:
            if re.fullmatch(pattern, name) and (found := of_file(root / name)):
                return name, found
    return "", []
