"""Compare random access to tar shards: the trainers' index and Loader against the package wids, same decoder, threads.

    python benchmarks/wids_figure.py FOLDER --rounds 9

FOLDER receives 4,000 JPEGs of 500x375 pixels, about 110 KB each, as 8 tar shards. Both sides read them in the order of
``order.permutation`` ("shuffled") or of the shards ("sequential"), crop and resize with ``images.decode`` in the same
number of threads, by turns. "encoded" leaves the decoder out. "far" is the fake bucket of the tests, 20 ms a request:
ours reads ranges, wids downloads whole shards into an empty folder (its own handler for gs:// calls gsutil).
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import shutil
import statistics
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "trainers")]

from far_storage import FarStorage  # noqa: E402
from trainers.common import images, order, paths  # noqa: E402

SHARDS, EACH, BATCH, AHEAD, SIDE = 8, 500, 64, 4, 224


def jpegs(count: int) -> list[bytes]:
    """Gradients with noise, 500 x 375, about 110 KB each, ImageNet's mean."""
    from PIL import Image

    chance, found = np.random.default_rng(0), []
    rows, columns = np.mgrid[0:375, 0:500]
    for _ in range(count):
        slopes = chance.uniform(-0.4, 0.4, (3, 2))
        plane = np.stack([128 + a * (rows - 187) + b * (columns - 250) for a, b in slopes], -1)
        pixels = (plane + chance.normal(0, 22, plane.shape)).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


