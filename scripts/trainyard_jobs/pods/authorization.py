"""Grant the service accounts of TPUs the roles that they need in a project, through gcloud.

The functions raise StepFailed if gcloud fails.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import requests

from trainyard.common import gcloud, settings
from trainyard.common.errors import StepFailed
from trainyard_jobs.model.machines import AI_PLATFORM_SHUT_DOWN

logger = logging.getLogger(__name__)

#: "Authorize your Cloud TPU": https://cloud.google.com/ai-platform/training/docs/using-tpus.
AI_PLATFORM_ROLE = "roles/ml.serviceAgent"

#: The workers pull the image, read data, and write checkpoints and models.
WORKER_ROLES = ("roles/artifactregistry.reader", "roles/storage.objectUser")

#: The service agent is the same in every zone, but the command requires one
#: (https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/service-identity/create).
ANY_ZONE = "us-central1-a"

#: How often a policy is read and written that another process changes in between. gcloud does not retry.
MAX_ATTEMPTS = 5


def _output(failed: str, *arguments: str) -> str:
    """Return what a command of gcloud prints; ``failed`` begins the line about one that fails."""
    finished = gcloud.run(*arguments)
    if finished.returncode:
        raise StepFailed(f"{failed}: {gcloud.error_line(finished)}")
    return finished.stdout.strip()


def ai_platform_endpoint() -> str:
    """AI Platform's API, or gcloud's property ``api_endpoint_overrides/ml`` if its variable is set."""
    override = settings.standard_variable("CLOUDSDK_API_ENDPOINT_OVERRIDES_ML")
    return (override or "https://ml.googleapis.com/").rstrip("/")


def ai_platform_service_account(project: str) -> str:
    """The account that AI Platform's TPU nodes run as (projects.getConfig, ``config.tpuServiceAccount``).

    Raises:
        StepFailed: the API does not return it, which is likely since its shutdown.
    """
    token = _output("no access token", "auth", "print-access-token")
    hint = f"AI Platform was shut down on {AI_PLATFORM_SHUT_DOWN}; use '--for tpu-vm' for Cloud TPU VMs"
    try:
        answer = requests.get(
            f"{ai_platform_endpoint()}/v1/projects/{project}:getConfig",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )
        found = answer.json()
    except (requests.RequestException, ValueError) as error:
        raise StepFailed(f"{ai_platform_endpoint()} does not answer ({type(error).__name__}): {hint}") from None
    if not answer.ok:
        message = (found.get("error") or {}).get("message", f"HTTP {answer.status_code}")
        raise StepFailed(f"{project}: AI Platform answers: {message} ({hint})")
    account = (found.get("config") or {}).get("tpuServiceAccount")
    if not account:
        raise StepFailed(f"{project}: AI Platform returns no TPU service account ({hint})")
    return str(account)


def has_role(policy: dict[str, Any], member: str, role: str) -> bool:
    """Whether an IAM policy grants the role to the member without a condition."""
    return any(
        binding.get("role") == role and member in binding.get("members", []) and not binding.get("condition")
        for binding in policy.get("bindings", [])
    )


def grant(project: str, member: str, roles: tuple[str, ...]) -> list[str]:
    """Grant ``member`` those of ``roles`` that it lacks in the project; return the roles that were granted."""
    policy = json.loads(_output(project, "projects", "get-iam-policy", project, "--format=json"))
    missing = [role for role in roles if not has_role(policy, member, role)]
    for role in missing:
        flags = [f"--member={member}", f"--role={role}", "--condition=None", "--format=none"]
        for _ in range(MAX_ATTEMPTS):
            finished = gcloud.run("projects", "add-iam-policy-binding", project, *flags)
            if finished.returncode == 0 or "concurrent policy changes" not in finished.stderr:
                break
        if finished.returncode:
            raise StepFailed(f"{project}: {role} could not be granted to {member}: {gcloud.error_line(finished)}")
    for role in roles:
        logger.info(f"{project}: {member} {'was granted' if role in missing else 'already had'} {role}")
    return missing


def authorize_ai_platform(project: str) -> dict[str, Any]:
    """Grant AI Platform's TPU service account the role of a Cloud ML service agent."""
    command = "trainyard pod authorize-tpu --for tpu-vm"
    logger.warning(f"AI Platform was shut down on {AI_PLATFORM_SHUT_DOWN}: TPU VMs need '{command}' instead")
    account = ai_platform_service_account(project)
    return {"account": account, "given": grant(project, f"serviceAccount:{account}", (AI_PLATFORM_ROLE,))}


def authorize_tpu_vm(project: str, account: str | None) -> dict[str, Any]:
    """TPU VMs: create the Cloud TPU service agent and grant the workers' service account :data:`WORKER_ROLES`.

    Args:
        account: that the workers run as; None for Compute Engine's default service account.
    """
    create = ("compute", "tpus", "tpu-vm", "service-identity", "create", f"--zone={ANY_ZONE}", f"--project={project}")
    agent = _output(f"{project}: no Cloud TPU service agent", *create, "--format=value(identity.email)")
    logger.info(f"{project}: the Cloud TPU service agent is {agent}")
    if not account:
        number = _output(project, "projects", "describe", project, "--format=value(projectNumber)")
        account = f"{number}-compute@developer.gserviceaccount.com"
    given = grant(project, f"serviceAccount:{account}", WORKER_ROLES)
    return {"agent": agent, "account": account, "given": given}
