"""Find the smoke test of a command: try arguments in its image, correct them by what they meet, keep those that pass.

What the program's code says about its options is tried first (:mod:`trainyard.workspace.short_run`). A run that works
for :data:`WATCHED` seconds is ended and has passed: its smoke test runs ``for`` as long. Nothing of these runs
is recorded: the smoke test itself, in the image with this trainyard.yaml, decides.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import shlex
import time
from typing import Any

from trainyard.common import stages, templates
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.image import smoke_command, smoke_test
from trainyard.image.smoke_command import Attempt, Subject, Tester
from trainyard.image.smoke_failure import HostFiles, own_lines, tracebacks
from trainyard.recipe import Recipe
from trainyard.spec import repository_files, yaml_source
from trainyard.spec.model import Spec, relative
from trainyard.spec.workspace import Workspace
from trainyard.workspace import python_projects, python_survey, short_run
from trainyard.workspace.lines import text_of, where

logger = logging.getLogger(__name__)

#: Seconds after its imports for which a run is watched; number of runs that are tried, and seconds after which no other
#: is started. The imports of a framework take 10 s on 2 cores.
WATCHED, TRIES, ALL = 30, 8, 300

#: Lines with a loss that a run which is ended must have printed for ``expect``: the next may be slower.
_LOSSES = 3

#: Endings of files that name folders of data, and one beside the repository that is /data in its image: not below the
#: folder of a file.
_READING = (".py", ".yaml", ".yml", ".json", ".toml")
_OUTSIDE = re.compile(r"""(?m)^(?!.*(?:__file__|dirname)).*?['": ](\.\./(?:data|datasets?))(?![\w.-])""")

#: Lines of trainyard.yaml that say how a smoke test is written.
_EXAMPLE = re.compile(r"(?m)^# smoke: \{args: .*\n")


def proposal(spec: Spec) -> short_run.ShortRun:
    """Return the first run of the command of a repository."""
    folder = spec.workspace.root
    names = python_survey.files(folder)
    sources = python_survey.Sources({name: folder / name for name in names})
    project = python_projects.read(folder)
    scripts = project.scripts if project and project.installed else {}
    words = spec.run or ()
    path = short_run.program_of(words, sources, scripts)
    documents = short_run.documents(folder, names).values()
    given = str(spec.workspace.data) if spec.workspace.given_data else ""
    return short_run.propose(words, path, sources, names, documents, mounted=given)


def outside(workspace: Workspace) -> str:
    """Return the line about a folder beside the repository that a file names and an image has; empty without one."""
    for name in sorted(python_survey.files(workspace.root), key=lambda name: name.endswith(".py")):
        path = workspace.root / name
        if match := name.endswith(_READING) and _OUTSIDE.search(text_of(path)):
            filled = "the folder of --data" if workspace.given_data else "for 'trainyard image --data FOLDER'"
            return f"{where(path, match[1])}: from the working directory of the image {match[1]} is /data, {filled}"
    return ""


def found(spec: Spec, files: HostFiles | None, recipe: Recipe, passed: bool = False) -> bool:
    """Find the smoke test of a repository without one in its candidate, and write it; return whether one was found.

    Args:
        passed: this image was started before: another search is made with the data of ``--data`` alone.
    """
    if files is None or spec.workspace.document.smoke is not None or (passed and not spec.workspace.given_data):
        return False
    if line := outside(spec.workspace):
        logger.info(line)
    run, network = proposal(spec), smoke_test.network_of(spec.local_name, files, spec.context)
    with stages.stage("search") as stage:
        subject = Subject(recipe.candidate, tuple(spec.run or ()), recipe=recipe, files=files, network=network)
        smoke, said, late = search(spec.context.engine, subject, run)
        stage.done = f"{shlex.join(smoke['args']) or 'no arguments'}: {said}" if smoke else "no short run passes"
    file = relative(spec.workspace.file)
    if not smoke:
        logger.warning(f"{file}: no smoke was found: {said}: write 'smoke', which 'trainyard push' needs")
        return False
    if late:
        logger.warning(f"{file}: the smoke test ends before the program does: {late}")
    write(spec, smoke)
    logger.info(f"wrote smoke to {file}: commit it")
    return True


def search(engine: Engine, subject: Subject, run: short_run.ShortRun) -> tuple[dict[str, Any], str, str]:
    """Return what a smoke test is to be as keys of trainyard.yaml, empty if none passed; and what it is, or met.

    The third is how a shorter run failed after it had printed a loss, if the smoke test ends a longer one before that.
    """
    started, reason, late = time.monotonic(), "", ""
    for number in range(1, TRIES + 1):
        words = run.words
        run.seen.append(words)
        files = subject.files
        if files and run.data:
            files = dataclasses.replace(files, data=files.root / run.data)
        tester = Tester(engine, dataclasses.replace(subject, test=smoke_command.STARTED, files=files, log=False))
        stages.now(f"try {number}: {shlex.join([*subject.command, *words])}")
        tried = tester.attempt(words, WATCHED)
        if tried.working or (not tried.alive and not tried.run.status):
            ended = ", and was ended" if tried.alive else ""
            return _smoke(run, tried), f"ran for {tried.seconds:.0f} s{ended}", late if tried.alive else ""
        if tried.alive:
            doing = f"still {tried.importing}" if tried.importing else "neither used a CPU nor printed anything"
            return {}, f"{doing} after {tried.seconds:.0f} s", ""
        lines = own_lines(tried.run.lines)
        errors = [one.error for one in tracebacks(lines)][-2:]
        reason = tester.explain.of(tried.run)
        if any(re.search(short_run.LOSS, line) for line in lines):
            late = f"'{shlex.join([*subject.command, *words])}' trained, and failed: {reason}"
        said, killed = "\n".join(errors or lines[-15:]), tried.run.out_of_memory
        missing = run.correct(said, reason, tried.run.hosts, out_of_memory=killed)
        logger.info(f"try {number}, {shlex.join(words) or 'without arguments'}: {reason[:200]}")
        if missing:
            return {}, missing, ""
        if time.monotonic() - started > ALL:
            return {}, f"{reason} (the last of {number} tries)", ""
    return {}, f"{reason} (the last of {TRIES} tries)", ""


def _smoke(run: short_run.ShortRun, tried: Attempt) -> dict[str, Any]:
    losses = [line for line in own_lines(tried.run.lines) if re.search(short_run.LOSS, line)]
    shown = bool(losses) and (not tried.alive or len(losses) >= _LOSSES)
    smoke = {
        "args": list(run.words),
        "data": run.data if any("/data" in word for word in run.words) else "",
        "for": math.ceil(tried.seconds / 10) * 10 if tried.alive else 0,
        "expect": short_run.LOSS if shown else "",
    }
    return {key: value for key, value in smoke.items() if value or key == "args"}


def write(spec: Spec, smoke: dict[str, Any]) -> None:
    """Write the smoke test that passed into the trainyard.yaml of a repository, whose comments stay.

    Raises:
        UserError: it cannot be written there.
    """
    file, quoted = spec.workspace.file, templates.environment().filters["yaml"]
    lines = "".join(f"  {key}: {one if isinstance(one, int) else quoted(one)}\n" for key, one in smoke.items())
    old = yaml_source.text(file)
    text = f"{_EXAMPLE.sub('', old).rstrip()}\nsmoke:\n{lines}"
    try:
        (document,) = yaml_source.parse(text, file)
        same = yaml_source.plain(document["smoke"]) == smoke
    except (UserError, TypeError, KeyError):
        same = False
    if not same:
        raise UserError(f"{relative(file)}: not changed, as it is no block of YAML: add smoke: {quoted(smoke)}")
    repository_files.write(file.parent, file.name, text)
