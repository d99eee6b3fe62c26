"""TPUs attached to this host: GKE slices (R3) and TPU VMs (R4).

The environments of GKE are those of its device plugin's own test, see docs/launcher-contract.md#gke-device-plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import tpu_vm
from launcher.errors import LaunchError
from launching import Launch, Machine

PLUGIN = {
    "TPU_SKIP_MDS_QUERY": "true",
    "VBAR_CONTROL_SERVICE_URL": "unix:///var/run/tpu-plugin/vbar.sock",
    "ALT": "false",
}
XLA = {"LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"}


def gke(kind: str, bounds: str = "", chips: str = "", wrap: str = "false,false,false", **more: str) -> dict[str, str]:
    """The variables that GKE's device plugin sets, including the older names."""
    env = {**PLUGIN, "TPU_ACCELERATOR_TYPE": kind, "WRAP": wrap, "TPU_TOPOLOGY_WRAP": wrap, **more}
    if bounds:
        env.update(TPU_HOST_BOUNDS=bounds, HOST_BOUNDS=bounds)
        env.update(TPU_CHIPS_PER_HOST_BOUNDS=chips, CHIPS_PER_HOST_BOUNDS=chips)
    return env


SINGLE = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
HOSTS64 = {"TPU_WORKER_ID": "5", "TPU_WORKER_HOSTNAMES": ",".join(f"w-{n}" for n in range(64))}


@pytest.mark.parametrize(
    ("env", "added"),
    [
        pytest.param(gke("v4-8", "1,1,1", "2,2,1", **SINGLE), {}, id="v4-8"),
        pytest.param(
            gke("v4-16", "1,1,2", "2,2,1", TPU_WORKER_ID="1", TPU_WORKER_HOSTNAMES="a,b"), {}, id="v4-16-with-webhook"
        ),
        pytest.param(
            gke("v5litepod-1", "1,1,1", "1,1,1"),
            {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
            id="v5litepod-1",
        ),
        pytest.param(gke("v5litepod-256", "8,8,1", "2,2,1", "true,true,false", **HOSTS64), {}, id="v5litepod-256"),
        pytest.param(
            gke("v5p-8", "1,1,1", "2,2,1", TPU_WORKER_ID="0"), {"TPU_WORKER_HOSTNAMES": "localhost"}, id="v5p-8"
        ),
        pytest.param(
            gke("v6e-8", "1,1,1", "2,4,1", TPU_WORKER_ID="0"), {"TPU_WORKER_HOSTNAMES": "localhost"}, id="v6e-8"
        ),
        pytest.param(gke("v3-8", TPU_WORKER_ID="0"), {"TPU_WORKER_HOSTNAMES": "localhost"}, id="v3-8"),
        pytest.param(
            gke("tpu7x-8", "1,1,1", "2,2,1"),
            {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
            id="tpu7x-8-without-worker-id",
        ),
        pytest.param(
            {
                "TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476",
                "TPU_WORKER_ID": "0",
                "TPU_ACCELERATOR_TYPE": "v4-16",
            },
            {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_SKIP_MDS_QUERY": "1"},
            id="addresses",
        ),
    ],
)
def test_exports_on_gke(launch: Launch, env: dict[str, str], added: dict[str, str]) -> None:
    data = launch({**env, **XLA}).data
    assert data["runtime"] == "tpu-local"
    exports = {
        name: value for name, value in data["exports"].items() if name.startswith(("TPU", "PJRT", "XRT", "CLOUD"))
    }
    assert exports == {"PJRT_DEVICE": "TPU", **added}
    multi_host = "," in env.get("TPU_WORKER_HOSTNAMES", "") or "," in env.get("TPU_PROCESS_ADDRESSES", "")
    assert ("NODE_RANK" in data["exports"]) == multi_host
    assert "MASTER_ADDR" not in data["exports"]  # torch_xla selects its own rendezvous host


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param(gke("v4-16", "1,1,2", "2,2,1"), "without TPU_WORKER_ID", id="v4-16-without-webhook"),
        pytest.param(
            gke("v4-128", "2,2,4", "2,2,1", "true,true,true"), "a slice of 16 hosts", id="v4-128-without-webhook"
        ),
        pytest.param(
            {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3"},
            "a slice of 4 hosts without TPU_WORKER_ID",
            id="hostnames-without-worker-id",
        ),
        pytest.param(gke("v3-32"), "a slice of 4 hosts", id="v3-32-without-bounds"),
        pytest.param(
            gke("v3-16", TPU_WORKER_ID="0"), "'v3-16': torch_xla has no v3 slice of this type", id="unknown-v3-type"
        ),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x'", id="id"),
        pytest.param(
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "2"}, "the slice has 2 workers", id="id-too-high"
        ),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b c", "TPU_WORKER_ID": "0"}, "is not a host name", id="host"),
        *(
            pytest.param(gke(kind), "Failed to parse TPU version from metadata", id=kind)
            for kind in (
                "tpu-v5-lite-podslice",
                "v4",
                "V4-8",
                "ct5lp-hightpu-4t",
                "v5litepodxx-8",
                "v-8",
                "v4-",
                "v44-8",
            )
        ),
    ],
)
def test_invalid_slices_are_status_2_and_a_warning_in_a_rehearsal(
    launch: Launch, env: dict[str, str], message: str
) -> None:
    launched = launch(env)
    assert launched.status == 2
    assert message in launched.err
    rehearsed = launch({**env, "LAUNCHER_REHEARSE": "1"})
    assert message in " ".join(rehearsed.data["warnings"])  # a warning in a rehearsal


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, id=kind)
        for kind, number in (
            ("v2-8", 2), ("v3-8", 3), ("v4-8", 4), ("v5litepod-8", 5), ("v5p-8", 5), ("v6e-8", 6), ("tpu7x-8", 7),
            ("v5abcdefg-16", 5),
        )
    ],
)  # fmt: skip
def test_generation_of_an_accelerator_type(kind: str, number: int) -> None:
    assert tpu_vm.generation(kind) == number


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({"TPU_PROCESS_ADDRESSES": "1:1,2:1"}, ("TPU_PROCESS_ADDRESSES", ["1:1", "2:1"]), id="addresses"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b"}, ("TPU_WORKER_HOSTNAMES", ["a", "b"]), id="hostnames"),
        pytest.param({}, ("", []), id="none"),
        pytest.param(
            {"TPU_PROCESS_ADDRESSES_PATH": "", "TPU_PROCESS_ADDRESSES": "1:1", "TPU_WORKER_HOSTNAMES": "a"},
            ("TPU_PROCESS_ADDRESSES", ["1:1"]),
            id="empty-path",
        ),
    ],
)
def test_precedence_of_worker_lists(env: dict[str, str], expected: tuple[str, list[str]]) -> None:
    assert tpu_vm.worker_list(env) == expected


