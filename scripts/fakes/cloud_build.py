#!/usr/bin/env python3
"""A fake of Cloud Build on 127.0.0.1 that really builds.

With it come Cloud Storage for the upload, Cloud Logging for the log, and Artifact Registry's repositories, as far as
the gcloud CLI (528) uses them.

    with CloudBuild(registry="127.0.0.1:5000") as cloud:
        subprocess.run(["gcloud", "builds", "submit", ...], env=os.environ | cloud.environment(folder))

A submitted source is unpacked and its steps are run by scripts/cloud_executor.py with the local Docker engine; images
under `images:` go to ``registry``, a real one, which stands for Artifact Registry. What the real server refuses is
refused with its error format, which gcloud shows.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from scripts import cloud_config
from scripts.cli import StepFailed, UserError
from scripts.cloud_executor import CANCELLED, INTERNAL, Executor, Result
from scripts.fakes.server import ApiError, gcloud_environment

PROJECT = "fake-project"
TOKEN = "fake-token"


@dataclass
class Submitted:
    """A build that was submitted: the API's resource, what runs it, and its log so far."""

    resource: dict[str, Any]
    executor: Executor | None = None
    log: list[str] = field(default_factory=list)
    result: Result | None = None
    done: threading.Event = field(default_factory=threading.Event)


def _now(seconds: float | None = None) -> str:
    moment = (
        datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC) if seconds else datetime.datetime.now(datetime.UTC)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def multipart(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes]:
    """The metadata and the bytes of a multipart/related upload, as Cloud Storage's JSON API takes it.

    gcloud puts its boundary between single quotes, which the email package does not know.
    """
    match = re.search(r"boundary=['\"]?([^'\";]+)", content_type)
    if not match:
        raise ApiError(400, "no boundary in Content-Type")
    parts = body.split(b"--" + match[1].encode())[1:-1]
    contents = [part.partition(b"\n\n" if b"\r\n\r\n" not in part else b"\r\n\r\n")[2] for part in parts]
    if len(contents) != 2:
        raise ApiError(400, f"{len(contents)} parts where metadata and media were expected")
    # What ends a part is one line break that belongs to the next boundary.
    media = contents[1].removesuffix(b"\r\n") if contents[1].endswith(b"\r\n") else contents[1].removesuffix(b"\n")
    return json.loads(contents[0]), media


