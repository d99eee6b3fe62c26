"""Read the rows of `sources`: nodes and processes that a platform has numbered, and what is no plain variable.

Each function takes the row, the environment and the TPU slice of this host, and returns the coordinates, or None if
these variables give none. Imported only if a variable of a row is set.
"""

from __future__ import annotations

import os

from launcher import address
from launcher.coordinates import DEFAULT_PORT, LOCAL_ADDR, MAX_NODES, Cluster, Task, job_port, master_port, number
from launcher.errors import LaunchError, config_error
from launcher.host import Host, regular
from launcher.settings import integer, text
from launcher.sources import SOURCES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.sources import Source
    from launcher.tpu_vm import Slice

    Env = Mapping[str, str]

JAX_PORT = 8482  # JAX's coordinator port on a TPU slice (R13.6)
# SLURM_MAX_NORMAL_STEP_ID of slurm.h: steps that Slurm numbers itself, such as the shell of `salloc`, are above it.
MAX_STEP = 0xFFFFFFF0
MAX_FILE = 1 << 20
HYDRA_PROXIES = ("hydra_pmi_proxy", "hydra_bstrap", "pmi_proxy")  # of MPICH, Intel MPI and older MPICH
MAX_ANCESTORS = 32
DETERMINED_FILE = "/run/determined/info/rendezvous.json"  # of Determined's `RendezvousInfo` (R13.18)


