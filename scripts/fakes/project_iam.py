"""A fake of what `make authorize-tpu` asks, on 127.0.0.1: a project, its IAM policy, and its TPU service accounts.

Resource Manager v1 as `gcloud projects` (528) uses it, AI Platform's projects.getConfig, and the Cloud TPU API's
generateServiceIdentity.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from scripts.fakes.server import gcloud_environment

PROJECT = "my-project"
NUMBER = "123456789012"
TOKEN = "fake-token"
TPU_ACCOUNT = f"service-{NUMBER}@cloud-ml-tpu.iam.gserviceaccount.com"
TPU_AGENT = f"service-{NUMBER}@cloud-tpu.iam.gserviceaccount.com"


class ProjectIam:
    """The fake, in a thread of this process.

    Attributes:
        bindings: of the policy: role -> members.
        writes: how often a policy was set.
        shut_down: AI Platform answers as it does since January 2025.
        races: the next so many policies are refused, as if somebody else had changed it in between.
    """

    def __init__(self) -> None:
        self.bindings: dict[str, list[str]] = {"roles/owner": ["user:somebody@example.com"]}
        self.writes = 0
        self.shut_down = False
        self.races = 0

    def __enter__(self) -> ProjectIam:
        fake = self

        class Handler(_Handler):
            iam = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that send gcloud here; ``folder`` is its home."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        return gcloud_environment(folder, dict.fromkeys(("CLOUDRESOURCEMANAGER", "ML", "TPU"), url), token=TOKEN)

    def policy(self) -> dict[str, Any]:
        """The policy with its version's mark, which a write must bring back."""
        bindings = [{"role": role, "members": members} for role, members in self.bindings.items()]
        return {"version": 1, "etag": base64.b64encode(str(self.writes).encode()).decode(), "bindings": bindings}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON for a request."""
        if path == f"/v1/projects/{PROJECT}":
            return 200, {"projectId": PROJECT, "projectNumber": NUMBER, "lifecycleState": "ACTIVE"}
        if path == f"/v1/projects/{PROJECT}:getConfig" and method == "GET":
            if self.shut_down:
                words = "Cloud AI Platform has been deprecated. Please use Vertex AI"
                return 400, {"error": {"code": 400, "message": words, "status": "FAILED_PRECONDITION"}}
            return 200, {"serviceAccountProject": NUMBER, "config": {"tpuServiceAccount": TPU_ACCOUNT}}
        if path.startswith(f"/v2/projects/{PROJECT}/locations/") and path.endswith(":generateServiceIdentity"):
            return 200, {"identity": {"email": TPU_AGENT}}
        if path == f"/v1/projects/{PROJECT}:getIamPolicy":
            return 200, self.policy()
        if path == f"/v1/projects/{PROJECT}:setIamPolicy":
            if self.races or body["policy"].get("etag") != self.policy()["etag"]:
                self.races = max(0, self.races - 1)
                words = "There were concurrent policy changes. Please retry the whole read-modify-write."
                return 409, {"error": {"code": 409, "message": words, "status": "ABORTED"}}
            self.bindings = {each["role"]: each["members"] for each in body["policy"]["bindings"]}
            self.writes += 1
            return 200, self.policy()
        words = f"The caller does not have permission: {method} {path}"
        return 403, {"error": {"code": 403, "message": words, "status": "PERMISSION_DENIED"}}


class _Handler(BaseHTTPRequestHandler):
    """Bound to a fake."""

    iam: ProjectIam
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, data = 401, {"error": {"code": 401, "message": "no token", "status": "UNAUTHENTICATED"}}
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            path = unquote(urlsplit(self.path).path)
            status, data = self.iam.answer(self.command, path, json.loads(text) if text else {})
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _handle
