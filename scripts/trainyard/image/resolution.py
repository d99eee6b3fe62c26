"""Resolve requirements with uv for all platforms of an image at once, so that they agree."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.pylock import Package
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_contents, tool_locks
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolver import Failed, Project, pins, versions
from trainyard.spec import catalog, lock, markers, pylock
from trainyard.spec.framework import without_version
from trainyard.spec.lock import Pin, mark_added
from trainyard.spec.markers import applies
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.workspace import requirements, wheels
from trainyard.workspace.indexes import Index
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

logger = logging.getLogger(__name__)

#: Build backends, of which a build has its own versions: importing the framework does not need those of the image.
_BACKENDS = ("setuptools", "wheel")

#: How often a version is looked for that all platforms have, before their versions may differ.
_TRIES = 5

#: Name of an architecture -> its packages, sorted by name.
Resolved = dict[str, list[Pin]]

#: Name of an architecture -> canonical name -> version.
Versions = Mapping[str, Mapping[str, str]]


def versions_of(resolved: Mapping[str, Iterable[Pin]]) -> dict[str, dict[str, str]]:
    """Return the versions of each platform."""
    return {arch: lock.versions(every) for arch, every in resolved.items()}


def exactly(versions: Versions, of: Collection[str] = ()) -> list[str]:
    """Return requirements of these versions alone, with a marker where not all platforms have the same.

    Args:
        of: names of packages; by default all of them.
    """
    archs: dict[str, list[str]] = {}
    for arch, every in versions.items():
        for line in pins({name: version for name, version in every.items() if not of or name in of}):
            archs.setdefault(line, []).append(arch)
    return [
        line if len(on) == len(versions) else f"{line} ; {' or '.join(pylock.marker(arch) for arch in on)}"
        for line, on in archs.items()
    ]


class Unfit(StepFailed):
    """Tell that no version of a package has a file for each platform.

    Attributes:
        name: canonical name of the package, ``reason``: in words.
    """

    def __init__(self, spec: Spec, pin: Pin, arch: str) -> None:
        self.name = pin.name
        self.reason = (
            f"{pin.name} {pin.version} has no wheel for linux/{arch} and Python {spec.python_version} of {spec.base}"
        )
        super().__init__(f"cannot lock {spec.target}: {self.reason}")


@dataclass(frozen=True)
class Resolution:
    """Describe what uv resolves.

    Attributes:
        platforms: the specs of an image's platforms, on one base.
        index: name, address and packages of the framework's index; None for the default one.
        indexes: the others.
        kept: names and versions that are kept if the requirements allow it.
        constraints: that everything has to fulfil, such as ``numpy<2.4``.
        options: uv's settings besides.
        made: canonical names of packages that are at an address, as wheels that were made of sources are.
        present: canonical name -> version of what the image has besides.
    """

    platforms: Sequence[Spec]
    index: tuple[str, str, list[str]] | None = None
    indexes: Sequence[Index] = ()
    kept: Iterable[tuple[str, str]] = ()
    constraints: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    made: Collection[str] = ()
    present: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        """The first platform."""
        return self.platforms[0]

    def packages(self, lines: Sequence[str], constraints: Sequence[str] = (), *, alone: bool = False) -> Resolved:
        """Return everything that requirements need.

        A version without a file for one of the platforms is left out, or, where the platforms cannot have one version,
        the versions differ. What was made has no files.

        Args:
            alone: leave out what they need.
        Raises:
            UserError: a package is at an address.
            Failed: uv found no solution, or failed.
            Unfit: no version has a file for each platform.
        """
        found = self._solved(lines, constraints, alone=alone)
        if not (first := self._lacking(found)):
            return found
        listed = {canonicalize_name(Requirement(line).name) for line in lines}
        refusal = min(first.values(), key=lambda one: one.name not in listed)
        try:
            apart = self._solved(lines, constraints, alone=alone, each=True)
        except Failed as error:
            raise (refusal if error.unsatisfiable else error) from None
        unfit = dict(first)
        for _ in range(_TRIES):
            try:
                found = self._solved(lines, [*constraints, *unfit], alone=alone)
            except Failed as error:
                if error.unsatisfiable:
                    break
                raise
            if not (lacking := self._lacking(found)):
                return found
            unfit |= lacking
        if self._lacking(apart):
            raise refusal
        return apart

    def _solved(self, lines: Sequence[str], constraints: Sequence[str], *, alone: bool, each: bool = False) -> Resolved:
        """Return what uv finds; ``each``: with a wheel for each platform, whose versions may differ."""
        # https://docs.astral.sh/uv/reference/settings/#required-environments
        required = [pylock.marker(one.arch, one.python_version) for one in self.platforms] if each else []
        packages = self.project(lines, constraints, required_environments=required).packages(alone=alone)
        return {platform.arch: self._usable(packages, platform) for platform in self.platforms}

    def _lacking(self, resolved: Resolved) -> dict[str, Unfit]:
        """Return what excludes a version -> the platform that has no file of it."""
        return {
            f"{pin.name}!={pin.version}": Unfit(self.spec, pin, arch)
            for arch, every in resolved.items()
            for pin in every
            if not pin.files and pin.name not in self.made
        }

    def project(self, lines: Sequence[str], constraints: Sequence[str] = (), **more: object) -> Project:
        """Return what uv is asked; ``more``: further settings, with ``_`` for ``-`` in their names."""
        spec = self.spec
        options = {**self.options, **{name.replace("_", "-"): given for name, given in more.items()}}
        # https://docs.astral.sh/uv/reference/settings/#exclude-newer
        options = ({"exclude-newer": spec.context.as_of} if spec.context.as_of else {}) | options
        options["constraint-dependencies"] = [*self.constraints, *constraints]
        if self.index:
            name, address, packages = self.index
            options["index"] = [*options.get("index", []), {"name": name, "url": address, "explicit": True}]
            options["sources"] = options.get("sources", {}) | {package: {"index": name} for package in packages}
        kept = [f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in self.kept]
        return Project(
            spec.target,
            lines,
            spec.python_version,
            spec.context.offline,
            # One environment: uv resolves each that is listed by itself.
            [" or ".join(pylock.marker(one.arch, one.python_version) for one in self.platforms)],
            options,
            self.indexes,
            "".join(['lock-version = "1.0"\ncreated-by = "trainyard"\n', *kept]) if kept else "",
        )

    def _usable(self, packages: Iterable[Package], platform: Spec) -> list[Pin]:
        """Return the packages of a resolution that a platform has, with the files that it can use."""
        python, architecture = platform.python_version, platform.architecture
        environment: dict[str, str | Set[str]] = {**markers.environment(python, architecture.machine)}
        environment |= {"extras": frozenset(), "dependency_groups": frozenset()}
        glibc = platform.wheel_platform.rpartition("manylinux_")[2].replace("_", ".")
        usable, unbuilt = [], self.options.get("no-build-package", ())
        for package in packages:
            if package.marker and not package.marker.evaluate(environment, context="lock_file"):
                continue
            if (package.archive or package.vcs or package.directory) and package.name not in self.made:
                raise UserError(
                    f"{platform.where}: {package.name} asks for an address, which a lock does not hold: name "
                    f"{package.name} in the requirements"
                )
            try:
                files = pylock.usable_files(package, python, architecture.name, glibc)
                files = tuple(file for file in files if file.is_wheel or package.name not in unbuilt)
            except ValueError as error:
                raise StepFailed(f"cannot lock {platform.target}: {error}") from None
            usable.append(Pin(package.name, str(package.version), files))
        return sorted(usable, key=lambda pin: pin.name)

    def without_conflicts(self, lines: Sequence[str]) -> Resolved:
        """Return :meth:`packages` with the constraints of images/conflicts.yaml, unless these exclude a requirement."""
        spec, together = self.spec, self.packages(lines)
        installed = [{**self.present, **of} for of in versions_of(together).values()]
        held = {
            one.constraint.format_map(of): one
            for one in catalog.conflicts().values()
            for of in installed
            if one.constraint and one.holds(of, spec.python_version)
        }
        if held:
            try:
                together = self.packages(lines, list(held))
            except StepFailed:
                for constraint, one in held.items():
                    logger.warning(f"{spec.where}: the requirements exclude '{constraint}': {one.reason}")
        return together


@dataclass(frozen=True)
class Compiled:
    """Describe a source distribution.

    Attributes:
        line: what asks for it.
        pin: its archive.
        requires: PEP 508 requirements of the package, ``build_requires``: of its build.
    """

    line: Line
    pin: Pin
    requires: tuple[str, ...] = ()
    build_requires: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        marker = self.line.requirement.marker
        return f"{self.pin.name}=={self.pin.version}{f' ; {marker}' if marker else ''}"

    def applies(self, spec: Spec) -> bool:
        """Return whether the image has it on a platform."""
        return applies(self.line.requirement.marker, spec.python_version, spec.architecture.machine)


@dataclass(frozen=True)
class Request:
    """Describe what a user's repository requires, beside its framework.

    Attributes:
        platforms: the specs of its platforms.
        wanted: what is asked for on all of them.
        framework: versions of the framework's packages, which are given.
        index: see :class:`Resolution`, as ``indexes`` and ``kept``.
        wheels: those that were made of sources.
        compiled: canonical name -> source distribution.
        shared: name of an architecture -> pins that are not marked as added; None where nothing is marked.
    """

    platforms: Sequence[RepositorySpec]
    wanted: Wanted
    framework: Versions = field(default_factory=dict)
    index: tuple[str, str, list[str]] | None = None
    indexes: Sequence[Index] = ()
    wheels: Sequence[Wheel] = ()
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    kept: Sequence[tuple[str, str]] = ()
    shared: Mapping[str, Sequence[Pin]] | None = None

    @property
    def spec(self) -> RepositorySpec:
        """The first platform."""
        return self.platforms[0]

    @property
    def frameworks(self) -> dict[str, str]:
        """Canonical name -> version of the framework's packages, of any platform."""
        return {name: version for every in self.framework.values() for name, version in every.items()}

    @property
    def base(self) -> dict[str, str]:
        """Canonical name -> version of what a base that holds the framework has besides."""
        contents = self.spec.base_contents
        held = contents.packages if contents else {}
        return {name: version for name, version in held.items() if name not in self.frameworks}

    def constrained(self, texts: Iterable[str]) -> Request:
        """Return the request with more constraints."""
        more = tuple(Line(text, self.spec.file, 1) for text in texts)
        return replace(self, wanted=replace(self.wanted, constraints=(*self.wanted.constraints, *more)))

    def everything(self) -> Resolved:
        """Return everything that the image has, as uv resolves it; see :meth:`Resolution.without_conflicts`."""
        lines = exactly(self.framework)
        variants = contradictions.variants(self.frameworks)
        lines += [text for line in self.wanted.lines if (text := _line(line, self.frameworks, variants))]
        for wheel in self.wheels:
            extras = f"[{','.join(wheel.source.extras)}]" if wheel.source.extras else ""
            marker = f" ; {wheel.source.marker}" if wheel.source.marker else ""
            lines.append(f"{wheel.name}{extras} @ {wheel.file.resolve().as_uri()}{marker}")
        lines += [source.requirement for source in self.compiled.values()]
        constraints = [line.text for line in self.wanted.constraints if line.name not in variants]
        with self._options(variants) as options:
            resolution = Resolution(
                self.platforms,
                self.index,
                self.indexes,
                self.kept,
                constraints,
                options,
                {wheel.name for wheel in self.wheels},
                self.base,
            )
            return resolution.without_conflicts(lines)

    @contextlib.contextmanager
    def _options(self, variants: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Make the ``[tool.uv]`` settings of what is resolved, and the folder that they name."""
        wanted, framework = self.wanted, self.frameworks
        options: dict[str, Any] = dict(wanted.options)
        options["override-dependencies"] = [line.text for line in wanted.overrides if line.name not in variants] + [
            text
            for name in dict.fromkeys(line.name for line in wanted.overrides if line.name in framework)
            for text in exactly(self.framework, [name])
        ]
        absent = {*wanted.excludes, *wanted.provided, *(name for name in variants if name not in framework)}
        options["exclude-dependencies"] = sorted(absent)
        options["dependency-metadata"] = [
            *catalog.metadata(),
            *options.get("dependency-metadata", []),
            *(
                {"name": one.pin.name, "version": one.pin.version, "requires-dist": one.requires}
                for one in self.compiled.values()
            ),
            *filter(None, (wheels.without_addresses(wheel) for wheel in self.wheels)),
        ]
        options["sources"] = {name: of for name, of in wanted.index_of.items() if name not in variants}
        if not self.spec.base_contents:
            yield options
            return
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            base_contents.write_wheels(base, self.spec.base_contents)
            index = {"name": base_contents.INDEX, "url": base.as_uri(), "format": "flat", "explicit": True}
            options["index"] = [index]
            options["sources"] |= {name: {"index": base_contents.INDEX} for name in framework}
            yield options

    def resolve(self) -> Resolved:
        """Return everything that the image needs besides the framework, what is compiled and what the base has.

        Raises:
            UserError: a requirement has an address.
            Failed: uv found no solution, or failed.
            StepFailed: no version of a package has a file for each platform.
        """
        found, resolved = {}, self.everything()
        for spec in self.platforms:
            arch, image = spec.arch, (spec.python_version, spec.architecture.machine)
            every = resolved[arch]
            made = {one.name: one for one in self.wheels if applies(one.source.marker, *image)}
            absent = self.framework.get(arch, {}).keys() | self.compiled.keys()
            rest = [pin for pin in every if pin.name not in absent and pin.name not in made]
            rest = [pin for pin in rest if self.base.get(pin.name) != pin.version]
            if self.shared is not None:
                rest = mark_added(rest, self.shared.get(arch, ()))
            of_sources = [made[pin.name].pin for pin in every if pin.name in made]
            found[arch] = sorted([*rest, *of_sources], key=lambda pin: pin.name)
        return found


def _line(line: Line, framework: Mapping[str, str], variants: Mapping[str, str]) -> str:
    """Return a line as it is resolved; of a package of the framework, only the extras."""
    if line.name not in variants:
        return line.text
    return without_version(line.text) if line.name in framework and line.requirement.extras else ""


def compile_sources(request: Request, old: Mapping[str, str]) -> dict[str, Compiled]:
    """Return the source distributions of ``build:`` with the SHA-256 of their archives; nothing is built.

    Args:
        old: canonical name -> version to keep.
    Raises:
        UserError: there is none on an index.
        Failed: uv failed.
    """
    names = {line.name: line for line in request.wanted.compiled}
    if not names:
        return {}
    kept = {
        name: version
        for name, version in old.items()
        if name in names and names[name].requirement.specifier.contains(version)
    }
    project = Resolution(request.platforms, indexes=request.indexes).project(
        [line.text for line in names.values()],
        pins(kept),
        sources={name: of for name, of in request.wanted.index_of.items() if name in names},
        no_binary_package=sorted(names),
    )
    return {
        name: _compiled(names[name], package, project)
        for package in project.packages(alone=True)
        if (name := canonicalize_name(package.name)) in names
    }


def _compiled(line: Line, package: Package, project: Project) -> Compiled:
    """Return a package of a pylock.toml (PEP 751) as a source distribution."""
    archive = project.source_distribution(package)
    if archive is None or package.sdist is None:
        raise UserError(f"{line.where}: {line.shown} has no source distribution on a package index")
    if not archive.final:
        logger.warning(
            f"{line.where}: {package.name} {package.version} does not say what it needs: list that in the requirements"
        )
    file = pylock.file(package.sdist)
    pin = Pin(canonicalize_name(package.name), str(package.version), (file,), "compiled")
    return Compiled(line, pin, archive.requires, archive.build_requires)


def build_requirements(request: Request) -> Resolved:
    """Return what the source distributions are compiled with, which no image has.

    What the image has, such as torch and numpy, is used as the image has it: compiled for another version, an extension
    might not import.

    Args:
        request: its ``framework`` is everything that the image has, its ``wanted`` what :func:`build_lines` returns.
    Raises:
        UserError: a requirement has an address.
        Failed: uv found no solution, or failed.
    """
    everywhere = set.intersection(*(set(_provided(of)) for of in request.framework.values()))
    tools = [pair for pair in versions(tool_locks.pins("uv")).items() if pair[0] in _BACKENDS]
    known = {name for name, _ in request.kept}
    names = {line.name for line in request.wanted.lines}
    options = {
        "exclude-dependencies": sorted(everywhere),
        "sources": {name: of for name, of in request.wanted.index_of.items() if name in names},
    }
    kept = [*(pair for pair in tools if pair[0] not in known), *request.kept]
    resolution = Resolution(request.platforms, indexes=request.indexes, kept=kept, options=options)
    return {
        arch: [replace(pin, role="build") for pin in every if pin.name not in _provided(request.framework[arch])]
        for arch, every in resolution.packages([line.text for line in request.wanted.lines]).items()
    }


def _provided(installed: Mapping[str, str]) -> dict[str, str]:
    """Return canonical name -> version of what a build has from the image."""
    return {name: version for name, version in installed.items() if name not in _BACKENDS}


def build_lines(request: Request) -> tuple[Line, ...]:
    """Return the requirements of the builds that the image does not fulfil on one of its platforms.

    Raises:
        UserError: one has an address.
    """
    needed: list[tuple[Line, str, Compiled | None]] = [
        (Line(text, source.line.file, source.line.number), f"{source.pin.name} {source.pin.version}", source)
        for source in request.compiled.values()
        for text in source.build_requires
    ]
    needed += [(line, "'build.requires'", None) for line in request.wanted.build_requires]
    lines: dict[str, list[Line]] = {}
    told: dict[str, None] = {}
    for spec in request.platforms:
        provided, compiled = _provided(request.framework[spec.arch]), request.compiled.values()
        lines[spec.architecture.machine] = missing = []
        for line, by, source in needed:
            wanted = line.requirement
            if not any(one.applies(spec) for one in ([source] if source else compiled)) and not (
                source is None and spec.workspace.compiles_own
            ):
                continue
            if not applies(wanted.marker, spec.python_version, spec.architecture.machine):
                continue
            if version := provided.get(line.name):
                if not wanted.specifier.contains(version, prereleases=True):
                    built = f"is built with {version} of the image"
                    told[f"{line.where}: {by} asks for {line.shown} to be built, and {built}"] = None
            elif wanted.url:
                raise UserError(
                    f"{line.where}: {by} is built with {line.shown}, an address, which a lock does not hold"
                )
            else:
                missing.append(line)
    for text in told:
        logger.warning(text)
    return requirements.joined(lines)
