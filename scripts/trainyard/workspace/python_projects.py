"""The Python projects of a user's code: their metadata, commands and module folders, read without running anything.

What a file says statically is read as its tool documents it: ``[project]``
(https://packaging.python.org/en/latest/specifications/pyproject-toml/), the PKG-INFO of a source distribution,
setup.cfg and setup.py, and the settings of build backends.
"""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name

from trainyard.common.errors import UserError
from trainyard.spec import yaml_source
from trainyard.spec.model import relative
from trainyard.spec.repository_files import check_links, git_root
from trainyard.spec.workspace import Workspace
from trainyard.workspace import build_backends, setuptools_projects
from trainyard.workspace.dependency_tables import table, toml
from trainyard.workspace.lines import text_of, where
from trainyard.workspace.project import Project, checked

#: Fields of ``[project]`` that are needed at run time -> what follows where one is dynamic and nothing tells it. The
#: others may be dynamic without a consequence.
_NEEDED = {
    "version": "importlib.metadata finds no '{name}' in the image",
    "dependencies": "they are not installed unless 'requirements' of trainyard.yaml lists them",
    "optional-dependencies": "extras have no packages",
    "scripts": "the image has none of them",
    "gui-scripts": "the image has none of them",
    "entry-points": "the image has none of them",
}


#: Keywords of ``setup()`` with extensions, of setuptools, setuptools-rust and cffi; build backends that compile.
_EXTENSIONS = ("ext_modules", "rust_extensions", "cffi_modules")
_COMPILING = ("maturin", "scikit_build_core", "mesonpy")


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
        project = None if folder in found else read(folder)
        if project:
            found[folder] = project
            waiting += _members_needed(project, git_root(workspace.root))
    return list(found.values())


def extensions(folders: Iterable[Path], installed: Container[str] = ()) -> Iterator[str]:
    """Yield a line for each project that compiles C++, CUDA or Rust and is not ``installed`` (canonical names)."""
    for folder in folders:
        project, keywords = read(folder), setuptools_projects.keywords_of(folder / "setup.py")
        backend = str(table(_toml(folder), "build-system").get("build-backend", ""))
        file, word = folder / "setup.py", next(filter(keywords.get, _EXTENSIONS), "")
        if backend.partition(".")[0] in _COMPILING:
            file, word = folder / "pyproject.toml", backend
        if word and not (project and canonicalize_name(project.name) in installed):
            yield (
                f"{where(file, word)}: {word}: extensions of the repository are not compiled for the image: publish "
                "its source distribution on an index, and name that in 'build'"
            )


