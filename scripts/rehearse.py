"""Run a job file on this machine: one container a replica, with what the platform would set, name and restart.

    make rehearse FILE=job.yaml
    make rehearse FILE=job.yaml BUCKETS=~/buckets OUTPUT=rehearsal    # gs://name is BUCKETS/name
    make rehearse FILE=job.yaml PREEMPT=worker-1@step20               # and see it resume
    make rehearse FILE=job.yaml KILL=master TPU_DELAY=30
    make rehearse FILE=job.yaml DRY_RUN=1 JSON=1                      # print what each replica would get

FILE is a Vertex AI CustomJob or HyperparameterTuningJob, an AI Platform job, or a GKE Job or JobSet. Accelerators are
replaced by the CPU backend of the image's framework. See docs/jobs/rehearse.md for what is imitated and what is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker.errors
from rich.table import Table

from scripts import cli
from scripts.cli import STATE, StepFailed, UserError, say, warn
from scripts.jobs import files
from scripts.jobs.files import JobFile
from scripts.rehearsal import ai_platform, chaos, gke, images, report, tuning, vertex, world
from scripts.rehearsal.images import StandIn
from scripts.rehearsal.model import Rehearsal, Trial
from scripts.rehearsal.runner import Outcome, Runner

#: Seconds a rehearsal (each trial of a tuning job) may take.
TIMEOUT = 1800.0

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def read(job: JobFile, trial: Trial | None = None) -> Rehearsal:
    """The rehearsal of a job file, by its kind."""
    if job.kind == "ai-platform":
        return ai_platform.rehearsal(job, trial)
    return gke.rehearsal(job) if job.kind == "gke" else vertex.rehearsal(job, trial)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, target=False)

    def add(name: str, metavar: str, text: str, default: str = "") -> None:
        variable = name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", metavar=metavar, default=os.environ.get(variable) or default, help=text)

    parser.add_argument("file", nargs="?", default=os.environ.get("FILE"), help="the job's file, YAML or JSON")
    add("image", "REFERENCE", "local image to run instead of those the file names")
    add("buckets", "DIR", "folder with a folder for each bucket (default: buckets/ in the output folder)")
    add("output", "DIR", "folder for report.json, report.png and logs/ (default: build/rehearsals/NAME-TIME)")
    add("preempt", "REPLICA@WHEN", "SIGTERM and the platform's grace, as when a machine is taken away")
    add("kill", "REPLICA@WHEN", "SIGKILL, as when a machine dies")
    add("tpu-delay", "SECONDS", "the TPU node is ready only after so long", "0")
    add("timeout", "SECONDS", "stop what still runs after so long", f"{TIMEOUT:g}")
    add("cpus", "NUMBER", "CPUs of each replica (default: an equal share)", "0")
    add("memory", "SIZE", "memory of each replica, such as 2g (default: an equal share)", "0")
    add("trials", "NUMBER", "run at most so many trials of a tuning job", "0")
    add("env", "NAME=VALUE...", "variables for every replica, in place of secrets and config maps")
    add("sidecar", "REFERENCE", "local image with a python3 for the fakes (default: the job's)")
    parser.add_argument(
        "--dry-run", action="store_true", default=bool(os.environ.get("DRY_RUN")), help="print the plan, start nothing"
    )
    return parser


def _options(arguments: list[str]) -> argparse.Namespace:
    """The options, checked and converted.

    Raises:
        UserError: one of them cannot be used.
    """
    found = _parser().parse_args(arguments)
    if not found.file:
        raise UserError("no job file given, as in 'make rehearse FILE=job.yaml'")
    for name in ("tpu_delay", "timeout", "cpus"):
        setattr(found, name, _number(name, getattr(found, name)))
    found.trials = int(_number("trials", found.trials))
    found.memory = _bytes(found.memory)
    found.env = _assignments(found.env)
    return found


def _number(name: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise UserError(f"{name.upper()}={text}: expected a number")
    return float(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)i?b?", text.lower())
    if not match:
        raise UserError(f"MEMORY={text}: expected a size such as 900m or 2g")
    return int(float(match[1]) * _SIZES[match[2]])


def _assignments(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(text)]
    for name, equals, _ in pairs:
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"ENV: {name!r} is no NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _faults(options: argparse.Namespace, rehearsal: Rehearsal) -> list[chaos.Fault]:
    found = []
    for variable in ("PREEMPT", "KILL"):
        found += chaos.parse(variable, getattr(options, variable.lower()), rehearsal.replicas)
    if options.tpu_delay and rehearsal.node is None:
        raise UserError(
            f"TPU_DELAY={options.tpu_delay:g}: {rehearsal.platform} '{rehearsal.name}' has no TPU node to wait for; "
            "only AI Platform's cloud_tpu workers are created beside a job that runs already"
        )
    return found


def plan(rehearsal: Rehearsal) -> dict[str, Any]:
    """What each replica would get, for DRY_RUN=1."""
    return {
        "platform": rehearsal.platform,
        "name": rehearsal.name,
        "notes": list(rehearsal.notes),
        "replicas": [
            {
                "name": one.name,
                "hostname": one.hostname,
                "role": one.role,
                "image": one.image,
                "command": one.command,
                "args": one.arguments,
                "environment": dict(sorted(one.environment.items())),
                "devices": one.devices,
            }
            for one in rehearsal.replicas
        ],
    }


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """What the engine refuses (no address left for a network, a folder it cannot mount) as a line."""
    try:
        yield
    except docker.errors.APIError as error:
        raise StepFailed(f"the Docker engine refused: {error.explanation or error}") from None


class _Stage:
    """What all runs of one command share: options, folders, images."""

    def __init__(self, options: argparse.Namespace, job: JobFile, rehearsal: Rehearsal) -> None:
        self.options, self.job = options, job
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", rehearsal.name).strip("-") or "job"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.output = Path(options.output or STATE / "rehearsals" / f"{name}-{stamp}").expanduser()
        self.buckets = Path(options.buckets or self.output / "buckets").expanduser()
        self.images: dict[str, StandIn] = {}
        for reference in dict.fromkeys(one.image for one in rehearsal.replicas):
            self.images[reference] = found = images.stand_in(reference, options.image)
            if found.note:
                say(f"rehearse: {found.note}")
        self.sidecar = images.stand_in(options.sidecar, options.sidecar).id if options.sidecar else ""

    def run(self, rehearsal: Rehearsal, faults: Sequence[chaos.Fault], logs: Path) -> Outcome:
        """One job, or one trial."""
        share = world.limits(len(rehearsal.replicas), self.options.cpus, self.options.memory)
        say(
            f"rehearse: {rehearsal.platform} '{rehearsal.name}': {len(rehearsal.replicas)} replicas with "
            f"{share.cpus:.3g} CPUs and {share.memory / 2**30:.1f} GB each; gs:// is {self.buckets}"
        )
        image = self.sidecar or self.images[rehearsal.replicas[0].image].id
        names = world.buckets_named(self.job.documents)
        with (
            _engine_errors(),
            world.World(rehearsal, image, self.buckets, names, self.options.tpu_delay) as found,
        ):
            runner = Runner(rehearsal, found, self.images, share, faults, self.options.timeout, logs, self.options.env)
            return runner.run()


def _rehearse_job(stage: _Stage, rehearsal: Rehearsal) -> tuple[dict[str, Any], list[str]]:
    faults = _faults(stage.options, rehearsal)
    outcome = stage.run(rehearsal, faults, stage.output / "logs")
    found = report.of_run(rehearsal, outcome) | {"file": str(stage.job.path)}
    _show_replicas(outcome)
    problems = [] if outcome.succeeded else [_failure(outcome)]
    return found, problems + _missed(faults, outcome)


def _rehearse_trials(stage: _Stage, study: tuning.Study) -> tuple[dict[str, Any], list[str]]:
    """The trials of a tuning job, one after the other; a fault asked for hits the first in which it can happen."""
    limit = min(study.trials, stage.options.trials or study.trials)
    search = tuning.Search(replace(study, trials=limit))
    runs: list[tuple[Trial, dict[str, Any], float | None]] = []
    begun = time.monotonic()
    faults: list[chaos.Fault] | None = None
    problems: list[str] = []
    for _ in range(limit):
        trial = search.ask()
        rehearsal = read(stage.job, trial)
        faults = _faults(stage.options, rehearsal) if faults is None else faults
        values = ", ".join(f"{name}={value}" for name, value in trial.parameters.items())
        say(f"rehearse: trial {trial.number} of {limit}: {values}")
        outcome = stage.run(rehearsal, faults, stage.output / "logs" / f"trial-{trial.number}")
        faults = [one for one in faults if one not in [fault for fault, _ in outcome.happened]]
        value = _measured(study, outcome)
        search.tell(trial, value)
        runs.append((trial, report.of_run(rehearsal, outcome), value))
        if value is None and sum(one is None for *_, one in runs) > study.failed_trials:
            problems.append(f"trial {trial.number} failed: {_failure(outcome)}")
            break
    found = report.of_tuning(runs, study.metric, study.maximize, time.monotonic() - begun)
    _show_trials(runs, study.metric)
    problems += [f"{fault} never happened" for fault in faults or []]
    return found | {"file": str(stage.job.path), "status": "failed" if problems else "succeeded"}, problems


def _measured(study: tuning.Study, outcome: Outcome) -> float | None:
    """A trial's measurement; None, with the reason in its outcome, if it has none."""
    if not outcome.succeeded:
        return None
    try:
        return tuning.final(study, tuning.measurements(outcome.metrics, study.metric))
    except StepFailed as error:
        outcome.succeeded, outcome.why = False, str(error)
        return None


