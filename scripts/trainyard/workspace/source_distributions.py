"""What a source distribution says about itself, without building it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import re
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import requests as http
from packaging.version import InvalidVersion, Version

from trainyard.common.errors import StepFailed
from trainyard.spec import yaml_source
from trainyard.workspace import python_projects
from trainyard.workspace.lines import without_credentials

#: Seconds to wait for bytes.
_TIMEOUT = 60

#: What a source distribution without ``[build-system]`` is built with, and wheel, which setup.py files of that time
#: import: https://packaging.python.org/en/latest/specifications/pyproject-toml/#build-system-table
_LEGACY = ("setuptools", "wheel")

#: The files that say something: those of every source distribution, and those of setuptools.
_FILES = re.compile(
    r"[^/]+/(PKG-INFO|setup\.py|pyproject\.toml|(?:[^/]+/)?[^/]+\.egg-info/(requires\.txt|SOURCES\.txt))"
)


@dataclass(frozen=True)
class SourceDistribution:
    """The requirements of a source distribution.

    Attributes:
        requires: PEP 508 requirements of the package.
        final: False if it says nothing about requirements, which only a build would tell.
        build_requires: PEP 508 requirements of its build.
    """

    requires: tuple[str, ...]
    final: bool
    build_requires: tuple[str, ...]


@cache  # for several platforms and indexes
def read(url: str, sha256: str, credentials: tuple[str, str] | None, *, offline: bool = False) -> SourceDistribution:
    """Download a source distribution, and read its PKG-INFO and pyproject.toml.

    Args:
        sha256: of the archive, as the index says.
    Raises:
        StepFailed: it cannot be downloaded, is no source distribution, or not the one that the index lists.
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
    if (made := hashlib.sha256(answer.content).hexdigest()) != sha256:
        raise StepFailed(f"{name} has the SHA-256 {made}, and its index says {sha256}: ask those who run the index")
    return of_archive(name, answer.content)


def of_archive(name: str, archive: bytes) -> SourceDistribution:
    """The requirements of a source distribution with the file name ``name``.

    Raises:
        StepFailed: it is no source distribution, or its pyproject.toml is not valid.
    """
    found: dict[str, bytes] = {}
    try:
        if archive.startswith(b"PK"):  # before 2021, https://peps.python.org/pep-0625/
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                found = {
                    kind: files.read(one) for one in files.infolist() if (kind := _kind(one.filename, one.file_size))
                }
        else:
            with tarfile.open(fileobj=io.BytesIO(archive)) as members:
                for member in members:
                    if (kind := _kind(member.name, member.size)) and (file := members.extractfile(member)):
                        found[kind] = file.read()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError):
        raise StepFailed(f"{name} is no source distribution: neither a tar nor a zip archive") from None
    if not {"PKG-INFO", "setup.py"} & found.keys():
        raise StepFailed(f"{name} is no source distribution: it has no PKG-INFO and no setup.py")
    requires, final = _requires(found) if "PKG-INFO" in found else ((), False)
    try:
        build_requires = _build_requires(found.get("pyproject.toml", b"").decode())
    except ValueError as error:  # of the encoding, of TOML or of a requirement
        raise StepFailed(f"{name}: its pyproject.toml cannot be read ({str(error).splitlines()[0]})") from None
    return SourceDistribution(requires, final, build_requires)


def _kind(name: str, size: int) -> str:
    match = _FILES.fullmatch(name)
    return (match[2] or match[1]) if match and size <= yaml_source.LARGEST else ""


def _requires(files: Mapping[str, bytes]) -> tuple[tuple[str, ...], bool]:
    """Return what PKG-INFO or setuptools' requires.txt lists, and whether that is known without a build.

    From metadata 2.2 on PKG-INFO is final, unless it says ``Dynamic``; before, it lists what was required where the
    archive was made: https://packaging.python.org/en/latest/specifications/core-metadata/#dynamic
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        about = importlib.metadata.PathDistribution(Path(folder))
        requires, metadata = tuple(about.requires or ()), about.metadata
    dynamic = {one.lower() for one in metadata.get_all("Dynamic", [])}
    try:
        final = Version(metadata.get_all("Metadata-Version", ["1.0"])[0]) >= Version("2.2")
    except InvalidVersion:
        final = False
    return requires, bool(requires) or "SOURCES.txt" in files or (final and "requires-dist" not in dynamic)


def _build_requires(text: str) -> tuple[str, ...]:
    """``requires`` of the ``[build-system]`` of a pyproject.toml, and what its backend asks for when it builds."""
    system = tomllib.loads(text).get("build-system", {})
    return python_projects.with_backends(tuple(str(one) for one in system.get("requires", _LEGACY)))
