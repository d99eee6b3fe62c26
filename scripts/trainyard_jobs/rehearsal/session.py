"""A rehearsal from its options to its report: one job, or the trials of a tuning job one after the other."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker.errors
from rich.table import Table

from trainyard.common.context import Context
from trainyard.common.errors import StepFailed, UserError
from trainyard.spec.state import own
from trainyard_jobs.model.machines import Hosts
from trainyard_jobs.rehearsal import faults, images, report, sandbox, tuning
from trainyard_jobs.rehearsal.faults import Fault
from trainyard_jobs.rehearsal.images import LocalImage
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.rehearsal.runner import Outcome, Runner
from trainyard_jobs.schema.job_file import JobFile

logger = logging.getLogger(__name__)

#: Makes the rehearsal of a job, or of one of its trials; the platform's.
Read = Callable[[Trial | None], Rehearsal]

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class Options:
    """Options of ``trainyard job rehearse``; its help describes them. An empty text, None or 0 is the default.

    Attributes:
        memory: in bytes.
        variables: those of ``--env``.
    """

    image: str = ""
    buckets: Path | None = None
    output: Path | None = None
    preempt: str = ""
    kill: str = ""
    timeout: float = 1800.0
    cpus: float = 0.0
    memory: int = 0
    trials: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    sidecar: str = ""


@dataclass(frozen=True)
class Result:
    """Describe a finished rehearsal: report, folder and files, and what failed; empty if nothing did."""

    report: dict[str, Any]
    folder: Path
    files: tuple[str, ...]
    problems: tuple[str, ...]


def parse_size(text: str) -> int:
    """Bytes of ``900m``, ``2g`` or ``1.5GiB``, in units of 1024 as Docker's ``--memory``.

    Raises:
        UserError: it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)i?b?", text.lower())
    if not match:
        raise UserError(f"'--memory {text}': expected a size such as 900m or 2g")
    return int(float(match[1]) * _SIZES[match[2]])


def placeholder_trial(study: tuning.Study | None) -> Trial | None:
    """A first trial with "VALUE" for every parameter, to show what trials have in common; None without a study."""
    return Trial(1, {one.name: "VALUE" for one in study.parameters}, study.metric) if study else None


def requested_faults(options: Options, rehearsal: Rehearsal) -> list[Fault]:
    """The faults to inject.

    Raises:
        UserError: one of them cannot happen in this job.
    """
    found = faults.parse("preempt", options.preempt, rehearsal.replicas)
    found += faults.parse("kill", options.kill, rehearsal.replicas)
    return found


def plan(rehearsal: Rehearsal) -> dict[str, Any]:
    """The containers of a rehearsal, as ``DRY_RUN=1`` prints them."""
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


def run(
    job: JobFile,
    read: Read,
    study: tuning.Study | None,
    options: Options,
    context: Context,
    show: Callable[[object], None],
) -> Result:
    """Run a job, or the trials of a tuning job, and write the report.

    Args:
        read: makes the rehearsal of the job, or of one of its trials.
        study: the study of a tuning job; None for other jobs.
        context: whose state folder has the report, unless the options name another one.
        show: called with what people read: lines of the replicas as they come, and tables of the results.
    Raises:
        UserError: the options do not fit the job, or an image is missing.
        StepFailed: a container could not be started.
    """
    session = _Session(options, job, read(placeholder_trial(study)), context, show)
    found, problems = session.run_trials(study, read) if study else session.run_job()
    if problems:
        found["problems"] = problems
    files = report.write(session.output, found)
    return Result(found, session.output, (*files, *session.files), tuple(problems))


