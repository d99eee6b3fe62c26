"""``trainyard bisect``: which package broke an image. uv resolves against an index on loopback; no image is built."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.fakes.package_index import PackageIndex, wheel
from tests.workspaces import LockedOnce, fresh, render

from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.image import lock_origin, planning, recipes, smoke_command, workspace_files
from trainyard.release import bisect, image_packages, mixed_lock
from trainyard.release.bisect import Check, Result, Tried
from trainyard.release.culprit import Verdict
from trainyard.release.mixed_lock import Mixture
from trainyard.spec import model, pylock
from trainyard.spec.lock import Lock, versions
from trainyard.spec.model import RepositorySpec, Spec

TARGET = model.load("tf-cpu", "amd64")

#: What two days of an index have: the newer eager needs the newer base, the older old none but the older base.
OLD = {"alpha": "1.0", "base": "1.0", "eager": "1.0", "gone": "1.0", "loner": "1.0", "old": "1.0"}
NEW = {"alpha": "2.0", "base": "2.0", "eager": "2.0", "loner": "3.0", "new": "1.0", "old": "2.0"}


@pytest.fixture(scope="module")
def locked_once(uv_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedOnce]:
    """Lock a repository with good.lock and a later pylock.trainyard.toml."""
    with LockedOnce(tmp_path_factory.mktemp("locked"), uv_environment) as made:
        made.index.add(*(wheel(name, version) for name, version in TARGET.locked().versions.items()))
        made.index.add(
            wheel("alpha", "1.0", ("gone",)), wheel("alpha", "2.0", ("new",)), wheel("gone", "1.0"),
            wheel("new", "1.0"),
            wheel("base", "1.0"), wheel("base", "1.5"), wheel("base", "2.0"),
            wheel("eager", "1.0", ("base",)), wheel("eager", "2.0", ("base>=2",)),
            wheel("old", "1.0", ("base<2",)), wheel("old", "2.0", ("base",)),
            wheel("loner", "1.0"), wheel("loner", "2.0"), wheel("loner", "3.0"),
        )  # fmt: skip
        asked = ("alpha", "eager", "loner", "old", "base")
        made.lock(f"{name}=={OLD[name]}" for name in asked).rename(made.root / "good.lock")
        made.lock(asked)
        yield made


@pytest.fixture
def index(locked_once: LockedOnce) -> Iterator[PackageIndex]:
    yield from locked_once.lend_index()


@pytest.fixture
def spec(locked_once: LockedOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RepositorySpec:
    """A repository with good.lock, and a later pylock.trainyard.toml."""
    return bisect.repository(locked_once.copy(tmp_path, monkeypatch))


def mixture(spec: RepositorySpec) -> Mixture:
    bad = bisect.side(None, spec)
    return Mixture(spec, bisect.side("good.lock", spec, bad), bad)


def own(lock: Lock | None) -> dict[str, str]:
    """Return the packages of a lock that are not the target's."""
    locked = lock.of("amd64") if lock else None
    assert locked
    return {name: version for name, version in locked.versions.items() if name in OLD or name in NEW}


class Tries:
    """Judge locks by their packages, and remember which were tried."""

    def __init__(self, judge: Callable[[dict[str, str]], Verdict | str]) -> None:
        self.seen: list[dict[str, str]] = []
        self._judge = judge

    def __call__(self, spec: RepositorySpec, check: Check) -> Verdict:
        assert lock_origin.is_current(spec), "a build would lock it again"
        self.seen.append(own(spec.usable_lock))
        found = self._judge(self.seen[-1])
        return found if isinstance(found, Verdict) else Verdict("bad" if found else "good", found)


def tried(spec: RepositorySpec) -> Tried:
    return Tried(recipes.make(render(spec)), "image", spec.context, workspace_files.on_host(spec))


def run(spec: RepositorySpec, tries: Tries, check: Check | None = None, *, again: bool = False) -> Result:
    found = mixture(spec)
    return bisect.bisect(spec, found.good, found.bad, check or Check(), again=again, try_=tries)


def test_changes_are_packages_with_other_versions_and_those_that_one_side_has(spec: RepositorySpec) -> None:
    found = mixture(spec)
    assert found.changes == {
        "alpha": ("1.0", "2.0"),
        "base": ("1.0", "2.0"),
        "eager": ("1.0", "2.0"),
        "gone": ("1.0", ""),
        "loner": ("1.0", "3.0"),
        "new": ("", "1.0"),
        "old": ("1.0", "2.0"),
    }
    assert [found.described(name) for name in ("base", "gone", "new")] == [
        "base 1.0 -> 2.0",
        "gone removed",
        "new 1.0 added",
    ]


