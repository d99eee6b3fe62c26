"""JAX: its backend (R9.3), and the processes that jax.distributed connects (R12.6, R13.26, R13.27, R14.7).

Imported only where an image may contain JAX.
"""

from __future__ import annotations

from launcher import versions
from launcher.address import join, split
from launcher.coordinates import coordinator, master_port
from launcher.errors import LaunchError, config_error
from launcher.processes import module
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.coordinates import Cluster
    from launcher.runtime import Decision, Facts

ADDRESS = "JAX_COORDINATOR_ADDRESS"
TRAINERS = "trainers.jax."  # trainers of this project: they always open a coordinator
COORDINATOR_TIMEOUT = 300.0  # seconds: that of jax.distributed.initialize (R12.6)
ACCELERATORS = {"gpu": "nvidia", "tpu-local": "tpu"}  # runtime -> accelerator of an image


def uses_accelerator(facts: Facts, decision: Decision) -> bool:
    """Return whether JAX may use an accelerator: this machine has one that the image is made for (R9.3)."""
    needed = ACCELERATORS.get(decision.runtime, "")
    return bool(needed) and facts.image.accelerator in ("", needed) and not facts.settings.rehearse


def gpus(facts: Facts, decision: Decision) -> int:
    """Return the number of GPUs that JAX uses on this node; 0 if it uses none, or the framework is unknown."""
    used = facts.image.framework == "jax" and decision.runtime == "gpu" and uses_accelerator(facts, decision)
    return facts.host.gpu_count(facts.env) if used else 0


def coordinates(
    facts: Facts, decision: Decision, cluster: Cluster, nproc: int, port: int, local_rank: str
) -> dict[str, str]:
    """Return the arguments of jax.distributed.initialize as variables, and what JAX needs beside them (R13.26).

    Args:
        facts: environment, machine, image and settings.
        decision: the runtime.
        cluster: the coordinates; the node has a rank.
        nproc: processes that the launcher starts on this node; each of several gets its own number (`process`).
        port: port of node 0.
        local_rank: LOCAL_RANK of a process that a scheduler has started; "" for the only process of its node.
    """
    task = cluster.task
    own_port = facts.settings.master_port or master_port(facts.env, "JAX_COORDINATOR_PORT")
    variables = {ADDRESS: join(cluster.master_addr, own_port or port)}
    if nproc == 1:
        variables["JAX_NUM_PROCESSES"] = str(task.world_size if task else cluster.nnodes)
        variables["JAX_PROCESS_ID"] = str(task.rank if task else cluster.node_rank)
    if facts.image.framework != "jax":
        return variables
    if not uses_accelerator(facts, decision) and not versions.jax_has_gloo(facts.image.version):
        variables["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    every = ",".join(str(number) for number in range(gpus(facts, decision)))
    if every and nproc == 1:
        variables["JAX_LOCAL_DEVICE_IDS"] = local_rank or every
    return variables


def is_replaced(facts: Facts) -> bool:
    """Return whether LAUNCHER_MASTER_ADDR or LAUNCHER_MASTER_PORT replaces a coordinator that is set (R13)."""
    return bool(facts.settings.master_addr or facts.settings.master_port)


def lacks_port(facts: Facts) -> bool:
    """Return whether the coordinator is kept without a port; jax.distributed.initialize raises IndexError."""
    given = facts.has(ADDRESS)
    return bool(given) and not is_replaced(facts) and not split(ADDRESS, given)[1]


def process(env: Mapping[str, str], present: int) -> dict[str, str]:
    """Return the variables of one of several processes that the launcher starts on this node (R14.7).

    Args:
        env: that of the process, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
        present: GPUs that JAX uses on this node.
    """
    variables = {"JAX_NUM_PROCESSES": env["WORLD_SIZE"], "JAX_PROCESS_ID": env["RANK"]}
    if int(env["LOCAL_RANK"]) < present and not text(env, "JAX_LOCAL_DEVICE_IDS"):
        variables["JAX_LOCAL_DEVICE_IDS"] = env["LOCAL_RANK"]
    return variables


def refuse_loopback(facts: Facts, cluster: Cluster) -> None:
    """Refuse a coordinator that each of several nodes would look for on itself (R13.27).

    Raises:
        LaunchError: (2) with the variable that names it.
    """
    if cluster.nnodes < 2 or cluster.node_rank is None or cluster.given or facts.settings.rehearse:
        return
    name, host = ADDRESS, "" if is_replaced(facts) else coordinator(facts.env)[0]
    if not host:
        name = "LAUNCHER_MASTER_ADDR" if facts.settings.master_addr else "MASTER_ADDR"
        host = cluster.master_addr
        if cluster.source == "AWS Batch" and not cluster.node_rank:
            return  # the other nodes know the address of this one (R13.24)
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        raise config_error(
            f"{name} is {host}, but there are {cluster.nnodes} nodes, and each would wait for itself: set it to the "
            "address of node 0; to start several processes on one host, set LAUNCHER_NPROC"
        )


def coordinator_timeout(facts: Facts, cluster: Cluster, command: list[str]) -> float:
    """Return for how many seconds the coordinator is waited for (R12.6); 0 if this process does not wait.

    Without the wait, JAX ends the process with SIGABRT and a stack trace of C++ code that nothing can catch.
    """
    number = cluster.task.rank if cluster.task else cluster.node_rank
    if not number or cluster.given:
        return 0.0
    if facts.settings.coordinator_timeout is not None:
        return facts.settings.coordinator_timeout
    return COORDINATOR_TIMEOUT if module(command).startswith(TRAINERS) else 0.0


def coordinator_of(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the coordinator that a process gets; "" and 0 if they are not known."""
    try:
        return split(ADDRESS, text(env, ADDRESS))
    except LaunchError:
        return "", 0
