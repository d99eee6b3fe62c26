"""docs/jobs.md: the page about jobs, with the tables of machines.yaml, rendered by `make render`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainyard.jobs import machines
from trainyard.settings import ROOT

PAGE = ROOT / "docs" / "jobs.md"


def rendered(having: Mapping[str, str]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of each generated file -> name and variables of its template.

    Args:
        having: option of :mod:`trainyard.jobs.platform_options` -> names of the platforms that have it.
    """
    known = machines.table()
    values = {
        "slices": list(machines.slices().values()),
        "tpus": known.tpus,
        "gpus": known.gpus,
        "cpus": known.cpus,
        "sources": known.sources,
        "having": dict(having),
    }
    return {PAGE: ("jobs/index.md.j2", values)}
