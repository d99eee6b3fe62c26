"""Two worker processes that hand arrays to their parent in shared memory, as those of a data loader do.

The smoke test copies this file into a container of the image: a PyTorch image uses torch's DataLoader, any other one a
pool of Python's. It ends with status 0 if all that the workers wrote has arrived. Python 3.8 to 3.14.
"""

from __future__ import annotations

import importlib.util
import multiprocessing

#: Arrays of 1 MiB: those of the DataLoader are more than a /dev/shm of 64 MB holds at a time.
SIZE, BATCH, BATCHES, POOLED = 1 << 20, 4, 24, 32
WORKERS = 2


class Numbered:
    """A data set in which image ``n`` is an array full of ``n``."""

    def __len__(self) -> int:
        """How many arrays there are."""
        return BATCH * BATCHES

    def __getitem__(self, number: int) -> object:
        """The array of this number."""
        import torch

        return torch.full((SIZE,), number, dtype=torch.uint8)


def load() -> list[int]:
    """The numbers that torch's DataLoader delivers."""
    from torch.utils.data import DataLoader

    batches = DataLoader(Numbered(), batch_size=BATCH, num_workers=WORKERS)
    return [int(number) for batch in batches for number in batch.amax(dim=1)]


_shared = multiprocessing.RawArray("B", SIZE * POOLED)


def _fill(number: int) -> None:
    memoryview(_shared).cast("B")[number * SIZE : (number + 1) * SIZE] = bytes([number]) * SIZE


def pool() -> list[int]:
    """The numbers that a pool of Python's wrote to memory that it shares with this process."""
    with multiprocessing.get_context("fork").Pool(WORKERS) as workers:
        workers.map(_fill, range(POOLED))
    return [_shared[(number + 1) * SIZE - 1] for number in range(POOLED)]


if __name__ == "__main__":
    found = load() if importlib.util.find_spec("torch") else pool()
    if found != list(range(len(found))):
        raise SystemExit(f"the workers delivered {found}")
    print(f"{WORKERS} worker processes delivered {len(found)} arrays")
