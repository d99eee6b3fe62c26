"""Rules of images and jobs: what every rule has, how findings get their severity, and ``trainyard rules``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainyard import cli
from trainyard.common import rule_engine
from trainyard.common.rule_engine import Finding, Rule, Severity, rule
from trainyard.common.settings import ROOT
from trainyard.lint.image import core as image
from trainyard_jobs import platforms

RULES = cli.trainyard.rules()

Trainyard = Callable[..., tuple[int, str, str]]

SUBJECTS = {"image", "target", "custom-job", "hyperparameter-tuning-job", "ai-platform", "gke", "cloud-build"}
every_rule = pytest.mark.parametrize("one", RULES, ids=lambda one: one.id)


@every_rule
def test_a_rule_has_a_title_subjects_and_a_source(one: Rule[Any]) -> None:
    assert one.title and len(one.title) < 120
    assert one.subjects and set(one.subjects) <= SUBJECTS
    assert len(one.source) > 10


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown page: those of its headings, and explicit ones."""
    headings = re.findall(r"(?m)^#+ +(?:<a [^>]*></a> *)?(.*)$", text)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings} | set(
        re.findall(r'<a id="([^"]+)"', text)
    )


@every_rule
def test_files_that_a_source_names_exist_with_their_anchors(one: Rule[Any]) -> None:
    for path, anchor in re.findall(r"(?<![\w/.])((?:docs|images)/[\w./-]+)(?:#([\w.-]+))?", one.source):
        assert (ROOT / path).is_file(), path
        assert not anchor or anchor in anchors((ROOT / path).read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_ids_are_unique() -> None:
    assert [one for one, count in Counter(one.id for one in RULES).items() if count > 1] == []


def test_rules_report_in_the_order_of_their_modules_and_definitions() -> None:
    for rules in (image.RULES, platforms.RULES):
        modules = [one.function.__module__ for one in rules]
        assert modules == sorted(modules, key=modules.index), "the rules of a module are together"
        for module in dict.fromkeys(modules):
            lines = [one.function.__code__.co_firstlineno for one in rules if one.function.__module__ == module]
            assert lines == sorted(lines)


# --- the engine ------------------------------------------------------------------------------------------------------


@rule("image", severity=Severity.CANNOT_START, source="docs/anatomy.md")
def numbers_are_small(numbers: list[int]) -> Iterator[Finding]:
    """Numbers are small.

    More about it.
    """
    for number in numbers:
        severity = Severity.NOTE if number < 100 else Severity.REFUSE
        yield Finding("here", f"{number} is large", "it overflows", "take a smaller one", severity)


def test_a_rule_is_named_after_its_function_and_titled_by_its_docstring() -> None:
    assert (numbers_are_small.id, numbers_are_small.title) == ("numbers_are_small", "Numbers are small")


def test_a_finding_has_the_id_of_its_rule_and_at_most_its_severity() -> None:
    note, failure = numbers_are_small([10, 1000])
    assert note.rule == failure.rule == "numbers_are_small"
    assert (note.severity, note.fails) == (Severity.NOTE, False)
    assert (failure.severity, failure.fails) == (Severity.CANNOT_START, True)
    assert rule_engine.as_dict(failure) == {
        "rule": "numbers_are_small",
        "where": "here",
        "what": "1000 is large",
        "why": "it overflows",
        "remediation": "take a smaller one",
        "severity": "cannot start",
    }


@pytest.mark.parametrize(
    ("one", "other", "lower"),
    [
        (Severity.REFUSE, Severity.CANNOT_START, Severity.CANNOT_START),
        (Severity.CANNOT_START, Severity.NOTE, Severity.NOTE),
        (Severity.NOTE, Severity.REFUSE, Severity.NOTE),
        (Severity.REFUSE, Severity.REFUSE, Severity.REFUSE),
    ],
)
def test_severities_are_ordered(one: Severity, other: Severity, lower: Severity) -> None:
    assert one.at_most(other) is other.at_most(one) is lower


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_lists_every_rule_with_its_severity_and_source(trainyard: Trainyard) -> None:
    status, out, _ = trainyard("rules")
    assert status == 0
    for one in RULES:
        assert f"{one.id} [{one.severity}; {', '.join(one.subjects)}]\n  {one.title}\n  source: {one.source}\n" in out


def test_the_list_can_be_limited_to_subjects_and_rules(trainyard: Trainyard) -> None:
    status, out, _ = trainyard("rules", "gke", "image_is_its_recipe", "--json")
    found = json.loads(out)["rules"]
    assert status == 0
    assert [one["id"] for one in found] == [
        one.id for one in RULES if "gke" in one.subjects or one.id == "image_is_its_recipe"
    ]
    assert set(found[0]) == {"id", "title", "severity", "subjects", "source"}


def test_an_unknown_subject_is_one_line_with_the_nearest(trainyard: Trainyard) -> None:
    status, out, err = trainyard("rules", "gkee")
    assert (status, out) == (2, "")
    assert err.startswith("rules: no rule or subject 'gkee' (did you mean 'gke'?)") and len(err.splitlines()) == 1
