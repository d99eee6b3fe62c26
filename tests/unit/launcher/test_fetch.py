"""HTTP over plain sockets: any response, one deadline (R12.4)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from launcher import fetch
from launching import Launch


@contextmanager
def serving(raw: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that responds to one request with these bytes, one at a time if there is a pause between them."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(65536)
            try:
                for piece in [raw] if not pause else [raw[n : n + 1] for n in range(len(raw))]:
                    connection.sendall(piece)
                    time.sleep(pause)
            except OSError:
                return  # the client gave up

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    listener.close()
    thread.join(timeout=5)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokmore", (200, b"okmore"), id="length"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nto the end", (200, b"to the end"), id="until-close"),
        pytest.param(b"HTTP/1.1 404\r\ncontent-length: 0\r\n\r\n", (404, b""), id="no-reason"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
            (200, b"abcde"),
            id="chunked",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab", (200, b"ab"), id="bad-length"),
    ],
)
def test_responses(raw: bytes, expected: tuple[int, bytes]) -> None:
    with serving(raw) as url:
        assert fetch.get(url, {}, 5) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"", "not HTTP", id="nothing"),
        pytest.param(b"\x00\xff" * 100, "not HTTP", id="garbage"),
        pytest.param(b"HTTP/1.1 abc OK\r\n\r\n", "not HTTP", id="status"),
        pytest.param(b"HTTP/1.1 20000 OK\r\n\r\n", "invalid HTTP status", id="long-status"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "before the end", id="truncated"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "before the end", id="chunk"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "before the end", id="chunk-size"
        ),
    ],
)
def test_malformed_responses(raw: bytes, message: str) -> None:
    with serving(raw) as url, pytest.raises(fetch.FetchError, match=message):
        fetch.get(url, {}, 5)


def test_a_server_that_sends_slowly_does_not_exceed_the_time_limit() -> None:
    started = time.monotonic()
    with serving(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000, pause=0.05) as url:
        with pytest.raises(fetch.FetchError, match=r"did not respond within 0\.3 s"):
            fetch.get(url, {}, 0.3)
        assert time.monotonic() - started < 10  # of the 50 s that the server takes


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SMALL_CHUNKS = CHUNKED + b"1\r\nx\r\n" * 174_000 + b"0\r\n\r\n"  # 1 MiB, the longest response


def test_small_chunks_take_little_processor_time() -> None:
    with serving(SMALL_CHUNKS) as url:
        started = time.thread_time()
        assert fetch.get(url, {}, 60) == (200, b"x" * 174_000)
    assert time.thread_time() - started < 3  # 0.2 s; 9 s if each chunk copies the rest of the response


class FakeClock:
    """Stands for the module `time`; each reading advances it by a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


def test_the_time_limit_holds_while_a_response_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(fetch, "time", clock)
    with serving(SMALL_CHUNKS) as url, pytest.raises(fetch.FetchError, match="did not respond within 2 s"):
        fetch.get(url, {}, 2)
    assert clock.now < 2.1


