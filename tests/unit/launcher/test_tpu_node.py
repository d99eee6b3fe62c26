"""Which TPU node the environment names, and what an answer of the API means (contract a.2; cases c.1, c.3)."""

from __future__ import annotations

import json

import pytest

from launcher.errors import LaunchError
from launcher.settings import Settings
from launcher.tpu_node import (
    FORBIDDEN,
    LOST,
    NEVER,
    NOT_FOUND,
    READY,
    UNAUTHORIZED,
    WAIT,
    classify,
    node_from_env,
    parse_endpoints,
    parse_tpu_config,
)

CONFIG = {"project": "p", "zone": "z", "tpu_node_name": "tpu-a"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("1.2.3.4:1234", ["1.2.3.4:1234"], id="T01"),
        pytest.param("grpc://1.2.3.4:2000", ["1.2.3.4:2000"], id="T02"),
        pytest.param("1.2.3.4:2000,5.6.7.8:1234", ["1.2.3.4:2000", "5.6.7.8:1234"], id="T03"),
        pytest.param("grpc://1.2.3.4:2000,grpc://5.6.7.8:1234", ["1.2.3.4:2000", "5.6.7.8:1234"], id="T04"),
        pytest.param("grpc://1.2.3.4:8470", ["1.2.3.4:8470"], id="T11"),
        pytest.param("grpc://10.120.27.5:8470", ["10.120.27.5:8470"], id="T29"),
        pytest.param(
            ",".join(f"grpc://10.120.27.{n}:8470" for n in (5, 6, 7, 8)),
            [f"10.120.27.{n}:8470" for n in (5, 6, 7, 8)],
            id="T30",
        ),
        pytest.param("grpc://10.0.0.1", ["10.0.0.1:8470"], id="T67"),
        pytest.param("10.0.0.1", ["10.0.0.1:8470"], id="T67-no-scheme"),
        pytest.param("grpc://my-host.svc:8471", ["my-host.svc:8471"], id="host-name"),
        pytest.param("tpu-a", [], id="T63"),
        pytest.param("projects/p/locations/z/nodes/n", [], id="full-name"),
    ],
)
def test_addresses(value: str, expected: list[str]) -> None:
    assert [str(endpoint) for endpoint in parse_endpoints(value)] == expected


