"""The loop that waits for a TPU node: how often it asks, how long it sleeps, how it ends (contract a.2; T71 to T77)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest

from launcher.cloud import Metadata, NodeClient, Tokens
from launcher.errors import LaunchError
from launcher.fetch import FetchError
from launcher.settings import Settings
from launcher.tpu_node import Answer, node_from_env
from launcher.wait import wait_for_node

READY = (200, {"state": "READY", "networkEndpoints": [{"ipAddress": "10.1.2.3", "port": 8470}], "health": "HEALTHY"})
CREATING = (200, {"state": "CREATING"})
TOKEN = "ya29.the-token"

Reply = "tuple[int, object] | Exception"


class World:
    """A network that answers from a list (the last reply stays), and a clock that only sleeping moves."""

    def __init__(self, replies: Iterable[object], env: dict[str, str] | None = None, chance: float = 0.0) -> None:
        self.replies = list(replies)
        self.env = {"TPU_CONFIG": '{"project":"p","zone":"z","tpu_node_name":"t"}', **(env or {})}
        self.slept: list[float] = []
        self.tokens = 0
        self.asked = 0
        self.log: list[str] = []
        self.now = 0.0
        self.chance = chance
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
        return wait_for_node(client, settings, self.sleep, lambda: self.now, lambda: self.chance, self.log.append)

    def failure(self) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            self.wait()
        return caught.value


@pytest.mark.parametrize(
    ("failures", "attempts", "slept"),
    [
        pytest.param(0, 1, 0, id="T76-0"),
        pytest.param(1, 2, 10, id="T76-1"),
        pytest.param(3, 4, 30, id="T76-3"),
        pytest.param(39, 40, 390, id="T76-39"),
    ],
)
@pytest.mark.parametrize("chance", [0.0, 0.7])
def test_attempts_and_sleeps(failures: int, attempts: int, slept: float, chance: float) -> None:
    world = World([*[CREATING] * failures, READY], chance=chance)
    assert [str(endpoint) for endpoint in world.wait().endpoints] == ["10.1.2.3:8470"]
    assert world.asked == attempts
    # Jitter moves an attempt by up to a tenth of the interval and never adds up.
    assert sum(world.slept) == pytest.approx(slept if failures == 39 or not slept else slept + 10 * 0.1 * chance)


def test_T77_never_ready() -> None:
    world = World([CREATING])
    error = world.failure()
    assert error.message == 'Failed to schedule TPU: TPU "t" is not yet ready; state: "CREATING"'
    assert error.status == 138
    assert (world.asked, sum(world.slept)) == (40, pytest.approx(390))


def test_googles_own_240_attempts() -> None:
    world = World([CREATING], {"LAUNCHER_TPU_ATTEMPTS": "240"})
    assert world.failure().status == 138
    assert (world.asked, sum(world.slept)) == (240, pytest.approx(2390))


def test_a_slow_answer_shortens_the_sleep() -> None:
    world = World([CREATING, CREATING, READY])
    original = world.get

    def slow(url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        world.now += 4
        return original(url, headers, timeout)

    world.get = slow  # type: ignore[method-assign]
    world.wait()
    assert world.slept == [pytest.approx(2), pytest.approx(6)]  # the first attempt asks for a token too


@pytest.mark.parametrize(
    ("replies", "status", "asked"),
    [
        pytest.param([(400, {})], 1, 1, id="400"),
        pytest.param([(403, {})], 1, 3, id="T73-403"),
        pytest.param([(401, {})], 1, 5, id="401-refresh-then-3-then-permanent"),
        pytest.param([(404, {})], 138, 40, id="T73-404"),
        pytest.param([(500, {})], 138, 40, id="T73-500"),
        pytest.param([(429, {})], 138, 40, id="429"),
        pytest.param([(200, b"\x00garbage")], 138, 40, id="garbage"),
        pytest.param([FetchError("connection refused")], 138, 40, id="connection"),
        pytest.param([(200, {"state": "STOPPED"})], 1, 1, id="STOPPED"),
        pytest.param([CREATING, (200, {"state": "PREEMPTED"})], 138, 2, id="PREEMPTED"),
        pytest.param([(200, {"state": "TERMINATED"})], 138, 1, id="TERMINATED"),
    ],
)
def test_ends(replies: list[object], status: int, asked: int) -> None:
    world = World(replies)
    error = world.failure()
    assert (error.status, world.asked) == (status, asked)
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
def test_recovers(replies: list[object]) -> None:
    world = World(replies)
    world.wait()
    assert world.asked == len(replies)


def test_401_asks_at_once_with_a_fresh_token() -> None:
    world = World([(401, {}), READY])
    world.wait()
    assert (world.tokens, world.slept) == (2, [])


def test_a_token_is_used_until_its_end() -> None:
    world = World([*[CREATING] * 39, READY])
    world.wait()
    assert world.tokens == 1


def test_404_names_the_full_path_and_may_give_up_early() -> None:
    world = World([(404, {"error": {"message": "no such node"}})], {"LAUNCHER_TPU_404_ATTEMPTS": "3"})
    error = world.failure()
    assert (error.status, world.asked) == (138, 3)
    assert "projects/p/locations/z/nodes/t" in error.message
    assert "projects/p/locations/z/nodes/t" in world.log[0]


def test_retryable_exit_is_the_users() -> None:
    assert World([CREATING], {"LAUNCHER_RETRYABLE_EXIT": "246"}).failure().status == 246


def test_T75_no_metadata_server_is_transient_and_then_a_clear_message() -> None:
    world = World([READY], {"TPU_NAME": "t", "TPU_CONFIG": ""})
    world.metadata_down = True
    error = world.failure()
    assert error.status == 138
    assert "no project for TPU 't': metadata.google.internal" in error.message
    assert sum(world.slept) == pytest.approx(390)


def test_T61_project_and_zone_of_tpu_config_serve_when_metadata_has_none() -> None:
    world = World([READY], {"TPU_NAME": "pod"})
    world.metadata_down = True
    settings = Settings(world.env)
    metadata = Metadata("", get=world.get)
    tokens = Tokens(metadata, lambda: TOKEN, clock=lambda: 0.0)
    client = NodeClient(node_from_env(world.env, settings, "TPU_NAME"), settings, metadata, tokens, get=world.get)
    assert client.ask().action == "ready"
    assert client.path == "projects/p/locations/z/nodes/pod"
    assert len(client.warnings) == 2


def test_T88_T89_require_healthy() -> None:
    sick = (200, {**READY[1], "health": "UNHEALTHY_TENSORFLOW"})  # type: ignore[dict-item]
    unknown = (200, {key: value for key, value in READY[1].items() if key != "health"})  # type: ignore[attr-defined]
    for reply in (sick, unknown):
        world = World([reply], {"LAUNCHER_REQUIRE_HEALTHY": "1"})
        error = world.failure()
        assert error.message.startswith("Failed to schedule TPU: TPU t is not HEALTHY yet")
        assert sum(world.slept) == pytest.approx(1200)  # every 30 s, as wait_for_healthy
    assert World([sick, unknown, READY], {"LAUNCHER_REQUIRE_HEALTHY": "1"}).wait().health == "HEALTHY"


def test_T71_health_does_not_matter_otherwise() -> None:
    world = World([(200, {**READY[1], "health": "UNHEALTHY_TENSORFLOW"})])  # type: ignore[dict-item]
    assert world.wait().health == "UNHEALTHY_TENSORFLOW"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"access_token": 7}', b'{"access_token": "a\\nb"}'])
def test_a_metadata_server_without_a_usable_token(body: bytes) -> None:
    def get(url: str, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        return 200, body

    with pytest.raises(FetchError, match="no access token"):
        Tokens(Metadata("", get=get), lambda: "").get()


def test_google_auth_is_asked_only_without_a_metadata_server() -> None:
    asked = []

    def google_auth() -> str:
        asked.append(1)
        return "from-google-auth"

    world = World([READY])
    tokens: Callable[[], str] = Tokens(Metadata("", get=world.get), google_auth).get
    assert (tokens(), asked) == (TOKEN, [])
    world.metadata_down = True
    assert Tokens(Metadata("", get=world.get), google_auth).get() == "from-google-auth"


def test_a_token_never_reaches_a_message() -> None:
    world = World([(400, {"error": {"message": f"bad header Bearer {TOKEN}"}})])
    assert TOKEN not in world.failure().message
