"""Resolve a user's requirements beside a framework: the project that uv is given, and how its answer is read."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.pylock import Package, Pylock
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_wheels, locked_files, resolver
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolver import entries, versions
from trainyard.spec import lock, model
from trainyard.spec.lock import Pin
from trainyard.spec.markers import applies
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import indexes, source_distributions
from trainyard.workspace.indexes import Index
from trainyard.workspace.lines import Line
from trainyard.workspace.requirements import Wanted
from trainyard.workspace.wheels import Wheel

logger = logging.getLogger(__name__)

#: Build backends, of which a build has its own versions: importing the framework does not need those of the image.
_BACKENDS = ("setuptools", "wheel")

#: The project that is resolved; uv's reasons begin with its name, as in "this-image depends on numpy==2.4.6".
_PROJECT = "this-image"

#: The variables with which uv finds credentials, its cache and interpreters. Indexes are written into its settings, and
#: others, which could change versions, are left out: https://docs.astral.sh/uv/reference/environment/
_UV_VARIABLES = re.compile(
    r"UV_(INDEX_\w+_(USERNAME|PASSWORD)|KEYRING_PROVIDER|INSECURE_HOST|CREDENTIALS_DIR|SYSTEM_CERTS|NATIVE_TLS|CACHE_DIR"
    r"|HTTP_\w+|CONCURRENT_\w+|PYTHON\w*|MANAGED_PYTHON|REQUEST_TIMEOUT|LINK_MODE)"
)


@dataclass(frozen=True)
class Request:
    """What one resolution starts from.

    Attributes:
        framework: canonical name -> version of the framework's packages.
        base: the same of the base image's other packages, which are used if the requirements allow it.
        index: name, address and packages of the framework's index; None for the default one.
        compiled: canonical name -> version and requirements of source distributions.
        old: entries whose versions are kept.
        upgraded: names whose versions are not kept.
        same_target: whether ``old`` is of the same target.
        first: canonical name -> version in the image for the first platform, which the others have too if they can.
    """

    spec: RepositorySpec
    wanted: Wanted
    framework: dict[str, str]
    index: tuple[str, str, list[str]] | None
    indexes: list[Index]
    wheels: list[Wheel]
    compiled: dict[str, Compiled]
    old: str
    upgraded: frozenset[str] = frozenset()
    base: Mapping[str, str] = field(default_factory=dict)
    same_target: bool = True
    first: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """A source distribution.

    Attributes:
        line: what asks for it.
        sha256: of its archive.
        requires: PEP 508 requirements of the package, ``build_requires``: of its build.
    """

    line: Line
    name: str
    version: str
    sha256: str
    requires: tuple[str, ...] = ()
    build_requires: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def resolve(request: Request) -> str:
    """The requirements section: everything that the image needs besides the framework.

    Raises:
        UserError: the requirements exclude each other; the message has uv's reason.
        StepFailed: uv failed for another reason.
    """
    spec = request.spec
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        lines, options = _project(request)
        if spec.base_contents:
            base_wheels.write(here / "base", spec.base_contents)
            options["index"].append(
                {"name": base_wheels.INDEX, "url": (here / "base").as_uri(), "format": "flat", "explicit": True}
            )
            options["sources"] |= {name: {"index": base_wheels.INDEX} for name in request.framework}
        _write_project(here, lines, options)
        (here / "new.lock").write_text(_preferred(request), encoding="utf-8")
        done = _uv(request, here, resolver.REQUIREMENTS_FORMAT)
        if done.returncode:
            raise _failure(request, done.stderr)
        text = (here / "new.lock").read_text(encoding="utf-8")
        made = {wheel.name: wheel for wheel in request.wheels}
        kept = {}
        for name, entry in entries(text):
            wheel = made.get(name)
            if name in request.framework or name in request.compiled or (not wheel and _in_base(request, name, entry)):
                continue
            if wheel is None and " @ " in entry.splitlines()[0]:
                raise UserError(
                    f"{spec.where}: {name} asks for an address, which a lock does not hold: name {name} in the "
                    "requirements"
                )
            kept[name] = entry

        def files(pins: list[str]) -> subprocess.CompletedProcess[str]:
            _write_project(here, pins, options)
            return _uv(request, here, locked_files.OPTIONS)

        from_indexes = "".join(entry for name, entry in kept.items() if name not in made)
        if not spec.framework_in_base:  # otherwise all are one layer
            from_indexes = locked_files.with_sizes(here, from_indexes, files)
        pins = lock.parse(from_indexes)
    if not spec.framework_in_base:
        pins = lock.mark_added(pins, _of_target(request))
    pinned = {pin.name: pin for pin in pins}
    found = []
    for name in kept:
        if wheel := made.get(name):
            pin = Pin(name, wheel.version, (wheel.sha256,), wheel.file.stat().st_size, added=True)
            found.append(f"{wheel.note}\n{pin.text()}")
        else:
            found.append(pinned[name].text())
    return "".join(found)


def _of_target(request: Request) -> list[Pin]:
    """The requirements that the image shares with its target.

    They are those of the old lock and of the target's: a later Trainyard, with another lock of the target, does not
    change the layers of an image whose requirements are the same.
    """
    target = request.spec.extends.on(request.spec.arch).locked().requirements
    kept = [pin for pin in lock.parse(request.old) if not pin.added] if request.same_target else []
    return [*target, *kept]


def _in_base(request: Request, name: str, entry: str) -> bool:
    """Whether the base image has a package in the version of ``entry``."""
    return name in request.base and versions(entry).get(name) == request.base[name]


def _uv(request: Request, folder: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    given = settings.environment()
    environment = {
        key: value for key, value in given.items() if not key.startswith("UV_") or _UV_VARIABLES.fullmatch(key)
    }
    environment |= {"UV_CONFIG_FILE": str(folder / "uv.toml")} | indexes.environment(request.indexes)
    spec = request.spec
    return resolver.pip_compile(
        folder,
        options,
        python=spec.python_version,
        platform=spec.wheel_platform,
        environment=environment,
        offline=spec.context.offline,
    )


def _preferred(request: Request) -> str:
    """The versions to keep: of the first platform, then of the old lock, then of the base image, then of the target.

    uv takes the hashes from here too. They are left out where the workspace names other indexes: a package that
    moves to another index has other files.
    """
    if request.spec.framework_in_base:
        # The target's own lock is for another day's base.
        target = "".join(f"{text}\n" for text in model.requirements_of(request.spec))
    else:
        target = request.spec.extends.on(request.spec.arch).locked().text("requirements")
    base = {name: f"{name}=={version}\n" for name, version in request.base.items()}
    known = dict(entries(target)) | base | dict(entries(request.old))
    return _kept(request, known, {*(wheel.name for wheel in request.wheels), *request.framework, *request.compiled})


def _kept(request: Request, known: Mapping[str, str], left_out: Container[str]) -> str:
    """The entries of ``known`` as uv's preferences, with the versions of the first platform.

    Where these differ they have no hashes, which are those of files for that platform.
    """
    agreed = {
        name: f"{name}=={version}\n"
        for name, version in request.first.items()
        if name in request.upgraded or versions(known.get(name, "")).get(name) != version
    }
    kept = {name: entry for name, entry in known.items() if name not in request.upgraded} | agreed
    found = [entry for name, entry in sorted(kept.items()) if name not in left_out]
    if request.indexes:
        found = [entry.split(" \\", 1)[0].strip() + "\n" for entry in found]
    return "".join(found)


def _project(request: Request) -> tuple[list[str], dict[str, Any]]:
    """The dependencies and the ``[tool.uv]`` settings of the project that is resolved."""
    spec, wanted, framework = request.spec, request.wanted, request.framework
    parent_names = [Requirement(text) for text in model.requirements_of(spec)]
    lines = [f"{name}=={version}" for name, version in framework.items()]
    lines += [str(_unpinned(one)) for one in parent_names if canonicalize_name(one.name) not in framework]
    variants = contradictions.variants(framework)
    lines += [text for line in wanted.lines if (text := _line(line, framework, variants))]
    for wheel in request.wheels:
        extras = f"[{','.join(wheel.source.extras)}]" if wheel.source.extras else ""
        marker = f" ; {wheel.source.marker}" if wheel.source.marker else ""
        lines.append(f"{wheel.name}{extras} @ {wheel.file.resolve().as_uri()}{marker}")
    lines += [f"{one.name}=={one.version}" for one in request.compiled.values()]
    outside = [line for line in (*wanted.constraints, *wanted.overrides) if line.name not in variants]
    options: dict[str, Any] = dict(wanted.options)
    options["constraint-dependencies"] = [line.text for line in wanted.constraints if line in outside]
    options["override-dependencies"] = [
        line.text if line in outside else f"{line.name}=={framework[line.name]}"
        for line in wanted.overrides
        if line in outside or line.name in framework
    ]
    absent = {*wanted.excludes, *wanted.provided, *(name for name in variants if name not in framework)}
    options["exclude-dependencies"] = sorted(absent)
    options["dependency-metadata"] = [
        *options.get("dependency-metadata", []),
        *(
            {"name": one.name, "version": one.version, "requires-dist": one.requires}
            for one in request.compiled.values()
        ),
    ]
    tables, sources = _index_tables(request.indexes, wanted.index_of)
    if request.index:
        name, address, packages = request.index
        tables.append({"name": name, "url": address, "explicit": True})
        sources |= {package: {"index": name} for package in packages}
    options |= {"index": tables, "sources": {name: one for name, one in sources.items() if name not in variants}}
    if request.index:
        options["sources"] |= {package: {"index": request.index[0]} for package in request.index[2]}
    return lines, options


def _write_project(folder: Path, lines: Sequence[str], options: Mapping[str, Any]) -> None:
    """Write the pyproject.toml of a project with these dependencies and ``[tool.uv]`` settings, and a uv.toml.

    uv is given the uv.toml, so that it reads no settings of this machine: https://docs.astral.sh/uv/reference/cli/#uv
    """
    settings_of_uv = {key: value for key, value in options.items() if value not in ([], {})}
    rows = [f"{key} = {_value(value)}" for key, value in settings_of_uv.items() if key != "sources"]
    (folder / "uv.toml").write_text("\n".join([*rows, ""]), encoding="utf-8")
    head = ["[project]", f'name = "{_PROJECT}"', 'version = "0"', f"dependencies = {_value(list(lines))}", "[tool.uv]"]
    rows = [f"{key} = {_value(value)}" for key, value in settings_of_uv.items() if key in ("index", "sources")]
    (folder / "pyproject.toml").write_text("\n".join([*head, *rows, ""]), encoding="utf-8")


def _value(value: Any) -> str:
    """A value in TOML, whose strings, numbers and booleans are those of JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, default=str)


