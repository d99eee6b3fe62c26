"""Evaluates the rules for jobs.

To add a rule, write a function in one of the modules that are imported here; see :mod:`trainyard.lint.engine`. A new
module goes into :data:`RULES`.
"""

from __future__ import annotations

from trainyard.jobs.job_file import Kind
from trainyard.lint.engine import Finding, Rule, rules_in
from trainyard.lint.jobs import (
    accelerators,
    ai_platform,
    fields,
    gke,
    image,
    jobset,
    kubernetes_job,
    kubernetes_pod,
    kubernetes_values,
    train_job,
    tuning,
    vertex,
)
from trainyard.lint.jobs.evidence import Evidence as Evidence
from trainyard.lint.jobs.evidence import drop_invalid_fields
from trainyard.lint.jobs.evidence import validate as validate

#: Rules about the file as it was written.
SCHEMA_RULES: tuple[Rule[Evidence], ...] = rules_in(fields)

#: Every rule, in the order in which they report.
RULES: tuple[Rule[Evidence], ...] = (
    *SCHEMA_RULES,
    *rules_in(
        vertex,
        accelerators,
        tuning,
        ai_platform,
        kubernetes_job,
        kubernetes_pod,
        kubernetes_values,
        jobset,
        train_job,
        gke,
        image,
    ),
)


def rules_for(kind: Kind) -> list[Rule[Evidence]]:
    """The rules about a kind of job."""
    return [one for one in RULES if kind in one.subjects]


def check(evidence: Evidence) -> list[Finding]:
    """Everything in a job that breaks a rule, rule by rule."""
    clean = drop_invalid_fields(evidence)
    return [
        finding for one in rules_for(evidence.job.kind) for finding in one(evidence if one in SCHEMA_RULES else clean)
    ]
