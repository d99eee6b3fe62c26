"""Name the lists of requirements that ``init`` does not take, with what makes one of them that it does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.workspace import copied_lists, dependency_tables, torch_variant
from trainyard.workspace.lines import text_of
from trainyard.workspace.project import Project
from trainyard.workspace.requirement_choice import Choice, beside

_COPY = "list what it has in requirements.txt"

#: File -> the command that converts it to a list that is read.
_FILES = {
    "Pipfile.lock": "'pipenv requirements > requirements.txt' makes a list of it",
    "poetry.lock": "'poetry export --output requirements.txt' makes a list of its pins",
    "pdm.lock": "'pdm export --output requirements.txt' makes a list of its pins",
    "conda-lock.yml": f"it is for conda: {_COPY}",
    "pylock.toml": "'requirements: pylock.toml' of trainyard.yaml takes it instead",
    "environment.yml": _COPY,
    "environment.yaml": _COPY,
    "requirements.in": "'requirements: requirements.in' of trainyard.yaml takes it instead",
    "requirements.txt": "'requirements: requirements.txt' of trainyard.yaml takes it instead",
}

#: Other names of such lists at the top of a repository, and what lists have in their names that training does not need.
_LIST = re.compile(r"[\w.-]*requirements[\w.-]*\.(txt|in)|requirements/[\w.-]+\.(txt|in)")
_ENVIRONMENT = re.compile(r"[\w.-]*env[\w.-]*\.ya?ml")
_NOT_TRAINING = re.compile(r"(^|[^a-z])(dev|tests?|docs?|lint|ci|build|constraints?|mypy)([^a-z]|$)")

#: Files of repo2docker (https://repo2docker.readthedocs.io/en/latest/configuration/) that are no lists of Python's.
_BINDER = {"postBuild": "nothing of it is run"}

#: Names of extras and groups that training does not need.
_ASIDE = re.compile(
    r"(dev|tests?|testing|docs?|lint|typing|types|build|release|ci|pre-?commit|examples?|notebooks?)[\w-]*"
)


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
        if name in names and name not in taken:
            yield f"{name}: lists requirements and is not read: {remedy}"
    for name in (name for name in names if name not in (*_FILES, *taken) and not _NOT_TRAINING.search(name)):
        if _LIST.fullmatch(name) and text_of(root / name).strip():
            yield f"{name}: lists requirements and is not read: 'requirements: {name}' in trainyard.yaml takes it"
        elif _ENVIRONMENT.fullmatch(name) and re.search(r"(?m)^dependencies:", text_of(root / name)):
            yield f"{name}: lists requirements and is not read: {_COPY}"
    yield from _beside(root, names, script, taken)
    for name, remedy in _BINDER.items():
        if name in names:
            yield f"{name}: is not read: {remedy}"
    if script and script not in taken and dependency_tables.has_header(root / script):
        yield f"{script}: its header is not read: 'requirements: {script}' of trainyard.yaml takes it instead"
    if not wanted.file:
        yield from _without_backend(names)
    yield from _tables(root, names, wanted, project)
    for name in names:
        if name in taken or not (listed := copied_lists.of_file(root / name)):
            continue
        packages = {one: canonicalize_name(re.split(r"[\[=<>~! ;]", one)[0]) for one, _ in listed}
        lost = [one for one, package in packages.items() if package not in wanted.names and package not in provided]
        if lost:
            yield f"{name}: lists {', '.join(lost)}, which no list that is read has: {_COPY}"


def _beside(root: Path, names: Sequence[str], script: str, taken: Container[str]) -> Iterator[str]:
    """Yield a line about the list beside the program."""
    try:
        folder, near = beside(root, script, names) or ("", Choice())
    except UserError:  # about a file that is not taken
        return
    apart = f"'trainyard init {shlex.quote(folder)}' makes an image of that folder"
    if near.file and near.file not in taken:
        takes = f"'requirements: {near.file}' in trainyard.yaml takes it, or {apart}"
        yield f"{near.file}: lists requirements and is not read: {takes}"
    elif folder and not near.file:
        yield f"{folder}: its own requirements are not read ({near.why}): {apart}"


def _without_backend(names: Sequence[str]) -> Iterator[str]:
    """Yield a line about a project that no build backend can be asked about."""
    if "setup.cfg" in names and "setup.py" not in names and "pyproject.toml" not in names:
        yield f"setup.cfg: is not read without a setup.py or a [build-system] in pyproject.toml: {_COPY}"


def _tables(root: Path, names: Sequence[str], wanted: Choice, project: Project | None) -> Iterator[str]:
    """Yield lines about the extras and groups of the project, but for those that training does not need."""
    if "pyproject.toml" not in names:
        return
    extras = list(project.optional_dependencies) if project else []
    groups = list(dependency_tables.groups(root / "pyproject.toml"))
    for what, key, listed, taken in (
        ("[project.optional-dependencies]", "extras", extras, wanted.extras),
        ("[dependency-groups]", "groups", groups, wanted.groups),
    ):
        # The target is the choice between extras such as cpu and cu130.
        listed = [name for name in listed if not torch_variant.is_name(name)]
        left = [name for name in listed if name not in taken and not _ASIDE.fullmatch(name.lower())]
        if left:
            value = f"{{file: pyproject.toml, {key}: [{', '.join(left)}]}}"
            instead = "" if wanted.file in ("", "pyproject.toml", "uv.lock") else " instead"
            yield f"pyproject.toml: of {what}, {', '.join(left)} is not read: 'requirements: {value}' takes it{instead}"
