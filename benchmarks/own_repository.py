"""How long it takes from an edit in a user's repository to an image at the registry that runs the edited code.

    python -m benchmarks.own_repository                    extends trainyard:cpu, which `make image TARGET=cpu` makes
    python -m benchmarks.own_repository --target tf-cpu    extends another image

The repository is a package of 50 modules and a script. A proxy delays each answer of the registry by 50 ms; all is on
loopback, without a login. In each round each way gets another edit, one line of one module:

    push --code-only   `trainyard push --code-only`, with an address of an engine that does not exist
    tuned recipe       `docker buildx build` and `docker push` of a Dockerfile with FROM our local image, COPY --link,
                       zstd, and without provenance
    image              `trainyard image`: build, verify and the smoke test; nothing is pushed
    image and push     `trainyard image` and `trainyard push`

Caches are warm: each way is taken once before the first round. Seconds are wall time of the commands; requests and
bytes are those that arrive at the proxy. At the end each way's last image is pulled by digest and run: it must print
the edit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.registry import TRAINYARD, Registry, docker, in_units, removed, started

#: Seconds that the proxy delays a request.
DELAY = 0.05

#: The targets: seconds, times faster than the recipe, bytes sent beyond the code, requests; and for `trainyard image`
#: the most seconds beside those of the smoke test.
SECONDS, TIMES, BEYOND, REQUESTS, BESIDE_SMOKE = 1.0, 3.0, 100_000, 8, 5.0

#: Modules of the package, and their sizes in bytes.
MODULES, MODULE_SIZES = 50, range(2_000, 12_000)

WORKSPACE = """\
extends: {target}
name: {name}
code: [src, train.py]
run: python train.py
smoke: {{expect: "edit [0-9a-f]+"}}
"""

DOCKERFILE = """\
FROM trainyard:{target}
WORKDIR /workspace
ENV PYTHONPATH=/workspace/src
COPY --link . /workspace
CMD ["python", "train.py"]
"""


class Bench:
    """A repository of a user's, and the ways of bringing its code to the registry."""

    def __init__(self, folder: Path, target: str, registry: Registry) -> None:
        self.folder, self.target, self.registry = folder / "repository", target, registry
        self.name = f"bench-{uuid.uuid4().hex[:6]}"
        self.address = f"{registry.address}/team"
        self.beside_smoke: list[float] = []
        self._outside = folder
        self._write()

    def _write(self) -> None:
        package = self.folder / "src" / "mymodel"
        package.mkdir(parents=True)
        standard_library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
        modules = [path for path in standard_library if path.stat().st_size in MODULE_SIZES][:MODULES]
        for path in modules:
            (package / path.name).write_bytes(path.read_bytes())
        (package / "__init__.py").touch()
        (self.folder / "train.py").write_text("from mymodel.edited import EDIT\nprint('edit', EDIT, flush=True)\n")
        text = WORKSPACE.format(target=self.target, name=self.name)
        (self.folder / "trainyard.yaml").write_text(text, encoding="utf-8")
        (self.folder / ".dockerignore").write_text(".git\ntrainyard.*\n", encoding="utf-8")
        self.edit()
        git = ["git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=The benchmark's repository"]):
            subprocess.run([*git, *words], cwd=self.folder, check=True)

    def edit(self) -> str:
        """Change a line of the code; what it prints from then on."""
        words = uuid.uuid4().hex
        (self.folder / "src" / "mymodel" / "edited.py").write_text(f'EDIT = "{words}"\n', encoding="utf-8")
        return words

    def run(self, *command: str, **variables: str) -> str:
        """Run a command in the repository; its standard output. It ends the program with the last line of a failure."""
        environment = {**os.environ, "TRAINYARD_BUILD": str(self._outside / "state"), **variables}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = ([*done.stdout.splitlines(), *done.stderr.splitlines()] or ["no output"])[-1]
            sys.exit(f"'{' '.join(command)}' failed: {last}")
        return done.stdout

    def code_only(self) -> str:
        """``trainyard push --code-only``; the reference by digest."""
        command = [*TRAINYARD, "push", "--code-only", "--registry", self.address, "--quiet"]
        return self.run(*command, DOCKER_HOST="unix:///nonexistent/docker.sock").strip()

    def tuned(self) -> str:
        """``docker buildx build`` and ``docker push`` with all that makes them fast; the reference by digest."""
        # Not `buildx build --push`, which with Docker 26 pushes in the same way, and then fails at manifests of OCI.
        tag, metadata = f"{self.address}/trainyard:tuned", self._outside / "tuned.json"
        dockerfile = self._outside / "Dockerfile.tuned"
        dockerfile.write_text(DOCKERFILE.format(target=self.target), encoding="utf-8")
        output = f"type=image,name={tag},oci-mediatypes=true,compression=zstd"
        command = ["docker", "buildx", "build", "--quiet", "--provenance=false", f"--metadata-file={metadata}"]
        self.run(*command, f"--file={dockerfile}", f"--output={output}", ".")
        self.run("docker", "push", "--quiet", tag)
        digest = json.loads(metadata.read_text(encoding="utf-8"))["containerimage.digest"]
        return f"{self.address}/trainyard@{digest}"

    def image(self) -> str:
        """Run ``trainyard image``; no reference. ``beside_smoke`` has its seconds without those of the smoke test."""
        started = time.perf_counter()
        made = json.loads(self.run(*TRAINYARD, "image", "--json"))
        self.beside_smoke.append(time.perf_counter() - started - made["smoke"]["seconds"])
        return ""

    def image_and_push(self) -> str:
        """``trainyard image`` and ``trainyard push``; the reference by digest."""
        self.run(*TRAINYARD, "image")
        return self.run(*TRAINYARD, "push", "--registry", self.address, "--quiet").strip()

    def measure(self, way: Callable[[], str]) -> tuple[dict[str, float], str]:
        """Take a way; the reference by digest that it made, if any, and before it a sample.

        A sample has ``seconds``, ``requests`` and bytes ``sent``, and those of the compressed layer with the ``code``.
        """
        self.registry.take()
        started = time.perf_counter()
        reference = way()
        seconds = time.perf_counter() - started
        traffic = self.registry.take()
        code = int(self.registry.manifest(reference)["layers"][-1]["size"]) if reference else 0
        return {"seconds": seconds, "requests": traffic.requests, "sent": traffic.sent, "code": code}, reference

    def check(self, reference: str, edit: str) -> None:
        """Pull an image and run it: it must run the edited code."""
        printed = docker("run", "--rm", "--pull=always", "--network=none", "--label=benchmark", reference)
        if f"edit {edit}" not in printed:
            sys.exit(f"{reference} does not run the edited code; it prints: {printed[-200:]}")


