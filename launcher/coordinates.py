"""The coordinates of this node and process in a cluster, and the ports of node 0 (R13.8, R13.19)."""

from __future__ import annotations

from launcher import address
from launcher.settings import integer, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

LOCAL_ADDR = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's default, for pods and containers, each with its own network (R13.19)
# The ports above Linux's range for outgoing connections, 32768 to 60999 (R13.19).
FIRST_JOB_PORT, JOB_PORTS = 61440, 4096
MAX_NODES = 1 << 20


class Task:
    """This process among those that a scheduler has started, such as one of the tasks of a Slurm step.

    Attributes:
        rank, world_size: among all processes of the job.
        local_rank, local_world_size: among those of this node; 0 if the size is unknown.
        nodes_known: rank and number of the nodes are known. Otherwise they are derived from local_world_size, as if all
            nodes had as many processes, and not exported.
    """

    def __init__(
        self, rank: int, world_size: int, local_rank: int, local_world_size: int, nodes_known: bool = True
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.nodes_known = nodes_known


class Cluster:
    """The coordinates of this node.

    Attributes:
        source: the variable, or other source, of the coordinates.
        role: "master", "worker", or "server" and "evaluator", which are outside the training world.
        node_rank: 0 to nnodes - 1; None for roles outside the training world.
        nnodes: number of nodes in the training world.
        master_addr, master_port: address and port of node 0. The address may be an IPv6 address, without brackets. The
            port is 0 on a single node until one is needed (R13.19).
        hosts: TF_CONFIG's task type -> "host:port" of each task; {} if unknown.
        task_index: index of this node among the tasks of its type.
        trial: id of the hyperparameter tuning trial; "" without one.
        given: torchrun has set the coordinates of this process; nothing is added (R13.1).
        task: this process, if a scheduler has started it as one of several; the launcher starts no others.
        recounted: RANK and WORLD_SIZE are set, count replicas outside the training world, and are replaced (R13.17).
    """

    def __init__(
        self,
        source: str,
        node_rank: int | None = 0,
        nnodes: int = 1,
        master_addr: str = LOCAL_ADDR,
        master_port: int = 0,
        role: str = "",
        task: Task | None = None,
    ) -> None:
        leads = task.rank == 0 if task else not node_rank
        self.source, self.role = source, role or ("master" if leads else "worker")
        self.node_rank, self.nnodes, self.task = node_rank, nnodes, task
        self.master_addr, self.master_port = master_addr, master_port
        self.hosts: dict[str, list[str]] = {}
        self.task_index, self.trial = 0, ""
        self.given = self.recounted = False
        self.warnings: list[str] = []


def job_port(number: int) -> int:
    """A port for a job on nodes that other jobs share, from a number that all of its processes know (R13.19)."""
    return FIRST_JOB_PORT + number % JOB_PORTS


def master_port(env: Mapping[str, str], name: str = "MASTER_PORT") -> int:
    """The port in a variable; 0 if it is unset. Raises LaunchError (2) if it is not a port."""
    word = text(env, name)
    return integer(name, word, 1, 65535) if word else 0


def number(env: Mapping[str, str], name: str, default: int = 0, digits: int = 7) -> int:
    """Return a count or rank from a variable of another program; other words ("auto", "gpu") count as unset."""
    word = text(env, name)
    return int(word) if word.isascii() and word.isdigit() and len(word) <= digits else default


def coordinator(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of JAX's coordinator as they are set (R13.25); "" and 0 if they are not.

    XPK sets JAX_COORDINATOR_ADDRESS without a port and JAX_COORDINATOR_PORT; Kubeflow sets the port in both.

    Raises:
        LaunchError: (2) if the address or the port is invalid.
    """
    if not text(env, "JAX_COORDINATOR_ADDRESS"):
        return "", 0
    host, port = address.split("JAX_COORDINATOR_ADDRESS", text(env, "JAX_COORDINATOR_ADDRESS"))
    return host, port or master_port(env, "JAX_COORDINATOR_PORT")
