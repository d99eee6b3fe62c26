"""Describe one Python file or notebook as a repository, so that its image and its jobs need no trainyard.yaml.

What ``init`` proposes for it is written to .trainyard/NAME.yaml beside it, anew by every command. Keys of a
trainyard.yaml in ``[tool.trainyard]`` of a script's header (PEP 723) count more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.spec import model, pylock, repository_files, workspace, yaml_source
from trainyard.spec.model import relative
from trainyard.workspace import copied_lists, dependency_tables, init, python_survey

logger = logging.getLogger(__name__)

#: What converts notebooks (https://nbconvert.readthedocs.io/en/latest/usage.html); IPython makes Python of ``!`` and
#: ``%`` for it. The day fixes what they require, so that a notebook always gives the same program.
_NBCONVERT = ("--exclude-newer", "2026-11-01", "--from", "nbconvert==7.16.6", "--with", "ipython==9.7.0",
              "jupyter-nbconvert", "--to", "python", "--stdout", "--log-level", "ERROR")  # fmt: skip

#: First lines of cells that measure a cell or keep its output from being shown; cells that are lines for a shell.
_AROUND = re.compile(r"%%(capture|time|timeit|prun)\b.*\n?")
_SHELL = re.compile(r"%%(bash|sh|shell|!)\s*\n")

#: Lines of a converted notebook with a command for a shell, and ``%pip install``.
_COMMAND = re.compile(
    r"(?m)^(\s*)get_ipython\(\)\.(?:system\((['\"])(.*)\2\)|run_line_magic\('pip', (['\"])(install .*)\4\))$"
)
_INSTALLS = re.compile(r"(\S*/)?(python3? -m )?(uv )?pip3? install .*")

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
    if repository_files.leads_out(path, repository_files.git_root(folder)):
        raise UserError(f"{relative(path)}: a symbolic link out of the repository: replace it by a file")
    description = workspace.description(folder / path.name)
    program = path.name if path.suffix == ".py" else _convert(folder, path.name)
    given = _given(dependency_tables.toml(folder / program))
    ipython = _IPYTHON.search(yaml_source.text(folder / program)) if path.suffix != ".py" else None
    file = program.rpartition("/")[2]
    words = (
        ["ipython", "--colors=nocolor", "--", file] if ipython else ["python", f"./{file}" if file[0] == "-" else file]
    )
    command = shlex.join(words)
    repository = init.Repository(folder, init.Candidate(tuple(words), program), _needed(folder, program))
    proposal = repository.propose(given.get("extends"), name=given.get("name") or default_name(path))
    wanted = proposal.requirements
    found = yaml_source.plain(yaml_source.read(description)).get("smoke") if description.is_file() else None
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
        "smoke": found,  # by 'trainyard image'
    }
    document = {key: value for key, value in keys.items() if value} | given
    text = (
        f"# What Trainyard found in {path.name}; it is written anew. [tool.trainyard] in the header of a script sets\n"
        "# keys of it, and 'trainyard init' with the script makes a trainyard.yaml of it.\n"
    ) + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if not description.is_file() or yaml_source.text(description) != text:
        repository_files.write(folder, os.path.relpath(description, folder), text)
        for value, why in proposal.reasons.items():
            logger.info("%s (%s)", value, why)
        for note in proposal.notes:
            logger.warning(note)
    return document


def _given(header: dependency_tables.Toml) -> dict[str, Any]:
    """Return the keys of a trainyard.yaml that a header has; see :func:`describe` for what it raises."""
    given = header.data.get("tool", {}).get("trainyard", {})
    if not isinstance(given, dict):
        raise UserError(f"{header.where('trainyard')}: tool.trainyard: expected a table")
    for key, value in given.items():
        wrong = not isinstance(value, str) if key in ("extends", "name") else not _is_plain(value)
        if wrong:
            raise UserError(f"{header.where(key)}: tool.trainyard.{key}: not a value of a trainyard.yaml")
    return given


def _is_plain(value: object) -> bool:
    """Return whether YAML has a value of TOML, which days and times are not."""
    if isinstance(value, dict | list):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float)


def default_name(path: Path) -> str:
    """Return the name of the image of a file: ``fine-tune`` of fine_tune.py; with ``my-`` if it is a target's."""
    stem = path.stem if path.suffix == ".py" else f"{path.stem}-notebook"
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "image"
    return f"my-{name}" if name in model.targets() else name


