"""Find where the requirements of a repository come from: ``requirements`` of trainyard.yaml, for ``init``."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.spec import markers, workspace, yaml_source
from trainyard.spec.model import Spec
from trainyard.spec.repository_files import inside
from trainyard.workspace import copied_lists, dependency_tables, import_names, python_projects, requirements_txt
from trainyard.workspace.lines import Found, is_script, text_of
from trainyard.workspace.project import Project
from trainyard.workspace.python_survey import Source, Sources

#: Requirements files, the preferred first.
_FILES = ("requirements.txt", "requirements/train.txt", "requirements/base.txt", "requirements/main.txt",
          "requirements/requirements.txt", "requirements-train.txt", "requirements_train.txt", "requirements.in",
          "requirements/train.in", "requirements/base.in")  # fmt: skip

#: What installs the repository itself, whose modules are in the image in any case.
_OF_ITSELF = re.compile(r"(-e|--editable)?[ =]*\.(\[.*\])?")

#: Conda's name of a package -> that of the package index.
_CONDA_NAMES = {"opencv": "opencv-python-headless", "py-opencv": "opencv-python-headless", "pytorch": "torch"}

#: Modules that the standard library or every image has.
_BUILT_IN = frozenset(sys.stdlib_module_names) | {"pkg_resources", "setuptools", "__main__"}

#: A Python that markers of a lock are evaluated for while no base is chosen.
_ANY_PYTHON = "3.11"

#: Frameworks of targets are not added to other targets, which would hold both of them: ``init`` names another target.
_OTHER_FRAMEWORKS = frozenset({"jax", "torch", "torchvision", "torchaudio", "torch-xla", "torch-tpu", "tensorflow"})


@dataclass
class Choice:
    """What ``requirements`` is to be.

    Attributes:
        file: relative to the repository; empty if ``packages`` lists everything.
        packages: requirements in addition to the file's.
        why: where they come from.
        lines: what is written down, as PEP 508 has it, and the place of each.
        names: canonical name -> place, of all that are known.
        extras, groups: of the file's project.
        unknown: modules that no known distribution provides -> where they are imported.
        notes: what the user has to know.
        conda: canonical name -> requirement and place of conda's packages, which are taken if the code imports them.
        python: the versions of Python that conda is asked for, and where; empty if it is not.
        untold: only a build backend, which ``init`` does not run, tells more of them.
        project: of the file, if it is not that of the top.
    """

    file: str = ""
    packages: list[str] = field(default_factory=list)
    why: str = ""
    lines: list[tuple[str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    conda: dict[str, tuple[str, str]] = field(default_factory=dict)
    python: tuple[str, str] = ("", "")
    untold: bool = False
    project: Project | None = None

    @property
    def installed(self) -> set[str]:
        """Return the canonical names of what an image installs: conda's packages only where they are taken."""
        return (self.names.keys() - self.conda.keys()) | {
            canonicalize_name(Requirement(one).name) for one in self.packages
        }

    def __post_init__(self) -> None:
        self.lines = [line for line in self.lines if _is_requirement(line[0])]
        self.names |= {canonicalize_name(Requirement(text).name): place for text, place in self.lines}


def _is_requirement(text: str) -> bool:
    try:
        markers.requirement(text)
    except InvalidRequirement:
        return False
    return True