def nodes(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Return nodes that a platform or the user has numbered; None for the only node of a platform.

    The main node of AWS Batch need not be the first one. It becomes node 0, and the nodes after it are numbered on,
    because the node whose address is known has to be node 0.
    """
    if not text(env, row.size):
        return None  # refused by R13.18 if the rank is over 0
    size = _count(env, row.size)
    if size == 1 and not row.own:
        return None
    rank = _rank(env, row.rank, size, row.size if row.rank == "NODE_RANK" else "")
    outside = _outside(env) if row.name == "NODE_RANK" else None
    if outside:
        return outside
    if row.main and text(env, row.main):
        rank = (rank - _rank(env, row.main, size)) % size
    head = globals()[row.head](env) if row.head else text(env, row.address)
    words = (head or text(env, "MASTER_ADDR")).split()
    if not words and row.own and size > 1:
        return None  # another source may know the address; if none does: R13.18
    if not words and (row.own or (row.main and rank == 0)):
        words = [LOCAL_ADDR]  # the other nodes know the address of this one
    if not words:
        raise config_error(
            f"{row.size} is {size}, but {row.address} is unset: the address of node 0 is unknown; pass "
            f"{row.address} on, or set MASTER_ADDR"
        )
    found = _at(row.name, rank, size, row.address, words[0], env)
    found.recounted = not row.own and not text(env, "RANK")  # WORLD_SIZE of RunPod counts GPUs
    return found


def lepton(env: Env) -> str:
    """Return the name of worker 0 of DGX Cloud Lepton, as in NVIDIA's scripts (R13.29); "" if it is unknown."""
    job = text(env, "LEPTON_JOB_NAME")
    prefix, domain = text(env, "LEPTON_JOB_SERVICE_PREFIX") or job, text(env, "LEPTON_SUBDOMAIN") or f"{job}-job-svc"
    return f"{prefix}-0.{domain}" if prefix else ""


def processes(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Return ranks of MPI, Horovod and others, which know no nodes: equal numbers on each node are assumed."""
    if not text(env, row.size) or _count(env, row.size) == 1:
        return None
    size = _count(env, row.size)
    if row.head == "hydra" and not (text(env, row.local_rank) and text(env, row.local_size)):
        return None  # srun --mpi=pmi2, whose tasks R13.12 describes, sets PMI_RANK and PMI_SIZE, too
    rank, local = _rank(env, row.rank, size), _count(env, row.local_size)
    task = Task(rank, size, _rank(env, row.local_rank, local), local, local >= size)
    host, job = globals()[row.head](env, task) if row.head else (text(env, row.address), None)
    if local < size and not (host or text(env, "MASTER_ADDR")):
        starter, how = row.name, "MASTER_ADDR for all"
        if row.remedy:
            starter, how = row.remedy.split()[0], f"it with {row.remedy}"
        raise config_error(f"{starter} started {size} ranks, but the address of rank 0 is unknown: set {how}")
    local = min(local, size)
    host = LOCAL_ADDR if local == size else host or LOCAL_ADDR
    port = DEFAULT_PORT if job is None else job_port(job)
    return Cluster(row.name, rank // local, -(-size // local), host, port, task=task)


def open_mpi(env: Env, task: Task) -> tuple[str, int]:
    """Return the address of mpirun, which Open MPI 5 does not set, and the number of its job (R13.10)."""
    first = text(env, "OMPI_MCA_orte_hnp_uri")
    host = _first_address(first)
    away = _first_address(text(env, "OMPI_MCA_orte_local_daemon_uri")) not in ("", host)
    if host and away and task.rank == 0 and not task.nodes_known and not text(env, "MASTER_ADDR"):
        # The other ranks cannot see this; mpirun ends all of them when this one fails.
        raise config_error(
            "rank 0 does not run on the host of mpirun, so the other ranks do not know its address: set it with "
            "mpirun -x MASTER_ADDR=HOST"
        )
    job = first.partition(".")[0] or text(env, "PMIX_NAMESPACE")
    # A job id of Open MPI is the family of the job times 65536, of 32 bits; PMIx names are text.
    return host, int(job[:10]) >> 16 if job.isascii() and job.isdigit() else int.from_bytes(os.fsencode(job), "big")


def _first_address(uri: str) -> str:
    """Return the first address in "8.0;tcp://192.0.2.2,172.17.0.1:38957;tcp6://[fd00::2]:55361"; "" without one."""
    for part in uri.split(";")[1:]:
        scheme, _, rest = part.partition("://")
        words = rest[1:].partition("]")[0] if rest.startswith("[") else rest.rpartition(":")[0]
        for word in words.split(",") if scheme in ("tcp", "tcp6") else ():
            if address.is_address(word):
                return word
    return ""


def hydra(env: Env, task: Task) -> tuple[str, int | None]:
    """Return no address, which Hydra does not tell, and a number of the job: its proxy's, or Slurm's (R13.11)."""
    job = number(env, "SLURM_JOB_ID", digits=10)
    return "", _hydra_proxy(_sysroot(env)) if task.nodes_known else 32 * job if job else None


def _hydra_proxy(sysroot: str) -> int | None:
    """Return the process id of Hydra's proxy, the parent of all ranks of a node (R13.19); None if it is unknown.

    A rank may be a shell that started the launcher. In a container with its own process IDs the proxy is not visible.
    """
    pid, host = os.getppid(), Host(sysroot)
    for _ in range(MAX_ANCESTORS):
        # "9825 (hydra_pmi_proxy) S 9823 ...": the name may contain blanks and parentheses (proc(5)).
        name, _, rest = host.read(f"/proc/{pid}/stat").rpartition(")")
        if name.partition("(")[2].startswith(HYDRA_PROXIES):
            return pid
        parent = "".join(rest.split()[1:2])
        if not (parent.isascii() and parent.isdigit()):
            return None
        pid = int(parent)
    return None


def torchelastic(row: Source, env: Env, _: Slice | None) -> Cluster:
    """Return None: processes started by torchrun have their coordinates (R13.1)."""
    rank, size = number(env, "GROUP_RANK"), max(1, number(env, "GROUP_WORLD_SIZE", 1))
    if rank >= size:
        raise config_error(f"GROUP_RANK is {rank}, but GROUP_WORLD_SIZE is {size}: torchrun sets both")
    port = address.port_number(text(env, "MASTER_PORT")) or DEFAULT_PORT
    found = Cluster(row.name, rank, size, text(env, "MASTER_ADDR") or LOCAL_ADDR, port)
    found.given = True
    return found


def ranks(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Read MASTER_ADDR, RANK and WORLD_SIZE, which count nodes on Vertex AI and Kubeflow, processes elsewhere (R13.2).

    With LOCAL_RANK this process is one of several that another launcher has started.
    """
    if not all(text(env, name) for name in (row.address, row.rank, row.size)):
        return None
    world = _count(env, row.size)
    rank = _rank(env, row.rank, world, row.size)
    described = _described(env)
    if described and described.node_rank is None:
        return described
    if described and world == sum(len(hosts) for hosts in described.hosts.values()) > described.nnodes:
        described.recounted = True
        described.warnings.append(
            f"RANK={rank} and WORLD_SIZE={world} count replicas outside the training world of {described.source}: "
            f"replaced by {described.node_rank} and {described.nnodes}"
        )
        return described
    local = max(1, number(env, row.local_size, 1))
    per_node = local if local > 1 else max(1, number(env, "PET_NPROC_PER_NODE", 1))
    count = _upper(env, "PET_NNODES") or _upper(env, "NNODES") or -(-world // per_node)
    node = number(env, "PET_NODE_RANK", number(env, "NODE_RANK", rank // local))
    if node >= count:
        raise config_error(f"this is node {node}, but there are {count} nodes: check RANK, NODE_RANK and NNODES")
    found = _at(row.name, node, count, row.address, text(env, row.address), env)
    if text(env, row.local_rank):
        known = bool(number(env, row.local_size)) or bool(text(env, "NODE_RANK") and text(env, "NNODES"))
        found.task = Task(rank, world, number(env, row.local_rank), number(env, row.local_size), known)
        found.role = "worker" if rank else "master"
    if described:
        found.hosts, found.task_index, found.trial = described.hosts, described.task_index, described.trial
    return found


def pet(row: Source, env: Env, _: Slice | None) -> Cluster:
    """Read PET_*: torchrun's own variables, set by Kubeflow (R13.3)."""
    described = _outside(env)
    if described:
        return described
    size = _upper(env, "PET_NNODES") or 1
    rank = _rank(env, "PET_NODE_RANK", size, "PET_NNODES") if text(env, "PET_NODE_RANK") else 0
    head = text(env, "PET_MASTER_ADDR") or text(env, "PET_RDZV_ENDPOINT") or text(env, "MASTER_ADDR")
    if size > 1 and not head:
        raise config_error(
            f"PET_NNODES is {text(env, 'PET_NNODES')[:40]}, but the address of node 0 is unknown: set PET_MASTER_ADDR "
            "or PET_RDZV_ENDPOINT"
        )
    static = text(env, "PET_RDZV_BACKEND") in ("", "static") and ":" not in text(env, "PET_NNODES")
    if size > 1 and static and not text(env, "PET_NODE_RANK"):
        raise config_error(
            f"PET_NNODES is {size}, but the rank of this node is unknown: set PET_NODE_RANK, or PET_RDZV_BACKEND=c10d"
        )
    host, port = address.split("PET_MASTER_ADDR", head or LOCAL_ADDR)
    port = master_port(env, "PET_MASTER_PORT") or port or master_port(env) or (DEFAULT_PORT if size > 1 else 0)
    return Cluster(row.name, rank, size, host, port)


# Vertex AI's worker pools (R13.4): the third has parameter or reduction servers, the fourth evaluators.
POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
# TensorFlow's task types -> roles
ROLES = {"chief": "master", "master": "master", "worker": "worker", "ps": "server", "evaluator": "evaluator"}


def tasks(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Read Vertex AI's CLUSTER_SPEC (R13.4), but its member `job`, which has no fixed type, and TF_CONFIG (R13.5).

    chief or master is node 0, followed by the workers; other tasks have no rank.
    """
    name, on_vertex = row.name, row.name == "CLUSTER_SPEC"
    spec = _json(name, text(env, name)) if text(env, name) else {}
    if not isinstance(spec, dict):
        raise config_error(f"{name} is not a JSON object")
    hosts = _hosts(name, spec.get("cluster")) if spec else {}
    if spec and on_vertex and not hosts:
        raise config_error(
            'CLUSTER_SPEC has no cluster: it must be {"cluster": {"workerpool0": [...]}, "task": ...}, or empty'
        )
    if on_vertex and hosts and not hosts.get("chief"):
        raise config_error("CLUSTER_SPEC has no workerpool0")
    if not any(hosts.values()):
        return None
    first = hosts.get("chief") or hosts.get("master") or []
    world = first + hosts.get("worker", [])
    if not world:
        raise config_error(f"{name} has no chief, no master and no worker")
    task = spec.get("task")
    if task is None and len(world) == 1 == sum(len(addresses) for addresses in hosts.values()):
        task = {"type": next(word for word in (POOLS if on_vertex else ROLES) if hosts.get(_type(name, word)))}
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise config_error(f"{name} has no task with a type and an index: the rank of this node is unknown")
    kind, index = _type(name, task["type"]), task.get("index", 0)
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 7:
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise config_error(f"{name}: task.index must be a whole number from 0")
    members = hosts.get(kind, [])
    if index >= len(members) and not (kind == "evaluator" and not members):
        raise config_error(f"{name}: task is {task['type']} {index}, but the cluster lists {len(members)} of them")
    rank = {"chief": index, "master": index, "worker": index + len(first)}.get(kind)
    host, port = address.split(name, world[0])
    found = Cluster(name, rank, len(world), host, port or DEFAULT_PORT, ROLES[kind] if rank is None else "")
    found.hosts, found.task_index, trial = hosts, index, task.get("trial")
    found.trial = trial if isinstance(trial, str) else ""
    return found


def _hosts(name: str, cluster: object) -> dict[str, list[str]]:
    """Return the member `cluster`: TensorFlow's task type -> addresses; {} if missing."""
    if not isinstance(cluster, (dict, type(None))):
        raise config_error(f"{name}: cluster must be an object of lists")
    for key, addresses in (cluster or {}).items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise config_error(f"{name}: cluster.{key[:40]} must be a list of host:port")
    return {_type(name, key): addresses for key, addresses in (cluster or {}).items()}


def _type(name: str, word: str) -> str:
    known = POOLS if name == "CLUSTER_SPEC" else ROLES
    if word not in known:
        raise config_error(f"{name}: Invalid task type: {word[:60]}. It must be one of {', '.join(known)}")
    return POOLS.get(word, word)


def _described(env: Env) -> Cluster | None:
    """Return what CLUSTER_SPEC or TF_CONFIG say beside RANK or NODE_RANK; None if unset or invalid (R13.17)."""
    try:
        return next(filter(None, (tasks(row, env, None) for row in SOURCES if row.read == "tasks")), None)
    except LaunchError:
        return None


def _outside(env: Env) -> Cluster | None:
    """Return the same, of a node outside the training world."""
    described = _described(env)
    return described if described and described.node_rank is None else None


def indexed_job(row: Source, env: Env, found: Slice | None) -> Cluster | None:
    """Return the hosts of a TPU slice, or the pods of a JobSet or an indexed Job (R13.6).

    Nodes of several slices are numbered slice by slice, as JAX does. A TPU VM has the variables of several slices in
    the metadata server.
    """
    if found and found.megascale:
        env = {**found.megascale, **{name: value for name, value in env.items() if value.strip()}}
    given = text(env, "MEGASCALE_NUM_SLICES")
    slices = integer("MEGASCALE_NUM_SLICES", given or "1", 1, 4096)
    own = text(env, "MEGASCALE_SLICE_ID") or ("0" if slices == 1 else "")
    slice_number = integer("MEGASCALE_SLICE_ID", own, 0, slices - 1) if given else 0
    index = text(env, row.name)
    rank = integer(row.name, index, 0, MAX_NODES) if index else None
    if found:
        # A slice of one host is not a cluster; several pods with an index are then independent of each other.
        if found.hosts * slices == 1:
            return None
        source, per_slice, port = found.source, found.hosts, JAX_PORT
        rank = rank if found.worker_id is None else found.worker_id
    else:
        count = _upper(env, "NNODES")
        if count % slices:
            raise config_error(f"NNODES is {count}, which is not a multiple of MEGASCALE_NUM_SLICES, {slices}")
        source, per_slice, port = row.name, count // slices, DEFAULT_PORT
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
    head = text(env, "MEGASCALE_COORDINATOR_ADDRESS") or text(env, "MASTER_ADDR")
    jobset, job = text(env, "JOBSET_NAME"), text(env, "REPLICATED_JOB_NAME")
    if not head and jobset and job:
        head = f"{jobset}-{job}-0-0.{jobset}"  # the name that JobSet gives the first pod
    head = head or (found.workers[0] if found and found.workers else "")
    if not head and not found and per_slice * slices > 1:
        raise config_error(
            "JOB_COMPLETION_INDEX is set, but the address of pod 0 is unknown: set MASTER_ADDR, or JOBSET_NAME and "
            "REPLICATED_JOB_NAME"
        )
    host, _ = address.split("MEGASCALE_COORDINATOR_ADDRESS or MASTER_ADDR", head or LOCAL_ADDR)
    return Cluster(source, slice_number * per_slice + rank, per_slice * slices, host, master_port(env) or port)


def slurm(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Return a task of a Slurm step (R13.12).

    The variables of a job are not enough: the script of sbatch has SLURM_PROCID=0 and SLURM_NTASKS=4 too, and is not
    one of four. Only srun sets SLURM_STEP_ID, and only tasks have a SLURM_PROCID over 0.
    """
    step, rank_word = number(env, "SLURM_STEP_ID", MAX_STEP + 1, digits=10), text(env, "SLURM_PROCID")
    if step > MAX_STEP and rank_word in ("", "0"):
        return None
    name = "SLURM_STEP_NUM_TASKS" if text(env, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not text(env, name) and rank_word not in ("", "0"):
        raise config_error(f"SLURM_PROCID is {rank_word[:20]}, but the number of tasks is unknown: pass {name} on")
    size = _count(env, name) if text(env, name) else 1
    if size == 1:
        return None
    rank = _rank(env, "SLURM_PROCID", size)
    per_node = _per_node(text(env, "SLURM_STEP_TASKS_PER_NODE") or text(env, "SLURM_TASKS_PER_NODE"))
    if sum(per_node) != size:
        per_node = []
    count = len(per_node) or number(env, "SLURM_STEP_NUM_NODES") or number(env, "SLURM_NNODES")
    node = integer("SLURM_NODEID", text(env, "SLURM_NODEID") or "0", 0, MAX_NODES)
    host = LOCAL_ADDR
    if count != 1 and not text(env, "MASTER_ADDR"):
        host = first_node(text(env, "SLURM_STEP_NODELIST") or text(env, "SLURM_JOB_NODELIST"))
        if not host:
            raise config_error(
                f"this is task {rank} of {size} of a Slurm step, but the address of task 0 is unknown: pass "
                "SLURM_STEP_NODELIST on, or set MASTER_ADDR"
            )
        if rank == 0 and node:
            raise config_error(
                f"task 0 of the Slurm step runs on node {node} of {text(env, 'SLURM_STEP_NODELIST')[:80]}, so the "
                "other tasks do not know its address: set MASTER_ADDR, or leave out --distribution=arbitrary"
            )
    # A job has at most a few steps at a time; consecutive jobs are 32 ports apart.
    port = job_port(32 * number(env, "SLURM_JOB_ID", digits=10) + min(step, 31))
    if count == size:
        return Cluster(row.name, rank, size, host, port)
    known = count > node and (count == 1 or bool(text(env, "SLURM_NODEID")))
    local_size = per_node[node] if known and node < len(per_node) else 0
    local = _rank(env, "SLURM_LOCALID", local_size or size)  # without it every task of the node would use the same GPU
    return Cluster(row.name, node, max(count, node + 1), host, port, task=Task(rank, size, local, local_size, known))


def first_node(nodes: str) -> str:
    """Return the first name in Slurm's "node[01-03,07],other", "rack[0-1]node[1-4]" or "a,b"; "" if there is none."""
    found, rest = "", nodes
    while rest:
        literal, bracket, after = rest.partition("[")
        name, comma, _ = literal.partition(",")
        if comma or not bracket:
            found += name
            break
        ranges, closed, rest = after.partition("]")
        first = ranges.partition(",")[0].partition("-")[0]
        if not (closed and first.isascii() and first.isdigit()):
            return ""
        found += literal + first
    return found if address.is_address(found) else ""


def _per_node(word: str) -> list[int]:
    """Return the tasks of each node in Slurm's "3,1" or "4(x2),3"; [] if it cannot be read."""
    found: list[int] = []
    for part in word.split(","):
        count, times, repeats = part.partition("(x")
        repeats = repeats[:-1] if repeats.endswith(")") else "" if times else "1"
        if not all(digits.isascii() and digits.isdigit() and len(digits) < 7 for digits in (count, repeats)):
            return []
        if len(found) + int(repeats) > MAX_NODES:
            return []
        found += [int(count)] * int(repeats)
    return found


# Names of Volcano's tasks that form a training world together, in the order of their ranks, and of those outside it,
# with their roles (R13.15).
VOLCANO_WORLD: tuple[str, ...] = ("MASTER", "CHIEF", "WORKER")
VOLCANO_OUTSIDE = {"PS": "server", "EVALUATOR": "evaluator"}


def volcano(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Return a pod of a Volcano job with the plugins `env` and `svc` (R13.15)."""
    name = next(signal for signal in row.signals if text(env, signal))
    index = integer(name, text(env, name), 0, MAX_NODES)
    hosts = {
        variable[3:-6]: [word.strip() for word in text(env, variable).split(",") if word.strip()]
        for variable in sorted(env)
        if variable.startswith("VC_") and variable.endswith("_HOSTS") and text(env, variable)
    }
    sizes = sorted(word for word in env if word.startswith("VC_") and word.endswith("_NUM") and number(env, word) > 1)
    if sizes and not hosts:
        raise config_error(
            f"{sizes[0]} is {text(env, sizes[0])[:20]}, but no VC_*_HOSTS is set: the addresses of the pods are "
            "unknown; enable Volcano's plugin svc"
        )
    if not hosts:
        return None  # without the plugin svc the pods are independent of each other
    here = (text(env, "HOSTNAME") or os.uname().nodename).partition(".")[0]
    listed = (task for task in hosts if [name.partition(".")[0] for name in hosts[task][index : index + 1]] == [here])
    own = next(iter(hosts)) if len(hosts) == 1 else next(listed, "")
    world = [task for task in VOLCANO_WORLD if task in hosts] or (list(hosts) if len(hosts) == 1 else [])
    role = VOLCANO_OUTSIDE.get(own, "")
    if not own or (own not in world and not role) or not world:
        if sum(len(names) for names in hosts.values()) == 1:
            return None
        single = Cluster("single node")
        single.warnings.append(
            f"Volcano's tasks are {', '.join(hosts)[:80]}, which do not say which pods train together: assuming a "
            "single node; name them master and worker, or set RANK, WORLD_SIZE and MASTER_ADDR"
        )
        return single
    pods = [host for task in world for host in hosts[task]]
    rank = None if role else sum(len(hosts[task]) for task in world[: world.index(own)]) + index
    if rank is not None and rank >= len(pods):
        raise config_error(f"{name} is {index}, but VC_{own}_HOSTS lists {len(hosts[own])} pods")
    return _at(row.name, rank, len(pods), "VC_*_HOSTS", pods[0], env, role)


def sagemaker(row: Source, env: Env, _: Slice | None) -> Cluster | None:
    """Return a container of a SageMaker training job (R13.16).

    SM_HOSTS and SM_CURRENT_HOST are set by SageMaker's own toolkit. Without it there is a file with the same content.
    The hosts of a heterogeneous cluster that train together are those of one instance group.
    """
    from launcher.sagemaker import CONFIG, read

    if text(env, "SM_HOSTS"):
        name: str = "SM_HOSTS"
        current: object = text(env, "SM_CURRENT_HOST")
        group = _json(name, text(env, "SM_CURRENT_INSTANCE_GROUP_HOSTS") or "[]")  # "[]" if the job has no groups
        hosts = group or _json(name, text(env, "SM_HOSTS"))
    else:
        name, found = f"{CONFIG}/resourceconfig.json", read(_sysroot(env), "resourceconfig.json", OSError)
        if not found:
            return None
        current, groups = found.get("current_host"), found.get("instance_groups")
        groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
        own = (group for group in groups if group.get("instance_group_name") == found.get("current_group_name"))
        hosts = next(own, {}).get("hosts") or found.get("hosts")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise config_error(f"{name} must have a list of the names of the hosts")
    if len(hosts) < 2:
        return None
    hosts.sort()
    if current not in hosts:
        raise config_error(
            f"the current host {str(current)[:60]!r} is not in {name} ({', '.join(hosts)[:80]}): the rank of this host "
            "is unknown"
        )
    return _at(row.name, hosts.index(current), len(hosts), name, hosts[0], env)


def refuse_determined(env: Env) -> None:
    """Refuse a container of Determined that is one of several, whose launch layer has not set coordinates (R13.18).

    Raises:
        LaunchError: (2) if the file with the addresses of the containers lists more than one.
    """
    try:
        with open(_sysroot(env) + DETERMINED_FILE, "rb", opener=regular) as file:
            rendezvous = _json(DETERMINED_FILE, file.read(MAX_FILE).decode("utf-8"))
    except (OSError, ValueError, LaunchError):
        return
    containers = rendezvous.get("container_addrs") if isinstance(rendezvous, dict) else None
    if isinstance(containers, list) and len(containers) > 1:
        raise config_error(
            f"this is one of {len(containers)} containers of Determined ({DETERMINED_FILE}), and none of its launch "
            "layers has set coordinates: start the launcher below one, such as determined.launch.torch_distributed, "
            "or set NODE_RANK, NNODES and MASTER_ADDR"
        )


def _at(source: str, rank: int | None, size: int, name: str, head: str, env: Env, role: str = "") -> Cluster:
    """Return coordinates with the address of node 0 that a variable has, and its port unless MASTER_PORT is set."""
    host, port = address.split(name, head)
    return Cluster(source, rank, size, host, master_port(env) or port or DEFAULT_PORT, role)


def _json(name: str, value: str) -> object:
    import json

    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise config_error(f"{name} is not JSON (at character {getattr(error, 'pos', 0)})") from None


def _sysroot(env: Env) -> str:
    return text(env, "LAUNCHER_SYSROOT").rstrip("/")


def _count(env: Env, name: str) -> int:
    return integer(name, text(env, name), 1, MAX_NODES)


def _rank(env: Env, name: str, size: int, of: str = "") -> int:
    """Return a rank below a size, which is that in a variable if `of` names one. Raises LaunchError (2)."""
    rank = integer(name, text(env, name), 0, MAX_NODES if of else size - 1)
    if rank >= size:
        raise config_error(f"{name} is {rank}, but {of} is {size}: ranks go from 0 to {of} - 1")
    return rank


def _upper(env: Env, name: str) -> int:
    """Return the number of nodes in "4", or the larger one in torchrun's elastic range "2:4"; 0 if unset.

    Raises:
        LaunchError: (2) for anything else.
    """
    if not text(env, name):
        return 0
    low, colon, high = text(env, name).partition(":")
    least = integer(name, low, 1, MAX_NODES) if colon else 1
    return integer(name, high if colon else low, least, MAX_NODES)
