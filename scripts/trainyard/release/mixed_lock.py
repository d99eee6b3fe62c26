"""Mix the packages of two locks: some in the versions of the one, the others in those of the other.

uv tells which mixtures resolve. What is in neither lock, base, system packages and code, is that of the repository in
every mixture, and so are packages that are built from git repositories, folders and source distributions.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from packaging.pylock import Package
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.image import base_image, package_index, repository_lock, resolution
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolution import Request
from trainyard.image.resolver import Failed, versions
from trainyard.release.culprit import Changes
from trainyard.spec import lock as locks
from trainyard.spec.lock import DEFAULT, Lock, Pin, Section
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Line

logger = logging.getLogger(__name__)

#: Kinds of sections whose packages are mixed.
_MIXED = ("framework", "requirements")


@dataclass(frozen=True)
class Side:
    """Hold the packages of a lock or an image, for one platform.

    Attributes:
        name: what the user calls it.
        pins: name of an index -> canonical name -> kind of the section, and pin.
        lock: that it has them from; None for an image.
    """

    name: str
    pins: Mapping[str, Mapping[str, tuple[str, Pin]]]
    lock: Lock | None = None


def of_lock(name: str, lock: Lock, arch: str) -> Side:
    """Return the packages of a lock.

    Raises:
        UserError: it has none for an architecture, or the framework is in its base.
    """
    pins: dict[str, dict[str, tuple[str, Pin]]] = {}
    for index in lock.indexes(arch):
        locked = lock.of(arch, index)
        if locked is None or locked.base:
            raise UserError(f"{name}: the framework is in the base image, whose packages cannot be exchanged")
        sourced = {match["name"] for match in map(wheels.NOTE.match, locked.text("requirements").splitlines()) if match}
        of_index = [(kind, pin) for kind in _MIXED for pin in locks.parse(locked.text(kind))]
        pins[index] = {pin.name: (kind, pin) for kind, pin in of_index if pin.name not in sourced}
    if not pins:
        raise UserError(f"{name}: nothing for {arch}: 'trainyard lock' adds the platform")
    return Side(name, pins, lock)


def of_image(name: str, packages: Mapping[str, str], other: Side, spec: RepositorySpec) -> Side:
    """Return the packages of an image, with the hashes and sizes that the other side or the package index has.

    Args:
        packages: canonical name -> version.
    Raises:
        StepFailed: a package is on no index.
    """
    index = _index(spec, other)
    known, provided = other.pins[index], _Asked(spec).provided
    wanted = {package: version for package, version in packages.items() if package not in provided}
    kept = {package: known[package] for package in wanted if package in known}
    found = {package: one for package, one in kept.items() if one[1].version == wanted[package]}
    if missing := [f"{package}=={version}" for package, version in wanted.items() if package not in found]:
        files = _Asked(spec).request(index, ()).project(missing, {}).files()
        for package in files:
            pin = _pin(package)
            found[pin.name] = (known[pin.name][0] if pin.name in known else "requirements", pin)
    return Side(name, {index: found})


def _pin(package: Package) -> Pin:
    files = [*(package.wheels or filter(None, [package.sdist]))]
    hashes = sorted(file.hashes["sha256"] for file in files)
    size = max((file.size or 0 for file in files), default=0)
    return Pin(canonicalize_name(package.name), str(package.version), tuple(hashes), size, added=True)


def _index(spec: RepositorySpec, *sides: Side) -> str:
    """Return the index that an image is built from."""
    chosen = DEFAULT if spec.context.offline else package_index.choose(spec)[0]
    return chosen if all(chosen in side.pins for side in sides) else DEFAULT


class _Asked:
    """Hold the requirements and indexes of a repository, which all mixtures share."""

    def __init__(self, spec: RepositorySpec) -> None:
        self._spec = spec
        self._wanted = requirements.read(spec.workspace, spec.python_version, spec.architecture.machine)
        self._indexes = [*indexes.of_machine(), *indexes.of_project(spec.workspace, self._wanted.addresses)]

    @property
    def provided(self) -> frozenset[str]:
        return self._wanted.provided

    def request(
        self, index: str, lines: Iterable[str], constraints: Iterable[str] = (), excludes: Iterable[str] = ()
    ) -> Request:
        """Return the resolution of pins in the place of the repository's requirements, with its settings."""
        file = self._spec.file
        own = tuple(Line(text, file, 1) for text in lines)
        pinned = {line.name: line for line in own}
        wanted = replace(
            self._wanted,
            lines=own,
            constraints=tuple(Line(text, file, 1) for text in constraints),
            overrides=tuple(pinned.get(line.name, line) for line in self._wanted.overrides),
            excludes=(*self._wanted.excludes, *excludes),
        )
        extra = package_index.extra(self._spec.parent, index)
        return Request(self._spec, wanted, index=extra, indexes=self._indexes)


