"""Every rule for jobs, and what checks a job by them."""

from __future__ import annotations

from trainyard.common.rule_engine import Finding, Rule, rules_in
from trainyard_jobs.platforms.ai_platform import rules as ai_platform
from trainyard_jobs.platforms.gke import rules as gke
from trainyard_jobs.platforms.kubeflow import rules as kubeflow
from trainyard_jobs.platforms.vertex import accelerators, tuning_rules
from trainyard_jobs.platforms.vertex import rules as vertex
from trainyard_jobs.rules import dry_run, fields, image
from trainyard_jobs.rules.evidence import Evidence, drop_invalid_fields

#: Rules about the file as it was written.
SCHEMA_RULES: tuple[Rule[Evidence], ...] = rules_in(fields)


#: Every rule, in the order in which they report.
RULES: tuple[Rule[Evidence], ...] = SCHEMA_RULES + rules_in(
    vertex, accelerators, tuning_rules, ai_platform, dry_run, gke, kubeflow, image
)


def check(evidence: Evidence) -> list[Finding]:
    """Return everything in a job that breaks a rule that is about its kind, rule by rule."""
    clean = drop_invalid_fields(evidence)
    return [
        finding
        for rule in RULES
        if evidence.job.kind in rule.subjects
        for finding in rule(evidence if rule in SCHEMA_RULES else clean)
    ]
