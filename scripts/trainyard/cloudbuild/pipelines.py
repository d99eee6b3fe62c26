"""Pipelines that build all targets on Cloud Build and GitHub Actions, rendered from the specs by `make render`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.settings import ROOT
from trainyard.spec.model import Spec


@dataclass(frozen=True)
class Schedule:
    """When a pipeline runs, and the generated files that define it.

    Attributes:
        promote: whether the pipeline moves the floating tags to the images that it published.
        build: configuration of Cloud Build.
        trigger: trigger of Cloud Build.
        workflow: workflow of GitHub Actions.
    """

    name: str
    promote: bool
    build: Path
    trigger: Path
    workflow: Path


#: Targets whose versions this repository pins: built on every push, promoted manually.
PUSHED = Schedule(
    "images",
    promote=False,
    build=ROOT / "cloudbuild.yaml",
    trigger=ROOT / "cloudbuild-trigger.yaml",
    workflow=ROOT / ".github" / "workflows" / "images.yml",
)
#: Targets on the newest framework: built every night, promoted if they pass.
NIGHTLY = Schedule(
    "nightly",
    promote=True,
    build=ROOT / "cloudbuild-nightly.yaml",
    trigger=ROOT / "cloudbuild-nightly-trigger.yaml",
    workflow=ROOT / ".github" / "workflows" / "nightly.yml",
)


@dataclass(frozen=True)
class Limit:
    """A time limit in seconds, and the measurement that it is derived from."""

    seconds: int
    measured: str


#: Time limits of the steps. They stop steps that hang, and are several times the measured times because machines,
#: networks and mirrors differ.
STEP_TIMEOUTS = {
    "builder": Limit(900, "112 s without cached layers, 1 s with them, on 2 cores (2026-11)"),
    "prepare": Limit(120, "1 s on 2 cores (2026-11)"),
    "build": Limit(3600, "tf-cpu 122 s without cached layers on 2 cores (2026-11)"),
    "verify": Limit(900, "xla 24 s, tf-cpu 28 s in parallel with smoke on 2 cores (2026-11)"),
    "smoke": Limit(1800, "xla 52 s, tf-cpu 33 s in parallel with verify on 2 cores (2026-11)"),
    "promote": Limit(300, "1 s for two tags at a registry on the same host (2026-11)"),
    "publish": Limit(1800, "tf-cpu 9 s to a registry on the same host (2026-11)"),
}
TIMEOUT = Limit(7200, "tf-cpu alone 277 s without cached layers, 51 s with them, on 2 cores (2026-11)")
#: An image takes space as build cache, as compressed layers and unpacked.
DISK = "three times the budgets; an 8.2 GB image took 26 GB at its peak (2026-11)"
#: Measurements that the time limits of the workflow's jobs are derived from.
WORKFLOW_MEASURED = {
    "check": "checks and unit tests took 2 min on 2 cores (2026-11)",
    "image": "tf-cpu took 183 s without cached layers on 2 cores (2026-11)",
}
#: Actions that the workflows use, pinned by commit: tags can be moved, and actions have access to credentials.
ACTIONS = {
    "checkout": "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8  # v5.0.0",
    "auth": "google-github-actions/auth@7c6bc770dae815cd3e89ee6cdf493a5fab2cc093  # v3",
    "setup_gcloud": "google-github-actions/setup-gcloud@aa5489c8933f4cc7a4f7d45035b3b1440c9c10db  # v3.0.1",
}


def schedule_of(spec: Spec) -> Schedule | None:
    """The schedule of a target; None for one that only takes the place of another, which is never promoted."""
    if spec.fallback_for:
        return None
    return NIGHTLY if spec.nightly else PUSHED


def disk(specs: list[Spec]) -> int:
    """Disk size in GB for building ``specs`` on one machine: at least 100, which is included in the price.

    A target needs three times its size (:data:`DISK`).
    """
    needed = sum(3 * spec.budget.size for spec in specs) / 1e9
    return max(100, 50 * math.ceil((20 + needed) / 50))


def variables(schedule: Schedule, specs: list[Spec]) -> dict[str, Any]:
    """Variables of the templates of a schedule."""
    return {
        "schedule": schedule.name,
        "nightly": schedule is NIGHTLY,
        "build_file": schedule.build.name,
        "promote": "yes" if schedule.promote else "",
        "targets": [{"name": spec.target, "summary": spec.summary} for spec in specs],
        "step_timeouts": STEP_TIMEOUTS,
        "timeout": TIMEOUT.seconds,
        "timeout_measured": TIMEOUT.measured,
        "disk": disk(specs),
        "disk_measured": DISK,
        "workflow": WORKFLOW_MEASURED,
        "actions": ACTIONS,
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of every generated file -> name and variables of its template."""
    found = {}
    for schedule in (PUSHED, NIGHTLY):
        mine = [spec for spec in specs if schedule_of(spec) is schedule]
        if not mine:
            continue
        values = variables(schedule, mine)
        found[schedule.build] = ("cloudbuild.yaml.j2", values)
        found[schedule.trigger] = ("cloudbuild-trigger.yaml.j2", values)
        found[schedule.workflow] = ("cloudbuild-workflow.yml.j2", values)
    return found
