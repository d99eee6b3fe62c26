"""Resolve a target's packages to hash-pinned locks, for the target's Python and platform, with uv."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.console import StepFailed, UserError, say
from trainyard.common.installation import check_writable, checkout
from trainyard.common.settings import ROOT
from trainyard.image import base_image, locked_files, package_index
from trainyard.oci import docker_engine, probe_runner
from trainyard.spec import lockfile, workspace_lock
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import conflict
from trainyard.spec.markers import applies
from trainyard.spec.model import (
    IMAGES,
    BaseContents,
    Spec,
    base_contents_file,
    bases,
    each_platform,
    requirements_of,
)
from trainyard.workspace.lines import without_credentials

#: The platform of locks that are of no image: Debian 12's.
PLATFORM = AMD64.wheel_platform("2.36")

#: First line of every lock. It names no target, so that images with the same framework lock share the build stage.
_HEADER = workspace_lock.SPLIT_HEADER

#: Options of ``uv pip compile`` for a requirements file with hashes and without addresses, new.lock.
REQUIREMENTS_FORMAT = (
    "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--output-file", "new.lock",
)  # fmt: skip

#: Tools of the build with a lock under images/.
TOOLS = ("uv", "gsutil")


def compile_lock(
    requirements: list[str],
    output: Path,
    *,
    python: str,
    target: str,
    platform: str = PLATFORM,
    constraints: str = "",
    preferred: str = "",
    prereleases: Sequence[str] = (),
    index: tuple[str, str, list[str]] | None = None,
    keep: set[str] | None = None,
    sized: bool = False,
) -> None:
    """Resolve ``requirements`` with uv and write the lock ``output`` atomically.

    Args:
        requirements: PEP 508 lines.
        python: version the lock is for, such as ``3.11``.
        target: name of the lock in messages.
        platform: uv's name of the platform that wheels must run on.
        constraints: text of a constraints file.
        preferred: pins that are kept unless a requirement rules them out.
        prereleases: names of packages whose newest release is taken even if it is a pre-release.
        index: name, address and package names of an index in addition to the default one.
        keep: canonical names to keep in the lock; everything if None.
        sized: write the size of each package's file, and of its hashes only those of files for this platform.
    Raises:
        StepFailed: uv found no solution; the message ends with its error.
    """
    check_writable(output)
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
        found = pip_compile(here, options, python=python, platform=platform, environment=environment)
        if found.returncode:
            reason = " ".join(found.stderr.split()) or f"uv exited with {found.returncode}"
            raise StepFailed(f"cannot lock {target}: {reason}")
        text = (here / "new.lock").read_text(encoding="utf-8")
        if keep is not None:
            text = _only(text, keep)

        def files(pins: list[str]) -> subprocess.CompletedProcess[str]:
            _write_project(here, pins, index)
            return pip_compile(here, locked_files.OPTIONS, python=python, platform=platform, environment=environment)

        if sized:
            text = locked_files.with_sizes(here, text, files)
    temporary = output.with_suffix(".lock.new")
    temporary.write_text(_HEADER + text, encoding="utf-8")
    temporary.replace(output)


def _write_project(folder: Path, requirements: Sequence[str], index: tuple[str, str, list[str]] | None) -> None:
    """Write the pyproject.toml of a project with these requirements; ``index``: see :func:`compile_lock`."""
    lines = ["[project]", 'name = "lock"', 'version = "0"', f"dependencies = {list(requirements)!r}"]
    if index:
        name, address, packages = index
        lines += ["[[tool.uv.index]]", f'name = "{name}"', f'url = "{address}"', "explicit = true"]
        lines += ["[tool.uv.sources]", *(f'{package} = {{ index = "{name}" }}' for package in packages)]
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pip_compile(
    folder: Path, options: Sequence[str], *, python: str, platform: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``uv pip compile`` on the pyproject.toml in ``folder`` for a platform, with the host's CA bundle."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml", *options]
    command += ["--python-version", python, "--python-platform", platform]
    if settings.offline():
        command.append("--offline")
    # uv's own CA certificates lack those of networks that inspect TLS.
    bundle = settings.ca_bundle()
    given = {**environment, **({"SSL_CERT_FILE": str(bundle)} if bundle else {})}
    given["UV_PYTHON_DOWNLOADS"] = "never"  # a resolution needs none, whatever the target's version
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    done.stderr = without_credentials(done.stderr)
    return done


def _only(text: str, keep: set[str]) -> str:
    """The entries of a lock whose canonical names are in ``keep``."""
    kept, keeping = [], False
    for line in text.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            keeping = canonicalize_name(line.split("==")[0].split("[")[0].strip()) in keep
        if keeping:
            kept.append(line)
    return "".join(kept)


def lock_target(spec: Spec, index_name: str) -> list[Path]:
    """Write the pair of locks of ``spec`` for one index; the paths written.

    Framework and requirements are resolved together, so that they are compatible, and then split: what the framework
    alone needs is in its lock and layer, the rest in the requirements'. A spec that inherits its parent's framework
    keeps the parent's versions.

    Raises:
        UserError: the versions conflict by images/conflicts.yaml, or the locks are files of the installed package.
        StepFailed: uv found no solution.
    """
    output = lockfile.requirements_lock(spec, index_name)
    check_writable(output)  # before packages are resolved or a base is pulled, which take minutes
    if spec.framework_in_base:
        return lock_with_framework_in_base(spec)
    index_spec = spec.index_spec()
    index = None
    if index_name != "default":
        assert index_spec is not None
        index = (index_name, package_index.url(index_name, index_spec), index_spec.packages)
    python, platform = spec.base_spec().python, spec.wheel_platform
    written = []
    framework = lockfile.framework_lock(spec, index_name)
    everything = spec.framework.packages + requirements_of(spec)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.lock"
        if spec.framework_folder == spec.folder:
            compile_lock(
                everything,
                whole,
                python=python,
                platform=platform,
                target=spec.target,
                preferred=_of_first_platform(spec, index_name),
                index=index,
            )
            check_conflicts(spec, lockfile.read(whole))
            pins = "\n".join(f"{name}=={version}" for name, version in lockfile.read(whole).items())
            compile_lock(
                spec.framework.packages,
                framework,
                python=python,
                platform=platform,
                target=spec.target,
                constraints=pins,
                index=index,
                sized=True,
            )
            written.append(framework)
        taken = lockfile.read(framework)
        pins = "\n".join(f"{name}=={version}" for name, version in taken.items())
        # What an image shares with the target that it extends is the same layers.
        parents = _parents_lock(spec, index_name)
        preferred = parents.read_text(encoding="utf-8") if parents else _of_first_platform(spec, index_name)
        compile_lock(
            everything,
            whole,
            python=python,
            platform=platform,
            target=spec.target,
            constraints=pins,
            preferred=preferred,
            index=index,
        )
        resolved = lockfile.read(whole)
        check_conflicts(spec, resolved)
        rest = set(resolved) - set(taken)
        compile_lock(
            everything,
            output,
            python=python,
            platform=platform,
            target=spec.target,
            constraints=pins,
            preferred=preferred,
            index=index,
            keep=rest,
            sized=True,
        )
    _mark_added(spec, index_name, output)
    return [*written, output]


def _of_first_platform(spec: Spec, index_name: str) -> str:
    """The pins of the first of a target's platforms, whose versions the others have too; empty for the first.

    Without hashes: uv would keep them, and they are those of files for that platform.
    """
    first = each_platform(spec)[0]
    if first.arch == spec.arch:
        return ""
    return "".join(f"{name}=={version}\n" for name, version in lockfile.installed(first, index_name).items())


def _parents_lock(spec: Spec, index_name: str) -> Path | None:
    """The requirements' lock of the target that ``spec`` extends, if there is one for this index."""
    path = spec.framework_folder / f"requirements{spec.suffix(index_name)}.lock"
    return path if spec.framework_folder != spec.folder and path.is_file() else None


