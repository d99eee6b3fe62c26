"""``trainyard job rehearse``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from trainyard.common import options, settings
from trainyard.common.context import Context
from trainyard_jobs.model import options as job_options

GROUP = "jobs"

_SECONDS = options.Number(min=0)
_FOLDER = options.Folder(file_okay=False, path_type=Path)


@click.command(
    short_help="Run a job file on this machine, as its platform would.",
    epilog="""\b
    Examples:
      trainyard job rehearse job.yaml
      trainyard job rehearse job.yaml --buckets ~/buckets --output rehearsal
      trainyard job rehearse job.yaml --preempt worker-1@step20
      trainyard job rehearse job.yaml --kill chief@30s
      trainyard job rehearse job.yaml --dry-run
    """,
)
@click.argument("file", envvar=f"{settings.PREFIX}FILE", required=False)
@options.option("--image", metavar="REFERENCE", help="Local image to run instead of those that FILE names.")
@options.option(
    "--buckets",
    type=_FOLDER,
    help="Folder with a folder for each bucket: gs://NAME is BUCKETS/NAME. Default: buckets/ in the output folder.",
)
@options.option(
    "--output",
    type=_FOLDER,
    help="Folder for report.json, report.png and logs/. Default: <state folder>/rehearsals/NAME-TIME.",
)
@options.option(
    "--preempt",
    metavar="REPLICA@WHEN",
    help="Preempt replicas: SIGTERM, the grace period, SIGKILL. WHEN is step20, epoch2, epoch2:step5, 30s or /text/. "
    "Default of WHEN: the first step.",
)
@options.option("--kill", metavar="REPLICA@WHEN", help="SIGKILL replicas, as in a machine failure.")
@options.option("--timeout", type=_SECONDS, default=1800, help="Seconds after which a job, or a trial, is stopped.")
@options.option("--cpus", type=_SECONDS, help="CPUs of each replica. Default: an equal share.")
@options.option("--memory", metavar="SIZE", help="Memory of each replica, such as 2g. Default: an equal share.")
@options.option("--trials", type=options.Count(min=0), help="Maximum number of trials. Default: the job's.")
@options.option(
    "--env",
    metavar="'A=1 B=2'",
    help="Variables for every replica, instead of secrets and config maps.",
)
@options.option("--sidecar", metavar="REFERENCE", help="Local image with python3 for the fakes. Default: the job's.")
@options.flag("--dry-run", help="Print the containers with their environment, as JSON; start nothing.")
@options.json_output
@click.pass_obj
def command(
    context: Context,
    /,
    file: str | None,
    memory: str | None,
    env: str | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the job in FILE on this machine: a container for each replica, with what the platform would set and restart.

    FILE is a CustomJob or HyperparameterTuningJob of Vertex AI, or a Job, JobSet or TrainJob of Kubernetes.
    Accelerators are replaced by the CPU backend of the image's framework; docs/jobs/rehearse.md describes what else
    differs. The exit status is 0 if the job succeeded by its platform's rules and every fault was injected.
    """
    from trainyard.common import console
    from trainyard.common.errors import StepFailed, UserError
    from trainyard_jobs import platforms
    from trainyard_jobs.check.files import explain_invalid_fields
    from trainyard_jobs.rehearsal import session, tuning
    from trainyard_jobs.schema import job_file

    if not file:
        raise UserError("no job file given, as in 'trainyard job rehearse job.yaml'")
    chosen = session.Options(
        memory=session.parse_size(memory or "0"),
        variables=dict(job_options.pairs(job_options.words(env or "", "--env"), "--env")),
        **{name: value for name, value in given.items() if value is not None},
    )
    job = job_file.load(Path(file).expanduser())
    platform = platforms.of_job_file(job)
    with explain_invalid_fields(job):
        study = tuning.study_of(job)
        rehearsal = platform.rehearse(job, session.placeholder_trial(study))
    for note in rehearsal.notes:
        console.say(f"rehearse: note: {note}")
    session.requested_faults(chosen, rehearsal)
    if dry_run:
        console.result(session.plan(rehearsal), as_json=True)
        return
    done = session.run(job, functools.partial(platform.rehearse, job), study, chosen, context, console.show)
    console.result(done.report, as_json=as_json)
    for problem in done.problems[1:]:
        console.warn(problem)
    console.say(f"rehearse: {', '.join(done.files)} and logs/ are in {done.folder}")
    if done.problems:
        raise StepFailed(done.problems[0])
