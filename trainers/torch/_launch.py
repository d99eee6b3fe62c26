"""Training on several devices of one machine without torchrun: one process per device, started by the first process.

torchrun exits with 1 whatever the exit codes of its workers are. Here the trainer's own exit code is kept, so that a
scheduler restarts a preempted run but not a diverged one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch

from trainers.common import exits

_PARENT = "TRAINYARD_PARENT"  # the environment variable with the process ID of the process that starts the others
_PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
_GRACE = 30.0  # seconds that the other processes have to save and exit after one has failed


def run(count: int) -> int:
    """Run this process's command line in ``count`` processes; returns the exit code of the first that fails, else 0.

    SIGTERM is forwarded. SIGINT is ignored here, because a terminal sends it to all processes of the group.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                       timeout=timedelta(minutes=5))  # fmt: skip
    # The variables that torchrun sets. Sharing the agent's store avoids choosing a free port in advance.
    shared = {_PARENT: str(os.getpid()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
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


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process, which :func:`run` started, when the process that did so ends.

    Without it, ranks would train on after ``kill -9`` of their parent, beside those of the command that resumes the
    run. No effect in other processes, such as those of torchrun.
    """
    parent = os.environ.get(_PARENT)
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it has ended before
            raise exits.UserError("the process that started this one has ended", exits.PREEMPTED)


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """The exit code of the first process that fails; others are killed ``_GRACE`` seconds later."""
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
