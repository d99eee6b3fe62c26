"""Find or bootstrap the base image of a target.

If the base's registry answers, its image is used, pinned by digest. Otherwise an equivalent is bootstrapped from the
Debian archive with mmdebstrap, using the host's own apt sources, and imported into the engine.

Wheels are installed in the build base, an older image of the same release, so that a newer base changes only its own
layers.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci.reference import Reference
from trainyard.spec import architectures
from trainyard.spec.architectures import AMD64, ARCHITECTURES, Architecture
from trainyard.spec.catalog import pythons_of
from trainyard.spec.model import Base, bases
from trainyard.spec.naming import FILE_EPOCH, FOLDER, NAME
from trainyard.workspace.lines import without_credentials

logger = logging.getLogger(__name__)

#: What Debian's slim images leave out (debuerreotype's slim excludes).
_SLIM = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/groff/*",
         "/usr/share/lintian/*", "/usr/share/linda/*"]  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """Name the images that a build starts from.

    Attributes:
        reference: base of the image.
        digest: its digest if a registry or ``TRAINYARD_BASE`` gave one, else empty.
        note: the fallback that was taken, a sentence; None if none was.
        build_base: base of the stages that install wheels.
    """

    reference: str
    digest: str
    note: str | None
    build_base: str


def unreachable(reference: str, context: Context) -> str:
    """Return why neither the engine nor its registry has an image, in a few words; empty if one of them has it."""
    if context.engine.find(reference):
        return ""
    if context.offline:
        return "this is an offline build"
    digest, reason = context.engine.digest_at_registry(reference, context.builder)
    return "" if digest else reason


def local_reference(name: str, architecture: Architecture = AMD64) -> str:
    """Return the local reference of a bootstrapped base."""
    return f"{NAME}-base:{name}" + ("" if architecture == AMD64 else f"-{architecture.name}")


def resolve(
    context: Context,
    name: str,
    locked: str = "",
    architecture: Architecture | None = None,
    machine: Architecture | None = None,
) -> Resolved:
    """Return the images that base ``name`` means on this host; bootstrapped if its registry does not answer.

    ``TRAINYARD_BASE`` and ``TRAINYARD_BUILD_BASE`` replace them.

    Args:
        context: whose builder's mirrors of registries are used (:func:`trainyard.oci.builder.current`).
        locked: reference with a digest that is used instead of the tag's current one, if the registry answers.
        architecture: of the image that is built; None: the engine's.
        machine: architecture of the machine that builds, which the build base is for; None: the engine's.
    Raises:
        UserError: the registry does not answer and the base cannot be bootstrapped.
        StepFailed: bootstrapping failed.
    """
    given, build_base = settings.variable("BASE"), settings.variable("BUILD_BASE")
    if given:
        if not build_base:
            of_engine = architectures.of_engine(context.engine)
            native = (architecture or of_engine) == (machine or of_engine)
            build_base = given if native else _find(context, name, machine=machine).build_base
        return Resolved(given, given.partition("@")[2], f"base {given} was set with TRAINYARD_BASE", build_base)
    resolved = _find(context, name, locked, architecture, machine)
    return replace(resolved, build_base=build_base) if build_base else resolved


def pythons(
    context: Context, names: Iterable[str], machine: Architecture | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return images with the Python of other bases than a build's: name -> reference; and a note for each without one.

    The stage ``tools`` takes the place of an image that this host cannot have: the layers that all images share then
    lack the byte code of that Python.

    Args:
        names: of :func:`trainyard.image.facts.other_pythons`.
        context, machine: see :func:`resolve`.
    """
    references, notes = {}, []
    for name in names:
        try:
            references[name] = _find(context, name, machine=machine).build_base
        except (UserError, StepFailed) as error:
            references[name] = "tools"
            notes.append(f"the layers with the launcher and the trainers have no byte code for {name}: {error}")
    return references, notes


def _find(
    context: Context,
    name: str,
    locked: str = "",
    architecture: Architecture | None = None,
    machine: Architecture | None = None,
) -> Resolved:
    """Return what :func:`resolve` does without the variables."""
    base = bases()[name]
    machine = machine or architectures.of_engine(context.engine)
    architecture = architecture or machine
    digest, reason = context.engine.digest_at_registry(locked if "@" in locked else base.image, context.builder)
    if digest:
        reference = f"{base.image}@{digest}"
        # Another name for the same image: a build replaces the one of the base (trainyard.image.working_directory).
        of_all_platforms = f"{Reference.parse(base.image).name}@{digest}"
        older = base.build_base
        built_in = context.engine.digest_at_registry(older, context.builder)[0] if older else None
        return Resolved(reference, digest, None, f"{older}@{built_in}" if built_in else of_all_platforms)
    if base.bootstrap is None:
        raise UserError(f"base {base.image} is unreachable ({reason}) and cannot be bootstrapped: {_instead(base)}")
    reference = local_reference(name, architecture)
    for wanted in dict.fromkeys((architecture, machine)):
        if not context.engine.find(local_reference(name, wanted)):
            logger.info(f"base {base.image}: its registry does not answer ({reason}); bootstrapping an equivalent")
            bootstrap(context.engine, name, base, wanted)
    note = f"base {base.image} is unreachable ({reason}): built on {reference}, bootstrapped from the Debian archive"
    return Resolved(reference, "", note, _local_build_base(context.engine, name, machine))


def _instead(base: Base) -> str:
    """Return what to do about a base that cannot be had, the end of a message."""
    remedy = "set 'TRAINYARD_BASE=<reference>' to an image with the same contents"
    others = {name: other.python for name, other in bases().items() if other.bootstrap}
    same = [name for name, python in others.items() if python == base.python]
    if base.framework:
        return remedy
    return f"{remedy}, or give a base from Debian's archive, as in 'base:' with {pythons_of(same or others)}"


