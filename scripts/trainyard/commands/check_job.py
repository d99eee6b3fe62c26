"""``trainyard check-job``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard import options, settings

GROUP = "jobs"


@click.command(
    short_help="Check a job file: fields, values, the platform's rules, images.",
    epilog="""\b
    Examples:
      trainyard check-job job.yaml
      trainyard check-job job.yaml --region us-central1
      trainyard check-job job.yaml --offline --json
    """,
)
@click.argument("file", envvar=f"{settings.PREFIX}FILE", required=False)
@options.option("--region", metavar="REGION", help="Where the job is to run; checks what the region has.")
@options.flag("--offline", help="Do not look up the images, on this host or at a registry.")
@options.json_output
def command(file: str | None, region: str | None, offline: bool, as_json: bool) -> None:
    """Check the job in FILE, YAML or JSON.

    FILE is a CustomJob or a tuning job of Vertex AI, an AI Platform job, or Kubernetes manifests with a Job or JobSet.
    Each finding says where, what, why, and how to correct it; the exit status is 1 if there is one. 'trainyard rules'
    lists the rules. Images are looked up on this host and at their registry, without pulling them.
    """
    from trainyard import installation
    from trainyard.console import StepFailed, UserError

    if not file:
        raise UserError(f"no file given, as in '{installation.command('check-job', FILE='job.yaml')}'")

    from trainyard import console, platforms
    from trainyard.lint import engine
    from trainyard.lint.jobs import core
    from trainyard.spec.yaml_source import relative

    job, found = platforms.check_file(Path(file), region=region, offline=offline)
    rules = core.rules_for(job.kind)
    by_rule = {rule.id: [one for one in found if one.rule == rule.id] for rule in rules}
    console.log.print(engine.results_table(f"{relative(job.path)}: {job.kind}", rules, by_rule))
    for one in found:
        engine.show(one)
    failed = [one for one in found if one.fails]
    console.result(
        {
            "file": str(job.path),
            "kind": job.kind,
            "passed": not failed,
            "findings": [engine.as_dict(one) for one in failed],
            "notes": [engine.as_dict(one) for one in found if not one.fails],
        },
        as_json=as_json,
    )
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise StepFailed(f"{failed[0]}{more}")
    console.say(f"{relative(job.path)}: no errors" + (", but see the notes" if found else ""))
