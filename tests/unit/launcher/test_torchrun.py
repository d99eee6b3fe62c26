"""torchrun, for elastic jobs (R14.6). The number of processes and the static case: test_processes.py."""

from __future__ import annotations

import pytest
from launcher import processes, torchrun
from launcher.cluster import resolve
from launcher.host import Host
from launcher.image import Image
from launcher.runtime import Facts
from launcher.settings import Settings
from launching import Launch, Machine, cluster_spec

GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")
VERTEX = "cmle-training-workerpool0-ab-0"
TWO = {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0), "LAUNCHER_RDZV_BACKEND": "c10d"}
TRAIN = ["python", "train.py", "--lr", "1"]
PET = {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "m:1"}


def _started(machine: Machine, env: dict[str, str], command: list[str]) -> list[str]:
    """The command that would be started on this machine."""
    machine.add_devices(*GPUS)
    facts = Facts(env, Host(str(machine.root)), Image(framework=env.get("framework", "torch")), Settings(env))
    cluster = resolve(env, facts.settings)
    nproc = processes.count(facts, "gpu", False, cluster, command)
    return torchrun.wrap(command, facts, cluster, nproc) or command


@pytest.mark.parametrize(
    ("env", "command", "arguments"),
    [
        pytest.param(
            TWO,
            ["python3", "-u", "-m", "my.module", "-x"],
            ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-backend=c10d",
             f"--rdzv-endpoint={VERTEX}:2222", "--rdzv-id=trainyard", "--rdzv-conf=is_host=false"],
            id="LAUNCHER_RDZV_BACKEND",
        ),
        pytest.param(
            {**TWO, "LAUNCHER_NPROC": "4", "LAUNCHER_MASTER_PORT": "29400", "CLOUD_ML_JOB_ID": "7"},
            TRAIN,
            ["--nnodes=2", "--nproc-per-node=4", "--node-rank=1", "--rdzv-backend=c10d",
             f"--rdzv-endpoint={VERTEX}:29400", "--rdzv-id=7", "--rdzv-conf=is_host=false"],
            id="LAUNCHER_NPROC",
        ),
        pytest.param(PET, TRAIN, ["--nproc-per-node=2", "--rdzv-id=trainyard"], id="range"),
        pytest.param(
            {**PET, "PET_NPROC_PER_NODE": "2", "LAUNCHER_NPROC": "8"},
            TRAIN,
            ["--nproc-per-node=8", "--rdzv-id=trainyard"],
            id="LAUNCHER_NPROC-over-PET",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1",
             "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3"},
            TRAIN,
            [],
            id="every-option-set-by-PET",
        ),
        pytest.param(
            {"PET_MAX_RESTARTS": "3", "LAUNCHER_NPROC": "2", "LAUNCHER_MASTER_PORT": "1"},
            TRAIN,
            ["--nnodes=1", "--nproc-per-node=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1"],
            id="restarts",
        ),
    ],
)  # fmt: skip
def test_arguments_of_torchrun(machine: Machine, env: dict[str, str], command: list[str], arguments: list[str]) -> None:
    script = [word for word in command[1:] if word != "-u"]
    assert _started(machine, env, command) == [command[0], "-m", "torch.distributed.run", *arguments, *script]


@pytest.mark.parametrize(
    ("env", "command"),
    [
        pytest.param({"CLUSTER_SPEC": TWO["CLUSTER_SPEC"]}, TRAIN, id="static"),
        pytest.param({"PET_RDZV_BACKEND": "static", "PET_NNODES": "1"}, TRAIN, id="static-PET"),
        pytest.param({"PET_NNODES": "1", "PET_MAX_RESTARTS": "0"}, TRAIN, id="no-restarts"),
        pytest.param({**TWO, "LAUNCHER_NPROC": "1"}, TRAIN, id="one-process"),
        pytest.param(PET, ["bash", "train.sh"], id="not-python"),
        pytest.param(PET, [], id="no-command"),
        pytest.param(PET, ["python", "-c", "pass"], id="python-c"),
        pytest.param(PET, ["python", "-m", "torch.distributed.run", "train.py"], id="torchrun-in-the-command"),
        pytest.param({**PET, "TORCHELASTIC_RUN_ID": "1"}, TRAIN, id="under-torchrun"),
        pytest.param({**PET, "LOCAL_RANK": "0"}, TRAIN, id="process-started-by-a-launcher"),
        pytest.param({**PET, "framework": "tensorflow"}, TRAIN, id="tensorflow"),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 0, 1], "workerpool2", 0), "LAUNCHER_RDZV_BACKEND": "c10d"}, TRAIN,
            id="reduction-server",
        ),
    ],
)  # fmt: skip
def test_commands_that_are_not_started_by_torchrun(machine: Machine, env: dict[str, str], command: list[str]) -> None:
    assert _started(machine, env, command) == command


def test_restarts_on_one_node_use_a_free_port(machine: Machine) -> None:
    env = {"PET_MAX_RESTARTS": "3", "LAUNCHER_NPROC": "2"}
    (port,) = (word for word in _started(machine, env, TRAIN) if word.startswith("--master-port="))
    assert 1024 < int(port.partition("=")[2]) < 65536


def test_a_job_of_torchrun_says_so(launch: Launch, machine: Machine) -> None:
    machine.add_image("torch", "2.13")
    out = launch({"LAUNCHER_RDZV_BACKEND": "c10d", "LAUNCHER_NPROC": "2"}, "--explain", "--", *TRAIN).out
    assert "start     python -m torch.distributed.run --nnodes=1 --nproc-per-node=2" in out


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1,2", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-1,GPU-2", 2)]
)
def test_number_of_visible_gpus(machine: Machine, visible: str | None, count: int) -> None:
    machine.add_devices(*GPUS)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Host(str(machine.root)).gpu_count(env) == count
