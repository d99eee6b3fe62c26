"""The TPU node that the environment names (R7, R11), and the meaning of a response of the API (R12.1)."""

from __future__ import annotations

import json

import pytest
from launcher.errors import LaunchError
from launcher.settings import Settings
from launcher.tpu_node.node import (
    FORBIDDEN,
    LOST,
    NOT_FOUND,
    READY,
    UNAUTHORIZED,
    UNUSABLE,
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
        pytest.param("1.2.3.4:1234", ["1.2.3.4:1234"], id="one-ip"),
        pytest.param("grpc://1.2.3.4:2000", ["1.2.3.4:2000"], id="one-grpc-address"),
        pytest.param("1.2.3.4:2000,5.6.7.8:1234", ["1.2.3.4:2000", "5.6.7.8:1234"], id="two-ips"),
        pytest.param(
            "grpc://1.2.3.4:2000,grpc://5.6.7.8:1234", ["1.2.3.4:2000", "5.6.7.8:1234"], id="two-grpc-addresses"
        ),
        pytest.param("grpc://1.2.3.4:8470", ["1.2.3.4:8470"], id="grpc-with-default-port"),
        pytest.param("grpc://10.120.27.5:8470", ["10.120.27.5:8470"], id="gke-one-worker"),
        pytest.param(
            ",".join(f"grpc://10.120.27.{n}:8470" for n in (5, 6, 7, 8)),
            [f"10.120.27.{n}:8470" for n in (5, 6, 7, 8)],
            id="gke-four-workers",
        ),
        pytest.param("grpc://10.0.0.1", ["10.0.0.1:8470"], id="grpc-without-port"),
        pytest.param("10.0.0.1", ["10.0.0.1:8470"], id="ip-without-port"),
        pytest.param("grpc://my-host.svc:8471", ["my-host.svc:8471"], id="host-name"),
        pytest.param("tpu-a", [], id="name"),
        pytest.param("projects/p/locations/z/nodes/n", [], id="full-resource-name-is-a-name"),
    ],
)
def test_parsing_of_addresses(value: str, expected: list[str]) -> None:
    assert [str(endpoint) for endpoint in parse_endpoints(value)] == expected


