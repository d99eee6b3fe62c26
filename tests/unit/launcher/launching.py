"""Shared by the tests of the launcher: a machine simulated in a folder, and the result of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Machine:
    """A folder that replaces / for the paths /dev, /proc, /sys and /opt/trainyard."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, content: str = "") -> None:
        """Create a file and its folders."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def add_devices(self, *paths: str) -> None:
        """Create device nodes (as plain files: only their names are read)."""
        for path in paths:
            self.add(path)

    def add_image(
        self,
        framework: str,
        version: str,
        trainers: Mapping[str, list[str]] | None = None,
        accelerator: str = "none",
        **gpus: str,
    ) -> None:
        """Write what the launcher reads of a recipe.json; `gpus` are `cuda`, `driver` and `gpus` of the accelerator."""
        trainers = trainers or {"mnist": ["/opt/venv/bin/python", "-m", "trainers.mnist"]}
        recipe = {
            "name": "test",
            "framework": {"name": framework, "version": version},
            "commands": trainers,
            "default": next(iter(trainers)),
            "accelerator": {"kind": accelerator, "cuda": "", "driver": "", "gpus": "", **gpus},
        }
        self.add("/opt/trainyard/recipe.json", json.dumps(recipe))


@dataclass(frozen=True)
class Launched:
    """The result of a run of the launcher."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The JSON of --print-env --json."""
        assert self.status == 0, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def exports(self) -> dict[str, str]:
        exports = self.data["exports"]
        assert isinstance(exports, dict)
        return exports


Launch = Callable[..., Launched]


def tpu_config(node: str = "tpu-a", project: str = "test-project", zone: str = "us-central1-c") -> str:
    """A TPU_CONFIG as AI Platform and Vertex AI set it."""
    return json.dumps({"project": project, "zone": zone, "tpu_node_name": node})


def cluster_spec(pools: Iterable[int], task: str, index: int, trial: str = "") -> str:
    """A CLUSTER_SPEC as Vertex AI sets it, with this number of replicas per pool."""
    cluster = {
        f"workerpool{pool}": [f"cmle-training-workerpool{pool}-ab-{number}:2222" for number in range(count)]
        for pool, count in enumerate(pools)
        if count
    }
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index, "trial": trial}, "job": "{not read"})
