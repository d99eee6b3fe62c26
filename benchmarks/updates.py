"""Measure how often `trainyard bisect` names the packages that broke a repository, and in how many tries.

    python -m benchmarks.updates             30 repositories
    python -m benchmarks.updates --save      also writes benchmarks/results/updates.json and .md; those it has are kept
    python -m benchmarks.updates --images 1  also tries the first one in images

The repositories extend tf-cpu. Each requires a choice of real packages, locked as of two days, between which many have
other versions, are added or removed. In the newer lock, one package or two are declared guilty, at random,
and the program of the repository fails, or prints other numbers, where their newer versions are installed. In every
third repository two more packages fit together in no mixture, which their metadata do not say.

Without ``--images`` a try asks the program's rule about the lock, and no image is built: what is counted is whether the
guilty packages are found, and the tries. Every third search is interrupted at a try at random, as by Ctrl-C, and run
again. uv resolves against the package index of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import trainers

from trainyard.common.console import Messages, say, show
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import repository_lock
from trainyard.release import bisect
from trainyard.release.bisect import Check
from trainyard.release.culprit import Verdict
from trainyard.release.mixed_lock import Mixture
from trainyard.spec import model
from trainyard.spec.model import RepositorySpec

#: The two days.
OLD, NEW = "2025-02-01T00:00:00Z", "2026-05-01T00:00:00Z"

#: What repositories require; others come with them.
PACKAGES = [
    "pandas", "scikit-learn", "polars", "networkx", "sqlalchemy", "pydantic", "matplotlib", "seaborn", "statsmodels",
    "tokenizers", "fastapi", "uvicorn", "httpx", "typer", "jinja2", "pyyaml", "hydra-core", "wandb", "tensorboardx",
    "einops", "tqdm", "dask", "xarray", "zarr", "imageio", "huggingface-hub", "sentencepiece", "orjson", "boto3",
    "lightgbm", "shapely", "regex", "nltk", "albucore", "safetensors", "pyarrow", "joblib", "click", "ipython",
]  # fmt: skip

#: Packages with compiled code.
NATIVE = {"pandas", "scikit-learn", "scipy", "polars", "pyarrow", "orjson", "tokenizers", "lightgbm", "shapely",
          "regex", "sentencepiece", "safetensors", "pydantic-core", "matplotlib", "contourpy", "kiwisolver",
          "sqlalchemy", "greenlet", "zarr", "numcodecs", "fonttools", "hf-xet"}  # fmt: skip

#: What the guilty do, in turn.
KINDS = ("API removed", "slower", "more memory", "wrong numbers", "transitive pin", "two together", "native library")

#: The exceptions of kinds; that of the others is AttributeError.
ERRORS = {"wrong numbers": "AssertionError", "native library": "OSError"}

RESULTS = ROOT / "benchmarks" / "results" / "updates.json"

#: The program of a repository; its rule is evaluated here, too.
PROGRAM = '''"""Fail, or be slow, where the guilty packages are installed."""
import builtins
import json
from importlib import metadata

rule = json.load(open("/workspace/rule.json"))


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def newer(names):
    return all(version(name) == rule["versions"][name] for name in names)


if rule["apart"] and newer(rule["apart"][:1]) != newer(rule["apart"][1:]):
    raise ImportError(rule["apart"][0])
guilty = newer(rule["guilty"])
print("value:", rule["bad"] if guilty else 1.0)
if guilty and not rule["measured"]:
    raise getattr(builtins, rule["error"])(rule["guilty"][0])
'''


@dataclass(frozen=True)
class Rule:
    """Describe how a repository breaks.

    Attributes:
        guilty: names of packages that break it if all of them are newer.
        versions: of the newer lock, empty for packages that it lacks.
        apart: two packages of which it may not have one alone; or none.
        bad: what is measured then, if it is; it is 1 otherwise.
        error: the exception that is raised then, if nothing is measured.
    """

    kind: str
    guilty: list[str]
    versions: dict[str, str]
    apart: list[str]
    measured: bool
    bad: float
    error: str

    def judge(self, versions: Mapping[str, str], noise: random.Random) -> Verdict:
        """Return what the program would do with packages."""

        def newer(names: Sequence[str]) -> bool:
            return all(versions.get(name, "") == self.versions[name] for name in names)

        if self.apart and newer(self.apart[:1]) != newer(self.apart[1:]):
            return Verdict("bad", f"ImportError: {self.apart[0]}")
        if self.measured:
            return Verdict("good", value=(self.bad if newer(self.guilty) else 1.0) * noise.gauss(1, 0.01))
        return Verdict("bad", f"{self.error}: {self.guilty[0]}") if newer(self.guilty) else Verdict("good")


@dataclass(frozen=True)
class Outcome:
    """Hold what became of a repository.

    Attributes:
        misfits: two packages that fit together in no mixture, if there are two.
        named: groups of culprits, ``inseparable``: whether no part of one resolves. The guilty are found if each is in
            one, and no group is without any.
        changes: number of packages that differ, ``tries``: between the two locks.
        again: tries that the run after the interruption did again.
        seconds: of the search, with the part before the interruption.
    """

    number: int
    kind: str
    guilty: list[str]
    misfits: list[str]
    named: list[list[str]]
    inseparable: bool
    changes: int
    tries: int
    again: int
    seconds: float

    @property
    def found(self) -> bool:
        guilty = set(self.guilty)
        return guilty <= {name for group in self.named for name in group} and all(guilty & {*one} for one in self.named)

    @property
    def most(self) -> int:
        """The tries that it may take: log2 N + 2."""
        return math.ceil(math.log2(self.changes)) + 2

    def row(self) -> str:
        """Return its row of the table."""
        named = "; ".join(", ".join(group) for group in self.named) or "nothing"
        named = named if self.found else f"**wrong**: {named}"
        return (
            f"| {self.number} | {self.kind} | {', '.join(self.guilty)} | {', '.join(self.misfits)} | {named} "
            f"| {self.changes} | {self.tries} | {self.most} | {self.again} | {self.seconds:.0f} |"
        )


def chosen(kind: str, mixture: Mixture, asked: Sequence[str], random_: random.Random, *, apart: bool) -> Rule:
    """Declare packages guilty."""
    changes = mixture.changes
    bumped = [name for name, (old, new) in changes.items() if old and new]
    pool = {
        "transitive pin": [name for name in bumped if name not in asked],
        "native library": [name for name in bumped if name in NATIVE],
    }.get(kind, bumped)
    guilty = random_.sample(pool or bumped, 2 if kind == "two together" else 1)
    others = random_.sample([name for name in bumped if name not in guilty], 2) if apart else []
    versions = {name: changes[name][1] for name in (*guilty, *others)}
    measured, error = kind in ("slower", "more memory"), ERRORS.get(kind, "AttributeError")
    return Rule(kind, guilty, versions, others, measured, 1.15 if kind == "slower" else 1.5, error)


def repository(folder: Path, asked: Sequence[str]) -> RepositorySpec:
    """Write a repository, and lock it as of the two days: good.lock, and trainyard.lock."""
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "rule.json").write_text("{}", encoding="utf-8")
    (folder / "trainyard.yaml").write_text(
        "extends: tf-cpu\nplatforms: [linux/amd64]\nrun: python train.py\nrequirements: pyproject.toml\n"
        "smoke: {args: []}\n",
        encoding="utf-8",
    )
    ours = sorted(model.load("tf-cpu", "amd64").locked().versions)
    exempt = ", ".join(f'{package} = "2099-01-01T00:00:00Z"' for package in ours)
    for day, name in ((OLD, "good.lock"), (NEW, "")):
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "breaks"\nversion = "0"\ndependencies = {json.dumps(list(asked))}\n'
            f'[tool.uv]\nexclude-newer = "{day}"\nexclude-newer-package = {{ {exempt} }}\n',
            encoding="utf-8",
        )
        loaded = model.load(str(folder), "amd64").repository("")
        locked = repository_lock.lock(loaded, upgrade=True)
        if name:
            locked.lock_file.rename(folder / name)
    return model.load(str(folder), "amd64").repository("")


def run(number: int, folder: Path, *, images: bool) -> Outcome:
    """Make a repository, break it, and look for what broke it."""
    random_ = random.Random(number)
    asked = sorted(random_.sample(PACKAGES, random_.randint(8, 24)))
    os.chdir(folder)
    spec = bisect.repository(repository(folder / f"repository-{number}", asked))
    os.chdir(spec.folder)
    bad = bisect.side(None, spec)
    good = bisect.side("good.lock", spec, bad)
    mixture = Mixture(spec, good, bad)
    rule = chosen(KINDS[number % len(KINDS)], mixture, asked, random_, apart=number % 3 == 2)
    (spec.folder / "rule.json").write_text(json.dumps(asdict(rule)), encoding="utf-8")
    check = Check(performance=1.1, measure="value: ([0-9.]+)", runs=1) if rule.measured else Check()
    judged: list[frozenset[tuple[str, str]]] = []
    interruptions = {random_.randint(3, 6)} if not images and number % 3 == 0 else set[int]()

    def judge(tried: RepositorySpec, _: Check) -> Verdict:
        versions = tried.locked(mixture.index).versions
        if len(judged) in interruptions:
            interruptions.clear()
            raise KeyboardInterrupt
        judged.append(frozenset(versions.items()))
        return rule.judge(versions, random_)

    started = time.monotonic()
    groups: list[list[str]] = []
    tries, inseparable = 0, True
    with contextlib.suppress(StepFailed, UserError):
        try:
            found = bisect.bisect(spec, good, bad, check, try_=bisect.in_image if images else judge)
        except KeyboardInterrupt:
            found = bisect.bisect(spec, good, bad, check, try_=judge)
        groups, tries = [[text.split()[0] for text in group] for group in found.culprits], found.tries
        inseparable = found.apart
    seconds = round(time.monotonic() - started, 1)
    return Outcome(
        number=number + 1,
        kind=rule.kind,
        guilty=sorted(rule.guilty),
        misfits=sorted(rule.apart),
        named=groups,
        inseparable=inseparable,
        changes=len(mixture.changes),
        tries=tries,
        again=len(judged) - len({*judged}),
        seconds=seconds,
    )


def report(outcomes: Sequence[Outcome], images: Sequence[Outcome], machine: Mapping[str, str]) -> str:
    """Return the result, as benchmarks/results/updates.md has it."""
    alone = [one for one in outcomes if len(one.guilty) == 1]
    both = [one for one in outcomes if len(one.guilty) == 2]
    found = sum(one.found for one in outcomes)
    grouped = [one for one in outcomes if one.found and any(len(group) > 1 for group in one.named)]
    demanded = sum(one.inseparable for one in grouped)
    fitting = [one for one in alone if not one.misfits]
    tried = [
        f"In images: {', '.join(one.guilty)} ({one.kind}), {one.tries} tries among {one.changes} packages, "
        f"{one.seconds / 60:.1f} min with both ends, named: {'; '.join(map(', '.join, one.named)) or 'nothing'}."
        for one in images
    ]
    counts = [
        f"Found: {found} of {len(outcomes)}; {demanded} of them in a group whose packages demand each other, so that "
        f"no smaller set resolves, and {len(grouped) - demanded} in one whose parts could not be judged.",
        f"With one guilty package, {sum(one.tries <= one.most for one in alone)} of {len(alone)} took at most "
        f"log2 N + 2 tries; the median was {statistics.median([one.tries for one in alone] or [0]):g}, the most "
        f"{max([one.tries for one in alone], default=0)}. Without misfits it was "
        f"{sum(one.tries <= one.most for one in fitting)} of {len(fitting)}.",
        f"With two, which are searched for one after the other, {sum(one.tries <= 2 * one.most for one in both)} of "
        f"{len(both)} took at most twice that.",
        f"After the interruption, {sum(one.again for one in outcomes)} tries were done again.",
        *tried,
    ]
    return "\n".join(
        [
            "<!-- Written by `python -m benchmarks.updates --save`. Do not edit. -->",
            f"# `trainyard bisect` in {len(outcomes)} repositories",
            "",
            f"The packages are those of the index as of {OLD[:10]} and {NEW[:10]}. A try is judged by its lock,",
            "without an image. Seconds are those of uv, before and after the interruption. Measured "
            f"{machine['date']} on {machine['cores']} cores,",
            f"{machine['cpu']}, with a load average of {machine['load']}.",
            "",
            "| | kind | guilty | misfits | named | packages that differ | tries | log2 N + 2 | again | s |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(one.row() for one in outcomes),
            "",
            *(f"- {text}" for text in counts),
            "",
        ]
    )


def main() -> None:
    """Measure, and print or save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--images", type=int, default=0, help="repositories that are tried in images, too")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}, and go on where it is")
    given = parser.parse_args()
    known: dict[str, Any] = {"machine": {}, "outcomes": [], "images": []}
    if given.save and RESULTS.exists():
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="trainyard-updates-") as temporary:
        os.environ["TRAINYARD_BUILD"] = f"{temporary}/state"
        for folder, number in (("outcomes", given.number), ("images", given.images)):
            (Path(temporary) / folder).mkdir()
            have = {one["number"] - 1 for one in known[folder]}
            for position in sorted({*range(number)} - have):
                outcome = run(position, Path(temporary) / folder, images=folder == "images")
                say(outcome.row())
                known[folder] = sorted([*known[folder], asdict(outcome)], key=lambda one: int(one["number"]))
                host = trainers.machine("cpu")
                known["machine"] = {name: host[name] for name in ("cpu", "cores", "date")}
                known["machine"]["load"] = f"{os.getloadavg()[1]:.1f}"
                if given.save:
                    RESULTS.write_text(f"{json.dumps(known, indent=1)}\n", encoding="utf-8")
                    RESULTS.with_suffix(".md").write_text(document(known), encoding="utf-8")
        os.chdir(ROOT)
    show(document(known))


def document(known: Mapping[str, Any]) -> str:
    """Return the report of saved results."""
    outcomes, images = ([Outcome(**one) for one in known[name]] for name in ("outcomes", "images"))
    return report(outcomes, images, known["machine"])


if __name__ == "__main__":
    with Messages():
        main()
