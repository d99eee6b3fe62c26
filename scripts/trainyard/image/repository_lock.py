"""Write trainyard.lock: what a user's repository requires, resolved for its target.

The framework is that of the target: its lock is copied, and kept until ``trainyard lock --upgrade``. If the target's
base holds the framework, the contents of the base are recorded instead. Everything else is resolved with uv beside it:
the user's requirements, those of the target's trainers, and those of wheels that are built from git repositories and
folders.

All platforms of trainyard.yaml are resolved, one after the other; the later ones have the versions of the first where
they can.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

import trainyard
from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.common.settings import ROOT
from trainyard.image import base_contents, base_image, build_backends, framework_choice, package_index, resolution
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolution import Request
from trainyard.image.resolver import NAME, Failed, check_conflicts, default_index, entries, pins, unhashed, versions
from trainyard.spec import framework, markers, matrix, model, state
from trainyard.spec import lock as locks
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.lock import DEFAULT, Lock, Locked, Origin, Pin, Section
from trainyard.spec.model import IMAGES, BaseContents, RepositorySpec, Spec, relative
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Line, Source
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

logger = logging.getLogger(__name__)

#: ``constrain(versions)``: constraints besides those of a repository, for what a platform was resolved to before.
Constrain = Callable[[Mapping[str, str]], Iterable[str]]

#: What the lock of a trial says in the place of the requirements for which the framework is not that of the target: its
#: versions are those of the lock.
_TRIAL = "a trial"


def contents(spec: RepositorySpec) -> str:
    """Return 8 hexadecimal digits of what this Trainyard contributes to images of the target that a repository extends.

    It is the same for all platforms that the repository may list.
    """
    parent = spec.parent
    about = [_settings(one) for one in model.each_platform(parent)]
    base = parent.base_spec().model_dump(mode="json")
    digest = hashlib.sha256(json.dumps([*about, base], sort_keys=True).encode())
    for path in _contributed(parent):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]


def _settings(parent: Spec) -> dict[str, Any]:
    """Return what the spec of a target contributes to images."""
    about = parent.model_dump(
        mode="json",
        include={"base", "framework", "system", "accelerator", "environment", "tools", "profile", "trainers"},
    )
    # Those of a base are recorded in trainyard.lock.
    about["framework"]["packages"] = [] if parent.framework_in_base else parent.packages
    about["trainers"]["folder"] = None  # its files count, wherever it is
    return about


def _contributed(parent: Spec) -> Iterator[Path]:
    yield ROOT / "templates" / "Dockerfile.j2"
    names = ("templates/steps", "launcher", "trainers/common", f"trainers/{parent.trainers.package}")
    folders = [ROOT / name for name in names]
    for folder in (*folders, *([parent.own_trainers] if parent.own_trainers else [])):
        files = folder.rglob("*")
        yield from sorted(one for one in files if one.is_file() and "__pycache__" not in one.parts)
    yield ROOT / "trainers" / "__init__.py"
    yield IMAGES / "uv.lock"
    if "gsutil" in parent.tools:
        yield IMAGES / "gsutil.lock"


def check_tool(spec: RepositorySpec) -> None:
    """Check that this Trainyard makes the image that trainyard.lock describes.

    Raises:
        UserError: there is no readable lock, or another Trainyard wrote it, whose images differ.
    """
    origin, here = _required(spec).origin, contents(spec)
    if origin and origin.contents != here and origin.target == spec.extends.target:
        other = f", or install Trainyard {origin.version}" if origin.version != trainyard.__version__ else ""
        raise UserError(
            f"{relative(spec.lock_file)}: written by Trainyard {origin.version} ({origin.contents}), this is "
            f"{trainyard.__version__} ({here}), which would make another image: run 'trainyard lock --upgrade'{other}"
        )


def _required(spec: RepositorySpec) -> Lock:
    """Return the lock of a repository.

    Raises:
        UserError: there is none that can be used.
    """
    if isinstance(spec.lock, Lock):
        return spec.lock
    raise UserError(spec.lock.reason)


def is_current(spec: RepositorySpec) -> bool:
    """Return whether trainyard.lock was resolved from what the repository asks for now.

    Raises:
        UserError: the requirements have a mistake, or the lock cannot be used.
    """
    if isinstance(spec.lock, locks.Unreadable) and spec.lock.missing:
        return False
    spec, lock = build_backends.asked(spec), _required(spec)
    if not is_of(lock, spec) or (spec.framework_in_base and not _has_base(spec)):
        return False
    return lock.origin is not None and lock.origin.inputs == inputs(spec, lock)


def is_of(lock: Lock, spec: RepositorySpec) -> bool:
    """Return whether a lock is of the target of a repository, and of the base that it has now."""
    origin = lock.origin
    same_base = spec.framework_in_base or (origin and origin.base.partition("@")[0] == spec.base_spec().image)
    return bool(origin and origin.target == spec.extends.target and same_base)


def _has_base(spec: RepositorySpec) -> bool:
    """Return whether trainyard.lock records the base: the one that ``TRAINYARD_BASE`` names, or any without that."""
    known, given = spec.base_contents, settings.variable("BASE")
    if known is None or not given:
        return known is not None
    return given in (known.image, known.reference) or given.partition("@")[2] == known.digest != ""


def inputs(spec: RepositorySpec, lock: Lock) -> str:
    """Return the SHA-256 of everything that a lock is resolved from, its framework included.

    Raises:
        UserError: the requirements have a mistake.
    """
    about = [[one.platform, _inputs_of_platform(one, lock)] for one in model.each_platform(spec)]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _inputs_of_platform(spec: RepositorySpec, lock: Lock) -> dict[str, Any]:
    wanted = _wanted(spec)
    return {
        "target": spec.extends.target,
        "python": spec.python_version,
        "framework": {
            str(section): text
            for section, text in lock.sections.items()
            if section.arch == spec.arch and section.kind in ("framework", "base")
        },
        "lines": sorted({" ".join([line.text, *sorted(line.hashes)]) for line in wanted.lines}),
        "sources": sorted(
            [wheels.key(one), *one.extras, one.marker, wheels.digest(one), *sorted(one.hashes)]
            for one in wanted.sources
        ),
        "constraints": sorted({line.text for line in wanted.constraints}),
        "overrides": sorted({line.text for line in wanted.overrides}),
        "excludes": sorted({*wanted.excludes, *wanted.provided}),
        "requires-python": sorted({line.text for line in wanted.requires_python}),
        "options": wanted.options,
        "indexes": [[one.name, one.url, one.kind] for one in indexes.of_project(spec.workspace, wanted.addresses)],
        "index_of": wanted.index_of,
        "compiled": sorted({line.text for line in wanted.compiled}),
        "build-requires": sorted({line.text for line in wanted.build_requires}),
    } | ({"asked": sorted(given)} if (given := spec.workspace.document.framework) else {})


def _wanted(spec: RepositorySpec) -> Wanted:
    """Return what a repository asks for on the platform of ``spec``."""
    return requirements.read(spec.workspace, spec.python_version, spec.architecture.machine)


def lock(
    spec: RepositorySpec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = (), check: bool = False
) -> RepositorySpec:
    """Write trainyard.lock for all platforms, unless it is up to date.

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
    spec = build_backends.asked(spec)
    if not upgrade and isinstance(spec.lock, locks.Unreadable) and not spec.lock.missing:
        logger.warning(f"{relative(spec.lock_file)} cannot be read, so all versions are resolved anew")
    old = None if upgrade else spec.usable_lock
    origin = old.origin if old else None
    same_target = origin and origin.target == spec.extends.target
    if old and origin and same_target and not is_of(old, spec) and not spec.workspace.document.base:
        raise UserError(
            f"{relative(spec.lock_file)}: was locked on {origin.base.partition('@')[0]}, and {origin.target} is on "
            f"base {spec.base} now: run 'trainyard lock --upgrade'"
        )
    before = spec.lock
    if spec.framework_in_base and (upgrade or not _has_base(spec)):
        spec = _with_base(spec, base_contents.inspect(spec, spec.base_contents))
    spec, resolved = resolve(spec, old, frozenset(map(canonicalize_name, upgrade_packages)))
    locked = spec.with_lock(resolved)
    if not locked.run and not locked.has_trainers:
        oldest = matrix.matrix().frameworks[spec.framework.name].trainers
        raise UserError(
            f"{spec.where}: the trainers of '{spec.extends.target}' need {spec.framework.name} {oldest} or later, not "
            f"{locked.version}: give the command of your own, as in 'run: python train.py', or ask for another version"
        )
    _check_gpu_wheels(locked)
    current = resolved == before
    if check and not current:
        raise StepFailed(
            f"The lock at {relative(spec.lock_file)} needs to be updated, but '--check' was provided: run "
            "'trainyard lock'"
        )
    if not current:
        locks.write(spec.lock_file, resolved)
    return locked