def _mark_added(spec: Spec, index_name: str, output: Path) -> None:
    """Mark in a lock what the target that ``spec`` extends does not have."""
    parents = _parents_lock(spec, index_name)
    if parents is None:
        return
    pins = lockfile.mark_added(lockfile.pinned(output), lockfile.pinned(parents))
    output.write_text(_HEADER + "".join(pin.text() for pin in pins), encoding="utf-8")


def check_conflicts(spec: Spec, versions: Mapping[str, str]) -> None:
    """Check versions (canonical name -> version) against images/conflicts.yaml.

    Raises:
        UserError: they cannot share an image; the message gives the reason.
    """
    reason = conflict(versions, spec.python_version)
    if reason:
        raise UserError(f"{spec.where}: {reason}")


def lock_with_framework_in_base(spec: Spec) -> list[Path]:
    """Inspect a base that holds the framework, record its packages, and lock the requirements that it lacks.

    Requirements that the base satisfies are used from it; the others are locked, and precede the base's packages on the
    module path.

    Raises:
        UserError: the base is unreachable, or is not as images/bases.yaml describes it.
        StepFailed: the requirements are not compatible with it; the message ends with uv's error.
    """
    contents = inspect_base(spec)
    output = lockfile.requirements_lock(spec, "default")
    _lock_missing(spec, contents, output)
    path = base_contents_file(spec)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(contents.text(), encoding="utf-8")
    temporary.replace(path)
    return [path, output]