def _unpinned(requirement: Requirement) -> Requirement:
    """A requirement of the target's trainers without its version, which is a preference."""
    found = Requirement(str(requirement))
    found.specifier = SpecifierSet()
    return found


def _line(line: Line, framework: Mapping[str, str], variants: Mapping[str, str]) -> str:
    """A user's line as it is resolved; of a package of the framework, only the extras."""
    if line.name not in variants:
        return line.text
    found = _unpinned(line.requirement)
    return str(found) if line.name in framework and found.extras else ""


def _index_tables(
    found: Sequence[Index], index_of: Mapping[str, str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """``[[tool.uv.index]]`` without credentials, and ``[tool.uv.sources]``."""
    tables = []
    for one in found:
        table: dict[str, Any] = {"name": one.name, "url": one.url}
        table |= {"flat": {"format": "flat"}, "extra": {}}.get(one.kind, {one.kind: True})
        tables.append(table)
    return tables, {name: {"index": index} for name, index in index_of.items()}


def _failure(request: Request, stderr: str) -> Exception:
    """uv's reason in one line, with the user's line that it is about."""
    spec = request.spec
    text = " ".join(stderr.split())
    text = text.replace(f"{_PROJECT} depends on", "this image needs").replace(f"{_PROJECT}'s", "its")
    match = re.search(r"No solution found when resolving dependencies:?(?: cause:| ╰─▶)? ?(.*)", text)
    if not match:
        return StepFailed(f"cannot lock {spec.target}: {_build_failure(text) or text or 'uv failed'}")
    reason = match[1][:1].lower() + match[1][1:]
    about = [line for line in request.wanted.lines if re.search(rf"(?<![\w-]){re.escape(line.name)}(?![\w-])", reason)]
    mine = [line for line in about if line.name not in request.framework]
    if not mine:
        return UserError(f"{spec.where}: the requirements cannot be installed: {reason}")
    return UserError(f"{mine[0].where}: {mine[0].shown} cannot be installed: {reason}")


def _build_failure(text: str) -> str:
    """The error of a source distribution whose metadata uv could not get; empty if that is not what failed."""
    package = re.search(r"Failed to (?:build|download and build) `([^`]+)`", text)
    errors = re.findall(r"\b\w+(?:Error|Exception): .+?(?= hint:|$)", text)
    return f"{package[1]} has no wheel for the image, and its build fails ({errors[-1]})" if package and errors else ""


def compile_sources(
    spec: RepositorySpec, wanted: Wanted, found: list[Index], old: Mapping[str, str]
) -> dict[str, Compiled]:
    """The source distributions of ``build:`` with the SHA-256 of their archives; nothing is built.

    Args:
        old: canonical name -> version to keep.
    Raises:
        UserError: there is none on an index.
        StepFailed: uv failed.
    """
    if not wanted.compiled:
        return {}
    request = Request(spec, wanted, {}, None, found, [], {}, "")
    tables, sources = _index_tables(found, wanted.index_of)
    names = {line.name: line for line in wanted.compiled}
    kept = [
        f"{name}=={version}"
        for name, version in old.items()
        if name in names and names[name].requirement.specifier.contains(version)
    ]
    options = {
        "constraint-dependencies": kept,
        "index": tables,
        "sources": {name: one for name, one in sources.items() if name in names},
        "no-binary-package": sorted(names),
    }
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _write_project(here, [one.text for one in wanted.compiled], options)
        done = _uv(request, here, ("--no-deps", "--format", "pylock.toml", "--output-file", "pylock.toml"))
        if done.returncode:
            raise _failure(Request(spec, Wanted(lines=wanted.compiled), {}, None, found, [], {}, ""), done.stderr)
        packages = Pylock.from_dict(tomllib.loads((here / "pylock.toml").read_text(encoding="utf-8"))).packages
    return {
        canonicalize_name(one.name): _compiled(
            names[canonicalize_name(one.name)], one, found, offline=spec.context.offline
        )
        for one in packages
        if canonicalize_name(one.name) in names
    }


def _compiled(line: Line, package: Package, found: Sequence[Index], *, offline: bool) -> Compiled:
    """A package of a pylock.toml (PEP 751) as a source distribution."""
    if package.sdist is None or not package.sdist.url or "sha256" not in package.sdist.hashes:
        raise UserError(f"{line.where}: {line.shown} has no source distribution on a package index")
    credentials = indexes.credentials_for(package.sdist.url, found)
    archive = source_distributions.read(package.sdist.url, credentials, offline=offline)
    if not archive.final and not archive.requires:
        logger.warning(
            f"{line.where}: {package.name} {package.version} does not say what it needs: list that in the requirements"
        )
    return Compiled(
        line,
        canonicalize_name(package.name),
        str(package.version),
        package.sdist.hashes["sha256"],
        archive.requires,
        archive.build_requires,
    )


def build_requirements(request: Request) -> str:
    """The build-requires section: what the source distributions are compiled with, which no image has.

    What the image has, such as torch and numpy, is used as the image has it: compiled for another version, an extension
    might not import.

    Args:
        request: its ``framework`` is everything that the image has.
    Raises:
        UserError: the requirements exclude each other, or one has an address.
        StepFailed: uv failed for another reason.
    """
    needed = [
        (Line(text, one.line.file, one.line.number), f"{one.name} {one.version}")
        for one in request.compiled.values()
        for text in one.build_requires
    ]
    needed += [(line, "'build.requires'") for line in request.wanted.build_requires]
    python, machine = request.spec.python_version, request.spec.architecture.machine
    provided = {name: version for name, version in request.framework.items() if name not in _BACKENDS}
    lines = []
    for line, by in needed:
        wanted = line.requirement
        if not applies(wanted.marker, python, machine):
            continue
        if version := provided.get(line.name):
            if not wanted.specifier.contains(version, prereleases=True):
                logger.warning(
                    f"{line.where}: {by} asks for {line.shown} to be built, and is built with {version} of the image"
                )
        elif wanted.url:
            raise UserError(f"{line.where}: {by} is built with {line.shown}, an address, which a lock does not hold")
        else:
            lines.append(line)
    tools = entries(resolver.tool_pins("uv"))
    known = {name: entry for name, entry in tools if name in _BACKENDS} | dict(entries(request.old))
    tables, sources = _index_tables(request.indexes, request.wanted.index_of)
    options = {
        "exclude-dependencies": sorted(provided),
        "index": tables,
        "sources": {name: one for name, one in sources.items() if name in {line.name for line in lines}},
    }
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _write_project(here, [line.text for line in dict.fromkeys(lines)], options)
        (here / "new.lock").write_text(_kept(request, known, provided), encoding="utf-8")
        done = _uv(request, here, resolver.REQUIREMENTS_FORMAT)
        if done.returncode:
            raise _failure(replace(request, wanted=Wanted(lines=tuple(lines)), framework={}), done.stderr)
        return "".join(entry for _, entry in entries((here / "new.lock").read_text(encoding="utf-8")))
