"""Resolve requirements with uv to pins with hashes, as the sections of a trainyard.lock have them.

uv resolves a project without code (:class:`Project`) that is written for it, and reads no settings of this machine:
only what a project names, and the variables of :data:`_VARIABLES`, can change a lock.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.parser import HeaderParser
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.pylock import Package, Pylock
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import conflict
from trainyard.spec.lock import Pin, parse
from trainyard.spec.model import Spec
from trainyard.spec.pylock import FILE, value
from trainyard.workspace import indexes, source_distributions
from trainyard.workspace.indexes import Index
from trainyard.workspace.lines import without_credentials
from trainyard.workspace.source_distributions import SourceDistribution

logger = logging.getLogger(__name__)

#: The platform of locks that are of no image: Debian 12's.
PLATFORM = AMD64.wheel_platform("2.36")

#: Name of the project; uv's reasons begin with it, as in "this-image depends on numpy==2.4.6".
NAME = "this-image"

#: Options of ``uv pip compile`` for pins with hashes and without addresses.
_PINS = ("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", "new.lock")

#: Options of ``uv pip compile`` that list files with sizes and hashes:
#: https://packaging.python.org/en/latest/specifications/pylock-toml/
_LOCKED = ("--format", "pylock.toml", "--output-file", FILE)
_FILES = ("--no-deps", *_LOCKED)

#: The variables with which uv finds credentials, its cache and interpreters:
#: https://docs.astral.sh/uv/reference/environment/
_VARIABLES = re.compile(
    r"UV_(INDEX_\w+_(USERNAME|PASSWORD)|KEYRING_PROVIDER|INSECURE_HOST|CREDENTIALS_DIR|SYSTEM_CERTS|NATIVE_TLS|CACHE_DIR"
    r"|HTTP_\w+|CONCURRENT_\w+|PYTHON\w*|MANAGED_PYTHON|REQUEST_TIMEOUT|LINK_MODE)"
)


#: The folder in which the Python of :func:`_python` leaves the PKG-INFO of a source distribution.
_UNTOLD = "TRAINYARD_UNTOLD"


@cache
def _python() -> tempfile.TemporaryDirectory[str]:
    """Make an environment whose Python answers uv's own questions (``-I``) and runs nothing else, no build backend.

    It is started in the folder of a source distribution whose requirements only a build would tell, and says which.
    With ``--no-build``, uv takes another version; this goes when it reads source distributions with that:
    https://github.com/astral-sh/uv/issues/9779.
    """
    folder = tempfile.TemporaryDirectory(prefix="trainyard-python-")
    venv.create(folder.name, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", {"base": folder.name})
    told = f"shutil.copy('PKG-INFO', os.environ['{_UNTOLD}'])"
    line = f"import os, shutil, sys; sys.flags.isolated or ({told}, sys.exit(1))\n"
    Path(packages, "no_builds.pth").write_text(line, encoding="utf-8")
    return folder


class Failed(StepFailed):
    """Tell that uv failed.

    Attributes:
        stderr: what uv wrote, without credentials.
    """

    def __init__(self, target: str, stderr: str) -> None:
        super().__init__(f"cannot lock {target}: {' '.join(stderr.split()) or 'uv failed'}")
        self.stderr = stderr


@dataclass(frozen=True)
class Project:
    """Describe what uv resolves.

    Attributes:
        target: name of the lock in messages.
        lines: PEP 508 requirements.
        python: minor version, such as ``3.11``.
        offline: whether uv uses its cache alone.
        platform: uv's name of the platform that wheels must run on.
        options: settings by their names in uv's ``[tool.uv]``.
        indexes: package indexes, whose credentials uv gets in variables.
        preferred: pins, of which uv keeps the versions, and the hashes that they have, if the requirements allow it; a
            PEP 751 file if there are ``environments``.
        environments: markers of the environments that uv resolves for at once; empty: for ``platform`` alone.
    """

    target: str
    lines: Sequence[str]
    python: str
    offline: bool
    platform: str = PLATFORM
    options: Mapping[str, Any] = field(default_factory=dict)
    indexes: Sequence[Index] = ()
    preferred: str = ""
    environments: Sequence[str] = ()

    def entries(self) -> dict[str, str]:
        """Return canonical name -> entry of everything that the requirements need.

        Raises:
            Failed: uv found no solution, or failed.
        """
        return dict(entries(self._compiled(_PINS)))

    def files(self) -> list[Package]:
        """Return the packages of the requirements alone, with their files for the platform.

        Raises:
            Failed: an index has none, or uv failed.
        """
        return list(Pylock.from_dict(tomllib.loads(self._compiled(_FILES))).packages)

    def install(self, folder: Path) -> None:
        """Install the requirements into a folder, from wheels: nothing is built, and nothing of them runs.

        Raises:
            Failed: one has no wheel, or uv failed.
        """
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            self._write(here)
            (here / "requirements.txt").write_text("\n".join(self.lines), encoding="utf-8")
            command = [*settings.UV, "pip", "install", "--quiet", "--requirement", "requirements.txt"]
            command += ["--target", str(folder), "--only-binary", ":all:", "--link-mode", "copy"]
            command += ["--python", sys.executable, "--python-version", self.python, "--python-platform", self.platform]
            command += ["--offline"] if self.offline else []
            environment = self._environment(here)
            done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(self.target, without_credentials(done.stderr))

    def locked(self) -> list[Package]:
        """Return everything that the requirements need in one of the environments, with all files.

        Raises:
            Failed: uv found no solution, or failed.
        """
        return list(Pylock.from_dict(tomllib.loads(self._compiled(_LOCKED))).packages)

    def sized(self, text: str) -> str:
        """Return the entries of a section with sizes; see :func:`with_sizes`."""
        return with_sizes(text, lambda pins: replace(self, lines=pins, preferred="").files())

    def source_distribution(self, package: Package) -> SourceDistribution | None:
        """Return what the source distribution of a package says; None if no index has it, with its hash.

        Raises:
            StepFailed: it cannot be read, or is not that of the index.
        """
        file = package.sdist
        if file is None or not file.url or "sha256" not in file.hashes:
            return None
        credentials = indexes.credentials_for(file.url, self.indexes)
        return source_distributions.read(file.url, file.hashes["sha256"], credentials, offline=self.offline)

    def _told(self, name: str, version: str) -> Project:
        """Return the project with what a source distribution says in the place of what its build would tell."""
        options = {**self.options, "no-binary-package": [name]}
        archive = self.source_distribution(replace(self, lines=[f"{name}=={version}"], options=options).files()[0])
        if archive is None or not archive.final:
            logger.warning(f"{self.target}: {name} {version} does not say what it needs: list that in the requirements")
        about = {"name": name, "version": version, "requires-dist": archive.requires if archive else ()}
        known = [*self.options.get("dependency-metadata", []), about]
        return replace(self, options={**self.options, "dependency-metadata": known})

    def _compiled(self, arguments: Sequence[str]) -> str:
        """Return the output file of ``uv pip compile``, the last of ``arguments``. Nothing is built."""
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            self._write(here)
            command = [*settings.UV, "pip", "compile", "--quiet", "pyproject.toml", *arguments]
            command += ["--python-version", self.python]
            command += ["--universal"] if self.environments else ["--python-platform", self.platform]
            command += ["--python", f"{_python().name}/bin/python", "--no-build-isolation"]
            if self.offline:
                command.append("--offline")
            environment = self._environment(here)
            done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
            if not done.returncode:
                return (here / arguments[-1]).read_text(encoding="utf-8")
            untold = _pkg_info(here / "untold" / "PKG-INFO")
            told = [(one.get("name"), one.get("version")) for one in self.options.get("dependency-metadata", [])]
            if untold and untold not in told and "--no-deps" not in arguments:
                return self._told(*untold)._compiled(arguments)
            _check_cache(environment)
            raise Failed(self.target, without_credentials(done.stderr))

    @cached_property
    def _index_tables(self) -> list[dict[str, Any]]:
        """Return ``[[tool.uv.index]]`` without credentials."""
        tables = []
        for index in self.indexes:
            table: dict[str, Any] = {"name": index.name, "url": index.url}
            tables.append(table | {"flat": {"format": "flat"}, "extra": {}}.get(index.kind, {index.kind: True}))
        return [*tables, *self.options.get("index", [])]

    def _write(self, folder: Path) -> None:
        """Write the pyproject.toml, the uv.toml that replaces those of this machine, and the preferred pins."""
        settled = {key: of for key, of in {**self.options, "index": self._index_tables}.items() if of}
        # uv reads the environments of a project alone, and no settings of a project beside a uv.toml that is named.
        settled |= {"environments": list(self.environments)} if self.environments else {}
        in_project = (*settled,) if self.environments else ("index", "sources")
        rows = [f"{key} = {value(of)}" for key, of in settled.items() if key != "sources" and not self.environments]
        (folder / "uv").mkdir()
        (folder / "uv" / "uv.toml").write_text("\n".join([*rows, ""]), encoding="utf-8")
        head = ["[project]", f'name = "{NAME}"', 'version = "0"', f"dependencies = {value(list(self.lines))}"]
        rows = [f"{key} = {value(of)}" for key, of in settled.items() if key in in_project]
        (folder / "pyproject.toml").write_text("\n".join([*head, "[tool.uv]", *rows, ""]), encoding="utf-8")
        if self.preferred:  # uv keeps the versions of its output file if it can
            (folder / (FILE if self.environments else _PINS[-1])).write_text(self.preferred, encoding="utf-8")
        (folder / "untold").mkdir()

    def _environment(self, folder: Path) -> dict[str, str]:
        given = settings.environment()
        environment = {
            name: value for name, value in given.items() if not name.startswith("UV_") or _VARIABLES.fullmatch(name)
        }
        if self.environments:  # https://docs.astral.sh/uv/concepts/configuration-files/
            environment |= dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), str(folder))
        else:
            environment["UV_CONFIG_FILE"] = str(folder / "uv" / "uv.toml")
        environment[_UNTOLD] = str(folder / "untold")
        environment |= indexes.environment(self.indexes)
        # uv's own CA certificates lack those of networks that inspect TLS.
        bundle = settings.ca_bundle()
        environment |= {"SSL_CERT_FILE": str(bundle)} if bundle else {}
        # A resolution needs no interpreter, whatever the target's version.
        return environment | {"UV_PYTHON_DOWNLOADS": "never"}


def _pkg_info(path: Path) -> tuple[str, str] | None:
    """Return name and version of a PKG-INFO; None if there is none."""
    if not path.is_file():
        return None
    about = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"), headersonly=True)
    return canonicalize_name(about.get("Name", "")), about.get("Version", "")


def _check_cache(environment: Mapping[str, str]) -> None:
    """Check that uv can write to its cache: https://docs.astral.sh/uv/concepts/cache/#cache-directory.

    Raises:
        UserError: it cannot.
    """
    command = [*settings.UV, "cache", "dir"]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    folder = Path(done.stdout.strip() or "/")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{folder}, where uv keeps what it downloads, cannot be written: set 'UV_CACHE_DIR=<folder>'")


def with_sizes(text: str, files: Callable[[list[str]], list[Package]]) -> str:
    """Return entries of a lock with the size of their file, and without hashes of files for other platforms.

    An entry stays as it is if it has a size already, or if no index has its files any more: then its wheel counts as
    small, and a warning says so.

    Args:
        files: returns the packages of pins with their files, as :meth:`Project.files`.
    """
    pins = parse(text)
    missing = [pin for pin in pins if not pin.size]
    if not missing:
        return text
    try:
        packages = files([f"{pin.name}=={pin.version}" for pin in missing])
    except Failed as error:
        names = ", ".join(pin.name for pin in missing)
        reason = " ".join(error.stderr.split())[:200]
        logger.warning(f"no sizes of {names}, which share layers of small wheels: {reason}")
        return text
    known = {str(canonicalize_name(package.name)): list(_files(package)) for package in packages}
    return "".join(_sized(pin, known.get(pin.name, [])).text() for pin in pins)


def _files(package: Package) -> Iterator[tuple[str, int]]:
    """Yield SHA-256 and size of a package's wheels, or of its source distribution if it has none."""
    for file in package.wheels or filter(None, [package.sdist]):
        yield file.hashes.get("sha256", ""), file.size or 0


