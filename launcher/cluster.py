"""Cluster coordinates: rank of this node, number of nodes, address of node 0 (R13).

SOURCES are the rules R13.1 to R13.7, in this order.
"""

from __future__ import annotations

from launcher.errors import config_error
from launcher.settings import integer, text
from launcher.xrt import is_host, port_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from launcher.settings import Settings
    from launcher.tpu_vm import Slice

LOCAL_ADDR = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's default (R13.7)
JAX_PORT = 8482  # JAX's coordinator port on a TPU slice (R13.6)
MAX_NODES = 1 << 20


class Cluster:
    """The coordinates of this node.

    Attributes:
        source: the variable, or other source, of the coordinates.
        role: "master", "worker", or "server" and "evaluator", which are outside the training world.
        node_rank: 0 to nnodes - 1; None for roles outside the training world.
        nnodes: number of nodes in the training world.
        master_addr, master_port: address and port of node 0.
        hosts: TF_CONFIG's task type -> "host:port" of each task; {} if unknown.
        task_index: index of this node among the tasks of its type.
        trial: id of the hyperparameter tuning trial; "" without one.
        given: torchrun has set the coordinates of this process; nothing is added (R13.1).
    """

    __slots__ = (
        "given",
        "hosts",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "role",
        "source",
        "task_index",
        "trial",
        "warnings",
    )

    def __init__(
        self,
        source: str,
        node_rank: int | None = 0,
        nnodes: int = 1,
        master_addr: str = LOCAL_ADDR,
        master_port: int = DEFAULT_PORT,
        role: str = "",
    ) -> None:
        self.source = source
        self.role = role or ("worker" if node_rank else "master")
        self.node_rank = node_rank
        self.nnodes = nnodes
        self.master_addr = master_addr
        self.master_port = master_port
        self.hosts: dict[str, list[str]] = {}
        self.task_index = 0
        self.trial = ""
        self.given = False
        self.warnings: list[str] = []


