"""What the tests of rehearsals share: job files, and the launcher's own resolver as the judge of an environment."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import cli as launcher_cli
from launcher import explain
from launcher.settings import Settings
from scripts import rehearse
from scripts.jobs import files
from scripts.rehearsal.model import Rehearsal, Replica, Trial


def rehearsal_of(folder: Path, text: str, trial: Trial | None = None) -> Rehearsal:
    """The rehearsal of a job file with this text."""
    path = folder / "job.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return rehearse.read(files.load(path), trial)


def resolved(replica: Replica, root: Path, framework: str = "torch==2.9.1", **more: str) -> dict[str, Any]:
    """What the launcher makes of a replica's environment, on a machine with its devices: runtime, cluster, exports."""
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
