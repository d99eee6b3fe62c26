"""Give the service accounts of TPUs the roles they need in a project, through gcloud; running it again is harmless.

    make authorize-tpu PROJECT=my-project FOR=tpu-vm   Cloud TPU VMs, today: 'make pod' and 'make job PLATFORM=tpu-vm'
    make authorize-tpu PROJECT=my-project FOR=tpu-vm SERVICE_ACCOUNT=trainer@my-project.iam.gserviceaccount.com
    make authorize-tpu PROJECT=my-project              AI Platform's TPUs (legacy: shut down on 31 January 2025)

FOR=tpu-vm makes the Cloud TPU service agent, and lets the workers' service account (Compute Engine's default one
unless SERVICE_ACCOUNT is given) read images and read and write in Cloud Storage. AI Platform: its TPU service account
becomes a Cloud ML service agent, as its guide says. TPUs on Vertex AI need none of it: its agent has its role already.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import requests

from scripts import cli
from scripts.cli import StepFailed, UserError, nearest, say, warn
from scripts.repository import gcloud, last_words

#: AI Platform's guide (cloud.google.com/ai-platform/training/docs/using-tpus, "Authorize your Cloud TPU").
LEGACY_ROLE = "roles/ml.serviceAgent"

#: What workers do: pull the image, read data and write checkpoints and models.
WORKER_ROLES = ("roles/artifactregistry.reader", "roles/storage.objectUser")

#: Any zone will do: the agent is one for the whole project (gcloud compute tpus tpu-vm service-identity create --help).
ANY_ZONE = "us-central1-a"

#: How often a policy is read and written again that somebody else wrote in between; gcloud itself does not.
ATTEMPTS = 5


def legacy_endpoint() -> str:
    """AI Platform's API, or what gcloud's own setting (api_endpoint_overrides/ml) puts in its place."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_ML", "https://ml.googleapis.com/").rstrip("/")


def tpu_service_account(project: str) -> str:
    """The account that AI Platform's TPU nodes run as (projects.getConfig, ``config.tpuServiceAccount``).

    Raises:
        StepFailed: the API does not say; since its shut-down it may not any more.
    """
    token = gcloud("auth", "print-access-token")
    if token.returncode:
        raise StepFailed(f"no access token: {last_words(token)}")
    hint = "AI Platform was shut down on 31 January 2025; FOR=tpu-vm is for today's TPUs"
    try:
        answer = requests.get(
            f"{legacy_endpoint()}/v1/projects/{project}:getConfig",
            headers={"Authorization": f"Bearer {token.stdout.strip()}"},
            timeout=60,
        )
        found = answer.json()
    except (requests.RequestException, ValueError) as error:
        raise StepFailed(f"{legacy_endpoint()} does not answer ({type(error).__name__}): {hint}") from None
    if not answer.ok:
        words = (found.get("error") or {}).get("message", f"HTTP {answer.status_code}")
        raise StepFailed(f"{project}: AI Platform says: {words} ({hint})")
    account = (found.get("config") or {}).get("tpuServiceAccount")
    if not account:
        raise StepFailed(f"{project}: AI Platform names no TPU service account ({hint})")
    return str(account)


def bound(policy: dict[str, Any], member: str, role: str) -> bool:
    """Whether a policy gives the role to the member, whatever the circumstances."""
    return any(
        binding.get("role") == role and member in binding.get("members", []) and not binding.get("condition")
        for binding in policy.get("bindings", [])
    )


def give(project: str, member: str, roles: tuple[str, ...]) -> list[str]:
    """Give ``member`` those of ``roles`` that it does not have in the project; these.

    Raises:
        StepFailed: gcloud refused; one line.
    """
    there = gcloud("projects", "get-iam-policy", project, "--format=json")
    if there.returncode:
        raise StepFailed(f"{project}: {last_words(there)}")
    policy = json.loads(there.stdout)
    missing = [role for role in roles if not bound(policy, member, role)]
    for role in missing:
        flags = [f"--member={member}", f"--role={role}", "--condition=None", "--format=none"]
        for _ in range(ATTEMPTS):
            done = gcloud("projects", "add-iam-policy-binding", project, *flags)
            if done.returncode == 0 or "concurrent policy changes" not in done.stderr:
                break
        if done.returncode:
            raise StepFailed(f"{project}: {member} could not get {role}: {last_words(done)}")
    for role in roles:
        say(f"{project}: {member} {'now has' if role in missing else 'had'} {role}")
    return missing


def legacy(project: str) -> dict[str, Any]:
    """AI Platform: its TPU service account becomes a Cloud ML service agent."""
    warn("AI Platform is legacy, shut down on 31 January 2025: TPU VMs need 'make authorize-tpu FOR=tpu-vm' instead")
    account = tpu_service_account(project)
    return {"account": account, "given": give(project, f"serviceAccount:{account}", (LEGACY_ROLE,))}


def tpu_vm(project: str, account: str | None) -> dict[str, Any]:
    """TPU VMs: the service agent exists, and the workers' account can do what a training does.

    Raises:
        StepFailed: gcloud refused; one line.
    """
    command = ("compute", "tpus", "tpu-vm", "service-identity", "create")
    agent = gcloud(*command, f"--zone={ANY_ZONE}", f"--project={project}", "--format=value(identity.email)")
    if agent.returncode:
        raise StepFailed(f"{project}: no Cloud TPU service agent: {last_words(agent)}")
    say(f"{project}: the Cloud TPU service agent is {agent.stdout.strip()}")
    if not account:
        found = gcloud("projects", "describe", project, "--format=value(projectNumber)")
        if found.returncode:
            raise StepFailed(f"{project}: {last_words(found)}")
        account = f"{found.stdout.strip()}-compute@developer.gserviceaccount.com"
    given = give(project, f"serviceAccount:{account}", WORKER_ROLES)
    return {"agent": agent.stdout.strip(), "account": account, "given": given}


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("--project", default=os.environ.get("PROJECT") or None, help="or PROJECT")
    parser.add_argument("--for", dest="what", default=os.environ.get("FOR") or "ai-platform", help="or FOR")
    parser.add_argument("--service-account", default=os.environ.get("SERVICE_ACCOUNT") or None)
    options = parser.parse_args(arguments)
    if not options.project:
        raise UserError("which project? give PROJECT=, as in 'make authorize-tpu PROJECT=my-project FOR=tpu-vm'")
    if not re.fullmatch(r"[a-z0-9.:-]+", options.project):
        raise UserError(f"PROJECT={options.project!r} is no project id")
    if options.what not in ("ai-platform", "tpu-vm"):
        choices = ("ai-platform", "tpu-vm")
        raise UserError(f"no FOR={options.what}{nearest(options.what, choices)}; there are: {', '.join(choices)}")
    if options.what == "ai-platform":
        if options.service_account:
            raise UserError("SERVICE_ACCOUNT goes with FOR=tpu-vm: AI Platform's TPU service account is Google's own")
        facts = legacy(options.project)
    else:
        facts = tpu_vm(options.project, options.service_account)
    cli.result({"project": options.project} | facts, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
