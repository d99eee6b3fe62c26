"""Images made for an accelerator: warnings and exports if it is missing or incomplete (R8.1, R9.1, R9.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launching import Launch, Machine

DRIVER = ("/dev/nvidiactl", "/dev/nvidia0")


@pytest.mark.parametrize(("framework", "version"), [("torch", "2.15.0"), ("tensorflow", "2.21.0")])
def test_a_gpu_image_without_a_driver_warns(launch: Launch, machine: Machine, framework: str, version: str) -> None:
    machine.add_image(framework, version, accelerator="nvidia")
    data = launch({"NVIDIA_VISIBLE_DEVICES": "all"}).data
    assert data["runtime"] == "cpu"
    (warning,) = data["warnings"]
    assert "no driver (neither /dev/nvidiactl nor /proc/driver/nvidia/gpus exists)" in warning
    assert "docker run --gpus all" in warning


def test_the_warning_names_the_variable_that_hides_the_gpu(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*DRIVER)
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    (warning,) = launch({"NVIDIA_VISIBLE_DEVICES": "void"}).data["warnings"]
    assert "NVIDIA_VISIBLE_DEVICES=void hides it" in warning


@pytest.mark.parametrize(
    ("library", "env"),
    [
        ("/usr/local/nvidia/lib64/libcuda.so.1", {"LD_LIBRARY_PATH": "/opt/x:/usr/local/nvidia/lib64"}),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", {}),
        ("/usr/lib/aarch64-linux-gnu/libcuda.so.1", {}),
        ("/usr/lib64/libcuda.so.1", {"LD_LIBRARY_PATH": ""}),
    ],
    ids=["gke", "container-runtime", "arm64", "red-hat"],
)
def test_no_warning_with_a_complete_driver(launch: Launch, machine: Machine, library: str, env: Any) -> None:
    machine.add_devices(*DRIVER)
    machine.add(library)
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    data = launch(env).data
    assert (data["runtime"], data["warnings"]) == ("gpu", [])


def test_a_device_without_the_driver_library_warns(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*DRIVER)
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    (warning,) = launch({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}).data["warnings"]
    assert "libcuda.so.1 is neither under /usr/local/nvidia/lib64 nor in a system library folder" in warning


def test_images_for_the_cpu_do_not_warn(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="none")
    assert launch({}).data["warnings"] == []


def test_a_rehearsal_does_not_warn_about_a_missing_accelerator(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    assert launch({"LAUNCHER_REHEARSE": "1"}).data["warnings"] == []


def test_no_warning_if_the_user_requested_the_cpu(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    assert launch({"LAUNCHER_RUNTIME": "cpu"}).data["warnings"] == []


# --- frameworks for TPUs: libtpu must not be loaded without a TPU (R9.2) ---------------------------------------------


@pytest.mark.parametrize("env", [{}, {"LAUNCHER_REHEARSE": "1"}, {"TPU_NAME": "grpc://192.0.2.1:8470"}])
def test_without_a_tpu_tensorflow_does_not_load_libtpu(launch: Launch, machine: Machine, env: dict[str, str]) -> None:
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    assert launch(env).exports["TPU_LIBRARY_PATH"] == "/nonexistent/libtpu.so"


def test_on_a_tpu_vm_tensorflow_loads_libtpu(
    launch: Launch, machine: Machine, google_cloud: Callable[..., Any]
) -> None:
    google_cloud()
    machine.add_devices("/dev/accel0")
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    data = launch({}).data
    assert data["runtime"] == "tpu-local"
    assert "TPU_LIBRARY_PATH" not in data["exports"]


def test_the_users_libtpu_is_kept(launch: Launch, machine: Machine) -> None:
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    assert "TPU_LIBRARY_PATH" not in launch({"TPU_LIBRARY_PATH": "/my/libtpu.so"}).exports


@pytest.mark.parametrize("env", [{}, {"LAUNCHER_REHEARSE": "1", "TPU_NAME": "grpc://192.0.2.1:8470"}])
def test_without_a_tpu_torch_does_not_load_torch_tpu(launch: Launch, machine: Machine, env: dict[str, str]) -> None:
    machine.add_image("torch_tpu", "0.2.0", accelerator="tpu")
    assert launch(env).exports["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    chosen = launch(env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in chosen.exports, "the user's value is kept"


def test_on_a_tpu_vm_torch_loads_torch_tpu(launch: Launch, machine: Machine, google_cloud: Callable[..., Any]) -> None:
    google_cloud()
    machine.add_devices("/dev/accel0")
    machine.add_image("torch_tpu", "0.2.0", accelerator="tpu")
    data = launch({}).data
    assert data["runtime"] == "tpu-local"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in data["exports"]


def test_without_a_tpu_torch_xla_needs_no_variable(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.9.0", accelerator="tpu")
    data = launch({}).data
    assert not {"TPU_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"} & set(data["exports"])
    assert data["warnings"] == ["this image is for Cloud TPU, and there is no TPU: training runs on the CPU"]


def test_an_unknown_accelerator_makes_a_recipe_invalid(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="gpu")
    found = launch({})
    assert found.status == 2
    assert "accelerator.kind is 'gpu', not one of none, nvidia, tpu" in found.err


VFIO = ("/dev/vfio/0", "/dev/vfio/1", "/dev/vfio/vfio")
PCI = "/sys/bus/pci/devices/0000:00:04.0"
TPU_ON_PCI = {f"{PCI}/vendor": "0x1ae0", f"{PCI}/device": "0x0063"}


def test_passed_through_devices_are_no_tpu_in_an_image_for_nvidia_gpus(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*VFIO)
    machine.add_image("torch", "2.9.1", accelerator="nvidia")
    found = launch({}).data
    assert (found["runtime"], found["exports"]) == ("cpu", {})
    assert "this image is for NVIDIA GPUs, and there is no driver" in found["warnings"][0]
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    assert launch({}).data["runtime"] == "gpu"


@pytest.mark.parametrize(("pci", "runtime"), [({}, "gpu"), (TPU_ON_PCI, "tpu-local")], ids=["no-tpu", "tpu"])
def test_vfio_beside_an_nvidia_driver_needs_a_tpu_on_the_pci_bus(
    launch: Launch, machine: Machine, pci: dict[str, str], runtime: str
) -> None:
    machine.add_devices(*VFIO, "/dev/nvidiactl", "/dev/nvidia0")
    for path, content in pci.items():
        machine.add(path, content)
    assert launch({}).data["runtime"] == runtime


@pytest.mark.parametrize(
    "library", ["/usr/lib/wsl/lib/libcuda.so.1", "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1"]
)
def test_wsl_has_one_device_for_its_gpus(launch: Launch, machine: Machine, library: str) -> None:
    machine.add_image("torch", "2.9.1", accelerator="nvidia")
    machine.add_devices("/dev/dxg", library)
    found = launch({}).data
    assert (found["runtime"], found["warnings"]) == ("gpu", [])


def test_wsl_without_the_driver_library_says_which_file_is_missing(launch: Launch, machine: Machine) -> None:
    """The device is also there for the GPUs of other vendors."""
    machine.add_devices("/dev/dxg")
    assert launch({}).data["runtime"] == "cpu"
    machine.add_image("torch", "2.9.1", accelerator="nvidia")
    assert "/dev/dxg of WSL 2 exists, but libcuda.so.1 is not in /usr/lib/wsl" in launch({}).data["warnings"][0]


@pytest.mark.parametrize("name", ["TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"])
@pytest.mark.parametrize(("devices", "runtime"), [((), "cpu"), (("/dev/nvidiactl", "/dev/nvidia0"), "gpu")])
def test_plain_torch_does_not_wait_for_a_tpu_node(
    launch: Launch, machine: Machine, name: str, devices: tuple[str, ...], runtime: str
) -> None:
    machine.add_devices(*devices)
    machine.add_image("torch", "2.9.1")
    # Nothing answers at this address: a request would be an attempt that fails.
    env = {name: "tpu-a", "GCE_METADATA_HOST": "127.0.0.1:1", "LAUNCHER_TPU_ATTEMPTS": "1"}
    launched = launch(env)
    assert (launched.data["runtime"], launched.exports) == (runtime, {})
    assert launched.data["warnings"] == [
        f"{name} names a TPU node, which plain torch cannot use; use an image with torch_xla <= 2.0 or TensorFlow for "
        "the TPU: training runs without the TPU"
    ]
    assert "attempt" not in launched.err


def test_plain_torch_refuses_a_tpu_node_on_request(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.9.1")
    launched = launch({"TPU_NAME": "tpu-a", "LAUNCHER_RUNTIME": "tpu-node"})
    assert launched.status == 2
    assert "names a TPU node, which plain torch cannot use" in launched.err
