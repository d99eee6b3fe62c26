"""``trainyard update``: newer packages in groups. uv resolves against an index on loopback; no image is built."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import locks
from tests.fakes.engine import FakeEngine
from tests.fakes.package_index import PackageIndex, wheel
from tests.workspaces import LockedOnce, empty, fresh, relock, render

from trainyard.commands import update as command
from trainyard.common.context import Context
from trainyard.common.errors import EngineFailed, StepFailed, UserError
from trainyard.image import base_image, lock_origin, peak_memory, planning, recipes, target_lock, workspace_files
from trainyard.recipe import Command
from trainyard.release import advisories, bisect, trials, update, update_report
from trainyard.release.advisories import Advisory, Snapshot
from trainyard.release.bisect import Tried
from trainyard.release.trials import Bounds, Measured, Trials
from trainyard.release.update import GROUPS, Result, Step, Update
from trainyard.spec import model, pylock
from trainyard.spec.lock import DEFAULT, Lock
from trainyard.spec.model import RepositorySpec, Spec

TARGET = model.load("tf-cpu", "amd64")
OLD = {"alpha": "1.0.0", "beta": "1.0.0", "gamma": "1.0.0", "leaky": "1.0.0"}
WHEELS = [
    wheel("alpha", "1.0.0"), wheel("alpha", "1.0.1"), wheel("alpha", "1.1.0"), wheel("alpha", "2.0.0"),
    wheel("beta", "1.0.0"), wheel("beta", "1.1.0"),
    wheel("gamma", "1.0.0"), wheel("gamma", "1.1.0", ("helper",)), wheel("helper", "0.1"),
    wheel("leaky", "1.0.0"), wheel("leaky", "1.0.1", ("beta>=1.1",)),
]  # fmt: skip
GOOD = Measured(steps=(2.0, 2.1, 2.2), starts=(3.0,), memory=50_000_000, size=10**9, blobs={"sha256:0": 10**8})

Result3 = tuple[int, str, str]


@pytest.fixture(scope="module")
def locked_once(uv_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedOnce]:
    """Lock a repository with old versions, which its requirements no longer ask for."""
    with LockedOnce(tmp_path_factory.mktemp("locked"), uv_environment) as made:
        index = made.index
        index.add(*(wheel(name, version) for name, version in TARGET.locked().versions.items()), *WHEELS)
        index.uploaded = dict.fromkeys(index.files, "2025-01-01T00:00:00Z")
        index.uploaded |= {name: "2025-06-01T12:00:00Z" for name in index.files if name.startswith("alpha-1.1")}
        index.uploaded |= {name: "2026-01-01T00:00:00Z" for name in index.files if name.startswith("alpha-2")}
        made.lock(f"{name}=={version}" for name, version in OLD.items())
        made.lock(OLD)
        yield made


@pytest.fixture
def index(locked_once: LockedOnce) -> Iterator[PackageIndex]:
    yield from locked_once.lend_index()


@pytest.fixture
def spec(
    locked_once: LockedOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex
) -> RepositorySpec:
    """A repository whose pylock.trainyard.toml has old versions, which its requirements no longer ask for."""
    no_advisories(monkeypatch)
    return locked_once.copy(tmp_path, monkeypatch)


def ask(root: Path, *lines: str) -> None:
    (root / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def no_advisories(monkeypatch: pytest.MonkeyPatch, *known: Advisory) -> None:
    monkeypatch.setattr(advisories, "load", lambda: Snapshot("a test", "2026-11-01", (), known))


def own(lock: Lock | None) -> dict[str, str]:
    """Return the packages of a lock that are not the target's."""
    locked = lock.of("amd64") if lock else None
    assert locked
    return {name: version for name, version in locked.versions.items() if name in (*OLD, "helper")}


class Images:
    """Measure locks by their packages, and remember which were measured."""

    def __init__(self, judge: Callable[[dict[str, str]], Measured | str] = lambda _: "") -> None:
        self.seen: list[dict[str, str]] = []
        self.again: list[dict[str, str]] = []
        self.bounds = Bounds()
        self._judge = judge

    def __call__(self, spec: RepositorySpec, bounds: Bounds, again: bool) -> Measured:
        assert lock_origin.is_current(spec), "a build would lock it again"
        (self.again if again else self.seen).append(own(spec.usable_lock))
        self.bounds = bounds
        found = self._judge(own(spec.usable_lock))
        return found if isinstance(found, Measured) else replace(GOOD, failure=found)


