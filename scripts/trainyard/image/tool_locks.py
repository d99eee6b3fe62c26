"""Lock what Trainyard and its tests need, and the tools of the build."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

from trainyard.common.context import Context
from trainyard.common.installation import check_writable, checkout
from trainyard.common.settings import ROOT
from trainyard.image.resolver import Project, default_index, versions
from trainyard.spec.model import IMAGES, bases

#: First line of the lock of a tool.
_HEADER = "# Locked by `make lock`. Do not edit.\n"

#: Tools of the build with a lock under images/.
TOOLS = ("uv", "gsutil")


def lock_scripts(context: Context, *, upgrade: bool = False) -> list[Path]:
    """Write two locks of the same versions: of the package with all its extras, and of that with what tests need.

    Args:
        upgrade: take the newest versions; if not, those of the lock are kept where the requirements allow it.
    Raises:
        UserError: there is no checkout.
        StepFailed: uv found no solution.
    """
    root = checkout("'trainyard lock scripts'")
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    package = sorted({*project["dependencies"], *(extra for extra in extras if not extra.startswith(project["name"]))})
    tests = [*pyproject["dependency-groups"]["tests"], *pyproject["build-system"]["requires"]]
    everything = ROOT / "scripts" / "requirements.lock"
    preferred = "" if upgrade else everything.read_text(encoding="utf-8")
    text = _resolved(Project("scripts", [*package, *tests], "3.11", context.offline, preferred=preferred))
    builder = ROOT / "scripts" / "trainyard" / "builder" / "requirements.lock"
    # The base of scripts/trainyard/builder/Dockerfile.
    python = bases()["debian-13"].python
    same = {"constraint-dependencies": [f"{name}=={version}" for name, version in versions(text).items()]}
    in_builder = _resolved(Project("scripts", package, python, context.offline, options=same))
    return [_written(everything, text), _written(builder, in_builder)]


def lock_tool(name: str, context: Context) -> list[Path]:
    """Write the lock of a tool of the build (:data:`TOOLS`).

    Raises:
        StepFailed: uv found no solution.
    """
    lines = (IMAGES / f"{name}.in").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    check_writable(IMAGES / f"{name}.lock")
    return [_written(IMAGES / f"{name}.lock", _resolved(Project(name, pins, "3.11", context.offline)))]


def _resolved(project: Project) -> str:
    """Return the pins of a project from the default index, or from this machine's mirror of it."""
    return "".join(replace(project, indexes=default_index()).entries().values())


def _written(path: Path, text: str) -> Path:
    """Write the lock of a tool atomically, and return its path."""
    temporary = path.with_suffix(".lock.new")
    temporary.write_text(_HEADER + text, encoding="utf-8")
    temporary.replace(path)
    return path


def pins(name: str) -> str:
    """Return the pins of a tool of the build (:data:`TOOLS`)."""
    return (IMAGES / f"{name}.lock").read_text(encoding="utf-8").removeprefix(_HEADER)