class FakeConnection:
    """A connection to a server that takes 0.5 s for each step."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.limits: list[float] = []

    def settimeout(self, seconds: float) -> None:
        self.limits.append(seconds)

    def wrap_socket(self, connection: FakeConnection, server_hostname: str) -> FakeConnection:
        self.clock.now += 0.5
        return self

    def sendall(self, data: bytes) -> None:
        self.clock.now += 0.5

    def recv(self, size: int) -> bytes:
        self.clock.now += 0.5
        return b""

    def close(self) -> None:
        return


@pytest.mark.parametrize(("scheme", "limits"), [("http", [3, 2.5, 2, 1.5]), ("https", [3, 2.5, 2, 1.5, 1])])
def test_each_step_gets_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, scheme: str, limits: list[float]
) -> None:
    """Two addresses, TLS, request and response."""
    clock = FakeClock()
    connection = FakeConnection(clock)
    found: list[float] = []

    def resolve(host: str, port: int, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(0, type, 0, "", (f"10.0.0.{number}", port)) for number in (1, 2)]

    def connect(address: tuple[str, int], timeout: float) -> FakeConnection:
        found.append(timeout)
        clock.now += 0.5
        if address[0] == "10.0.0.1":
            raise ConnectionRefusedError(111, "Connection refused")
        return connection

    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("ssl.create_default_context", lambda: connection)
    with pytest.raises(fetch.FetchError, match="is not HTTP"):
        fetch.get(f"{scheme}://a", {}, 3)
    assert found + connection.limits == pytest.approx(limits, abs=0.02)


class SilentSocket:
    """A socket whose connect gets no answer."""

    clock: FakeClock

    def __init__(self, *_: int) -> None:
        self.limit = 0.0

    def settimeout(self, seconds: float) -> None:
        self.limit = seconds

    def connect(self, address: tuple[str, int]) -> None:
        self.clock.now += self.limit
        raise TimeoutError

    def close(self) -> None:
        return


def test_addresses_that_do_not_answer_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    def resolve(host: str, port: int, family: int = 0, type: int = 0) -> list[Any]:
        hosts = [f"10.0.0.{number}" for number in range(16)] if host == "a" else [host]
        return [(family, type, 0, "", (found, port)) for found in hosts]

    monkeypatch.setattr(SilentSocket, "clock", clock, raising=False)
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("socket.socket", SilentSocket)
    with pytest.raises(fetch.FetchError, match="a:80 did not respond within 2 s"):
        fetch.get("http://a", {}, 2)
    assert clock.now < 2.1


def test_a_long_response_is_cut() -> None:
    with serving(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * (3 << 20)) as url:
        assert len(fetch.get(url, {}, 10)[1]) < 2 << 20


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/", "127.0.0.1:1: Connection refused"),
        ("http://no-such-host.invalid/", "no-such-host.invalid:80: "),
        (f"http://{'x' * 70}.com/", "is not a host name"),
        ("https://127.0.0.1:1/", "Connection refused"),
    ],
)
def test_no_connection(url: str, message: str) -> None:
    with pytest.raises(fetch.FetchError, match=message):
        fetch.get(url, {}, 5)


def test_a_server_without_tls() -> None:
    with serving(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, pytest.raises(fetch.FetchError):
        fetch.get(url.replace("http:", "https:"), {}, 5)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a", (False, "a", 80, "/")),
        ("https://a/b?c", (True, "a", 443, "/b?c")),
        ("http://a:8080/", (False, "a", 8080, "/")),
    ],
)
def test_split_url(url: str, expected: tuple[bool, str, int, str]) -> None:
    assert fetch.split_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "a",
        "ftp://a",
        "http://",
        "http://u:p@a/",
        "http://a:b/",
        "http://a:0",
        "http://a b/",
        "http://a/\u00e9",
        "http://a\r\nX: y/",
    ],
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        fetch.split_url(url)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"node": [fault]}, id=f"node-{fault}")
        for fault in ("status:503", "status:429", "status:404", "status:401", "status:403", "garbage", "text", "empty",
                      "truncate", "drop", "nothttp")
    ]
    + [
        pytest.param({"token": [fault]}, id=f"token-{fault}")
        for fault in ("status:404", "status:500", "garbage", "text", "empty", "truncate", "drop", "nothttp")
    ]
    + [
        pytest.param({"metadata": [fault]}, id=f"metadata-{fault}")
        for fault in ("status:404", "garbage", "text", "empty", "drop", "nothttp")
    ],
)  # fmt: skip
def test_one_fault_is_retried(launch: Launch, google_cloud: Callable[..., Any], faults: dict[str, list[str]]) -> None:
    cloud = google_cloud(faults=faults)
    launched = launch({"TPU_NAME": "tpu-a"})
    assert launched.data["endpoints"] == ["10.1.2.3:8470"], launched.err
    assert [request["fault"] for request in cloud.requests if "fault" in request] == [
        fault.partition(":")[0] for faults_of_kind in faults.values() for fault in faults_of_kind
    ]


@pytest.mark.parametrize("fault", ["delay:30", "drip:0.1"])
def test_a_slow_api_takes_at_most_the_time_limit(launch: Launch, google_cloud: Callable[..., Any], fault: str) -> None:
    google_cloud(faults={"node": [fault]})
    started = time.monotonic()
    launched = launch({"TPU_NAME": "tpu-a", "LAUNCHER_HTTP_TIMEOUT": "1", "LAUNCHER_TPU_ATTEMPTS": "3"})
    assert launched.data["endpoints"] == ["10.1.2.3:8470"]
    assert time.monotonic() - started < 10  # of the 27 to 30 s that the slow response takes
