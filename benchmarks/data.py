"""Reading shards from Cloud Storage: the trainers' loader and index against WebDataset, gcsfs and plain reads.

    python -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers/requirements-data.txt
    PYTHONPATH=scripts build/peers/bin/python -m benchmarks.data --save             every section
    PYTHONPATH=scripts build/peers/bin/python -m benchmarks.data encoded --save     one; the others' figures are kept

The storage is the fake of ``scripts/trainyard/sandbox/fakes/storage.py`` on this machine, which waits 20 ms before each
answer and uses the same cores as its clients. Both sides read the same shards and decode with the same function, each
with the best of a grid of settings, alternating. So in "pipeline" no loader can be faster than decoding alone, which is
measured as well; "encoded" leaves decoding out. The table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import itertools
import json
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DELAY = 0.02  # seconds: a request to a bucket in the same region
BUCKET = "shards"
SIDE, BATCH = 224, 64
IMAGENET = 1_281_167
_PICTURES, _WIDTH, _HEIGHT, _QUALITY = 256, 500, 375, 97  # distinct pictures; 99 KB on average


@dataclass(frozen=True)
class Row:
    """One comparison. ``ratio`` is the median of the rounds' ratios."""

    what: str
    ours: float
    peer: float
    unit: str
    ratio: float
    against: str
    target: str = ""
    met: bool = True


# --- data -----------------------------------------------------------------------------------------------------


def pictures() -> list[bytes]:
    """JPEGs of ImageNet's size: parts of the two photographs that scikit-learn carries."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    chance, found = random.Random(0), []
    for number in range(_PICTURES):
        whole = photographs[number % len(photographs)]
        left, upper = chance.randint(0, whole.width - _WIDTH), chance.randint(0, whole.height - _HEIGHT)
        buffer = io.BytesIO()
        whole.crop((left, upper, left + _WIDTH, upper + _HEIGHT)).save(buffer, "JPEG", quality=_QUALITY)
        found.append(buffer.getvalue())
    return found


def write_tars(folder: Path, shards: int, each: int, contents: list[bytes], split: str = "train") -> None:
    """WebDataset shards of ``each`` samples."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard in range(shards):
        with tarfile.open(folder / f"imagenet1k-{split}-{shard:04d}.tar", "w") as archive:
            for _ in range(each):
                for suffix, data in (("jpg", contents[number % len(contents)]), ("cls", str(number % 1000).encode())):
                    member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                number += 1


def write_tfrecords(folder: Path, shards: int, each: int, contents: list[bytes]) -> None:
    """TFRecord files whose records are ``contents``: only their lengths matter to an index."""
    from trainers.common.tfrecord import masked_crc

    folder.mkdir(parents=True)
    for shard in range(shards):
        with (folder / f"train-{shard:05d}-of-{shards:05d}").open("wb") as file:
            for number in range(each):
                data = contents[(shard * each + number) % len(contents)]
                length = struct.pack("<Q", len(data))
                file.write(length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data)))