def written(root: Path, names: Sequence[str], project: Project | None, script: str = "") -> Choice:
    """Return the requirements that a repository has written down, without a look at its code.

    Args:
        script: the file that is run; empty if it is not known.
    Raises:
        UserError: a file has a mistake.
    """
    listed = (
        [(line.text, line.where) for line in dependency_tables.told_lines(project, "dependencies")] if project else []
    )
    pyproject = project is not None and project.file.name == "pyproject.toml"
    document = dependency_tables.toml(root / "pyproject.toml") if "pyproject.toml" in names else None
    table = dependency_tables.table(document.data, "project") if document else {}
    poetry = bool(document and not table and dependency_tables.table(document.data, "tool", "poetry"))
    if listed and (poetry or (table and "dependencies" not in table.get("dynamic", []))):
        if "uv.lock" in names:
            return Choice("uv.lock", why="the project is locked with uv", lines=listed)
        if "pylock.toml" in names:
            return _of_pylock(root)
        why = f"[{'tool.poetry.dependencies' if poetry else 'project'}] lists dependencies"
        return Choice("pyproject.toml", why=why, lines=listed)
    found = Found()
    of_notebook = script.startswith(f"{workspace.GENERATED}/")
    cells, notes = copied_lists.of_cells(root / script) if of_notebook else ([], [])
    cells = [cell for cell in cells if _is_requirement(cell[0])]
    if script and dependency_tables.has_header(root / script):
        dependency_tables.read_script(root / script, found, fits=lambda _: True)
        choice = _of_file(script, "its header lists requirements", found)
        choice.packages, choice.notes = [text for text, _ in cells], notes
        return choice
    if cells:
        return Choice("", [text for text, _ in cells], "its cells install them", cells, notes=notes)
    if name := next((name for name in _FILES if name in names), None):
        return _of_requirements(root, name, "it lists requirements")
    if "pylock.toml" in names:
        return _of_pylock(root)
    environments = [name for name in names if re.fullmatch(r"(environment|conda|env)(\.devenv)?\.ya?ml", name)]
    environment = min(environments, key=len, default=None)
    if environment and (choice_of_conda := conda(root / environment)):
        return choice_of_conda
    if project and "dependencies" in project.pending:
        why = f"the build backend of {project.file.name} tells them"
        return Choice(project.file.name, why=why, notes=[python_projects.unasked(project)], untold=True)
    if (near := beside(root, script, names)) and near[1].file:
        return near[1]
    copied, lines = copied_lists.read(root, names)
    conda_packages = list(copied_lists.of_pixi(root / "pixi.toml")) if "pixi.toml" in names else []
    if lines or conda_packages:
        lines = [line for line in lines if _is_requirement(line[0])]
        choice = Choice("", [text for text, _ in lines], f"{copied} lists them" if copied else "", lines)
        for name, versions, place in conda_packages:
            _add_conda(choice, name, versions, place)
        return choice
    return Choice(why="[project] lists no dependencies" if pyproject else "")


def beside(root: Path, script: str, names: Sequence[str]) -> tuple[str, Choice] | None:
    """Return the nearest folder above a program, below the top, that lists requirements, and what it lists; else None.

    Raises:
        UserError: a file of such a folder has a mistake.
    """
    for folder in (str(one) for one in PurePosixPath(script).parents if one.name):
        project = python_projects.read(root / folder)
        inner = [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]
        choice = written(root / folder, inner, project)
        if choice.file or choice.lines or choice.conda or choice.untold:
            choice.project = project
            if choice.file:
                choice.file, choice.why = f"{folder}/{choice.file}", f"{choice.why}, beside the program"
            if project and project.requires_python and not choice.python[0]:
                text = project.requires_python
                choice.python = text, f"{folder}/{project.file.name} requires Python {text}"
            return folder, choice
    return None


def _of_requirements(root: Path, name: str, why: str) -> Choice:
    found = Found()
    requirements_txt.read(inside(root / name, root, name), found, above=(root / "trainyard.yaml",))
    return _of_file(name, why, found)


def _of_pylock(root: Path) -> Choice:
    found = Found()
    dependency_tables.read_pylock(root / "pylock.toml", found, markers.environment(_ANY_PYTHON))
    return _of_file("pylock.toml", "it locks the requirements", found)


def _of_file(name: str, why: str, found: Found) -> Choice:
    lines = [(line.text, line.where) for line in found.lines]
    named = {one.name: one.line.where for one in found.sources if one.name}
    choice = Choice(name, why=why, lines=lines)
    choice.names |= named
    if found.requires_python:
        line = found.requires_python[0]
        choice.python = line.text, f"{line.where} requires Python {line.text}"
    return choice


