"""How long importing a framework takes in an image, where the time goes, and what settings of an image change.

    python -m benchmarks.imports                                     print the tables
    python -m benchmarks.imports --save                              also write them to benchmarks/results, where the
                                                                     figures of other pairs are kept
    python -m benchmarks.imports trainyard:tf-cpu=tensorflow --rounds 25

Three measurements for each IMAGE=MODULE, each in a container without a network:

    warm    new processes that import the module, as it is and with each variant, alternating; then also with two
            training steps after the import, since what an import postpones is no gain
    parts   processes with timers inside: where the seconds of an import go
    cold    the same import after its files were dropped from the page cache (posix_fadvise; no other file's pages are
            dropped), and how many bytes of which files are in the cache after it (mincore)

Ratios are medians of the rounds' ratios, "as it is" divided by the variant: above 1 the variant is faster. CPU seconds
are user and system time of the process; other work on the machine disturbs them less than wall time.
The container runs as root, because the kernel shows the cached pages of a file only to those who may write to it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import sys
import tarfile
from pathlib import Path
from typing import Any

import docker.errors
from benchmarks import trainers

from trainyard.oci import docker_engine

RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT = ("trainyard:tf-cpu=tensorflow", "trainyard:xla=torch", "trainyard:xla=torch_xla")
#: The variant that is compared with the target, and the module and ratio of the target.
CANDIDATE, TARGET_MODULE, TARGET = "no collection while importing", "tensorflow", 1.2

#: Two training steps of a small model: what the first step allocates, and postponed work, is in the time.
STEPS = {
    "tensorflow": """
