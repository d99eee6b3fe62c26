"""Choose the versions of a repository's framework, and the base that has a Python for them.

The framework is that of the target, unless ``framework`` of trainyard.yaml names versions, or a requirement excludes
the target's. Then the packages that the target names are resolved anew, together with everything that the repository
requires, for the first base whose Python they have wheels for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolution import Request, Resolution, Resolved, exactly, versions_of
from trainyard.image.resolver import Failed, pins
from trainyard.spec import matrix, yaml_source
from trainyard.spec.catalog import plain_bases
from trainyard.spec.framework import installs_as
from trainyard.spec.lock import versions
from trainyard.spec.markers import applies
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import indexes, requirements
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted

logger = logging.getLogger(__name__)

#: Package -> the package that it is built for, whose version it has; its metadata does not say so:
#: https://github.com/pytorch/xla#installation
_BUILT_FOR = {"torch-xla": "torch"}

#: The reason, as the lock records it, for which the framework's packages have the target's versions if possible, and
#: the base or what they need is another, since a requirement needs that.
MOVED = "dependencies"


def reasons(spec: RepositorySpec, wanted: Wanted) -> list[Line]:
    """Return the lines for which the framework cannot be that of the target; none if it can.

    One that excludes the Python of the target's base, as in ``python<3.13``, asks for another base.
    """
    data = yaml_source.read(spec.file)
    given = [
        Line(text, spec.file, yaml_source.line_of(data, ("framework",)) or 1)
        for text in spec.workspace.document.framework
    ]
    target = versions(spec.extends.on(spec.arch).locked().framework)
    python = None if spec.workspace.document.base else contradictions.excluding_python(wanted, spec.python_version)
    other_base = [Line(f"python{python.text}", python.file, python.number)] if python else []
    return [*given, *contradictions.excluding(spec, wanted, target), *other_base]


def text(lines: Iterable[Line]) -> str:
    """Return :func:`reasons` as the lock records them."""
    return ", ".join(sorted({line.text for line in lines}))


def packages(spec: RepositorySpec, wanted: Wanted, reasons: Sequence[Line]) -> list[Line]:
    """Return the packages that the target names, with the versions that the repository asks for.

    A package that it does not ask for has the target's version or, if it asks for others, any that goes with these.
    """
    declared = spec.extends.on(spec.arch).declared_packages
    names = {canonicalize_name(Requirement(text).name): Requirement(text) for text in declared}
    asked: dict[str, list[Line]] = {}
    for line in (*reasons, *wanted.lines, *wanted.constraints, *wanted.overrides):
        name = installs_as(line.name, names)
        if name and applies(line.requirement.marker, spec.python_version, spec.architecture.machine):
            asked.setdefault(name, []).append(line)
    if not any(installs_as(line.name, names) for line in reasons):
        return [Line(text, spec.file, 1) for text in declared]
    for name, other in _BUILT_FOR.items():
        if {name, other} <= names.keys() and (both := [*asked.get(name, []), *asked.get(other, [])]):
            asked |= {name: both, other: both}
    found = []
    for name, requirement in names.items():
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        lines = asked.get(name, [Line("", spec.file, 1)])
        for line in dict.fromkeys(lines):
            specifier = contradictions.public(line.requirement.specifier) if line.text else ""
            found.append(Line(f"{requirement.name}{extras}{specifier}", line.file, line.number))
    return list(dict.fromkeys(found))


def _packages(spec: RepositorySpec, lines: Iterable[Line | str], *, alone: bool = False, **options: str) -> Resolved:
    """Return the packages of lines on a platform, from wheels; see :meth:`Resolution.packages`."""
    texts = [line if isinstance(line, str) else line.text for line in lines]
    names = sorted({canonicalize_name(Requirement(text).name) for text in texts})
    own = Resolution([spec], indexes=indexes.default(spec), options={"no-build-package": names, **options})
    return own.packages(texts, alone=alone)


def possible_bases(spec: RepositorySpec) -> list[str]:
    """Return the names of the bases that a repository may have, the preferred first.

    A target that has no packages of its framework has a base with that, the only one.
    """
    given = spec.workspace.document.base
    if given or not spec.extends.framework.packages:
        return [given or spec.extends.base]
    return list(dict.fromkeys((spec.extends.base, *plain_bases())))


def check_trainers(spec: RepositorySpec, version: str) -> None:
    """Raise a UserError about an image without a command that has no trainers for a version of its framework."""
    if not spec.run and not matrix.has_trainers(spec.framework.name, version):
        oldest = matrix.matrix().frameworks[spec.framework.name].trainers
        raise UserError(
            f"{spec.where}: the trainers of '{spec.extends.target}' need {spec.framework.name} {oldest} or later, not "
            f"{version}: give the command of your own, as in 'run: python train.py', or ask for another version"
        )


def check_python(spec: RepositorySpec) -> None:
    """Raise a UserError about the first base unless one has a Python that the code's projects allow."""
    every = [spec.on_base(name) for name in possible_bases(spec)]
    if all(contradictions.excluding_python(requirements.of_platform(one), one.python_version) for one in every):
        contradictions.check_python(every[0], requirements.of_platform(every[0]))


