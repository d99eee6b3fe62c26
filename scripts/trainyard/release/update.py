"""Take newer packages into a lock, in groups, each of which has to pass what the packages before passed.

A group is resolved on top of those that were taken before it, and its image compared with theirs
(:mod:`trainyard.release.trials`). One that is worse is taken apart (:mod:`trainyard.release.bisect`), and tried again
without the culprits.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import trainyard
from trainyard.common import git, stages
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_image, lock_origin, repository_lock, target_lock
from trainyard.image.repository_lock import Constrain
from trainyard.image.resolution import Resolution
from trainyard.release import advisories, audit, bisect, mixed_lock
from trainyard.release.advisories import Snapshot
from trainyard.release.culprit import Changes
from trainyard.release.mixed_lock import Mixture
from trainyard.release.trials import Comparison, Trials
from trainyard.spec import pylock
from trainyard.spec.lock import DEFAULT, Lock, Locked, Origin
from trainyard.spec.model import RepositorySpec, Spec, relative, requirements_of
from trainyard.spec.state import own
from trainyard.workspace import indexes, requirements

logger = logging.getLogger(__name__)

#: Groups of packages by their level: the first two numbers of a version stay, the first, or none.
LEVELS = ("patch", "minor", "major")

#: Groups in the order in which they are tried. Major releases of the framework and of CUDA are in ``framework``, which
#: is tried with nothing else.
GROUPS = ("security", "base", "patch", "minor", "framework", "major")


@dataclass
class Step:
    """Tell what became of a group.

    Attributes:
        changes: in words, ``along``: those of packages that are not of the group.
        taken: whether the lock has them; ``reason``: why not.
        left_out: change in words -> why it was left out.
        comparison: with the packages before; None if no image was built.
    """

    group: str
    changes: list[str] = field(default_factory=list)
    along: list[str] = field(default_factory=list)
    taken: bool = False
    reason: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    comparison: Comparison | None = None


@dataclass
class Result:
    """Hold what was done.

    Attributes:
        name: of the lock, and what it was compared with.
        steps: of groups with newer packages, or with something to say.
        whole: all that was taken compared with the packages before, if it was several groups.
        behind: newer releases that the requirements exclude, ``notes``: on the whole; a line each.
    """

    name: str
    steps: list[Step] = field(default_factory=list)
    whole: Comparison | None = None
    behind: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def taken(self) -> list[Step]:
        """Return the groups that the lock has now."""
        return [step for step in self.steps if step.taken]


def within(old: str, level: str) -> str:
    """Return the specifiers of the releases of a level after a version: ``>=2.2.3,<2.3`` of a patch."""
    try:
        version = Version(old)
    except InvalidVersion:
        return f"==={old}"
    first, second = (*version.release, 0)[:2]
    epoch = f"{version.epoch}!" if version.epoch else ""
    ends = {"patch": f",<{epoch}{first}.{second + 1}", "minor": f",<{epoch}{first + 1}"}
    return f">={version.public}{ends.get(level, '')}"


def with_origin(lock: Lock, own: RepositorySpec) -> Lock:
    """Return the lock of a repository; that of a target of the catalogue has no origin, and gets one."""
    if lock.origin:
        return lock
    base, here = base_image.lockable_reference(own.base, own.context), lock_origin.contents(own)
    return replace(lock, origin=Origin(trainyard.__version__, here, own.extends.target, base, ""))


@dataclass
class Update:
    """Update the lock of a repository, in memory.

    Attributes:
        own: see :func:`trainyard.release.bisect.extending`.
        trials: of the same, under another name.
        name: of the lock.
        pins: requirements that every resolution has to fulfil, besides those of the repository.
        apart: whether a group that is worse is taken apart.
        first: the lock before, ``lock``: with what was taken until now.
    """

    own: RepositorySpec
    trials: Trials
    name: str
    pins: Sequence[str] = ()
    apart: bool = True

    def __post_init__(self) -> None:
        self.first = self.lock = with_origin(self.own.usable_lock or Lock(), self.own)
        self._file = self.trials.spec.kept / f"culprits-{bisect.key(self.trials.spec, self.trials.bounds)[:16]}.json"
        self._culprits: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self._culprits = {} if self.trials.force else json.loads(self._file.read_text(encoding="utf-8"))
        self._snapshot: Snapshot | None = None
        with contextlib.suppress(UserError):
            self._snapshot = advisories.load()

    def run(self, only: Sequence[str] = ()) -> Result:
        """Try all groups, or only some of them.

        Raises:
            StepFailed: the image with the packages before does not pass.
            UserError: the framework is in the base image.
        """
        day = self.own.context.as_of[:10]
        result, told = Result(f"{self.name}{f' as of {day}' if day else ''}"), set[str]()
        first = () if lock_origin.is_of(self.lock, self.own) else ("framework",)
        for group in (one for one in dict.fromkeys((*first, *GROUPS)) if not only or one in only):
            for step in self._group(group):
                step.left_out = {words: reason for words, reason in step.left_out.items() if words not in told}
                told |= step.left_out.keys()
                if step.changes or step.reason or step.left_out:
                    result.steps.append(step)
        if len(result.taken) > 1:
            result.whole = self.trials.compare(self.first, self.lock, "with all that was taken")
        result.behind = self._behind()
        result.notes = list(self._notes())
        return result

    def _notes(self) -> Iterator[str]:
        if self._snapshot is None:
            yield "no advisory data: 'trainyard dev audit --update' fetches it"
        else:
            covered = audit.Coverage.of(self._snapshot, {name: set() for name in self._versions()})
            yield from [f"the snapshot of advisories is {covered}"] if covered.is_poor else []
        origin = self.lock.origin
        if origin and origin.contents != lock_origin.contents(self.own):
            yield f"the lock stays one of Trainyard {origin.version}: this one needs the group 'framework', too"

    def _versions(self, *, framework: bool = True) -> dict[str, str]:
        """Return canonical name -> version, without what is built from git repositories and folders.

        Args:
            framework: whether with the packages of the framework.
        """
        pins = mixed_lock.of_lock(self.name, self.lock, self.own.arch).pins[DEFAULT]
        return {name: pin.version for name, pin in pins.items() if framework or pin.role != "framework"}

    def _mixture(self, lock: Lock) -> Mixture:
        before = mixed_lock.of_lock("the packages before", self.lock, self.own.arch)
        return Mixture(self.trials.spec, before, mixed_lock.of_lock("the newer ones", lock, self.own.arch))

    def _group(self, group: str) -> list[Step]:
        """Return what becomes of a group; nothing if it has no newer packages."""
        if group != "framework" and not lock_origin.is_of(self.lock, self.own):
            return [Step(group, reason=f"{self.own.extends.target} is on another base now: 'framework' comes first")]
        if group == "security":
            return self._security()
        if group == "base":
            return self._base()
        own = self._versions(framework=False) if group in LEVELS else {}

        def bounds(versions: Mapping[str, str]) -> list[str]:
            return [f"{name}{within(old, group)}" for name, old in versions.items() if name in own]

        return self._tried(group, frozenset(own), bounds)

    def _security(self) -> list[Step]:
        """Try the packages with an advisory in the nearest release that has none, or a later one of its level."""
        own, fixes, steps = self._versions(framework=False), dict[str, str](), []
        for name, old in self._versions().items():
            about = self._snapshot.about if self._snapshot else (lambda _name, _version: [])
            known = about(name, old)
            later = sorted(Version(fix) for one in known for fix in one.fixed if Version(fix) > Version(old))
            fixed = next((fix for fix in later if not about(name, str(fix))), None)
            has = f"{name} {old} has {', '.join(one.id for one in known)}"
            if known and name in own and fixed:
                nearest = (within(old, one) for one in LEVELS)
                fixes[name] = f"{name}{next(one for one in nearest if fixed in SpecifierSet(one))},>={fixed}"
            elif known:
                why = f"{fixed} closes it, and is for the framework to take" if fixed else "no release closes it"
                steps.append(Step("security", reason=f"{has}: {why}"))
        tried = self._tried("security", frozenset(fixes), lambda _: fixes.values()) if fixes else []
        if len(fixes) > 1 and tried and not tried[0].comparison:  # no solution for all of them
            tried = []
            for name, fix in fixes.items():
                tried += self._tried("security", frozenset([name]), lambda _, fix=fix: [fix])  # type: ignore[misc]
        return steps + tried

    def _base(self) -> list[Step]:
        """Try the base as its registry has it today."""
        today = base_image.lockable_reference(self.own.base, self.own.context)
        known = self.lock.origin.base if self.lock.origin else ""
        same = today.partition("@")[0] == known.partition("@")[0]
        if self.own.context.as_of or not same or "@" not in today or today == known:
            return []
        return [*filter(None, [self._decided("base", _on(self.lock, today), frozenset())])]

    def _resolved(self, group: str, members: Changes, constrain: Constrain, left_out: dict[str, str]) -> Lock:
        """Resolve a group on top of what was taken before, without known culprits, which are added to ``left_out``."""
        before, held, origin = self.lock, dict[str, str](), self.lock.origin
        if group == "framework" and origin:  # any but that of the lock
            emptied = {
                index: {arch: Locked(tuple(locked.requirements)) for arch, locked in of.items()}
                for index, of in before.indexes.items()
            }
            before = replace(before, indexes=emptied, origin=replace(origin, framework="another"))
        while True:
            more = [*self.pins, *(f"{name}{f'=={old}' if old else '<0.dev0'}" for name, old in held.items())]

            def all_of(versions: Mapping[str, str], more: list[str] = more) -> list[str]:
                return [*more, *constrain(versions)]

            own = self.own.with_lock(self.lock)
            _, found = repository_lock.resolve(own, before, members - held.keys(), all_of)
            if origin and found.origin and origin.base.startswith(f"{found.origin.base}@"):
                found = _on(found, origin.base)  # whose registry is out of reach
            mixture = self._mixture(found)
            known = {name: mixture.described(name) for name in mixture.changes if name not in held}
            known = {name: words for name, words in known.items() if words in self._culprits}
            if not known:
                return found
            left_out |= {words: self._culprits[words] for words in known.values()}
            held |= {name: mixture.changes[name][0] for name in known}

    def _tried(self, group: str, members: Changes, constrain: Constrain) -> list[Step]:
        """Resolve a group and decide; once more without its culprits. Nothing is returned if nothing is newer."""
        left_out: dict[str, str] = {}
        again = False
        while True:
            try:
                lock = self._resolved(group, members, constrain, left_out)
            except (UserError, StepFailed) as error:
                names = f" for {', '.join(sorted(members))}" if group == "security" else ""
                return [Step(group, reason=f"no solution{names}: {error}", left_out=left_out)]
            step = self._decided(group, lock, members)
            if step is None:
                return [Step(group, left_out=left_out)] if left_out else []
            step.left_out = left_out
            if step.taken or again or not self._take_apart(step, lock):
                return [step]
            again = True

    def _decided(self, group: str, lock: Lock, members: Changes) -> Step | None:
        """Compare a lock with the one before, and take it unless it is worse; None if it has nothing else."""
        mixture, old, new = self._mixture(lock), self.lock.origin, lock.origin
        step = Step(group, [mixture.described(name) for name in mixture.changes])
        others = {*self._versions(framework=False)} if group == "framework" else {*mixture.changes} - members
        if group not in ("base", "proof"):
            step.along = [mixture.described(name) for name in mixture.changes if name in others]
        if old and new and old.base != new.base:
            step.changes.append(f"base {old.base} -> {new.base}")
        if old and new and old.contents != new.contents and group == "framework":
            step.changes.append(f"Trainyard {old.version} ({old.contents}) -> {new.version} ({new.contents})")
        if not step.changes:
            return None
        logger.info(stages.row(group, f"{len(step.changes)} changes"))
        step.comparison = self.trials.compare(self.lock, lock, f"{group}: {', '.join(step.changes[:3])}")
        step.reason, step.taken = step.comparison.worse, not step.comparison.worse
        self.lock = lock if step.taken else self.lock
        logger.info(stages.row(group, f"worse: {step.reason}" if step.reason else "taken"))
        return step

    def prove(self, lock: Lock) -> list[Step]:
        """Compare another lock with the one before; if it is worse, name the culprits."""
        step = self._decided("proof", lock, frozenset())
        if step and step.reason and self._take_apart(step, lock):
            step.left_out = {words: self._culprits[words] for words in step.changes if words in self._culprits}
        return [step or Step("proof")]

    def _take_apart(self, step: Step, lock: Lock) -> bool:
        """Find and record the culprits of a group that is worse, and return whether any were found."""
        mixture, trials = self._mixture(lock), self.trials
        culprits = [mixture.described(name) for name in mixture.changes]
        if not self.apart or not culprits:
            return False
        if len(culprits) > 1:
            judge, sides = trials.judge(self.lock, step.reason), (mixture.good, mixture.bad)
            try:
                found = bisect.bisect(trials.spec, *sides, trials.bounds, again=trials.force, try_=judge)
            except (UserError, StepFailed) as error:
                step.reason += f" (not taken apart: {error})"
                return False
            culprits = [words for group in found.culprits for words in group]
        self._culprits |= dict.fromkeys(culprits, step.reason)
        own(self._file.parent)
        self._file.write_text(json.dumps(self._culprits, indent=1), encoding="utf-8")
        return True

    def _behind(self) -> list[str]:
        """Return the newest releases that the requirements, or the pins of a target, exclude."""
        own, have = self.own, self._versions()
        wanted = requirements.of_platform(own)
        named = [(line.requirement, line.where) for line in wanted.lines]
        named += [(Requirement(text), own.extends.where) for text in (*self.pins, *own.extends.packages)]
        asked = {str(canonicalize_name(one.name)): (one.specifier, where) for one, where in named}
        asked = {name: pair for name, pair in asked.items() if name in have and pair[0]}
        if not asked:
            return []
        found = [*indexes.of_machine(), *indexes.of_project(own.workspace, wanted.addresses)]
        try:
            resolution = Resolution([own], indexes=found, options=wanted.options)
            newest = resolution.packages(list(asked), alone=True)[own.arch]
        except StepFailed as error:
            logger.debug(str(error))
            return []
        return [
            f"{one.name} {have[one.name]}: there is {one.version}, and {asked[one.name][1]} has {asked[one.name][0]}"
            for one in newest
            if not asked[one.name][0].contains(one.version)
        ]


def _on(lock: Lock, base: str) -> Lock:
    """Return a lock on another base."""
    return replace(lock, origin=replace(lock.origin, base=base)) if lock.origin else lock


def start(spec: Spec, trials: Trials, *, apart: bool) -> Update:
    """Return the update of a repository, or of a target of the catalogue, whose requirements are pins.

    Raises:
        UserError: it is an image.yaml outside the catalogue, or there is no lock of what it requires now.
    """
    own = bisect.extending(spec)
    if own.usable_lock and lock_origin.is_of(own.usable_lock, own):
        _check_current(own)
    pins = [] if _is_own(own) else requirements_of(spec)
    return Update(own, trials, relative(spec.lock_file), pins, apart)


def _is_own(spec: Spec) -> bool:
    """Return whether a lock is a repository's: those of the catalogue have no origin."""
    return bool(spec.usable_lock and spec.usable_lock.origin)


