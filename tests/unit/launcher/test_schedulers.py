"""Coordinates from schedulers of processes, pods and machines (R13.10 to R13.16, R13.18, R13.22 to R13.24)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launcher.cluster import resolve
from launcher.coordinates import Cluster
from launcher.errors import LaunchError
from launcher.readers import first_node
from launcher.settings import Settings
from launching import ROOT, Launch, Machine

TORCH = {"LAUNCHER_FRAMEWORK": "torch==2.9.1"}
HNP = "88735744.0;tcp://192.0.2.2,172.17.0.1:38957;tcp6://[fd00::2]:55361"
PORTS = range(61440, 65536)  # R13.19


def job(tasks: str, nodes: str, size: int) -> dict[str, str]:
    """What sbatch sets in its script (Slurm 22.05), which is task 0 of the job, but not a task of a step."""
    return {
        "SLURM_JOB_ID": "4",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(tasks.count(",") + 1),
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": nodes,
        "SLURM_NPROCS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": "0",
        "SLURM_TASKS_PER_NODE": tasks,
    }


def step(rank: int, size: int, tasks: str, node: int = 0, local: int = 0, nodes: str = "n[0-1]") -> dict[str, str]:
    """What srun sets in a task (Slurm 22.05)."""
    return {
        **job(tasks, nodes, size),
        "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(2 if "[" in nodes else 1),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def mpi(rank: int, size: int, local: int, local_size: int, **more: str) -> dict[str, str]:
    """What Open MPI 4.1 sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_MCA_orte_hnp_uri": HNP,
        "OMPI_MCA_orte_local_daemon_uri": HNP,
        **more,
    }


def hydra(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(local_size),
    }


LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "3"}
VOLCANO = {
    "VC_MASTER_HOSTS": "job-master-0.job",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2",
    "VC_PS_HOSTS": "job-ps-0.job",
    "VC_PS_NUM": "1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]'}


def sky_pilot(rank: int, size: int = 2, ips: str = "10.0.0.1\n10.0.0.2") -> dict[str, str]:
    """Return the variables that SkyPilot sets in the shell of `run`."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(size),
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }


def dstack(rank: int, size: int = 2, head: str = "10.0.0.1") -> dict[str, str]:
    return {
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_NODES_NUM": str(size),
        "DSTACK_MASTER_NODE_IP": head,
        "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
    }


def aws_batch(index: int, size: int, main: int = 0) -> dict[str, str]:
    """Return the variables of a node of a multi-node parallel job; the main node does not get its address."""
    address = {} if index == main else {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.9"}
    return {
        "AWS_BATCH_JOB_ID": "7e2f",
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_NUM_NODES": str(size),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
        **address,
    }


def run_pod(rank: int, size: int = 2) -> dict[str, str]:
    """Return the variables of a node with 8 GPUs of an Instant Cluster."""
    return {
        "NODE_RANK": str(rank),
        "NUM_NODES": str(size),
        "NUM_TRAINERS": "8",
        "WORLD_SIZE": str(8 * size),
        "MASTER_ADDR": "10.65.0.2",
        "MASTER_PORT": "29400",
        "PRIMARY_ADDR": "10.65.0.2",
        "PRIMARY_PORT": "29400",
    }


def lepton(index: int, workers: int = 2) -> dict[str, str]:
    return {
        "LEPTON_JOB_WORKER_INDEX": str(index),
        "LEPTON_JOB_TOTAL_WORKERS": str(workers),
        "LEPTON_JOB_NAME": "job-98bw",
        "LEPTON_JOB_SERVICE_PREFIX": "job-98bw",
        "LEPTON_SUBDOMAIN": "job-98bw-job-svc",
        "LEPTON_JOB_WORKER_PREFIX": "worker",
    }


def beaker(rank: int, count: int = 2, head: str = "b-cs-1.reviz.ai2.in") -> dict[str, str]:
    return {
        "BEAKER_REPLICA_RANK": str(rank),
        "BEAKER_REPLICA_COUNT": str(count),
        "BEAKER_LEADER_REPLICA_HOSTNAME": head,
    }


def metaflow(index: int, nodes: int = 2) -> dict[str, str]:
    return {
        "MF_PARALLEL_NODE_INDEX": str(index),
        "MF_PARALLEL_NUM_NODES": str(nodes),
        "MF_PARALLEL_MAIN_IP": "10.0.0.1",
    }


def ngc(index: int, size: int = 2) -> dict[str, str]:
    return {"NGC_ARRAY_INDEX": str(index), "NGC_ARRAY_SIZE": str(size), "NGC_MASTER_ADDR": "launcher-svc-1234"}


def horovod(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    }


def mvapich(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    """Return the variables that mpirun_rsh sets."""
    return {
        "MPIRUN_RANK": str(rank),
        "MV2_COMM_WORLD_RANK": str(rank),
        "MV2_COMM_WORLD_SIZE": str(size),
        "MV2_COMM_WORLD_LOCAL_RANK": str(local),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def _resolve(env: dict[str, str]) -> Cluster:
    return resolve(env, Settings(env))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(step(1, 2, "1(x2)", node=1), ("Slurm", 1, 2, "n0"), id="slurm-task-per-node"),
        pytest.param({**LWS, "LWS_WORKER_INDEX": "2"}, ("LeaderWorkerSet", 2, 3, "lws-0.lws.default"), id="lws"),
        pytest.param({**LWS, "LWS_WORKER_INDEX": "0"}, ("LeaderWorkerSet", 0, 3, "lws-0.lws.default"), id="lws-leader"),
        pytest.param(
            {"VC_TASK_INDEX": "1", "VC_TRAINER_HOSTS": "j-trainer-0.j,j-trainer-1.j", "VC_TRAINER_NUM": "2"},
            ("Volcano", 1, 2, "j-trainer-0.j"),
            id="volcano-one-task",
        ),
        pytest.param(
            {**VOLCANO, "VC_TASK_INDEX": "1", "HOSTNAME": "job-worker-1"},
            ("Volcano", 2, 3, "job-master-0.job"),
            id="volcano-worker",
        ),
        pytest.param(
            {**VOLCANO, "VK_TASK_INDEX": "0", "HOSTNAME": "job-master-0"},
            ("Volcano", 0, 3, "job-master-0.job"),
            id="volcano-master",
        ),
        pytest.param(
            {**VOLCANO, "VC_TASK_INDEX": "0", "HOSTNAME": "job-ps-0"},
            ("Volcano", None, 3, "job-master-0.job"),
            id="volcano-ps",
        ),
        pytest.param({**SAGEMAKER, "SM_CURRENT_HOST": "algo-2"}, ("SageMaker", 1, 2, "algo-1"), id="sagemaker"),
        pytest.param(
            {
                **SAGEMAKER,
                "SM_HOSTS": '["algo-1", "algo-2", "algo-3"]',
                "SM_CURRENT_HOST": "algo-3",
                "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-3", "algo-2"]',
            },
            ("SageMaker", 1, 2, "algo-2"),
            id="sagemaker-group",
        ),
        pytest.param(
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-2", "SM_CURRENT_INSTANCE_GROUP_HOSTS": "[]"},
            ("SageMaker", 1, 2, "algo-1"),
            id="sagemaker-no-groups",
        ),
        pytest.param(sky_pilot(0), ("SkyPilot", 0, 2, "10.0.0.1"), id="skypilot-head"),
        pytest.param(sky_pilot(1), ("SkyPilot", 1, 2, "10.0.0.1"), id="skypilot-worker"),
        pytest.param({**sky_pilot(1, ips=""), "MASTER_ADDR": "h0"}, ("SkyPilot", 1, 2, "h0"), id="skypilot-no-ips"),
        pytest.param(dstack(1), ("dstack", 1, 2, "10.0.0.1"), id="dstack"),
        pytest.param(aws_batch(0, 3), ("AWS Batch", 0, 3, "127.0.0.1"), id="aws-batch-main"),
        pytest.param(aws_batch(2, 3), ("AWS Batch", 2, 3, "10.0.0.9"), id="aws-batch-child"),
        pytest.param(aws_batch(1, 3, main=1), ("AWS Batch", 0, 3, "127.0.0.1"), id="aws-batch-main-in-the-middle"),
        pytest.param(aws_batch(0, 3, main=1), ("AWS Batch", 2, 3, "10.0.0.9"), id="aws-batch-child-before-the-main"),
        pytest.param({**aws_batch(0, 2), "MASTER_ADDR": "h0"}, ("AWS Batch", 0, 2, "h0"), id="aws-batch-MASTER_ADDR"),
        pytest.param(run_pod(0), ("RunPod", 0, 2, "10.65.0.2"), id="runpod-primary"),
        pytest.param(run_pod(1), ("RunPod", 1, 2, "10.65.0.2"), id="runpod"),
        pytest.param(lepton(0), ("Lepton", 0, 2, "job-98bw-0.job-98bw-job-svc"), id="lepton-worker-0"),
        pytest.param(
            {**lepton(1), "LEPTON_JOB_SERVICE_PREFIX": "", "LEPTON_SUBDOMAIN": ""},
            ("Lepton", 1, 2, "job-98bw-0.job-98bw-job-svc"),
            id="lepton-name-alone",
        ),
        pytest.param(beaker(0), ("Beaker", 0, 2, "b-cs-1.reviz.ai2.in"), id="beaker-leader"),
        pytest.param(metaflow(1), ("Metaflow", 1, 2, "10.0.0.1"), id="metaflow"),
        pytest.param({**metaflow(1), **aws_batch(1, 2)}, ("AWS Batch", 1, 2, "10.0.0.9"), id="metaflow-on-aws-batch"),
        pytest.param(ngc(1), ("NGC", 1, 2, "launcher-svc-1234"), id="ngc"),
        pytest.param(
            {**sky_pilot(1), "NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.1"},
            ("NODE_RANK", 1, 2, "10.0.0.1"),
            id="variables-of-the-user-over-skypilot's",
        ),
    ],
)
def test_nodes(env: dict[str, str], expected: tuple[object, ...]) -> None:
    found = _resolve(env)
    assert (found.source, found.node_rank, found.nnodes, found.master_addr) == expected
    assert found.task is None


@pytest.mark.parametrize(
    ("env", "source", "ranks", "nodes", "head"),
    [
        pytest.param(step(1, 2, "2", local=1, nodes="n0"), "Slurm", (1, 2, 1, 2), (0, 1), "127.0.0.1", id="slurm-1"),
        pytest.param(step(1, 4, "3,1", local=1), "Slurm", (1, 4, 1, 3), (0, 2), "n0", id="slurm-uneven-node-0"),
        pytest.param(step(3, 4, "3,1", node=1), "Slurm", (3, 4, 0, 1), (1, 2), "n0", id="slurm-uneven-node-1"),
        pytest.param(step(9, 16, "8(x2)", 1, 1), "Slurm", (9, 16, 1, 8), (1, 2), "n0", id="slurm-task-per-gpu"),
        pytest.param(mpi(1, 2, 1, 2), "Open MPI", (1, 2, 1, 2), (0, 1), "127.0.0.1", id="mpi-one-node"),
        pytest.param(mpi(5, 8, 1, 4), "Open MPI", (5, 8, 1, 4), (1, 2), "192.0.2.2", id="mpi-two-nodes"),
        pytest.param(
            mpi(0, 2, 0, 1, OMPI_MCA_orte_local_daemon_uri=HNP.replace("88735744.0", "88735744.1")),
            "Open MPI",
            (0, 2, 0, 1),
            (0, 2),
            "192.0.2.2",
            id="mpi-daemon-on-the-host-of-mpirun",
        ),
        pytest.param(
            mpi(1, 2, 0, 1, OMPI_MCA_orte_hnp_uri="1.0;tcp6://[fd00::2,fd00::3]:1"),
            "Open MPI",
            (1, 2, 0, 1),
            (1, 2),
            "fd00::2",
            id="mpi-ipv6",
        ),
        pytest.param(
            mpi(1, 2, 0, 1, OMPI_MCA_orte_hnp_uri="", MASTER_ADDR="h0"),
            "Open MPI",
            (1, 2, 0, 1),
            (1, 2),
            "h0",
            id="mpi-5-with-MASTER_ADDR",
        ),
        pytest.param(hydra(1, 2, 1, 2), "PMI", (1, 2, 1, 2), (0, 1), "127.0.0.1", id="hydra-one-node"),
        pytest.param(
            {**hydra(3, 4, 1, 2), "MASTER_ADDR": "h0"}, "PMI", (3, 4, 1, 2), (1, 2), "h0", id="hydra-two-nodes"
        ),
        pytest.param(horovod(1, 2, 1, 2), "Horovod", (1, 2, 1, 2), (0, 1), "127.0.0.1", id="horovod-one-node"),
        pytest.param(horovod(5, 8, 1, 4), "Horovod", (5, 8, 1, 4), (1, 2), "10.0.0.1", id="horovod-two-nodes"),
        pytest.param(mvapich(1, 2, 1, 2), "MVAPICH", (1, 2, 1, 2), (0, 1), "127.0.0.1", id="mvapich-one-node"),
        pytest.param(
            {**mvapich(3, 4, 1, 2), "MASTER_ADDR": "h0"}, "MVAPICH", (3, 4, 1, 2), (1, 2), "h0", id="mvapich-two-nodes"
        ),
        pytest.param(
            {**step(1, 2, "1(x2)", node=1), **mpi(5, 8, 1, 4)},
            "Open MPI",
            (5, 8, 1, 4),
            (1, 2),
            "192.0.2.2",
            id="mpirun-whose-daemons-are-a-slurm-step",
        ),
        pytest.param(
            {**step(1, 2, "2", local=1, nodes="n0"), "PMI_RANK": "1", "PMI_SIZE": "2"},
            "Slurm",
            (1, 2, 1, 2),
            (0, 1),
            "127.0.0.1",
            id="srun-mpi=pmi2",
        ),
        pytest.param(
            {**step(3, 4, "2(x2)", 1, 1), "NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "n0"},
            "Slurm",
            (3, 4, 1, 2),
            (1, 2),
            "n0",
            id="slurm-over-variables-of-the-batch-script",
        ),
        pytest.param(
            {"MASTER_ADDR": "m", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            "MASTER_ADDR",
            (5, 8, 1, 4),
            (1, 2),
            "m",
            id="another-launcher",
        ),
    ],
)
def test_processes(env: dict[str, str], source: str, ranks: tuple[int, ...], nodes: tuple[int, int], head: str) -> None:
    found = _resolve(env)
    assert found.source == source
    assert found.task is not None
    task = found.task
    assert (task.rank, task.world_size, task.local_rank, task.local_world_size) == ranks
    assert (found.node_rank, found.nnodes) == nodes
    assert found.master_addr == head
    assert found.role == ("worker" if task.rank else "master")


def test_all_processes_of_a_job_have_the_same_port_and_other_jobs_another() -> None:
    ports = {_resolve(step(rank, 4, "3,1", node)).master_port for rank, node in ((0, 0), (1, 0), (3, 1))}
    assert len(ports) == 1
    assert ports <= set(PORTS)
    others = {_resolve({**step(0, 2, "2"), "SLURM_JOB_ID": str(n)}).master_port for n in range(100)}
    assert len(others) == 100
    steps = {_resolve({**step(0, 2, "2"), "SLURM_STEP_ID": str(n)}).master_port for n in range(30)}
    assert len(steps) == 30
    assert {_resolve(mpi(rank, 2, rank, 2)).master_port for rank in (0, 1)} == {61440 + 88735744 // 65536}
    prrte = {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-host-1234@1"}
    ports = {_resolve(mpi(rank, 2, rank, 2, **prrte)).master_port for rank in (0, 1)}
    assert len(ports) == 1 and ports <= set(PORTS)
    assert _resolve({**step(1, 2, "2"), "MASTER_PORT": "1234"}).master_port == 1234


@pytest.mark.parametrize("name", ["9" * 5000, "9" * 11, "\udcff", "\u0663"], ids=["long", "11-digits", "bytes", "text"])
@pytest.mark.parametrize("variable", ["OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"])
def test_any_name_of_a_job_of_open_mpi_gives_a_port(variable: str, name: str) -> None:
    env = {"OMPI_MCA_orte_hnp_uri": "", variable: name}
    ports = {_resolve(mpi(rank, 2, rank, 2, **env)).master_port for rank in (0, 1)}
    assert len(ports) == 1 and ports <= set(PORTS)


def test_a_parent_that_is_no_number_gives_the_default_port(machine: Machine) -> None:
    machine.add(f"/proc/{os.getppid()}/stat", "7 (sh) S \u00b2 7")
    assert _resolve({**hydra(0, 2, 0, 2), "LAUNCHER_SYSROOT": str(machine.root)}).master_port == 29500


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(job("3,1", "n[0-1]", 4), id="script-of-sbatch"),
        pytest.param({**job("3,1", "n[0-1]", 4), "SLURM_PROCID": ""}, id="shell-of-salloc"),
        pytest.param({**step(0, 16, "8(x2)"), "SLURM_STEP_ID": "4294967290"}, id="interactive-step-of-salloc"),
        pytest.param(step(0, 1, "1", nodes="n0"), id="step-of-one-task"),
        pytest.param({**job("3,1", "n[0-1]", 4), "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}, id="exports-of-a-script"),
        pytest.param(mpi(0, 1, 0, 1), id="mpirun-of-one-rank"),
        pytest.param(hydra(0, 1, 0, 1), id="mpiexec-of-one-rank"),
        pytest.param({**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, id="lws-of-one-pod"),
        pytest.param({"VC_TASK_INDEX": "3"}, id="volcano-without-svc"),
        pytest.param({"VC_TASK_INDEX": "0", "VC_A_HOSTS": "a-0.j", "VC_A_NUM": "1"}, id="volcano-of-one-pod"),
        pytest.param({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, id="sagemaker-of-one-host"),
        pytest.param(sky_pilot(0, 1, "10.0.0.1"), id="skypilot-of-one-node"),
        pytest.param({"SKYPILOT_NODE_RANK": "0"}, id="skypilot-without-a-size"),
        pytest.param(dstack(0, 1, ""), id="dstack-of-one-node"),
        pytest.param(aws_batch(0, 1), id="aws-batch-of-one-node"),
        pytest.param({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, id="flux-of-one-task"),
        pytest.param(lepton(0, 1), id="lepton-of-one-worker"),
        pytest.param({**lepton(0, 1), "WORLD_SIZE": "8", "MASTER_ADDR": "198.51.100.7"}, id="a-size-of-1-decides"),
        pytest.param(beaker(0, 1, ""), id="beaker-of-one-replica"),
        pytest.param(metaflow(0, 1), id="metaflow-of-one-node"),
        pytest.param(ngc(0, 1), id="ngc-of-one-node"),
        pytest.param(run_pod(0, 1), id="runpod-of-one-node"),
        pytest.param(horovod(0, 1, 0, 1), id="horovod-of-one-process"),
        pytest.param(mvapich(0, 1, 0, 1), id="mpirun_rsh-of-one-rank"),
        pytest.param({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "1"}, id="google-batch-of-one-task"),
        pytest.param({"CLOUD_RUN_TASK_INDEX": "0", "CLOUD_RUN_TASK_COUNT": "1"}, id="cloud-run-of-one-task"),
        pytest.param({"MASTER_ADDR": "localhost"}, id="MASTER_ADDR-localhost"),
        pytest.param({"MASTER_ADDR": "127.0.0.1", "RANK": "0"}, id="MASTER_ADDR-loopback-and-a-rank"),
        pytest.param({"MASTER_ADDR": os.uname().nodename}, id="MASTER_ADDR-of-this-host"),
        pytest.param({"FLUX_JOB_SIZE": "4"}, id="flux-size-alone"),
        pytest.param({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"}, id="jsrun-of-one-task"),
        pytest.param({"PALS_RANKID": "0"}, id="pals-of-one-rank"),
        pytest.param({"DET_TASK_ID": "t"}, id="determined-without-a-rendezvous"),
        pytest.param({"TRAINING_JOB_NAME": "mine"}, id="a-variable-of-the-same-name-as-sagemaker's"),
    ],
)
def test_what_is_one_process(launch: Launch, env: dict[str, str]) -> None:
    data = launch({**TORCH, **env}).data
    assert (data["cluster"]["node_rank"], data["cluster"]["nnodes"]) == (0, 1)
    assert data["exports"] == {}
    assert data["warnings"] == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param({"SLURM_PROCID": "9", "SLURM_NTASKS": "16"}, "the address of task 0 is unknown", id="slurm"),
        pytest.param({"SLURM_PROCID": "9"}, "the number of tasks is unknown", id="slurm-no-size"),
        pytest.param({**step(1, 2, "1(x2)", 1, nodes="n[0-1"), "X": ""}, "address of task 0", id="slurm-nodelist"),
        pytest.param(step(2, 2, "1(x2)", 1), "SLURM_PROCID is '2'", id="slurm-rank"),
        pytest.param(step(0, 2, "1(x2)", 1), "set MASTER_ADDR", id="slurm-arbitrary"),
        pytest.param(mpi(1, 2, 0, 1, OMPI_MCA_orte_hnp_uri=""), "mpirun -x MASTER_ADDR=HOST", id="mpi-5"),
        pytest.param(
            mpi(0, 2, 0, 1, OMPI_MCA_orte_local_daemon_uri="88735744.1;tcp://10.0.0.3:1"),
            "rank 0 does not run on the host of mpirun",
            id="mpi-job-whose-launcher-is-another-pod",
        ),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is ''", id="mpi-no-rank"),
        pytest.param(hydra(1, 4, 1, 2), "mpiexec -genv MASTER_ADDR HOST", id="hydra"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, "the rank on this node is unknown", id="pmi"),
        pytest.param({"PMI_ID": "0", "MPI_LOCALNRANKS": "2"}, "leave out -pmi-port", id="pmi-port"),
        pytest.param({"PMI_ID": "1", "MPI_LOCALNRANKS": "1"}, "leave out -pmi-port", id="pmi-port-on-another-node"),
        pytest.param({"RANK": "3"}, "RANK is 3, so this is one of several processes, but WORLD_SIZE is", id="rank"),
        pytest.param({"RANK": "3", "MASTER_ADDR": "m"}, "WORLD_SIZE is unset", id="rank-and-address"),
        pytest.param({"NODE_RANK": "1"}, "but NNODES is unset", id="node-rank"),
        pytest.param({"PMIX_RANK": "1"}, "the number of processes is unknown", id="pmix"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is unset", id="mpi-no-size"),
        pytest.param({"LWS_WORKER_INDEX": "1"}, "LWS_GROUP_SIZE is unset", id="lws-no-size"),
        pytest.param({"PET_NNODES": "x", "PET_NODE_RANK": "0"}, "PET_NNODES is 'x'", id="pet-nodes"),
        pytest.param({"PET_NNODES": "4:2", "PET_NODE_RANK": "0"}, "from 4 to", id="pet-range"),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "x", "PET_MASTER_ADDR": "m"}, "PET_NODE_RANK is 'x'", id="pet-rank"
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "0", "NNODES": "two", "MASTER_ADDR": "m"}, "NNODES is 'two'", id="index-nodes"
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "0", "NNODES": "3", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"},
            "not a multiple of MEGASCALE_NUM_SLICES",
            id="slices-of-different-sizes",
        ),
        pytest.param({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID is ''", id="slices-without-a-number"),
        pytest.param({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, "set RANK, WORLD_SIZE", id="slices"),
        pytest.param(
            {**step(1, 4, "4", nodes="n0"), "SLURM_LOCALID": ""}, "SLURM_LOCALID is ''", id="slurm-no-local-id"
        ),
        pytest.param({**step(1, 4, "2(x2)"), "SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'", id="slurm-node"),
        pytest.param(mpi(1, 2, 2, 2), "OMPI_COMM_WORLD_LOCAL_RANK is '2'", id="mpi-local-rank"),
        pytest.param({"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "1"}, "LWS_LEADER_ADDRESS is unset", id="lws-address"),
        pytest.param({**LWS}, "LWS_WORKER_INDEX is ''", id="lws-index"),
        pytest.param({"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "2"}, "no VC_*_HOSTS is set", id="volcano-hosts"),
        pytest.param({"VC_TASK_INDEX": "2", "VC_A_HOSTS": "a,b"}, "VC_A_HOSTS lists 2 pods", id="volcano-index"),
        pytest.param(SAGEMAKER, "is not in SM_HOSTS", id="sagemaker-current"),
        pytest.param({"SM_HOSTS": "["}, "SM_HOSTS is not JSON", id="sagemaker-json"),
        pytest.param({"SM_HOSTS": '{"a": 1}'}, "SM_HOSTS must have a list", id="sagemaker-list"),
        pytest.param(sky_pilot(1, ips=""), "but SKYPILOT_NODE_IPS is unset", id="skypilot-address"),
        pytest.param({"SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NUM_NODES is unset", id="skypilot-no-size"),
        pytest.param(sky_pilot(2), "SKYPILOT_NODE_RANK is '2'", id="skypilot-rank"),
        pytest.param({**dstack(0), "DSTACK_NODES_NUM": "two"}, "DSTACK_NODES_NUM is 'two'", id="dstack-size"),
        pytest.param(dstack(1, head=""), "but DSTACK_MASTER_NODE_IP is unset", id="dstack-address"),
        pytest.param(
            {**aws_batch(1, 2), "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""},
            "but AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is unset",
            id="aws-batch-address",
        ),
        pytest.param(
            {**aws_batch(1, 2), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}, "MAIN_NODE_INDEX is '2'", id="aws-batch-main"
        ),
        pytest.param({"WORLD_SIZE": "16"}, "WORLD_SIZE is 16, but nothing says which node", id="world"),
        pytest.param({"WORLD_SIZE": "2.0"}, "WORLD_SIZE is 2.0, but nothing says which node", id="world-no-number"),
        pytest.param({"WORLD_SIZE": "16", "MEGASCALE_NUM_SLICES": "1"}, "WORLD_SIZE is 16", id="world-of-a-slice"),
        pytest.param({"WORLD_SIZE": "2", "CLOUD_RUN_TASK_COUNT": "1"}, "WORLD_SIZE is 2", id="world-in-a-task"),
        pytest.param({"WORLD_SIZE": "2", "MASTER_ADDR": "m", "NODE_RANK": "0"}, "WORLD_SIZE is 2", id="no-nodes"),
        pytest.param({"MASTER_ADDR": "198.51.100.7"}, "MASTER_ADDR is 198.51.100.7, but nothing", id="foreign"),
        pytest.param({"MASTER_ADDR": "node-7.svc:29500"}, "MASTER_ADDR is node-7.svc:29500", id="foreign-name"),
        pytest.param(
            {"MASTER_ADDR": os.uname().nodename, "NODE_RANK": "0"}, "set NODE_RANK, NNODES", id="own-address-and-a-rank"
        ),
        pytest.param(beaker(1, head=""), "BEAKER_LEADER_REPLICA_HOSTNAME is unset", id="beaker-without-a-leader"),
        pytest.param({"LEPTON_JOB_WORKER_INDEX": "1"}, "LEPTON_JOB_TOTAL_WORKERS is unset", id="lepton-no-size"),
        pytest.param({**lepton(1), "LEPTON_JOB_NAME": "", "LEPTON_JOB_SERVICE_PREFIX": ""}, "is unset", id="lepton"),
        pytest.param({"NUM_NODES": "2", "NODE_RANK": "0"}, "PRIMARY_ADDR is unset", id="runpod-no-address"),
        pytest.param(mvapich(0, 4, 0, 2), "set MASTER_ADDR for all", id="mvapich"),
        pytest.param({**horovod(0, 2, 0, 1), "HOROVOD_GLOO_RENDEZVOUS_ADDR": ""}, "MASTER_ADDR for all", id="horovod"),
        pytest.param({"BATCH_TASK_INDEX": "0", "BATCH_TASK_COUNT": "2"}, "NNODES=1 if it trains alone", id="g-batch"),
        pytest.param({"CLOUD_RUN_TASK_INDEX": "1", "CLOUD_RUN_TASK_COUNT": "2"}, "node 0 is unknown", id="cloud-run"),
        pytest.param(
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "SM_CURRENT_INSTANCE_GROUP_HOSTS": "["},
            "SM_HOSTS is not JSON",
            id="sagemaker-group-json",
        ),
        pytest.param({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "the address of node 0 is unknown", id="flux"),
        pytest.param({"FLUX_TASK_RANK": "1"}, "FLUX_JOB_SIZE is unset", id="flux-no-size"),
        pytest.param(
            {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "the address of node 0 is unknown", id="jsrun"
        ),
        pytest.param({"PALS_RANKID": "1"}, "the number of processes is unknown", id="pals"),
        pytest.param(
            {"PALS_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}, "the rank on this node is unknown", id="pals-pmi"
        ),
    ],
)
def test_a_known_size_that_cannot_be_resolved_is_one_line_and_status_2(
    launch: Launch, env: dict[str, str], message: str
) -> None:
    launched = launch({**TORCH, **env})
    assert launched.status == 2
    assert message in launched.err
    assert launched.err.count("\n") == 1


def test_torchrun_inside_gets_its_coordinates_as_arguments(launch: Launch) -> None:
    """The launcher starts what starts the processes of a node, also where only its arguments say which node this is."""
    env = {**TORCH, "MASTER_ADDR": "198.51.100.7", "WORLD_SIZE": "16"}
    torchrun = ["torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=198.51.100.7", "train.py"]
    assert launch(env, "--print-env", "--json", "--", *torchrun).data["cluster"]["nnodes"] == 1
    assert launch(env, "--print-env", "--json", "--", "python", "train.py").status == 2
    assert launch({**env, "NODE_RANK": "0", "NNODES": "1"}).data["cluster"]["nnodes"] == 1  # the way out it names


def test_a_node_of_runpod_starts_its_processes_as_one_of_two(launch: Launch, machine: Machine) -> None:
    machine.add_devices("/dev/nvidiactl", *(f"/dev/nvidia{number}" for number in range(8)))
    machine.add_image("torch", "2.9.1")
    explained = launch(run_pod(1), "--explain", "--", "python", "train.py").out
    assert "RunPod: worker, node 1 of 2" in explained and "start     8 processes" in explained
    one = launch({**run_pod(1), "LAUNCHER_NPROC": "1"}).exports  # WORLD_SIZE counted GPUs
    assert (one["RANK"], one["WORLD_SIZE"], one["NNODES"]) == ("1", "2", "2")


def test_the_hosts_of_a_heterogeneous_cluster_train_with_their_own_group(launch: Launch, machine: Machine) -> None:
    config = {
        "current_host": "algo-3",
        "current_group_name": "gpus",
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "instance_groups": [
            {"instance_group_name": "data", "instance_type": "ml.c5.9xlarge", "hosts": ["algo-1"]},
            {"instance_group_name": "gpus", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-2", "algo-3"]},
        ],
    }

    def cluster(**changes: object) -> tuple[object, ...]:
        machine.add("/opt/ml/input/config/resourceconfig.json", json.dumps({**config, **changes}))
        found = launch({**TORCH, "TRAINING_JOB_NAME": "job"}).data["cluster"]
        return found["node_rank"], found["nnodes"], found["master_addr"]

    assert cluster() == (1, 2, "algo-2")
    assert cluster(current_host="algo-1", current_group_name="data") == (0, 1, "127.0.0.1")
    for invalid in (None, [], "x", [3], [{}]):
        assert cluster(instance_groups=invalid) == (2, 3, "algo-1")


def test_a_container_of_determined_that_is_one_of_several_is_refused(launch: Launch, machine: Machine) -> None:
    env = {**TORCH, "DET_TASK_ID": "t"}
    found = {"container_addrs": ["10.0.0.1"], "container_rank": 0, "container_slot_counts": [8]}
    machine.add("/run/determined/info/rendezvous.json", json.dumps(found))
    assert launch(env).data["cluster"]["nnodes"] == 1
    found["container_addrs"] = ["10.0.0.1", "10.0.0.2"]
    machine.add("/run/determined/info/rendezvous.json", json.dumps(found))
    launched = launch(env)
    assert (launched.status, launched.err.count("\n")) == (2, 1)
    assert "one of 2 containers of Determined" in launched.err
    assert launch(TORCH).data["cluster"]["nnodes"] == 1
    # What its launch layer sets is a source of coordinates.
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert launch({**env, **ranks}).data["cluster"]["node_rank"] == 1
    for invalid in ("{", "[]", '{"container_addrs": 3}'):
        machine.add("/run/determined/info/rendezvous.json", invalid)
        assert launch(env).data["cluster"]["nnodes"] == 1


def test_exports_of_a_task(launch: Launch) -> None:
    data = launch({**TORCH, **step(9, 16, "8(x2)", 1, 1)}).data
    port = data["exports"].pop("MASTER_PORT")
    assert int(port) in PORTS
    assert data["exports"] == {
        "MASTER_ADDR": "n0",
        "NODE_RANK": "1",
        "NNODES": "2",
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
    }


@pytest.mark.parametrize(
    ("env", "said"),
    [
        pytest.param(step(9, 16, "8(x2)", 1, 1), "worker, node 1 of 2, process 9 of 16, node 0 at n0:", id="slurm"),
        pytest.param(mpi(1, 2, 1, 2), "worker, node 0 of 1, process 1 of 2, node 0 at 127.0.0.1:", id="mpi-one-node"),
        pytest.param(mpi(3, 4, 0, 1), "worker, process 3 of 4, node 0 at 192.0.2.2:", id="mpi-uneven"),
    ],
)
def test_nodes_that_are_not_known_are_not_exported(launch: Launch, env: dict[str, str], said: str) -> None:
    known = "node 1" in said or "node 0 of" in said
    assert ("NODE_RANK" in launch({**TORCH, **env}).exports) == known
    assert said in launch({**TORCH, **env}, "--explain").out


def test_a_rank_of_the_batch_script_that_every_task_inherits_warns(launch: Launch) -> None:
    env = {**TORCH, **step(3, 4, "2(x2)", 1, 1), "NODE_RANK": "0"}
    warnings = launch(env).data["warnings"]
    assert warnings == ["NODE_RANK=0 is set and kept, but Slurm says 1: unset it, or set it in each task"]
    assert launch({**env, "NODE_RANK": "1"}).data["warnings"] == []


GPUS = ("/dev/nvidiactl", *(f"/dev/nvidia{number}" for number in range(4)))


@pytest.mark.parametrize(
    ("env", "visible", "local_rank", "warns"),
    [
        pytest.param(step(1, 4, "4", local=1, nodes="n0"), None, "1", False, id="all-gpus-visible"),
        pytest.param(step(1, 4, "4", local=1, nodes="n0"), "0,1,2,3", "1", False, id="as-many-as-processes"),
        # srun --gpus-per-task=1, or --gpu-bind=single:1
        pytest.param(step(0, 4, "4", local=0, nodes="n0"), "0", "0", False, id="own-gpu-of-the-first"),
        pytest.param(step(3, 4, "4", local=3, nodes="n0"), "0", "0", False, id="own-gpu-of-the-last"),
        pytest.param(step(5, 8, "4(x2)", 1, 1), "0", "0", False, id="own-gpu-on-another-node"),
        pytest.param(step(1, 4, "4", local=1, nodes="n0"), "MIG-f1", "0", False, id="own-mig-device"),
        # mpiexec -gpus-per-proc 1 numbers the devices of the node
        pytest.param(hydra(3, 4, 3, 4), "3", "0", False, id="hydra"),
        pytest.param(mpi(3, 4, 3, 4), "3", "0", False, id="open-mpi"),
        # srun --gpus-per-task=2: which of the processes share GPUs is unknown
        pytest.param(step(1, 4, "4", local=1, nodes="n0"), "0,1", "0", True, id="two-gpus-of-four"),
        pytest.param(step(1, 4, "4", local=1, nodes="n0"), "", "1", False, id="no-gpu-visible"),
    ],
)
def test_a_process_that_sees_fewer_gpus_than_its_node_has_processes_uses_its_first(
    launch: Launch, machine: Machine, env: dict[str, str], visible: str | None, local_rank: str, warns: bool
) -> None:
    """Slurm then shows each task only its own GPUs, the first of which is device 0 in each of them."""
    machine.add_devices(*GPUS)
    data = launch({**TORCH, **env, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}).data
    assert data["exports"]["LOCAL_RANK"] == local_rank
    assert data["exports"]["LOCAL_WORLD_SIZE"] == "4"
    assert any("it gets LOCAL_RANK=0" in warning for warning in data["warnings"]) == warns
    assert len(data["warnings"]) == warns


def test_a_local_rank_of_the_user_is_kept_with_a_warning(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*GPUS)
    env = {**TORCH, **step(3, 4, "4", local=3, nodes="n0"), "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    data = launch(env).data
    assert "LOCAL_RANK" not in data["exports"]
    (warning,) = data["warnings"]
    assert warning.startswith("LOCAL_RANK=3 is set, but this process sees 1 GPU: unset it")
    assert launch({**env, "LOCAL_RANK": "0"}).data["warnings"] == []
    assert launch(env, "--force", "--print-env", "--json").exports["LOCAL_RANK"] == "0"


# A process of this name is the parent of all ranks of MPICH's mpiexec on a node.
PROXY = """#!/bin/sh
for rank in 0 1; do
    PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 "$@" --print-env
done
"""


@pytest.mark.parametrize("shell", [False, True])
def test_each_job_of_mpiexec_has_a_port(tmp_path: Path, shell: bool) -> None:
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.write_text(PROXY)
    proxy.chmod(0o755)
    command = [sys.executable, "-I", "-S", str(ROOT / "launcher")]
    if shell:  # a rank may be a script that starts the launcher
        command = ["/bin/sh", "-c", '"$@"; true', "sh", *command]
    env = {"PATH": os.environ["PATH"], "LAUNCHER_FRAMEWORK": "torch==2.9.1"}
    jobs = [subprocess.Popen([proxy, *command], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = [re.findall(r"^MASTER_PORT=(\d+)$", job.communicate(timeout=60)[0], re.MULTILINE) for job in jobs]
    expected = [[str(61440 + job.pid % 4096)] * 2 for job in jobs]
    assert ports == expected
    assert ports[0] != ports[1]


def test_a_job_of_mpiexec_on_several_nodes_of_slurm_has_a_port_from_the_job() -> None:
    env = {**hydra(3, 4, 1, 2), "MASTER_ADDR": "h0"}
    assert _resolve(env).master_port == 29500
    assert _resolve({**env, "SLURM_JOB_ID": "7"}).master_port == 61440 + 32 * 7


def test_volcano_tasks_that_do_not_say_who_trains_warn(launch: Launch) -> None:
    env = {"VC_TASK_INDEX": "0", "VC_MPIMASTER_HOSTS": "j-mpimaster-0.j", "VC_MPIWORKER_HOSTS": "j-mpiworker-0.j"}
    data = launch({**TORCH, **env, "HOSTNAME": "j-mpimaster-0"}).data
    assert data["cluster"]["source"] == "single node"
    assert "assuming a single node" in data["warnings"][0]


def test_sagemaker_without_its_toolkit(launch: Launch, machine: Machine) -> None:
    config = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
    machine.add("/opt/ml/input/config/resourceconfig.json", json.dumps(config))
    cluster = launch({**TORCH, "TRAINING_JOB_NAME": "j"}).data["cluster"]
    assert (cluster["node_rank"], cluster["nnodes"], cluster["master_addr"]) == (1, 2, "algo-1")
    machine.add("/opt/ml/input/config/resourceconfig.json", "{")
    assert "resourceconfig.json is not JSON" in launch({"TRAINING_JOB_NAME": "j"}).err


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,07]", "node01"),
        ("node[07,01-03],other[1-2]", "node07"),
        ("a,b[1-2]", "a"),
        ("rack[0-1]node[10-12]-ib", "rack0node10-ib"),
        ("node[3]", "node3"),
        ("fd00::1,fd00::2", "fd00::1"),
        ("node[1", ""),
        ("node[]", ""),
        ("node[a-b]", ""),
        ("no de", ""),
        ("", ""),
    ],
)
def test_first_node_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("tasks", ["2(x", "2(x99999999)", "x", "", "2(x2)(x2)", "9(x2)"])
def test_tasks_per_node_that_cannot_be_read_leave_the_local_size_unknown(tasks: str) -> None:
    found = _resolve({**step(1, 4, tasks, local=1), "SLURM_TASKS_PER_NODE": ""})
    assert found.task is not None
    assert (found.task.rank, found.task.local_rank, found.task.local_world_size) == (1, 1, 0)


def test_an_error_has_status_2() -> None:
    with pytest.raises(LaunchError) as caught:
        _resolve({"SLURM_PROCID": "9", "SLURM_NTASKS": "16"})
    assert caught.value.status == 2