def on_base(spec: RepositorySpec, lines: Sequence[Line]) -> RepositorySpec:
    """Return the spec on the first base whose Python the packages have wheels for, and go together on.

    If they go together on none, it is the first that each of them has wheels for; resolving them explains the rest.

    Raises:
        UserError: there is none; the message says why, and which version is the nearest.
    """
    names = possible_bases(spec)
    why: list[str] = []
    excluded: dict[str, list[str]] = {}
    lacking: list[tuple[RepositorySpec, Line]] = []
    apart: list[RepositorySpec] = []
    for name in names:
        on_base = spec.on_base(name)
        python = f"Python {on_base.python_version}"
        wanted = requirements.of_platform(on_base)
        if line := contradictions.excluding_python(wanted, on_base.python_version):
            why.append(f"{line.where} excludes {python} of {name}")
            excluded.setdefault(line.where, []).append(on_base.python_version)
        elif _resolves(on_base, lines):
            if why:
                logger.info(f"{spec.target}: base {name} with {python}: {'; '.join(why)}")
            return on_base
        elif line := next((line for line in lines if not _resolves(on_base, [line], alone=True)), None):
            why.append(f"{line.text} has no wheel for {python}")
            lacking.append((on_base, line))
        else:
            why.append(f"{' with '.join(line.text for line in lines)} has no wheels for {python}")
            apart.append(on_base)
    if apart:
        return apart[0]
    also = "; ".join(f"{where} excludes Python {listed(of)}" for where, of in excluded.items())
    raise _without_wheel([other for other, _ in lacking], lacking[0][1], f" ({also})" if also else "")


def check_target(spec: RepositorySpec) -> None:
    """Check that the packages of the target have wheels for the base that the repository gives.

    Raises:
        UserError: one has none; the message says which, and the Pythons that it has wheels for.
    """
    line = yaml_source.line_of(yaml_source.read(spec.file), ("base",)) or 1
    lines = [Line(text, spec.file, line) for text in spec.extends.on(spec.arch).packages]
    if lacking := next((one for one in lines if not _resolves(spec, [one], alone=True)), None):
        raise _without_wheel([spec], lacking)


def _without_wheel(specs: Sequence[RepositorySpec], line: Line, also: str = "") -> UserError:
    """Return the error about a package without a wheel for the Pythons of bases, or of the one that is given."""
    spec, given = specs[0], specs[0].workspace.document.base
    pythons = listed((one.python_version for one in specs), "or") + (f" of {given}" if given else "")
    others = listed(pythons_with(spec, line)) if given else ""
    return UserError(
        f"{line.where}: {line.text} has no wheel for {spec.platform} and Python {pythons}"
        f"{f', but for {others}' if others else ''}{also}{_nearest(specs, line)}"
    )


