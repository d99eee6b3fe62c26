"""Build, verify and measure images of locks of a repository, and compare two of them by bounds.

What was measured is recorded before the next image is built, so that a run that was interrupted goes on where it was.
An image is called slower if its median and its quickest run are, twice: the second time the two are measured in turns.
"""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter, ValidationError

from trainyard.common import stages
from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.image import build, planning, repository_lock, smoke_command, smoke_packages
from trainyard.image.smoke_command import MEASURED, RUN
from trainyard.image.workspace_files import on_host
from trainyard.lint.image import verify
from trainyard.recipe import Command
from trainyard.release import advisories, audit, bisect
from trainyard.release.bisect import Check, Tried
from trainyard.release.culprit import Verdict
from trainyard.release.vulnerabilities import public_version
from trainyard.spec import state
from trainyard.spec.lock import Lock
from trainyard.spec.model import RepositorySpec
from trainyard.spec.naming import NAME
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: Seconds by which a run or a start must be longer to be slower: containers of one image start within 0.2 s.
LEAST = 0.5

#: How a trainer of the catalogue is run, and what it prints of its speed.
_TRAINER, _SPEED = RUN.model_copy(update={"args": ("--fake-data", "--epochs=1")}), r'"images_per_second": ([0-9.]+)'

#: What scripts/trainyard/image/peak_memory.py prints.
_PEAK = re.compile(r'\{"peak_memory": (\d+)')


@dataclass(frozen=True)
class Bounds(Check):
    """Say when an image is worse than another.

    Attributes:
        slower: how many times as long a step, a run or the start may take, at most.
        larger: how many times as large the image, what is pulled of it and its memory may be, at most.
        step: regular expression whose first group is the time of a step; empty: the seconds of a run are compared.
    """

    slower: float = 1.1
    larger: float = 1.1
    step: str = ""

    def __post_init__(self) -> None:
        Check(performance=2.0, measure=self.step)


@dataclass(frozen=True)
class Measured:
    """Hold what was measured of an image.

    Attributes:
        failure: why it did not pass; empty if it did.
        value: accuracy of a trainer in percent, or the last number that the group of ``smoke.expect`` matched.
        steps: times of what ``timed`` says, ``starts``: seconds until the framework is imported; one of each run.
        memory: bytes of the largest process, at most; 0 if there was no run.
        size: of all layers in bytes, ``blobs``: digest -> bytes as it is pulled.
        advisories: about its packages, such as ``urllib3 PYSEC-2023-212``.
        beside: what was tried beside the training, in words, ``failing``: what fails of it,
            ``<package>: <what>: <why>``.
    """

    failure: str = ""
    value: float | None = None
    timed: str = "run, s"
    steps: tuple[float, ...] = ()
    starts: tuple[float, ...] = ()
    memory: int = 0
    size: int = 0
    blobs: dict[str, int] = field(default_factory=dict)
    advisories: tuple[str, ...] = ()
    beside: str = ""
    failing: tuple[str, ...] = ()


_RECORD = TypeAdapter(dict[str, Measured])


@dataclass(frozen=True)
class Row:
    """Compare two images in one point; ``worse`` is why the second is refused, empty if it is not."""

    name: str
    before: str
    after: str
    bound: str = ""
    worse: str = ""


@dataclass(frozen=True)
class Comparison:
    """Hold the rows of two images, why the second is refused, and the advisories that it closes."""

    rows: list[Row]
    worse: str
    closed: list[str]