def _sized(pin: Pin, files: list[tuple[str, int]]) -> Pin:
    accepted = {digest: size for digest, size in files if digest in pin.hashes}
    if pin.size or not accepted:
        return pin
    return Pin(pin.name, pin.version, tuple(sorted(accepted)), max(accepted.values()), pin.added)


def default_index() -> list[Index]:
    """Return the mirror that this machine uses in place of the default package index, if it has one."""
    return [index for index in indexes.of_machine() if index.kind == "default"]


def versions(text: str) -> dict[str, str]:
    """Return canonical name -> version of pins, with or without hashes."""
    pins = re.findall(r"(?m)^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\\n]+)", text)
    return {canonicalize_name(name): version for name, version in pins}


def pins(known: Mapping[str, str]) -> list[str]:
    """Return ``name==version`` for canonical name -> version."""
    return [f"{name}=={version}" for name, version in known.items()]


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield canonical name and text of each entry of a requirements file, without comments."""
    entry: list[str] = []
    for line in [*text.splitlines(keepends=True), ""]:
        if not line.startswith((" ", "\t")) and entry:
            yield canonicalize_name(re.split(r"[\[=@ ;]", entry[0])[0]), "".join(entry)
            entry = []
        if line and not line.startswith("#"):
            entry.append(line)


def unhashed(known: Mapping[str, str]) -> dict[str, str]:
    """Return canonical name -> entry without hashes, for canonical name -> version."""
    return {name: f"{name}=={version}\n" for name, version in known.items()}


def check_conflicts(spec: Spec, versions: Mapping[str, str]) -> None:
    """Check versions (canonical name -> version) against images/conflicts.yaml.

    Raises:
        UserError: they cannot share an image; the message gives the reason.
    """
    reason = conflict(versions, spec.python_version)
    if reason:
        raise UserError(f"{spec.where}: {reason}")
