"""Lock a target for all its platforms and package indexes, and bring its Dockerfiles up to date."""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.installation import check_writable
from trainyard.image import base_contents, dockerfile, package_index
from trainyard.image.resolution import Request, resolve
from trainyard.image.resolver import check_conflicts, default_index, entries, pins, unhashed, versions
from trainyard.spec import framework
from trainyard.spec import lock as locks
from trainyard.spec.lock import DEFAULT, Lock, Locked, Section
from trainyard.spec.model import BaseContents, Spec, each_platform, load, requirements_of
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted

logger = logging.getLogger(__name__)


def lock(spec: Spec) -> tuple[Spec, list[Path]]:
    """Lock a target for the default index, and for the index of its spec if that answers.

    Packages that a nightly names without a version are locked in their newest release, pre-releases included.

    Returns:
        The spec with its new lock, and the paths of the Dockerfiles that changed with it.
    Raises:
        UserError: its versions conflict by images/conflicts.yaml, its base cannot be inspected, or it is part of the
            installed package.
        StepFailed: uv found no solution.
    """
    check_writable(spec.lock_file)  # before packages are resolved or a base is pulled, which take minutes
    if spec.base_spec().framework:
        return write(spec, _beside_base(spec, base_contents.inspect(spec)))
    index, reason = package_index.choose(spec)
    if index == DEFAULT and reason:
        logger.warning(f"no lock for index '{spec.framework.index}': {reason}")
    return write(spec, _resolved(spec, dict.fromkeys((DEFAULT, index))))


def lock_index(spec: Spec, index: str) -> tuple[Spec, list[Path]]:
    """Lock a target, which is locked for the default index, for another one too, on the platform of ``spec``.

    Returns, Raises:
        See :func:`lock`.
    """
    check_writable(spec.lock_file)
    known = spec.usable_lock or Lock()
    return write(spec, Lock({**known.sections, **_sections(spec, index, spec.packages, first=None)}, known.day))


def write(spec: Spec, content: Lock) -> tuple[Spec, list[Path]]:
    """Write a lock and the Dockerfiles that have it; return the spec with it, and their paths."""
    locks.write(spec.lock_file, content)
    spec = spec.with_lock(content)
    return spec, dockerfile.write(dockerfile.rendered(spec))


def _resolved(spec: Spec, indexes: Iterable[str]) -> Lock:
    """Resolve the packages of all platforms; the later ones have the versions of the first where they can."""
    platforms = each_platform(spec)
    newest = {} if spec.framework_of else _newest(platforms)
    day = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d}" if newest else ""
    sections: dict[Section, str] = {}
    for platform, index in itertools.product(platforms, indexes):
        packages = [framework.pinned(text, newest) for text in platform.declared_packages]
        first = None if platform is platforms[0] else Lock(sections).of(platforms[0].arch, index)
        sections |= _sections(platform, index, packages, first)
    if spec.framework_of:
        day = load(str(spec.framework_of), spec.arch, spec.context).day
    return Lock(sections, day)


def _request(spec: Spec, lines: Iterable[str], constraints: Iterable[str] = ()) -> Request:
    """Return the resolution of a target's requirements."""
    return Request(
        spec,
        Wanted(
            lines=tuple(Line(text, spec.file, 1) for text in lines),
            constraints=tuple(Line(text, spec.file, 1) for text in constraints),
        ),
        indexes=default_index(),
    )


def _newest(platforms: Sequence[Spec]) -> dict[str, str]:
    """Return canonical name -> newest version of the packages that the file of a nightly names without one.

    What several platforms have in common has the version of the first; if one of them lacks that, it cannot be locked.
    """
    newest: dict[str, str] = {}
    for spec in platforms:
        names = framework.unpinned(spec.declared_packages)
        if not names:
            continue
        request = _request(spec, spec.declared_packages + requirements_of(spec), pins(newest))
        options = {"prerelease-package": dict.fromkeys(names, "allow")}
        text = resolve(replace(request, wanted=replace(request.wanted, options=options)), sized=False)
        newest |= {name: version for name, version in versions(text).items() if name in names}
    return newest


def _sections(spec: Spec, index: str, packages: list[str], first: Locked | None) -> dict[Section, str]:
    """Resolve the pair of sections for the platform of ``spec`` and an index.

    Framework and requirements are resolved together, so that they are compatible, and then split: what the framework
    alone needs is in its section and its layers, the rest in the requirements'.

    Args:
        packages: the framework's, with versions.
        first: what the first of the platforms is locked to; None for that itself.
    """
    parent = load(str(spec.framework_of), spec.arch, spec.context).locked(index) if spec.framework_of else None
    everything = replace(
        _request(spec, packages + requirements_of(spec)),
        index=package_index.extra(spec, index),
        first=first.versions if first else {},
    )
    if parent:
        of_framework = parent.text("framework")
        # The same layers as those of the parent.
        everything = replace(everything, known=dict(entries(parent.text("requirements"))), shared=parent.requirements)
    else:
        together = versions(resolve(everything, sized=False))
        check_conflicts(spec, together)
        alone = _request(spec, packages, pins(together))
        of_framework = resolve(replace(alone, index=everything.index), sized=True)
    fixed = versions(of_framework)
    rest = resolve(replace(everything, framework=fixed), sized=True)
    check_conflicts(spec, fixed | versions(rest))
    return {Section(spec.arch, "framework", index): of_framework, Section(spec.arch, "requirements", index): rest}


def _beside_base(spec: Spec, contents: BaseContents) -> Lock:
    """Record the packages of a base that holds the framework, and lock the requirements that it lacks.

    Requirements that the base satisfies are used from it; the others are locked, and precede the base's packages on the
    module path.
    """
    taken = set(map(canonicalize_name, spec.base_spec().framework))
    needs = [
        str(requirement)
        for text in itertools.chain.from_iterable(contents.requires.get(name, []) for name in sorted(taken))
        if (requirement := Requirement(text)).marker is None and canonicalize_name(requirement.name) not in taken
    ]
    base, requirements = Section(spec.arch, "base"), Section(spec.arch, "requirements")
    inspected = spec.with_lock(Lock({base: contents.text(), requirements: ""}))
    known = unhashed(contents.packages)
    request = replace(_request(inspected, requirements_of(spec), needs), base=contents.packages, known=known)
    resolved = dict(entries(resolve(request, sized=False)))
    check_conflicts(spec, contents.packages | versions("".join(resolved.values())))
    rest = "".join(entry for name, entry in resolved.items() if name not in taken)
    return Lock({base: contents.text(), requirements: rest})