def _check_current(own: RepositorySpec) -> None:
    if _is_own(own) and not lock_origin.is_current(own):
        raise UserError(f"{relative(own.lock_file)}: the requirements have changed since: run 'trainyard lock'")


def write(spec: Spec, lock: Lock) -> list[Path]:
    """Write the lock of a repository; of a target of the catalogue, with its Dockerfiles. Return what was written."""
    if _is_own(spec):
        return pylock.write(spec.lock_file, lock)
    return target_lock.lock_versions(spec, lock)[1]


def proof(spec: Spec, trials: Trials, against: str | None, *, apart: bool) -> Result:
    """Compare the lock that is there with that of a commit; nothing is written.

    Args:
        against: a commit, the path of a lock, or an image; by default :func:`before`.
    Raises:
        UserError: there is no such commit, or the lock is not of the requirements.
        StepFailed: the smoke test fails with the packages of ``against``.
    """
    own = bisect.extending(spec)
    _check_current(own)
    against = against or before(spec)
    result = Result(f"{relative(spec.lock_file)} against {against}")
    new = bisect.side(None, own)
    old = bisect.side(against, own.model_copy(update={"folder": spec.folder}), new)
    lock = old.lock or Mixture(own, old, new).lock(frozenset())
    update = Update(own.with_lock(with_origin(lock, own)), trials, result.name, apart=apart)
    result.steps = update.prove(with_origin(own.usable_lock or Lock(), own))
    return result


