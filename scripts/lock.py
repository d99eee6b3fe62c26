"""Resolve a target's packages to hash-pinned locks, for the target's Python and platform.

make lock TARGET=xla        the target's locks, for every index that answers
make lock TARGET=scripts    what scripts/ and tests/ need (scripts/requirements.lock)
make lock TARGET=uv         the installer used inside builds (images/uv.lock); gsutil likewise
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import base, cli, engine, indexes, locks
from scripts.cli import ROOT, StepFailed, UserError, say, warn
from scripts.spec import IMAGES, Held, Spec, held_file, load, relative, requirements_of
from scripts.stored import inside
from scripts.tables import conflict

#: Debian 12's glibc, for what is locked for no image.
GLIBC = "2.36"

#: The same for every target: images whose frameworks are locked alike then share that stage, not only its blob.
_HEADER = "# Locked by `make lock`. Do not edit.\n"


#: What has a lock of its own under images/.
TOOLS = ("uv", "gsutil")


def compile_lock(
    requirements: list[str],
    output: Path,
    *,
    python: str,
    target: str,
    glibc: str = GLIBC,
    constraints: str = "",
    preferred: str = "",
    index: tuple[str, str, list[str]] | None = None,
    keep: set[str] | None = None,
) -> None:
    """Resolve ``requirements`` with uv and write the lock ``output`` atomically.

    Args:
        requirements: PEP 508 lines.
        python: version the lock is for, such as ``3.11``.
        target: what ``make lock`` calls it, for messages.
        glibc: version of the C library that wheels must run on.
        constraints: text of a constraints file.
        preferred: pins that are taken where nothing speaks against them.
        index: name, address and package names of an index beside the default one.
        keep: canonical names to keep in the lock; everything if None.
    Raises:
        StepFailed: uv found no solution; the message ends with its own words.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "constraints.txt").write_text(constraints, encoding="utf-8")
        (here / "new.lock").write_text(preferred, encoding="utf-8")  # uv keeps what its output file has, if it can
        lines = ["[project]", 'name = "lock"', 'version = "0"', f"dependencies = {requirements!r}"]
        if index:
            name, address, packages = index
            lines += ["[[tool.uv.index]]", f'name = "{name}"', f'url = "{address}"', "explicit = true"]
            lines += ["[tool.uv.sources]", *(f'{package} = {{ index = "{name}" }}' for package in packages)]
        (here / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml"]
        command += ["--constraint", "constraints.txt", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
        command += ["--python-version", python, "--python-platform", platform_of(glibc), "--output-file", "new.lock"]
        # A user's own uv or pip settings must not change what is locked for everybody.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
        if bundle := engine.ca_bundle():  # uv brings authorities of its own, which no inspecting network is among
            environment["SSL_CERT_FILE"] = str(bundle)
        found = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        if found.returncode:
            reason = " ".join(found.stderr.split()) or f"uv exited with {found.returncode}"
            raise StepFailed(f"cannot lock {target}: {reason}")
        text = (here / "new.lock").read_text(encoding="utf-8")
    if keep is not None:
        text = _only(text, keep)
    temporary = output.with_suffix(".lock.new")
    temporary.write_text(_HEADER + text, encoding="utf-8")
    temporary.replace(output)


def platform_of(glibc: str) -> str:
    """uv's name of the platform whose wheels run on a C library."""
    return f"x86_64-manylinux_{glibc.replace('.', '_')}"


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

    Framework and requirements are resolved together, so that they agree, and then split: what the framework needs
    by itself goes to its own lock and layer, the rest to the requirements'. A spec that takes its parent's
    framework keeps the parent's versions.
    """
    if spec.on_framework:
        return lock_on_framework(spec)
    index_spec = spec.index_spec()
    index = None
    if index_name != "default":
        assert index_spec is not None
        index = (index_name, indexes.url(index_name, index_spec), index_spec.packages)
    python = spec.base_spec().python
    written = []
    framework = locks.framework_lock(spec, index_name)
    everything = spec.framework.packages + requirements_of(spec)
    output = locks.requirements_lock(spec, index_name)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.lock"
        if spec.framework_folder == spec.folder:
            compile_lock(everything, whole, python=python, target=spec.target, index=index)
            refuse_conflicts(spec, locks.read(whole))
            pins = "\n".join(f"{name}=={version}" for name, version in locks.read(whole).items())
            compile_lock(
                spec.framework.packages,
                framework,
                python=python,
                target=spec.target,
                constraints=pins,
                index=index,
            )
            written.append(framework)
        taken = locks.read(framework)
        pins = "\n".join(f"{name}=={version}" for name, version in taken.items())
        compile_lock(everything, whole, python=python, target=spec.target, constraints=pins, index=index)
        resolved = locks.read(whole)
        refuse_conflicts(spec, resolved)
        rest = set(resolved) - set(taken)
        compile_lock(everything, output, python=python, target=spec.target, constraints=pins, index=index, keep=rest)
    return [*written, output]


def refuse_conflicts(spec: Spec, versions: Mapping[str, str]) -> None:
    """Refuse what the resolver allows and images/conflicts.yaml does not.

    Raises:
        UserError: these versions cannot share an image; the line says why.
    """
    reason = conflict(versions)
    if reason:
        raise UserError(f"{spec.where}: {reason}")


def lock_on_framework(spec: Spec) -> list[Path]:
    """Look into a base that holds the framework, record what is there, and lock the rest to go with it.

    The tag is resolved to a digest first, and everything else is about that digest. Of what the requirements need, the
    base's own versions are taken where they fit; others are locked, and come before the base's on the module path.

    Raises:
        UserError: the base is out of reach, or is not what images/bases.yaml says.
        StepFailed: the requirements do not go with it, in the resolver's words.
    """
    wanted = spec.base_spec()
    found = base.resolve(spec.base)
    say(f"{spec.target}: looking into {found.reference}")
    engine.pull(found.reference)
    seen = inside.look(found.reference, "packages")
    given = os.environ.get("BASE")  # by hand: whatever Python it has, that is what is locked for
    if not given and not seen["python"].startswith(f"{wanted.python}."):
        raise UserError(f"{found.reference} has Python {seen['python']}; base {spec.base} is to have {wanted.python}")
    packages = {canonicalize_name(one["name"]): one for one in reversed(seen["packages"])}
    missing = [name for name in wanted.framework if canonicalize_name(name) not in packages]
    if missing:
        raise UserError(f"{found.reference} has no {', '.join(missing)}: it is no base {spec.base}")
    framework = [packages[canonicalize_name(name)] for name in wanted.framework]
    held = Held(
        image=base.asked_for(spec.base),
        reference=found.reference,
        digest=found.digest,
        day=datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d"),
        python=seen["python"],
        interpreter=seen["executable"],
        site=seen["site"],
        packages={name: one["version"] for name, one in sorted(packages.items())},
        requires={canonicalize_name(one["name"]): one["requires"] for one in framework},
    )
    refuse_conflicts(spec, held.packages)
    output = locks.requirements_lock(spec, "default")
    _lock_beside(spec, held, output)
    path = held_file(spec)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(held.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return [path, output]


def _lock_beside(spec: Spec, held: Held, output: Path) -> None:
    """Lock what the requirements need and the base does not have in a version that fits."""
    taken = set(map(canonicalize_name, spec.base_spec().framework))
    needs = [
        str(requirement)
        for text in itertools.chain.from_iterable(held.requires.values())
        if (requirement := Requirement(text)).marker is None and canonicalize_name(requirement.name) not in taken
    ]
    resolve = functools.partial(
        compile_lock,
        requirements_of(spec),
        python=".".join(held.python.split(".")[:2]),
        glibc=spec.base_spec().glibc,
        target=spec.target,
        constraints="\n".join(needs),
        preferred="\n".join(f"{name}=={version}" for name, version in held.packages.items()),
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.lock"
        resolve(whole)
        resolved = locks.read(whole)
    refuse_conflicts(spec, held.packages | resolved)
    rest = {name for name, version in resolved.items() if held.packages.get(name) != version}
    resolve(output, keep=rest - taken)


def _lock_scripts() -> list[Path]:
    """Write the lock of what verbs and tests need, and the one of what verbs need alone, of the same versions."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    verbs, tests = project["project"]["dependencies"], project["dependency-groups"]["tests"]
    everything = ROOT / "scripts" / "requirements.lock"
    compile_lock([*verbs, *tests], everything, python="3.11", target="scripts")
    pins = "\n".join(f"{name}=={version}" for name, version in locks.read(everything).items())
    builder = ROOT / "scripts" / "builder" / "requirements.lock"
    compile_lock(verbs, builder, python="3.11", target="scripts", constraints=pins)
    return [everything, builder]


def _lock_tool(name: str) -> list[Path]:
    lines = (IMAGES / f"{name}.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    compile_lock(pins, IMAGES / f"{name}.lock", python="3.11", target=name)
    return [IMAGES / f"{name}.lock"]


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    if options.target == "scripts":
        written = _lock_scripts()
    elif options.target in TOOLS:
        written = _lock_tool(options.target)
    else:
        spec = load(options.target)
        written = lock_target(spec, "default")
        chosen, reason = indexes.choose(spec)
        if chosen != "default":
            written += lock_target(spec, chosen)
        elif reason:
            warn(f"no lock for index '{spec.framework.index}': {reason}")
    for path in written:
        say(f"{relative(path)}: {len(locks.read(path))} packages")
    cli.result({"written": [relative(path) for path in written]}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
