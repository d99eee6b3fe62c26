"""Files whose paths the environment gives: only regular files are opened, and nothing is waited for (R10.2)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, Launch, Machine

JOB = {"TRAINING_JOB_NAME": "job"}
Folders = Callable[..., None]
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def _run(machine: Machine, env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher in a separate process, which can be killed if it waits for a FIFO."""
    command = [sys.executable, "-I", "-S", str(ROOT / "launcher"), *argv]
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], **env}
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=30)


def _special(kind: str, path: Path) -> str:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        return kind
    return str(path)


KINDS = pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "/dev/zero", "/dev/full"])


@KINDS
def test_a_list_of_workers_that_is_not_a_regular_file_is_status_2(machine: Machine, tmp_path: Path, kind: str) -> None:
    path = _special(kind, tmp_path / "x")
    ended = _run(machine, {"TPU_PROCESS_ADDRESSES_PATH": path}, "--print-env")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    reason = "No such device or address" if kind == "socket" else "not a regular file"
    assert f"{path!r} (TPU_PROCESS_ADDRESSES_PATH): {reason}" in ended.stderr


@KINDS
def test_a_termination_log_that_is_not_a_regular_file_is_skipped(machine: Machine, tmp_path: Path, kind: str) -> None:
    ended = _run(machine, {"TPU_CONFIG": "x", "TERMINATION_LOG": _special(kind, tmp_path / "x")}, "--print-env")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "env", "argv", "status"),
    [
        pytest.param("/opt/trainyard/recipe.json", {}, ["--explain"], 2, id="image"),
        pytest.param("/dev/termination-log", {"TPU_CONFIG": "x"}, ["--explain"], 2, id="termination-log"),
        pytest.param("/opt/ml/output/failure", {"TPU_CONFIG": "x", **JOB}, ["--explain"], 2, id="failure"),
        pytest.param("/opt/ml/input/config/hyperparameters.json", {}, ["--explain", "train"], 2, id="hyperparameters"),
        pytest.param("/opt/ml/input/config/resourceconfig.json", JOB, ["--explain"], 0, id="resources"),
        pytest.param("/proc/self/cgroup", {}, ["--explain"], 0, id="cgroup"),
        pytest.param("/sys/bus/pci/devices/0/vendor", {}, ["--explain"], 0, id="pci"),
        pytest.param(f"/proc/{os.getpid()}/stat", HYDRA, ["--explain"], 0, id="parent"),
    ],
)
def test_a_fifo_below_the_prefix_of_the_machine_is_not_waited_for(
    machine: Machine, path: str, env: dict[str, str], argv: list[str], status: int
) -> None:
    machine.add(path)
    (machine.root / path.lstrip("/")).unlink()
    os.mkfifo(machine.root / path.lstrip("/"))
    ended = _run(machine, env, *argv)
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr and "internal error" not in ended.stderr


@pytest.fixture
def folders(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Create folders of the machine; ``noexec`` ones are mounted so that nothing in them can be executed."""
    not_executable = set()
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        fields = list(real(path))
        flags = fields[8] | os.ST_NOEXEC if path in not_executable else fields[8] & ~os.ST_NOEXEC
        return os.statvfs_result([*fields[:8], flags, *fields[9:]])

    def create(*usable: str, noexec: tuple[str, ...] = ()) -> None:
        for name in (*usable, *noexec):
            (machine.root / name).mkdir(parents=True)
        not_executable.update(str(machine.root / name) for name in noexec)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return create


def test_compiled_code_is_left_where_pytorch_puts_it_if_it_can_be_loaded_from_there(
    machine: Machine, launch: Launch, folders: Folders
) -> None:
    machine.add_image("torch", "2.15.0")
    folders("tmp", "home/trainer")
    assert launch(env={"HOME": "/home/trainer"}).exports == {}


def test_compiled_code_gets_a_folder_that_is_not_mounted_noexec(
    machine: Machine, launch: Launch, folders: Folders
) -> None:
    machine.add_image("torch", "2.15.0")
    folders("home/trainer/.cache", noexec=("tmp",))
    assert launch(env={"HOME": "/home/trainer"}).exports == {
        "TORCHINDUCTOR_CACHE_DIR": "/home/trainer/.cache/torchinductor"
    }
    assert launch(env={"HOME": "/home/trainer", "TORCHINDUCTOR_CACHE_DIR": "/x"}).exports == {}


def test_triton_gets_a_folder_if_the_home_directory_is_none(machine: Machine, launch: Launch, folders: Folders) -> None:
    machine.add_image("torch_xla", "2.9.0")
    folders("scratch", noexec=("home/trainer",))
    exports = launch(env={"HOME": "/home/trainer", "TMPDIR": "/scratch"}).exports
    assert exports["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert "TORCHINDUCTOR_CACHE_DIR" not in exports


def test_without_a_folder_for_compiled_code_one_line_says_what_to_do(
    machine: Machine, launch: Launch, folders: Folders
) -> None:
    machine.add_image("torch", "2.15.0")
    folders(noexec=("tmp", "home/trainer", "workspace"))
    launched = launch(env={"HOME": "/home/trainer"})
    assert launched.exports == {}
    assert (
        "torch.compile will fail: /tmp, /home/trainer, /workspace are read-only or mounted noexec, and compiled code "
        "cannot be loaded from there; mount an executable folder, as with docker run --tmpfs /tmp:exec"
    ) in launched.data["warnings"]
    machine.add_image("tensorflow", "2.21.0")
    assert launch(env={"HOME": "/home/trainer"}).data["warnings"] == []
