"""How long it takes from `docker run` on an engine with an empty store to the first training step that is logged.

    python -m benchmarks.cold_start tf-cpu                 three sides, 5 rounds, about 10 minutes; needs root
    python -m benchmarks.cold_start xla --rounds 3         needs 35 GB of disk
    python -m benchmarks.cold_start tf-cpu --keep --save   keeps what was built for the next time; writes the results
    python -m benchmarks.cold_start --report               measures nothing, writes the table of the kept figures anew

The sides, with the same base, versions, trainers and flags:

    ours       trainyard:<target>, which `make image TARGET=<target>` makes
    single     our Dockerfile with all wheels in one layer, packed with zstd as ours
    original   the recipe of benchmarks/images_sides.py, packed with gzip

A registry on this machine is behind a link of 1 Gbit/s (tc-tbf); how much it carries is measured first, with the
largest blob. A second engine is started for each round, with an empty store. It runs `mnist --fake-data`, with the
trainer's defaults but --log-steps 1 --num-steps 1; the containers have no network. The phases of a round:

    download   until the last layer is complete in the engine's store. Layers are unpacked meanwhile.
    unpack     until `docker run` reports that the image is pulled
    start      until the container's first process runs, as the engine reports it
    launch     the launcher, where there is one, and Python's start, to the first import of a package of the framework
    import     of the framework's packages; benchmarks/import_times.py says when
    step       all else: data, model, tracing or compiling, to the line `| Training Device=... Step=0` in the output

Files that were just unpacked are in the page cache when they are imported, as on a new machine. The registry's blobs
are in it too. All share this machine's processors, the registry included, and the link has no latency. A round waits up
to two minutes until other processes use less than 10 % of the processors; what they used then is in the results.

Everything that is started here is removed at the end, also after Ctrl-C. With it goes the build cache that came to be
meanwhile, of other builds on this machine too; --keep keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cold_start_report as report
from benchmarks import import_times, trainers
from benchmarks.cold_start_engine import HOST, Engine, Link, Meter, check_host, wait_until_quiet
from benchmarks.images import cleaned
from benchmarks.images_sides import OneLayer, Original, Side, Tree
from rich import box
from rich.table import Table
from tests.image.registry import running

from trainyard.common import console
from trainyard.common.console import Messages, say, show, warn
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import build
from trainyard.oci import docker_engine, image_store, registry
from trainyard.oci.inventory import LayerPackages, read_layer
from trainyard.spec.model import Spec, load
from trainyard.spec.naming import NAME, day_and_hash
from trainyard.spec.units import in_units

RESULTS = ROOT / "benchmarks" / "results" / "cold-start.json"

#: Target -> the packages whose import is measured, and the free bytes of disk that the whole needs.
TARGETS = {"tf-cpu": (("tensorflow", "keras"), 12e9), "xla": (("torch", "torch_xla"), 35e9)}

#: Side -> how its image is made; ours is there already.
PEERS: dict[str, type[Side]] = {"single": OneLayer, "original": Original}

#: Flags of the trainer: its defaults, and the first step is logged at once.
FLAGS = ("--fake-data", "--log-steps=1", "--num-steps=1")

#: Variables of all sides: without it, torch_xla looks for a TPU. Our launcher sets it too.
ENVIRONMENT = {"PJRT_DEVICE": "CPU"}

#: Seconds after which a round has failed; the slowest took 51 (tf-cpu, 2 busy cores, 2026-11).
LIMIT = 900

#: Seconds that a round waits for other processes to end: builds, tests.
QUIET_LIMIT = 120

#: What the output is searched for: the end of the pull, and a trainer's first step.
_PULLED = re.compile(r"Status: Downloaded newer image")
FIRST_STEP = re.compile(r"\| Training Device=\S+ Epoch=1 Step=0 ")


@dataclass(frozen=True)
class Image:
    """A side's image at the registry.

    Attributes:
        reference: for the second engine.
        layers: digest of the blob -> ``name``, and bytes ``packed`` and ``unpacked``; lowest first.
        command: what `docker run` is given behind the image.
        path: value of PYTHONPATH, without the folder that is mounted.
    """

    reference: str
    digest: str
    layers: dict[str, dict[str, Any]]
    command: tuple[str, ...]
    path: str = ""


def build_side(side: str, spec: Spec, folder: Path, name: str) -> str:
    """Build the image of a peer, in a copy of the tree below ``folder``; its reference."""
    base = build.plan_for(spec).base
    tree = folder / f"tree-{side}"
    tree.mkdir()
    made = PEERS[side](Tree(tree, spec), name, (base, base))
    made.prepare()
    made.build()
    return made.reference


def describe(layer: LayerPackages) -> str:
    """What a layer holds, in a few words."""
    if layer.python:
        names = sorted(layer.python)
        return names[0] if len(names) == 1 else f"{len(names)} wheels"
    return "Debian packages" if layer.debian is not None else "other files"


def push(reference: str, address: str, side: str, target: str) -> Image:
    """Push a local image to the registry at ``address``, which is localhost with a port."""
    digest = docker_engine.digest(reference, made_by=f"make image TARGET={target}")
    parts = image_store.read(reference, read_layer)
    layers: dict[str, dict[str, Any]] = {
        layer.digest: {"name": describe(layer.found), "packed": layer.stored, "unpacked": layer.found.size}
        for layer in parts.layers
    }
    remote = f"{address}/cold-start/{side}:{target}"
    docker_engine.image(reference, made_by=f"make image TARGET={target}").tag(remote)
    try:
        for _ in registry.push(remote):
            pass
    finally:
        docker_engine.client().api.remove_image(remote, noprune=True)
    say(f"{side}: {len(layers)} layers, {in_units(sum(layer['packed'] for layer in layers.values()))} packed")
    spec = load(target)
    trainer = f"trainers.{spec.trainers.package}.mnist"
    original = side == "original"
    command = ("python", "-m", trainer, *FLAGS) if original else ("mnist", *FLAGS)
    return Image(remote.replace("localhost", HOST, 1), digest, layers, command, "/app:" if original else "")


def _warn_if_outdated(spec: Spec, reference: str) -> None:
    """Warn if a local image was not built from the files that the other sides are built from."""
    command = f"make image TARGET={spec.target}"
    labels = docker_engine.image(reference, made_by=command).labels
    found, wanted = labels.get("org.opencontainers.image.version", ""), build.plan_for(spec).tag
    if day_and_hash(found)[1] != day_and_hash(wanted)[1]:
        warn(f"{reference} is {found}, and the files here would make {wanted}: run '{command}' to compare the same")


def prepare(target: str, sides: list[str], address: str, folder: Path, *, keep: bool) -> dict[str, Image]:
    """Build and push the images; by side."""
    spec, name = load(target), f"bench-cold-start-{target}"
    found = {}
    for side in sides:
        say(f"{side}: building and pushing")
        reference = f"{NAME}:{target}"
        # The disk has room for the files and the cache of one side at a time.
        with contextlib.nullcontext() if keep else cleaned(name):
            if side == "ours":
                _warn_if_outdated(spec, reference)
            else:
                reference = build_side(side, spec, folder, name)
            found[side] = push(reference, address, side, target)
            if not keep and side != "ours":
                docker_engine.untag(reference)
    return found


@contextlib.contextmanager
def _time_limit(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process after :data:`LIMIT` seconds, or when what is done within fails."""
    timer = threading.Timer(LIMIT, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def observe(engine: Engine, link: Link, image: Image, hook: Path, packages: tuple[str, ...]) -> report.Observed:
    """Run an image on an engine that does not have it.

    Args:
        hook: folder with benchmarks/import_times.py as sitecustomize.py.
        packages: those whose import is measured.
    Raises:
        StepFailed: it does not log a first step, or something of it was not observed.
    """
    variables = ENVIRONMENT | {"PYTHONPATH": f"{image.path}/cold-start", "COLD_START_PACKAGES": ",".join(packages)}
    command = ["docker", "--host", engine.host, "run", "--name=cold-start", "--network=none"]
    command += [f"--volume={hook}:/cold-start:ro", *(f"--env={key}={value}" for key, value in variables.items())]
    command += [image.reference, *image.command]
    others = wait_until_quiet(QUIET_LIMIT)
    last = ""
    with Meter(link) as meter:
        seen = report.Observed(begun=time.time(), others=others)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        with _time_limit(process):
            for line in process.stdout or ():
                now = time.time()
                last = line.strip() or last
                if _PULLED.match(line):
                    seen.pulled = now
                elif imported := report.read_import(line):
                    seen.imports.append(imported)
                elif FIRST_STEP.search(line) and not seen.logged:
                    seen.logged = now
            status = process.wait()
    if status or not seen.logged:
        raise StepFailed(f"{image.reference} ended with {status} and logged no first step: {last}")
    state = engine.client.containers.get("cold-start").attrs["State"]
    seen.started = datetime.datetime.fromisoformat(state["StartedAt"]).timestamp()
    seen.ready = {digest: engine.downloaded(digest) for digest in image.layers}
    seen.unpacked = report.unpacked(engine.log.read_text(encoding="utf-8", errors="replace"))
    seen.readings = meter.readings
    missing = [
        *([] if seen.pulled else ["the end of the pull"]),
        *([] if seen.imports else ["an import"]),
        *(f"the unpacking of {digest}" for digest in image.layers if digest not in seen.unpacked),
    ]
    if missing:
        raise StepFailed(f"{image.reference}: {missing[0]} was not observed; the versions of this engine differ")
    return seen


def measure(target: str, rounds: int, sides: list[str], folder: Path, *, keep: bool) -> dict[str, Any]:
    """All rounds of a target; for :mod:`benchmarks.cold_start_report`.

    Raises:
        UserError: there is no image of ``target``, or too little disk.
        StepFailed: an image cannot be built, or does not train, or the link does not have its rate.
    """
    packages, need = TARGETS[target]
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(f"{folder} has {in_units(free)} free; {target} needs {in_units(need)}")
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainyard-cold-start-")))
        hook = temporary / "hook"
        hook.mkdir()
        shutil.copyfile(import_times.__file__, hook / "sitecustomize.py")
        for path in (temporary, hook, hook / "sitecustomize.py"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # the image's user is another
        link = stack.enter_context(Link())
        address = running.address(stack.enter_context(running.container()))
        images = prepare(target, sides, address, temporary, keep=keep)
        first = next(iter(images.values()))
        largest = max(first.layers, key=lambda digest: int(first.layers[digest]["packed"]))
        repository = first.reference.partition("/")[2].rpartition(":")[0]
        speed = link.measure(f"http://{address.replace('localhost', HOST)}/v2/{repository}/blobs/{largest}")
        say(f"the link carries {speed / 1e9:.2f} Gbit/s")
        figures: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        versions: dict[str, str] = {}
        for number in range(rounds):
            # Each round begins with another side, so that none is always the first or the last.
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                with Engine(link, folder) as engine:
                    versions = engine.versions()
                    figures[side].append(report.round_of(observe(engine, link, images[side], hook, packages)))
                one = figures[side][-1]
                parts = ", ".join(f"{phase} {value:.2f}" for phase, value in one["phases"].items())
                say(f"round {number + 1}, {side}: {one['seconds']:.2f} s: {parts}; others {100 * one['others']:.0f} %")
    return {
        "sides": {
            side: {"digest": image.digest, "layers": image.layers, "rounds": figures[side]}
            for side, image in images.items()
        },
        "link": speed,
        "machine": machine(versions),
        "command": f"python -m benchmarks.cold_start {target} --rounds {rounds}",
    }


def machine(versions: dict[str, str]) -> dict[str, str]:
    """What the figures hold for.

    Args:
        versions: of the engine and of the programs that it uses.
    """
    host = trainers.machine("cpu")
    memory = in_units(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    used = {f"Docker {name}" if name == "Engine" else name: versions[name] for name in ("Engine", "containerd", "runc")}
    return {"cpu": host["cpu"], "cores": host["cores"], "memory": memory, "kernel": platform.release(), **used,
            "date": host["date"]}  # fmt: skip


def kept() -> dict[str, Any]:
    """The figures of the repository."""
    try:
        found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"targets": {}}
    return found


def save(found: dict[str, Any]) -> None:
    """Write the figures and their tables."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report.document(found), encoding="utf-8")
    say(f"wrote {RESULTS.relative_to(ROOT)} and .md")


def table(target: str, one: dict[str, Any]) -> Table:
    """The figures of a target, for people."""
    found = Table(target, *(report.SIDES[side] for side in report.SIDES if side in one["sides"]), box=box.SIMPLE)
    for row in report.rows(one):
        found.add_row(*(cell.strip("*") for cell in row))
    return found


def main() -> None:
    """Measure and print; the figures as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=list(TARGETS), help="the image to measure")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is measured (default 5)")
    parser.add_argument("--sides", default=",".join(report.SIDES), help=f"of {', '.join(report.SIDES)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where the engine's store is (default "
                        "/var/tmp): on a disk, not on overlayfs or tmpfs")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the images that are built, and the build cache")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and its table")
    options = parser.parse_args()
    sides = options.sides.split(",")
    for side in sides:
        if side not in report.SIDES:
            parser.error(f"there is no side {side!r}; there are {', '.join(report.SIDES)}")
    found: dict[str, Any] = {"targets": {}}
    if not options.report:
        if not options.target:
            parser.error("name a target, or --report")
        check_host()
        found["targets"][options.target] = measure(
            options.target, max(1, options.rounds), sides, options.folder, keep=options.keep
        )
    merged = {"targets": kept()["targets"] | found["targets"]}
    shown = merged if options.report else found
    for target, one in shown["targets"].items():
        show(table(target, one))
    for words, value, met in report.verdicts(shown):
        say(f"{words}: {value}, {'met' if met else 'MISSED'}")
    if options.save or options.report:
        save(merged)
    console.result(shown, as_json=options.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all that was started is removed
    try:
        with Messages():
            main()
    except (UserError, StepFailed) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # all that was started is removed
