"""Several processes per node: how many, what each of them gets, and how they end (R14, R15.6)."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import processes
from launcher.cluster import resolve
from launcher.coordinates import Cluster, Task
from launcher.host import Host
from launcher.image import Image
from launcher.runtime import Facts
from launcher.settings import Settings
from launching import ROOT, Launch, Machine, cluster_spec

GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")
CHIPS = tuple(f"/dev/vfio/{number}" for number in range(8))
VERTEX = "cmle-training-workerpool0-ab-0"
TWO = {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}
TRAIN = ["python", "train.py", "--lr", "1"]
MNIST = ["/opt/venv/bin/python", "-m", "trainers.torch.mnist"]
LAUNCHER = [sys.executable, "-I", "-S", str(ROOT / "launcher")]


def _count(
    machine: Machine,
    env: dict[str, str],
    command: list[str],
    named: bool = False,
    image: Image | None = None,
    cluster: Cluster | None = None,
) -> int:
    image = image or Image(framework="torch")
    facts = Facts(env, Host(str(machine.root)), image, Settings(env))
    runtime = "tpu-local" if facts.tpu_chips else "gpu" if facts.host.has_gpu(env) else "cpu"
    return processes.count(facts, runtime, named, cluster or resolve(env, facts.settings), command)


@pytest.mark.parametrize(
    ("env", "command", "named", "count"),
    [
        pytest.param({}, MNIST, True, 2, id="trainer"),
        pytest.param({}, ["python", "-m", "my.trainer"], True, 2, id="trainer-of-a-user"),
        pytest.param({}, TRAIN, False, 1, id="command"),
        pytest.param(TWO, TRAIN, False, 2, id="command-on-two-nodes"),
        pytest.param(TWO, ["python", "-c", "pass"], False, 2, id="python-c"),
        pytest.param(TWO, ["python"], False, 1, id="interactive"),
        pytest.param(TWO, ["bash", "train.sh"], False, 1, id="a-script-may-start-torchrun"),
        pytest.param({"LAUNCHER_NPROC": "3"}, ["bash", "train.sh"], False, 3, id="LAUNCHER_NPROC"),
        pytest.param({"LAUNCHER_NPROC": "3", "PET_NPROC_PER_NODE": "4"}, TRAIN, False, 3, id="LAUNCHER_NPROC-over-PET"),
        pytest.param({**TWO, "LAUNCHER_NPROC": "1"}, TRAIN, False, 1, id="one-on-request"),
        pytest.param({"PET_NPROC_PER_NODE": "4"}, TRAIN, False, 4, id="PET"),
        pytest.param({"PET_NPROC_PER_NODE": "auto"}, TRAIN, False, 2, id="PET-auto"),
        pytest.param({"PET_NPROC_PER_NODE": "4"}, ["bash", "train.sh"], False, 1, id="PET-and-a-script"),
        pytest.param({}, [*MNIST, "--num-cores", "1"], True, 1, id="num-cores"),
        pytest.param({}, [*MNIST, "--num_cores=5"], True, 5, id="num_cores="),
        pytest.param({}, [*MNIST, "--num-cores=0"], True, 2, id="num-cores-all"),
        pytest.param({}, ["python", "-m", "my.trainer", "--num-cores", "1"], True, 2, id="num-cores-of-a-user"),
        pytest.param({"LAUNCHER_REHEARSE": "1"}, MNIST, True, 1, id="rehearsal"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, MNIST, True, 1, id="one-visible-gpu"),
        pytest.param({"LOCAL_RANK": "0", "LAUNCHER_NPROC": "2"}, TRAIN, False, 1, id="started-by-a-launcher"),
        pytest.param({"TORCHELASTIC_RUN_ID": "1", "LAUNCHER_NPROC": "2"}, TRAIN, False, 1, id="under-torchrun"),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 0, 1], "workerpool2", 0), "LAUNCHER_NPROC": "2"}, TRAIN, False, 1,
            id="reduction-server",
        ),
        pytest.param({"LAUNCHER_NPROC": "2"}, ["/usr/bin/torchrun", "x.py"], False, 1, id="torchrun"),
        pytest.param({"LAUNCHER_NPROC": "2"}, ["accelerate", "launch", "x.py"], False, 1, id="accelerate"),
        pytest.param(
            {"LAUNCHER_NPROC": "2"}, ["python3", "-u", "-m", "torch.distributed.run", "x.py"], False, 1,
            id="torch.distributed.run",
        ),
        pytest.param({"LAUNCHER_NPROC": "2"}, ["python", "/opt/venv/bin/torchrun", "x.py"], False, 1, id="its-script"),
    ],
)  # fmt: skip
def test_number_of_processes(
    machine: Machine, env: dict[str, str], command: list[str], named: bool, count: int
) -> None:
    machine.add_devices(*GPUS)
    assert _count(machine, env, command, named) == count


def test_a_task_of_a_scheduler_starts_no_others(machine: Machine) -> None:
    machine.add_devices(*GPUS)
    cluster = Cluster("Slurm", 0, 2, "n0", 1, task=Task(0, 4, 0, 2))
    assert _count(machine, {"LAUNCHER_NPROC": "2"}, MNIST, True, cluster=cluster) == 1


@pytest.mark.parametrize(
    ("framework", "env", "count"),
    [
        ("tensorflow", {"PET_NPROC_PER_NODE": "4"}, 1),
        ("tensorflow", {"LAUNCHER_NPROC": "4"}, 4),
        ("torch_xla", {}, 1),
        ("torch_tpu", {}, 8),
        ("torch_tpu", {"LAUNCHER_NPROC": "4"}, 4),
    ],
)
def test_number_of_processes_on_a_tpu(machine: Machine, framework: str, env: dict[str, str], count: int) -> None:
    """torch_xla and TensorFlow drive all chips of a host from one process."""
    machine.add_devices(*CHIPS)
    assert _count(machine, env, MNIST, True, Image(framework=framework, accelerator="tpu")) == count


def test_a_command_that_starts_its_own_processes_gets_a_warning(launch: Launch) -> None:
    launched = launch({"LAUNCHER_NPROC": "2"}, "--print-env", "--json", "--", "torchrun", "train.py")
    assert launched.data["warnings"] == ["LAUNCHER_NPROC=2 has no effect: this command starts its own processes"]


def test_coordinates_of_each_process() -> None:
    cluster = Cluster("CLUSTER_SPEC", 1, 3, "head", 2222)
    vertex = {"RANK": "1", "WORLD_SIZE": "3", "OTHER": "kept"}  # of the node
    shared = {
        "OTHER": "kept", "MASTER_ADDR": "head", "MASTER_PORT": "2222", "NODE_RANK": "1", "NNODES": "3",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6",
    }  # fmt: skip
    assert processes.environments(vertex, cluster, 2) == [
        {**shared, "RANK": "2", "LOCAL_RANK": "0"},
        {**shared, "RANK": "3", "LOCAL_RANK": "1"},
    ]


def test_a_reserved_port_is_given_to_nobody_but_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    reserved = processes.reserve("127.0.0.1", port)
    assert reserved is not None
    with reserved:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # TCPStore and create_server set SO_REUSEADDR.
        with socket.create_server(("127.0.0.1", port)) as rank_0:
            assert rank_0.getsockname()[1] == port
            assert processes.reserve("127.0.0.1", port) is None


# --- CPUs -----------------------------------------------------------------------------------------------------------

V2 = {"/proc/self/cgroup": "0::/\n"}
V1 = {"/proc/self/cgroup": "5:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, 0.0, id="no-cgroup"),
        pytest.param({**V2, "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 0.0, id="v2-max"),
        pytest.param({**V2, "/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5, id="v2"),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/kubepods/pod1/c2\n",
                "/sys/fs/cgroup/kubepods/pod1/c2/cpu.max": "400000 100000",
                "/sys/fs/cgroup/kubepods/pod1/cpu.max": "300000 100000",
            },
            3.0,
            id="v2-lower-limit-above",
        ),
        pytest.param(
            {**V1, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            0.0,
            id="v1-unlimited",
        ),
        pytest.param(
            {**V1, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            6.0,
            id="v1-in-a-container",
        ),
        pytest.param(
            {
                **V1,
                "/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "50000",
                "/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000",
            },
            0.5,
            id="v1-on-the-host",
        ),
        pytest.param({**V2, "/sys/fs/cgroup/cpu.max": "1 0"}, 0.0, id="invalid-period"),
        pytest.param({"/proc/self/cgroup": "0::/../..\nx\n", "/sys/fs/cgroup/cpu.max": "x y"}, 0.0, id="invalid"),
    ],
)
def test_cpu_quota_of_the_cgroup(machine: Machine, files: dict[str, str], quota: float) -> None:
    for path, content in files.items():
        machine.add(path, content)
    assert Host(str(machine.root)).cpu_quota() == quota


@pytest.mark.parametrize(
    ("env", "quota", "exported"),
    [
        pytest.param({}, "", None, id="one-process-without-a-quota"),
        pytest.param({}, "max 100000", None, id="unlimited"),
        pytest.param({}, "1600000 100000", None, id="quota-of-every-cpu"),
        pytest.param({}, "250000 100000", "2", id="one-process-with-a-quota"),
        pytest.param({}, "50000 100000", "1", id="less-than-one-cpu"),
        pytest.param({"LAUNCHER_NPROC": "4"}, "", "4", id="affinity-divided"),
        pytest.param({"LAUNCHER_NPROC": "4"}, "900000 100000", "2", id="quota-divided"),
        pytest.param({"LAUNCHER_NPROC": "64"}, "", "1", id="more-processes-than-cpus"),
        pytest.param({"LAUNCHER_NPROC": "4", "OMP_NUM_THREADS": "7"}, "", None, id="set-by-the-user"),
    ],
)
def test_threads_of_each_process(
    launch: Launch, machine: Machine, env: dict[str, str], quota: str, exported: str | None
) -> None:
    machine.add("/proc/self/cgroup", "0::/\n")
    if quota:
        machine.add("/sys/fs/cgroup/cpu.max", quota)
    machine.add("/proc/self/status", "Name:\tlaunch\nCpus_allowed_list:\t0-7,16,24-30\n")
    launched = launch(env, "--print-env", "--json", "--", "/bin/true")
    assert launched.exports.get("OMP_NUM_THREADS") == exported


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        ("torch==2.9.1", []),
        ("tensorflow==2.21.0", ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"]),
        ("jax==0.12.0", ["PJRT_NPROC"]),
        ("torch_xla==2.9.0", ["PJRT_NPROC"]),
        ("", ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "PJRT_NPROC"]),
    ],
)
def test_every_pool_of_threads_follows_a_quota(
    launch: Launch, machine: Machine, framework: str, names: list[str]
) -> None:
    pools = {"OMP_NUM_THREADS", "PYTHON_CPU_COUNT", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "PJRT_NPROC"}
    machine.add("/proc/self/cgroup", "0::/\n")
    env = {"LAUNCHER_FRAMEWORK": framework, "LAUNCHER_NPROC": "2"}
    machine.add("/proc/self/status", "Cpus_allowed_list:\t0-15\n")
    without = launch(env, "--print-env", "--json", "--", "/bin/true").exports
    machine.add("/sys/fs/cgroup/cpu.max", "600000 100000")
    found = launch(env, "--print-env", "--json", "--", "/bin/true").exports
    kept = launch({**env, "PYTHON_CPU_COUNT": "3"}, "--print-env", "--json", "--", "/bin/true").exports
    assert pools & without.keys() == {"OMP_NUM_THREADS"}
    # os.cpu_count() is that of the node, of which programs give each process its part.
    expected = {"OMP_NUM_THREADS": "3", "PYTHON_CPU_COUNT": "6", **dict.fromkeys(names, "3")}
    assert {name: found[name] for name in pools & found.keys()} == expected
    assert "PYTHON_CPU_COUNT" not in kept


# --- torch_tpu --------------------------------------------------------------------------------------------------------

# Has the interface of torch_tpu 0.2.0's function: it changes os.environ and keeps what is set.
FAKE_TORCH = """
import os, sys, types