def trial(spec: RepositorySpec, sections: Mapping[Section, str], base: str) -> Lock:
    """Return a lock as if it had been resolved now, so that an image is built with its packages, whatever they are.

    Args:
        base: reference of the base image.
    """
    origin = Origin(trainyard.__version__, "", spec.extends.target, base, "", _TRIAL)
    spec = spec.with_lock(Lock(sections, origin=origin))  # on that base
    here = replace(origin, contents=contents(spec), inputs=inputs(spec, Lock(sections)))
    return Lock(sections, origin=here)


def _check_gpu_wheels(spec: RepositorySpec) -> None:
    """Check that the framework's wheels have code for GPUs on each platform of an image for NVIDIA GPUs.

    Raises:
        UserError: they have on another platform alone, as those of torch before 2.11, which are CPU builds on arm64.
    """
    platforms = model.each_platform(spec)
    lacking = [one for one in platforms if spec.accelerator == "nvidia" and not one.device_code]
    if lacking and any(spec.on(arch).device_code for arch in ARCHITECTURES):
        raise UserError(
            f"{spec.where}: {spec.framework.name} {spec.version} has no wheels with code for GPUs on "
            f"{lacking[0].platform}: ask for a later version, or remove the platform from 'platforms'"
        )


def _with_base(spec: RepositorySpec, base: BaseContents) -> RepositorySpec:
    """Return the spec with the contents of its base, before anything is resolved beside them."""
    sections = {
        Section(one.arch, kind): text
        for one in model.each_platform(spec)
        for kind, text in (("base", base.text()), ("requirements", ""))
    }
    return spec.with_lock(Lock(sections, origin=Origin("", "", spec.extends.target, base.reference, "")))