@pytest.mark.parametrize(
    ("must", "completed"),
    [
        ({"loner"}, {"loner"}),  # never 2.0, which neither side has
        ({"base"}, {"base", "old"}),  # the older old allows no newer base
        ({"old"}, {"old"}),
        ({"eager"}, {"eager", "base", "old"}),
        ({"alpha"}, {"alpha", "new"}),  # what alpha needed before may stay
        ({"new"}, {"new"}),
        ({"gone"}, {"gone", "alpha", "new"}),
    ],
)
def test_a_set_is_completed_to_one_that_resolves(spec: RepositorySpec, must: set[str], completed: set[str]) -> None:
    found = mixture(spec)
    assert found.complete(frozenset(must), frozenset(found.changes)) == frozenset(completed)


@pytest.mark.parametrize(
    "pair", [("2.14.0+cpu", "2.15.0+cpu"), ("2.15.0", "2.15.0+cpu"), ("1!1.0", "1!2.0"), ("3", "1.2")]
)
def test_either_of_two_versions_is_allowed(pair: tuple[str, str]) -> None:
    allowed = SpecifierSet(mixed_lock._either(*pair))
    assert all(allowed.contains(version, prereleases=True) for version in pair)


def test_a_set_that_resolves_only_with_what_it_may_not_have_is_none(spec: RepositorySpec) -> None:
    found = mixture(spec)
    assert found.complete(frozenset(["eager"]), frozenset(["eager", "base", "loner"])) is None
    assert found.complete(frozenset(["alpha"]), frozenset(["alpha"])) is None


def test_no_index_is_asked_for_a_mixture_once_both_sides_have_resolved(
    spec: RepositorySpec, index: PackageIndex
) -> None:
    found = mixture(spec)
    everything = frozenset(found.changes)
    assert found.complete(everything, everything) == everything
    index.seen.clear()
    assert found.complete(frozenset(["eager"]), everything) == {"eager", "base", "old"}
    assert found.with_needs(frozenset(["eager"])) == {"eager", "base", "old"}, "it is known now"
    assert not index.seen


def test_a_mixed_lock_has_the_pins_of_the_two_with_their_hashes(spec: RepositorySpec) -> None:
    found = mixture(spec)
    ends = [found.lock(frozenset()), found.lock(frozenset(found.changes))]
    assert [own(lock) for lock in ends] == [OLD, NEW]
    assert own(found.lock(frozenset(["loner", "new"]))) == OLD | {"loner": "3.0", "new": "1.0"}
    known, mixed = fresh(spec).locked(), ends[1].of("amd64")
    assert mixed == known
    assert lock_origin.is_current(spec.with_lock(ends[0]))


def test_the_culprit_is_named_with_what_it_needs(spec: RepositorySpec) -> None:
    tries = Tries(lambda packages: "train.py:1: ImportError: eager" if packages["eager"] == "2.0" else "")
    found = run(spec, tries)
    assert found.culprits == [["eager 1.0 -> 2.0"]]
    assert found.along == ["base 1.0 -> 2.0", "old 1.0 -> 2.0"]
    assert found.keep == ["eager==1.0"] and found.reason == "train.py:1: ImportError: eager"
    assert found.tries == len(tries.seen) - 2 <= 4
    assert tries.seen[:2] == [NEW, OLD]
    assert "culprit  eager 1.0 -> 2.0" in found.lines()


def test_two_packages_that_break_together_are_both_named(spec: RepositorySpec) -> None:
    tries = Tries(lambda packages: "ValueError" if (packages["loner"], packages["old"]) == ("3.0", "2.0") else "")
    found = run(spec, tries)
    assert found.culprits == [["loner 1.0 -> 3.0"], ["old 1.0 -> 2.0"]]
    assert any("each of these lines is needed" in line for line in found.lines())


def test_a_run_that_was_interrupted_goes_on(spec: RepositorySpec) -> None:
    def judge(packages: dict[str, str]) -> str:
        if len(tries.seen) == 4:
            raise KeyboardInterrupt
        return "ValueError" if packages["loner"] == "3.0" else ""

    tries = Tries(judge)
    with pytest.raises(KeyboardInterrupt):
        run(spec, tries)
    whole = Tries(lambda packages: "ValueError" if packages["loner"] == "3.0" else "")
    found = run(spec, whole)
    assert found.culprits == [["loner 1.0 -> 3.0"]] and found.before == 1
    assert not [packages for packages in whole.seen if packages in tries.seen[:3]]
    nothing = Tries(lambda _: "")
    assert run(spec, nothing).culprits == found.culprits and not nothing.seen