def lockable_reference(name: str, context: Context) -> str:
    """Return the reference of base ``name``, with its digest if its registry may be asked and answers."""
    image = bases()[name].image
    if context.offline or not shutil.which("docker"):
        return image
    digest, _ = context.engine.digest_at_registry(image, context.builder)
    return f"{image}@{digest}" if digest else image


def _local_build_base(engine: Engine, name: str, architecture: Architecture) -> str:
    """Return the reference of the first base that was bootstrapped for an architecture, which later ones leave."""
    reference = local_reference(f"{name}-build-base", architecture)
    if not engine.find(reference):
        engine.client.images.get(local_reference(name, architecture)).tag(reference)
    return reference


def configured_reference(name: str) -> str:
    """Return the reference of a base before it is resolved: ``TRAINYARD_BASE``, or that of images/bases.yaml."""
    return settings.variable("BASE") or bases()[name].image


def _apt(*arguments: str) -> None:
    """Run apt-get as root, quietly, or raise :class:`StepFailed` with its last line."""
    environment = settings.environment(DEBIAN_FRONTEND="noninteractive")
    command = ["apt-get", "-qq", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StepFailed(f"'apt-get {' '.join(arguments)}' failed: {words}")


def host_sources(targets: str, suite: str) -> list[str]:
    """Return apt source lines for ``suite`` on the hosts that this machine's apt uses for Debian.

    Args:
        targets: what ``apt-get indextargets --format '$(REPO_URI) $(LABEL)'`` prints.
    """
    suites = {"Debian": [suite, f"{suite}-updates"], "Debian-Security": [f"{suite}-security"]}
    sources = []
    for line in dict.fromkeys(targets.splitlines()):
        address, _, label = line.partition(" ")
        sources += [f"deb {address} {name} main" for name in suites.get(label, [])]
    return sources


def _sources(suite: str) -> list[str]:
    """Return apt source lines for ``suite``: ``TRAINYARD_DEBIAN_MIRROR``, or the mirrors of the host's own apt."""
    given = settings.variable("DEBIAN_MIRROR")
    if given:
        return [f"deb {given} {suite} main"]
    if shutil.which("apt-get"):
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"]
        for attempt in range(2):
            targets = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            sources = host_sources(targets, suite)
            if sources:
                return sources
            if attempt == 0 and os.geteuid() == 0:
                _apt("update")  # container images delete the package lists, and apt lists no targets without them
    raise UserError(
        f"cannot bootstrap Debian {suite}: this host has no Debian apt source (or 'apt-get update' never ran); run "
        "'TRAINYARD_DEBIAN_MIRROR=<address of a mirror> trainyard dev base', or set 'TRAINYARD_BASE=<reference>'"
    )


def _need_mmdebstrap(*, foreign: bool) -> None:
    """Install mmdebstrap, and what it needs for another architecture than the host's (``foreign``)."""
    missing = [name for name in ("mmdebstrap", *(["arch-test"] if foreign else [])) if not shutil.which(name)]
    if not missing:
        return
    names = " and ".join(missing)
    if os.geteuid() or not shutil.which("apt-get"):
        raise UserError(f"cannot bootstrap a base: install {names} (or set 'TRAINYARD_BASE=<reference>')")
    logger.info(f"installing {names}")
    _apt("update")
    _apt("install", "-y", "--no-install-recommends", *missing)


def bootstrap(engine: Engine, name: str, base: Base, architecture: Architecture) -> str:
    """Make a base from the Debian archive, import it, and return its reference.

    23 s on 2 cores (2026-11), and several times as long for another architecture, under emulation.

    Raises:
        UserError: the base has no Debian suite to bootstrap from, or this host cannot bootstrap.
        StepFailed: mmdebstrap failed; the message ends with its first error.
    """
    if base.bootstrap is None:
        raise UserError(f"base {name} cannot be bootstrapped: {_instead(base)}")
    engine.require_emulation(architecture.platform)
    _need_mmdebstrap(foreign=architecture != architectures.of_host())
    sources = _sources(base.bootstrap)
    excludes = [f"--dpkgopt=path-exclude={pattern}" for pattern in _SLIM]
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "base.tar"
        options = [f"--architectures={architecture.name}", "--variant=minbase", *excludes]
        command = ["mmdebstrap", *options, base.bootstrap, str(tar), "-"]
        environment = settings.environment(SOURCE_DATE_EPOCH=str(FILE_EPOCH))
        text = "\n".join(sources)  # on stdin, as the address of a mirror may have a password
        done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            words = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["see mmdebstrap's log"]
            why = without_credentials(f"from {sources[0]!r}: {words[0]}")
            raise StepFailed(f"mmdebstrap could not bootstrap {base.bootstrap} {why}")
        reference = local_reference(name, architecture)
        changes = ['--change=CMD ["bash"]', f"--change=WORKDIR {FOLDER}", f"--change=LABEL io.trainyard.base={name}"]
        words = [f"--platform={architecture.platform}", *changes, str(tar), reference]
        # The API's client for Python has no parameter for the platform.
        done = subprocess.run(["docker", "import", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepFailed(f"the engine could not import {reference}: {done.stderr.strip()}")
    return reference


def rebuild(engine: Engine, name: str) -> None:
    """Bootstrap a base again if it was bootstrapped on this host before, from the archive of today.

    The build base stays as it is.
    """
    if settings.variable("BASE"):
        return
    for architecture in ARCHITECTURES.values():
        if engine.find(local_reference(name, architecture)):
            if architecture.name == engine.architecture:
                _local_build_base(engine, name, architecture)
            logger.info(f"{name}: bootstrapping it again for {architecture.platform}")
            bootstrap(engine, name, bases()[name], architecture)
