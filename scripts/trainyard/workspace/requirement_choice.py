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
from trainyard.workspace import dependency_tables, import_names, requirements_txt, setuptools_projects
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
    file = project.file if project else root / "setup.py"
    if not project and "setup.py" in names:  # without a name that can be read
        listed = [(text, where(file, text)) for text in setuptools_projects.read(root)[0].dependencies]
    if listed:
        return Choice(packages=[text for text, _ in listed], why=f"{file.name} lists them", lines=listed)
    if document and (choice_of_poetry := _poetry(document)):
        return choice_of_poetry
    if project and "dependencies" in project.unknown:
        return Choice(notes=[project.unknown["dependencies"]])
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


def _poetry(source: dependency_tables.Toml) -> Choice | None:
    """Return what ``[tool.poetry.dependencies]`` always needs, as PEP 508 requirements; None if there is no such table.

    Poetry's own library converts them entry by entry, so that one that a requirement cannot express leaves the others:
    https://python-poetry.org/docs/dependency-specification/.
    """
    poetry = dependency_tables.table(source.data, "tool", "poetry")
    if not poetry.get("dependencies"):
        return None
    choice, optional = Choice(why="[tool.poetry.dependencies]"), []
    for name, value in poetry["dependencies"].items():
        place = f"{source.path.name}:{source.line_of(name, after='[tool.poetry.dependencies')}"
        entries = value if isinstance(value, list) else [value]
        if any(isinstance(entry, dict) and entry.get("optional") for entry in entries):
            optional.append(name)
            continue
        for entry in entries:
            try:
                text = _poetry_requirement(name, entry)
            except ValueError as error:
                if name.lower() != "python":
                    choice.notes.append(f"{place}: {name} is left out: {error}")
                continue
            if name.lower() == "python":  # it is that of the project
                continue
            choice.packages.append(text)
            choice.lines.append((text, place))
            choice.names[canonicalize_name(name)] = source.path.name
            if isinstance(entry, dict) and entry.get("source"):
                choice.notes.append(
                    f"{place}: {name} comes from the source '{entry['source']}': give its address to uv, as in "
                    "[[tool.uv.index]], or remove it"
                )
            if isinstance(entry, dict) and entry.get("allow-prereleases"):
                choice.notes.append(f"{place}: {name} allows pre-releases: name one in its range under 'requirements'")
    if optional:
        choice.notes.append(f"{source.path.name}: optional packages are left out: {', '.join(optional)}")
    groups = [*(["dev"] if poetry.get("dev-dependencies") else []), *dependency_tables.table(poetry, "group")]
    if groups:
        choice.notes.append(f"{source.path.name}: groups are left out: {', '.join(groups)}")
    return choice


def _poetry_requirement(name: str, entry: object) -> str:
    """Return an entry of ``[tool.poetry.dependencies]`` as a PEP 508 requirement.

    Raises:
        ValueError: it is none; the message says why, and what to do.
    """
    from poetry.core.factory import Factory

    local = isinstance(entry, dict) and (entry.get("path") or entry.get("file"))
    if local:
        dotted = local if str(local).startswith(("/", "./")) else f"./{local}"
        raise ValueError(
            f"it is the folder or file '{local}': list '{dotted}' in a requirements.txt, and write its name under "
            "'requirements'"
        )
    otherwise = "write it under 'requirements' as PEP 508 has it"
    if not isinstance(entry, str | dict):
        raise ValueError(f"{entry!r} is neither a version nor a table: {otherwise}")
    try:
        text = Factory.create_dependency(name, entry).to_pep_508()
    except (ValueError, TypeError, KeyError) as error:
        reason = (str(error) or f"{entry!r} is no version").splitlines()[0]
        raise ValueError(f"{reason}: {otherwise}") from None
    if "||" in text:
        version = entry if isinstance(entry, str) else entry.get("version")
        raise ValueError(f"{version!r} has alternatives, which a requirement has not: {otherwise}")
    text = re.sub(r" \(([^)]*)\)", r"\1", text, count=1)
    if not _is_requirement(text):
        raise ValueError(f"{text!r} is no requirement: {otherwise}")
    return text


def complete(choice: Choice, closure: Iterable[Source], sources: Sources, spec: Spec, project: Project | None) -> None:
    """Add to ``choice`` what the command always imports and neither the target nor the requirements have.

    Args:
        project: of the repository; its extras are taken where they list what is missing.
    """
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
