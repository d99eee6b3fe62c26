"""Resolve requirements with uv to pins with hashes.

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
from collections.abc import Iterator, Mapping, Sequence
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
from trainyard.spec.model import Spec
from trainyard.spec.pylock import FILE, value
from trainyard.workspace import indexes, source_distributions
from trainyard.workspace.indexes import Index
from trainyard.workspace.lines import without_credentials
from trainyard.workspace.source_distributions import SourceDistribution

logger = logging.getLogger(__name__)

#: The platform of locks that are of no image: Debian 12's.
_PLATFORM = AMD64.wheel_platform("2.36")

#: Name of the project; uv's reasons begin with it, as in "this-image depends on numpy==2.4.6".
NAME = "this-image"

#: Options of ``uv pip compile`` for pins with hashes and without addresses.
_PINS = ("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", "new.lock")

#: Options of ``uv pip compile`` for files with sizes, hashes and addresses:
#: https://packaging.python.org/en/latest/specifications/pylock-toml/
_FILES = ("--universal", "--format", "pylock.toml", "--output-file", FILE)

#: The variables with which uv finds credentials, its cache and interpreters:
#: https://docs.astral.sh/uv/reference/environment/
_VARIABLES = re.compile(
    r"UV_(INDEX_\w+_(USERNAME|PASSWORD)|KEYRING_PROVIDER|INSECURE_HOST|CREDENTIALS_DIR|SYSTEM_CERTS|NATIVE_TLS|CACHE_DIR"
    r"|HTTP_\w+|CONCURRENT_\w+|PYTHON\w*|MANAGED_PYTHON|REQUEST_TIMEOUT|LINK_MODE)"
)


#: The folder in which the Python of :func:`_python` leaves the PKG-INFO of a source distribution.
_UNTOLD = "TRAINYARD_UNTOLD"

#: uv's warning about a version that its index withdraws: https://peps.python.org/pep-0592/
_YANKED = re.compile(r"^warning: `(\S+)==(\S+)` is yanked(?: \(reason: \"(.*)\"\))?", re.MULTILINE)

#: What that Python runs. A source distribution without PKG-INFO is in NAME/VERSION/REVISION/src of uv's cache.
_NO_BUILDS = f"""
import os, pathlib, shutil, sys
if not sys.flags.isolated:
    told = pathlib.Path(os.environ["{_UNTOLD}"], "PKG-INFO")
    if os.path.exists("PKG-INFO"):
        shutil.copy("PKG-INFO", told)
    else:
        told.write_text("Name: {{}}\\nVersion: {{}}\\n".format(*pathlib.Path.cwd().parts[-4:-2]))
    sys.exit(1)