def before(spec: Spec) -> str:
    """Return the commit with which the lock that is there is to be compared.

    It is HEAD if the lock has changes that are not committed, else where the branch left the default branch.

    Raises:
        UserError: there is none.
    """
    if _git(spec.folder, "status", "--porcelain", "--", *pylock.file_names(spec.lock_file)):
        return "HEAD"
    default = _git(spec.folder, "symbolic-ref", "--quiet", "--short", "refs/remotes/origin/HEAD", fails="")
    for branch in filter(None, (default, "origin/main", "origin/master", "main", "master")):
        if common := _git(spec.folder, "merge-base", "HEAD", branch, fails=""):
            return common[:12]
    raise UserError("no commit that HEAD and the default branch have in common: give '--against <commit>'")


def check_git(spec: Spec, branch: str | None) -> None:
    """Check that a commit can be made of the lock, on a new branch if one is named.

    Raises:
        UserError: there is no git repository, the branch exists, or the lock has changes that are not committed.
    """
    if _git(spec.folder, "status", "--porcelain", "--", *pylock.file_names(spec.lock_file)):
        raise UserError(f"{relative(spec.lock_file)}: has changes that are not committed: commit or restore it first")
    if branch:
        _git(spec.folder, "check-ref-format", "--branch", branch)
        if _git(spec.folder, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}", fails="-") != "-":
            raise UserError(f"'--branch {branch}': it exists: give another name, or 'git branch --delete {branch}'")