def set_tpu_launch_env(*, nnodes=None, nproc_per_node=None):
    if nproc_per_node == 3:
        raise RuntimeError("No TPU topology found for count: 3")
    hosts = os.environ["TPU_WORKER_HOSTNAMES"].split(",") if nnodes > 1 else ["localhost"]
    addresses = [f"{host}:{8070 + number}" for host in hosts for number in range(nproc_per_node)]
    os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(addresses))
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", "2,2,1")
    print("a line of the framework")

tpu = types.SimpleNamespace(distributed=types.SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env))
"""
SHOW = """
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES")
print(json.dumps([os.environ.get(name) for name in names]), flush=True)
"""


def _torch_tpu(machine: Machine, chips: int, **env: str) -> subprocess.CompletedProcess[str]:
    machine.add("/lib/torch.py", FAKE_TORCH)
    machine.add("/show.py", SHOW)
    machine.add_devices(*CHIPS[:chips])
    machine.add_image("torch_tpu", "0.2.0", {"show": [sys.executable, str(machine.root / "show.py")]}, "tpu")
    env["PYTHONPATH"] = str(machine.root / "lib")
    env["GCE_METADATA_HOST"] = "127.0.0.1:1"
    return _launcher(machine, "show", **env)


def test_torch_tpu_gets_a_process_per_chip(machine: Machine) -> None:
    ended = _torch_tpu(machine, 4)
    assert ended.returncode == 0, ended.stderr
    addresses = ",".join(f"localhost:{port}" for port in range(8070, 8074))
    found = sorted(json.loads(line) for line in ended.stdout.splitlines())
    assert found == [[str(n), str(n), "4", "127.0.0.1", "2,2,1", addresses] for n in range(4)]


def test_torch_tpu_on_two_hosts_has_one_chief(machine: Machine) -> None:
    env = {"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_WORKER_ID": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    ended = _torch_tpu(machine, 2, **env, LAUNCHER_MASTER_ADDR="127.0.0.1")
    assert ended.returncode == 0, ended.stderr
    addresses = "h0:8070,h0:8071,h1:8070,h1:8071"
    found = sorted(json.loads(line) for line in ended.stdout.splitlines())
    assert found == [[str(2 + n), str(n), "4", "127.0.0.1", "2,2,1", addresses] for n in range(2)]


def test_a_number_of_processes_that_torch_tpu_refuses_is_one_line_and_status_2(machine: Machine) -> None:
    ended = _torch_tpu(machine, 3)
    assert ended.returncode == 2
    assert (
        "torch_tpu cannot start 3 processes on this host (RuntimeError: No TPU topology found for count: 3)"
        in (ended.stderr.splitlines()[-1])
    )


# --- supervision ------------------------------------------------------------------------------------------------------


def _env(machine: Machine, env: dict[str, str]) -> dict[str, str]:
    return {"LAUNCHER_SYSROOT": str(machine.root), "PATH": os.environ["PATH"], "LAUNCHER_NPROC": "2", **env}


def _launcher(machine: Machine, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = _env(machine, env)
    if argv[0] == "show":
        del full["LAUNCHER_NPROC"]
    return subprocess.run([*LAUNCHER, *argv], env=full, capture_output=True, text=True, timeout=60)


def _start(machine: Machine, command: list[str], **env: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [*LAUNCHER, "--", *command]
    return subprocess.Popen(words, env=_env(machine, env), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _read(running: subprocess.Popen[str], lines: int) -> list[str]:
    assert running.stdout is not None
    return sorted(running.stdout.readline().rstrip("\n") for _ in range(lines))


@pytest.mark.parametrize("kind", ["python", "shell", "script"])
def test_any_command_is_started_once_per_process(machine: Machine, tmp_path: Path, kind: str) -> None:
    script = tmp_path / "show"
    script.write_text("#!/bin/sh\necho $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR\n")
    script.chmod(0o755)
    show = "import os; print(*(os.environ[n] for n in 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR'.split()))"  # noqa: E501
    command = {
        "python": [sys.executable, "-c", show], "shell": ["/bin/sh", str(script)], "script": [str(script)]
    }[kind]  # fmt: skip
    ended = _launcher(machine, "--", *command)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 0 2 2 0 127.0.0.1", "1 1 2 2 0 127.0.0.1"]
    assert "start     2 processes: " in ended.stderr


# Each rank sends a number to rank 0 at MASTER_ADDR and MASTER_PORT, and prints the sum.
RENDEZVOUS = """
import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(world - 1)]
    total = 1 + sum(int(peer.recv(10)) for peer in peers)
    for peer in peers:
        peer.sendall(str(total).encode())
else:
    while True:
        try:
            peer = socket.create_connection(address, timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(str(rank + 1).encode())
    total = int(peer.recv(10))
print(rank, total)
"""


def test_the_processes_meet_at_the_exported_port(machine: Machine) -> None:
    ended = _launcher(machine, "--", sys.executable, "-c", RENDEZVOUS, LAUNCHER_NPROC="3")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 6", "1 6", "2 6"]


def test_two_jobs_on_one_host_do_not_collide(machine: Machine) -> None:
    running = [_start(machine, [sys.executable, "-c", RENDEZVOUS]) for _ in range(4)]
    for job in running:
        out, err = job.communicate(timeout=60)
        assert (job.returncode, sorted(out.splitlines())) == (0, ["0 3", "1 3"]), err


# Saves on SIGTERM and exits with the given status. Not with print: the handler may interrupt the first one.
SAVES = """
import os, signal, sys, time
def say(word):
    os.write(1, f"{word} {os.environ['RANK']}\\n".encode())
def save(number, frame):
    time.sleep(float(sys.argv[2]))
    say("saved")
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
say("up")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "exits", "status"),
    [
        pytest.param(signal.SIGTERM, 143, 143, id="143"),
        pytest.param(signal.SIGTERM, 1, 143, id="another-status"),
        pytest.param(signal.SIGTERM, 0, 0, id="success"),
        pytest.param(signal.SIGINT, 130, 130, id="SIGINT"),
    ],
)
def test_a_signal_reaches_every_process(machine: Machine, number: signal.Signals, exits: int, status: int) -> None:
    with _start(machine, [sys.executable, "-c", SAVES, str(exits), "0.2"], LAUNCHER_GRACE="0.05") as running:
        assert _read(running, 2) == ["up 0", "up 1"]
        running.send_signal(number)
        assert _read(running, 2) == ["saved 0", "saved 1"]  # later than LAUNCHER_GRACE: the platform's limit applies
        assert running.wait(timeout=30) == status


