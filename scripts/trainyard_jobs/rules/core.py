"""Evaluates the rules for a job: those of its platform, and those that every job has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

from trainyard.common.rule_engine import Finding, Rule, rules_in
from trainyard_jobs.rules import fields, image, image_gpus
from trainyard_jobs.rules.evidence import Evidence, drop_invalid_fields

#: Rules about the file as it was written.
SCHEMA_RULES: tuple[Rule[Evidence], ...] = rules_in(fields)


def rules(modules: Iterable[ModuleType]) -> tuple[Rule[Evidence], ...]:
    """Return the rules of modules, between those about fields and those about images, in the order they report."""
    return (*SCHEMA_RULES, *rules_in(*modules), *rules_in(image, image_gpus))


def check(evidence: Evidence, rules: Sequence[Rule[Evidence]]) -> list[Finding]:
    """Return everything in a job that breaks one of ``rules`` that are about its kind, rule by rule."""
    clean = drop_invalid_fields(evidence)
    return [
        finding
        for rule in rules
        if evidence.job.kind in rule.subjects
        for finding in rule(evidence if rule in SCHEMA_RULES else clean)
    ]
