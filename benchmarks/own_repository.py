"""How long it takes from an edit in a user's repository to an image at the registry that runs the edited code.

    python -m benchmarks.own_repository                    extends trainyard:cpu, which `make image TARGET=cpu` makes
    python -m benchmarks.own_repository --target tf-cpu    extends another image
    python -m benchmarks.own_repository --save             also writes benchmarks/results/own-repository.md

The repository is a package of 50 modules and a script. The registry has token login, and its proxy delays each request
by 50 ms; all is on loopback. In each round each way gets another edit, one line of one module:

    push --code-only   `trainyard push --code-only`, with an address of an engine that does not exist
    plain recipe       `docker build` and `docker push` of a Dockerfile with FROM our image at the registry and COPY
    tuned recipe       the same with FROM our local image, COPY --link, zstd, and without provenance
    image              `trainyard image`: build, verify and the smoke test; nothing is pushed
    image and push     `trainyard image` and `trainyard push`

Caches are warm: each way is taken once before the first round. Seconds are wall time of the commands; requests and
bytes are those that arrive at the proxy. At the end each way's last image is pulled by digest and run: it must print
the edit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_registry import SlowRegistry
from rich.table import Column, Table
from tests.engine import ENGINE

from trainyard.common import console, settings
from trainyard.common.console import Messages, say, show
from trainyard.common.docker_engine import resource_labels
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.oci.registry import Repository
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units

#: Seconds that the proxy delays a request.
DELAY = 0.05

#: The targets: seconds, times faster than the faster recipe, bytes sent beyond the code, requests.
SECONDS, TIMES, BEYOND, REQUESTS = 1.0, 3.0, 100_000, 8

#: The target for `trainyard image`: most seconds beside those of the smoke test.
BESIDE_SMOKE = 5.0

#: Modules of the package, and their sizes in bytes.
MODULES, MODULE_SIZES = 50, range(2_000, 12_000)

RESULTS = ROOT / "benchmarks" / "results" / "own-repository.md"

WORKSPACE = """\
extends: {target}
name: {name}
code: [src, train.py]
run: python train.py
smoke: {{expect: "edit [0-9a-f]+"}}
"""

TRAIN = """\
from mymodel.edited import EDIT

