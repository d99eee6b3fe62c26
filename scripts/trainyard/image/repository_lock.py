"""Lock what a user's repository requires, resolved for its target.

The framework is that of the target: its lock is copied, and kept until ``trainyard lock --upgrade``. If the target's
base holds the framework, the contents of the base are recorded instead. Everything else is resolved with uv beside it,
for all platforms of trainyard.yaml at once: the user's requirements, those of the target's trainers, and those of
wheels that are built from git repositories and folders.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.utils import canonicalize_name

import trainyard
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.image import (
    base_contents,
    base_image,
    build_backends,
    foreseen,
    framework_choice,
    lock_origin,
    package_index,
    resolution,
)
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.explanation import explained
from trainyard.image.resolution import Request, Resolution, Resolved, versions_of
from trainyard.image.resolver import Failed, NoSolution, check_conflicts, default_index, pins
from trainyard.spec import framework, markers, matrix, model, pylock, state
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.lock import DEFAULT, Lock, Locked, Origin, Pin, Unreadable, ordered, versions
from trainyard.spec.model import BaseContents, RepositorySpec, Spec, relative
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Line, Source
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

logger = logging.getLogger(__name__)

#: ``constrain(versions)``: constraints besides those of a repository, for the versions that a platform had before.
Constrain = Callable[[Mapping[str, str]], Iterable[str]]

#: What :func:`_answer` returns.
_Answer = tuple[list[Line], Lock | None, dict[str, dict[str, Locked]]]

#: What the lock of a trial says in the place of the requirements for which the framework is not that of the target: its
#: versions are those of the lock.
_TRIAL = "a trial"


def lock(
    spec: RepositorySpec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = (), check: bool = False
) -> RepositorySpec:
    """Write the lock for all platforms, unless it is up to date.

    Versions of an existing lock are kept where the requirements allow it.

    Args:
        upgrade: take the framework and base of this Trainyard, and the newest versions of everything else.
        upgrade_packages: names whose newest versions are taken.
        check: write nothing.
    Returns:
        The spec with the new lock.
    Raises:
        UserError: the requirements have a mistake or contradict the target's framework; or a platform was added, and
            another Trainyard locked the others.
        StepFailed: uv could not resolve them; or, with ``check``, the lock is out of date.
    """
    spec, before = build_backends.asked(spec), spec.lock
    if isinstance(spec.lock, Unreadable) and spec.lock.rest:
        spec = spec.with_lock(spec.lock.rest)
    elif not upgrade and isinstance(spec.lock, Unreadable) and not spec.lock.missing:
        logger.warning(f"{relative(spec.lock_file)} cannot be read, so all versions are resolved anew")
    old = None if upgrade else spec.usable_lock
    if old:
        check_base(spec, old)
    if spec.framework_in_base and (upgrade or not lock_origin.has_base(spec)):
        spec = _with_base(spec, base_contents.inspect(spec, spec.base_contents))
    spec, resolved = resolve(spec, old, frozenset(map(canonicalize_name, upgrade_packages)))
    locked = spec.with_lock(resolved)
    _check_framework(locked)
    current = resolved == before
    if check and not current:
        raise StepFailed(
            f"The lock at {relative(spec.lock_file)} needs to be updated, but '--check' was provided: run "
            f"'{spec.command('lock')}'"
        )
    if not current:
        pylock.write(spec.lock_file, resolved)
    return locked


def trial(spec: RepositorySpec, lock: Lock, base: str) -> Lock:
    """Return a lock as if it had been resolved now, so that an image is built with its packages, whatever they are.

    Args:
        base: reference of the base image.
    """
    origin = Origin(trainyard.__version__, "", spec.extends.target, base, "", _TRIAL)
    spec = spec.with_lock(replace(lock, origin=origin))  # on that base
    lock = replace(lock, python=spec.python_version)
    origin = replace(origin, contents=lock_origin.contents(spec), inputs=lock_origin.inputs(spec, lock))
    return replace(lock, origin=origin)


def check_base(spec: RepositorySpec, lock: Lock) -> None:
    """Raise a UserError if a lock was not resolved on the base of its target, and ``base`` asks for no other one."""
    origin = lock.origin
    same_target = origin and origin.target == spec.extends.target
    if origin and same_target and not lock_origin.is_of(lock, spec) and not spec.workspace.document.base:
        raise UserError(
            f"{relative(spec.lock_file)}: was locked on {origin.base.partition('@')[0]}, and {origin.target} is on "
            f"base {spec.base} now: run '{spec.command('lock')} --upgrade'"
        )


def _check_framework(spec: RepositorySpec) -> None:
    """Check that an image without a command has trainers for the locked framework, and one for GPUs code for them.

    Raises:
        UserError: it has none, or on another platform alone, as torch before 2.11, which is for CPUs on arm64.
    """
    framework_choice.check_trainers(spec, spec.version)
    platforms = model.each_platform(spec)
    lacking = [one for one in platforms if spec.accelerator == "nvidia" and not one.device_code]
    if lacking and any(spec.on(arch).device_code for arch in ARCHITECTURES):
        raise UserError(
            f"{spec.where}: {spec.framework.name} {spec.version} has no wheels with code for GPUs on "
            f"{lacking[0].platform}: ask for a later version, or remove the platform from 'platforms'"
        )


def _with_base(spec: RepositorySpec, base: BaseContents) -> RepositorySpec:
    """Return the spec with the contents of its base, before anything is resolved beside them."""
    locked = {one.arch: Locked(base=base) for one in model.each_platform(spec)}
    origin = Origin("", "", spec.extends.target, base.reference, "")
    return spec.with_lock(Lock(base.python_version, {DEFAULT: locked}, origin=origin))


def resolve(
    spec: RepositorySpec, old: Lock | None, upgraded: frozenset[str], constrain: Constrain = lambda _: ()
) -> tuple[RepositorySpec, Lock]:
    """Return the spec on the base that its framework has wheels for, and the lock that its requirements resolve to.

    It raises what :func:`lock` does, which writes it.

    Args:
        old: whose versions are kept.
        upgraded: canonical names of packages whose versions are not kept.
        constrain: is called for each platform.
    """
    spec = build_backends.asked(spec)
    for error in foreseen.refusals(spec):
        raise error
    if old:
        _check_known(spec, upgraded, old)
    state.own(spec.kept)

    spec, (reasons, kept, indexed) = _answer_on_a_base(spec, old, upgraded, constrain)
    origin = kept.origin if kept else None
    lock = Lock(spec.python_version, indexed)
    return spec, replace(
        lock,
        origin=Origin(
            version=origin.version if origin else trainyard.__version__,
            contents=origin.contents if origin else lock_origin.contents(spec),
            target=spec.extends.target,
            base=_base(spec, origin),
            inputs=lock_origin.inputs(spec, lock),
            framework=framework_choice.text(reasons),
        ),
    )


def answered(spec: RepositorySpec) -> None:
    """Resolve what neither an engine nor a build has to tell; raise what :func:`lock` does, which writes the result."""
    spec, (reasons, _, indexed) = _answer_on_a_base(spec, spec.usable_lock, frozenset(), lambda _: (), built=False)
    origin = Origin("", "", spec.extends.target, spec.base_spec().image, "", framework_choice.text(reasons))
    _check_framework(spec.with_lock(Lock(spec.python_version, indexed, origin=origin)))


def _answer_on_a_base(
    spec: RepositorySpec, old: Lock | None, upgraded: frozenset[str], constrain: Constrain, *, built: bool = True
) -> tuple[RepositorySpec, _Answer]:
    """Return what :func:`_answer` does for the base of the framework or, if nothing goes together there, for another.

    A base that the repository gives is the only one.
    """
    spec, reasons = _on_base(spec, old)
    try:
        return spec, _answer(spec, old, reasons, upgraded, constrain, built=built)
    except (NoSolution, Failed) as refused:
        if isinstance(refused, Failed) and not refused.unsatisfiable:
            raise
        for other in framework_choice.other_bases(spec):
            reasons = framework_choice.reasons(other, requirements.of_platform(other)) or [_moved(other)]
            with contextlib.suppress(UserError, StepFailed):
                answer = _answer(other, old, reasons, upgraded, constrain, built=built)
                logger.info(
                    f"{spec.target}: base {other.base} with Python {other.python_version}: with Python "
                    f"{spec.python_version}, {refused}"
                )
                return other, answer
        raise


def _moved(spec: RepositorySpec) -> Line:
    """Return the reason for which the base, or what the framework needs, is not that of the target."""
    return Line(framework_choice.MOVED, spec.file, 1)


def _answer(
    spec: RepositorySpec,
    old: Lock | None,
    reasons: list[Line],
    upgraded: frozenset[str],
    constrain: Constrain,
    *,
    built: bool = True,
) -> _Answer:
    """Resolve with the framework of the target or, if nothing goes with that, with other versions of what it needs.

    Args:
        reasons: lines for which the framework is not that of the target; ``built``: see :func:`_request`.
    Returns:
        the reasons that hold, the old lock if it is kept, and what is locked, by package index and architecture.
    """
    kept = _kept(spec, old, reasons)
    if kept and built and not all(kept.of(one.arch) for one in model.each_platform(spec)):
        lock_origin.check_tool(spec)  # the framework of a platform that was added is that of this Trainyard
    previous = _Previous(old or Lock(), kept is not None, upgraded)
    try:
        return reasons, kept, _resolved(_request(spec, previous, constrain, built=built), previous, reasons)
    except (NoSolution, Failed) as refused:
        # By uv's exit status: its words may be others than those that make a NoSolution of it.
        if reasons or spec.base_contents or (isinstance(refused, Failed) and not refused.unsatisfiable):
            raise
        try:
            return _answer(spec, old, [_moved(spec)], upgraded, constrain, built=built)
        except NoSolution:
            raise
        except (UserError, StepFailed):
            raise refused from None


def _kept(spec: RepositorySpec, old: Lock | None, reasons: Sequence[Line]) -> Lock | None:
    """Return the old lock if it has the framework and base that a repository has now."""
    origin = old.origin if old and lock_origin.is_of(old, spec) else None
    return old if origin and origin.framework == framework_choice.text(reasons) else None


def _on_base(spec: RepositorySpec, old: Lock | None) -> tuple[RepositorySpec, list[Line]]:
    """Return the spec on the base that its framework has wheels for, and why that is not the target's.

    The base of the old lock is kept as long as the reasons are the same.

    Raises:
        UserError: no base has a Python that the framework has wheels for.
    """
    if spec.base_contents:
        return spec, []
    home = spec.on_base(spec.workspace.document.base or spec.extends.base)
    wanted = requirements.of_platform(home)
    reasons = framework_choice.reasons(home, wanted)
    if not reasons:
        return home, []
    if _kept(spec, old, reasons):
        return spec, reasons
    packages = framework_choice.packages(home, wanted, reasons)
    names = [canonicalize_name(line.requirement.name) for line in packages]
    # What the framework needs has a version that the repository asks for, which needs a wheel, too.
    needed = [line for line in reasons if line.name != "python" and not framework.installs_as(line.name, names)]
    if needed:
        with contextlib.suppress(UserError):
            return framework_choice.on_base(home, [*packages, *needed]), reasons
    return framework_choice.on_base(home, packages), reasons


@dataclass(frozen=True)
class _Previous:
    """Give what was locked before.

    Attributes:
        lock: what was locked.
        same_target: whether it is of the same target, base and framework.
        upgraded: names whose versions are not kept.
    """

    lock: Lock
    same_target: bool
    upgraded: frozenset[str]

    def of(self, platforms: Iterable[Spec], index: str = DEFAULT) -> list[Locked]:
        """Return what was locked for platforms and an index, or else for the default index."""
        return [self.lock.known(one.arch, index) for one in platforms]

    def kept(self, *others: Iterable[Pin]) -> list[tuple[str, str]]:
        """Return the names and versions to keep: for each package, those of the last that has it."""
        known: dict[str, dict[str, None]] = {}
        for every in others:
            of: dict[str, dict[str, None]] = {}
            for pin in every:
                of.setdefault(pin.name, {})[pin.version] = None
            known |= of
        return [(name, one) for name, of in sorted(known.items()) if name not in self.upgraded for one in of]


class _Wheels:
    """Build the wheels of sources; one that several resolutions have is built once."""

    def __init__(self, spec: RepositorySpec, previous: _Previous) -> None:
        pins = [pin for of in previous.lock.indexes.values() for locked in of.values() for pin in locked.pins]
        made = {pin.made for pin in pins if pin.made and pin.made.commit and pin.name not in previous.upgraded}
        self._folder, self._commits = spec.build_folder / "wheels", {one.key: one.commit for one in made}
        self._make = build_backends.of_spec(spec).wheel
        self._built: dict[Source, Wheel] = {}

    def of(self, sources: Sequence[Source]) -> list[Wheel]:
        """Return the wheels of sources, and those of what these need that is no package of an index."""
        made: list[Wheel] = []
        waiting, names = list(sources), {one.name for one in sources}
        while waiting:
            source = waiting.pop(0)
            if source not in self._built:
                (self._built[source],) = wheels.build([source], self._folder, self._commits, self._make)
            made.append(self._built[source])
            more = [one for one in wheels.further(made[-1].file, source) if one.name not in names]
            waiting, names = [*waiting, *more], names | {one.name for one in more}
        return made


def _request(spec: RepositorySpec, previous: _Previous, constrain: Constrain, *, built: bool = True) -> Request:
    """Return what a repository requires, with its source distributions, and the wheels that were made of sources.

    Args:
        built: if not, the sources from which a wheel would have to be made are left out.
    """
    platforms = model.each_platform(spec)
    wanted = requirements.of_image(spec)
    if not built:
        there = tuple(one for one in wanted.sources if one.is_path and one.location.endswith(".whl"))
        absent = (one.name for one in wanted.sources if one.name and one not in there)
        wanted = replace(wanted, sources=there, excludes=(*wanted.excludes, *absent))
    contradictions.check_python(spec, wanted)
    for line in wanted.unasked:
        logger.info(f"{line.where}: {line.shown} is not asked: the image has the torch of {spec.extends.target}")
    more = {
        one.architecture.machine: [Line(text, spec.file, 1) for text in constrain(versions(locked.requirements))]
        for one, locked in zip(platforms, previous.of(platforms), strict=True)
    }
    request = Request(
        platforms,
        replace(wanted, constraints=(*wanted.constraints, *requirements.joined(more))),
        indexes=[*indexes.of_machine(), *indexes.of_project(spec.workspace, wanted.addresses)],
        wheels=_Wheels(spec, previous).of(wanted.sources),
    )
    known = [pin for locked in previous.of(platforms) for pin in locked.compiled if pin.name not in previous.upgraded]
    with explained(request, wanted.compiled):
        return replace(request, compiled=resolution.compile_sources(request, versions(known)))


def _resolved(request: Request, previous: _Previous, reasons: Sequence[Line]) -> dict[str, dict[str, Locked]]:
    """Return what is locked, by package index and architecture.

    Args:
        reasons: lines for which the framework is not that of the target.
    """
    spec = request.spec
    frameworks = _frameworks(request, previous, reasons)
    fixed = {pin.name for every in frameworks[DEFAULT].values() for pin in every}
    if refused := sorted(previous.upgraded & fixed):
        raise UserError(
            f"'{refused[0]}' is part of the framework of {spec.extends.target}, which 'trainyard lock --upgrade' "
            "updates as a whole"
        )
    locked: dict[str, dict[str, Locked]] = {}
    for index, of in frameworks.items():
        platforms = [one for one in request.platforms if one.arch in of]
        for one in platforms:
            have = versions(of[one.arch])
            if lines := contradictions.excluding(one, request.wanted, have):
                raise contradictions.contradiction(one, lines[0], have)
            if index == DEFAULT:  # others have other files
                _check_hashes(one, request.wanted, of[one.arch])
        try:
            rest = _requirements(replace(request, platforms=platforms, framework=versions_of(of)), previous, index)
        except StepFailed as error:
            if index == DEFAULT:
                raise
            logger.warning(f"no packages of index '{index}' in {relative(spec.lock_file)}: {error}")
            continue
        for one in platforms:
            held = spec.base_contents.packages if spec.base_contents else {}
            check_conflicts(one, {**held, **versions(of[one.arch]), **versions(rest[one.arch])})
        locked[index] = {
            one.arch: Locked((*(() if spec.base_contents else of[one.arch]), *rest[one.arch]), spec.base_contents)
            for one in platforms
        }
    tools = _builds(request, {arch: of.versions for arch, of in locked[DEFAULT].items()}, previous)
    return {
        index: {arch: _sorted(of, tools.get(arch, ())) for arch, of in every.items()} for index, every in locked.items()
    }


def _sorted(locked: Locked, more: Iterable[Pin]) -> Locked:
    """Return what is locked with more pins."""
    return replace(locked, pins=ordered([*locked.pins, *more]))


def _requirements(request: Request, previous: _Previous, index: str) -> Resolved:
    """Return everything but the framework, and the archives of what is compiled, for an index.

    The requirements of the target's trainers are added without versions. The versions that are kept are those of the
    old lock, then of the base image, then of the target. What the image shares with its target are the pins of the
    target's lock and of the old one: a later Trainyard, with another lock of the target, does not change the layers of
    an image whose requirements are the same.
    """
    spec = request.spec
    pinned = request.frameworks.get(spec.framework.named_after(request.frameworks) or "", framework.UNLOCKED)
    needed = model.requirements_of(spec.extends) if matrix.has_trainers(spec.framework.name, pinned) else []
    own = [Line(framework.without_version(text), spec.file, 1) for text in needed]
    own = [line for line in own if line.name not in request.frameworks]
    before = previous.of(request.platforms, index)
    shared: dict[str, list[Pin]] | None = None
    if spec.base_contents:
        # The target's lock is for another day's base.
        known = [Pin(name, version, ()) for name, version in framework.versions_of(needed).items()]
        known = [replace(pin, name=canonicalize_name(pin.name)) for pin in known]
    else:
        targets = {one.arch: spec.extends.on(one.arch).locked().requirements for one in request.platforms}
        known = [pin for pins in targets.values() for pin in pins]
        shared = {
            one.arch: [
                *targets[one.arch],
                *(pin for pin in old.requirements if previous.same_target and not pin.added),
            ]
            for one, old in zip(request.platforms, before, strict=True)
        }
    held = [Pin(name, version, ()) for name, version in request.base.items() if base_contents.is_version(version)]
    request = replace(
        request,
        wanted=replace(request.wanted, lines=(*own, *request.wanted.lines)),
        index=package_index.extra(spec.parent, index),
        kept=previous.kept(known, held, [pin for old in before for pin in old.requirements]),
        shared=shared,
    )
    lines = [line for line in request.wanted.lines[len(own) :] if line.name not in request.frameworks]
    with explained(request, lines):
        resolved = request.resolve()
    archives = [(one, one.pin) for one in request.compiled.values()]
    found = {
        one.arch: [*resolved[one.arch], *(pin for archive, pin in archives if archive.applies(one))]
        for one in request.platforms
    }
    for one in request.platforms:
        _check_hashes(one, request.wanted, found[one.arch])
    return found


def _check_hashes(spec: Spec, wanted: Wanted, locked: Iterable[Pin]) -> None:
    """Check that packages have a file that the requirements, constraints or uv.lock allow.

    Raises:
        UserError: an index has other files than those whose hashes are pinned.
    """
    image, pinned = (spec.python_version, spec.architecture.machine), (*wanted.lines, *wanted.constraints)
    pinned = tuple(one for one in pinned if one.hashes and markers.applies(one.requirement.marker, *image))
    for pin in locked:
        lines = [
            one for one in pinned if one.name == pin.name and one.requirement.specifier.contains(pin.version, True)
        ]
        if not lines or not pin.hashes or not all(one.hashes.isdisjoint(pin.hashes) for one in lines):
            continue
        if other := next((one for one in lines if any(":" in sha for sha in one.hashes)), None):
            logger.warning(f"{other.where}: only SHA-256 is compared: other hashes of {pin.name} are not")
        else:
            raise UserError(
                f"{lines[0].where}: no file of {pin.name} {pin.version} for this image has a hash that is pinned here: "
                f"the index has sha256:{pin.hashes[0]}: pin that if it is the right one"
            )


def _builds(request: Request, installed: resolution.Versions, previous: _Previous) -> Resolved:
    """Return what source distributions are compiled with, besides what the image has.

    Args:
        installed: versions of everything that the image has.
    """
    if not request.compiled and not request.spec.workspace.compiles_own:
        return {}
    present = {
        arch: {name: version for name, version in of.items() if name not in request.compiled}
        for arch, of in installed.items()
    }
    request = replace(request, framework=present)
    request = replace(
        request,
        wanted=replace(request.wanted, lines=resolution.build_lines(request)),
        kept=previous.kept([pin for old in previous.of(request.platforms) for pin in old.build_requires]),
    )
    with explained(request, request.wanted.lines):
        return resolution.build_requirements(request)


def _base(spec: RepositorySpec, kept: Origin | None) -> str:
    """Return the base image: the one that was inspected, that of a lock that is kept, or today's."""
    if spec.base_contents:
        return spec.base_contents.reference
    return kept.base if kept else base_image.lockable_reference(spec.base, spec.context)


