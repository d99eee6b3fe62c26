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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

import trainyard
from trainyard.common import settings
from trainyard.common.console import StepFailed, UserError, nearest, warn
from trainyard.common.settings import ROOT
from trainyard.image import base_image, base_wheels, package_index, resolver
from trainyard.image import framework_contradictions as contradictions
from trainyard.image import workspace_resolution as resolution
from trainyard.spec import lockfile, model, workspace_lock
from trainyard.spec.architectures import AMD64
from trainyard.spec.model import IMAGES, Spec, relative
from trainyard.spec.workspace import Workspace
from trainyard.spec.workspace_lock import SPLIT_HEADER, WorkspaceLock
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Source
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

#: The templates that an image is made from; the others are of documentation and of Cloud Build.
_TEMPLATES = ("Dockerfile*.j2", "*.sh", "*.py")


def contents(spec: Spec) -> str:
    """8 hexadecimal digits of what this Trainyard contributes to images of the target that a workspace extends.

    It is the same for all platforms that the workspace may list.

    Raises:
        UserError: there is no such target.
    """
    parent = _parent(spec)
    about = [_settings(one.model_copy(update={"base": spec.base})) for one in model.each_platform(parent)]
    base = parent.base_spec().model_dump(mode="json")
    found = hashlib.sha256(json.dumps([*about, base], sort_keys=True).encode())
    for path in _contributed(parent):
        found.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:8]


def _settings(parent: Spec) -> dict[str, Any]:
    """What the spec of a target contributes to images."""
    found = parent.model_dump(
        mode="json",
        include={"base", "framework", "system", "accelerator", "environment", "tools", "profile", "trainers"},
    )
    if parent.framework_in_base:
        found["framework"]["packages"] = []  # they are those of a base that trainyard.lock records
    return found


def _parent(spec: Spec) -> Spec:
    """The target that a workspace extends, for the same platform, on the workspace's base."""
    assert spec.workspace is not None
    return model.load(spec.workspace.parent, spec.arch).model_copy(update={"base": spec.base})


def _contributed(parent: Spec) -> Iterator[Path]:
    for pattern in _TEMPLATES:
        yield from sorted((ROOT / "templates").glob(pattern))
    for folder in ("launcher", "trainers/common", f"trainers/{parent.trainers.package}"):
        files = (ROOT / folder).rglob("*")
        yield from sorted(one for one in files if one.is_file() and "__pycache__" not in one.parts)
    yield ROOT / "trainers" / "__init__.py"
    yield IMAGES / "uv.lock"
    if "gsutil" in parent.tools:
        yield IMAGES / "gsutil.lock"


def check_tool(spec: Spec) -> None:
    """Check that this Trainyard makes the image that trainyard.lock describes.

    Raises:
        UserError: there is no readable lock, or another Trainyard wrote it, whose images differ.
    """
    assert spec.workspace is not None
    lock, here = workspace_lock.read(spec.workspace), contents(spec)
    if lock.contents != here and lock.target == spec.workspace.parent:
        other = f", or install Trainyard {lock.version}" if lock.version != trainyard.__version__ else ""
        raise UserError(
            f"{relative(spec.workspace.lock)}: written by Trainyard {lock.version} ({lock.contents}), this is "
            f"{trainyard.__version__} ({here}), which would make another image: run 'trainyard lock --upgrade'{other}"
        )


def is_current(spec: Spec) -> bool:
    """Whether trainyard.lock was resolved from what the workspace asks for now.

    Raises:
        UserError: the requirements have a mistake, or the lock is damaged.
    """
    ws = spec.workspace
    assert ws is not None
    if not ws.lock.is_file():
        return False
    lock = workspace_lock.read(ws)
    if not _is_of(lock, spec) or (spec.framework_in_base and not _has_base(spec)):
        return False
    return lock.inputs == inputs(spec, lock.sections)


def _is_of(lock: WorkspaceLock, spec: Spec) -> bool:
    """Whether a lock is of the target and the base of a workspace."""
    assert spec.workspace is not None
    same_base = spec.framework_in_base or lock.base.partition("@")[0] == spec.base_spec().image
    return lock.target == spec.workspace.parent and same_base