def write(folder: Path) -> None:
    """SHARDS shards of EACH samples, and one image for the test."""
    contents = jpegs(128)
    print(f"mean {statistics.mean(map(len, contents)) / 1000:.0f} KB", file=sys.stderr)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as archive:
            for number in range(shard * EACH, (shard + 1) * EACH):
                content = contents[number % len(contents)]
                for suffix, data in (("jpg", content), ("cls", str(number % 1000).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    shutil.copy(folder / "train-0000.tar", folder / "val-0000.tar")


def first_pixel(content: bytes, where: str, side: int, choose: Any) -> np.ndarray:
    """In place of a decoder: three bytes of the encoded image: only reading takes time."""
    return np.frombuffer(content, np.uint8, 3).reshape(1, 1, 3)


def plan(epoch: int, shuffled: bool, batches: int = 1 << 30) -> list[np.ndarray]:
    count = SHARDS * EACH
    chosen = order.permutation(count, 0, epoch) if shuffled else np.arange(count)
    return [chosen[at : at + BATCH] for at in range(0, count - BATCH + 1, BATCH)][:batches]


def boxes(epoch: int) -> Callable[[int, int, int], images.Box]:
    chances = images.uniform(SHARDS * EACH, 5, 0, epoch, 1)
    return lambda number, width, height: images.random_box(chances[number], width, height, 0.25)


class Wids:
    """ShardListDataset behind threads that read and decode, AHEAD batches in advance."""

    def __init__(self, folder: Path, workers: int, decode: Any, side: int, far: FarStorage | None = None) -> None:
        import wids
        from wids import wids_dl

        self.decode, self.side, self.folder, self.far = decode, side, folder, far
        self.pool = ThreadPoolExecutor(workers)
        self.wids, self.dl = wids, wids_dl
        self.dataset: Any = None

    def open(self) -> None:
        names = [f"train-{shard:04d}.tar" for shard in range(SHARDS)]
        shards = [{"url": str(self.folder / name), "nsamples": EACH} for name in names]
        local: Callable[[str], str] = lambda url: url  # noqa: E731
        if self.far:
            cache = self.folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()
            shards = [{"url": f"far://d/{name}", "nsamples": EACH} for name in names]
            local = lambda url: str(cache / url.rpartition("/")[2])  # noqa: E731
            far = self.far

            def download(url: str, path: str) -> None:
                Path(path).write_bytes(far.cat_file(url.partition("://")[2]))

            self.dl.default_cmds["far"] = download
        self.dataset = self.wids.ShardListDataset(shards, localname=local, lru_size=100, transformations=[], keep=True)
        # Its cache of shards is not safe with threads: two would index one shard. Each is opened here, as a user must.
        list(self.pool.map(lambda shard: self.dataset[shard * EACH], range(SHARDS)))

    def batches(self, numbers: Iterable[np.ndarray], choose: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        group = 8

        def some(chosen: np.ndarray, pixels: np.ndarray, labels: np.ndarray, at: int) -> None:
            for place in range(at, min(at + group, len(chosen))):
                number = int(chosen[place])
                sample = self.dataset[number]
                pixels[place] = self.decode(
                    sample[".jpg"].read(), "", self.side, lambda w, h, n=number: choose(n, w, h)
                )
                labels[place] = int(sample[".cls"].read())

        waiting: deque[tuple[np.ndarray, np.ndarray, list[Future[None]]]] = deque()

        def result() -> tuple[np.ndarray, np.ndarray]:
            pixels, labels, futures = waiting.popleft()
            for future in futures:
                future.result()
            return pixels, labels

        for chosen in numbers:
            pixels, labels = np.empty((len(chosen), self.side, self.side, 3), np.uint8), np.empty(len(chosen), np.int64)
            futures = [self.pool.submit(some, chosen, pixels, labels, at) for at in range(0, len(chosen), group)]
            waiting.append((pixels, labels, futures))
            if len(waiting) > AHEAD:
                yield result()
        while waiting:
            yield result()


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Images per CPU second and per wall second."""
    before, begun = cpu(), time.monotonic()
    count = work()
    return count / (cpu() - before), count / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", default="local,far")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    data = args.folder / "d"
    if not data.exists():
        data.mkdir()
        write(data)
    far = FarStorage(args.folder)
    far.seconds = 0.02
    sys.modules["fsspec"] = SimpleNamespace(filesystem=lambda scheme: far)  # type: ignore[assignment]
    paths.retries.pause = 0.0
    rows = []
    for case in args.cases.split(","):  # far: whole epochs, of which wids downloads all shards
        for name, decode, side in (("decoded", images.decode, SIDE), ("encoded", first_pixel, 1)):
            for shuffled in (True, False):
                source = images.find("far://d" if case == "far" else str(data), "train")
                loader = images.Loader(source, args.workers, AHEAD, decode)
                peer = Wids(data, args.workers, decode, side, far if case == "far" else None)
                peer.open()

                batches = 16 if case == "local" and side > 1 else 1 << 30  # many short rounds

                def ours(epoch: int) -> int:
                    return sum(
                        len(labels) for _, labels in loader.batches(plan(epoch, shuffled, batches), side, boxes(epoch))
                    )

                def theirs(epoch: int) -> int:
                    if case == "far":
                        peer.open()
                    return sum(len(labels) for _, labels in peer.batches(plan(epoch, shuffled, batches), boxes(epoch)))

                first = next(iter(loader.batches(plan(1, shuffled), side, boxes(1))))
                other = next(iter(peer.batches(plan(1, shuffled), boxes(1))))
                assert (first[0] == other[0]).all() and (first[1] == other[1]).all()
                found: dict[str, list[tuple[float, float]]] = {"ours": [], "wids": []}
                for epoch in range(1, args.rounds + 1):
                    for who, work in (("ours", ours), ("wids", theirs))[:: 1 if epoch % 2 else -1]:
                        found[who].append(timed(lambda work=work, epoch=epoch: work(epoch)))
                row: dict[str, Any] = {"case": case, "what": name, "order": "shuffled" if shuffled else "sequential"}
                for place, unit in enumerate(("cpu", "wall")):
                    pairs = [(mine[place], its[place]) for mine, its in zip(found["ours"], found["wids"], strict=True)]
                    ratios = sorted(mine / its for mine, its in pairs)
                    theirs_sorted = sorted(its for _, its in pairs)
                    row[unit] = {
                        "ours": round(statistics.median(mine for mine, _ in pairs), 1),
                        "wids": round(statistics.median(theirs_sorted), 1),
                        "ratio": round(statistics.median(ratios), 3),
                        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
                        "wids spread": [round(value, 1) for value in (theirs_sorted[0], theirs_sorted[-1])],
                    }
                rows.append(row)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
