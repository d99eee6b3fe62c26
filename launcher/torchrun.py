"""The command under torchrun, for elastic jobs (R14.6)."""

from __future__ import annotations

import os

from launcher.address import join
from launcher.exports import free_port
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.coordinates import Cluster
    from launcher.runtime import Facts


def wrap(command: list[str], facts: Facts, cluster: Cluster, nproc: int) -> list[str] | None:
    """The command under torchrun, if its rendezvous is needed: the number of nodes changes while the job runs (R14.6).

    With a fixed number of nodes the launcher starts the processes itself (R14.2).

    Returns:
        None if torchrun is not needed, or cannot be used: no PyTorch, a process or a command that already uses
        torchrun, a node outside the training world, or a command that does not run Python.
    """
    env = facts.env
    if (
        not is_elastic(facts, nproc)
        or not facts.image.may_be("torch", "torch_xla", "torch_tpu")
        or cluster.given
        or cluster.task
        or cluster.node_rank is None
        or text(env, "LOCAL_RANK")
    ):
        return None
    script = _script(command)
    if not script:
        return None
    return [command[0], "-m", "torch.distributed.run", *arguments(env, facts, cluster, nproc), *script]


def is_elastic(facts: Facts, nproc: int) -> bool:
    """Whether nodes may join and leave: a range in PET_NNODES, a rendezvous backend, or restarts by torchrun."""
    restarts = facts.has("PET_MAX_RESTARTS")
    return (
        facts.has("PET_RDZV_BACKEND") not in ("", "static")
        or ":" in facts.has("PET_NNODES")
        or restarts.strip("0") != ""
        or (nproc > 1 and facts.settings.rdzv_backend == "c10d")
    )


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
    if settings.log_dir:
        add("log-dir", settings.log_dir)
        add("tee", "3")
    backend = text(env, "PET_RDZV_BACKEND") or settings.rdzv_backend
    if not on_pet or backend == "static":
        add("node-rank", str(cluster.node_rank))
    if backend == "c10d":
        add("rdzv-backend", "c10d")
        add("rdzv-endpoint", join(cluster.master_addr, cluster.master_port or free_port()))
        add("rdzv-id", text(env, "CLOUD_ML_JOB_ID") or "trainyard")
        if not on_pet or text(env, "PET_NODE_RANK"):
            # On node 0 its service name may resolve to none of its interfaces (R14.3).
            add("rdzv-conf", "is_host=" + ("false" if cluster.node_rank else "true"))
    else:
        add("master-addr", cluster.master_addr)
        add("master-port", str(cluster.master_port or free_port()))
    return found


def _script(command: list[str]) -> list[str]:
    """The part of a Python command line that torchrun runs: `-m module ...` or `script.py ...`; else [].

    `--print-env` in an image without a default trainer has no command.
    """
    if not command or not os.path.basename(command[0]).startswith("python"):
        return []
    rest = command[1:]
    while rest and rest[0] == "-u":  # torchrun starts its workers unbuffered
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m" and not rest[1].startswith("torch.distributed"):
        return rest
    return rest if rest and not rest[0].startswith("-") else []