print("edit", EDIT, flush=True)
"""

DOCKERFILE = """\
FROM {base}
WORKDIR /workspace
ENV PYTHONPATH=/workspace/src
COPY {link}. /workspace
CMD ["python", "train.py"]
"""


@dataclass(frozen=True)
class Sample:
    """One round of one way.

    Attributes:
        seconds: from the start of its first command to the end of its last.
        requests: that arrived at the registry's proxy.
        sent: bytes of these, with headers.
        code: bytes of the layer with the code, as it is compressed.
    """

    seconds: float
    requests: int
    sent: int
    code: int

    @property
    def beyond(self) -> int:
        """Bytes sent beyond the code."""
        return self.sent - self.code


class Bench:
    """A repository of a user's, and the ways of bringing its code to the registry."""

    def __init__(self, folder: Path, target: str, registry: SlowRegistry) -> None:
        self.folder, self.target, self.registry = folder / "repository", target, registry
        self.name = f"bench-{uuid.uuid4().hex[:6]}"
        self.address = f"{registry.address}/team"
        self.base = f"{self.address}/{NAME}:{target}"
        self.beside_smoke: list[float] = []
        self._outside = folder
        self._trainyard = str(Path(sys.executable).with_name("trainyard"))
        self._write()

    def _write(self) -> None:
        package = self.folder / "src" / "mymodel"
        package.mkdir(parents=True)
        standard_library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
        modules = [path for path in standard_library if path.stat().st_size in MODULE_SIZES][:MODULES]
        for path in modules:
            (package / path.name).write_bytes(path.read_bytes())
        (package / "__init__.py").touch()
        (self.folder / "train.py").write_text(TRAIN, encoding="utf-8")
        text = WORKSPACE.format(target=self.target, name=self.name)
        (self.folder / "trainyard.yaml").write_text(text, encoding="utf-8")
        (self.folder / ".dockerignore").write_text(".git\ntrainyard.*\n", encoding="utf-8")
        self.edit()
        git = ["git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=The benchmark's repository"]):
            subprocess.run([*git, *words], cwd=self.folder, check=True)

    @property
    def code_size(self) -> int:
        """Bytes of the code."""
        return sum(path.stat().st_size for path in (self.folder / "src").rglob("*.py"))

    def edit(self) -> str:
        """Change a line of the code; what it prints from then on."""
        words = uuid.uuid4().hex
        (self.folder / "src" / "mymodel" / "edited.py").write_text(f'EDIT = "{words}"\n', encoding="utf-8")
        return words

    def run(self, *command: str, **variables: str) -> str:
        """Run a command in the repository; its standard output.

        Raises:
            StepFailed: it failed; the message ends with its last line.
        """
        environment = settings.environment(**variables)
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            last = ([*done.stdout.splitlines(), *done.stderr.splitlines()] or ["no output"])[-1]
            raise StepFailed(f"'{' '.join(command)}' failed: {last}")
        return done.stdout

    def push_base(self) -> None:
        """Push the image that the recipes are FROM."""
        local = f"{NAME}:{self.target}"
        ENGINE.image(local, made_by=f"make image TARGET={self.target}").tag(self.base)
        self.run("docker", "push", "--quiet", self.base)

    def code_only(self) -> str:
        """``trainyard push --code-only``; the reference by digest."""
        nowhere = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
        command = [self._trainyard, "push", "--code-only", "--registry", self.address, "--quiet"]
        return self.run(*command, **nowhere).strip()

    def plain(self) -> str:
        """``docker build`` and ``docker push``; the reference by digest."""
        tag, dockerfile = f"{self.address}/{NAME}:plain", self._outside / "Dockerfile.plain"
        dockerfile.write_text(DOCKERFILE.format(base=self.base, link=""), encoding="utf-8")
        self.run("docker", "build", "--quiet", f"--file={dockerfile}", f"--tag={tag}", ".")
        pushed = self.run("docker", "push", tag)
        digest = re.search(r"digest: (sha256:[0-9a-f]{64})", pushed)
        assert digest, pushed
        return f"{self.address}/{NAME}@{digest[1]}"

    def tuned(self) -> str:
        """The same with all that makes it faster; the reference by digest."""
        # Not `buildx build --push`, which with Docker 26 pushes in the same way, and then fails at manifests of OCI.
        tag, metadata = f"{self.address}/{NAME}:tuned", self._outside / "tuned.json"
        dockerfile = self._outside / "Dockerfile.tuned"
        dockerfile.write_text(DOCKERFILE.format(base=f"{NAME}:{self.target}", link="--link "), encoding="utf-8")
        output = f"type=image,name={tag},oci-mediatypes=true,compression=zstd"
        command = ["docker", "buildx", "build", "--quiet", "--provenance=false", f"--metadata-file={metadata}"]
        self.run(*command, f"--file={dockerfile}", f"--output={output}", ".")
        self.run("docker", "push", "--quiet", tag)
        digest = json.loads(metadata.read_text(encoding="utf-8"))["containerimage.digest"]
        return f"{self.address}/{NAME}@{digest}"

    def image(self) -> str:
        """Run ``trainyard image``; no reference. ``beside_smoke`` has its seconds without those of the smoke test."""
        started = time.perf_counter()
        made = json.loads(self.run(self._trainyard, "image", "--json"))
        self.beside_smoke.append(time.perf_counter() - started - made["smoke"]["seconds"])
        return ""

    def image_and_push(self) -> str:
        """``trainyard image`` and ``trainyard push``; the reference by digest."""
        self.run(self._trainyard, "image")
        return self.run(self._trainyard, "push", "--registry", self.address, "--quiet").strip()

    def measure(self, way: Callable[[], str]) -> tuple[Sample, str]:
        """Take a way; how long it took, and the reference by digest that it made, if any."""
        self.registry.take()
        started = time.perf_counter()
        reference = way()
        seconds = time.perf_counter() - started
        traffic = self.registry.take()
        code = _size_of_code(reference) if reference else 0
        return Sample(seconds, len(traffic.requests), traffic.sent, code), reference

    def check(self, reference: str, edit: str) -> None:
        """Pull an image and run it.

        Raises:
            StepFailed: it does not run the edited code.
        """
        labels = [f"--label={key}={value}" for key, value in resource_labels("benchmark").items()]
        printed = self.run("docker", "run", "--rm", "--pull=always", "--network=none", *labels, reference)
        if f"edit {edit}" not in printed:
            raise StepFailed(f"{reference} does not run the edited code; it prints: {printed[-200:]}")


