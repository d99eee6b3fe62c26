"""Helpers for the tests of rehearsals: job files, and the launcher's resolver, which evaluates an environment."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import cli as launcher_cli
from launcher import explain
from launcher.settings import Settings

from trainyard_jobs import platforms
from trainyard_jobs.rehearsal.model import Rehearsal, Replica, Trial
from trainyard_jobs.schema import job_file


def rehearsal_of(folder: Path, text: str, trial: Trial | None = None) -> Rehearsal:
    """The rehearsal of a job file with this text."""
    path = folder / "job.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    job = job_file.load(path)
    return platforms.of_job_file(job).rehearse(job, trial)


def resolved(replica: Replica, root: Path, framework: str = "torch==2.9.1", **more: str) -> dict[str, Any]:
    """What the launcher resolves from a replica's environment and devices: runtime, cluster, exports."""
    for device in replica.devices:
        path = root / device.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    env: Mapping[str, str] = {
        "PATH": "/usr/bin:/bin",
        "LAUNCHER_SYSROOT": str(root),
        "LAUNCHER_FRAMEWORK": framework,
        "LAUNCHER_TPU_INTERVAL": "0.01",
        **replica.environment,
        **more,
    }
    arguments = launcher_cli.parse(["--print-env", "--", "python", "train.py"])
    report = launcher_cli.resolve(arguments, env, Settings(env), launcher_cli.Log(env))
    return explain.as_data(report)