class CloudBuild:
    """The fake, in a thread of this process.

    Attributes:
        requests: (method, path, JSON body or None) of every request so far.
        objects: (bucket, name) -> bytes of every uploaded object.
        builds: id -> what was submitted.
        repositories: full name -> resource of every Artifact Registry repository.
        triggers: name -> resource of every build trigger.
    """

    def __init__(self, *, registry: str | None = None, images: Mapping[str, str] | None = None) -> None:
        """
        Args:
            registry: host:port of a registry that stands for every registry of ``images:``.
            images: image names -> local images that stand for them.
        """
        self._registry, self._images = registry, dict(images or {})
        self.requests: list[tuple[str, str, Any]] = []
        self.objects: dict[tuple[str, str], bytes] = {}
        self.builds: dict[str, Submitted] = {}
        self.repositories: dict[str, dict[str, Any]] = {}
        self.triggers: dict[str, dict[str, Any]] = {}
        self.denied: set[str] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> CloudBuild:
        fake = self

        class Handler(_Handler):
            cloud = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for build in self.builds.values():
            if build.executor and not build.done.is_set():
                build.executor.cancel()
        for thread in self._threads:
            thread.join(timeout=120)
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that send gcloud here; ``folder`` is its home."""
        endpoints = {
            "CLOUDBUILD": self.url,
            "STORAGE": f"{self.url}storage/v1/",  # uploads then go to /upload/storage/v1/
            "LOGGING": self.url,
            "ARTIFACTREGISTRY": self.url,
        }
        return gcloud_environment(folder, endpoints, token=TOKEN, project=PROJECT)

    # --- Cloud Storage ---------------------------------------------------------------------------------------------

    def bucket(self, name: str) -> dict[str, Any]:
        return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "projectNumber": "123456789012"}

    def upload(self, bucket: str, name: str, media: bytes) -> dict[str, Any]:
        self.objects[bucket, name] = media
        digest = base64.b64encode(hashlib.md5(media, usedforsecurity=False).digest()).decode()
        return {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(media)), "generation": "1",
                "md5Hash": digest, "id": f"{bucket}/{name}/1", "etag": "YWJj"}  # fmt: skip

    # --- Cloud Build -----------------------------------------------------------------------------------------------

    def create(self, project: str, location: str, body: dict[str, Any]) -> dict[str, Any]:
        """Start a build; the operation that gcloud expects.

        Raises:
            ApiError: the configuration breaks a rule of the server, or its source was never uploaded.
        """
        identity = str(uuid.uuid4())
        source = (body.get("source") or {}).get("storageSource")
        archive = None
        if source:
            archive = self.objects.get((source["bucket"], source["object"]))
            if archive is None:
                raise ApiError(404, f"source gs://{source['bucket']}/{source['object']} does not exist")
        built_in = {"PROJECT_ID": project, "PROJECT_NUMBER": "123456789012", "BUILD_ID": identity, "LOCATION": location}
        config = {key: value for key, value in body.items() if key in cloud_config.BUILD_KEYS}
        try:
            build = cloud_config.load(config, where="build", built_in=built_in)
        except UserError as error:
            raise ApiError(400, f"invalid build: {error}") from None
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
        submitted.executor = Executor(
            build,
            io.BytesIO(archive) if archive else None,
            write=submitted.log.append,
            images=self._images,
            push_to=self._registry,
        )
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
        assert submitted.executor is not None
        resource = submitted.resource
        try:
            result = submitted.executor.run()
        except (UserError, StepFailed) as error:
            result = Result(status="FAILURE", detail=str(error), steps=submitted.executor.outcomes)
        except Exception as error:  # whatever it is, gcloud must be told that the build has ended
            result = Result(status=INTERNAL, detail=repr(error), steps=submitted.executor.outcomes)
        submitted.result = result
        steps = []
        for step, outcome in zip(resource["steps"], result.steps, strict=True):
            ended = {"timing": {"startTime": _now(outcome.started), "endTime": _now(outcome.ended)}}
            steps.append(step | {"status": outcome.status} | (ended if outcome.ended else {}))
        results = {
            "images": [{"name": name, "digest": digest} for name, digest in result.images.items()],
            "buildStepOutputs": [base64.b64encode(outcome.output).decode() for outcome in result.steps],
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

    def build(self, identity: str) -> Submitted:
        if identity not in self.builds:
            raise ApiError(404, f"build {identity} not found")
        return self.builds[identity]

    def cancel(self, identity: str) -> dict[str, Any]:
        submitted = self.build(identity)
        if submitted.executor and not submitted.done.is_set():
            submitted.executor.cancel(CANCELLED)
            submitted.done.wait(timeout=60)
        return submitted.resource

    def entries(self, body: dict[str, Any]) -> dict[str, Any]:
        """Cloud Logging's entries:list, for the filter that `gcloud builds log` sends."""
        match = re.search(r'build_id="([^"]+)"', body.get("filter", ""))
        lines = self.build(match[1]).log if match else []
        return {
            "entries": [
                {"textPayload": line, "insertId": str(number), "logName": f"projects/{PROJECT}/logs/cloudbuild"}
                for number, line in enumerate(lines)
            ]
        }

    def trigger(self, name: str) -> dict[str, Any]:
        if name not in self.triggers:
            raise ApiError(404, f"trigger {name} not found")
        return self.triggers[name]

    def create_trigger(self, parent: str, body: dict[str, Any]) -> dict[str, Any]:
        self.triggers[body["name"]] = body | {
            "id": str(uuid.uuid4()),
            "resourceName": f"{parent}/triggers/{body['name']}",
        }
        return self.triggers[body["name"]]

    # --- Artifact Registry -------------------------------------------------------------------------------------------

    def create_repository(self, parent: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
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

    def repository(self, name: str) -> dict[str, Any]:
        if name not in self.repositories:
            raise ApiError(404, f'repository "{name}" not found')
        return self.repositories[name]

    def patch_repository(self, name: str, mask: str, body: dict[str, Any]) -> dict[str, Any]:
        found = self.repository(name)
        for key in mask.split(","):
            found[key] = body.get(key)
        return found


Route = Callable[..., Any]


class _Handler(BaseHTTPRequestHandler):
    """Paths of the APIs -> methods of the fake."""

    cloud: CloudBuild
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        try:
            upload = path.startswith("/upload/")
            data = None if upload or not body else json.loads(body)
            self.cloud.requests.append((self.command, path, data))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise ApiError(401, "Request had invalid authentication credentials.")
            if any(re.match(pattern, path) for pattern in self.cloud.denied):
                raise ApiError(403, f"Permission denied on {path}")
            if upload:
                bucket = path.split("/")[5]
                metadata, media = multipart(body, self.headers.get("Content-Type", ""))
                self._answer(200, self.cloud.upload(bucket, query.get("name") or metadata["name"], media))
                return
            self._answer(200, self._route(path, query, data or {}))
        except ApiError as error:
            self._answer(error.status, error.body())

    def _route(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        cloud, method = self.cloud, self.command
        routes: list[tuple[str, str, Route]] = [
            ("GET", r"/storage/v1/b", lambda: {"items": [cloud.bucket(query.get("prefix", ""))]}),
            ("GET", r"/storage/v1/b/([^/]+)", cloud.bucket),
            ("POST", r"/v1/projects/([^/]+)/locations/([^/]+)/builds",
             lambda project, location: cloud.create(project, location, body)),
            ("GET", r"/v1/projects/[^/]+/locations/[^/]+/builds/([^/]+)", lambda i: cloud.build(i).resource),
            ("POST", r"/v1/projects/[^/]+/locations/[^/]+/builds/([^/:]+):cancel", cloud.cancel),
            ("GET", r"/v1/projects/[^/]+/locations/[^/]+/triggers/([^/]+)", cloud.trigger),
            ("POST", r"/v1/(projects/[^/]+/locations/[^/]+)/triggers",
             lambda parent: cloud.create_trigger(parent, body)),
            ("POST", r"/v2/entries:list", lambda: cloud.entries(body)),
            ("POST", r"/v1/(projects/[^/]+/locations/[^/]+)/repositories",
             lambda parent: cloud.create_repository(parent, query["repositoryId"], body)),
            ("GET", r"/v1/(projects/[^/]+/locations/[^/]+/repositories/[^/]+)", cloud.repository),
            ("PATCH", r"/v1/(projects/[^/]+/locations/[^/]+/repositories/[^/]+)",
             lambda name: cloud.patch_repository(name, query.get("updateMask", ""), body)),
        ]  # fmt: skip
        for wanted, pattern, action in routes:
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                return action(*match.groups())
        raise ApiError(404, f"{method} {path} is not part of this fake")

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle
