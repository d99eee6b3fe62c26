"""Cluster coordinates: rank of this node or process, size of the cluster, address of node 0 (R13).

SOURCES is the table of R13: where coordinates come from, in order.
"""

from __future__ import annotations

import os

from launcher import address
from launcher.coordinates import DEFAULT_PORT, LOCAL_ADDR, MAX_NODES, Cluster, Task, master_port
from launcher.errors import LaunchError, config_error
from launcher.settings import integer, text
from launcher.xrt import port_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from launcher.settings import Settings
    from launcher.tpu_vm import Slice

JAX_PORT = 8482  # JAX's coordinator port on a TPU slice (R13.6)


def _torchelastic(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """Processes started by torchrun have their coordinates (R13.1)."""
    rank, nodes = _number(env, "GROUP_RANK", 0), max(1, _number(env, "GROUP_WORLD_SIZE", 1))
    if rank >= nodes:
        raise config_error(f"GROUP_RANK is {rank}, but GROUP_WORLD_SIZE is {nodes}: torchrun sets both")
    found = Cluster(
        "torchelastic",
        rank,
        nodes,
        text(env, "MASTER_ADDR") or LOCAL_ADDR,
        port_number(text(env, "MASTER_PORT")) or DEFAULT_PORT,
    )
    found.given = True
    return found


def _ranks(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """MASTER_ADDR, RANK and WORLD_SIZE, which count nodes on Vertex AI and Kubeflow, processes elsewhere (R13.2).

    With LOCAL_RANK this process is one of several that another launcher has started.
    """
    if not all(text(env, name) for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE")):
        return None
    rank = integer("RANK", text(env, "RANK"), 0, MAX_NODES)
    world = integer("WORLD_SIZE", text(env, "WORLD_SIZE"), 1, MAX_NODES)
    if rank >= world:
        raise config_error(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks go from 0 to WORLD_SIZE - 1")
    described = _described(env)
    if described:
        if described.node_rank is None:
            return described
        if world == sum(len(hosts) for hosts in described.hosts.values()) > described.nnodes:
            described.recounted = True
            described.warnings.append(
                f"RANK={rank} and WORLD_SIZE={world} count replicas outside the training world of {described.source}: "
                f"replaced by {described.node_rank} and {described.nnodes}"
            )
            return described
    host, port = address.split("MASTER_ADDR", text(env, "MASTER_ADDR"))
    local_world = max(1, _number(env, "LOCAL_WORLD_SIZE", 1))
    per_node = local_world if local_world > 1 else max(1, _number(env, "PET_NPROC_PER_NODE", 1))
    nodes = _upper(env, "PET_NNODES") or _upper(env, "NNODES") or -(-world // per_node)
    node_rank = _number(env, "PET_NODE_RANK", _number(env, "NODE_RANK", rank // local_world))
    if node_rank >= nodes:
        raise config_error(f"this is node {node_rank}, but there are {nodes} nodes: check RANK, NODE_RANK and NNODES")
    task = None
    if text(env, "LOCAL_RANK"):
        local = _number(env, "LOCAL_WORLD_SIZE", 0)
        known = bool(local) or bool(text(env, "NODE_RANK") and text(env, "NNODES"))
        task = Task(rank, world, _number(env, "LOCAL_RANK", 0), local, known)
    found = Cluster("MASTER_ADDR", node_rank, nodes, host, master_port(env) or port or DEFAULT_PORT, task=task)
    if described:
        found.hosts, found.task_index, found.trial = described.hosts, described.task_index, described.trial
    return found


def _nodes(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """NODE_RANK and NNODES with MASTER_ADDR, the variables that the launcher exports itself (R13.13)."""
    if not (text(env, "NODE_RANK") and text(env, "NNODES")):
        return None
    nodes = integer("NNODES", text(env, "NNODES"), 1, MAX_NODES)
    rank = integer("NODE_RANK", text(env, "NODE_RANK"), 0, MAX_NODES)
    if rank >= nodes:
        raise config_error(f"NODE_RANK is {rank}, but NNODES is {nodes}: ranks go from 0 to NNODES - 1")
    described = _described(env)
    if described and described.node_rank is None:
        return described
    if nodes > 1 and not text(env, "MASTER_ADDR"):
        return None  # another source may know the address; if none does: _refuse_unknown
    host, port = address.split("MASTER_ADDR", text(env, "MASTER_ADDR") or LOCAL_ADDR)
    return Cluster("NODE_RANK", rank, nodes, host, master_port(env) or port or DEFAULT_PORT)


def _pet(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """PET_*: torchrun's own variables, set by Kubeflow (R13.3)."""
    described = _described(env)
    if described and described.node_rank is None:
        return described
    rank = integer("PET_NODE_RANK", text(env, "PET_NODE_RANK") or "0", 0, MAX_NODES)
    nodes = _upper(env, "PET_NNODES") or 1
    if rank >= nodes:
        raise config_error(f"PET_NODE_RANK is {rank}, but PET_NNODES is {nodes}: ranks go from 0 to PET_NNODES - 1")
    head = text(env, "PET_MASTER_ADDR") or text(env, "PET_RDZV_ENDPOINT") or text(env, "MASTER_ADDR")
    if nodes > 1 and not head:
        raise config_error(
            f"PET_NNODES is {text(env, 'PET_NNODES')[:40]}, but the address of node 0 is unknown: set PET_MASTER_ADDR "
            "or PET_RDZV_ENDPOINT"
        )
    static = text(env, "PET_RDZV_BACKEND") in ("", "static") and ":" not in text(env, "PET_NNODES")
    if nodes > 1 and static and not text(env, "PET_NODE_RANK"):
        raise config_error(
            f"PET_NNODES is {nodes}, but the rank of this node is unknown: set PET_NODE_RANK, or PET_RDZV_BACKEND=c10d"
        )
    host, port = address.split("PET_MASTER_ADDR", head or LOCAL_ADDR)
    own_port = master_port(env, "PET_MASTER_PORT") or port or master_port(env)
    return Cluster("PET_*", rank, nodes, host, own_port or (DEFAULT_PORT if nodes > 1 else 0))


# Vertex AI's worker pools (R13.4): the third has parameter or reduction servers, the fourth evaluators.
POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
# TensorFlow's task types -> roles
ROLES = {"chief": "master", "master": "master", "worker": "worker", "ps": "server", "evaluator": "evaluator"}


def _cluster_spec(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """Vertex AI's CLUSTER_SPEC (R13.4). It may be empty; its member `job` has no fixed type and is not read."""
    spec = _json_object(env, "CLUSTER_SPEC")
    if not spec:
        return None
    hosts = _hosts("CLUSTER_SPEC", spec)
    if not hosts.get("workerpool0"):
        if not hosts:
            raise config_error(
                'CLUSTER_SPEC has no cluster: it must be {"cluster": {"workerpool0": [...]}, "task": ...}, or empty'
            )
        unknown = sorted(set(hosts) - set(POOLS))
        raise config_error(
            f"CLUSTER_SPEC: Invalid task type: {unknown[0]}." if unknown else "CLUSTER_SPEC has no workerpool0"
        )
    return _from_tasks("CLUSTER_SPEC", spec, {_pool(name): addresses for name, addresses in hosts.items()}, _pool)


def _described(env: Mapping[str, str]) -> Cluster | None:
    """What CLUSTER_SPEC or TF_CONFIG say beside RANK or NODE_RANK; None if they are unset or invalid (R13.17)."""
    try:
        return _cluster_spec(env, None) or _tf_config(env, None)
    except LaunchError:
        return None


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
    host, port = address.split(source, world[0])
    role = ROLES[task_type] if rank is None else ""
    found = Cluster(source, rank, len(world), host, port or DEFAULT_PORT, role)
    found.hosts = hosts
    found.task_index = index
    trial = task.get("trial")
    found.trial = trial if isinstance(trial, str) else ""
    return found


def _jax(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
    """Return the coordinates in JAX_PROCESS_ID and JAX_NUM_PROCESSES: a process of JAX is a node (R13.25)."""
    if not text(env, "JAX_NUM_PROCESSES"):
        return None  # refused by R13.18 if the number of the process is over 0
    nodes = integer("JAX_NUM_PROCESSES", text(env, "JAX_NUM_PROCESSES"), 1, MAX_NODES)
    rank = integer("JAX_PROCESS_ID", text(env, "JAX_PROCESS_ID"), 0, nodes - 1)
    if nodes > 1 and not text(env, "MASTER_ADDR"):  # or JAX_COORDINATOR_ADDRESS, see `resolve`
        return None  # another source may know the address; if none does: _refuse_unknown
    host, port = address.split("MASTER_ADDR", text(env, "MASTER_ADDR") or LOCAL_ADDR)
    return Cluster("JAX", rank, nodes, host, master_port(env) or port or DEFAULT_PORT)


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


def _indexed_job(env: Mapping[str, str], found: Slice | None) -> Cluster | None:
    """The hosts of a TPU slice, or the pods of a JobSet or an indexed Job (R13.6).

    Nodes of several slices are numbered slice by slice, as JAX does. A TPU VM has the variables of several slices in
    the metadata server.
    """
    if found and found.megascale:
        env = {**found.megascale, **{name: value for name, value in env.items() if value.strip()}}
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
        nodes = _upper(env, "NNODES")
        if nodes % slices:
            raise config_error(f"NNODES is {nodes}, which is not a multiple of MEGASCALE_NUM_SLICES, {slices}")
        source, per_slice, port = "JOB_COMPLETION_INDEX", nodes // slices, DEFAULT_PORT
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
    host, _ = address.split("MEGASCALE_COORDINATOR_ADDRESS or MASTER_ADDR", head or LOCAL_ADDR)
    port = master_port(env) or port
    return Cluster(source, slice_number * per_slice + rank, per_slice * slices, host, port)


def _jobset_head(env: Mapping[str, str]) -> str:
    """`<jobset>-<replicated job>-0-0.<jobset>`, the name that JobSet gives the first pod."""
    jobset, job = text(env, "JOBSET_NAME"), text(env, "REPLICATED_JOB_NAME")
    return f"{jobset}-{job}-0-0.{jobset}" if jobset and job else ""


def _slices(env: Mapping[str, str]) -> tuple[int, int]:
    """Number of slices of a multislice job, and the number of this one (MEGASCALE_*)."""
    if not text(env, "MEGASCALE_NUM_SLICES"):
        return 1, 0
    count = integer("MEGASCALE_NUM_SLICES", text(env, "MEGASCALE_NUM_SLICES"), 1, 4096)
    number = text(env, "MEGASCALE_SLICE_ID") or ("0" if count == 1 else "")
    return count, integer("MEGASCALE_SLICE_ID", number, 0, count - 1)


def _scheduler(function: str, *arguments: str) -> Callable[[Mapping[str, str], Slice | None], Cluster | None]:
    """Return a function of `schedulers` as a reader of a row; the module is imported only if the row is read."""

    def read(env: Mapping[str, str], _: Slice | None) -> Cluster | None:
        from launcher import schedulers

        cluster: Cluster | None = getattr(schedulers, function)(env, *arguments)
        return cluster

    return read


class Source:
    """A row of the table of R13.

    Attributes:
        rule: its id in docs/launcher-contract.md.
        signals: the source is read if one of these variables is set. variables: what else it reads.
        read: returns the coordinates, or None if these variables give none.
    """

    __slots__ = ("read", "rule", "signals", "variables")

    def __init__(
        self,
        rule: str,
        signals: str,
        read: Callable[[Mapping[str, str], Slice | None], Cluster | None],
        variables: str = "",
    ) -> None:
        self.rule, self.read = rule, read
        self.signals, self.variables = signals.split(), variables.split()


def _numbered(rule: str, name: str, rank: str, *others: str) -> Source:
    """Return the row of a platform that numbers the nodes of a job: what `schedulers.numbered` takes."""
    return Source(rule, rank, _scheduler("numbered", name, rank, *others), " ".join(others))


def _ranked(rule: str, name: str, prefix: str, head: str = "") -> Source:
    """Return the row of a launcher of ranks whose variables have a prefix: what `schedulers.ranked` takes."""
    others = f"{prefix}RANK {prefix}LOCAL_RANK {prefix}LOCAL_SIZE {head}"
    return Source(rule, f"{prefix}SIZE", _scheduler("ranked", name, prefix, head), others)


# fmt: off
PLATFORMS = (
    _numbered("R13.22", "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    _numbered("R13.23", "dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    _numbered("R13.24", "AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES",
              "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "AWS_BATCH_JOB_MAIN_NODE_INDEX"),
    _numbered("R13.28", "RunPod", "NODE_RANK", "NUM_NODES", "PRIMARY_ADDR"),
    Source("R13.29", "LEPTON_JOB_WORKER_INDEX", _scheduler("lepton"),
           "LEPTON_JOB_TOTAL_WORKERS LEPTON_JOB_SERVICE_PREFIX LEPTON_JOB_NAME LEPTON_SUBDOMAIN"),
    _numbered("R13.30", "Beaker", "BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT", "BEAKER_LEADER_REPLICA_HOSTNAME"),
    _numbered("R13.31", "Metaflow", "MF_PARALLEL_NODE_INDEX", "MF_PARALLEL_NUM_NODES", "MF_PARALLEL_MAIN_IP"),
    _numbered("R13.32", "NGC", "NGC_ARRAY_INDEX", "NGC_ARRAY_SIZE", "NGC_MASTER_ADDR"),
)
# What counts processes comes first: variables that count nodes are inherited by every process of a node.
SOURCES = (
    Source("R13.1", "TORCHELASTIC_RUN_ID", _torchelastic, "GROUP_RANK GROUP_WORLD_SIZE"),
    Source("R13.2", "RANK", _ranks, "WORLD_SIZE MASTER_ADDR LOCAL_RANK LOCAL_WORLD_SIZE"),
    Source("R13.10", "OMPI_COMM_WORLD_SIZE", _scheduler("open_mpi"), "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK"
           " OMPI_COMM_WORLD_LOCAL_SIZE OMPI_MCA_orte_hnp_uri"),
    Source("R13.11", "PMI_SIZE", _scheduler("hydra"), "PMI_RANK MPI_LOCALRANKID MPI_LOCALNRANKS"),
    _ranked("R13.33", "Horovod", "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    _ranked("R13.34", "MVAPICH", "MV2_COMM_WORLD_"),
    Source("R13.12", "SLURM_STEP_ID SLURM_PROCID", _scheduler("slurm"), "SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES"
           " SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST SLURM_LOCALID SLURM_NODEID SLURM_JOB_ID"),
    Source("R13.13", "NODE_RANK", _nodes, "NNODES MASTER_ADDR"),
    Source("R13.25", "JAX_PROCESS_ID", _jax, "JAX_NUM_PROCESSES JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_PORT"),
    Source("R13.3", "PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_RDZV_ENDPOINT", _pet,
           "PET_MASTER_PORT PET_RDZV_BACKEND"),
    Source("R13.4", "CLUSTER_SPEC", _cluster_spec),
    Source("R13.5", "TF_CONFIG", _tf_config),
    Source("R13.6", "TPU_WORKER_ID MEGASCALE_NUM_SLICES JOB_COMPLETION_INDEX", _indexed_job,
           "NNODES MEGASCALE_SLICE_ID MEGASCALE_COORDINATOR_ADDRESS JOBSET_NAME REPLICATED_JOB_NAME"),
    Source("R13.14", "LWS_GROUP_SIZE", _scheduler("leader_worker_set"), "LWS_WORKER_INDEX LWS_LEADER_ADDRESS"),
    Source("R13.15", "VC_TASK_INDEX VK_TASK_INDEX", _scheduler("volcano"), "HOSTNAME"),
    Source("R13.16", "SM_HOSTS TRAINING_JOB_NAME", _scheduler("sagemaker"),
           "SM_CURRENT_HOST SM_CURRENT_INSTANCE_GROUP_HOSTS"),
    *PLATFORMS,
)
# fmt: on

# The variables of these sources, for `--explain`.
_NAMES = [name for source in SOURCES for name in source.signals + source.variables if name != "HOSTNAME"]
SIGNALS = tuple(dict.fromkeys(["MASTER_ADDR", "MASTER_PORT", *_NAMES]))


def resolve(
    env: Mapping[str, str], settings: Settings, found: Slice | None = None, starts_processes: bool = False
) -> Cluster:
    """The coordinates from the first source that has any (R13).

    Args:
        env: the environment.
        settings: LAUNCHER_MASTER_ADDR and LAUNCHER_MASTER_PORT replace the source's address: node 0 needs a port that
            is free, and the 2222 of a CLUSTER_SPEC is the port of a Kubernetes service.
        found: the TPU slice of this host, if any.
        starts_processes: the command, such as torchrun, gets the coordinates as arguments.

    Raises:
        LaunchError: (2) if that source is invalid, or no source resolves a size over one (R13.18).
    """
    explicit = dict(env)
    if settings.master_addr:
        explicit["MASTER_ADDR"] = settings.master_addr
    if settings.master_port:
        explicit["MASTER_PORT"] = str(settings.master_port)
    if text(env, "JAX_COORDINATOR_ADDRESS") and not text(explicit, "MASTER_ADDR"):
        host, port = coordinator(env)
        explicit["MASTER_ADDR"] = host
        if port and not text(explicit, "MASTER_PORT"):
            explicit["MASTER_PORT"] = str(port)
    for source in SOURCES:
        if any(text(env, name) for name in source.signals) or (found and source.read is _indexed_job):
            cluster = source.read(explicit, found)
            if cluster:
                break
    else:
        cluster = Cluster("single node")
    if cluster.source == "single node":
        _refuse_unknown(explicit)
        if not starts_processes:
            _refuse_alone(env)
    if not cluster.given and not (found and cluster.source == found.source):
        _use_master_variables(cluster, explicit)
    if settings.master_addr:
        cluster.master_addr = address.split("LAUNCHER_MASTER_ADDR", settings.master_addr)[0]
    cluster.master_port = settings.master_port or cluster.master_port
    _warn_of_other_ranks(cluster, env)
    return cluster


def _use_master_variables(cluster: Cluster, env: Mapping[str, str]) -> None:
    """MASTER_ADDR and MASTER_PORT that are set replace the source's; a single node needs neither (R13.19)."""
    alone = cluster.nnodes == 1 and not cluster.task and cluster.node_rank is not None
    if text(env, "MASTER_ADDR"):
        cluster.master_addr = address.split("MASTER_ADDR", text(env, "MASTER_ADDR"))[0]
    elif alone:
        cluster.master_addr = LOCAL_ADDR
    cluster.master_port = master_port(env) or (0 if alone else cluster.master_port)


# Rank -> size. A rank over 0 without a source of coordinates is one of several processes (R13.18).
# PALS is mpiexec of HPE Cray, whose PMI_RANK and PMI_SIZE are refused below; JSM jsrun of LSF; BATCH Google Cloud's.
# fmt: off
RANKS = (
    ("RANK", "WORLD_SIZE"), ("NODE_RANK", "NNODES"), ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES"), ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), *((row.signals[0], row.variables[0]) for row in PLATFORMS),
    ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT"), ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PALS_RANKID", ""), ("PMIX_RANK", ""),
)
# fmt: on
ADDRESSES = dict.fromkeys(("RANK", "NODE_RANK"), "set MASTER_ADDR")
ADDRESSES["JAX_PROCESS_ID"] = "set JAX_COORDINATOR_ADDRESS to HOST:PORT of process 0"
RESOLVE = "set RANK, WORLD_SIZE and MASTER_ADDR, or NODE_RANK, NNODES and MASTER_ADDR"
ALONE = "NODE_RANK=0 and NNODES=1 if it trains alone"


def _refuse_unknown(env: Mapping[str, str]) -> None:
    """Refuse ranks whose node 0 no source knows (R13.18). A size without a rank may belong to something else."""
    for rank, size in RANKS:
        number = _number(env, rank, 0)
        if number > 0 and not (size and _number(env, size, 0) > number):
            known = f"{size} is {text(env, size)[:20] or 'unset'}" if size else "the number of processes is unknown"
            raise config_error(f"{rank} is {number}, so this is one of several processes, but {known}: {RESOLVE}")
        if size and text(env, rank) and _number(env, size, 1) > 1:
            raise config_error(
                f"{rank}={text(env, rank)[:20]} and {size}={text(env, size)[:20]} are set, but the address of node 0 "
                f"is unknown: {ADDRESSES.get(rank, f'{RESOLVE}; {ALONE}')}"
            )
    ranks = max(_number(env, "PMI_ID", 0), _number(env, "PMI_RANK", 0), _number(env, "MPI_LOCALNRANKS", 1) - 1)
    if ranks > 0 and not text(env, "PMI_SIZE"):
        raise config_error(
            "mpiexec started this process as one of several ranks, but PMI_SIZE is unset: leave out -pmi-port, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR"
        )
    if text(env, "PMI_RANK") and _number(env, "PMI_SIZE", 1) > 1:
        raise config_error(
            f"PMI_SIZE is {_number(env, 'PMI_SIZE', 1)}, but the rank on this node is unknown: set RANK, WORLD_SIZE, "
            "LOCAL_RANK and MASTER_ADDR"
        )
    if text(env, "DET_TASK_ID"):
        from launcher import schedulers

        schedulers.refuse_determined(env)


def _refuse_alone(env: Mapping[str, str]) -> None:
    """Refuse a node with a WORLD_SIZE over 1, or another host in MASTER_ADDR, that no source numbers (R13.18).

    A size of 1 of any source says that the node is alone. In a batch script of Slurm they are for the steps.
    """
    several = _number(env, "WORLD_SIZE", 1) > 1
    of_tasks = ("MEGASCALE_NUM_SLICES", "BATCH_TASK_COUNT", "CLOUD_RUN_TASK_COUNT")  # which have processes of their own
    sizes = [size for _, size in RANKS if not (several and size in of_tasks)]
    if text(env, "SLURM_JOB_ID") or any(_number(env, size, 0) == 1 for size in sizes):
        return
    what, head = f"WORLD_SIZE is {text(env, 'WORLD_SIZE')[:20]}", text(env, "MASTER_ADDR")
    if not several and (text(env, "WORLD_SIZE") or "0").isdigit():
        ranked = bool(text(env, "NODE_RANK") or text(env, "RANK"))
        if not head or not _is_elsewhere(address.split("MASTER_ADDR", head)[0], ranked):
            return
        what = f"MASTER_ADDR is {head[:60]}"
    raise config_error(
        f"{what}, but nothing says which node of how many this is: set NODE_RANK, NNODES and MASTER_ADDR; {ALONE}"
    )


def _is_elsewhere(host: str, ranked: bool) -> bool:
    """Return whether an address names another host; if this node has a rank, any that other hosts could reach."""
    if host == "localhost" or host.startswith("127.") or host in ("::1", "0.0.0.0", "::"):
        return False
    if ranked or host.partition(".")[0] == os.uname().nodename.partition(".")[0]:
        return ranked
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # names are not looked up
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this host can be bound
        return False
    except OSError:
        return True


def _warn_of_other_ranks(cluster: Cluster, env: Mapping[str, str]) -> None:
    """Warn if variables that are kept (R10.2) contradict the ranks of the scheduler."""
    task = cluster.task
    if cluster.source == "MASTER_ADDR" or not (task or cluster.source == "Slurm"):
        return
    ranks = [("RANK", task.rank if task else cluster.node_rank)]
    if not task or task.nodes_known:
        ranks.append(("NODE_RANK", cluster.node_rank))
    ranks.append(("JAX_PROCESS_ID", task.rank if task else cluster.node_rank))
    for name, ours in ranks:
        if text(env, name) and text(env, name) != str(ours):
            cluster.warnings.append(
                f"{name}={text(env, name)[:20]} is set and kept, but {cluster.source} says {ours}: unset it, or set it "
                "in each task"
            )


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


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """A count or rank from a variable of another program; other words ("auto", "gpu") count as unset."""
    word = text(env, name)
    return int(word) if word.isascii() and word.isdigit() and len(word) < 8 else default


def _upper(env: Mapping[str, str], name: str) -> int:
    """The number of nodes in "4", or the larger one in torchrun's elastic range "2:4"; 0 if unset.

    Raises:
        LaunchError: (2) for anything else.
    """
    if not text(env, name):
        return 0
    low, colon, high = text(env, name).partition(":")
    least = integer(name, low, 1, MAX_NODES) if colon else 1
    return integer(name, high if colon else low, least, MAX_NODES)
