"""The search for the changes that break an image, as a function of what resolves and of what is bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from trainyard.release import culprit
from trainyard.release.culprit import Changes, Found, Outcome, Test, Verdict


class Needing:
    """Complete sets in which a change needs others, and those what they need; what was asked for is known then.

    Whatever two changes ask of each other is of this form: with all of them, and without any, packages resolve.
    """

    def __init__(self, needs: Mapping[str, Iterable[str]]) -> None:
        self._needs, self._known = needs, dict[str, Iterable[str]]()

    def __call__(self, must: Changes, may: Changes) -> Changes | None:
        found = self._closed(must, self._needs)
        self._known |= {change: self._needs[change] for change in found if change in self._needs}
        return found if found <= may else None

    def known(self, changes: Changes) -> Changes:
        return self._closed(changes, self._known)

    @staticmethod
    def _closed(changes: Changes, needs: Mapping[str, Iterable[str]]) -> Changes:
        found, missing = frozenset[str](), changes
        while missing:
            found |= missing
            missing = frozenset(other for change in missing for other in needs.get(change, ())) - found
        return found


alone = Needing({})


class Tries:
    """Judge sets, and remember them."""

    def __init__(self, judge: Callable[[Changes], Outcome], complete: Needing = alone) -> None:
        self.seen: list[Changes] = []
        self._judge, self._complete = judge, complete

    def __call__(self, changes: Changes) -> Verdict:
        assert self._complete(changes, changes) == changes, "it cannot be tried"
        self.seen.append(changes)
        return Verdict(self._judge(changes))


def breaks(*groups: Iterable[str]) -> Callable[[Changes], Outcome]:
    """Return a judge for whom a set is bad if it contains one of the groups."""
    guilty = [frozenset(group) for group in groups]
    return lambda changes: "bad" if any(group <= changes for group in guilty) else "good"


def names(number: int) -> list[str]:
    return [f"p{position:02}" for position in range(number)]


def search(order: list[str], tries: Test, complete: Needing = alone) -> Found:
    return culprit.search(order, complete.known, complete, tries)


@pytest.mark.parametrize("number", [1, 2, 3, 20, 34, 63, 64])
def test_one_guilty_package_is_found_in_log2_of_all_tries_and_one(number: int) -> None:
    for guilty in names(number):
        tries = Tries(breaks([guilty]))
        assert search(names(number), tries) == Found((frozenset([guilty]),), frozenset(), apart=True)
        assert len(tries.seen) <= math.ceil(math.log2(number)) + 1


def test_packages_that_break_only_together_are_both_found() -> None:
    tries = Tries(breaks(["p03", "p27"]))
    found = search(names(32), tries)
    assert sorted(map(sorted, found.culprits)) == [["p03"], ["p27"]]
    assert len(tries.seen) <= 2 * (5 + 1) + 1


def test_what_a_culprit_needs_to_resolve_comes_along() -> None:
    complete = Needing({"p07": ["p20"], "p20": ["p21"]})
    found = search(names(30), Tries(breaks(["p07"]), complete), complete)
    assert found == Found((frozenset(["p07"]),), frozenset(["p20", "p21"]), apart=True)


def test_packages_that_need_each_other_are_one_group() -> None:
    complete = Needing({"p04": ["p11"], "p11": ["p04"]})
    found = search(names(16), Tries(breaks(["p11"]), complete), complete)
    assert found == Found((frozenset(["p04", "p11"]),), frozenset(), apart=True)


def test_a_package_that_many_need_is_told_apart_from_them() -> None:
    """Both halves would need nearly everything."""
    everything = names(40)
    complete = Needing({name: ["p39"] for name in everything[:39]})
    for guilty in ("p39", "p00", "p20"):
        tries = Tries(breaks([guilty]), complete)
        assert search(everything, tries, complete).culprits == (frozenset([guilty]),)
        assert len(tries.seen) <= math.ceil(math.log2(40)) + 3


@pytest.mark.parametrize("guilty", ["p00", "p13", "p30", "p59"])
def test_what_packages_need_is_learned_before_a_try_is_spent(guilty: str) -> None:
    """In two families of thirty, everything needs the member before it: halves of a list would take most of both."""
    everything = names(60)
    needs = {f"p{position:02}": [f"p{position - 1:02}"] for position in range(60) if position % 30}
    complete = Needing(needs)
    tries = Tries(breaks([guilty]), complete)
    assert search(everything[::-1], tries, complete).culprits == (frozenset([guilty]),)
    assert len(tries.seen) <= math.ceil(math.log2(60)) + 2


def test_a_set_that_cannot_be_judged_is_passed_over() -> None:
    def judge(changes: Changes) -> Outcome:
        # p05 needs p04, and no metadata say so.
        return "unresolved" if "p05" in changes and "p04" not in changes else breaks(["p09"])(changes)

    found = search(names(16), Tries(judge))
    assert found.culprits == (frozenset(["p09"]),) and found.apart


def misfitting(misfits: set[str], guilty: str) -> Callable[[Changes], Outcome]:
    """Return a judge who cannot judge a set that has one of two changes."""
    return lambda changes: "unresolved" if len(changes & misfits) == 1 else breaks([guilty])(changes)


def test_sets_that_cannot_be_judged_tell_which_halves_to_try_next() -> None:
    """Two packages fit together in no mixture: half of all halves have one of them."""
    seen = []
    for position in range(0, 60, 4):
        misfits = {f"p{position:02}", f"p{(7 * position + 30) % 59 + 1:02}"}
        guilty = f"p{(11 * position + 5) % 60:02}"
        if guilty not in misfits:
            tries = Tries(misfitting(misfits, guilty))
            assert search(names(60), tries).culprits == (frozenset([guilty]),)
            seen.append(len(tries.seen))
    assert sum(seen) / len(seen) <= math.log2(60) + 1 + 2 and max(seen) <= math.log2(60) + 1 + 5


def test_what_cannot_be_taken_apart_is_one_group() -> None:
    def judge(changes: Changes) -> Outcome:
        return "unresolved" if 0 < len(changes & {"p05", "p06", "p07"}) < 3 else breaks(["p06"])(changes)

    found = search(names(16), Tries(judge))
    assert len(found.culprits) == 1 and {"p05", "p06", "p07"} <= found.culprits[0] and not found.apart


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[str], dict[str, list[str]], list[list[str]]]:
    order = names(draw(st.integers(1, 40)))
    pairs = draw(st.lists(st.tuples(st.sampled_from(order), st.sampled_from(order)), max_size=60))
    needs: dict[str, list[str]] = {}
    for one, other in pairs:
        needs.setdefault(one, []).append(other)
    group = st.lists(st.sampled_from(order), min_size=1, max_size=3, unique=True)
    return order, needs, draw(st.lists(group, min_size=1, max_size=2))


@settings(max_examples=examples(2000))
@given(problems())
def test_the_result_is_bad_and_nothing_of_it_can_be_left_out(
    problem: tuple[list[str], dict[str, list[str]], list[list[str]]],
) -> None:
    order, needs, guilty = problem
    complete, judge = Needing(needs), breaks(*guilty)
    tries = Tries(judge, complete)
    found = search(order, tries, complete)
    bad = found.along.union(*found.culprits)
    assert judge(bad) == "bad" and complete(bad, bad) == bad
    for group in found.culprits:
        rest = complete(frozenset[str]().union(*found.culprits) - group, bad - group)
        assert rest is None or judge(rest) == "good"
        # A group of several cannot be taken apart.
        assert len(group) == 1 or all(group <= (complete(frozenset([one]), frozenset(order)) or group) for one in group)
    assert len(tries.seen) == len(set(tries.seen))


@settings(max_examples=examples(2000))
@given(problems())
def test_a_single_culprit_takes_few_tries_whatever_packages_need(
    problem: tuple[list[str], dict[str, list[str]], list[list[str]]],
) -> None:
    order, needs, guilty = problem
    complete = Needing(needs)
    tries = Tries(breaks(guilty[0][:1]), complete)
    found = search(order, tries, complete)
    assert guilty[0][0] in found.culprits[0]
    assert len(tries.seen) <= math.ceil(math.log2(len(order))) + 2
