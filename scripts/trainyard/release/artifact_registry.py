"""Create repositories of Artifact Registry, and log Docker in to it, through gcloud."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from trainyard.common import gcloud
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import registry
from trainyard.spec.naming import NAME

#: Cleanup policy (https://cloud.google.com/artifact-registry/docs/repositories/cleanup-policy).
POLICY: list[dict[str, Any]] = [
    {
        "name": "delete-untagged",
        "action": {"type": "Delete"},
        "condition": {"tagState": "UNTAGGED", "olderThan": "30d"},
    },
    {"name": "keep-newest", "action": {"type": "Keep"}, "mostRecentVersions": {"keepCount": 20}},
]


def create(address: str, *, immutable: bool) -> bool:
    """Create a repository, if it does not exist, and set its cleanup policy.

    Args:
        address: ``<location>-docker.pkg.dev/<project>/<repository>``.
        immutable: whether its tags can be neither moved nor deleted.
    Returns:
        Whether it was created.
    Raises:
        UserError: gcloud is not installed, it is no address, or the repository exists with the other kind of tags.
        StepFailed: gcloud failed; one line.
    """
    parts = re.fullmatch(
        r"([a-z0-9-]+)-docker\.pkg\.dev/([a-z][a-z0-9.:-]+)/([a-z](?:[a-z0-9-]{0,61}[a-z0-9])?)", address
    )
    if not parts:
        raise UserError(f"'--registry {address}' is not <location>-docker.pkg.dev/<project>/<repository>")
    location, project, name = parts.groups()
    where = [f"--location={location}", f"--project={project}"]
    described = gcloud.run("artifacts", "repositories", "describe", name, *where, "--format=json")
    if described.returncode == 0:
        known = bool((json.loads(described.stdout).get("dockerConfig") or {}).get("immutableTags"))
        if known != immutable:
            kind = "immutable" if known else "not immutable"
            raise UserError(f"{address} exists, and its tags are {kind}: give another name, or change IMMUTABLE")
    elif "NOT_FOUND" not in described.stderr:
        raise StepFailed(f"{address}: {gcloud.error_line(described)}")
    else:
        flags = ["--repository-format=docker", f"--description={NAME} images"]
        made = gcloud.run("artifacts", "repositories", "create", name, *where, *flags,
                      *(["--immutable-tags"] if immutable else []))  # fmt: skip
        if made.returncode:
            raise StepFailed(f"{address} could not be created: {gcloud.error_line(made)}")
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.json"
        policy.write_text(json.dumps(POLICY), encoding="utf-8")
        command = ["set-cleanup-policies", name, *where, f"--policy={policy}", "--no-dry-run"]
        done = gcloud.run("artifacts", "repositories", *command)
    if done.returncode:
        raise StepFailed(f"{address}: its cleanup policy could not be set: {gcloud.error_line(done)}")
    return described.returncode != 0


def login(address: str) -> str:
    """Set gcloud as the Docker client's credential helper for the registry of ``address``, and return its host.

    Raises:
        UserError: it is not a registry of Google's, or gcloud is not installed.
        StepFailed: gcloud failed; one line.
    """
    host = registry.host(address)
    if not re.fullmatch(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)", host):
        raise UserError(f"{host} is not a host of Artifact Registry: run 'docker login {host}'")
    # Credential helpers are set per host: without one, gcloud does not configure pkg.dev.
    done = gcloud.run("auth", "configure-docker", host)
    if done.returncode:
        raise StepFailed(f"{host}: {gcloud.error_line(done)}")
    return host
