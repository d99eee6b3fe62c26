"""Describe the pipelines that build all targets on Cloud Build and GitHub Actions, for `make render`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.common.settings import ROOT
from trainyard.spec.architectures import AMD64, ARM64
from trainyard.spec.model import Spec, each_platform


@dataclass(frozen=True)
class Schedule:
    """Name a pipeline and the generated files that define it.

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
    """Give a time limit in seconds, and the measurement that it is derived from."""

    seconds: int
    measured: str


#: Time limits of the steps. They stop steps that hang, and are several times the measured times because machines,
#: networks and mirrors differ.
STEP_TIMEOUTS = {
    "builder": Limit(900, "112 s without cached layers, 1 s with them, on 2 cores (2026-11)"),
    "prepare": Limit(120, "1 s on 2 cores (2026-11)"),
    "emulation": Limit(300, "12 s to install QEMU, 2 s if programs for arm64 run already, on 2 cores (2026-11)"),
    "build": Limit(3600, "tf-cpu 122 s without cached layers on 2 cores (2026-11)"),
    "verify": Limit(900, "xla 24 s, tf-cpu 28 s in parallel with smoke on 2 cores (2026-11)"),
    "smoke": Limit(1800, "xla 52 s, tf-cpu 33 s in parallel with verify on 2 cores (2026-11)"),
    "promote": Limit(300, "1 s for two tags at a registry on the same host (2026-11)"),
    "publish": Limit(1800, "tf-cpu 9 s to a registry on the same host (2026-11)"),
}
#: The architecture of Cloud Build's machines. All machine types of its API are N1 or E2, which are x86-64:
#: https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#machinetype,
#: https://cloud.google.com/compute/docs/general-purpose-machines
MACHINE = AMD64
#: Time limits of the steps for other architectures, which QEMU emulates.
EMULATED_TIMEOUTS = STEP_TIMEOUTS | {
    "build": Limit(3600, "tf-cpu: system packages 2.5 min under emulation on 2 cores, the rest natively (2026-11)"),
    "verify": Limit(900, "tf-cpu 19 s, cpu 12 s under emulation on 2 cores (2026-11)"),
    "smoke": Limit(7200, "tf-cpu 17 min, cpu and gpu 12 min under emulation on 2 cores (2026-11)"),
}
#: Time limits of a build of one architecture, and of one with others.
TIMEOUT = Limit(7200, "tf-cpu alone 277 s without cached layers, 51 s with them, on 2 cores (2026-11)")
EMULATED_TIMEOUT = Limit(14400, "tf-cpu: linux/amd64 277 s, linux/arm64 under emulation 17.5 min, on 2 cores (2026-11)")
#: An image takes space as build cache, as compressed layers and unpacked.
DISK = "three times the budgets, for each platform; an 8.2 GB image took 26 GB at its peak (2026-11)"
#: Runners of GitHub Actions for each platform:
#: https://docs.github.com/en/actions/reference/runners/github-hosted-runners
RUNNERS = {AMD64: "ubuntu-24.04", ARM64: "ubuntu-24.04-arm"}
#: Measurements that the time limits of the workflow's jobs are derived from.
WORKFLOW_MEASURED = {
    "check": "checks and unit tests took 2 min on 2 cores (2026-11)",
    "image": "tf-cpu took 183 s without cached layers on 2 cores of x86-64 (2026-11), arm64 was not measured",
    "index": "setting up 1 to 2 min, the index 2 s on 2 cores (2026-11)",
}
#: Actions that the workflows use, pinned by commit: tags can be moved, and actions have access to credentials.
ACTIONS = {
    "checkout": "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8  # v5.0.0",
    "auth": "google-github-actions/auth@7c6bc770dae815cd3e89ee6cdf493a5fab2cc093  # v3",
    "setup_gcloud": "google-github-actions/setup-gcloud@aa5489c8933f4cc7a4f7d45035b3b1440c9c10db  # v3.0.1",
    "upload_artifact": "actions/upload-artifact@ea165f8d65b6e75b540449e92b4886f43607fa02  # v4.6.2",
    "download_artifact": "actions/download-artifact@d3f86a106a0bac45b974a628896c90dbdf5c8093  # v4.3.0",
}

#: Files that users copy, to update their repositories on a schedule; the workflow is generated.
UPDATES = ROOT / "examples" / "updates"


def schedule_of(spec: Spec) -> Schedule | None:
    """Return the schedule of a target; None for one that only takes the place of another, which is never promoted."""
    if spec.fallback_for:
        return None
    return NIGHTLY if spec.nightly else PUSHED


def disk(specs: list[Spec]) -> int:
    """Return the disk size in GB for building ``specs`` on one machine: at least 100, which is included in the price.

    An image needs three times its size (:data:`DISK`).
    """
    needed = sum(3 * spec.budget.size * len(spec.platforms) for spec in specs) / 1e9
    return max(100, 50 * math.ceil((20 + needed) / 50))


def _image(spec: Spec) -> dict[str, Any]:
    """Return what the templates say about the image of a target for one of its platforms."""
    emulated = spec.architecture != MACHINE
    return {
        "target": spec.target,
        "arch": spec.arch,
        "name": spec.local_name,
        "summary": spec.summary if not emulated else f"The same for {spec.platform}, under emulation",
        "emulated": emulated,
        "timeouts": EMULATED_TIMEOUTS if emulated else STEP_TIMEOUTS,
        "runner": RUNNERS[spec.architecture],
        "until": f"{spec.ends[0].day}" if spec.ends else "",
        "output": _output(spec),
        "digest": f"${{{{ steps.push.outputs.{_output(spec)} }}}}",
    }


def _output(spec: Spec) -> str:
    """Return the name of the output of the workflow's job ``image`` that has the digest of an image, without dots."""
    return f"{spec.target}-{spec.arch}".replace(".", "_")


def variables(schedule: Schedule, specs: list[Spec]) -> dict[str, Any]:
    """Return the variables of the templates of a schedule."""
    images = [_image(one) for spec in specs for one in each_platform(spec)]
    emulated = any(image["emulated"] for image in images)
    timeout = EMULATED_TIMEOUT if emulated else TIMEOUT
    return {
        "schedule": schedule.name,
        "nightly": schedule is NIGHTLY,
        "build_file": schedule.build.name,
        "promote": "yes" if schedule.promote else "",
        "targets": [spec.target for spec in specs],
        "machine": MACHINE.platform,
        "images": images,
        "emulated": emulated,
        "indexes": {
            spec.target: [f"${{{{ needs.image.outputs.{_output(one)} }}}}" for one in each_platform(spec)]
            for spec in specs
            if len(spec.platforms) > 1
        },
        "step_timeouts": STEP_TIMEOUTS,
        "timeout": timeout.seconds,
        "timeout_measured": timeout.measured,
        "disk": disk(specs),
        "disk_measured": DISK,
        "workflow": WORKFLOW_MEASURED,
        "actions": ACTIONS,
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return path of every generated file -> name and variables of its template."""
    files: dict[Path, tuple[str, dict[str, Any]]] = {
        UPDATES / "updates.yml": ("updates-workflow.yml.j2", {"actions": ACTIONS})
    }
    for schedule in (PUSHED, NIGHTLY):
        if mine := [spec for spec in specs if schedule_of(spec) is schedule]:
            values = variables(schedule, mine)
            files[schedule.build] = ("cloudbuild.yaml.j2", values)
            files[schedule.trigger] = ("cloudbuild-trigger.yaml.j2", values)
            files[schedule.workflow] = ("cloudbuild-workflow.yml.j2", values)
    return files
