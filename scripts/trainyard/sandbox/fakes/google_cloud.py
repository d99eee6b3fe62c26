#!/usr/bin/env python3
"""A fake Google Cloud on one port: metadata server, access tokens, Cloud TPU API v1 and v2, discovery documents.

One self-contained file that needs only the standard library: it runs in a container of any image with Python,

    python3 -I -S google_cloud.py --host 0.0.0.0 --port 8080 --states CREATING,CREATING,READY

or inside a test:

    with GoogleCloud(states=["CREATING", "READY"]) as cloud:
        os.environ["GCE_METADATA_HOST"] = cloud.address
        os.environ["TPU_API_ENDPOINT"] = cloud.url

The real google-auth, cloud-tpu-client and TensorFlow's TPUClusterResolver accept it (tests/cloud). It is as strict as
the real servers where clients have made mistakes: metadata requests need `Metadata-Flavor: Google`, API requests the
token that the metadata server issued. `POST /token` is the token_uri of service-account keys.

`GET /_fake/requests` lists the requests, as JSON: {"requests": [{"kind", "method", "path", "status"}, ...],
"counts": {kind: number}}; requests for the node carry its "state" too. Kinds: probe, metadata, token, discovery,
node, other.

Faults are injected in order, one into each request of a kind; `*N` repeats one, `*` repeats it without end:
`--fault node=status:503*2 --fault token=delay:1.5`. Forms: status:CODE, delay:SECONDS, drip:SECONDS (one byte a
pause), garbage (bytes that are not JSON), text (a page instead of JSON), empty, truncate, drop (no answer), nothttp.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = ("probe", "metadata", "token", "discovery", "node", "other")
FAULTS = ("status", "delay", "drip", "garbage", "text", "empty", "truncate", "drop", "nothttp")
GARBAGE = b"\x00\xff{[not json"
METADATA_ROOT = "/computeMetadata/v1/"
EMAIL = "trainer@fake-project.iam.gserviceaccount.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PROJECT_NUMBER = "123456789012"
STATUS_NAMES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
                429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}  # fmt: skip


@dataclass
class Fault:
    """One way for an answer to go wrong.

    Attributes:
        form: one of FAULTS.
        argument: status code or seconds, as text; "" without one.
        left: requests it still applies to; -1: all.
    """

    form: str
    argument: str = ""
    left: int = 1

    @classmethod
    def parse(cls, text: str) -> Fault:
        """A fault out of "status:503*2". Raises ValueError for an unknown form or a bad number."""
        body, star, count = text.partition("*")
        form, _, argument = body.partition(":")
        if form not in FAULTS:
            raise ValueError(f"unknown fault {form!r}: use one of {', '.join(FAULTS)}")
        if form == "status" and not 100 <= int(argument) <= 599:
            raise ValueError(f"not an HTTP status: {argument!r}")
        if form in ("delay", "drip") and float(argument) < 0:
            raise ValueError(f"seconds must not be negative: {argument!r}")
        return cls(form, argument, (int(count) if count else -1) if star else 1)


@dataclass(frozen=True)
class Answer:
    """Hold an HTTP answer: its status, its bytes, and the value of Content-Type."""

    status: int
    body: bytes
    content_type: str = "application/json"

    @classmethod
    def of_json(cls, data: object, status: int = 200) -> Answer:
        """JSON. The content type has no charset: oauth2client compares it with `application/json`."""
        return cls(status, json.dumps(data).encode())

    @classmethod
    def of_text(cls, text: str) -> Answer:
        """One metadata value."""
        return cls(200, text.encode(), "application/text")

    @classmethod
    def of_error(cls, status: int, message: str) -> Answer:
        """An error in the format of Google's APIs (https://cloud.google.com/apis/design/errors)."""
        error = {"code": status, "message": message, "status": STATUS_NAMES.get(status, "UNKNOWN")}
        return cls.of_json({"error": error}, status)


