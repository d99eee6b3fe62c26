"""JAX: its backend, the arguments of jax.distributed.initialize, and the wait for its coordinator.

R9.3, R12.6, R13.25 to R13.27, R14.7.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from launcher.cluster import resolve
from launcher.settings import Settings
from launching import ROOT, Launch, Machine, cluster_spec
from test_schedulers import LWS, SAGEMAKER, VOLCANO, aws_batch, dstack, hydra, mpi, sky_pilot, step

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JAX = {"LAUNCHER_FRAMEWORK": "jax==0.10.2"}
#: What Kubeflow Trainer's JAX runtime sets in the pods of a TrainJob.
TRAIN_JOB = {
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666",
    "JAX_COORDINATOR_PORT": "6666",
    "JAX_NUM_PROCESSES": "2",
    "JAX_DISTRIBUTED_BACKEND": "gloo",
}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "workers", "NNODES": "2"}
SLICE = {"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_SKIP_MDS_QUERY": "true"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0-h0:8080"}


def _of(exports: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(exports.get(name) for name in NAMES)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({"MASTER_ADDR": "m", "RANK": "1", "WORLD_SIZE": "2"}, ("m:29500", "2", "1"), id="RANK"),
        pytest.param({"MASTER_ADDR": "m", "NODE_RANK": "1", "NNODES": "2"}, ("m:29500", "2", "1"), id="NODE_RANK"),
        pytest.param(
            {"MASTER_ADDR": "fd00::1", "NODE_RANK": "1", "NNODES": "2"}, ("[fd00::1]:29500", "2", "1"), id="6"
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1234"},
            ("m:1234", "2", "1"),
            id="PET",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec((1, 2), "workerpool1", 1)},
            ("cmle-training-workerpool0-ab-0:2222", "3", "2"),
            id="Vertex-AI",
        ),
        pytest.param(
            {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})},
            ("a:1", "2", "1"),
            id="TF_CONFIG",
        ),
        pytest.param({**JOBSET, "JOB_COMPLETION_INDEX": "1"}, ("run-workers-0-0.run:29500", "2", "1"), id="JobSet"),
        pytest.param({**LWS, "LWS_WORKER_INDEX": "2"}, ("lws-0.lws.default:29500", "3", "2"), id="LeaderWorkerSet"),
        pytest.param(
            {**VOLCANO, "VC_TASK_INDEX": "1", "HOSTNAME": "job-worker-1"},
            ("job-master-0.job:29500", "3", "2"),
            id="Volcano",
        ),
        pytest.param({**SAGEMAKER, "SM_CURRENT_HOST": "algo-2"}, ("algo-1:29500", "2", "1"), id="SageMaker"),
        pytest.param(sky_pilot(1), ("10.0.0.1:29500", "2", "1"), id="SkyPilot"),
        pytest.param(dstack(1), ("10.0.0.1:29500", "2", "1"), id="dstack"),
        pytest.param(aws_batch(2, 3), ("10.0.0.9:29500", "3", "2"), id="AWS-Batch"),
        pytest.param(aws_batch(0, 3), ("127.0.0.1:29500", "3", "0"), id="AWS-Batch-main-node"),
        pytest.param({**SLICE, "TPU_WORKER_ID": "1"}, ("h0:8482", "2", "1"), id="TPU-slice"),
        pytest.param({**SLICE, **SLICES, "TPU_WORKER_ID": "1"}, ("s0-h0:8482", "4", "3"), id="TPU-slices"),
        pytest.param(step(1, 2, "1(x2)", node=1), ("n0:61568", "2", "1"), id="Slurm-task-per-node"),
        pytest.param(step(3, 4, "2(x2)", 1, 1), ("n0:61568", "4", "3"), id="Slurm-tasks"),
        pytest.param(mpi(5, 8, 1, 4), ("192.0.2.2:62794", "8", "5"), id="Open-MPI"),
        pytest.param({**hydra(3, 4, 1, 2), "MASTER_ADDR": "h0"}, ("h0:29500", "4", "3"), id="MPICH"),
        pytest.param(
            {"JAX_COORDINATOR_PORT": "1234", "MASTER_ADDR": "m", "NODE_RANK": "1", "NNODES": "2"},
            ("m:1234", "2", "1"),
            id="port-of-the-user",
        ),
    ],
)
@pytest.mark.parametrize("framework", ["jax==0.10.2", ""])
def test_every_source_of_coordinates_gives_the_arguments_of_jax(
    launch: Launch, env: dict[str, str], expected: tuple[str, str, str], framework: str
) -> None:
    """Without a known framework, too: then the variables of every framework are exported (R10.3)."""
    assert _of(launch({**env, "LAUNCHER_FRAMEWORK": framework}).exports) == expected


def test_other_frameworks_do_not_get_them(launch: Launch) -> None:
    env = {"MASTER_ADDR": "m", "NODE_RANK": "1", "NNODES": "2"}
    for framework in ("torch==2.9.1", "torch_xla==2.9.0", "tensorflow==2.20.0"):
        assert _of(launch({**env, "LAUNCHER_FRAMEWORK": framework}).exports) == (None, None, None)


def test_a_single_process_stays_plain(launch: Launch) -> None:
    assert launch(JAX).exports == {"JAX_PLATFORMS": "cpu"}
    one = launch({**JAX, "LAUNCHER_NPROC": "1"}).exports
    assert _of(one) == (f"127.0.0.1:{one['MASTER_PORT']}", "1", "0")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({**TRAIN_JOB, "JAX_PROCESS_ID": "1"}, (1, 2, "job-node-0-0.job", 6666), id="kubeflow"),
        pytest.param(
            {**TRAIN_JOB, "JAX_PROCESS_ID": "1", "JOB_COMPLETION_INDEX": "1"},
            (1, 2, "job-node-0-0.job", 6666),
            id="kubeflow-in-an-indexed-job",
        ),
        pytest.param(
            {"JAX_COORDINATOR_ADDRESS": "h0", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            (0, 2, "h0", 29500),
            id="without-a-port",
        ),
        pytest.param(
            {"MASTER_ADDR": "m", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            (1, 2, "m", 29500),
            id="address-of-MASTER_ADDR",
        ),
        # XPK
        pytest.param(
            {"JAX_COORDINATOR_ADDRESS": "h0", "JAX_COORDINATOR_PORT": "6002", "NODE_RANK": "1", "NNODES": "2"},
            (1, 2, "h0", 6002),
            id="address-for-NODE_RANK",
        ),
        pytest.param(
            {**mpi(1, 2, 0, 1, OMPI_MCA_orte_hnp_uri=""), "JAX_COORDINATOR_ADDRESS": "h0:1"},
            (1, 2, "h0", 1),
            id="address-for-Open-MPI-5",
        ),
        pytest.param({**TRAIN_JOB, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, (0, 1), id="one-process"),
    ],
)
def test_the_variables_of_jax_are_a_source_for_every_framework(env: dict[str, str], expected: tuple[object]) -> None:
    cluster = resolve(env, Settings(env))
    coordinates = (cluster.node_rank, cluster.nnodes, cluster.master_addr, cluster.master_port)
    assert coordinates[: len(expected)] == expected


def test_torch_gets_its_variables_from_those_of_jax(launch: Launch) -> None:
    env = {**TRAIN_JOB, "JAX_PROCESS_ID": "1", "LAUNCHER_FRAMEWORK": "torch==2.9.1"}
    assert launch(env).exports == {
        "MASTER_ADDR": "job-node-0-0.job",
        "MASTER_PORT": "6666",
        "NODE_RANK": "1",
        "NNODES": "2",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def test_values_that_are_set_are_kept(launch: Launch) -> None:
    env = {**JAX, **JOBSET, "JOB_COMPLETION_INDEX": "1", "JAX_COORDINATOR_ADDRESS": "mine:7", "JAX_PLATFORMS": "cuda"}
    exports = launch(env).exports
    assert _of(exports) == (None, "2", "1")
    assert "JAX_PLATFORMS" not in exports
    assert (exports["MASTER_ADDR"], exports["MASTER_PORT"]) == ("mine", "7")
    data = launch({**env, "JAX_COORDINATOR_ADDRESS": "mine"}).data
    assert "JAX_COORDINATOR_ADDRESS" not in data["exports"]
    assert data["warnings"] == ["JAX_COORDINATOR_ADDRESS=mine has no port, which jax.distributed.initialize needs"]


def test_the_address_for_the_launcher_replaces_one_that_is_set(launch: Launch) -> None:
    env = {**JAX, **TRAIN_JOB, "JAX_PROCESS_ID": "1"}
    assert _of(launch({**env, "LAUNCHER_MASTER_ADDR": "mine"}).exports) == ("mine:6666", None, None)
    assert _of(launch({**env, "LAUNCHER_MASTER_PORT": "7"}).exports) == ("job-node-0-0.job:7", None, None)
    launched = launch({**env, "LAUNCHER_MASTER_ADDR": "127.0.0.1"})
    assert launched.status == 2
    assert "LAUNCHER_MASTER_ADDR is 127.0.0.1" in launched.err


def test_an_invalid_coordinator_is_of_no_concern_for_torch_with_an_address(launch: Launch) -> None:
    env = {"MASTER_ADDR": "m", "NODE_RANK": "1", "NNODES": "2", "JAX_COORDINATOR_ADDRESS": "a b"}
    assert launch({**env, "LAUNCHER_FRAMEWORK": "torch==2.9.1"}).status == 0
    assert launch({**env, **JAX}).status == 2


def test_a_number_of_the_batch_script_that_every_task_inherits_warns(launch: Launch) -> None:
    warnings = launch({**JAX, **step(3, 4, "2(x2)", 1, 1), "JAX_PROCESS_ID": "0"}).data["warnings"]
    assert warnings == ["JAX_PROCESS_ID=0 is set and kept, but Slurm says 3: unset it, or set it in each task"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "set JAX_COORDINATOR_ADDRESS to HOST:PORT of process 0"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_NUM_PROCESSES is unset"),
        ({**TRAIN_JOB, "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is '2'"),
        ({**TRAIN_JOB, "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        ({**TRAIN_JOB, "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a b"}, "'a b' is not host:port"),
        ({**JOBSET, "JOB_COMPLETION_INDEX": "1", "JAX_COORDINATOR_PORT": "x"}, "JAX_COORDINATOR_PORT is 'x'"),
    ],
)
def test_what_cannot_be_resolved_is_one_line_and_status_2(launch: Launch, env: dict[str, str], message: str) -> None:
    launched = launch({**JAX, **env})
    assert (launched.status, launched.err.count("\n")) == (2, 1)
    assert message in launched.err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]", "0.0.0.0"])
@pytest.mark.parametrize("variable", ["JAX_COORDINATOR_ADDRESS", "MASTER_ADDR"])
def test_a_loopback_coordinator_of_several_nodes_is_status_2(launch: Launch, host: str, variable: str) -> None:
    env = {**JAX, variable: f"{host}:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    launched = launch(env)
    assert (launched.status, launched.err.count("\n")) == (2, 1)
    assert f"{variable} is {host.strip('[]')}, but there are 2 nodes" in launched.err
    assert launch({**env, "LAUNCHER_REHEARSE": "1"}).status == 0
    assert launch({**env, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}).status == 0
    assert launch({**env, "LAUNCHER_FRAMEWORK": "torch==2.9.1"}).status == 0


def test_processes_of_one_host_meet_at_its_loopback_interface(launch: Launch) -> None:
    env = {**JAX, **step(1, 2, "2", local=1, nodes="n0")}
    assert _of(launch(env).exports) == ("127.0.0.1:61568", "2", "1")


GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")


@pytest.mark.parametrize(
    ("accelerator", "devices", "env", "expected"),
    [
        pytest.param("none", (), {}, "cpu", id="cpu"),
        pytest.param("nvidia", (), {}, "cpu", id="no-gpu"),
        pytest.param("nvidia", GPUS, {}, None, id="gpu"),
        pytest.param("nvidia", GPUS, {"LAUNCHER_RUNTIME": "cpu"}, "cpu", id="cpu-on-request"),
        pytest.param("none", GPUS, {}, "cpu", id="gpu-of-no-use"),
        pytest.param("", GPUS, {}, None, id="unknown-image-gpu"),
        pytest.param("tpu", (), {}, "cpu", id="no-tpu"),
        pytest.param("tpu", GPUS, {}, "cpu", id="tpu-image-on-gpus"),
        pytest.param("tpu", ("/dev/accel0",), {}, None, id="tpu"),
        pytest.param("tpu", ("/dev/accel0",), {"LAUNCHER_REHEARSE": "1"}, "cpu", id="rehearsal-on-a-tpu"),
        pytest.param("nvidia", GPUS, {"LAUNCHER_REHEARSE": "1"}, "cpu", id="rehearsal-on-gpus"),
        pytest.param("tpu", (), {"PJRT_DEVICE": "NEURON"}, None, id="device-of-the-user"),
        pytest.param("", (), {}, "cpu", id="unknown-image"),
    ],
)
def test_backend(
    launch: Launch,
    machine: Machine,
    accelerator: str,
    devices: tuple[str, ...],
    env: dict[str, str],
    expected: str | None,
) -> None:
    if accelerator:
        machine.add_image("jax", "0.10.2", accelerator=accelerator)
    else:
        env = {"LAUNCHER_FRAMEWORK": "jax==0.10.2", **env}
    machine.add_devices(*devices)
    exports = launch({"TPU_SKIP_MDS_QUERY": "1", **env}).exports
    assert exports.get("JAX_PLATFORMS") == expected
    assert "PJRT_DEVICE" not in exports


def test_a_rehearsal_replaces_the_backend_of_the_user(launch: Launch) -> None:
    data = launch({**JAX, "LAUNCHER_REHEARSE": "1", "JAX_PLATFORMS": "cuda"}).data
    assert data["exports"]["JAX_PLATFORMS"] == "cpu"
    assert data["warnings"] == ["rehearsal: JAX_PLATFORMS=cuda replaced by cpu"]


@pytest.mark.parametrize("version", ["0.4.30", "0.5.0", "0.5.1", "0.10.2", "0.12.0.1", "", "0.4.35.dev1"])
def test_collectives_on_the_cpu_of_releases_without_a_default(launch: Launch, version: str) -> None:
    exports = launch({**sky_pilot(1), "LAUNCHER_FRAMEWORK": f"jax=={version}"}).exports
    expected = "gloo" if version in ("0.4.30", "0.5.0", "0.4.35.dev1") else None
    assert exports.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION") == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, None, id="one-node"),
        pytest.param(sky_pilot(1), "0,1", id="one-process-per-host"),
        pytest.param(step(1, 2, "1(x2)", node=1), "0,1", id="slurm-task-per-node"),
        pytest.param(step(1, 2, "2", local=1, nodes="n0"), "1", id="slurm-task-per-gpu"),
        pytest.param({**step(1, 2, "2", local=1, nodes="n0"), "CUDA_VISIBLE_DEVICES": "1"}, "0", id="own-gpu"),
        pytest.param({**sky_pilot(1), "CUDA_VISIBLE_DEVICES": ""}, None, id="no-gpu-visible"),
        pytest.param({**sky_pilot(1), "JAX_LOCAL_DEVICE_IDS": "1"}, None, id="kept"),
        pytest.param({**sky_pilot(1), "LAUNCHER_REHEARSE": "1"}, None, id="rehearsal"),
    ],
)
def test_gpus_of_a_process(launch: Launch, machine: Machine, env: dict[str, str], expected: str | None) -> None:
    """Below Slurm and Open MPI, JAX would use one GPU of a host otherwise."""
    machine.add_image("jax", "0.10.2", accelerator="nvidia")
    machine.add_devices(*GPUS)
    assert launch(env).exports.get("JAX_LOCAL_DEVICE_IDS") == expected


def test_one_process_uses_all_gpus_of_a_host(launch: Launch, machine: Machine) -> None:
    machine.add_image("jax", "0.10.2", accelerator="nvidia")
    machine.add_devices(*GPUS)
    assert "start     /opt/venv/bin/python" in launch(sky_pilot(1), "--explain", "mnist").out


def test_a_tpu_node_is_of_no_use(launch: Launch, tpu_config: Callable[..., str]) -> None:
    data = launch({**JAX, "TPU_CONFIG": tpu_config()}).data
    assert (data["runtime"], data["exports"]) == ("cpu", {"JAX_PLATFORMS": "cpu"})
    (warning,) = data["warnings"]
    assert warning.startswith("TPU_CONFIG names a TPU node, which JAX cannot use; use a TPU VM")
    assert warning.endswith(": training runs without the TPU")
    launched = launch({**JAX, "TPU_CONFIG": tpu_config(), "LAUNCHER_RUNTIME": "tpu-node"})
    assert launched.status == 2
    assert "names a TPU node, which JAX cannot use" in launched.err


def test_variables_of_a_slice_that_gke_did_not_set(launch: Launch) -> None:
    """MEGASCALE_* are never exported: libtpu and JAX read them."""
    env = {"TPU_PROCESS_ADDRESSES": "h0:8471,h1:8471", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_ID": "0"}
    exports = launch({**JAX, **env, **SLICES, "LAUNCHER_RUNTIME": ""}).exports
    assert exports["TPU_WORKER_HOSTNAMES"] == "h0,h1"
    assert exports["TPU_SKIP_MDS_QUERY"] == "1"
    assert not [name for name in exports if name.startswith(("MEGASCALE_", "PJRT_"))]


def test_several_slices_of_tpu_vms(launch: Launch, machine: Machine, google_cloud: Callable[..., object]) -> None:
    """Their variables are in the metadata server, and those of the environment take precedence."""
    tpu_env = "".join(f"{name}: '{value}'\n" for name, value in {**SLICES, "WORKER_ID": "1"}.items())
    google_cloud(
        attributes={"tpu-env": tpu_env, "worker-network-endpoints": "h0,h1", "accelerator-type": "v5litepod-8"}
    )
    machine.add_devices("/dev/accel0")
    assert _of(launch(JAX).exports) == ("s0-h0:8482", "4", "3")
    assert _of(launch({**JAX, "MEGASCALE_SLICE_ID": "0"}).exports) == ("s0-h0:8482", "4", "1")


@pytest.mark.parametrize(
    "invalid", [{"MEGASCALE_SLICE_ID": ""}, {"MEGASCALE_NUM_SLICES": "two"}, {"MEGASCALE_SLICE_ID": "2"}]
)
def test_slices_whose_numbers_cannot_be_used_count_as_one(
    launch: Launch, machine: Machine, google_cloud: Callable[..., object], invalid: dict[str, str]
) -> None:
    tpu_env = "".join(f"{name}: '{value}'\n" for name, value in {**SLICES, "WORKER_ID": "1", **invalid}.items())
    google_cloud(attributes={"tpu-env": tpu_env, "worker-network-endpoints": "h0,h1"})
    machine.add_devices("/dev/accel0")
    assert _of(launch(JAX).exports) == ("h0:8482", "2", "1")


#: Prints what a process got.
SHOW = f"import json, os; print(json.dumps([os.environ.get(name) for name in {(*NAMES, 'JAX_LOCAL_DEVICE_IDS')!r}]))"


def _start(env: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(ROOT / "launcher"), "--", *words]
    full = {"PATH": os.environ["PATH"], **JAX, "LAUNCHER_LOG": "quiet", **env}
    return subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_several_processes_of_a_node_are_numbered(tmp_path: Path) -> None:
    """They replace the numbers of the node, which Kubeflow has set."""
    job = _start({"LAUNCHER_NPROC": "2"}, sys.executable, "-c", SHOW)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    first, second = sorted((json.loads(line) for line in out.splitlines()), key=lambda values: str(values[2]))
    assert first[0] == second[0] and first[0].startswith("127.0.0.1:")
    assert (first[1:], second[1:]) == (["2", "0", None], ["2", "1", None])
    env = {**TRAIN_JOB, "JAX_PROCESS_ID": "1", "LAUNCHER_NPROC": "2", "LAUNCHER_JAX_TIMEOUT": "0"}
    job = _start({**env, "JAX_COORDINATOR_ADDRESS": f"{socket.gethostname()}:1"}, sys.executable, "-c", SHOW)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert sorted(json.loads(line)[1:3] for line in out.splitlines()) == [["4", "2"], ["4", "3"]]


def test_several_processes_of_a_node_have_a_gpu_each(tmp_path: Path, machine: Machine) -> None:
    machine.add_image("jax", "0.10.2", accelerator="nvidia")
    machine.add_devices(*GPUS)
    env = {"LAUNCHER_NPROC": "3", "LAUNCHER_SYSROOT": str(machine.root), "LAUNCHER_FRAMEWORK": ""}
    out, err = _start(env, sys.executable, "-c", SHOW).communicate(timeout=60)
    assert sorted((json.loads(line)[2:] for line in out.splitlines()), key=str) == [
        ["0", "0"],
        ["1", "1"],
        ["2", None],
    ], err


def _worker(port: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": f"{socket.gethostname()}:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }


@pytest.fixture
def port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def test_a_late_coordinator_is_waited_for(port: int) -> None:
    job = _start({**_worker(port), "LAUNCHER_JAX_TIMEOUT": "60"}, sys.executable, "-c", "print('started')")
    time.sleep(1)
    assert job.poll() is None
    with socket.create_server(("", port)):
        assert job.communicate(timeout=60)[0] == "started\n"
    assert job.returncode == 0


def test_a_missing_coordinator_is_one_line(port: int) -> None:
    job = _start({**_worker(port), "LAUNCHER_JAX_TIMEOUT": "0.5"}, "/bin/true")
    err = job.communicate(timeout=60)[1]
    assert job.returncode == 138
    assert err.count("\n") == 1
    assert f"JAX's coordinator at {socket.gethostname()}:{port} (JAX) did not accept a connection within 0.5 s" in err


def test_a_signal_ends_the_wait(port: int) -> None:
    job = _start({**_worker(port), "LAUNCHER_JAX_TIMEOUT": "60"}, "/bin/true")
    time.sleep(1)
    job.terminate()
    err = job.communicate(timeout=60)[1]
    assert job.returncode == 143
    assert "SIGTERM while waiting for JAX's coordinator" in err


@pytest.mark.parametrize(
    ("env", "command", "waits"),
    [
        ({"JAX_PROCESS_ID": "1"}, ("-m", "trainers.jax.mnist"), True),
        ({"JAX_PROCESS_ID": "0"}, ("-m", "trainers.jax.mnist"), False),
        ({"JAX_PROCESS_ID": "1", "LAUNCHER_JAX_TIMEOUT": "0"}, ("-m", "trainers.jax.mnist"), False),
        ({"JAX_PROCESS_ID": "1"}, ("-c", "0"), False),
    ],
)
def test_who_waits_for_the_coordinator(port: int, env: dict[str, str], command: tuple[str, ...], waits: bool) -> None:
    """A command of the user may open the coordinator later, at another port, or not at all."""
    accepted: list[object] = []
    with socket.create_server(("", port)) as server:
        server.settimeout(5 if waits else 2)

        def accept() -> None:
            try:
                accepted.append(server.accept())
            except TimeoutError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        _start({**_worker(port), **env}, sys.executable, *command).communicate(timeout=60)
        thread.join()
    assert bool(accepted) == waits


def test_ranks_of_one_node_wait_for_rank_0_of_theirs(port: int) -> None:
    env = {**mpi(1, 2, 1, 2), "MASTER_PORT": str(port), "LAUNCHER_JAX_TIMEOUT": "0.5"}
    job = _start(env, "/bin/true")
    assert f"coordinator at 127.0.0.1:{port} (Open MPI) did not accept" in job.communicate(timeout=60)[1]
    assert job.returncode == 138
