"""Resolve packages to hash-pinned requirements with uv, inspect bases, and lock the tools of the build."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.installation import check_writable, checkout
from trainyard.common.settings import ROOT
from trainyard.image import base_image, locked_files
from trainyard.oci import docker_engine, probe_runner
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import conflict
from trainyard.spec.markers import applies
from trainyard.spec.model import IMAGES, BaseContents, Spec, bases
from trainyard.workspace.lines import without_credentials

logger = logging.getLogger(__name__)

#: The platform of locks that are of no image: Debian 12's.
PLATFORM = AMD64.wheel_platform("2.36")

#: First line of the lock of a tool.
_HEADER = "# Locked by `make lock`. Do not edit.\n"

#: Options of ``uv pip compile`` for a requirements file with hashes and without addresses, new.lock.
REQUIREMENTS_FORMAT = (
    "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", "new.lock",
)  # fmt: skip

#: Tools of the build with a lock under images/.
TOOLS = ("uv", "gsutil")


def compile_pins(
    requirements: Sequence[str],
    *,
    python: str,
    target: str,
    context: Context,
    platform: str = PLATFORM,
    constraints: str = "",
    preferred: str = "",
    prereleases: Sequence[str] = (),
    index: tuple[str, str, list[str]] | None = None,
    without: Container[str] = (),
    sized: bool = False,
) -> str:
    """Return what uv resolves ``requirements`` to: pins with hashes, as a section of a lock has them.

    Args:
        requirements: PEP 508 lines.
        python: version the lock is for, such as ``3.11``.
        target: name of the lock in messages.
        context: of the command.
        platform: uv's name of the platform that wheels must run on.
        constraints: text of a constraints file.
        preferred: pins that are kept unless a requirement rules them out.
        prereleases: names of packages whose newest release is taken even if it is a pre-release.
        index: name, address and package names of an index in addition to the default one.
        without: canonical names that are left out of the result.
        sized: write the size of each package's file, and of its hashes only those of files for this platform.
    Raises:
        StepFailed: uv found no solution; the message ends with its error.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "constraints.txt").write_text(constraints, encoding="utf-8")
        # uv keeps the versions of its output file if it can.
        (here / "new.lock").write_text(preferred, encoding="utf-8")
        _write_project(here, requirements, index)
        # A user's uv settings must not change the locks.
        environment = {key: value for key, value in settings.environment().items() if not key.startswith("UV_")}
        options = ["--constraint", "constraints.txt", *REQUIREMENTS_FORMAT]
        options += [f"--prerelease-package={name}=allow" for name in prereleases]
        run = partial(pip_compile, python=python, platform=platform, environment=environment, offline=context.offline)
        done = run(here, options)
        if done.returncode:
            reason = " ".join(done.stderr.split()) or f"uv exited with {done.returncode}"
            raise StepFailed(f"cannot lock {target}: {reason}")
        text = "".join(
            entry for name, entry in entries((here / "new.lock").read_text(encoding="utf-8")) if name not in without
        )

        def files(pins: list[str]) -> subprocess.CompletedProcess[str]:
            _write_project(here, pins, index)
            return run(here, locked_files.OPTIONS)

        return locked_files.with_sizes(here, text, files) if sized else text


def versions(text: str) -> dict[str, str]:
    """Return canonical name -> version of pins, with or without hashes."""
    pins = re.findall(r"(?m)^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\\n]+)", text)
    return {canonicalize_name(name): version for name, version in pins}


def constraints(pinned: Mapping[str, str]) -> str:
    """Return the text of a constraints file, or of preferred pins, for canonical name -> version."""
    return "".join(f"{name}=={version}\n" for name, version in pinned.items())


