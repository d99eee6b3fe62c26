"""``trainyard pod authorize-tpu``."""

from __future__ import annotations

import re

import click

from trainyard.common import options

GROUP = "jobs"


def _project(ctx: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    # https://cloud.google.com/resource-manager/docs/creating-managing-projects; domain-scoped ids contain . and :
    if given and not re.fullmatch(r"[a-z0-9.:-]+", given):
        raise click.BadParameter(f"{given!r} is not a project ID", ctx, parameter)
    return given


@click.command(
    short_help="Grant the service accounts of TPUs the roles that they need.",
    epilog="""\b
    Examples:
      trainyard pod authorize-tpu --project my-project --for tpu-vm
      trainyard pod authorize-tpu --project my-project --for tpu-vm --service-account=NAME@P.iam.gserviceaccount.com
      trainyard pod authorize-tpu --project my-project      # AI Platform (shut down on 31 January 2025)
    """,
)
@options.option("--project", metavar="ID", callback=_project, help="Google Cloud project, required.")
@options.option(
    "--for",
    "product",
    type=click.Choice(["ai-platform", "tpu-vm"]),
    default="ai-platform",
    help="tpu-vm: 'trainyard pod' and 'trainyard job --platform tpu-vm'.",
)
@options.option(
    "--service-account",
    metavar="EMAIL",
    help="With --for tpu-vm: account of the workers. Default: Compute Engine's default service account.",
)
@options.json_output
def command(project: str | None, product: str, service_account: str | None, as_json: bool) -> None:
    """Grant the service accounts of TPUs the roles that they need in a project. It can be run again at any time.

    For TPU VMs, it creates the Cloud TPU service agent and lets the workers' service account read images from Artifact
    Registry and read and write in Cloud Storage. For AI Platform, its TPU service account becomes a Cloud ML service
    agent, as its documentation requires. TPUs on Vertex AI need neither.
    """
    from trainyard.common import console, errors
    from trainyard_jobs.pods import authorization

    if not project:
        example = "trainyard pod authorize-tpu --project my-project --for tpu-vm"
        raise errors.UserError(f"no project: set '--project', as in '{example}'")
    if product == "ai-platform" and service_account:
        why = "AI Platform's TPU service account is Google's"
        raise errors.UserError(f"'--service-account' needs '--for tpu-vm': {why}")
    if product == "ai-platform":
        facts = authorization.authorize_ai_platform(project)
    else:
        facts = authorization.authorize_tpu_vm(project, service_account)
    console.result({"project": project} | facts, as_json=as_json)
