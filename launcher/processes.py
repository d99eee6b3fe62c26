"""How many processes the launcher starts on this node, and what each of them gets (R14).

Started and supervised by `supervisor`; the coordinates of the node are `cluster`'s.
"""

from __future__ import annotations

import os

from launcher.errors import CONFIG, LaunchError
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Mapping

    from launcher.coordinates import Cluster
    from launcher.runtime import Decision, Facts

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TORCH = ("torch", "torch_xla", "torch_tpu")
# Programs and modules that start the processes of a node themselves.
STARTERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "colossalai")
STARTER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands", "deepspeed.launcher")
# Trainers of this project have a flag for the number of their processes; see docs/trainers.md.
TRAINERS = "trainers.torch."
CORES_FLAGS = ("--num-cores", "--num_cores")
TPU_ENVIRONMENT_TIMEOUT = 120.0  # seconds; importing torch and torch_tpu took 7 s on 2 cores

# Runs in the image's Python. set_tpu_launch_env only changes os.environ, and keeps variables that are set (R14.4).
TPU_ENVIRONMENT = """
import json, os, sys
import torch
nnodes, nproc = map(int, sys.argv[1:])
torch.tpu.distributed.set_tpu_launch_env(nnodes=nnodes, nproc_per_node=nproc)
found = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
print("\\n" + json.dumps(found))
"""


def count(facts: Facts, runtime: str, named: bool, cluster: Cluster, command: list[str]) -> int:
    """The number of processes that the launcher starts on this node (R14.1); 1 if it only execs the command.

    Args:
        facts: environment, machine, image and settings.
        runtime: the runtime.
        named: the command is a trainer of the image.
        cluster: the coordinates.
        command: the command; [] if there is none.
    """
    # This process has been started as one of several, or is outside the training world.
    if cluster.given or cluster.task or cluster.node_rank is None or facts.has("LOCAL_RANK"):
        return 1
    if starts_processes(command):
        return 1
    if facts.settings.nproc:
        return facts.settings.nproc
    image = facts.image
    if not image.may_be(*TORCH) or image.framework == "torch_xla":
        given = facts.has("PET_NPROC_PER_NODE") if image.may_be(*TORCH) else ""
        return _number(given) or 1
    if not (named or is_python(command)):
        return 1  # a shell script, for example, may start torchrun
    cores = _cores(command) if named else None
    if cores:
        return cores
    if _number(facts.has("PET_NPROC_PER_NODE")):
        return _number(facts.has("PET_NPROC_PER_NODE"))
    # A command that is not a trainer of the image may start its own processes on a single node.
    if facts.settings.rehearse or not (named or cluster.nnodes > 1 or facts.has("PET_NPROC_PER_NODE")):
        return 1
    if image.framework == "torch" and runtime == "gpu":
        return max(1, facts.host.gpu_count(facts.env))
    if image.framework == "torch_tpu" and runtime == "tpu-local":
        return max(1, len(facts.tpu_chips))
    return 1


def starts_processes(command: list[str]) -> bool:
    """Whether a command starts the processes of a node itself, as torchrun does."""
    if not command:
        return False
    if os.path.basename(command[0]) in STARTERS:
        return True
    if not os.path.basename(command[0]).startswith("python"):
        return False
    name = module(command)
    if name.startswith(STARTER_MODULES):
        return True
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    return not name and os.path.basename(script) in STARTERS


def is_python(command: list[str]) -> bool:
    """Whether a command runs a Python program: a script, `-m` or `-c`; not the interactive interpreter."""
    return bool(command) and os.path.basename(command[0]).startswith("python") and len(command) > 1


def module(command: list[str]) -> str:
    """Return the module of `python [OPTIONS] -m MODULE`, else ""."""
    for number, word in enumerate(command[1:-1], 1):
        if word == "-m":
            return command[number + 1]
        if not word.startswith("-") or word == "-c":
            break
    return ""


def _cores(command: list[str]) -> int | None:
    """The value of `--num-cores` of one of this project's trainers; None without one, or for another trainer."""
    if not module(command).startswith(TRAINERS):
        return None
    found = None
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in CORES_FLAGS:
            value = value if equals else "".join(command[number + 1 : number + 2])
            found = _number(value)  # an invalid value is the trainer's to refuse
    return found