def resolve(
    spec: RepositorySpec, old: Lock | None, upgraded: frozenset[str], constrain: Constrain = lambda _: ()
) -> tuple[RepositorySpec, Lock]:
    """Return the spec on the base that its framework has wheels for, and the lock that its requirements resolve to.

    It raises what :func:`lock` does, which writes it.

    Args:
        old: whose versions are kept.
        upgraded: canonical names of packages whose versions are not kept.
        constrain: is called for each platform with the requirements' versions in the old lock.
    """
    spec, reasons = _on_base(build_backends.asked(spec), old)
    asked = framework_choice.text(reasons)
    kept = old if old and is_of(old, spec) and old.origin and old.origin.framework == asked else None
    platforms = model.each_platform(spec)
    if kept and not all(kept.of(one.arch) for one in platforms):
        check_tool(spec)  # the framework of a platform that was added is that of this Trainyard
    if old:
        _check_known(spec, upgraded, old)
    state.own(spec.kept)
    built = _Wheels(spec, old, upgraded)
    sections: dict[Section, str] = {}
    for platform in platforms:
        first = Lock(sections) if sections else None
        previous = _Previous(
            old or Lock(), platform.arch, kept is not None, upgraded, first, platforms[0].arch, constrain
        )
        sections |= _resolved_for_platform(platform, previous, built, reasons)
    origin = kept.origin if kept else None
    return spec, Lock(
        sections,
        origin=Origin(
            version=origin.version if origin else trainyard.__version__,
            contents=origin.contents if origin else contents(spec),
            target=spec.extends.target,
            base=_base(spec, origin),
            inputs=inputs(spec, Lock(sections)),
            framework=asked,
        ),
    )


