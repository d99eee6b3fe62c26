"""Lock a target for all its platforms and package indexes, and bring its Dockerfiles up to date."""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.installation import check_writable
from trainyard.image import dockerfile, package_index, resolver
from trainyard.image.resolver import constraints, versions
from trainyard.spec import framework
from trainyard.spec import lock as locks
from trainyard.spec.lock import DEFAULT, Lock, Locked, Section
from trainyard.spec.model import Spec, each_platform, load, requirements_of

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
    index, reason = package_index.choose(spec)
    if index == DEFAULT and reason:
        logger.warning(f"no lock for index '{spec.framework.index}': {reason}")
    content = _beside_base(spec) if spec.framework_in_base else _resolved(spec, dict.fromkeys((DEFAULT, index)))
    locks.write(spec.lock_file, content)
    spec = spec.with_lock(content)
    return spec, dockerfile.write(dockerfile.rendered(spec))


def lock_index(spec: Spec, index: str) -> tuple[Spec, list[Path]]:
    """Lock a target, which is locked for the default index, for another one too, on the platform of ``spec``.

    Returns, Raises:
        See :func:`lock`.
    """
    check_writable(spec.lock_file)
    known = spec.usable_lock or Lock()
    sections = _sections(spec, index, spec.packages, first=None)
    content = Lock({**known.sections, **sections}, known.day)
    locks.write(spec.lock_file, content)
    spec = spec.with_lock(content)
    return spec, dockerfile.write(dockerfile.rendered(spec))


def _resolved(spec: Spec, indexes: Iterable[str]) -> Lock:
    """Resolve the packages of all platforms; the later ones have the versions of the first where they can."""
    platforms = each_platform(spec)
    newest = {} if spec.framework_of else _newest(platforms)
    day = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d}" if newest else ""
    sections: dict[Section, str] = {}
    for one, index in itertools.product(platforms, indexes):
        packages = [framework.pinned(text, newest) for text in one.declared_packages]
        first = None if one is platforms[0] else Lock(sections).of(platforms[0].arch, index)
        sections |= _sections(one, index, packages, first)
    if spec.framework_of:
        day = load(str(spec.framework_of), spec.arch, spec.context).day
    return Lock(sections, day)


def _newest(platforms: list[Spec]) -> dict[str, str]:
    """Return canonical name -> newest version of the packages that the file of a nightly names without one.

    What several platforms have in common has the version of the first; if one of them lacks that, it cannot be locked.
    """
    newest: dict[str, str] = {}
    for spec in platforms:
        names = framework.unpinned(spec.declared_packages)
        if not names:
            continue
        pins = resolver.compile_pins(
            spec.declared_packages + requirements_of(spec),
            python=spec.base_spec().python,
            platform=spec.wheel_platform,
            target=spec.target,
            context=spec.context,
            constraints=constraints(newest),
            prereleases=names,
        )
        newest |= {name: version for name, version in versions(pins).items() if name in names}
    return newest


def _sections(spec: Spec, index: str, packages: list[str], first: Locked | None) -> dict[Section, str]:
    """Resolve the pair of sections for the platform of ``spec`` and an index.

    Framework and requirements are resolved together, so that they are compatible, and then split: what the framework
    alone needs is in its section and its layers, the rest in the requirements'.

    Args:
        packages: the framework's, with versions.
        first: what the first of the platforms is locked to; None for that itself.
    """
    # Without hashes: uv would keep them, and they are those of files for that platform.
    agreed = constraints(first.versions) if first else ""
    parent = load(str(spec.framework_of), spec.arch, spec.context).locked(index) if spec.framework_of else None
    resolve = partial(
        resolver.compile_pins,
        python=spec.base_spec().python,
        platform=spec.wheel_platform,
        target=spec.target,
        context=spec.context,
        index=package_index.extra(spec, index),
    )
    everything = packages + requirements_of(spec)
    if parent:
        of_framework = parent.text("framework")
    else:
        together = versions(resolve(everything, preferred=agreed))
        resolver.check_conflicts(spec, together)
        of_framework = resolve(packages, constraints=constraints(together), sized=True)
    fixed = versions(of_framework)
    rest = resolve(
        everything,
        constraints=constraints(fixed),
        preferred=parent.text("requirements") if parent else agreed,  # the same layers as those of the parent
        without=fixed,
        sized=True,
    )
    resolver.check_conflicts(spec, fixed | versions(rest))
    if parent:
        rest = "".join(pin.text() for pin in locks.mark_added(locks.parse(rest), parent.requirements))
    return {Section(spec.arch, "framework", index): of_framework, Section(spec.arch, "requirements", index): rest}


def _beside_base(spec: Spec) -> Lock:
    """Inspect a base that holds the framework, record its packages, and lock the requirements that it lacks.

    Requirements that the base satisfies are used from it; the others are locked, and precede the base's packages on the
    module path.
    """
    contents = resolver.inspect_base(spec)
    taken = set(map(canonicalize_name, spec.base_spec().framework))
    needs = [
        str(requirement)
        for text in itertools.chain.from_iterable(contents.requires.get(name, []) for name in sorted(taken))
        if (requirement := Requirement(text)).marker is None and canonicalize_name(requirement.name) not in taken
    ]
    text = resolver.compile_pins(
        requirements_of(spec),
        python=contents.python_version,
        platform=spec.wheel_platform,
        target=spec.target,
        context=spec.context,
        constraints="\n".join(needs),
        preferred=constraints(contents.packages),
    )
    resolved = versions(text)
    resolver.check_conflicts(spec, contents.packages | resolved)
    missing = {name for name, version in resolved.items() if contents.packages.get(name) != version} - taken
    rest = "".join(entry for name, entry in resolver.entries(text) if name in missing)
    return Lock({Section(spec.arch, "base"): contents.text(), Section(spec.arch, "requirements"): rest})
