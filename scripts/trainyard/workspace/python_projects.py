"""The Python projects of a user's code: their metadata, commands and module folders, read without running anything.

What a file says statically is read as its tool documents it: ``[project]``
(https://packaging.python.org/en/latest/specifications/pyproject-toml/), the PKG-INFO of a source distribution,
setup.cfg and setup.py, and the settings of build backends.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.common.errors import UserError
from trainyard.spec.model import relative
from trainyard.spec.workspace import Workspace, git_root
from trainyard.workspace import dependency_tables, module_folders, project_versions, setuptools_projects
from trainyard.workspace.lines import without_credentials

#: Fields of ``[project]`` that are needed at run time; the others may be dynamic without a consequence.
NEEDED = ("version", "dependencies", "optional-dependencies", "scripts", "gui-scripts", "entry-points")


@dataclass(frozen=True)
class Project:
    """A folder with a pyproject.toml, setup.cfg or setup.py that names a project.

    Attributes:
        name: as its file writes it; ``version``: PEP 440, or None if it is dynamic and could not be read.
        folder: of the project; ``file``: what names it.
        requires_python: versions of Python; empty if it says nothing.
        dependencies: PEP 508 requirements, ``optional_dependencies``: those of each extra.
        entry_points: group -> name -> object; the groups ``console_scripts`` and ``gui_scripts`` are commands.
        import_roots: folders that its modules are imported from.
        installed: False with ``[tool.uv] package = false``: only its dependencies count.
        unknown: dynamic field -> the line that says so and what to do.
    """

    name: str
    version: str | None
    folder: Path
    file: Path
    requires_python: str = ""
    dependencies: tuple[str, ...] = ()
    optional_dependencies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    import_roots: tuple[Path, ...] = ()
    installed: bool = True
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def scripts(self) -> dict[str, str]:
        """Command -> its object, as ``package.module:function``."""
        found: dict[str, str] = {}
        for group in ("gui_scripts", "console_scripts"):
            found |= self.entry_points.get(group, {})
        return found


def projects(workspace: Workspace) -> list[Project]:
    """The projects of the code: those of trainyard.yaml's folder and of each folder of ``code``, and the members of
    their uv workspace that they depend on (https://docs.astral.sh/uv/concepts/projects/workspaces/).

    Raises:
        UserError: a file has a mistake; the message names the line.
    """
    found: dict[Path, Project] = {}
    folders = [workspace.root, *((workspace.root / path).resolve() for path in workspace.document.code)]
    waiting = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    while waiting:
        folder = waiting.pop(0)
        project = None if folder in found else read(folder)
        if project:
            found[folder] = project
            waiting += _members_needed(project, git_root(workspace.root))
    return list(found.values())


def member_folders(workspace: Workspace) -> list[Path]:
    """Folders of the projects that ``code`` does not name and the code needs: members of its uv workspace."""
    named = {workspace.root, *((workspace.root / path).resolve() for path in workspace.document.code)}
    return [project.folder for project in projects(workspace) if project.folder not in named]


def import_roots(workspace: Workspace) -> list[Path]:
    """The folders that the code imports from, besides trainyard.yaml's own, which is always one."""
    roots = [root for project in projects(workspace) if project.installed for root in project.import_roots]
    folders = [workspace.root, *((workspace.root / path).resolve() for path in workspace.document.code)]
    known = {project.folder for project in projects(workspace)}
    for folder in folders:
        if folder.is_dir() and folder not in known:
            roots += module_folders.of(folder, _toml(folder / "pyproject.toml"))
    return [root for root in dict.fromkeys(roots) if root != workspace.root]


def read(folder: Path) -> Project | None:
    """The project in ``folder``; None if no file there names one.

    Raises:
        UserError: its file has a mistake; the message names the line.
    """
    file = folder / "pyproject.toml"
    document = _toml(file)
    if "project" in document:
        return _from_project_table(folder, file, document)
    if name := document.get("tool", {}).get("poetry", {}).get("name"):
        return _from_poetry(folder, file, document, str(name))
    if (folder / "setup.cfg").is_file() or (folder / "setup.py").is_file():
        return _from_setuptools(folder, document)
    return None


def _toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; empty if there is none."""
    return dependency_tables.toml(path).data if os.path.lexists(path) else {}


def where(file: Path, word: str) -> str:
    """``pyproject.toml:12``: the first line of a file with ``word``, or the file alone."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if word in line:
            return f"{relative(file)}:{number}"
    return relative(file)


def _from_project_table(folder: Path, file: Path, document: dict[str, Any]) -> Project:
    table = document["project"]
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str):
        raise UserError(f"{where(file, '[project]')}: [project] has no name")
    try:
        canonicalize_name(name, validate=True)
    except InvalidName:
        raise UserError(f"{where(file, name)}: '{name}' is not a name of a project (PEP 508)") from None
    published = _package_info(folder, name)
    dynamic = [one for one in table.get("dynamic", []) if one in NEEDED]
    unknown: dict[str, str] = {}

    def missing(key: str, consequence: str) -> None:
        unknown[key] = (
            f"{where(file, 'dynamic')}: {key} is dynamic and known to the build backend alone: {consequence}; "
            f"write it under [project]"
        )

    version = _version(table.get("version"), file)
    if "version" in dynamic:
        version = published.version or project_versions.of(folder, name, document)
        if version is None:
            missing("version", f"importlib.metadata finds no '{name}' in the image")
    dependencies = _strings(table.get("dependencies", []), file, "dependencies")
    if "dependencies" in dynamic:
        found = published.dependencies if published.version else project_versions.dependencies(folder, document)
        if found is None:
            missing("dependencies", "they are not installed unless 'requirements' of trainyard.yaml lists them")
        dependencies = found or ()
    extras = {
        str(extra): _strings(lines, file, str(extra)) for extra, lines in table.get("optional-dependencies", {}).items()
    }
    if "optional-dependencies" in dynamic:
        extras = dict(published.extras)
        if not published.version:
            missing("optional-dependencies", "extras have no packages")
    groups = {"console_scripts": table.get("scripts", {}), "gui_scripts": table.get("gui-scripts", {})}
    groups |= table.get("entry-points", {})
    for key in ("scripts", "gui-scripts", "entry-points"):
        if key in dynamic and published.entry_points:
            groups = {**published.entry_points, **{group: names for group, names in groups.items() if names}}
        elif key in dynamic:
            missing(key, "the image has none of them")
    return Project(
        name=name,
        version=version,
        folder=folder,
        file=file,
        requires_python=_specifier(table.get("requires-python", ""), file),
        dependencies=_checked(dependencies, file),
        optional_dependencies={extra: _checked(lines, file) for extra, lines in extras.items()},
        entry_points=_entry_points(groups, file),
        import_roots=tuple(module_folders.of(folder, document)),
        installed=document.get("tool", {}).get("uv", {}).get("package") is not False,
        unknown=unknown,
    )