def _frameworks(request: Request, previous: _Previous, reasons: Sequence[Line]) -> dict[str, Resolved]:
    """Return name of an index -> the framework, for every index that answers, or that it was locked for.

    That of a base has no files.
    """
    spec, platforms = request.spec, request.platforms
    if contents := spec.base_contents:
        held = [Pin(name, version, ()) for name, version in base_contents.framework(contents).items()]
        return {DEFAULT: {one.arch: held for one in platforms}}
    found: dict[str, Resolved] = {}
    locked = {name: None for one in platforms for name in previous.lock.names(one.arch)}
    for index in locked if previous.same_target else ():
        known = {one.arch: previous.lock.of(one.arch, index) for one in platforms}
        found[index] = {arch: of.framework for arch, of in known.items() if of}
    if missing := [one for one in platforms if one.arch not in found.get(DEFAULT, {})]:
        request = replace(request, platforms=missing)
        agreed = {name: one for every in found.get(DEFAULT, {}).values() for name, one in versions(every).items()}
        fresh = _asked_frameworks(request, previous, reasons, agreed) if reasons else _frameworks_of_target(missing)
        for index, of in fresh.items():
            found[index] = found.get(index, {}) | of
    return found


def _asked_frameworks(
    request: Request, previous: _Previous, reasons: Sequence[Line], agreed: Mapping[str, str]
) -> dict[str, Resolved]:
    """Return the framework in the versions that a repository asks for.

    Args:
        agreed: versions on other platforms, which these have, too.
    """
    spec = request.spec
    of_platforms = {
        one.architecture.machine: framework_choice.packages(one, request.wanted, reasons) for one in request.platforms
    }
    lines = requirements.joined(of_platforms)
    targets = [spec.extends.on(one.arch).locked() for one in request.platforms]
    of_targets = [pin for one in targets for pin in (*one.framework, *one.requirements)]
    same = pins({line.name: agreed[line.name] for line in lines if line.name in agreed})
    lines = (*lines, *(Line(text, spec.file, 1) for text in same))
    found: dict[str, Resolved] = {}
    for index in _indexes(spec):
        old = [pin for one in previous.of(request.platforms, index) for pin in (*one.framework, *one.requirements)]
        everything = replace(
            request, index=package_index.extra(spec.parent, index), kept=previous.kept(of_targets, old)
        )
        asked_for = any(framework.installs_as(line.name, [package.name for package in lines]) for line in reasons)
        try:
            with explained(request, [*reasons, *request.wanted.lines]):
                found[index] = _free_if_needed(everything, lines, free=not asked_for and not agreed)
        except (UserError, StepFailed) as error:
            if index != DEFAULT:
                logger.warning(f"no packages of index '{index}' in {relative(spec.lock_file)}: {error}")
            elif isinstance(error, StepFailed) or asked_for or not str(error).startswith(f"{reasons[0].where}: "):
                raise
            else:
                raise contradictions.contradiction(spec, reasons[0], targets[0].versions) from None
    chosen = versions(pin for every in found[DEFAULT].values() for pin in every)
    if reasons[0].text == framework_choice.MOVED:
        other = [f"{name} {one}" for name, one in chosen.items() if targets[0].versions.get(name, one) != one]
        if other:
            logger.info(f"{spec.target}: what the framework needs is {', '.join(other)}, as the requirements ask for")
        return found
    shown = ", ".join(
        f"{name} {chosen[name]}" for name in dict.fromkeys(line.name for line in (*lines, *reasons)) if name in chosen
    )
    logger.info(f"{spec.target}: {shown}: {reasons[0].where} asks for {reasons[0].shown}")
    return found