def _number(word: str) -> int:
    """A count from 1; 0 for words such as "auto" and "gpu"."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 5 else 0


def threads(facts: Facts, nproc: int) -> dict[str, str]:
    """Return the variables that limit the threads of each of this node's processes to its CPUs (R14.5).

    A single process without a quota is left alone: the frameworks' defaults follow the affinity and hyperthreads.
    """
    present = facts.host.affinity()
    quota = facts.host.cpu_quota()
    usable = min(present, quota) if quota else present
    share = str(max(1, int(usable) // nproc))
    found = {"OMP_NUM_THREADS": share} if nproc > 1 or usable < present else {}
    if usable < present:  # of which os.cpu_count(), TensorFlow and XLA know nothing
        found["PYTHON_CPU_COUNT"] = str(max(1, int(usable)))
        if facts.image.may_be("tensorflow"):
            found.update(TF_NUM_INTRAOP_THREADS=share, TF_NUM_INTEROP_THREADS=share)
        if facts.image.may_be("jax", "torch_xla"):
            found["PJRT_NPROC"] = share
    return found


def environments(env: Mapping[str, str], cluster: Cluster, nproc: int) -> list[dict[str, str]]:
    """The environment of each process: the variables that torchrun sets, without those of its agent (R14.2).

    Node-level values of RANK and WORLD_SIZE, as on Vertex AI, are replaced.

    Args:
        env: the environment that the processes share.
        cluster: the coordinates; the node has a rank.
        nproc: processes of this and of every other node.
    """
    node = cluster.node_rank or 0
    shared = {
        "MASTER_ADDR": text(env, "MASTER_ADDR") or cluster.master_addr,
        "MASTER_PORT": text(env, "MASTER_PORT") or str(cluster.master_port),
        "NODE_RANK": str(node),
        "NNODES": str(cluster.nnodes),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(cluster.nnodes),
        "LOCAL_WORLD_SIZE": str(nproc),
        "WORLD_SIZE": str(nproc * cluster.nnodes),
    }
    if is_local(cluster, shared["MASTER_ADDR"]):
        # Otherwise gloo looks up the host's name, which a container without a network cannot resolve.
        shared["GLOO_SOCKET_IFNAME"] = text(env, "GLOO_SOCKET_IFNAME") or "lo"
    return [{**env, **shared, "RANK": str(node * nproc + local), "LOCAL_RANK": str(local)} for local in range(nproc)]


def is_local(cluster: Cluster, address: str) -> bool:
    """Whether the processes of a single node meet at its loopback interface."""
    return cluster.nnodes == 1 and address in LOOPBACK


def reserve(address: str, port: int) -> socket.socket | None:
    """Keep a free port of this host for rank 0 until the socket is closed (R14.3); None if it is taken.

    The socket is bound and never listens: the kernel gives the port to no other process, while rank 0 can bind it,
    because TCPStore sets SO_REUSEADDR as well (socket(7)). Importing torch takes seconds in which the port would be
    free for all.
    """
    import socket

    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((address, port))
    except OSError:
        reserved.close()
        return None
    return reserved


def tpu_environment(
    facts: Facts, decision: Decision, cluster: Cluster, nproc: int, env: Mapping[str, str]
) -> dict[str, str]:
    """torch_tpu's variables for the processes of a slice, from torch_tpu's own function (R14.4).

    Args:
        facts: environment, machine, image and settings.
        decision: the runtime, with the slice.
        cluster: the coordinates.
        nproc: processes of each host.
        env: the environment of the processes.

    Raises:
        LaunchError: (2) if torch_tpu refuses, with its reason.
    """
    import json
    import subprocess

    given = dict(env)
    if decision.slice and decision.slice.workers and cluster.nnodes > 1:
        given.setdefault("TPU_WORKER_HOSTNAMES", ",".join(decision.slice.workers))
    given.setdefault("NODE_RANK", str(cluster.node_rank or 0))
    command = [facts.image.python(), "-c", TPU_ENVIRONMENT, str(cluster.nnodes), str(nproc)]
    try:
        done = subprocess.run(
            command,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=TPU_ENVIRONMENT_TIMEOUT,
        )
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        reason = lines[-1]
        if done.returncode == 0:
            found = json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
            return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, LookupError, AttributeError, subprocess.TimeoutExpired) as error:
        reason = f"{type(error).__name__}: {error}"
    raise LaunchError(
        f"torch_tpu cannot start {nproc} processes on this host ({reason[:300]}): set LAUNCHER_NPROC to a number that "
        "it supports, or to 1 to use one chip",
        CONFIG,
    )
