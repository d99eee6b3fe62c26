"""Output and errors of several processes in files, as torchrun has them (R15.8)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import ROOT, Launch, Machine

LAUNCHER = [sys.executable, "-I", "-S", str(ROOT / "launcher")]
#: What `@record` of torch.distributed.elastic writes (torch 2.15), in the order of the times given for each rank.
#: A process fails when every process has written its output: the launcher stops the others then.
RECORD = """
import json, os, sys, time
rank = os.environ["RANK"]
os.write(1, f"out {rank}\\n".encode())  # at once: unbuffered, print() writes a line in parts
os.write(2, f"err {rank}\\n".encode())
times, started = json.loads(sys.argv[1]), sys.argv[2]
open(f"{started}/{rank}", "w").close()
while len(os.listdir(started)) < int(os.environ["LOCAL_WORLD_SIZE"]):
    time.sleep(0.01)
if rank in times:
    stack = 'Traceback:\\n  File "/a.py", line 1, in f\\n  File "/b.py", line 12\\nValueError: x\\n'
    info = {"py_callstack": stack, "timestamp": str(times[rank])}
    error = {"message": {"message": f"ValueError: of {rank}\\nline 2", "extraInfo": info}}
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    with open(path, "w") as file:
        json.dump(error, file)
    while not all(os.path.exists(path.replace(f"/{rank}/error", f"/{other}/error")) for other in times):
        time.sleep(0.01)
    if rank != min(times):
        time.sleep(60)
    sys.exit(7)
time.sleep(0 if not times else 60)
"""


def run(machine: Machine, tmp_path: Path, times: dict[str, int], **env: str) -> subprocess.CompletedProcess[str]:
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    full = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCHER_NPROC": "2",
            "TMPDIR": str(temporary), **env}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=tmp_path) as started:
        command = [*LAUNCHER, "--", sys.executable, "-c", RECORD, json.dumps(times), started]
        ended = subprocess.run(command, env=full, capture_output=True, text=True, timeout=60, check=False)
    assert list(temporary.iterdir()) == []
    return ended


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_first_error_of_the_processes_is_one_line(machine: Machine, tmp_path: Path) -> None:
    """Print the error of rank 1, which fails first, although rank 0 ends first."""
    ended = run(machine, tmp_path, {"0": 1700000002, "1": 1700000001})
    assert ended.returncode == 7
    assert ended.stderr.splitlines()[-1] == "launch: error: rank 1: ValueError: of 1 line 2 (/b.py:12)"


def test_output_and_errors_are_kept_in_a_folder_for_each_attempt(machine: Machine, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ended = run(machine, tmp_path, {}, LAUNCHER_LOG_DIR=str(logs))
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["out 0", "out 1"])
    first = {f"attempt_0/{rank}/{name}.log": f"{name[3:]} {rank}\n" for rank in "01" for name in ("stdout", "stderr")}
    assert files(logs) == first
    ended = run(machine, tmp_path, {"1": 1700000001}, LAUNCHER_LOG_DIR=str(logs), LAUNCHER_PREFIX="1")
    assert ended.stderr.splitlines()[-1].endswith(f"(/b.py:12, {logs}/attempt_1/1/error.json)")
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    second = files(logs)
    assert json.loads(second.pop("attempt_1/1/error.json"))["message"]["message"].startswith("ValueError")
    assert second == {**first, **{name.replace("attempt_0", "attempt_1"): text for name, text in first.items()}}


def test_another_node_of_the_job_has_the_same_attempt(machine: Machine, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = {"LAUNCHER_LOG_DIR": str(logs), "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    for node in "01":
        assert run(machine, tmp_path, {}, NODE_RANK=node, **job).returncode == 0
    assert sorted(path.name for path in (logs / "attempt_0").iterdir()) == ["0", "1", "2", "3"]


def test_one_process_has_a_folder_too(machine: Machine, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ended = run(machine, tmp_path, {"0": 1700000001}, LAUNCHER_NPROC="1", LAUNCHER_LOG_DIR=str(logs))
    assert (ended.returncode, ended.stdout) == (7, "out 0\n")
    assert {name: text for name, text in files(logs).items() if "log" in name} == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
    }
    assert "rank 0: ValueError" in ended.stderr


@pytest.mark.parametrize("error", ["", "{", "[]", '{"message": "text"}', '{"message": {"message": 3}}'])
def test_an_error_file_of_another_form_is_passed_over(machine: Machine, tmp_path: Path, error: str) -> None:
    program = f"import os, sys; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({error!r}); sys.exit(3)"
    env = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCHER_NPROC": "2"}
    command = [*LAUNCHER, "--", sys.executable, "-c", program]
    ended = subprocess.run(command, env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (ended.returncode, list(tmp_path.glob("launch-*"))) == (3, [])
    assert "of this node" in ended.stderr.splitlines()[-1] or "start" in ended.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_written_ends_the_start(launch: Launch, machine: Machine, tmp_path: Path) -> None:
    ended = run(machine, tmp_path, {}, LAUNCHER_LOG_DIR="/dev/null/logs")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "LAUNCHER_LOG_DIR is '/dev/null/logs': Not a directory" in ended.stderr
    assert "a folder of this machine" in launch({"LAUNCHER_LOG_DIR": "gs://bucket/logs"}).err


def test_a_temporary_folder_that_cannot_be_made_does_not_end_the_job(machine: Machine) -> None:
    env = {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCHER_NPROC": "2"}
    command = [*LAUNCHER, "--", "/bin/sh", "-c", "echo ${TORCHELASTIC_ERROR_FILE:-none}"]
    ended = subprocess.run(command, env={**env, "TMPDIR": "/dev/null"}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "none\nnone\n")


def test_torchrun_gets_the_folder_as_its_own(launch: Launch) -> None:
    env = {"LAUNCHER_FRAMEWORK": "torch==2.13", "LAUNCHER_RDZV_BACKEND": "c10d", "LAUNCHER_NPROC": "2",
           "LAUNCHER_LOG_DIR": "/logs/"}  # fmt: skip
    started = launch(env, "--explain", "--", "python", "train.py").out
    assert "--log-dir=/logs --tee=3" in started