def _on_base(spec: RepositorySpec, old: Lock | None) -> tuple[RepositorySpec, list[Line]]:
    """Return the spec on the base that its framework has wheels for, and why that is not the target's.

    The base of the old lock is kept as long as the reasons are the same.

    Raises:
        UserError: no base has a Python that the framework has wheels for, or the base holds another framework.
    """
    if spec.base_contents:
        held = versions(base_contents.pins(spec.base_contents))
        if lines := contradictions.excluding(spec, _wanted(spec), held):
            raise contradictions.contradiction(spec, lines[0], held)
        return spec, []
    home = spec.on_base(spec.workspace.document.base or spec.extends.base)
    wanted = _wanted(home)
    reasons = framework_choice.reasons(home, wanted)
    if not reasons:
        return home, []
    if old and old.origin and old.origin.framework == framework_choice.text(reasons) and is_of(old, spec):
        return spec, reasons
    return framework_choice.on_base(home, framework_choice.packages(home, wanted, reasons)), reasons


@dataclass(frozen=True)
class _Previous:
    """Give what a platform was resolved to before, and what the first platform was resolved to now.

    Attributes:
        old: the old lock, ``arch``: the platform's architecture.
        same_target: whether the old lock is of the same target, base and framework.
        upgraded: names whose versions are not kept.
        first: what the first platform was resolved to, ``first_arch``: its architecture; None for that itself.
        constrain: see :func:`resolve`.
    """

    old: Lock
    arch: str
    same_target: bool
    upgraded: frozenset[str]
    first: Lock | None
    first_arch: str
    constrain: Constrain

    @property
    def frameworks(self) -> dict[str, str]:
        """Return name of an index -> the framework's section in the old lock; none of another target."""
        names = self.old.indexes(self.arch) if self.same_target else []
        return {name: _of(self.old, self.arch, name).text("framework") for name in names}

    def requirements(self, index: str) -> str:
        """Return the old section of an index; that of the default index if it has none."""
        return _of(self.old, self.arch, index).text("requirements")

    def build_requires(self) -> str:
        """Return the old section of what source distributions were compiled with."""
        return _of(self.old, self.arch).text("build-requires")

    def compiled(self) -> dict[str, str]:
        """Return canonical name -> version of the source distributions whose versions are kept."""
        own = versions(_of(self.old, self.arch).text("compiled"))
        kept = {name: version for name, version in own.items() if name not in self.upgraded}
        return kept | versions(_of(self.first, self.first_arch).text("compiled"))

    def of_first(self, *kinds: str, index: str = DEFAULT) -> dict[str, str]:
        """Return canonical name -> version in sections of the first platform."""
        first = _of(self.first, self.first_arch, index)
        return versions("".join(first.text(kind) for kind in kinds))


def _of(lock: Lock | None, arch: str, index: str = DEFAULT) -> Locked:
    """Return what a lock has for an architecture and an index, or else for the default index; nothing without it."""
    return (lock and (lock.of(arch, index) or lock.of(arch))) or Locked({})


class _Wheels:
    """Build the wheels of sources; one that several platforms have is built once."""

    def __init__(self, spec: RepositorySpec, old: Lock | None, upgraded: frozenset[str]) -> None:
        known = "".join(old.sections.values()) if old else ""
        self._folder, self._commits = spec.build_folder / "wheels", wheels.locked_commits(known, leave_out=upgraded)
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