@contextlib.contextmanager
def storage(folder: Path) -> Iterator[None]:
    """The fake Cloud Storage over ``folder``, as its own process; gcsfs of this process uses it."""
    program = ROOT / "scripts" / "trainyard" / "sandbox" / "fakes" / "storage.py"
    words = [sys.executable, "-I", "-S", str(program), str(folder), "--port=0", f"--delay={DELAY}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ["STORAGE_EMULATOR_HOST"] = json.loads(server.stdout.readline())["url"]
            os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
            yield
        finally:
            server.terminate()


# --- sections -------------------------------------------------------------------------------------------------


def _rate(start: Callable[[], Iterator[Any]]) -> float:
    """Images per second of the epoch that ``start`` starts, from its start to its end.

    Not from the first batch on: by then, several worker processes have one ready each.
    """
    begun = time.monotonic()
    count = sum(len(pixels) for pixels, _ in start())
    return count / (time.monotonic() - begun)


def first_pixel(
    content: bytes, where: str, side: int, choose: Callable[[int, int], tuple[float, float, float, float]]
) -> np.ndarray:
    """In place of a decoder: three bytes of the encoded image as ``uint8[1, 1, 3]``: only reading takes time."""
    return np.frombuffer(content, np.uint8, 3).reshape(1, 1, 3)


def _batches(
    source: Any, decode: Any, side: int, workers: int, readers: int, block: int
) -> Callable[[int], Iterator[Any]]:
    """A function that starts epoch ``number`` of the trainers' loader, with random crops."""
    from trainers.common import images, order

    loader = images.Loader(source, workers, 8, decode, readers)

    def epoch(number: int) -> Iterator[Any]:
        chances = images.uniform(source.count, 5, 0, number)
        chosen = order.block_permutation(source.count, 0, number, block)
        plan = np.array_split(chosen, max(1, source.count // BATCH))
        return loader.batches(plan, side, lambda n, w, h: images.random_box(chances[n], w, h, 0.08))

    return epoch


def _compare(
    folder: Path, rounds: int, shards: int, each: int, decode: Any, side: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Images per second of "blocks", "single", "webdataset" and "alone" (decoding, from memory) in each round."""
    from benchmarks.peers import webdataset_gcsfs
    from trainers.common import images

    contents = pictures()
    write_tars(folder / BUCKET / "tar", shards, each, contents)
    write_tars(folder / BUCKET / "tar", 1, 1, contents, "validation")  # else a tenth of the images would be the test
    cores = len(os.sched_getaffinity(0))
    with storage(folder):
        url = f"gs://{BUCKET}/tar"
        source = images.find(url, "train")
        urls = [f"{url}/imagenet1k-train-{shard:04d}.tar" for shard in range(shards)]

        def ours(workers: int, readers: int, block: int) -> Callable[[int], float]:
            start = _batches(source, decode, side, workers, readers, block)
            return lambda number: _rate(lambda: start(number))

        def peer(workers: int, block: int) -> Callable[[int], float]:
            start = webdataset_gcsfs.loader(urls, side, workers, block, BATCH, decode)
            return lambda number: _rate(start)

        def alone(number: int) -> float:
            chances = images.uniform(source.count, 5, 0, number)

            def one(place: int) -> None:
                content = contents[place % len(contents)]
                decode(content, "", side, lambda w, h: images.random_box(chances[place], w, h, 0.08))

            start = time.monotonic()
            with ThreadPoolExecutor(cores) as pool:
                for _ in pool.map(one, range(source.count)):
                    pass
            return source.count / (time.monotonic() - start)

        sides: dict[str, dict[str, Callable[[int], float]]] = {
            "single": {f"{workers} decoding, {readers} reading": ours(workers, readers, 1)
                       for workers, readers in itertools.product((cores, 2 * cores), (32, 64))},
            "blocks": {f"{workers} decoding, {readers} reading": ours(workers, readers, 32)
                       for workers, readers in itertools.product((cores, 2 * cores), (8, 16))},
            "webdataset": {f"{workers} workers, blocks of {block >> 20} MB": peer(workers, block)
                           for workers, block in itertools.product((cores, 2 * cores, 4 * cores), (5 << 20, 16 << 20))},
            "alone": {f"{cores} threads": alone},
        }  # fmt: skip
        grid = {name: {what: epoch(1) for what, epoch in grid.items()} for name, grid in sides.items()}
        # A worker's first epoch includes its start, so the best three of each side are tried again.
        for name, figures in grid.items():
            for what in sorted(figures, key=lambda what: -figures[what])[:3]:
                figures[what] = sides[name][what](2)
        best = {name: max(figures, key=lambda what: figures[what]) for name, figures in grid.items()}
        measured: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sides:
                measured[name].append(sides[name][best[name]](3 + number))
    return measured, {"images": source.count, "best": best, "grid": grid, "rounds": measured}


def _row(what: str, measured: dict[str, list[float]], one: str, other: str, against: str, target: float = 0.0) -> Row:
    """The comparison of two of what :func:`_compare` measured."""
    ratio = statistics.median(mine / its for mine, its in zip(measured[one], measured[other], strict=True))
    return Row(what, statistics.median(measured[one]), statistics.median(measured[other]), "images/s", ratio, against,
               f">= {target}" if target else "", ratio >= target)  # fmt: skip


_PEER = "WebDataset + gcsfs"


def pipeline(folder: Path, rounds: int, shards: int, each: int) -> tuple[list[Row], dict[str, Any]]:
    """Images per second of random 224 px crops."""
    from trainers.common import images

    # Shards of a sixth of the size, so that an epoch takes seconds.
    measured, details = _compare(folder, rounds, shards, each // 6, images.decode, SIDE)
    crops = f"random {SIDE} px crops from gs://"
    return [
        _row(f"{crops}, --shuffle-block 32", measured, "blocks", "webdataset", _PEER, 1.5),
        _row(f"{crops}, shuffled one by one", measured, "single", "webdataset", _PEER, 1.5),
        _row("the same crops from memory, the most that a loader can reach", measured, "alone", "webdataset", _PEER),
        _row(f"{crops}, --shuffle-block 32", measured, "blocks", "alone", "decoding alone, from memory"),
    ], details


def encoded(folder: Path, rounds: int, shards: int, each: int) -> tuple[list[Row], dict[str, Any]]:
    """Images per second that arrive in the process, not decoded: what reading allows where decoding is no limit."""
    measured, details = _compare(folder, rounds, shards, each // 2, first_pixel, 1)
    return [
        _row("encoded images from gs://, --shuffle-block 32", measured, "blocks", "webdataset", _PEER, 1.5),
        _row("encoded images from gs://, shuffled one by one", measured, "single", "webdataset", _PEER, 1.5),
    ], details


_EPOCHS = """
import sys, time
from benchmarks import data
from trainers.common import images
source = images.find(sys.argv[1], "train")
start = data._batches(source, data.first_pixel, 1, int(sys.argv[2]), 0, 1)
for number in range(int(sys.argv[3]) + 1):
    input()
    print(data._rate(lambda: start(number)), flush=True)
"""


def process(folder: Path, rounds: int, shards: int, each: int) -> tuple[list[Row], dict[str, Any]]:
    """Encoded images per second from local files: of one process, and of one process per core."""
    contents = pictures()
    write_tars(folder / "tar", shards, each // 2, contents)
    write_tars(folder / "tar", 1, 1, contents, "validation")
    cores = len(os.sched_getaffinity(0))

    def processes(count: int) -> list[subprocess.Popen[str]]:
        words = [sys.executable, "-c", _EPOCHS, str(folder / "tar"), str(cores), str(rounds)]
        return [
            subprocess.Popen(words, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]

    def epoch(running: list[subprocess.Popen[str]]) -> float:
        for one in running:
            print(file=one.stdin, flush=True)
        return sum(float(one.stdout.readline()) for one in running if one.stdout)

    sides = {"one": processes(1)}
    epoch(sides["one"])  # which makes the index, and reads the files into memory
    sides["several"] = processes(cores)
    epoch(sides["several"])
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in itertools.product(range(rounds), sides):
        measured[name].append(epoch(sides[name]))
    for one in itertools.chain(*sides.values()):
        one.communicate()
    what = f"encoded images from local files, {cores} processes"
    return [_row(what, measured, "several", "one", "one process")], {"rounds": measured}


def making(folder: Path, rounds: int, shards: int, each: int) -> tuple[list[Row], dict[str, Any]]:
    """Bytes per second of making an index, against reading the same ranges and dropping them."""
    from trainers.common import index, paths
    from trainers.common import storage as files

    chance = random.Random(0)
    noise = chance.randbytes(1 << 20)
    contents = [noise[: chance.randint(60_000, 160_000)] for _ in range(64)]
    write_tars(folder / BUCKET / "tar", shards, each, contents)
    write_tfrecords(folder / BUCKET / "tfrecord", shards, each, contents)
    rows, found = [], {}
    with storage(folder):
        for kind in ("tfrecord", "tar"):
            url = f"gs://{BUCKET}/{kind}"
            entries = {name: entry for name, entry in files.entries(url).items() if index.kind_of(name)}
            size = sum(entry.size for entry in entries.values())
            ranges = [
                (paths.join(url, name), start, min(start + index.BLOCK, entry.size))
                for name, entry in entries.items()
                for start in range(0, entry.size, index.BLOCK)
            ]

            def plain(ranges: list[tuple[str, int, int]] = ranges) -> None:
                with ThreadPoolExecutor(index.READS) as pool:
                    for _ in pool.map(lambda one: len(files.read_range(*one)), ranges):
                        pass

            def ours(url: str = url, entries: dict[str, files.Entry] = entries) -> None:
                index.load(url, dict(entries), list(entries))

            plain()
            rates: dict[str, list[float]] = {"ours": [], "plain": []}
            for _, name in itertools.product(range(rounds), rates):
                start = time.monotonic()
                with contextlib.redirect_stderr(io.StringIO()):  # progress
                    ours() if name == "ours" else plain()
                rates[name].append(size / (time.monotonic() - start) / 1e6)
                paths.remove(paths.join(url, index.NAME))
            ratio = statistics.median(mine / other for mine, other in zip(rates["ours"], rates["plain"], strict=True))
            rows.append(
                Row(f"making the index of {kind} shards", statistics.median(rates["ours"]),
                    statistics.median(rates["plain"]), "MB/s", ratio, "plain parallel range reads", ">= 0.8",
                    ratio >= 0.8)
            )  # fmt: skip
            found[kind] = {"bytes": size, "records": shards * each, "rates": rates}
    return rows, found


_START = """
import argparse, json, re, sys, time
begin = time.monotonic()
from trainers.common import images
loaded = time.monotonic()
train, test = images.find_both(argparse.Namespace(datadir=sys.argv[1]))
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"records": train.count, "seconds": time.monotonic() - begin, "own_seconds": time.monotonic() - loaded,
                  "mb": peak / 1024}))
"""


def starting(folder: Path, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Time and memory of a start with an index of ImageNet's size: a new process that opens the data set."""
    from trainers.common import index
    from trainers.common import storage as files

    shards = 1024
    for kind in ("tfrecord", "tar"):
        (folder / BUCKET / kind).mkdir(parents=True)
        names = [f"train-{number:05d}-of-{shards:05d}" if kind == "tfrecord" else f"train-{number:05d}.tar"
                 for number in range(shards)]  # fmt: skip
        for name in (*names, f"val-{names[0].partition('-')[2]}"):
            path = folder / BUCKET / kind / name
            with path.open("wb") as file:
                file.truncate(140 << 20)  # sparse: a start reads no shard
        found = files.entries(str(folder / BUCKET / kind))
        counts = [IMAGENET // shards + (number < IMAGENET % shards) for number in range(shards)]
        table = np.zeros(IMAGENET + 1, index.RECORD)
        chance = np.random.default_rng(0)
        table["length"] = chance.integers(20_000, 200_000, len(table))
        table["offset"], table["label"] = np.arange(len(table)) % 1251 * 110_000, chance.integers(0, 1000, len(table))
        kept = [index.Shard(name, found[name].size, found[name].version, count, "")
                for name, count in zip(names, counts, strict=True)]  # fmt: skip
        last = next(name for name in found if name.startswith("val"))
        kept.append(index.Shard(last, found[last].size, found[last].version, 1, ""))
        local = index.Index(kept, table)
        (folder / BUCKET / kind / index.NAME).write_bytes(local.to_bytes())
    rows, details = [], {}
    with storage(folder):
        for kind, remote in itertools.product(("tfrecord", "tar"), (False, True)):
            place = f"gs://{BUCKET}/{kind}" if remote else str(folder / BUCKET / kind)
            if remote:  # a generation is in microseconds, a local version in nanoseconds
                found = files.entries(place)
                kept = [
                    index.Shard(shard.name, shard.size, found[shard.name].version, shard.count, "")
                    for shard in index.Index.from_bytes((folder / BUCKET / kind / index.NAME).read_bytes()).shards
                ]
                content = index.Index(kept, table).to_bytes()
                (folder / BUCKET / kind / index.NAME).write_bytes(content)
            each = []
            for _ in range(rounds):
                ended = subprocess.run(
                    [sys.executable, "-c", _START, place], cwd=ROOT, stdout=subprocess.PIPE, check=True
                )
                each.append(json.loads(ended.stdout))
            assert {one["records"] for one in each} == {IMAGENET}
            where = f"{kind}, {'gs://' if remote else 'local'}"
            seconds, memory = (statistics.median(one[key] for one in each) for key in ("seconds", "mb"))
            rows.append(Row(f"second start with {IMAGENET:,} records, {where}", seconds, 2.0, "s", seconds / 2.0,
                            "limit", "<= 1", seconds <= 2.0))  # fmt: skip
            rows.append(Row(f"its memory, {where}", memory, 100.0, "MB", memory / 100, "limit", "<= 1", memory <= 100))
            details[where] = each
    return rows, details


# --- report ---------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the figures hold for."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    found = {"cpu": model, "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version()}
    for package in ("gcsfs", "webdataset", "torch", "pillow", "numpy"):
        found[package] = importlib.metadata.version(package)
    found["load"] = f"{os.getloadavg()[0]:.1f} at the start"  # others' processes take time from both sides
    return {**found, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def table(found: dict[str, Any]) -> str:
    """The figures of each section as a Markdown table, and what they were measured on."""
    lines = ["| what | Trainyard | compared with | ratio | target |", "|---|---|---|---|---|"]
    for section in found["sections"].values():
        for entry in section["rows"]:
            row = Row(**entry)
            target = f"{row.target} {'met' if row.met else 'MISSED'}" if row.target else "-"
            lines.append(f"| {row.what} | {row.ours:.4g} {row.unit} | {row.against}: {row.peer:.4g} {row.unit}"
                         f" | {row.ratio:.2f} | {target} |")  # fmt: skip
    lines.append("")
    machines: dict[str, list[str]] = {}
    for name, section in found["sections"].items():
        on = ", ".join(f"{key} {value}" for key, value in section["machine"].items())
        machines.setdefault(on, []).append(name)
    lines += [f"- Measured on {on}: {', '.join(names)}." for on, names in machines.items()]
    for name, section in found["sections"].items():
        if best := section["details"].get("best"):
            lines.append(
                f"- Best of the grids of {name}: {'; '.join(f'{side}: {what}' for side, what in best.items())}."
            )
    return "\n".join(lines)


def document(found: dict[str, Any]) -> str:
    """The contents of benchmarks/results/data.md."""
    return (
        "# Reading shards from Cloud Storage\n\n"
        "Written by `python -m benchmarks.data --save`. The storage is a fake on the same machine that waits"
        f" {found['delay_seconds'] * 1000:.0f} ms before each answer; ratios are medians of alternating rounds.\n\n"
        f"{table(found)}\n"
    )


def save(found: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write ``found`` to data.json and data.md of ``folder``; figures of sections that it lacks are kept."""
    path = folder / "data.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["sections"] if path.exists() else {}
    merged = {**kept, **found["sections"]}
    whole = {**found, "sections": {name: merged[name] for name in SECTIONS if name in merged}}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(document(whole), encoding="utf-8")


#: What can be measured, in the order of the table.
SECTIONS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "pipeline": pipeline, "encoded": encoded, "process": process, "making": making, "starting": starting,
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions, of which the median counts (default 5)")
    parser.add_argument("--shards", type=int, default=16, help="shards to write (default 16)")
    parser.add_argument("--each", type=int, default=1251, help="samples per shard (default 1251, as in ImageNet)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/data.json and .md")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there is {', '.join(SECTIONS)}")
    found: dict[str, Any] = {"delay_seconds": DELAY, "sections": {}}
    for name in args.sections or SECTIONS:
        on = machine()
        with tempfile.TemporaryDirectory() as folder:
            sizes = () if name == "starting" else (args.shards, args.each)
            rows, details = SECTIONS[name](Path(folder), args.rounds, *sizes)
            found["sections"][name] = {"rows": [asdict(row) for row in rows], "details": details, "machine": on}
    print(table(found), file=sys.stderr)
    if args.save:
        save(found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