class _Session:
    """What the runs of one command share: options, folders, images.

    Args:
        rehearsal: of the job, or of any of its trials: images and names are the same for all.
        state, show: see :func:`run`.
    """

    def __init__(
        self, options: Options, job: JobFile, rehearsal: Rehearsal, context: Context, show: Callable[[object], None]
    ) -> None:
        self.engine = context.engine
        self.show, self.options, self.job, self.rehearsal = show, options, job, rehearsal
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", rehearsal.name).strip("-") or "job"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.output = (options.output or own(context.state / "rehearsals") / f"{name}-{stamp}").expanduser()
        self.buckets = (options.buckets or self.output / "buckets").expanduser()
        found: dict[tuple[str, Hosts], LocalImage] = {}
        for reference, hosts in dict.fromkeys((one.image, one.hosts) for one in rehearsal.replicas):
            found[reference, hosts] = image = images.find(self.engine, reference, options.image, hosts)
            if image.note:
                logger.info(f"rehearse: {image.note}")
        self.images = {one.name: found[one.image, one.hosts] for one in rehearsal.replicas}
        self.files: list[str] = []
        self.sidecar = images.find(self.engine, options.sidecar, options.sidecar) if options.sidecar else None

    def _run(self, rehearsal: Rehearsal, injected: Sequence[Fault], logs: Path) -> Outcome:
        """Run one job, or one trial."""
        options = self.options
        share = sandbox.limits(self.engine, len(rehearsal.replicas), options.cpus, options.memory)
        logger.info(
            f"rehearse: {rehearsal.platform} '{rehearsal.name}': {len(rehearsal.replicas)} replicas with "
            f"{share.cpus:.3g} CPUs and {share.memory / 2**30:.1f} GB each; gs:// is {self.buckets}"
        )
        image = self.sidecar or self.images[rehearsal.replicas[0].name]
        names = sandbox.buckets_named(self.job.documents)
        made = sandbox.RehearsalSandbox(self.engine, rehearsal, image, self.buckets, names)
        try:
            with made:
                return Runner(
                    rehearsal, made, self.images, share, injected, options.timeout, logs, options.variables, self.show
                ).run()
        except docker.errors.APIError as error:  # such as no network address left, or a folder it cannot mount
            raise StepFailed(f"the Docker engine failed: {error.explanation or error}") from None

    def run_job(self) -> tuple[dict[str, Any], list[str]]:
        """Run the job; its report, and what failed."""
        requested = requested_faults(self.options, self.rehearsal)
        outcome = self._run(self.rehearsal, requested, self.output / "logs")
        found = report.of_run(self.rehearsal, outcome) | {"file": str(self.job.path)}
        self.show(_replicas_table(outcome))
        self.output.mkdir(parents=True, exist_ok=True)
        self.files = outcome.progress.curves.write(self.output, time.time() - outcome.seconds)
        for line in outcome.progress.curves.lines():
            self.show(line)
        problems = [] if outcome.succeeded else [_failure(outcome)]
        return found, problems + _not_injected(requested, outcome)

    def run_trials(self, study: tuning.Study, read: Read) -> tuple[dict[str, Any], list[str]]:
        """Run the trials one after the other; a fault is injected in the first trial that reaches its moment."""
        limit = min(study.trials, self.options.trials or study.trials)
        search = tuning.Search(replace(study, trials=limit))
        runs: list[tuple[Trial, dict[str, Any], float | None]] = []
        begun = time.monotonic()
        remaining = requested_faults(self.options, self.rehearsal)
        problems: list[str] = []
        for _ in range(limit):
            trial = search.ask()
            rehearsal = read(trial)
            values = ", ".join(f"{name}={value}" for name, value in trial.parameters.items())
            logger.info(f"rehearse: trial {trial.number} of {limit}: {values}")
            outcome = self._run(rehearsal, remaining, self.output / "logs" / f"trial-{trial.number}")
            remaining = [one for one in remaining if one not in [fault for fault, _ in outcome.injected]]
            value = _measurement(study, outcome)
            search.tell(trial, value)
            runs.append((trial, report.of_run(rehearsal, outcome), value))
            if value is None and sum(one is None for *_, one in runs) > study.failed_trials:
                problems.append(f"trial {trial.number} failed: {_failure(outcome)}")
                break
        found = report.of_tuning(runs, study.metric, study.maximize, time.monotonic() - begun)
        self.show(_trials_table(runs, study.metric))
        problems += [f"{fault} was never injected" for fault in remaining]
        return found | {"file": str(self.job.path), "status": "failed" if problems else "succeeded"}, problems


def _measurement(study: tuning.Study, outcome: Outcome) -> float | None:
    """The measurement of a trial; None, with the reason in its outcome, if it has none."""
    if not outcome.succeeded:
        return None
    try:
        return tuning.final(study, tuning.measurements(outcome.metrics, study.metric))
    except StepFailed as error:
        outcome.succeeded, outcome.why = False, str(error)
        return None


def _failure(outcome: Outcome) -> str:
    return outcome.why + (f" ({outcome.advice})" if outcome.advice else "")


def _not_injected(requested: Sequence[Fault], outcome: Outcome) -> list[str]:
    injected = [fault for fault, _ in outcome.injected]
    return [
        f"'{fault}' was never injected: the log did not reach that moment (steps are those in the log; epoch2 and 30s "
        "are moments too)"
        for fault in requested
        if fault not in injected
    ]


def _replicas_table(outcome: Outcome) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("replica", "exit status", "ended by", "restarts", "seconds"):
        table.add_column(column, justify="left" if column in ("replica", "ended by") else "right")
    for one in outcome.members:
        last = one.attempts[-1]
        seconds = (last.ended or outcome.seconds) - last.started
        table.add_row(one.replica.name, str(one.status), last.cause, str(len(one.attempts) - 1), f"{seconds:.1f}")
    return table


def _trials_table(runs: Sequence[tuple[Trial, dict[str, Any], float | None]], metric: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("trial", *runs[0][0].parameters, metric, "seconds"):
        table.add_column(column, justify="right")
    for trial, found, value in runs:
        measured = "failed" if value is None else f"{value:.4g}"
        table.add_row(str(trial.number), *trial.parameters.values(), measured, f"{found['seconds']:.1f}")
    return table