def listed(pythons: Iterable[str], last: str = "and") -> str:
    """Return ``3.9, 3.10 and 3.11``, each once."""
    *others, end = sorted(set(pythons), key=Version) or [""]
    return f"{', '.join(others)} {last} {end}" if others else end


def pythons_with(spec: RepositorySpec, line: Line) -> list[str]:
    """Return the Pythons of bases that a package has wheels for."""
    firsts = {base.python: name for name, base in plain_bases().items()}
    return [python for python, name in firsts.items() if _resolves(spec.on_base(name), [line], alone=True)]


def _resolves(spec: RepositorySpec, lines: Iterable[Line], *, alone: bool = False) -> bool:
    """Return whether uv has an answer; ``alone``: without what the packages need."""
    try:
        return bool(_packages(spec, lines, alone=alone))
    except StepFailed as error:
        if isinstance(error, Failed) and not error.unsatisfiable:
            raise  # an index that does not answer says nothing about wheels
        return False


def _nearest(specs: Sequence[RepositorySpec], line: Line) -> str:
    """Return the nearest later release that has wheels, or else the nearest earlier one, as the end of a message."""
    name = line.requirement.name
    asked = [Version(item.version.removesuffix(".*")) for item in line.requirement.specifier]
    for bound, nearest, options in ((">", min, {"resolution": "lowest-direct"}), ("<", max, {})):
        known: dict[Version, str] = {}
        for spec in specs if asked else ():
            with contextlib.suppress(StepFailed):
                found = _packages(spec, [f"{name}{bound}{min(asked)}"], alone=True, **options)
                known.setdefault(Version(found[spec.arch][0].version), spec.python_version)
        if known:
            return f": the nearest that has one is {nearest(known)} (Python {known[nearest(known)]})"
    return ""


def resolve_framework(request: Request, lines: Sequence[Line]) -> Resolved:
    """Return what the framework's packages alone need, in versions that suit everything else.

    Args:
        request: of everything that the repository requires; its ``framework`` is empty.
        lines: :func:`packages`.
    Raises:
        Failed: uv found no solution, or failed.
    """
    together = versions_of(_together(request, lines))
    first = together[request.spec.arch]
    named = {line.name for line in lines if line.name in first}
    if any(first[name] != of.get(name, first[name]) for of in together.values() for name in named):
        # One image has one version of its framework.
        same = [Line(text, request.spec.file, 1) for text in pins({name: first[name] for name in named})]
        together = versions_of(_together(request, [*lines, *same]))
    alone = Wanted(lines=tuple(lines), options=request.wanted.options)
    request = replace(request, wanted=alone, wheels=(), compiled={}, kept=()).constrained(exactly(together))
    return {arch: [replace(pin, role="framework") for pin in every] for arch, every in request.resolve().items()}


def _together(request: Request, lines: Sequence[Line]) -> Resolved:
    """Return the framework's packages and everything else; see :func:`resolve_framework`."""
    names = [line.name for line in lines]
    wanted = request.wanted

    def others(of: Iterable[Line]) -> tuple[Line, ...]:
        return tuple(line for line in of if not installs_as(line.name, names))

    variants = contradictions.variants(dict.fromkeys(names, "0")).keys() - set(names)
    everything = replace(
        wanted,
        lines=(*lines, *others(wanted.lines)),
        constraints=others(wanted.constraints),
        overrides=others(wanted.overrides),
        excludes=(*wanted.excludes, *sorted(variants)),
        index_of={name: of for name, of in wanted.index_of.items() if not installs_as(name, names)},
    )
    return replace(request, wanted=everything).everything()


def other_bases(spec: RepositorySpec) -> list[RepositorySpec]:
    """Return the spec on bases with another Python, one for each that the projects allow, if it may have another."""
    found = {spec.python_version: spec}
    for one in map(spec.on_base, possible_bases(spec)):
        if not contradictions.excluding_python(requirements.of_platform(one), one.python_version):
            found.setdefault(one.python_version, one)
    return list(found.values())[1:]
