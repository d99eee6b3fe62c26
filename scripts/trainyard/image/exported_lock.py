"""Write a lock with the addresses of its files, with which uv and pip make the environment of an image elsewhere."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.pylock import is_valid_pylock_path

from trainyard.common.errors import UserError
from trainyard.image import build_backends, lock_origin, package_index
from trainyard.image.resolution import Resolution, exactly
from trainyard.image.resolver import default_index
from trainyard.spec import pylock, repository_files
from trainyard.spec.lock import DEFAULT, File, Lock, Locked, Made, Pin, versions
from trainyard.spec.model import RepositorySpec, Spec, each_platform, relative
from trainyard.workspace import indexes, requirements, wheels
from trainyard.workspace.lines import Source, without_credentials
from trainyard.workspace.requirements import Wanted

logger = logging.getLogger(__name__)


def export(spec: Spec, path: Path) -> None:
    """Write the lock of a target or repository with the addresses of its files at the indexes that this machine uses.

    It is the lock of the index that an image would be built from. What an image has compiled is a source distribution,
    and what is made of a git repository, a folder or the address of a wheel is named as such.

    Raises:
        UserError: no tool reads a file of that name; the framework is in the base image; an index lacks a file; a
            package is made of what such a file cannot name; or the lock cannot be used.
        StepFailed: an index does not answer, or lacks a package.
    """
    if not is_valid_pylock_path(path):
        raise UserError(f"'--export {path}': uv and pip read files that are named pylock.NAME.toml")
    if path.resolve() in {(spec.folder / name).resolve() for name in pylock.file_names(spec.lock_file)}:
        raise UserError(f"'--export {path}': it is a name of the lock itself: give another")
    if isinstance(spec, RepositorySpec):
        spec = build_backends.asked(spec)
        if isinstance(spec.lock, Lock) and not lock_origin.is_current(spec):
            logger.warning(
                f"{relative(spec.lock_file)}: is not of what the repository requires now: run 'trainyard lock'"
            )
    spec.locked()  # reports a lock that is missing or cannot be used
    known = spec.usable_lock or Lock()
    index = package_index.choose(spec)[0]
    index = index if index in known.indexes else DEFAULT
    if any(of.base for of in known.indexes[index].values()):
        raise UserError(f"{relative(spec.lock_file)}: the framework is in the base image, and on no package index")
    locked = {
        arch: replace(of, pins=tuple(pin for pin in of.pins if pin.role != "build"))
        for arch, of in known.indexes[index].items()
    }
    wanted = requirements.of_image(spec) if isinstance(spec, RepositorySpec) else Wanted()
    sources = _sources(wanted, [pin for of in locked.values() for pin in of.pins], path)
    addresses = _addresses(spec, index, locked, wanted)
    for file in _files(of.pins for of in locked.values()):
        if file.sha256 not in addresses:
            where = relative(spec.lock_file)
            raise UserError(f"{where}: no package index has {file.name} with SHA-256 {file.sha256}")
    exported = {
        arch: replace(of, pins=tuple(_with_addresses(pin, addresses) for pin in of.pins)) for arch, of in locked.items()
    }
    text = pylock.text(replace(known, indexes={index: exported}), index, sources)
    repository_files.write(path.parent, path.name, text)


def _addresses(spec: Spec, index: str, locked: Mapping[str, Locked], wanted: Wanted) -> dict[str, str]:
    """Return SHA-256 of a file -> its address, without credentials."""
    platforms = [one for one in each_platform(spec) if one.arch in locked]
    pins = {arch: [pin for pin in of.pins if not pin.made] for arch, of in locked.items()}
    compiled = {pin.name for of in pins.values() for pin in of if pin.role == "compiled"}
    options = {**wanted.options, "sources": wanted.index_of, "no-binary-package": sorted(compiled)}
    found, parent = default_index(), spec
    if isinstance(spec, RepositorySpec):
        found, parent = [*indexes.of_machine(), *indexes.of_project(spec.workspace, wanted.addresses)], spec.parent
    resolution = Resolution(platforms, package_index.extra(parent, index), found, options=options)
    resolved = resolution.packages(exactly({arch: versions(of) for arch, of in pins.items()}), alone=True)
    return {file.sha256: without_credentials(file.url) for file in _files(resolved.values())}


def _files(every: Iterable[Sequence[Pin]]) -> Iterator[File]:
    return (file for pin in itertools.chain.from_iterable(every) if not pin.made for file in pin.files)


def _with_addresses(pin: Pin, addresses: Mapping[str, str]) -> Pin:
    if pin.made:
        return pin
    return replace(pin, files=tuple(replace(file, url=addresses[file.sha256]) for file in pin.files))


def _sources(wanted: Wanted, pins: Sequence[Pin], path: Path) -> dict[Made, str]:
    """Return what wheels were made of, as PEP 751 names it."""
    known = {wheels.key(source): source for source in wanted.sources}
    return {pin.made: _source(known.get(pin.made.key), pin, path) for pin in pins if pin.made}


def _source(source: Source | None, pin: Pin, path: Path) -> str:
    if source is None:
        raise UserError(
            f"'--export {path}': {pin.name} is made of an address that another package names: name it in the "
            "requirements, too"
        )
    location, _, fragment = source.location.partition("#")
    inside = {"subdirectory": fragment.removeprefix("subdirectory=")} if fragment.startswith("subdirectory=") else {}
    if source.is_path and Path(location).is_dir():
        return f"directory = {pylock.value({'path': os.path.relpath(location, path.resolve().parent), **inside})}"
    if location.startswith("git+"):
        url, commit = wheels.git_address(location)[0], pin.made.commit if pin.made else ""
        return f"vcs = {pylock.value({'type': 'git', 'url': url, 'commit-id': commit, **inside})}"
    if not location.partition("?")[0].endswith(".whl"):
        raise UserError(
            f"{source.line.where}: '--export {path}': {source.line.shown} is built, so that its file has another hash: "
            "name the address of a wheel"
        )
    relative_path = os.path.relpath(location, path.resolve().parent)
    where = {"path": relative_path} if source.is_path else {"url": without_credentials(location)}
    return f"archive = {pylock.value({**where, 'hashes': {'sha256': pin.hashes[0]}})}"
