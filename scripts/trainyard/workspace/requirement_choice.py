"""Where the requirements of a repository come from: ``requirements`` of trainyard.yaml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging import utils
from packaging.requirements import InvalidRequirement, Requirement

from trainyard.spec import markers, yaml_source
from trainyard.spec.lock import DEFAULT, Locked
from trainyard.spec.model import Spec
from trainyard.workspace import (
    dependency_tables,
    import_names,
    poetry,
    python_projects,
    python_source,
    requirements_txt,
)
from trainyard.workspace.lines import Found
from trainyard.workspace.python_source import Source, Sources

#: Requirements files, the preferred first.
_FILES = ("requirements.txt", "requirements/train.txt", "requirements/base.txt", "requirements/main.txt",
          "requirements/requirements.txt", "requirements-train.txt", "requirements_train.txt")  # fmt: skip

#: Modules that the standard library or every image has.
_BUILT_IN = frozenset(sys.stdlib_module_names) | {"pkg_resources", "setuptools", "__main__"}

#: Frameworks of targets are not added to other targets, which would hold both of them: ``init`` names another target.
_OTHER_FRAMEWORKS = frozenset({"jax", "torch", "torchvision", "torchaudio", "torch-xla", "torch-tpu", "tensorflow"})


def _canonical(name: str) -> str:
    return utils.canonicalize_name(name)


@dataclass
class Choice:
    """What ``requirements`` is to be.

    Attributes:
        file: relative to the repository; empty if ``packages`` lists everything.
        extras: of the file's project.
        packages: requirements in addition to the file's.
        why: where they come from.
        names: canonical name -> where it is listed, of all that are known.
        unknown: modules that no known distribution provides -> where they are imported.
        notes: what the user has to know.
        requires_python: the versions of Python that they are for; empty if the project says so itself.
    """

    file: str = ""
    extras: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    why: str = ""
    names: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    requires_python: str = ""


def written(root: Path, names: Sequence[str]) -> Choice:
    """The requirements that a repository has written down, without a look at its code.

    Raises:
        UserError: the file has a mistake.
    """
    project = python_projects.read(root)
    known = project is not None and "dependencies" not in project.unknown
    if project is not None and project.file.name == "pyproject.toml" and known and project.dependencies:
        table = dependency_tables.table(dependency_tables.toml(project.file).data, "project")
        own_table = bool(table) and "dependencies" not in table.get("dynamic", [])
        listed = {_canonical(Requirement(one).name): _where(project.file, one, root) for one in project.dependencies}
        if own_table and "uv.lock" in names:
            return Choice("uv.lock", why="the project is locked with uv", names=listed)
        if own_table:
            return Choice("pyproject.toml", why="[project] lists dependencies", names=listed)
    for name in _FILES:
        if name in names:
            found = Found()
            requirements_txt.read(root / name, found)
            return Choice(name, why="it lists requirements", names={one.name: one.where for one in found.lines})
    environment = next((name for name in names if re.fullmatch(r"(environment|conda|env)\.ya?ml", name)), None)
    if environment and (pip := _conda(root / environment)) is not None:
        return pip
    if project is not None and known and project.dependencies:
        listed = {_canonical(Requirement(one).name): _where(project.file, one, root) for one in project.dependencies}
        return Choice(packages=list(project.dependencies), why=f"{project.file.name} lists them", names=listed)
    if setup := _setup(root):
        return setup
    if "pyproject.toml" in names and (of_poetry := _poetry(root / "pyproject.toml")):
        return of_poetry
    if project is not None and project.dependencies == () and known and project.file.name == "pyproject.toml":
        return Choice(why="[project] lists no dependencies")
    notes = [project.unknown["dependencies"]] if project is not None and not known else []
    return Choice(notes=notes)


def _where(file: Path, text: str, root: Path) -> str:
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if text in line:
            return f"{file.relative_to(root).as_posix()}:{number}"
    return file.relative_to(root).as_posix()


def _conda(path: Path) -> Choice | None:
    """The pip part of a conda environment
    (https://docs.conda.io/projects/conda/en/latest/user-guide/tasks/manage-environments.html#create-env-file-manually).
    """
    data = yaml_source.plain(yaml_source.read(path))
    entries = found if isinstance(found := data.get("dependencies"), list) else []
    pip = next((one["pip"] for one in entries if isinstance(one, dict) and isinstance(one.get("pip"), list)), None)
    conda = [str(one) for one in entries if isinstance(one, str) and not re.match(r"(python|pip)\b", one)]
    if pip is None and not conda:
        return None
    packages, names = [], {}
    for text in map(str, pip or []):
        if _is_requirement(text):  # not -r other.txt, nor -e .
            names[_canonical(Requirement(text).name)] = path.name
            packages.append(text)
    notes = []
    if conda:
        shown = ", ".join(re.split(r"[=<> ]", one)[0] for one in conda[:8])
        notes.append(f"{path.name}: conda packages are not installed: {shown}{', ...' if len(conda) > 8 else ''}")
    names |= {_canonical(re.split(r"[=<> ]", one.rpartition("::")[2])[0]): path.name for one in conda}
    return Choice(packages=packages, why=f"the pip part of {path.name}", names=names, notes=notes)


def _setup(root: Path) -> Choice | None:
    """The dependencies of setup.py: those that setuptools wrote for a source distribution
    (https://setuptools.pypa.io/en/latest/deprecated/python_eggs.html#requires-txt), or else a list that its text spells
    out.
    """
    file = root / "setup.py"
    written = next(iter(sorted(root.glob("*.egg-info/requires.txt"))), None)
    if written is not None:
        text = written.read_text(encoding="utf-8", errors="replace").partition("\n[")[0]
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[")]
    elif file.is_file():
        lines = python_source.literal_argument(file, "install_requires")
    else:
        return None
    packages = [line for line in lines if _is_requirement(line)]
    names = {_canonical(Requirement(one).name): _where(file, one, root) for one in packages if file.is_file()}
    return Choice(packages=packages, why="setup.py lists them", names=names) if packages else None


def _is_requirement(text: str) -> bool:
    try:
        Requirement(text)
    except InvalidRequirement:
        return False
    return True


def _poetry(path: Path) -> Choice | None:
    """The dependencies of ``[tool.poetry]``."""
    found = poetry.dependencies(path)
    if found is None:
        return None
    names = {_canonical(Requirement(one).name): path.name for one in found.requirements}
    packages, why = found.requirements, "[tool.poetry.dependencies]"
    return Choice(packages=packages, why=why, names=names, notes=found.notes, requires_python=found.python)


def complete(
    choice: Choice, closure: Iterable[Source], sources: Sources, spec: Spec, root: Path, own: set[str]
) -> None:
    """Add to ``choice`` what the command always imports and neither the target nor the requirements have.

    Args:
        own: canonical names of the projects of the repository.
    """
    has = provided(spec)
    missing: dict[str, str] = {}
    for source in closure:
        for one in source.imports:
            top = one.module.partition(".")[0]
            if one.optional or one.level or top in _BUILT_IN or sources.is_local(one, source):
                continue
            name = (
                "google-cloud-storage"
                if one.module.startswith("google.cloud.storage")
                else import_names.distribution(top)
            )
            same = _canonical(top)
            if {name, same} & (has.keys() | choice.names.keys() | own | _OTHER_FRAMEWORKS):
                continue
            if name is None:
                choice.unknown.setdefault(top, f"{source.path}:{one.line}")
            else:
                missing.setdefault(name, f"{source.path}:{one.line}")
    _from_extras(choice, missing, root)
    for name, where in missing.items():
        if choice.file:
            choice.notes.append(f"{where} imports {name}, which {choice.file} does not list: it is added")
        choice.packages.append(name)
        choice.names[name] = where
    if missing and not choice.why:
        choice.why = "the code imports them"


def _from_extras(choice: Choice, missing: dict[str, str], root: Path) -> None:
    """Take missing packages from extras of the project, where these list them."""
    project = python_projects.read(root) if choice.file in ("pyproject.toml", "uv.lock") else None
    for extra, lines in (project.optional_dependencies if project else {}).items():
        listed = {_canonical(Requirement(one).name) for one in lines}
        if listed & missing.keys() and len(listed) <= 20:
            choice.extras.append(extra)
            for name in listed & missing.keys():
                choice.names[name] = missing.pop(name)


def provided(spec: Spec) -> dict[str, str]:
    """Canonical name -> version of everything that a target has; empty if it is not locked."""
    return {pin.name: pin.version for pin in _locked(spec).requirements} | framework(spec)


def framework(spec: Spec) -> dict[str, str]:
    """Canonical name -> version of the packages of a target's framework; empty if it is not locked.

    tensorflow-cpu and tensorflow-tpu are tensorflow, too: one of them is what code imports under that name.
    """
    locked = _locked(spec)
    versions = dict(locked.base.packages) if locked.base else {pin.name: pin.version for pin in locked.framework}
    return {spec.framework.name.replace("_", "-"): spec.version, **versions} if versions else {}


def _locked(spec: Spec) -> Locked:
    """Return what a target is locked to: for its index, or else for the default index; nothing if it never was."""
    content = spec.usable_lock
    known = (content.of(spec.arch, index) for index in (spec.framework.index, DEFAULT)) if content else ()
    return next(filter(None, known), Locked({}))


def contradictions(choice: Choice, spec: Spec, root: Path) -> list[str]:
    """Lines about requirements that exclude the version of the target's framework."""
    versions = framework(spec)
    own = {_canonical(Requirement(text).name) for text in spec.packages} | {_canonical(spec.framework.name)}
    found = []
    for text, where in _lines(choice, root):
        if not _is_requirement(text):
            continue
        wanted = Requirement(text)
        name = _canonical(wanted.name)
        applies = not wanted.marker or wanted.marker.evaluate(markers.environment(spec.base_spec().python))
        if (
            applies
            and name in own & versions.keys()
            and not wanted.specifier.contains(versions[name], prereleases=True)
        ):
            found.append(f"{where}: {text} excludes {name} {versions[name]}, which {spec.target} contains: relax it")
    return found


def _lines(choice: Choice, root: Path) -> list[tuple[str, str]]:
    """The requirements that a choice means, and where they are written."""
    if choice.file.endswith(".txt"):
        found = Found()
        requirements_txt.read(root / choice.file, found)
        return [(one.text, one.where) for one in found.lines]
    if choice.file:
        project = python_projects.read(root)
        return [(one, _where(project.file, one, root)) for one in project.dependencies] if project else []
    return [(one, "requirements") for one in choice.packages]
