"""A fake of the APIs that `trainyard authorize-tpu` calls: a project, its IAM policy and its TPU service accounts.

Resource Manager v1 as `gcloud projects` (528) uses it, AI Platform's projects.getConfig, and the Cloud TPU API's
generateServiceIdentity.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.server import ApiError, Route, Server, gcloud_environment

PROJECT = "my-project"
NUMBER = "123456789012"
TOKEN = "fake-token"
TPU_ACCOUNT = f"service-{NUMBER}@cloud-ml-tpu.iam.gserviceaccount.com"
TPU_AGENT = f"service-{NUMBER}@cloud-tpu.iam.gserviceaccount.com"


class ProjectIam(Server):
    """The fake.

    Attributes:
        bindings: of the policy: role -> members.
        writes: how many policies were set.
        shut_down: AI Platform answers as after its shutdown.
        races: how many of the next policies are rejected, as if they had been changed in between.
    """

    token = TOKEN

    def __init__(self) -> None:
        super().__init__()
        self.bindings: dict[str, list[str]] = {"roles/owner": ["user:owner@example.com"]}
        self.writes = 0
        self.shut_down = False
        self.races = 0

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that make gcloud call this fake; ``folder`` is its home."""
        endpoints = dict.fromkeys(("CLOUDRESOURCEMANAGER", "ML", "TPU"), self.url)
        return gcloud_environment(folder, endpoints, token=TOKEN)

    def policy(self) -> dict[str, Any]:
        """The policy with its etag, which a write has to repeat."""
        bindings = [{"role": role, "members": members} for role, members in self.bindings.items()]
        return {"version": 1, "etag": base64.b64encode(str(self.writes).encode()).decode(), "bindings": bindings}

    def admit(self, path: str) -> None:
        """There is one project; the caller has no permission for others.

        Raises:
            ApiError: (403) it is another project.
        """
        if not re.match(rf"/v\d/projects/{PROJECT}(?![\w-])", path):
            raise ApiError(403, f"The caller does not have permission: {path}")

    def routes(self) -> list[Route]:
        project = rf"/v1/projects/{PROJECT}"
        return [
            ("GET", project, self._describe),
            ("GET", rf"{project}:getConfig", self._config),
            ("POST", rf"/v2/projects/{PROJECT}/locations/[^/]+:generateServiceIdentity",
             lambda **_: {"identity": {"email": TPU_AGENT}}),
            ("POST", rf"{project}:getIamPolicy", lambda **_: self.policy()),
            ("POST", rf"{project}:setIamPolicy", self._set_policy),
        ]  # fmt: skip

    def _describe(self, **_: Any) -> dict[str, Any]:
        return {"projectId": PROJECT, "projectNumber": NUMBER, "lifecycleState": "ACTIVE"}

    def _config(self, **_: Any) -> dict[str, Any]:
        """AI Platform's projects.getConfig.

        Raises:
            ApiError: AI Platform is shut down.
        """
        if self.shut_down:
            words = "Cloud AI Platform has been deprecated. Please use Vertex AI"
            raise ApiError(400, words, word="FAILED_PRECONDITION")
        return {"serviceAccountProject": NUMBER, "config": {"tpuServiceAccount": TPU_ACCOUNT}}

    def _set_policy(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Replace the policy.

        Raises:
            ApiError: the etag is not the current one.
        """
        if self.races or body["policy"].get("etag") != self.policy()["etag"]:
            self.races = max(0, self.races - 1)
            words = "There were concurrent policy changes. Please retry the whole read-modify-write."
            raise ApiError(409, words, word="ABORTED")
        self.bindings = {each["role"]: each["members"] for each in body["policy"]["bindings"]}
        self.writes += 1
        return self.policy()