def updating(spec: Spec, images: Images, *, force: bool = False, apart: bool = True, **bounds: Any) -> Update:
    tried = Trials(bisect.repository(spec, "update"), Bounds(**bounds), images, force)
    return update.start(spec, tried, apart=apart)


def run(spec: Spec, images: Images, *only: str, **how: Any) -> tuple[Result, dict[str, str]]:
    """Run an update and write its lock; return the result and the packages that the lock has."""
    started = updating(spec, images, **how)
    result = started.run(only)
    update.write(spec, started.lock)
    return result, own(fresh(spec).usable_lock)


def broken(name: str, version: str, reason: str = "train.py:1: ValueError") -> Callable[[dict[str, str]], str]:
    return lambda packages: reason if packages.get(name) == version else ""


def shown(result: Result) -> dict[str, list[str]]:
    return {step.group: step.changes for step in result.steps if step.taken}


def test_groups_are_taken_in_order_each_on_top_of_the_one_before(spec: RepositorySpec) -> None:
    images = Images()
    result, packages = run(spec, images)
    assert shown(result) == {
        "patch": ["alpha 1.0.0 -> 1.0.1"],
        "minor": ["alpha 1.0.1 -> 1.1.0", "beta 1.0.0 -> 1.1.0", "gamma 1.0.0 -> 1.1.0", "helper 0.1 added",
                  "leaky 1.0.0 -> 1.0.1"],
        "major": ["alpha 1.1.0 -> 2.0.0"],
    }  # fmt: skip
    assert [step.along for step in result.steps] == [[], ["helper 0.1 added"], []]
    assert packages == {"alpha": "2.0.0", "beta": "1.1.0", "gamma": "1.1.0", "helper": "0.1", "leaky": "1.0.1"}
    assert images.seen[0] == OLD and images.seen[-1] == packages and len(images.seen) == 4
    assert result.whole and not result.whole.worse
    assert not relock(spec), "'trainyard lock' has nothing to add"
    again, same = run(fresh(spec), nothing := Images())
    assert (again.steps, same, nothing.seen) == ([], packages, [])
    assert "nothing to take" in update_report.markdown(again)


@pytest.mark.parametrize(
    ("day", "alpha"),
    [("2025-05-31", "1.0.1"), ("2025-06-01", "1.1.0"), ("2025-12-31", "1.1.0"), ("2026-01-01", "2.0.0")],
)
def test_no_release_after_the_day_counts(spec: RepositorySpec, day: str, alpha: str) -> None:
    then = model.load(None, context=Context(as_of=f"{day}T23:59:59Z"))
    result, packages = run(then, Images())
    assert packages["alpha"] == alpha and result.name == f"pylock.trainyard.toml as of {day}"


def test_only_some_groups_are_tried(spec: RepositorySpec) -> None:
    result, packages = run(spec, Images(), "patch")
    assert shown(result) == {"patch": ["alpha 1.0.0 -> 1.0.1"]} and packages["beta"] == "1.0.0"
    assert result.whole is None, "its table is that of the group"


def test_a_culprit_is_left_out_now_and_later_and_the_rest_is_taken(spec: RepositorySpec) -> None:
    images = Images(broken("beta", "1.1.0"))
    result, packages = run(spec, images, "minor")
    assert packages == OLD | {"alpha": "1.1.0", "gamma": "1.1.0", "helper": "0.1"}
    assert result.steps[0].left_out == {"beta 1.0.0 -> 1.1.0": "train.py:1: ValueError"}
    assert "- left out: beta 1.0.0 -> 1.1.0 (train.py:1: ValueError)" in update_report.markdown(result)
    again, _ = run(fresh(spec), later := Images(broken("beta", "1.1.0")), "minor", "major")
    assert [step.left_out for step in again.steps if step.left_out] == [result.steps[0].left_out], "said once"
    assert shown(again) == {"major": ["alpha 1.1.0 -> 2.0.0"]} and len(later.seen) == 1
    _, mended = run(fresh(spec), Images(), "minor", force=True)
    assert mended["beta"] == "1.1.0"


def beside(packages: dict[str, str]) -> Measured:
    """Measure an image where the command of leaky does not start with another package's release."""
    fails = ("leaky: leak: ImportError: no beta.old",) if packages["beta"] == "1.1.0" else ()
    return replace(GOOD, beside="2 console scripts", failing=("alpha: alpha: ValueError: 1", *fails))


