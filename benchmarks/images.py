"""Our images against the original recipe: time to build, bytes to push, size, what they share, time to import.

    python -m benchmarks.images                                     everything, one part after the other (half an hour)
    python -m benchmarks.images --only tf-cpu/ours,tf-cpu/original  parts; what was measured before is kept and shown
    python -m benchmarks.images --report                            only shows, and writes benchmarks/results/images.md

``one-layer`` is our own build with all wheels in one layer, as the images were before each large wheel had its own.

The recipe is one stage: `pip install torch torch_xla`, `pip install tensorflow` for its launcher, cloudml-hypertune,
then the files; layers packed with gzip. Versions, base, package index and engine are the same as ours. Steps of a part:

    cold                 `--no-cache`, and every wheel is downloaded, as on a new machine
    no change
    trainer edited       a comment in a trainer
    wheel patched        another version of one wheel: nvidia-nvjitlink for xla, libclang for tf-cpu
    requirement added    tabulate: ours in an image that extends the target, as a user adds it
    base updated         the same base with one more file

Seconds are those of the build with the export of the image; bytes are what a registry's storage grew by when the image
was then pushed to it. All is done on a copy of the tree under a temporary name, and removed afterwards with its build
cache.
Parts are kept in build/benchmarks/images.json, so that a small machine can do one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
from benchmarks.images_report import markdown, tables, verdicts
from benchmarks.images_sides import OneLayer, Original, Ours, Side, Storage, Tree
from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running

from trainyard.common import console
from trainyard.common.console import Messages, say, show
from trainyard.common.docker_engine import resource_labels
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import base_image, package_index
from trainyard.oci import image_store
from trainyard.oci.inventory import read_layer
from trainyard.spec.model import Spec, load
from trainyard.spec.units import in_units

#: The parts of a whole run, in the order of their size.
PARTS = (
    "tf-cpu/ours", "tf-cpu/one-layer", "tf-cpu/original", "xla/ours", "xla/one-layer", "xla/original", "imports"
)  # fmt: skip

#: Steps that take a minute or more with a CUDA torch in one layer say nothing new: they are measured with tf-cpu alone.
LEFT_OUT = {
    "xla/original": ("base updated", "wheel patched"),
    "xla/one-layer": ("base updated", "wheel patched", "requirement added"),
}

#: The side of a part -> how it makes an image.
SIDES: dict[str, type[Side]] = {"ours": Ours, "one-layer": OneLayer, "original": Original}

#: Target -> the wheel of which another version is installed.
PATCHED = {"xla": "nvidia-nvjitlink-cu12==12.8.61", "tf-cpu": "libclang==17.0.6"}

#: Parts, kept between runs, and what the repository shows of them.
KEPT, RESULTS = state_folder() / "benchmarks" / "images.json", ROOT / "benchmarks" / "results" / "images.md"

#: Times an import in fresh containers; without byte code, Python looks for it in an empty folder.
IMPORT = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"


def bases(spec: Spec, name: str) -> tuple[str, str]:
    """The base, and an update of it: one file more."""
    before = base_image.resolve(CONTEXT, spec.base).reference
    after = f"{name}-base:updated"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(f"FROM {before}\nRUN date >/etc/updated\n", encoding="utf-8")
        ENGINE.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={after}", folder)
    return before, after


@contextlib.contextmanager
def cleaned(name: str) -> Iterator[None]:
    """Remove every image called ``name`` afterwards, and the cache that came to be."""
    before = ENGINE.cached().keys()
    try:
        yield
    finally:
        # Not the SDK's list of images, which asks for each again: others come and go meanwhile.
        for image in ENGINE.client.api.images():
            for tag in image["RepoTags"] or []:
                if str(tag).startswith(name):
                    ENGINE.untag(str(tag))
        with contextlib.suppress(StepFailed, docker.errors.APIError):  # what was measured is worth more
            ENGINE.drop_cached(ENGINE.cached().keys() - before)


def size(reference: str) -> dict[str, Any]:
    """``unpacked`` and ``packed`` bytes of a local image, and its ``blobs`` (digest -> bytes)."""
    parts = image_store.read(ENGINE, reference, read_layer)
    return {
        "unpacked": sum(layer.found.size for layer in parts.layers),
        "packed": sum(layer.stored for layer in parts.layers),
        "blobs": {layer.digest: layer.stored for layer in parts.layers},
    }


def measure(part: str, repeat: int) -> dict[str, Any]:
    """One part: step -> ``seconds`` (median), ``pushed`` bytes; and ``size``."""
    target, who = part.split("/")
    spec, name = load(target), f"bench-{uuid.uuid4().hex[:6]}"
    found: dict[str, Any] = {"steps": {}}
    with cleaned(name), tempfile.TemporaryDirectory() as folder, running.container() as started:
        storage = Storage(started)
        side = SIDES[who](Tree(Path(folder), spec), name, bases(spec, name))
        side.prepare()

        def step(words: str, times: list[float], reference: str = "") -> None:
            pushed = storage.push(reference or side.reference)
            found["steps"][words] = {"seconds": round(statistics.median(times), 2), "pushed": pushed}
            say(f"{part}: {words}: {found['steps'][words]['seconds']} s, {in_units(pushed)} pushed")

        step("cold", [side.build(cold=True)])
        found["size"] = size(side.reference)
        found["import"] = import_seconds(side.reference, spec.framework.name, 2 * repeat + 1)
        step("no change", [side.build() for _ in range(repeat)])
        edits = []
        for _ in range(repeat):
            side.tree.edit_trainer()
            edits.append(side.build())
        step("trainer edited", edits)
        left_out = LEFT_OUT.get(part, ())
        if "requirement added" not in left_out:
            reference, found["requirement"] = side.require("tabulate==0.9.0")  # no other image here has it
            step("requirement added", [side.build_required()], reference)
        if "wheel patched" not in left_out:
            found["wheel"] = side.patch(PATCHED[target])
            step("wheel patched", [side.build()])
        if "base updated" not in left_out:
            side.updated = True
            step("base updated", [side.build()])
    return found


def import_seconds(reference: str, module: str, repeat: int, *, byte_code: str = "") -> float:
    """Seconds of an import in a fresh container: the median.

    Args:
        byte_code: folder in which byte code is looked up instead of beside the sources.
    """
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": byte_code, "PJRT_DEVICE": "CPU"}
    times = []
    for _ in range(repeat):
        said = ENGINE.client.containers.run(
            reference,
            ["-c", IMPORT.format(module=module)],
            entrypoint=["python"],
            environment={key: value for key, value in environment.items() if value},
            network_mode="none",
            labels=resource_labels("benchmark"),
            remove=True,
        )
        times.append(float(said.decode().strip().splitlines()[-1]))
    return round(statistics.median(times), 2)


def imports(repeat: int = 3) -> dict[str, dict[str, float]]:
    """Target -> seconds of the framework's import in a fresh container, ``with`` byte code and ``without``."""
    found: dict[str, dict[str, float]] = {}
    for target in ("tf-cpu", "xla"):
        reference, module = f"trainyard:{target}", load(target).framework.name
        ENGINE.image(reference, made_by=f"make image TARGET={target}")
        found[target] = {}
        for words, prefix in (("with", ""), ("without", "/nowhere")):
            found[target][words] = import_seconds(reference, module, repeat, byte_code=prefix)
        say(f"{target}: import {module}: {found[target]['with']} s, without byte code {found[target]['without']} s")
    return found


def kept() -> dict[str, Any]:
    """What was measured before, part by part."""
    try:
        found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def main() -> None:
    """Measure and print; the figures as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--repeat", type=int, default=3, help="builds without a change and after an edit (default 3)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    wanted = [] if options.report else (options.only.split(",") if options.only else list(PARTS))
    for part in wanted:
        if part not in PARTS:
            parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
    found = kept()
    for part in wanted:
        found[part] = imports() if part == "imports" else measure(part, max(1, options.repeat))
        found["day"] = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, package index of {_index()}"
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not found:
        parser.error("nothing was measured yet")
    for table in tables(found):
        show(table)
    for words, value, met in verdicts(found):
        say(f"{words}: {value}, {'met' if met else 'MISSED'}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(markdown(found), encoding="utf-8")
    say(f"wrote {RESULTS.relative_to(ROOT)}")
    console.result(found, as_json=options.json)


def _index() -> str:
    chosen = package_index.choose(load("xla"))[0]
    return "PyTorch's CPU wheels" if chosen == "pytorch-cpu" else "CUDA builds (PyTorch's CPU index was out of reach)"


if __name__ == "__main__":
    try:
        with Messages():
            main()
    except (UserError, StepFailed) as error:
        sys.exit(str(error))