def test_processes_without_a_handler_end_with_143(machine: Machine) -> None:
    with _start(machine, ["/bin/sh", "-c", "echo up; exec sleep 60"]) as running:
        assert _read(running, 2) == ["up", "up"]
        running.terminate()
        assert running.wait(timeout=30) == 143


FAILS = 'if [ "$RANK" = 1 ]; then {fail}; fi; {other}'
WAITS = "exec sleep 60"
SAYS = "trap 'echo ended; exit 0' TERM; while :; do sleep 0.05; done"
IGNORES = "trap '' TERM; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("fail", "other", "status", "message"),
    [
        pytest.param("exit 7", WAITS, 7, "rank 1 exited with 7; ending the other process", id="status"),
        pytest.param("kill -KILL $$", WAITS, 137, "rank 1 was killed by SIGKILL; ending the other", id="SIGKILL"),
        pytest.param("sleep 0.3; exit 22", SAYS, 22, "rank 1 exited with 22", id="handler"),
        pytest.param("sleep 0.3; exit 22", IGNORES, 22, "rank 1 exited with 22", id="ignores-SIGTERM"),
    ],
)
def test_the_first_failure_is_the_result_and_ends_the_others(
    machine: Machine, fail: str, other: str, status: int, message: str
) -> None:
    started = time.monotonic()
    ended = _launcher(machine, "--", "/bin/sh", "-c", FAILS.format(fail=fail, other=other), LAUNCHER_GRACE="0.5")
    assert ended.returncode == status
    assert message in ended.stderr
    assert ("ended" in ended.stdout) == (other == SAYS)
    assert time.monotonic() - started < 30  # of the 60 s that the other process would sleep


