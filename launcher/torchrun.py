"""The command that is really started: torchrun in front of it where a node runs several PyTorch processes (a.4)."""

from __future__ import annotations

import os

from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.cluster import Cluster
    from launcher.runtime import Facts


def processes(facts: Facts, runtime: str, named: bool, cluster: Cluster) -> int:
    """How many processes this node runs.

    LAUNCHER_NPROC, else PET_NPROC_PER_NODE, else one a GPU for plain torch. A command that is none of the image's
    trainers gets one process on a single node: it may well place its processes itself.
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
    """The command under torchrun.

    PET_* variables are torchrun's own defaults: an argument would outrank them (S20, T165), so what they say is not
    said again.

    Returns:
        None when the command is to be exec'ed as it is: one process a node, no PyTorch, a launcher above or in the
        command, a node outside the training world, or a command that is not Python's.
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
    """torchrun's arguments, without those that PET_* variables already give."""
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
            # Node 0's own service name may not resolve to an interface of its own (pitfall 17).
            add("rdzv-conf", "is_host=" + ("false" if cluster.node_rank else "true"))
    else:
        add("master-addr", cluster.master_addr)
        add("master-port", str(cluster.master_port))
    return found


def _script(command: list[str]) -> list[str]:
    """What torchrun runs of a Python command line: `-m module ...` or `script.py ...`; [] for anything else."""
    if not os.path.basename(command[0]).startswith("python"):
        return []
    rest = command[1:]
    while rest and rest[0] == "-u":  # torchrun starts its workers unbuffered
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m" and not rest[1].startswith("torch.distributed"):
        return rest
    return rest if rest and not rest[0].startswith("-") else []
