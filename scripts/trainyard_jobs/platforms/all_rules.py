"""Every rule for jobs, in the order in which they report: fields first, then those of platforms, then images."""

from __future__ import annotations

from trainyard.common.rule_engine import Rule, rules_in
from trainyard_jobs.platforms.ai_platform import rules as ai_platform
from trainyard_jobs.platforms.gke import rules as gke
from trainyard_jobs.platforms.vertex import accelerators, tuning_rules
from trainyard_jobs.platforms.vertex import rules as vertex
from trainyard_jobs.rules import fields, image, jobset, kubernetes_job, kubernetes_pod, kubernetes_values, train_job
from trainyard_jobs.rules.evidence import Evidence

_VERTEX = (vertex, accelerators, tuning_rules)
_KUBERNETES = (kubernetes_job, kubernetes_pod, kubernetes_values, jobset, train_job, gke)

RULES: tuple[Rule[Evidence], ...] = rules_in(fields, *_VERTEX, ai_platform, *_KUBERNETES, image)
