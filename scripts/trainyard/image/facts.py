"""Collect what of a spec and its commit reaches an image: the files that it is made from, its labels, its revision."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.common import git, settings
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.recipe import DIGEST
from trainyard.spec import pylock
from trainyard.spec.catalog import bases
from trainyard.spec.lock import Lock
from trainyard.spec.model import Spec
from trainyard.spec.naming import FILE_EPOCH, LABELS, NAME
from trainyard.spec.repository_files import leads_out

#: Folders whose files are inputs of every image: the programs that its Dockerfile mounts, and what it copies.
_SHARED = ("templates/steps", "trainers", "launcher")

#: What an image is made of: a commit with changes in these is called dirty, as ``scripts/hatch_build.py`` does.
SOURCES = ("images", *_SHARED)


@cache
def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None outside a repository or without git."""
    try:
        found = git.run(folder, *arguments)
    except FileNotFoundError:
        return None
    return found.stdout.decode(errors="replace").strip() if found.returncode == 0 else None


@cache
def _build_facts() -> dict[str, Any]:
    """``revision`` and ``time`` of the commit that a wheel was built from (scripts/hatch_build.py)."""
    try:
        found: dict[str, Any] = json.loads((settings.PACKAGE / "_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def revision(root: Path = ROOT) -> str:
    """Return the commit, with ``-dirty`` if files differ; ``unknown`` if there is neither a repository nor a wheel.

    ``TRAINYARD_REVISION`` replaces it: an upload to Cloud Build has no repository.

    Args:
        root: :attr:`trainyard.spec.model.Spec.root`; by default that of Trainyard, of which the images' files count.
    """
    given = settings.variable("REVISION")
    if given:
        return given
    if root == ROOT and settings.CHECKOUT is None:
        return str(_build_facts().get("revision", "unknown"))
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    paths = [*SOURCES] if root == ROOT else ["."]
    return f"{commit}-dirty" if _is_changed(root, *paths) else commit


def _is_changed(folder: Path, *paths: str) -> bool:
    """Return whether files of a repository, or of its submodules, differ from its commit."""
    listed = (_git(folder, "ls-files", "--stage", "-z", "--", *paths) or "").split("\0")
    modules = (folder / line.partition("\t")[2] for line in listed if line.startswith("160000 "))
    inner = (module for module in modules if (module / ".git").exists() and not leads_out(module, folder))
    return bool(_git(folder, "status", "--porcelain", "--", *paths)) or any(_is_changed(each, ".") for each in inner)


def source_date_epoch(root: Path = ROOT) -> int:
    """``SOURCE_DATE_EPOCH`` if set, else the time of the commit of :func:`revision`: seconds since 1970.

    Raises:
        UserError: the variable is not a number.
    """
    given = settings.standard_variable("SOURCE_DATE_EPOCH")
    if given:
        if not given.isdigit():
            raise UserError(f"SOURCE_DATE_EPOCH={given!r} is not a number of seconds since 1970")
        return int(given)
    if root == ROOT and settings.CHECKOUT is None:
        return int(_build_facts().get("time") or FILE_EPOCH)
    return int(_git(root, "log", "-1", "--format=%ct") or FILE_EPOCH)


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that reach an image, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def inputs(spec: Spec, index: str) -> dict[str, str]:
    """Return the name -> sha256 of everything that goes into the image.

    That is the rendered Dockerfile and the programs of its steps, what is locked for the platform, the trainers, the
    launcher, and the image's own trainers or code.
    """
    paths = [spec.dockerfile(index), *(path for folder in _SHARED for path in _files(ROOT / folder))]
    if spec.own_trainers:
        paths += _files(spec.own_trainers)
    if spec.has_code:
        paths.append(spec.build_folder / "code.tar")
    if spec.workspace.compiles_own:
        paths.append(spec.build_folder / "extensions.tar")
    known = Lock(spec.python_version, {index: {spec.arch: spec.locked(index)}})
    name = pylock.REPOSITORY_FILE if spec.workspace.one_file else spec.lock_file.name
    locked = {name: pylock.text(known, index).encode()}
    files = {_input_name(spec, path): path.read_bytes() for path in paths}
    return {name: hashlib.sha256(content).hexdigest() for name, content in (files | locked).items()}


def _input_name(spec: Spec, path: Path) -> str:
    """Return a name for a file that is the same wherever the folder of the spec, the checkout and the state are."""
    if any(path.is_relative_to(ROOT / shared) for shared in _SHARED):
        return str(path.relative_to(ROOT))
    folders = [spec.folder, *([spec.own_trainers.parent] if spec.own_trainers else [])]
    return next((str(path.relative_to(folder)) for folder in folders if path.is_relative_to(folder)), path.name)


def other_pythons(spec: Spec) -> list[str]:
    """Return the names of the bases, other than the image's, for whose Python the shared layers have byte code.

    These are of the launcher and the trainers. On a base that is not shared, they have byte code for its Python alone.
    """
    base, shared = spec.base_spec(), (name for name, base in bases().items() if base.shared)
    return sorted(name for name in shared if name != spec.base) if base.shared or base.framework else []


def python_argument(base: str) -> str:
    """Return the build argument with the reference of a base of :func:`other_pythons`: ``PYTHON_DEBIAN_12``."""
    return f"PYTHON_{base.upper().replace('-', '_')}"


_OCI = "org.opencontainers.image"

_LABELS_FROM_ARGUMENTS = {
    f"{_OCI}.created": "CREATED",
    f"{_OCI}.revision": "REVISION",
    f"{_OCI}.version": "VERSION",
    f"{_OCI}.base.name": "BASE",
    f"{_OCI}.base.digest": "BASE_DIGEST",
    f"{LABELS}.index": "INDEX",
    DIGEST: "RECIPE",
}


def labels_from_arguments(spec: Spec) -> dict[str, str]:
    """Return label -> the build argument whose value it takes."""
    code = {f"{LABELS}.code": "CODE"} if spec.has_code else {}
    return {**_LABELS_FROM_ARGUMENTS, **spec.lock_labels, **code}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def labels(spec: Spec) -> dict[str, str]:
    """Return the labels that the spec alone decides."""
    code = spec.device_code
    known = {
        **({f"{LABELS}.fallback-for": spec.fallback_for} if spec.fallback_for else {}),
        **({f"{LABELS}.supported-until": f"{spec.ends[0].day}"} if spec.ends else {}),
        **({f"{LABELS}.cuda": code.cuda, f"{LABELS}.driver": code.driver, f"{LABELS}.gpus": code.text} if code else {}),
        f"{_OCI}.title": f"{NAME}/{spec.target}",
        f"{_OCI}.description": spec.summary,
        f"{_OCI}.licenses": "Apache-2.0",
        f"{LABELS}.target": spec.target,
        f"{LABELS}.accelerator": spec.accelerator,
        f"{LABELS}.tested": spec.level,
        f"{LABELS}.framework": f"{spec.framework.name}=={spec.version}",
        **spec.own_labels,
    }
    return {name: text for name, text in known.items() if text}
