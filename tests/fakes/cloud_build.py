#!/usr/bin/env python3
"""A fake of Cloud Build on 127.0.0.1 that runs builds with the local Docker engine.

It includes Cloud Storage for the upload, Cloud Logging for the log, and Artifact Registry's repositories, as far as
the gcloud CLI (528) uses them.

    with CloudBuild(registry="127.0.0.1:5000") as cloud:
        subprocess.run(["gcloud", "builds", "submit", ...], env=os.environ | cloud.environment(folder))

Steps are run by :mod:`tests.fakes.cloud_build_runner`. Images under `images:` are pushed to ``registry``, which is
used instead of Artifact Registry. Builds that Cloud Build would reject (:mod:`tests.fakes.cloud_build_rules`) are
rejected in its error format, which gcloud prints.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes import cloud_build_rules
from tests.fakes.cloud_build_runner import Result, Runner
from tests.fakes.server import ApiError, Route, Server, Upload, gcloud_environment
from trainyard.sandbox.fakes import storage

PROJECT = "fake-project"
TOKEN = "fake-token"


@dataclass
class Submitted:
    """A submitted build: the API's resource, what runs it, and its log so far."""

    resource: dict[str, Any]
    runner: Runner | None = None
    log: list[str] = field(default_factory=list)
    result: Result | None = None
    done: threading.Event = field(default_factory=threading.Event)