def _resolved_for_platform(
    spec: RepositorySpec, previous: _Previous, built: _Wheels, reasons: Sequence[Line]
) -> dict[Section, str]:
    """Return the sections for the platform of ``spec``.

    Args:
        reasons: lines for which the framework is not that of the target.
    """
    wanted = _wanted(spec)
    contradictions.check_python(spec, wanted)
    more = (Line(text, spec.file, 1) for text in previous.constrain(versions(previous.requirements(DEFAULT))))
    request = Request(
        spec,
        replace(wanted, constraints=(*wanted.constraints, *more)),
        indexes=[*indexes.of_machine(), *indexes.of_project(spec.workspace, wanted.addresses)],
        wheels=built.of(wanted.sources),
        upgraded=previous.upgraded,
    )
    held = spec.base_contents.packages if spec.base_contents else {}
    if spec.base_contents:
        frameworks = {DEFAULT: base_contents.pins(spec.base_contents)}
    elif previous.frameworks:
        frameworks = previous.frameworks
    elif reasons:
        frameworks = _own_frameworks(spec, request, previous, reasons)
    else:
        frameworks = _frameworks(spec)
    fixed = versions(frameworks[DEFAULT])
    if refused := sorted(previous.upgraded & fixed.keys()):
        raise UserError(
            f"'{refused[0]}' is part of the framework of {spec.extends.target}, which 'trainyard lock --upgrade' "
            "updates as a whole"
        )
    request = replace(request, base={name: version for name, version in held.items() if name not in fixed})
    with _explained(request, wanted.compiled):
        request = replace(request, compiled=resolution.compile_sources(request, previous.compiled()))
    sections: dict[Section, str] = {}
    for index, pinned in frameworks.items():
        if lines := contradictions.excluding(spec, wanted, versions(pinned)):
            raise contradictions.contradiction(spec, lines[0], versions(pinned))
        if index == DEFAULT and "--hash=" in pinned:  # others have other files; what a base has, has no hashes
            _check_hashes(spec, wanted, locks.parse(pinned))
        try:
            rest = _requirements(replace(request, framework=versions(pinned)), spec, previous, index)
        except StepFailed as error:
            if index == DEFAULT:
                raise
            logger.warning(f"no packages of index '{index}' in {relative(spec.lock_file)}: {error}")
            continue
        if spec.base_contents:
            sections[Section(spec.arch, "base")] = spec.base_contents.text()
        else:
            sections[Section(spec.arch, "framework", index)] = pinned
        sections[Section(spec.arch, "requirements", index)] = rest
        check_conflicts(spec, held | versions(pinned) | versions(rest))
    if request.compiled:
        everything = versions("".join(sections[Section(spec.arch, kind)] for kind in ("framework", "requirements")))
        sections |= _builds(replace(request, framework=everything), previous)
    return sections


def _requirements(request: Request, spec: RepositorySpec, previous: _Previous, index: str) -> str:
    """Return the requirements section for an index.

    The requirements of the target's trainers are added without versions. The versions that are kept are those of the
    old lock, then of the base image, then of the target. What the image shares with its target are the pins of the
    target's lock and of the old one: a later Trainyard, with another lock of the target, does not change the layers of
    an image whose requirements are the same.
    """
    pinned = request.framework.get(spec.framework.named_after(request.framework) or "", framework.UNLOCKED)
    needed = model.requirements_of(spec.extends) if matrix.has_trainers(spec.framework.name, pinned) else []
    own = [Line(framework.without_version(text), spec.file, 1) for text in needed]
    own = [line for line in own if line.name not in request.framework]
    old = previous.requirements(index)
    shared: list[Pin] | None = None
    if spec.base_contents:
        # The target's lock is for another day's base.
        known = dict(entries("".join(f"{text}\n" for text in needed)))
    else:
        target = spec.extends.on(spec.arch).locked()
        known = _known(target.text("requirements"), same_files=spec.base == spec.extends.base)
        kept = [pin for pin in locks.parse(old) if not pin.added] if previous.same_target else []
        shared = [*target.requirements, *kept]
    known |= unhashed(request.base) | _known(old, same_files=previous.same_target)
    request = replace(
        request,
        wanted=replace(request.wanted, lines=(*own, *request.wanted.lines)),
        index=package_index.extra(spec.parent, index),
        known=known,
        first=previous.of_first("framework", "requirements", index=index),
        shared=shared,
    )
    with _explained(request, [line for line in request.wanted.lines[len(own) :] if line.name not in request.framework]):
        text = resolution.resolve(request, sized=shared is not None)
    compiled = [Pin(one.name, one.version, (one.sha256,)) for one in request.compiled.values()]
    _check_hashes(spec, request.wanted, [*locks.parse(text), *compiled])
    return text


