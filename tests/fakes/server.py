"""Common parts of fakes of JSON APIs: a server in a thread, routes, and errors in the format of Google's APIs."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          409: "ALREADY_EXISTS", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED"}  # fmt: skip


class ApiError(Exception):
    """An error response: HTTP status, message, and (field, description) pairs of violations.

    ``word`` is its google.rpc.Code if that is not the one of STATUS: a 409 may be ABORTED
    (https://cloud.google.com/apis/design/errors).
    """

    def __init__(
        self, status: int, message: str, violations: list[tuple[str, str]] | None = None, *, word: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.violations = violations or []
        self.word = word or STATUS.get(status, "UNKNOWN")

    def body(self) -> dict[str, Any]:
        """The response: google.rpc.Status, with google.rpc.BadRequest for the fields."""
        error: dict[str, Any] = {"code": self.status, "message": str(self), "status": self.word}
        if self.violations:
            fields = [{"field": field, "description": words} for field, words in self.violations]
            error["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields}]
        return {"error": error}


def gcloud_environment(folder: Path, endpoints: Mapping[str, str], *, token: str, project: str = "") -> dict[str, str]:
    """Variables that make gcloud call fakes and ignore the user's configuration.

    Args:
        folder: its home.
        endpoints: suffix of CLOUDSDK_API_ENDPOINT_OVERRIDES_ -> address.
        token: its access token.
        project: its project; none if empty.
    """
    return {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}": address for api, address in endpoints.items()} | {
        "HOME": str(folder),
        "CLOUDSDK_CONFIG": str(folder / "gcloud"),
        **({"CLOUDSDK_CORE_PROJECT": project} if project else {}),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
        "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
        "CLOUDSDK_AUTH_ACCESS_TOKEN": token,
    }


#: Method, pattern of the whole path, and handler: called with the groups of the pattern, the body and the query.
Route = tuple[str, str, Callable[..., Any]]


@dataclass
class Upload:
    """A body that is not JSON, as it was sent."""

    content_type: str
    content: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the client left before it had the answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Listener:
    """Requests to a free port, answered while the context manager is open.

    Attributes:
        address: that it listens on.
    """

    address = "127.0.0.1"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class that answers a request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._server = _Server((self.address, 0), self.handler())
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def host(self) -> str:
        """Address and port."""
        return f"{self.address}:{self._server.server_address[1]}"


class Server(Listener):
    """A fake of a JSON API.

    A handler is called as ``handler(*groups, body=..., query=...)``, with {} for a missing body; it returns JSON data
    or text.

    Attributes:
        requests: (method, path, JSON body or None) of every request so far.
        token: the access token that requests need; "" for none, as SDKs with anonymous credentials send none.
        uploads: starts of paths whose bodies are not JSON; their handlers get an :class:`Upload` as body.
    """

    token = ""
    uploads: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []

    def routes(self) -> list[Route]:
        raise NotImplementedError

    def admit(self, path: str) -> None:
        """Called for each request with a valid token before its handler.

        Raises:
            ApiError: the request is not permitted.
        """

    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an error."""
        return error.body()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class that answers a request."""
        fake = self

        class Handler(_Handler):
            server_of: Server = fake

        return Handler

    @property
    def url(self) -> str:
        """http://127.0.0.1:port/."""
        return f"http://{self.host}/"

    def answer(self, method: str, path: str, body: Any, query: Mapping[str, str]) -> Any:
        """The response of the first matching route.

        Raises:
            ApiError: no route matches, or the handler raises it.
        """
        for wanted, pattern, function in self.routes():
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                return function(*match.groups(), body=body, query=query)
        raise ApiError(404, f"{method} {path} is not part of this fake")


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body waits 40 ms for the acknowledgement of the headers

    def log_message(self, *_: object) -> None:
        """Log nothing: the fake keeps the requests."""

    def _send(self, status: int, data: Any) -> None:
        text = isinstance(data, str)
        body = data.encode() if text else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        fake = self.server_of
        upload = path.startswith(fake.uploads)
        try:
            data = json.loads(raw) if raw and not upload else None
            fake.requests.append((self.command, path, data))
            if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
                raise ApiError(401, "Request had invalid authentication credentials.")
            fake.admit(path)
            body = Upload(self.headers.get("Content-Type", ""), raw) if upload else data or {}
            self._send(200, fake.answer(self.command, path, body, query))
        except ApiError as error:
            self._send(error.status, fake.error(error))

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle
