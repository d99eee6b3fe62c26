"""Find the packages that broke an image, by building and testing images between a good one and a bad one.

The packages are those of two locks (:mod:`trainyard.release.mixed_lock`), all else is the repository as it is now. An
image of a try is built as any other, from layers by wheel, most of which another try has built. Every verdict is
recorded before the next try begins, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard.common import git, stages
from trainyard.common.context import Context
from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.image import build, build_backends, planning, smoke_command, smoke_test
from trainyard.image.smoke_command import RUN, Subject
from trainyard.image.smoke_failure import HostFiles
from trainyard.image.workspace_files import on_host
from trainyard.recipe import Command, Recipe
from trainyard.release import culprit, image_packages, mixed_lock
from trainyard.release.culprit import Changes, Verdict
from trainyard.release.mixed_lock import Mixture, Side
from trainyard.spec import model, pylock, state, workspace
from trainyard.spec.lock import Lock, Unreadable
from trainyard.spec.model import RepositorySpec, Spec, relative
from trainyard.spec.naming import NAME
from trainyard.workspace import check as workspace_check

logger = logging.getLogger(__name__)

#: Exit status of a command that cannot tell good from bad: https://git-scm.com/docs/git-bisect#_bisect_run
SKIP = 125

#: The exception in the reason of a failed command.
_EXCEPTION = re.compile(r"\b\w+(?:Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True)
class Check:
    """Describe what tells good from bad.

    Attributes:
        command: words that fail in a bad image; empty: the smoke test of the repository.
        performance: how many times as much is measured at least with all changes; None: nothing is measured.
        measure: regular expression whose first group is what is measured, in lines of the output; empty: seconds of a
            run, or images a second of a trainer of the catalogue.
        runs: of which the median is taken.
    """

    command: tuple[str, ...] = ()
    performance: float | None = None
    measure: str = ""
    runs: int = 3

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.measure).groups
        except re.error as error:
            raise UserError(f"'--measure {self.measure}' is not a regular expression: {error}") from None
        if self.measure and not groups:
            raise UserError(f"'--measure {self.measure}' has no group for the number: as in 'step took ([0-9.]+) s'")
        if self.measure and self.performance is None:
            raise UserError("'--measure' needs '--performance', such as '--performance 1.1'")


@dataclass(frozen=True)
class Result:
    """Hold what was found.

    Attributes:
        good, bad: what the sides are called.
        changes: number of packages that differ.
        culprits: groups of changes in words, ``along``: those without which the culprits do not resolve.
        keep: the versions of the culprits that are good.
        reason: why it is bad.
        apart: see :class:`trainyard.release.culprit.Found`.
        tries: images between the two, ``before``: those of them that an earlier run had tried.
        values: what was measured with the packages of ``good``, and of ``bad``; empty if nothing was.
        seconds: of this run.
    """

    good: str
    bad: str
    changes: int
    culprits: list[list[str]]
    along: list[str]
    keep: list[str]
    reason: str
    apart: bool
    tries: int
    before: int
    values: list[float]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the answer for people."""
        rows = [stages.row("culprit", ", ".join(group)) for group in self.culprits]
        if len(self.culprits) > 1:
            rows.append(stages.row("", "each of these lines is needed: without one of them it is good"))
        if any(len(group) > 1 for group in self.culprits):
            why = "cannot be installed without each other" if self.apart else "were not separated: no result in between"
            rows.append(stages.row("", f"the packages of a line {why}"))
        if self.along:
            rows.append(stages.row("with", f"{', '.join(self.along)}, as the requirements of the culprit demand"))
        if self.values:
            rows.append(stages.row("measured", " -> ".join(f"{value:.4g}" for value in self.values)))
        rows.append(stages.row("reason", self.reason))
        recorded = f", {self.before} of them before" if self.before else ""
        rows.append(
            stages.row("tries", f"{self.tries} between {self.good} and {self.bad}, {self.changes} packages{recorded}")
        )
        if self.keep:
            rows.append(stages.row("keep", f"{' '.join(self.keep)} (as requirements, then 'trainyard lock')"))
        return [row for row in rows if row]


def extending(spec: Spec) -> RepositorySpec:
    """Return the spec of a repository; for a target of the catalogue, that of one that only extends it.

    Raises:
        UserError: it is an image.yaml outside the catalogue, or there is no lock.
    """
    if spec.folder.is_relative_to(model.IMAGES):
        folder = spec.context.state / f"{spec.local_name}-tried"
        state.own(folder)
        text = f"extends: {spec.target}\nname: {spec.target}-tried\nplatforms: [{', '.join(spec.platforms)}]\n"
        (folder / workspace.FILE).write_text(text, encoding="utf-8")
        if spec.usable_lock:
            pylock.write(folder / pylock.REPOSITORY_FILE, spec.usable_lock)
        # A lock of the catalogue is no lock of a repository, and is given to it.
        spec = model.load(str(folder), spec.arch, spec.context).model_copy(update={"lock": spec.lock})
    own = spec.repository(f"{spec.where}: give a target of the catalogue, or the folder of a {workspace.FILE}")
    if isinstance(own.lock, Unreadable):
        raise UserError(own.lock.reason)
    return build_backends.asked(own)


def repository(spec: Spec, purpose: str = "bisect") -> RepositorySpec:
    """Return :func:`extending` under the name of what its images are tried for, for one platform."""
    own = extending(spec)
    return own.model_copy(update={"target": f"{own.target}-{purpose}", "platforms": [own.platform]})


def side(text: str | None, spec: RepositorySpec, other: Side | None = None) -> Side:
    """Return one of the two sides.

    Args:
        text: path of a lock, a commit of the repository, or reference of an image; None: the repository's lock.
        other: the other side, of whose packages an image's have the hashes.
    Raises:
        UserError: it is none of these, or its packages cannot be exchanged.
    """
    if text is None:
        if isinstance(spec.lock, Unreadable):
            raise UserError(spec.lock.reason)
        return mixed_lock.of_lock(relative(spec.lock_file), spec.lock, spec.arch)
    path = Path(text)
    if path.is_file():
        found_lock = _read({path.name: path.read_text(encoding="utf-8", errors="replace")}, text)
        return mixed_lock.of_lock(text, found_lock, spec.arch)
    if committed := _committed(text, spec.folder):
        name = f"{next(iter(committed))} of {text}"
        return mixed_lock.of_lock(name, _read(committed, name), spec.arch)
    try:
        found = image_packages.find(spec.context.engine, text)
    except (UserError, StepFailed) as error:
        raise UserError(
            f"'{text}' is neither a file, nor a commit with a {pylock.REPOSITORY_FILE}, nor an image ({error})"
        ) from None
    return mixed_lock.of_image(text, found.python, other or side(None, spec), spec)


def _read(texts: Mapping[str, str], name: str) -> Lock:
    """Return the lock in texts, by the names of their files, of a repository or a target."""
    try:
        return pylock.merged(
            pylock.loads(text, "trainyard lock", pylock.index_of(file)) for file, text in texts.items()
        )
    except ValueError as error:
        raise UserError(f"{name}{error}") from None


def _committed(revision: str, folder: Path) -> dict[str, str]:
    """Return name -> text of the lock of a repository, or else of a target, that a folder has in a commit."""
    for names in map(pylock.file_names, (Path(pylock.REPOSITORY_FILE), Path(pylock.FILE))):
        try:
            shown = {name: git.run(folder, "show", "--end-of-options", f"{revision}:./{name}") for name in names}
        except FileNotFoundError:
            return {}
        if texts := {name: done.stdout.decode(errors="replace") for name, done in shown.items() if not done.returncode}:
            return texts
    return {}


#: ``try_(spec, check)``: how a repository fares with the packages of its lock.
Try = Callable[[RepositorySpec, Check], Verdict]


def in_image(spec: RepositorySpec, check: Check) -> Verdict:
    """Build the image of a repository, and judge it; an image that cannot be built cannot be judged."""
    try:
        with planning.planned(spec) as plan:
            build.build(plan, name=reference(spec))
    except EngineFailed:  # says nothing of the image
        raise
    except (StepFailed, UserError) as error:  # the lock may lack a package of the framework
        return Verdict("unresolved", str(error))
    tried = Tried(plan.recipe, reference(spec), spec.context, on_host(spec))
    with state.testing_lock(spec.context.state):
        return judge(tried, check)


def reference(spec: Spec) -> str:
    """Return the reference of the image of a try, which is there until all tries are done."""
    return f"{NAME}:{spec.local_name}"


def bisect(
    spec: RepositorySpec, good: Side, bad: Side, check: Check, *, again: bool = False, try_: Try = in_image
) -> Result:
    """Find the smallest set of packages that makes ``good`` bad.

    Args:
        spec: see :func:`repository`.
        again: forget the verdicts of earlier runs.
    Raises:
        UserError: no package differs.
        StepFailed: the sides are not what they are called, or cannot be tried.
    """
    started = time.monotonic()
    mixture = Mixture(spec, good, bad)
    if not mixture.changes:
        raise UserError(f"{good.name} and {bad.name} have the same packages")
    logger.info(stages.row("bisect", f"{len(mixture.changes)} packages differ between {good.name} and {bad.name}"))
    with state.file_lock(spec.context.state, spec.local_name, f"another process tries {spec.target}: waiting for it"):
        ends = (mixture.lock(changes) for changes in (frozenset[str](), frozenset(mixture.changes)))
        record = _Record.load(spec.kept / "tries.json", key(spec, check, *ends), again=again)
        tries = _Tries(mixture, check, record, try_)
        reason, values = tries.ends()
        found = culprit.search(list(mixture.changes), mixture.with_needs, mixture.complete, tries)
    culprits = sorted(sorted(group) for group in found.culprits)
    kept = [(name, mixture.changes[name][0]) for group in culprits for name in group]
    return Result(
        good=good.name,
        bad=bad.name,
        changes=len(mixture.changes),
        culprits=[[mixture.described(name) for name in group] for group in culprits],
        along=[mixture.described(name) for name in sorted(found.along)],
        keep=[f"{name}=={old}" for name, old in kept if old],
        reason=reason,
        apart=found.apart,
        tries=tries.number,
        before=tries.before,
        values=values,
        seconds=round(time.monotonic() - started, 1),
    )


def key(spec: RepositorySpec, check: Check, *ends: Lock) -> str:
    """Return the SHA-256 of what verdicts about locks depend on: these, the check, the code, and the smoke test."""
    digest = hashlib.sha256(repr((check, spec.workspace.config_hash, spec.extends.target)).encode())
    for lock in ends:
        for index in sorted(lock.indexes):
            digest.update(pylock.text(lock, index).encode())
    for file in workspace_check.require(spec):
        content = str(file.link).encode() if file.link is not None else file.source.read_bytes()
        digest.update(f"{file.path}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    smoke = spec.workspace.document.smoke
    for path in sorted((spec.folder / smoke.data).rglob("*")) if smoke and smoke.data else ():
        digest.update(f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\0".encode())
    return digest.hexdigest()


@dataclass
class _Record:
    """Keep verdicts in a file.

    Attributes:
        key: of what they depend on; those with another key are forgotten.
    """

    path: Path
    key: str
    verdicts: dict[Changes, Verdict] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, key: str, *, again: bool) -> _Record:
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            verdicts = {frozenset(one.pop("changes")): Verdict(**one) for one in known["verdicts"]}
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path, key)
        return cls(path, key, {} if again or known.get("key") != key else verdicts)

    def add(self, changes: Changes, verdict: Verdict) -> None:
        self.verdicts[changes] = verdict
        rows = [{"changes": sorted(one), **asdict(judged)} for one, judged in self.verdicts.items()]
        state.own(self.path.parent)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps({"key": self.key, "verdicts": rows}, indent=1), encoding="utf-8")
        temporary.replace(self.path)


