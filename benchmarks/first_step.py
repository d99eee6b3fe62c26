"""Which part of an image the first training step reads.

    python -m benchmarks.first_step tf-cpu           1 minute; needs root
    python -m benchmarks.first_step tf-cpu xla --save

`mnist --fake-data` runs in trainyard:<target> until it logs its first step, with nothing of the image in the page
cache. What is in the cache then was read, the kernel's read-ahead included: what a file system that fetches on demand
(GKE image streaming, stargz) would have to fetch. The page cache of the whole machine is dropped before each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
from benchmarks import cold_start
from rich import box
from rich.table import Table

from trainyard.common import console
from trainyard.common.console import Messages, say, show
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.oci import docker_engine, image_store
from trainyard.oci.inventory import read_layer
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units

RESULTS = ROOT / "benchmarks" / "results" / "first-step.json"

#: Writing it drops clean pages of the page cache. https://docs.kernel.org/admin-guide/sysctl/vm.html#drop-caches
_DROP = Path("/proc/sys/vm/drop_caches")

#: A layer of which less is read is in the row of the others, in bytes.
_SHOWN = 5_000_000


def cached(files: list[Path]) -> list[int]:
    """Bytes in the page cache of each file that has some there.

    Raises:
        StepFailed: util-linux's fincore cannot say it.
    """
    found = subprocess.run(
        ["xargs", "-0", "fincore", "--bytes", "--noheadings", "--output=RES"],
        input="\0".join(map(str, files)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        raise StepFailed(f"fincore failed: {(found.stderr.strip().splitlines() or ['no output'])[-1]}")
    return [int(line) for line in found.stdout.split() if line != "0"]


def layer_folders(mounts: str, count: int) -> list[Path]:
    """Where the engine has the files of an image's layers, the lowest first.

    Args:
        mounts: /proc/mounts in one of its containers.
        count: how many layers the image has; what is mounted above them is the container's.
    Raises:
        StepFailed: the container's root is no overlay of that many folders.
    """
    root = next((line.split() for line in mounts.splitlines() if line.split()[1] == "/"), ["", "", "nothing", ""])
    options = dict(one.partition("=")[::2] for one in root[3].split(","))
    lower = options.get("lowerdir", "").split(":")
    if root[2] != "overlay" or len(lower) < count or not lower[0].startswith("/"):
        raise StepFailed(f"the container's root is {root[2]} of {len(lower)} folders, not an overlay of {count} layers")
    return [Path(folder) for folder in lower[-count:]][::-1]


@contextlib.contextmanager
def after_first_step(reference: str) -> Iterator[None]:
    """A container of the trainer, paused when it has logged a step.

    Raises:
        StepFailed: it ended without.
    """
    name = f"first-step-{uuid.uuid4().hex[:8]}"
    variables = [f"--env={key}={value}" for key, value in cold_start.ENVIRONMENT.items()]
    command = ["docker", "run", "--rm", f"--name={name}", "--network=none", *variables, reference, "mnist"]
    process = subprocess.Popen(
        [*command, *cold_start.FLAGS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    timer = threading.Timer(cold_start.LIMIT, process.kill)
    timer.start()
    last = ""
    try:
        for line in process.stdout or ():
            last = line.strip() or last
            if cold_start.FIRST_STEP.search(line):
                break
        else:
            raise StepFailed(f"{reference} ended with {process.wait()} and logged no first step: {last}")
        docker_engine.client().containers.get(name).pause()
        yield
    finally:
        timer.cancel()
        with contextlib.suppress(docker.errors.APIError):
            docker_engine.client().api.remove_container(name, force=True)
        process.kill()
        process.wait()


def measure(target: str) -> dict[str, Any]:
    """Bytes and files that the first step of a target reads, by layer."""
    reference = f"{NAME}:{target}"
    contents = image_store.read(reference, read_layer).layers
    mounts = docker_engine.client().containers.run(reference, ["/proc/mounts"], entrypoint="cat", remove=True)
    folders = layer_folders(mounts.decode(), len(contents))
    os.sync()
    _DROP.write_text("3")
    layers = []
    with after_first_step(reference):
        for folder, layer in zip(folders, contents, strict=True):
            files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
            read = cached(files)
            size = sum(path.stat().st_size for path in files)
            one = {"name": cold_start.describe(layer.found), "size": size, "files": len(files)}
            layers.append(one | {"read": sum(read), "files_read": len(read)})
    digest = docker_engine.digest(reference, made_by=f"make image TARGET={target}")
    return {"digest": digest, "layers": layers}


def rows(one: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Layer, bytes read, of bytes, files read: layers of which much is read, all others, and the whole."""
    layers = one["layers"]
    shown = sorted((layer for layer in layers if layer["read"] >= _SHOWN), key=lambda layer: -int(layer["read"]))
    others = [layer for layer in layers if layer["read"] < _SHOWN]
    groups = [(layer["name"], [layer]) for layer in shown] + [(f"{len(others)} others", others), ("**all**", layers)]
    found = []
    for name, group in groups:
        read, size, files, files_read = (
            sum(layer[key] for layer in group) for key in ("read", "size", "files", "files_read")
        )
        part = f"{in_units(size)} ({100 * read / max(1, size):.0f} %)"
        found.append((name, in_units(read), part, f"{files_read:,} of {files:,}"))
    return found


def document(found: dict[str, Any]) -> str:
    """The tables for the repository."""
    lines = [
        "<!-- Written by `python -m benchmarks.first_step --save`. Do not edit. -->",
        "# What the first training step reads of an image",
        "",
        "Bytes of the image's files that are in the page cache when `mnist --fake-data` has logged its first step, the",
        "kernel's read-ahead included, by layer. `benchmarks/first_step.py` says how it is measured.",
    ]
    for target, one in found["targets"].items():
        lines += ["", f"## {target}", "", "| layer | read | of | files read |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows(one)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print; the figures as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="an image that `make image` has made")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and its tables")
    options = parser.parse_args()
    if os.geteuid():
        raise UserError("this benchmark needs root: it drops the page cache and reads the engine's store")
    found = {"targets": {target: measure(target) for target in options.targets}}
    for target, one in found["targets"].items():
        table = Table(target, "read", "of", "files read", box=box.SIMPLE)
        for row in rows(one):
            table.add_row(*(cell.strip("*") for cell in row))
        show(table)
    if options.save:
        merged = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"targets": {}}
        merged["targets"] |= found["targets"]
        RESULTS.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(document(merged), encoding="utf-8")
        say(f"wrote {RESULTS.relative_to(ROOT)} and .md")
    console.result(found, as_json=options.json)


if __name__ == "__main__":
    try:
        with Messages():
            main()
    except (UserError, StepFailed) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # the container is removed
