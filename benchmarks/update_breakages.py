"""Measure how often `trainyard update` leaves out what breaks a repository, and takes what breaks nothing.

    python -m benchmarks.update_breakages           20 repositories, each without and with a breakage
    python -m benchmarks.update_breakages --save    also writes benchmarks/results/update_breakages.json and .md

The repositories are those of :mod:`benchmarks.updates`, with fewer packages and a lock of the older day, which is
updated to the newer one. Then one of the packages that the update took is declared guilty, at random: an image with any
newer version of it fails, is slower, or takes more memory. An image is judged by its lock, and none is built; its times
differ from run to run by NOISE. uv resolves against the package index of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import trainers, updates

from trainyard.common.console import Messages, say, show
from trainyard.common.settings import ROOT
from trainyard.image import repository_lock
from trainyard.release import bisect, update
from trainyard.release.trials import Bounds, Measured, Trials
from trainyard.release.update import Result
from trainyard.spec import model
from trainyard.spec.model import RepositorySpec

KINDS = ("fails", "slower", "more memory")
NOISE = 0.05  # standard deviation of times, as a part of them
GROUPS = ("security", "patch", "minor", "major")
RESULTS = ROOT / "benchmarks" / "results" / "update_breakages.json"


@dataclass(frozen=True)
class Outcome:
    """Hold what became of a repository.

    Attributes:
        harmless: changes that the update took where nothing breaks, ``refused``: what it said of those it did not take.
        guilty: the package that breaks the repository then, in what it does (``kind``).
        left_out: packages that were left out, ``has``: whether the lock has a newer version of the guilty one.
        images: that were measured for both updates; ``seconds``: of both, which are those of uv.
    """

    number: int
    harmless: int
    refused: list[str]
    kind: str
    guilty: str
    left_out: list[str]
    has: bool
    taken: int
    images: int
    seconds: float

    @property
    def named(self) -> bool:
        """Return whether the guilty package was left out, by its name."""
        return self.guilty in self.left_out and not self.has

    def row(self) -> str:
        """Return its row of the table."""
        refused = "; ".join(self.refused) or "nothing"
        left_out = ", ".join(self.left_out) or "nothing"
        return (
            f"| {self.number} | {self.harmless} | {refused} | {self.guilty} {self.kind} "
            f"| {left_out if self.named else f'**wrong**: {left_out}'} | {self.taken} | {self.images} "
            f"| {self.seconds:.0f} |"
        )


class Images:
    """Judge locks: those with a newer version of the guilty package break."""

    def __init__(self, random_: random.Random, guilty: str = "", old: str = "", kind: str = "") -> None:
        self._random, self._guilty, self._old, self._kind = random_, guilty, old, kind
        self.count = 0

    def __call__(self, spec: RepositorySpec, bounds: Bounds, again: bool) -> Measured:
        """Return what an image of a lock would be like."""
        self.count += not again
        breaks = bool(self._guilty) and versions_of(spec).get(self._guilty, self._old) != self._old
        slower = 1.3 if breaks and self._kind == "slower" else 1.0
        return Measured(
            failure=f"train.py:1: AttributeError: {self._guilty}" if breaks and self._kind == "fails" else "",
            steps=tuple(10 * slower * self._random.gauss(1, NOISE) for _ in range(bounds.runs)),
            starts=tuple(3 * self._random.gauss(1, NOISE) for _ in range(bounds.runs)),
            memory=(1500 if breaks and self._kind == "more memory" else 1000) << 20,
            size=2 << 30,
        )


def versions_of(spec: RepositorySpec) -> dict[str, str]:
    """Return canonical name -> version of a lock."""
    lock = spec.usable_lock
    locked = lock.of(spec.arch) if lock else None
    return dict(locked.versions) if locked else {}


def updated(spec: RepositorySpec, images: Images, *, force: bool) -> tuple[Result, dict[str, str]]:
    """Update a lock in memory; return what was done, and its packages."""
    trials = Trials(bisect.repository(spec, "update"), Bounds(), images, force)
    started = update.start(spec, trials, apart=True)
    result = started.run(GROUPS)
    return result, versions_of(spec.with_lock(started.lock))


def run(number: int, folder: Path) -> Outcome:
    """Make a repository with an old lock, and update it without and with a breakage."""
    random_ = random.Random(number)
    asked = sorted(random_.sample(updates.PACKAGES, random_.randint(3, 6)))
    os.chdir(folder)
    spec = updates.repository(folder / f"repository-{number}", asked)
    os.chdir(spec.folder)
    (spec.folder / "good.lock").replace(spec.lock_file)
    # Its versions stay, and it is one of the requirements as they are now.
    spec = repository_lock.lock(model.load(None, "amd64").repository(""))
    old = versions_of(spec)
    began = time.monotonic()
    result, new = updated(spec, harmless := Images(random_), force=True)
    newer = sorted(name for name in old if new.get(name, old[name]) != old[name])
    guilty, kind = random_.choice(newer), KINDS[number % len(KINDS)]
    broken, packages = updated(spec, images := Images(random_, guilty, old[guilty], kind), force=True)
    said = [f"{step.group}: {step.reason}" for step in result.steps if step.reason]
    left_out = [words for step in broken.steps for words in step.left_out]
    return Outcome(
        number=number + 1,
        harmless=sum(len(step.changes) for step in result.taken),
        refused=said + [words for step in result.steps for words in step.left_out],
        kind=kind,
        guilty=guilty,
        left_out=sorted({words.split()[0] for words in left_out}),
        has=packages.get(guilty, old[guilty]) != old[guilty],
        taken=sum(len(step.changes) for step in broken.taken),
        images=harmless.count + images.count,
        seconds=round(time.monotonic() - began, 1),
    )


def document(outcomes: Sequence[Outcome], machine: dict[str, Any]) -> str:
    """Return the result, as benchmarks/results/update_breakages.md has it."""
    alone = sum(one.left_out == [one.guilty] for one in outcomes)
    named, refused = sum(one.named for one in outcomes), sum(bool(one.refused) for one in outcomes)
    return "\n".join(
        [
            "<!-- Written by `python -m benchmarks.update_breakages --save`. Do not edit. -->",
            f"# `trainyard update` of {len(outcomes)} repositories, without and with a breakage",
            "",
            f"From packages of the index as of {updates.OLD[:10]} to those of {updates.NEW[:10]}. An image is judged "
            "by",
            f"its lock, and none is built; times have a noise of {NOISE:.0%}. Seconds are those of uv. Measured "
            f"{machine['date']} on",
            f"{machine['cores']} cores, {machine['cpu']}.",
            "",
            "| | harmless: taken | refused | planted | left out | taken | images | s |",
            "|---|---|---|---|---|---|---|---|",
            *(one.row() for one in outcomes),
            "",
            f"- Breakages: {named} of {len(outcomes)} left out by name, {alone} of them with nothing else.",
            f"- Harmless updates: {refused} of {len(outcomes)} with something refused.",
            "",
        ]
    )


def main() -> None:
    """Measure, and print or save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    host = trainers.machine("cpu")
    machine = {name: host[name] for name in ("cpu", "cores", "date")}
    with tempfile.TemporaryDirectory(prefix="trainyard-updates-") as temporary:
        os.environ["TRAINYARD_BUILD"] = f"{temporary}/state"
        for number in range(given.number):
            outcomes.append(run(number, Path(temporary)))
            say(outcomes[-1].row())
            if given.save:
                known = {"machine": machine, "outcomes": [asdict(one) for one in outcomes]}
                RESULTS.write_text(f"{json.dumps(known, indent=1)}\n", encoding="utf-8")
                RESULTS.with_suffix(".md").write_text(document(outcomes, machine), encoding="utf-8")
        os.chdir(ROOT)
    show(document(outcomes, machine))


if __name__ == "__main__":
    with Messages():
        main()
