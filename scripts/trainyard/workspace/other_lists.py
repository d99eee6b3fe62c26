"""Name the lists of requirements that ``init`` does not take, with what makes one of them that it does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from trainyard.workspace import dependency_tables, torch_variant
from trainyard.workspace.lines import text_of
from trainyard.workspace.project import Project
from trainyard.workspace.requirement_choice import Choice

_COPY = "list what it has in requirements.txt"

#: File -> the command that converts it to a list that is read.
_FILES = {
    "Pipfile.lock": "'pipenv requirements > requirements.txt' makes a list of it",
    "Pipfile": "'pipenv lock', then 'pipenv requirements > requirements.txt' makes a list of it",
    "poetry.lock": "'poetry export --output requirements.txt' makes a list of its pins",
    "pdm.lock": "'pdm export --output requirements.txt' makes a list of its pins",
    "pixi.toml": "'pixi workspace export conda-environment environment.yml' makes a list of it",
    "conda-lock.yml": f"it is for conda: {_COPY}",
    "cog.yaml": _COPY,
    "pylock.toml": _COPY,
    "environment.yml": _COPY,
    "environment.yaml": _COPY,
    "requirements.in": "'uv pip compile requirements.in --output-file requirements.txt' makes a list of it",
    "requirements.txt": "'requirements: requirements.txt' of trainyard.yaml takes it instead",
}

#: Files of repo2docker (https://repo2docker.readthedocs.io/en/latest/configuration/) that are no lists of Python's.
_BINDER = {"apt.txt": "name its packages under 'system'", "postBuild": "nothing of it is run"}

#: Names of extras and groups that training does not need.
_ASIDE = re.compile(
    r"(dev|tests?|testing|docs?|lint|typing|types|build|release|ci|pre-?commit|examples?|notebooks?)[\w-]*"
)

#: The header of a script: https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEADER = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")

#: Packages of ``pip install`` in a Dockerfile; without options, addresses and files.
_INSTALLS = re.compile(r"(?:pip3?|uv pip) install(?P<words>[^&;|]*)")


def unread(
    root: Path, names: Sequence[str], wanted: Choice, project: Project | None, script: str, provided: Container[str]
) -> Iterator[str]:
    """Yield a line for each list that is not taken.

    Args:
        names: the files of the repository, ``wanted``: what is taken, ``script``: the file that is run.
        provided: canonical names of the packages that the target has.
    """
    taken = {wanted.file, *(place.partition(":")[0] for place in wanted.names.values())}
    for name, remedy in _FILES.items():
        if name in names and name not in taken and not (name == "Pipfile" and "Pipfile.lock" in names):
            yield f"{name}: lists requirements and is not read: {remedy}"
    for name, remedy in _BINDER.items():
        if name in names:
            yield f"{name}: is not read: {remedy}"
    if script and (header := _header(root / script)):
        yield f"{script}: its header lists {', '.join(header)} and is not read: list that in requirements.txt"
    if not (wanted.file or wanted.untold):
        yield from _without_backend(root, names)
    yield from _tables(root, names, wanted, project)
    for name in (name for name in names if re.fullmatch(r"(.*/)?(Dockerfile[^/]*|[^/]+\.dockerfile)", name)):
        if installed := _installed(root / name):
            known = {one: canonicalize_name(re.split(r"[\[=<>~!]", one)[0]) for one in installed}
            lost = [one for one, package in known.items() if package not in wanted.names and package not in provided]
            if lost:
                yield f"{name}: installs {', '.join(lost)}, which no list that is read has: {_COPY}"


def _without_backend(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield lines about projects that no build backend can be asked about."""
    if "setup.cfg" in names and "setup.py" not in names and "pyproject.toml" not in names:
        yield f"setup.cfg: is not read without a setup.py or a [build-system] in pyproject.toml: {_COPY}"
    document = dependency_tables.toml(root / "pyproject.toml").data if "pyproject.toml" in names else {}
    if dependency_tables.table(document, "tool", "poetry") and "poetry.lock" not in names:
        yield (
            "pyproject.toml: what Poetry requires is not read without a package to build: 'poetry export --output "
            "requirements.txt' makes a list of it"
        )


def _tables(root: Path, names: Sequence[str], wanted: Choice, project: Project | None) -> Iterator[str]:
    """Yield lines about the extras and groups of the project, but for those that training does not need."""
    if "pyproject.toml" not in names:
        return
    extras = list(project.optional_dependencies) if project else []
    groups = list(dependency_tables.table(dependency_tables.toml(root / "pyproject.toml").data, "dependency-groups"))
    for what, key, listed, taken in (
        ("[project.optional-dependencies]", "extras", extras, wanted.extras),
        ("[dependency-groups]", "groups", groups, []),
    ):
        # The target is the choice between extras such as cpu and cu130.
        listed = [name for name in listed if not torch_variant.is_name(name)]
        left = [name for name in listed if name not in taken and not _ASIDE.fullmatch(name.lower())]
        if left:
            value = f"{{file: pyproject.toml, {key}: [{', '.join(left)}]}}"
            instead = "" if wanted.file in ("", "pyproject.toml", "uv.lock") else " instead"
            yield f"pyproject.toml: of {what}, {', '.join(left)} is not read: 'requirements: {value}' takes it{instead}"


def _header(path: Path) -> list[str]:
    """Return the requirements in the header of a script; none if it has no header that is valid."""
    match = _HEADER.search(text_of(path)) if path.is_file() else None
    if not match:
        return []
    content = "".join(line[2:] if line.startswith("# ") else line[1:] for line in match["content"].splitlines(True))
    try:
        listed = tomllib.loads(content).get("dependencies", [])
    except tomllib.TOMLDecodeError:
        return []
    return [str(one) for one in listed] if isinstance(listed, list) else []


def _installed(path: Path) -> list[str]:
    """Return the packages that a Dockerfile installs with pip or uv by their names."""
    text = re.sub(r"\\\n", " ", text_of(path))
    found: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for match in _INSTALLS.finditer(line):
            words, skip = match["words"].split(), False
            for word in words:
                word = word.strip("\"'")
                if skip or word.startswith("-"):
                    skip = not skip and bool(_WITH_VALUE.fullmatch(word))
                elif re.fullmatch(r"[A-Za-z][\w.-]*(\[[\w,-]+\])?([=<>~!].*)?", word) and word not in _TOOLS:
                    found.append(word)
    return list(dict.fromkeys(found))


#: Options of pip and uv that are followed by a value, and tools that no program imports.
_WITH_VALUE = re.compile(
    "-[rcifte]|--(requirement|constraint|index-url|extra-index-url|find-links|target|python|editable|index|prefix|root)"
    "|--torch-backend"
)
_TOOLS = frozenset(("pip", "uv", "wheel", "setuptools", "poetry", "pipenv", "pdm"))
