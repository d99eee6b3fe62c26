"""WebDataset over gcsfs, as its users read shards at ``gs://``: worker processes, each streaming whole shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


class Crop:
    """A random crop by ``decode`` of an encoded image to ``side`` pixels.

    Picklable, for workers that are started by spawn.
    """

    def __init__(self, side: int, decode: Callable[..., np.ndarray]) -> None:
        self.side, self.decode = side, decode

    def __call__(self, sample: dict[str, Any]) -> tuple[np.ndarray, int]:
        from trainers.common import images

        chance = np.array([random.random() for _ in range(5)])
        pixels = self.decode(
            sample["jpg"], sample["__key__"], self.side, lambda w, h: images.random_box(chance, w, h, 0.08)
        )
        return pixels, int(sample["cls"])


class Open:
    """Opens ``gs://`` for WebDataset: gcsfs' file object, which reads ahead in blocks of ``block`` bytes."""

    def __init__(self, block: int) -> None:
        self.block = block

    def __call__(self, shards: Any) -> Iterator[dict[str, Any]]:
        import gcsfs

        filesystem = gcsfs.GCSFileSystem()
        for shard in shards:
            url = shard["url"]
            yield {"url": url, "stream": filesystem.open(url, "rb", block_size=self.block, cache_type="readahead")}


def loader(
    urls: Sequence[str], side: int, workers: int, block: int, batch: int, decode: Callable[..., np.ndarray]
) -> Callable[[], Iterator[Any]]:
    """A function that starts an epoch of batches: shards and samples shuffled, as in WebDataset's documentation."""
    import torch
    import webdataset as wds
    from webdataset import tariterators

    stages = wds.DataPipeline(
        wds.SimpleShardList(list(urls)),
        wds.shuffle(len(urls)),
        wds.split_by_worker,
        Open(block),
        tariterators.tar_file_expander,
        tariterators.group_by_keys,
        wds.shuffle(1000),
        wds.map(Crop(side, decode)),
        wds.batched(batch, partial=True),
    )
    found = torch.utils.data.DataLoader(
        stages, batch_size=None, num_workers=workers, persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None, prefetch_factor=4 if workers else None,
    )  # fmt: skip
    return lambda: iter(found)