def _free_if_needed(request: Request, lines: Sequence[Line], *, free: bool) -> Resolved:
    """Return the framework in the versions of ``lines``; ``free``: or else in any that suits everything."""
    try:
        return framework_choice.resolve_framework(request, lines)
    except Failed as refused:
        if not (free and refused.unsatisfiable):
            raise
        try:
            anything = [replace(line, text=framework.without_version(line.text)) for line in lines]
            return framework_choice.resolve_framework(request, anything)
        except Failed as also:
            raise (also if also.unsatisfiable else refused) from None


def _indexes(spec: RepositorySpec) -> list[str]:
    """Return the names of the package indexes that a repository is locked for: all that answer."""
    chosen = DEFAULT if spec.context.offline else package_index.choose(spec.extends)[0]
    return list(dict.fromkeys((DEFAULT, chosen)))


def _frameworks_of_target(platforms: Sequence[RepositorySpec]) -> dict[str, Resolved]:
    """Return the framework of the target; on another base, the same versions are resolved for that."""
    spec = platforms[0]
    targets = [spec.extends.on(one.arch) for one in platforms]
    default = {one.arch: one.locked().framework for one in targets}
    if spec.base != spec.extends.base:
        for of in versions_of(default).values():
            check_conflicts(spec, of)
        try:
            return {DEFAULT: _framework_again([one.parent for one in platforms], default, DEFAULT)}
        except StepFailed:
            framework_choice.check_target(spec)
            raise
    found = {DEFAULT: default}
    for index in _indexes(spec)[1:]:
        locked = {one.arch: one.usable_lock.of(one.arch, index) for one in targets if one.usable_lock}
        known = {arch: of.framework for arch, of in locked.items() if of}
        found[index] = known if len(known) == len(targets) else _framework_again(targets, default, index)
    return found


def _framework_again(parents: Sequence[Spec], default: Resolved, index: str) -> Resolved:
    """Return a target's framework for its base and an index, with the versions of ``default`` if possible."""
    lines = requirements.joined(
        {one.architecture.machine: [Line(text, one.file, 1) for text in one.packages] for one in parents}
    )
    kept = sorted({(pin.name, pin.version) for every in default.values() for pin in every})
    own = Resolution(parents, package_index.extra(parents[0], index), default_index(), kept)
    resolved = own.without_conflicts([line.text for line in lines])
    return {arch: [replace(pin, role="framework") for pin in every] for arch, every in resolved.items()}


def _check_known(spec: RepositorySpec, upgraded: frozenset[str], old: Lock) -> None:
    """Check that the packages to upgrade are locked, or in the base.

    Raises:
        UserError: one is not; the nearest name is given.
    """
    held = spec.base_contents.packages if spec.base_contents else {}
    pins = [pin for of in old.indexes.values() for locked in of.values() for pin in locked.pins]
    known = {**held, **versions(pins)}
    if unknown := sorted(upgraded - known.keys()):
        raise UserError(f"{relative(spec.lock_file)}: no package '{unknown[0]}'{nearest(unknown[0], known)}")