def _check_hashes(spec: RepositorySpec, wanted: Wanted, locked: Iterable[Pin]) -> None:
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


def _known(section: str, *, same_files: bool) -> dict[str, str]:
    """Return canonical name -> entry of a section, whose versions are to be kept.

    Args:
        same_files: whether its hashes are of files for the Python of the image; without hashes, uv asks for others.
    """
    return dict(entries(section)) if same_files else unhashed(versions(section))


def _builds(request: Request, previous: _Previous) -> dict[Section, str]:
    """Return the sections of the source distributions, and of what they are compiled with.

    Args:
        request: its ``framework`` is everything that the image has.
    """
    spec, wanted = request.spec, replace(request.wanted, lines=resolution.build_lines(request))
    request = replace(
        request,
        wanted=wanted,
        known=_known(previous.build_requires(), same_files=previous.same_target),
        first=previous.of_first("build-requires"),
    )
    with _explained(request, wanted.lines):
        tools = resolution.build_requirements(request)
    compiled = "".join(source.entry for _, source in sorted(request.compiled.items()))
    return {Section(spec.arch, "compiled"): compiled, Section(spec.arch, "build-requires"): tools}


@contextmanager
def _explained(request: Request, lines: Sequence[Line]) -> Iterator[None]:
    """Say in one line why uv found no solution, with the user's line that it is about.

    Args:
        request: what is resolved.
        lines: the user's that are resolved.
    """
    spec = request.spec
    try:
        yield
    except Failed as error:
        text = " ".join(error.stderr.split())
        text = text.replace(f"{NAME} depends on", "this image needs").replace(f"{NAME}'s", "its")
        match = re.search(r"No solution found when resolving dependencies:?(?: cause:| ╰─▶)? ?(.*)", text)
        if not match:
            raise Failed(spec.target, text) from None
        reason = match[1][:1].lower() + match[1][1:]
        about = [line for line in lines if re.search(rf"(?<![\w-]){re.escape(line.name)}(?![\w-])", reason)]
        subject = f"{about[0].where}: {about[0].shown}" if about else f"{spec.where}: the requirements"
        reason = _other_base(request, reason) or reason + _other_version(lines, reason)
        raise UserError(f"{subject} cannot be installed: {reason}") from None


def _other_version(lines: Sequence[Line], reason: str) -> str:
    """Return how to have another version of a package of the target that a requirement excludes; else nothing.

    Args:
        lines: the user's, ``reason``: uv's for which there is no solution.
    """
    needed = re.search(r"this image needs ([\w.-]+)==", reason)
    if not needed or any(line.name == needed[1] for line in lines):
        return ""
    ranges = re.findall(rf"depends? on {re.escape(needed[1])}([<>=!~]\S+)", reason)
    wanted = f"{needed[1]}{ranges[-1].rstrip('.,')}" if ranges else ""
    return f" Require '{wanted}', too, and the image has that version, if its framework allows it." if wanted else ""


def _other_base(request: Request, reason: str) -> str:
    """Return the base that has a Python for a package without a wheel for this one; empty if no other base helps.

    Args:
        reason: uv's for which there is no solution.
    """
    spec = request.spec
    match = re.search(r"(\S+) ha(?:s|ve) no wheels with a matching Python", reason)
    other = framework_choice.other_base(request) if match else None
    if match is None or other is None:
        return ""
    return (
        f"{match[1]} has no wheel for Python {spec.python_version} of {spec.base}: give another base, as in "
        f"'base: {other.base}' (Python {other.python_version})"
    )