def _write_project(folder: Path, requirements: Sequence[str], index: tuple[str, str, list[str]] | None) -> None:
    """Write the pyproject.toml of a project with these requirements; ``index``: see :func:`compile_lock`."""
    lines = ["[project]", 'name = "lock"', 'version = "0"', f"dependencies = {list(requirements)!r}"]
    if index:
        name, address, packages = index
        lines += ["[[tool.uv.index]]", f'name = "{name}"', f'url = "{address}"', "explicit = true"]
        lines += ["[tool.uv.sources]", *(f'{package} = {{ index = "{name}" }}' for package in packages)]
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pip_compile(
    folder: Path,
    options: Sequence[str],
    *,
    python: str,
    platform: str,
    environment: Mapping[str, str],
    offline: bool,
) -> subprocess.CompletedProcess[str]:
    """Run ``uv pip compile`` on the pyproject.toml in ``folder`` for a platform, with the host's CA bundle."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml", *options]
    command += ["--python-version", python, "--python-platform", platform]
    if offline:
        command.append("--offline")
    # uv's own CA certificates lack those of networks that inspect TLS.
    bundle = settings.ca_bundle()
    given = {**environment, **({"SSL_CERT_FILE": str(bundle)} if bundle else {})}
    given["UV_PYTHON_DOWNLOADS"] = "never"  # a resolution needs none, whatever the target's version
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    done.stderr = without_credentials(done.stderr)
    return done


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield canonical name and text of each entry of a requirements file without comments."""
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
        UserError: they cannot share an image; the message gives the reason.
    """
    reason = conflict(versions, spec.python_version)
    if reason:
        raise UserError(f"{spec.where}: {reason}")


def inspect_base(spec: Spec, known: BaseContents | None = None) -> BaseContents:
    """The contents of a base that holds the framework.

    The tag is first resolved to a digest; everything else refers to that digest.

    Args:
        known: returned as it is, and nothing is pulled, if the tag has that digest still.
    Raises:
        UserError: the base is unreachable, or is not as images/bases.yaml describes it.
    """
    wanted = spec.base_spec()
    found = base_image.resolve(spec.base, builder_name=spec.context.builder)
    if known and found.digest and (known.reference, known.digest) == (found.reference, found.digest):
        return known
    logger.info(f"{spec.target}: inspecting {found.reference}")
    docker_engine.pull(found.reference)
    seen = probe_runner.run(found.reference, "packages")
    given = settings.variable("BASE")  # whose Python is the one to lock for, whatever its version
    if not given and not seen["python"].startswith(f"{wanted.python}."):
        raise UserError(
            f"{found.reference} has Python {seen['python']}; images/bases.yaml says {wanted.python} of base {spec.base}"
        )
    packages = {canonicalize_name(one["name"]): one for one in reversed(seen["packages"])}
    missing = [name for name in wanted.framework if canonicalize_name(name) not in packages]
    if missing:
        raise UserError(f"{found.reference} has no {', '.join(missing)}: it cannot be base {spec.base}")
    contents = BaseContents(
        image=base_image.configured_reference(spec.base),
        reference=found.reference,
        digest=found.digest,
        day=datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d"),
        python=seen["python"],
        interpreter=seen["executable"],
        site=seen["site"],
        packages={name: one["version"] for name, one in sorted(packages.items())},
        requires=_required(wanted.framework, {name: one["requires"] for name, one in packages.items()}, seen["python"]),
    )
    check_conflicts(spec, contents.packages)
    return contents


def _required(names: Sequence[str], requires: Mapping[str, Sequence[str]], python: str) -> dict[str, list[str]]:
    """Canonical name -> requirements of the packages ``names`` and of the installed ones that they need, sorted.

    Args:
        requires: the same of everything that is installed.
        python: version of the Python that it is installed for.
    """
    found: dict[str, list[str]] = {}
    waiting = list(map(canonicalize_name, names))
    while waiting:
        name = waiting.pop()
        if name in found or name not in requires:
            continue
        needed = _readable(requires[name])
        found[name] = list(needed)
        version = ".".join(python.split(".")[:2])
        waiting += [canonicalize_name(one.name) for one in needed.values() if applies(one.marker, version)]
    return dict(sorted(found.items()))


def _readable(texts: Sequence[str]) -> dict[str, Requirement]:
    """Requirements in the metadata of what is installed, by their text; without those that are not PEP 508."""
    found = {}
    for text in texts:
        with contextlib.suppress(InvalidRequirement):
            found[text] = Requirement(text)
    return found


def lock_scripts(context: Context, *, upgrade: bool = False) -> list[Path]:
    """Write two locks of the same versions: of the package with all its extras, and of that with what tests need.

    Args:
        upgrade: take the newest versions; if not, those of the lock are kept where the requirements allow it.
    Raises:
        UserError: there is no checkout.
        StepFailed: uv found no solution.
    """
    import tomllib

    root = checkout("'trainyard lock scripts'")
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    package = sorted({*project["dependencies"], *(one for one in extras if not one.startswith(project["name"]))})
    tests = [*pyproject["dependency-groups"]["tests"], *pyproject["build-system"]["requires"]]
    everything = ROOT / "scripts" / "requirements.lock"
    preferred = "" if upgrade else everything.read_text(encoding="utf-8")
    text = compile_pins([*package, *tests], python="3.11", target="scripts", context=context, preferred=preferred)
    builder = ROOT / "scripts" / "trainyard" / "builder" / "requirements.lock"
    # The base of scripts/trainyard/builder/Dockerfile.
    python = bases()["debian-13"].python
    in_builder = compile_pins(
        package, python=python, target="scripts", context=context, constraints=constraints(versions(text))
    )
    return [_written(everything, text), _written(builder, in_builder)]


def lock_tool(name: str, context: Context) -> list[Path]:
    """Write the lock of a tool of the build (:data:`TOOLS`).

    Raises:
        StepFailed: uv found no solution.
    """
    lines = (IMAGES / f"{name}.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    check_writable(IMAGES / f"{name}.lock")
    return [_written(IMAGES / f"{name}.lock", compile_pins(pins, python="3.11", target=name, context=context))]


def _written(path: Path, text: str) -> Path:
    """Write the lock of a tool atomically, and return its path."""
    temporary = path.with_suffix(".lock.new")
    temporary.write_text(_HEADER + text, encoding="utf-8")
    temporary.replace(path)
    return path


def tool_pins(name: str) -> str:
    """Return the pins of a tool of the build (:data:`TOOLS`)."""
    return (IMAGES / f"{name}.lock").read_text(encoding="utf-8").removeprefix(_HEADER)