def test_a_group_that_breaks_a_command_beside_the_training_is_taken_apart(spec: RepositorySpec) -> None:
    result, packages = run(spec, Images(beside), "minor")
    why = "fails beside the training: leaky: leak: ImportError: no beta.old"
    assert packages == OLD | {"alpha": "1.1.0", "gamma": "1.1.0", "helper": "0.1"}
    assert result.steps[0].taken and result.steps[0].left_out == {"beta 1.0.0 -> 1.1.0": why}
    text, found = update_report.markdown(result), update_report.as_dict(result)
    assert "| beside the training | 2 console scripts | 2 console scripts | no other failure |  |" in text
    assert f"- left out: beta 1.0.0 -> 1.1.0 ({why})" in text
    assert "beside the training" in [row["name"] for row in found["steps"][0]["comparison"]["rows"]]
    whole, _ = run(fresh(spec), Images(beside), "minor", apart=False, force=True)
    assert whole.steps[0].reason == why
    rows = update_report.as_dict(whole)["steps"][0]["comparison"]["rows"]
    assert [row["worse"] for row in rows if row["name"] == "beside the training"] == [why]
    assert "| beside the training | 2 console scripts | 2 console scripts | no other failure | **worse** |" in (
        update_report.markdown(whole)
    )


def test_a_package_that_is_alone_in_its_group_needs_no_search(spec: RepositorySpec) -> None:
    result, packages = run(spec, images := Images(broken("alpha", "1.0.1")), "patch")
    assert packages == OLD and result.steps == [
        Step("patch", left_out={"alpha 1.0.0 -> 1.0.1": "train.py:1: ValueError"})
    ]
    assert len(images.seen) == 2
    assert "Nothing but what is left out." in update_report.markdown(result)


def test_without_bisect_a_group_that_is_worse_is_left_out_as_a_whole(spec: RepositorySpec) -> None:
    result, packages = run(spec, images := Images(broken("beta", "1.1.0")), "minor", apart=False)
    assert packages == OLD and result.steps[0].reason == "train.py:1: ValueError"
    assert len(images.seen) == 2 and "Not taken: train.py:1: ValueError." in update_report.markdown(result)