def compare(before: Measured, after: Measured, bounds: Bounds) -> Comparison:
    """Compare two images; what one of them lacks is left out."""
    rows = [Row("smoke test", before.failure or "passed", after.failure or "passed", "passes", after.failure)]
    if after.failure:
        return Comparison(rows, after.failure, [])
    if before.value is not None and after.value is not None:
        rows.append(Row("accuracy or value", f"{before.value:g}", f"{after.value:g}", "the smoke test's"))
    for name, old, new in ((after.timed, before.steps, after.steps), ("start, s", before.starts, after.starts)):
        if old and new:
            middle = statistics.median(old), statistics.median(new)
            shown = f"{middle[0]:.3g}", f"{middle[1]:.3g}"
            slower = middle[1] > bounds.slower * middle[0] and min(new) > bounds.slower * min(old)
            slower = slower and (middle[1] - middle[0] > LEAST or name in ("step", "image, s"))
            rows.append(_row(name, *shown, bounds.slower, "slower" if slower else ""))
    if before.beside or after.beside:  # nothing is tried of an image with the packages of its target
        known = {_what(one) for one in before.failing}
        fails = [f"fails beside the training: {one}" for one in after.failing if _what(one) not in known]
        shown = before.beside or "nothing", after.beside or "nothing"
        rows.append(Row("beside the training", *shown, "no other failure", *fails[:1]))
    sizes = [("memory", before.memory, after.memory), ("size", before.size, after.size)]
    for name, was, now in (*sizes, ("bytes to pull", sum(before.blobs.values()), sum(after.blobs.values()))):
        if was and now:
            larger = "larger" if now > was * bounds.larger else ""
            rows.append(_row(name, in_units(was), in_units(now), bounds.larger, larger))
    if after.blobs:
        moved = sum(size for digest, size in after.blobs.items() if digest not in before.blobs)
        rows.append(Row("of them new", "", in_units(moved)))
    had, has = set(before.advisories), set(after.advisories)
    opened = [f"has {one}" for one in sorted(has - had)]
    rows.append(Row("advisories", f"{len(had)}", f"{len(has)}", "no other", *opened[:1]))
    return Comparison(rows, next((row.worse for row in rows if row.worse), ""), sorted(had - has))


def _what(failing: str) -> tuple[str, ...]:
    """Return the package and what fails of it, without the reason."""
    return tuple(failing.split(": ")[:2])


def _row(name: str, before: str, after: str, factor: float, worse: str) -> Row:
    return Row(name, before, after, f"{factor:g} times", f"{worse}: {name} {before} -> {after}" if worse else "")


#: ``measure(spec, bounds, again)``: what the image of a repository's lock is like; ``again``: only the times.
Measure = Callable[[RepositorySpec, Bounds, bool], Measured]


def in_image(spec: RepositorySpec, bounds: Bounds, again: bool) -> Measured:
    """Build the image of a repository, verify, test and measure it."""
    name = f"{NAME}:{spec.local_name}"
    try:
        try:
            with planning.planned(spec) as plan:
                build.build(plan, name=name)
        except UserError as error:  # the lock lacks a package of the framework
            return Measured(failure=str(error))
        tried = Tried(plan.recipe, name, spec.context, on_host(spec))
        with state.testing_lock(spec.context.state):
            found = Measured() if again else _tested(tried)
            return _timed(tried, bounds, found)
    except EngineFailed:  # says nothing of the image
        raise
    except StepFailed as error:
        return Measured(failure=str(error))
    finally:
        spec.context.engine.untag(name)


def _tested(tried: Tried) -> Measured:
    verified, smoke = verify.verify(tried.recipe, tried.image, tried.context), tried.smoke()
    known = []
    with contextlib.suppress(UserError):  # there is no snapshot
        pins = {name: {public_version(version)} for name, version in tried.recipe.versions.items()}
        known = audit.by_snapshot(pins, advisories.load())
    return Measured(
        beside=smoke_packages.described(smoke.get("beside", {})),
        failing=tuple(smoke.get("beside", {}).get("findings", ())),
        value=smoke.get("accuracy"),
        size=verified["size"],
        blobs={layer["digest"]: layer["compressed"] for layer in verified["layers"]},
        advisories=tuple(sorted(f"{one.package} {one.names[0]}" for one in known)),
    )


def _timed(tried: Tried, bounds: Bounds, found: Measured) -> Measured:
    """Add times, memory and the value of some runs.

    Raises:
        StepFailed: a run failed, or printed no number.
    """
    recipe = tried.recipe
    test, command = recipe.test if isinstance(recipe.test, Command) else _TRAINER, recipe.commands[recipe.default]
    steps, starts = list[float](), list[float]()
    with stages.stage("measure") as stage:
        for number in range(1, bounds.runs + 1):
            stages.now(f"run {number} of {bounds.runs}")
            starts.append(_run(tried, ("python", "-c", f"import {recipe.framework.name}"), RUN).seconds)
            if test.args is None:
                continue
            tester = _run(tried, (*MEASURED, *command), test)
            peaks = [int(match[1]) for line in tester.printed if (match := _PEAK.match(line))]
            found = replace(found, memory=max([found.memory, *peaks]))
            if bounds.step:
                steps.append(bisect.number(bounds.step, tester.printed))
                found = replace(found, timed="step")
            elif tried.files is None:
                steps.append(1 / bisect.number(_SPEED, tester.printed))
                found = replace(found, timed="image, s")
            elif test.seconds is None:
                steps.append(tester.seconds)
            if test.expect and re.compile(test.expect).groups:
                matches = [match[1] for line in tester.printed if (match := re.search(test.expect, line))]
                with contextlib.suppress(ValueError, TypeError):
                    found = replace(found, value=float(matches[-1]))
        stage.done = ", ".join(f"{value:.3g}" for value in steps or starts)
    return replace(found, steps=tuple(steps), starts=tuple(starts))


