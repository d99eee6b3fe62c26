"""Trainyard refuses no valid file of the corpora, and at least 95 % of the invalid ones.

Files that only a cluster refuses, by rules of its API server and webhooks, are not in the corpora. What is valid is
said by the tests, examples and schemas that each case links: see :mod:`tests.unit.corpus`.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tests import examples
from tests.unit.corpus import google_jobs, kinds, kubernetes, names, published
from tests.unit.corpus.case import Case

BY_HAND: list[Case] = [one for module in (kubernetes, google_jobs, kinds, names) for one in module.corpus()]

#: A program makes these faults; a quarter of them is checked without --big, and test_goldens.py has others.
GENERATED = list(published.corpus())
CASES = [*BY_HAND, *GENERATED[:: 1 if examples.ALL else 4]]
VALID = [one for one in CASES if one.valid]
INVALID = [one for one in CASES if not one.valid]

#: Invalid files that Trainyard accepts: name -> why.
MISSES = {
    "AI Platform: an unknown machine": "the API has ended, and no document lists the machines that it had",
}


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_a_valid_file_is_not_refused(case: Case) -> None:
    assert case.refusals() == [], case.source


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_file_is_refused_unless_it_is_a_listed_miss(case: Case) -> None:
    """A listed miss that is found now leaves the list."""
    assert bool(case.refusals()) != (case.name in MISSES), case.source


def test_the_corpora_are_large_and_nearly_all_faults_are_found() -> None:
    """With the two tests above: no false refusal, and exactly the listed misses."""
    assert len(VALID) >= 300
    assert len(INVALID) >= 200
    by_hand = [one for one in BY_HAND if not one.valid]
    assert len(MISSES) <= 0.05 * len(by_hand), "the generated faults, which are many, do not count here"
    assert set(MISSES) <= {one.name for one in INVALID}


def test_every_case_has_another_name_and_a_link() -> None:
    every = [*BY_HAND, *GENERATED]
    assert [name for name, number in Counter(case.name for case in every).items() if number > 1] == []
    assert all(re.match(r"https://[\w.-]+/\S+$", case.source) for case in every)
