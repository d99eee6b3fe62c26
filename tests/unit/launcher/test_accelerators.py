"""Images that are made for an accelerator: what they say, and set, where it is missing or only half there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launching import Launch, Machine

DRIVER = ("/dev/nvidiactl", "/dev/nvidia0")


@pytest.mark.parametrize(("framework", "version"), [("torch", "2.15.0"), ("tensorflow", "2.21.0")])
def test_a_gpu_image_without_a_driver_says_so(launch: Launch, machine: Machine, framework: str, version: str) -> None:
    machine.add_image(framework, version, accelerator="nvidia")
    data = launch({"NVIDIA_VISIBLE_DEVICES": "all"}).data
    assert data["runtime"] == "cpu"
    (warning,) = data["warnings"]
    assert "no driver (neither /dev/nvidiactl nor /proc/driver/nvidia/gpus is here)" in warning
    assert "docker run --gpus all" in warning


def test_a_hidden_gpu_is_named_as_hidden(launch: Launch, machine: Machine) -> None:
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
def test_a_whole_driver_is_no_reason_for_words(launch: Launch, machine: Machine, library: str, env: Any) -> None:
    machine.add_devices(*DRIVER)
    machine.add(library)
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    data = launch(env).data
    assert (data["runtime"], data["warnings"]) == ("gpu", [])


def test_a_device_without_the_drivers_library_is_said(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*DRIVER)
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    (warning,) = launch({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}).data["warnings"]
    assert "libcuda.so.1 is neither under /usr/local/nvidia/lib64 nor with the system's libraries" in warning


@pytest.mark.parametrize("accelerator", ["", "none"])
def test_other_images_do_not_mind(launch: Launch, machine: Machine, accelerator: str) -> None:
    machine.add_image("torch", "2.15.0", accelerator=accelerator)
    assert launch({}).data["warnings"] == []


def test_a_rehearsal_misses_no_accelerator(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    assert launch({"LAUNCHER_REHEARSE": "1"}).data["warnings"] == []


def test_the_users_own_choice_of_the_cpu_is_not_questioned(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    assert launch({"LAUNCHER_RUNTIME": "cpu"}).data["warnings"] == []


# --- frameworks for TPUs: libtpu must not be loaded where there is none ---------------------------------------------


@pytest.mark.parametrize("env", [{}, {"LAUNCHER_REHEARSE": "1"}, {"TPU_NAME": "grpc://192.0.2.1:8470"}])
def test_off_tpus_tensorflow_is_kept_from_libtpu(launch: Launch, machine: Machine, env: dict[str, str]) -> None:
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    assert launch(env).exports["TPU_LIBRARY_PATH"] == "/nonexistent/libtpu.so"


def test_on_a_tpu_vm_it_is_loaded(launch: Launch, machine: Machine, google_cloud: Callable[..., Any]) -> None:
    google_cloud()
    machine.add_devices("/dev/accel0")
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    data = launch({}).data
    assert data["runtime"] == "tpu-local"
    assert "TPU_LIBRARY_PATH" not in data["exports"]


def test_a_libtpu_of_the_users_own_stays(launch: Launch, machine: Machine) -> None:
    machine.add_image("tensorflow", "2.20.0", accelerator="tpu")
    assert "TPU_LIBRARY_PATH" not in launch({"TPU_LIBRARY_PATH": "/my/libtpu.so"}).exports


@pytest.mark.parametrize("env", [{}, {"LAUNCHER_REHEARSE": "1", "TPU_NAME": "grpc://192.0.2.1:8470"}])
def test_off_tpus_torch_does_not_load_torch_tpu(launch: Launch, machine: Machine, env: dict[str, str]) -> None:
    machine.add_image("torch_tpu", "0.2.0", accelerator="tpu")
    assert launch(env).exports["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    chosen = launch(env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in chosen.exports, "the user's own choice stays"


def test_on_a_tpu_vm_torch_loads_it(launch: Launch, machine: Machine, google_cloud: Callable[..., Any]) -> None:
    google_cloud()
    machine.add_devices("/dev/accel0")
    machine.add_image("torch_tpu", "0.2.0", accelerator="tpu")
    data = launch({}).data
    assert data["runtime"] == "tpu-local"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in data["exports"]


def test_torch_xla_needs_nothing(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch_xla", "2.9.0", accelerator="tpu")
    data = launch({}).data
    assert not {"TPU_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"} & set(data["exports"])
    assert data["warnings"] == ["this image is for Cloud TPU, and there is none here: training runs on the CPU"]


def test_an_unknown_accelerator_is_a_broken_image(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="gpu")
    found = launch({})
    assert found.status == 2
    assert "accelerator is 'gpu', not one of none, nvidia, tpu" in found.err
