"""Find out which framework a repository uses, for ``init``: from its imports, its requirements and frameworks.yaml.

Packages that need one framework say as much about it as its own. Those that go with several are asked last, and one
that leaves the framework open is no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.spec import yaml_source
from trainyard.workspace import import_names
from trainyard.workspace.framework_table import Name, Several, table
from trainyard.workspace.python_survey import Import, Source, Sources
from trainyard.workspace.requirement_choice import Choice

#: Files that set variables of a program, beside its code, and where Keras's settings may be:
#: https://keras.io/getting_started/#configuring-your-backend
_SETTINGS = re.compile(r"(.*/)?(Dockerfile[^/]*|Makefile|\.env|[^/]+\.(sh|ya?ml|env|dockerfile|toml))")
_KERAS_JSON = ("keras.json", ".keras/keras.json")
_BACKEND = re.compile(r"KERAS_BACKEND\W{1,8}(tensorflow|torch|jax)\b|\bset_backend\(\W(tensorflow|torch|jax)\b")


@dataclass(frozen=True)
class Backend:
    """Say which backend a repository sets for Keras, and ``place``: where; ``by_code``: a program that is run does."""

    name: Name
    place: str
    by_code: bool

    @property
    def why(self) -> str:
        """Return what shows the framework, as ``train.py:2 sets Keras's backend jax``."""
        return f"{self.place} sets Keras's backend {self.name}"