def test_a_group_that_cannot_be_taken_apart_is_left_out_with_the_reason(
    spec: RepositorySpec, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StepFailed("no culprit")

    monkeypatch.setattr(bisect, "bisect", fail)
    result, packages = run(spec, Images(broken("beta", "1.1.0")), "minor")
    assert packages == OLD and result.steps[0].reason.endswith("ValueError (not taken apart: no culprit)")


def test_what_is_found_slow_is_bisected_by_its_time_and_all_else_without_one(spec: RepositorySpec) -> None:
    def slow(packages: dict[str, str]) -> Measured:
        return replace(GOOD, steps=(4.0,)) if packages["beta"] == "1.1.0" else GOOD

    result, packages = run(spec, images := Images(slow), "minor")
    assert packages["beta"] == "1.0.0" and packages["gamma"] == "1.1.0"
    assert result.steps[0].left_out["beta 1.0.0 -> 1.1.0"] == "slower: run, s 2.1 -> 4" and images.again


def test_what_is_slower_once_is_measured_again_in_turns(spec: RepositorySpec) -> None:
    def busy(packages: dict[str, str]) -> Measured:
        return replace(GOOD, steps=(4.0,)) if packages["alpha"] == "1.0.1" and not images.again else GOOD

    result, packages = run(spec, images := Images(busy), "patch")
    assert packages["alpha"] == "1.0.1" and result.steps[0].taken
    assert [one["alpha"] for one in images.again] == ["1.0.0", "1.0.1"] * 3


def test_after_an_interrupt_the_lock_is_as_it_was_and_a_later_run_goes_on(spec: RepositorySpec) -> None:
    def interrupted(packages: dict[str, str]) -> str:
        if packages["alpha"] == "1.1.0":
            raise KeyboardInterrupt
        return ""

    first = Images(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(spec, first)
    assert own(fresh(spec).usable_lock) == OLD
    _, packages = run(fresh(spec), second := Images())
    assert packages["alpha"] == "2.0.0" and not [one for one in second.seen if one in first.seen[:2]]


def test_an_image_that_fails_as_it_is_ends_the_update(spec: RepositorySpec) -> None:
    with pytest.raises(StepFailed, match=r"it fails with the packages before: train.py:1: OSError"):
        run(spec, Images(lambda _: "train.py:1: OSError"))


def advisory(package: str, *events: tuple[str, str]) -> Advisory:
    return Advisory(f"PYSEC-{package}", (), package, "", "2026-01-01", (events,))


def test_a_release_that_closes_an_advisory_comes_first_with_what_it_needs(
    spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_advisories(monkeypatch, advisory("leaky", ("introduced", "0"), ("fixed", "1.0.1")))

    def measured(packages: dict[str, str]) -> Measured:
        return replace(GOOD, advisories=("leaky PYSEC-leaky",) if packages["leaky"] == "1.0.0" else ())

    result, packages = run(spec, Images(measured), "security")
    assert packages == OLD | {"leaky": "1.0.1", "beta": "1.1.0"}
    assert result.steps[0].along == ["beta 1.0.0 -> 1.1.0"]
    text = update_report.markdown(result)
    assert "security taken, with 2 changes; advisories closed: 1" in text and "- closes leaky PYSEC-leaky" in text
    assert "along, as others need them: beta 1.0.0 -> 1.1.0" in text


def test_an_advisory_that_nothing_closes_is_named(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = TARGET.locked().versions["numpy"]
    no_advisories(
        monkeypatch,
        advisory("alpha", ("introduced", "0")),
        advisory("gamma", ("introduced", "0"), ("fixed", "1.5.0")),
        advisory("leaky", ("introduced", "0"), ("fixed", "1.0.1")),
        advisory("numpy", ("introduced", "0"), ("fixed", f"{numpy}.post1")),
    )
    result, packages = run(spec, Images(), "security")
    reasons = [step.reason for step in result.steps]
    assert "alpha 1.0.0 has PYSEC-alpha: no release closes it" in reasons
    assert f"numpy {numpy} has PYSEC-numpy: {numpy}.post1 closes it, and is for the framework to take" in reasons
    assert any(reason.startswith("no solution for gamma: ") for reason in reasons)
    assert packages["leaky"] == "1.0.1", "what has a solution is taken"


def test_without_advisory_data_the_report_says_so(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Snapshot:
        raise UserError("images/advisories.json is missing")

    monkeypatch.setattr(advisories, "load", missing)
    result, _ = run(spec, Images(), "security")
    assert result.steps == [] and any(note.startswith("no advisory data") for note in result.notes)


def test_a_group_without_a_solution_is_a_line(spec: RepositorySpec, index: PackageIndex) -> None:
    for name in [name for name in index.files if name.startswith("beta")]:
        del index.files[name]
    result, packages = run(spec, Images(), "patch")
    assert packages == OLD and result.steps[0].reason.startswith(
        "no solution: requirements.txt:2: beta cannot be installed"
    )
    assert "\n" not in result.steps[0].reason


def test_the_base_is_taken_alone_and_not_as_of_an_earlier_day(
    spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = TARGET.base_spec().image
    monkeypatch.setattr(base_image, "lockable_reference", lambda *_: f"{image}@sha256:{'b' * 64}")
    then = model.load(None, context=Context(as_of="2026-06-01T00:00:00Z"))
    assert run(then, Images(), "base")[0].steps == []
    result, _ = run(spec, Images(), "base")
    change = f"base {image}@sha256:{'a' * 64} -> {image}@sha256:{'b' * 64}"
    assert shown(result) == {"base": [change]}
    written = fresh(spec).usable_lock
    assert written and written.origin and written.origin.base.endswith("b" * 64)
    monkeypatch.setattr(base_image, "lockable_reference", lambda *_: image)
    assert run(fresh(spec), Images(), "base", "framework")[0].steps == [], "its registry is out of reach"


def test_the_framework_of_this_trainyard_is_taken_with_nothing_else(spec: RepositorySpec, index: PackageIndex) -> None:
    """A lock of an earlier Trainyard, with an earlier framework."""
    index.add(wheel("tensorflow-cpu", "2.20.0"))
    known = spec.usable_lock
    assert known and known.origin
    others = (pin for pin in spec.locked().pins if pin.name != "tensorflow-cpu")
    older = replace(locks.lock(locks.pin("tensorflow-cpu==2.20.0", "framework"), *others), python=known.python)
    origin = replace(known.origin, version="0.0.1", contents="00000000", inputs=lock_origin.inputs(spec, older))
    pylock.write(spec.lock_file, replace(older, origin=origin))
    result, packages = run(fresh(spec), Images(), "patch")
    assert packages["alpha"] == "1.0.1" and "the lock stays one of Trainyard 0.0.1" in result.notes[-1]
    result, packages = run(fresh(spec), Images(), "framework")
    changes = shown(result)["framework"]
    assert changes[0] == "tensorflow-cpu 2.20.0 -> 2.21.0" and changes[1].startswith("Trainyard 0.0.1 (00000000) -> ")
    assert packages == OLD | {"alpha": "1.0.1"} and not relock(spec)


def test_a_lock_of_a_target_that_has_another_base_now_gets_its_framework_first(spec: RepositorySpec) -> None:
    known = spec.usable_lock
    assert known and known.origin
    base = f"{model.bases()['debian-12'].image}@sha256:{'c' * 64}"
    pylock.write(spec.lock_file, replace(known, origin=replace(known.origin, base=base)))
    result, packages = run(fresh(spec), Images(), "patch")
    assert result.steps[0].reason == "tf-cpu is on another base now: 'framework' comes first" and packages == OLD
    result, packages = run(fresh(spec), Images())
    assert list(shown(result)) == ["framework", "patch", "minor", "major"]
    assert shown(result)["framework"] == [f"base {base} -> {known.origin.base}"]
    assert packages["alpha"] == "2.0.0" and not relock(spec)


def test_a_lock_that_is_not_of_the_requirements_is_refused(spec: RepositorySpec) -> None:
    ask(spec.folder, *OLD, "helper")
    with pytest.raises(UserError, match="the requirements have changed since: run 'trainyard lock'"):
        run(spec, Images())


def test_releases_that_the_requirements_exclude_are_named(spec: RepositorySpec) -> None:
    ask(spec.folder, "alpha<2", "beta==1.0.0", "gamma", "leaky==1.0.0")
    relock(spec)
    result, _ = run(fresh(spec), Images())
    assert result.behind == [
        "alpha 1.1.0: there is 2.0.0, and requirements.txt:1 has <2",
        "beta 1.0.0: there is 1.1.0, and requirements.txt:2 has ==1.0.0",
        "leaky 1.0.0: there is 1.0.1, and requirements.txt:4 has ==1.0.0",
    ]
    assert "- beta 1.0.0: there is 1.1.0" in update_report.markdown(result)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex, resolves: None) -> Spec:
    """tf-cpu, with newer releases of two of its packages."""
    settings = empty(tmp_path / "elsewhere", monkeypatch)
    settings.write_text(f'[[index]]\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")
    monkeypatch.setenv("UV_CONFIG_FILE", str(settings))
    no_advisories(monkeypatch)
    for_arm = model.load("tf-cpu", "arm64").locked().versions
    index.add(*(wheel(name, version) for name, version in for_arm.items()))
    every = tuple(name for name in TARGET.locked().versions if not name.startswith("tensorflow") and name != "gcsfs")
    index.add(wheel("gcsfs", for_arm["gcsfs"], every), wheel("numpy", "99.0"), wheel("aiosignal", "99.0"))
    return model.load("tf-cpu", "amd64")


def test_a_target_of_the_catalogue_keeps_its_pins(target: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, written = target, list[Lock]()
    monkeypatch.setattr(target_lock, "write", lambda spec, lock: written.append(lock) or (spec, []))
    started = updating(spec, Images())
    assert started.name.endswith("images/tf-cpu/pylock.toml")
    result = started.run(["patch", "minor", "major", "framework"])
    assert shown(result) == {"major": [f"aiosignal {spec.locked().versions['aiosignal']} -> 99.0"]}
    assert any(line.startswith("numpy ") and "tf-cpu" in line for line in result.behind)
    update.write(spec, started.lock)
    locked = written[0]
    for arch in ("amd64", "arm64"):
        new, old = locked.of(arch), started.lock.of(arch)
        assert new and old and new.versions == old.versions and not any(pin.added for pin in new.requirements)


def test_an_update_of_a_target_leaves_out_what_breaks_its_commands(target: Spec) -> None:
    """Nothing is tried of an image with the lock of the target, whose own smoke test has tried all of it."""

    def measure(spec: RepositorySpec, _bounds: Bounds, _again: bool) -> Measured:
        if not recipes._tried(spec, DEFAULT):
            return GOOD
        return replace(GOOD, beside="15 console scripts", failing=("tensorboard: tensorboard: ImportError: x",))

    tried = Trials(bisect.repository(target, "update"), Bounds(), measure)
    (step,) = update.start(target, tried, apart=True).run(["major"]).steps
    ((words, why),) = step.left_out.items()
    assert words.startswith("aiosignal ") and not step.taken
    assert why == "fails beside the training: tensorboard: tensorboard: ImportError: x"


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        ({"failure": "train.py:1: ValueError"}, "train.py:1: ValueError"),
        ({"steps": (2.3, 2.4, 2.5)}, ""),  # 0.3 s are what a container takes longer by chance
        ({"steps": (2.9, 3.0, 3.1)}, "slower: run, s 2.1 -> 3"),
        ({"steps": (2.0, 3.0, 3.1)}, ""),  # the quickest run is as quick
        ({"starts": (4.0,)}, "slower: start, s 3 -> 4"),
        ({"memory": 60_000_000}, "larger: memory 50.0 MB -> 60.0 MB"),
        ({"memory": 54_000_000}, ""),
        ({"size": 1_200_000_000}, "larger: size 1.00 GB -> 1.20 GB"),
        ({"blobs": {"sha256:1": 120_000_000}}, "larger: bytes to pull 100.0 MB -> 120.0 MB"),
        ({"advisories": ("a PYSEC-1",)}, "has a PYSEC-1"),
        ({"value": 3.0}, ""),
        ({}, ""),
    ],
)
def test_an_image_is_refused_for_what_is_worse(after: dict[str, Any], worse: str) -> None:
    found = trials.compare(GOOD, replace(GOOD, **after), Bounds())
    assert found.worse == worse


def test_bounds_and_the_time_of_a_step_are_given() -> None:
    slow, fat = replace(GOOD, steps=(6.0,)), replace(GOOD, size=2 * 10**9)
    assert (
        not trials.compare(GOOD, slow, Bounds(slower=3)).worse and not trials.compare(GOOD, fat, Bounds(larger=2)).worse
    )
    little = replace(GOOD, steps=(0.01,)), replace(GOOD, steps=(0.02,))
    assert not trials.compare(*little, Bounds()).worse
    for timed in ("step", "image, s"):
        steps = (replace(one, timed=timed) for one in little)
        assert trials.compare(*steps, Bounds()).worse == f"slower: {timed} 0.01 -> 0.02"
    with pytest.raises(UserError, match="'--measure x' has no group"):
        Bounds(step="x")


def test_an_image_that_fails_closes_no_advisory() -> None:
    found = trials.compare(replace(GOOD, advisories=("a PYSEC-1",)), Measured(failure="ValueError"), Bounds())
    assert (found.worse, found.closed, len(found.rows)) == ("ValueError", [], 1)


def test_blobs_that_a_host_lacks_are_what_it_pulls() -> None:
    other = replace(GOOD, blobs={"sha256:0": 10**8, "sha256:1": 2_000_000})
    rows = {row.name: row.after for row in trials.compare(GOOD, other, Bounds()).rows}
    assert rows["of them new"] == "2.0 MB" and rows["bytes to pull"] == "102.0 MB"


@pytest.mark.parametrize(
    ("old", "level", "specifiers"),
    [
        ("2.2.3", "patch", ">=2.2.3,<2.3"),
        ("2.2.3", "minor", ">=2.2.3,<3"),
        ("2.2.3", "major", ">=2.2.3"),
        ("2", "patch", ">=2,<2.1"),
        ("1!2.3+cpu", "minor", ">=1!2.3,<1!3"),
        ("2009c-old", "major", "===2009c-old"),
    ],
)
def test_a_level_is_about_the_first_two_numbers(old: str, level: str, specifiers: str) -> None:
    assert update.within(old, level) == specifiers


# Measuring


class Runs:
    """Runs that print lines and take seconds, in place of containers."""

    def __init__(self, *printed: str, seconds: float = 2.0) -> None:
        self.printed, self.seconds = list(printed), seconds
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, _tried: Tried, command: tuple[str, ...], _test: Command) -> Runs:
        self.commands.append(command)
        return self


def timed(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch, runs: Runs, smoke: str, **bounds: Any) -> Measured:
    """Measure a repository with a ``smoke``."""
    text = (spec.folder / "trainyard.yaml").read_text(encoding="utf-8").replace("smoke: {args: []}", smoke)
    (spec.folder / "trainyard.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(trials, "_run", runs)
    made = render(spec)
    tried = Tried(recipes.make(made), "image", made.context, workspace_files.on_host(made))
    return trials._timed(tried, Bounds(runs=2, **bounds), Measured())


PRINTED = ("step 1: 9 ms", "step 2: 4 ms", "accuracy 0.5", "accuracy 0.75", '{"peak_memory": 4096}')


@pytest.mark.parametrize(
    ("smoke", "bounds", "found"),
    [
        ("smoke: {args: []}", {}, {"steps": (2.0, 2.0)}),
        ("smoke: {args: [], expect: 'accuracy (.*)'}", {}, {"steps": (2.0, 2.0), "value": 0.75}),
        ("smoke: {args: [], expect: '(accuracy) '}", {}, {"steps": (2.0, 2.0)}),
        ("smoke: {args: [], expect: accuracy}", {"step": "(.) ms"}, {"timed": "step", "steps": (4.0, 4.0)}),
        ("smoke: {args: [], for: 5}", {}, {"steps": ()}),
    ],
)
def test_runs_are_measured(
    spec: RepositorySpec,
    monkeypatch: pytest.MonkeyPatch,
    smoke: str,
    bounds: dict[str, Any],
    found: dict[str, Any],
) -> None:
    runs = Runs(*PRINTED)
    expected = replace(Measured(starts=(2.0, 2.0), memory=4096), **found)
    assert timed(spec, monkeypatch, runs, smoke, **bounds) == expected
    assert runs.commands[0] == ("python", "-c", "import tensorflow")
    assert runs.commands[1] == ("python", "/smoke/peak/peak_memory.py", "python", "train.py")


def test_without_a_smoke_test_only_the_start_is_measured(spec: RepositorySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(spec, monkeypatch, Runs(), "") == Measured(starts=(2.0, 2.0))


def test_a_trainer_of_the_catalogue_is_measured_by_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs('{"event": "summary", "images_per_second": 250.0}', '{"peak_memory": 4096}')
    monkeypatch.setattr(trials, "_run", runs)
    tried = Tried(recipes.make(TARGET), "image", TARGET.context, None)
    found = trials._timed(tried, Bounds(runs=1), Measured(value=98.0))
    assert (found.timed, found.steps, found.value) == ("image, s", (0.004,), 98.0)
    assert runs.commands[-1][-2:] == ("-m", "trainers.tf.mnist")


@pytest.mark.parametrize("kind", [StepFailed, UserError])
def test_an_image_that_cannot_be_built_fails_with_the_reason(
    spec: RepositorySpec, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(_: Spec) -> None:
        raise kind("no wheel")

    monkeypatch.setattr(planning, "planned", fail)
    assert trials.in_image(spec, Bounds(), False) == Measured(failure="no wheel")


def test_an_engine_that_fails_ends_the_update_and_is_not_recorded(
    spec: RepositorySpec, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Spec) -> None:
        raise EngineFailed("the engine's disk is full")

    monkeypatch.setattr(planning, "planned", fail)
    tried = Trials(bisect.repository(spec, "update"), Bounds())
    with pytest.raises(EngineFailed):
        update.start(spec, tried, apart=True).run(["patch"])
    assert not (tried.spec.kept / "measured.json").exists()


@pytest.mark.parametrize(("code", "status"), [("b'0' * 10**8", 0), ("exit(3)", 3)])
def test_the_peak_of_a_command_is_printed_after_its_output(code: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, peak_memory.__file__, sys.executable, "-c", f"print('out', flush=True); {code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    first, last = done.stdout.splitlines()
    assert (done.returncode, first) == (status, "out")
    assert (json.loads(last)["peak_memory"] > 10**8) == (status == 0)


# The command


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch, spec: RepositorySpec, fake_engine: FakeEngine) -> Images:
    """Images that the command measures; everything is committed on main."""
    found = Images(broken("beta", "1.1.0"))
    monkeypatch.setattr(Trials, "__init__", _with(Trials.__init__, found))
    for name, value in (("user.name", "a"), ("user.email", "a@b")):
        git(spec, "config", name, value)
    git(spec, "add", ".")
    git(spec, "commit", "--quiet", "--message=before")
    return found


def _with(made: Callable[..., None], images: Images) -> Callable[..., None]:
    def init(self: Trials, spec: RepositorySpec, bounds: Bounds, **more: Any) -> None:
        made(self, spec, bounds, measure=images, **more)

    return init


def git(spec: Spec, *words: str) -> str:
    return subprocess.run(["git", "-C", str(spec.folder), *words], check=True, capture_output=True, text=True).stdout


def test_a_branch_a_commit_and_a_report_are_made(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    status, out, err = trainyard("update", "--only", "patch", "--branch", "newer", "--commit", "--report", "body.md")
    assert status == 0 and (spec.folder / "body.md").read_text("utf-8") == out
    assert "| size | 1.00 GB | 1.00 GB | 1.1 times |  |" in out and "- alpha 1.0.0 -> 1.0.1" in out
    assert git(spec, "branch", "--show-current").strip() == "newer"
    assert git(spec, "log", "--format=%B", "-1") == "Update pylock.trainyard.toml: patch\n\n- alpha 1.0.0 -> 1.0.1\n\n"
    assert git(spec, "show", "--stat", "--format=").split()[0] == "pylock.trainyard.toml" and "commit" in err
    assert git(spec, "status", "--porcelain") == "?? body.md\n"


def test_bounds_and_runs_are_options(spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]) -> None:
    options = ("--slower", "2", "--larger", "3", "--runs", "5", "--measure", "took (.)")
    assert trainyard("update", "--only", "patch", *options)[0] == 0
    assert images.bounds == Bounds(slower=2, larger=3, runs=5, step="took (.)")


def test_what_was_left_out_is_tried_again_by_force(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    assert trainyard("update", "--only", "minor")[0] == 0
    seen = len(images.seen)
    assert trainyard("update", "--only", "minor")[0] == 0 and len(images.seen) == seen
    assert trainyard("update", "--only", "minor", "--force")[0] == 0 and len(images.seen) > seen


def test_the_result_is_json(spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]) -> None:
    status, out, _ = trainyard("update", "--only", "minor", "--json")
    found = json.loads(out)
    assert status == 0 and found["taken"] == ["minor"] and found["steps"][0]["left_out"]
    assert found["steps"][0]["comparison"]["rows"][0]["name"] == "smoke test"


def test_a_lock_is_proven_against_the_commit_that_it_is_changed_from(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    assert "Nothing differs" in trainyard("update", "--proof")[1]
    assert relock(spec, upgrade_packages=["alpha"])
    before = spec.lock_file.read_bytes()
    status, out, _ = trainyard("update", "--proof", "--report", "body.md")
    assert (
        status == 0
        and out.startswith("## pylock.trainyard.toml against HEAD: not worse")
        and "Nothing is worse." in out
    )
    assert "- alpha 1.0.0 -> 2.0.0" in out
    git(spec, "switch", "--quiet", "--create", "renovate")
    relock(spec, upgrade_packages=["beta", "gamma"])
    git(spec, "commit", "--quiet", "--all", "--message=newer")
    status, out, err = trainyard("update", "--proof")
    common = git(spec, "rev-parse", "main")[:12]
    assert status == 1 and out.startswith(f"## pylock.trainyard.toml against {common}: worse")
    assert "- culprit: beta 1.0.0 -> 1.1.0 (train.py:1: ValueError)" in out
    assert err.strip().endswith(f"pylock.trainyard.toml against {common}: train.py:1: ValueError")
    status, out, _ = trainyard("update", "--proof", "--against", "HEAD", "--no-bisect")
    assert status == 0 and spec.lock_file.read_bytes() != before and not git(spec, "status", "--porcelain", "-uno")


def test_a_lock_that_is_not_of_the_requirements_is_not_proven(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    ask(spec.folder, *OLD, "helper")
    status, _, err = trainyard("update", "--proof")
    assert status == 2 and "the requirements have changed since: run 'trainyard lock'" in err


def test_a_branch_without_a_default_branch_needs_against(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    git(spec, "branch", "--move", "other")
    status, _, err = trainyard("update", "--proof")
    assert status == 2 and "give '--against <commit>'" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--proof", "--commit"], "'--proof' writes nothing"),
        (["--proof", "--only", "patch"], "'--proof' writes nothing"),
        (["--proof", "--as-of", "2026-01-01"], "'--proof' writes nothing"),
        (["--against", "main"], "'--against' is for '--proof'"),
        (["--as-of", "yesterday"], "'yesterday' is not a day: write it as in 2026-11-26"),
        (["--measure", "("], "'--measure (' is not a regular expression"),
        (["--slower", "0.5"], "--slower"),
        (["--only", "all"], "--only"),
        (["--report", "nowhere/body.md"], "'--report nowhere/body.md': there is no folder nowhere"),
        (["--report", "."], "--report"),
        (["--branch", "main"], "'--branch main': it exists"),
        (["--branch", "a b"], "git check-ref-format: "),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_mistake_is_a_line(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3], words: list[str], message: str
) -> None:
    status, _, err = trainyard("update", *words)
    assert status == 2 and message in err and "Traceback" not in err and not images.seen


def test_a_lock_with_changes_is_not_committed(
    spec: RepositorySpec, images: Images, trainyard: Callable[..., Result3]
) -> None:
    relock(spec, upgrade_packages=["alpha"])
    status, _, err = trainyard("update", "--commit")
    assert status == 2 and "pylock.trainyard.toml: has changes that are not committed" in err and not images.seen


def test_the_command_knows_the_groups() -> None:
    assert command._GROUPS == GROUPS