def _torchelastic(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """Processes started by torchrun have their coordinates (R13.1)."""
    if not text(env, "TORCHELASTIC_RUN_ID"):
        return None
    found = Cluster(
        "torchelastic",
        _number(env, "GROUP_RANK", 0),
        max(1, _number(env, "GROUP_WORLD_SIZE", 1)),
        text(env, "MASTER_ADDR") or LOCAL_ADDR,
        port_number(text(env, "MASTER_PORT")) or DEFAULT_PORT,
    )
    found.given = True
    return found


def _explicit(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """MASTER_ADDR, RANK and WORLD_SIZE, which count nodes on Vertex AI and Kubeflow, processes elsewhere (R13.2)."""
    if not all(text(env, name) for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE")):
        return None
    rank = integer("RANK", text(env, "RANK"), 0, MAX_NODES)
    world = integer("WORLD_SIZE", text(env, "WORLD_SIZE"), 1, MAX_NODES)
    if rank >= world:
        raise config_error(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks go from 0 to WORLD_SIZE - 1")
    address, port = _address("MASTER_ADDR", text(env, "MASTER_ADDR"))
    local_world = max(1, _number(env, "LOCAL_WORLD_SIZE", 1))
    per_node = local_world if local_world > 1 else max(1, _number(env, "PET_NPROC_PER_NODE", 1))
    nodes = _upper(env, "PET_NNODES") or _upper(env, "NNODES") or max(1, world // per_node)
    node_rank = _number(env, "PET_NODE_RANK", _number(env, "NODE_RANK", rank // local_world))
    if node_rank >= nodes:
        raise config_error(f"this is node {node_rank}, but there are {nodes} nodes: check RANK, NODE_RANK and NNODES")
    return Cluster("MASTER_ADDR", node_rank, nodes, address, _port(env, "MASTER_PORT") or port or DEFAULT_PORT)


def _pet(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """PET_*: torchrun's own variables, set by Kubeflow (R13.3)."""
    if not any(text(env, name) for name in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")):
        return None
    rank = _number(env, "PET_NODE_RANK", 0)
    nodes = _upper(env, "PET_NNODES") or 1
    if rank >= nodes:
        raise config_error(f"PET_NODE_RANK is {rank}, but PET_NNODES is {nodes}: ranks go from 0 to PET_NNODES - 1")
    address = text(env, "PET_MASTER_ADDR") or text(env, "PET_RDZV_ENDPOINT") or LOCAL_ADDR
    host, port = _address("PET_MASTER_ADDR", address)
    return Cluster("PET_*", rank, nodes, host, _port(env, "PET_MASTER_PORT") or port or DEFAULT_PORT)


# Vertex AI's worker pools (R13.4): the third has parameter or reduction servers, the fourth evaluators.
POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
# TensorFlow's task types -> roles
ROLES = {"chief": "master", "master": "master", "worker": "worker", "ps": "server", "evaluator": "evaluator"}


def _cluster_spec(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """Vertex AI's CLUSTER_SPEC (R13.4). It may be empty; its member `job` has no fixed type and is not read."""
    spec = _json_object(env, "CLUSTER_SPEC")
    if spec is None:
        return None
    hosts = _hosts("CLUSTER_SPEC", spec)
    if not hosts.get("workerpool0"):
        if not hosts:
            return None
        unknown = sorted(set(hosts) - set(POOLS))
        raise config_error(
            f"CLUSTER_SPEC: Invalid task type: {unknown[0]}." if unknown else "CLUSTER_SPEC has no workerpool0"
        )
    return _from_tasks("CLUSTER_SPEC", spec, {_pool(name): addresses for name, addresses in hosts.items()}, _pool)


def _pool(name: str) -> str:
    if name not in POOLS:
        raise config_error(f"CLUSTER_SPEC: Invalid task type: {name[:60]}. It must be one of {', '.join(POOLS)}")
    return POOLS[name]


def _tf_config(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """TF_CONFIG (R13.5). Without a cluster (AI Platform jobs with one replica) it gives no coordinates."""
    config = _json_object(env, "TF_CONFIG")
    if config is None:
        return None
    hosts = _hosts("TF_CONFIG", config)
    if not any(hosts.values()):
        return None
    return _from_tasks("TF_CONFIG", config, {_task(name): addresses for name, addresses in hosts.items()}, _task)


def _task(name: str) -> str:
    if name not in ROLES:
        raise config_error(f"TF_CONFIG: Invalid task type: {name[:60]}. It must be one of {', '.join(ROLES)}")
    return name


def _from_tasks(
    source: str, spec: dict[str, object], hosts: dict[str, list[str]], kind: Callable[[str], str]
) -> Cluster:
    """Coordinates from a cluster of tasks: chief or master first, then workers; other tasks have no rank."""
    head = "chief" if hosts.get("chief") else "master" if hosts.get("master") else ""
    world = (hosts[head] if head else []) + hosts.get("worker", [])
    if not world:
        raise config_error(f"{source} has no chief, no master and no worker")
    task = spec.get("task")
    if task is None and len(world) == 1 == sum(len(addresses) for addresses in hosts.values()):
        task = {"type": head or "worker", "index": 0}
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise config_error(f"{source} has no task with a type and an index: the rank of this node is unknown")
    task_type = kind(task["type"])
    index = task.get("index", 0)
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 7:
        index = int(index)
    members = hosts.get(task_type, [])
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise config_error(f"{source}: task.index must be a whole number from 0")
    if index >= len(members) and not (task_type == "evaluator" and not members):
        raise config_error(f"{source}: task is {task['type']} {index}, but the cluster lists {len(members)} of them")
    rank: int | None = None
    if task_type in ("chief", "master"):
        rank = index
    elif task_type == "worker":
        rank = index + (len(hosts[head]) if head else 0)
    address, port = _address(source, world[0])
    role = ROLES[task_type] if rank is None else ""
    found = Cluster(source, rank, len(world), address, port or DEFAULT_PORT, role)
    found.hosts = hosts
    found.task_index = index
    trial = task.get("trial")
    found.trial = trial if isinstance(trial, str) else ""
    return found


def _indexed_job(env: Mapping[str, str], found: Slice | None) -> Cluster | None:
    """The hosts of a TPU slice, or the pods of a JobSet or an indexed Job (R13.6).

    Nodes of several slices are numbered slice by slice, as JAX does.
    """
    slices, slice_number = _slices(env)
    index = text(env, "JOB_COMPLETION_INDEX")
    rank = integer("JOB_COMPLETION_INDEX", index, 0, MAX_NODES) if index else None
    if found:
        # A slice of one host is not a cluster; several pods with an index are then independent of each other.
        if found.hosts * slices == 1:
            return None
        source, per_slice, port = found.source, found.hosts, JAX_PORT
        rank = rank if found.worker_id is None else found.worker_id
    else:
        source, per_slice, port = "JOB_COMPLETION_INDEX", _upper(env, "NNODES") // slices, DEFAULT_PORT
    if rank is None:
        return None
    if not per_slice:
        single = Cluster("single node")
        single.warnings.append(
            "JOB_COMPLETION_INDEX is set, but the number of pods is unknown: assuming a single node; "
            "set NNODES to train on all pods together"
        )
        return single
    if rank >= per_slice:
        raise config_error(f"this is host {rank} of {source}, but there are {per_slice} hosts: 0 to {per_slice - 1}")
    workers = found.workers if found else []
    head = text(env, "MEGASCALE_COORDINATOR_ADDRESS") or text(env, "MASTER_ADDR") or _jobset_head(env)
    head = head or (workers[0] if workers else "")
    if not head and not found and per_slice * slices > 1:
        raise config_error(
            "JOB_COMPLETION_INDEX is set, but the address of pod 0 is unknown: set MASTER_ADDR, or JOBSET_NAME and "
            "REPLICATED_JOB_NAME"
        )
    address, _ = _address("MEGASCALE_COORDINATOR_ADDRESS or MASTER_ADDR", head or LOCAL_ADDR)
    port = _port(env, "MASTER_PORT") or port
    return Cluster(source, slice_number * per_slice + rank, per_slice * slices, address, port)


def _jobset_head(env: Mapping[str, str]) -> str:
    """`<jobset>-<replicated job>-0-0.<jobset>`, the name that JobSet gives the first pod."""
    jobset, job = text(env, "JOBSET_NAME"), text(env, "REPLICATED_JOB_NAME")
    return f"{jobset}-{job}-0-0.{jobset}" if jobset and job else ""


def _slices(env: Mapping[str, str]) -> tuple[int, int]:
    """Number of slices of a multislice job, and the number of this one (MEGASCALE_*)."""
    if not text(env, "MEGASCALE_NUM_SLICES"):
        return 1, 0
    count = integer("MEGASCALE_NUM_SLICES", text(env, "MEGASCALE_NUM_SLICES"), 1, 4096)
    return count, integer("MEGASCALE_SLICE_ID", text(env, "MEGASCALE_SLICE_ID") or "0", 0, count - 1)


def _single(env: Mapping[str, str], _: Slice | None) -> Cluster:
    return Cluster("single node")


SOURCES = (_torchelastic, _explicit, _pet, _cluster_spec, _tf_config, _indexed_job, _single)

# The variables of these sources, for `--explain`.
SIGNALS = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "RANK",
    "WORLD_SIZE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "CLUSTER_SPEC",
    "TF_CONFIG",
    "JOB_COMPLETION_INDEX",
    "MEGASCALE_NUM_SLICES",
)


def resolve(env: Mapping[str, str], settings: Settings, found: Slice | None = None) -> Cluster:
    """The coordinates from the first source that has any (R13).

    Args:
        env: the environment.
        settings: LAUNCHER_MASTER_ADDR and LAUNCHER_MASTER_PORT replace the source's address: torchrun needs a port
            that is free on node 0, and the 2222 of a CLUSTER_SPEC is the port of a Kubernetes service.
        found: the TPU slice of this host, if any.

    Raises:
        LaunchError: (2) if that source is invalid.
    """
    for source in SOURCES:
        cluster = source(env, found)
        if cluster:
            break
    else:
        raise AssertionError("_single always applies")
    cluster.master_addr = settings.master_addr or cluster.master_addr
    cluster.master_port = settings.master_port or cluster.master_port
    return cluster


def _json_object(env: Mapping[str, str], name: str) -> dict[str, object] | None:
    value = text(env, name)
    if not value:
        return None
    import json

    try:
        data = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise config_error(f"{name} is not JSON (at character {getattr(error, 'pos', 0)})") from None
    if not isinstance(data, dict):
        raise config_error(f"{name} is not a JSON object")
    return data


def _hosts(name: str, spec: dict[str, object]) -> dict[str, list[str]]:
    """The member `cluster`: task type -> addresses; {} if missing."""
    cluster = spec.get("cluster")
    if cluster is None:
        return {}
    if not isinstance(cluster, dict):
        raise config_error(f"{name}: cluster must be an object of lists")
    for key, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise config_error(f"{name}: cluster.{key[:40]} must be a list of host:port")
    return cluster


def _address(name: str, value: str) -> tuple[str, int]:
    """Host and port of "host:port", "grpc://host:port" or "host" (then the port is 0)."""
    address = value[len("grpc://") :] if value.startswith("grpc://") else value
    host, colon, port = address.partition(":")
    if not is_host(host) or (colon and not port_number(port)):
        raise config_error(f"{name}: {value[:80]!r} is not host:port")
    return host, port_number(port)


def _port(env: Mapping[str, str], name: str) -> int:
    word = text(env, name)
    return integer(name, word, 1, 65535) if word else 0


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """A count or rank from a variable of another program; other words ("auto", "gpu") count as unset."""
    word = text(env, name)
    return int(word) if word.isascii() and word.isdigit() and len(word) < 8 else default


def _upper(env: Mapping[str, str], name: str) -> int:
    """The number in "4", or the larger one in torchrun's elastic range "2:4"; 0 if unset."""
    word = text(env, name).rpartition(":")[2]
    return int(word) if word.isascii() and word.isdigit() and len(word) < 8 else 0