def _base(spec: RepositorySpec, kept: Origin | None) -> str:
    """Return the base image: the one that was inspected, that of a lock that is kept, or today's."""
    if spec.base_contents:
        return spec.base_contents.reference
    return kept.base if kept else base_image.lockable_reference(spec.base, spec.context)


def _own_frameworks(
    spec: RepositorySpec, request: Request, previous: _Previous, reasons: Sequence[Line]
) -> dict[str, str]:
    """Return name of an index -> the section with the framework in the versions that a repository asks for."""
    lines = framework_choice.packages(spec, request.wanted, reasons)
    target = spec.extends.on(spec.arch).locked()
    of_target = target.text("framework") + target.text("requirements")
    known = _known(of_target, same_files=spec.base == spec.extends.base)
    first = previous.of_first("framework", "requirements")
    agreed = pins({line.name: first[line.name] for line in lines if line.name in first})
    sections: dict[str, str] = {}
    for index in _indexes(spec):
        old = "".join(_of(previous.old, spec.arch, index).text(kind) for kind in ("framework", "requirements"))
        everything = replace(
            request,
            index=package_index.extra(spec.parent, index),
            known=known | _known(old, same_files=False),
            first=first,
        )
        try:
            with _explained(request, [*reasons, *request.wanted.lines]):
                sections[index] = framework_choice.resolve_framework(everything, lines, agreed)
        except (UserError, StepFailed) as error:
            asked_for = any(framework.installs_as(line.name, [package.name for package in lines]) for line in reasons)
            if index != DEFAULT:
                logger.warning(f"no packages of index '{index}' in {relative(spec.lock_file)}: {error}")
            elif isinstance(error, StepFailed) or asked_for:
                raise
            else:
                raise contradictions.contradiction(spec, reasons[0], target.versions) from None
    chosen = versions(sections[DEFAULT])
    shown = ", ".join(
        f"{name} {chosen[name]}" for name in dict.fromkeys(line.name for line in (*lines, *reasons)) if name in chosen
    )
    logger.info(f"{spec.target}: {shown}: {reasons[0].where} asks for {reasons[0].shown}")
    return sections


def _indexes(spec: RepositorySpec) -> list[str]:
    """Return the names of the package indexes that a repository is locked for: all that answer."""
    chosen = DEFAULT if spec.context.offline else package_index.choose(spec.extends)[0]
    return list(dict.fromkeys((DEFAULT, chosen)))


def _frameworks(spec: RepositorySpec) -> dict[str, str]:
    """Return name of an index -> the section with the target's framework, for every index that answers.

    On another base than the target's, the same versions are resolved for that base.
    """
    target = spec.extends.on(spec.arch)
    default = target.locked().text("framework")
    if spec.base != target.base:
        check_conflicts(spec, versions(default))
        return {DEFAULT: _framework_for(spec.parent, default, DEFAULT)}
    known = {DEFAULT: default}
    for chosen in _indexes(spec)[1:]:
        locked = target.usable_lock.of(spec.arch, chosen) if target.usable_lock else None
        known[chosen] = locked.text("framework") if locked else _framework_for(target, default, chosen)
    return known


def _framework_for(parent: Spec, default: str, index: str) -> str:
    """Return a target's framework for its base and an index, with the versions of ``default`` if possible."""
    request = Request(
        parent,
        Wanted(lines=tuple(Line(text, parent.file, 1) for text in parent.packages)),
        indexes=default_index(),
        index=package_index.extra(parent, index),
        known=unhashed(versions(default)),
    )
    return resolution.resolve(request, sized=True)


def _check_known(spec: RepositorySpec, upgraded: frozenset[str], old: Lock) -> None:
    """Check that the packages to upgrade are locked, or in the base.

    Raises:
        UserError: one is not; the nearest name is given.
    """
    held = spec.base_contents.packages if spec.base_contents else {}
    known = {**held, **versions("\n".join(old.sections.values()))}
    if unknown := sorted(upgraded - known.keys()):
        raise UserError(f"{relative(spec.lock_file)}: no package '{unknown[0]}'{nearest(unknown[0], known)}")