def inspect_base(spec: Spec, known: BaseContents | None = None) -> BaseContents:
    """The contents of a base that holds the framework.

    The tag is first resolved to a digest; everything else refers to that digest.

    Args:
        known: returned as it is, and nothing is pulled, if the tag has that digest still.
    Raises:
        UserError: the base is unreachable, or is not as images/bases.yaml describes it.
    """
    wanted = spec.base_spec()
    found = base_image.resolve(spec.base)
    if known and found.digest and (known.reference, known.digest) == (found.reference, found.digest):
        return known
    say(f"{spec.target}: inspecting {found.reference}")
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


def _lock_missing(spec: Spec, contents: BaseContents, output: Path) -> None:
    """Lock the requirements that the base does not have in a compatible version."""
    taken = set(map(canonicalize_name, spec.base_spec().framework))
    needs = [
        str(requirement)
        for text in itertools.chain.from_iterable(contents.requires.get(name, []) for name in sorted(taken))
        if (requirement := Requirement(text)).marker is None and canonicalize_name(requirement.name) not in taken
    ]
    resolve = functools.partial(
        compile_lock,
        requirements_of(spec),
        python=contents.python_version,
        platform=spec.wheel_platform,
        target=spec.target,
        constraints="\n".join(needs),
        preferred="\n".join(f"{name}=={version}" for name, version in contents.packages.items()),
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.lock"
        resolve(whole)
        resolved = lockfile.read(whole)
    check_conflicts(spec, contents.packages | resolved)
    rest = {name for name, version in resolved.items() if contents.packages.get(name) != version}
    resolve(output, keep=rest - taken)


def lock_scripts(*, upgrade: bool = False) -> list[Path]:
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
    compile_lock([*package, *tests], everything, python="3.11", target="scripts", preferred=preferred)
    pins = "\n".join(f"{name}=={version}" for name, version in lockfile.read(everything).items())
    builder = ROOT / "scripts" / "trainyard" / "builder" / "requirements.lock"
    # The base of scripts/trainyard/builder/Dockerfile.
    python = bases()["debian-13"].python
    compile_lock(package, builder, python=python, target="scripts", constraints=pins)
    return [everything, builder]


def lock_tool(name: str) -> list[Path]:
    """Write the lock of a tool of the build (:data:`TOOLS`).

    Raises:
        StepFailed: uv found no solution.
    """
    lines = (IMAGES / f"{name}.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    compile_lock(pins, IMAGES / f"{name}.lock", python="3.11", target=name)
    return [IMAGES / f"{name}.lock"]
