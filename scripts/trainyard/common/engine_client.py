"""Talk to the Docker engine over HTTP, and say in one line what is wrong with an answer that is none of Docker's API.

An engine with a full disk, a proxy or another program at its address answers with a status of 500, a page of HTML, an
empty object, or not at all. Each of these is an :class:`EngineFailed`, and also the exception that docker and requests
raise, so that callers handle an image that does not exist, or a program that does not end, as usual.
"""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import requests
import urllib3
from docker.constants import DEFAULT_DOCKER_API_VERSION, DEFAULT_UNIX_SOCKET
from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool
from docker.utils.proxy import ProxyConfig

from trainyard.common.errors import EngineFailed, one_line

#: Method and path -> keys that their answer has: https://docs.docker.com/reference/api/engine/version/v1.45/
_KEYS = (
    (r"GET /version", ("ApiVersion",)),
    (r"GET /images/.+/json", ("Id", "RootFS")),
    (r"GET /containers/[^/]+/json", ("Id", "State", "Config")),
    (r"POST /(containers|networks)/create", ("Id",)),
    (r"POST /containers/[^/]+/wait", ("StatusCode",)),
    (r"POST /volumes/create", ("Name",)),
)

#: Paths whose answer is a list.
_LISTS = r"GET /(images|containers|networks)/json|GET /networks"

#: How often a list is asked for before its 404 counts: with containerd's image store, the engine refuses a list if an
#: image is removed while it reads them, https://github.com/moby/moby/issues/52688
_LIST_ATTEMPTS = 5

#: What the docker package and requests raise if a stream ends or is not what the API says.
_BROKEN = (
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    docker.errors.StreamParseError,
    struct.error,
)


class Refused(EngineFailed, docker.errors.APIError):
    """Report that the engine answered with an error."""

    def __str__(self) -> str:
        return str(self.args[0])


class Missing(Refused, docker.errors.NotFound):
    """Report that the engine has no such container, network or volume."""


class ImageMissing(Missing, docker.errors.ImageNotFound):
    """Report that the engine has no such image."""


class NoAnswer(EngineFailed, requests.exceptions.ReadTimeout):
    """Report that the engine did not answer in time."""


class Lost(EngineFailed, requests.exceptions.ConnectionError):
    """Report a missing or closed connection to the engine; ``absent`` if nothing listens at the engine's address."""

    absent = False


