"""The launcher under every Python from 3.8 to 3.14 that is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, Machine, cluster_spec
from tests.fakes import cuda_driver

MINORS = range(8, 15)


def _interpreters() -> dict[str, str]:
    """Version -> path of the interpreters on PATH and in pyenv, and of the running one."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    roots = Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))) / "versions"
    for minor in MINORS:
        # Those of pyenv first: its shims on PATH take three shells each.
        candidates = [*map(str, sorted(roots.glob(f"3.{minor}.*/bin/python3"))), shutil.which(f"python3.{minor}")]
        working = (path for path in candidates if path and _works(path, minor))
        if f"3.{minor}" not in found and (first := next(working, None)):
            found[f"3.{minor}"] = first
    return found


def _works(path: str, minor: int) -> bool:
    """Whether this is the given Python: pyenv has shims for versions that are not selected."""
    text = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
    return subprocess.run([path, "-I", "-S", "-c", text], capture_output=True, check=False).returncode == 0


PYTHONS = _interpreters()


@pytest.fixture(params=sorted(PYTHONS, key=lambda version: int(version[2:])))
def python(request: pytest.FixtureRequest) -> str:
    return PYTHONS[request.param]


def _run(python: str, machine: Machine, env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **machine.env, **env}
    return subprocess.run(
        [python, "-I", "-S", str(ROOT / "launcher"), *argv], env=full, capture_output=True, text=True, timeout=60
    )


CASES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "cpu": ({"LAUNCHER_FRAMEWORK": "torch_xla==2.9.0"}, "cpu", {"PJRT_DEVICE": "CPU"}),
    "tpu-node-by-address": (
        {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.120.27.5:8470"},
        "tpu-node",
        {"TPU_IP_ADDRESS": "10.120.27.5"},
    ),
    "tpu7x-without-worker-id": (
        {"TPU_ACCELERATOR_TYPE": "tpu7x-8", "TPU_SKIP_MDS_QUERY": "true"},
        "tpu-local",
        {"TPU_WORKER_ID": "0"},
    ),
    "vertex-worker": (
        {"CLUSTER_SPEC": cluster_spec([1, 2, 2], "workerpool1", 1)},
        "cpu",
        {"NODE_RANK": "2", "NNODES": "3"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decisions(python: str, machine: Machine, case: str) -> None:
    env, runtime, exports = CASES[case]
    done = _run(python, machine, env, "--print-env", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["runtime"] == runtime
    assert exports.items() <= data["exports"].items()


def test_waits_for_a_tpu_node_then_execs(
    python: str, machine: Machine, google_cloud: Callable[..., Any], tpu_config: Any
) -> None:
    google_cloud(states=["CREATING", "READY"], faults={"node": ["garbage"]})
    done = _run(python, machine, {"TPU_CONFIG": tpu_config()}, "--", "/bin/sh", "-c", 'echo "$XRT_TPU_CONFIG"; exit 42')
    assert (done.returncode, done.stdout) == (42, "tpu_worker;0;10.1.2.3:8470\n")
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(("env", "status"), [({"TPU_CONFIG": "x"}, 2), ({"TPU_NAME": "nonexistent"}, 138)])
def test_exit_statuses_of_failures(
    python: str, machine: Machine, google_cloud: Any, env: dict[str, str], status: int
) -> None:
    google_cloud()
    done = _run(python, machine, {**env, "LAUNCHER_TPU_ATTEMPTS": "2"}, "--explain")
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_gpus(python: str, machine: Machine) -> None:
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    machine.add("/proc/driver/nvidia/version", cuda_driver.OPEN_VERSION.format("580.65.06"))
    library = machine.root / "usr/lib64/libcuda.so.1"
    cuda_driver.compile_library(library, [("Tesla V100-SXM2-16GB", "7.0")])
    machine.add_image("torch", "2.15.0", accelerator="nvidia", cuda="13.2", driver="580", gpus="7.5 9.0")
    done = _run(python, machine, {}, "--", "/bin/true")
    assert done.returncode == 2 and "GPU 0 (Tesla V100-SXM2-16GB, compute capability 7.0)" in done.stderr
    cuda_driver.compile_library(library, [("NVIDIA H100", "9.0")])
    assert _run(python, machine, {"LAUNCHER_LOG": "quiet"}, "--", "/bin/true").stderr == ""


def test_explain_help_and_a_missing_command(python: str, machine: Machine) -> None:
    assert "R9" in _run(python, machine, {}, "--explain").stdout
    assert "usage: launch" in _run(python, machine, {}, "--help").stdout
    assert _run(python, machine, {}, "--", "no-such-command").returncode == 127


def test_several_processes(python: str, machine: Machine) -> None:
    show = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"; exit $RANK'
    env = {"LAUNCHER_NPROC": "2", "LAUNCHER_PREFIX": "1", "LAUNCHER_GRACE": "5"}
    done = _run(python, machine, env, "--", "/bin/sh", "-c", f'if [ "$RANK" = 1 ]; then sleep 0.2; fi; {show}')
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 0 2", "[rank 1] 1 1 2"]
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr
