"""The launcher without requests: the modules that it imports, and its isolation from the user's Python."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from launcher import image
from launching import ROOT, Machine

FORBIDDEN = {"ssl", "_ssl", "http", "http.client", "urllib", "urllib.request", "socket", "subprocess", "threading"}
HEAVY = {"typing", "re", "dataclasses", "argparse", "enum", "logging", "signal", "asyncio"}
LIST_MODULES = """
import sys
sys.path.insert(0, {root!r})
from launcher import process
process.replace = lambda command, env: print("\\n".join(sorted(sys.modules)))
from launcher.__main__ import main
main({argv!r})
"""


def _imported(machine: Machine, env: dict[str, str], *argv: str) -> set[str]:
    """The modules in memory at the time of the exec."""
    text = LIST_MODULES.format(root=str(ROOT), argv=list(argv))
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **machine.env, **env}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", text], env=full, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "launcher.cli" in done.stdout
    return set(done.stdout.split())


TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[0-1]",
}
NEEDS = {"LAUNCHER_PREFLIGHT_NEEDS": "memory=0,shm=0,disk=0,files=0"}
SLICE = {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v4-8"}


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="R9"),
        pytest.param({"PJRT_DEVICE": "TPU"}, id="R1"),
        pytest.param({"XRT_TPU_CONFIG": "tpu_worker;0;1.2.3.4:8470"}, id="R2"),
        pytest.param(SLICE, id="R3"),
        pytest.param({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://1.2.3.4"}, id="R5"),
        pytest.param({"TPU_NAME": "grpc://1.2.3.4"}, id="R6"),
        pytest.param({"LAUNCHER_RUNTIME": "cpu", "TPU_NAME": "tpu-a"}, id="R0"),
        pytest.param(TASK, id="slurm"),
    ],
)
def test_no_network_module_is_imported(machine: Machine, env: dict[str, str]) -> None:
    imported = _imported(machine, env, "--", "/bin/true")
    assert not imported & (FORBIDDEN | HEAVY)
    assert not imported & {"launcher.tpu_node.cloud", "launcher.fetch", "launcher.tpu_node.wait"}


@pytest.mark.parametrize(
    ("env", "package"),
    [
        pytest.param({}, "", id="cpu"),
        pytest.param({"LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"}, "", id="torch_xla"),
        pytest.param(SLICE, "", id="slice-of-TPU-VMs"),
        pytest.param(TASK, "", id="slurm"),
        pytest.param({"TPU_NAME": "local"}, "", id="TPU_NAME=local"),
        pytest.param({"TPU_NAME": "grpc://1.2.3.4"}, "launcher.tpu_node", id="TPU_NAME"),
        pytest.param({"XRT_TPU_CONFIG": "tpu_worker;0;1.2.3.4:8470"}, "launcher.tpu_node", id="XRT"),
        pytest.param({**SLICE, "LAUNCHER_FRAMEWORK": "torch_xla==1.12"}, "launcher.tpu_node", id="torch_xla-1.12"),
        pytest.param({"LAUNCHER_PREFLIGHT": "1", **NEEDS}, "launcher.preflight", id="preflight"),
    ],
)
def test_a_package_is_imported_only_on_its_signals(machine: Machine, env: dict[str, str], package: str) -> None:
    found = _imported(machine, env, "--", "/bin/true") & {"launcher.tpu_node", "launcher.preflight"}
    assert found == ({package} if package else set())


def test_reading_the_recipe_imports_no_json(machine: Machine) -> None:
    machine.add_image("torch", "2.9.1")
    assert not _imported(machine, {}, "mnist") & (FORBIDDEN | HEAVY | {"json"})


GPU_FACTS = {"cuda": "13.2", "driver": "580", "gpus": "7.5 8.0 8.6 9.0 10.0 12.0"}


@pytest.mark.parametrize("env", [{}, {"LAUNCHER_RUNTIME": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_gpus_are_asked_only_where_there_are_gpus(machine: Machine, env: dict[str, str]) -> None:
    machine.add_image("torch", "2.15.0", accelerator="nvidia", **GPU_FACTS)
    assert not _imported(machine, {"LAUNCHER_RUNTIME": "gpu"}, "--", "/bin/true") & (FORBIDDEN | {"launcher.gpus"})
    if env:
        machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    assert not _imported(machine, env, "--", "/bin/true") & FORBIDDEN
    machine.add_image("torch", "2.15.0", accelerator="nvidia")
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    assert not _imported(machine, {}, "--", "/bin/true") & (FORBIDDEN | {"launcher.gpus"})


def test_plain_http_does_not_import_tls(machine: Machine, google_cloud: object, tpu_config: object) -> None:
    google_cloud()  # type: ignore[operator]
    imported = _imported(machine, {"TPU_CONFIG": tpu_config()}, "--", "/bin/true")  # type: ignore[operator]
    assert "launcher.tpu_node.cloud" in imported
    assert not imported & {"ssl", "http", "http.client", "urllib", "urllib.request", "email"}


def test_standard_library_only() -> None:
    known = set(sys.stdlib_module_names) | {"launcher"}
    # But for the programs of a preflight, which run in the image's Python.
    for path in set((ROOT / "launcher").rglob("*.py")) - set((ROOT / "launcher/preflight/frameworks").iterdir()):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= known, path


def test_every_file_parses_as_python_3_8() -> None:
    for path in [*(ROOT / "launcher").rglob("*.py"), ROOT / "launcher" / "launch"]:
        ast.parse(path.read_text(), feature_version=(3, 8))


def _env_of(command: list[str], machine: Machine) -> dict[str, str]:
    env = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "PYTHONPATH": "/nonexistent"}
    done = subprocess.run([*command, "--print-env", "--json"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    exports = json.loads(done.stdout)["exports"]
    assert isinstance(exports, dict)
    return exports


def test_folder_zip_and_installed_script_are_the_same_program(machine: Machine, tmp_path: Path) -> None:
    archive = tmp_path / "launcher.pyz"
    zipapp.create_archive(ROOT / "launcher", archive)
    script = tmp_path / "launch"
    script.write_text((ROOT / "launcher" / "launch").read_text().replace('"/opt/trainyard"', repr(str(ROOT))))
    isolated = [sys.executable, "-I", "-S"]
    folder = _env_of([*isolated, str(ROOT / "launcher")], machine)
    assert folder["PJRT_DEVICE"] == "CPU"
    assert _env_of([*isolated, str(archive)], machine) == folder
    assert _env_of([*isolated, str(script)], machine) == folder
    assert _env_of([sys.executable, "-m", "launcher"], machine) == folder


def test_files_in_the_current_folder_are_not_imported(machine: Machine, tmp_path: Path) -> None:
    for name in ("json.py", "os.py", "errors.py", "launcher.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    env = {"LAUNCHER_SYSROOT": str(machine.root), "PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-I", "-S", str(ROOT / "launcher"), "--print-env", "--json"]
    assert subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=30).returncode == 0


def test_readers_of_coordinates_are_imported_only_for_their_variables(machine: Machine) -> None:
    assert "launcher.readers" not in _imported(machine, {}, "--", "/bin/true")
    assert "launcher.readers" in _imported(machine, TASK, "--", "/bin/true")


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2.5, true, null, "\\u00e9\\n"], "b": {}}', " [1]\n", '"é"', "NaN", "{", "", "[1] x", "[1,]"],
)
def test_the_recipe_is_parsed_as_json_does(text: str) -> None:
    """Invalid text raises what json raises, to which it is left."""
    content = text.encode()
    try:
        expected = repr(json.loads(content))
    except ValueError as error:
        expected = str(error)
    try:
        found = repr(image._loads(content))
    except ValueError as error:
        found = str(error)
    assert found == expected
