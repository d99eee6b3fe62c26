"""Test JAX's collectives between the processes of a job: a program of ``launch --preflight``."""

from __future__ import annotations

import functools
import os
from typing import Any

import collectives
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def join() -> collectives.Group:
    """Join the processes that JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID describe."""
    rank, size = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], size, rank)
    local = jax.local_device_count()
    # Devices of a process follow each other.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh, spec = Mesh(np.array(devices), "all"), PartitionSpec("all")
    sharding = NamedSharding(mesh, spec)

    def on_all(value: float, count: int) -> jax.Array:
        return jax.make_array_from_callback(
            (len(devices) * count,), sharding, lambda _: np.full(count, value, np.float32)
        )

    @functools.cache
    def compiled(k: int) -> Any:
        if not k:
            body = functools.partial(jax.lax.psum, axis_name="all")
        else:
            pairs = [
                (place * local + device, (place ^ k) * local + device)
                for place in range(size)
                for device in range(local)
                if place ^ k < size
            ]
            body = functools.partial(jax.lax.ppermute, axis_name="all", perm=pairs)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))

    values = {count: on_all(0.0, count) for count in (collectives.SMALL, collectives.LARGE)}

    def total(count: int) -> tuple[float, float]:
        found = [shard.data for shard in compiled(0)(on_all((rank + 1.0) / local, count)).addressable_shards]
        return min(float(part.min()) for part in found), max(float(part.max()) for part in found)

    def swap(k: int, count: int) -> None:
        compiled(k)(values[count]).block_until_ready()

    return collectives.Group(rank, size, total, swap, devices[0].platform)


if __name__ == "__main__":
    collectives.run(join)
