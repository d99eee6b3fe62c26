"""Host names, IPv4 and IPv6 addresses, with and without a port (R13.20)."""

from __future__ import annotations

import ipaddress
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import address, tpu_vm
from launcher.cluster import resolve
from launcher.errors import LaunchError
from launcher.settings import Settings
from launching import Launch
from tests.examples import examples

TORCH = {"LAUNCHER_FRAMEWORK": "torch==2.9.1"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("host", ("host", 0)),
        ("host:2222", ("host", 2222)),
        ("grpc://10.0.0.1:8470", ("10.0.0.1", 8470)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[::1]:2222", ("::1", 2222)),
        ("fd00::1:2222", ("fd00::1:2222", 0)),
        ("fe80::1%eth0", ("fe80::1%eth0", 0)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("::ffff:10.0.0.1", ("::ffff:10.0.0.1", 0)),
    ],
)
def test_host_and_port(value: str, expected: tuple[str, int]) -> None:
    assert address.split("MASTER_ADDR", value) == expected
    host, port = expected
    assert not port or address.split("X", address.join(host, port)) == expected


@pytest.mark.parametrize(
    "value",
    ["", "a b", "host:", "host:x", "host:70000", "[::1", "[::1]2222", "[::1]:", "[host]:1", ":::1", "1::2::3", "::",
     "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "12345::1", "::g", "a:b:c", "::1.2.3", "1.2.3.4::", "fe80::1%", "::1%a b"],
)  # fmt: skip
def test_what_is_not_an_address(value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        address.split("MASTER_ADDR", value)
    assert caught.value.status == 2
    assert "MASTER_ADDR" in caught.value.message


@settings(derandomize=True, database=None, max_examples=examples(300))
@given(st.text("0123456789abcdefF:.%g", max_size=24) | st.ip_addresses(v=6).map(str))
def test_the_same_words_are_ipv6_addresses_as_in_the_standard_library(word: str) -> None:
    try:
        expected = ipaddress.IPv6Address(word) != ipaddress.IPv6Address("::")
    except ValueError:
        expected = False
    if "%" in word or (expected and int(ipaddress.IPv6Address(word)) == 0):
        return  # zones have no agreed grammar; the address of no host is refused
    assert address.is_ipv6(word) == expected


@pytest.mark.parametrize(
    ("env", "head", "port"),
    [
        pytest.param({"MASTER_ADDR": "::1", "RANK": "1", "WORLD_SIZE": "2"}, "::1", 29500, id="MASTER_ADDR"),
        pytest.param({"MASTER_ADDR": "[::1]:1234", "RANK": "1", "WORLD_SIZE": "2"}, "::1", 1234, id="with-port"),
        pytest.param({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "[::1]:99"}, "::1", 99, id="PET"),
        pytest.param(
            {
                "CLUSTER_SPEC": json.dumps(
                    {
                        "cluster": {"workerpool0": ["[fd00::1]:2222"], "workerpool1": ["[fd00::2]:2222"]},
                        "task": {"type": "workerpool1", "index": 0},
                    }
                )
            },
            "fd00::1",
            2222,
            id="CLUSTER_SPEC",
        ),
    ],
)
def test_ipv6_addresses_of_node_0(launch: Launch, env: dict[str, str], head: str, port: int) -> None:
    data = launch({**TORCH, **env}).data
    assert (data["cluster"]["master_addr"], data["cluster"]["master_port"]) == (head, port)
    assert (data["cluster"]["node_rank"], data["cluster"]["nnodes"]) == (1, 2)
    assert f"node 0 at [{head}]:{port}" in launch({**TORCH, **env}, "--explain").out


def test_a_master_addr_with_a_port_is_exported_without_it(launch: Launch) -> None:
    """PyTorch takes MASTER_ADDR for a host name."""
    for value, host in (("[::1]:1234", "::1"), ("[::1]", "::1"), ("m:1234", "m")):
        exports = launch({**TORCH, "MASTER_ADDR": value, "RANK": "1", "WORLD_SIZE": "2"}).exports
        assert exports["MASTER_ADDR"] == host
    for value in ("::1", "m"):
        assert "MASTER_ADDR" not in launch({**TORCH, "MASTER_ADDR": value, "RANK": "1", "WORLD_SIZE": "2"}).exports


@pytest.mark.parametrize(
    "env",
    [
        {"TPU_WORKER_HOSTNAMES": "fd00::1,fd00::2"},
        {"TPU_WORKER_HOSTNAMES": "[fd00::1],[fd00::2]"},
        {"TPU_PROCESS_ADDRESSES": "[fd00::1]:8476,[fd00::1]:8477,[fd00::2]:8476,[fd00::2]:8477"},
    ],
)
def test_a_slice_of_ipv6_hosts(env: dict[str, str]) -> None:
    env = {**env, "TPU_WORKER_ID": "1"}
    found = tpu_vm.slice_from_env(env)
    assert found.workers == ["fd00::1", "fd00::2"]
    cluster = resolve(env, Settings(env), found)
    assert (cluster.node_rank, cluster.nnodes, cluster.master_addr) == (1, 2, "fd00::1")


def test_ipv6_workers_of_the_metadata_server_cannot_be_read_by_torch_xla() -> None:
    assert tpu_vm.parse_worker_endpoints("w-0:1:fd00::1,w-1:2:fd00::2") == (["fd00::1", "fd00::2"], True)
    assert tpu_vm.parse_worker_endpoints("fd00::1,fd00::2") == (["fd00::1", "fd00::2"], True)


def test_xrt_refuses_ipv6_addresses(launch: Launch) -> None:
    env = {
        "LAUNCHER_FRAMEWORK": "torch_xla==1.12",
        "TPU_WORKER_HOSTNAMES": "fd00::1,fd00::2",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v4-16",
    }
    launched = launch(env)
    assert launched.status == 2
    assert "XRT has no form for the IPv6 address fd00::1" in launched.err
