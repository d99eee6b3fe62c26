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
        ("/usr/lib64/libcuda.so.1", {"LD_LIBRARY_PATH": ""}),
    ],
    ids=["gke", "container-runtime", "red-hat"],
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


@pytest.mark.parametrize("accelerator", ["", "none"])
def test_images_for_the_cpu_do_not_warn(launch: Launch, machine: Machine, accelerator: str) -> None:
    machine.add_image("torch", "2.15.0", accelerator=accelerator)
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


def test_an_unknown_accelerator_is_an_invalid_image_description(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="gpu")
    found = launch({})
    assert found.status == 2
    assert "accelerator is 'gpu', not one of none, nvidia, tpu" in found.err
