"""Our images against the original recipe: time to build, bytes to push, size, and what they share.

    python -m benchmarks.images                                     everything, one part after the other (half an hour)
    python -m benchmarks.images --only tf-cpu/ours,tf-cpu/original  parts; what was measured before is kept and shown
    python -m benchmarks.images --report                            only shows

The recipe is one stage: `pip install torch torch_xla`, `pip install tensorflow` for its launcher, cloudml-hypertune,
then the files; layers packed with gzip. Base, package index and engine are the same as ours, and our lock is made anew
before the first build, so that both install today's versions. Steps of a part:

    cold                 `--no-cache`, and every wheel is downloaded, as on a new machine
    no change
    trainer edited       a comment in a trainer
    wheel patched        another version of one wheel: nvidia-nvjitlink for xla, libclang for tf-cpu
    requirement added    tabulate: ours in an image that extends the target, as a user adds it
    base updated         the same base with one more file

Seconds are those of the build with the export of the image; bytes are what a registry's storage grew by when the image
was then pushed to it. All is done on a copy of the tree under a temporary name; the images are removed afterwards, the
build cache is left to the engine. Parts are kept in build/benchmarks/images.json: a small machine can do one at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.registry import ROOT, Registry, base, docker, in_units, removed, started

#: The parts of a whole run, in the order of their size.
PARTS = ("tf-cpu/ours", "tf-cpu/original", "xla/ours", "xla/original")
TARGETS, SIDES = ("xla", "tf-cpu"), {"ours": "ours", "original": "original recipe"}
STEPS = ("cold", "no change", "trainer edited", "wheel patched", "requirement added", "base updated")

#: Steps that take a minute or more with a CUDA torch in one layer say nothing new: they are measured with tf-cpu alone.
LEFT_OUT = {"xla/original": ("base updated", "wheel patched")}

#: Target -> its base, Python, package of trainers, and the wheel of which another version is taken.
FACTS = {
    "xla": ("debian-12", "3.11", "torch_xla", "nvidia-nvjitlink-cu12==12.8.61"),
    "tf-cpu": ("debian-13", "3.13", "tf", "libclang==17.0.6"),
}
ADDED = "tabulate==0.9.0"  # no other image here has it

#: What is aimed at: times faster than the recipe's cold build, and bytes that an edit of a trainer pushes.
COLD, EDIT_BYTES = {"xla": 2.5, "tf-cpu": 2.2}, 80_000

#: Parts, kept between runs.
KEPT = ROOT / "build" / "benchmarks" / "images.json"

ORIGINAL = """\
FROM {base}
RUN apt-get -qq update \\
 && apt-get -qq install -y --no-install-recommends ca-certificates python3 python3-venv libpython{python} \\
 && rm -rf /var/lib/apt/lists/* \\
 && python3 -m venv /opt/venv
{installs}
COPY launcher /app/launcher
COPY trainers /app/trainers
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app
CMD ["python", "-m", "trainers.{package}.mnist"]
"""
INSTALL = (
    "RUN --mount=type=secret,id=ca,target=/run/secrets/ca.pem "
    "PIP_CERT=/run/secrets/ca.pem /opt/venv/bin/pip install --quiet --no-cache-dir {}"
)


class Ours:
    """Our image: `trainyard lock`, `render` and `build` in a copy of the tree, in which nothing is cached."""

    def __init__(self, folder: Path, target: str, name: str) -> None:
        self.folder, self.target, self.name = folder, target, name
        self.base = self.first_base = base(FACTS[target][0])
        self.reference = f"{name}:{target}-candidate"
        self.copy()

    def copy(self) -> None:
        """Copy what images are made of, without what keeps downloads; lock anew."""
        self._copied("images", "launcher", "trainers", "templates", "scripts", "examples", ".github", "docs")
        for name in (".dockerignore", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder / name)
        template = self.folder / "templates" / "Dockerfile.j2"
        text = re.sub(r" --mount=type=cache,id=pip,target=[^\s{]+", "", template.read_text(encoding="utf-8"))
        template.write_text(text.replace("UV_NO_CACHE=1", "UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1"), encoding="utf-8")
        self.trainyard("lock", self.target)
        self.trainyard("render")  # the image's name is part of what is rendered

    def _copied(self, *names: str) -> None:
        for name in names:
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))

    def trainyard(self, *words: str) -> str:
        """Run a command of the copy's own package; its standard output."""
        variables = {
            "PYTHONPATH": str(self.folder / "scripts"), "TRAINYARD_IMAGE_NAME": self.name, "TRAINYARD_BASE": self.base,
            "TRAINYARD_BUILD_BASE": self.first_base, "TRAINYARD_PROVENANCE": "0",
            "TRAINYARD_BUILD": str(self.folder / "build"), "SOURCE_DATE_EPOCH": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "trainyard", *words]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            sys.exit(f"'trainyard {' '.join(words)}' failed in the copy: {last}")
        return done.stdout

    def edit_trainer(self) -> None:
        """Add a comment that no build has seen before."""
        with (self.folder / "trainers" / FACTS[self.target][2] / "mnist.py").open("a", encoding="utf-8") as file:
            file.write(f"# {uuid.uuid4()}\n")

    def require(self, pin: str) -> str:
        """Add a requirement; the name of the image that :meth:`build` then makes."""
        folder = self.folder / "examples" / "required"
        folder.mkdir()
        text = f"extends: {self.target}\nsummary: one more package\nrequirements: [{pin}]\n"
        (folder / "image.yaml").write_text(text, encoding="utf-8")
        self.trainyard("lock", "examples/required")
        return f"{self.name}:required-candidate"

    def patch(self, pin: str) -> None:
        """Take another version of a wheel."""
        path = self.folder / "images" / self.target / "image.yaml"
        text = path.read_text(encoding="utf-8")
        if "packages: [" in text:
            changed = text.replace("packages: [", f'packages: ["{pin}", ')
        else:
            changed = text.replace("  packages:\n", f"  packages:\n  - {pin}\n")
        path.write_text(changed, encoding="utf-8")
        self.trainyard("lock", self.target)

    def build(self, target: str = "", *, cold: bool = False) -> float:
        """Build the image, or that of another target; seconds."""
        words = ["build", target or self.target, "--json", *(["--no-cache"] if cold else [])]
        return float(json.loads(self.trainyard(*words))["seconds"])


class Original(Ours):
    """The recipe."""

    def copy(self) -> None:
        """Copy what it has."""
        self._copied("launcher", "trainers")
        self.reference, self.extra, self.patched = f"{self.name}:original", [""], ""
        command = [sys.executable, "-m", "trainyard", "list", "--json"]
        listed = subprocess.check_output(command, stderr=subprocess.DEVNULL)
        self.packages = " ".join(json.loads(listed)[self.target]["packages"])
        (self.folder / "Original.dockerignore").write_text("*\n!launcher\n!trainers\n**/__pycache__\n")

    def require(self, pin: str) -> str:
        """Add a requirement; the name of the image stays."""
        self.extra.append(pin)
        return self.reference

    def patch(self, pin: str) -> None:
        """Take another version of a wheel."""
        self.patched = pin

    def build(self, target: str = "", *, cold: bool = False) -> float:
        """Build the image; seconds."""
        lines = [self.packages, *(["tensorflow==2.21.0"] if self.target == "xla" else [])]
        lines[-1] += f" {self.patched}"
        lines.append(" ".join(["cloudml-hypertune==0.1.0.dev6", *self.extra]))
        _, python, package, _ = FACTS[self.target]
        installs = "\n".join(INSTALL.format(line) for line in lines)
        text = ORIGINAL.format(base=self.base, installs=installs, package=package, python=python)
        (self.folder / "Original").write_text(text, encoding="utf-8")
        command = ["buildx", "build", "--quiet", "--provenance=false", f"--file={self.folder / 'Original'}"]
        command.append(f"--output=type=image,name={self.reference},oci-mediatypes=true,compression=gzip")
        command.append(f"--secret=id=ca,src={os.environ.get('SSL_CERT_FILE', '/etc/ssl/certs/ca-certificates.crt')}")
        began = time.monotonic()
        docker(*command, *(["--no-cache"] if cold else []), str(self.folder))
        return time.monotonic() - began


