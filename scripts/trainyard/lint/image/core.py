"""Evaluates the rules for images.

To add a rule, write a function in one of the modules that are imported here; see :mod:`trainyard.common.rule_engine`. A
new module goes into :data:`RULES`.
"""

from __future__ import annotations

import dataclasses

from trainyard.common.rule_engine import Finding, Rule, Severity, rules_in
from trainyard.lint.image import configuration, contents, filesystem, framework, metadata
from trainyard.lint.image.evidence import Evidence

#: Findings of one rule that are listed; the others are counted.
LIMIT = 20

#: Every rule, in the order in which they report: a failure's one line is the first finding, and a wrong label says more
#: than what follows from it.
RULES: tuple[Rule[Evidence], ...] = rules_in(metadata, configuration, framework, contents, filesystem)


def rules_for(image: Evidence) -> list[Rule[Evidence]]:
    """The rules that apply to an image: those about a ``target`` need its spec."""
    return [one for one in RULES if image.spec is not None or "image" in one.subjects]


def check(image: Evidence) -> dict[str, list[Finding]]:
    """Rule id -> findings, for every rule; none for a rule that does not apply.

    A finding with a waiver that has not expired is a note. Of a rule with more than :data:`LIMIT` findings, the last
    entry gives the number of those that are left out.
    """
    found: dict[str, list[Finding]] = {one.id: [] for one in RULES}
    for one in rules_for(image):
        found[one.id] = _limited([_waived(finding, image) for finding in one(image)])
    return found


def _limited(findings: list[Finding]) -> list[Finding]:
    if len(findings) <= LIMIT:
        return findings
    rest = dataclasses.replace(findings[LIMIT], where="and", what=f"{len(findings) - LIMIT} more")
    return [*findings[:LIMIT], rest]


def _waived(finding: Finding, image: Evidence) -> Finding:
    for waiver in image.waivers:
        if waiver.covers_finding(finding.rule, finding.where, image.target) and not waiver.expired(image.day):
            return dataclasses.replace(finding, what=f"{finding.what} ({waiver})", severity=Severity.NOTE)
    return finding
