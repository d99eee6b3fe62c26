"""The plan of all targets for Cloud Build and for GitHub Actions, rendered from the specs by `make render`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.cli import ROOT
from scripts.spec import Spec

CLOUD_BUILD = ROOT / "cloudbuild.yaml"
TRIGGER = ROOT / "cloudbuild-trigger.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "images.yml"


@dataclass(frozen=True)
class Limit:
    """A time limit in seconds, and what it was derived from."""

    seconds: int
    measured: str


#: Limits of the steps. They are many times what was measured here on 2 cores, since machines, networks and mirrors
#: differ and a limit is there for what hangs.
STEP_TIMEOUTS = {
    "builder": Limit(900, "112 s without cached layers, 1 s with them, on 2 cores (2026-11)"),
    "prepare": Limit(120, "1 s on 2 cores (2026-11)"),
    "build": Limit(3600, "tf-cpu 122 s without cached layers on 2 cores (2026-11)"),
    "verify": Limit(900, "xla 24 s, tf-cpu 28 s beside its smoke on 2 cores (2026-11)"),
    "smoke": Limit(1800, "xla 52 s, tf-cpu 33 s beside its verify on 2 cores (2026-11)"),
    "promote": Limit(300, "1 s for two tags at a registry on the same host (2026-11)"),
    "publish": Limit(1800, "tf-cpu 9 s to a registry on the same host (2026-11)"),
}
TIMEOUT = Limit(7200, "tf-cpu alone 277 s without cached layers, 51 s with them, on 2 cores (2026-11)")
#: Each image is held as build cache, as packed layers and unpacked.
DISK = "a torch image with CUDA wheels, which closed networks fall back to, took 26 GB at its peak"
#: What the limits of the workflow's jobs were derived from.
WORKFLOW_MEASURED = {
    "check": "checks and unit tests took 2 min on 2 cores (2026-11)",
    "image": "tf-cpu took 183 s without cached layers on 2 cores (2026-11)",
}


def variables(specs: list[Spec]) -> dict[str, Any]:
    """Everything templates/cloudbuild.yaml.j2 may use."""
    return {
        "targets": [{"name": spec.target, "summary": spec.summary} for spec in specs],
        "step_timeouts": STEP_TIMEOUTS,
        "timeout": TIMEOUT.seconds,
        "timeout_measured": TIMEOUT.measured,
        "disk_measured": DISK,
        "workflow": WORKFLOW_MEASURED,
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of every generated file -> its template's name and variables."""
    values = variables(specs)
    return {
        CLOUD_BUILD: ("cloudbuild.yaml.j2", values),
        TRIGGER: ("cloudbuild-trigger.yaml.j2", values),
        WORKFLOW: ("cloudbuild-workflow.yml.j2", values),
    }
