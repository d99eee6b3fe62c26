"""Resolve a target's packages to hash-pinned locks, for the target's Python and platform.

make lock TARGET=xla        the target's locks, for every index that answers
make lock TARGET=scripts    what scripts/ and tests/ need (scripts/requirements.lock)
make lock TARGET=uv         the installer used inside builds (images/uv.lock)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import cli, indexes, locks
from scripts.cli import ROOT, StepFailed, say, warn
from scripts.spec import IMAGES, Spec, load, relative

#: The wheel tag of Debian 12's glibc, the base of every image that is locked here.
PLATFORM = "x86_64-manylinux_2_36"

_HEADER = "# Locked by `make lock TARGET={target}`. Do not edit.\n"


def compile_lock(
    requirements: list[str],
    output: Path,
    *,
    python: str,
    target: str,
    constraints: str = "",
    index: tuple[str, str, list[str]] | None = None,
    keep: set[str] | None = None,
) -> None:
    """Resolve ``requirements`` with uv and write the lock ``output`` atomically.

    Args:
        requirements: PEP 508 lines.
        python: version the lock is for, such as ``3.11``.
        target: what ``make lock`` calls it; stands in the lock's first line.
        constraints: text of a constraints file.
        index: name, address and package names of an index beside the default one.
        keep: canonical names to keep in the lock; everything if None.
    Raises:
        StepFailed: uv found no solution; the message ends with its own words.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "constraints.txt").write_text(constraints, encoding="utf-8")
        lines = ["[project]", 'name = "lock"', 'version = "0"', f"dependencies = {requirements!r}"]
        if index:
            name, address, packages = index
            lines += ["[[tool.uv.index]]", f'name = "{name}"', f'url = "{address}"', "explicit = true"]
            lines += ["[tool.uv.sources]", *(f'{package} = {{ index = "{name}" }}' for package in packages)]
        (here / "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml"]
        command += ["--constraint", "constraints.txt", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url"]
        command += ["--python-version", python, "--python-platform", PLATFORM, "--output-file", "new.lock"]
        # A user's own uv or pip settings must not change what is locked for everybody.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
        found = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        if found.returncode:
            reason = " ".join(found.stderr.split()) or f"uv exited with {found.returncode}"
            raise StepFailed(f"cannot lock {target}: {reason}")
        text = (here / "new.lock").read_text(encoding="utf-8")
    if keep is not None:
        text = _only(text, keep)
    temporary = output.with_suffix(".lock.new")
    temporary.write_text(_HEADER.format(target=target) + text, encoding="utf-8")
    temporary.replace(output)


def _only(text: str, keep: set[str]) -> str:
    """The entries of a lock whose canonical names are in ``keep``."""
    kept, keeping = [], False
    for line in text.splitlines(keepends=True):
        if not line.startswith((" ", "\t")):
            keeping = canonicalize_name(line.split("==")[0].split("[")[0].strip()) in keep
        if keeping:
            kept.append(line)
    return "".join(kept)


def requirements_of(spec: Spec) -> list[str]:
    """The spec's requirements with named sets replaced by their lines."""
    found: list[str] = []
    for entry in spec.requirements:
        if "==" in entry:
            found.append(entry)
            continue
        for line in (IMAGES / "requirements" / f"{entry}.in").read_text(encoding="utf-8").splitlines():
            pin = line.split("#")[0].strip()
            if pin:
                found.append(str(Requirement(pin)))
    return found


def lock_target(spec: Spec, index_name: str) -> list[Path]:
    """Write the pair of locks of ``spec`` for one index; the paths written.

    Framework and requirements are resolved together, so that they agree, and then split: what the framework needs
    by itself goes to its own lock and layer, the rest to the requirements'. A spec that takes its parent's
    framework keeps the parent's versions.
    """
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
        rest = set(locks.read(whole)) - set(taken)
        compile_lock(everything, output, python=python, target=spec.target, constraints=pins, index=index, keep=rest)
    return [*written, output]


def _lock_scripts() -> list[Path]:
    import tomllib

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    output = ROOT / "scripts" / "requirements.lock"
    compile_lock(dependencies, output, python="3.11", target="scripts")
    return [output]


def _lock_uv() -> list[Path]:
    lines = (IMAGES / "uv.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    compile_lock(pins, IMAGES / "uv.lock", python="3.11", target="uv")
    return [IMAGES / "uv.lock"]


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    if options.target in ("scripts", "uv"):
        written = _lock_scripts() if options.target == "scripts" else _lock_uv()
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
