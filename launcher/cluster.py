"""Cluster coordinates: rank of this node or process, size of the cluster, address of node 0 (R13)."""

from __future__ import annotations

import os

from launcher import address
from launcher.coordinates import LOCAL_ADDR, Cluster, coordinator, master_port, number
from launcher.errors import config_error
from launcher.settings import text
from launcher.sources import RANKS, SOURCES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.settings import Settings
    from launcher.tpu_vm import Slice


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
    cluster = _first(explicit, found) or Cluster("single node")
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


def _first(env: Mapping[str, str], found: Slice | None) -> Cluster | None:
    for row in SOURCES:
        if any(text(env, name) for name in row.signals) or (found and row.read == "indexed_job"):
            from launcher import readers  # only here: most starts need none

            cluster: Cluster | None = getattr(readers, row.read)(row, env, found)
            if cluster:
                return cluster
    return None


def _use_master_variables(cluster: Cluster, env: Mapping[str, str]) -> None:
    """MASTER_ADDR and MASTER_PORT that are set replace the source's; a single node needs neither (R13.19)."""
    alone = cluster.nnodes == 1 and not cluster.task and cluster.node_rank is not None
    if text(env, "MASTER_ADDR"):
        cluster.master_addr = address.split("MASTER_ADDR", text(env, "MASTER_ADDR"))[0]
    elif alone:
        cluster.master_addr = LOCAL_ADDR
    cluster.master_port = master_port(env) or (0 if alone else cluster.master_port)


ADDRESSES = dict.fromkeys(("RANK", "NODE_RANK"), "set MASTER_ADDR")
ADDRESSES["JAX_PROCESS_ID"] = "set JAX_COORDINATOR_ADDRESS to HOST:PORT of process 0"
RESOLVE = "set RANK, WORLD_SIZE and MASTER_ADDR, or NODE_RANK, NNODES and MASTER_ADDR"
ALONE = "NODE_RANK=0 and NNODES=1 if it trains alone"


def _refuse_unknown(env: Mapping[str, str]) -> None:
    """Refuse ranks whose node 0 no source knows (R13.18). A size without a rank may belong to something else."""
    for rank, size in RANKS:
        own, count = number(env, rank), number(env, size, 1) if size else 0
        if own > 0 and not (count > own and text(env, size)):
            known = f"{size} is {text(env, size)[:20] or 'unset'}" if size else "the number of processes is unknown"
            raise config_error(f"{rank} is {own}, so this is one of several processes, but {known}: {RESOLVE}")
        if text(env, rank) and count > 1:
            raise config_error(
                f"{rank}={text(env, rank)[:20]} and {size}={text(env, size)[:20]} are set, but the address of node 0 "
                f"is unknown: {ADDRESSES.get(rank, f'{RESOLVE}; {ALONE}')}"
            )
    ranks = max(number(env, "PMI_ID"), number(env, "PMI_RANK"), number(env, "MPI_LOCALNRANKS", 1) - 1)
    if ranks > 0 and not text(env, "PMI_SIZE"):
        raise config_error(
            "mpiexec started this process as one of several ranks, but PMI_SIZE is unset: leave out -pmi-port, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR"
        )
    if text(env, "PMI_RANK") and number(env, "PMI_SIZE", 1) > 1:
        raise config_error(
            f"PMI_SIZE is {number(env, 'PMI_SIZE')}, but the rank on this node is unknown: set RANK, WORLD_SIZE, "
            "LOCAL_RANK and MASTER_ADDR"
        )
    if text(env, "DET_TASK_ID"):
        from launcher import readers

        readers.refuse_determined(env)


def _refuse_alone(env: Mapping[str, str]) -> None:
    """Refuse a node with a WORLD_SIZE over 1, or another host in MASTER_ADDR, that no source numbers (R13.18).

    A size of 1 of any source says that the node is alone. In a batch script of Slurm they are for the steps.
    """
    several = number(env, "WORLD_SIZE", 1) > 1
    of_tasks = ("MEGASCALE_NUM_SLICES", "BATCH_TASK_COUNT", "CLOUD_RUN_TASK_COUNT")  # which have processes of their own
    sizes = [size for _, size in RANKS if not (several and size in of_tasks)]
    if text(env, "SLURM_JOB_ID") or any(number(env, size) == 1 for size in sizes):
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
    rank = task.rank if task else cluster.node_rank
    ranks = [("RANK", rank), ("NODE_RANK", cluster.node_rank), ("JAX_PROCESS_ID", rank)]
    for name, ours in ranks:
        if name == "NODE_RANK" and task and not task.nodes_known:
            continue
        if text(env, name) and text(env, name) != str(ours):
            cluster.warnings.append(
                f"{name}={text(env, name)[:20]} is set and kept, but {cluster.source} says {ours}: unset it, or set it "
                "in each task"
            )
