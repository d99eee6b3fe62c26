"""The runtime, the rule that decides it (R0 to R9), and what is exported for it (R10, R11)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from launching import Launch, Machine

ACCEL = ("/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel3")
CONFIG = json.dumps({"project": "test-project", "zone": "us-central1-c", "tpu_node_name": "tpu-a"})
KUBE = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
GRPC = "grpc://10.120.27.5:8470"
SLICE = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_ID": "0"}
NO_METADATA = {"GCE_METADATA_HOST": "127.0.0.1:1"}  # connection refused


@pytest.mark.parametrize(
    ("env", "devices", "runtime", "rule"),
    [
        pytest.param({}, (), "cpu", "R9", id="R9"),
        pytest.param({"LAUNCHER_RUNTIME": "cpu"}, ACCEL, "cpu", "R0", id="R0-cpu"),
        pytest.param({"LAUNCHER_RUNTIME": "gpu"}, (), "gpu", "R0", id="R0-gpu"),
        pytest.param({"LAUNCHER_RUNTIME": "tpu-local", "TPU_NAME": GRPC}, (), "tpu-local", "R0", id="R0-tpu-local"),
        pytest.param({"LAUNCHER_RUNTIME": "tpu-node", KUBE: GRPC}, ACCEL, "tpu-node", "R0", id="R0-tpu-node"),
        pytest.param({"PJRT_DEVICE": "TPU"}, (), "tpu-local", "R1", id="R1-TPU"),
        pytest.param({"PJRT_DEVICE": "CPU", "TPU_CONFIG": CONFIG}, ACCEL, "cpu", "R1", id="R1-over-R4-and-R7"),
        pytest.param({"PJRT_DEVICE": "CUDA", "XRT_TPU_CONFIG": "x"}, (), "gpu", "R1", id="R1-over-R2"),
        pytest.param({"XRT_TPU_CONFIG": "tpu_worker;0;1.2.3.4:8470"}, ACCEL, "tpu-node", "R2", id="R2-over-R4"),
        pytest.param({"XRT_TPU_CONFIG": "localservice;0;localhost:51011"}, (), "tpu-local", "R2", id="R2-local"),
        pytest.param({"XRT_DEVICE_MAP": "GPU:0;/job:x", "XRT_WORKERS": "x:0;grpc://l:1"}, (), "gpu", "R2", id="R2-map"),
        pytest.param({"XRT_DEVICE_MAP": "GPU:0"}, (), "cpu", "R9", id="R2-map-alone-does-not-match"),
        pytest.param({"GPU_NUM_DEVICES": "4"}, (), "gpu", "R2", id="R2-gpu"),
        pytest.param({"CPU_NUM_DEVICES": "4"}, (), "cpu", "R2", id="R2-cpu"),
        pytest.param(SLICE, (), "tpu-local", "R3", id="R3"),
        pytest.param({**SLICE, KUBE: GRPC, "TPU_NAME": "x"}, (), "tpu-local", "R3", id="R3-over-R5-and-R6"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "1"}, (), "cpu", "R9", id="R3-skip-alone-does-not-match"),
        pytest.param({"TPU_ACCELERATOR_TYPE": "v4-8"}, (), "cpu", "R9", id="R3-type-alone-does-not-match"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "localhost"}, (), "tpu-local", "R3", id="R3-hostnames"),
        pytest.param(NO_METADATA, ACCEL, "tpu-local", "R4", id="R4-accel"),
        pytest.param(NO_METADATA, ("/dev/vfio/0", "/dev/vfio/vfio"), "tpu-local", "R4", id="R4-vfio"),
        pytest.param({}, ("/dev/vfio/vfio", "/dev/accel/accel0"), "cpu", "R9", id="R4-other-devices-do-not-match"),
        pytest.param({**NO_METADATA, KUBE: GRPC}, ACCEL, "tpu-local", "R4", id="R4-over-R5"),
        pytest.param({KUBE: GRPC}, (), "tpu-node", "R5", id="R5"),
        pytest.param({KUBE: GRPC, "TPU_NAME": "grpc://1.1.1.1"}, (), "tpu-node", "R5", id="R5-over-R6"),
        pytest.param({"TPU_NAME": GRPC, "TPU_CONFIG": CONFIG}, (), "tpu-node", "R6", id="R6-over-R7"),
        pytest.param({**NO_METADATA, "TPU_NAME": "local"}, (), "tpu-local", "R6", id="R6-local"),
        pytest.param({KUBE: "", "TPU_NAME": " ", "TPU_CONFIG": ""}, (), "cpu", "R9", id="empty-is-unset"),
        pytest.param({}, ("/dev/nvidiactl", "/dev/nvidia0"), "gpu", "R8", id="R8"),
        pytest.param({}, ("/proc/driver/nvidia/gpus/0000:01:00.0/x",), "gpu", "R8", id="R8-proc"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "void"}, ("/dev/nvidiactl",), "cpu", "R9", id="R8-void"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "none"}, ("/dev/nvidiactl",), "cpu", "R9", id="R8-none"),
        pytest.param({"TPU_NAME": GRPC}, ("/dev/nvidiactl",), "tpu-node", "R6", id="R6-over-R8"),
    ],
)
def test_precedence_of_the_rules(
    launch: Launch, machine: Machine, env: dict[str, str], devices: tuple[str, ...], runtime: str, rule: str
) -> None:
    machine.add_devices(*devices)
    data = launch(env).data
    assert data["runtime"] == runtime
    assert data["why"].endswith(f"({rule})")


@pytest.mark.parametrize(
    ("device", "is_tpu"),
    [*((f"0x00{end}", True) for end in ("27", "56", "5e", "62", "63", "6f", "76")), ("0x1234", False)],
)
def test_pci_ids_of_tpus(launch: Launch, machine: Machine, device: str, is_tpu: bool) -> None:
    machine.add("/sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n")
    machine.add("/sys/bus/pci/devices/0000:00:04.0/device", f"{device}\n")
    machine.add("/sys/bus/pci/devices/0000:00:05.0/vendor", "0x8086\n")
    assert launch(NO_METADATA).data["runtime"] == ("tpu-local" if is_tpu else "cpu")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param({"LAUNCHER_RUNTIME": "tpu"}, "LAUNCHER_RUNTIME is 'tpu': it must be one of cpu, gpu", id="R0"),
        pytest.param(
            {"LAUNCHER_RUNTIME": "tpu-node"}, "Please provide a TPU Name to connect to", id="tpu-node-without-a-name"
        ),
        pytest.param(
            {"LAUNCHER_RUNTIME": "tpu-node", "TPU_NAME": ""}, "Please provide a TPU Name to connect to", id="empty-name"
        ),
        pytest.param({"TPU_NAME": "a,b"}, "Using multiple TPUs", id="several-nodes"),
        pytest.param(
            {"TPU_CONFIG": '{"project":"p"}'}, "TPU_CONFIG has no tpu_node_name", id="TPU_CONFIG-without-name"
        ),
        pytest.param({"TPU_CONFIG": "not json"}, "TPU_CONFIG is not JSON", id="TPU_CONFIG-not-JSON"),
        pytest.param(
            {"XRT_TPU_CONFIG": "tpu_worker;0;grpc://1.2.3.4:8470"}, "bad worker syntax", id="grpc-in-XRT_TPU_CONFIG"
        ),
        pytest.param(
            {"XRT_TPU_CONFIG": "tpu_worker;0;1.2.3.4:8470", "LAUNCHER_FRAMEWORK": "torch_xla==2.1.0"},
            "XRT was removed in torch_xla 2.1",
            id="XRT-with-torch_xla-2.1",
        ),
        pytest.param(
            {"TPU_CONFIG": CONFIG, "LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"},
            "use a TPU VM",
            id="tpu-node-with-torch_xla-2.9",
        ),
        pytest.param(
            {"TPU_CONFIG": CONFIG, "LAUNCHER_FRAMEWORK": "torch_tpu==0.2.0"},
            "use a TPU VM",
            id="tpu-node-with-torch_tpu",
        ),
        pytest.param({"LAUNCHER_FRAMEWORK": "mxnet==1.9"}, "LAUNCHER_FRAMEWORK is 'mxnet==1.9'", id="framework"),
        *(
            pytest.param(
                {"LAUNCHER_FRAMEWORK": text}, f"LAUNCHER_FRAMEWORK is {text!r}: it must be one name==", id=text
            )
            for text in ("torch==2.9.1 torch_xla==2.0.0", "torch==2.9.1,torch_xla==2.0", "torch>=2", "torch===2.9")
        ),
        pytest.param({"LAUNCHER_REHEARSE": "maybe"}, "LAUNCHER_REHEARSE is 'maybe': use 1 or 0", id="switch"),
        pytest.param({"LAUNCHER_TPU_ATTEMPTS": "0"}, "whole number from 1", id="attempts"),
        pytest.param({"LAUNCHER_TPU_INTERVAL": "nan"}, "number of seconds", id="interval"),
        pytest.param({"TPU_NAME": "x", "TPU_API_ENDPOINT": "ftp://x"}, "TPU_API_ENDPOINT is 'ftp://x'", id="endpoint"),
        pytest.param(
            {"TPU_NAME": "x", "TPU_API_ENDPOINT": "http://192.0.2.2"}, "token would be sent without TLS", id="token"
        ),
        pytest.param({"TPU_NAME": "x", "TPU_API_ENDPOINT": "http://127.evil.example"}, "without TLS", id="token-name"),
        pytest.param({"TPU_NAME": "x", "GCE_METADATA_HOST": "a b"}, "GCE_METADATA_HOST is 'a b'", id="metadata-host"),
    ],
)
def test_configuration_errors_are_one_line_and_status_2(launch: Launch, env: dict[str, str], message: str) -> None:
    launched = launch(env)
    assert launched.status == 2
    assert launched.out == ""
    assert message in launched.err
    assert launched.err.startswith("launch: error: ")
    assert launched.err.count("\n") == 1


def test_waits_until_the_node_is_ready(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    cloud = google_cloud(states=["CREATING", "READY"])
    launched = launch({"TPU_CONFIG": CONFIG})
    assert launched.data["endpoints"] == ["10.1.2.3:8470"]
    assert launched.exports["XRT_TPU_CONFIG"] == "tpu_worker;0;10.1.2.3:8470"
    assert 'state: "CREATING"' in launched.err
    assert cloud.counts() == {"token": 1, "node": 2}  # project and zone were known: no other metadata request


def test_project_and_zone_of_a_name_come_from_the_metadata_server(
    launch: Launch, google_cloud: Callable[..., Any]
) -> None:
    cloud = google_cloud()
    assert launch({"TPU_NAME": "tpu-a"}).data["endpoints"] == ["10.1.2.3:8470"]
    assert cloud.counts() == {"metadata": 2, "token": 1, "node": 1}
    assert cloud.requests[-1]["path"] == "/v1/projects/test-project/locations/us-central1-c/nodes/tpu-a"


def test_an_unknown_node_is_retryable_and_named_in_full(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    google_cloud()
    launched = launch({"TPU_NAME": "nonexistent-tpu", "LAUNCHER_TPU_ATTEMPTS": "3"})
    assert launched.status == 138
    assert "Failed to schedule TPU" in launched.err
    assert "projects/test-project/locations/us-central1-c/nodes/nonexistent-tpu" in launched.err


def test_several_tpu_workers_for_tensorflow(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    google_cloud(endpoints=[f"10.2.3.{n}:8470" for n in (4, 5, 6, 7)])
    exports = launch({"TPU_CONFIG": CONFIG, "LAUNCHER_FRAMEWORK": "tensorflow==2.20.0"}).exports
    assert exports["TPU_NAME"] == "grpc://10.2.3.4:8470"
    assert exports[KUBE] == ",".join(f"grpc://10.2.3.{n}:8470" for n in (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("env", "exports", "unsets"),
    [
        pytest.param(
            {"TPU_CONFIG": CONFIG}, {"TPU_NAME": "grpc://10.1.2.3:8470", "TPU_NODE_NAME": "tpu-a"}, [], id="TPU_CONFIG"
        ),
        pytest.param(
            {"TPU_NAME": "tpu-a"},
            {"TPU_NAME": "grpc://10.1.2.3:8470", "TPU_NODE_NAME": "tpu-a"},
            [],
            id="name-in-TPU_NAME-is-replaced",
        ),
        pytest.param({KUBE: "tpu-a"}, {"TPU_NAME": "grpc://10.1.2.3:8470"}, [KUBE], id="name-in-KUBE"),
        pytest.param({KUBE: "10.120.27.5:8470"}, {"TPU_NAME": GRPC}, [KUBE], id="address-without-scheme-in-KUBE"),
        pytest.param({KUBE: GRPC}, {"TPU_NAME": GRPC}, [], id="address-in-KUBE-is-kept"),
        pytest.param(
            {"TPU_NAME": "1.2.3.4:1234"},
            {"TPU_NAME": "grpc://1.2.3.4:1234"},
            [],
            id="address-without-scheme-in-TPU_NAME",
        ),
        pytest.param(
            {KUBE: "", "TPU_NAME": "tpu-a"}, {"TPU_NAME": "grpc://10.1.2.3:8470"}, [KUBE], id="empty-KUBE-is-unset"
        ),
        pytest.param({KUBE: GRPC, "TPU_NAME": "tpu-b"}, {}, [], id="KUBE-over-TPU_NAME"),
        pytest.param({"TPU_NAME": "grpc://10.0.0.1"}, {}, [], id="address-in-TPU_NAME-is-kept"),
    ],
)
def test_exports_for_tensorflow(
    launch: Launch, google_cloud: Callable[..., Any], env: dict[str, str], exports: dict[str, str], unsets: list[str]
) -> None:
    google_cloud()
    launched = launch({**env, "LAUNCHER_FRAMEWORK": "tensorflow==2.20.0"})
    found = {name: value for name, value in launched.exports.items() if name in ("TPU_NAME", "TPU_NODE_NAME")}
    assert found == exports | {name: found[name] for name in found if name == "TPU_NODE_NAME"}
    assert launched.data["unsets"] == unsets
    assert "XRT_TPU_CONFIG" not in launched.exports


@pytest.mark.parametrize("value", ["10.120.27.5:8470", "10.120.27.5"])
def test_an_address_without_scheme_warns(launch: Launch, value: str) -> None:
    data = launch({KUBE: value}).data
    assert data["endpoints"] == ["10.120.27.5:8470"]
    assert "no grpc:// prefix" in data["warnings"][0]


def test_a_grpc_address_needs_no_request(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    cloud = google_cloud()
    assert launch({"TPU_NAME": "grpc://10.0.0.1"}).data["endpoints"] == ["10.0.0.1:8470"]
    assert cloud.requests == []


def test_an_unhealthy_node_is_used_with_a_warning(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    google_cloud(health="UNHEALTHY_TENSORFLOW")
    data = launch({"TPU_CONFIG": CONFIG}).data
    assert data["endpoints"] == ["10.1.2.3:8470"]
    assert "UNHEALTHY_TENSORFLOW" in " ".join(data["warnings"])


def test_require_healthy_waits_for_an_unhealthy_node(launch: Launch, google_cloud: Callable[..., Any]) -> None:
    google_cloud(health="UNHEALTHY_TENSORFLOW")
    env = {"TPU_CONFIG": CONFIG, "LAUNCHER_TPU_ATTEMPTS": "2"}
    launched = launch(env, "--print-env", "--require-healthy")
    assert launched.status == 138
    assert "TPU tpu-a is not HEALTHY yet; health: UNHEALTHY_TENSORFLOW" in launched.err


def test_tpu_config_is_ignored_on_a_vertex_tpu_vm(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any], cluster_spec: Any
) -> None:
    cloud = google_cloud()
    machine.add_devices(*ACCEL)
    env = {"TPU_NODE_NAME": "tpu-a", "TPU_CONFIG": CONFIG, "CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0)}
    data = launch(env).data
    assert data["runtime"] == "tpu-local"
    assert data["exports"]["PJRT_DEVICE"] == "TPU"
    assert not [name for name in data["exports"] if name.startswith("XRT_")]
    assert "TPU_CONFIG ignored: TPU is attached to this VM" in data["warnings"]
    assert "node" not in cloud.counts()


def test_tpu_config_without_devices_is_a_tpu_node(
    launch: Launch, google_cloud: Callable[..., Any], cluster_spec: Any
) -> None:
    cloud = google_cloud(states=["CREATING", "CREATING", "READY"])
    env = {"TPU_NODE_NAME": "tpu-a", "TPU_CONFIG": CONFIG, "CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0)}
    data = launch(env).data
    assert (data["runtime"], cloud.counts()["node"]) == ("tpu-node", 3)
    assert data["exports"]["XRT_TPU_CONFIG"] == "tpu_worker;0;10.1.2.3:8470"


@pytest.mark.parametrize(
    ("framework", "pjrt"),
    [
        ("torch_xla==2.9.0", "CPU"), ("torch_xla==1.13", "CPU"), ("torch_xla==1.12", None), ("torch==2.9.1", None),
        ("tensorflow==2.20.0", None), ("torch_tpu==0.2.0", None), ("", "CPU"),
        (" Torch-XLA == 2.10.0.dev20251101+cpu ", "CPU"), ("torch_xla", "CPU"),
    ],
)  # fmt: skip
def test_pjrt_device_without_an_accelerator(launch: Launch, framework: str, pjrt: str | None) -> None:
    assert launch({"LAUNCHER_FRAMEWORK": framework}).exports.get("PJRT_DEVICE") == pjrt


@pytest.mark.parametrize(
    ("framework", "pjrt"),
    [
        ("torch==2.9.1", None), ("torch_xla==1.13", None), ("torch_xla==2.0", "GPU"), ("torch_xla==2.1.0", "GPU"),
        ("torch_xla==2.2.0", "CUDA"), ("torch_xla==2.8.1", "CUDA"), ("torch_xla==2.9.0", None), ("", None),
    ],
)  # fmt: skip
def test_pjrt_device_on_a_gpu(launch: Launch, machine: Machine, framework: str, pjrt: str | None) -> None:
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    data = launch({"LAUNCHER_FRAMEWORK": framework}).data
    assert data["exports"].get("PJRT_DEVICE") == pjrt
    assert bool(data["warnings"]) == (framework == "torch_xla==2.9.0")


@pytest.mark.parametrize(
    ("version", "exported"),
    [
        ("1.11", {"XRT_TPU_CONFIG": "localservice;0;localhost:51011"}),
        ("1.12", {"XRT_TPU_CONFIG": "localservice;0;localhost:51011"}),
        ("1.13", {"PJRT_DEVICE": "TPU"}),
        ("2.0", {"PJRT_DEVICE": "TPU"}),
        ("2.9.0", {"PJRT_DEVICE": "TPU"}),
    ],
)
def test_exports_for_an_attached_tpu_by_torch_xla_release(
    launch: Launch, machine: Machine, version: str, exported: dict[str, str]
) -> None:
    machine.add_devices("/dev/accel0")
    exports = launch({**NO_METADATA, "LAUNCHER_FRAMEWORK": f"torch_xla=={version}"}).exports
    assert {name: value for name, value in exports.items() if name.startswith(("PJRT", "XRT"))} == exported


@pytest.mark.parametrize(
    ("env", "framework"),
    [
        ({"PJRT_DEVICE": "TPU"}, "torch_xla==2.9.0"),
        ({"XRT_TPU_CONFIG": "tpu_worker;0;1.2.3.4:8470"}, "torch_xla==1.13"),
        ({"GPU_NUM_DEVICES": "1"}, "torch_xla==2.0"),
    ],
)
def test_a_runtime_configured_by_the_user_is_not_changed(launch: Launch, env: dict[str, str], framework: str) -> None:
    exports = launch({**env, "LAUNCHER_FRAMEWORK": framework}).exports
    assert not [name for name in exports if name.startswith(("PJRT", "XRT", "TPU"))]


def test_pjrt_device_with_xrt_variables_warns(launch: Launch) -> None:
    data = launch({"PJRT_DEVICE": "TPU", "XRT_TPU_CONFIG": "x", "XRT_SHARD_ORDINAL": "0"}).data
    assert data["warnings"] == [
        "PJRT_DEVICE takes precedence over XRT_SHARD_ORDINAL, XRT_TPU_CONFIG; unset one of the two"
    ]


def test_only_force_overwrites_variables_that_are_set(launch: Launch) -> None:
    env = {"TPU_NAME": GRPC, "XRT_TPU_CONFIG": "", "TPU_IP_ADDRESS": "mine"}
    assert "TPU_IP_ADDRESS" not in launch(env).exports
    forced = json.loads(launch(env, "--force", "--print-env", "--json").out)["exports"]
    assert forced["TPU_IP_ADDRESS"] == "10.120.27.5"


@pytest.mark.parametrize(
    ("framework", "exports"),
    [
        pytest.param(
            "torch_xla==2.9.0", {"PJRT_DEVICE": "CPU", "XRT_TPU_CONFIG": "tpu_worker;0;10.1.2.3:8470"}, id="xla"
        ),
        pytest.param("tensorflow==2.20.0", {"TPU_SKIP_MDS_QUERY": "1", "TPU_NAME": "grpc://10.1.2.3:8470"}, id="tf"),
        pytest.param("torch==2.9.1", {"XRT_TPU_CONFIG": "tpu_worker;0;10.1.2.3:8470", "TPU_NAME": "tpu-a"}, id="torch"),
        pytest.param("torch_tpu==0.2.0", {"XRT_TPU_CONFIG": "tpu_worker;0;10.1.2.3:8470"}, id="torch_tpu"),
    ],
)
def test_a_rehearsal_waits_and_exports_as_on_the_platform(
    launch: Launch, google_cloud: Callable[..., Any], framework: str, exports: dict[str, str]
) -> None:
    cloud = google_cloud(states=["CREATING", "READY"])
    data = launch({"TPU_CONFIG": CONFIG, "LAUNCHER_REHEARSE": "1", "LAUNCHER_FRAMEWORK": framework}).data
    assert cloud.counts()["node"] == 2
    assert exports.items() <= data["exports"].items()
    assert bool(data["warnings"]) == (framework != "tensorflow==2.20.0")


def test_rehearsal_of_a_tpu_vm_job_runs_on_the_cpu(launch: Launch) -> None:
    env = {"LAUNCHER_REHEARSE": "1", "LAUNCHER_FRAMEWORK": "torch_xla==2.9.0", "PJRT_DEVICE": "TPU"}
    data = launch(env).data
    assert data["exports"]["PJRT_DEVICE"] == "CPU"
    assert "rehearsal: PJRT_DEVICE=TPU replaced by CPU" in data["warnings"]


def test_rehearsal_on_a_gpu_machine_hides_the_gpu(launch: Launch, machine: Machine) -> None:
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")
    exports = launch({"LAUNCHER_REHEARSE": "1", "LAUNCHER_FRAMEWORK": "torch==2.9.1"}).exports
    assert exports["CUDA_VISIBLE_DEVICES"] == "-1"


def test_variables_of_other_programs_are_not_changed(launch: Launch) -> None:
    env = {
        "TPU_API_DISCOVERY_URL": "https://{api}.internal/{apiVersion}",
        "AIP_MODEL_DIR": "gs://b/3/model/",
        "AIP_CHECKPOINT_DIR": "gs://b/3/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": "gs://b/3/logs/",
        "AIP_TRAINING_DATA_URI": "gs://b/train",
        "AIP_VALIDATION_DATA_URI": "gs://b/validate",
        "AIP_TEST_DATA_URI": "gs://b/test",
        "CLOUD_ML_TRIAL_ID": "3",
        "CLOUD_ML_HP_METRIC_FILE": "/x/y/out.metrics",
        "TPU_LIBRARY_PATH": "/lib/libtpu.so",
        "MEGASCALE_SLICE_ID": "0",
    }
    data = launch(env).data
    assert not set(data["exports"]) & set(env)
    assert data["unsets"] == []
    assert not [name for name in data["exports"] if name.startswith(("AIP_", "CLOUD_ML_", "LAUNCHER_"))]


def test_gcs_folders_are_also_exported_below_gcs_on_request(launch: Launch) -> None:
    exports = launch({"AIP_MODEL_DIR": "gs://b/model/", "LAUNCHER_MIRROR_GCS": "1"}).exports
    assert exports["LAUNCHER_GCS_AIP_MODEL_DIR"] == "/gcs/b/model/"


def test_an_empty_metric_file_is_unset(launch: Launch) -> None:
    assert launch({"CLOUD_ML_HP_METRIC_FILE": ""}).data["unsets"] == ["CLOUD_ML_HP_METRIC_FILE"]
    assert "has no folder" in launch({"CLOUD_ML_HP_METRIC_FILE": "out.metrics"}).data["warnings"][0]