@dataclass
class GoogleCloud:
    """The fake, startable in a thread.

    Attributes:
        host, port: where to listen; port 0 takes a free one, and is that one then.
        project, zone, node: of the only TPU node; there is none if `node` is "".
        states: its state at the first, second, ... request; the last one stays.
        endpoints: "ip:port" of its workers, reported once it is READY.
        health: its health once it is READY; "" leaves it out.
        accelerator_type: such as "v3-8".
        attributes: instance attributes of the metadata server, such as "tpu-env".
        host_attributes: host name -> attributes that only this host sees; hosts are distinguished by their address.
        node_fields: members that replace those of the node's JSON; None removes one.
        token: the access token.
        faults: kind -> faults, as text, in order.
    """

    host: str = "127.0.0.1"
    port: int = 0
    project: str = "test-project"
    zone: str = "us-central1-c"
    node: str = "tpu-a"
    states: Sequence[str] = ("READY",)
    endpoints: Sequence[str] = ("10.1.2.3:8470",)
    health: str = "HEALTHY"
    accelerator_type: str = "v3-8"
    attributes: Mapping[str, str] = field(default_factory=dict)
    node_fields: Mapping[str, object] = field(default_factory=dict)
    token: str = "ya29.fake-access-token"
    faults: Mapping[str, Iterable[str]] = field(default_factory=dict)
    host_attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests: list[dict[str, object]] = []
        self._faults = {kind: [Fault.parse(text) for text in texts] for kind, texts in self.faults.items()}
        self._polls = 0
        self._lock = threading.Lock()
        if not self.states:
            raise ValueError("states: at least one is needed")
        for kind in self._faults:
            if kind not in KINDS:
                raise ValueError(f"unknown kind of request {kind!r}: use one of {', '.join(KINDS)}")
        for endpoint in self.endpoints:
            _address(endpoint)
        self._server = ThreadingHTTPServer((self.host, self.port), type("Handler", (_Handler,), {"cloud": self}))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True)

    @property
    def address(self) -> str:
        """host:port, for GCE_METADATA_HOST."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """http://host:port, for TPU_API_ENDPOINT."""
        return f"http://{self.address}"

    def serve(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever()

    def __enter__(self) -> GoogleCloud:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def counts(self) -> dict[str, int]:
        """How many requests of each kind there were; kinds without any are left out."""
        with self._lock:
            kinds = [str(request["kind"]) for request in self.requests]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}

    def handle(self, handler: _Handler) -> None:
        """Answer a request, with the next fault of its kind, and record it."""
        url = urlsplit(handler.path)
        path = url.path
        kind = _kind(path)
        if path == "/_fake/requests":
            handler.send(Answer.of_json({"requests": list(self.requests), "counts": self.counts()}))
            return
        fault = self._next_fault(kind)
        answer = self._answer(kind, path, parse_qs(url.query), handler)
        if fault and fault.form == "status":
            answer = Answer.of_error(int(fault.argument), f"injected {fault.argument}")
        with self._lock:
            entry = {"kind": kind, "method": handler.command, "path": handler.path, "status": answer.status}
            if kind == "node" and answer.status == 200:
                entry["state"] = json.loads(answer.body).get("state", "")
            if fault:
                entry["fault"] = fault.form
            self.requests.append(entry)
        handler.send(answer, fault)

    def _next_fault(self, kind: str) -> Fault | None:
        with self._lock:
            queue = self._faults.get(kind, [])
            if not queue:
                return None
            fault = queue[0]
            if fault.left > 0:
                fault.left -= 1
                if fault.left == 0:
                    queue.pop(0)
            return fault

    def _answer(self, kind: str, path: str, query: dict[str, list[str]], handler: _Handler) -> Answer:
        if kind == "probe":
            return Answer(200, b"computeMetadata/\n", "application/text")
        if path == "/token":
            return self._account("token", query)
        if kind in ("metadata", "token"):
            if handler.headers.get("Metadata-Flavor") != "Google":
                return Answer(403, b"Missing Metadata-Flavor:Google header.\n", "text/html")
            return self._metadata(path[len(METADATA_ROOT) :], query, str(handler.client_address[0]))
        if kind == "discovery":
            version = query.get("version", [path.rstrip("/").split("/")[-2]])[0]
            return Answer.of_json(discovery_document(version, f"http://{handler.headers.get('Host')}/"))
        if kind == "node":
            if handler.headers.get("Authorization") != f"Bearer {self.token}":
                return Answer.of_error(401, "Request had invalid authentication credentials.")
            return self._node(path)
        return Answer.of_error(404, f"no such page: {path}")

    def _metadata(self, path: str, query: dict[str, list[str]], client: str) -> Answer:
        accounts = "instance/service-accounts/"
        values = {
            "project/project-id": self.project,
            "project/numeric-project-id": PROJECT_NUMBER,
            "instance/zone": f"projects/{PROJECT_NUMBER}/zones/{self.zone}",
            "instance/id": "1234567890123456789",
            "instance/name": "fake-instance",
            "instance/hostname": f"fake-instance.{self.zone}.c.{self.project}.internal",
            "instance/network-interfaces/0/ip": "10.128.1.2",
            "universe/universe-domain": "googleapis.com",
        }
        attributes = {**self.attributes, **self._attributes_of(client)}
        values.update({f"instance/attributes/{name}": value for name, value in attributes.items()})
        if path in values:
            return Answer.of_text(values[path])
        if path.startswith(accounts):
            account, _, what = path[len(accounts) :].partition("/")
            if account in ("default", EMAIL):
                return self._account(what, query)
        return Answer(404, b"not found\n", "text/html")

    def _attributes_of(self, client: str) -> Mapping[str, str]:
        """The attributes of the host with this address. Looked up each time: it changes when a host is restarted."""
        for host, attributes in self.host_attributes.items():
            try:
                if client in socket.gethostbyname_ex(host)[2]:
                    return attributes
            except OSError:
                continue  # not running now
        return {}

    def _account(self, what: str, query: dict[str, list[str]]) -> Answer:
        if what == "token":
            return Answer.of_json({"access_token": self.token, "expires_in": 3599, "token_type": "Bearer"})
        if what == "email":
            return Answer.of_text(EMAIL)
        if what == "scopes":
            return Answer.of_text(SCOPE)
        if what == "" and query.get("recursive", [""])[0].lower() == "true":
            return Answer.of_json({"aliases": ["default"], "email": EMAIL, "scopes": [SCOPE]})
        if what == "":
            return Answer.of_text("aliases\nemail\nidentity\nscopes\ntoken\n")
        return Answer(404, b"not found\n", "text/html")

    def _node(self, path: str) -> Answer:
        parts = path.strip("/").split("/")
        version, parent = parts[0], f"projects/{self.project}/locations/{self.zone}"
        name = f"{parent}/nodes/{self.node}"
        resource = "/".join(parts[1:])
        if resource == f"{parent}/nodes":
            return Answer.of_json({"nodes": [self._node_json(version, name)]} if self.node else {})
        if not self.node or resource != name:
            return Answer.of_error(404, f"Resource '{resource}' was not found")
        return Answer.of_json(self._node_json(version, name))

    def _node_json(self, version: str, name: str) -> dict[str, object]:
        """The node, one state further at each request; the fields of v1 or v2."""
        with self._lock:
            state = self.states[min(self._polls, len(self.states) - 1)]
            self._polls += 1
        data: dict[str, object] = {"name": name, "acceleratorType": self.accelerator_type}
        if state:
            data["state"] = state
        addresses = [_address(endpoint) for endpoint in self.endpoints]
        if version == "v1":
            data["tensorflowVersion"] = "pytorch-2.0"
            data["apiVersion"] = "V1"
        else:
            data["runtimeVersion"] = "pytorch-2.0"
            data["apiVersion"] = "V2"
        if state == "READY":
            data["networkEndpoints"] = [{"ipAddress": host, "port": port} for host, port in addresses]
            if version == "v1" and addresses:
                # The deprecated pair of fields; the port is a string.
                data["ipAddress"], data["port"] = addresses[0][0], str(addresses[0][1])
            if self.health:
                data["health"] = self.health
        data.update(self.node_fields)
        return {key: value for key, value in data.items() if value is not None}