def test_sigterm_after_a_failure_does_not_hide_it(machine: Machine) -> None:
    fail = FAILS.format(
        fail="sleep 0.2; exit 22", other="trap 'echo told; sleep 1; exit 143' TERM; while :; do sleep 0.05; done"
    )
    with _start(machine, ["/bin/sh", "-c", fail]) as running:
        assert _read(running, 1) == ["told"]
        running.terminate()
        assert running.wait(timeout=30) == 22


def test_a_process_that_succeeds_early_is_waited_for_by_nobody(machine: Machine) -> None:
    ended = _launcher(machine, "--", "/bin/sh", "-c", 'if [ "$RANK" = 0 ]; then sleep 0.3; echo last; fi')
    assert (ended.returncode, ended.stdout) == (0, "last\n")


def test_a_command_that_cannot_be_started_is_reported_once(machine: Machine) -> None:
    ended = _launcher(machine, "--", "/no/such/command")
    assert ended.returncode == 127
    assert ended.stderr.count("not found") == 1


def test_only_the_first_process_reads_stdin(machine: Machine) -> None:
    with _start(machine, ["/bin/sh", "-c", 'echo "$RANK $(cat)"']) as running:
        out, _ = running.communicate("typed", timeout=30)
        assert sorted(out.splitlines()) == ["0 typed", "1 "]


