"""Write trainyard.lock: what a user's repository requires, resolved for its target.

The framework is that of the target: its lock is copied, and kept until ``trainyard lock --upgrade``. If the target's
base holds the framework, the contents of the base are recorded instead. Everything else is resolved with uv beside it:
the user's requirements, those of the target's trainers, and those of wheels that are built from git repositories and
folders.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

import trainyard
from trainyard import settings
from trainyard.console import StepFailed, UserError, nearest, warn
from trainyard.image import base_image, base_wheels, package_index, resolver
from trainyard.image import framework_contradictions as contradictions
from trainyard.image import workspace_resolution as resolution
from trainyard.settings import ROOT
from trainyard.spec import lockfile, model, workspace_lock
from trainyard.spec.model import IMAGES, Spec, relative
from trainyard.spec.workspace import Workspace
from trainyard.spec.workspace_lock import SPLIT_HEADER, WorkspaceLock
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.indexes import Index
from trainyard.workspace.requirements import Wanted

#: The templates that an image is made from; the others are of documentation and of Cloud Build.
_TEMPLATES = ("Dockerfile*.j2", "*.sh", "*.py")


def contents(spec: Spec) -> str:
    """8 hexadecimal digits of what this Trainyard contributes to images of the target that a workspace extends.

    Raises:
        UserError: there is no such target.
    """
    parent = _parent(spec)
    about = parent.model_dump(
        mode="json",
        include={"base", "framework", "system", "accelerator", "environment", "tools", "profile", "trainers"},
    )
    if parent.framework_in_base:
        about["framework"]["packages"] = []  # they are those of a base that trainyard.lock records
    found = hashlib.sha256(json.dumps([about, parent.base_spec().model_dump(mode="json")], sort_keys=True).encode())
    for path in _contributed(parent):
        found.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:8]


def _parent(spec: Spec) -> Spec:
    """The target that a workspace extends, on the workspace's base."""
    assert spec.workspace is not None
    return model.load(spec.workspace.parent).model_copy(update={"base": spec.base})


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
    wanted = requirements.read(ws, spec.python_version)
    return lock.inputs == _inputs(spec, wanted, indexes.of_project(ws, wanted.addresses), lock.sections)


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


