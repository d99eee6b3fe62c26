"""``trainyard job check``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainyard.common import options, settings

if TYPE_CHECKING:
    from trainyard.common.context import Context
    from trainyard_jobs.check.files import Checked, Unsigned

GROUP = "jobs"


class _Paths(click.Path):
    """Paths; the variable holds one path, or several as a shell splits words."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        try:
            return [rv] if Path(rv).exists() else shlex.split(rv)
        except (OSError, ValueError):  # too long for a path; an unclosed quotation mark
            return [rv]


def _show(result: Checked, *, alone: bool) -> None:
    """Print the findings of one file; the command ends with the error of a file that is ``alone``."""
    from trainyard.common import console

    for finding in result.findings:
        console.show(finding)
    if result.unchecked and not result.template:
        console.say(f"not checked: {result.unchecked}")
    elif result.error and not alone:
        console.fail(result.error)


def _unsigned(
    context: Context, public_key: Path | None, identity: str | None, issuer: str | None, offline: bool
) -> Unsigned:
    """What says why an image has no valid signature."""
    import functools

    from trainyard.common.errors import UserError
    from trainyard.release import signers

    if offline:
        raise UserError("--require-signed and --offline exclude each other: signatures are at the registry")
    trust = signers.trust(public_key, identity, issuer, "check-job", context=context)
    if trust is None:
        raise UserError(f"--require-signed needs {signers.ways_to_check()} to check the signatures with")
    from trainyard.release import claims

    # Jobs name the same image many times.
    return functools.cache(functools.partial(claims.unsigned, trust=trust))


@click.command(
    short_help="Check job files: fields, values, the platform's rules, images.",
    epilog="""\b
    Examples:
      trainyard job check job.yaml
      trainyard job check job.yaml --region us-central1
      trainyard job check jobs/ other.yaml --offline --json
      trainyard job check job.yaml --server
      trainyard job check . --offline --sarif >findings.sarif
      trainyard job check job.yaml --require-signed --public-key signing.pub
    """,
)
@click.argument("files", metavar="FILE...", nargs=-1, envvar=f"{settings.PREFIX}FILE", type=_Paths())
@options.option("--region", metavar="REGION", help="Where the jobs are to run; checks what the region has.")
@options.flag("--offline", help="Do not look up the images, on this host or at a registry.")
@options.flag("--server", help="Ask the cluster of kubectl's context, too, in a dry run, which creates nothing.")
@options.flag("--require-signed", help="Demand a valid signature of every image, at its registry.")
@options.checking
@options.trust_config
@options.flag("--strict", help="Fail on notes, too.")
@options.flag("--sarif", help="Print the findings on stdout as SARIF 2.1.0, for code scanning.")
@options.json_output
@click.pass_obj
def command(
    context: Context,
    files: tuple[str, ...],
    region: str | None,
    offline: bool,
    server: bool,
    require_signed: bool,
    public_key: Path | None,
    certificate_identity: str | None,
    certificate_oidc_issuer: str | None,
    strict: bool,
    sarif: bool,
    as_json: bool,
) -> None:
    """Check the jobs in each FILE, YAML or JSON; of a folder, all files below it that are jobs.

    A job is a CustomJob or a tuning job of Vertex AI, an AI Platform job, or Kubernetes manifests with a job or pods.
    Each finding says where, what, why, and how to correct it. 'trainyard dev rules' lists the rules. Images are looked
    up on this host and at their registry, without pulling them. For a Slurm script, a SkyPilot task or a script for TPU
    VMs, the command that checks it is printed. A template is not checked: what it leaves to fill in is named.

    What the API server and webhooks of a cluster refuse, beyond fields and types, only a cluster says: with --server.

    The exit status is 1 if a platform refuses a job, or the job cannot start, and 2 if a file cannot be read, or is a
    template.
    """
    import functools
    import json

    from trainyard.common import console
    from trainyard.common.errors import StepFailed, UserError

    if not files:
        raise UserError("no file given, as in 'trainyard job check job.yaml'")
    if sarif and as_json:
        raise UserError("--sarif and --json both print on stdout: give one of them")

    from trainyard.image import recipes
    from trainyard.spec import model
    from trainyard.spec.yaml_source import relative
    from trainyard_jobs import platforms
    from trainyard_jobs.check import files as job_files
    from trainyard_jobs.check import sarif as sarif_log
    from trainyard_jobs.platforms import submission

    unsigned = None
    if server:
        submission.require_program("kubectl")
    if require_signed:
        unsigned = _unsigned(context, public_key, certificate_identity, certificate_oidc_issuer, offline)
    paths = [Path(file) for file in files]
    check = functools.partial(
        job_files.check_file,
        region=region,
        offline=offline,
        unsigned=unsigned,
        engine=context.engine,
        server=server,
        targets=lambda: recipes.outlines(*model.recommended()),
    )
    results, skipped = job_files.check_files(paths, check, signed=require_signed)
    for one in results:
        _show(one, alone=len(results) == 1)
    templates = [one.path for one in results if one.template]
    for what, some in (("templates, not checked", templates), ("not jobs, and not checked", skipped)):
        if some:
            names = ", ".join(relative(path) for path in some[:5]) + (", ..." if len(some) > 5 else "")
            console.say(f"{what}: {len(some)} ({names})")
    failed = [found for one in results for found in one.findings if strict or found.fails]
    unreadable = {relative(one.path): one.error for one in results if one.error}
    if sarif:
        findings = [found for one in results for found in one.findings]
        print(json.dumps(sarif_log.log(platforms.RULES, findings, unreadable), indent=2))
    console.result(
        {
            "passed": not failed and not unreadable,
            "files": [one.as_dict(strict=strict) for one in results],
            "skipped": [str(path) for path in skipped],
        },
        as_json=as_json,
    )
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise StepFailed(f"{failed[0]}{more}")
    if unreadable:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise UserError(f"{next(iter(unreadable.values()))}{more}")
    checked = [one for one in results if one.job]
    if server and not any(one.job and one.job.kind == "gke" for one in checked):
        raise UserError("--server: none of these is a Kubernetes job, which a cluster checks")
    if checked:
        notes = any(one.findings for one in checked)
        subject = relative(checked[0].path) if len(checked) == 1 else f"{len(checked)} jobs"
        kinds = {one.job.kind for one in checked if one.job}
        applied = sum(not kinds.isdisjoint(rule.subjects) for rule in platforms.RULES)
        console.say(f"{subject}: {applied} rules, no errors" + (", but see the notes" if notes else ""))