def _from_poetry(folder: Path, file: Path, document: dict[str, Any], name: str) -> Project:
    """https://python-poetry.org/docs/pyproject/: the tables before Poetry 2 wrote ``[project]``."""
    table = document["tool"]["poetry"]
    published = _package_info(folder, name)
    unknown = {}
    if table.get("dependencies", {}).keys() - {"python"} and not published.version:
        unknown["dependencies"] = (
            f"{where(file, '[tool.poetry.dependencies]')}: dependencies in Poetry's own format are not read: "
            "write them under [project], or list them in 'requirements' of trainyard.yaml"
        )
    scripts = {key: value for key, value in table.get("scripts", {}).items() if isinstance(value, str)}
    return Project(
        name=name,
        version=_version(table.get("version"), file) or published.version,
        folder=folder,
        file=file,
        dependencies=_checked(published.dependencies, file),
        optional_dependencies=published.extras,
        entry_points=_entry_points({"console_scripts": scripts, **table.get("plugins", {})}, file),
        import_roots=tuple(module_folders.of(folder, document)),
        unknown=unknown,
    )


def _from_setuptools(folder: Path, document: dict[str, Any]) -> Project | None:
    """A project of setup.cfg or setup.py; what setup.py computes is known in an unpacked source distribution."""
    declared = setuptools_projects.read(folder)
    file = declared.file
    published = _package_info(folder)
    name = declared.name or published.name
    if not name:
        return None
    version: str | None = declared.version
    if declared.version.startswith(("attr:", "file:")):
        kind, _, value = declared.version.partition(":")
        version = project_versions.from_setuptools(folder, {kind: value.strip()})
    version = version or published.version
    unknown = {}
    if not version:
        unknown["version"] = (
            f"{where(file, 'version')}: the version is computed: importlib.metadata finds no '{name}' in the image; "
            "write it under [project] of pyproject.toml"
        )
    if "install_requires" in declared.computed and not published.version:
        unknown["dependencies"] = (
            f"{where(folder / 'setup.py', 'install_requires')}: the dependencies are computed, which is not read: list "
            "them in 'requirements' of trainyard.yaml"
        )
    extras = declared.extras or published.extras
    return Project(
        name=name,
        version=_version(version, file) if version else None,
        folder=folder,
        file=file,
        requires_python=_specifier(declared.requires_python, file),
        dependencies=_checked(declared.dependencies or published.dependencies, file),
        optional_dependencies={extra: _checked(lines, file) for extra, lines in extras.items()},
        entry_points=_entry_points(declared.entry_points or published.entry_points, file),
        import_roots=tuple(module_folders.of(folder, document, declared.package_dir, declared.where)),
        unknown=unknown,
    )