def _has_base(spec: Spec) -> bool:
    """Whether trainyard.lock records the base: the one that ``TRAINYARD_BASE`` names, or any if that is not set."""
    contents, given = spec.base_contents, settings.variable("BASE")
    if contents is None or not given:
        return contents is not None
    return given in (contents.image, contents.reference) or given.partition("@")[2] == contents.digest != ""


def inputs(spec: Spec, sections: Mapping[str, str]) -> str:
    """SHA-256 of everything that a lock with these sections is resolved from: for linux/amd64 alone, or by platform.

    Raises:
        UserError: the requirements have a mistake.
    """
    about = [[one.platform, _inputs_of_platform(one, sections)] for one in model.each_platform(spec)]
    hashed = about[0][1] if spec.platforms == [AMD64.platform] else about
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()


def _inputs_of_platform(spec: Spec, sections: Mapping[str, str]) -> dict[str, Any]:
    ws = spec.workspace
    assert ws is not None
    wanted = _wanted(spec)
    own = workspace_lock.of_platform(sections, spec.architecture)
    return {
        "target": ws.parent,
        "python": spec.python_version,
        "framework": {name: text for name, text in own.items() if name.startswith(("framework", "base"))},
        "lines": sorted({line.text for line in wanted.lines}),
        "sources": sorted([wheels.key(one), *one.extras, one.marker, wheels.digest(one)] for one in wanted.sources),
        "constraints": sorted({line.text for line in wanted.constraints}),
        "overrides": sorted({line.text for line in wanted.overrides}),
        "excludes": sorted({*wanted.excludes, *wanted.provided}),
        "requires-python": sorted({line.text for line in wanted.requires_python}),
        "options": wanted.options,
        "indexes": [[one.name, one.url, one.kind] for one in indexes.of_project(ws, wanted.addresses)],
        "index_of": wanted.index_of,
        "compiled": sorted({line.text for line in wanted.compiled}),
        "build-requires": sorted({line.text for line in wanted.build_requires}),
    }


def _wanted(spec: Spec) -> Wanted:
    """What a workspace asks for on the platform of ``spec``."""
    assert spec.workspace is not None
    return requirements.read(spec.workspace, spec.python_version, spec.architecture.machine)


def lock(spec: Spec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = (), check: bool = False) -> list[Path]:
    """Write trainyard.lock for all platforms; the paths written, none if it was up to date.

    Versions of an existing lock are kept where the requirements allow it.

    Args:
        upgrade: take the framework and base of this Trainyard, and the newest versions of everything else.
        upgrade_packages: names whose newest versions are taken.
        check: write nothing.
    Raises:
        UserError: the requirements have a mistake or contradict the target's framework; or a platform was added, and
            another Trainyard locked the others.
        StepFailed: uv could not resolve them; or, with ``check``, the lock is out of date.
    """
    ws = spec.workspace
    assert ws is not None
    old = None if upgrade else _existing(ws)
    if old and old.target == ws.parent and not _is_of(old, spec) and not ws.document.base:
        raise UserError(
            f"{relative(ws.lock)}: was locked on {old.base.partition('@')[0]}, and {ws.parent} is on base {spec.base} "
            "now: run 'trainyard lock --upgrade'"
        )
    if spec.framework_in_base and (upgrade or not _has_base(spec)):
        spec = model.with_base_contents(spec, resolver.inspect_base(spec, spec.base_contents))
    found = _resolved(spec, old, frozenset(canonicalize_name(one) for one in upgrade_packages))
    current = ws.lock.is_file() and ws.lock.read_text(encoding="utf-8", errors="replace") == found.text()
    if check and not current:
        raise StepFailed(
            f"The lock at {relative(ws.lock)} needs to be updated, but '--check' was provided: run 'trainyard lock'"
        )
    if current:
        return []
    workspace_lock.write(ws, found)
    return [ws.lock]


def _existing(ws: Workspace) -> WorkspaceLock | None:
    """The lock whose versions are kept; None if there is none that can be read."""
    if not ws.lock.is_file():
        return None
    try:
        return workspace_lock.read(ws)
    except UserError as error:
        warn(f"{str(error).split(': ', 1)[0]} cannot be read, so all versions are resolved anew")
        return None