def conda(path: Path) -> Choice | None:
    """Return the packages of a conda environment; None if it lists none.

    https://docs.conda.io/projects/conda/en/latest/user-guide/tasks/manage-environments.html#create-env-file-manually
    """
    if "@EXPLICIT" in text_of(path).splitlines():  # no YAML: https://docs.conda.io/projects/conda/en/latest/user-guide/
        return None  # tasks/manage-environments.html#identical-conda-envs
    data = yaml_source.read(path)
    entries = yaml_source.plain(data).get("dependencies")
    entries = entries if isinstance(entries, list) else []
    pip: list[Any] = next(
        (item["pip"] for item in entries if isinstance(item, dict) and isinstance(item.get("pip"), list)), []
    )
    packages = [text for text in map(str, pip) if _is_requirement(text)]
    choice = Choice("", packages, f"{path.name} lists them", [(text, path.name) for text in packages])
    if left := [text for text in map(str, pip) if not _is_requirement(text) and not _OF_ITSELF.fullmatch(text)]:
        choice.notes.append(
            f"{path.name}: lists {', '.join(map(repr, left))} for pip, which is not read: list what it installs in "
            "requirements.txt, an address as 'NAME @ ADDRESS'"
        )
    for position, item in enumerate(entries):
        if isinstance(item, str) and (name := re.match(r"(?:\S+::)?([\w.-]+)", item)):
            place = f"{path.name}:{yaml_source.line_of(data, ('dependencies', position))}"
            _add_conda(choice, name[1], item[name.end() :], place)
    return choice if pip or choice.conda else None


def _add_conda(choice: Choice, name: str, versions: str, place: str) -> None:
    """Add a package of conda's, or its Python, to a choice."""
    shown, text = f"{name}{versions}", _of_conda(name.lower(), versions)
    if name == "python":
        versions = re.sub(r"(\d+\.\d+)(\.\d+)+", r"\1", text.removeprefix("python"))
        choice.python = versions, f"{place} asks for {shown}"
    elif name != "pip" and _is_requirement(text):  # not _libgcc_mutex
        choice.conda[canonicalize_name(Requirement(text).name)] = text, place
        choice.names[canonicalize_name(Requirement(text).name)] = place


def _of_conda(name: str, versions: str) -> str:
    """Return a conda package as a PEP 508 requirement: ``=2.4`` and `` 2.4`` are every 2.4
    (https://docs.conda.io/projects/conda-build/en/stable/resources/package-spec.html#package-match-specifications).
    """
    name = _CONDA_NAMES.get(name, name)
    versions = versions.strip()
    if every := re.match(r"(?:=(?!=))?\s*(\d[\w.]*)", versions):
        versions = f"=={every[1].rstrip('.')}.*"
    return f"{name}{versions}" if _is_requirement(f"{name}{versions}") else name


def others(root: Path, names: Sequence[str], choice: Choice, project: Project | None) -> dict[str, Choice]:
    """Return name -> what it lists, of the files of a repository that ``choice`` does not take."""
    found: dict[str, Choice] = {}
    taken = {choice.file.replace("uv.lock", "pyproject.toml")}
    taken |= {place.partition(":")[0] for place in choice.names.values()}
    for name in (name for name in names if name not in taken):
        with contextlib.suppress(UserError):  # about a file that is not taken
            other = written(root, [name], project if project and project.file == root / name else None)
            if other.lines or other.conda:
                found[name] = other
    return found


def is_complete(file: str | None) -> bool:
    """Return whether a file lists everything: uv and pip install nothing else for a script or a pylock.toml."""
    return is_script(file or "") or (file or "").endswith("pylock.toml")


