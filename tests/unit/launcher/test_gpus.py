"""The NVIDIA driver and the visible GPUs are compared with what the image has code for (R8.3 to R8.5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import gpus
from launcher.host import Host
from launcher.image import Image
from launching import ROOT, Launch, Launched, Machine
from tests.fakes import cuda_driver

#: Models and compute capabilities: https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus
P4, P100, V100 = ("Tesla P4", "6.1"), ("Tesla P100-PCIE-16GB", "6.0"), ("Tesla V100-SXM2-16GB", "7.0")
T4, A100, A10 = ("Tesla T4", "7.5"), ("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA A10", "8.6")
L4, H100, H200 = ("NVIDIA L4", "8.9"), ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA H200", "9.0")
B200, B300 = ("NVIDIA B200", "10.0"), ("NVIDIA B300 SXM6 AC", "10.3")
RTX = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0")
MODELS = (P4, P100, V100, T4, A100, A10, L4, H100, H200, B200, B300, RTX)

#: The content of images: of torch 2.15.0 and 2.7.1, and of TensorFlow, whose code for 9.0 is also there as PTX.
NEW = {"cuda": "13.2", "driver": "580", "gpus": "7.5 8.0 8.6 9.0 10.0 12.0"}
OLD = {"cuda": "12.6", "driver": "525.60.13", "gpus": "5.0 6.0 7.0 7.5 8.0 8.6 9.0"}
PTX = {"cuda": "12.5", "driver": "525.60.13", "gpus": "6.0 7.0 8.0 8.9 9.0+PTX"}
VERSIONS = {"13.2": ("torch", "2.15.0"), "12.6": ("torch", "2.7.1"), "12.5": ("tensorflow", "2.20.0")}

LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"


@pytest.fixture
def gpu_machine(machine: Machine) -> Callable[..., Machine]:
    """Prepare a machine with GPUs, an image, and a driver; a `cuda` of "" leaves out libcuda.so.1."""

    def prepare(
        *models: tuple[str, str],
        image: dict[str, str] = NEW,
        driver: str = "580.65.06",
        cuda: str = "13.0",
        form: str = cuda_driver.VERSION,
        library: str = LIBRARY,
        **options: Any,
    ) -> Machine:
        machine.add_devices("/dev/nvidiactl", *(f"/dev/nvidia{index}" for index, _ in enumerate(models)))
        if driver:
            machine.add("/proc/driver/nvidia/version", form.format(driver))
        for index, (name, _) in enumerate(models):
            machine.add(f"/proc/driver/nvidia/gpus/0000:0{index}:00.0/information", f"Model: \t\t {name}\nIRQ: 1\n")
        if cuda:
            path = machine.root / library.lstrip("/")
            cuda_driver.compile_library(path, models, cuda=cuda, **options)
        machine.add_image(*VERSIONS[image["cuda"]], accelerator="nvidia", **image)
        return machine

    return prepare


def refused(launched: Launched) -> str:
    """Return the only line of a refusal."""
    assert launched.status == 2, launched
    (line,) = launched.err.splitlines()
    assert line.startswith("launch: error: ")
    assert line.endswith("(docs/gpus.md); LAUNCHER_RUNTIME=cpu starts without this check")
    return line


# --- the GPU ---------------------------------------------------------------------------------------------------------

#: Written from NVIDIA's rule: code for X.Y runs on X.Z with Z >= Y.
RUNS = {
    "13.2": {T4, A100, A10, L4, H100, H200, B200, B300, RTX},
    "12.6": {P4, P100, V100, T4, A100, A10, L4, H100, H200},
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
@pytest.mark.parametrize("image", [NEW, OLD], ids=["gpu", "gpu-2.7"])
def test_each_gpu_is_accepted_or_refused(
    launch: Launch, gpu_machine: Callable[..., Machine], image: dict[str, str], model: tuple[str, str]
) -> None:
    gpu_machine(model, image=image)
    if model in RUNS[image["cuda"]]:
        assert launch({}).data["warnings"] == []
        return
    line = refused(launch({}))
    for word in (*model, "GPU 0 (", "driver 580.65.06, CUDA 13.0", *image["gpus"].split(), *VERSIONS[image["cuda"]]):
        assert word in line
    assert f"an image whose torch has code for {model[1]} " in line


def test_the_refusal_of_a_gpu(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(V100, V100)
    assert refused(launch({})) == (
        "launch: error: this image has no code for the GPU of this machine: GPU 0, 1 (Tesla V100-SXM2-16GB, compute "
        "capability 7.0) (driver 580.65.06, CUDA 13.0); test (torch 2.15.0, CUDA 13.2) has code for 7.5 8.0 8.6 9.0 "
        "10.0 12.0: use another GPU, or an image whose torch has code for 7.0 (docs/gpus.md); LAUNCHER_RUNTIME=cpu "
        "starts without this check"
    )


@pytest.mark.parametrize(
    ("env", "use"),
    [({}, "0,2"), ({"CUDA_VISIBLE_DEVICES": "2,1,0"}, "2,0"), ({"CUDA_VISIBLE_DEVICES": "1,2"}, "2")],
)
def test_of_several_gpus_those_without_code_are_named(
    launch: Launch, gpu_machine: Callable[..., Machine], env: dict[str, str], use: str
) -> None:
    gpu_machine(A100, V100, H100)
    index = env.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",").index("1")
    (warning,) = launch(env).data["warnings"]
    assert f"no code for GPU {index} (Tesla V100-SXM2-16GB, compute capability 7.0)" in warning
    assert f"set CUDA_VISIBLE_DEVICES={use} to use the others only" in warning


def test_the_advice_makes_the_warning_disappear(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(A100, V100, H100)
    assert launch({"CUDA_VISIBLE_DEVICES": "0,2"}).data["warnings"] == []


@pytest.mark.parametrize(("visible", "status"), [("0", 2), ("1", 0), ("-1", 0), ("", 0), ("0,-1,1", 2)])
def test_only_visible_gpus_count(
    launch: Launch, gpu_machine: Callable[..., Machine], visible: str, status: int
) -> None:
    gpu_machine(V100, H100)
    launched = launch({"CUDA_VISIBLE_DEVICES": visible})
    assert launched.status == status
    if not status:
        assert launched.data["warnings"] == []


@pytest.mark.parametrize("name", ["void", "none"])
def test_hidden_gpus_are_not_checked(launch: Launch, gpu_machine: Callable[..., Machine], name: str) -> None:
    gpu_machine(V100)
    (warning,) = launch({"NVIDIA_VISIBLE_DEVICES": name}).data["warnings"]
    assert f"NVIDIA_VISIBLE_DEVICES={name} hides it" in warning


def test_a_mig_device_has_the_capability_of_its_gpu(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "8.0"), image={**NEW, "gpus": "9.0"})
    assert "GPU 0 (NVIDIA A100-SXM4-80GB MIG 1g.10gb, compute capability 8.0)" in refused(launch({}))


@pytest.mark.parametrize(("cuda", "warnings"), [("12.8", 0), ("12.5", 0), ("12.4", 1)])
def test_ptx_needs_a_driver_that_is_as_new(
    launch: Launch, gpu_machine: Callable[..., Machine], cuda: str, warnings: int
) -> None:
    gpu_machine(B200, image=PTX, cuda=cuda, driver="570.86.15")
    assert (
        "0: NVIDIA B200, compute capability 10.0: runs from PTX, which the driver compiles"
        in launch({}, "--explain").out
    )
    messages = launch({}).data["warnings"]
    assert len(messages) == warnings
    assert all(f"a driver with CUDA {cuda} may not compile that of CUDA 12.5" in message for message in messages)


# --- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [True, False], ids=["libcuda", "proc"])
@pytest.mark.parametrize("form", [cuda_driver.VERSION, cuda_driver.OPEN_VERSION], ids=["proprietary", "open"])
@pytest.mark.parametrize(
    ("image", "driver", "cuda", "status"),
    [
        (NEW, "470.82.01", "11.4", 2),
        (NEW, "575.57.08", "12.9", 2),
        (NEW, "580.65.06", "13.0", 0),
        (OLD, "470.82.01", "11.4", 2),
        (OLD, "525.60.12", "11.8", 2),
        (OLD, "525.60.13", "12.0", 0),
        (OLD, "580.65.06", "13.0", 0),
    ],
)
def test_the_least_driver(
    launch: Launch,
    gpu_machine: Callable[..., Machine],
    form: str,
    image: dict[str, str],
    driver: str,
    cuda: str,
    status: int,
    library: bool,
) -> None:
    gpu_machine(T4, image=image, driver=driver, cuda=cuda if library else "", form=form)
    launched = launch({})
    assert launched.status == status
    if status:
        line = refused(launched)
        assert f"driver {driver}, CUDA {cuda}" in line if library else f"driver {driver} for" in line
        assert f"needs driver {image['driver']} or later" in line
        assert "for GPU 0 (Tesla T4" in line


def test_the_refusal_of_a_driver(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(T4, driver="470.82.01", cuda="11.4")
    assert refused(launch({}, "mnist")) == (
        "launch: error: the NVIDIA driver of this machine is too old for this image: driver 470.82.01, CUDA 11.4 for "
        "GPU 0 (Tesla T4, compute capability 7.5); test (torch 2.15.0, CUDA 13.2) needs driver 580 or later: update "
        "the host's driver, or use an image with an older CUDA (docs/gpus.md); LAUNCHER_RUNTIME=cpu starts without "
        "this check"
    )


def test_a_newer_driver_is_no_advice_for_a_gpu_without_code(
    launch: Launch, gpu_machine: Callable[..., Machine]
) -> None:
    gpu_machine(V100, driver="470.82.01", cuda="11.4")
    line = refused(launch({}))
    assert "driver 470.82.01" in line and "update the host's driver" not in line
    assert "use an image whose torch has code for 7.0" in line


def test_forward_compatibility_brings_a_newer_cuda(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    """Of the two libraries, that of the package comes first, as in an image with /usr/local/cuda/compat."""
    prepared = gpu_machine(A100, driver="535.261.03", cuda="12.2")
    compat = "/usr/local/cuda/compat"
    cuda_driver.compile_library(prepared.root / compat[1:] / "libcuda.so.1", [A100], cuda="13.2")
    assert launch({}).status == 2
    assert launch({"LD_LIBRARY_PATH": compat}).data["warnings"] == []
    explained = launch({"LD_LIBRARY_PATH": compat}, "--explain").out
    assert "driver 535.261.03, CUDA 13.2; the image has CUDA 13.2" in explained


@pytest.mark.parametrize(
    ("error", "driver", "status"),
    [(803, "535.261.03", 2), (804, "535.261.03", 2), (802, "535.261.03", 0), (999, "535.261.03", 0)]
    + [(error, "580.65.06", 0) for error in (803, 804, 802, 999)],
)
def test_a_compatibility_package_that_does_not_start(
    launch: Launch, gpu_machine: Callable[..., Machine], error: int, driver: str, status: int
) -> None:
    """Without it the kernel module decides; errors that may pass are not held against the package."""
    gpu_machine(T4, driver=driver, cuda="13.2", init=error)
    launched = launch({})
    assert launched.status == status
    if status:
        assert "cuda-compat" in refused(launched)
    else:
        (warning,) = launched.data["warnings"]
        assert f"cuInit of libcuda.so.1 returned {error} (driver {driver}, CUDA 13.2)" in warning


# --- drivers that do not answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [34, 46, 100, 802, 803, 804, 805, 999])
def test_an_error_of_cuda_is_a_warning(launch: Launch, gpu_machine: Callable[..., Machine], error: int) -> None:
    gpu_machine(H100, init=error)
    (warning,) = launch({}).data["warnings"]
    assert warning.startswith(f"CUDA does not start, cuInit of libcuda.so.1 returned {error} (driver 580.65.06, CUDA ")


def test_a_driver_without_a_gpu_says_so(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine()
    (warning,) = launch({}).data["warnings"]
    assert "returned 100" in warning and "shows no GPU to this container" in warning


@pytest.mark.parametrize(("driver", "status"), [("580.65.06", 0), ("470.82.01", 2), ("", 0)])
def test_a_driver_that_hangs_is_a_line(
    launch: Launch, gpu_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, driver: str, status: int
) -> None:
    monkeypatch.setattr(gpus, "DEADLINE", 0.5)
    gpu_machine(H100, driver=driver, cuda="13.0" if not status else "11.4", hangs=True)
    started = time.monotonic()
    launched = launch({})
    assert time.monotonic() - started < 20
    assert launched.status == status
    if status:
        refused(launched)
        return
    (warning,) = launched.data["warnings"]
    assert "did not answer within 0.5 s (cuInit of libcuda.so.1)" in warning
    assert "NVIDIA H100 80GB HBM3, compute capability unknown: not checked" in launch({}, "--explain").out


def test_sigterm_ends_the_wait_for_a_driver_that_hangs(gpu_machine: Callable[..., Machine]) -> None:
    prepared = gpu_machine(H100, hangs=True)
    env = {"LAUNCHER_SYSROOT": str(prepared.root), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-I", "-S", str(ROOT / "launcher"), "--", "/bin/true"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        end = time.monotonic() + 20
        while not children.read_text().split() and time.monotonic() < end:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        try:
            _, err = child.communicate(timeout=20)
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # the process that asks
    assert child.returncode == 128 + signal.SIGTERM
    assert err == "launch: error: SIGTERM while waiting for the NVIDIA driver\n"


def test_a_driver_that_crashes_is_a_line(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(H100, crashes=True)
    (warning,) = launch({}).data["warnings"]
    assert warning == "the NVIDIA driver cannot be asked (libcuda.so.1: signal 6)"


def test_a_library_that_cannot_be_loaded_is_a_line(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(H100, cuda="").add(LIBRARY, "no library")
    (warning,) = launch({}).data["warnings"]
    assert warning.startswith("libcuda.so.1 cannot be loaded, and CUDA will not start: ")


def test_a_missing_library_is_said_once(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(H100, cuda="")
    (warning,) = launch({}).data["warnings"]
    assert "libcuda.so.1 is neither under /usr/local/nvidia/lib64 nor in a system library folder" in warning


def test_without_a_python_that_starts_the_gpus_are_not_checked(
    launch: Launch, gpu_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine(V100)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (warning,) = launch({}).data["warnings"]
    assert warning.startswith("the NVIDIA driver cannot be asked (FileNotFoundError: ")


def test_the_loader_finds_the_library_by_its_name(tmp_path: Path) -> None:
    """On a machine that is not simulated: in LD_LIBRARY_PATH, as the frameworks find it."""
    cuda_driver.compile_library(tmp_path / "libcuda.so.1", [H100])
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    driver = gpus.ask(Host(), env, Image(**NEW))
    assert (driver.cuda, driver.error, driver.problem) == ("13.2", 0, "")
    assert [(gpu.name, gpu.capability, gpu.code) for gpu in driver.gpus] == [(*H100, "machine code")]


def test_what_the_library_prints_is_no_answer(
    launch: Launch, gpu_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu_machine(V100)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 5\necho '[1]'\necho '{'\necho '{\"cuda\": 12080}'\necho '{\"error\": 0}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "driver 580.65.06, CUDA 12.8 for GPU 0 (Tesla V100-SXM2-16GB)" in refused(launch({}))


@pytest.mark.parametrize("version", ["", "Kernel Module", "Kernel Module 580..65 \u0661.\u0662 ." + "9" * 5000, "\0"])
def test_a_version_that_cannot_be_read_is_unknown(
    launch: Launch, gpu_machine: Callable[..., Machine], version: str
) -> None:
    gpu_machine(H100, form=version + "{}", driver=" ")
    assert launch({}).data["warnings"] == []
    assert "nvidia    CUDA 13.0; the image has CUDA 13.2" in launch({}, "--explain").out


# --- where a refusal is none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"LAUNCHER_REHEARSE": "1"}, id="rehearsal"),
        pytest.param({"PJRT_DEVICE": "CUDA"}, id="R1"),
        pytest.param({"GPU_NUM_DEVICES": "1"}, id="R2"),
        pytest.param({"CLUSTER_SPEC": "pool 2"}, id="server"),
    ],
)
def test_what_does_not_train_on_the_gpu_by_the_launchers_decision_is_warned(
    launch: Launch, gpu_machine: Callable[..., Machine], cluster_spec: Callable[..., str], env: dict[str, str]
) -> None:
    gpu_machine(V100)
    if "CLUSTER_SPEC" in env:
        env = {"CLUSTER_SPEC": cluster_spec([1, 1, 1], "workerpool2", 0)}
    assert any("has no code for the GPU of this machine" in warning for warning in launch(env).data["warnings"])


def test_a_requested_gpu_is_checked_and_a_requested_cpu_is_the_way_round(
    launch: Launch, gpu_machine: Callable[..., Machine]
) -> None:
    gpu_machine(V100)
    refused(launch({"LAUNCHER_RUNTIME": "gpu"}))
    assert launch({"LAUNCHER_RUNTIME": "cpu"}).data["warnings"] == []


def test_without_a_gpu_nothing_is_asked_on_request(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia", **NEW)
    assert "driver " not in launch({"LAUNCHER_RUNTIME": "gpu"}, "--explain").out


@pytest.mark.parametrize(("framework", "status"), [("torch==2.15.0", 2), ("torch==2.7.1", 0), ("tensorflow", 0)])
def test_what_another_framework_needs_is_unknown(
    launch: Launch, gpu_machine: Callable[..., Machine], framework: str, status: int
) -> None:
    gpu_machine(V100)
    assert launch({"LAUNCHER_FRAMEWORK": framework}).status == status


def test_an_image_that_says_nothing_is_not_checked(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(V100).add_image("torch", "2.15.0", accelerator="nvidia")
    assert launch({}).data["warnings"] == []


# --- output ----------------------------------------------------------------------------------------------------------


def test_explain_shows_driver_image_and_gpus(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(H100, V100)
    lines = launch({}, "--explain").out.splitlines()
    assert lines[11:14] == [
        "nvidia    driver 580.65.06, CUDA 13.0; the image has CUDA 13.2, needs driver 580 or later, and has code for "
        "7.5 8.0 8.6 9.0 10.0 12.0",
        "gpu       0: NVIDIA H100 80GB HBM3, compute capability 9.0: runs",
        "gpu       1: Tesla V100-SXM2-16GB, compute capability 7.0: no code in this image",
    ]


def test_explain_shows_them_before_a_refusal_too(launch: Launch, gpu_machine: Callable[..., Machine]) -> None:
    gpu_machine(V100)
    launched = launch({}, "--explain")
    assert launched.status == 2
    assert "launch: gpu       0: Tesla V100-SXM2-16GB, compute capability 7.0: no code in this image" in launched.err


@pytest.mark.parametrize(
    "wrong",
    [
        {"cuda": "13"},
        {"cuda": 13.2},
        {"driver": "580-server"},
        {"driver": ""},
        {"gpus": "sm_90"},
        {"gpus": "9.0+SASS"},
        {"gpus": " "},
        {"gpus": ["9.0"]},
        {"cuda": None, "driver": None, "gpus": None},
    ],
    ids=str,
)
def test_an_invalid_recipe_is_refused(launch: Launch, machine: Machine, wrong: dict[str, Any]) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia", **{**NEW, **wrong})
    launched = launch({})
    assert launched.status == 2
    assert "is not a valid recipe (cuda, driver and gpus are " in launched.err
    assert launched.err.endswith("rebuild the image\n")