def _resolved(spec: Spec, old: WorkspaceLock | None, upgraded: frozenset[str]) -> WorkspaceLock:
    """The lock that the workspace's requirements resolve to."""
    ws = spec.workspace
    assert ws is not None
    kept = old if old and _is_of(old, spec) else None
    platforms = model.each_platform(spec)
    if kept and not all(kept.of(one.architecture) for one in platforms):
        check_tool(spec)  # the framework of a platform that was added is that of this Trainyard
    if old:
        _check_known(spec, upgraded, old)
    built = _Wheels(spec.build_folder / "wheels", old, upgraded)
    sections: dict[str, str] = {}
    first: dict[str, str] = {}
    for one in platforms:
        previous = _Previous(old.of(one.architecture) if old else {}, kept is not None, upgraded, first)
        found = _resolved_for_platform(one, previous, built)
        first = first or found
        sections |= {workspace_lock.section(name, one.architecture): text for name, text in found.items()}
    return WorkspaceLock(
        version=kept.version if kept else trainyard.__version__,
        contents=kept.contents if kept else contents(spec),
        target=ws.parent,
        base=_base(spec, kept),
        inputs=inputs(spec, sections),
        sections=sections,
    )


@dataclass(frozen=True)
class _Previous:
    """What a platform was resolved to before, and what the first platform was resolved to now.

    Attributes:
        sections: those of the platform in the old lock; none if it was not locked.
        same_target: whether the old lock is of the same target and base.
        upgraded: names whose versions are not kept.
        first: the sections of the first platform; none for that itself.
    """

    sections: Mapping[str, str]
    same_target: bool
    upgraded: frozenset[str]
    first: Mapping[str, str]

    @property
    def frameworks(self) -> dict[str, str]:
        """Name of an index -> the framework's lock in trainyard.lock; none of another target."""
        names = [name for name in self.sections if self.same_target and name.split(".", 1)[0] == "framework"]
        return {name.partition(".")[2] or "default": self.sections[name] for name in sorted(names)}

    def requirements(self, index: str) -> str:
        """The old section of an index; that of the default index if it has none."""
        default = self.sections.get("requirements", "")
        return self.sections.get(_section("requirements", index), default)

    def compiled(self) -> dict[str, str]:
        """Canonical name -> version of the source distributions whose versions are kept."""
        own = resolution.pins(self.sections.get("compiled", ""))
        kept = {name: version for name, version in own.items() if name not in self.upgraded}
        return kept | resolution.pins(self.first.get("compiled", ""))

    def of_first(self, index: str) -> dict[str, str]:
        """Canonical name -> version in the image for the first platform."""
        names = ("framework", "requirements")
        return resolution.pins(
            "".join(self.first.get(_section(name, index), self.first.get(name, "")) for name in names)
        )


class _Wheels:
    """The wheels of sources; one that several platforms have is built once."""

    def __init__(self, folder: Path, old: WorkspaceLock | None, upgraded: frozenset[str]) -> None:
        known = "".join(old.sections.values()) if old else ""
        self._folder, self._commits = folder, wheels.locked_commits(known, leave_out=upgraded)
        self._built: dict[Source, Wheel] = {}

    def of(self, sources: Sequence[Source]) -> list[Wheel]:
        missing = [one for one in sources if one not in self._built]
        self._built |= zip(missing, wheels.build(missing, self._folder, self._commits), strict=True)
        return [self._built[one] for one in sources]


def _section(name: str, index: str) -> str:
    """The section of ``framework`` or ``requirements`` for a package index."""
    return name if index == "default" else f"{name}.{index}"


