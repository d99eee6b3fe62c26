"""Coordinates from schedulers of processes, pods and machines (R13.10 to R13.16, R13.22 to R13.24, R13.28 to R13.34).

Imported only if their variables are set.
"""

from __future__ import annotations

import os

from launcher import address
from launcher.coordinates import DEFAULT_PORT, LOCAL_ADDR, MAX_NODES, Cluster, Task, job_port, master_port
from launcher.errors import config_error
from launcher.host import regular
from launcher.settings import integer, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

# SLURM_MAX_NORMAL_STEP_ID of slurm.h: steps that Slurm numbers itself, such as the shell of `salloc`, are above it.
MAX_STEP = 0xFFFFFFF0
MAX_FILE = 1 << 20
HYDRA_PROXIES = ("hydra_pmi_proxy", "hydra_bstrap", "pmi_proxy")  # of MPICH, Intel MPI and older MPICH
MAX_ANCESTORS = 32
SAGEMAKER_FILE = "/opt/ml/input/config/resourceconfig.json"
DETERMINED_FILE = "/run/determined/info/rendezvous.json"  # of Determined's `RendezvousInfo` (R13.18)


def open_mpi(env: Mapping[str, str]) -> Cluster | None:
    """Processes started by Open MPI's mpirun (R13.10). A rank is a process: the launcher starts no others."""
    size = _count(env, "OMPI_COMM_WORLD_SIZE")
    if size == 1:
        return None
    rank, local_size = _rank(env, "OMPI_COMM_WORLD_RANK", size), _count(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    task = Task(rank, size, _rank(env, "OMPI_COMM_WORLD_LOCAL_RANK", local_size), local_size)
    first = text(env, "OMPI_MCA_orte_hnp_uri")  # of mpirun itself; not set by Open MPI 5
    host = _first_address(first)
    if task.local_world_size < size and not text(env, "MASTER_ADDR"):
        if not host:
            raise config_error(
                f"mpirun started {size} ranks, but the address of rank 0 is unknown: set it with "
                "mpirun -x MASTER_ADDR=HOST"
            )
        if task.rank == 0 and _first_address(text(env, "OMPI_MCA_orte_local_daemon_uri")) not in ("", host):
            # The other ranks cannot see this; mpirun ends all of them when this one fails.
            raise config_error(
                "rank 0 does not run on the host of mpirun, so the other ranks do not know its address: set it with "
                "mpirun -x MASTER_ADDR=HOST"
            )
    job = first.partition(".")[0] or text(env, "PMIX_NAMESPACE")
    # A job id of Open MPI is the family of the job times 65536, of 32 bits; PMIx names are text.
    number = int(job[:10]) >> 16 if job.isascii() and job.isdigit() else int.from_bytes(os.fsencode(job), "big")
    return _processes(env, "Open MPI", task, host, number)


def hydra(env: Mapping[str, str]) -> Cluster | None:
    """Processes started by Hydra: mpiexec of MPICH and Intel MPI (R13.11). Hydra does not tell the address of rank 0.

    PMI_RANK alone is also set by `srun --mpi=pmi2`, whose tasks R13.12 describes.
    """
    size = _count(env, "PMI_SIZE")
    if size == 1 or not (text(env, "MPI_LOCALRANKID") and text(env, "MPI_LOCALNRANKS")):
        return None
    local_size = _count(env, "MPI_LOCALNRANKS")
    task = Task(_rank(env, "PMI_RANK", size), size, _rank(env, "MPI_LOCALRANKID", local_size), local_size)
    if task.local_world_size < size and not text(env, "MASTER_ADDR"):
        raise config_error(
            f"mpiexec started {size} ranks, but the address of rank 0 is unknown: set it with "
            "mpiexec -genv MASTER_ADDR HOST"
        )
    if task.local_world_size >= size:
        return _processes(env, "PMI", task, LOCAL_ADDR, _hydra_proxy(text(env, "LAUNCHER_SYSROOT").rstrip("/")))
    job = _known(env, "SLURM_JOB_ID")
    return _processes(env, "PMI", task, LOCAL_ADDR, 32 * job if job else None)


def _hydra_proxy(sysroot: str) -> int | None:
    """The process id of Hydra's proxy, the parent of all ranks of a job on this node (R13.19); None if it is unknown.

    A rank may be a shell that started the launcher. In a container with its own process IDs the proxy is not visible.
    """
    pid = os.getppid()
    for _ in range(MAX_ANCESTORS):
        try:
            with open(f"{sysroot}/proc/{pid}/stat", "rb", opener=regular) as file:
                # "9825 (hydra_pmi_proxy) S 9823 ...": the name may contain blanks and parentheses (proc(5)).
                name, _, rest = file.read(4096).decode("ascii", "replace").rpartition(")")
        except OSError:
            return None
        if name.partition("(")[2].startswith(HYDRA_PROXIES):
            return pid
        parent = rest.split()[1:2]
        pid = int(parent[0]) if parent and parent[0].isdigit() else 0
    return None


def _processes(env: Mapping[str, str], source: str, task: Task, host: str, job: int | None) -> Cluster:
    """The coordinates of a rank of MPI, which knows processes but not nodes: equal numbers on each node are assumed."""
    local = max(1, min(task.local_world_size, task.world_size))
    nodes = -(-task.world_size // local)
    task.nodes_known = nodes == 1
    if nodes == 1:
        host = LOCAL_ADDR
    port = DEFAULT_PORT if job is None else job_port(job)
    return Cluster(source, task.rank // local, nodes, host, port, task=task)


def _first_address(uri: str) -> str:
    """The first address in "88735744.0;tcp://192.0.2.2,172.17.0.1:38957;tcp6://[fd00::2]:55361"; "" without one."""
    for part in uri.split(";")[1:]:
        scheme, _, rest = part.partition("://")
        if scheme not in ("tcp", "tcp6"):
            continue
        words = rest[1:].partition("]")[0] if rest.startswith("[") else rest.rpartition(":")[0]
        for word in words.split(","):
            if address.is_address(word):
                return word
    return ""


def slurm(env: Mapping[str, str]) -> Cluster | None:
    """A task of a Slurm step (R13.12).

    The variables of a job are not enough: the script of sbatch has SLURM_PROCID=0 and SLURM_NTASKS=4 too, and is not
    one of four. Only srun sets SLURM_STEP_ID, and only tasks have a SLURM_PROCID over 0.
    """
    step, rank_word = text(env, "SLURM_STEP_ID"), text(env, "SLURM_PROCID")
    step_id = int(step) if step.isascii() and step.isdigit() and len(step) < 12 else MAX_STEP + 1
    if step_id > MAX_STEP and rank_word in ("", "0"):
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
    nodes = len(per_node) or _known(env, "SLURM_STEP_NUM_NODES") or _known(env, "SLURM_NNODES")
    node = integer("SLURM_NODEID", text(env, "SLURM_NODEID") or "0", 0, MAX_NODES)
    host = LOCAL_ADDR
    if nodes != 1 and not text(env, "MASTER_ADDR"):
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
    port = job_port(32 * _known(env, "SLURM_JOB_ID") + min(step_id, 31))
    if nodes == size:
        return Cluster("Slurm", rank, size, host, port)
    known = nodes > node and (nodes == 1 or bool(text(env, "SLURM_NODEID")))
    local_size = per_node[node] if known and node < len(per_node) else 0
    # Without it every task of the node would use the same GPU.
    local = integer("SLURM_LOCALID", text(env, "SLURM_LOCALID"), 0, (local_size or size) - 1)
    task = Task(rank, size, local, local_size, nodes_known=known)
    return Cluster("Slurm", node, max(nodes, node + 1), host, port, task=task)


def first_node(nodes: str) -> str:
    """The first name in Slurm's "node[01-03,07],other", "rack[0-1]node[1-4]" or "a,b"; "" if it cannot be read."""
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
    """Tasks of each node in Slurm's "3,1" or "4(x2),3"; [] if it cannot be read."""
    found: list[int] = []
    for part in word.split(","):
        count, times, repeats = part.partition("(x")
        repeats = repeats[:-1] if repeats.endswith(")") else "" if times else "1"
        if not all(number.isascii() and number.isdigit() and len(number) < 7 for number in (count, repeats)):
            return []
        if len(found) + int(repeats) > MAX_NODES:
            return []
        found += [int(count)] * int(repeats)
    return found


def leader_worker_set(env: Mapping[str, str]) -> Cluster | None:
    """A pod of a group of a LeaderWorkerSet (R13.14)."""
    size = _count(env, "LWS_GROUP_SIZE")
    if size == 1:
        return None
    rank = _rank(env, "LWS_WORKER_INDEX", size)
    head = text(env, "LWS_LEADER_ADDRESS") or text(env, "MASTER_ADDR")
    if not head:
        raise config_error(
            f"LWS_GROUP_SIZE is {size}, but LWS_LEADER_ADDRESS is unset: the address of the leader is unknown"
        )
    host, port = address.split("LWS_LEADER_ADDRESS", head)
    return Cluster("LeaderWorkerSet", rank, size, host, master_port(env) or port or DEFAULT_PORT)


# Names of Volcano's tasks that form a training world together, in the order of their ranks (R13.15).
VOLCANO_HEADS = ("MASTER", "CHIEF")
VOLCANO_OUTSIDE = {"PS": "server", "EVALUATOR": "evaluator"}


def volcano(env: Mapping[str, str]) -> Cluster | None:
    """A pod of a Volcano job with the plugins `env` and `svc` (R13.15)."""
    name = "VC_TASK_INDEX" if text(env, "VC_TASK_INDEX") else "VK_TASK_INDEX"
    index = integer(name, text(env, name), 0, MAX_NODES)
    tasks = {
        variable[3:-6]: [word.strip() for word in text(env, variable).split(",") if word.strip()]
        for variable in sorted(env)
        if variable.startswith("VC_") and variable.endswith("_HOSTS") and text(env, variable)
    }
    if not tasks:
        sizes = [word for word in env if word.startswith("VC_") and word.endswith("_NUM") and _known(env, word) > 1]
        if sizes:
            raise config_error(
                f"{sorted(sizes)[0]} is {text(env, sorted(sizes)[0])[:20]}, but no VC_*_HOSTS is set: the addresses of "
                "the pods are unknown; enable Volcano's plugin svc"
            )
        return None  # without the plugin svc the pods are independent of each other
    own = _volcano_task(env, tasks, index)
    heads = [task for task in VOLCANO_HEADS if task in tasks]
    members = [*heads, "WORKER"] if "WORKER" in tasks else heads or list(tasks) if len(tasks) == 1 else heads
    role = VOLCANO_OUTSIDE.get(own, "")
    if not own or (own not in members and not role) or not members:
        if sum(len(hosts) for hosts in tasks.values()) == 1:
            return None
        single = Cluster("single node")
        single.warnings.append(
            f"Volcano's tasks are {', '.join(tasks)[:80]}, which do not say which pods train together: assuming a "
            "single node; name them master and worker, or set RANK, WORLD_SIZE and MASTER_ADDR"
        )
        return single
    world = [host for task in members for host in tasks[task]]
    host, port = address.split("VC_*_HOSTS", world[0])
    rank = None if role else sum(len(tasks[task]) for task in members[: members.index(own)]) + index
    if rank is not None and rank >= len(world):
        raise config_error(f"{name} is {index}, but VC_{own}_HOSTS lists {len(tasks[own])} pods")
    return Cluster("Volcano", rank, len(world), host, master_port(env) or port or DEFAULT_PORT, role)


def _volcano_task(env: Mapping[str, str], tasks: Mapping[str, list[str]], index: int) -> str:
    """The task of this pod: the only one, or the one that lists this host at this index; "" if unknown."""
    if len(tasks) == 1:
        return next(iter(tasks))
    own = (text(env, "HOSTNAME") or os.uname().nodename).partition(".")[0]
    for task in tasks:
        if index < len(tasks[task]) and tasks[task][index].partition(".")[0] == own:
            return task
    return ""


def sagemaker(env: Mapping[str, str]) -> Cluster | None:
    """A container of a SageMaker training job (R13.16).

    SM_HOSTS and SM_CURRENT_HOST are set by SageMaker's own toolkit. Without it there is a file with the same content.
    The hosts of a heterogeneous cluster that train together are those of one instance group.
    """
    import json

    found: object
    try:
        if text(env, "SM_HOSTS"):
            group = text(env, "SM_CURRENT_INSTANCE_GROUP_HOSTS") or "[]"  # "[]" if the job has no groups
            hosts = json.loads(group) or json.loads(text(env, "SM_HOSTS"))
            found = {"hosts": hosts, "current_host": text(env, "SM_CURRENT_HOST")}
        else:
            with open(text(env, "LAUNCHER_SYSROOT").rstrip("/") + SAGEMAKER_FILE, "rb", opener=regular) as file:
                found = json.loads(file.read(MAX_FILE).decode("utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError):
        raise config_error(f"{_sagemaker_source(env)} is not JSON") from None
    hosts = _group(found) or (found.get("hosts") if isinstance(found, dict) else None)
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise config_error(f"{_sagemaker_source(env)} must have a list of the names of the hosts")
    if len(hosts) < 2:
        return None
    hosts.sort()
    current = found.get("current_host") if isinstance(found, dict) else None
    if current not in hosts:
        raise config_error(
            f"the current host {str(current)[:60]!r} is not in {_sagemaker_source(env)} ({', '.join(hosts)[:80]}): the "
            "rank of this host is unknown"
        )
    host, port = address.split(_sagemaker_source(env), hosts[0])
    return Cluster("SageMaker", hosts.index(current), len(hosts), host, master_port(env) or port or DEFAULT_PORT)


def _group(config: object) -> object:
    """Return the hosts of this host's instance group in resourceconfig.json; None if it names none (R13.16)."""
    groups = config.get("instance_groups") if isinstance(config, dict) else None
    own = config.get("current_group_name") if isinstance(config, dict) else None
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and group.get("instance_group_name") == own:
            return group.get("hosts")
    return None


def _sagemaker_source(env: Mapping[str, str]) -> str:
    return "SM_HOSTS" if text(env, "SM_HOSTS") else SAGEMAKER_FILE


def numbered(
    env: Mapping[str, str], name: str, number: str, count: str, addresses: str, head: str = ""
) -> Cluster | None:
    """Return the coordinates of a node that a platform has numbered (R13.22 to R13.32); None for the only node.

    The main node of AWS Batch need not be the first one. It becomes node 0, and the nodes after it are numbered on,
    because the node whose address is known has to be node 0.

    Args:
        number, count: variables with the number of this node, and of all nodes.
        addresses: variable with the address of node 0, or with several, separated by blanks, of which it is the first.
        head: variable with the number of the main node, which does not know its own address; "" if that is node 0.

    Raises:
        LaunchError: (2) if a number is invalid, or the address of node 0 is unknown.
    """
    if not text(env, count):
        return None  # refused by R13.18 if the rank is over 0
    size = _count(env, count)
    if size == 1:
        return None
    rank = _rank(env, number, size)
    if head and text(env, head):
        rank = (rank - _rank(env, head, size)) % size
    words = (text(env, addresses) or text(env, "MASTER_ADDR")).split()
    if not words and head and rank == 0:
        words = [LOCAL_ADDR]  # the other nodes know the address of this one
    if not words:
        raise config_error(
            f"{count} is {size}, but {addresses} is unset: the address of node 0 is unknown; pass "
            f"{addresses} on, or set MASTER_ADDR"
        )
    host, port = address.split(addresses, words[0])
    cluster = Cluster(name, rank, size, host, master_port(env) or port or DEFAULT_PORT)
    cluster.recounted = not text(env, "RANK")  # WORLD_SIZE of RunPod counts GPUs
    return cluster


def lepton(env: Mapping[str, str]) -> Cluster | None:
    """Return the coordinates of a worker of DGX Cloud Lepton (R13.29), with the host names of NVIDIA's scripts."""
    job = text(env, "LEPTON_JOB_NAME")
    prefix, domain = text(env, "LEPTON_JOB_SERVICE_PREFIX") or job, text(env, "LEPTON_SUBDOMAIN") or f"{job}-job-svc"
    first = {"LEPTON_JOB_NAME": f"{prefix}-0.{domain}" if prefix else ""}
    return numbered({**env, **first}, "Lepton", "LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS", *first)


def ranked(env: Mapping[str, str], name: str, prefix: str, head: str) -> Cluster | None:
    """Return the coordinates of a rank of Horovod or MVAPICH, whose variables have a prefix (R13.33, R13.34).

    `head` is the variable with the address of the host that starts the ranks, if there is one.
    """
    size = _count(env, prefix + "SIZE")
    if size == 1:
        return None
    local = _count(env, prefix + "LOCAL_SIZE")
    task = Task(_rank(env, prefix + "RANK", size), size, _rank(env, prefix + "LOCAL_RANK", local), local)
    host = text(env, head) if head else ""
    if local < size and not (host or text(env, "MASTER_ADDR")):
        raise config_error(
            f"{name} started {size} ranks, but the address of rank 0 is unknown: set MASTER_ADDR for all"
        )
    return _processes(env, name, task, host or LOCAL_ADDR, None)


def refuse_determined(env: Mapping[str, str]) -> None:
    """Refuse a container of Determined that is one of several, whose launch layer has not set coordinates (R13.18).

    Raises:
        LaunchError: (2) if the file with the addresses of the containers lists more than one.
    """
    import json

    try:
        with open(text(env, "LAUNCHER_SYSROOT").rstrip("/") + DETERMINED_FILE, "rb", opener=regular) as file:
            rendezvous = json.loads(file.read(MAX_FILE).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    containers = rendezvous.get("container_addrs") if isinstance(rendezvous, dict) else None
    if isinstance(containers, list) and len(containers) > 1:
        raise config_error(
            f"this is one of {len(containers)} containers of Determined ({DETERMINED_FILE}), and none of its launch "
            "layers has set coordinates: start the launcher below one, such as determined.launch.torch_distributed, "
            "or set NODE_RANK, NNODES and MASTER_ADDR"
        )


def _count(env: Mapping[str, str], name: str) -> int:
    return integer(name, text(env, name), 1, MAX_NODES)


def _rank(env: Mapping[str, str], name: str, size: int) -> int:
    return integer(name, text(env, name), 0, size - 1)


def _known(env: Mapping[str, str], name: str) -> int:
    """A number that another program has set; 0 if it is unset or not a number."""
    word = text(env, name)
    return int(word) if word.isascii() and word.isdigit() and len(word) < 11 else 0
