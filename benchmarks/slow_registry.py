"""A registry with token login behind a proxy that delays and counts requests, all on loopback.

The registry is the real one of tests/image/registry. The proxy is also the server that it trusts for tokens
(https://distribution.github.io/distribution/spec/auth/token/), so that tokens are delayed and counted too.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import io
import json
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID
from tests.engine import ENGINE
from tests.image.registry import running

from trainyard.common import settings
from trainyard.common.docker_engine import resource_labels
from trainyard.common.errors import StepFailed

#: Issuer and audience of the tokens.
SERVICE = "benchmark"
USER = "someone"

#: Seconds that a token is valid: the least that clients must accept is 60.
_VALID = 300

#: Bytes read at a time.
_CHUNK = 1 << 20

#: The first byte of a TLS handshake (RFC 8446, section 5.1).
_TLS_HANDSHAKE = b"\x16"

#: Headers that hold for one connection (RFC 9110, section 7.6.1), or that this server answers itself.
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "expect")


@dataclass
class Traffic:
    """What clients sent: ``requests`` as method and path, ``sent`` bytes with headers."""

    requests: list[str] = field(default_factory=list)
    sent: int = 0


class _Tokens:
    """Signs tokens (https://distribution.github.io/distribution/spec/auth/jwt/)."""

    def __init__(self, password: str) -> None:
        self._password = password
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVICE)])
        now = datetime.datetime.now(tz=datetime.UTC)
        day = datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(self._key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        self._certificate = builder.not_valid_after(now + day).sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """What the registry checks signatures with (PEM)."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def answer(self, scopes: list[str], user: str, password: str) -> dict[str, object] | None:
        """The response to a request for a token; None if the password is wrong."""
        if (user, password) != (USER, self._password):
            return None
        access = []
        for scope in " ".join(scopes).split():
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {
            "iss": SERVICE, "sub": user, "aud": SERVICE, "exp": now + _VALID, "nbf": now - 10, "iat": now,
            "jti": secrets.token_hex(8), "access": access,
        }  # fmt: skip
        chain = [base64.b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()]
        parts = [
            _base64url(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "RS256", "x5c": chain}, claims)
        ]
        signature = self._key.sign(".".join(parts).encode(), padding.PKCS1v15(), hashes.SHA256())
        token = ".".join([*parts, _base64url(signature)])
        return {"token": token, "access_token": token, "expires_in": _VALID}


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, delay: float, tokens: _Tokens) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.delay, self.tokens = delay, tokens
        self.registry = ("", 0)
        self.traffic = Traffic()
        self.lock = threading.Lock()


class _Counted(io.RawIOBase):
    """What arrives on a connection, counted."""

    def __init__(self, connection: socket.socket, proxy: _Proxy) -> None:
        self._connection, self._proxy = connection, proxy

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer elsewhere
        size = self._connection.recv_into(buffer)
        with self._proxy.lock:
            self._proxy.traffic.sent += size
        return size


class _Connection(BaseHTTPRequestHandler):
    """A client's connection, and the one to the registry that serves it."""

    server: _Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile: io.BufferedReader = io.BufferedReader(_Counted(self.connection, self.server), _CHUNK)
        self._registry = http.client.HTTPConnection(*self.server.registry, blocksize=_CHUNK)

    def finish(self) -> None:
        self._registry.close()
        with contextlib.suppress(OSError):  # the client has closed it
            super().finish()

    def log_message(self, *_: object) -> None:
        """Log nothing: the traffic is recorded."""

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            data = self.rfile.read(min(left, _CHUNK))
            if not data:
                raise ConnectionResetError
            left -= len(data)
            yield data

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _token(self) -> None:
        """By GET with Basic credentials, or by POST of OAuth 2 (https://distribution.github.io/distribution/spec/auth/oauth/)."""
        if self.command == "POST":
            query = parse_qs(b"".join(self._body()).decode())
            user, password = query.get("username", [""])[0], query.get("password", [""])[0]
        else:
            query = parse_qs(urlsplit(self.path).query)
            pair = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            user, _, password = pair.partition(":")
        answer = self.server.tokens.answer(query.get("scope", []), user, password)
        body = json.dumps(answer or {}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        self._send(200 if answer else 401, headers, body)

    def _forward(self) -> None:
        chunked = "Transfer-Encoding" in self.headers
        body = self._body() if chunked or self.headers.get("Content-Length") else None
        self._registry.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # a name may occur several times, as Go's clients send Accept
            if name.lower() not in _OF_ONE_CONNECTION:
                self._registry.putheader(name, value)
        if chunked:
            self._registry.putheader("Transfer-Encoding", "chunked")
        self._registry.endheaders(body, encode_chunked=chunked)
        answer = self._registry.getresponse()
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OF_ONE_CONNECTION]
        if answer.chunked:  # documents, not blobs
            data = answer.read()
            self._send(answer.status, [*headers, ("Content-Length", str(len(data)))], data)
            return
        self._send(answer.status, headers, b"")
        while data := answer.read(_CHUNK):
            self.wfile.write(data)

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        with self.server.lock:
            self.server.traffic.requests.append(f"{self.command} {path}")
        time.sleep(self.server.delay)
        if path == "/token":
            self._token()
        else:
            self._forward()

    def handle(self) -> None:
        # A client closes connections that it no longer needs.
        with contextlib.suppress(ConnectionError):
            if self.rfile.peek(1)[:1] == _TLS_HANDSHAKE:
                # The engine tries TLS first, and then what answers it in plain HTTP, as Go's server does.
                self.wfile.write(b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTPS request to an HTTP server.\n")
            else:
                super().handle()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle


class SlowRegistry:
    """A registry in a container and its proxy, as a context manager.

    Attributes:
        address: the proxy's ``localhost:port``: with localhost alone the engine uses plain HTTP.
        docker_config: value of DOCKER_CONFIG for clients that are logged in.
    """

    def __init__(self, delay: float) -> None:
        """Delay each request by ``delay`` seconds."""
        self._password = secrets.token_urlsafe(12)
        self._tokens = _Tokens(self._password)
        self._proxy = _Proxy(delay, self._tokens)
        self.address = f"localhost:{self._proxy.server_address[1]}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SlowRegistry:
        """Start both and log in.

        Raises:
            StepFailed: the registry does not start, or refuses the login.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainyard-registry-")))
            self.docker_config = folder / "docker"
            self._proxy.registry = ("127.0.0.1", self._start(stack, folder))
            stack.callback(self._proxy.server_close)
            threading.Thread(target=self._proxy.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(self._proxy.shutdown)
            self._log_in()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack, folder: Path) -> int:
        """Start the registry; its port."""
        (folder / "certificate.pem").write_bytes(self._tokens.certificate)
        container = ENGINE.client.containers.run(
            running.image(),
            detach=True,
            environment={
                "REGISTRY_AUTH": "token",
                "REGISTRY_AUTH_TOKEN_REALM": f"http://{self.address}/token",
                "REGISTRY_AUTH_TOKEN_SERVICE": SERVICE,
                "REGISTRY_AUTH_TOKEN_ISSUER": SERVICE,
                "REGISTRY_AUTH_TOKEN_ROOTCERTBUNDLE": "/certificate.pem",
            },
            volumes={str(folder / "certificate.pem"): {"bind": "/certificate.pem", "mode": "ro"}},
            ports={"5000/tcp": None},
            labels=resource_labels("benchmark"),
        )
        stack.callback(container.remove, force=True, v=True)
        container.reload()
        port = int((container.ports["5000/tcp"] or [])[0]["HostPort"])
        end = time.monotonic() + 30
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/v2/")
                if connection.getresponse().status == 401:
                    return port
            if time.monotonic() > end:
                raise StepFailed(f"the registry did not start: {container.logs(tail=3).decode(errors='replace')}")
            time.sleep(0.1)

    def _log_in(self) -> None:
        self.docker_config.mkdir()
        done = subprocess.run(
            ["docker", "login", self.address, f"--username={USER}", "--password-stdin"],
            input=self._password,
            env=settings.environment(DOCKER_CONFIG=str(self.docker_config)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StepFailed(f"'docker login' failed: {done.stderr.strip()}")

    def take(self) -> Traffic:
        """The traffic since the last call."""
        with self._proxy.lock:
            found, self._proxy.traffic = self._proxy.traffic, Traffic()
        return found
