"""Describe one Python file or notebook as a repository, so that its image and its jobs need no trainyard.yaml.

What ``init`` proposes for it is written to .trainyard/NAME.yaml beside it, anew by every command. Keys of a
trainyard.yaml in ``[tool.trainyard]`` of a script's header (PEP 723) count more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.spec import model, pylock, repository_files, workspace, yaml_source
from trainyard.spec.model import relative
from trainyard.workspace import dependency_tables, init, python_survey

logger = logging.getLogger(__name__)

#: What converts notebooks (https://nbconvert.readthedocs.io/en/latest/usage.html); IPython makes Python of ``!`` and
#: ``%`` for it. The day fixes what they require, so that a notebook always gives the same program.
_NBCONVERT = ("--exclude-newer", "2026-11-01", "--from", "nbconvert==7.16.6", "--with", "ipython==9.7.0",
              "jupyter-nbconvert", "--to", "python", "--stdout", "--log-level", "ERROR")  # fmt: skip

#: Lines of a converted notebook that install packages: ``!pip install``, ``!uv pip install``, ``%pip install``.
_INSTALL = re.compile(
    r"(?m)^(\s*)get_ipython\(\)\.(?:system|run_line_magic)"
    r"\(['\"](?:[^'\"]*\s)?pip3?(?: |['\"], ['\"])install (.*)['\"]\)$"
)

#: Lines that change what IPython shows, or what it does after an edit: nothing in a program.
_SHOWN = re.compile(
    r"(?m)^(\s*)(get_ipython\(\)\.run_line_magic\('(?:matplotlib|config|autoreload|load_ext', 'autoreload)'.*)$"
)

#: What only IPython runs: other lines with ``!`` and ``%``, and its function display.
_IPYTHON = re.compile(r"(?m)^(?!\s*pass  # ).*get_ipython\(\).*|^\s*display\(")

_LISTS = re.compile(r"requirements.*\.txt|environment\.ya?ml")


def describe(path: Path) -> dict[str, Any]:
    """Write what ``init`` proposes for one file, unless it is written already, and return that trainyard.yaml.

    Raises:
        UserError: there is no such file, or nothing tells which target it needs.
        StepFailed: a notebook cannot be converted.
    """
    if not path.is_file():
        names = [one.name for one in path.parent.glob(f"*{path.suffix}")]
        raise UserError(f"no file '{path}'{nearest(path.name, names)}")
    folder = Path(os.path.abspath(path)).parent
    description = workspace.description(folder / path.name)
    program = path.name if path.suffix == ".py" else _convert(folder, path.name)
    given = dependency_tables.table(dependency_tables.toml(folder / program).data, "tool", "trainyard")
    ipython = _IPYTHON.search(yaml_source.text(folder / program)) if path.suffix != ".py" else None
    command = f"{'ipython --colors=nocolor --' if ipython else 'python'} {program.rpartition('/')[2]}"
    repository = init.Repository(folder, init.Candidate(tuple(command.split()), program), _needed(folder, program))
    proposal = repository.propose(given.get("extends"), name=given.get("name") or default_name(path))
    wanted, smoke = proposal.requirements, proposal.smoke
    if ipython and "ipython" not in wanted.names:
        wanted.packages.append("ipython")
        proposal.reasons[f"run: {command}"] = f"a cell has '{ipython[0].strip()[:60]}'"
    listed = {"file": wanted.file, "packages": wanted.packages} if wanted.file else {}
    keys: dict[str, Any] = {
        "extends": proposal.target,
        "base": proposal.base,
        "name": proposal.name,
        "requirements": (listed if wanted.packages else wanted.file) or wanted.packages,
        "system": proposal.system,
        "environment": proposal.environment,
        "code": [path.name, *(one for one in proposal.code if one != program)],
        "run": command,
        "smoke": {"args": list(smoke.args)} if smoke.args and not smoke.obstacle else {},
    }
    document = {key: value for key, value in keys.items() if value} | given
    text = (
        f"# What Trainyard found in {path.name}; it is written anew. 'trainyard init {path.name}' makes a\n"
        "# trainyard.yaml of it, and [tool.trainyard] in the header of a script sets keys of it.\n"
    ) + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if not description.is_file() or yaml_source.text(description) != text:
        repository_files.write(folder, os.path.relpath(description, folder), text)
        for value, why in proposal.reasons.items():
            logger.info("%s (%s)", value, why)
        for note in proposal.notes:
            logger.warning(note)
    return document


def default_name(path: Path) -> str:
    """Return the name of the image of a file: ``fine-tune`` of fine_tune.py; with ``my-`` if it is a target's."""
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "image"
    return f"my-{name}" if name in model.targets() else name


def keep(path: Path) -> list[Path]:
    """Make a trainyard.yaml of the description of one file, and its lock that of the repository; return their paths.

    Raises:
        UserError: there is a trainyard.yaml already; or see :func:`describe`.
    """
    folder = Path(os.path.abspath(path)).parent
    if path.suffix != ".py":
        raise UserError(f"{relative(path)}: 'jupyter nbconvert --to python {path.name}' makes a program of it first")
    text = yaml.safe_dump(describe(path), sort_keys=False, allow_unicode=True)
    written = init.write(folder, f"# yaml-language-server: $schema={init.SCHEMA}\n{text}")
    for index, lock in pylock.files(workspace.lock_of(folder / path.name)).items():
        written.append(lock.replace(pylock.file_of(folder / pylock.REPOSITORY_FILE, index)))
    return written


def _needed(folder: Path, program: str) -> list[str]:
    """Return the files that one needs: the modules beside it that it imports, and the lists of requirements there."""
    needed = {name for name in os.listdir(folder) if _LISTS.fullmatch(name)}
    waiting = [program]
    while waiting:
        name = waiting.pop()
        source = None if name in needed else python_survey.read(folder / name, name)
        needed.add(name)
        for top in {statement.top for statement in source.imports if not statement.level} if source else ():
            for place in (folder / f"{top}.py", *(folder / top).rglob("*.py")):
                if place.is_file():
                    waiting.append(place.relative_to(folder).as_posix())
    return sorted(needed)


def _convert(folder: Path, name: str) -> str:
    """Convert a notebook to a program that installs nothing, unless that is done; return its path in the folder."""
    program = f"{workspace.GENERATED}/{Path(name).stem}.py"
    first = f"# Made of {name}, SHA-256 {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n"
    if (folder / program).is_file() and yaml_source.text(folder / program).startswith(first):
        return program
    command = [*settings.UV, "tool", "run", *_NBCONVERT, str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StepFailed(f"{name}: nbconvert does not convert it: {lines[-1][:300]}")
    text = _SHOWN.sub(r"\1pass  # \2", _INSTALL.sub(r"\1pass  # pip install \2", done.stdout))
    repository_files.write(folder, program, first + text)
    return program