def folders_of(workspace: Workspace) -> list[Path]:
    """Return trainyard.yaml's folder and those of ``code``."""
    folders = [workspace.root, *((workspace.root / path).resolve() for path in workspace.document.code)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def member_folders(workspace: Workspace) -> list[Path]:
    """Return folders of projects that ``code`` does not name and the code needs: members of its uv workspace."""
    named = folders_of(workspace)
    return [project.folder for project in projects(workspace) if project.folder not in named]


def import_roots(workspace: Workspace) -> list[Path]:
    """Return the folders that the code imports from, besides trainyard.yaml's own, which is always one."""
    known = {project.folder: project for project in projects(workspace)}
    roots = [root for project in known.values() if project.installed for root in project.import_roots]
    for folder in folders_of(workspace):
        if folder not in known:
            roots += build_backends.module_folders(folder, _toml(folder))
    return [root for root in dict.fromkeys(roots) if root != workspace.root]


def read(folder: Path) -> Project | None:
    """Return the project in ``folder``; None if no file there names one.

    Raises:
        UserError: its file has a mistake; the message names the line.
    """
    check_links(folder)
    file, document = folder / "pyproject.toml", _toml(folder)
    poetry = table(document, "tool", "poetry")
    told: tuple[str, ...] = ()
    if "project" in document:
        project = _of_project_table(file, document)
    elif poetry.get("name"):
        project = _of_poetry(file, poetry)
    elif (folder / "setup.cfg").is_file() or (folder / "setup.py").is_file():
        project, told = _of_setuptools(folder)
    else:
        return None
    if not project.name:
        return None
    roots = build_backends.module_folders(folder, document, told)
    return checked(dataclasses.replace(project, import_roots=tuple(roots)))


def _toml(folder: Path) -> dict[str, Any]:
    """Return the pyproject.toml of a folder; empty if it has none."""
    path = folder / "pyproject.toml"
    return toml(path).data if os.path.lexists(path) else {}


def _of_project_table(file: Path, document: Mapping[str, Any]) -> Project:
    own = document["project"]
    name = own.get("name")
    if not isinstance(name, str):
        raise UserError(f"{where(file, '[project]')}: [project] has no name")
    try:
        canonicalize_name(name, validate=True)
    except InvalidName:
        raise UserError(f"{where(file, name)}: '{name}' is not a name of a project (PEP 508)") from None
    published = _published(file.parent, name)
    version, dependencies = own.get("version"), own.get("dependencies", ())
    extras = own.get("optional-dependencies", {})
    groups = {"console_scripts": own.get("scripts", {}), "gui_scripts": own.get("gui-scripts", {})}
    groups |= own.get("entry-points", {})
    dynamic = [key for key in _NEEDED if key in own.get("dynamic", [])]
    if "version" in dynamic:
        version = published.version or build_backends.version(file.parent, name, document)
    if "dependencies" in dynamic:
        known = published.dependencies if published.version else None
        dependencies = build_backends.dependencies(file.parent, document) if known is None else known
    if "optional-dependencies" in dynamic:
        extras = published.optional_dependencies
    if {"scripts", "gui-scripts", "entry-points"} & set(dynamic):
        groups = {**published.entry_points, **{group: names for group, names in groups.items() if names}}
    told = {
        "version": version is not None,
        "dependencies": dependencies is not None,
        "optional-dependencies": published.version is not None,
    }
    unknown = {
        key: f"{where(file, 'dynamic')}: {key} is dynamic and known to the build backend alone: "
        f"{_NEEDED[key].format(name=name)}; write it under [project]"
        for key in dynamic
        if not told.get(key, bool(published.entry_points))
    }
    return Project(
        file,
        name,
        version,
        own.get("requires-python", ""),
        dependencies or (),
        extras,
        groups,
        installed=table(document, "tool", "uv").get("package") is not False,
        unknown=unknown,
    )


def _of_poetry(file: Path, own: Mapping[str, Any]) -> Project:
    """Return a project of the tables before Poetry 2, which wrote no ``[project]``.

    https://python-poetry.org/docs/pyproject/
    """
    published = _published(file.parent, str(own["name"]))
    unknown = {}
    if own.get("dependencies", {}).keys() - {"python"} and not published.version:
        unknown["dependencies"] = (
            f"{where(file, '[tool.poetry.dependencies]')}: dependencies in Poetry's own format are not read: "
            "write them under [project], or list them in 'requirements' of trainyard.yaml"
        )
    scripts = {key: value for key, value in own.get("scripts", {}).items() if isinstance(value, str)}
    return dataclasses.replace(
        published,
        file=file,
        name=str(own["name"]),
        version=own.get("version") or published.version,
        entry_points={"console_scripts": scripts, **own.get("plugins", {})},
        unknown=unknown,
    )


def _of_setuptools(folder: Path) -> tuple[Project, tuple[str, ...]]:
    """Return a project of setup.cfg or setup.py, and the folders of its modules that they tell.

    What setup.py computes is known in a source distribution.
    """
    own, told, computed = setuptools_projects.read(folder)
    published = _published(folder)
    name, version, unknown = own.name or published.name, own.version or "", {}
    if version.startswith(("attr:", "file:")):
        kind, _, value = version.partition(":")
        version = build_backends.from_setuptools(folder, {kind: value.strip()}) or ""
    version = version or published.version or ""
    if not version:
        unknown["version"] = (
            f"{where(own.file, 'version')}: the version is computed: importlib.metadata finds no '{name}' in the "
            "image; write it under [project] of pyproject.toml"
        )
    if "install_requires" in computed and not published.version:
        unknown["dependencies"] = (
            f"{where(folder / 'setup.py', 'install_requires')}: the dependencies are computed, which is not read: list "
            "them in 'requirements' of trainyard.yaml"
        )
    project = dataclasses.replace(
        own,
        name=name,
        version=version or None,
        dependencies=own.dependencies or published.dependencies,
        optional_dependencies=own.optional_dependencies or published.optional_dependencies,
        entry_points=own.entry_points or published.entry_points,
        unknown=unknown,
    )
    return project, told


def _published(folder: Path, name: str = "") -> Project:
    """Return what the PKG-INFO at the top of an unpacked source distribution says; an empty project without one.

    Its backend has written it: https://packaging.python.org/en/latest/specifications/source-distribution-format/
    """
    path = folder / "PKG-INFO"
    if not path.is_file():
        return Project(path)
    # Few projects need it, and it takes 20 ms to import.
    from packaging.metadata import parse_email

    raw, _ = parse_email(yaml_source.content(path))
    found = raw.get("name", "")
    if not found or (name and canonicalize_name(found) != canonicalize_name(name)):
        return Project(path)
    dependencies: list[str] = []
    extras: dict[str, list[str]] = {extra: [] for extra in raw.get("provides_extra", [])}
    for line in raw.get("requires_dist", []):
        extra = re.search(r"""\bextra\s*==\s*["']([^"']+)["']""", line)
        (extras.setdefault(extra[1], []) if extra else dependencies).append(line)
    groups = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    groups.optionxform = str  # type: ignore[assignment,method-assign]
    for file in sorted([*folder.glob("*.egg-info/entry_points.txt"), *folder.glob("src/*.egg-info/entry_points.txt")]):
        groups.read_string(text_of(file))
    return Project(
        path,
        found,
        raw.get("version"),
        dependencies=tuple(dependencies),
        optional_dependencies={extra: tuple(lines) for extra, lines in extras.items()},
        entry_points={group: dict(groups[group]) for group in groups.sections()},
    )


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
