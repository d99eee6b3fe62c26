"""Mix the packages of two locks: some in the versions of the one, the others in those of the other.

uv tells which mixtures resolve, and what a newer package needs: it may take either version, and keeps the older one if
it can. What is in neither lock, base, system packages and code, is that of the repository in
every mixture, and so are packages that are built from git repositories, folders and source distributions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from packaging.version import InvalidVersion, Version

from trainyard.common.errors import UserError
from trainyard.image import base_image, package_index, repository_lock
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolution import Request, Resolution, Unfit
from trainyard.image.resolver import Failed
from trainyard.release.culprit import Changes
from trainyard.spec.lock import DEFAULT, Lock, Locked, Pin, ordered, versions
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import indexes, requirements
from trainyard.workspace.lines import Line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Side:
    """Hold the packages of a lock or an image, for one platform.

    Attributes:
        name: what the user calls it.
        pins: name of an index -> canonical name -> pin.
        lock: that it has them from; None for an image.
    """

    name: str
    pins: Mapping[str, Mapping[str, Pin]]
    lock: Lock | None = None


def of_lock(name: str, lock: Lock, arch: str) -> Side:
    """Return the packages of a lock.

    Raises:
        UserError: it has none for an architecture, or the framework is in its base.
    """
    pins: dict[str, dict[str, Pin]] = {}
    for index in lock.names(arch):
        locked = lock.known(arch, index)
        if locked.base:
            raise UserError(f"{name}: the framework is in the base image, whose packages cannot be exchanged")
        pins[index] = {pin.name: pin for pin in (*locked.framework, *locked.requirements) if not pin.made}
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
    found = {package: known[package] for package in wanted if package in known}
    found = {package: pin for package, pin in found.items() if pin.version == wanted[package]}
    if missing := [f"{package}=={version}" for package, version in wanted.items() if package not in found]:
        for pin in _Asked(spec).resolution(index).packages(missing, alone=True)[spec.arch]:
            found[pin.name] = replace(pin, role=known[pin.name].role if pin.name in known else "added")
    return Side(name, {index: found})


def _index(spec: RepositorySpec, *sides: Side) -> str:
    """Return the index that an image is built from."""
    chosen = DEFAULT if spec.context.offline else package_index.choose(spec)[0]
    return chosen if all(chosen in side.pins for side in sides) else DEFAULT


class _Asked:
    """Hold the requirements and indexes of a repository, which all mixtures share."""

    def __init__(self, spec: RepositorySpec) -> None:
        self._spec = spec
        self._wanted = requirements.of_platform(spec)
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
        return Request([self._spec], wanted, index=package_index.extra(self._spec.parent, index), indexes=self._indexes)

    def resolution(self, index: str) -> Resolution:
        """Return the resolution of packages alone, with the settings of the repository."""
        extra = package_index.extra(self._spec.parent, index)
        return Resolution([self._spec], extra, self._indexes, options=self._wanted.options)


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
        old, new = (versions(side.pins[self.index].values()) for side in self._sides)
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
        """Return a set of changes that uv resolves, of which none that was added can be left out; None without one."""
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
        """Return the spec with which uv asks no index: its cache has both sides, and other versions are not taken."""
        return self.spec.model_copy(update={"context": replace(self.spec.context, offline=True)})

    def _complete(self, must: Changes, may: Changes, spec: RepositorySpec) -> Changes | None:
        """Add to a set what it needs, with uv, to which the older versions are preferred.

        No change that is added can be left out, each by itself.
        """
        must = self.with_needs(must)
        found = self._solved(must, may, spec) if must <= may else None
        for name in sorted(found - must) if found else ():
            if found and name in found:
                found = self._solved(must, found - {name}, spec) or found
        if found and len(must) == 1:
            self._needs[next(iter(must))] = set(found - must)
        return found

    def _solved(self, must: Changes, may: Changes, spec: RepositorySpec) -> Changes | None:
        """Return the changes of a resolution; None if there is none.

        A package that only ``good`` has stays if it can: uv is asked with it, and without.
        """
        removed = sorted(name for name in may - must if not self.changes[name][1])
        gone: list[str] = []
        found = self._resolved(must, may, spec)
        if found is None and removed:
            gone = removed
            found = self._resolved(must.union(gone), may, spec)
            for name in removed:
                fewer = [one for one in gone if one != name]
                if found and (other := self._resolved(must.union(fewer), may, spec)) is not None:
                    gone, found = fewer, other
        return found

    def _resolved(self, must: Changes, may: Changes, spec: RepositorySpec) -> Changes | None:
        between: list[str] = []
        while True:
            lines, constraints = self._asked_for(must, may)
            try:
                everything = self._request(lines, [*constraints, *between], spec).everything()[spec.arch]
            except Unfit:
                return None
            except Failed as error:
                if not error.unsatisfiable:
                    raise
                return None
            have = {name: version for name, version in versions(everything).items() if name in self.changes}
            if neither := [f"{name}!={version}" for name, version in have.items() if version not in self.changes[name]]:
                between += neither
                continue
            return must | {name for name, version in have.items() if version == self.changes[name][1]}

    def with_needs(self, changes: Changes) -> Changes:
        """Return changes with those that they are known to need."""
        found, added = changes, changes
        while added:
            added = frozenset(other for name in added for other in self._needs.get(name, ())) - found
            found |= added
        return found

    def _asked_for(self, must: Changes, may: Changes) -> tuple[list[str], list[str]]:
        """Return requirements and constraints: the versions of ``must``, and either version of the rest of ``may``.

        What only ``bad`` has may come along.
        """
        of_good = self.good.pins[self.index]
        lines = [f"{name}=={pin.version}" for name, pin in of_good.items() if name not in self.changes]
        constraints = []
        for name, pair in self.changes.items():
            fixed = pair[name in must]
            if name in may - must and all(pair):
                lines.append(f"{name}{_either(*pair)}")
            elif fixed:
                lines.append(f"{name}=={fixed}")
            else:
                constraints.append(f"{name}=={pair[1]}" if pair[1] and name in may else f"{name}<0.dev0")
        return lines, constraints

    def _request(self, lines: list[str], constraints: list[str], spec: RepositorySpec) -> Request:
        kept = list(versions(self.good.pins[self.index].values()).items())
        request = self._asked.request(self.index, lines, constraints, self._excluded)
        return replace(request, kept=kept, platforms=[spec])

    @cached_property
    def _asked(self) -> _Asked:
        return _Asked(self.spec)

    @cached_property
    def _excluded(self) -> list[str]:
        """Return the packages that uv leaves out: those built from sources, and TensorFlow under other names."""
        every = {name: pin.version for side in self._sides for name, pin in side.pins[self.index].items()}
        built = {pin.name for pin in self._built(self.index)} - every.keys()
        return sorted(built | (contradictions.variants(every).keys() - every.keys()))

    def _built(self, index: str) -> list[Pin]:
        """Return what ``bad`` has built from sources, and to build it; every mixture has that."""
        locked = self.bad.lock.known(self.spec.arch, index) if self.bad.lock else Locked()
        return [pin for pin in locked.pins if pin.made or pin.role in ("compiled", "build")]

    def lock(self, changes: Changes) -> Lock:
        """Return the lock of a set of changes, as the repository's is written now."""
        locked = {}
        for index in (one for one in self.bad.pins if one in self.good.pins):
            old, new = self.good.pins[index], self.bad.pins[index]
            mixed = {name: pin for name, pin in old.items() if name not in self.changes}
            mixed |= {name: pin for name, pin in new.items() if name not in self.changes or name in changes}
            mixed |= {name: pin for name, pin in old.items() if name in self.changes and name not in changes}
            locked[index] = {self.spec.arch: Locked(ordered([*mixed.values(), *self._built(index)]))}
        spec, known = self.spec, self.bad.lock.origin if self.bad.lock else None
        base = known.base if known else base_image.lockable_reference(spec.base, spec.context)
        return repository_lock.trial(spec, Lock(spec.python_version, locked), base)


def _either(one: str, other: str) -> str:
    """Return the specifiers that two versions fulfil, and those between them."""
    try:
        low, high = sorted(map(Version, (one, other)))
    except InvalidVersion:
        return ""
    # A local version is after its public one, and no range may name it.
    return f">={low.public},<={high}" if high.local is None else f">={low.public},<{_after(high)}"


def _after(version: Version) -> str:
    """Return the first version after a public one and all its local ones, without its epoch's next release."""
    epoch = f"{version.epoch}!" if version.epoch else ""
    *first, last = version.release
    return f"{epoch}{'.'.join(map(str, (*first, last + 1)))}"