def keep(path: Path) -> list[Path]:
    """Make a trainyard.yaml of the description of one file, and its lock that of the repository; return their paths.

    Raises:
        UserError: there is a trainyard.yaml already; or see :func:`describe`.
    """
    folder = Path(os.path.abspath(path)).parent
    if path.suffix != ".py":
        raise UserError(f"{relative(path)}: 'jupyter nbconvert --to script {path.name}' makes a program of it first")
    locks = pylock.files(workspace.lock_of(folder / path.name))
    if taken := [one for one in pylock.files(folder / pylock.REPOSITORY_FILE).values() if locks]:
        raise UserError(f"{relative(taken[0])} exists already: remove it first")
    text = yaml.safe_dump(describe(path), sort_keys=False, allow_unicode=True)
    written = init.write(folder, f"# yaml-language-server: $schema={init.SCHEMA}\n{text}")
    for index, lock in locks.items():
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
    """Convert a notebook to a program that installs nothing, unless that is done; return its path in the folder.

    Raises:
        StepFailed: it is no notebook, or nbconvert cannot be had.
    """
    program = f"{workspace.GENERATED}/{name}.py"
    content = (folder / name).read_bytes()
    how = repr((_NBCONVERT, _AROUND, _SHELL, _COMMAND, _SHOWN)).encode()
    first = f"# Made of {name}: {hashlib.sha256(how + content).hexdigest()}\n"
    if (folder / program).is_file() and yaml_source.text(folder / program).startswith(first):
        return program
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "notebook.ipynb")
        copy.write_bytes(_prepared(content))
        command = [*settings.UV, "tool", "run", "--python", sys.executable, *_NBCONVERT, str(copy)]
        command[3:3] = ["--offline"] if settings.variable("OFFLINE") == "1" else []
        environment = settings.environment(JUPYTER_NO_CONFIG="1", JUPYTER_CONFIG_DIR=temporary)
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("hint:")]
        raise StepFailed(f"{name}: nbconvert does not convert it: {(lines or ['no reason given'])[-1][:300]}")
    text = _SHOWN.sub(rf"\1{copied_lists.INSTALL}\2", _COMMAND.sub(_without_installs, done.stdout))
    repository_files.write(folder, program, first + text)
    return program


def _prepared(content: bytes) -> bytes:
    """Return a notebook without ``%%capture`` and the like, and with ``!`` before lines of a shell that install."""
    try:
        document = json.loads(content)
        for cell in document["cells"]:
            text = "".join(cell["source"])
            if around := _AROUND.match(text):
                cell["source"] = text[around.end() :]
            elif (shell := _SHELL.match(text)) and all(
                not line or _INSTALLS.fullmatch(line) for line in text[shell.end() :].splitlines()
            ):
                cell["source"] = re.sub(r"(?m)^(?=\S)", "!", text[shell.end() :])
        return json.dumps(document).encode()
    except (ValueError, KeyError, TypeError):
        return content  # nbconvert says what is wrong with it


def _without_installs(match: re.Match[str]) -> str:
    """Return a cell's command without what it installs: the image has it."""
    indent, command = match[1], (match[3] or match[5]).replace("\\'", "'")
    parts = re.split(r"\s*(?:&&|;)\s*", command if match[3] else f"pip {command}")
    installs = [part for part in parts if _INSTALLS.fullmatch(part)]
    others = [part for part in parts if part not in installs]
    if not installs:
        return match[0]
    kept = [f"{indent}get_ipython().system({' && '.join(others)!r})"] if others else []
    return "\n".join([f"{indent}{copied_lists.INSTALL}{part}" for part in installs] + kept)