class _Tries:
    """Try sets of changes.

    Attributes:
        number: of sets that were tried between the two ends, ``before``: by an earlier run.
    """

    def __init__(self, mixture: Mixture, check: Check, record: _Record, try_: Try) -> None:
        self._mixture, self._check, self._record, self._try = mixture, check, record, try_
        self._known = frozenset(record.verdicts)
        self._everything = frozenset(mixture.changes)
        self._exception = ""
        self._limit: tuple[float, bool] | None = None
        self.number = self.before = 0

    def ends(self) -> tuple[str, list[float]]:
        """Try both sides, and return why ``bad`` is bad, and what was measured.

        Raises:
            StepFailed: ``bad`` is not bad, ``good`` is not good, or one of them cannot be tried.
        """
        good, bad = self._mixture.good.name, self._mixture.bad.name
        ends = {bad: self._verdict(self._everything, bad), good: self._verdict(frozenset(), good)}
        for name, verdict in ends.items():
            if verdict.outcome == "unresolved":
                raise StepFailed(f"the packages of {name} cannot be tried: {verdict.reason}")
        if ends[good].outcome == "bad":
            raise StepFailed(
                f"the packages are not what broke it: it fails with those of {good}, too: {ends[good].reason}"
            )
        if self._check.performance is not None:
            return self._measured_ends(ends[good].value or 0.0, ends[bad].value or 0.0)
        if ends[bad].outcome == "good":
            raise StepFailed(f"nothing fails with the packages of {bad}: give a '--command' that does")
        self._exception = _exception(ends[bad].reason)
        return ends[bad].reason, []

    def _measured_ends(self, good: float, bad: float) -> tuple[str, list[float]]:
        """Set the limit between good and bad, half way between the two as a ratio."""
        factor = self._check.performance or 1.0
        if min(good, bad) <= 0:
            raise StepFailed(f"{good:.4g} and {bad:.4g} were measured, which have no ratio: measure something else")
        ratio = max(good, bad) / min(good, bad)
        if ratio < factor:
            raise StepFailed(
                f"{good:.4g} was measured with the packages of {self._mixture.good.name}, {bad:.4g} with those of "
                f"{self._mixture.bad.name}: {ratio:.2f} times as much, not {factor:g}"
            )
        self._limit = (math.sqrt(good * bad), bad > good)
        return f"{max(good, bad) / min(good, bad):.2f} times as {'much' if bad > good else 'little'}", [good, bad]

    def __call__(self, changes: Changes) -> Verdict:
        self.number += 1
        self.before += changes in self._known
        verdict = self._judged(self._verdict(changes, f"try {self.number}"))
        measured = f", {verdict.value:.4g}" if verdict.value is not None else ""
        reason = f": {verdict.reason}" if verdict.reason else ""
        count = f"{len(changes)} of {len(self._everything)} packages of {self._mixture.bad.name}"
        logger.info(stages.row(f"try {self.number}", f"{verdict.outcome}{measured}, with {count}{reason}"))
        return verdict

    def _judged(self, verdict: Verdict) -> Verdict:
        """Return a verdict by what the ends were like.

        Another exception than that of the bad side says nothing about what broke that: packages of different days may
        not fit together, though their metadata say they do.
        """
        if self._limit and verdict.outcome == "good" and verdict.value is not None:
            limit, more = self._limit
            return Verdict("bad" if (verdict.value > limit) == more else "good", value=verdict.value)
        if self._limit and verdict.outcome == "bad":
            return Verdict("unresolved", verdict.reason)
        if verdict.outcome == "bad" and _exception(verdict.reason) != self._exception:
            return Verdict("unresolved", f"it fails otherwise: {verdict.reason}")
        return verdict

    def _verdict(self, changes: Changes, name: str) -> Verdict:
        """Return how a try ended, and record it, unless it could not be judged, as on a full disk."""
        if changes in self._record.verdicts:
            return self._record.verdicts[changes]
        logger.info(stages.row(name, self._described(changes)))
        verdict = self._try(self._mixture.spec.with_lock(self._mixture.lock(changes)), self._check)
        if verdict.outcome != "unresolved":
            self._record.add(changes, verdict)
        return verdict

    def _described(self, changes: Changes) -> str:
        """Return in a few words what is tried."""
        if changes in (frozenset(), self._everything):
            return "with all its packages"
        few = [self._mixture.described(name) for name in sorted(changes)]
        return ", ".join(few if len(few) <= 3 else [*few[:2], f"{len(few) - 2} more"])