def save(spec: Spec, lock: Lock, result: Result, *, branch: str | None, commit: bool) -> str:
    """Write the lock, on a new branch if one is named, commit it alone if that is wanted, and say so in a line."""
    if branch:
        _git(spec.folder, "switch", "--quiet", "--create", branch)
    files = write(spec, lock)
    said = f"wrote {', '.join(map(relative, files))}"
    if commit:
        title = f"Update {spec.lock_file.name}: {', '.join(step.group for step in result.taken)}"
        text = "\n".join([title, "", *(f"- {words}" for step in result.taken for words in step.changes)])
        _git(spec.folder, "commit", "--quiet", f"--message={text}", "--", *map(str, files))
        said += f", commit {_git(spec.folder, 'rev-parse', '--short', 'HEAD')}"
    return said


def _git(folder: Path, *arguments: str, fails: str | None = None) -> str:
    """Return what git prints; if it fails, ``fails``, or without that a :class:`UserError` is raised."""
    try:
        done = git.run(folder, *arguments)
    except FileNotFoundError:
        raise UserError("git is not installed") from None
    if done.returncode and fails is None:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise UserError(f"git {arguments[0]}: {reason[-1]}")
    return fails if done.returncode and fails is not None else done.stdout.decode(errors="replace").strip()