import numpy
model = tensorflow.keras.Sequential([tensorflow.keras.layers.Dense(64, "relu"), tensorflow.keras.layers.Dense(10)])
model.compile("sgd", tensorflow.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(numpy.zeros((64, 784), "float32"), numpy.zeros(64, "int32"), batch_size=32, verbose=0)
""",
    "torch": """
model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    torch.nn.functional.cross_entropy(model(torch.zeros(32, 784)), torch.zeros(32, dtype=torch.long)).backward()
    optimizer.step()
""",
    "torch_xla": """
import torch
model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    labels = torch.zeros(32, dtype=torch.long, device="xla")
    torch.nn.functional.cross_entropy(model(torch.zeros(32, 784, device="xla")), labels).backward()
    optimizer.step()
    torch_xla.sync(wait=True)
""",
}

# Runs inside the container.
INSIDE = r"""
import ctypes, importlib.util, json, mmap, os, re, statistics, subprocess, sys, time

PLAIN = "import " + MODULE + "\n"
# freeze and unfreeze move all objects to the oldest generation without visiting them, so that the first collection
# after the import does not make up for the ones left out; nothing stays frozen.
QUIET = "import gc\ngc.disable()\n" + PLAIN + "gc.freeze()\ngc.unfreeze()\ngc.enable()\n"
BASIC = {
    "as it is": ({}, [], PLAIN),
    "no collection while importing": ({}, [], QUIET),
    "the same, and two training steps after it": ({}, [], QUIET + STEPS),
    "as it is, and two training steps after it": ({}, [], PLAIN + STEPS),
}
ALL = BASIC | {
    "no full collection while importing": (
        {}, [], "import gc\ngc.set_threshold(700, 10, 1 << 30)\n" + PLAIN + "gc.set_threshold(700, 10, 10)\n"),
    "byte code in one file": ({}, [], "import sys\nsys.path.append('/bench')\nimport archive\narchive.use()\n" + PLAIN),
    "both": ({}, [], "import sys\nsys.path.append('/bench')\nimport archive\narchive.use()\n" + QUIET),
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1": ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, [], PLAIN),
    "MALLOC_TOP_PAD_, _TRIM_ and _MMAP_THRESHOLD_ of 64 MB and more": (
        {"MALLOC_TOP_PAD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
         "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, [], PLAIN),
    "PYTHONMALLOC=malloc": ({"PYTHONMALLOC": "malloc"}, [], PLAIN),
    "PYTHONNODEBUGRANGES=1": ({"PYTHONNODEBUGRANGES": "1"}, [], PLAIN),
    "-X frozen_modules=on": ({}, ["-X", "frozen_modules=on"], PLAIN),
    "-I": ({}, ["-I"], PLAIN),
    "OPENBLAS_NUM_THREADS=1": ({"OPENBLAS_NUM_THREADS": "1"}, [], PLAIN),
    "LD_BIND_NOW=1": ({"LD_BIND_NOW": "1"}, [], PLAIN),
    "TF_ENABLE_ONEDNN_OPTS=0 TF_CPP_MIN_LOG_LEVEL=3": (
        {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}, [], PLAIN),
    "RTLD_LAZY": ({}, [], "import os, sys\nsys.setdlopenflags(os.RTLD_LAZY)\n" + PLAIN),
}

def run(variant):
    environment, options, code = ALL[variant]
    begun = time.perf_counter()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):
            os.dup2(null, file)
        os.execvpe(sys.executable, [sys.executable, *options, "-c", code], {**os.environ, **environment})
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - begun
    if status:
        return None
    return {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "bytes": usage.ru_maxrss * 1024,
            "faults": usage.ru_minflt}

def warm(rounds, extra):
    '''Samples by variant; None for a variant whose process does not exit with 0.'''
    samples = {}
    for variant in ALL if extra else BASIC:  # files into the page cache
        samples[variant] = [] if run(variant) else None
    for number in range(max(rounds, extra)):
        for variant in samples:
            if samples[variant] is not None and number < (rounds if variant in BASIC else extra):
                samples[variant].append(run(variant))
    return samples

TIMED = r'''
import gc, os, sys, time
import importlib._bootstrap_external as external
import _ctypes
times, counts, inner, clock = {}, {}, [0.0], time.perf_counter

def add(name, seconds):
    times[name] = times.get(name, 0) + seconds
    counts[name] = counts.get(name, 0) + 1

def timed(name, function):
    def wrapper(*arguments, **named):
        begun = clock()
        inner.append(0.0)
        try:
            return function(*arguments, **named)
        finally:
            passed = clock() - begun
            add(name, passed - inner.pop())
            inner[-1] += passed
    return wrapper

def collecting(phase, info):
    global since
    if phase == "start":
        since = clock()
    else:
        add(f"garbage collection, generation {info['generation']}", clock() - since)
        inner[-1] += clock() - since

gc.callbacks.append(collecting)
external._compile_bytecode = timed("unmarshalling byte code", external._compile_bytecode)
external.FileLoader.get_data = timed("reading byte code", external.FileLoader.get_data)
external.FileFinder.find_spec = timed("finding modules", external.FileFinder.find_spec)
external.SourceLoader.source_to_code = timed("compiling source", external.SourceLoader.source_to_code)
loader = external.ExtensionFileLoader
create = loader.create_module
def load(path):
    if "LD_DEBUG" in os.environ:
        os.write(2, b"mark begin\n")
    _ctypes.dlopen(path, sys.getdlopenflags())  # the same flags as the import after it, which finds it loaded
    if "LD_DEBUG" in os.environ:
        os.write(2, b"mark end\n")
load = timed("dlopen of extension modules", load)
def create_module(self, spec):
    load(spec.origin)
    return create(self, spec)
loader.create_module = timed("native initialisation (PyInit)", create_module)
loader.exec_module = timed("native initialisation (PyInit)", loader.exec_module)
begun = clock()
__import__(MODULE)
whole = clock() - begun
times["executing modules, the rest"] = whole - sum(times.values())
import json
print(json.dumps({"seconds": whole, "times": times, "counts": counts}))
'''

def parts():
    '''Seconds of one import by part, by timers inside the process.'''
    code = f"MODULE = {MODULE!r}\n" + TIMED
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(ended.stdout)

def loading():
    '''Seconds in the dynamic loader: constructors of libraries, and the rest, which is mapping and relocating.

    glibc prints a line per step (LD_DEBUG, ld.so(8)); the time between two lines belongs to the first.
    '''
    code = f"MODULE = {MODULE!r}\n" + TIMED
    found, constructors = {"relocating and mapping": 0.0, "constructors": 0.0}, {}
    environment = {**os.environ, "LD_DEBUG": "files,reloc"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          env=environment) as child:
        inside, kind, library, since = False, "", "", 0.0
        for line in child.stderr:
            if not line.partition(b":\t")[2].strip() and not line.startswith(b"mark"):
                continue  # glibc prints empty lines around some steps
            now = time.perf_counter()
            if inside:
                found[kind] += now - since
                if library:
                    constructors[library] = constructors.get(library, 0) + now - since
            since = now
            if line.startswith(b"mark"):
                inside = line.split()[1] == b"begin"
            called = re.search(rb"calling init: .*?([^/\s]+)\s*$", line)
            kind = "constructors" if called else "relocating and mapping"
            library = called[1].decode() if called else ""
    assert child.returncode == 0
    found["largest constructors"] = dict(sorted(constructors.items(), key=lambda pair: -pair[1])[:4])
    return found

def files():
    for root in ("/opt", "/usr/lib", "/usr/bin"):
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path):
                    yield path

def evict(paths):
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

def cached(paths):
    '''Bytes in the page cache by path.'''
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found = {}
    for path in paths:
        size = os.path.getsize(path)
        file = os.open(path, os.O_RDONLY)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        assert libc.mincore(address, size, pages) == 0, path
        libc.munmap(address, size)
        os.close(file)
        found[path] = min(size, mmap.PAGESIZE * sum(page & 1 for page in bytes(pages)))
    return found

def cold(rounds):
    '''Imports from empty caches, plain and without collections, alternating; and what the last one has read.'''
    paths = list(files())
    seconds = {"as it is": [], "no collection while importing": []}
    left, after = 0, {}
    for _ in range(rounds):
        for variant in seconds:
            evict(paths)
            left = sum(cached(paths).values())
            seconds[variant].append(run(variant)["seconds"])
            after = cached(paths)
    largest = sorted(after, key=after.get, reverse=True)[:8]
    kinds = {"libraries": ".so", "byte code": ".pyc", "source": ".py"}
    return {
        "seconds": seconds, "bytes_before": left, "bytes": sum(after.values()),
        "bytes_by_kind": {kind: sum(size for path, size in after.items() if (
            ".so" in os.path.basename(path) if end == ".so" else path.endswith(end))) for kind, end in kinds.items()},
        "largest": {path: [after[path], os.path.getsize(path)] for path in largest},
    }

found = {"warm": warm(ROUNDS, EXTRA), "parts": [parts() for _ in range(PARTS)],
         "loading": [loading() for _ in range(PARTS)], "cold": cold(COLD) if COLD else None}
found["python"], found["libc"] = sys.version.split()[0], os.confstr("CS_GNU_LIBC_VERSION")
print(json.dumps(found))
"""

# All byte code that the module's import loads in one file: what opening and finding thousands of files costs at most.
ARCHIVE = r"""
import marshal, mmap, sys
from importlib.machinery import ModuleSpec, SourceFileLoader

def write(module):
    __import__(module)
    index, blobs, start = {}, [], 0
    for name, loaded in list(sys.modules.items()):
        spec = getattr(loaded, "__spec__", None)
        if spec is None or spec.name != name or not spec.cached or type(spec.loader) is not SourceFileLoader:
            continue
        try:
            with open(spec.cached, "rb") as file:
                code = file.read()[16:]
        except FileNotFoundError:
            continue
        folders = spec.submodule_search_locations
        index[name] = (start, len(code), spec.origin, spec.cached, folders and list(folders))
        blobs.append(code)
        start += len(code)
    with open("/bench/index", "wb") as file:
        file.write(marshal.dumps(index))
    with open("/bench/archive", "wb") as file:
        file.writelines(blobs)

def use():
    with open("/bench/index", "rb") as file:
        index = marshal.loads(file.read())
    with open("/bench/archive", "rb") as file:
        codes = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    class Loader(SourceFileLoader):
        def get_code(self, name):
            start, size = index[name][:2]
            return marshal.loads(codes[start : start + size])

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name not in index:
                return None
            _, _, origin, cached, folders = index[name]
            spec = ModuleSpec(name, Loader(name, origin), origin=origin, is_package=folders is not None)
            spec.has_location, spec.cached = True, cached
            if folders is not None:
                spec.submodule_search_locations = folders
            return spec

    sys.meta_path.insert(0, Finder)
"""


def _archive(**files: str) -> bytes:
    """A tar archive of Python files in /bench; names are keywords without the suffix."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, code in files.items():
            entry = tarfile.TarInfo(f"bench/{name}.py")
            entry.size, entry.mode = len(code.encode()), 0o644
            tar.addfile(entry, io.BytesIO(code.encode()))
    return buffer.getvalue()


def measure(image: str, module: str, rounds: int, extra: int, parts: int, cold: int) -> dict[str, Any]:
    """Run all measurements of one module in one container.

    Args:
        image: reference of an image.
        module: what to import.
        rounds: samples of the import as it is and without collections.
        extra: samples of each other variant; 0 leaves them out.
        parts: processes with timers inside.
        cold: rounds with an empty page cache; 0 leaves them out.

    Returns:
        Samples in seconds and bytes, as the container printed them.

    Raises:
        SystemExit: the image is not here, or a case failed in it; one line says which.
    """
    settings = f"MODULE, ROUNDS, EXTRA, PARTS, COLD = {module!r}, {rounds}, {extra}, {parts}, {cold}\n"
    code = f"{settings}STEPS = {STEPS.get(module, '')!r}\n{INSIDE}"
    write = f"import sys; sys.path.append('/bench'); import archive; archive.write({module!r})"
    script = 'python -c "$0" >/dev/null 2>&1 && exec python /bench/inside.py'
    try:
        container = docker_engine.client().containers.create(
            image, entrypoint=["tini", "--", "sh", "-c", script, write], network_mode="none", user="0",
            labels=docker_engine.resource_labels("benchmark"),
        )  # fmt: skip
    except docker.errors.ImageNotFound:
        sys.exit(f"no image {image} here: make image TARGET={image.partition(':')[2]}")
    try:
        container.put_archive("/", _archive(inside=code, archive=ARCHIVE))
        container.start()
        if container.wait(timeout=7200)["StatusCode"]:
            sys.exit(f"the measurement failed: {(container.logs().decode().strip().splitlines() or ['?'])[-1]}")
        found = json.loads(container.logs(stderr=False).decode().splitlines()[-1])
    finally:
        container.remove(force=True)
    assert isinstance(found, dict)
    return found


def ratio(samples: dict[str, list[dict[str, float]] | None], variant: str, what: str) -> float | None:
    """Median over rounds of "as it is" divided by ``variant``; ``what`` is "seconds" or "cpu".

    None if processes of the variant fail.
    """
    mine = samples[variant]
    steps = variant.endswith("two training steps after it")
    base = samples["as it is, and two training steps after it" if steps else "as it is"]
    if not mine or not base:
        return None
    return statistics.median(plain[what] / its[what] for plain, its in zip(base, mine, strict=False))


def _warm(module: str, samples: dict[str, list[dict[str, float]] | None]) -> list[str]:
    lines = [
        f"| import {module} | seconds | CPU seconds | faster, wall | faster, CPU | peak MB | page faults | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, taken in samples.items():
        if not taken:
            lines.append(f"| {variant} | fails | | | | | | |")
            continue
        median = {what: statistics.median(one[what] for one in taken) for what in taken[0]}
        lines.append(
            f"| {variant} | {median['seconds']:.2f} | {median['cpu']:.2f} | {ratio(samples, variant, 'seconds'):.2f}"
            f" | {ratio(samples, variant, 'cpu'):.2f} | {median['bytes'] / 1e6:.0f} | {median['faults']:.0f}"
            f" | {len(taken)} |"
        )
    return lines


def _parts(parts: list[dict[str, Any]], loading: list[dict[str, Any]]) -> list[str]:
    whole = statistics.median(run["seconds"] for run in parts)
    names = sorted({name for run in parts for name in run["times"]})
    medians = {name: statistics.median(run["times"].get(name, 0.0) for run in parts) for name in names}
    lines = ["| where the time goes | seconds | share | times |", "|---|---|---|---|"]
    for name in sorted(medians, key=lambda name: -medians[name]):
        count = parts[0]["counts"].get(name, "")
        lines.append(f"| {name} | {medians[name]:.3f} | {medians[name] / whole:.0%} | {count} |")
    lines.append(f"| all, with the timers | {whole:.3f} | | |")
    relocating = statistics.median(run["relocating and mapping"] for run in loading)
    constructors = statistics.median(run["constructors"] for run in loading)
    largest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in loading[0]["largest constructors"].items())
    lines += [
        "",
        f"Of dlopen, by LD_DEBUG: relocating and mapping {relocating:.2f} s, "
        f"constructors {constructors:.2f} s ({largest}).",
    ]
    return lines


def _cold(found: dict[str, Any]) -> list[str]:
    times = "; ".join(f"{name} {statistics.median(taken):.2f} s" for name, taken in found["seconds"].items())
    kinds = ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in found["bytes_by_kind"].items())
    largest = ", ".join(f"{Path(path).name} {size / 1e6:.0f} of {whole / 1e6:.0f}"
                        for path, (size, whole) in list(found["largest"].items())[:5])  # fmt: skip
    return [
        f"From an empty page cache ({found['bytes_before'] / 1e6:.0f} MB left in it): {times}. "
        f"{found['bytes'] / 1e6:.0f} MB are in it after the import (MB: {kinds}; {largest})."
    ]