def _now(seconds: float | None = None) -> str:
    moment = (
        datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC) if seconds else datetime.datetime.now(datetime.UTC)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class CloudBuild(Server):
    """The fake.

    Attributes:
        objects: (bucket, name) -> bytes of every uploaded object.
        builds: id -> submitted build.
        repositories: full name -> resource of every Artifact Registry repository.
        triggers: name -> resource of every build trigger.
        denied: patterns of the starts of paths for which the caller has no permission.
    """

    token = TOKEN
    uploads = ("/upload/",)

    def __init__(self, *, registry: str | None = None) -> None:
        """
        Args:
            registry: host:port of a registry to use for every registry of ``images:``.
        """
        super().__init__()
        self._registry = registry
        self.objects: dict[tuple[str, str], bytes] = {}
        self.builds: dict[str, Submitted] = {}
        self.repositories: dict[str, dict[str, Any]] = {}
        self.triggers: dict[str, dict[str, Any]] = {}
        self.denied: set[str] = set()
        self._threads: list[threading.Thread] = []

    def __exit__(self, *error: object) -> None:
        for build in self.builds.values():
            if build.runner and not build.done.is_set():
                build.runner.cancel()
        for thread in self._threads:
            thread.join(timeout=120)
        super().__exit__(*error)

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that make gcloud call this fake; ``folder`` is its home."""
        endpoints = {
            "CLOUDBUILD": self.url,
            "STORAGE": f"{self.url}storage/v1/",  # uploads then go to /upload/storage/v1/
            "LOGGING": self.url,
            "ARTIFACTREGISTRY": self.url,
        }
        return gcloud_environment(folder, endpoints, token=TOKEN, project=PROJECT)

    def admit(self, path: str) -> None:
        """Check the caller's permission.

        Raises:
            ApiError: (403) it is denied.
        """
        if any(re.match(pattern, path) for pattern in self.denied):
            raise ApiError(403, f"Permission denied on {path}")

    def routes(self) -> list[Route]:
        place = r"/v1/(projects/[^/]+/locations/[^/]+)"
        return [
            ("GET", r"/storage/v1/b", lambda *, body, query: {"items": [self._bucket(query.get("prefix", ""))]}),
            ("GET", r"/storage/v1/b/([^/]+)", self._bucket),
            ("POST", r"/upload/storage/v1/b/([^/]+)/o", self._upload),
            ("POST", r"/v1/projects/([^/]+)/locations/([^/]+)/builds", self._create),
            ("GET", rf"{place}/builds/([^/]+)", lambda _, identity, **__: self._build(identity).resource),
            ("POST", rf"{place}/builds/([^/:]+):cancel", self._cancel),
            ("GET", rf"{place}/triggers/([^/]+)", self._trigger),
            ("POST", rf"{place}/triggers", self._create_trigger),
            ("POST", r"/v2/entries:list", self._entries),
            ("POST", rf"{place}/repositories", self._create_repository),
            ("GET", r"/v1/(projects/[^/]+/locations/[^/]+/repositories/[^/]+)", self._repository),
            ("PATCH", r"/v1/(projects/[^/]+/locations/[^/]+/repositories/[^/]+)", self._patch_repository),
        ]

    # --- Cloud Storage ---------------------------------------------------------------------------------------------

    def _bucket(self, name: str, **_: Any) -> dict[str, Any]:
        return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "projectNumber": "123456789012"}

    def _upload(self, bucket: str, *, body: Upload, query: Mapping[str, str]) -> dict[str, Any]:
        """A multipart upload.

        Raises:
            ApiError: it is malformed.
        """
        try:
            metadata, media = storage.multipart(body.content_type, body.content)
        except storage.Refused as error:
            raise ApiError(error.status, str(error)) from None
        name = query.get("name") or metadata["name"]
        self.objects[bucket, name] = media
        digest = base64.b64encode(hashlib.md5(media, usedforsecurity=False).digest()).decode()
        return {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(media)), "generation": "1",
                "md5Hash": digest, "id": f"{bucket}/{name}/1", "etag": "YWJj"}  # fmt: skip

    # --- Cloud Build -----------------------------------------------------------------------------------------------

    def _create(self, project: str, location: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Start a build; the operation that gcloud expects.

        Raises:
            ApiError: the build is invalid, or its source was not uploaded.
        """
        identity = str(uuid.uuid4())
        source = (body.get("source") or {}).get("storageSource")
        archive = None
        if source:
            archive = self.objects.get((source["bucket"], source["object"]))
            if archive is None:
                raise ApiError(404, f"source gs://{source['bucket']}/{source['object']} does not exist")
        built_in = {"PROJECT_ID": project, "PROJECT_NUMBER": "123456789012", "BUILD_ID": identity, "LOCATION": location}
        violations = cloud_build_rules.violations(body)
        if violations:
            raise ApiError(400, violations[0])
        resource = body | {
            "id": identity,
            "projectId": project,
            "status": "WORKING",
            "createTime": _now(),
            "startTime": _now(),
            "logUrl": f"{self.url}log/{identity}",
            "name": f"projects/{project}/locations/{location}/builds/{identity}",
        }
        submitted = Submitted(resource)
        source = io.BytesIO(archive) if archive else None
        submitted.runner = Runner(body, built_in, source, submitted.log.append, self._registry)
        self.builds[identity] = submitted
        thread = threading.Thread(target=self._run, args=[submitted], daemon=True)
        self._threads.append(thread)
        thread.start()
        return {
            "name": f"operations/build/{project}/{identity}",
            "metadata": {
                "@type": "type.googleapis.com/google.devtools.cloudbuild.v1.BuildOperationMetadata",
                "build": resource,
            },
        }

    def _run(self, submitted: Submitted) -> None:
        assert submitted.runner is not None
        resource = submitted.resource
        try:
            result = submitted.runner.run()
        except Exception as error:  # of any kind: gcloud waits for the end of the build
            result = Result("INTERNAL_ERROR", repr(error))
        submitted.result = result
        steps = []
        for step, outcome in zip(resource["steps"], submitted.runner.outcomes, strict=True):
            ended = {"timing": {"startTime": _now(outcome.started), "endTime": _now(outcome.ended)}}
            steps.append(step | {"status": outcome.status} | (ended if outcome.ended else {}))
        results = {
            "images": [{"name": name, "digest": digest} for name, digest in result.images.items()],
            "buildStepOutputs": [base64.b64encode(outcome.output).decode() for outcome in submitted.runner.outcomes],
        }
        submitted.resource = resource | {"steps": steps, "results": results, "finishTime": _now()}
        if result.detail:
            submitted.log.append(f"ERROR: {result.detail}")
            submitted.resource |= {
                "statusDetail": result.detail,
                "failureInfo": {"type": "USER_BUILD_STEP", "detail": result.detail},
            }
        submitted.log.append("DONE" if result.status == "SUCCESS" else result.status)
        submitted.resource["status"] = result.status
        submitted.done.set()

    def _build(self, identity: str) -> Submitted:
        if identity not in self.builds:
            raise ApiError(404, f"build {identity} not found")
        return self.builds[identity]

    def _cancel(self, _parent: str, identity: str, **_: Any) -> dict[str, Any]:
        submitted = self._build(identity)
        if submitted.runner and not submitted.done.is_set():
            submitted.runner.cancel()
            submitted.done.wait(timeout=60)
        return submitted.resource

    def _entries(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        """Cloud Logging's entries:list, with the filter that `gcloud builds log` sends."""
        match = re.search(r'build_id="([^"]+)"', body.get("filter", ""))
        lines = self._build(match[1]).log if match else []
        return {
            "entries": [
                {"textPayload": line, "insertId": str(number), "logName": f"projects/{PROJECT}/logs/cloudbuild"}
                for number, line in enumerate(lines)
            ]
        }

    def _trigger(self, _parent: str, name: str, **_: Any) -> dict[str, Any]:
        if name not in self.triggers:
            raise ApiError(404, f"trigger {name} not found")
        return self.triggers[name]

    def _create_trigger(self, parent: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        self.triggers[body["name"]] = body | {
            "id": str(uuid.uuid4()),
            "resourceName": f"{parent}/triggers/{body['name']}",
        }
        return self.triggers[body["name"]]

    # --- Artifact Registry -------------------------------------------------------------------------------------------

    def _create_repository(self, parent: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        name = query["repositoryId"]
        full = f"{parent}/repositories/{name}"
        if full in self.repositories:
            raise ApiError(409, "the repository already exists")
        if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", name):
            raise ApiError(400, f'invalid repository id "{name}"')
        self.repositories[full] = body | {"name": full}
        return {
            "name": f"{parent}/operations/{uuid.uuid4()}",
            "done": True,
            "response": {"@type": "type.googleapis.com/google.devtools.artifactregistry.v1.Repository"}
            | self.repositories[full],
        }

    def _repository(self, name: str, **_: Any) -> dict[str, Any]:
        if name not in self.repositories:
            raise ApiError(404, f'repository "{name}" not found')
        return self.repositories[name]

    def _patch_repository(self, name: str, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        found = self._repository(name)
        for key in query.get("updateMask", "").split(","):
            found[key] = body.get(key)
        return found