class Client(docker.DockerClient):
    """Send requests to an engine; what goes wrong is one of the errors of this module."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.api = _Requests(*arguments, **options)


class _Dialed(UnixHTTPConnection):
    """Connect through the docker command, as its own requests over ssh do: its ssh has the user's settings."""

    def connect(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(self.timeout)
        with theirs:
            command = ["docker", "system", "dial-stdio"]
            # It ends when the connection is closed.
            subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


class _DialedPool(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:
        return _Dialed(self.base_url, self.socket_path, self.timeout)  # type: ignore[arg-type]


class _DialedAdapter(UnixHTTPAdapter):
    def get_connection(self, url: Any, proxies: Any = None) -> Any:
        with self.pools.lock:
            if url not in self.pools:
                self.pools[url] = _DialedPool(url, "", self.timeout, maxsize=self.max_pool_size)
            return self.pools[url]


class _Requests(docker.APIClient):
    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        self.address = base_url or DEFAULT_UNIX_SOCKET.removeprefix("http+")
        if self.address.startswith("ssh://"):
            # docker's own adapter for ssh needs paramiko, and has none of the hosts of ~/.ssh/config.
            super().__init__(**options | {"version": DEFAULT_DOCKER_API_VERSION})
            self.mount("http+docker://", _DialedAdapter("", self.timeout))
            self._version = self._retrieve_server_version()  # type: ignore[attr-defined]
        else:
            super().__init__(base_url, **options)
        # Docker's configuration would give every container its proxies: those without a network, and base images that
        # are made of one. What needs them asks trainyard.common.proxies.
        self._proxy_configs = ProxyConfig()

    def _said(self, response: Any, text: str) -> EngineFailed:
        return EngineFailed(
            f"the engine at {self.address} answered {_asked(response.request)} with {text}: see whether "
            "'docker version' prints a server there, and that no proxy stands before it"
        )

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        try:
            response = super().send(request, **options)
            for _ in range(_LIST_ATTEMPTS - 1):
                if response.status_code != 404 or not re.fullmatch(_LISTS, _asked(request)):
                    break
                time.sleep(0.2)
                response = super().send(request, **options)
            return response
        except requests.exceptions.RequestException as error:
            raise self._lost(request, error) from error

    def _lost(self, request: Any, error: BaseException) -> EngineFailed:
        causes = _causes(error)
        if any(isinstance(cause, urllib3.exceptions.ReadTimeoutError) for cause in causes):
            return NoAnswer(
                f"the engine at {self.address} did not answer {_asked(request)} in time: see its log, and restart it"
            )
        lost = Lost(
            f"the connection to the engine at {self.address} ended at {_asked(request)} "
            f"({_short(str(causes[-1]))}): see whether it runs with 'docker version'"
        )
        lost.absent = any(isinstance(cause, _NOTHING_LISTENS) for cause in causes)
        return lost

    def _raise_for_status(self, response: requests.Response) -> None:
        try:
            super()._raise_for_status(response)  # type: ignore[misc]  # the stubs have public methods alone
            return
        except docker.errors.APIError as error:
            kind = Refused
            if isinstance(error, docker.errors.NotFound):
                kind = ImageMissing if isinstance(error, docker.errors.ImageNotFound) else Missing
            said = str(error.explanation or "")
        except (KeyError, TypeError):  # JSON without a message
            kind, said = Refused, ""
        said = "a page of HTML" if _is_page(said) else _short(said) or str(response.reason)
        status = f"{response.status_code}"
        raise kind(
            f"the engine at {self.address} answered {_asked(response.request)} with {status}: {said}",
            response=response,
            explanation=said,
        )

    def _result(self, response: requests.Response, json: bool = False, binary: bool = False) -> Any:
        if not json:
            return super()._result(response, json, binary)  # type: ignore[misc]
        self._raise_for_status(response)
        try:
            answer = response.json()
        except ValueError:
            text = response.text
            raise self._said(
                response, "a page of HTML, not JSON" if _is_page(text) else f"{_short(text)!r}, which is not JSON"
            ) from None
        asked = _asked(response.request)
        if re.fullmatch(_LISTS, asked) and not isinstance(answer, list):
            raise self._said(response, "no list")
        for pattern, keys in _KEYS:
            if re.fullmatch(pattern, asked) and (missing := [key for key in keys if not _has(answer, key)]):
                raise self._said(response, f"JSON that has no '{missing[0]}'")
        return answer

    def _stream_helper(self, response: requests.Response, decode: bool = False) -> Iterator[Any]:
        yield from self._unbroken(response, super()._stream_helper(response, decode))  # type: ignore[misc]

    def _stream_raw_result(
        self, response: requests.Response, chunk_size: int = 1, decode: bool = True
    ) -> Iterator[Any]:
        stream = super()._stream_raw_result(response, chunk_size, decode)  # type: ignore[misc]
        yield from self._unbroken(response, stream)

    def _multiplexed_response_stream_helper(self, response: requests.Response) -> Iterator[Any]:
        stream = super()._multiplexed_response_stream_helper(response)  # type: ignore[misc]
        yield from self._unbroken(response, stream)

    def _unbroken(self, response: requests.Response, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield what a stream has, or raise :class:`Lost` or :class:`NoAnswer` if it ends early."""
        try:
            yield from stream
        except EngineFailed:
            raise
        except _BROKEN as error:
            raise self._lost(response.request, error) from error


#: Exceptions below a :class:`Lost` that say that there is no engine at all.
_NOTHING_LISTENS = (
    FileNotFoundError,
    ConnectionRefusedError,
    PermissionError,
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and those that requests and urllib3 have wrapped, the innermost last."""
    causes = [error]
    for cause in causes:
        inner = (*cause.args, getattr(cause, "reason", None))
        causes += [one for one in inner if isinstance(one, BaseException) and one not in causes]
    return causes


def _asked(request: Any) -> str:
    """Return method and path of a request, without the version of the API: ``GET /images/json``."""
    path = re.sub(r"^\w[\w+]*://[^/]*(/v\d[\d.]*)?|\?.*$", "", str(request.url))
    return f"{request.method} {path}"


def _has(answer: object, key: str) -> bool:
    return isinstance(answer, dict) and answer.get(key) is not None


def _is_page(text: str) -> bool:
    return bool(re.match(r"\s*<(!doctype|html|\?xml)", text, re.IGNORECASE))


def _short(text: str) -> str:
    words = one_line(" ".join(text.split()))
    return words if len(words) <= 300 else f"{words[:300]}…"