"""


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
    Path(packages, "no_builds.py").write_text(_NO_BUILDS, encoding="utf-8")
    Path(packages, "no_builds.pth").write_text("import no_builds\n", encoding="utf-8")
    return folder


class NoSolution(UserError):
    """Tell that requirements contradict each other, or what the image has."""


class Failed(StepFailed):
    """Tell that uv failed.

    Attributes:
        stderr: what uv wrote, without credentials.
        unsatisfiable: whether it said so: another exit status tells of an index that does not answer, and the like.
    """

    def __init__(self, target: str, stderr: str, *, unsatisfiable: bool = False) -> None:
        super().__init__(f"cannot lock {target}: {' '.join(stderr.split()) or 'uv failed'}")
        self.stderr = stderr
        self.unsatisfiable = unsatisfiable


@dataclass(frozen=True)
class Project:
    """Describe what uv resolves.

    Attributes:
        target: name of the lock in messages.
        lines: PEP 508 requirements.
        python: minor version, such as ``3.11``.
        offline: whether uv uses its cache alone.
        environments: markers of the environments that uv resolves for at once.
        options: settings by their names in uv's ``[tool.uv]``.
        indexes: package indexes, whose credentials uv gets in variables.
        preferred: the output file that uv is to replace: it keeps the versions there if the requirements allow it.
    """

    target: str
    lines: Sequence[str]
    python: str
    offline: bool
    environments: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    indexes: Sequence[Index] = ()
    preferred: str = ""

    def entries(self) -> dict[str, str]:
        """Return canonical name -> entry of a requirements file, with hashes, of everything that is needed on Debian.

        Raises:
            Failed: uv found no solution, or failed.
        """
        return dict(entries(self._compiled((*_PINS, "--python-platform", _PLATFORM))))

    def packages(self, *, alone: bool = False) -> list[Package]:
        """Return everything that the requirements need in one of the environments, with all files.

        Args:
            alone: leave out what they need.
        Raises:
            Failed: uv found no solution, or failed.
        """
        data = tomllib.loads(self._compiled((*_FILES, *(["--no-deps"] if alone else []))))
        for package in data["packages"]:
            if not package.keys() & {"wheels", "sdist", "vcs", "directory", "archive"}:
                # uv leaves out files that no environment can use, and packaging reads no package without any.
                wheel = f"{package['name'].replace('-', '_')}-{package['version']}-py3-none-none.whl"
                package["wheels"] = [{"path": wheel, "hashes": {"sha256": ""}}]
        return list(Pylock.from_dict(data).packages)

    def install(self, folder: Path, platform: str) -> None:
        """Install the requirements into a folder, from wheels: nothing is built, and nothing of them runs.

        Args:
            platform: uv's name of the platform that the wheels must run on.
        Raises:
            Failed: one has no wheel, or uv failed.
        """
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            self._write(here)
            (here / "requirements.txt").write_text("\n".join(self.lines), encoding="utf-8")
            command = [*settings.UV, "pip", "install", "--quiet", "--requirement", "requirements.txt"]
            command += ["--target", str(folder), "--only-binary", ":all:", "--link-mode", "copy"]
            command += ["--python", sys.executable, "--python-version", self.python, "--python-platform", platform]
            command += ["--offline"] if self.offline else []
            environment = self._environment(here)
            done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(self.target, without_credentials(done.stderr))

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
        archive = self.source_distribution(
            replace(self, lines=[f"{name}=={version}"], options=options).packages(alone=True)[0]
        )
        if archive is None or not archive.final:
            logger.warning(f"{self.target}: {name} {version} does not say what it needs: list that in the requirements")
        about = {"name": name, "version": version, "requires-dist": archive.requires if archive else ()}
        known = [*self.options.get("dependency-metadata", []), about]
        return replace(self, options={**self.options, "dependency-metadata": known})

    def _compiled(self, arguments: Sequence[str]) -> str:
        """Return the output file of ``uv pip compile`` with ``arguments``. Nothing is built."""
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            self._write(here)
            if self.preferred:
                (here / _output(arguments)).write_text(self.preferred, encoding="utf-8")
            command = [*settings.UV, "pip", "compile", "--no-progress", "pyproject.toml", *arguments]
            command += ["--python-version", self.python]
            command += ["--python", f"{_python().name}/bin/python", "--no-build-isolation"]
            if self.offline:
                command.append("--offline")
            environment = self._environment(here)
            done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
            if not done.returncode:
                for name, version, why in _YANKED.findall(done.stderr):
                    logger.warning(f"{self.target}: {name} {version} is yanked{why and f' ({why})'}: pin another")
                return (here / _output(arguments)).read_text(encoding="utf-8")
            untold = _pkg_info(here / "untold" / "PKG-INFO")
            told = [(one.get("name"), one.get("version")) for one in self.options.get("dependency-metadata", [])]
            if untold and untold not in told and "--no-deps" not in arguments:
                return self._told(*untold)._compiled(arguments)
            _check_cache(environment)
            if "(401 Unauthorized)" in done.stderr:  # a hint about an index, which uv leaves out then
                for index in self.indexes:
                    if f"({index.url.rstrip('/')})" in done.stderr:
                        raise index.unauthorized
            raise Failed(self.target, without_credentials(done.stderr), unsatisfiable=done.returncode == 1)

    @cached_property
    def _index_tables(self) -> list[dict[str, Any]]:
        """Return ``[[tool.uv.index]]`` without credentials."""
        tables = []
        for index in self.indexes:
            table: dict[str, Any] = {"name": index.name, "url": index.url}
            tables.append(table | {"flat": {"format": "flat"}, "extra": {}}.get(index.kind, {index.kind: True}))
        return [*tables, *self.options.get("index", [])]

    def _write(self, folder: Path) -> None:
        """Write the pyproject.toml, and the empty uv.toml in the place of this machine's."""
        settled = {key: of for key, of in {**self.options, "index": self._index_tables}.items() if of}
        settled |= {"environments": list(self.environments)} if self.environments else {}
        head = ["[project]", f'name = "{NAME}"', 'version = "0"', f"dependencies = {value(list(self.lines))}"]
        rows = [f"{key} = {value(of)}" for key, of in settled.items()]
        (folder / "pyproject.toml").write_text("\n".join([*head, "[tool.uv]", *rows, ""]), encoding="utf-8")
        (folder / "uv").mkdir()
        (folder / "uv" / "uv.toml").touch()
        (folder / "untold").mkdir()

    def _environment(self, folder: Path) -> dict[str, str]:
        given = settings.environment()
        environment = {
            name: value for name, value in given.items() if not name.startswith("UV_") or _VARIABLES.fullmatch(name)
        }
        # https://docs.astral.sh/uv/concepts/configuration-files/
        environment |= dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), str(folder))
        environment[_UNTOLD] = str(folder / "untold")
        environment |= indexes.environment(self.indexes)
        # uv's own CA certificates lack those of networks that inspect TLS.
        bundle = settings.ca_bundle()
        environment |= {"SSL_CERT_FILE": str(bundle)} if bundle else {}
        # A resolution needs no interpreter, whatever the target's version.
        return environment | {"UV_PYTHON_DOWNLOADS": "never"}


def _pkg_info(path: Path) -> tuple[str, str] | None:
    """Return name and version of a PKG-INFO; None if there is none with a version."""
    if not path.is_file():
        return None
    about = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"), headersonly=True)
    name, version = canonicalize_name(about.get("Name", "")), about.get("Version", "")
    return (name, version) if re.match(r"\d", version) else None


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


def _output(arguments: Sequence[str]) -> str:
    """Return the name of the output file that arguments have."""
    return arguments[arguments.index("--output-file") + 1]


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


def check_conflicts(spec: Spec, versions: Mapping[str, str]) -> None:
    """Check versions (canonical name -> version) against images/conflicts.yaml.

    Raises:
        NoSolution: they cannot share an image; the message gives the reason.
    """
    reason = conflict(versions, spec.python_version)
    if reason:
        raise NoSolution(f"{spec.where}: {reason}")