def test_verdicts_of_other_code_another_command_or_with_force_are_forgotten(spec: RepositorySpec) -> None:
    def judge(packages: dict[str, str]) -> str:
        return "ValueError" if packages["loner"] == "3.0" else ""

    first, forced, other = Tries(judge), Tries(judge), Tries(judge)
    run(spec, first)
    run(spec, forced, again=True)
    run(spec, other, Check(("python", "-V")))
    (spec.folder / "train.py").write_text("print(1)\n", encoding="utf-8")
    edited = Tries(judge)
    run(spec, edited)
    assert first.seen == forced.seen == other.seen == edited.seen


def test_what_fails_otherwise_is_not_the_same_failure(spec: RepositorySpec) -> None:
    """eager 2.0 cannot be imported with the older loner, and says so nowhere."""

    def judge(packages: dict[str, str]) -> str:
        if packages["eager"] == "2.0" and packages["loner"] == "1.0":
            return "train.py:1: ImportError: loner"
        return "train.py:2: AttributeError: alpha" if packages["alpha"] == "2.0" else ""

    assert run(spec, Tries(judge)).culprits == [["alpha 1.0 -> 2.0"]]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda _: "ValueError: data", r"it fails with those of good.lock, too: ValueError: data"),
        (lambda _: "", r"nothing fails with the packages of pylock.trainyard.toml: give a '--command' that does"),
        (lambda _: Verdict("unresolved", "no disk"), r"the packages of pylock.trainyard.toml cannot be tried: no disk"),
    ],
)
def test_sides_that_are_not_what_they_are_called_end_it(
    spec: RepositorySpec, judge: Callable[[dict[str, str]], Verdict | str], message: str
) -> None:
    with pytest.raises(StepFailed, match=message):
        run(spec, Tries(judge))


