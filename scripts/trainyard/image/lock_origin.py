"""Tell what the lock of a repository was resolved from, and whether that is what the repository asks for now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trainyard
from trainyard.common import settings
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import build_backends
from trainyard.spec import model
from trainyard.spec.lock import Lock, Unreadable
from trainyard.spec.model import IMAGES, RepositorySpec, Spec, relative
from trainyard.workspace import indexes, requirements, wheels


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
    # Those of a base are recorded in the lock.
    about["framework"]["packages"] = [] if parent.framework_in_base else parent.packages
    about["trainers"]["folder"] = None  # its files count, wherever it is
    return about


def _contributed(parent: Spec) -> Iterator[Path]:
    yield ROOT / "templates" / "Dockerfile.j2"
    packages = (f"trainers/{package}" for package in parent.trainers.packages)
    names = ("templates/steps", "launcher", "trainers/common", *packages)
    folders = [ROOT / name for name in names]
    for folder in (*folders, *([parent.own_trainers] if parent.own_trainers else [])):
        files = folder.rglob("*")
        yield from sorted(one for one in files if one.is_file() and "__pycache__" not in one.parts)
    yield ROOT / "trainers" / "__init__.py"
    yield IMAGES / "uv.lock"
    if "gsutil" in parent.tools:
        yield IMAGES / "gsutil.lock"


def check_tool(spec: RepositorySpec) -> None:
    """Check that this Trainyard makes the image that the lock describes.

    Raises:
        UserError: there is no readable lock, or another Trainyard wrote it, whose images differ.
    """
    lock, here = _required(spec), contents(spec)
    origin = lock.origin
    if origin and origin.contents != here and is_of(lock, spec):
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
    """Return whether the lock was resolved from what the repository asks for now.

    Raises:
        UserError: the requirements have a mistake, or the lock cannot be used.
    """
    if isinstance(spec.lock, Unreadable) and spec.lock.missing:
        return False
    spec, lock = build_backends.asked(spec), _required(spec)
    if not is_of(lock, spec) or (spec.framework_in_base and not has_base(spec)):
        return False
    return lock.origin is not None and lock.origin.inputs == inputs(spec, lock)


def is_of(lock: Lock, spec: RepositorySpec) -> bool:
    """Return whether a lock is of the target of a repository, and of the base that it has now."""
    origin = lock.origin
    same_base = spec.framework_in_base or (origin and origin.base.partition("@")[0] == spec.base_spec().image)
    return bool(origin and origin.target == spec.extends.target and same_base)


def has_base(spec: RepositorySpec) -> bool:
    """Return whether the lock records the base: the one that ``TRAINYARD_BASE`` names, or any without that."""
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
    wanted = requirements.of_platform(spec)
    return {
        "target": spec.extends.target,
        "python": spec.python_version,
        "framework": {
            index: [locked.base.model_dump() if locked.base else [pin.identity for pin in locked.framework]]
            for index, of in lock.indexes.items()
            if (locked := of.get(spec.arch))
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