@pytest.mark.parametrize(
    "value",
    ["grpc://", "grpc://1.2.3.4:0", "grpc://1.2.3.4:99999", "grpc://[::1]:8470", "1.2.3.4:1,tpu-a", "grpc://a;b:1"],
)
def test_bad_addresses_are_configuration_errors(value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_endpoints(value)
    assert caught.value.status == 2
    assert "grpc://IP:PORT" in caught.value.message


def test_ipv6_is_named_as_the_reason() -> None:
    with pytest.raises(LaunchError, match="IPv6"):
        parse_endpoints("grpc://[::1]:8470")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param('{"project":"p"}', "TPU_CONFIG has no tpu_node_name", id="T68"),
        pytest.param("not json", "TPU_CONFIG is not JSON", id="T69"),
        pytest.param("[]", "not a JSON object", id="list"),
        pytest.param('{"tpu_node_name": 3}', "tpu_node_name must be a string", id="number"),
        pytest.param('{"tpu_node_name": " "}', "TPU_CONFIG has no tpu_node_name", id="blank"),
        pytest.param("[" * 100000, "TPU_CONFIG is not JSON", id="nested"),
    ],
)
def test_bad_tpu_config(value: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_tpu_config(value)
    assert caught.value.status == 2
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def _node(env: dict[str, str], source: str) -> tuple[str, str, str]:
    node = node_from_env(env, Settings(env), source)
    return node.name, node.project, node.zone


@pytest.mark.parametrize(
    ("env", "source", "expected"),
    [
        pytest.param({"TPU_CONFIG": json.dumps(CONFIG)}, "TPU_CONFIG", ("tpu-a", "p", "z"), id="T60"),
        pytest.param(
            {"TPU_NAME": "tpu-a", "TPU_CONFIG": json.dumps(CONFIG)}, "TPU_NAME", ("tpu-a", "p", "z"), id="same-node"
        ),
        pytest.param({"TPU_NAME": "pod", "TPU_CONFIG": json.dumps(CONFIG)}, "TPU_NAME", ("pod", "", ""), id="T61"),
        pytest.param(
            {"TPU_NAME": "projects/q/locations/y/nodes/n"}, "TPU_NAME", ("n", "q", "y"), id="full-resource-name"
        ),
        pytest.param(
            {"TPU_CONFIG": json.dumps(CONFIG), "LAUNCHER_TPU_PROJECT": "mine", "LAUNCHER_TPU_ZONE": "here"},
            "TPU_CONFIG",
            ("tpu-a", "mine", "here"),
            id="T12-explicit",
        ),
        pytest.param(
            {"TPU_CONFIG": json.dumps({"tpu_node_name": "tpu-a", "zone": None})},
            "TPU_CONFIG",
            ("tpu-a", "", ""),
            id="only-name",
        ),
    ],
)
def test_name_project_and_zone(env: dict[str, str], source: str, expected: tuple[str, str, str]) -> None:
    assert _node(env, source) == expected


def test_T61_tpu_config_of_another_node_is_kept_as_fallback() -> None:
    env = {"TPU_NAME": "pod", "TPU_CONFIG": json.dumps(CONFIG)}
    node = node_from_env(env, Settings(env), "TPU_NAME")
    assert (node.fallback_project, node.fallback_zone) == ("p", "z")


def test_unusable_tpu_config_is_no_error_when_tpu_name_decides() -> None:
    env = {"TPU_NAME": "pod", "TPU_CONFIG": "not json"}
    node = node_from_env(env, Settings(env), "TPU_NAME")
    assert node.name == "pod"
    assert "TPU_CONFIG is not JSON" in node.warnings[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param("multiple,elements", "Using multiple TPUs in a single session is not yet implemented", id="T07"),
        pytest.param("a b", "no name of a TPU node", id="space"),
        pytest.param("../../secret", "no name of a TPU node", id="path"),
        pytest.param("..", "no name of a TPU node", id="dots"),
        pytest.param("tpu?x=1", "no name of a TPU node", id="query"),
        pytest.param("tpu\u00e9", "no name of a TPU node", id="accent"),
    ],
)
def test_names_that_cannot_stand_in_a_url(value: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        _node({"TPU_NAME": value}, "TPU_NAME")
    assert caught.value.status == 2
    assert said in caught.value.message


def _answer(data: object, status: int = 200) -> tuple[str, list[str]]:
    answer = classify("tpu_name", status, data if isinstance(data, bytes) else json.dumps(data).encode())
    return answer.action, [str(endpoint) for endpoint in answer.endpoints]


FOUR = [{"ipAddress": f"10.2.3.{n}", "port": 8470} for n in (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param({"ipAddress": "10.1.2.3", "port": "8470"}, (WAIT, []), id="T08"),
        pytest.param(
            {"state": "READY", "health": "HEALTHY", "ipAddress": "10.1.2.3", "port": "8470"},
            (READY, ["10.1.2.3:8470"]),
            id="T09",
        ),
        pytest.param({"state": "CREATING", "networkEndpoints": FOUR[:1]}, (WAIT, []), id="T23"),
        pytest.param({"state": "READY", "networkEndpoints": FOUR[:1]}, (READY, ["10.2.3.4:8470"]), id="T25"),
        pytest.param(
            {"state": "READY", "networkEndpoints": FOUR}, (READY, [f"10.2.3.{n}:8470" for n in (4, 5, 6, 7)]), id="T26"
        ),
        pytest.param({"state": "READY"}, (WAIT, []), id="ready-without-address"),
        pytest.param({"state": "READY", "networkEndpoints": []}, (WAIT, []), id="ready-empty-list"),
        pytest.param({"state": "READY", "networkEndpoints": [{"port": 8470}]}, (WAIT, []), id="entry-without-address"),
        pytest.param({"state": "READY", "networkEndpoints": [*FOUR, {}]}, (WAIT, []), id="one-entry-without-address"),
        pytest.param(
            {"state": "READY", "networkEndpoints": [{"ipAddress": "1.2.3.4"}]}, (READY, ["1.2.3.4:8470"]), id="no-port"
        ),
        pytest.param({"state": "READY", "networkEndpoints": "x"}, (WAIT, []), id="endpoints-of-another-type"),
        pytest.param({"state": "READY", "networkEndpoints": [7]}, (WAIT, []), id="entry-of-another-type"),
        pytest.param(
            {"state": "READY", "networkEndpoints": [{"ipAddress": "a|b", "port": 1}]}, (WAIT, []), id="no-host"
        ),
        pytest.param({"state": "READY", "networkEndpoints": [{"ipAddress": "a", "port": 0}]}, (WAIT, []), id="port-0"),
        pytest.param({"state": 7}, (WAIT, []), id="state-of-another-type"),
        pytest.param([], (WAIT, []), id="list"),
        pytest.param(b"\x00\xff{[", (WAIT, []), id="garbage"),
        pytest.param(b"", (WAIT, []), id="empty"),
        pytest.param(b"[" * 100000, (WAIT, []), id="nested"),
    ],
)
def test_answers(data: object, expected: tuple[str, list[str]]) -> None:
    assert _answer(data) == expected


@pytest.mark.parametrize(
    ("state", "action"),
    [
        *((state, WAIT) for state in ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING")),
        *((state, WAIT) for state in ("STATE_UNSPECIFIED", "UNKNOWN", "SOMETHING_NEW")),
        *((state, LOST) for state in ("PREEMPTED", "TERMINATED")),
        *((state, NEVER) for state in ("STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")),
    ],
)
def test_states(state: str, action: str) -> None:
    assert _answer({"state": state, "networkEndpoints": FOUR}) == (action, [])


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (400, NEVER), (401, UNAUTHORIZED), (403, FORBIDDEN), (404, NOT_FOUND), (408, WAIT), (429, WAIT),
        (500, WAIT), (502, WAIT), (503, WAIT), (504, WAIT), (301, FORBIDDEN), (405, FORBIDDEN),
    ],
)  # fmt: skip
def test_T73_statuses(status: int, action: str) -> None:
    error = {"error": {"code": status, "message": "the\nmessage", "status": "X"}}
    answer = classify("tpu-a", status, json.dumps(error).encode())
    assert answer.action == action
    assert answer.reason == f"HTTP {status} for TPU 'tpu-a': the message"


def test_T08_message_is_the_one_alerts_look_for() -> None:
    assert classify("t", 200, b"{}").reason == 'TPU "t" is not yet ready; state: "None"'
    assert classify("t", 200, b'{"state": "CREATING"}').reason == 'TPU "t" is not yet ready; state: "CREATING"'