def test_output_has_a_prefix_on_request(machine: Machine) -> None:
    command = ["/bin/sh", "-c", "printf 'a\\nb\\r100%%\\nlast'; echo error >&2"]
    plain = _launcher(machine, "--", *command)
    assert "[rank" not in plain.stdout + plain.stderr
    ended = _launcher(machine, "--", *command, LAUNCHER_PREFIX="1")
    lines = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("100%", "a", "b", "last")]
    assert sorted(ended.stdout.splitlines()) == lines
    assert {"[rank 0] error", "[rank 1] error"} <= set(ended.stderr.splitlines())


def test_a_megabyte_of_output_with_prefixes_is_complete(machine: Machine) -> None:
    show = "print('x' * 99); print(*['y' * 99] * 10000, sep='\\n')"
    ended = _launcher(machine, "--", sys.executable, "-c", show, LAUNCHER_PREFIX="1")
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 * 10001
    assert {len(line) for line in lines} == {len("[rank 0] ") + 99}


def test_ctrl_c_at_a_terminal_reaches_each_process_once_and_ends_with_130(machine: Machine) -> None:
    """The terminal sends SIGINT to its whole foreground group, the launcher included."""
    count = "import signal, sys, time\ngot = []\nsignal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
    count += "print('up', flush=True)\nend = time.monotonic() + 30\n"
    count += "while not got and time.monotonic() < end: time.sleep(0.01)\n"
    count += "time.sleep(0.3)\nprint('interrupts', len(got), flush=True)\nsys.exit(130)"
    pid, terminal = pty.fork()
    if pid == 0:
        env = _env(machine, {"LAUNCHER_LOG": "quiet"})
        os.execvpe(LAUNCHER[0], [*LAUNCHER, "--", sys.executable, "-c", count], env)
    out = b""
    while out.count(b"up") < 2:
        out += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    while out.count(b"interrupts") < 2:
        out += os.read(terminal, 1000)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert out.count(b"interrupts 1") == 2, out
    assert os.WEXITSTATUS(status) == 130


