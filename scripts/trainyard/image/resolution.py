"""Resolve requirements beside a framework, for a target and for a user's repository."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.pylock import Package
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.image import base_contents, tool_locks
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolver import Failed, Project, entries, pins, versions
from trainyard.spec import catalog, lock
from trainyard.spec.framework import without_version
from trainyard.spec.lock import Pin
from trainyard.spec.markers import applies
from trainyard.spec.model import Spec
from trainyard.workspace import wheels
from trainyard.workspace.indexes import Index
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

logger = logging.getLogger(__name__)

#: Build backends, of which a build has its own versions: importing the framework does not need those of the image.
_BACKENDS = ("setuptools", "wheel")


@dataclass(frozen=True)
class Request:
    """Describe one resolution.

    Attributes:
        spec: the platform, and the base that the packages of ``base`` are in.
        wanted: what is asked for.
        framework: canonical name -> version of the framework's packages, which are given.
        base: the same of the base image's other packages, which are used if the requirements allow it.
        index: name, address and packages of the framework's index; None for the default one.
        indexes: the others.
        wheels: those that were built from sources.
        compiled: canonical name -> source distribution.
        known: canonical name -> entry, whose version is kept if the requirements allow it.
        upgraded: names whose versions are not kept.
        first: canonical name -> version in the image for the first platform, which the others have too if they can.
        shared: pins that are not marked as added; None where nothing is marked.
    """

    spec: Spec
    wanted: Wanted
    framework: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
    index: tuple[str, str, list[str]] | None = None
    indexes: Sequence[Index] = ()
    wheels: Sequence[Wheel] = ()
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    upgraded: frozenset[str] = frozenset()
    first: Mapping[str, str] = field(default_factory=dict)
    shared: Sequence[Pin] | None = None

    def project(self, lines: Sequence[str], options: Mapping[str, Any], preferred: str = "") -> Project:
        """Return what uv resolves, for the platform of the spec."""
        spec = self.spec
        # https://docs.astral.sh/uv/reference/settings/#exclude-newer
        options = ({"exclude-newer": spec.context.as_of} if spec.context.as_of else {}) | dict(options)
        return Project(
            spec.target,
            lines,
            spec.python_version,
            spec.context.offline,
            spec.wheel_platform,
            options,
            self.indexes,
            preferred,
        )


@dataclass(frozen=True)
class Compiled:
    """Describe a source distribution.

    Attributes:
        line: what asks for it.
        sha256: of its archive.
        requires: PEP 508 requirements of the package, ``build_requires``: of its build.
    """

    line: Line
    name: str
    version: str
    sha256: str
    requires: tuple[str, ...] = ()
    build_requires: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def resolve(request: Request, *, sized: bool) -> str:
    """Return the requirements section: everything that the image needs besides the framework.

    Args:
        sized: give entries the size of their file, from which layers are made up, and no hashes of files for other
            platforms.
    Raises:
        UserError: a requirement has an address.
        Failed: uv found no solution, or failed.
    """
    spec, text = request.spec, _resolved(request, sized=sized)
    found = {**request.base, **request.framework, **versions(text)}
    held = [one for one in catalog.conflicts().values() if one.constraint and one.holds(found, spec.python_version)]
    more = [Line(one.constraint, spec.file, 1) for one in held]
    wanted = replace(request.wanted, constraints=(*request.wanted.constraints, *more))
    try:
        return _resolved(replace(request, wanted=wanted), sized=sized) if more else text
    except Failed:
        for one in held:
            logger.warning(f"{spec.where}: the requirements exclude '{one.constraint}': {one.reason}")
        return text


def _resolved(request: Request, *, sized: bool) -> str:
    spec, made = request.spec, {wheel.name: wheel for wheel in request.wheels}
    lines, options = _project(request)
    with tempfile.TemporaryDirectory() as folder:
        if spec.base_contents:
            base = Path(folder) / "base"
            base_contents.write_wheels(base, spec.base_contents)
            options["index"].append(
                {"name": base_contents.INDEX, "url": base.as_uri(), "format": "flat", "explicit": True}
            )
            options["sources"] |= {name: {"index": base_contents.INDEX} for name in request.framework}
        project = request.project(lines, options, _preferred(request, {*made, *request.framework, *request.compiled}))
        kept = {}
        for name, entry in project.entries().items():
            wheel = made.get(name)
            if name in request.framework or name in request.compiled or (not wheel and _in_base(request, name, entry)):
                continue
            if wheel is None and " @ " in entry.splitlines()[0]:
                raise UserError(
                    f"{spec.where}: {name} asks for an address, which a lock does not hold: name {name} in the "
                    "requirements"
                )
            kept[name] = entry
        from_indexes = "".join(entry for name, entry in kept.items() if name not in made)
        locked = lock.parse(project.sized(from_indexes) if sized else from_indexes)
    if request.shared is not None:
        locked = lock.mark_added(locked, request.shared)
    pinned = {pin.name: pin.text() for pin in locked}
    for name, wheel in made.items():
        pin = Pin(name, wheel.version, (wheel.sha256,), wheel.file.stat().st_size, added=True)
        pinned[name] = f"{wheel.note}\n{pin.text()}"
    return "".join(pinned[name] for name in kept)


def _in_base(request: Request, name: str, entry: str) -> bool:
    """Return whether the base image has a package in the version of ``entry``."""
    return name in request.base and versions(entry).get(name) == request.base[name]


def _preferred(request: Request, left_out: Container[str]) -> str:
    """Return the entries whose versions uv keeps: of the first platform, then of ``known``.

    uv takes the hashes from here too. They are left out where a version is that of the first platform, whose files are
    others, and where a user names other indexes: a package that moves to another index has other files.
    """
    agreed = {
        name: f"{name}=={version}\n"
        for name, version in request.first.items()
        if name in request.upgraded or versions(request.known.get(name, "")).get(name) != version
    }
    kept = {name: entry for name, entry in request.known.items() if name not in request.upgraded} | agreed
    preferred = [entry for name, entry in sorted(kept.items()) if name not in left_out]
    if request.indexes:
        preferred = [entry.split(" \\", 1)[0].strip() + "\n" for entry in preferred]
    return "".join(preferred)


def _project(request: Request) -> tuple[list[str], dict[str, Any]]:
    """Return the dependencies and the ``[tool.uv]`` settings of the project that is resolved."""
    wanted, framework = request.wanted, request.framework
    lines = pins(framework)
    variants = contradictions.variants(framework)
    lines += [text for line in wanted.lines if (text := _line(line, framework, variants))]
    for wheel in request.wheels:
        extras = f"[{','.join(wheel.source.extras)}]" if wheel.source.extras else ""
        marker = f" ; {wheel.source.marker}" if wheel.source.marker else ""
        lines.append(f"{wheel.name}{extras} @ {wheel.file.resolve().as_uri()}{marker}")
    lines += [f"{source.name}=={source.version}" for source in request.compiled.values()]
    outside = [line for line in (*wanted.constraints, *wanted.overrides) if line.name not in variants]
    options: dict[str, Any] = dict(wanted.options)
    options["constraint-dependencies"] = [line.text for line in wanted.constraints if line in outside]
    options["override-dependencies"] = [
        line.text if line in outside else f"{line.name}=={framework[line.name]}"
        for line in wanted.overrides
        if line in outside or line.name in framework
    ]
    absent = {*wanted.excludes, *wanted.provided, *(name for name in variants if name not in framework)}
    options["exclude-dependencies"] = sorted(absent)
    options["dependency-metadata"] = [
        *options.get("dependency-metadata", []),
        *(
            {"name": source.name, "version": source.version, "requires-dist": source.requires}
            for source in request.compiled.values()
        ),
        *filter(None, (wheels.without_addresses(wheel) for wheel in request.wheels)),
    ]
    options["index"] = []
    sources = {name: {"index": index} for name, index in wanted.index_of.items() if name not in variants}
    if request.index:
        name, address, packages = request.index
        options["index"].append({"name": name, "url": address, "explicit": True})
        sources |= {package: {"index": name} for package in packages}
    return lines, options | {"sources": sources}


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
    options = {
        "constraint-dependencies": pins(kept),
        "sources": {name: {"index": index} for name, index in request.wanted.index_of.items() if name in names},
        "no-binary-package": sorted(names),
    }
    project = request.project([line.text for line in names.values()], options)
    return {
        name: _compiled(names[name], package, project)
        for package in project.files()
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
    return Compiled(
        line,
        canonicalize_name(package.name),
        str(package.version),
        package.sdist.hashes["sha256"],
        archive.requires,
        archive.build_requires,
    )


def build_requirements(request: Request) -> str:
    """Return the build-requires section: what the source distributions are compiled with, which no image has.

    What the image has, such as torch and numpy, is used as the image has it: compiled for another version, an extension
    might not import.

    Args:
        request: its ``framework`` is everything that the image has, its ``wanted`` what :func:`build_lines` returns.
    Raises:
        UserError: a requirement has an address.
        Failed: uv found no solution, or failed.
    """
    provided = _provided(request)
    tools = entries(tool_locks.pins("uv"))
    known = {name: entry for name, entry in tools if name in _BACKENDS} | dict(request.known)
    lines = request.wanted.lines
    names = {line.name for line in lines}
    options = {
        "exclude-dependencies": sorted(provided),
        "sources": {name: {"index": index} for name, index in request.wanted.index_of.items() if name in names},
    }
    preferred = _preferred(replace(request, known=known), provided)
    project = request.project([line.text for line in lines], options, preferred)
    return "".join(project.entries().values())


def _provided(request: Request) -> dict[str, str]:
    """Return canonical name -> version of what a build has from the image."""
    return {name: version for name, version in request.framework.items() if name not in _BACKENDS}


def build_lines(request: Request) -> tuple[Line, ...]:
    """Return the requirements of the builds that the image does not fulfil.

    Raises:
        UserError: one has an address.
    """
    needed = [
        (Line(text, source.line.file, source.line.number), f"{source.name} {source.version}")
        for source in request.compiled.values()
        for text in source.build_requires
    ]
    needed += [(line, "'build.requires'") for line in request.wanted.build_requires]
    python, machine = request.spec.python_version, request.spec.architecture.machine
    provided = _provided(request)
    lines = []
    for line, by in needed:
        wanted = line.requirement
        if not applies(wanted.marker, python, machine):
            continue
        if version := provided.get(line.name):
            if not wanted.specifier.contains(version, prereleases=True):
                logger.warning(
                    f"{line.where}: {by} asks for {line.shown} to be built, and is built with {version} of the image"
                )
        elif wanted.url:
            raise UserError(f"{line.where}: {by} is built with {line.shown}, an address, which a lock does not hold")
        else:
            lines.append(line)
    return tuple(dict.fromkeys(lines))
