"""Lock a target for all its platforms and package indexes, and bring its Dockerfiles up to date.

uv resolves all platforms at once, so that they agree. Versions of the lock that is there are kept until something needs
another one.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError, nearest
from trainyard.common.installation import check_writable
from trainyard.image import base_contents, dockerfile, package_index
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolution import Resolution, Resolved, exactly, versions_of
from trainyard.image.resolver import check_conflicts, default_index
from trainyard.spec import framework, pylock
from trainyard.spec.lock import DEFAULT, Lock, Locked, mark_added, ordered, versions
from trainyard.spec.model import BaseContents, Spec, each_platform, load, relative, requirements_of

logger = logging.getLogger(__name__)


def lock(spec: Spec) -> tuple[Spec, list[Path]]:
    """Lock a target, and write its locks; see :func:`resolve` and :func:`write`."""
    return write(spec, resolve(spec))


def resolve(spec: Spec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = ()) -> Lock:
    """Resolve a target for the default index, and for the index of its spec if that answers.

    Packages that a nightly names without a version are locked in their newest release, pre-releases included, and so is
    everything that it needs.

    Args:
        upgrade: keep no version, ``upgrade_packages``: names whose versions are not kept.
    Raises:
        UserError: its versions conflict by images/conflicts.yaml, its base cannot be inspected, or it is part of the
            installed package.
        StepFailed: uv found no solution.
    """
    check_writable(spec.lock_file)  # before packages are resolved or a base is pulled, which take minutes
    known = spec.usable_lock or Lock()
    upgraded = set(map(canonicalize_name, upgrade_packages))
    if upgraded and (unknown := sorted(upgraded - {name for name, _ in _known(known, DEFAULT)})):
        names = [name for name, _ in _known(known, DEFAULT)]
        raise UserError(f"{relative(spec.lock_file)}: no package '{unknown[0]}'{nearest(unknown[0], names)}")
    if spec.base_spec().framework:
        return _beside_base(spec, base_contents.inspect(spec))
    index, reason = package_index.choose(spec)
    if index == DEFAULT and reason:
        logger.warning(f"no lock for index '{spec.framework.index}': {reason}")
    every = upgrade or (spec.nightly and not spec.framework_of)
    found = Lock()
    for name in dict.fromkeys((DEFAULT, index)):
        kept = [] if every else [pair for pair in _known(known, name) if pair[0] not in upgraded]
        found = _with(found, _resolved(spec, name, kept, _chosen(spec, found)))
    return found


def _with(lock: Lock, more: Lock) -> Lock:
    """Return a lock with what is locked for another index."""
    return replace(more, indexes={**lock.indexes, **more.indexes})


def lock_index(spec: Spec, index: str) -> tuple[Spec, list[Path]]:
    """Lock a target, which is locked for the default index, for another one too, and write that.

    Returns, Raises:
        See :func:`resolve` and :func:`write`.
    """
    check_writable(spec.lock_file)
    spec.locked()  # reports a lock that is missing or cannot be used
    known = spec.usable_lock or Lock()
    return write(spec, _with(known, _resolved(spec, index, _known(known, DEFAULT), _chosen(spec, known))))


def lock_versions(spec: Spec, wanted: Lock) -> tuple[Spec, list[Path]]:
    """Lock a target in the versions of another lock, for the platforms and indexes that this has, and write it.

    Returns, Raises:
        See :func:`resolve` and :func:`write`.
    """
    found = Lock()
    for index, locked in wanted.indexes.items():
        exact = exactly({arch: of.versions for arch, of in locked.items()})
        found = _with(found, replace(_resolved(spec, index, [], exact), day=wanted.day))
    return write(spec, found)


def write(spec: Spec, lock: Lock) -> tuple[Spec, list[Path]]:
    """Write the locks of a target and the Dockerfiles that have them, and remove those of other indexes.

    Returns:
        The spec with its new lock, and the paths of what changed.
    Raises:
        UserError: it is part of the installed package, or its folder cannot be written.
    """
    written = pylock.write(spec.lock_file, lock)
    spec = spec.with_lock(lock)
    return spec, [*written, *dockerfile.write(dockerfile.rendered(spec))]


def _known(known: Lock, index: str) -> list[tuple[str, str]]:
    """Return the names and versions that a lock has for an index on any platform, or for the default index."""
    locked = known.indexes.get(index, known.indexes.get(DEFAULT, {}))
    return sorted({(pin.name, pin.version) for of in locked.values() for pin in of.pins})


def _chosen(spec: Spec, lock: Lock) -> list[str]:
    """Return pins of the packages that a nightly names without a version, as the default index has them."""
    names = framework.unpinned(spec.framework.packages)
    return [f"{name}=={version}" for name, version in _known(lock, DEFAULT) if name in names]


def _resolution(
    spec: Spec, index: str, kept: Iterable[tuple[str, str]] = (), constraints: Sequence[str] = ()
) -> Resolution:
    """Return what is resolved for all platforms of a target, and a package index."""
    names = {canonicalize_name(Requirement(text).name) for text in spec.framework.packages}
    variants = contradictions.variants(dict.fromkeys(names, "0")).keys() - names
    newest = framework.unpinned(spec.framework.packages)
    options: dict[str, object] = {"exclude-dependencies": sorted(variants)}
    options |= {"prerelease-package": dict.fromkeys(newest, "allow")} if newest else {}
    return Resolution(
        each_platform(spec), package_index.extra(spec, index), default_index(), kept, constraints, options
    )


def _resolved(spec: Spec, index: str, kept: Iterable[tuple[str, str]], constraints: Sequence[str]) -> Lock:
    """Resolve framework and requirements together, so that they are compatible, and mark what the framework needs."""
    resolution = _resolution(spec, index, kept, constraints)
    if spec.framework_of:
        return _on_target(resolution, load(str(spec.framework_of), spec.arch, spec.context), index)
    together = _checked(spec, resolution.without_conflicts([*spec.framework.packages, *requirements_of(spec)]))
    alone = versions_of(resolution.packages(spec.framework.packages, exactly(versions_of(together))))
    locked = {
        arch: Locked(tuple(replace(pin, role="framework") if pin.name in alone[arch] else pin for pin in every))
        for arch, every in together.items()
    }
    newest = framework.unpinned(spec.framework.packages)
    day = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d}" if newest else ""
    return Lock(spec.python_version, {index: locked}, day)


def _checked(spec: Spec, resolved: Resolved) -> Resolved:
    """Return what was resolved, after :func:`check_conflicts` of each platform."""
    for installed in versions_of(resolved).values():
        check_conflicts(spec, installed)
    return resolved


def _on_target(resolution: Resolution, parent: Spec, index: str) -> Lock:
    """Resolve the requirements of an image that has the framework of a target.

    What it has in common with the target has the same versions, and so the same layers.
    """
    spec, day = resolution.spec, parent.usable_lock.day if parent.usable_lock else ""
    of_parent = {one.arch: parent.on(one.arch).locked(index) for one in resolution.platforms}
    fixed = exactly({arch: versions(locked.framework) for arch, locked in of_parent.items()})
    known = {name: version for locked in of_parent.values() for name, version in locked.versions.items()}
    kept = {**dict(resolution.kept), **known}
    resolution = replace(resolution, kept=kept.items(), constraints=[*resolution.constraints, *fixed])
    together = _checked(spec, resolution.without_conflicts([*spec.framework.packages, *requirements_of(spec)]))
    locked = {}
    for arch, every in together.items():
        names = versions(of_parent[arch].framework)
        others = mark_added([pin for pin in every if pin.name not in names], of_parent[arch].pins)
        locked[arch] = Locked(ordered([*of_parent[arch].framework, *others]))
    return Lock(spec.python_version, {index: locked}, day)


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
    inspected = spec.with_lock(Lock(contents.python_version, {DEFAULT: {spec.arch: Locked(base=contents)}}))
    known = [(name, version) for name, version in contents.packages.items() if base_contents.is_version(version)]
    resolution = replace(_resolution(inspected, DEFAULT, known, needs), platforms=[inspected], options={})
    resolved = resolution.without_conflicts(requirements_of(inspected))[spec.arch]
    check_conflicts(spec, contents.packages | versions(resolved))
    rest = [pin for pin in resolved if pin.name not in taken and contents.packages.get(pin.name) != pin.version]
    return Lock(inspected.python_version, {DEFAULT: {spec.arch: Locked(tuple(rest), contents)}})
