"""How long a build takes and how many bytes a push sends: cold, without a change, after an edit.

    python -m benchmarks.rebuild [TARGET] [--repeat 5] [--warm] [--json]

One run, on a copy of the tree and under an image name of its own, so that nothing of the user's is touched:

* `cold`: with `--no-cache`. Downloads may come from the installers' cache mounts, which that flag leaves alone.
  `--warm` leaves these out.
* `no change`, `trainer edited`, `launcher edited`: the median of --repeat builds, each edit a new one.

Seconds are those of the build with the export of the image. Bytes are what a registry's storage grew by when the
image was pushed to it after the step. The peer is what people write without us: one stage, pip, the same pinned
packages, gzip layers; it is measured in the same run, on the same base and engine. The builder's cache keeps what was
built here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker.errors
from rich.table import Table
from testcontainers.community.registry import DockerRegistryContainer

from scripts import base, cli, engine, indexes, locks, registry
from scripts.cli import ROOT, StepFailed, log, say
from scripts.plan import FILE_EPOCH
from scripts.spec import Spec, load
from scripts.units import in_units
from tests.image.registry import running

#: What the main issue asks of a tf-cpu image after a trainer edit: seconds of build, bytes pushed.
TARGET_SECONDS, TARGET_BYTES = 3.0, 200_000

#: The peer. {base} is the base that ours is built on, which may come without pip.
PLAIN = """\
FROM {base}
RUN apt-get -qq update \\
 && apt-get -qq install -y --no-install-recommends ca-certificates python3 python3-venv \\
 && rm -rf /var/lib/apt/lists/* \\
 && python3 -m venv /opt/venv
COPY requirements.txt /app/requirements.txt
RUN --mount=type=secret,id=ca,target=/run/secrets/ca.pem \\
    PIP_CERT=/run/secrets/ca.pem /opt/venv/bin/pip install --quiet --no-cache-dir -r /app/requirements.txt
COPY launcher /app/launcher
COPY trainers /app/trainers
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app
CMD ["python", "-m", "trainers.tf.mnist"]
"""

#: The first build: cold, or with --warm whatever the builder's cache makes of it.
FIRST = ("cold", "first, cache as found")

#: Builds an image, without the builder's cache if True; seconds.
Builder = Callable[[bool], float]

EDITS = ("no change", "trainer edited", "launcher edited")


class Tree:
    """A copy of what images are made of, to edit at will."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("images", "launcher", "trainers", "templates", "scripts", "examples", ".github"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        for name in (".dockerignore", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self._files = {
            "trainer edited": folder / "trainers" / spec.trainers.package / f"{spec.trainers.default}.py",
            "launcher edited": folder / "launcher" / "__init__.py",
        }

    def change(self, step: str) -> None:
        """Make the edit of ``step``: a comment that no build has seen before."""
        if step in self._files:
            with self._files[step].open("a", encoding="utf-8") as file:
                file.write(f"# {uuid.uuid4()}\n")


def ours(tree: Tree, spec: Spec, name: str, on: str) -> tuple[str, Builder]:
    """Reference of our image, and what builds it: seconds of the build, as `make build` reports them."""
    environment = os.environ | {
        "IMAGE_NAME": name,
        "BASE": on,
        "SOURCE_DATE_EPOCH": str(FILE_EPOCH),
        "TRAINYARD_BUILD": str(tree.folder / "build"),
    }
    environment.pop("NO_CACHE", None)

    def verb(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command, cwd=tree.folder, env=environment | more, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no words"])[-1]
            raise StepFailed(f"'python -m {' '.join(arguments)}' failed in the copy: {last}")
        return done.stdout

    verb("scripts.render")  # the image's name is part of what is rendered

    def build(no_cache: bool) -> float:
        more = {"NO_CACHE": "1"} if no_cache else {}
        return float(json.loads(verb("scripts.build", spec.target, "--json", **more))["seconds"])

    return f"{name}:{spec.target}-candidate", build


def plain(tree: Tree, spec: Spec, name: str, on: str) -> tuple[str, Builder]:
    """Reference of the peer's image, and what builds it: seconds from `docker buildx build` to its end."""
    pins = locks.installed(spec, indexes.choose(spec)[0])
    text = "".join(f"{package}=={version}\n" for package, version in pins.items())
    (tree.folder / "requirements.txt").write_text(text, encoding="utf-8")
    dockerfile = tree.folder / "Dockerfile.plain"
    dockerfile.write_text(PLAIN.replace("{base}", on), encoding="utf-8")
    (tree.folder / "Dockerfile.plain.dockerignore").write_text("*\n!requirements.txt\n!launcher\n!trainers\n")
    reference = f"{name}:plain"
    command = ["build", "--quiet", "--load", "--provenance=false", f"--tag={reference}", f"--file={dockerfile}"]
    bundle = engine.ca_bundle()
    if bundle:
        command.append(f"--secret=id=ca,src={bundle}")

    def build(no_cache: bool) -> float:
        started = time.monotonic()
        engine.buildx(*command, *(["--no-cache"] if no_cache else []), str(tree.folder), quiet=True)
        return time.monotonic() - started

    return reference, build


class Storage:
    """A throw-away registry, and how many bytes it stores."""

    def __init__(self, started: DockerRegistryContainer) -> None:
        self._container = started

    def _bytes(self) -> int:
        found = self._container.exec("find /var/lib/registry -type f -name data -path '*/blobs/*' -printf %s+")
        assert isinstance(found.output, bytes)  # not streamed
        if found.exit_code and b"No such file" not in found.output:
            raise StepFailed(f"cannot measure the registry's storage: {found.output.decode(errors='replace').strip()}")
        return sum(int(size) for size in found.output.decode().split("+") if size.isdigit())

    def push(self, reference: str, repository: str) -> int:
        """Push a local image; the bytes the registry stores more than before."""
        destination = f"{running.address(self._container)}/{repository}"
        before = self._bytes()
        image = engine.image(reference, made_by="make build")
        image.tag(destination, "latest")
        try:
            for _ in registry.push(f"{destination}:latest"):
                pass
        finally:
            engine.client().api.remove_image(f"{destination}:latest", noprune=True)
        return self._bytes() - before


def measure(
    tree: Tree, storage: Storage, sides: dict[str, tuple[str, Builder]], repeat: int, first: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Side -> step -> ``seconds`` (median), ``runs`` (all of them), ``bytes_pushed`` (of the step's last build).

    The sides take turns, so that what else the host does meets both.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {side: {} for side in sides}
    for step in (first, *EDITS):
        runs: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(1 if step == first else repeat):
            tree.change(step)
            for side, (_, build) in sides.items():
                runs[side].append(round(build(step == "cold"), 2))
        for side, (reference, _) in sides.items():
            pushed = storage.push(reference, side)
            seconds = round(statistics.median(runs[side]), 2)
            found[side][step] = {"seconds": seconds, "runs": runs[side], "bytes_pushed": pushed}
            say(f"{side}: {step}: {seconds} s, {in_units(pushed)} pushed")
    return found


def run(spec: Spec, repeat: int, first: str = "cold") -> dict[str, Any]:
    """The whole benchmark; see the module's docstring."""
    name = f"trainyard-bench-{uuid.uuid4().hex[:6]}"
    on = base.resolve(spec.base).reference
    with tempfile.TemporaryDirectory() as folder, running.container() as started:
        tree, storage = Tree(Path(folder), spec), Storage(started)
        found: dict[str, Any] = {"target": spec.target, "base": on, "cpus": os.cpu_count(), "repeat": repeat}
        found["load"] = os.getloadavg()[0]
        sides = {"ours": ours(tree, spec, name, on), "plain": plain(tree, spec, name, on)}
        try:
            found |= measure(tree, storage, sides, repeat, first)
        finally:
            for reference, _ in sides.values():
                with contextlib.suppress(docker.errors.ImageNotFound):
                    engine.client().api.remove_image(reference, force=True)
    return found


def table(found: dict[str, Any]) -> Table:
    """The figures for people."""
    title = f"{found['target']} on {found['base']}, {found['cpus']} cores (load {found['load']:.1f} at the start), "
    title += f"median of {found['repeat']}"
    shown = Table(title=title, title_justify="left")
    for column in ("", "ours", "pushed", "one stage with pip", "pushed"):
        shown.add_column(column, justify="left" if not column else "right")
    for step in found["ours"]:
        cells = [
            [f"{found[who][step]['seconds']} s", in_units(found[who][step]["bytes_pushed"])]
            for who in ("ours", "plain")
        ]
        shown.add_row(step, *cells[0], *cells[1])
    return shown


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.set_defaults(target="tf-cpu")
    parser.add_argument("--repeat", type=int, default=5, help="builds per step, the cold one excepted (default 5)")
    parser.add_argument("--warm", action="store_true", help="leave the cold builds out")
    options = parser.parse_args(arguments)
    found = run(load(options.target or "tf-cpu"), max(1, options.repeat), FIRST[options.warm])
    log.print(table(found))
    edited = found["ours"]["trainer edited"]
    missed = [
        f"{step}: {found['ours'][step]['seconds']} s"
        for step in ("no change", "trainer edited")
        if found["ours"][step]["seconds"] >= TARGET_SECONDS
    ]
    if edited["bytes_pushed"] >= TARGET_BYTES:
        missed.append(f"trainer edited: {in_units(edited['bytes_pushed'])} pushed")
    goal = (
        f"under {TARGET_SECONDS:g} s without a change and after a trainer edit, under {in_units(TARGET_BYTES)} pushed"
    )
    say(f"{goal}: {'missed by ' + ', '.join(missed) if missed else 'met'}")
    cli.result(found | {"missed": missed}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
