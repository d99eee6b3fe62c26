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

#: Packages of ``pip install`` in a Dockerfile; without options, addresses and files.
_INSTALLS = re.compile(r"(?:pip3?|uv pip) install(?P<words>[^&;|]*)")

#: Options of pip and uv that are followed by a value, and tools that no program imports.
_WITH_VALUE = re.compile(
    "-[rcifte]|--(requirement|constraint|index-url|extra-index-url|find-links|target|python|editable|index|prefix|root)"
    "|--torch-backend"
)
_TOOLS = frozenset(("pip", "uv", "wheel", "setuptools", "poetry", "pipenv", "pdm"))


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


def _entries(source: Toml, entries: Mapping[str, Any], after: str) -> Iterator[Placed]:
    """Yield the packages of a table with versions, as both formats have it; those of addresses are left to the user."""
    for name, value in entries.items():
        about = value if isinstance(value, dict) else {"version": value}
        version = str(about.get("version", "*"))
        if {"git", "path", "file", "url"} & about.keys():
            continue
        extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
        marker = f" ; {about['markers']}" if about.get("markers") else ""
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


def installed(path: Path) -> list[Placed]:
    """Return the packages that a Dockerfile or converted notebook installs with pip or uv by their names."""
    found: dict[str, str] = {}
    number = 1
    for command in re.split(r"(?<!\\)\n", text_of(path)):
        text = re.sub(r"\\\n", " ", command)
        for match in () if text.lstrip().startswith("#") else _INSTALLS.finditer(text):
            skip = False
            for word in match["words"].split():
                word = word.strip("\"'")
                if skip or word.startswith("-"):
                    skip = not skip and bool(_WITH_VALUE.fullmatch(word))
                elif re.fullmatch(r"[A-Za-z][\w.-]*(\[[\w,-]+\])?([=<>~!].*)?", word) and word not in _TOOLS:
                    found.setdefault(word, f"{path.name}:{number}")
        number += command.count("\n") + 1
    return list(found.items())


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
