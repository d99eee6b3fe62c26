"""Several devices of one machine without torchrun: a process for each, started by the one that the user started.

torchrun ends with 1 whatever its workers' exit codes were; here the trainer's own code is kept, so that a preempted run
is started again by the scheduler and a diverged one is not.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch

from trainers.common import exits
from trainers.torch import _device

_GRACE = 30.0  # seconds that the others get to end by themselves once a process failed: to save, and to be told
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
         "Timed out waiting", "NCCL communicator was aborted", "remote process exited")  # fmt: skip


def main(train: Callable[[argparse.Namespace], int], args: argparse.Namespace, name: str) -> NoReturn:
    """Run ``train(args)`` on all devices asked for and end the process with its code."""
    exits.guard(lambda given: _everywhere(train, given), args, name)


def _everywhere(train: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    count = processes(args)
    if count > 1:
        if _device.kind_of(args) == "tpu":  # torch_tpu 0.2: what all processes must agree on before the first starts
            torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=count)  # type: ignore[attr-defined]
        return run(count)
    rank = os.environ.get("RANK") or "0"
    try:
        return train(args)
    except exits.UserError as error:
        if rank == "0":
            raise
        raise exits.UserError(f"rank {rank}: {error}", error.code) from None
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST):
            raise
        reason = str(error).strip().splitlines()[0]
        raise exits.UserError(
            f"rank {rank} lost another process of the run, whose own message says why ({reason[:120]});"
            " checkpoints are kept, run again to go on"
        ) from None


def processes(args: argparse.Namespace) -> int:
    """How many processes to start: ``--num-cores`` of CPU or accelerator, or all CUDA devices; 1 where somebody above
    has started several already."""
    kind = _device.kind_of(args)
    if kind == "xla" or any(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return 1
    if kind == "cpu":
        return args.num_cores or 1
    present = torch.accelerator.device_count()
    if args.num_cores > present:
        raise exits.UserError(f"--num-cores {args.num_cores}: there are {present} {kind} devices", exits.USAGE)
    return args.num_cores or (present if kind == "cuda" else 1)


def run(count: int) -> int:
    """Run this very command line in ``count`` processes; returns the code of the first that failed, else 0.

    SIGTERM is passed on. A terminal's Ctrl-C reaches all of them by itself.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                       timeout=timedelta(minutes=5))  # fmt: skip
    # The variables that torchrun sets; with its agent's store no port has to be guessed.
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
              "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo",
              "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}  # fmt: skip
    words = [sys.executable, *sys.orig_argv[1:]]
    running: dict[int, subprocess.Popen[bytes]] = {}

    def forward(number: int, frame: object) -> None:
        for child in running.values():
            child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[rank] = subprocess.Popen(words, env={**os.environ, **shared, **own})
    return _wait(running)


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """The code of the first process that failed; the others are killed if they go on without it."""
    code, deadline = 0, float("inf")
    while running:
        for rank, child in list(running.items()):
            ended = child.poll()
            if ended is None:
                continue
            del running[rank]
            if ended and not code:
                code, deadline = (ended if ended > 0 else 128 - ended), time.monotonic() + _GRACE
                if ended < 0:
                    print(f"rank {rank} was killed by {signal.Signals(-ended).name}", file=sys.stderr)
        if time.monotonic() > deadline:
            for child in running.values():
                child.kill()
        time.sleep(0.05)
    return code