def _failure(outcome: Outcome) -> str:
    return outcome.why + (f" ({outcome.advice})" if outcome.advice else "")


def _missed(faults: Sequence[chaos.Fault], outcome: Outcome) -> list[str]:
    happened = [fault for fault, _ in outcome.happened]
    return [
        f"'{fault}' never happened: the log did not get there (steps count as logged; epoch2 and 30s are moments too)"
        for fault in faults
        if fault not in happened
    ]


def _show_replicas(outcome: Outcome) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("replica", "exit status", "ended by", "restarts", "seconds"):
        table.add_column(column, justify="right" if column in ("exit status", "restarts", "seconds") else "left")
    for one in outcome.members:
        last = one.attempts[-1]
        seconds = (last.ended or outcome.seconds) - last.started
        table.add_row(one.replica.name, str(one.status), last.cause, str(len(one.attempts) - 1), f"{seconds:.1f}")
    cli.log.print(table)


def _show_trials(runs: Sequence[tuple[Trial, dict[str, Any], float | None]], metric: str) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("trial", *runs[0][0].parameters, metric, "seconds"):
        table.add_column(column, justify="right")
    for trial, found, value in runs:
        measured = "failed" if value is None else f"{value:.4g}"
        table.add_row(str(trial.number), *trial.parameters.values(), measured, f"{found['seconds']:.1f}")
    cli.log.print(table)


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    job = files.load(Path(options.file).expanduser())
    study = tuning.study_of(job)
    first = Trial(1, {one.name: "VALUE" for one in study.parameters}, study.metric) if study else None
    rehearsal = read(job, first)
    for note in rehearsal.notes:
        say(f"rehearse: note: {note}")
    _faults(options, rehearsal)
    if options.dry_run:
        cli.result(plan(rehearsal), as_json=True)
        return 0
    stage = _Stage(options, job, rehearsal)
    found, problems = _rehearse_trials(stage, study) if study else _rehearse_job(stage, rehearsal)
    if problems:
        found["problems"] = problems
    report.write(stage.output, found)
    cli.result(found, as_json=options.json)
    for problem in problems[1:]:
        warn(problem)
    say(f"rehearse: report.json, report.png and logs/ are in {stage.output}")
    if problems:
        raise StepFailed(problems[0])
    return 0


if __name__ == "__main__":
    cli.run(main)
