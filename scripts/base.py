"""Find or make the base image a target stands on.

Where the base's registry answers, its image is used, pinned by digest. Elsewhere (closed networks) an equivalent is
bootstrapped from Debian's archive with mmdebstrap, out of the host's own apt sources, and imported.

    make base               every base in images/bases.yaml
    make base TARGET=xla    the base of one target
    make base FORCE=1       bootstrap again what was bootstrapped, from today's archive
    BASE=<reference> make … stands in for it

Wheels are installed in a workshop, an older image of the same release: a base that is newer moves its own layers alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import docker.errors

from scripts import cli, engine
from scripts.cli import StepFailed, UserError, say, warn
from scripts.plan import FILE_EPOCH, NAME
from scripts.spec import Base, bases, load

#: Seconds to wait for a registry's answer; one that answers did so in under 2 s, a closed network refuses at once.
REGISTRY_TIMEOUT = 20

#: What Debian's slim images leave out (debuerreotype's slim excludes).
_SLIM = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/groff/*",
         "/usr/share/lintian/*", "/usr/share/linda/*"]  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """What a build stands on.

    Attributes:
        reference: for FROM.
        digest: its digest, if a registry gave one, or empty.
        note: a remark on a fallback.
        workshop: for the FROM of the stages that install wheels.
    """

    reference: str
    digest: str
    note: str | None
    workshop: str


@cache
def _registry_digest(reference: str) -> tuple[str | None, str]:
    """Digest of ``reference`` at its registry, or None and why, in a few words."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", reference]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=REGISTRY_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {REGISTRY_TIMEOUT} s"
    if found.returncode == 0 and found.stdout.strip().startswith("sha256:"):
        return found.stdout.strip(), ""
    words = found.stderr.strip().splitlines() or ["no answer"]
    return None, words[-1].removeprefix("ERROR: ").rsplit(": ", 2)[-1]


def local_reference(name: str) -> str:
    """What a bootstrapped base is called on this host."""
    return f"{NAME}-base:{name}"


def resolve(name: str) -> Resolved:
    """What an image with base ``name`` is built on, on this host; bootstrapped if need be."""
    given, workshop = os.environ.get("BASE"), os.environ.get("WORKSHOP")
    if given:
        return Resolved(given, "", f"base {given} was given by hand", workshop or given)
    base = bases()[name]
    engine.client()
    digest, reason = _registry_digest(base.image)
    if digest:
        reference = f"{base.image}@{digest}"
        return Resolved(reference, digest, None, workshop or _workshop_at_registry(base) or reference)
    if base.bootstrap is None:
        raise UserError(
            f"base {base.image} is out of reach ({reason}), and nothing can stand in for it by itself: "
            "give an image that holds the same with BASE=<reference>"
        )
    reference = local_reference(name)
    if not _is_here(reference):
        say(f"base {base.image}: its registry does not answer ({reason}); bootstrapping an equivalent")
        bootstrap(name, base)
    note = f"base {base.image} is out of reach ({reason}): built on {reference}, bootstrapped from Debian's archive"
    return Resolved(reference, "", note, workshop or _local_workshop(name))


def _is_here(reference: str) -> bool:
    try:
        engine.client().images.get(reference)
    except docker.errors.ImageNotFound:
        return False
    return True


def _workshop_at_registry(base: Base) -> str | None:
    """Reference of the workshop with its digest, or None if there is none to be had."""
    digest = _registry_digest(base.workshop)[0] if base.workshop else None
    return f"{base.workshop}@{digest}" if digest else None


def _local_workshop(name: str) -> str:
    """The first base that was bootstrapped on this host, under a name that later ones leave alone."""
    reference = local_reference(f"{name}-workshop")
    if not _is_here(reference):
        engine.client().images.get(local_reference(name)).tag(reference)
    return reference


def asked_for(name: str) -> str:
    """The reference of a base as it is asked for on this host: BASE, or what images/bases.yaml says."""
    return os.environ.get("BASE") or bases()[name].image


def _apt(*arguments: str) -> None:
    """Run apt-get as root, quietly.

    Raises:
        StepFailed: it failed; the message ends with its own last words.
    """
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-qq", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise StepFailed(f"'apt-get {' '.join(arguments)}' failed: {words}")


def host_sources(targets: str, suite: str) -> list[str]:
    """apt source lines for ``suite`` on the hosts that this machine's own apt takes Debian from.

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
    """apt source lines for ``suite``: ``DEBIAN_MIRROR``, or what the host's own apt uses for Debian."""
    given = os.environ.get("DEBIAN_MIRROR")
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
                _apt("update")  # a machine whose package lists were deleted, as container images do, names no targets
    raise UserError(
        f"cannot bootstrap Debian {suite}: this host has no Debian apt source (or 'apt-get update' never ran); "
        "run 'make base DEBIAN_MIRROR=<address of a mirror>', or give a base with BASE=<reference>"
    )


def _need_mmdebstrap() -> None:
    if shutil.which("mmdebstrap"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise UserError("cannot bootstrap a base: install mmdebstrap (or give a base with BASE=<reference>)")
    say("installing mmdebstrap")
    _apt("update")
    _apt("install", "-y", "--no-install-recommends", "mmdebstrap")


def bootstrap(name: str, base: Base) -> str:
    """Make a base from Debian's archive and import it; its reference. 23 s on 2 cores (2026-11).

    Raises:
        StepFailed: mmdebstrap failed; the message ends with its own words.
    """
    if base.bootstrap is None:
        raise UserError(f"base {name} cannot be bootstrapped: give an image in its place with BASE=<reference>")
    _need_mmdebstrap()
    sources = _sources(base.bootstrap)
    excludes = [f"--dpkgopt=path-exclude={pattern}" for pattern in _SLIM]
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "base.tar"
        command = ["mmdebstrap", "--variant=minbase", *excludes, base.bootstrap, str(tar), *sources]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(FILE_EPOCH)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            words = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["see mmdebstrap's log"]
            raise StepFailed(f"mmdebstrap could not make {base.bootstrap} from {sources[0]!r}: {words[0]}")
        changes = ['CMD ["bash"]', f"LABEL io.trainyard.base={name}"]
        engine.client().api.import_image_from_file(str(tar), repository=f"{NAME}-base", tag=name, changes=changes)
    return local_reference(name)


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    names = (
        [load(options.target).base] if options.target else [name for name, base in bases().items() if base.bootstrap]
    )
    found = {}
    for name in names:
        if os.environ.get("FORCE") and not os.environ.get("BASE") and _is_here(local_reference(name)):
            _local_workshop(name)
            say(f"{name}: bootstrapping it again")
            bootstrap(name, bases()[name])
        resolved = resolve(name)
        if resolved.note:
            warn(resolved.note)
        say(f"{name}: {resolved.reference}")
        found[name] = {"reference": resolved.reference, "digest": resolved.digest, "workshop": resolved.workshop}
    cli.result(found, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
