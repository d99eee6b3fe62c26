"""The loop that waits for a TPU node: attempts, sleeps and results (R12), access tokens (R11.3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from launcher.errors import LaunchError
from launcher.fetch import FetchError
from launcher.metadata import Metadata
from launcher.settings import Settings
from launcher.tpu_node.cloud import NodeClient, Tokens
from launcher.tpu_node.node import Answer, node_from_env
from launcher.tpu_node.wait import wait_for_node

READY = (200, {"state": "READY", "networkEndpoints": [{"ipAddress": "10.1.2.3", "port": 8470}], "health": "HEALTHY"})
CREATING = (200, {"state": "CREATING"})
TOKEN = "ya29.the-token"

Reply = "tuple[int, object] | Exception"


class FakeNetwork:
    """A network that replies from a list (then repeats the last reply), and a clock that only sleeping advances."""

    def __init__(self, replies: Iterable[object], env: dict[str, str] | None = None, random: float = 0.0) -> None:
        self.replies = list(replies)
        self.env = {"TPU_CONFIG": '{"project":"p","zone":"z","tpu_node_name":"t"}', **(env or {})}
        self.slept: list[float] = []
        self.tokens = 0
        self.asked = 0
        self.log: list[str] = []
        self.now = 0.0
        self.random = random
        self.metadata_down = False

    def get(self, url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        if "computeMetadata" in url:
            if self.metadata_down:
                raise FetchError("metadata.google.internal: Name or service not known")
            if url.endswith("/token"):
                self.tokens += 1
                return 200, json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode()
            return 200, b"projects/1/zones/zone-of-metadata"
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        reply = self.replies[min(self.asked, len(self.replies) - 1)]
        self.asked += 1
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, tuple)
        status, body = reply
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def wait(self) -> Answer:
        settings = Settings(self.env)
        source = "TPU_NAME" if "TPU_NAME" in self.env else "TPU_CONFIG"
        metadata = Metadata("", get=self.get)
        tokens = Tokens(metadata, lambda: "", clock=lambda: self.now)
        client = NodeClient(node_from_env(self.env, settings, source), settings, metadata, tokens, get=self.get)
        return wait_for_node(client, settings, self.sleep, lambda: self.now, lambda: self.random, self.log.append)

    def failure(self) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            self.wait()
        return caught.value


@pytest.mark.parametrize(
    ("failures", "attempts", "slept"),
    [
        pytest.param(0, 1, 0, id="ready-at-once"),
        pytest.param(1, 2, 10, id="one-failure"),
        pytest.param(3, 4, 30, id="three-failures"),
        pytest.param(39, 40, 390, id="39-failures"),
    ],
)
@pytest.mark.parametrize("random", [0.0, 0.7])
def test_attempts_and_seconds_slept(failures: int, attempts: int, slept: float, random: float) -> None:
    network = FakeNetwork([*[CREATING] * failures, READY], random=random)
    assert [str(endpoint) for endpoint in network.wait().endpoints] == ["10.1.2.3:8470"]
    assert network.asked == attempts
    # Jitter delays an attempt by up to a tenth of the interval; the delays do not add up.
    assert sum(network.slept) == pytest.approx(slept if failures == 39 or not slept else slept + 10 * 0.1 * random)


def test_a_node_that_is_never_ready_is_retryable() -> None:
    network = FakeNetwork([CREATING])
    error = network.failure()
    assert error.message == 'Failed to schedule TPU: TPU "t" is not yet ready; state: "CREATING"'
    assert error.status == 138
    assert (network.asked, sum(network.slept)) == (40, pytest.approx(390))


def test_240_attempts_on_request() -> None:
    network = FakeNetwork([CREATING], {"LAUNCHER_TPU_ATTEMPTS": "240"})
    assert network.failure().status == 138
    assert (network.asked, sum(network.slept)) == (240, pytest.approx(2390))


def test_a_slow_response_shortens_the_sleep() -> None:
    network = FakeNetwork([CREATING, CREATING, READY])
    original = network.get

    def slow(url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        network.now += 4
        return original(url, headers, timeout)

    network.get = slow  # type: ignore[method-assign]
    network.wait()
    assert network.slept == [pytest.approx(2), pytest.approx(6)]  # the first attempt also requests a token


@pytest.mark.parametrize(
    ("replies", "status", "asked"),
    [
        pytest.param([(400, {})], 1, 1, id="400"),
        pytest.param([(403, {})], 1, 3, id="403"),
        pytest.param([(401, {})], 1, 5, id="401"),
        pytest.param([(404, {})], 138, 40, id="404"),
        pytest.param([(500, {})], 138, 40, id="500"),
        pytest.param([(429, {})], 138, 40, id="429"),
        pytest.param([(200, b"\x00garbage")], 138, 40, id="garbage"),
        pytest.param([FetchError("connection refused")], 138, 40, id="connection"),
        pytest.param([(200, {"state": "STOPPED"})], 1, 1, id="STOPPED"),
        pytest.param([CREATING, (200, {"state": "PREEMPTED"})], 138, 2, id="PREEMPTED"),
        pytest.param([(200, {"state": "TERMINATED"})], 138, 1, id="TERMINATED"),
    ],
)
def test_exit_status_and_attempts_of_failures(replies: list[object], status: int, asked: int) -> None:
    network = FakeNetwork(replies)
    error = network.failure()
    assert (error.status, network.asked) == (status, asked)
    assert error.message.startswith("Failed to schedule TPU: ")


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param([(403, {}), (403, {}), READY], id="403-twice"),
        pytest.param([(401, {}), READY], id="401-once"),
        pytest.param([(404, {}), READY], id="404-once"),
        pytest.param([(503, {}), FetchError("x"), (200, b""), READY], id="transient"),
    ],
)
def test_transient_failures_are_retried(replies: list[object]) -> None:
    network = FakeNetwork(replies)
    network.wait()
    assert network.asked == len(replies)


def test_401_is_retried_at_once_with_a_new_token() -> None:
    network = FakeNetwork([(401, {}), READY])
    network.wait()
    assert (network.tokens, network.slept) == (2, [])


def test_a_token_is_reused_until_it_expires() -> None:
    network = FakeNetwork([*[CREATING] * 39, READY])
    network.wait()
    assert network.tokens == 1


def test_404_logs_the_full_resource_name_and_has_its_own_limit() -> None:
    network = FakeNetwork([(404, {"error": {"message": "no such node"}})], {"LAUNCHER_TPU_404_ATTEMPTS": "3"})
    error = network.failure()
    assert (error.status, network.asked) == (138, 3)
    assert "projects/p/locations/z/nodes/t" in error.message
    assert "projects/p/locations/z/nodes/t" in network.log[0]


def test_the_retryable_exit_status_can_be_set() -> None:
    assert FakeNetwork([CREATING], {"LAUNCHER_RETRYABLE_EXIT": "246"}).failure().status == 246


def test_a_missing_metadata_server_is_retried_and_named_in_the_error() -> None:
    network = FakeNetwork([READY], {"TPU_NAME": "t", "TPU_CONFIG": ""})
    network.metadata_down = True
    error = network.failure()
    assert error.status == 138
    assert "no project for TPU 't': metadata.google.internal" in error.message
    assert sum(network.slept) == pytest.approx(390)


def test_without_a_metadata_server_project_and_zone_come_from_tpu_config() -> None:
    network = FakeNetwork([READY], {"TPU_NAME": "pod"})
    network.metadata_down = True
    settings = Settings(network.env)
    metadata = Metadata("", get=network.get)
    tokens = Tokens(metadata, lambda: TOKEN, clock=lambda: 0.0)
    client = NodeClient(node_from_env(network.env, settings, "TPU_NAME"), settings, metadata, tokens, get=network.get)
    assert client.ask().action == "ready"
    assert client.path == "projects/p/locations/z/nodes/pod"
    assert len(client.warnings) == 2


def test_require_healthy_waits_1200_seconds() -> None:
    unhealthy = (200, {**READY[1], "health": "UNHEALTHY_TENSORFLOW"})  # type: ignore[dict-item]
    unknown = (200, {key: value for key, value in READY[1].items() if key != "health"})  # type: ignore[attr-defined]
    for reply in (unhealthy, unknown):
        network = FakeNetwork([reply], {"LAUNCHER_REQUIRE_HEALTHY": "1"})
        error = network.failure()
        assert error.message.startswith("Failed to schedule TPU: TPU t is not HEALTHY yet")
        assert sum(network.slept) == pytest.approx(1200)  # every 30 s (R12.3)
    assert FakeNetwork([unhealthy, unknown, READY], {"LAUNCHER_REQUIRE_HEALTHY": "1"}).wait().health == "HEALTHY"


def test_an_unhealthy_node_is_used_by_default() -> None:
    network = FakeNetwork([(200, {**READY[1], "health": "UNHEALTHY_TENSORFLOW"})])  # type: ignore[dict-item]
    assert network.wait().health == "UNHEALTHY_TENSORFLOW"


def lasting(expires_in: str) -> bytes:
    """A response with a token whose `expires_in` is this JSON."""
    return b'{"access_token": "a", "expires_in": %s}' % expires_in.encode()


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"\xff", b'{"access_token": 7}', b'{"access_token": "a\\nb"}'),
        *map(lasting, ("NaN", "Infinity", "-Infinity", "1e999", "-1", '"x"', '"nan"', '"inf"', "null", "[]", "{}")),
        pytest.param(lasting("9" * 400), id="400-digits"),
        pytest.param(lasting("9" * 5000), id="5000-digits"),
    ],
)
def test_a_metadata_server_without_a_usable_token(body: bytes) -> None:
    def get(url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        return 200, body

    with pytest.raises(FetchError, match="no access token"):
        Tokens(Metadata("", get=get), lambda: "").get()


@pytest.mark.parametrize("expires_in", ["0", "3599", "3599.5", '"3599"', "1e12"])
def test_a_token_with_any_usable_lifetime_is_used(expires_in: str) -> None:
    metadata = Metadata("", get=lambda url, headers, timeout: (200, lasting(expires_in)))
    assert Tokens(metadata, lambda: "").get() == "a"


def test_google_auth_is_used_only_without_a_metadata_server() -> None:
    asked = []

    def google_auth() -> str:
        asked.append(1)
        return "from-google-auth"

    network = FakeNetwork([READY])
    tokens: Callable[[], str] = Tokens(Metadata("", get=network.get), google_auth).get
    assert (tokens(), asked) == (TOKEN, [])
    network.metadata_down = True
    assert Tokens(Metadata("", get=network.get), google_auth).get() == "from-google-auth"


def test_a_token_is_not_part_of_a_message() -> None:
    network = FakeNetwork([(400, {"error": {"message": f"bad header Bearer {TOKEN}"}})])
    assert TOKEN not in network.failure().message