def _inputs(spec: Spec, wanted: Wanted, found: Sequence[Index], sections: Mapping[str, str]) -> str:
    """SHA-256 of everything that a lock is resolved from."""
    assert spec.workspace is not None
    about = {
        "target": spec.workspace.parent,
        "python": spec.python_version,
        "framework": {name: text for name, text in sections.items() if name.startswith(("framework", "base"))},
        "lines": sorted({line.text for line in wanted.lines}),
        "sources": sorted([wheels.key(one), *one.extras, one.marker, wheels.digest(one)] for one in wanted.sources),
        "constraints": sorted({line.text for line in wanted.constraints}),
        "overrides": sorted({line.text for line in wanted.overrides}),
        "excludes": sorted({*wanted.excludes, *wanted.provided}),
        "requires-python": sorted({line.text for line in wanted.requires_python}),
        "options": wanted.options,
        "indexes": [[one.name, one.url, one.kind] for one in found],
        "index_of": wanted.index_of,
        "compiled": sorted({line.text for line in wanted.compiled}),
        "build-requires": sorted({line.text for line in wanted.build_requires}),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def lock(spec: Spec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = (), check: bool = False) -> list[Path]:
    """Write trainyard.lock; the paths written, none if it was up to date.

    Versions of an existing lock are kept where the requirements allow it.

    Args:
        upgrade: take the framework and base of this Trainyard, and the newest versions of everything else.
        upgrade_packages: names whose newest versions are taken.
        check: write nothing.
    Raises:
        UserError: the requirements have a mistake or contradict the target's framework.
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
    wanted = requirements.read(ws, spec.python_version)
    contradictions.check_python(spec, wanted)
    found = _resolved(spec, wanted, old, frozenset(canonicalize_name(one) for one in upgrade_packages))
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


def _resolved(spec: Spec, wanted: Wanted, old: WorkspaceLock | None, upgraded: frozenset[str]) -> WorkspaceLock:
    """The lock that ``wanted`` resolves to."""
    ws = spec.workspace
    assert ws is not None
    parent = _parent(spec)
    kept = old if old and _is_of(old, spec) else None
    held = spec.base_contents.packages if spec.base_contents else {}
    if spec.base_contents:
        frameworks = {"default": base_wheels.pins(spec.base_contents)}
    else:
        frameworks = _kept_frameworks(kept) if kept else _frameworks(spec, parent)
    pins = resolution.pins(frameworks["default"])
    _check_upgraded(ws, upgraded, pins, old, held)
    own = indexes.of_project(ws, wanted.addresses)
    found = [*indexes.of_machine(), *own]
    known = old.sections["requirements"] if old else ""
    commits = wheels.locked_commits(known, leave_out=upgraded)
    built = wheels.build(wanted.sources, spec.build_folder / "wheels", commits)
    compiled = resolution.compile_sources(
        spec, wanted, found, resolution.pins(old.sections.get("compiled", "")) if old else {}, upgraded
    )
    sections: dict[str, str] = {}
    for name, framework in frameworks.items():
        request = resolution.Request(
            spec, wanted, resolution.pins(framework), _index(parent, name), found, built, compiled,
            old.sections.get(f"requirements{spec.suffix(name)}", known) if old else "", upgraded,
            {one: version for one, version in held.items() if one not in pins}, kept is not None,
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
            sections[f"framework{spec.suffix(name)}"] = framework
        sections[f"requirements{spec.suffix(name)}"] = rest
        resolver.check_conflicts(spec, held | request.framework | resolution.pins(rest))
    if compiled:
        sections["compiled"] = "".join(one.entry for _, one in sorted(compiled.items()))
        installed = resolution.pins(sections["framework"] + sections["requirements"])
        sections["build-requires"] = resolution.build_requirements(
            resolution.Request(
                spec, wanted, installed, None, found, [], compiled,
                old.sections.get("build-requires", "") if old else "", upgraded,
            )
        )  # fmt: skip
    return WorkspaceLock(
        version=kept.version if kept else trainyard.__version__,
        contents=kept.contents if kept else contents(spec),
        target=ws.parent,
        base=_base(spec, kept),
        inputs=_inputs(spec, wanted, own, sections),
        sections=sections,
    )


def _base(spec: Spec, kept: WorkspaceLock | None) -> str:
    """The reference of the base image: the one that was inspected, that of a lock that is kept, or today's."""
    if spec.base_contents:
        return spec.base_contents.reference
    return kept.base if kept else base_image.lockable_reference(spec.base)


def _kept_frameworks(old: WorkspaceLock) -> dict[str, str]:
    """Name of an index -> the framework's lock in trainyard.lock."""
    names = [name for name in old.sections if name.split(".", 1)[0] == "framework"]
    return {name.partition(".")[2] or "default": old.sections[name] for name in sorted(names)}


def _frameworks(spec: Spec, parent: Spec) -> dict[str, str]:
    """Name of an index -> the text of the target's framework lock, for every index that answers.

    Args:
        parent: the target; on another base than the catalogue's, the same versions are resolved for that base.
    """
    default = lockfile.framework_lock(parent, "default").read_text(encoding="utf-8").removeprefix(SPLIT_HEADER)
    if parent.base != model.load(parent.target).base:
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


def _check_upgraded(
    ws: Workspace,
    upgraded: frozenset[str],
    framework: Mapping[str, str],
    old: WorkspaceLock | None,
    held: Mapping[str, str],
) -> None:
    known = dict(held) | (resolution.pins("\n".join(old.sections.values())) if old else {})
    for name in sorted(upgraded):
        if name in framework:
            raise UserError(
                f"'{name}' is part of the framework of {ws.parent}, which 'trainyard lock --upgrade' updates as a whole"
            )
        if old and name not in known:
            raise UserError(f"{relative(ws.lock)}: no package '{name}'{nearest(name, known)}")
