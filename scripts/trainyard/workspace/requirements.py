"""What a user's repository requires, from the files that ``requirements:`` of trainyard.yaml names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError, nearest
from trainyard.spec import markers, yaml_source
from trainyard.spec.architectures import AMD64
from trainyard.spec.markers import Fits, applies
from trainyard.spec.model import RepositorySpec, each_platform
from trainyard.spec.repository_files import inside
from trainyard.spec.workspace import Workspace
from trainyard.spec.yaml_source import relative
from trainyard.workspace import python_projects, requirements_txt, torch_variant
from trainyard.workspace.dependency_tables import (
    extra_lines,
    read_project,
    read_pylock,
    read_script,
    read_uv_lock,
    told_lines,
    toml,
)
from trainyard.workspace.lines import Found, Kind, Line, Source, is_script, line_with, parse_reference
from trainyard.workspace.project import Project

Asked = TypeVar("Asked", Line, Source)

#: Files whose dependencies ``trainyard init`` reads and ``requirements:`` does not.
_OTHER_FORMATS = ("environment.yml", "environment.yaml", "Pipfile", "Pipfile.lock", "poetry.lock", "pdm.lock",
                  "setup.cfg")  # fmt: skip

#: What the line begins with on which a project says its Python: of [project], setup.cfg and Poetry.
_PYTHON = ("requires-python", "python_requires", "python =")


@dataclass(frozen=True)
class Wanted:
    """What a workspace asks for, in addition to the packages of its target.

    Attributes:
        lines: requirements of package indexes; ``sources``: those from git, folders and files.
        constraints: versions that apply if the package is needed; ``overrides``: requirements that replace all others.
        excludes: names that are left out of the resolution.
        provided: canonical names of the projects that the code itself provides.
        requires_python: of the code's projects, and of the script or lock that lists the requirements.
        options: resolver settings, by their names in uv's ``[tool.uv]``.
        addresses: kind and address of indexes that a requirements file names, ``unasked``: of those that are left
            out, as the target has what they are for.
        index_of: canonical name -> entry of uv's ``[tool.uv.sources]``, which names the index of a package.
        compiled: the source distributions of ``build:``, ``build_requires``: what else their builds need.
    """

    lines: tuple[Line, ...] = ()
    sources: tuple[Source, ...] = ()
    constraints: tuple[Line, ...] = ()
    overrides: tuple[Line, ...] = ()
    excludes: tuple[str, ...] = ()
    provided: frozenset[str] = frozenset()
    requires_python: tuple[Line, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    addresses: tuple[tuple[Kind, Line], ...] = ()
    unasked: tuple[Line, ...] = ()
    index_of: dict[str, Any] = field(default_factory=dict)
    compiled: tuple[Line, ...] = ()
    build_requires: tuple[Line, ...] = ()


def read(ws: Workspace, python: str, machine: str = AMD64.machine) -> Wanted:
    """The requirements of a workspace.

    Without ``requirements:`` they are the dependencies of the code's own projects.

    Args:
        python: minor version of the image's Python, which markers of ``[tool.uv.sources]`` are evaluated for.
        machine: of the image's architecture, as ``uname -m`` says, for the same.
    Raises:
        UserError: a file is missing or has a mistake; the message names the file and line.
    """
    found = Found()
    fits = functools.partial(applies, python=python, machine=machine)
    projects = python_projects.projects(ws)
    wanted = ws.document.requirements
    file = wanted.file or ("pyproject.toml" if wanted.extras or wanted.groups else "")
    if file:
        _read_file(ws, _path(ws, file), found, projects, fits, markers.environment(python, machine))
    elif "requirements" not in ws.document.model_fields_set:
        for project in projects:
            _read_project(project, found, fits)
    for text in wanted.packages:
        line = _yaml_line(ws, text, ("requirements", "packages"), ("requirements",))
        if line.requirement.url:
            raise UserError(
                f"{line.where}: {line.shown!r}: an address is written in requirements.txt or [tool.uv.sources]"
            )
        found.lines.append(line)
    build = ws.document.build
    compiled = tuple(_yaml_line(ws, text, ("build", "sources")) for text in (build.packages_compiled if build else ()))
    build_requires = tuple(_yaml_line(ws, text, ("build", "requires")) for text in (build.requires if build else ()))
    for line in (*compiled, *build_requires):
        if line.requirement.url:
            raise UserError(
                f"{line.where}: {line.shown!r}: an address, which no lock holds: name a version of an index"
            )
    if ws.compiles_own:
        of = python_projects.backend(ws.root)
        own = python_projects.with_backends((*of.requires, "wheel"))
        build_requires += tuple(Line(text, of.file, line_with(of.file, text) or 1) for text in own)
    _resolve_own(found, projects, fits)
    for source in (one for one in found.sources if one.is_path):
        path, _, fragment = source.location.partition("#")
        inside(Path(path) / fragment.removeprefix("subdirectory="), ws.root, source.line.where)
    provided = frozenset(canonicalize_name(project.name) for project in projects if project.name)
    return Wanted(
        lines=_without(found.lines, provided),
        sources=tuple(one for one in found.sources if one.name not in provided),
        constraints=_without(found.constraints, provided),
        overrides=_without(found.overrides, provided),
        excludes=tuple(found.excludes),
        provided=provided,
        requires_python=(
            *found.requires_python,
            *(
                Line(
                    one.requires_python,
                    one.file,
                    line_with(one.file, "requires-python", "python_requires", "python =") or 1,
                )
                for one in projects
                if one.requires_python
            ),
        ),
        options=found.options,
        addresses=tuple(found.addresses),
        index_of={name: {"index": index} for name, index in found.index_of.items()},
        compiled=compiled,
        build_requires=build_requires,
    )


def of_platform(spec: RepositorySpec) -> Wanted:
    """Read the requirements of a repository, for the base and the platform of ``spec``; see :func:`read`."""
    wanted = read(spec.workspace, spec.python_version, spec.architecture.machine)
    asked = tuple(torch_variant.without_indexes(spec, wanted.addresses))
    versions, sources = torch_variant.of_addresses(spec, wanted.sources)
    wanted = replace(wanted, lines=(*wanted.lines, *versions), sources=tuple(sources))
    return replace(
        wanted, addresses=asked, unasked=tuple(line for kind, line in wanted.addresses if (kind, line) not in asked)
    )


def of_image(spec: RepositorySpec) -> Wanted:
    """Read the requirements of a repository for all its platforms, with markers where they differ."""
    every = {one.architecture.machine: of_platform(one) for one in each_platform(spec)}
    first = next(iter(every.values()))
    if all(one == first for one in every.values()):
        return first

    indexes: dict[str, Any] = {}
    for name in {name for one in every.values() for name in one.index_of}:
        of = {machine: one.index_of[name] for machine, one in every.items() if name in one.index_of}
        same = len(of) == len(every) and all(one == next(iter(of.values())) for one in of.values())
        marked = [{**one, "marker": f"platform_machine == '{machine}'"} for machine, one in of.items()]
        indexes[name] = next(iter(of.values())) if same else marked
    return replace(
        first,
        lines=joined({machine: one.lines for machine, one in every.items()}),
        sources=joined({machine: one.sources for machine, one in every.items()}),
        constraints=joined({machine: one.constraints for machine, one in every.items()}),
        overrides=joined({machine: one.overrides for machine, one in every.items()}),
        index_of=indexes,
    )


def joined(every: Mapping[str, Sequence[Asked]]) -> tuple[Asked, ...]:
    """Return what is asked for on several architectures, with a marker of those unless it is all.

    Args:
        every: machine of an architecture -> requirements.
    """
    on: dict[Asked, list[str]] = {}
    for machine, asked in every.items():
        for one in dict.fromkeys(asked):
            on.setdefault(one, []).append(f"platform_machine == '{machine}'")
    return tuple(one if len(of) == len(every) else one.with_marker(" or ".join(of)) for one, of in on.items())


def index_options(spec: RepositorySpec) -> Found:
    """Read what the requirements file of a repository says about indexes: :attr:`Found.addresses`, ``options``.

    Raises:
        UserError: see :func:`read`.
    """
    found, ws = Found(), spec.workspace
    name = ws.document.requirements.file
    if name and Path(name).suffix not in (".toml", ".lock", ".py"):
        requirements_txt.read(_path(ws, name), found, above=(ws.file,))
    found.addresses = torch_variant.without_indexes(spec, found.addresses)
    return found


def _without(lines: list[Line], names: frozenset[str]) -> tuple[Line, ...]:
    """The lines without repetitions and without those for packages of ``names``."""
    return tuple(line for line in dict.fromkeys(lines) if line.name not in names)


def _yaml_line(ws: Workspace, text: str, *locations: tuple[str, ...]) -> Line:
    """An item of a list in trainyard.yaml, and its line."""
    data = yaml_source.read(ws.file)
    for location in locations:
        items: Any = data
        for key in location:
            items = items.get(key) if isinstance(items, dict) else None
        if isinstance(items, list) and text in list(map(str, items)):
            at = list(map(str, items)).index(text)
            return Line(text, ws.file, yaml_source.line_of(data, (*location, at)) or 1)
    return Line(text, ws.file, yaml_source.line_of(data, locations[-1]) or 1)


def _path(ws: Workspace, name: str) -> Path:
    """The file that ``requirements:`` names.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    data = yaml_source.read(ws.file)
    line = yaml_source.line_of(data, ("requirements", "file")) or yaml_source.line_of(data, ("requirements",)) or 1
    path = inside(ws.root / name, ws.root, f"{relative(ws.file)}:{line}: requirements")
    if path.is_file():
        return path
    beside = path.parent if path.parent.is_dir() else ws.root
    names = [one.name for one in beside.iterdir() if one.is_file()]
    raise UserError(f"{relative(ws.file)}:{line}: requirements: no file '{name}'{nearest(path.name, names)}")


