"""The plans of all targets for Cloud Build and for GitHub Actions, rendered from the specs by `make render`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.cli import ROOT
from scripts.spec import Spec


@dataclass(frozen=True)
class Schedule:
    """When a plan's images are made, and the generated files that say so.

    Attributes:
        promote: whether what was published is what its targets' tags mean from then on.
        build, trigger, workflow: Cloud Build's steps, what starts them, and the same for GitHub Actions.
    """

    name: str
    promote: bool
    build: Path
    trigger: Path
    workflow: Path


#: Targets on bases of this project's choosing: on every push, and promoted by hand.
PUSHED = Schedule(
    "images",
    promote=False,
    build=ROOT / "cloudbuild.yaml",
    trigger=ROOT / "cloudbuild-trigger.yaml",
    workflow=ROOT / ".github" / "workflows" / "images.yml",
)
#: Targets on a base that its makers replace every night: every night, and promoted once they have passed.
NIGHTLY = Schedule(
    "nightly",
    promote=True,
    build=ROOT / "cloudbuild-nightly.yaml",
    trigger=ROOT / "cloudbuild-nightly-trigger.yaml",
    workflow=ROOT / ".github" / "workflows" / "nightly.yml",
)


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
DISK = "three times the budgets; an 8.2 GB image took 26 GB at its peak (2026-11)"
#: What the limits of the workflow's jobs were derived from.
WORKFLOW_MEASURED = {
    "check": "checks and unit tests took 2 min on 2 cores (2026-11)",
    "image": "tf-cpu took 183 s without cached layers on 2 cores (2026-11)",
}
#: Actions of GitHub's and Google's that the workflows use, by commit: a tag can be moved, and they see credentials.
ACTIONS = {
    "checkout": "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8  # v5.0.0",
    "auth": "google-github-actions/auth@7c6bc770dae815cd3e89ee6cdf493a5fab2cc093  # v3",
    "setup_gcloud": "google-github-actions/setup-gcloud@aa5489c8933f4cc7a4f7d45035b3b1440c9c10db  # v3.0.1",
}


def schedule_of(spec: Spec) -> Schedule:
    """The schedule that a target is on: nightly if its base brings the framework, in versions of somebody else's."""
    return NIGHTLY if spec.base_spec().framework else PUSHED


def disk(specs: list[Spec]) -> int:
    """GB of disk for building ``specs`` on one machine: 100, which cost nothing extra, or as much as they need.

    A target takes three times its size: as build cache, as packed layers and unpacked (:data:`DISK`).
    """
    needed = sum(3 * spec.budget.size for spec in specs) / 1e9
    return max(100, 50 * math.ceil((20 + needed) / 50))


def variables(schedule: Schedule, specs: list[Spec]) -> dict[str, Any]:
    """Everything that the templates of a schedule may use."""
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
    """Path of every generated file -> its template's name and variables."""
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