def test_worker_addresses_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    file.write_text("  10.0.0.1:8476,10.0.0.2:8476 \n")
    env = {"TPU_PROCESS_ADDRESSES_PATH": str(file), "TPU_PROCESS_ADDRESSES": "10.9.9.9:1", "TPU_WORKER_ID": "1"}
    assert tpu_vm.worker_list(env) == ("TPU_PROCESS_ADDRESSES_PATH", ["10.0.0.1:8476", "10.0.0.2:8476"])
    assert tpu_vm.slice_from_env(env).workers == ["10.0.0.1", "10.0.0.2"]


def test_a_number_of_hosts_that_python_cannot_print_is_not_an_internal_error(launch: Launch) -> None:
    env = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_SKIP_MDS_QUERY": "1", "TPU_PROCESS_BOUNDS": ",".join(["99999"] * 1000)}
    assert launch(env).data["runtime"] == "tpu-local"


@pytest.mark.parametrize("content", [None, "   \n  \t ", "\0"])
def test_an_unreadable_file_is_an_error_even_with_other_variables(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "addresses"
    if content is not None:
        file.write_text(content)
    with pytest.raises(LaunchError) as caught:
        tpu_vm.slice_from_env({"TPU_PROCESS_ADDRESSES_PATH": str(file), "TPU_WORKER_HOSTNAMES": "a"})
    assert caught.value.status == 2


@pytest.mark.parametrize(
    ("env", "number"),
    [
        pytest.param({}, None, id="unset"),
        *(pytest.param({"CLOUD_TPU_TASK_ID": str(n)}, n, id=f"task-id-{n}") for n in (0, 1, 15)),
        pytest.param({"CLOUD_TPU_TASK_ID": "1", "TPU_WORKER_ID": "0"}, 1, id="task-id-first"),
        pytest.param(
            {"CLOUD_TPU_TASK_ID": "4", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"},
            1,
            id="task-id-of-a-process",
        ),
    ],
)
def test_number_of_this_host(env: dict[str, str], number: int | None) -> None:
    assert tpu_vm.slice_from_env({"TPU_WORKER_HOSTNAMES": "a", **env}).worker_id == number


def test_several_processes_of_a_host_are_one_host() -> None:
    addresses = ",".join(f"10.0.0.{host}:{port}" for host in (1, 2) for port in range(8476, 8480))
    assert tpu_vm.slice_from_env({"TPU_PROCESS_ADDRESSES": addresses, "TPU_WORKER_ID": "1"}).hosts == 2


@pytest.mark.parametrize(
    ("bounds", "size"),
    [
        pytest.param("", 0, id="unset-bounds"),
        pytest.param("1,1,1", 1, id="1"),
        pytest.param("2,2,1", 4, id="4"),
        pytest.param("2,2,2", 8, id="8"),
        pytest.param("2,2,4", 16, id="16"),
        pytest.param("2,2,1,2", 8, id="four-dimensions"),
        pytest.param("2,x,1", 0, id="no-number"),
        pytest.param(",".join(["99999"] * 1000), 0, id="5000-digits"),
    ],
)
def test_number_of_hosts_from_bounds(bounds: str, size: int) -> None:
    assert tpu_vm.volume(bounds) == size


TPU_ENV = """\
ACCELERATOR_TYPE: 'v4-16'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
HOST_BOUNDS: '1,1,2'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: '1,1,2'
TPU_RUNTIME_METRICS_PORTS: '8431,8432,8433,8434'
WORKER_ID: '1'
ZONE: 'us-central2-b'
"""
OLD_FORMAT = "t1v-n-1-w-0:12345:10.130.0.31,t1v-n-1-w-1:12346:10.130.0.30"
NEW_FORMAT = "t1v-n-1-w-0.c.p.internal,t1v-n-1-w-1.c.p.internal"


def test_parsing_of_tpu_env() -> None:
    found = tpu_vm.parse_tpu_env(TPU_ENV)
    assert (found["ACCELERATOR_TYPE"], found["WORKER_ID"], found["ZONE"]) == ("v4-16", "1", "us-central2-b")


def test_bounds_from_the_older_names_in_tpu_env() -> None:
    text = "ACCELERATOR_TYPE: 'v4-16'\nHOST_BOUNDS: '1,1,2'\nCHIPS_PER_HOST_BOUNDS: '2,1,1'\nWORKER_ID: '0'\n"
    found = tpu_vm.slice_from_metadata({"tpu-env": text})
    assert (found.process_bounds, found.chips_bounds, found.worker_id) == ("1,1,2", "2,1,1", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("t1v-n-ea9d3291-w-0:12345:10.130.0.31", (["10.130.0.31"], False), id="one-worker"),
        pytest.param(OLD_FORMAT, (["10.130.0.31", "10.130.0.30"], False), id="old"),
        pytest.param(NEW_FORMAT, (NEW_FORMAT.split(","), True), id="new"),
        pytest.param("", ([], False), id="empty"),
        pytest.param("a b,\xff", ([], True), id="garbage"),
    ],
)
def test_formats_of_worker_network_endpoints(text: str, expected: tuple[list[str], bool]) -> None:
    assert tpu_vm.parse_worker_endpoints(text) == expected


@pytest.mark.parametrize(
    "attributes", [{}, {"tpu-env": "\xff: {[", "worker-network-endpoints": "::,::"}, {"tpu-env": "WORKER_ID: x"}]
)
def test_invalid_metadata_counts_as_missing(attributes: dict[str, str]) -> None:
    found = tpu_vm.slice_from_metadata(attributes)
    assert (found.hosts, found.worker_id, tpu_vm.metadata_as_variables(found)) == (1, None, {})


def _vm(machine: Machine, google_cloud: Callable[..., Any], workers: str, **attributes: str) -> Any:
    machine.add_devices("/dev/accel0", "/dev/accel1")
    names = {"tpu-env": TPU_ENV, "worker-network-endpoints": workers, "agent-worker-number": "1", **attributes}
    return google_cloud(attributes=names)


def test_a_slice_of_the_older_format_gets_only_its_rank(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    _vm(machine, google_cloud, OLD_FORMAT)
    data = launch(XLA).data
    assert data["exports"] == {"PJRT_DEVICE": "TPU", "NODE_RANK": "1", "NNODES": "2"}
    assert (data["cluster"]["master_addr"], data["cluster"]["source"]) == ("10.130.0.31", "the metadata server")


def test_a_slice_of_the_newer_format_is_exported_as_variables(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    _vm(machine, google_cloud, NEW_FORMAT)
    assert launch(XLA).exports == {
        "PJRT_DEVICE": "TPU",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_PROCESS_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": NEW_FORMAT,
        "NODE_RANK": "1",
        "NNODES": "2",
    }
    # PJRT_DEVICE set by the user: a warning instead of exports for the runtime.
    data = launch({**XLA, "PJRT_DEVICE": "TPU"}).data
    assert data["exports"] == {"NODE_RANK": "1", "NNODES": "2"}
    assert "cannot read this TPU VM's worker-network-endpoints" in data["warnings"][0]


def test_a_single_host_tpu_vm_gets_only_pjrt_device(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    _vm(machine, google_cloud, "t1v-n-1-w-0:12345:10.130.0.31", **{"tpu-env": "WORKER_ID: '0'"})
    exports = launch(XLA).exports
    assert {name for name in exports if name.startswith(("TPU", "PJRT"))} == {"PJRT_DEVICE"}


def test_a_slice_under_xrt(launch: Launch, machine: Machine, google_cloud: Callable[..., Any]) -> None:
    _vm(machine, google_cloud, OLD_FORMAT)
    exports = launch({"LAUNCHER_FRAMEWORK": "torch_xla==1.12"}).exports
    assert exports["XRT_LOCAL_WORKER"] == "c_localservice:1"
    assert exports["XRT_MESH_SERVICE_ADDRESS"] == "10.130.0.31:8477"
    assert "PJRT_DEVICE" not in exports


def test_without_a_metadata_server_a_single_host_is_assumed(launch: Launch, machine: Machine) -> None:
    machine.add_devices("/dev/accel0")
    data = launch({**XLA, "GCE_METADATA_HOST": "127.0.0.1:1"}).data
    assert data["exports"]["PJRT_DEVICE"] == "TPU"
    assert "assuming a single host" in data["warnings"][0]


def test_no_metadata_request_with_tpu_skip_mds_query_or_tensorflow(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    cloud = _vm(machine, google_cloud, OLD_FORMAT)
    launch({**XLA, "TPU_SKIP_MDS_QUERY": "1"})
    launch({"LAUNCHER_FRAMEWORK": "tensorflow==2.20.0"})
    assert cloud.requests == []


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_tpu_skip_mds_query_that_means_no_is_unset(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any], value: str
) -> None:
    cloud = _vm(machine, google_cloud, OLD_FORMAT)
    data = launch({**XLA, "TPU_SKIP_MDS_QUERY": value}).data
    assert data["unsets"] == ["TPU_SKIP_MDS_QUERY"]
    assert data["cluster"]["nnodes"] == 2
    assert cloud.requests


def test_tpu_skip_mds_query_that_means_no_is_replaced_where_it_must_be_yes(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    _vm(machine, google_cloud, NEW_FORMAT)
    data = launch({**XLA, "TPU_SKIP_MDS_QUERY": "0"}).data
    assert data["exports"]["TPU_SKIP_MDS_QUERY"] == "1"
    assert data["unsets"] == []


def test_tpu_skip_mds_query_that_means_no_does_not_describe_a_slice(launch: Launch) -> None:
    env = {**XLA, "TPU_ACCELERATOR_TYPE": "v4-8"}
    assert launch({**env, "TPU_SKIP_MDS_QUERY": "1"}).data["runtime"] == "tpu-local"
    assert launch({**env, "TPU_SKIP_MDS_QUERY": "0"}).data["runtime"] == "cpu"


@pytest.mark.parametrize("name", ["CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT"])
def test_variables_of_one_process_are_not_exported_and_warn(launch: Launch, name: str) -> None:
    env = {**gke("v4-8", "1,1,1", "2,2,1", **SINGLE), **XLA}
    assert name not in launch(env).exports
    assert any(name in message for message in launch({**env, name: "0"}).data["warnings"])


def test_tpu7x_warns_about_four_dimensional_bounds(launch: Launch) -> None:
    env = gke("tpu7x-8", "1,1,1", "2,2,1")
    assert "tpu7x" in " ".join(launch({**env, **XLA}).data["warnings"])
    assert launch({**env, "LAUNCHER_FRAMEWORK": "torch_tpu==0.2.0"}).data["warnings"] == []


def test_master_addr_on_several_tpu_hosts_warns(launch: Launch) -> None:
    env = {**gke("v4-16", "1,1,2", "2,2,1", TPU_WORKER_ID="1", TPU_WORKER_HOSTNAMES="a,b"), **XLA}
    assert "MASTER_ADDR" in " ".join(launch({**env, "MASTER_ADDR": "a"}).data["warnings"])