def _exception(reason: str) -> str:
    """Return the name of the exception in a reason; empty if there is none."""
    found = _EXCEPTION.search(reason)
    return found[0] if found else ""


@dataclass(frozen=True)
class Tried:
    """Name an image that is tried; ``files``: the repository whose command it runs, on this host."""

    recipe: Recipe
    image: str
    context: Context
    files: HostFiles | None

    def subject(self, command: tuple[str, ...] = (), test: Command | None = None) -> Subject:
        """Return what is run: a command with ``test``, or else that of the repository as its smoke test runs it."""
        network = smoke_test.network_of(self.recipe.local_name, self.files, self.context)
        own = self.recipe.test if isinstance(self.recipe.test, Command) else RUN
        words, start = (command, ("--", *command)) if command else (self.recipe.commands[self.recipe.default], ())
        return Subject(self.image, words, start, test or own, self.recipe, self.files, network, log=False)

    def smoke(self) -> dict[str, Any]:
        """Run the smoke test of the image."""
        return smoke_test.smoke(self.recipe, self.image, self.context, self.files)


def judge(tried: Tried, check: Check) -> Verdict:
    """Run what tells good from bad in an image; what is measured is good."""
    try:
        if check.performance is not None:
            return Verdict("good", value=_measured(tried, check))
        if check.command or tried.files:
            with stages.stage("command"):
                smoke_command.check(tried.context.engine, _subject(tried, check))
        else:
            tried.smoke()
    except smoke_command.Failed as error:
        return Verdict("unresolved" if check.command and error.status == SKIP else "bad", str(error))
    except EngineFailed:  # says nothing of the image
        raise
    except StepFailed as error:
        return Verdict("bad", str(error))
    return Verdict("good")


def _subject(tried: Tried, check: Check) -> Subject:
    """Return the command that is run: that of the check, or else that of the repository."""
    own = tried.recipe.test
    timeout = own.timeout if isinstance(own, Command) else RUN.timeout
    return tried.subject(check.command, RUN.model_copy(update={"timeout": timeout}) if check.command else None)


def _measured(tried: Tried, check: Check) -> float:
    """Return the median of what is measured in some runs.

    Raises:
        StepFailed: a run failed, or printed no number.
    """
    values = []
    with stages.stage("measure") as stage:
        for run in range(1, check.runs + 1):
            stages.now(f"run {run} of {check.runs}")
            if check.command or tried.files:
                subject = _subject(tried, check)
                tester = smoke_command.Tester(tried.context.engine, subject)
                tester.check_run(RUN if subject.test.args is None else subject.test)
                values.append(number(check.measure, tester.printed) if check.measure else tester.seconds)
            else:
                values.append(float(tried.smoke()["images_per_second"]))
        stage.done = ", ".join(f"{value:.4g}" for value in values)
    return statistics.median(values)


def number(pattern: str, lines: Sequence[str]) -> float:
    """Return the median of the numbers that lines have; the first of several is left out, which warms up.

    Raises:
        StepFailed: none has one.
    """
    found: Iterable[str] = (match[1] for line in lines if (match := re.search(pattern, line)))
    try:
        numbers = [float(text) for text in found]
    except (TypeError, ValueError) as error:
        raise StepFailed(f"'--measure {pattern}': {error}") from None
    if not numbers:
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise StepFailed(f"no line of the output matches '--measure {pattern}'; the last is: {last[:200]}")
    return statistics.median(numbers[1:] or numbers)
