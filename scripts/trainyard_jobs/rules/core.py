"""Evaluates the rules for a job."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.common.rule_engine import Finding, Rule, rules_in
from trainyard_jobs.rules import fields
from trainyard_jobs.rules.evidence import Evidence, drop_invalid_fields

#: Rules about the file as it was written.
SCHEMA_RULES: tuple[Rule[Evidence], ...] = rules_in(fields)


def check(evidence: Evidence, rules: Sequence[Rule[Evidence]]) -> list[Finding]:
    """Return everything in a job that breaks one of ``rules`` that are about its kind, rule by rule."""
    clean = drop_invalid_fields(evidence)
    return [
        finding
        for rule in rules
        if evidence.job.kind in rule.subjects
        for finding in rule(evidence if rule in SCHEMA_RULES else clean)
    ]
