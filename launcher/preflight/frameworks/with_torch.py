"""Test gloo or NCCL between the processes of a job: a program of ``launch --preflight``."""

from __future__ import annotations

import datetime
import os

import collectives
import torch
from torch import distributed

TIMEOUT = datetime.timedelta(seconds=60)  # the launcher ends this program sooner


def join() -> collectives.Group:
    """Join the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    distributed.init_process_group(backend, timeout=TIMEOUT)
    rank, size = distributed.get_rank(), distributed.get_world_size()

    def total(count: int) -> tuple[float, float]:
        values = torch.full((count,), rank + 1.0, device=device)
        distributed.all_reduce(values)
        return float(values.min()), float(values.max())

    def swap(k: int, count: int) -> None:
        peer = rank ^ k
        if peer < size:
            sent, received = torch.zeros(count, device=device), torch.empty(count, device=device)
            pair = [
                distributed.P2POp(distributed.isend, sent, peer),
                distributed.P2POp(distributed.irecv, received, peer),
            ]
            for work in distributed.batch_isend_irecv(pair):
                work.wait()
            float(received[0])  # waits for the GPU

    return collectives.Group(rank, size, total, swap, backend)


if __name__ == "__main__":
    collectives.run(join)
