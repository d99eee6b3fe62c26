"""docs/jobs.md: the page about jobs, with the tables of machines.yaml, rendered by `make render`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.cli import ROOT
from scripts.jobs import machines

PAGE = ROOT / "docs" / "jobs.md"


def rendered() -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of every generated file -> its template's name and variables."""
    known = machines.table()
    values = {"slices": list(machines.slices().values()), "tpus": known.tpus, "gpus": known.gpus, "cpus": known.cpus}
    return {PAGE: ("jobs/index.md.j2", values)}
