"""HTTP of registries: where a request may go, how long it may wait, and how much is read of an answer.

requests alone sends the passwords of ``~/.netrc``, asks a proxy for addresses of this host, follows a redirect from TLS
to plain HTTP, sleeps as long as ``Retry-After`` says, and reads an answer whatever its length.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from trainyard.common.errors import one_line
from trainyard.oci.documents import ALGORITHMS, InvalidAnswer

logger = logging.getLogger(__name__)

#: Seconds to wait for an answer to begin or to go on; registries on the same host took under 0.1 s (2026-11).
TIMEOUT = 60

#: Seconds that the headers of an answer, and then a whole document, may take: enough for 32 MiB at 2.5 Mbit/s.
DEADLINE = 120

#: Longest wait in seconds that a registry may ask for with ``Retry-After``.
LONGEST_WAIT = 30

#: Status codes of errors that are expected to pass: the reference registry answers 500 to one of two simultaneous
#: writes of a tag, and hosted registries answer 429 and 503 under load.
TRANSIENT_ERRORS = (429, 500, 502, 503, 504)

#: How often a request is sent if its errors are transient.
MAX_ATTEMPTS = 4

#: Most requests at a time: each thread of a command that sends many keeps one connection.
MAX_CONNECTIONS = 16


class _Retry(urllib3.Retry):
    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        try:
            asked = super().get_retry_after(response)
        except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            return None
        if not asked:
            return asked
        seconds = min(asked, LONGEST_WAIT)
        logger.info(f"the registry is busy (status {response.status}): trying again in {seconds:.0f} s")
        return seconds


#: Transient errors are retried within 1.4 s, or when the registry asks for it. Connection errors are not: the address
#: is most likely wrong. A POST begins an upload or mounts a blob: if it is sent again, at most an empty upload stays,
#: which the registry removes.
RETRY = _Retry(
    total=None, connect=0, read=0, other=0, status=MAX_ATTEMPTS - 1, backoff_factor=0.2, raise_on_status=False,
    status_forcelist=TRANSIENT_ERRORS, allowed_methods=["GET", "HEAD", "POST", "PUT"],
)  # fmt: skip


def is_loopback(address: str) -> bool:
    """Return whether an address is on the engine's own host, the only one that the engine accepts plain HTTP from."""
    host = address.split("/", 1)[0]
    return re.fullmatch(r"localhost(:\d+)?|127\.\d+\.\d+\.\d+(:\d+)?", host) is not None


def origin(url: str) -> tuple[str, str]:
    """Return the scheme and ``host[:port]`` of a URL, which decide who gets a token; empty if it is not a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc.rpartition("@")[2]


def joined(base: str, reference: str) -> str:
    """Return the URL of a reference in an answer; empty if it has none."""
    try:
        return urljoin(base, reference)
    except ValueError:
        return ""


def is_private(url: str) -> bool:
    """Return whether credentials may be sent to a URL: it uses TLS, or is on this host."""
    scheme, host = origin(url)
    return scheme == "https" or (scheme == "http" and is_loopback(host))


class _Timed(urllib3.connection.HTTPConnection):
    def getresponse(self) -> Any:
        """Wait for the status line and the headers, which may arrive byte by byte, at most :data:`DEADLINE` seconds."""
        end = time.monotonic() + DEADLINE
        timer = threading.Timer(DEADLINE, self.sock.shutdown, (socket.SHUT_RDWR,))
        timer.start()
        try:
            return super().getresponse()
        finally:
            timer.cancel()
            if time.monotonic() >= end:  # an answer that ends in the middle of its headers is one for http.client
                raise InvalidAnswer(f"the answer of {self.host} did not begin within {DEADLINE} s") from None


class _Adapter(requests.adapters.HTTPAdapter):
    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        if not issubclass(pool.ConnectionCls, _Timed):  # each pool is kept
            pool.ConnectionCls = type("Timed", (_Timed, pool.ConnectionCls), {})
        return pool


class Threads(ThreadPoolExecutor):
    """Run functions that wait for a registry: after Ctrl-C, neither the context nor ``__main__`` waits for them."""

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(wait=kind is not KeyboardInterrupt, cancel_futures=kind is KeyboardInterrupt)


class Session(requests.Session):
    """Connect to registries and to their token services. Several threads may use one session."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # or requests looks for the host in ~/.netrc
        for scheme in ("http://", "https://"):
            self.mount(scheme, _Adapter(pool_maxsize=MAX_CONNECTIONS, max_retries=RETRY))
        self.max_redirects = 5  # blobs are at another host after one or two

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Drop the token at a redirect to another origin, and add none from ``~/.netrc``."""
        if origin(prepared_request.url or "") != origin(response.request.url or ""):
            prepared_request.headers.pop("Authorization", None)

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return where a redirect leads to; one from TLS to plain HTTP, where anybody could answer, is refused."""
        target = super().get_redirect_target(resp)
        if target and not is_private(joined(resp.url, target)) and is_private(resp.url):
            raise InvalidAnswer(f"{origin(resp.url)[1]} redirects to plain HTTP: ask who runs the registry")
        return target

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a request; to this host without a proxy, as Docker does."""
        if is_loopback(origin(request.url or "")[1]):
            kwargs["proxies"] = {}
        return super().send(request, **kwargs)


def read(answer: requests.Response, limit: int, what: str, deadline: float = DEADLINE) -> bytes:
    """Return the body of an answer that was asked for with ``stream=True``.

    Raises:
        InvalidAnswer: ``what`` has more than ``limit`` bytes, or takes longer than ``deadline`` seconds.
    """
    end, chunks, size = time.monotonic() + deadline, [], 0
    with answer:
        while chunk := answer.raw.read1(1 << 16, decode_content=True):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise InvalidAnswer(f"{what} has more than {limit >> 20} MiB")
            if time.monotonic() > end:
                raise InvalidAnswer(f"{what} did not arrive within {deadline:.0f} s")
    return b"".join(chunks)


class Checked(io.RawIOBase):
    """Read a blob as it arrives, and compare it with its digest and its size in bytes; ``what`` is for the message."""

    def __init__(self, source: IO[bytes], digest: str, size: int, what: str) -> None:
        algorithm = digest.partition(":")[0]
        if algorithm not in ALGORITHMS:
            raise InvalidAnswer(f"{what} cannot be compared with its digest: {one_line(algorithm)[:40]} is not known")
        self._source, self._digest, self._left, self._what = source, digest, size, what
        self._hash = hashlib.new(algorithm)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return the number of bytes, 0 at the end."""
        data = self._source.read(len(buffer)) if self._left >= 0 else b""
        self._left -= len(data)
        self._hash.update(data)
        if self._left < 0 or (not data and self._hash.hexdigest() != self._digest.partition(":")[2]):
            raise InvalidAnswer(f"{self._what} is another one at the registry: ask who runs it")
        buffer[: len(data)] = data
        return len(data)