@pytest.mark.parametrize("faster", [False, True])
def test_the_package_that_changed_what_is_measured_is_found(spec: RepositorySpec, faster: bool) -> None:
    def judge(packages: dict[str, str]) -> Verdict:
        value = 1.0 + 0.2 * (packages["old"] == "2.0") + 0.02 * (packages["loner"] == "3.0")
        return Verdict("good", value=1 / value if faster else value)

    found = run(spec, Tries(judge), Check(performance=1.1))
    assert found.culprits == [["old 1.0 -> 2.0"]] and found.reason.startswith("1.22 times as ")
    with pytest.raises(StepFailed, match=r"1.22 times as much, not 2|1.22 times as much"):
        run(spec, Tries(judge), Check(performance=2))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"measure": "("}, r"'--measure \(' is not a regular expression"),
        ({"measure": "[0-9]+", "performance": 1.1}, "has no group for the number"),
        ({"measure": "([0-9]+)"}, "'--measure' needs '--performance'"),
    ],
)
def test_a_measure_that_cannot_be_is_refused(check: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Check(**check)  # type: ignore[arg-type]


def test_a_side_is_a_file_a_commit_or_an_image(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(spec.folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["add", "pylock.trainyard.toml"], ["commit", "--quiet", "--message=lock"]):
        subprocess.run([*git, *words], check=True)
    bad = bisect.side(None, spec)
    assert bisect.side("HEAD", spec).pins == bad.pins
    packages = versions(bad.pins["default"].values()) | {"loner": "2.0"}
    monkeypatch.setattr(image_packages, "find", lambda _, text: image_packages.ImagePackages(text, "", packages))
    image = bisect.side("localhost:5000/ml:1", spec, bad)
    assert versions(image.pins["default"].values()) == packages
    assert Mixture(spec, image, bad).changes == {"loner": ("2.0", "3.0")}
    assert image.pins["default"]["loner"].hashes and image.pins["default"]["loner"].size

    def none(_engine: object, text: str) -> None:
        raise UserError("no such image")

    monkeypatch.setattr(image_packages, "find", none)
    with pytest.raises(
        UserError, match=r"'nonsense' is neither a file, nor a commit .* nor an image \(no such image\)"
    ):
        bisect.side("nonsense", spec)


def test_sides_with_the_same_packages_are_refused(spec: RepositorySpec) -> None:
    with pytest.raises(UserError, match=r"pylock.trainyard.toml and pylock.trainyard.toml have the same packages"):
        bisect.bisect(spec, bisect.side(None, spec), bisect.side(None, spec), Check())


def test_a_side_is_the_lock_of_a_target_in_a_file_or_a_commit(spec: RepositorySpec, tmp_path: Path) -> None:
    target = model.load("tf-cpu")
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / pylock.FILE).write_bytes(target.lock_file.read_bytes())
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=lock"]):
        subprocess.run([*git, *words], check=True)
    for side in (
        bisect.side("HEAD", spec.model_copy(update={"folder": folder})),
        bisect.side(str(folder / pylock.FILE), spec),
    ):
        assert versions(side.pins["default"].values()) == target.on(spec.arch).locked().versions


def test_a_lock_that_was_edited_is_refused(spec: RepositorySpec) -> None:
    (spec.folder / "good.lock").write_text("# numpy\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"good.lock: no '# checksum:' line, so not a lock"):
        bisect.side("good.lock", spec)


def test_a_target_of_the_catalogue_is_tried_as_a_repository_that_extends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    spec = bisect.repository(model.load("tf-cpu", "amd64"))
    assert spec.extends.target == "tf-cpu" and not spec.run and spec.lock_file.is_file()
    side = bisect.side(None, spec)
    of_index = side.pins["default"]
    other = replace(side, pins={"default": {**of_index, "numpy": replace(of_index["numpy"], version="99")}})
    assert list(Mixture(spec, side, other).changes) == ["numpy"]
    assert Mixture(spec, side, other).lock(frozenset(["numpy"])).of("amd64") is not None


def test_packages_of_a_base_cannot_be_exchanged() -> None:
    nightly = model.load("xla-nightly", "amd64")
    if nightly.usable_lock:
        with pytest.raises(UserError, match="the framework is in the base image"):
            mixed_lock.of_lock("a.lock", nightly.usable_lock, "amd64")


@pytest.mark.parametrize(
    ("check", "failure", "outcome"),
    [
        (Check(), None, "good"),
        (Check(), smoke_command.Failed("train.py:1: ValueError", 1), "bad"),
        (Check(), smoke_command.Failed("exit status 125", 125), "bad"),
        (Check(("sh", "-c", "exit 125")), smoke_command.Failed("exit status 125", 125), "unresolved"),
        (Check(("python", "x.py")), smoke_command.Failed("exit status 2", 2), "bad"),
    ],
)
def test_a_command_tells_good_from_bad(
    spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch, check: Check, failure: Exception | None, outcome: str
) -> None:
    subjects: list[smoke_command.Subject] = []

    def test(_engine: object, subject: smoke_command.Subject) -> dict[str, object]:
        subjects.append(subject)
        if failure:
            raise failure
        return {}

    monkeypatch.setattr(smoke_command, "check", test)
    assert bisect.judge(tried(spec), check).outcome == outcome
    assert subjects[0].words([]) == (["--", *check.command] if check.command else [])


def test_an_engine_that_fails_says_nothing_of_the_image(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was tried would be recorded as bad."""

    def fail(*_: object) -> None:
        raise EngineFailed("the connection to the engine ended")

    monkeypatch.setattr(smoke_command, "check", fail)
    with pytest.raises(EngineFailed):
        bisect.judge(tried(spec), Check())


def test_numbers_are_taken_from_lines_without_the_first() -> None:
    lines = ["step 1: 9 ms", "step 2: 2 ms", "step 3: 4 ms", "done"]
    assert bisect.number(r": ([0-9.]+) ms", lines) == 3
    assert bisect.number(r"2: ([0-9.]+) ms", lines) == 2
    with pytest.raises(StepFailed, match=r"no line of the output matches '--measure x\(y\)'; the last is: done"):
        bisect.number("x(y)", lines)
    with pytest.raises(StepFailed, match="could not convert"):
        bisect.number(r"(\w+)$", lines)


@pytest.mark.parametrize("kind", [StepFailed, UserError])
def test_an_image_that_cannot_be_built_cannot_be_judged(
    spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(_: Spec) -> None:
        raise kind("no wheel")

    monkeypatch.setattr(planning, "planned", fail)
    assert bisect.in_image(spec, Check()) == Verdict("unresolved", "no wheel")
