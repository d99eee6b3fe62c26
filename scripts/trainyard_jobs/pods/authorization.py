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


def ai_platform_endpoint() -> str:
    """AI Platform's API, or gcloud's property ``api_endpoint_overrides/ml`` if its variable is set."""
    override = settings.standard_variable("CLOUDSDK_API_ENDPOINT_OVERRIDES_ML")
    return (override or "https://ml.googleapis.com/").rstrip("/")


def ai_platform_service_account(project: str) -> str:
    """The account that AI Platform's TPU nodes run as (projects.getConfig, ``config.tpuServiceAccount``).

    Raises:
        StepFailed: the API does not return it, which is likely since its shutdown.
    """
    token = gcloud.run("auth", "print-access-token")
    if token.returncode:
        raise StepFailed(f"no access token: {gcloud.error_line(token)}")
    hint = f"AI Platform was shut down on {AI_PLATFORM_SHUT_DOWN}; use '--for tpu-vm' for Cloud TPU VMs"
    try:
        answer = requests.get(
            f"{ai_platform_endpoint()}/v1/projects/{project}:getConfig",
            headers={"Authorization": f"Bearer {token.stdout.strip()}"},
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
    """Grant ``member`` those of ``roles`` that it does not have in the project; the roles that were granted."""
    read = gcloud.run("projects", "get-iam-policy", project, "--format=json")
    if read.returncode:
        raise StepFailed(f"{project}: {gcloud.error_line(read)}")
    policy = json.loads(read.stdout)
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
    """AI Platform: grant its TPU service account the role of a Cloud ML service agent."""
    command = "trainyard pod authorize-tpu --for tpu-vm"
    logger.warning(f"AI Platform was shut down on {AI_PLATFORM_SHUT_DOWN}: TPU VMs need '{command}' instead")
    account = ai_platform_service_account(project)
    return {"account": account, "given": grant(project, f"serviceAccount:{account}", (AI_PLATFORM_ROLE,))}


def authorize_tpu_vm(project: str, account: str | None) -> dict[str, Any]:
    """TPU VMs: create the Cloud TPU service agent and grant the workers' service account :data:`WORKER_ROLES`.

    Args:
        account: that the workers run as; None for Compute Engine's default service account.
    """
    command = ("compute", "tpus", "tpu-vm", "service-identity", "create")
    agent = gcloud.run(*command, f"--zone={ANY_ZONE}", f"--project={project}", "--format=value(identity.email)")
    if agent.returncode:
        raise StepFailed(f"{project}: no Cloud TPU service agent: {gcloud.error_line(agent)}")
    logger.info(f"{project}: the Cloud TPU service agent is {agent.stdout.strip()}")
    if not account:
        found = gcloud.run("projects", "describe", project, "--format=value(projectNumber)")
        if found.returncode:
            raise StepFailed(f"{project}: {gcloud.error_line(found)}")
        account = f"{found.stdout.strip()}-compute@developer.gserviceaccount.com"
    given = grant(project, f"serviceAccount:{account}", WORKER_ROLES)
    return {"agent": agent.stdout.strip(), "account": account, "given": given}