def _size_of_code(reference: str) -> int:
    """Bytes of the topmost layer of an image at its registry."""
    name, _, digest = reference.partition("@")
    repository = Repository(name)
    while True:
        manifest = repository.manifest(digest)
        assert manifest is not None, f"{reference} is not at the registry"
        document = json.loads(manifest.body)
        if "layers" in document:
            return int(document["layers"][-1]["size"])
        # An index: of the image and its provenance, whose platform is unknown/unknown.
        digest = next(entry["digest"] for entry in document["manifests"] if entry["platform"]["os"] == "linux")


#: Name -> the way, and how many rounds it takes part in at most.
WAYS: dict[str, tuple[Callable[[Bench], str], int]] = {
    "push --code-only": (Bench.code_only, 100),
    "plain recipe": (Bench.plain, 100),
    "tuned recipe": (Bench.tuned, 100),
    "image": (Bench.image, 5),
    "image and push": (Bench.image_and_push, 2),
}
OURS, RECIPES = "push --code-only", ("plain recipe", "tuned recipe")


@contextlib.contextmanager
def cleaned(*starts: str) -> Iterator[None]:
    """Remove the images afterwards whose references start so."""
    try:
        yield
    finally:
        for image in ENGINE.client.api.images():
            names = [str(name) for name in [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]]
            for name in names:
                if name.startswith(starts):
                    ENGINE.untag(name)


def measure(target: str, rounds: int, names: list[str]) -> dict[str, Any]:
    """Way -> its samples; and what was measured on.

    Raises:
        UserError: there is no image of ``target``.
        StepFailed: a command failed, or an image does not run the edited code.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trainyard-own-repository-") as temporary,
        SlowRegistry(DELAY) as registry,
        cleaned(registry.address, f"{NAME}:bench-"),
    ):
        settings.set_variable("BUILD", str(Path(temporary) / "state"))
        settings.set_standard_variable("DOCKER_CONFIG", str(registry.docker_config))
        bench = Bench(Path(temporary), target, registry)
        say(f"pushing {NAME}:{target} to the registry")
        bench.push_base()
        if OURS in names:
            say(f"making the repository's image and pushing it to {bench.address}")
            bench.image_and_push()
        for name in names:
            bench.edit()
            WAYS[name][0](bench)
        samples: dict[str, list[Sample]] = {name: [] for name in names}
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
                    say(f"{name}: {sample.seconds:.2f} s, {sample.requests} requests, {in_units(sample.sent)} sent")
        for name, (reference, edit) in last.items():
            if not reference:
                continue
            bench.check(reference, edit)
            say(f"{name}: {reference} runs the edited code")
        return {
            "target": target,
            "ways": {name: [asdict(sample) for sample in found] for name, found in samples.items()},
            "beside_smoke": bench.beside_smoke[1:],  # the first one filled the caches
            "code": bench.code_size,
            "rounds": rounds,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, with a load average of {os.getloadavg()[2]:.1f}",
            "day": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A row per way: its name, seconds (least, median, most), times as long as ours, requests, bytes."""
    medians = {name: _median(samples) for name, samples in found["ways"].items()}
    shown = []
    for name, samples in found["ways"].items():
        seconds = [sample["seconds"] for sample in samples]
        times = f"{medians[name] / medians[OURS]:.1f}" if OURS in medians else "-"
        shown.append(
            [
                name,
                *(f"{value:.2f}" for value in (min(seconds), medians[name], max(seconds))),
                times,
                str(max(sample["requests"] for sample in samples)),
                in_units(max(sample["sent"] for sample in samples)),
                in_units(max(sample["sent"] - sample["code"] for sample in samples)),
            ]
        )
    return shown


