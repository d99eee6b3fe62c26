"""How long `trainyard find` takes at a registry with many images.

    python -m benchmarks.find           100 images
    python -m benchmarks.find --save    also writes benchmarks/results/find.md

Each image has a different manifest and an SBOM of 60 Python and 80 Debian packages. The registry has token login, and
its proxy delays each request by 20 ms; all is on loopback. Seconds are wall time of the command, a new process with an
empty state folder, so that nothing of the registry is known. One run before the first round writes Python's byte code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.slow_registry import SlowRegistry
from tests.published_images import publish

from trainyard.common import settings
from trainyard.common.console import Messages, say, show
from trainyard.common.settings import ROOT
from trainyard.oci.registry import Repository
from trainyard.spec.naming import NAME

#: Seconds that the proxy delays a request, and the target: seconds that the command may take.
DELAY, SECONDS = 0.02, 5.0

IMAGES, PYTHON, DEBIAN = 100, 60, 80

#: The questions, and how many of the images have the package.
QUERIES = {"torch==2.9.7": 10, "torch<2.9.5": 50, "libexample7==1.7-3+deb13u1": 100, "numpy<1": 0}

RESULTS = ROOT / "benchmarks" / "results" / "find.md"


@dataclass(frozen=True)
class Sample:
    """One run of the command: seconds, and requests that arrived at the registry's proxy."""

    seconds: float
    requests: int


def fill(address: str) -> None:
    """Push the images, without an engine; the versions of torch are 2.9.0 to 2.9.9."""
    repository = Repository(f"{address}/{NAME}")
    python = {f"example-{number}": f"{number}.4.6" for number in range(PYTHON - 2)} | {"numpy": "2.4.6"}
    debian = {f"libexample{number}": f"1.{number}-3+deb13u1" for number in range(DEBIAN)}
    put = partial(publish, repository, debian=debian)
    with ThreadPoolExecutor(4) as pool:
        versions = {f"{number:08x}": f"2.9.{number % 10}" for number in range(IMAGES)}
        made = [
            pool.submit(put, f"cpu-{version}-20261120-{content_hash}", python=python | {"torch": version})
            for content_hash, version in versions.items()
        ]
        for one in made:
            one.result()


def find(query: str, registry: SlowRegistry, address: str) -> tuple[Sample, dict[str, Any]]:
    """Run the command once, cold; what it took, and its answer."""
    registry.take()
    with tempfile.TemporaryDirectory(prefix="trainyard-find-") as folder:
        environment = settings.environment(
            DOCKER_CONFIG=str(registry.docker_config),
            TRAINYARD_BUILD=folder,
            TRAINYARD_JSON="1",
            PYTHONDONTWRITEBYTECODE="",
        )
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "trainyard", "find", query, "--registry", address],
            env=environment,
            capture_output=True,
            check=True,
        )
        seconds = time.monotonic() - started
    return Sample(seconds, len(registry.take().requests)), json.loads(done.stdout)


def measure(rounds: int) -> dict[str, list[Sample]]:
    """All questions, ``rounds`` times.

    Raises:
        AssertionError: an answer is wrong.
    """
    samples: dict[str, list[Sample]] = {query: [] for query in QUERIES}
    with SlowRegistry(DELAY) as registry:
        os.environ["DOCKER_CONFIG"] = str(registry.docker_config)
        address = f"{registry.address}/ml"
        fill(address)
        find("torch", registry, address)
        for _ in range(rounds):
            for query, expected in QUERIES.items():
                sample, answer = find(query, registry, address)
                assert (answer["images"], len(answer["matches"])) == (IMAGES, expected), query
                samples[query].append(sample)
    return samples


def report(samples: dict[str, list[Sample]]) -> str:
    """The result, as benchmarks/results/find.md has it."""
    rounds = len(next(iter(samples.values())))
    most = max(sample.seconds for some in samples.values() for sample in some)
    rows = []
    for query, some in samples.items():
        seconds = [sample.seconds for sample in some]
        figures = [f"{one:.2f}" for one in (min(seconds), statistics.median(seconds), max(seconds))]
        requests = max(sample.requests for sample in some)
        rows.append(f"| `{query}` | {QUERIES[query]} | {requests} | {' | '.join(figures)} |")
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return "\n".join(
        [
            "<!-- Written by `python -m benchmarks.find --save`. Do not edit. -->",
            f"# `trainyard find` at a registry with {IMAGES} images",
            "",
            f"Measured {today} on {os.cpu_count()} cores, {platform.machine()}, with a load average of "
            f"{os.getloadavg()[1]:.1f}, {rounds} rounds.",
            f"Each image has {PYTHON} Python and {DEBIAN} Debian packages; the registry's proxy delays a request by "
            f"{DELAY * 1000:.0f} ms.",
            "Each run is a new process that knows nothing of the registry.",
            "",
            "| query | images found | requests | least s | median s | most s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Target: at most {SECONDS:.0f} s. Most: {most:.2f} s: {'met' if most <= SECONDS else 'missed'}.",
            "",
        ]
    )


def main() -> None:
    """Measure, and print or save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    given = parser.parse_args()
    text = report(measure(given.rounds))
    show(text)
    if given.save:
        RESULTS.write_text(text, encoding="utf-8")
        say(str(Path(RESULTS).relative_to(ROOT)))


if __name__ == "__main__":
    with Messages():
        main()
