"""Processes of JAX meet through the launcher: below Slurm's srun and Open MPI's mpirun, and in rehearsed jobs (R13.26).

Two and four processes on CPUs add their numbers up. JAX runs in this Python, from a separate folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.cloud import slurm_cluster
from tests.cloud.slurm_cluster import Slurm
from tests.conftest import ROOT

from trainyard.image import recipes
from trainyard.spec.model import load
from trainyard_jobs import platforms
from trainyard_jobs.model import request
from trainyard_jobs.rehearsal.model import Replica
from trainyard_jobs.schema import job_file

pytestmark = [*slurm_cluster.MARKS, pytest.mark.usefixtures("schedulers")]
LOCK = Path(__file__).with_name("jax.lock")
LAUNCHER = (sys.executable, "-I", "-S", str(ROOT / "launcher"))
TIMEOUT = 240  # seconds; two processes take 9 and four 18 on 2 busy cores

#: Adds the numbers of the processes up, each plus one, by a psum over a mesh of one CPU device of each process.
PSUM = """
import json, os
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
)
mesh = Mesh(jax.devices(), "all")
mine = jax.numpy.array([float(jax.process_index() + 1)])
numbers = jax.make_array_from_process_local_data(NamedSharding(mesh, P("all")), mine)
add = jax.shard_map(lambda part: jax.lax.psum(part, "all"), mesh=mesh, in_specs=P("all"), out_specs=P())
total = float(jax.jit(add)(numbers)[0])
print("met", json.dumps([jax.process_index(), jax.process_count(), jax.device_count(), total]), flush=True)
"""


@pytest.fixture(scope="module")
def variables(installed: Callable[[Path], Path]) -> dict[str, str]:
    """Return the environment of the launcher in an image with JAX; one thread for each process."""
    folder = installed(LOCK)
    (version,) = (path.name.split("-")[1] for path in folder.glob("jax-*.dist-info"))
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(folder),
        "LAUNCHER_FRAMEWORK": f"jax=={version.removesuffix('.dist')}",
        "LAUNCHER_LOG": "quiet",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("jax") / "psum.py"
    path.write_text(PSUM, encoding="utf-8")
    return str(path)


def _assert_met(out: str, processes: int) -> None:
    """Each process has met all others; gloo prints to stdout, too."""
    printed = sorted(json.loads(line[len("met ") :]) for line in out.splitlines() if line.startswith("met "))
    total = processes * (processes + 1) / 2
    assert printed == [[number, processes, processes, total] for number in range(processes)]


@pytest.mark.parametrize(
    ("tasks", "processes"),
    [
        pytest.param(("-N2",), 2, id="a-task-per-node"),
        pytest.param(("-N2", "--ntasks-per-node=2"), 4, id="two-tasks-per-node"),
    ],
)
def test_tasks_of_srun(
    slurm: Slurm, variables: dict[str, str], program: str, tasks: tuple[str, ...], processes: int
) -> None:
    words = [f"{name}={value}" for name, value in variables.items()]
    ended = slurm.run("env", *words, "srun", *tasks, *LAUNCHER, "--", sys.executable, program, timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stderr
    _assert_met(ended.stdout, processes)


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_of_mpirun(variables: dict[str, str], program: str, processes: int) -> None:
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(processes))
    command = ["mpirun", *options, *LAUNCHER, "--", sys.executable, program]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr
    _assert_met(ended.stdout, processes)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_of_one_node(variables: dict[str, str], program: str, processes: int) -> None:
    env = {**variables, "LAUNCHER_NPROC": str(processes)}
    command = [*LAUNCHER, "--", sys.executable, program]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr
    _assert_met(ended.stdout, processes)


def _job_set(nodes: int) -> str:
    """Return the JobSet that `make job PLATFORM=gke` writes."""
    known = recipes.outlines(load("cpu"))
    wanted = request.parse_request({"workers": nodes}, known, lambda _: None, tpu_machine=False)
    return platforms.by_name("gke").write(wanted).text


def _train_job(nodes: int) -> str:
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: train}}
spec:
  runtimeRef: {{name: torch-distributed}}
  trainer: {{image: i, numNodes: {nodes}}}
"""


def _replicas(folder: Path, text: str) -> list[Replica]:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    job = job_file.load(path)
    return list(platforms.of_job_file(job).rehearse(job, None).replicas)


class Pods:
    """Run the replicas of a rehearsed job as processes of this host, which knows their names as its own."""

    def __init__(self, folder: Path, replicas: list[Replica], variables: Mapping[str, str]) -> None:
        names = sorted({name for replica in replicas for name in (replica.hostname, *replica.aliases)})
        self._hosts = folder / "hosts"
        self._hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(names)}\n")
        self._variables = {**variables, "LAUNCHER_REHEARSE": "1"}

    def start(self, replica: Replica, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start a command of a replica below the launcher, in a mount namespace with the names of the job."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", script, str(self._hosts), *LAUNCHER, "--", *command]
        env = {**self._variables, **replica.environment, **more}
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def as_root() -> None:
    if os.geteuid():
        pytest.skip("names for this test only need root: run the cloud tests as root, as CI does")


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("text", [_job_set, _train_job])
def test_pods_of_a_rehearsed_job(
    tmp_path: Path, variables: dict[str, str], program: str, text: Callable[[int], str], nodes: int
) -> None:
    replicas = _replicas(tmp_path, text(nodes))
    assert len(replicas) == nodes
    pods = Pods(tmp_path, replicas, variables)
    started = [pods.start(replica, sys.executable, program) for replica in replicas]
    ended = [process.communicate(timeout=TIMEOUT) for process in started]
    assert [process.returncode for process in started] == [0] * nodes, ended
    _assert_met("".join(out for out, _ in ended), nodes)


@pytest.mark.usefixtures("as_root")
def test_a_pod_waits_for_a_late_pod_0(tmp_path: Path, variables: dict[str, str], program: str) -> None:
    first, second = _replicas(tmp_path, _job_set(2))
    pods = Pods(tmp_path, [first, second], variables)
    waiting = pods.start(second, sys.executable, program, LAUNCHER_JAX_TIMEOUT="120")
    time.sleep(3)
    assert waiting.poll() is None
    late = pods.start(first, sys.executable, program)
    ended = [process.communicate(timeout=TIMEOUT) for process in (late, waiting)]
    assert (late.returncode, waiting.returncode) == (0, 0), ended
    _assert_met("".join(out for out, _ in ended), 2)


@pytest.mark.usefixtures("as_root")
def test_a_missing_pod_0_is_one_line(tmp_path: Path, variables: dict[str, str], program: str) -> None:
    """JAX would end with SIGABRT and a stack trace of C++ code."""
    first, second = _replicas(tmp_path, _job_set(2))
    waiting = Pods(tmp_path, [first, second], variables).start(
        second, sys.executable, program, LAUNCHER_JAX_TIMEOUT="2"
    )
    err = waiting.communicate(timeout=TIMEOUT)[1]
    assert waiting.returncode == 138
    assert "did not accept a connection within 2 s" in err
    assert [line for line in err.splitlines() if line.startswith("launch: error: ")] == err.splitlines()[-1:]
