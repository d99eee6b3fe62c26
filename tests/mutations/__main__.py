"""How many faults that code without knowledge of the rules plants in an image ``trainyard verify`` finds.

    python -m tests.mutations tf-cpu                 200 mutants of trainyard:tf-cpu, and images that are not ours
    python -m tests.mutations tf-cpu --count 20      the first 20
    python -m tests.mutations tf-cpu --only 17,18    these, again
    python -m tests.mutations tf-cpu --only foreign  only the images that are not ours
    python -m tests.mutations tf-cpu --report        only writes the table

A seed and a number give the same mutant again. What was measured with the same image and seed is kept and not measured
again. A mutant has one fault: in the configuration; in a layer, made anew or one more; in an image of one layer; by one
more instruction; or in a copy of the target's locks. It is found if the command fails with a finding that names the
place, and that the original, loaded in the same way, does not have. ``--image`` is another image of the target.

It needs Docker's containerd image store, three times the size of the image on disk, and half a minute a mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import docker.errors

from tests.engine import ENGINE
from tests.mutations import foreign, judge, locks, plan, report
from tests.mutations.judge import Verdict
from tests.mutations.layout import Draft, SavedImage
from tests.mutations.plan import Mutant, Source
from tests.mutations.report import Foreign, Results, Row
from trainyard.common.console import Messages, fail, say
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT, state_folder
from trainyard.oci import image_store
from trainyard.spec.lock import Lock
from trainyard.spec.model import load
from trainyard.spec.naming import NAME

#: What the repository shows of the results.
RESULTS = ROOT / "benchmarks" / "results" / "mutations.md"

#: Name of the mutants' images.
MUTANT = "trainyard-mutant"


class Trial:
    """Mutants of one image, each loaded, verified and removed.

    Args:
        target: name or folder of the target that the image is of.
    """

    def __init__(self, target: str, reference: str, source: Source) -> None:
        self._target, self._reference, self.source = target, reference, source
        self._without_fault = cache(self._measure_without_fault)

    def row(self, mutant: Mutant) -> Row:
        """The result of one mutant."""
        try:
            verdict = self._verdict(mutant)
        except (docker.errors.APIError, docker.errors.ImageLoadError) as error:
            return Row(mutant.number, mutant.family, mutant.kind, mutant.what, "not loaded", (str(error),))
        without = self._without_fault(squashed=mutant.family == "squashed")
        found = verdict.finds(mutant.places, without.findings)
        said = tuple(one for one in verdict.findings if one not in without.findings)
        outcome: report.Outcome = "found" if found else "missed"
        return Row(mutant.number, mutant.family, mutant.kind, mutant.what, outcome, () if found else said)

    def _verdict(self, mutant: Mutant) -> Verdict:
        if mutant.draft is None:
            with tempfile.TemporaryDirectory(prefix="trainyard-mutant-") as folder:
                target = locks.copied(self.source.folder, Path(folder), mutant.lock)
                return judge.verify(self._reference, str(target))
        assert mutant.draft.digest != self.source.image.original().digest, mutant.what
        return self._loaded(mutant.draft)

    def _loaded(self, draft: Draft) -> Verdict:
        with loaded(draft) as reference:
            return judge.verify(reference, self._target)

    def require_passed(self) -> None:
        """Check that the command finds nothing in the original: loaded as mutants are, and with a copy of its folder.

        Raises:
            StepFailed: it does.
        """
        with tempfile.TemporaryDirectory(prefix="trainyard-mutant-") as folder:
            verdicts = [self._without_fault(squashed=False)]
            verdicts.append(judge.verify(self._reference, str(locks.copied(self.source.folder, Path(folder)))))
        for verdict in verdicts:
            if verdict.status:
                raise StepFailed(
                    f"{self._reference} does not pass without a fault ({verdict.findings[0]}): build it with this "
                    f"checkout, with 'make image TARGET={self._target}'"
                )

    def _measure_without_fault(self, *, squashed: bool) -> Verdict:
        return self._loaded(self.source.image.squashed() if squashed else self.source.image.original())


@contextlib.contextmanager
def loaded(draft: Draft) -> Iterator[str]:
    """A changed image in the engine, while the context lasts; its reference."""
    reference = f"{MUTANT}:{draft.digest.removeprefix('sha256:')[:12]}"
    try:
        draft.load(reference)
        yield reference
    finally:
        ENGINE.untag(reference)


def measure(target: str, reference: str, results: Results, numbers: Collection[int]) -> None:
    """Add the mutants with these numbers to the results, and keep the results after each."""
    spec = load(target)
    with tempfile.TemporaryDirectory(prefix="trainyard-mutations-") as folder:
        image_store.save(ENGINE, reference, Path(folder))
        image = SavedImage(Path(folder))
        spec.locked()
        assert isinstance(spec.lock, Lock)
        trial = Trial(target, reference, Source(image, spec.folder, spec.lock, locks.of_image(spec, image.config)))
        trial.require_passed()
        for number in numbers:
            row = trial.row(plan.make(trial.source, results.seed, number))
            results.rows[number] = row
            keep(results)
            said = f": {row.said[0]}" if row.said else ""
            (say if row.outcome == "found" else fail)(f"{number} {row.kind}: {row.what}: {row.outcome}{said}")


def measure_foreign(
    results: Results,
    images: Mapping[str, Callable[[], str]] = foreign.IMAGES,
    verify: Callable[[str], Verdict] = judge.verify,
) -> None:
    """Add the images that are not ours to the results."""
    for name, build in images.items():
        try:
            with foreign.built(build) as reference:
                verdict = verify(reference)
        except (StepFailed, UserError) as error:
            results.foreign[name] = Foreign(name, "not built", (str(error),))
        else:
            results.foreign[name] = Foreign(name, "false alarm" if verdict.status else "passed", verdict.findings)
        keep(results)
        one = results.foreign[name]
        (say if one.outcome == "passed" else fail)(f"{name}: {one.outcome} {' '.join(one.said[:1])}".rstrip())


def _file() -> Path:
    return state_folder() / "mutations.json"


def keep(results: Results) -> None:
    """Write the results to the state folder."""
    _file().parent.mkdir(parents=True, exist_ok=True)
    _file().write_text(json.dumps(results.as_dict(), indent=1), encoding="utf-8")


def kept() -> Results | None:
    """The results in the state folder, if any."""
    return Results.of(json.loads(_file().read_text(encoding="utf-8"))) if _file().is_file() else None


def started(target: str, image: str, seed: int) -> Results:
    """What was measured with this image and seed, or else results without rows; foreign images are kept anyway."""
    before = kept()
    if before and (before.target, before.image, before.seed) == (target, image, seed):
        return before
    today = str(datetime.datetime.now(tz=datetime.UTC).date())
    return Results(target, image, seed, today, foreign=before.foreign if before else {})


def main() -> None:
    """Measure, keep, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--image", metavar="REFERENCE", help=f"default: {NAME}:TARGET")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="numbers of mutants, or 'foreign'")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    try:
        run(given)
    except (StepFailed, UserError) as error:
        parser.exit(1, f"{error}\n")


def run(given: argparse.Namespace) -> None:
    """What the options ask for.

    Raises:
        UserError: there is no such target or image, or nothing was measured so far.
        StepFailed: the image cannot be saved or does not pass without a fault.
    """
    if given.report:
        results = kept()
        if results is None:
            raise UserError(f"nothing was measured: run 'python -m tests.mutations {given.target}' first")
    else:
        reference = given.image or f"{NAME}:{load(given.target).local_name}"
        results = started(given.target, ENGINE.digest(reference), given.seed)
        wanted = [int(one) for one in given.only.split(",") if one.isdigit()]
        if not given.only:
            wanted = [number for number in range(1, given.count + 1) if number not in results.rows]
        if wanted:
            measure(given.target, reference, results, wanted)
        if given.only in ("", "foreign"):
            measure_foreign(results)
    RESULTS.write_text(report.markdown(results), encoding="utf-8")
    good, tried = report.found(results.rows.values())
    say(f"{good} of {tried} found: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    with Messages():
        main()