def _resolved_for_platform(spec: Spec, previous: _Previous, built: _Wheels) -> dict[str, str]:
    """The sections for the platform of ``spec``, by their names without its architecture."""
    ws = spec.workspace
    assert ws is not None
    wanted = _wanted(spec)
    contradictions.check_python(spec, wanted)
    parent = _parent(spec)
    held = spec.base_contents.packages if spec.base_contents else {}
    if spec.base_contents:
        frameworks = {"default": base_wheels.pins(spec.base_contents)}
    else:
        frameworks = previous.frameworks or _frameworks(spec, parent)
    pins = resolution.pins(frameworks["default"])
    if fixed := sorted(previous.upgraded & pins.keys()):
        raise UserError(
            f"'{fixed[0]}' is part of the framework of {ws.parent}, which 'trainyard lock --upgrade' updates as a whole"
        )
    found = [*indexes.of_machine(), *indexes.of_project(ws, wanted.addresses)]
    made = built.of(wanted.sources)
    compiled = resolution.compile_sources(spec, wanted, found, previous.compiled())
    sections: dict[str, str] = {}
    for name, framework in frameworks.items():
        request = resolution.Request(
            spec, wanted, resolution.pins(framework), _index(parent, name), found, made, compiled,
            previous.requirements(name), previous.upgraded,
            {one: version for one, version in held.items() if one not in pins}, previous.same_target,
            previous.of_first(name),
        )  # fmt: skip
        contradictions.check(spec, wanted, request.framework)
        try:
            rest = resolution.resolve(request)
        except StepFailed as error:
            if name == "default":
                raise
            warn(f"no packages of index '{name}' in {relative(ws.lock)}: {error}")
            continue
        if spec.base_contents:
            sections["base"] = spec.base_contents.text()
        else:
            sections[_section("framework", name)] = framework
        sections[_section("requirements", name)] = rest
        resolver.check_conflicts(spec, held | request.framework | resolution.pins(rest))
    if compiled:
        sections["compiled"] = "".join(one.entry for _, one in sorted(compiled.items()))
        installed = resolution.pins(sections["framework"] + sections["requirements"])
        sections["build-requires"] = resolution.build_requirements(
            resolution.Request(
                spec, wanted, installed, None, found, [], compiled,
                previous.sections.get("build-requires", ""), previous.upgraded,
                first=resolution.pins(previous.first.get("build-requires", "")),
            )
        )  # fmt: skip
    return sections


def _base(spec: Spec, kept: WorkspaceLock | None) -> str:
    """The reference of the base image: the one that was inspected, that of a lock that is kept, or today's."""
    if spec.base_contents:
        return spec.base_contents.reference
    return kept.base if kept else base_image.lockable_reference(spec.base)


def _frameworks(spec: Spec, parent: Spec) -> dict[str, str]:
    """Name of an index -> the text of the target's framework lock, for every index that answers.

    Args:
        parent: the target; on another base than the catalogue's, the same versions are resolved for that base.
    """
    default = lockfile.framework_lock(parent, "default").read_text(encoding="utf-8").removeprefix(SPLIT_HEADER)
    if parent.base != model.load(parent.target, parent.arch).base:
        resolver.check_conflicts(spec, resolution.pins(default))
        return {"default": _framework_for(parent, default, "default")}
    found = {"default": default}
    chosen = "default" if settings.offline() else package_index.choose(parent)[0]
    if chosen != "default":
        path = lockfile.framework_lock(parent, chosen)
        if path.is_file():
            found[chosen] = path.read_text(encoding="utf-8").removeprefix(SPLIT_HEADER)
            return found
        found[chosen] = _framework_for(parent, default, chosen)
    return found


def _framework_for(parent: Spec, default: str, index: str) -> str:
    """The framework of a target, resolved for its base and an index, with the versions of ``default`` if possible."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "framework.lock"
        resolver.compile_lock(
            parent.framework.packages,
            output,
            python=parent.base_spec().python,
            platform=parent.wheel_platform,
            target=parent.target,
            preferred="".join(f"{name}=={version}\n" for name, version in resolution.pins(default).items()),
            index=_index(parent, index),
            sized=True,
        )
        return output.read_text(encoding="utf-8").removeprefix(SPLIT_HEADER)


def _index(parent: Spec, name: str) -> tuple[str, str, list[str]] | None:
    spec = parent.index_spec()
    if name == "default" or spec is None:
        return None
    return name, package_index.url(name, spec), spec.packages


def _check_known(spec: Spec, upgraded: frozenset[str], old: WorkspaceLock) -> None:
    """Check that the packages to upgrade are locked, or in the base.

    Raises:
        UserError: one is not; the nearest name is given.
    """
    assert spec.workspace is not None
    held = spec.base_contents.packages if spec.base_contents else {}
    known = {**held, **resolution.pins("\n".join(old.sections.values()))}
    if unknown := sorted(upgraded - known.keys()):
        raise UserError(f"{relative(spec.workspace.lock)}: no package '{unknown[0]}'{nearest(unknown[0], known)}")