def complete(
    choice: Choice,
    closure: Iterable[Source],
    sources: Sources,
    spec: Spec,
    project: Project | None,
    groups: Mapping[str, list[str]],
    others: Iterable[Choice],
) -> None:
    """Add to ``choice`` what the command always imports and neither the target nor the requirements have.

    Args:
        project: of the repository; its extras, and the groups of its file, are taken where they list what is missing.
        others: the lists that are not taken.
    """
    if is_complete(choice.file):
        return
    project = choice.project or project
    own = _told(choice, project) if project else set()
    framework, rest = spec.provided
    known = ({*choice.names, *_OTHER_FRAMEWORKS} - choice.conda.keys()) | {*own, *framework, *rest}
    modules = missing(closure, sources, known, choice.names.keys() - choice.conda.keys())
    packages = {
        module: import_names.proposed(module, choice.conda) or _same(module, choice.conda) for module in modules
    }
    choice.unknown = {module: place for module, place in modules.items() if not packages[module]}
    found = {package: module for module, package in packages.items() if package}
    _take_from_conda(choice, found, framework, rest)
    of_project = PurePosixPath(choice.file).name in ("pyproject.toml", "uv.lock") or not (
        choice.file or choice.packages or choice.conda
    )
    extras = project.optional_dependencies if project and project.file.name == "pyproject.toml" else {}
    for taken, listed in (
        (choice.extras, extras if of_project else {}),
        (choice.groups, groups if of_project else {}),
    ):
        for key, lines in listed.items():
            names = {canonicalize_name(Requirement(line).name) for line in lines if _is_requirement(line)}
            left = {name: module for name, module in found.items() if not import_names.is_provided(module, names, ())}
            own_names = [module for module in choice.unknown if canonicalize_name(module) in names]
            if (left != found or own_names) and len(lines) <= 20:
                taken.append(key)
                found = left
                for module in own_names:
                    del choice.unknown[module]
    if choice.file.endswith("uv.lock") and project:  # what the requirements need is locked, too
        packages_of_lock = dependency_tables.toml(project.folder / "uv.lock").data.get("package", [])
        locked = {canonicalize_name(str(one.get("name"))) for one in packages_of_lock}
        found = {name: module for name, module in found.items() if name not in locked}
    listed_elsewhere: dict[str, tuple[str, str]] = {}
    for text, place in (one for other in others for one in (*other.lines, *other.conda.values())):
        listed_elsewhere.setdefault(canonicalize_name(Requirement(text).name), (text, place))
    for module in [one for one in choice.unknown if canonicalize_name(one) in listed_elsewhere]:
        found[canonicalize_name(module)] = module
        del choice.unknown[module]
    if (choice.extras or choice.groups) and not choice.file:
        choice.file, choice.why = "pyproject.toml", "it lists what the code imports"
    for name, module in found.items():
        text, place = listed_elsewhere.get(name, (name, ""))
        if choice.file or place:
            said = f", as {place} lists it" if place else ""
            lacking = f"imports {module}, for which {choice.file or 'the requirements'} lists no package"
            choice.notes.append(f"{modules[module]} {lacking}: {text} is added{said}")
        choice.packages.append(text)
    if found and not choice.why:
        choice.why = "the code imports them"


def _told(choice: Choice, project: Project) -> set[str]:
    """Return the canonical name of a project, and all that its files name if only its build backend tells more."""
    files = ("setup.py", "setup.cfg", "pyproject.toml") if choice.untold else ()
    texts = (text_of(project.folder / name) for name in files)
    words = {canonicalize_name(word) for text in texts for word in re.findall(r"[\w.-]+", text)}
    return {canonicalize_name(project.name), *words}


def _same(module: str, names: Container[str]) -> str:
    name = canonicalize_name(module)
    return name if name in names else ""


def _take_from_conda(
    choice: Choice, found: dict[str, str], framework: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Add those of conda's packages that are missing, and say what becomes of the others.

    Args:
        found: the packages that are missing -> the module; those of conda are removed.
        framework: canonical name -> version of the target's framework, ``others``: of all else that it has.
    """
    left = []
    for name, (text, place) in choice.conda.items():
        version = {**framework, **others}.get(name)
        if version is None and found.pop(name, ""):
            choice.packages.append(text)
        elif version is None:
            left.append(name)
        elif not Requirement(text).specifier.contains(version, prereleases=True):
            key = "framework" if name in framework else "requirements"
            choice.notes.append(
                f"{place} lists {text}: the image has {version}, unless '{key}: [\"{text}\"]' asks for it"
            )
    if left:
        file = choice.conda[left[0]][1].partition(":")[0]
        choice.notes.append(
            f"{file}: conda packages are not installed if the code is not known to import them: {', '.join(left)}"
        )


def removed(closure: Iterable[Source], sources: Sources) -> dict[str, tuple[str, str]]:
    """Return module -> place and Python, of those that files always import and that Python's library has no longer."""
    modules: dict[str, tuple[str, str]] = {}
    for source in closure:
        for statement in source.imports:
            version = import_names.removed(statement.top)
            if version and not (statement.optional or statement.conditional or sources.is_local(statement, source)):
                modules.setdefault(statement.top, (source.at(statement.line), version))
    return modules


def missing(
    closure: Iterable[Source], sources: Sources, known: Container[str], listed: Collection[str]
) -> dict[str, str]:
    """Return the modules that files always import and no package provides -> where.

    Args:
        closure: the files, of ``sources``.
        known: canonical names of packages, ``listed``: of those that the repository lists.
    """
    modules: dict[str, str] = {}
    for source in closure:
        for statement in source.imports:
            if statement.optional or statement.top in _BUILT_IN or sources.is_local(statement, source):
                continue
            if not import_names.is_provided(statement.module, known, listed):
                modules.setdefault(import_names.root(statement.module), source.at(statement.line))
    return modules