class _Handler(BaseHTTPRequestHandler):
    """One connection. HTTP/1.1, because the real servers keep connections open."""

    protocol_version = "HTTP/1.1"
    server_version = "Metadata Server for VM"
    sys_version = ""
    disable_nagle_algorithm = True

    cloud: GoogleCloud

    def do_GET(self) -> None:
        self.cloud.handle(self)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.cloud.handle(self)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: /_fake/requests lists the requests."""

    def send(self, answer: Answer, fault: Fault | None = None) -> None:
        """Write an answer with a fault."""
        form = fault.form if fault else ""
        argument = fault.argument if fault else ""
        if form == "delay":
            time.sleep(float(argument))
        if form in ("drop", "nothttp"):
            if form == "nothttp":
                self.wfile.write(GARBAGE * 100)
            self.close_connection = True
            return
        body = {"garbage": GARBAGE, "empty": b"", "text": b"<html>proxy login</html>"}.get(form, answer.body)
        try:
            self.send_response(answer.status)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", "text/html" if form == "text" else answer.content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if form == "truncate":
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            elif form == "drip":
                for index in range(len(body)):
                    self.wfile.write(body[index : index + 1])
                    time.sleep(float(argument))
            else:
                self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up, as expected


def _kind(path: str) -> str:
    if path == "/":
        return "probe"
    if path == "/token":
        return "token"
    if path.startswith(METADATA_ROOT):
        return "token" if path.endswith("/token") else "metadata"
    if path.startswith("/discovery/") or path == "/$discovery/rest":
        return "discovery"
    return "node" if path.startswith(("/v1/projects/", "/v2/projects/")) else "other"


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port of "ip:port". Raises ValueError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(f"no ip:port: {endpoint!r}")
    return host, int(port)


def discovery_document(version: str, root: str) -> dict[str, object]:
    """The smallest discovery document that google-api-python-client 1.8 and 2.x both accept.

    Args:
        version: "v1" or "v2".
        root: URL of this server, with a slash at the end; the client sends its requests there.
    """
    name = {"name": {"location": "path", "required": True, "type": "string", "pattern": "^projects/.*$"}}
    get = {
        "id": "tpu.projects.locations.nodes.get",
        "httpMethod": "GET",
        "path": f"{version}/{{+name}}",
        "parameters": name,
        "parameterOrder": ["name"],
        "response": {"$ref": "Node"},
    }
    return {
        "kind": "discovery#restDescription",
        "name": "tpu",
        "version": version,
        "rootUrl": root,
        "servicePath": "",
        "batchPath": "batch",
        "parameters": {"alt": {"type": "string", "location": "query", "default": "json"}},
        "resources": {"projects": {"resources": {"locations": {"resources": {"nodes": {"methods": {"get": get}}}}}}},
        "schemas": {"Node": {"id": "Node", "type": "object", "properties": {"name": {"type": "string"}}}},
    }


def _pairs(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parse texts of the form ``kind=value`` to {kind: [value, ...]}. Raises ValueError without a ``=``."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} has no =")
        found.setdefault(key, []).append(value)
    return found


def _read_json(path: str | None) -> dict[str, dict[str, str]]:
    """A JSON object of objects of strings; {} without a path. Raises ValueError."""
    if not path:
        return {}
    with open(path, encoding="utf-8") as file:
        found: dict[str, dict[str, str]] = json.load(file)
    return found


def main() -> None:
    """Serve until killed. The first line on stdout is {"url": ...}."""
    parser = argparse.ArgumentParser(description="A fake Google Cloud: metadata server and Cloud TPU API on one port.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument("--project", default="test-project")
    parser.add_argument("--zone", default="us-central1-c")
    parser.add_argument("--node", default="tpu-a")
    parser.add_argument("--states", default="READY", help="comma-separated, one for each request; the last one stays")
    parser.add_argument("--endpoint", dest="endpoints", action="append", metavar="IP:PORT",
                        help="a worker of the node; repeatable")  # fmt: skip
    parser.add_argument("--health", default="HEALTHY")
    parser.add_argument("--accelerator-type", default="v3-8")
    parser.add_argument("--attribute", dest="attributes", action="append", default=[], metavar="NAME=VALUE",
                        help="instance attribute")  # fmt: skip
    parser.add_argument("--host-attributes", metavar="FILE.json", help="{host name: {attribute: value}}")
    parser.add_argument("--fault", dest="faults", action="append", default=[], metavar="KIND=FAULT",
                        help="see the top of this file")  # fmt: skip
    given = vars(parser.parse_args())
    try:
        given["states"] = given["states"].split(",")
        given["endpoints"] = given["endpoints"] or ["10.1.2.3:8470"]
        given["attributes"] = {name: values[-1] for name, values in _pairs(given["attributes"]).items()}
        given["faults"] = _pairs(given["faults"])
        given["host_attributes"] = _read_json(given["host_attributes"])
        cloud = GoogleCloud(**given)
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    print(json.dumps({"url": cloud.url}), flush=True)
    # As PID 1 of a container it would not get SIGTERM at all without a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        cloud.serve()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