def report(results: dict[str, Any]) -> list[str]:
    """The tables of ``results``, by IMAGE=MODULE, as Markdown, and whether the target is met."""
    lines = ["# Importing a framework", ""]
    for name, found in results.items():
        image, _, module = name.rpartition("=")
        details = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        lines += [
            *(f"## {module} in {image}", "", f"Written by `{found['command']}`. Measured on {details}.", ""),
            *(*_warm(module, found["warm"]), ""),
        ]
        lines += [*_parts(found["parts"], found["loading"]), ""] if found["parts"] else []
        lines += [*_cold(found["cold"]), ""] if found["cold"] else []
        reached = ratio(found["warm"], CANDIDATE, "seconds")
        if module == TARGET_MODULE and reached is not None:
            verdict = "met" if reached >= TARGET else "MISSED"
            lines += [f"Target: >= {TARGET} by wall time with {CANDIDATE!r}; {reached:.2f}: {verdict}.", ""]
    return lines[:-1]


def _machine() -> dict[str, Any]:
    host = trainers.machine("cpu")
    return {"cpu": host["cpu"], "cores": host["cores"], "kernel": platform.release(),
            "load": f"{os.getloadavg()[0]:.1f} at the start", "date": host["date"]}  # fmt: skip


def main() -> None:
    """Measure each IMAGE=MODULE and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pairs", nargs="*", metavar="IMAGE=MODULE", default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=15, help="samples of the import as it is and of the candidate")
    parser.add_argument("--extra", type=int, default=15, help="samples of each other variant; 0: none")
    parser.add_argument("--parts", type=int, default=5, help="processes with timers inside; 0: none")
    parser.add_argument("--cold", type=int, default=3, help="rounds with an empty page cache; 0: none")
    parser.add_argument("--save", action="store_true", help="write the results; other pairs' are kept")
    arguments = parser.parse_args()
    command = " ".join(["python -m benchmarks.imports", *sys.argv[1:]])
    counts = (arguments.rounds, arguments.extra, arguments.parts, arguments.cold)
    results: dict[str, Any] = {}
    for pair in arguments.pairs:
        image, separator, module = pair.rpartition("=")
        if not separator:
            parser.error(f"not IMAGE=MODULE: {pair}")
        about = {"command": command, "machine": _machine()}
        results[pair] = {**about, **measure(image, module, *counts)}
        print(f"measured: {pair}", file=sys.stderr, flush=True)
    print("\n".join(report(results)))
    if arguments.save:
        file = RESULTS / "imports.json"
        results = {**(json.loads(file.read_text()) if file.exists() else {}), **results}
        file.write_text(json.dumps(results, indent=1) + "\n")
        file.with_suffix(".md").write_text("\n".join(report(results)) + "\n")


if __name__ == "__main__":
    main()