@dataclass
class Survey:
    """Find the framework of a repository.

    Attributes:
        root: its folder, ``names``: its files, ``sources``: those in Python.
        closure: the files that the command consists of; empty if there is no command.
        wanted: the requirements that are written down.
    """

    root: Path
    names: Sequence[str]
    sources: Sources
    closure: Sequence[Source]
    wanted: Choice

    def frameworks(self) -> dict[Name, str]:
        """Return the frameworks that it uses -> what shows it; the likeliest comes first.

        One that is imported only where it is there counts only if there is no other.
        """
        needed, everything = self._needed(self.closure), self.sources.run
        if self.uses_keras and (backend := self.backend):
            return {backend.name: backend.why} | {name: why for name, why in needed.items() if name != backend.name}
        return (
            needed
            or self._settled(self.closure)
            or self._needed(everything)
            or self._listed()
            or self._settled(everything)
            or self._settled_list()
        )

    def undecided(self) -> str:
        """Return what shows a package that goes with several frameworks; empty if there is none."""
        several = table().several
        for package, statement, source in self._imports(self.closure or self.sources.run):
            if package in several:
                return f"{source.at(statement.line)} imports {package}"
        return next((f"{place} lists {name}" for name, place in self.wanted.names.items() if name in several), "")

    def deciding(self, name: Name) -> tuple[str, str]:
        """Return the target that a package, or an extra of one, decides, and what shows it; both empty if none does."""
        sources = self.closure or self.sources.run
        extras = {
            f"{canonicalize_name(found.name)}[{extra}]": place
            for text, place in self.wanted.lines
            for found in (Requirement(text),)
            for extra in found.extras
        }
        imports = {
            package: f"{source.at(statement.line)} imports {statement.top}"
            for package, statement, source in reversed(self._imports(sources))
            if not statement.optional
        }
        for package, target in table().frameworks[name].deciding.items():
            if package in imports:
                return target, imports[package]
            if place := (self.wanted.names | extras).get(package):
                return target, f"{place} lists {package}"
        return "", ""

    def other_than(self, name: Name) -> tuple[Name, str] | None:
        """Return a framework other than ``name`` that the command always needs, and what shows it; None without one."""
        if self.uses_keras and (backend := self.backend) and backend.name != name:
            return backend.name, backend.why
        for package, statement, source in self._imports(self.closure or self.sources.run):
            needed = table().needed(package)
            if needed and needed != name and not statement.optional:
                return needed, _reason(source.at(statement.line), "imports", package, needed)
        return None

    @property
    def uses_keras(self) -> bool:
        """Return whether the code always imports Keras or, without code that does, the requirements list it."""
        imports = self._imports(self.closure or self.sources.run)
        imported = [package for package, statement, _ in imports if not statement.optional]
        return "keras" in (imported or self.wanted.names)

    @cached_property
    def backend(self) -> Backend | None:
        """Return the backend that code or settings name for Keras; KERAS_BACKEND comes before keras.json, as there."""
        programs = [source.path for source in self.closure or self.sources.run]
        settings = [name for name in self.names if _SETTINGS.fullmatch(name)]
        for path in (*programs, *settings):
            lines = yaml_source.text(self.root / path, errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if found := _BACKEND.search(line.partition("#")[0]):
                    return Backend(_name(found[1] or found[2]), f"{path}:{number}", path in programs)
        for path in _KERAS_JSON:
            if (self.root / path).is_file() and (name := _of_json(self.root / path)):
                return Backend(name, path, False)
        return None

    def _imports(self, files: Iterable[Source]) -> list[tuple[str, Import, Source]]:
        """Return the imports of packages that the table has, with their files; those that are optional come last."""
        known = table()
        found = [
            (package, statement, source)
            for source in files
            for statement in source.imports
            if not statement.level
            and (package := import_names.proposed(statement.module) or canonicalize_name(statement.top))
            and (known.needed(package) or package in known.several)
            and not self.sources.is_local(statement, source)
        ]
        return sorted(found, key=lambda one: one[1].optional)

    def _needed(self, files: Iterable[Source]) -> dict[Name, str]:
        """Return the frameworks that imports need -> what shows it; the one that most files import comes first."""
        found: dict[Name, list[tuple[str, Import, Source]]] = {}
        for one in self._imports(files):
            if name := table().needed(one[0]):
                found.setdefault(name, []).append(one)
        always = {
            name: len({source.path for _, statement, source in some if not statement.optional})
            for name, some in found.items()
        }
        names = sorted(found, key=lambda name: -always[name])
        reasons = {}
        for name in [name for name in names if always[name]] or names:
            packages = table().frameworks[name].packages
            package, statement, source = min(found[name], key=lambda one: (one[1].optional, one[0] not in packages))
            reasons[name] = _reason(source.at(statement.line), "imports", package, name)
        return reasons

    def _listed(self) -> dict[Name, str]:
        """Return the frameworks that the requirements need -> what shows it, in the order of the table."""
        reasons: dict[Name, str] = {}
        for package, place in self.wanted.names.items():
            if (name := table().needed(package)) and name not in reasons:
                reasons[name] = _reason(place, "lists", package, name)
        return {name: reasons[name] for name in table().frameworks if name in reasons}

    def _settled(self, files: Iterable[Source]) -> dict[Name, str]:
        """Return the framework that imports of packages for several frameworks need -> what shows it."""
        defaults: dict[Name, str] = {}
        for package, statement, source in self._imports(files):
            if row := table().several.get(package):
                place, rest = source.at(statement.line), statement.module.partition(".")[2]
                for part, name in row.parts.items():
                    if rest.startswith(part):
                        return {name: f"{place} imports {statement.module}, which needs {name}"}
                if (default := self._default(package, row)) and not defaults:
                    defaults = {default: f"{place} imports {package}, which uses {default}"}
        return defaults

    def _settled_list(self) -> dict[Name, str]:
        for package, place in self.wanted.names.items():
            if (row := table().several.get(package)) and (default := self._default(package, row)):
                return {default: f"{place} lists {package}, which uses {default}"}
        return {}

    def _default(self, package: str, row: Several) -> Name | None:
        """Return the framework that a package uses: the one that is listed beside it, or else its default."""
        old = row.since and any(
            canonicalize_name(found.name) == package and row.excludes_since(found.specifier)
            for found in (Requirement(text) for text, _ in self.wanted.lines)
        )
        listed = list(self._listed())
        if row.default and len(listed) == 1 and (old or not row.since):
            return listed[0]
        return None if old else row.default


def _reason(place: str, verb: str, package: str, framework: Name) -> str:
    """Return what shows a framework, as ``train.py:2 imports flax, which needs jax``."""
    if package in table().frameworks[framework].packages:
        return f"{place} uses {framework}" if verb == "imports" else f"{place} {verb} {package}"
    return f"{place} {verb} {package}, which needs {framework}"


def _name(text: str) -> Name:
    return next(name for name in table().frameworks if name == text)


def _of_json(path: Path) -> Name | None:
    """Return the backend of a keras.json; None if it names none that a target could have."""
    try:
        document = json.loads(yaml_source.text(path, errors="replace"))
    except json.JSONDecodeError:
        return None
    value = document.get("backend") if isinstance(document, Mapping) else None
    return next((name for name in table().frameworks if name == value), None)
