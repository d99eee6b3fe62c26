"""Test TensorFlow's collectives between the workers of ``TF_CONFIG``: a program of ``launch --preflight``."""

from __future__ import annotations

import itertools

import collectives
import tensorflow as tf

TIMEOUT = 60.0  # seconds; the launcher ends this program sooner
ALL, PAIRS = 1, 1000  # keys of groups: that of all workers, and the first of those of two


def join() -> collectives.Group:
    """Join the workers of ``TF_CONFIG``."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict()
    tasks = [(kind, index) for kind in ("chief", "worker") for index in range(len(cluster.get(kind, ())))]
    rank, size = tasks.index((resolver.task_type, resolver.task_id)), len(tasks)
    gpu = bool(tf.config.list_logical_devices("GPU"))
    numbers = itertools.count(1)

    def reduce(value: float, count: int, members: int, key: int) -> tf.Tensor:
        with tf.device("GPU:0" if gpu else "CPU:0"):
            return tf.raw_ops.CollectiveReduceV2(
                input=tf.fill((count,), value), group_size=members, group_key=key, instance_key=next(numbers),
                ordering_token=[], merge_op="Add", final_op="Id", timeout_seconds=TIMEOUT,
            )  # fmt: skip

    def total(count: int) -> tuple[float, float]:
        found = reduce(rank + 1.0, count, size, ALL)
        return float(tf.reduce_min(found)), float(tf.reduce_max(found))

    def swap(k: int, count: int) -> None:
        low, high = sorted((rank, rank ^ k))
        if high < size:
            float(reduce(0.0, count, 2, PAIRS + low * size + high)[0])

    return collectives.Group(rank, size, total, swap, "nccl" if gpu else "grpc")


if __name__ == "__main__":
    collectives.run(join)