#: What the columns of :func:`rows` are.
COLUMNS = ("seconds", "least", "median", "most", "times", "requests", "sent", "beyond")


def _median(samples: list[dict[str, Any]]) -> float:
    seconds: list[float] = [sample["seconds"] for sample in samples]
    return statistics.median(seconds)


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The targets, as far as they were measured: what, how much, whether it was met."""
    ways = found["ways"]
    if not ways.get(OURS):
        return []
    beside = statistics.median(found["beside_smoke"]) if found.get("beside_smoke") else None
    ours = _median(ways[OURS])
    beyond = max(sample["sent"] - sample["code"] for sample in ways[OURS])
    requests = max(sample["requests"] for sample in ways[OURS])
    shown = [
        (f"an edit is at the registry within {SECONDS:g} s (median)", f"{ours:.2f} s", ours <= SECONDS),
        (f"at most {in_units(BEYOND)} sent beyond the code", in_units(beyond), beyond <= BEYOND),
        (f"at most {REQUESTS} requests", str(requests), requests <= REQUESTS),
    ]
    recipes = [_median(ways[name]) for name in RECIPES if ways.get(name)]
    if recipes:
        times = min(recipes) / ours
        shown.insert(1, (f"at least {TIMES:g} times faster than the faster recipe", f"{times:.1f}", times >= TIMES))
    if beside is not None:
        what = f"'trainyard image' after an edit takes at most {BESIDE_SMOKE:g} s beside the smoke test (median)"
        shown.append((what, f"{beside:.1f} s", beside <= BESIDE_SMOKE))
    return shown


def markdown(found: dict[str, Any]) -> str:
    """benchmarks/results/own-repository.md."""
    lines = [
        "<!-- Written by `python -m benchmarks.own_repository --save`. Do not edit. -->",
        "# From an edit to a runnable image at the registry",
        "",
        f"Measured {found['day']} on {found['machine']}, {found['rounds']} rounds in one run. The repository has",
        f"{in_units(found['code'])} of code and extends `{found['target']}`. `benchmarks/own_repository.py` says what",
        "the ways are and what is the same for all. 'times' compares the medians with ours; 'sent' is all that arrived",
        "there, 'beyond' what of that was not the code's layer. Requests and bytes are the most of all rounds.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
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
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(WAYS)
    for name in names:
        if name not in WAYS:
            parser.error(f"there is no way {name!r}; there are {', '.join(WAYS)}")
    found = measure(options.target, max(1, options.rounds), names)
    columns = [Column(name, justify="right" if number else "left", no_wrap=True) for number, name in enumerate(COLUMNS)]
    title = f"{in_units(found['code'])} of code on {options.target}"
    table = Table(*columns, title=title, title_justify="left", box=None)
    for row in rows(found):
        table.add_row(*row)
    show(table)
    for words, value, met in verdicts(found):
        say(f"{words}: {value}, {'met' if met else 'MISSED'}")
    if options.save:
        RESULTS.write_text(markdown(found), encoding="utf-8")
        say(f"wrote {RESULTS.relative_to(ROOT)}")
    console.result(found, as_json=options.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that containers and images are removed
    try:
        with Messages():
            main()
    except (UserError, StepFailed) as error:
        sys.exit(str(error))
