"""A registry on 127.0.0.1 with token authentication, which keeps what it stores in memory and counts requests.

OCI distribution specification: https://github.com/opencontainers/distribution-spec/blob/main/spec.md
Tokens: https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.fakes.server import Listener

#: Statuses and messages of the specification's error codes.
ERRORS = {
    "BLOB_UNKNOWN": 404,
    "BLOB_UPLOAD_UNKNOWN": 404,
    "DIGEST_INVALID": 400,
    "MANIFEST_BLOB_UNKNOWN": 404,
    "MANIFEST_INVALID": 400,
    "MANIFEST_UNKNOWN": 404,
    "UNAUTHORIZED": 401,
    "TAG_IMMUTABLE": 400,
}


class RegistryError(Exception):
    """An error response; its message is the code."""


def sha256(data: bytes) -> str:
    """The digest of ``data``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Answer:
    """What a registry sends; ``seconds``: between single bytes of the body."""

    status: int
    body: bytes
    headers: dict[str, str]
    seconds: float = 0


class Registry(Listener):
    """A registry as a context manager.

    Attributes:
        user, password: credentials that tokens are given for; no token is needed if empty.
        delay: seconds that every request takes longer.
        authorizations: the credentials of every request; empty for a request without.
        requests: method and path of every request, those for tokens too.
        received: bytes of the bodies of all requests.
        blobs: digest -> content, ``manifests``: digest -> media type and content, ``tags``: tag -> digest.
        immutable: whether tags cannot be moved.
        most_at_once: most requests that were open at a time.
        referrers_api: whether it has the referrers API of OCI 1.1; docker-registry 2.8 has not.
        referrers_per_page: the most descriptors in one answer of that API.
        after: called with method and path of every request, and the answer, before it is sent; returns what is sent.
        before: called with method and path of every request before it is answered; may raise RegistryError or
            ConnectionError, which closes the connection.
    """

    def __init__(self, *, user: str = "", password: str = "", delay: float = 0) -> None:
        self.user, self.password, self.delay = user, password, delay
        self.requests: list[str] = []
        self.received = 0
        self.most_at_once = 0
        self.open = 0
        self.lock = threading.Lock()
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}
        self.immutable = False
        self.referrers_api = True
        self.referrers_per_page = 100
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.after: Callable[[str, str, Answer], Answer] = lambda method, path, answer: answer
        self.authorizations: list[str] = []
        self.tokens: set[str] = set()
        self.uploads: set[str] = set()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class that answers a request."""
        fake = self

        class Handler(_Handler):
            registry: Registry = fake

        return Handler

    def docker_config(self) -> dict[str, Any]:
        """The config.json that ``docker login`` writes for the credentials."""
        auth = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"auths": {self.host: {"auth": auth}}}

    def put_manifest(self, version: str, media_type: str, body: bytes) -> str:
        """Store a manifest under a tag or its digest; the digest.

        Raises:
            RegistryError: a blob or manifest that it names is missing, or the tag is immutable.
        """
        document, digest = json.loads(body), sha256(body)
        if ":" in version and version != digest:
            raise RegistryError("DIGEST_INVALID")
        named = [one["digest"] for one in [*document.get("layers", []), *filter(None, [document.get("config")])]]
        if any(one not in self.blobs for one in named):
            raise RegistryError("MANIFEST_BLOB_UNKNOWN")
        if any(one["digest"] not in self.manifests for one in document.get("manifests", [])):
            raise RegistryError("MANIFEST_INVALID")
        if self.immutable and self.tags.get(version, digest) != digest:
            raise RegistryError("TAG_IMMUTABLE")
        self.manifests[digest] = (media_type, body)
        if ":" not in version:
            self.tags[version] = digest
        return digest

    def referrers(self, subject: str) -> list[dict[str, Any]]:
        """The descriptors of the manifests whose subject is a digest.

        https://github.com/opencontainers/distribution-spec/blob/main/spec.md#listing-referrers
        """
        found = []
        for digest, (media_type, body) in self.manifests.items():
            document = json.loads(body)
            if (document.get("subject") or {}).get("digest") != subject:
                continue
            one = {"mediaType": media_type, "digest": digest, "size": len(body)}
            kind = document.get("artifactType") or (document.get("config") or {}).get("mediaType")
            found.append(
                one
                | ({"artifactType": kind} if kind else {})
                | ({"annotations": document["annotations"]} if document.get("annotations") else {})
            )
        return found


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body waits 40 ms for the acknowledgement of the headers

    def log_message(self, *_: object) -> None:
        """Log nothing: the registry keeps the requests."""

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        answer = self.registry.after(self.command, self.path, Answer(status, body, headers or {}))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        step = 1 if answer.seconds else len(answer.body) or 1
        for start in range(0, len(answer.body), step):
            self.wfile.write(answer.body[start : start + step])
            time.sleep(answer.seconds)

    def _handle(self) -> None:
        fake = self.registry
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with fake.lock:
            fake.requests.append(f"{self.command} {url.path}")
            fake.authorizations.append(self.headers.get("Authorization", ""))
            fake.received += len(body)
            fake.open += 1
            fake.most_at_once = max(fake.most_at_once, fake.open)
        try:
            time.sleep(fake.delay)
            fake.before(self.command, url.path)
            if url.path == "/token":
                self._token()
                return
            if fake.user and self.headers.get("Authorization", "").removeprefix("Bearer ") not in fake.tokens:
                raise RegistryError("UNAUTHORIZED")
            self._answer(url.path, query, body)
        except ConnectionError:
            self.close_connection = True
        except RegistryError as error:
            self._refuse(str(error))
        finally:
            with fake.lock:
                fake.open -= 1

    def _refuse(self, code: str) -> None:
        challenge = f'Bearer realm="http://{self.registry.host}/token",service="fake",scope="repository:x:pull"'
        headers = {"WWW-Authenticate": challenge} if code == "UNAUTHORIZED" else {}
        text = code.replace("_", " ").lower()
        body = json.dumps({"errors": [{"code": code, "message": text}]}).encode()
        self._send(ERRORS[code], body, headers | {"Content-Type": "application/json"})

    def _token(self) -> None:
        expected = base64.b64encode(f"{self.registry.user}:{self.registry.password}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {expected}":
            raise RegistryError("UNAUTHORIZED")
        token = secrets.token_hex(8)
        self.registry.tokens.add(token)
        self._send(200, json.dumps({"token": token}).encode(), {"Content-Type": "application/json"})

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> None:
        fake = self.registry
        if path.endswith("/tags/list"):
            self._send(200, json.dumps({"tags": sorted(fake.tags)}).encode(), {"Content-Type": "application/json"})
            return
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs|blobs/uploads|referrers)/([^/]*)", path)
        if not found:
            raise RegistryError("MANIFEST_UNKNOWN")
        name, kind, version = found.groups()
        match (self.command, kind):
            case ("POST", "blobs/uploads"):
                session = secrets.token_hex(8)
                fake.uploads.add(session)
                where = f"http://{fake.host}/v2/{name}/blobs/uploads/{session}?_state={'x' * 100}"
                self._send(202, headers={"Location": where})
            case ("PUT", "blobs/uploads"):
                if version not in fake.uploads:
                    raise RegistryError("BLOB_UPLOAD_UNKNOWN")
                if sha256(body) != query["digest"]:
                    raise RegistryError("DIGEST_INVALID")
                fake.blobs[query["digest"]] = body
                self._send(201, headers={"Location": f"/v2/{name}/blobs/{query['digest']}"})
            case ("GET" | "HEAD", "blobs"):
                if version not in fake.blobs:
                    raise RegistryError("BLOB_UNKNOWN")
                self._send(200, fake.blobs[version], {"Content-Type": "application/octet-stream"})
            case ("GET" | "HEAD", "manifests"):
                digest = fake.tags.get(version, version)
                if digest not in fake.manifests:
                    raise RegistryError("MANIFEST_UNKNOWN")
                media_type, content = fake.manifests[digest]
                self._send(200, content, {"Content-Type": media_type, "Docker-Content-Digest": digest})
            case ("PUT", "manifests"):
                self._put_manifest(version, body)
            case ("GET", "referrers"):
                self._referrers(path, version, query)
            case _:
                raise RegistryError("MANIFEST_INVALID")

    def _put_manifest(self, version: str, body: bytes) -> None:
        digest = self.registry.put_manifest(version, self.headers["Content-Type"], body)
        subject = (json.loads(body).get("subject") or {}).get("digest")
        processed = {"OCI-Subject": subject} if subject and self.registry.referrers_api else {}
        self._send(201, headers={"Docker-Content-Digest": digest, **processed})

    def _referrers(self, path: str, subject: str, query: dict[str, str]) -> None:
        if not self.registry.referrers_api:
            raise RegistryError("MANIFEST_UNKNOWN")
        if not re.fullmatch("sha256:[0-9a-f]{64}", subject):
            raise RegistryError("DIGEST_INVALID")
        wanted = query.get("artifactType")
        found = [one for one in self.registry.referrers(subject) if wanted in (None, one.get("artifactType"))]
        first, size = int(query.get("first", 0)), self.registry.referrers_per_page
        headers = {"Content-Type": "application/vnd.oci.image.index.v1+json"}
        if wanted:
            headers["OCI-Filters-Applied"] = "artifactType"
        if first + size < len(found):
            following = urlencode({**query, "first": first + size})
            headers["Link"] = f'<{path}?{following}>; rel="next"'
        page = {"schemaVersion": 2, "mediaType": headers["Content-Type"], "manifests": found[first : first + size]}
        self._send(200, json.dumps(page).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = _handle