def _strings(value: object, file: Path, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise UserError(f"{where(file, key)}: {key}: expected a list of requirements")
    return tuple(value)


def _checked(lines: Iterable[str], file: Path) -> tuple[str, ...]:
    for line in lines:
        try:
            Requirement(line)
        except InvalidRequirement as error:
            words = str(error).splitlines()[0]
            raise UserError(
                f"{where(file, line)}: {without_credentials(line)!r} is not a requirement ({words})"
            ) from None
    return tuple(lines)


def _version(value: object, file: Path) -> str | None:
    if value is None:
        return None
    try:
        return str(Version(str(value)))
    except InvalidVersion:
        raise UserError(f"{where(file, str(value))}: '{value}' is not a version (PEP 440)") from None


def _specifier(value: object, file: Path) -> str:
    try:
        SpecifierSet(str(value))
    except InvalidSpecifier:
        raise UserError(f"{where(file, str(value))}: '{value}' is not a range of versions (PEP 440)") from None
    return str(value).strip()


#: ``package.module:object.attribute [extra]`` (https://packaging.python.org/en/latest/specifications/entry-points/).
_OBJECT = re.compile(r"([\w.]+)\s*(:\s*[\w.]+)?\s*(\[.*\])?")

_COMMANDS = ("console_scripts", "gui_scripts")


def _entry_points(groups: Mapping[str, Any], file: Path) -> dict[str, dict[str, str]]:
    found = {}
    for group, names in groups.items():
        if not isinstance(names, dict):
            raise UserError(f"{where(file, group)}: {group}: expected names and objects, as in train = 'package:main'")
        for name, value in names.items():
            match = _OBJECT.fullmatch(value) if isinstance(value, str) else None
            if not match or (group in _COMMANDS and not match[2]):
                place = where(file, str(value))
                raise UserError(f"{place}: {name} = {value!r}: not an object, as in 'package.module:main'")
            if group in _COMMANDS and not re.fullmatch(r"[\w.-]+", name):
                raise UserError(
                    f"{where(file, name)}: {name!r} is not a name of a command: use letters, digits, . _ and -"
                )
        if names:
            found[group] = {str(name): re.sub(r"\s*\[.*\]$", "", value) for name, value in names.items()}
    return found


@dataclass(frozen=True)
class _PackageInfo:
    """What a source distribution says about itself; nothing outside of one."""

    name: str = ""
    version: str | None = None
    dependencies: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def _package_info(folder: Path, name: str = "") -> _PackageInfo:
    """The PKG-INFO at the top of an unpacked source distribution, which its backend has written.

    https://packaging.python.org/en/latest/specifications/source-distribution-format/
    """
    path = folder / "PKG-INFO"
    if not path.is_file():
        return _PackageInfo()
    # Few projects need it, and it takes 20 ms to import.
    from packaging.metadata import parse_email

    raw, _ = parse_email(path.read_bytes())
    found = raw.get("name", "")
    if not found or (name and canonicalize_name(found) != canonicalize_name(name)):
        return _PackageInfo()
    dependencies: list[str] = []
    extras: dict[str, list[str]] = {extra: [] for extra in raw.get("provides_extra", [])}
    for line in raw.get("requires_dist", []):
        extra = re.search(r"""\bextra\s*==\s*["']([^"']+)["']""", line)
        (extras.setdefault(extra[1], []) if extra else dependencies).append(line)
    groups = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    groups.optionxform = str  # type: ignore[assignment,method-assign]
    for file in sorted([*folder.glob("*.egg-info/entry_points.txt"), *folder.glob("src/*.egg-info/entry_points.txt")]):
        groups.read(file, encoding="utf-8")
    return _PackageInfo(
        found,
        _version(raw.get("version"), path),
        tuple(dependencies),
        {extra: tuple(lines) for extra, lines in extras.items()},
        {group: dict(groups[group]) for group in groups.sections()},
    )


def _members_needed(project: Project, top: Path) -> list[Path]:
    """Folders of the members of its uv workspace that a project depends on."""
    document = _toml(project.folder / "pyproject.toml")
    folders = [folder for folder in (project.folder, *project.folder.parents) if folder.is_relative_to(top)]
    root = next((folder for folder in folders if "workspace" in _uv(_toml(folder / "pyproject.toml"))), None)
    if root is None:
        return []
    settings = _toml(root / "pyproject.toml")
    sources = _uv(settings).get("sources", {}) | _uv(document).get("sources", {})
    named = {canonicalize_name(name) for name, source in sources.items() if _is_member(source)}
    wanted = {canonicalize_name(Requirement(line).name) for line in _all_requirements(project, document)} & named
    if not wanted:
        return []
    members = {}
    patterns = _uv(settings)["workspace"]
    excluded = {folder for pattern in patterns.get("exclude", []) for folder in root.glob(pattern)}
    for folder in [root, *(folder for pattern in patterns.get("members", []) for folder in sorted(root.glob(pattern)))]:
        name = _toml(folder / "pyproject.toml").get("project", {}).get("name") if folder not in excluded else None
        if isinstance(name, str):
            members[canonicalize_name(name)] = folder.resolve()
    if missing := sorted(wanted - members.keys()):
        file = project.folder / "pyproject.toml"
        raise UserError(
            f"{where(file, missing[0])}: '{missing[0]}' is not a member of the uv workspace of {relative(root)}"
        )
    return [members[name] for name in sorted(wanted)]


def _uv(document: dict[str, Any]) -> dict[str, Any]:
    found = document.get("tool", {}).get("uv", {})
    return found if isinstance(found, dict) else {}


def _is_member(source: object) -> bool:
    entries = source if isinstance(source, list) else [source]
    return any(isinstance(entry, dict) and entry.get("workspace") is True for entry in entries)


def _all_requirements(project: Project, document: dict[str, Any]) -> list[str]:
    """Requirements of a project with those of its extras and dependency groups."""
    groups = document.get("dependency-groups", {}).values()
    of_groups = [line for lines in groups for line in lines if isinstance(line, str)]
    return [
        *project.dependencies,
        *(line for lines in project.optional_dependencies.values() for line in lines),
        *of_groups,
    ]
