"""docs/jobs/rules.md: the rules for jobs, rendered by `make render`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainyard.lint.jobs import core
from trainyard.settings import ROOT

PAGE = ROOT / "docs" / "jobs" / "rules.md"

#: Subject -> heading of the page, in its order. A rule with several subjects is below the first.
_HEADINGS = {
    "custom-job": "Vertex AI",
    "hyperparameter-tuning-job": "Tuning jobs of Vertex AI",
    "ai-platform": "AI Platform",
    "gke": "Kubernetes",
}


def _linked(source: str) -> str:
    """A source as Markdown: addresses as links, and no characters that end a cell of a table."""
    return re.sub(r"https://[^\s;,)\"']+", lambda match: f"<{match[0]}>", source).replace("|", r"\|")


def rendered() -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of the page -> name and variables of its template."""
    shared = [one for one in core.RULES if len(set(one.subjects) & {"ai-platform", "gke", "custom-job"}) > 1]
    groups = [("Every kind of job", shared)]
    left = [one for one in core.RULES if one not in shared]
    for subject, heading in _HEADINGS.items():
        known = list(_HEADINGS)
        first = [one for one in left if min(one.subjects, key=lambda name: known.index(name)) == subject]
        groups.append((heading, first))
    return {PAGE: ("jobs/rules.md.j2", {"groups": [group for group in groups if group[1]], "linked": _linked})}