def _run(tried: Tried, command: tuple[str, ...], test: Command) -> smoke_command.Tester:
    tester = smoke_command.Tester(tried.context.engine, tried.subject(command, test))
    tester.check_run(test)
    return tester


@dataclass
class Trials:
    """Try locks of one repository.

    Attributes:
        spec: see :func:`trainyard.release.bisect.repository`.
        measure: how an image is measured.
        force: whether images are measured again that an earlier run has measured.
    """

    spec: RepositorySpec
    bounds: Bounds
    measure: Measure = in_image
    force: bool = False

    def __post_init__(self) -> None:
        self._file, self._known = self.spec.kept / "measured.json", dict[str, Measured]()
        with contextlib.suppress(OSError, ValidationError):
            self._known = {} if self.force else _RECORD.validate_json(self._file.read_bytes())

    def compare(self, before: Lock, after: Lock, name: str) -> Comparison:
        """Compare the images of two locks.

        Raises:
            StepFailed: the first did not pass.
        """
        return self._compared(self._tried(before), self._tried(after), name, self.bounds)

    def judge(self, before: Lock, worse: str) -> bisect.Try:
        """Return what tells how locks fare against another, for :func:`trainyard.release.bisect.bisect`.

        Args:
            worse: why an image is refused; others are run for their times and memory only if it is about these.
        """
        timed = worse.startswith(("slower", "larger: memory"))
        bounds = self.bounds if timed else replace(self.bounds, runs=0)

        def judged(tried: RepositorySpec, _check: Check) -> Verdict:
            found = self._compared(self._tried(before), tried, "", bounds).worse
            return Verdict("bad" if found else "good", found)

        return judged

    def _tried(self, lock: Lock) -> RepositorySpec:
        """Return the spec with what a lock has for its platform, so that the image is built from that as it is."""
        base = lock.origin.base if lock.origin else ""
        return self.spec.with_lock(repository_lock.trial(self.spec, lock.only(self.spec.arch), base))

    def _measured(self, tried: RepositorySpec, name: str, bounds: Bounds) -> Measured:
        """Return what an image is like, and record it."""
        assert tried.usable_lock
        keys = []
        for some in (self.bounds, bounds):
            keys.append(bisect.key(self.spec, replace(some, slower=1.0, larger=1.0), tried.usable_lock))
            if keys[-1] in self._known:
                return self._known[keys[-1]]
        if name:
            logger.info(stages.row("image", name))
        self._known[keys[-1]] = self.measure(tried, bounds, False)
        state.own(self._file.parent)
        temporary = self._file.with_suffix(".new")
        temporary.write_bytes(_RECORD.dump_json(self._known, indent=1))
        temporary.replace(self._file)
        return self._known[keys[-1]]

    def _compared(self, before: RepositorySpec, after: RepositorySpec, name: str, bounds: Bounds) -> Comparison:
        old = self._measured(before, "with the packages before", self.bounds)
        if old.failure:
            raise StepFailed(f"it fails with the packages before: {old.failure}")
        new = self._measured(after, name, bounds)
        found = compare(old, new, bounds)
        if not found.worse.startswith("slower"):
            return found
        logger.info(stages.row("again", f"{found.worse}: both are measured again, in turns"))
        once, turns = replace(bounds, runs=1), range(max(3, bounds.runs))
        olds, news = zip(*([self.measure(one, once, True) for one in (before, after)] for _ in turns), strict=True)
        return compare(_renewed(old, olds), _renewed(new, news), bounds)


def _renewed(measured: Measured, again: tuple[Measured, ...]) -> Measured:
    """Return what was measured with the times of other runs."""
    steps, starts = [time for one in again for time in one.steps], [time for one in again for time in one.starts]
    return replace(measured, steps=tuple(steps), starts=tuple(starts))