def test_the_signals_of_the_processes_are_not_blocked(machine: Machine) -> None:
    show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert _launcher(machine, "--", sys.executable, "-c", show).stdout == "set()\n" * 2


@pytest.mark.parametrize("ends", [143, 1])
def test_torchrun_that_got_sigterm_ends_with_143(machine: Machine, tmp_path: Path, ends: int) -> None:
    """torch.distributed.run raises SignalException, so that Python exits with 1."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "run.py").write_text(f"import sys\nsys.argv = ['x', '{ends}', '0']\n{SAVES}")
    env = {
        "LAUNCHER_FRAMEWORK": "torch==2.13",
        "LAUNCHER_RDZV_BACKEND": "c10d",
        "PYTHONPATH": str(tmp_path),
        "RANK": "x",
    }
    with _start(machine, [sys.executable, "train.py"], **env) as running:
        assert _read(running, 1) == ["up x"]
        running.terminate()
        assert running.wait(timeout=30) == 143


def test_signal_group_reaches_what_each_process_has_started(machine: Machine) -> None:
    shell = ["/bin/sh", "-c", '"$0" -c "$1" 143 0.2; exit 3', sys.executable, SAVES]
    for number in (1, 2):
        env = {"LAUNCHER_SIGNAL_GROUP": "1", "LAUNCHER_NPROC": str(number), "RANK": "0"}
        with _start(machine, shell, **env) as running:
            _read(running, number)
            running.terminate()
            out, err = running.communicate(timeout=30)  # the launcher waits for the children of the shells
            assert (running.returncode, out.count("saved")) == (143, number), err


# --- PID 1 ------------------------------------------------------------------------------------------------------------


#: Starts a command as PID 1 of a PID namespace.
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def unshare() -> list[str]:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.fail("this host does not allow PID namespaces, which tests of PID 1 need")
    return UNSHARE


@pytest.mark.needs("unshare")
def test_several_processes_of_pid_1(machine: Machine, unshare: list[str]) -> None:
    words = [*unshare, *LAUNCHER, "--", "/bin/sh", "-c"]
    words.append('echo "up $RANK"; i=0; while [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done')
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=_env(machine, {}), stdout=pipe, stderr=pipe, text=True) as running:
        assert _read(running, 2) == ["up 0", "up 1"]
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)  # PID 1 of its namespace
        assert running.wait(timeout=30) == 143


@pytest.mark.needs("unshare")
@pytest.mark.parametrize("start", ["folder", "script"])
def test_pid_1_is_tini_where_there_is_one(machine: Machine, tmp_path: Path, unshare: list[str], start: str) -> None:
    """Replace the image's entry point by `launch` alone, as with `command` of Kubernetes."""
    tini = tmp_path / "tini"
    tini.write_text('#!/bin/sh\necho "PID $$: $*"\nshift\n"$@"\n')
    tini.chmod(0o755)
    script = tmp_path / "launch"
    script.write_text((ROOT / "launcher" / "launch").read_text().replace('"/opt/trainyard"', repr(str(ROOT))))
    launcher = [*LAUNCHER[:-1], str(script)] if start == "script" else LAUNCHER
    words = [*unshare, *launcher, "--force", "--", "/bin/sh", "-c", "echo command; exit 7"]

    def run(path: str) -> subprocess.CompletedProcess[str]:
        env = _env(machine, {"PATH": path, "LAUNCHER_NPROC": "1"})
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)

    ended = run(f"{tmp_path}:{os.environ['PATH']}")
    again = " ".join([*launcher, "--force", "-- /bin/sh -c echo command; exit 7"])
    assert (ended.returncode, ended.stdout) == (7, f"PID 1: -- {again}\ncommand\n")
    assert "PID 1" not in ended.stderr
    (tmp_path / "sh").symlink_to("/bin/sh")
    tini.unlink()
    words[0] = shutil.which("unshare") or ""
    ended = run(str(tmp_path))
    assert (ended.returncode, ended.stdout) == (7, "command\n")
    assert "warning   this is PID 1 and tini is not on PATH" in ended.stderr