def push(registry: Registry, reference: str) -> tuple[int, dict[str, int]]:
    """Push a local image; the bytes that the registry stores more than before, and the image's blobs with sizes."""
    tag = f"{registry.address}/bench:{uuid.uuid4().hex[:8]}"
    before = registry.stored()
    docker("tag", reference, tag)
    try:
        pushed = docker("push", tag)
    finally:
        docker("rmi", "--force", "--no-prune", tag)
    digest = pushed.partition("digest: ")[2].split()[0]
    layers = registry.manifest(f"{registry.address}/bench@{digest}")["layers"]
    return registry.stored() - before, {layer["digest"]: layer["size"] for layer in layers}


def measure(part: str, repeat: int) -> dict[str, Any]:
    """One part: step -> ``seconds`` (median), ``pushed`` bytes; and the sizes of the image."""
    target, who = part.split("/")
    name, left_out = f"bench-{uuid.uuid4().hex[:6]}", LEFT_OUT.get(part, ())
    found: dict[str, Any] = {"steps": {}}
    with removed(name), tempfile.TemporaryDirectory() as folder, started() as registry:
        side = (Ours if who == "ours" else Original)(Path(folder), target, name)

        def step(words: str, times: list[float], reference: str = "") -> dict[str, int]:
            pushed, blobs = push(registry, reference or side.reference)
            found["steps"][words] = {"seconds": round(statistics.median(times), 2), "pushed": pushed}
            print(f"{part}: {words}: {found['steps'][words]['seconds']} s, {in_units(pushed)} pushed", file=sys.stderr)
            return blobs

        found["blobs"] = step("cold", [side.build(cold=True)])
        found["unpacked"] = docker("images", "--format={{.Size}}", side.reference)
        step("no change", [side.build() for _ in range(repeat)])
        edits = []
        for _ in range(repeat):
            side.edit_trainer()
            edits.append(side.build())
        step("trainer edited", edits)
        reference = side.require(ADDED)
        step("requirement added", [side.build("examples/required")], reference)
        if "wheel patched" not in left_out:
            side.patch(FACTS[target][3])
            step("wheel patched", [side.build()])
        if "base updated" not in left_out:
            (Path(folder) / "Updated").write_text(f"FROM {side.base}\nRUN date >/etc/updated\n", encoding="utf-8")
            side.base = f"{name}-base:updated"
            docker("build", "--quiet", f"--tag={side.base}", f"--file={folder}/Updated", f"{folder}/launcher")
            step("base updated", [side.build()])
    return found


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return each target that was measured: its name, the value, whether it was met."""
    shown = []
    for target in TARGETS:
        ours, other = (found.get(f"{target}/{who}", {}).get("steps", {}) for who in SIDES)
        if ours and other:
            least, times = COLD[target], other["cold"]["seconds"] / ours["cold"]["seconds"]
            shown.append((f"{target}: cold build at least {least:g} times faster", f"{times:.2f}", times >= least))
        if ours:
            pushed = ours["trainer edited"]["pushed"]
            words = f"{target}: a trainer edit pushes at most {in_units(EDIT_BYTES)}"
            shown.append((words, in_units(pushed), pushed <= EDIT_BYTES))
            # What was installed again would take longer than to link: the cold build installs, and takes minutes.
            seconds, whole = (ours[step]["seconds"] for step in ("base updated", "cold"))
            words = f"{target}: a base update reinstalls no wheel (seconds, of those of a cold build)"
            shown.append((words, f"{seconds:.0f} of {whole:.0f}", seconds < whole / 2))
    return shown


def _rows(found: dict[str, Any], target: str) -> Iterator[list[str]]:
    """One row per step: its name, then seconds and bytes pushed of each side."""
    sides = [found.get(f"{target}/{who}", {}) for who in SIDES]
    for step in STEPS:
        steps = [side.get("steps", {}).get(step) for side in sides]
        pairs = ([f"{one['seconds']} s", in_units(one["pushed"])] if one else ["-", "-"] for one in steps)
        yield [step, *(cell for pair in pairs for cell in pair)]
    packed = [in_units(sum(side.get("blobs", {}).values())) for side in sides]
    sizes = ([side.get("unpacked", "-"), size] for side, size in zip(sides, packed, strict=True))
    yield ["size unpacked, packed", *(cell for pair in sizes for cell in pair)]


def markdown(found: dict[str, Any]) -> str:
    """Return the page about what was measured."""
    lines = [
        "# Images against the original recipe",
        "",
        f"Measured {found['day']} on {found['machine']}. The recipe, the steps and what is the same for all sides are",
        "in `benchmarks/images.py`. Bytes are what a registry stores in addition, after the step before.",
    ]
    for target in TARGETS:
        if any(f"{target}/{who}" in found for who in SIDES):
            heads = [word for words in SIDES.values() for word in (words, "pushed")]
            lines += ["", f"## {target}", "", f"| step | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in _rows(found, target)]
    lines += ["", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {words} | {value} | {'met' if met else 'missed'} |" for words, value, met in verdicts(found)]
    for who, words in SIDES.items():
        blobs = [found.get(f"{target}/{who}", {}).get("blobs", {}) for target in TARGETS]
        if all(blobs):
            both = in_units(sum(size for digest, size in blobs[1].items() if digest in blobs[0]))
            lines += ["", f"Bytes of tf-cpu's layers that xla has too, and that are stored once, {words}: {both}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--repeat", type=int, default=3, help="builds without a change and after an edit (default 3)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    wanted = [] if options.report else (options.only.split(",") if options.only else list(PARTS))
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    found = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for part in wanted:
        found[part] = measure(part, max(1, options.repeat))
        found["day"] = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, load average {os.getloadavg()[2]:.1f}"
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not found:
        parser.error("nothing was measured yet")
    print(markdown(found), end="")


if __name__ == "__main__":
    main()
