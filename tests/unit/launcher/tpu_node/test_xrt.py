"""XRT: the grammar of XRT_TPU_CONFIG (R2.1), variables for several TPU workers (R11.6) and for TPU VMs (R4.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launcher.errors import LaunchError
from launcher.tpu_node import xrt
from launching import Launch

SERVERS = [(f"10.2.0.{n}", 8470) for n in range(4)]
CLIENTS = [f"10.0.0.{n}" for n in range(4)]
POD_CONFIG = (
    "c_tpu_worker;0;10.2.0.0:8470|c_tpu_worker;1;10.2.0.1:8470|"
    "c_tpu_worker;2;10.2.0.2:8470|c_tpu_worker;3;10.2.0.3:8470"
)


def _client(ordinal: int) -> dict[str, str]:
    return {
        "XRT_LOCAL_WORKER": f"c_tpu_worker:{ordinal}",
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.0:8477",
        "XRT_SHARD_WORLD_SIZE": "4",
        "XRT_SHARD_ORDINAL": str(ordinal),
        "TPU_NUM_DEVICES": "8",
        "XLA_EMIT_STEPLOG": "1",
    }


@pytest.mark.parametrize(
    ("ordinal", "expected"),
    [
        pytest.param(0, {**_client(0), "XRT_TPU_CONFIG": POD_CONFIG}, id="first-host"),
        pytest.param(3, _client(3), id="last-host"),
    ],
)
def test_variables_for_several_tpu_workers(ordinal: int, expected: dict[str, str]) -> None:
    assert xrt.pod(SERVERS, 4, "10.0.0.0", ordinal, xrt.cores_per_host("v3-32"), on_vm=False) == expected


def test_variables_for_a_slice_of_tpu_vms() -> None:
    assert xrt.vm_pod(CLIENTS, 0, "v3-32", "") == {
        "XRT_LOCAL_WORKER": "c_localservice:0",
        "XRT_MESH_SERVICE_ADDRESS": "10.0.0.0:8477",
        "XRT_SHARD_WORLD_SIZE": "4",
        "XRT_SHARD_ORDINAL": "0",
        "TPU_NUM_DEVICES": "8",
        "XLA_EMIT_STEPLOG": "1",
        "XRT_TPU_CONFIG": "|".join(f"c_localservice;{n};10.0.0.{n}:51011" for n in range(4)),
        "TPUVM_MODE": "1",
        "CLOUD_TPU_TASK_ID": "0",
        "TPU_HOST_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_MESH_CONTROLLER_ADDRESS": "10.0.0.0:8476",
        "TPU_MESH_CONTROLLER_PORT": "8476",
    }


@pytest.mark.parametrize("clients", [pytest.param(3, id="three-clients"), pytest.param(1, id="one-client")])
def test_one_trainer_host_per_tpu_worker_is_required(clients: int) -> None:
    with pytest.raises(LaunchError) as caught:
        xrt.pod(SERVERS, clients, "10.0.0.0", 0, 8, on_vm=False)
    assert caught.value.status == 2
    assert "The client_workers and service_workers must have a 1:1 mapping" in caught.value.message


def test_unknown_bounds_of_a_slice_of_tpu_vms() -> None:
    with pytest.raises(LaunchError, match="'v3-16' has no known host bounds"):
        xrt.vm_pod(CLIENTS[:2], 0, "v3-16", "")
    assert xrt.vm_pod(CLIENTS[:2], 0, "v3-16", "1,2,1")["TPU_HOST_BOUNDS"] == "1,2,1"


@pytest.mark.parametrize(
    ("kind", "hosts"), [("v3-32", 4), ("v3-128", 16), ("v2-512", 64), ("v4-16", 2), ("v4-1024", 128)]
)
def test_host_bounds_agree_with_the_number_of_hosts(kind: str, hosts: int) -> None:
    x, y, z = (int(word) for word in xrt.HOST_BOUNDS[kind].split(","))
    assert x * y * z == hosts


@pytest.mark.parametrize(
    ("value", "workers"),
    [
        ("tpu_worker;0;10.1.2.3:8470", [("tpu_worker", 0, "10.1.2.3", 8470)]),
        ("localservice;0;localhost:51011", [("localservice", 0, "localhost", 51011)]),
        ("a;0;h-1.x_y:1|a;1;h-2:65535", [("a", 0, "h-1.x_y", 1), ("a", 1, "h-2", 65535)]),
    ],
)
def test_parsing_of_xrt_tpu_config(value: str, workers: list[tuple[str, int, str, int]]) -> None:
    assert xrt.parse_config(value) == workers


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("tpu_worker;0;grpc://1.2.3.4:8470", id="grpc-prefix"),
        "tpu_worker;0",
        "tpu_worker;0;1.2.3.4",
        "tpu_worker;x;1.2.3.4:8470",
        "tpu_worker;0;1.2.3.4:0",
        "tpu_worker;0;[::1]:8470",
        "tpu worker;0;1.2.3.4:8470",
        ";0;1.2.3.4:8470",
        "tpu_worker;0;1.2.3.4:8470|",
        "a;0;b:1;c",
        "|",
    ],
)
def test_invalid_xrt_tpu_config(value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        xrt.parse_config(value)
    assert caught.value.status == 2
    assert "bad worker syntax" in caught.value.message


def test_exports_for_the_second_of_two_tpu_workers(
    launch: Launch, google_cloud: Callable[..., Any], cluster_spec: Any, tpu_config: Any
) -> None:
    google_cloud(endpoints=["10.2.0.0:8470", "10.2.0.1:8470"], accelerator_type="v4-16")
    env = {"TPU_CONFIG": tpu_config(), "LAUNCHER_FRAMEWORK": "torch_xla==2.0"}
    env["CLUSTER_SPEC"] = cluster_spec([1, 1], "workerpool1", 0)
    exports = launch(env).exports
    assert exports["XRT_SHARD_ORDINAL"] == "1"
    assert exports["XRT_MESH_SERVICE_ADDRESS"] == "cmle-training-workerpool0-ab-0:8477"
    assert exports["TPU_NUM_DEVICES"] == "4"
    assert "XRT_TPU_CONFIG" not in exports


@pytest.mark.parametrize(("framework", "status"), [("torch_xla==2.0", 2), ("", 0), ("tensorflow==2.20", 0)])
def test_one_trainer_host_for_two_tpu_workers_is_status_2_only_for_torch_xla(
    launch: Launch, google_cloud: Callable[..., Any], tpu_config: Any, framework: str, status: int
) -> None:
    google_cloud(endpoints=["10.2.0.0:8470", "10.2.0.1:8470"])
    launched = launch({"TPU_CONFIG": tpu_config(), "LAUNCHER_FRAMEWORK": framework})
    assert launched.status == status
    assert ("1:1 mapping" in launched.err + launched.out) == (framework != "tensorflow==2.20")
