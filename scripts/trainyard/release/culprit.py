"""Find the smallest set of changes that turns good into bad, where only some sets of changes can be tried together.

This is delta debugging (https://www.st.cs.uni-saarland.de/papers/tse2002/) between a set that is good and one that is
bad: what lies between them is halved, and the last change of the set is found after log2 of their number. That change
is then tried alone; if it is good alone, it breaks together with another one, which is searched for in the same way.

It is a function of others, which know what changes are: one completes a set to one that can be tried, as a package
needs others in certain versions, which takes seconds; one tells what is known of that; and one tries a set, which takes
minutes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

#: Names of changes.
Changes = frozenset[str]

Outcome = Literal["good", "bad", "unresolved"]

#: How many sets that cannot be judged are passed over, until what is left counts as one group.
PATIENCE = 6

#: How many halves are compared by what has been seen, without asking what resolves.
WAYS = 32

#: How far a set may be from the middle of two others, as a share of what is between them.
NEAR = 0.1


@dataclass(frozen=True)
class Verdict:
    """Tell how a try ended.

    Attributes:
        reason: why it is bad, or cannot be judged; a line.
        value: what was measured.
    """

    outcome: Outcome
    reason: str = ""
    value: float | None = None


#: ``complete(must, may)``: the smallest set it knows that contains ``must``, is within ``may``, and can be tried; None
#: if there is none.
Complete = Callable[[Changes, Changes], Changes | None]
#: ``needs(changes)``: a set with what is known by now to be needed by it, without asking.
Needs = Callable[[Changes], Changes]
Test = Callable[[Changes], Verdict]


@dataclass(frozen=True)
class Found:
    """Hold what was found.

    Attributes:
        culprits: groups of changes, all of which are needed. A group of several could not be taken apart.
        along: changes without which the culprits cannot be tried.
        apart: whether every group of several is one since no part of it can be tried; else a part could not be judged.
    """

    culprits: tuple[Changes, ...]
    along: Changes
    apart: bool


def search(order: Sequence[str], needs: Needs, complete: Complete, test: Test) -> Found:
    """Find the changes that are needed for a bad outcome.

    Args:
        order: all changes; without any the outcome is good, with all of them it is bad.
        test: is called for each set once.
    """
    return _Search(order, needs, complete, test).run()


class _Search:
    def __init__(self, order: Sequence[str], needs: Needs, complete: Complete, test: Test) -> None:
        self._order, self._needs, self._complete, self._ask = order, needs, complete, test
        self._known: dict[Changes, Verdict] = {
            frozenset(): Verdict("good"),
            frozenset(order): Verdict("bad"),
        }
        self._apart = True

    def run(self) -> Found:
        groups: list[Changes] = []
        base, high = frozenset[str](), frozenset(self._order)
        while base != high:
            low, high = self._narrow(base, high)
            groups.append(high - low)
            base = self._complete(frozenset[str]().union(*groups), high) or high
            if self._test(base).outcome == "bad":
                break
        return self._reduced(groups, base)

    def _reduced(self, groups: list[Changes], bad: Changes) -> Found:
        """Leave out groups without which it is bad, too: what breaks alone may be good in the company of others.

        Without the last group it was good, as it was without the only one.
        """
        for group in groups[:-1]:
            rest = [one for one in groups if one != group]
            smaller = self._complete(frozenset[str]().union(*rest), bad - group)
            if smaller is not None and self._test(smaller).outcome == "bad":
                groups, bad = rest, smaller
        return Found(tuple(groups), bad - frozenset[str]().union(*groups), self._apart)

    def _test(self, changes: Changes) -> Verdict:
        if changes not in self._known:
            self._known[changes] = self._ask(changes)
        return self._known[changes]

    def _narrow(self, low: Changes, high: Changes) -> tuple[Changes, Changes]:
        """Return a set that is not bad, and a bad one, between which no other can be tried.

        Args:
            low: is not bad, ``high``: is bad and contains it.
        """
        passed_over: set[Changes] = set()
        while len(passed_over) <= PATIENCE and (middle := self._middle(low, high, passed_over)):
            match self._test(middle).outcome:
                case "bad":
                    high = middle
                case "good":
                    low = middle
                case _:
                    passed_over.add(middle)
        self._apart = self._apart and (len(high - low) == 1 or not passed_over)
        return low, high

    def _middle(self, low: Changes, high: Changes, passed_over: set[Changes]) -> Changes | None:
        """Return a set between two others, half way if there is one."""
        between = len(high - low)
        best: Changes | None = None
        for middle in self._between(low, high):
            if middle is None and best:
                break
            if middle is None or not low < middle < high or middle in passed_over:
                continue
            distance = abs(2 * len(middle - low) - between)
            if distance <= max(1, between * NEAR):
                return middle
            if best is None or distance < abs(2 * len(best - low) - between):
                best = middle
        return best

    def _between(self, low: Changes, high: Changes) -> Iterator[Changes | None]:
        """Yield sets that can be tried, about half of what is between two; then None, and those of single changes."""
        rest = [change for change in self._order if change in high and change not in low]
        suspects = self._suspects(rest)

        def half(way: int) -> Changes:
            return self._grown(low, high, random.Random(way).sample(rest, len(rest)))

        def split(way: int) -> int:
            chosen = half(way)
            return sum(one in chosen and other not in chosen for one, other in suspects)

        for way in (sorted(range(WAYS), key=split) if suspects else range(WAYS))[: PATIENCE + 2]:
            yield self._complete(half(way), high) or high
        yield None
        for change in rest:
            yield self._complete(low | {change}, high) or high

    def _suspects(self, rest: Sequence[str]) -> list[tuple[str, str]]:
        """Return pairs that may be the reason for all that could not be judged: the one was tried without the other.

        A pair is suspected in both orders, unless a set was judged that has the one without the other.
        """
        unclear = [changes for changes, verdict in self._known.items() if verdict.outcome == "unresolved"]
        clear = [changes for changes, verdict in self._known.items() if verdict.outcome != "unresolved"]
        suspects = []
        for one, other in itertools.combinations(rest if unclear else (), 2):
            orders = [
                (first, second)
                for first, second in ((one, other), (other, one))
                if not any(first in changes and second not in changes for changes in clear)
            ]
            if all(any(first in changes and second not in changes for first, second in orders) for changes in unclear):
                suspects += orders
        return suspects

    def _grown(self, low: Changes, high: Changes, changes: Sequence[str]) -> Changes:
        """Return ``low`` with changes and what they are known to need, as many as fit into a half."""
        size = len(low) + len(high - low) // 2
        grown, before = low, None
        while grown != before:
            before = grown
            for change in changes:
                more = self._needs(grown | {change})
                grown = more if len(more) <= size and more <= high else grown
        return grown