def _read_file(
    ws: Workspace, path: Path, found: Found, projects: list[Project], fits: Fits, environment: Mapping[str, str]
) -> None:
    wanted = ws.document.requirements
    if path.name in _OTHER_FORMATS:
        raise UserError(
            f"{relative(path)}: 'requirements:' is the name of a requirements.txt, pyproject.toml, uv.lock, "
            "pylock.toml, setup.py or script with a header; 'trainyard init' reads this file once"
        )
    if is_script(path.name) or re.fullmatch(r"pylock\.(\w+\.)?toml", path.name):
        _check_no_extras(ws)
        if path.suffix == ".py":
            read_script(path, found, fits=fits)
        else:
            read_pylock(path, found, environment)
        return
    if path.name == "setup.py":
        _check_no_extras(ws)
        own = python_projects.of_file(path, ws.told.get(path.parent))
        for one in [*projects, *([own] if own and all(one.file != path for one in projects) else [])]:
            _read_project(one, found, fits)
        return
    if path.name == "uv.lock" or path.suffix == ".toml":
        file = path.with_name("pyproject.toml") if path.name == "uv.lock" else path
        if not file.is_file():
            raise UserError(f"{relative(path)}: no pyproject.toml beside it, which names the direct dependencies")
        own = next((one for one in projects if one.file == file), None)
        own = own or python_projects.of_file(file, ws.told.get(file.parent))
        read_project(file, found, fits=fits, project=own, extras=wanted.extras, groups=wanted.groups)
        for one in projects:
            if one.file != file:
                _read_project(one, found, fits)
        if path.name == "uv.lock":
            read_uv_lock(path, found, fits=fits)
        return
    _check_no_extras(ws)
    requirements_txt.read(path, found, above=(ws.file,))
    hashed = {one.name for one in (*found.lines, *found.constraints) if one.hashes}
    unhashed = [(one, one.requirement.marker) for one in found.lines if one.name not in hashed]
    for line, marker in (*unhashed, *((one.line, one.marker) for one in found.sources if not one.hashes)):
        if found.require_hashes and fits(marker):
            raise UserError(f"{line.where}: {line.shown!r} has no --hash, and {found.require_hashes} requires hashes")


