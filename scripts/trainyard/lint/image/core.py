"""Evaluate the rules for images, and describe rules.

To add a rule, write a function in one of the modules that are imported here; see :mod:`trainyard.common.rule_engine`. A
new module goes into :data:`RULES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trainyard.common import stages
from trainyard.common.errors import UserError, nearest
from trainyard.common.rule_engine import Finding, Rule, Severity, rules_in
from trainyard.lint.image import configuration, contents, device_code, filesystem, framework, metadata
from trainyard.lint.image.evidence import Evidence

#: Findings of one rule that are listed; the others are counted.
LIMIT = 20

#: Every rule, in the order in which they report: a failure's one line is the first finding, and a wrong label says more
#: than what follows from it.
RULES: tuple[Rule[Evidence], ...] = rules_in(metadata, configuration, framework, device_code, contents, filesystem)


def rules_for(image: Evidence) -> list[Rule[Evidence]]:
    """Return the rules that apply to an image: those about a ``target`` need its recipe."""
    return [rule for rule in RULES if image.recipe is not None or "image" in rule.subjects]


def check(image: Evidence) -> dict[str, list[Finding]]:
    """Return rule id -> findings, for every rule; none for a rule that does not apply.

    A finding with a waiver that has not expired is a note. Of a rule with more than :data:`LIMIT` findings, the last
    entry gives the number of those that are left out.
    """
    reported: dict[str, list[Finding]] = {rule.id: [] for rule in RULES}
    for rule in rules_for(image):
        stages.now(rule.title)
        findings = [_waived(finding, image) for finding in rule(image)]
        if len(findings) > LIMIT:
            rest = dataclasses.replace(findings[LIMIT], where="and", what=f"{len(findings) - LIMIT} more")
            findings[LIMIT:] = [rest]
        reported[rule.id] = findings
    return reported


def _waived(finding: Finding, image: Evidence) -> Finding:
    for waiver in image.waivers:
        if waiver.covers_finding(finding.rule, finding.where, image.target) and not waiver.expired(image.day):
            return dataclasses.replace(finding, what=f"{finding.what} ({waiver})", severity=Severity.NOTE)
    return finding


def select(known: Sequence[Rule[Any]], words: Sequence[str] = ()) -> list[Rule[Any]]:
    """Return those of the known rules with one of the subjects or ids; all of them if there are none.

    Raises:
        UserError: a word is neither a subject nor the id of a rule.
    """
    subjects = list(dict.fromkeys(subject for rule in known for subject in rule.subjects))
    for word in words:
        if word not in (valid := [*subjects, *(rule.id for rule in known)]):
            raise UserError(f"no rule or subject '{word}'{nearest(word, valid)}; subjects are: {', '.join(subjects)}")
    return [rule for rule in known if not words or {rule.id, *rule.subjects} & set(words)]


def as_dict(rule: Rule[Any]) -> dict[str, Any]:
    """Return a rule as JSON has it."""
    return {name: getattr(rule, name) for name in ("id", "title", "severity", "subjects", "source")}


def describe(rule: Rule[Any]) -> str:
    """Return a rule for people, in three lines."""
    return f"{rule.id} [{rule.severity}; {', '.join(rule.subjects)}]\n  {rule.title}\n  source: {rule.source}"
