"""Find where the requirements of a repository come from: ``requirements`` of trainyard.yaml, for ``init``."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.spec import markers, yaml_source
from trainyard.spec.model import Spec
from trainyard.spec.repository_files import inside
from trainyard.workspace import dependency_tables, import_names, python_projects, requirements_txt
from trainyard.workspace.lines import Found, where
from trainyard.workspace.project import Project
from trainyard.workspace.python_survey import Source, Sources

#: Requirements files, the preferred first.
_FILES = ("requirements.txt", "requirements/train.txt", "requirements/base.txt", "requirements/main.txt",
          "requirements/requirements.txt", "requirements-train.txt", "requirements_train.txt")  # fmt: skip

#: Conda's name of a package -> that of the package index.
_CONDA_NAMES = {"opencv": "opencv-python-headless", "py-opencv": "opencv-python-headless", "pytorch": "torch"}

#: Modules that the standard library or every image has.
_BUILT_IN = frozenset(sys.stdlib_module_names) | {"pkg_resources", "setuptools", "__main__"}

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
        extras: of the file's project.
        unknown: modules that no known distribution provides -> where they are imported.
        notes: what the user has to know.
        conda: canonical name -> requirement and place of conda's packages, which are taken if the code imports them.
        python: the versions of Python that conda is asked for, and where; empty if it is not.
        untold: only a build backend, which ``init`` does not run, tells more of them.
    """

    file: str = ""
    packages: list[str] = field(default_factory=list)
    why: str = ""
    lines: list[tuple[str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    conda: dict[str, tuple[str, str]] = field(default_factory=dict)
    python: tuple[str, str] = ("", "")
    untold: bool = False

    def __post_init__(self) -> None:
        self.lines = [line for line in self.lines if _is_requirement(line[0])]
        self.names |= {canonicalize_name(Requirement(text).name): place for text, place in self.lines}


def _is_requirement(text: str) -> bool:
    try:
        markers.requirement(text)
    except InvalidRequirement:
        return False
    return True


def written(root: Path, names: Sequence[str], project: Project | None) -> Choice:
    """Return the requirements that a repository has written down, without a look at its code.

    Raises:
        UserError: a file has a mistake.
    """
    listed = [(text, where(project.file, text)) for text in project.dependencies] if project else []
    pyproject = project is not None and project.file.name == "pyproject.toml"
    document = dependency_tables.toml(root / "pyproject.toml") if "pyproject.toml" in names else None
    table = dependency_tables.table(document.data, "project") if document else {}
    if listed and table and "dependencies" not in table.get("dynamic", []):
        if "uv.lock" in names:
            return Choice("uv.lock", why="the project is locked with uv", lines=listed)
        return Choice("pyproject.toml", why="[project] lists dependencies", lines=listed)
    if name := next((name for name in _FILES if name in names), None):
        found = Found()
        requirements_txt.read(inside(root / name, root, name), found, above=(root / "trainyard.yaml",))
        return Choice(name, why="it lists requirements", lines=[(line.text, line.where) for line in found.lines])
    environment = next((name for name in names if re.fullmatch(r"(environment|conda|env)\.ya?ml", name)), None)
    if environment and (choice_of_conda := conda(root / environment)):
        return choice_of_conda
    if project and "dependencies" in project.pending:
        file = project.file.name if pyproject else ""
        why = f"the build backend of {project.file.name} tells them"
        return Choice(file, why=why, notes=[python_projects.unasked(project)], untold=True)
    return Choice(why="[project] lists no dependencies" if pyproject else "")


def conda(path: Path) -> Choice | None:
    """Return the packages of a conda environment; None if it lists none.

    https://docs.conda.io/projects/conda/en/latest/user-guide/tasks/manage-environments.html#create-env-file-manually
    """
    data = yaml_source.read(path)
    entries = yaml_source.plain(data).get("dependencies")
    entries = entries if isinstance(entries, list) else []
    pip: list[Any] = next(
        (item["pip"] for item in entries if isinstance(item, dict) and isinstance(item.get("pip"), list)), []
    )
    packages = [text for text in map(str, pip) if _is_requirement(text)]  # not -r other.txt, nor -e .
    choice = Choice("", packages, f"{path.name} lists them", [(text, path.name) for text in packages])
    for position, item in enumerate(entries):
        if not isinstance(item, str) or not (name := re.match(r"(?:\S+::)?([\w.-]+)", item)) or name[1] == "pip":
            continue
        place = f"{path.name}:{yaml_source.line_of(data, ('dependencies', position))}"
        text = _of_conda(name[1].lower(), item[name.end() :])
        if name[1] == "python":
            versions = re.sub(r"(\d+\.\d+)(\.\d+)+", r"\1", text.removeprefix("python"))
            choice.python = versions, f"{place} asks for {item}"
        elif _is_requirement(text):  # not _libgcc_mutex
            choice.conda[canonicalize_name(Requirement(text).name)] = text, place
    choice.names |= {name: place for name, (_, place) in choice.conda.items()}
    return choice if pip or choice.conda else None


def _of_conda(name: str, versions: str) -> str:
    """Return a conda package as a PEP 508 requirement: ``=2.4`` and `` 2.4`` are every 2.4
    (https://docs.conda.io/projects/conda-build/en/stable/resources/package-spec.html#package-match-specifications).
    """
    name = _CONDA_NAMES.get(name, name)
    versions = versions.strip()
    if every := re.match(r"(?:=(?!=))?\s*(\d[\w.]*)", versions):
        versions = f"=={every[1].rstrip('.')}.*"
    return f"{name}{versions}" if _is_requirement(f"{name}{versions}") else name


def complete(choice: Choice, closure: Iterable[Source], sources: Sources, spec: Spec, project: Project | None) -> None:
    """Add to ``choice`` what the command always imports and neither the target nor the requirements have.

    Args:
        project: of the repository; its extras are taken where they list what is missing.
    """
    if choice.untold:
        return
    own = {canonicalize_name(project.name)} if project else set()
    framework, others = spec.provided
    known = ({*choice.names, *_OTHER_FRAMEWORKS} - choice.conda.keys()) | {*own, *framework, *others}
    modules = missing(closure, sources, known, choice.names.keys() - choice.conda.keys())
    choice.unknown = {module: place for module, place in modules.items() if not import_names.providers(module)}
    found = {import_names.providers(module)[0]: module for module in modules if module not in choice.unknown}
    _take_from_conda(choice, found, framework, others)
    extras = project.optional_dependencies if project and choice.file in ("pyproject.toml", "uv.lock") else {}
    for extra, lines in extras.items():
        names = {canonicalize_name(Requirement(line).name) for line in lines}
        left = {name: module for name, module in found.items() if not import_names.is_provided(module, names, ())}
        if left != found and len(lines) <= 20:
            choice.extras.append(extra)
            found = left
    for name, module in found.items():
        if choice.file:
            said = f"imports {module}, for which {choice.file} lists no package: {name} is added"
            choice.notes.append(f"{modules[module]} {said}")
        choice.packages.append(name)
    if found and not choice.why:
        choice.why = "the code imports them"


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