#: Name -> the way, and how many rounds it takes part in at most.
WAYS: dict[str, tuple[Callable[[Bench], str], int]] = {
    "push --code-only": (Bench.code_only, 100),
    "tuned recipe": (Bench.tuned, 100),
    "image": (Bench.image, 5),
    "image and push": (Bench.image_and_push, 2),
}
OURS, RECIPE = "push --code-only", "tuned recipe"


def measure(target: str, rounds: int, names: list[str]) -> dict[str, Any]:
    """Return way -> its samples, and what was measured on."""
    docker("image", "inspect", f"trainyard:{target}")
    with (
        tempfile.TemporaryDirectory(prefix="trainyard-own-repository-") as temporary,
        started(DELAY) as registry,
        removed(registry.address, "trainyard:bench-"),
    ):
        bench = Bench(Path(temporary), target, registry)
        if OURS in names:
            print(f"making the repository's image and pushing it to {bench.address}", file=sys.stderr)
            bench.image_and_push()
        for name in names:
            bench.edit()
            WAYS[name][0](bench)
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        last: dict[str, tuple[str, str]] = {}
        for number in range(rounds):
            # Each round begins with another way, so that none is always the first or the last.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                way, most = WAYS[name]
                if number < most:
                    edit = bench.edit()
                    sample, reference = bench.measure(lambda way=way: way(bench))  # type: ignore[misc]
                    samples[name].append(sample)
                    last[name] = reference, edit
                    took = f"{sample['seconds']:.2f} s, {sample['requests']} requests, {in_units(sample['sent'])} sent"
                    print(f"{name}: {took}", file=sys.stderr)
        for name, (reference, edit) in last.items():
            if not reference:
                continue
            bench.check(reference, edit)
            print(f"{name}: {reference} runs the edited code", file=sys.stderr)
        return {
            "target": target,
            "ways": samples,
            "beside_smoke": bench.beside_smoke[1:],  # the first one filled the caches
            "code": sum(path.stat().st_size for path in (bench.folder / "src").rglob("*.py")),
            "rounds": rounds,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, with a load average of {os.getloadavg()[2]:.1f}",
            "day": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A row per way: its name, seconds (least, median, most), times as long as ours, requests, bytes."""
    shown = []
    for name, samples in found["ways"].items():
        seconds = [sample["seconds"] for sample in samples]
        times = f"{_median(samples) / _median(found['ways'][OURS]):.1f}" if OURS in found["ways"] else "-"
        requests, sent = (max(sample[key] for sample in samples) for key in ("requests", "sent"))
        beyond = max(sample["sent"] - sample["code"] for sample in samples)
        figures = (f"{value:.2f}" for value in (min(seconds), _median(samples), max(seconds)))
        shown.append([name, *figures, times, str(requests), in_units(sent), in_units(beyond)])
    return shown


def _median(samples: list[dict[str, Any]]) -> float:
    seconds: list[float] = [sample["seconds"] for sample in samples]
    return statistics.median(seconds)


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The targets, as far as they were measured: what, how much, whether it was met."""
    ways = found["ways"]
    if not ways.get(OURS):
        return []
    ours = _median(ways[OURS])
    beyond = max(sample["sent"] - sample["code"] for sample in ways[OURS])
    requests = max(sample["requests"] for sample in ways[OURS])
    shown = [
        (f"an edit is at the registry within {SECONDS:g} s (median)", f"{ours:.2f} s", ours <= SECONDS),
        (f"at most {in_units(BEYOND)} sent beyond the code", in_units(beyond), beyond <= BEYOND),
        (f"at most {REQUESTS} requests", str(requests), requests <= REQUESTS),
    ]
    if ways.get(RECIPE):
        times = _median(ways[RECIPE]) / ours
        shown.insert(1, (f"at least {TIMES:g} times faster than the recipe", f"{times:.1f}", times >= TIMES))
    if found["beside_smoke"]:
        beside = statistics.median(found["beside_smoke"])
        what = f"'trainyard image' after an edit takes at most {BESIDE_SMOKE:g} s beside the smoke test (median)"
        shown.append((what, f"{beside:.1f} s", beside <= BESIDE_SMOKE))
    return shown


def markdown(found: dict[str, Any]) -> str:
    """Return the page about what was measured."""
    lines = [
        "# From an edit to a runnable image at the registry",
        "",
        f"Measured {found['day']} on {found['machine']}, {found['rounds']} rounds in one run. The repository has",
        f"{in_units(found['code'])} of code and extends `{found['target']}`. `benchmarks/own_repository.py` says what",
        "the ways are and what is the same for all. 'times' compares the medians with ours; 'sent' is all that arrived",
        "there, 'beyond' what of that was not the code's layer. Requests and bytes are the most of all rounds.",
        "",
        "| seconds | least | median | most | times | requests | sent | beyond |",
        "|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows(found)),
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(f"| {words} | {value} | {'met' if met else 'missed'} |" for words, value, met in verdicts(found)),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print; the figures as JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="the image that the repository extends (default cpu)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is measured (default 7)")
    parser.add_argument("--only", default="", help=f"ways, separated by commas: {', '.join(WAYS)}")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(WAYS)
    if unknown := set(names) - set(WAYS):
        parser.error(f"there is no way {sorted(unknown)[0]!r}; there are {', '.join(WAYS)}")
    found = measure(options.target, max(1, options.rounds), names)
    print(json.dumps(found, indent=1) if options.json else markdown(found), end="")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that containers and images are removed
    main()