@pytest.mark.parametrize(
    "value",
    ["grpc://", "grpc://1.2.3.4:0", "grpc://1.2.3.4:99999", "grpc://[::1]:8470", "1.2.3.4:1,tpu-a", "grpc://a;b:1"],
)
def test_invalid_addresses_are_configuration_errors(value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_endpoints(value)
    assert caught.value.status == 2
    assert "grpc://IP:PORT" in caught.value.message


def test_the_error_for_an_ipv6_address_says_so() -> None:
    with pytest.raises(LaunchError, match="IPv6"):
        parse_endpoints("grpc://[::1]:8470")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param('{"project":"p"}', "TPU_CONFIG has no tpu_node_name", id="no-name"),
        pytest.param("not json", "TPU_CONFIG is not JSON", id="not-JSON"),
        pytest.param("[]", "not a JSON object", id="list"),
        pytest.param('{"tpu_node_name": 3}', "tpu_node_name must be a string", id="number"),
        pytest.param('{"tpu_node_name": " "}', "TPU_CONFIG has no tpu_node_name", id="blank"),
        pytest.param("[" * 100000, "TPU_CONFIG is not JSON", id="nested"),
    ],
)
def test_invalid_tpu_config(value: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_tpu_config(value)
    assert caught.value.status == 2
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def _node(env: dict[str, str], source: str) -> tuple[str, str, str]:
    node = node_from_env(env, Settings(env), source)
    return node.name, node.project, node.zone


@pytest.mark.parametrize(
    ("env", "source", "expected"),
    [
        pytest.param({"TPU_CONFIG": json.dumps(CONFIG)}, "TPU_CONFIG", ("tpu-a", "p", "z"), id="TPU_CONFIG"),
        pytest.param(
            {"TPU_NAME": "tpu-a", "TPU_CONFIG": json.dumps(CONFIG)}, "TPU_NAME", ("tpu-a", "p", "z"), id="same-node"
        ),
        pytest.param(
            {"TPU_NAME": "pod", "TPU_CONFIG": json.dumps(CONFIG)},
            "TPU_NAME",
            ("pod", "", ""),
            id="TPU_CONFIG-of-another-node",
        ),
        pytest.param(
            {"TPU_NAME": "projects/q/locations/y/nodes/n"}, "TPU_NAME", ("n", "q", "y"), id="full-resource-name"
        ),
        pytest.param(
            {"TPU_CONFIG": json.dumps(CONFIG), "LAUNCHER_TPU_PROJECT": "mine", "LAUNCHER_TPU_ZONE": "here"},
            "TPU_CONFIG",
            ("tpu-a", "mine", "here"),
            id="project-and-zone-from-settings",
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


def test_tpu_config_of_another_node_is_the_fallback() -> None:
    env = {"TPU_NAME": "pod", "TPU_CONFIG": json.dumps(CONFIG)}
    node = node_from_env(env, Settings(env), "TPU_NAME")
    assert (node.fallback_project, node.fallback_zone) == ("p", "z")


def test_an_invalid_tpu_config_is_a_warning_if_tpu_name_decides() -> None:
    env = {"TPU_NAME": "pod", "TPU_CONFIG": "not json"}
    node = node_from_env(env, Settings(env), "TPU_NAME")
    assert node.name == "pod"
    assert "TPU_CONFIG is not JSON" in node.warnings[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(
            "multiple,elements", "Using multiple TPUs in a single session is not yet implemented", id="several-names"
        ),
        pytest.param("a b", "is not the name of a TPU node", id="space"),
        pytest.param("../../secret", "is not the name of a TPU node", id="path"),
        pytest.param("..", "is not the name of a TPU node", id="dots"),
        pytest.param("tpu?x=1", "is not the name of a TPU node", id="query"),
        pytest.param("tpu\u00e9", "is not the name of a TPU node", id="accent"),
    ],
)
def test_names_that_are_invalid_in_a_url(value: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        _node({"TPU_NAME": value}, "TPU_NAME")
    assert caught.value.status == 2
    assert message in caught.value.message


def _answer(data: object, status: int = 200) -> tuple[str, list[str]]:
    answer = classify("tpu_name", status, data if isinstance(data, bytes) else json.dumps(data).encode())
    return answer.action, [str(endpoint) for endpoint in answer.endpoints]


FOUR = [{"ipAddress": f"10.2.3.{n}", "port": 8470} for n in (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param({"ipAddress": "10.1.2.3", "port": "8470"}, (WAIT, []), id="no-state"),
        pytest.param(
            {"state": "READY", "health": "HEALTHY", "ipAddress": "10.1.2.3", "port": "8470"},
            (READY, ["10.1.2.3:8470"]),
            id="ready-with-address",
        ),
        pytest.param({"state": "CREATING", "networkEndpoints": FOUR[:1]}, (WAIT, []), id="creating"),
        pytest.param(
            {"state": "READY", "networkEndpoints": FOUR[:1]}, (READY, ["10.2.3.4:8470"]), id="ready-with-endpoint"
        ),
        pytest.param(
            {"state": "READY", "networkEndpoints": FOUR},
            (READY, [f"10.2.3.{n}:8470" for n in (4, 5, 6, 7)]),
            id="ready-with-four-endpoints",
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
def test_meaning_of_a_response(data: object, expected: tuple[str, list[str]]) -> None:
    assert _answer(data) == expected


@pytest.mark.parametrize(
    ("state", "action"),
    [
        *((state, WAIT) for state in ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING")),
        *((state, WAIT) for state in ("STATE_UNSPECIFIED", "UNKNOWN", "SOMETHING_NEW")),
        *((state, LOST) for state in ("PREEMPTED", "TERMINATED")),
        *((state, UNUSABLE) for state in ("STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN")),
    ],
)
def test_meaning_of_a_state(state: str, action: str) -> None:
    assert _answer({"state": state, "networkEndpoints": FOUR}) == (action, [])


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (400, UNUSABLE), (401, UNAUTHORIZED), (403, FORBIDDEN), (404, NOT_FOUND), (408, WAIT), (429, WAIT),
        (500, WAIT), (502, WAIT), (503, WAIT), (504, WAIT), (301, FORBIDDEN), (405, FORBIDDEN),
    ],
)  # fmt: skip
def test_meaning_of_an_http_status(status: int, action: str) -> None:
    error = {"error": {"code": status, "message": "the\nmessage", "status": "X"}}
    answer = classify("tpu-a", status, json.dumps(error).encode())
    assert answer.action == action
    assert answer.reason == f"HTTP {status} for TPU 'tpu-a': the message"


def test_the_message_is_that_of_tensorflows_client() -> None:
    assert classify("t", 200, b"{}").reason == 'TPU "t" is not yet ready; state: "None"'
    assert classify("t", 200, b'{"state": "CREATING"}').reason == 'TPU "t" is not yet ready; state: "CREATING"'