def _check_no_extras(ws: Workspace) -> None:
    if ws.document.requirements.extras or ws.document.requirements.groups:
        raise UserError(f"{relative(ws.file)}: requirements: extras and groups are those of a pyproject.toml")


def _read_project(project: Project, found: Found, fits: Fits) -> None:
    """Add the dependencies of one of the code's projects."""
    if project.file.name == "pyproject.toml":
        read_project(project.file, found, fits=fits, project=project)
        return
    for line in told_lines(project, "install_requires"):
        if line.requirement.url:
            found.sources.append(parse_reference(line))
        else:
            found.lines.append(line)


def _resolve_own(found: Found, projects: list[Project], fits: Fits) -> None:
    """Replace ``-e .`` and extras of the code's own projects by what these require: the code itself is in the image."""
    folders = {project.folder: project for project in projects}
    names: dict[str, Project] = {canonicalize_name(project.name): project for project in projects if project.name}
    waiting, found.sources = found.sources, []
    known: set[str] = set()
    for source in waiting:
        project = folders.get(Path(source.location)) if source.is_path else names.get(source.name)
        if project is None:
            found.sources.append(source)
            continue
        _read_project(project, found, fits)
        known |= {f"{canonicalize_name(project.name)}[{extra}]" for extra in source.extras}
    done: set[str] = set()
    while True:
        for line in found.lines:
            if line.name in names:
                known |= {f"{line.name}[{canonicalize_name(extra)}]" for extra in line.requirement.extras}
        if not known - done:
            return
        for one in sorted(known - done):
            done.add(one)
            wanted = Requirement(one)
            project = names[wanted.name]
            if project.file.name == "pyproject.toml":
                found.lines += extra_lines(toml(project.file), wanted.extras, project=project)
