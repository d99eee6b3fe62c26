"""The generated pages about jobs: docs/jobs.md and docs/jobs/rules.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainyard.common.settings import ROOT
from trainyard_jobs import platforms
from trainyard_jobs.model import machines
from trainyard_jobs.model.options import ROWS
from trainyard_jobs.schema import kinds

JOBS = ROOT / "docs" / "jobs.md"
RULES = ROOT / "docs" / "jobs" / "rules.md"

#: Subject -> its heading on the page of rules, in this order. A rule with several subjects is below the first.
_HEADINGS = {
    "custom-job": "Vertex AI",
    "hyperparameter-tuning-job": "Tuning jobs of Vertex AI",
    "ai-platform": "AI Platform",
    "gke": "Kubernetes",
}


def _linked(source: str) -> str:
    """Return a source as Markdown: addresses as links, and no characters that end a cell of a table."""
    return re.sub(r"https://[^\s;,)\"']+", lambda match: f"<{match[0]}>", source).replace("|", r"\|")


def rendered() -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return the path of each page -> name and variables of its template."""
    known = machines.table()
    tables = {
        "slices": list(machines.slices().values()),
        "tpus": known.tpus,
        "gpus": known.gpus,
        "cpus": known.cpus,
        "sources": known.sources,
        "options": ROWS,
        "having": platforms.having,
        "kinds": kinds.KINDS,
    }
    shared = [rule for rule in platforms.RULES if len(set(rule.subjects) & {"ai-platform", "gke", "custom-job"}) > 1]
    groups = [("Every kind of job", shared)]
    left = [rule for rule in platforms.RULES if rule not in shared]
    order = list(_HEADINGS)
    for subject, heading in _HEADINGS.items():
        groups.append((heading, [rule for rule in left if min(rule.subjects, key=order.index) == subject]))
    rules = {"groups": [group for group in groups if group[1]], "linked": _linked}
    return {JOBS: ("jobs/index.md.j2", tables), RULES: ("jobs/rules.md.j2", rules)}