@dataclass(frozen=True)
class Mixture:
    """Mix two sides: a change is the name of a package that only one has, or both in different versions.

    Attributes:
        good, bad: a set of changes has these packages as ``bad`` has them, and the others as ``good`` has them.
    """

    spec: RepositorySpec
    good: Side
    bad: Side
    _completed: dict[tuple[Changes, Changes], Changes | None] = field(default_factory=dict)
    _needs: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def index(self) -> str:
        """The index that images are built from."""
        return _index(self.spec, self.good, self.bad)

    @cached_property
    def changes(self) -> dict[str, tuple[str, str]]:
        """Name -> version in ``good`` and in ``bad``, empty where there is none; sorted by name."""
        old, new = ({name: pin.version for name, (_, pin) in side.pins[self.index].items()} for side in self._sides)
        names = sorted({*old, *new})
        both = {name: (old.get(name, ""), new.get(name, "")) for name in names}
        return {name: pair for name, pair in both.items() if pair[0] != pair[1]}

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.good, self.bad

    def described(self, name: str) -> str:
        """Return what a change is: ``numpy 1.26.4 -> 2.4.6``, ``numpy 2.4.6 added``, or ``numpy removed``."""
        old, new = self.changes[name]
        return f"{name} {old} -> {new}" if old and new else f"{name} {new} added" if new else f"{name} removed"

    def complete(self, must: Changes, may: Changes) -> Changes | None:
        """Return the smallest set of changes that uv finds to resolve; None if there is none (see ``culprit``)."""
        if (must, may) not in self._completed:
            self._completed[must, may] = self._complete(must, may, self._offline) if self._resolvable else must
        return self._completed[must, may]

    @cached_property
    def _resolvable(self) -> bool:
        """Return whether both sides resolve; they do not if the repository's requirements contradict them."""
        everything = frozenset(self.changes)
        for side, changes in ((self.good, frozenset[str]()), (self.bad, everything)):
            if self._complete(changes, changes, self.spec) != changes:
                logger.warning(f"the packages of {side.name} do not resolve: mixtures are tried whether or not they do")
                return False
        return True

    @cached_property
    def _offline(self) -> RepositorySpec:
        """The spec with which uv asks no index: when both sides have resolved, it knows all that mixtures have."""
        return self.spec.model_copy(update={"context": replace(self.spec.context, offline=True)})

    def _complete(self, must: Changes, may: Changes, spec: RepositorySpec) -> Changes | None:
        """Add to a set what uv says is missing: a newer package, and an older one that do not go together.

        Everything has one version, so that uv has nothing to search for.
        """
        while (must := self.with_needs(must)) <= may:
            lines, constraints = self._asked_for(must, may)
            try:
                found = versions(resolution.resolve(self._request(lines, constraints, spec), sized=False))
                missing = frozenset(name for name in found if name in self.changes) - must
                missing = frozenset(name for name in missing if not self.changes[name][0])
                if not missing:
                    return must
            except Failed as error:
                text = " ".join(error.stderr.split())
                if "No solution found" not in text:
                    raise
                named = frozenset(name for name in self.changes if re.search(rf"(?<![\w.-]){name}(?![\w-])", text))
                missing = (named & may) - must
                if len(causes := named & must) == 1 and missing:
                    self._needs.setdefault(next(iter(causes)), set()).update(missing)
            if not missing:
                return None
            must |= missing
        return None

    def with_needs(self, changes: Changes) -> Changes:
        """Return changes with those that they are known to need."""
        found, added = changes, changes
        while added:
            added = frozenset(other for name in added for other in self._needs.get(name, ())) - found
            found |= added
        return found

    def _asked_for(self, must: Changes, may: Changes) -> tuple[list[str], list[str]]:
        """Return the requirements and constraints of a set; what is only in the newer lock may come along."""
        of_good = self.good.pins[self.index]
        lines = [f"{name}=={pin.version}" for name, (_, pin) in of_good.items() if name not in self.changes]
        constraints = []
        for name, pair in self.changes.items():
            if version := pair[name in must]:
                lines.append(f"{name}=={version}")
            else:
                constraints.append(f"{name}=={pair[1]}" if pair[1] and name in may else f"{name}<0.dev0")
        return lines, constraints

    def _request(self, lines: list[str], constraints: list[str], spec: RepositorySpec) -> Request:
        known = {name: f"{name}=={pin.version}\n" for name, (_, pin) in self.good.pins[self.index].items()}
        return replace(self._asked.request(self.index, lines, constraints, self._excluded), known=known, spec=spec)

    @cached_property
    def _asked(self) -> _Asked:
        return _Asked(self.spec)

    @cached_property
    def _excluded(self) -> list[str]:
        """Return the packages that uv leaves out: those built from sources, and TensorFlow under other names."""
        every = {name: pin.version for side in self._sides for name, (_, pin) in side.pins[self.index].items()}
        built = versions("".join(self._built.values())).keys() - every.keys()
        return sorted(built | (contradictions.variants(every).keys() - every.keys()))

    @cached_property
    def _built(self) -> dict[Section, str]:
        """Return the entries of ``bad`` that are built from sources; every mixture has them."""
        found: dict[Section, str] = {}
        for section, text in (self.bad.lock.sections if self.bad.lock else {}).items():
            if section.arch == self.spec.arch and section.kind not in _MIXED:
                found[section] = text
            elif section.arch == self.spec.arch:
                entries = {pin.name: pin.text() for pin in locks.parse(text)}
                notes = filter(None, map(wheels.NOTE.match, text.splitlines()))
                found[section] = "".join(f"{note[0]}\n{entries[note['name']]}" for note in notes)
        return found

    def lock(self, changes: Changes) -> Lock:
        """Return the lock of a set of changes, as the repository's is written now."""
        sections = {section: text for section, text in self._built.items() if section.kind not in _MIXED}
        for index, kind in itertools.product((one for one in self.bad.pins if one in self.good.pins), _MIXED):
            old, new = self.good.pins[index], self.bad.pins[index]
            mixed = {name: one for name, one in old.items() if name not in self.changes}
            mixed |= {name: one for name, one in new.items() if name not in self.changes or name in changes}
            mixed |= {name: one for name, one in old.items() if name in self.changes and name not in changes}
            section = Section(self.spec.arch, kind, index)
            texts = [pin.text() for _, (of_kind, pin) in sorted(mixed.items()) if of_kind == kind]
            sections[section] = "".join([*texts, self._built.get(section, "")])
        spec, known = self.spec, self.bad.lock.origin if self.bad.lock else None
        base = known.base if known else base_image.lockable_reference(spec.base, spec.context)
        return repository_lock.trial(spec, sections, base)
