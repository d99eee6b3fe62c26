"""The command to start: under torchrun if a node runs several PyTorch processes (R14)."""

from __future__ import annotations

import os

from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.cluster import Cluster
    from launcher.runtime import Facts


def processes(facts: Facts, runtime: str, named: bool, cluster: Cluster) -> int:
    """Number of processes of this node (R14.1).

    LAUNCHER_NPROC, else PET_NPROC_PER_NODE, else one per GPU for plain torch. A command that is not a trainer of the
    image gets one process on a single node, because it may start its own.

    Args:
        facts: environment, machine, image and settings.
        runtime: the runtime.
        named: the command is a trainer of the image.
        cluster: the coordinates.
    """
    if facts.settings.nproc:
        return facts.settings.nproc
    given = text(facts.env, "PET_NPROC_PER_NODE")
    if given.isascii() and given.isdigit() and len(given) < 5:
        return max(1, int(given))
    if runtime != "gpu" or facts.image.framework != "torch" or facts.settings.rehearse:
        return 1
    if not named and cluster.nnodes == 1 and not given:
        return 1
    return max(1, facts.host.gpu_count(facts.env))


def wrap(command: list[str], facts: Facts, cluster: Cluster, nproc: int) -> list[str] | None:
    """The command under torchrun (R14.2).

    Returns:
        None if the command is exec'ed unchanged: one process per node, no PyTorch, a process or a command that already
        uses torchrun, a node outside the training world, or a command that does not run Python.
    """
    env = facts.env
    elastic = bool(text(env, "PET_RDZV_BACKEND")) or ":" in text(env, "PET_NNODES")
    if (
        (nproc <= 1 and not elastic)
        or not facts.image.may_be("torch", "torch_xla", "torch_tpu")
        or cluster.given
        or cluster.node_rank is None
        or text(env, "LOCAL_RANK")
    ):
        return None
    script = _script(command)
    if not script:
        return None
    return [command[0], "-m", "torch.distributed.run", *arguments(env, facts, cluster, nproc), *script]


def arguments(env: Mapping[str, str], facts: Facts, cluster: Cluster, nproc: int) -> list[str]:
    """torchrun's arguments (R14.3).

    PET_* variables are the defaults of torchrun's options, and an argument would take precedence over them: options
    whose variable is set are left out.
    """
    settings = facts.settings
    found = []

    def add(option: str, value: str, explicit: bool = False) -> None:
        if explicit or not text(env, "PET_" + option.upper().replace("-", "_")):
            found.append(f"--{option}={value}")

    on_pet = cluster.source == "PET_*"
    if not on_pet:
        add("nnodes", str(cluster.nnodes))
    add("nproc-per-node", str(nproc), explicit=settings.nproc > 0)
    backend = text(env, "PET_RDZV_BACKEND") or settings.rdzv_backend
    if not on_pet or backend == "static":
        add("node-rank", str(cluster.node_rank))
    if backend == "c10d":
        add("rdzv-backend", "c10d")
        add("rdzv-endpoint", f"{cluster.master_addr}:{cluster.master_port}")
        add("rdzv-id", text(env, "CLOUD_ML_JOB_ID") or "trainyard")
        if not on_pet or text(env, "PET_NODE_RANK"):
            # On node 0 its service name may resolve to none of its interfaces (R14.3).
            add("rdzv-conf", "is_host=" + ("false" if cluster.node_rank else "true"))
    else:
        add("master-addr", cluster.master_addr)
        add("master-port", str(cluster.master_port))
    return found


def _script(command: list[str]) -> list[str]:
    """The part of a Python command line that torchrun runs: `-m module ...` or `script.py ...`; else []."""
    if not os.path.basename(command[0]).startswith("python"):
        return []
    rest = command[1:]
    while rest and rest[0] == "-u":  # torchrun starts its workers unbuffered
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m" and not rest[1].startswith("torch.distributed"):
        return rest
    return rest if rest and not rest[0].startswith("-") else []
